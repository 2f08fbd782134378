# SPDX-License-Identifier: Apache-2.0
"""Reports of vllm bench serve and of guidellm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.files import detect, read
from vllm_slo.traces.request import Served, TraceRequest
from vllm_slo.traces.times import UNIX_ORIGIN_S

VLLM: dict[str, Any] = {
    "date": "20261130-120000", "endpoint_type": "openai-chat", "model_id": "tiny", "duration": 9.5,
    "input_lens": [10, 20, 30, 40], "output_lens": [4, 4, 1, 0], "ttfts": [0.5, 0.25, 0.1, 0.0],
    "itls": [[0.1, 0.2, 0.3], [0.4], [], []], "start_times": [100.0, 101.5, 102.0, 103.0],
    "generated_texts": ["{}", "b", "c", ""], "errors": ["", "", "", "Bad Gateway"],
}  # fmt: skip


def written(tmp_path: Path, *values: Any, indent: int | None = None) -> Path:
    path = tmp_path / "report.json"
    path.write_text("\n".join(json.dumps(value, indent=indent) for value in values))
    return path


def test_a_run_of_vllm_bench_serve(tmp_path: Path) -> None:
    path = written(tmp_path, VLLM)
    assert detect(path) == "vllm-bench"
    found = list(read(path))
    assert [(r.at_s, r.prompt_tokens, r.output_tokens, r.model) for r in found] == [
        (100.0, 10, 4, "tiny"), (101.5, 20, 4, "tiny"), (102.0, 30, 1, "tiny"),
        (103.0, 40, 0, "tiny"),
    ]  # fmt: skip
    alone, together, single, failed = (r.served for r in found)
    for served, times in ((alone, (0.5, 0.2, 1.1)), (together, (0.25, 0.4 / 3, 0.65))):
        # The four tokens of the second one came in two chunks, so only the mean gap is known.
        assert served is not None and served.end == "completed"
        assert (served.ttft_s, served.tpot_s, served.e2e_s) == pytest.approx(times)
    assert single == Served(ttft_s=0.1, tpot_s=None, e2e_s=0.1)
    assert failed == Served("failed")


def test_the_worst_window_counts_where_each_token_came_by_itself(tmp_path: Path) -> None:
    gaps = [0.01] * 10 + [0.1] * 10 + [0.01] * 15
    run = VLLM | {"output_lens": [36, 4, 1, 0], "itls": [gaps, [0.4], [], []]}
    served = next(read(written(tmp_path, run))).served
    assert served is not None and served.tpot_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{k: v for k, v in VLLM.items() if k != "start_times"}],
         "line 1, field start_times: missing; run a recent vllm bench serve with --save-"),
        ([VLLM, VLLM], "line 2: a second run, whose times do not continue the first one's"),
        ([VLLM | {"ttfts": [0.1]}], "line 1, field ttfts: 1 values, 4 in start_times"),
        ([VLLM | {"itls": 5}], "line 1, field itls: not a list"),
        ([VLLM | {"itls": [1, 2, 3, 4]}], "request 0, field itls: '1' is not a list of times"),
        ([VLLM | {"itls": [["x"], [], [], []]}], "request 0, field itls: 'x' is not a number"),
        ([VLLM | {"input_lens": [10, -1, 1, 1]}], "request 1, field input_lens: '-1' is not"),
        ([VLLM | {"start_times": [1, 2, None, 4]}], "request 2, field start_times: 'None'"),
        ([VLLM | {"ttfts": [-1, 2, 3, 4]}], "request 0, field ttfts: '-1' is not a time"),
    ],
)  # fmt: skip
def test_a_broken_run_is_told(tmp_path: Path, values: list[Any], message: str) -> None:
    path = written(tmp_path, *values)
    with pytest.raises(TraceError) as caught:
        list(read(path))
    assert str(caught.value).startswith(f"{path} looks like a result of vllm bench serve; ")
    assert message in str(caught.value)


# --- guidellm ------------------------------------------------------------------------------------

START = 1_796_040_000.0
START_S = START - UNIX_ORIGIN_S
COMMON = {
    "prompt_tokens": 10, "output_tokens": 5, "time_to_first_token_ms": 250.0,
    "inter_token_latency_ms": 40.0, "request_latency": 0.5,
}  # fmt: skip
NEW = COMMON | {"request_start_time": START, "info": {"conversation_id": "c1", "status": "done"}}
OLD = COMMON | {"start_time": START + 1.0, "end_time": START + 1.5}


def report(successful: list[Any], **others: Any) -> dict[str, Any]:
    return {"metadata": {"version": 2, "guidellm_version": "0.8.1"}, "config": {"target": "http"},
            "benchmarks": [{"requests": {"successful": successful, **others}}]}  # fmt: skip


@pytest.mark.parametrize("indent", [None, 4])
def test_reports_of_guidellm_old_and_new(tmp_path: Path, indent: int | None) -> None:
    path = written(tmp_path, report([NEW]), indent=indent)
    assert detect(path) == "guidellm"
    served = Served("completed", None, 0.25, 0.04, 0.5)
    assert list(read(path)) == [TraceRequest(START_S, 10, 5, session="c1", served=served)]
    old = {"benchmarks": [{"type_": "generative_benchmark", "requests": {"successful": [OLD]}}]}
    path = written(tmp_path, old, indent=indent)
    assert detect(path) == "guidellm"
    assert list(read(path)) == [TraceRequest(START_S + 1, 10, 5, served=served)]


def test_what_became_of_guidellms_requests(tmp_path: Path) -> None:
    nothing = dict.fromkeys(COMMON) | {"request_start_time": START}
    unsent = nothing | {"request_start_time": None}
    single = NEW | {"output_tokens": 1, "inter_token_latency_ms": 0.0}
    made = report([single], errored=[nothing], incomplete=[NEW, unsent], total=None)
    found = list(read(written(tmp_path, made)))
    assert [(r.prompt_tokens, r.output_tokens, r.served and r.served.end) for r in found] == [
        (10, 1, "completed"), (0, 0, "failed"), (10, 5, "aborted"),
    ]  # fmt: skip
    assert found[0].served is not None and found[0].served.tpot_s is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"benchmarks": 5, "metadata": {}}, "field benchmarks: not a list"),
        ({"benchmarks": [5]}, "benchmark 0 is not an object"),
        ({"benchmarks": [{"metrics": {}}]}, "benchmark 0, field requests: missing; the report"),
        (report(5), "benchmark 0, field requests.successful: not a list"),  # type: ignore[arg-type]
        (report([5]), "benchmark 0, successful request 0 is not an object"),
        (report([NEW, COMMON]), "successful request 1, field request_start_time: missing"),
        (report([NEW | {"prompt_tokens": None}]), "request 0, field prompt_tokens: 'None' is not"),
        (report([{k: v for k, v in NEW.items() if k != "output_tokens"}]),
         "request 0, field output_tokens: missing"),
        (report([NEW | {"time_to_first_token_ms": "x"}]), "field time_to_first_token_ms: 'x'"),
    ],
)  # fmt: skip
def test_a_broken_report_is_told(tmp_path: Path, value: Any, message: str) -> None:
    path = written(tmp_path, value)
    with pytest.raises(TraceError) as caught:
        list(read(path))
    assert str(caught.value).startswith(f"{path} looks like a report of guidellm; ")
    assert message in str(caught.value)
    path.write_text('{"benchmarks": [')
    with pytest.raises(TraceError, match="a report of guidellm; line 1 is not JSON"):
        list(read(path))
