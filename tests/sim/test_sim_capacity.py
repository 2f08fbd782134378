# SPDX-License-Identifier: Apache-2.0
"""Capacity: the bisection against known thresholds, intervals, early stops, and the driver."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import patience

from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.sim import windows
from vllm_slo.sim.capacity import best_of, best_of_family, find_capacities, sweep
from vllm_slo.sim.demand import binding, demand, start_rate
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, JobResult, Round, RoundResult, Stage
from vllm_slo.sim.questions import Evidence, Question, Watcher
from vllm_slo.sim.search import Threshold, find_threshold, smallest
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.statistics import Capacity, mean_interval, ratio
from vllm_slo.sim.systems import parse_system
from vllm_slo.sim.windows import Point, measure_window, search_window
from vllm_slo.sim.workers import Workers, run_tasks

STEP = StepTimeModel(((0.0, 0.0, 0.006), (3e-5, 0.0, 0.002)), 1e-8, pair_s=1e-11)
HARDWARE = Hardware("toy", 1, STEP, 300_000, frontend_s=0.01)
OURS, FCFS = parse_system("vllm-slo"), parse_system("fcfs-2048")


def find_capacity(attainment_at, target, *, windows, start, **search):
    """Capacity of anything that has an attainment at (rate, window)."""

    def threshold(window):
        return find_threshold(lambda rate: attainment_at(rate, window) >= target, start, **search)

    return Capacity.of(Question(target), map(threshold, windows))


# --- one window ----------------------------------------------------------------------------------


@given(
    st.floats(1e-2, 1e3), st.floats(1e-2, 1e3), st.sampled_from([0.01, 0.03, 0.1, 0.5, 1.0, 2.0])
)
def test_the_bisection_finds_a_known_threshold(true, start, precision):
    tried = Counter()

    def keeps(rate):
        tried[rate] += 1
        return rate <= true

    found = find_threshold(keeps, start, precision=precision, octaves=20)
    assert found.censored == ""
    assert found.kept <= true < found.missed
    assert found.missed <= found.kept * (1 + precision) * (1 + 1e-9) or found.missed == (
        pytest.approx(2 * found.kept)
    )
    assert max(tried.values()) == 1
    assert (found.lowest, found.highest) == (min(tried), max(tried))
    assert len(tried) <= abs(math.log2(true / start)) + 2 + math.log2(1 / math.log2(1 + precision)
                                                                      + 1) + 1  # fmt: skip


@given(st.floats(0.1, 10), st.integers(0, 6))
def test_what_is_never_kept_or_never_missed_is_censored(start, octaves):
    never = find_threshold(lambda rate: False, start, octaves=octaves)
    assert (never.kept, never.censored) == (None, "never keeps")
    assert never.lowest == pytest.approx(start / 2**octaves)
    always = find_threshold(lambda rate: True, start, octaves=octaves)
    assert (always.missed, always.censored) == (None, "never fails")
    assert always.kept == always.highest == pytest.approx(start * 2**octaves)


@given(st.integers(0, 10_000))
def test_an_attainment_that_wobbles_still_gives_a_crossing(seed):
    rng = np.random.default_rng(seed)
    verdicts: dict[float, bool] = {}

    def keeps(rate):
        return verdicts.setdefault(rate, bool(rng.random() < 1 / (1 + rate**2)))

    found = find_threshold(keeps, 1.0)
    if not found.censored:
        assert verdicts[found.kept] and not verdicts[found.missed]
        assert found.missed <= found.kept * 1.03


def test_searches_of_one_start_share_rates():
    tried: list[set[float]] = []
    for true in (7.0, 6.5):
        tried.append(set())
        find_threshold(lambda rate, t=true: tried[-1].add(rate) or rate <= t, 1.0)
    assert len(tried[0] & tried[1]) >= 5


@pytest.mark.parametrize(("start", "precision"), [(0, 0.1), (-1, 0.1), (math.inf, 0.1), (1, 0)])
def test_a_bad_start_or_precision_is_named(start, precision):
    with pytest.raises(SimulationError, match="start" if precision else "precision"):
        find_threshold(lambda rate: True, start, precision=precision)


# --- several windows -----------------------------------------------------------------------------


def test_the_interval_is_students():
    assert mean_interval([5.0]) == (5.0, None)
    mean, half = mean_interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    with pytest.raises(SimulationError):
        mean_interval([])


@pytest.mark.parametrize("count", [2, 3, 5, 31, 60])
def test_the_interval_covers_the_mean_in_95_of_100(count):
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(2000):
        mean, half = mean_interval(rng.normal(3.0, 1.0, count).tolist())
        hits += abs(mean - 3.0) <= half
    assert 0.93 < hits / 2000 < 0.97


def test_a_capacity_is_the_mean_of_its_windows():
    found = find_capacity(
        lambda rate, window: 1.0 if rate <= window else 0.5, 0.9, windows=[4, 5, 6], start=1.0,
        precision=0.01,
    )  # fmt: skip
    assert found.rate == pytest.approx(5, rel=0.01)
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3), rel=0.05)
    assert "+-" in found.text
    single = find_capacity(lambda rate, _: rate < 4, 0.9, windows=[0], start=1.0)
    assert single.half_width is None
    assert "+-" not in single.text


def test_equality_with_the_target_keeps_it():
    assert find_capacity(lambda rate, _: 0.9 if rate <= 3 else 0, 0.9, windows=[0], start=1.0).rate


def test_censored_windows_are_told_and_never_extrapolated():
    never = find_capacity(lambda rate, window: 0.5, 0.9, windows=[0, 1], start=1.0, octaves=3)
    assert never.rate is None
    assert never.text == "never reaches 90%, not even at 0.125"
    assert never.score == 0
    always = find_capacity(lambda rate, window: 1.0, 0.98, windows=[0, 1], start=1.0, octaves=3)
    assert always.text == "keeps 98% up to 8, the highest rate tried"
    assert always.score == 8
    some = find_capacity(
        lambda rate, window: float(rate <= window), 0.9, windows=[0, 2, 3], start=1.0, octaves=3
    )
    assert some.rate is None
    assert some.text == "never reaches 90% in 1 of 3 windows, not even at 0.125"


def made(*rates):
    question = Question(0.9)
    return Capacity.of(question, [Threshold(rate, rate * 1.02, rate, rate * 2) for rate in rates])


def test_a_ratio_compares_windows_pairwise():
    mean, low, high = ratio(made(2.0, 4.0, 8.0), made(1.0, 2.0, 4.0))
    assert (mean, low, high) == pytest.approx((2.0, 2.0, 2.0))
    assert ratio(made(3.0), made(2.0)) == pytest.approx((1.5, 1.5, 1.5))
    mean, low, high = ratio(made(2.0, 2.0), made(1.0, 4.0))
    assert low < 1.0 < high
    assert mean == pytest.approx(1.0)
    never = Capacity.of(Question(0.9), [Threshold(None, 1.0, 1.0, 1.0)])
    assert ratio(made(1.0), never) is None


# --- questions and evidence ----------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), min_size=1, max_size=30),
    st.sampled_from([0.1, 0.5, 0.9, 0.98, 1.0]),
    st.booleans(),
)
def test_evidence_answers_as_soon_as_it_is_certain_and_not_before(ended, target, every):
    question = Question(target, every)
    evidence = Evidence(Counter(name for name, _ in ended))

    def final(outcomes):
        names = {name for name, _ in ended}
        groups = [{n} for n in names] if every else [names]
        shares = []
        for group in groups:
            mine = [ok for name, ok in outcomes if name in group]
            shares.append(sum(mine) / len(mine) >= target - 1e-12)
        return all(shares)

    for seen in range(len(ended) + 1):
        best = final(ended[:seen] + [(name, True) for name, _ in ended[seen:]])
        worst = final(ended[:seen] + [(name, False) for name, _ in ended[seen:]])
        want = None if best != worst else best
        assert evidence.answer(question) is want
        if seen < len(ended):
            evidence.add(*ended[seen])
    assert evidence.answer(question) is final(ended)


@pytest.mark.parametrize("target", [0, -1, 1.01, float("nan")])
def test_a_target_is_a_share(target):
    with pytest.raises(SimulationError, match="attainment"):
        Question(target)


def finished(job, good):
    first_s = job.arrival_s + (0.5 if good else 5.0)
    return JobResult(job, (RoundResult(job.arrival_s, (first_s,), True),))


def make_jobs(count):
    one = Round(10, (Stage(1, 0.1),), 1.0)
    return [Job(str(i), "ab"[i % 2], float(i), (one,)) for i in range(count)]


def test_a_watcher_stops_when_all_questions_are_answered():
    jobs = make_jobs(25)  # 20 count: 2 misses are allowed at 0.9, none at 0.98
    watch = Watcher(jobs, 0.2, [Question(0.9), Question(0.98)])
    assert not watch(finished(jobs[0], good=False))  # warm-up
    assert not watch(finished(jobs[5], good=False))
    assert not watch(finished(jobs[5], good=False))  # told twice, counted once
    assert not watch(finished(jobs[6], good=False))
    assert watch(finished(jobs[7], good=False))
    assert watch.evidence.answer(Question(0.9)) is False
    never = Watcher(jobs, 0.2, [])
    assert not any(never(finished(job, good=False)) for job in jobs)


def test_no_counted_job_is_an_error():
    with pytest.raises(SimulationError, match="none are left"):
        Watcher([], 0.2, [])


# --- the driver, with a made-up simulator --------------------------------------------------------


def fake_simulate(jobs, system, hardware, conditions, *, watch=None):
    """Jobs miss as soon as the rate exceeds the system's token budget / 1000."""
    limit = system.token_budget / 1000 * conditions.replicas * (1 + 0.1 * conditions.seed)
    rate = len(jobs) / (jobs[-1].arrival_s - jobs[0].arrival_s + 1e-9)
    share = min(1.0, limit / rate * 0.9)
    results, aborted = [], False
    for place, job in enumerate(jobs):
        good = (place * 37 % len(jobs)) < share * len(jobs)
        one = job.rounds[0]
        step_s = min(one.tightest_tpot_s, 1.0) * (0.5 if good else 2.0)
        first_s = job.arrival_s + min(one.ttft_s, 99.0) * 0.9
        times = tuple(first_s + step_s * i for i in range(one.output_tokens))
        results.append(JobResult(job, (RoundResult(job.arrival_s, times, True),)))
        if watch is not None and watch(results[-1]):
            aborted = True
            break
    return SimpleNamespace(
        results=results, end_s=1.0, steps=1, gpus=1, scheduler_s=0.0, wall_s=0.0, aborted=aborted
    )


