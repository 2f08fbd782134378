# SPDX-License-Identifier: Apache-2.0
"""Which replicas there are: URLs on the command line, a file, or the addresses of a DNS name.

A file is a YAML (or JSON) list. Each entry is a URL, or a mapping with ``url`` and, if they differ
from the rest, ``name`` and ``token``.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from vllm_slo.config.yaml_nodes import line_of, near, parse
from vllm_slo.errors import ConfigError
from vllm_slo.router.replica_spec import ReplicaSpec
from vllm_slo.wire.front_protocol import check_token

logger = logging.getLogger("vllm_slo.front")

PERIOD_S: Final = 2.0
"""Time between two looks at a file or at DNS, seconds. A lost replica is noticed earlier, by its
silence."""
MAX_FILE_BYTES: Final = 4 * 1024 * 1024
_FIELDS: Final = ("name", "url", "token")
_DNS: Final = re.compile(r"dns:(?P<name>[^:\s/]+):(?P<port>[0-9]{1,5})", re.IGNORECASE)
_NO_ADDRESS: Final = frozenset(
    getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)
)
"""Answers of DNS that a name has no address, as that of a service without ready pods."""


def spec_of_url(url: str, token: str | None, where: str, *, name: str | None = None) -> ReplicaSpec:
    """The replica at a URL; its name is host and port unless it has one.

    Args:
        url: ``http://HOST:PORT``.
        token: opens its state stream; None: there is none.
        where: begins the text of an error.

    Raises:
        ConfigError: it is no such URL, or there is no token.
    """
    fix = "give http://HOST:PORT"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{where}: {url!r}: {error}; {fix}") from None
    if parts.scheme != "http" or not host or not port:
        raise ConfigError(f"{where}: {url!r} is no URL of a replica; {fix}")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(f"{where}: {url!r} has more than host and port; {fix}")
    if not token:
        raise ConfigError(
            f"{where}: no token; name the file with the replicas' token (--token-file), or give "
            "the entry a token of its own"
        )
    check_token(token, where)
    if name is not None and not name.isprintable():
        raise ConfigError(f"{where}: the name has characters that a header cannot have")
    address = address_of(host, port)
    return ReplicaSpec(name or address, f"http://{address}", token)


def address_of(host: str, port: int) -> str:
    """Host and port in one text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def specs_of_file(text: str, token: str | None, origin: object) -> list[ReplicaSpec]:
    """The replicas in a file's text.

    Raises:
        ConfigError: the text names the file, the line and the field.
    """
    node, data = parse(text, origin, ConfigError)
    if data is None:
        return []
    if not isinstance(data, list):
        raise ConfigError(f"{origin}: expected a list of replicas, such as '- http://HOST:PORT'")
    specs = []
    for place, entry in enumerate(data):
        line = line_of(node, (place,))
        specs.append(_spec_of_entry(entry, token, f"{origin}:{line}"))
        _refuse_twice(specs, f"{origin}:{line}")
    return specs


def _spec_of_entry(entry: Any, token: str | None, where: str) -> ReplicaSpec:
    if isinstance(entry, str):
        return spec_of_url(entry, token, f"{where}: url")
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected a URL, or a mapping with url")
    for key, value in entry.items():
        if key not in _FIELDS:
            raise ConfigError(f"{where}: unknown field {key!r}; {near(str(key), _FIELDS)}")
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{where}: {key}: expected text")
    if "url" not in entry:
        raise ConfigError(f"{where}: url is missing; give http://HOST:PORT")
    own = entry.get("token") or token
    return spec_of_url(entry["url"], own, f"{where}: url", name=entry.get("name"))


def _refuse_twice(specs: Sequence[ReplicaSpec], where: str) -> None:
    *before, last = specs
    if any(spec.name == last.name for spec in before):
        raise ConfigError(f"{where}: name: there are two replicas {last.name}; remove one")


