# SPDX-License-Identifier: Apache-2.0
"""A command line of ``vllm serve``, read as vLLM reads it. Nothing here loads torch or vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml

_ALIASES: Final = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-asc": "--api-server-count",
    "-n": "--nnodes",
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
}
SHARED_WITH_DRAFTS: Final = (
    *("--dtype", "--max-model-len", "--seed", "--enforce-eager", "--trust-remote-code"),
    *("--config-format", "--load-format", "--model-loader-extra-config", "--download-dir"),
)
"""Flags of a served model that hold for its draft models too: those that a draft model beside it
takes over in vLLM (``SpeculativeConfig``), and how weights are loaded. Draft servers are engines of
their own, so its memory, parallel sizes, quantisation, ports and batches are not theirs."""
_FLAGS: Final = (
    *("--data-parallel-size", "--tensor-parallel-size", "--pipeline-parallel-size"),
    *("--data-parallel-rank", "--data-parallel-start-rank", "--data-parallel-size-local"),
    *("--data-parallel-hybrid-lb", "--data-parallel-external-lb"),
    "--data-parallel-multi-port-external-lb",
    *("--api-server-count", "--nnodes", "--distributed-executor-backend", "--headless", "--grpc"),
    *("--uds", "--root-path", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"),
    *("--ssl-cert-reqs", "--served-model-name", "--additional-config", "--api-key", "--config"),
    *("--model", "--host", "--port", "--tokenizer", "--block-size", "--attention-backend"),
    *("--attention-config", "--compilation-config", "--scheduler-cls", "--middleware"),
    *("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens", "--worker-cls"),
    *SHARED_WITH_DRAFTS,
)
_NEGATED: Final = "--no-"
_SHORTEST_PREFIX: Final = len("--xxx")


class Flags:
    """A vLLM command line, read as vLLM reads it: underscores, ``=``, aliases, abbreviations.

    Abbreviations of the flags in `_FLAGS` are resolved. A dotted flag, which sets one key of a flag
    with a JSON value, is a flag of its own.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def values(self, flag: str) -> list[str] | None:
        """All values given to a flag; None without it, empty for a switch."""
        given: list[str] | None = None
        for name, values, _, _ in self._scan():
            if name == flag:
                given = [*(given or []), *values]
        return given

    def last(self, flag: str) -> str | None:
        """The value that vLLM would use for a flag with one value; None without it."""
        values = self.values(flag)
        return values[-1] if values else None

    def mentions(self, flag: str) -> bool:
        """Whether a flag is given, be it one key of it."""
        return any(name == flag or name.startswith(f"{flag}.") for name, _, _, _ in self._scan())

    def without(self, flag: str) -> Flags:
        dropped = {
            index
            for name, _, start, stop in self._scan()
            if name == flag
            for index in range(start, stop)
        }
        return Flags([word for index, word in enumerate(self.words) if index not in dropped])

    def words_of(self, *flags: str) -> list[str]:
        """The words of these flags and of their negations, ``--no-...``, in order."""
        names = (*flags, *(_NEGATED + flag[2:] for flag in flags))
        given = (found for found in self._scan() if found[0] in names)
        return [word for name, values, _, _ in given for word in (name, *values)]

    def with_config_file(self) -> Flags:
        """What vLLM's ``--config`` file says, too; the command line wins. For questions only."""
        path = self.last("--config")
        if path is None:
            return self
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            return self  # vLLM says what is wrong with it
        words: list[str] = []
        for key, value in content.items() if isinstance(content, dict) else ():
            if value is False:
                continue
            listed = value if isinstance(value, list) else [value]
            words += [f"--{key}", *(_word(item) for item in listed if not isinstance(item, bool))]
        first = next((i for i, word in enumerate(self.words) if is_flag(word)), len(self.words))
        return Flags([*self.words[:first], *words, *self.words[first:]])

    def _scan(self) -> list[tuple[str, list[str], int, int]]:
        """(flag, values, first word, word after the last) of every flag."""
        flags: list[tuple[str, list[str], int, int]] = []
        start = 0
        while start < len(self.words):
            stop = start + 1
            if is_flag(self.words[start]):
                name, equals, value = self.words[start].partition("=")
                while not equals and stop < len(self.words) and not is_flag(self.words[stop]):
                    stop += 1
                values = [value] if equals else self.words[start + 1 : stop]
                flags.append((_full_name(name), values, start, stop))
            start = stop
        return flags


def _word(value: object) -> str:
    """A value of a config file as one word of a command line."""
    return json.dumps(value, default=str) if isinstance(value, dict) else str(value)


def is_flag(word: str) -> bool:
    """Whether a word is a flag; a negative number is a value."""
    return len(word) > 1 and word[0] == "-" and (word[1] == "-" or word[1].isalpha())


def _full_name(given: str) -> str:
    name, dot, key = given.partition(".")
    name = _ALIASES.get(name, name.replace("_", "-"))
    if name not in _FLAGS and len(name) >= _SHORTEST_PREFIX:
        longer = [flag for flag in _FLAGS if flag.startswith(name)]
        name = longer[0] if len(longer) == 1 else name
    return f"{name}{dot}{key}"


def flag_of(name: str) -> str:
    """The flag of ``vllm serve`` that sets an argument of its engine."""
    return f"--{name.replace('_', '-')}"