@pytest.fixture
def faked(monkeypatch):
    calls = []

    def simulate(jobs, system, *args, **more):
        calls.append((system.name, jobs[-1].arrival_s))
        return fake_simulate(jobs, system, *args, **more)

    monkeypatch.setattr(windows, "simulate", simulate)
    return calls


SETTING = Setting("chatbot", HARDWARE, jobs=100, arrivals="poisson")


def test_capacities_of_cases(faked):
    cases = [Case(SETTING, parse_system(f"fcfs-{n}")) for n in (2000, 4000)]
    questions = [Question(0.9), Question(0.45)]
    told = []
    found = find_capacities(
        cases, questions, [0, 1, 2], processes=1, progress=lambda *a: told.append(a)
    )
    assert told == [(done, 6) for done in range(7)]
    for case, (strict, loose) in zip(cases, found, strict=True):
        base = case.system.token_budget / 1000
        want = [base * (1 + 0.1 * seed) for seed in (0, 1, 2)]
        assert [w.kept for w in strict.windows] == pytest.approx(want, rel=0.1)
        assert loose.rate == pytest.approx(2 * strict.rate, rel=0.1)
    assert ratio(found[1][0], found[0][0])[0] == pytest.approx(2.0, rel=0.05)


def test_no_rate_of_a_window_is_simulated_twice(faked):
    search = search_window(
        Case(SETTING, FCFS), 0, [Question(0.9), Question(0.45), Question(0.9, True)], 1.0, 0.03
    )
    assert len(faked) == len(search.rates) == len(set(search.rates)) == len(set(faked))
    assert search.thresholds[0] == search.thresholds[2]


