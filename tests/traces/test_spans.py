# SPDX-License-Identifier: Apache-2.0
"""Spans of vLLM and of the scheduler become one record of each request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_slo.traces import spans
from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.files import detect, read
from vllm_slo.traces.request import Served, TraceRequest
from vllm_slo.traces.times import UNIX_ORIGIN_S

START_NS = (UNIX_ORIGIN_S + 5000) * 10**9


def value(plain: Any) -> dict[str, Any]:
    """A value as OTLP writes it in JSON: 64-bit integers are strings."""
    if isinstance(plain, bool):
        return {"boolValue": plain}
    if isinstance(plain, int):
        return {"intValue": str(plain)}
    return {"doubleValue": plain} if isinstance(plain, float) else {"stringValue": plain}


def span(name: str, attributes: dict[str, Any], at_s: float = 0.0) -> dict[str, Any]:
    start = START_NS + round(at_s * 1e9)
    return {
        "traceId": "00", "spanId": "00", "name": name, "kind": 2,
        "startTimeUnixNano": str(start), "endTimeUnixNano": str(start + 2 * 10**9),
        "attributes": [{"key": k, "value": value(v)} for k, v in attributes.items()],
    }  # fmt: skip


EMPTY: Mapping[str, Any] = {}


def vllm(request: str, at_s: float = 0.0, more: Mapping[str, Any] = EMPTY) -> dict[str, Any]:
    told = {
        "gen_ai.request.id": request, "gen_ai.usage.prompt_tokens": 100,
        "gen_ai.usage.completion_tokens": 11, "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.e2e": 1.5, "gen_ai.latency.time_in_model_decode": 0.8,
    }  # fmt: skip
    return span("llm_request", told | dict(more), at_s)


def ours(request: str, at_s: float = 0.0, more: Mapping[str, Any] = EMPTY) -> dict[str, Any]:
    told = {
        "gen_ai.request.id": request, "gen_ai.usage.prompt_tokens": 100,
        "gen_ai.usage.completion_tokens": 11, "slo.class": "chat", "slo.tenant": "acme",
        "slo.value": 1.0, "slo.ttft_ms": 600.0, "slo.tpot_ms": 90.0, "slo.tier": "guaranteed",
        "slo.promised": True, "slo.late": False, "slo.ttft_achieved_ms": 490.0,
        "slo.tpot_achieved_ms": 95.0, "slo.attained": False, "slo.declined": False,
    }  # fmt: skip
    kept = {key: each for key, each in (told | dict(more)).items() if each is not None}
    return span("slo_request", kept, at_s)


def written(tmp_path: Path, *found: dict[str, Any]) -> Path:
    """A file with one batch of spans a line."""
    path = tmp_path / "spans.json"
    batches = [
        {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"spans": [each]}]}]}
        for each in found
    ]
    path.write_text("".join(json.dumps(batch) + "\n" for batch in batches))
    return path


def requests(path: Path) -> list[TraceRequest]:
    assert detect(path) == "spans"
    return list(read(path))


def test_a_span_of_vllm_alone(tmp_path: Path) -> None:
    other = span("HTTP POST", {"http.route": "/v1/completions"})
    served = Served("completed", None, 0.5, 0.08, 1.5)
    assert requests(written(tmp_path, other, vllm("chatcmpl-1"))) == [
        TraceRequest(5000.0, 100, 11, served=served)
    ]


@pytest.mark.parametrize(
    "engine_id", ["chatcmpl-1-0a1b2c3d", "0_chatcmpl-1-0a1b2c3d", "chatcmpl-1"]
)
@pytest.mark.parametrize("ours_first", [False, True])
def test_both_spans_are_one_request(tmp_path: Path, engine_id: str, ours_first: bool) -> None:
    pair = [vllm("chatcmpl-1"), ours(engine_id, 0.01)]
    found = requests(written(tmp_path, *(reversed(pair) if ours_first else pair)))
    # Arrival and end are the API server's, the worst window of TPOT is the scheduler's.
    assert found == [
        TraceRequest(
            5000.0, 100, 11, "chat", "acme", ttft_ms=600.0, tpot_ms=90.0,
            served=Served("completed", "in_time", 0.49, 0.095, 1.5, None, False),
        )
    ]  # fmt: skip


def test_spans_of_one_batch_and_of_several_choices(tmp_path: Path) -> None:
    path = tmp_path / "spans.json"
    many = [vllm("a"), vllm("a", 1.0), ours("0_a-00000000", 2.0), ours("1_a-00000000", 3.0)]
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": many}]}]}))
    found = requests(path)
    assert [(r.at_s, r.slo_class) for r in found] == [(5000.0, "chat"), (5001.0, "chat")]


@pytest.mark.parametrize(
    ("more", "end", "promise"),
    [
        ({"slo.late": True}, "completed", "late"),
        ({"slo.promised": False}, "completed", "none"),
        ({"slo.declined": True, "slo.promised": False, "slo.attained": None}, "declined", "none"),
        ({"slo.attained": None}, "aborted", "in_time"),
    ],
)
def test_ends_and_promises(tmp_path: Path, more: dict[str, Any], end: str, promise: str) -> None:
    (one,) = requests(written(tmp_path, ours("a", more=more)))
    assert one.served is not None
    assert (one.served.end, one.served.promise, one.served.e2e_s) == (end, promise, 2.0)


def test_a_request_without_a_class_and_one_without_a_token(tmp_path: Path) -> None:
    none = {"gen_ai.usage.completion_tokens": 0, "gen_ai.latency.time_to_first_token": 0.0}
    unclassed, silent = requests(
        written(tmp_path, ours("a", more={"slo.class": "custom"}), vllm("b", more=none))
    )
    assert unclassed.slo_class == ""
    assert silent.served == Served("aborted")


def test_few_spans_wait_for_their_partner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "_MOST_OPEN", 3)
    path = written(tmp_path, *(vllm(str(i), float(i)) for i in range(5)), ours("4"))
    reader = read(path)
    assert next(reader).at_s == 5000.0
    assert [r.at_s for r in reader] == [5001.0, 5004.0, 5002.0, 5003.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attributes": 5}, "field attributes: not a list"),
        ({"attributes": [5]}, "field attributes: not a list of keys and values"),
        ({"attributes": []}, "field gen_ai.request.id: missing"),
        ({"startTimeUnixNano": "noon"}, "field startTimeUnixNano: 'noon' is not a number"),
        (vllm("a", more={"gen_ai.usage.prompt_tokens": "x"}),
         "field gen_ai.usage.prompt_tokens: 'x' is not a number of tokens"),
        (vllm("a", more={"gen_ai.latency.e2e": "x"}), "field gen_ai.latency.e2e: 'x' is not"),
        (ours("a", more={"slo.ttft_ms": -1}), "field slo.ttft_ms: '-1' is not an objective"),
        (ours("a", more={"slo.class": True}), "field slo.class: 'True' is not a name"),
    ],
)  # fmt: skip
def test_a_broken_span_is_told(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path, vllm("b"), vllm("a") | change)
    with pytest.raises(TraceError) as caught:
        requests(path)
    assert str(caught.value).startswith(f"{path} looks like OpenTelemetry spans; line 2, {message}")


@pytest.mark.parametrize("broken", ['{"resourceSpans": 5}', '{"resourceSpans": [5]}'])
def test_a_broken_batch_is_told(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "spans.json"
    path.write_text(broken)
    with pytest.raises(TraceError, match="line 1, field resourceSpans: not a list of objects"):
        requests(path)
