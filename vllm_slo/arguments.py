# SPDX-License-Identifier: Apache-2.0
"""Types and options that the commands share.

A type is given to ``argparse.ArgumentParser.add_argument(type=...)``. It raises
``argparse.ArgumentTypeError``, so that argparse prints its own usage line, ``argument --rate: ...``
and exits with status 2.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

T = TypeVar("T")

OK: Final = 0
NO: Final = 1
"""The command ran, and its answer is no: a promise, an attainment or a plan cannot be had."""
USAGE: Final = 2
"""An option, a file or a server cannot be used."""


def number(
    low: float = -math.inf, high: float = math.inf, *, above: bool = False
) -> Callable[[str], float]:
    """A finite number in [``low``, ``high``]; with ``above`` it must be greater than ``low``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a number") from None
        if not low <= value <= high or math.isinf(value) or (above and value == low):
            raise argparse.ArgumentTypeError(f"must be {_range(low, high, above)}, got {text[:80]}")
        return value

    return parse


def whole(low: int = 0, high: int | None = None) -> Callable[[str], int]:
    """A whole number of at least ``low`` and at most ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number") from None
        if value < low or (high is not None and value > high):
            most = math.inf if high is None else high
            raise argparse.ArgumentTypeError(f"must be {_range(low, most)}, got {text[:80]}")
        return value

    return parse


def share(*, above_zero: bool = True) -> Callable[[str], float]:
    """A share from 0 to 1; a percentage such as ``90%`` is taken, too."""
    among = number(0.0, 1.0, above=above_zero)

    def parse(text: str) -> float:
        if text.endswith("%"):
            return among(repr(number()(text[:-1]) / 100))
        return among(text)

    return parse


def listed(kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Values of one type between commas, without duplicates; at least one."""

    def parse(text: str) -> tuple[T, ...]:
        words = list(dict.fromkeys(filter(None, (word.strip() for word in text.split(",")))))
        if not words:
            raise argparse.ArgumentTypeError("name at least one")
        return tuple(kind(word) for word in words)

    return parse


def one_of(known: Sequence[str]) -> Callable[[str], str]:
    """One of ``known``; a near miss is named."""

    def parse(text: str) -> str:
        if text in known:
            return text
        near = get_close_matches(text, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(known)}"
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is unknown; {hint}")

    return parse


def _range(low: float, high: float, above: bool = False) -> str:
    parts = []
    if not math.isinf(low):
        parts.append(f"above {low:g}" if above else f"at least {low:g}")
    if not math.isinf(high):
        parts.append(f"at most {high:g}")
    return " and ".join(parts) or "finite"


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json FILE``: the result as JSON; ``-`` is standard output."""
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the result as JSON; - prints only it"
    )


def add_out(parser: argparse.ArgumentParser, what: str) -> None:
    """``--out DIR``: the folder for ``what``; it is made if needed."""
    parser.add_argument("--out", metavar="DIR", type=Path, help=f"write {what} into this folder")


class Renamed(argparse.Action):
    """An option's old name, which works for one version: it warns and sets the new one.

    ``parser.add_argument("--old", action=Renamed, new="--new", type=..., dest="new")``
    """

    def __init__(self, option_strings: Sequence[str], dest: str, new: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, **kwargs, help=argparse.SUPPRESS)
        self.new = new

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        sys.stderr.write(
            f"vllm-slo: note: {option_string} is now called {self.new}; "
            "the old name goes away with the next version\n"
        )
        setattr(namespace, self.dest, values)
