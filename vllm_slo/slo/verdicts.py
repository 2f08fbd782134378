# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the API server about a request, packed into fields that vLLM carries.

A report travels in ``kv_transfer_params`` of a finished output, under `REPORT_KEY`; that of one of
several choices also in its ``stop_reason``. A request that is not served ends as aborted, and its
``stop_reason`` says why: `Declined`, `Invalid` or `Quoted`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

REPORT_KEY: Final = "vllm_slo"
DECLINED_HEADER: Final = "x-vllm-slo-declined"
"""Header by which a server tells the front, whatever the status, that it declined. The value: the
milliseconds after which to retry. Clients do not get it."""

PLANNING_FAILED: Final = "planning_failed"
"""Reason why a request got no promise, or lost it: a fault in the scheduler's own planning."""

WAIT: Final = "wait"
"""Why a request is declined: its turn comes later than its `max_wait_ms`."""
QUEUE: Final = "queue"
"""Why a request is declined: as many of its class as its `max_waiting` wait before it."""
_FIX: Final = {WAIT: "raise max_wait_ms", QUEUE: "raise max_waiting"}

_REPORTED: Final = "slo_report:"
_DECLINED: Final = "slo_declined:"
_INVALID: Final = "slo_invalid:"
_QUOTE: Final = "slo_quote:"


@dataclass(frozen=True, slots=True)
class Declined:
    """The objectives cannot be promised, and the request asked to be refused then."""

    retry_after_ms: int
    reason: str

    @property
    def text(self) -> str:
        """The error message, one line."""
        return (
            f"the SLO cannot be kept now ({self.reason}); retry after {self.retry_after_ms} ms, or "
            f"{_FIX.get(self.reason, 'drop on_unattainable')}"
        )

    def pack(self) -> str:
        """The stop reason."""
        return f"{_DECLINED}{self.retry_after_ms}:{self.reason}"


@dataclass(frozen=True, slots=True)
class Invalid:
    """The request's SLO is not valid; ``text`` says why, beginning with the field."""

    text: str

    def pack(self) -> str:
        return _INVALID + self.text


@dataclass(frozen=True, slots=True)
class Quoted:
    """The answer to a request for a quote: what it would be promised."""

    quote: Mapping[str, Any]


Verdict: TypeAlias = Declined | Invalid | Quoted


def pack_quote(quote: Mapping[str, Any]) -> str:
    """The stop reason that carries a quote."""
    return _QUOTE + json.dumps(quote, separators=(",", ":"))


def unpack_quote(stop_reason: object) -> dict[str, Any] | None:
    """Inverse of `pack_quote`; None of any other stop reason."""
    if not isinstance(stop_reason, str) or not stop_reason.startswith(_QUOTE):
        return None
    return dict(json.loads(stop_reason.removeprefix(_QUOTE)))


def unpack(stop_reason: object) -> Verdict | None:
    """The verdict in a stop reason; None of any other stop reason."""
    if not isinstance(stop_reason, str) or not stop_reason.startswith("slo_"):
        return None
    try:
        if stop_reason.startswith(_DECLINED):
            retry_ms, _, reason = stop_reason.removeprefix(_DECLINED).partition(":")
            return Declined(max(int(retry_ms), 1), reason)
        if (quote := unpack_quote(stop_reason)) is not None:
            return Quoted(quote)
    except (ValueError, TypeError, RecursionError):
        return None
    if stop_reason.startswith(_INVALID):
        return Invalid(stop_reason.removeprefix(_INVALID))
    return None


def pack_report(report: Mapping[str, Any] | None, stop_reason: int | str | None) -> str:
    """The stop reason of a choice with its report inside."""
    return _REPORTED + json.dumps([report, stop_reason], separators=(",", ":"))


def unpack_report(
    stop_reason: int | str | None,
) -> tuple[Mapping[str, Any] | None, int | str | None]:
    """Inverse of `pack_report`: (report, stop reason); of any other stop reason (None, itself)."""
    if not isinstance(stop_reason, str) or not stop_reason.startswith(_REPORTED):
        return None, stop_reason
    try:
        report, inner = json.loads(stop_reason.removeprefix(_REPORTED))
    except (ValueError, TypeError, RecursionError):
        return None, stop_reason  # a stop string of the client that looks like a report
    return (report if isinstance(report, Mapping) else None), inner
