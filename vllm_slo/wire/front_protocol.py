# SPDX-License-Identifier: Apache-2.0
"""The private paths and headers between a front and its replicas.

A replica is a server of vLLM with this package's scheduler that knows the front's token. The front
sends requests with headers of its own and follows the replica's state stream, in which the replica
tells what became of each request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from vllm_slo.errors import ConfigError

STATE_PATH: Final = "/vllm-slo/state"
"""GET: JSON lines, see `engine.http.state_feed`."""
DRAIN_PATH: Final = "/vllm-slo/drain"
"""POST: no new requests; answers when none runs any more, or after ``?seconds=``."""
OWN_PREFIX: Final = "x-vllm-slo-"
"""Headers that clients cannot send: front and replicas drop them."""
TOKEN_HEADER: Final = "x-vllm-slo-token"
AGE_HEADER: Final = "x-vllm-slo-age-ms"
TICKET_HEADER: Final = "x-vllm-slo-ticket"
"""A `core.routing.tickets.Ticket`: ``FRONT:NUMBER``, or ``NUMBER`` of a front without a name."""
UNATTAINABLE_HEADER: Final = "x-vllm-slo-unattainable"
TRY_NEXT: Final = 425
"""HTTP status of a replica that refuses a request so that the front tries another one. No route of
vLLM uses it, and gateways retry it (RFC 8470)."""
RETRIED: Final = frozenset({TRY_NEXT, 500, 502, 503, 504})
"""Statuses of answers in whose place another replica is tried, if the front allows it."""
TOKEN_VARIABLE: Final = "VLLMSLO_FRONT_TOKEN"
"""Environment variable with the secret that front and replicas share. A server without it has no
front."""
PRIVATE_VARIABLE: Final = "VLLMSLO_FRONT_ONLY"
"""Environment variable: if it is 1, a server answers the front alone."""
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]+")
"""What a header, and a command of HAProxy, can have."""


def check_token(token: str, where: str) -> None:
    """Refuse a token that cannot be sent.

    ``where``: begins the text of the error.

    Raises:
        ConfigError: it has other characters than a token may have.
    """
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"{where}: the token: use ASCII letters, digits and ._~+/=- only")


def token_in(environment: Mapping[str, str]) -> str | None:
    """The front's token in an environment; None: there is none.

    Raises:
        ConfigError: as `check_token`.
    """
    token = environment.get(TOKEN_VARIABLE, "").strip()
    if not token:
        return None
    check_token(token, TOKEN_VARIABLE)
    return token
