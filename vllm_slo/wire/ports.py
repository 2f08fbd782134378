# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that are about to start."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Linux: the range of ports for outgoing connections."""
FIRST: Final = 20_000
"""Ray's workers listen on 10,002 to 19,999."""
USUAL: Final = 32_768
"""Linux's default for the first port of that range."""
TRIES: Final = 100


def free_ports(count: int) -> int:
    """The first of ``count`` adjacent ports of 127.0.0.1 that are free now; as `free_port`.

    Raises:
        OSError: no such ports were found.
    """
    for first in _candidates(count):
        if all(_bound(first + place) for place in range(count)):
            return first
    raise OSError(f"127.0.0.1: found no {count} adjacent ports that are free")


def free_port(host: str = "127.0.0.1") -> int:
    """A port of an address that is free now and outside the range of outgoing connections.

    A server binds its port up to a minute after the port was chosen. In that minute an outgoing
    connection may take any port of the ephemeral range. A client that polls such a port can even
    connect to itself.
    """
    for port in _candidates(1):
        if bound := _bound(port, host):
            return bound
    return _bound(0, host)


def _candidates(count: int) -> list[int]:
    """Random ports outside that range, as the first of ``count``."""
    end = max(FIRST + TRIES, _first_ephemeral() - count + 1)
    return random.sample(range(FIRST, end), TRIES)


def _first_ephemeral() -> int:
    try:
        return int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return USUAL


def _bound(port: int, host: str = "127.0.0.1") -> int:
    """The port that was bound; 0: it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            if port == 0:
                raise
            return 0
        return int(probe.getsockname()[1])
