# SPDX-License-Identifier: Apache-2.0
"""What the scheduler says about a request, read out of vLLM's responses. Pure functions of bytes.

The scheduler speaks through two fields of a finished output. `kv_transfer_params` carries
``{"vllm_slo": {...report...}}``; of a declined request every choice has `finish_reason` ``abort``
and `stop_reason` ``slo_declined:<retry_after_ms>``. vLLM's streams drop the chunk of a choice that
has no token at all, so a stream that ends before any token is the mark of a declined request too.

The streams of completions and chat carry no `kv_transfer_params`. There the report travels in the
`stop_reason` of a choice's last chunk, packed by `pack_report`, and `rewrite_event` unpacks it: the
chunk that ends a choice shows that choice's report. A stop *string* is matched by vLLM's API
server, not by the scheduler, and overwrites it: such a choice of a stream has its report only where
vLLM's streams carry `kv_transfer_params` (patches/0001).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm_slo.slo import SLO

__all__ = [
    "DECLINED_PREFIX",
    "REPORT_KEY",
    "STREAM_MARKS",
    "Asked",
    "Declined",
    "StreamGate",
    "pack_report",
    "rewrite_event",
    "rewrite_json",
    "served_service_tier",
]

REPORT_KEY: Final = "vllm_slo"
DECLINED_PREFIX: Final = "slo_declined:"
REPORT_PREFIX: Final = "slo_report:"
STREAM_MARKS: Final = (b'"vllm_slo"', b'"slo_report:')
"""One of these is in every event that `rewrite_event` has to change."""

DEFAULT_RETRY_AFTER_MS: Final = 1_000
MAX_RETRY_AFTER_MS: Final = 86_400_000
MAX_HELD_BYTES: Final = 64 * 1024
MAX_HELD_EVENTS: Final = 32
_OPENING_EVENTS: Final = ("response.created", "response.queued", "response.in_progress")


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asked for: its SLO (None: nothing) and its `service_tier` as sent."""

    slo: SLO | None
    service_tier: str | None

    @property
    def may_be_declined(self) -> bool:
        """Whether the client prefers a refusal over best effort."""
        return self.slo is not None and self.slo.on_unattainable == "decline"


def pack_report(report: Mapping[str, Any] | None, stop_reason: int | str | None) -> str:
    """The stop reason of a streamed choice with its report inside; both come out again here."""
    return REPORT_PREFIX + json.dumps([report, stop_reason], separators=(",", ":"))


def _unpack_report(choices: object) -> tuple[bool, Mapping[str, Any] | None]:
    """Restore the stop reasons of `choices`, in place; (whether any was packed, last report)."""
    found, last = False, None
    for choice in choices if isinstance(choices, list) else ():
        packed = choice.get("stop_reason") if isinstance(choice, dict) else None
        if not isinstance(packed, str) or not packed.startswith(REPORT_PREFIX):
            continue
        try:
            report, stop_reason = json.loads(packed.removeprefix(REPORT_PREFIX))
        except (ValueError, TypeError, RecursionError):
            continue  # a stop string of the client's own that looks like ours
        found, choice["stop_reason"] = True, stop_reason
        last = report if isinstance(report, Mapping) else last
    return found, last


@dataclass(frozen=True, slots=True)
class Declined:
    """The request was declined; a new attempt is worth it after `retry_after_ms`."""

    retry_after_ms: int


def served_service_tier(asked: Asked, report: Mapping[str, Any] | None) -> str:
    """OpenAI `service_tier` of the response: the tier that was served, not the one asked for.

    - A promise was made: ``priority`` if that was asked for, else ``default``.
    - No promise although the request has an SLO (it is best effort by its own wish, or its
      objectives could not be promised): ``flex``.
    - No SLO, or no report because another scheduler runs: ``flex`` if asked for, else ``default``.
    """
    if report is not None and report.get("promised") is True:
        return "priority" if asked.service_tier == "priority" else "default"
    if asked.service_tier == "flex" or (report is not None and asked.slo is not None):
        return "flex"
    return "default"


def rewrite_json(body: bytes, asked: Asked) -> bytes | Declined:
    """Rewrite a complete JSON response: the report moves to ``slo``, `service_tier` is set.

    Args:
        body: the response of status 200 as vLLM wrote it.
        asked: what the request asked for.

    Returns:
        The new body (`body` itself if it is not a JSON object), or `Declined`.
    """
    try:
        response = json.loads(body)
    except ValueError:
        return body
    if not isinstance(response, dict):
        return body
    report = _take_report(response)
    _unpack_report(response.get("choices"))
    if asked.may_be_declined and (retry_ms := _declined_ms(response, report)) is not None:
        return Declined(retry_ms)
    if report is not None:
        response["slo"] = dict(report)
    response["service_tier"] = served_service_tier(asked, report)
    return _dump(response)


def rewrite_event(chunk: bytes, asked: Asked) -> bytes:
    """Do as `rewrite_json` in the event of a stream that holds the report.

    That is the last event of a Responses stream, and of completions and chat the one that ends a
    choice.

    Args:
        chunk: one chunk of an SSE body. vLLM sends whole events; a part of one is left as it is.
        asked: what the request asked for.
    """
    if not any(mark in chunk for mark in STREAM_MARKS):
        return chunk
    return b"\n".join(_rewrite_line(line, asked) for line in chunk.split(b"\n"))


