# SPDX-License-Identifier: Apache-2.0
"""The side of a replica in a Ray Serve deployment that starts its own engine."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from vllm_slo.engine.telemetry.state import MAX_MESSAGE_BYTES, SOCKET_VARIABLE, unpack
from vllm_slo.wire.serve_stats import ServeStats
from vllm_slo.wire.socket_folder import make_socket_folder

_PREFIX: Final = "vllm-slo-serve-"


class ServeReplicaState:
    """The newest state of the engine that this process starts, for ``record_routing_stats``.

    Make it before the engine: it names the socket to which the scheduler sends, in the environment
    that the engine's process inherits. A thread takes in what is sent, so that the newest state is
    here whenever Serve asks.

    Raises:
        OSError: the socket cannot be made.
    """

    def __init__(self) -> None:
        folder = make_socket_folder(_PREFIX)
        path = str(folder / "state")
        receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.close = weakref.finalize(self, _close, receiver, folder)
        """Stop listening. It happens by itself when this object or the process ends."""
        receiver.bind(path)
        self._messages: list[bytes] = []
        """The newest message, or nothing."""
        threading.Thread(
            target=_receive, args=(receiver, self._messages), name="vllm-slo-state", daemon=True
        ).start()
        os.environ[SOCKET_VARIABLE] = path

    def stats(self) -> dict[str, Any]:
        """What ``record_routing_stats`` returns; a deployment may add keys of its own."""
        epoch_s, monotonic_s = time.time(), time.monotonic()
        for message in list(self._messages):
            with suppress(ValueError):
                line, taken_s = unpack(message)
                return ServeStats(
                    epoch_s, epoch_s - monotonic_s + taken_s, line.decode()
                ).to_stats()
        return ServeStats(epoch_s, epoch_s, None).to_stats()


def _receive(receiver: socket.socket, messages: list[bytes]) -> None:
    """Keep the newest message until the socket is closed."""
    with suppress(OSError):
        while message := receiver.recv(MAX_MESSAGE_BYTES):
            messages[:] = [message]


def _close(receiver: socket.socket, folder: Path) -> None:
    with suppress(OSError):
        receiver.shutdown(socket.SHUT_RDWR)  # wakes the thread
    receiver.close()
    shutil.rmtree(folder, ignore_errors=True)
