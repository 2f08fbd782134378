# SPDX-License-Identifier: Apache-2.0
"""The numbers of ``vllm-slo whatif``, against brute force."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import whatif_reports
from hypothesis import given
from hypothesis import strategies as st
from test_sim_measure import worst_by_hand

from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.jobs import Job, JobResult, RequestDetails, Round, RoundResult, Stage
from vllm_slo.sim.statistics import Share, mean_interval
from vllm_slo.sim.whatif.numbers import FEWEST, STRETCHES, Column, Percentiles, compare
from vllm_slo.sim.whatif.outcomes import Asked, Measured, Outcome, as_served, as_simulated
from vllm_slo.slo.model import SLO
from vllm_slo.traces.request import Served, TraceRequest

WHOLE = Measured(0.0, 1e9)
CHAT = SLO(ttft_ms=500, tpot_ms=50)


# --- intervals -----------------------------------------------------------------------------------


def test_without_bursts_an_interval_is_wilsons() -> None:
    """Twenty stretches with the same share each: no fewer observations than requests."""
    share = Share.over([8] * 20, [10] * 20)
    n, p, t = 200, 0.8, 2.093
    middle = (p + t**2 / (2 * n)) / (1 + t**2 / n)
    half = t * math.sqrt(p * (1 - p) / n + t**2 / (4 * n**2)) / (1 + t**2 / n)
    assert (share.kept, share.of, share.value) == (160, 200, 0.8)
    assert (share.low, share.high) == pytest.approx((middle - half, middle + half))


def test_bursts_widen_an_interval_and_it_stays_within_0_and_1() -> None:
    even = Share.over([5] * 20, [10] * 20)
    bursts = Share.over([0, 10] * 10, [10] * 20)
    assert bursts.value == even.value
    assert bursts.high - bursts.low > 2 * (even.high - even.low)
    every, none = Share.over([10] * 20, [10] * 20), Share.over([0] * 20, [10] * 20)
    assert (every.high, none.low) == (1.0, 0.0)
    assert 0.96 < every.low < 1.0 and 0.0 < none.high < 0.04


@pytest.mark.parametrize("burst", [1, 25])
def test_an_interval_holds_the_true_share_about_19_times_of_20(burst: int) -> None:
    """Requests that share their fate in bursts of so many, as a queue makes them."""
    rng, held = np.random.default_rng(7), 0
    for _ in range(400):
        fates = np.repeat(rng.random(1000 // burst) < 0.9, burst)
        share = Share.over(fates.reshape(20, 50).sum(axis=1).tolist(), [50] * 20)
        held += share.low <= 0.9 <= share.high
    assert 0.90 <= held / 400 <= 0.99


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=30))
def test_a_difference_is_of_pairs(kept: list[tuple[int, int]]) -> None:
    mine, theirs = (Share.over(list(part), [9] * len(kept)) for part in zip(*kept, strict=True))
    mean, half = mean_interval([(a - b) / 9 for a, b in kept])
    assert mine.minus(theirs) == pytest.approx((mean, half))


def test_a_share_needs_stretches_and_requests() -> None:
    for kept, of in (([1], [1]), ([0, 0], [0, 0]), ([1, 1], [1])):
        with pytest.raises(SimulationError, match="share"):
            Share.over(kept, of)


# --- outcomes ------------------------------------------------------------------------------------


def served(end="completed", ttft_s=0.4, tpot_s=0.04, e2e_s=2.0, slo=CHAT, **more) -> Outcome:
    own = {name: more.pop(name) for name in ("ttft_ms", "tpot_ms", "e2e_ms") if name in more}
    tokens = more.pop("output_tokens", 41)
    request = TraceRequest(
        10.0, 100, tokens, "chat", **own, served=Served(end, None, ttft_s, tpot_s, e2e_s, **more)
    )
    return as_served(Asked(request, "chat", slo), WHOLE)


@pytest.mark.parametrize(
    ("given", "attained"),
    [
        ({}, True),
        ({"ttft_s": 0.5}, True),
        ({"ttft_s": 0.51}, False),
        ({"tpot_s": 0.051}, False),
        ({"tpot_s": 0.051, "output_tokens": 1}, True),
        ({"ttft_s": None}, None),
        ({"tpot_s": None}, None),
        ({"tpot_s": None, "ttft_s": 0.51}, False),
        ({"e2e_s": None}, True),
        ({"slo": replace(CHAT, e2e_ms=1999)}, False),
        ({"slo": replace(CHAT, e2e_ms=2000)}, True),
        ({"slo": None}, None),
        ({"slo": SLO(session_id="a", session_e2e_ms=100)}, None),
        ({"end": "declined", "ttft_s": None, "tpot_s": None}, False),
        ({"end": "failed"}, False),
        # The server's own verdict counts where it had the same objectives, and only there.
        ({"ttft_ms": 500, "tpot_ms": 50, "attained": False}, False),
        ({"ttft_ms": 500, "tpot_ms": 50, "attained": True, "tpot_s": 0.06}, True),
        ({"ttft_ms": 501, "tpot_ms": 50, "attained": False}, True),
        ({"ttft_ms": 500, "tpot_ms": 50, "e2e_ms": 9, "attained": False}, True),
    ],
)
def test_a_recorded_outcome_is_judged_by_the_new_objectives(given, attained) -> None:
    assert served(**given).attained is attained


def test_a_recorded_outcome_keeps_what_was_recorded() -> None:
    got = served(late_kept=True)
    assert (got.end, got.ttft_s, got.tpot_s, got.e2e_s) == ("completed", 0.4, 0.04, 2.0)
    assert (got.promised, got.late_kept) == (None, True)
    declined = TraceRequest(0.0, 1, 50, served=Served("declined", "none"))
    assert as_served(Asked(declined, "chat", CHAT), WHOLE).promised is False
    broken = TraceRequest(0.0, 1, 50, served=Served("failed", "late"))
    assert as_served(Asked(broken, "chat", CHAT), WHOLE).late_kept is False
    nothing = as_served(Asked(TraceRequest(0.0, 1, 50), "chat", CHAT), WHOLE)
    assert nothing == Outcome("completed", None, None, None, None, None, None, 0.0)


@pytest.mark.parametrize(
    ("measured", "tokens"),
    [
        ((0.0, 100.0), 40),
        ((0.0, 10.4), 0),
        ((0.0, 11.2), 20),
        ((11.2, 11.6), 10),
        ((11.6, 100.0), 10),
        ((12.0, 100.0), 0),
    ],
)
def test_recorded_tokens_come_evenly_from_the_first_to_the_end(measured, tokens) -> None:
    request = TraceRequest(10.0, 1, 40, served=Served(ttft_s=0.4, e2e_s=2.0))
    got = as_served(Asked(request, "chat", CHAT), Measured(*measured))
    assert got.tokens == pytest.approx(tokens)


def test_an_answer_whose_length_was_estimated_has_no_recorded_tokens() -> None:
    request = TraceRequest(10.0, 1, 40, served=Served("declined", ttft_s=None, e2e_s=0.1))
    assert as_served(Asked(request, "chat", CHAT), WHOLE).tokens == 0


def result(rng: random.Random, number: int, slo: SLO | None) -> JobResult:
    """One simulated request of a random fate."""

    def seconds(bound_ms):
        return math.inf if bound_ms is None else bound_ms / 1e3

    tokens, at_s = rng.randint(1, 60), number * 0.25
    stage = Stage(tokens, seconds(slo and slo.tpot_ms))
    asked = Round(
        50, (stage,), seconds(slo and slo.ttft_ms), details=RequestDetails(slo, number, "chat")
    )
    fate = rng.random()
    got = tokens if fate < 0.8 else 0 if fate < 0.9 else rng.randint(1, tokens)
    first_s = at_s + rng.uniform(0.1, 0.8)
    gaps = [0.0, *(rng.choice([0.01, 0.03, 0.2]) for _ in range(got - 1))]
    times = tuple((first_s + np.cumsum(gaps[:got])).tolist())
    round_result = RoundResult(
        at_s, times, fate < 0.8, rng.random() < 0.5, late_kept=rng.choice([None, True, False])
    )
    return JobResult(Job(str(number), "chat", at_s, (asked,)), (round_result,))


@given(st.integers(0, 10_000))
def test_a_simulated_outcome_against_its_tokens(seed: int) -> None:
    rng = random.Random(seed)
    slo = rng.choice([None, CHAT, SLO(e2e_ms=1000), SLO(ttft_ms=300), SLO(tpot_ms=40, e2e_ms=900)])
    job = result(rng, seed, slo)
    measured = Measured(job.job.arrival_s + 0.2, job.job.arrival_s + 0.9)
    (got,), outcome = job.rounds, as_simulated(job, measured)
    times, at_s = got.token_times_s, job.job.arrival_s
    ttft = times[0] - at_s if times else None
    tpot = worst_by_hand(np.diff(times).tolist())
    e2e = times[-1] - at_s if got.finished else None
    assert outcome.ttft_s == ttft and outcome.e2e_s == e2e
    assert outcome.tpot_s == (None if tpot is None else pytest.approx(tpot))
    if got.finished:
        assert outcome.end == "completed"
    else:
        assert outcome.end == ("failed" if times else "declined")
    margins = [
        (bound, time_s)
        for bound, time_s in (
            (slo and slo.ttft_ms, ttft), (slo and slo.tpot_ms, tpot), (slo and slo.e2e_ms, e2e),
        )
        if bound is not None and time_s is not None
    ]  # fmt: skip
    if all(abs(bound / 1e3 - time_s) > 1e-6 for bound, time_s in margins):
        kept = got.finished and all(time_s <= bound / 1e3 for bound, time_s in margins)
        assert outcome.attained is (None if slo is None else kept)
    assert outcome.tokens == sum(measured.from_s < t <= measured.to_s for t in times)
    assert (outcome.promised, outcome.late_kept) == (got.promised, got.late_kept)


# --- the comparison ------------------------------------------------------------------------------


def test_every_number_of_every_class_against_brute_force() -> None:
    requests = whatif_reports.asked(count=330)
    columns = [whatif_reports.column(requests, each, 3) for each in whatif_reports.SYSTEMS]
    # One outcome that nobody can judge, one that was declined, one that failed.
    outcomes = list(columns[0].outcomes)
    outcomes[0] = replace(outcomes[0], attained=None, tpot_s=None)
    outcomes[1] = Outcome("declined", False, None, None, None, None, None, 0.0)
    outcomes[4] = Outcome("failed", False, 0.3, None, None, None, None, 3.0)
    columns[0] = replace(columns[0], outcomes=tuple(outcomes))
    measured = Measured(requests[0].request.at_s, requests[-1].request.at_s)
    numbers = compare(requests, columns, measured, ["code", "unused", "chat"])
    assert [row.name for row in numbers.classes] == ["code", "chat", "batch"]
    length_s = measured.to_s - measured.from_s
    for row in (numbers.all, *numbers.classes):
        places = [i for i, each in enumerate(requests) if row.name in ("", each.slo_class)]
        assert row.requests == len(places)
        assert row.requests_per_s == pytest.approx(len(places) / length_s)
        assert row.prompt_tokens == np.median([requests[i].request.prompt_tokens for i in places])
        assert row.output_tokens == np.median([requests[i].request.output_tokens for i in places])
        for column, cell in zip(columns, row.cells, strict=True):
            got = [column.outcomes[i] for i in places]
            verdicts = [o.attained for o in got if o.attained is not None]
            if cell.attained is None:
                assert not verdicts
            else:
                asking = sum(requests[i].slo is not None for i in places)
                assert (cell.attained.kept, cell.attained.of) == (sum(verdicts), len(verdicts))
                assert cell.attained.unjudged == asking - len(verdicts)
                assert cell.attained_per_s == pytest.approx(sum(verdicts) / length_s)
                low, high = cell.attained.low, cell.attained.high
                assert low is not None and high is not None
                assert 0 <= low <= cell.attained.share <= high <= 1
            for field in ("ttft", "tpot", "e2e"):
                times = [t for o in got if (t := getattr(o, f"{field}_s")) is not None]
                want = Percentiles(len(times), *np.percentile(times, [50, 95, 99]).tolist())
                assert getattr(cell, field) == want
            assert cell.declined == sum(o.end == "declined" for o in got)
            assert cell.failed == sum(o.end == "failed" for o in got)
            promised = [o for o in got if o.promised]
            late = [o for o in got if o.late_kept is not None]
            if column.kind == "ours" and row.name != "batch":
                assert (cell.promised, cell.late) == (len(promised), len(late))
                assert cell.promised_kept == sum(o.attained is True for o in promised)
                assert cell.late_kept == sum(o.late_kept is True for o in late)
            elif column.kind != "ours":
                assert (cell.promised, cell.late) == (None, None)
            assert cell.tokens_per_s == pytest.approx(sum(o.tokens for o in got) / length_s)
        assert [gain.over for gain in row.gains] == (
            [] if row.name == "batch" else ["served", "fcfs-2048"]
        )
        for gain, cell in zip(row.gains, row.cells, strict=False):
            ours = row.cells[-1].attained
            assert ours is not None and cell.attained is not None
            assert gain.share == pytest.approx(ours.share - cell.attained.share)
    assert numbers.batch is not None
    batch = numbers.classes[-1]
    for part, cell in zip(numbers.batch, batch.cells, strict=True):
        assert (part.tokens_per_s, part.e2e) == (pytest.approx(cell.tokens_per_s), cell.e2e)


def test_few_requests_have_no_interval() -> None:
    for count, enough in ((FEWEST - 1, False), (FEWEST, True)):
        numbers = whatif_reports.report({"chat": CHAT}, count=count).numbers
        attained, (gain, _) = numbers.all.cells[0].attained, numbers.all.gains
        assert attained is not None
        assert (attained.low is not None) is enough
        assert (gain.half_width is not None) is enough
    assert FEWEST >= STRETCHES


def test_objectives_that_differ_within_a_class_are_a_range() -> None:
    requests = whatif_reports.asked({"chat": CHAT}, count=50)
    requests[7] = replace(requests[7], slo=SLO(ttft_ms=900, e2e_ms=4000))
    columns = [whatif_reports.column(requests, whatif_reports.SYSTEMS[2], 0)]
    row = compare(requests, columns, Measured(0.0, 20.0), []).all
    assert row.objectives.ttft_ms == (500, 900)
    assert row.objectives.tpot_ms == (50, 50)
    assert row.objectives.e2e_ms == (4000, 4000)


def test_no_request_is_refused() -> None:
    with pytest.raises(SimulationError, match="no request is left"):
        compare([], [Column("vllm-slo", "vllm-slo", "ours", (), ())], WHOLE, [])