def _rewrite_line(line: bytes, asked: Asked) -> bytes:
    try:
        event = json.loads(line.removeprefix(b"data:")) if line.startswith(b"data:") else None
    except ValueError:
        return line
    if not isinstance(event, dict):
        return line
    found, packed = _unpack_report(event.get("choices"))
    carried = _take_report(event)
    if carried is not None and event["kv_transfer_params"] is None:
        del event["kv_transfer_params"]  # events of streams leave out what is not set
    report = packed or carried
    target: Any = event
    if not found and carried is None:
        target = event.get("response")
        report = _take_report(target) if isinstance(target, dict) else None
        if report is None:
            return line
    if report is not None:
        target["slo"] = dict(report)
    target["service_tier"] = served_service_tier(asked, report)
    return b"data: " + _dump(event)


def _dump(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def _take_report(response: dict[str, Any]) -> Mapping[str, Any] | None:
    """Remove the report from `response`, in place; None when there is none."""
    carrier = response.get("kv_transfer_params")
    if not isinstance(carrier, dict) or not isinstance(carrier.get(REPORT_KEY), Mapping):
        return None
    report: Mapping[str, Any] = carrier.pop(REPORT_KEY)
    if not carrier:
        response["kv_transfer_params"] = None
    return report


def _declined_ms(response: Mapping[str, Any], report: Mapping[str, Any] | None) -> int | None:
    """Retry time if the whole response was declined: by its report, or in all its choices."""
    if report is not None and report.get("declined") is True:
        return _clamp_ms(report.get("retry_after_ms"))
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        return None
    marks = [_mark(choice) for choice in choices]
    return None if None in marks else max(mark for mark in marks if mark is not None)


def _mark(choice: object) -> int | None:
    """Retry time of a declined choice, milliseconds; None of any other choice."""
    if not isinstance(choice, Mapping) or choice.get("finish_reason") != "abort":
        return None
    reason = choice.get("stop_reason")
    if not isinstance(reason, str) or not reason.startswith(DECLINED_PREFIX):
        return None
    return _clamp_ms(reason.removeprefix(DECLINED_PREFIX))


def _clamp_ms(value: object) -> int:
    try:
        retry_ms = float(str(value))
    except ValueError:
        return DEFAULT_RETRY_AFTER_MS
    if not 0 < retry_ms < float("inf"):
        return DEFAULT_RETRY_AFTER_MS
    return max(1, min(int(retry_ms), MAX_RETRY_AFTER_MS))


class StreamGate:
    """Watches the head of an SSE stream for a decline, one body chunk at a time.

    Only what vLLM sends before the first token is worth holding back: the role chunk of a chat,
    the opening events of the Responses API, usage without choices, and marks of a decline.
    Anything else, a keep-alive comment included, opens the gate at once.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._held_bytes = 0
        self._held_events = 0
        self._retry_ms: int | None = None

    def feed(self, chunk: bytes, more: bool) -> bool | Declined:
        """Look at the next chunk of the body.

        Args:
            chunk: bytes of the stream, at any boundary.
            more: whether the stream goes on.

        Returns:
            True: keep holding. False: let everything through, for good. Or `Declined`.
        """
        self._held_bytes += len(chunk)
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        for event in events:
            self._held_events += 1
            verdict = self._judge(event)
            if verdict is not True:
                return verdict
        if not more:
            return False if self._retry_ms is None else Declined(self._retry_ms)
        return self._held_bytes <= MAX_HELD_BYTES and self._held_events <= MAX_HELD_EVENTS

    def _judge(self, event: bytes) -> bool | Declined:
        data = b"".join(
            line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")
        )
        if data == b"[DONE]":
            return Declined(self._retry_ms or DEFAULT_RETRY_AFTER_MS)
        try:
            chunk = json.loads(data)
        except ValueError:
            return False
        if not isinstance(chunk, dict):
            return False
        if "choices" in chunk:
            return self._judge_choices(chunk["choices"])
        return self._judge_response(chunk)

    def _judge_choices(self, choices: object) -> bool:
        """Completions and chat: hold while no choice shows a token."""
        if not isinstance(choices, list):
            return False
        for choice in choices:
            mark = _mark(choice)
            if mark is not None:
                self._retry_ms = max(mark, self._retry_ms or 0)
            elif not _is_role_only(choice):
                return False
        return True

    def _judge_response(self, event: dict[str, Any]) -> bool | Declined:
        """Responses API: hold the opening events; the last one carries the report."""
        if event.get("type") in _OPENING_EVENTS:
            return True
        response = event.get("response")
        report = _take_report(response) if isinstance(response, dict) else None
        if report is None or report.get("declined") is not True:
            return False
        return Declined(_clamp_ms(report.get("retry_after_ms")))


def _is_role_only(choice: object) -> bool:
    """Whether a chat choice is the role chunk that vLLM sends ahead of the first token."""
    if not isinstance(choice, Mapping) or choice.get("finish_reason") is not None:
        return False
    delta = choice.get("delta")
    if not isinstance(delta, Mapping) or "role" not in delta:
        return False
    return not any(value for key, value in delta.items() if key != "role")