class Source(Protocol):
    """Where the list of replicas comes from."""

    async def read(self) -> list[ReplicaSpec]:
        """The replicas that there are now.

        Raises:
            ConfigError: the source has a mistake.
            OSError: it does not answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Urls:
    """The replicas of ``--replica``, which do not change."""

    urls: tuple[str, ...]
    token: str | None

    async def read(self) -> list[ReplicaSpec]:
        """The replicas.

        Raises:
            ConfigError: as `specs`.
        """
        return self.specs()

    def specs(self) -> list[ReplicaSpec]:
        """The replicas.

        Raises:
            ConfigError: a URL cannot be used.
        """
        specs: list[ReplicaSpec] = []
        for url in self.urls:
            specs.append(spec_of_url(url, self.token, "--replica"))
            _refuse_twice(specs, "--replica")
        return specs


@dataclass(frozen=True, slots=True)
class File:
    """The replicas in a file."""

    path: Path
    token: str | None

    async def read(self) -> list[ReplicaSpec]:
        """The replicas that it lists now.

        Raises:
            ConfigError: it cannot be read, or has a mistake.
        """
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
            text = data.decode()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise ConfigError(f"--replicas-from {self.path}: {reason}") from error
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"--replicas-from {self.path}: larger than {MAX_FILE_BYTES} bytes")
        return specs_of_file(text, self.token, self.path)


@dataclass(frozen=True, slots=True)
class Dns:
    """A replica at each address of a name, such as that of a headless service."""

    name: str
    port: int
    token: str | None

    async def read(self) -> list[ReplicaSpec]:
        """The replicas that the name has now.

        Raises:
            ConfigError: there is no token.
            OSError: DNS does not answer.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self.name, self.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno in _NO_ADDRESS:
                return []
            raise
        hosts = sorted({str(address[0]) for *_, address in found}, key=ipaddress.ip_address)
        where = f"--replicas-from DNS:{self.name}:{self.port}"
        urls = (f"http://{address_of(host, self.port)}" for host in hosts)
        return [spec_of_url(url, self.token, where) for url in urls]


def source_of(urls: Iterable[str], replicas_from: str | None, token: str | None) -> Source:
    """The source that the command line names.

    Args:
        urls: of ``--replica``.
        replicas_from: of ``--replicas-from``: a file, or ``DNS:name:port``.
        token: opens the state streams of replicas without a token of their own.

    Raises:
        ConfigError: there is none, or there are two, or it cannot be used.
    """
    given = tuple(urls)
    if bool(given) == bool(replicas_from):
        raise ConfigError("give either --replica URL (several times), or --replicas-from")
    if not replicas_from:
        listed = Urls(given, token)
        listed.specs()  # shows a mistake before anything is started
        return listed
    if not replicas_from.lower().startswith("dns:"):
        return File(Path(replicas_from), token)
    parts = _DNS.fullmatch(replicas_from)
    if parts is None or not 1 <= int(parts["port"]) <= 65_535:
        raise ConfigError(f"--replicas-from {replicas_from}: give DNS:name:port")
    if not token:
        raise ConfigError("--replicas-from DNS: no token; name its file with --token-file")
    return Dns(parts["name"], int(parts["port"]), token)


async def watch(
    source: Source, changed: Callable[[list[ReplicaSpec]], None], period_s: float = PERIOD_S
) -> None:
    """Call ``changed`` with the replicas at first and after each change, for ever.

    A mistake in a file, or no answer from DNS, leaves the last list; it is logged once.

    Raises:
        ConfigError: the first list has a mistake.
    """
    known: list[ReplicaSpec] | None = None
    complaint = ""
    while True:
        try:
            specs = await source.read()
        except (ConfigError, OSError) as error:
            if known is None and isinstance(error, ConfigError):
                raise
            if str(error) != complaint:
                complaint = str(error)
                logger.warning("the list of replicas stays as it was: %s", complaint)
        else:
            complaint = ""
            if specs != known:
                known = specs
                changed(specs)
        await asyncio.sleep(period_s)