def test_a_question_does_not_change_the_answer_to_another(faked):
    case = Case(SETTING, FCFS)
    both = search_window(case, 0, [Question(0.45), Question(0.9)], 1.0, 0.03)
    alone = search_window(case, 0, [Question(0.9)], 1.0, 0.03)
    assert both.thresholds[1] == alone.thresholds[0]


def test_rates_are_per_gpu_and_windows_last_equally_long():
    two = replace(HARDWARE, gpus=2)
    setting = replace(SETTING, hardware=two)
    setting = replace(setting, conditions=replace(setting.conditions, replicas=3))
    one = Case(SETTING, FCFS).window(4.0, 0)
    many = Case(setting, parse_system("disaggregated-2:1")).window(4.0, 0)
    assert Case(setting, parse_system("disaggregated-2:1")).gpus == 18
    assert (len(one), len(many)) == (100, 900)
    assert one[-1].arrival_s == pytest.approx(100 / 4, rel=0.1)
    assert many[-1].arrival_s == pytest.approx(900 / (4 * 18), rel=0.1)
    assert len(Case(setting, FCFS, 7).window(4.0, 0)) == 7


def test_the_best_of_a_family_is_chosen_on_seeds_of_its_own(faked):
    family = [parse_system(f"fcfs-{n}") for n in (1000, 4000, 2000)]
    best = best_of_family(family, SETTING, Question(0.9), seeds=(3,), processes=1)
    assert best.token_budget == 4000
    assert best_of_family(family[:1], SETTING, Question(0.9), processes=1) == family[0]
    assert best_of(family, [made(2.0), made(2.0), made(1.0)]) == family[0]
    with pytest.raises(SimulationError, match="family"):
        best_of([], [])


