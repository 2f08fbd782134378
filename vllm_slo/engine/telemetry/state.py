# SPDX-License-Identifier: Apache-2.0
"""Sends the scheduler's state (`ReplicaState`) to the front that plans with it, often and one way.

The scheduler lives in the engine's process and must never wait. So it sends datagrams to a Unix
socket that another process has bound, and drops what cannot be sent at once. Two processes of one
machine share the monotonic clock, so a message holds the time when its state was taken.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from vllm_slo.core.routing.state_stream import StateEncoder

if TYPE_CHECKING:
    from vllm_slo.core.routing.replica_state import ReplicaState

logger = logging.getLogger(__name__)

SOCKET_VARIABLE = "VLLMSLO_STATE_SOCKET"
"""Environment variable that names the socket; without it nothing is published."""

RETRY_S = 0.25
"""Pause before a state is sent again: to a reader that is slow, or to one that comes later."""
MAX_MESSAGE_BYTES = 1 << 20


class StatePublisher:
    """Sends states to the socket at ``path``, and never waits.

    A state is dropped if no process has bound the socket, or if its reader is too slow. The last
    state is sent a little later then, since an idle engine makes no newer one.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._encoder = StateEncoder()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE_BYTES)
        self._lock = threading.Lock()
        self._unsent: bytes | None = None
        self._complained = False

    @classmethod
    def from_environment(cls) -> StatePublisher | None:
        """The publisher to the socket that the environment names; None if it names none."""
        path = os.environ.get(SOCKET_VARIABLE)
        return cls(path) if path else None

    def publish(self, state: ReplicaState) -> None:
        """Send a state that was taken just now, whole: a message may get lost."""
        self._encoder.begin_anew()
        message = pack(self._encoder.line(state))
        with self._lock:
            retries = self._unsent is not None
            self._unsent = None if self._sent(message) else message
            if self._unsent is not None and not retries:
                self._try_later()

    def close(self) -> None:
        """Close the socket; the unsent state is dropped."""
        with self._lock:
            self._unsent = None
            self._socket.close()

    def _sent(self, message: bytes) -> bool:
        """Whether a message needs no retry: it was sent, or can never be sent."""
        try:
            self._socket.sendto(message, self._path)
        except (BlockingIOError, FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError as error:
            if not self._complained:
                self._complained = True
                logger.error("a state of %d bytes cannot be sent: %s", len(message), error)
        return True

    def _try_later(self) -> None:
        timer = threading.Timer(RETRY_S, self._retry)
        timer.daemon = True
        timer.start()

    def _retry(self) -> None:
        with self._lock:
            if self._unsent is None:
                return
            if self._sent(self._unsent):
                self._unsent = None
            else:
                self._try_later()


def pack(line: bytes) -> bytes:
    """The message for a state taken just now: the monotonic clock, a line feed, a whole line."""
    return b"%r\n" % time.monotonic() + line


def unpack(message: bytes) -> tuple[bytes, float]:
    """(line of the state, when it was taken on the monotonic clock).

    Raises:
        ValueError: this is not a message of `pack`.
    """
    taken_s, line_feed, line = message.partition(b"\n")
    if not line_feed:
        raise ValueError("not the message of a scheduler")
    return line, float(taken_s)
