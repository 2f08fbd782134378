# SPDX-License-Identifier: Apache-2.0
"""Puts a request's report into the response that vLLM writes. Pure functions of bytes.

A whole JSON response gets the field ``slo``. In a stream the event that ends a choice gets it:
the last chunk of a choice (completions, chat), ``response.completed`` inside its ``response``
(Responses), ``message_delta`` (Messages). Where the request named a ``service_tier``, the tier that
was served stands beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm_slo.slo.model import SLO

Reports = Mapping[int, Mapping[str, Any]]
"""Choice -> its report."""
_ENDS: Final = re.compile(
    rb'"finish_reason": ?"|"type": ?"(?:message_delta|response\.(?:completed|incomplete|failed))"'
)
"""Matches every event that ends a choice."""
_ENDED: Final = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asked for. ``service_tier``: as sent; None: not sent."""

    slo: SLO | None = None
    service_tier: object = None

    @property
    def may_be_declined(self) -> bool:
        """Whether the client prefers a refusal over best effort."""
        return self.slo is not None and self.slo.may_be_declined


def served_service_tier(asked: Asked, report: Mapping[str, Any] | None) -> str:
    """OpenAI `service_tier` of the response: the tier that was served, not the one asked for.

    - A promise was made: ``priority`` if that was asked for, else ``default``.
    - No promise although the request has an SLO (it asked for best effort, or its objectives could
      not be promised), or a late one: ``flex``.
    - No SLO, or no report because another scheduler runs: ``flex`` if asked for, else ``default``.
    """
    if report is not None and report.get("promised") is True and not report.get("late"):
        return "priority" if asked.service_tier == "priority" else "default"
    if asked.service_tier == "flex" or (report is not None and asked.slo is not None):
        return "flex"
    return "default"


def rewrite_json(body: bytes, asked: Asked, report: Mapping[str, Any] | None) -> bytes:
    """A complete JSON response with the report in it; `body` itself if it is not a JSON object.

    Args:
        body: the response of status 200 as vLLM wrote it.
        report: of its first choice; None: there is no report.
    """
    if report is None and asked.service_tier is None:
        return body
    try:
        response = json.loads(body)
    except ValueError:
        return body
    if not isinstance(response, dict):
        return body
    _show(response, asked, report)
    return _dump(response)


def rewrite_event(chunk: bytes, asked: Asked, reports: Reports) -> bytes:
    """Do as `rewrite_json` in the events of a stream that end a choice.

    Args:
        chunk: one chunk of an SSE body. vLLM sends whole events; a part of one is left as it is.
        reports: choice -> report, as far as they are there.
    """
    if not _ENDS.search(chunk):
        return chunk
    return b"\n".join(_rewrite_line(line, asked, reports) for line in chunk.split(b"\n"))


def _rewrite_line(line: bytes, asked: Asked, reports: Reports) -> bytes:
    if not line.startswith(b"data:") or not _ENDS.search(line):
        return line
    try:
        event = json.loads(line.removeprefix(b"data:"))
    except ValueError:
        return line
    target, index = _ended(event)
    report = reports.get(index)
    if target is None or (report is None and asked.service_tier is None):
        return line
    _show(target, asked, report)
    return b"data: " + _dump(event)


def _ended(event: Any) -> tuple[dict[str, Any] | None, int]:
    """(object that gets the report, choice that ends); (None, 0): no choice ends."""
    if not isinstance(event, dict):
        return None, 0
    choices = event.get("choices")
    if isinstance(choices, list):
        ended = [c for c in choices if isinstance(c, dict) and c.get("finish_reason")]
        index = ended[0].get("index") if ended else None
        return (event if ended else None), (index if isinstance(index, int) else 0)
    response = event.get("response")
    if event.get("type") in _ENDED and isinstance(response, dict):
        return response, 0
    return (event, 0) if event.get("type") == "message_delta" else (None, 0)


def _show(target: dict[str, Any], asked: Asked, report: Mapping[str, Any] | None) -> None:
    if report is not None:
        target["slo"] = dict(report)
    if asked.service_tier is not None:
        target["service_tier"] = served_service_tier(asked, report)


def _dump(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")
