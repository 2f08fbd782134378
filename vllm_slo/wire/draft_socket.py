# SPDX-License-Identifier: Apache-2.0
"""The sockets between a verifier and its draft servers: authentication, limits and timeouts.

All processes of a cluster share one secret, its token. From it both ends derive the same two CURVE
key pairs, the verifier's and the drafters'. The verifier admits that drafter key only, and a
drafter connects to that verifier key only. So each end proves that it knows the token, and the link
is encrypted. CURVE makes new keys for every connection, so a recorded connection cannot be
replayed. The token does not tell drafters apart: a process that knows it may be a drafter or a
verifier.

Heartbeats end connections to machines that have vanished. They are ZMQ's own: a busy process
answers them, a stopped one does not.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

import zmq
from zmq.utils import z85

from vllm_slo.errors import ConfigError
from vllm_slo.wire.draft_messages import MAX_ANSWER_BYTES, MAX_DRAFT_BYTES

TOKEN_VARIABLE: Final = "VLLMSLO_DRAFT_TOKEN"
"""Environment variable with the token; a flag may name a file instead."""
TOKEN_FILE_FLAG: Final = "--draft-token-file"
"""Flag that names the file to a verifier; a draft server has ``--token-file``."""
MIN_TOKEN: Final = 16
"""Fewest characters of a token."""
HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 3.0
"""Without an answer to heartbeats for so long a connection is closed."""
HANDSHAKE_S: Final = 5.0
RECONNECT_S: Final = (0.1, 2.0)
"""A drafter reconnects after the first time, later after up to the second."""
WAITING_MESSAGES: Final = 64
"""Messages that wait for each peer, in each direction; further ones are not sent."""
ZAP_DOMAIN: Final = "draft"
"""Domain under which a verifier asks `zmq.auth` about connections."""
LINGER_MS: Final = 200
"""Time for the last messages to leave after the socket is closed."""
Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]
Socket: TypeAlias = zmq.Socket[bytes]
MOST_PORTS: Final = 64
"""Ports of one range. Each draft server holds a connection to each."""
_ADDRESS: Final = re.compile(
    r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([0-9]+(?:-[0-9]+)?|\*)|ipc://[^\s\0]+"
)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, both halves in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LinkKeys:
    """The key pairs of one cluster."""

    verifier: KeyPair
    drafter: KeyPair


def derive_keys(token: str) -> LinkKeys:
    """The key pairs of a token: scrypt, as a token may be guessable, then HMAC with a label each.

    Raises:
        ConfigError: the token is short, or ZMQ was built without CURVE.
    """
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"draft token: {len(token)} characters are too few; use at least {MIN_TOKEN} random "
            "ones, for example of 'openssl rand -hex 32'"
        )
    if not zmq.has("curve"):
        raise ConfigError(
            "draft servers: the installed libzmq has no CURVE, so the link cannot be protected; "
            "install pyzmq from its wheel"
        )
    seed = hashlib.scrypt(
        token.encode(), salt=b"vllm-slo draft link 1", n=1 << 14, r=8, p=1, dklen=32
    )
    return LinkKeys(_key_pair(seed, b"verifier"), _key_pair(seed, b"drafter"))


def _key_pair(seed: bytes, role: bytes) -> KeyPair:
    secret = z85.encode(hmac.digest(seed, role, "sha256"))
    return KeyPair(zmq.curve_public(secret), secret)


def read_token(file: str | Path | None, flag: str = "--token-file") -> str:
    """The token in a file, or in the environment where no file is given; without spaces around it.

    Args:
        file: name of the file.
        flag: flag by which the user names the file, for errors.

    Raises:
        ConfigError: there is no token, or the file cannot be read.
    """
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not token:
            raise ConfigError(
                f"{flag}: not given, and {TOKEN_VARIABLE} is not set; a draft server and its "
                "verifier share a secret, name the file that holds it"
            )
        return token
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"{flag} {file}: {reason}; name a file with the token") from None


def check_address(address: str, flag: str, *, connects: bool = False) -> None:
    """Refuse an address that cannot be used for a link.

    Args:
        address: as the user wrote it.
        flag: flag by which the user gave it, for errors.
        connects: whether to connect there. An address to listen on may have the port ``*``: any
            free one.

    Raises:
        ConfigError: it is not ``tcp://HOST:PORT``, ``tcp://HOST:FIRST-LAST`` or ``ipc://PATH``.
    """
    match = _ADDRESS.fullmatch(address)
    usable = bool(match)
    if match and match[2] not in (None, "*"):
        first, dash, last = match[2].partition("-")
        usable = int(last or first) < 1 << 16
        if usable and dash and not 0 < int(first) <= int(last) < int(first) + MOST_PORTS:
            raise ConfigError(
                f"{flag} {address}: not a range of ports; write the first port, a dash and the "
                f"last, at most {MOST_PORTS} ports"
            )
    if usable and connects:
        usable = match is not None and match[2] not in ("*", "0") and match[1] != "*"
    if not usable:
        raise ConfigError(f"{flag} {address}: not an address; write tcp://HOST:PORT or ipc://PATH")


def single_addresses(address: str) -> list[str]:
    """The addresses that a checked address stands for: several if it has a range of ports."""
    host, _, ports = address.rpartition(":")
    first, dash, last = ports.partition("-")
    if not dash or not address.startswith("tcp://"):
        return [address]
    return [f"{host}:{port}" for port in range(int(first), int(last) + 1)]


def connected_addresses(addresses: Sequence[str], flag: str) -> list[str]:
    """The single addresses to which a draft server connects, in order.

    Raises:
        ConfigError: as `check_address`, or one is given twice, or there are too many.
    """
    for address in addresses:
        check_address(address, flag, connects=True)
    single = [one for address in addresses for one in single_addresses(address)]
    twice = next((one for place, one in enumerate(single) if one in single[:place]), None)
    if twice is not None:
        raise ConfigError(f"{flag} {twice}: given twice; a draft server connects to each once")
    if len(single) > MOST_PORTS:
        raise ConfigError(f"{flag}: {len(single)} addresses; give at most {MOST_PORTS}")
    return single


def check_verifier(address: str, token_file: str | None, flag: str = "--draft-servers") -> None:
    """Refuse, before a model is loaded, an address or a token that a verifier cannot use.

    Args:
        address: where its draft servers connect.
        token_file: file with the token; None: it is in the environment.
        flag: flag by which the user gave the address, for errors.

    Raises:
        ConfigError: the address or the token cannot be used; one line.
    """
    check_address(address, flag)
    derive_keys(read_token(token_file, TOKEN_FILE_FLAG))


def verifier_socket(context: Context, keys: LinkKeys, address: str) -> Socket:
    """A ROUTER for this address that accepts CURVE connections only. It is not bound yet.

    Without a ZAP handler in ``context`` (`zmq.auth`) it admits every peer that knows its public
    key.
    """
    socket = _socket(context, zmq.ROUTER, address, MAX_ANSWER_BYTES)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.verifier.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
    return socket


def drafter_socket(context: Context, keys: LinkKeys, address: str) -> Socket:
    """A DEALER for the verifier at this address. It is not connected yet.

    It reconnects for ever, and queues no messages while there is no connection.
    """
    socket = _socket(context, zmq.DEALER, address, MAX_DRAFT_BYTES)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, round(RECONNECT_S[0] * 1e3))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, round(RECONNECT_S[1] * 1e3))
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.verifier.public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.drafter.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.drafter.secret)
    return socket


def _socket(context: Context, kind: int, address: str, max_bytes: int) -> Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, "[" in address)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.SNDHWM, WAITING_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, WAITING_MESSAGES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_S * 1e3))
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(HEARTBEAT_S * 1e3))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(SILENCE_S * 1e3))
    return socket
