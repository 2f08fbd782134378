# SPDX-License-Identifier: Apache-2.0
"""Reports of load generators, which hold what was sent and what became of it.

Both are one JSON value and are read whole. Times were measured by the client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TextIO

from vllm_slo.core.attainment import worst_window_tpot_s
from vllm_slo.traces import fields
from vllm_slo.traces.errors import FieldError, RecordError
from vllm_slo.traces.json_records import json_lines, json_value, objects
from vllm_slo.traces.request import End, Served, TraceRequest
from vllm_slo.traces.times import at_of

VLLM_BENCH_FIELDS: Final = ("start_times", "input_lens", "output_lens", "ttfts", "itls", "errors")
GUIDELLM_FIELDS: Final = ("benchmarks", "requests", "successful")
_LONGEST_S: Final = 86_400.0 * 366


# --- vllm bench serve --save-result --save-detailed ----------------------------------------------


def vllm_bench(text: TextIO) -> Iterator[TraceRequest]:
    """The requests of one run of ``vllm bench serve``; times count from the client's start.

    The worst window of TPOT is known where each token came by itself, else TPOT is the mean.
    """
    for where, report in json_lines(text):
        if where != "line 1":
            raise RecordError(
                f"{where}: a second run, whose times do not continue the first one's; "
                "keep one line of the file"
            )
        yield from _run(where, report)


def _run(where: str, report: Mapping[str, Any]) -> Iterator[TraceRequest]:
    for field in VLLM_BENCH_FIELDS:
        if field not in report:
            raise RecordError(
                f"{where}, field {field}: missing; run a recent vllm bench serve with "
                "--save-detailed"
            )
        if not isinstance(report[field], list):
            raise RecordError(f"{where}, field {field}: not a list")
        if len(report[field]) != len(report["start_times"]):
            raise RecordError(
                f"{where}, field {field}: {len(report[field])} values, "
                f"{len(report['start_times'])} in start_times"
            )
    model = report.get("model_id")
    for place, values in enumerate(zip(*(report[f] for f in VLLM_BENCH_FIELDS), strict=True)):
        try:
            yield _sent(values, model if isinstance(model, str) else None)
        except FieldError as error:
            raise RecordError(f"{where}, request {place}, {error}") from None


def _sent(values: Sequence[Any], model: str | None) -> TraceRequest:
    start, prompt, output, ttft, gaps, error = values
    output_tokens = fields.tokens("output_lens", output)
    if not isinstance(gaps, list):
        raise fields.bad("itls", gaps, "a list of times")
    first_s = _seconds("ttfts", ttft)
    token_times_s = list(accumulate((_seconds("itls", gap) for gap in gaps), initial=first_s))
    served = Served("failed")
    if not error:
        alone = len(token_times_s) == output_tokens
        mean_s = (token_times_s[-1] - first_s) / max(1, output_tokens - 1)
        tpot_s = worst_window_tpot_s(token_times_s) if alone else mean_s
        served = Served(
            ttft_s=first_s,
            tpot_s=tpot_s if output_tokens > 1 else None,
            e2e_s=token_times_s[-1],
        )
    return TraceRequest(
        _seconds("start_times", start),
        fields.tokens("input_lens", prompt),
        output_tokens,
        model=model,
        served=served,
    )


def _seconds(field: str, value: object) -> float:
    seconds = fields.number(field, value)
    if not 0 <= seconds <= _LONGEST_S:
        raise fields.bad(field, value, "a time in seconds")
    return seconds


# --- guidellm ------------------------------------------------------------------------------------

_ENDS: Final[Mapping[str, End]] = {
    "successful": "completed",
    "errored": "failed",
    "incomplete": "aborted",
}


def guidellm(text: TextIO) -> Iterator[TraceRequest]:
    """The requests of a report of guidellm, of all its benchmarks; times are dates.

    Versions from 0.2 to 0.8 differ in the names of a request's start. TPOT is the mean.
    """
    report = json_value(text)
    benchmarks = report.get("benchmarks") if isinstance(report, dict) else None
    if not isinstance(benchmarks, list):
        raise RecordError("field benchmarks: not a list of benchmarks")
    for where, benchmark in objects(benchmarks, "benchmark"):
        requests = benchmark.get("requests")
        if not isinstance(requests, dict):
            raise RecordError(f"{where}, field requests: missing; the report holds only totals")
        for status, end in _ENDS.items():
            items = requests.get(status) or []
            if not isinstance(items, list):
                raise RecordError(f"{where}, field requests.{status}: not a list of requests")
            for place, item in objects(items, f"{where}, {status} request"):
                try:
                    request = _measured(item, end)
                except FieldError as error:
                    raise RecordError(f"{place}, {error}") from None
                if request is not None:
                    yield request


def _measured(item: Mapping[str, Any], end: End) -> TraceRequest | None:
    """A request of a report; None: it was never sent."""
    start = next((f for f in ("request_start_time", "start_time") if f in item), None)
    if start is None:
        raise FieldError("field request_start_time: missing")
    if item[start] is None and end != "completed":
        return None
    fields.require(item, "prompt_tokens", "output_tokens")
    prompt_tokens, output_tokens = (
        0 if end != "completed" and item[field] is None else fields.tokens(field, item[field])
        for field in ("prompt_tokens", "output_tokens")
    )
    ttft_s = _known_s(item, "time_to_first_token_ms", 1e-3)
    tpot_s = _known_s(item, "inter_token_latency_ms", 1e-3) if output_tokens > 1 else None
    info = item.get("info")
    session = info.get("conversation_id") if isinstance(info, dict) else None
    return TraceRequest(
        at_of(fields.number(start, item[start])),
        prompt_tokens,
        output_tokens,
        session=session if isinstance(session, str) else None,
        served=Served(end, None, ttft_s, tpot_s, _known_s(item, "request_latency", 1.0)),
    )


def _known_s(item: Mapping[str, Any], field: str, unit_s: float) -> float | None:
    value = item.get(field)
    return None if value is None else _seconds(field, fields.number(field, value) * unit_s)