def test_a_sweep_pools_its_windows(faked):
    [points] = sweep([Case(SETTING, FCFS)], [1.0, 8.0], [0, 1], with_load=True, processes=1)
    low, high = points
    assert (low.rate, low.summary.attainment, low.half_width) == (1.0, 1.0, 0.0)
    assert high.summary.jobs == 160
    assert high.summary.attainment == pytest.approx(np.mean(high.attainments))
    assert high.summary.goodput_jobs_per_s == pytest.approx(8 * high.summary.attainment)
    assert low.load is None
    assert high.load is not None


# --- processes -----------------------------------------------------------------------------------


def square(x):
    return x * x, os.environ.get("OMP_NUM_THREADS")


def fails(x):
    raise SimulationError(f"rate: {x} is wrong")


def dies(x):
    os._exit(1)


@pytest.mark.parametrize("processes", [1, 2])
def test_tasks_come_back_in_order(processes):
    told = []
    found = run_tasks(square, [(i,) for i in range(4)], processes, lambda *a: told.append(a))
    assert [value for value, _ in found] == [0, 1, 4, 9]
    assert told == [(i, 4) for i in range(5)]
    with pytest.raises(SimulationError, match="rate: 7 is wrong"):
        run_tasks(fails, [(7,), (7,)], processes)


def process_id():
    return os.getpid()


def test_workers_live_on_between_calls():
    with Workers(2) as workers:
        ids = {one for _ in range(3) for one in run_tasks(process_id, [()] * 2, workers)}
    assert 1 <= len(ids) <= 2
    assert os.getpid() not in ids


def test_a_dead_worker_is_one_clear_error():
    with pytest.raises(SimulationError, match="processes: a worker died"):
        run_tasks(dies, [(0,), (1,)], 2)


# --- demand by hand, and plans -------------------------------------------------------------------


def test_demand_by_hand():
    flat = Hardware("flat", 1, StepTimeModel(((0.0, 0.0, 0.005), (1e-4, 0.0, 0.0)), 0.0), 10_000)
    job = Job("j", "a", 0.0, (Round(1000, (Stage(100, 0.05),), 1.0),))
    need = demand([job, job], flat)
    assert need.prefill_s == pytest.approx(0.1)
    assert need.decode_s == pytest.approx(0.01)
    assert need.idle_s == pytest.approx(0.1)
    assert need.kv_token_s == pytest.approx(1000 * 0.1 + 1050 * 100 * 0.05)
    shares = need.shares(2.0, flat)
    assert shares["memory"] == pytest.approx(2 * 5350 / 10_000)
    assert need.limit(flat) == pytest.approx(10_000 / 5350)
    assert binding(shares) == "memory"
    assert binding({"prefill": 0.5, "decode": 0.4, "memory": 0.8}) == "prefill"
    assert binding({"prefill": 0.3, "decode": 0.4, "memory": 0.2}) == "decode"


@pytest.mark.parametrize("scenario", ["chatbot", "coder", "toolllm", "reasoning", "adaserve"])
def test_a_search_starts_somewhere_sensible(scenario):
    assert 0.001 < start_rate(replace(SETTING, scenario=scenario)) < 1000


@given(st.integers(1, 40), st.integers(1, 40), st.integers(-1, 45))
def test_the_smallest_number_that_keeps(true, most, guess):
    tried = Counter()

    def keeps(n):
        tried[n] += 1
        assert 1 <= n <= most
        return n >= true

    assert smallest(keeps, most, guess) == (true if true <= most else None)
    assert max(tried.values()) == 1
    if guess == true <= most:
        assert set(tried) <= {true - 1, true}
    assert len(tried) <= 2 * math.log2(most) + 2


# --- the real simulator --------------------------------------------------------------------------


def test_a_real_window():
    pytest.importorskip("vllm")
    case = Case(replace(SETTING, jobs=20), OURS)
    window = measure_window(case, 5.0, 0, True)
    point = Point.of(5.0, [window])
    assert point.summary.jobs == 16
    assert point.summary.unfinished == 0
    assert point.summary.promised_missed == 0
    assert point.summary.attainment > 0.9
    assert max(window.load.promised) > 0


@pytest.mark.slow
def test_workers_leave_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, time\n"
        "from vllm_slo.sim.workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    with Workers(2) as workers:\n"
        "        pids = {workers.pool().submit(os.getpid).result() for _ in range(2)}\n"
        "        print(*pids, flush=True)\n"
        "        time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    deadline_s = time.monotonic() + patience(10)
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
