# SPDX-License-Identifier: Apache-2.0
"""The flat keys by which an SLO travels in ``SamplingParams.extra_args`` and ``vllm_xargs``.

Internal keys are written by the server's own processes only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

AGE_KEY: Final = "slo_age_ms"
"""Internal key of `extra_args`: for how long a front has had the request, milliseconds."""
TICKET_KEY: Final = "slo_ticket"
"""Internal key: the mark by which a front knows the request, `core.routing.tickets` as text."""
QUOTE_KEY: Final = "slo_quote"
"""Internal key: the request is not to be served, but told what it would be promised."""
EXEMPT_KEY: Final = "slo_exempt"
"""Internal key: the request is a part of another one. It has no SLO, not even the default class."""
EACH_KEY: Final = "slo_each"
"""Internal key: the report is to travel in the stop reason, since vLLM unites the outputs of the
choices of one prompt, and then keeps the other fields of one of them only."""
GROUP_KEY: Final = "slo_group"
"""Internal key: a name that the choices of one HTTP request share. They are declined together or
not at all."""
SEAL_KEY: Final = "slo_seal"
"""Internal key: proves that this server wrote the others; see `vllm_slo.slo.access`."""
INTERNAL_KEYS: Final = (AGE_KEY, TICKET_KEY, QUOTE_KEY, EXEMPT_KEY, EACH_KEY, GROUP_KEY, SEAL_KEY)
"""Keys that only this server's own processes may write. A client that sends one is refused."""
PREFIX: Final = "slo_"
"""Of every flat key of an SLO."""
SESSION_KEY: Final = f"{PREFIX}session_id"
"""The session of which a request is a round."""
TENANT_KEY: Final = f"{PREFIX}tenant"
"""The tenant that a request names; sessions of two tenants are two."""
DDL_KEY: Final = "prefill_ddl"
"""SLOs-Serve's key: deadline of the first token, epoch seconds."""
TPOT_S_KEY: Final = "slo_tpot"
"""SLOs-Serve's key: seconds per output token."""


def is_slo_key(key: object) -> bool:
    """Whether a key of `extra_args` belongs to the SLO: ``slo_*`` or ``prefill_ddl``."""
    return isinstance(key, str) and (key.startswith(PREFIX) or key == DDL_KEY)


def has_slo_key(extra: Mapping[str, Any] | None) -> bool:
    """Whether any key of `extra` belongs to the SLO."""
    return extra is not None and any(is_slo_key(key) for key in extra)


def asks_for_slo(extra: Mapping[str, Any] | None) -> bool:
    """Whether a key of `extra` asks for an SLO; internal keys and those set to None do not."""
    asked = slo_keys_of(extra)
    return any(key not in INTERNAL_KEYS and value is not None for key, value in asked.items())


def slo_keys_of(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keys of `extra` that belong to the SLO."""
    return {key: value for key, value in (extra or {}).items() if is_slo_key(key)}
