# SPDX-License-Identifier: Apache-2.0
"""Credentials for a server: an API key and headers.

Keys and header values never appear in a report, a log or an error. A process listing shows the
words of a command, so a key is safer in the environment.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from vllm_slo.bench.errors import BenchError

KEY_VARIABLE: Final = "OPENAI_API_KEY"
MASK: Final = "***"

_SHORTEST_SECRET: Final = 4
"""Characters of a secret, at least; a shorter text is part of many ordinary words."""
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A field name (RFC 9110, section 5.1)."""
_VALUE: Final = re.compile(r"[\x20-\x7e\t]+")
_KEY: Final = re.compile(r"[\x21-\x7e]+")
_FRAMING: Final = ("content-length", "transfer-encoding")
"""Headers that give the end of a body; the client sets them."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The key and headers of every request to a server.

    Attributes:
        api_key: sent as ``Authorization: Bearer KEY``; None: not sent.
        headers: (name, value) pairs; an ``Authorization`` header replaces the key's.
    """

    api_key: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def as_headers(self) -> dict[str, str]:
        """The headers by name; names differ in more than case."""
        given = dict(self.headers)
        if self.api_key is None or _authorization(self.headers) is not None:
            return given
        return {"Authorization": f"Bearer {self.api_key}", **given}

    def hide(self, text: str) -> str:
        """``text`` with asterisks instead of the key and the header values."""
        values = [value for _, value in self.headers]
        secrets = {self.api_key or "", *values, *(value.split()[-1] for value in values)}
        for secret in sorted(secrets, key=len, reverse=True):
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, MASK)
        return text


NO_CREDENTIALS: Final = Credentials()


def _authorization(headers: Iterable[tuple[str, str]]) -> str | None:
    """The name ``Authorization`` as written in ``headers``; None if it is not there."""
    return next((name for name, _ in headers if name.lower() == "authorization"), None)


def add_credential_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that sends requests to a server."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"the server's key (default: the environment variable {KEY_VARIABLE}, which does not "
        "show in a process listing)",
    )
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="send this header with every request; repeat for several",
    )


def credentials_of(args: argparse.Namespace) -> Credentials:
    """The credentials from the options and the environment.

    Raises:
        BenchError: a key or a header is not valid in HTTP; its text is not repeated.
    """
    headers = tuple(parse_header(text) for text in args.header)
    names: set[str] = set()
    for name, _ in headers:
        if name.lower() in names:
            raise BenchError("--header", f"{name} is given twice")
        names.add(name.lower())
    named = _authorization(headers)
    if named is not None and args.api_key:
        raise BenchError("--header", f"both {named} and --api-key are given; leave one out")
    if args.api_key is not None:
        return Credentials(_key("--api-key", args.api_key), headers)
    return Credentials(_key(KEY_VARIABLE, os.environ.get(KEY_VARIABLE, "")), headers)


def _key(source: str, text: str) -> str | None:
    key = text.strip()
    if not key:
        return None
    if not _KEY.fullmatch(key):
        raise BenchError(source, "the key has a character that no HTTP header can carry")
    return key


def parse_header(text: str) -> tuple[str, str]:
    """(name, value) of ``NAME: VALUE``.

    Raises:
        BenchError: it is not a header; its text may be secret and is not repeated.
    """
    name, colon, value = text.partition(":")
    name, value = name.strip(), value.strip()
    if not colon:
        raise BenchError("--header", "no colon in it; write 'NAME: VALUE'")
    if not name:
        raise BenchError("--header", "no name before the colon; write 'NAME: VALUE'")
    if not _NAME.fullmatch(name):
        raise BenchError("--header", "the name has a character that no header name can have")
    if name.lower() in _FRAMING:
        raise BenchError("--header", f"{name} is set by the client; leave it out")
    if not value:
        raise BenchError("--header", f"{name} has no value; write '{name}: VALUE'")
    if not _VALUE.fullmatch(value):
        raise BenchError("--header", f"{name}: the value has a character that HTTP cannot carry")
    return name, value


def shown_command(words: Sequence[str], credentials: Credentials = NO_CREDENTIALS) -> str:
    """The command for a report: ``words`` with asterisks instead of keys and header values."""
    shown, option = [], ""
    for word in words:
        name, is_pair, value = word.partition("=")
        if option:
            shown.append(_masked(option, word))
            option = ""
        elif is_pair and name in ("--api-key", "--header"):
            shown.append(f"{name}={_masked(name, value)}")
        else:
            shown.append(credentials.hide(word))
            option = word if word in ("--api-key", "--header") else ""
    return shlex.join(shown)


def _masked(option: str, value: str) -> str:
    if option == "--header":
        name, colon, _ = value.partition(":")
        if colon and _NAME.fullmatch(name.strip()):
            return f"{name}: {MASK}"
    return MASK
