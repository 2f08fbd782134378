# SPDX-License-Identifier: Apache-2.0
"""A port for a server that is about to start."""

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


def free_port() -> int:
    """A port of 127.0.0.1 that is free now and outside the range of outgoing connections.

    A server binds its port up to a minute after the port was chosen. In that minute an outgoing
    connection may take any port of the ephemeral range. A client that polls such a port can even
    connect to itself.
    """
    for port in random.sample(range(FIRST, max(FIRST + TRIES, _first_ephemeral())), TRIES):
        if bound := _bound(port):
            return bound
    return _bound(0)


def _first_ephemeral() -> int:
    try:
        return int(EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return USUAL


def _bound(port: int) -> int:
    """The port that was bound; 0: it is taken."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            if port == 0:
                raise
            return 0
        return int(probe.getsockname()[1])
