# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans of vLLM and of vllm-slo, as a collector's file exporter writes them.

Each line is a batch: ``{"resourceSpans": [{"scopeSpans": [{"spans": [...]}]}]}`` (OTLP in JSON).
vLLM's API server has a span ``llm_request`` for each request. The scheduler has ``slo_request`` for
each request with an objective. Both name the request, and become one record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TextIO

from msgspec.structs import replace

from vllm_slo.traces import fields
from vllm_slo.traces.errors import FieldError, RecordError
from vllm_slo.traces.json_records import json_lines
from vllm_slo.traces.request import End, Promise, Served, TraceRequest
from vllm_slo.traces.times import UNIX_ORIGIN_S

FIELDS: Final = ("resourceSpans", "scopeSpans", "spans")
_VLLM: Final = "llm_request"
_OURS: Final = "slo_request"
_UNCLASSED: Final = "custom"
"""What our spans call the class of a request that names none."""
_MOST_OPEN: Final = 10_000
"""Spans that wait for the other span of their request. Both are exported within seconds."""
_ENGINE_ID: Final = re.compile(r"(?:\d+_)?(.+?)(?:-[0-9a-f]{8})?", re.ASCII)
"""How the engine names a request: the API server's name and eight random digits."""

_ID: Final = "gen_ai.request.id"
_PROMPT: Final = "gen_ai.usage.prompt_tokens"
_OUTPUT: Final = "gen_ai.usage.completion_tokens"
_TTFT_S: Final = "gen_ai.latency.time_to_first_token"
_E2E_S: Final = "gen_ai.latency.e2e"
_DECODE_S: Final = "gen_ai.latency.time_in_model_decode"
_MODEL: Final = "gen_ai.response.model"


def requests(text: TextIO) -> Iterator[TraceRequest]:
    """The requests of a file of spans, about in the order of their ends; times are dates.

    Other spans are passed over. A span waits for its request's other one while `_MOST_OPEN` others
    come.

    Raises:
        RecordError: a line or a span is broken.
    """
    waiting: dict[tuple[str, str], list[_Span]] = {}
    for span in _spans(text):
        other = (_OURS if span.name == _VLLM else _VLLM, span.request)
        if other in waiting:
            partner = waiting[other].pop(0)
            if not waiting[other]:
                del waiting[other]
            yield _request(span, partner)
            continue
        waiting.setdefault((span.name, span.request), []).append(span)
        if len(waiting) > _MOST_OPEN:
            for alone in waiting.pop(next(iter(waiting))):
                yield _request(alone)
    for spans in waiting.values():
        for alone in spans:
            yield _request(alone)


class _Span:
    """One span of a request, checked when it is read.

    Attributes:
        request: the API server's name of the request.
        at_s, end_s: seconds since 2000.
    """

    __slots__ = ("at_s", "end_s", "name", "request", "told", "where")

    def __init__(self, where: str, item: Mapping[str, Any]) -> None:
        self.where = where
        self.name = str(item["name"])
        self.told = _attributes(item.get("attributes"))
        fields.require(self.told, _ID, _PROMPT, _OUTPUT)
        match = _ENGINE_ID.fullmatch(str(self.told[_ID]))
        own = match is not None and self.name == _OURS
        self.request = match.group(1) if match is not None and own else str(self.told[_ID])
        fields.require(item, "startTimeUnixNano", "endTimeUnixNano")
        self.at_s, self.end_s = (
            fields.number(field, item[field]) / 1e9 - UNIX_ORIGIN_S
            for field in ("startTimeUnixNano", "endTimeUnixNano")
        )

    def seconds(self, field: str, unit_s: float = 1.0) -> float | None:
        value = self.told.get(field)
        return None if value is None else fields.number(field, value) * unit_s

    def text(self, field: str) -> str | None:
        value = self.told.get(field)
        return None if value is None else fields.name(field, value)


def _spans(text: TextIO) -> Iterator[_Span]:
    """The spans of requests."""
    for where, batch in json_lines(text):
        try:
            for resource in _list(batch, "resourceSpans"):
                for scope in _list(resource, "scopeSpans"):
                    for item in _list(scope, "spans"):
                        if item.get("name") in (_VLLM, _OURS):
                            yield _Span(where, item)
        except FieldError as error:
            raise RecordError(f"{where}, {error}") from None


def _list(item: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    found = item.get(field, [])
    if not isinstance(found, list) or any(not isinstance(each, dict) for each in found):
        raise FieldError(f"field {field}: not a list of objects")
    return found


def _attributes(listed: object) -> dict[str, Any]:
    """OTLP's list of ``{"key", "value": {"intValue": "5"}}`` as a dict."""
    if not isinstance(listed, list):
        raise FieldError("field attributes: not a list")
    found = {}
    for item in listed:
        value = item.get("value") if isinstance(item, dict) else None
        if not isinstance(value, dict) or not value:
            raise FieldError("field attributes: not a list of keys and values")
        found[str(item.get("key"))] = next(iter(value.values()))
    return found


def _request(span: _Span, partner: _Span | None = None) -> TraceRequest:
    """The request of one span, or of both."""
    try:
        vllm, ours = (span, partner) if span.name == _VLLM else (partner, span)
        first = vllm or span
        prompt_tokens = fields.tokens(_PROMPT, first.told[_PROMPT])
        output_tokens = fields.tokens(_OUTPUT, first.told[_OUTPUT])
        request = TraceRequest(
            first.at_s,
            prompt_tokens,
            output_tokens,
            model=first.text(_MODEL),
            served=_served(vllm, ours, output_tokens),
        )
        return request if ours is None else replace(request, **_asked(ours))
    except FieldError as error:
        raise RecordError(f"{span.where}, {error}") from None


def _asked(ours: _Span) -> dict[str, Any]:
    """What the request asked for."""
    name = ours.text("slo.class")
    asked: dict[str, Any] = {
        "slo_class": "" if name is None or name == _UNCLASSED else name,
        "tenant": ours.text("slo.tenant"),
    }
    for field in ("ttft_ms", "tpot_ms"):
        if f"slo.{field}" in ours.told:
            asked[field] = fields.objective_ms(f"slo.{field}", ours.told[f"slo.{field}"])
    return asked


def _served(vllm: _Span | None, ours: _Span | None, output_tokens: int) -> Served:
    ttft_s = tpot_s = e2e_s = None
    if vllm is not None and output_tokens:
        ttft_s, e2e_s = vllm.seconds(_TTFT_S), vllm.seconds(_E2E_S)
        decode_s = vllm.seconds(_DECODE_S)
        if decode_s is not None and output_tokens > 1:
            tpot_s = decode_s / (output_tokens - 1)
    if ours is None:
        return Served("completed" if output_tokens else "aborted", None, ttft_s, tpot_s, e2e_s)
    ttft_s = _first(ours.seconds("slo.ttft_achieved_ms", 1e-3), ttft_s)
    tpot_s = _first(ours.seconds("slo.tpot_achieved_ms", 1e-3), tpot_s)
    e2e_s = _first(e2e_s, ours.end_s - ours.at_s if output_tokens else None)
    attained = ours.told.get("slo.attained")
    asked = any(f"slo.{field}" in ours.told for field in ("ttft_ms", "tpot_ms", "stages"))
    end: End = "aborted" if attained is None and asked else "completed"
    end = "declined" if ours.told.get("slo.declined") is True else end
    promise: Promise = "in_time" if ours.told.get("slo.promised") is True else "none"
    promise = "late" if ours.told.get("slo.late") is True else promise
    return Served(end, promise, ttft_s, tpot_s, e2e_s, attained=attained)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
