# SPDX-License-Identifier: Apache-2.0
"""The parser, the types and the options that the commands share, and their exit statuses.

A type is given to ``argparse.ArgumentParser.add_argument(type=...)``. It raises
``argparse.ArgumentTypeError``, so that the parser prints ``argument --rate: ...`` and exits with
status 2.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")

OK: Final = 0
NO: Final = 1
"""The command ran, and its answer is no: a promise, an attainment or a plan cannot be had."""
USAGE: Final = 2
"""An option, a file or a server cannot be used."""
BUG: Final = 70
"""An error that nobody expected; its traceback is printed. ``EX_SOFTWARE`` of BSD's sysexits."""
INTERRUPTED: Final = 130
"""Ended by Ctrl-C, as a shell counts it: 128 and the number of the signal."""
NO_READER: Final = 141
"""Nobody reads the output any more, as after ``| head``: 128 and the number of SIGPIPE."""

_SPELLING: Final = re.compile(r"(?<=[\w-])/--[a-z-]*_[a-z_-]*")
"""A second spelling of an option, with underscores, in an error of argparse."""
ERROR: Final = "vllm-slo: error: "
"""Begins the one line of every error."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like a given one; None: none is like it."""
    from difflib import get_close_matches  # takes as long to import as the rest of the help

    return next(iter(get_close_matches(word, known, 1, cutoff=0.65)), None)


class HelpFormatter(argparse.HelpFormatter):
    """Help that is the same in each version of Python.

    An option's value is shown once, after its names. A name with underscores is not shown beside
    the one with dashes. In a description or an epilog, a paragraph that is indented keeps its
    lines.
    """

    def add_argument(self, action: argparse.Action) -> None:
        """Add an argument; the column of its help is right of indented names, too."""
        super().add_argument(action)
        if action.help is not argparse.SUPPRESS:
            for command in self._iter_indented_subactions(action):
                length = len(self._format_action_invocation(command)) + self._current_indent
                self._action_max_length = max(self._action_max_length, length)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if "_" not in name]
        shown = ", ".join(names or action.option_strings)
        if action.nargs == 0:
            return shown
        default = self._get_default_metavar_for_optional(action)
        return f"{shown} {self._format_args(action, default)}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrapped = super()._fill_text
        return "\n\n".join(
            part if part.startswith(" ") else wrapped(part, width, indent)
            for part in text.strip("\n").split("\n\n")
        )


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line each, with the prefix of all errors; status 2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults = {"formatter_class": HelpFormatter, "allow_abbrev": False}
        super().__init__(*args, **{**defaults, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Print the line and exit."""
        line = " ".join(_SPELLING.sub("", message).split())
        self.exit(USAGE, f"{ERROR}{line}; see '{self.prog} --help'\n")

    def every_action(self) -> Iterator[argparse.Action]:
        """The arguments of this parser and of its commands."""
        for action in self._actions:
            yield action
            if isinstance(action.choices, dict):
                for command in action.choices.values():
                    yield from command.every_action()

    def refuse_unknown(self, rest: Sequence[str]) -> None:
        """End with an error if words are left over; the option that is most like one is named."""
        if not rest:
            return
        shown = [
            name
            for name, action in self._option_string_actions.items()
            if action.help is not argparse.SUPPRESS and "_" not in name
        ]
        flag = next((word.partition("=")[0] for word in rest if word.startswith("-")), "")
        longer = [name for name in shown if flag and name.startswith(flag)]
        near = longer[0] if longer else nearest(flag, shown)
        hint = f"; did you mean {near}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")


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
        near = nearest(text, known)
        hint = f"did you mean {near}?" if near else f"use {', '.join(known)}"
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is unknown; {hint}")

    return parse


def _range(low: float, high: float, above: bool = False) -> str:
    parts = []
    if not math.isinf(low):
        parts.append(f"above {low:g}" if above else f"at least {low:g}")
    if not math.isinf(high):
        parts.append(f"at most {high:g}")
    return " and ".join(parts) or "finite"


def port(text: str) -> int:
    """The number of a TCP port; 0 stands for any that is free."""
    return whole(0, 65_535)(text)


def add_model(parser: argparse.ArgumentParser, text: str) -> None:
    """``MODEL``, also as ``--model NAME``; one of the two is required."""
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=text)
    given.add_argument("--model", metavar="NAME", help="the same as MODEL")


def standard_output(path: Path | None) -> bool:
    """Whether a file that the user named is ``-``: then nothing else is printed there."""
    return str(path) == "-"


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json FILE``: the result as JSON; ``-`` is standard output."""
    from pathlib import Path

    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the result as JSON; - prints only it"
    )


def put_json(data: Any, path: Path, error: Callable[[str], Exception]) -> None:
    """Write a result to a file, whose folder is made if needed, or for ``-`` to standard output.

    ``error`` makes what is raised if that fails.
    """
    import json  # the list of commands needs none

    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    if standard_output(path):
        sys.stdout.write(text)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as failure:
        raise error(f"cannot write {path}: {failure.strerror}") from failure


def add_out(parser: argparse.ArgumentParser, what: str) -> None:
    """``--out DIR``: the folder for ``what``; it is made if needed."""
    from pathlib import Path

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
