# SPDX-License-Identifier: Apache-2.0
"""Measures of simulated jobs, against brute force."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.jobs import Job, JobResult, Round, RoundResult, Stage
from vllm_slo.sim.measure import (
    counted,
    job_attained,
    load_over_time,
    measure_counted,
    measure_job,
    round_kept,
    stage_tpots_s,
    summarise,
)


def one_round(stages=((3, 0.1),), ttft_s=1.0, prompt=10):
    return Round(prompt, tuple(Stage(n, tpot_s) for n, tpot_s in stages), ttft_s)


def result(rounds, got, application="a", arrival_s=0.0, name="j"):
    return JobResult(Job(name, application, arrival_s, tuple(rounds)), tuple(got))


def steady(n, gap_s, first_s=0.5, sent_s=0.0, **more):
    times = tuple(sent_s + first_s + gap_s * i for i in range(n))
    return RoundResult(sent_s, times, True, **more)


# --- stages --------------------------------------------------------------------------------------


def worst_by_hand(gaps_s):
    """Windows of ten gaps, a shorter tail joining the last full window."""
    windows = [list(gaps_s[i : i + 10]) for i in range(0, len(gaps_s), 10)]
    if len(windows) > 1 and len(windows[-1]) < 10:
        tail = windows.pop()
        windows[-1] += tail
    return max((sum(w) / len(w) for w in windows), default=None)


@given(
    st.lists(st.tuples(st.integers(1, 35), st.sampled_from([0.02, 0.05, 0.1])), min_size=1,
             max_size=4),
    st.integers(0, 10_000),
)  # fmt: skip
def test_every_gap_belongs_to_the_stage_of_the_token_that_ends_it(stages, seed):
    rng = np.random.default_rng(seed)
    asked = one_round(stages, ttft_s=10.0)
    gaps = rng.choice([0.0, 0.01, 0.05, 0.0999, 0.2], asked.output_tokens - 1)
    times = tuple((0.5 + np.concatenate([[0.0], np.cumsum(gaps)])).tolist())
    # Token i's gap is the one before it; the first token of the answer has none.
    by_token = [None, *gaps.tolist()]
    want, start = [], 0
    for n, _ in stages:
        mine = [gap for gap in by_token[start : start + n] if gap is not None]
        want.append(worst_by_hand(mine))
        start += n
    found = stage_tpots_s(asked, times)
    assert [f is None for f in found] == [w is None for w in want]
    assert [f for f in found if f is not None] == pytest.approx([w for w in want if w is not None])
    margins = [w - s.tpot_s for w, s in zip(want, asked.stages, strict=True) if w is not None]
    if all(abs(margin) > 1e-6 for margin in margins):
        assert round_kept(asked, RoundResult(0.0, times, True)) == all(m < 0 for m in margins)


def test_a_stage_of_one_first_token_cannot_miss_its_tpot():
    asked = one_round(((1, 0.0), (2, 0.1)))
    assert stage_tpots_s(asked, (0.5, 0.6, 0.7)) == [None, pytest.approx(0.1)]
    assert round_kept(asked, RoundResult(0.0, (0.5, 0.6, 0.7), True))


def test_the_gap_between_stages_counts_for_the_later_one():
    slow_change = RoundResult(0.0, (0.5, 0.51, 0.71, 0.72), True)
    assert round_kept(one_round(((2, 0.02), (2, 0.2))), slow_change)
    assert not round_kept(one_round(((2, 0.2), (2, 0.02))), slow_change)


def test_rounding_does_not_miss():
    asked = one_round(((3, 0.1),), ttft_s=0.3)
    times = (0.1 + 0.2, 0.1 + 0.2 + 0.1, 0.1 + 0.2 + 0.1 + 0.1)  # each a little over in floats
    assert times[0] > 0.3
    assert round_kept(asked, RoundResult(0.0, times, True))
    assert not round_kept(asked, RoundResult(0.0, (0.3 + 1e-6, 0.4, 0.5), True))


def test_ttft_counts_from_when_the_client_sent_it():
    asked = one_round(((1, 1.0),), ttft_s=0.5)
    assert round_kept(asked, RoundResult(7.0, (7.5,), True))
    assert not round_kept(asked, RoundResult(7.0, (7.6,), True))


def test_a_finished_answer_of_another_length_is_refused():
    with pytest.raises(SimulationError, match="2 tokens came of a finished answer of 3"):
        round_kept(one_round(), RoundResult(0.0, (0.1, 0.2), True))


# --- jobs ----------------------------------------------------------------------------------------


def test_a_job_needs_every_round():
    rounds = [one_round(), one_round()]
    good = steady(3, 0.05)
    late = steady(3, 0.05, first_s=2.0, sent_s=3.0)
    assert job_attained(result(rounds, [good, steady(3, 0.05, sent_s=3.0)]))
    assert not job_attained(result(rounds, [good, late]))
    assert not job_attained(result(rounds, [good]))
    cut = RoundResult(3.0, (3.1,), False)
    assert not job_attained(result(rounds, [good, cut]))
    measured = measure_job(result(rounds, [good, cut]))
    assert (measured.finished, measured.latency_s, measured.output_tokens) == (False, None, 4)


def test_a_job_measured():
    rounds = [one_round(prompt=7), one_round()]
    refused = steady(3, 0.2, sent_s=3.0, promised=False, reason="memory")
    got = [steady(3, 0.05, promised=True, reason="seats"), refused]
    m = measure_job(result(rounds, got, arrival_s=0.0))
    assert (m.tokens, m.output_tokens, m.attained, m.finished) == (23, 6, False, True)
    assert (m.promised, m.broken, m.reason) == (True, False, "memory")
    assert summarise([m, m], 1.0).reasons == {"memory": 2}
    assert m.latency_s == pytest.approx(3.9)
    assert m.ttfts_s == pytest.approx((0.5, 0.5))
    assert m.tpots_s == pytest.approx((0.05, 0.2))


@pytest.mark.parametrize(
    ("promises", "promised", "broken"),
    [
        ((None, None), None, False),
        ((False, False), False, False),
        ((True, True), True, True),
        ((False, True), True, True),
        ((True, False), True, False),
    ],
)
def test_a_promise_is_broken_by_the_round_it_was_given_for(promises, promised, broken):
    got = [steady(3, gap, promised=p) for p, gap in zip(promises, (0.05, 0.2), strict=True)]
    m = measure_job(result([one_round(), one_round()], got))
    assert (m.promised, m.broken) == (promised, broken)


# --- windows -------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.floats(0, 0.95))
def test_the_warm_up_drops_the_first_by_arrival(count, warmup):
    rng = np.random.default_rng(count)
    at = rng.random(count)
    jobs = [Job(str(i), "a", float(t), (one_round(),)) for i, t in enumerate(at)]
    kept = counted(jobs, warmup)
    assert len(kept) == count - int(warmup * count + 1e-9)
    dropped = {job.job_id for job in jobs} - {job.job_id for job in kept}
    latest = max((job.arrival_s for job in jobs if job.job_id in dropped), default=-1.0)
    assert all(latest <= job.arrival_s for job in kept)
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(kept))


@pytest.mark.parametrize("warmup", [-0.1, 1.0, float("nan")])
def test_a_wrong_warm_up_is_named(warmup):
    with pytest.raises(SimulationError, match="warmup"):
        counted([], warmup)


def test_ten_jobs_and_a_fifth_of_warm_up():
    results = [
        result([one_round()], [steady(3, 0.05, sent_s=i)], arrival_s=float(i), name=str(i))
        for i in reversed(range(10))
    ]
    assert len(measure_counted(results)) == 8
    with pytest.raises(SimulationError, match="two jobs"):
        measure_counted([results[0], results[0]])


def test_a_summary():
    good = measure_job(result([one_round()], [steady(3, 0.05, promised=True)], "x"))
    bad = measure_job(result([one_round(prompt=100)], [steady(3, 0.2, promised=True)], "y"))
    cut = measure_job(result([one_round()], [RoundResult(0.0, (), False, False)], "y"))
    s = summarise([good, good, bad, cut], 2.0)
    assert (s.jobs, s.attainment, s.by_application) == (4, 0.5, {"x": 1.0, "y": 0.0})
    assert s.smallest == 0.0
    assert s.token_attainment == pytest.approx(26 / (13 + 13 + 103 + 13))
    assert (s.promised, s.promised_missed, s.unfinished) == (3, 1, 1)
    assert s.missed_latency_p99_s == pytest.approx(0.9)
    assert (s.goodput_jobs_per_s, s.goodput_tokens_per_s) == (1.0, 3.0)
    assert (s.ttft_p50_s, s.tpot_p50_s) == pytest.approx((0.5, 0.05))


def test_measures_that_do_not_exist():
    cut = measure_job(result([one_round()], [RoundResult(0.0, (), False)]))
    s = summarise([cut], 1.0)
    assert (s.ttft_p99_s, s.tpot_p99_s, s.missed_latency_p99_s, s.promised) == (None,) * 4
    with pytest.raises(SimulationError, match="none are left"):
        summarise([], 1.0)
    with pytest.raises(SimulationError, match="window_s"):
        summarise([cut], 0.0)


# --- load ----------------------------------------------------------------------------------------


def test_load_over_time_by_hand():
    rng = np.random.default_rng(0)
    results = []
    for i in range(30):
        sent_s, length_s = rng.random(2)
        got = RoundResult(sent_s, (sent_s + length_s,), True, bool(i % 2))
        results.append(result([one_round(((1, 1.0),))], [got], name=str(i)))
    load = load_over_time(results, points=50)
    assert load.promises
    for at_s, promised, plain in zip(load.times_s, load.promised, load.best_effort, strict=True):
        present = [
            r.rounds[0].promised
            for r in results
            if r.rounds[0].sent_s <= at_s < r.rounds[0].token_times_s[-1]
        ]
        assert (promised, plain) == (present.count(True), present.count(False))


def test_load_without_promises_and_of_nothing():
    load = load_over_time([result([one_round()], [steady(3, 0.1)])], points=3)
    assert not load.promises
    assert load.promised == (0, 0, 0)
    assert load.best_effort == (1, 1, 0)
    assert load_over_time([], points=2).best_effort == (0, 0)
