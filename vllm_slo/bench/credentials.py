# SPDX-License-Identifier: Apache-2.0
"""What proves to a server that it may be asked: an API key, and headers.

No key and no header value appears in a report, a log or an error. A process listing shows the words
of a command, so a key in the environment is the safer way.
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
"""Characters. A shorter text is no secret, and is part of many words that are none either."""
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A field name (RFC 9110, section 5.1)."""
_VALUE: Final = re.compile(r"[\x20-\x7e\t]+")
_KEY: Final = re.compile(r"[\x21-\x7e]+")
_FRAMING: Final = ("content-length", "transfer-encoding")
"""Headers that say where a body ends. A wrong one makes the request unreadable."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What is sent with every request to a server.

    Attributes:
        api_key: sent as ``Authorization: Bearer KEY``; None sends no such header.
        headers: (name, value) pairs. ``Authorization`` among them replaces the key's.
    """

    api_key: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def as_headers(self) -> dict[str, str]:
        """The headers by name; no two names differ in case only."""
        given = dict(self.headers)
        if self.api_key is None or _authorization(self.headers) is not None:
            return given
        return {"Authorization": f"Bearer {self.api_key}", **given}

    def hide(self, text: str) -> str:
        """``text`` with asterisks for the key and the header values."""
        values = [value for _, value in self.headers]
        secrets = {self.api_key or "", *values, *(value.split()[-1] for value in values)}
        for secret in sorted(secrets, key=len, reverse=True):
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, MASK)
        return text


NO_CREDENTIALS: Final = Credentials()


def _authorization(headers: Iterable[tuple[str, str]]) -> str | None:
    """The name ``Authorization`` as it is written in ``headers``; None where it is not there."""
    return next((name for name, _ in headers if name.lower() == "authorization"), None)


def add_credential_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that talks to a server."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"the server's key (default: the environment variable {KEY_VARIABLE}, which a process "
        "listing does not show)",
    )
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="send this header with every request; repeat for several",
    )


def credentials_of(args: argparse.Namespace) -> Credentials:
    """The credentials that the options and the environment give.

    Raises:
        BenchError: a key or a header that HTTP cannot carry. Its text is not repeated.
    """
    headers = tuple(parse_header(text) for text in args.header)
    names: set[str] = set()
    for name, _ in headers:
        if name.lower() in names:
            raise BenchError("--header", f"{name} is given twice")
        names.add(name.lower())
    named = _authorization(headers)
    if named is not None and args.api_key:
        raise BenchError("--header", f"{named} is given, and --api-key too; leave one out")
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
        BenchError: it is no header. Its text may be a secret and is not repeated.
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
    """The command that a report shows: ``words`` with asterisks for keys and header values."""
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
