# SPDX-License-Identifier: Apache-2.0
"""Attainment and goodput: definitions, the online tracker, and agreement with vLLM's own bench."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.core.attainment import (
    RequestRecord,
    WindowTPOT,
    attained,
    mean_tpot_s,
    measure,
    summarise,
    summarise_class,
    worst_window_tpot_s,
)

_gaps = st.lists(st.floats(0, 10, allow_nan=False), max_size=120)


def _times(gaps: list[float], start: float = 0.0) -> tuple[float, ...]:
    times = [start]
    for gap in gaps:
        times.append(times[-1] + gap)
    return tuple(times)


def record(**changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "request_id": "r",
        "slo_class": "chat",
        "arrival_s": 0.0,
        "token_times_s": (0.5, 0.6, 0.7),
        "ttft_slo_s": 0.5,
        "tpot_slo_s": 0.2,
        "outcome": "served",
        "finished": True,
        "num_prompt_tokens": 4,
    }
    return RequestRecord(**(fields | changes))


def test_worst_window_by_hand() -> None:
    assert worst_window_tpot_s(()) is None
    assert worst_window_tpot_s((1.0,)) is None
    assert worst_window_tpot_s((1.0, 3.0)) == 2.0  # fewer gaps than a window: one window
    # 10 gaps of 1 s, then 10 of 2 s: the second window counts, not the mean of 1.5.
    assert worst_window_tpot_s(_times([1.0] * 10 + [2.0] * 10)) == 2.0
    # A tail of 5 slow gaps joins the last full window: (10 * 1 + 5 * 4) / 15.
    assert worst_window_tpot_s(_times([1.0] * 20 + [4.0] * 5)) == pytest.approx(30 / 15)
    # One late token within a window is smoothed by its neighbours.
    assert worst_window_tpot_s(_times([1.0] * 9 + [11.0] + [1.0] * 10)) == 2.0
    assert worst_window_tpot_s(_times([1.0, 5.0, 1.0]), window=1) == 5.0


def test_multi_token_chunks_count_per_token() -> None:
    # Speculation: chunks of 5 tokens every 0.5 s are 0.1 s per token, not 0.5.
    times = tuple(0.5 * (i // 5) for i in range(26))
    assert worst_window_tpot_s(times) == pytest.approx(0.1)


@given(_gaps, st.integers(1, 15))
def test_tracker_equals_batch_on_every_prefix(gaps: list[float], window: int) -> None:
    times = _times(gaps)
    tracker = WindowTPOT(window)
    assert tracker.worst_s is None
    for i, time_s in enumerate(times):
        tracker.add(time_s)
        assert tracker.tokens == i + 1
        assert tracker.worst_s == worst_window_tpot_s(times[: i + 1], window)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 7)), min_size=1, max_size=40))
def test_tracker_equals_batch_for_chunks(chunks: list[tuple[float, int]]) -> None:
    tracker, times, now = WindowTPOT(), [], 0.0
    for gap, count in chunks:
        now += gap
        tracker.add(now, count)
        times += [now] * count
    assert tracker.worst_s == worst_window_tpot_s(times)


@given(_gaps.filter(bool), st.integers(1, 15))
def test_worst_window_bounds(gaps: list[float], window: int) -> None:
    times = _times(gaps)
    worst, mean = worst_window_tpot_s(times, window), mean_tpot_s(times)
    assert worst is not None
    assert mean is not None
    assert mean <= worst * (1 + 1e-9) + 1e-12  # the worst of the parts is no better than the whole
    assert worst <= max(gaps) * (1 + 1e-9) + 1e-9


def test_tracker_refuses_time_going_backwards_and_no_window() -> None:
    tracker = WindowTPOT()
    tracker.add(2.0)
    for bad in (1.0, float("nan")):
        with pytest.raises(ValueError, match="must not decrease"):
            tracker.add(bad)
    with pytest.raises(ValueError, match="at least 1"):
        WindowTPOT(0)
    with pytest.raises(ValueError, match="at least 1"):
        worst_window_tpot_s((0.0, 1.0), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_times_s": (0.5, 0.4)}, "token time 0.4"),
        ({"arrival_s": 0.6}, "token time 0.5"),
        ({"token_times_s": (float("inf"),)}, "not finite"),
        ({"arrival_s": float("nan")}, "arrival_s must be finite"),
        ({"outcome": "lost"}, "outcome 'lost'"),
    ],
)
def test_record_refuses_nonsense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(**changes)


def test_attained() -> None:
    assert attained(record()) is True  # a TTFT equal to its objective keeps it
    assert attained(record(ttft_slo_s=0.49)) is False
    assert attained(record(tpot_slo_s=0.09)) is False
    assert attained(record(ttft_slo_s=None, tpot_slo_s=None)) is None
    assert attained(record(ttft_slo_s=None, tpot_slo_s=None, finished=False)) is None
    assert attained(record(finished=False)) is False
    assert attained(record(token_times_s=(), finished=False, outcome="declined")) is False
    assert attained(record(token_times_s=(), tpot_slo_s=None)) is False
    assert attained(record(token_times_s=(0.1,), tpot_slo_s=1e-6)) is True  # no gap to be late in
    assert attained(record(outcome="best_effort")) is True  # met it anyway


def test_the_whole_answer_may_have_an_objective() -> None:
    alone = {"ttft_slo_s": None, "tpot_slo_s": None}
    assert record(**alone).has_objective is False
    assert attained(record(**alone, e2e_slo_s=0.7)) is True  # equality keeps it
    assert attained(record(**alone, e2e_slo_s=0.69)) is False
    assert attained(record(**alone, e2e_slo_s=0.7, finished=False)) is False
    assert attained(record(e2e_slo_s=0.69)) is False  # beside the others, which were kept
    assert attained(record(**alone, e2e_slo_s=9.0, token_times_s=())) is False
    assert record(arrival_s=0.5).e2e_s == pytest.approx(0.2)
    assert record(token_times_s=()).e2e_s is None


def test_worst_window_and_mean_disagree_on_a_stall() -> None:
    stalled = record(token_times_s=_times([0.1] * 10 + [0.5] * 10, start=0.4))
    assert measure(stalled).worst_tpot_s == pytest.approx(0.5)
    assert measure(stalled).mean_tpot_s == pytest.approx(0.3)
    wide = record(token_times_s=stalled.token_times_s, tpot_slo_s=0.31)
    assert attained(wide) is False
    assert attained(wide, tpot="mean") is True


def test_summary() -> None:
    records = [
        record(),
        record(ttft_slo_s=0.1),
        record(token_times_s=(), finished=False, outcome="declined"),
        record(token_times_s=(), finished=False, outcome="failed"),
        record(slo_class="batch", ttft_slo_s=None, tpot_slo_s=None, outcome="best_effort"),
    ]
    summary = summarise(records, duration_s=2.0)
    assert list(summary) == ["chat", "batch"]
    chat, batch = summary["chat"], summary["batch"]
    assert (chat.n, chat.finished, chat.declined, chat.failed, chat.with_objective) == (
        4,
        2,
        1,
        1,
        4,
    )
    assert chat.attainment == chat.attainment_by_mean == 0.25
    assert chat.goodput_requests_per_s == 0.5
    assert chat.goodput_tokens_per_s == 1.5
    assert chat.throughput_tokens_per_s == 3.0
    assert chat.ttft_p50_s == 0.5
    assert chat.tpot_p99_s == pytest.approx(0.1)
    assert (batch.attainment, batch.goodput_tokens_per_s, batch.best_effort) == (None, 0.0, 1)
    assert batch.throughput_tokens_per_s == 1.5
    assert summarise([], 1.0) == {}
    assert summarise_class("all", [], 1.0).ttft_p50_s is None
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="duration_s"):
            summarise_class("all", [], bad)


_streams = st.lists(
    st.tuples(
        st.floats(0, 100),  # arrival
        st.floats(0.001, 2),  # TTFT
        st.lists(st.floats(0.001, 0.2), max_size=30),  # gaps
        st.booleans(),  # finished
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.filterwarnings("ignore")  # vLLM's own, for runs in which nothing succeeded
@settings(max_examples=examples(40))
@given(_streams, st.floats(1, 2000), st.floats(1, 200))
def test_mean_goodput_counts_as_vllm_bench_serve(
    streams: list[tuple[float, float, list[float], bool]], ttft_ms: float, tpot_ms: float
) -> None:
    """The same records through ``calculate_metrics`` of vLLM give the same goodput."""
    serve = pytest.importorskip("vllm.benchmarks.serve")
    lib = importlib.import_module("vllm.benchmarks.lib.endpoint_request_func")
    records, outputs = [], []
    for arrival_s, ttft_s, gaps, finished in streams:
        times = _times(gaps, start=arrival_s + ttft_s)
        records.append(
            record(
                arrival_s=arrival_s,
                token_times_s=times,
                ttft_slo_s=ttft_ms / 1000,
                tpot_slo_s=tpot_ms / 1000,
                finished=finished,
            )
        )
        outputs.append(
            lib.RequestFuncOutput(
                success=finished,
                latency=times[-1] - arrival_s,
                output_tokens=len(times),
                ttft=times[0] - arrival_s,
                itl=[b - a for a, b in itertools.pairwise(times)],
                prompt_len=4,
                start_time=arrival_s,
            )
        )
    goodput = {"ttft": ttft_ms, "tpot": tpot_ms}
    theirs, _ = serve.calculate_metrics([], outputs, 7.0, None, [50, 99], goodput)
    ours = summarise_class("all", records, 7.0)
    # Where a request is within rounding of its objective, the two may round differently.
    close = any(
        abs(got - limit / 1000) < 1e-9
        for r in records
        for got, limit in ((measure(r).ttft_s, ttft_ms), (measure(r).mean_tpot_s, tpot_ms))
        if got is not None
    )
    if not close:
        assert ours.goodput_requests_per_s_by_mean == pytest.approx(theirs.request_goodput)
