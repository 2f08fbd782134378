# SPDX-License-Identifier: Apache-2.0
"""The bound on attainment: cases by hand, a search over schedules, and the simulated systems."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.step_time.model import StepTimeModel, chunk_pairs
from vllm_slo.sim.capacity import find_capacities
from vllm_slo.sim.ceiling import ceiling, find_ceilings, may_keep
from vllm_slo.sim.ceiling_work import latest_after_first_s, least_step_time, works_of
from vllm_slo.sim.cluster import simulate
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import Hardware, load_hardware
from vllm_slo.sim.jobs import Job, JobResult, Round, RoundResult, Stage
from vllm_slo.sim.measure import job_attained, measure_counted, round_kept, stage_tpots_s
from vllm_slo.sim.questions import Question
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.systems import parse_system
from vllm_slo.sim.windows import measure_window

STEADY = StepTimeModel(((0.0, 0.0, 0.1), (0.01, 0.0, 0.0)))
"""A step of up to ten tokens takes 0.1 s, and 10 ms per token beyond."""
TOY = Hardware("toy", 1, STEADY, 16_000)


def job(name, arrival_s, *rounds, application="a"):
    return Job(name, application, arrival_s, tuple(rounds))


def one_round(prompt, answer=1, ttft_s=1.0, tpot_s=1.0, wait_s=0.0):
    return Round(prompt, (Stage(answer, tpot_s),), ttft_s, wait_s)


def most(jobs, hardware=TOY, **more):
    return ceiling(jobs, hardware, warmup=0.0, **more)


# --- by hand -------------------------------------------------------------------------------------


def test_a_lone_job_needs_its_prompt_in_time():
    assert most([job("a", 0.0, one_round(20, ttft_s=0.2))]).jobs == pytest.approx(1.0)
    late = most([job("a", 0.0, one_round(20, ttft_s=0.15))])
    assert late.jobs == pytest.approx(0.75)  # 15 of 20 tokens
    assert (late.most, late.share) == (0, 0.0)


def test_a_lone_job_needs_a_step_per_token():
    # Five steps of 0.1 s by 0.1 + 4 * tpot.
    assert most([job("a", 0.0, one_round(1, 5, 0.1, 0.1))]).most == 1
    assert most([job("a", 0.0, one_round(1, 5, 0.1, 0.05))]).most == 0


def test_steps_for_one_job_are_paid_beside_the_work_of_another():
    # By 1.1 s, one job takes 11 steps of 50 ms and 11 tokens of 10 ms, the other 60 tokens.
    model = StepTimeModel(((0.0, 0.0, 0.1), (0.01, 0.0, 0.05)))
    both = [job("a", 0.0, one_round(1, 11, 0.1, 0.1)), job("b", 0.0, one_round(60, ttft_s=1.1))]
    assert most(both, replace(TOY, step_time=model)).jobs == pytest.approx(1 + 0.5 / 0.66)


def test_two_jobs_that_want_one_slot():
    both = [job(name, 0.0, one_round(20, ttft_s=0.3)) for name in "ab"]
    assert most(both).jobs == pytest.approx(1.5)
    assert most(both).most == 1
    assert most([replace(both[0], arrival_s=0.2), both[1]]).most == 2
    assert most(both, engines=2).most == 2


def test_memory_limits_what_a_step_reads():
    # A step holds 32 tokens. A job needs 15 for its prompt, 15 read and 1 computed for its answer.
    memory = Hardware("small", 1, StepTimeModel(((0.0, 0.0, 0.1), (0.0, 0.0, 0.0))), 32)
    four = [job(name, 0.0, one_round(15, 2, 0.2, 0.1)) for name in "abcd"]
    assert most(four, memory).jobs == pytest.approx(3 * 32 / 31, rel=1e-6)
    assert most(four, replace(memory, kv_tokens=1600)).most == 4


def test_a_step_has_a_largest_number_of_requests():
    narrow = replace(TOY, max_num_seqs=2)
    four = [job(name, 0.0, one_round(1, 11, 0.1, 0.1)) for name in "abcd"]
    assert most(four).most == 4
    # Eleven steps give two requests a token each; a job needs ten.
    assert most(four, narrow).jobs == pytest.approx(2.2)


def test_the_round_after_a_tool_wants_its_own_slot():
    # The second round can only run from 1.1 to 1.2 s, where another job has to run, too.
    tools = job("a", 0.0, one_round(10, ttft_s=0.1), one_round(10, ttft_s=0.1, wait_s=1.0))
    other = job("b", 1.1, one_round(10, ttft_s=0.1))
    assert most([tools, other]).jobs == pytest.approx(1.0, abs=1e-5)
    assert most([tools, replace(other, arrival_s=1.3)]).most == 2
    assert most([tools, replace(other, arrival_s=0.9)]).most == 2


def test_times_and_work_of_a_tool_loop():
    hardware = replace(TOY, frontend_s=0.01)
    asked = job("a", 5.0, one_round(20, 3, 0.5, 0.3), one_round(10, 2, 0.4, 0.2, wait_s=2.0))
    (work,) = works_of(asked, hardware, least_step_time(STEADY))
    assert work.first_prompts.earliest_s == pytest.approx([5.01])
    assert work.first_prompts.latest_s == pytest.approx([5.5])
    # 20 tokens take 0.2 s, each of two answer tokens 0.1 s.
    assert work.later_prompts.earliest_s == pytest.approx([5.01 + 0.4 + 2.0 + 0.01])
    assert work.later_prompts.latest_s == pytest.approx([5.5 + 0.6 + 2.0 + 0.4])
    assert work.answers.earliest_s == pytest.approx([5.21, 5.31, 7.52])
    assert work.answers.latest_s == pytest.approx([6.1, 6.1, 8.7])
    assert work.answers.context.tolist() == [20, 21, 33]
    assert (work.steps, work.starts_s) == (5, 5.01)
    assert work.ends_s == pytest.approx(8.7)


def test_jobs_of_the_warm_up_cost_nothing():
    jobs = [job(str(n), n * 1e-6, one_round(20, ttft_s=0.2)) for n in range(5)]
    assert most(jobs).most == 1
    last = ceiling(jobs, TOY, warmup=0.8)
    assert (last.most, last.counted) == (1, 1)


def test_without_objectives_every_job_attains():
    free = one_round(20, 30, math.inf, math.inf)
    assert most([job(str(n), 0.0, free) for n in range(9)]).most == 9


def test_each_application_may_have_to_keep_the_share():
    slow = [job(f"s{n}", 0.0, one_round(30, ttft_s=0.3), application="slow") for n in range(2)]
    fast = [job(f"f{n}", 0.0, one_round(1, ttft_s=0.3), application="fast") for n in range(8)]
    assert may_keep(slow + fast, TOY, Question(0.8), warmup=0.0)
    assert not may_keep(slow + fast, TOY, Question(0.9), warmup=0.0)
    assert not may_keep(slow + fast, TOY, Question(0.6, every=True), warmup=0.0)
    assert may_keep(fast, TOY, Question(1.0, every=True), warmup=0.0)


def test_an_even_share_drops_no_heavy_jobs():
    # All of it takes 8 * 0.1 + 0.6 s until 1.2 s: the free bound drops 1/3 of the heavy job, the
    # even one 1/7 of each.
    light = [job(f"l{n}", 0.0, one_round(10, ttft_s=1.2)) for n in range(8)]
    both = [*light, job("heavy", 0.0, one_round(60, ttft_s=1.2))]
    for target, free, even in ((0.77, True, True), (0.88, True, False), (0.97, False, False)):
        question = Question(target)
        assert may_keep(both, TOY, question, warmup=0.0) is free, target
        assert may_keep(both, TOY, question, warmup=0.0, even=True) is even, target


def test_no_job_counts():
    with pytest.raises(SimulationError, match="none are left"):
        ceiling([], TOY)


def test_without_scipy_the_fix_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(SimulationError, match="vllm-slo\\[bench\\]"):
        most([job("a", 0.0, one_round(20))])


# --- due times -----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 35), st.sampled_from([0.02, 0.05, 0.1])), min_size=1,
             max_size=3),
    st.data(),
)  # fmt: skip
def test_a_round_attains_up_to_its_latest_times_and_no_longer(stages, data):
    asked = Round(10, tuple(Stage(*stage) for stage in stages), 0.5)
    latest = 0.5 + latest_after_first_s(asked) * (1 - 1e-9)
    assert round_kept(asked, RoundResult(0.0, tuple(latest.tolist()), True))
    place = data.draw(st.integers(0, len(latest) - 1))
    later = latest.copy()
    later[place:] = np.maximum(later[place:], latest[place] + 1e-4)
    assert not round_kept(asked, RoundResult(0.0, tuple(later.tolist()), True))


# --- a step costs at least so much ---------------------------------------------------------------


@given(
    st.tuples(*[st.floats(0, 0.02) for _ in range(2)]),
    st.tuples(*[st.floats(0, 1e-3) for _ in range(2)]),
    st.floats(0, 1e-3), st.floats(0, 1e-6), st.integers(0, 400), st.integers(1, 40),
    st.integers(0, 300), st.data(),
)  # fmt: skip
def test_computing_again_saves_nothing(bases, slopes, kv_s, pair_s, context, new, others, data):
    """One request of a step computes a part of its context again; the rest of the step is given."""
    flat, steep = ((slope, 0.0, base) for slope, base in zip(slopes, bases, strict=True))
    model = StepTimeModel((flat, steep), kv_s, pair_s=pair_s)
    again = data.draw(st.integers(0, context))
    real = model.predict_s(
        new + again + others, context - again, 0, chunk_pairs(new + again, context - again)
    )
    least = least_step_time(model).predict_s(new + others, context, 0, chunk_pairs(new, context))
    assert least <= real * (1 + 1e-9) + 1e-12


# --- a search over schedules ---------------------------------------------------------------------


class Player:
    """A request loop of one job, as an engine would see it. It knows nothing of the program."""

    def __init__(self, asked):
        self.job, self.place, self.sent_s = asked, 0, asked.arrival_s
        self.text = asked.rounds[0].prompt_tokens
        self.computed, self.times, self.results = 0, [], []

    @property
    def ended(self):
        return self.place == len(self.job.rounds)

    def took(self, tokens, now_s):
        self.computed += tokens
        if self.computed < self.text:
            return
        asked = self.job.rounds[self.place]
        self.text += 1
        self.times.append(now_s)
        if len(self.times) == asked.output_tokens:
            self.results.append(RoundResult(self.sent_s, tuple(self.times), True))
            self.place, self.times = self.place + 1, []
            if not self.ended:
                following = self.job.rounds[self.place]
                self.sent_s = now_s + following.wait_s
                self.text += following.prompt_tokens


def play(jobs, order, hardware, budget, decodes_first):
    """Results of ``jobs`` in an order of importance. The last pays with its memory."""
    players = [Player(jobs[place]) for place in order]
    now_s = 0.0
    while left := [p for p in players if not p.ended]:
        ready = [p for p in left if p.sent_s + hardware.frontend_s <= now_s + 1e-12]
        if not ready:
            now_s = min(p.sent_s for p in left) + hardware.frontend_s
            continue
        if decodes_first:
            ready.sort(key=lambda p: p.text - p.computed > 1)
        chosen, room = [], budget
        for player in ready:
            new = min(player.text - player.computed, room)
            held = sum(p.computed for p in players) + sum(n for _, n in chosen)
            for victim in reversed(players):  # drops the KV of the least important
                if held + new <= hardware.kv_tokens:
                    break
                if victim is not player and all(victim is not p for p, _ in chosen):
                    held -= victim.computed
                    victim.computed = 0
            new = min(player.text - player.computed, room, hardware.kv_tokens - held)
            if new > 0 and len(chosen) < hardware.max_num_seqs:
                chosen.append((player, new))
                room -= new
        now_s += hardware.step_time.predict_s(
            sum(n for _, n in chosen),
            sum(p.computed for p, _ in chosen),
            0,
            sum(chunk_pairs(n, p.computed) for p, n in chosen),
        )
        for player, new in chosen:
            player.took(new, now_s)
        for player in players:
            if player.ended:
                player.computed = 0
    return [JobResult(p.job, tuple(p.results)) for p in players]


def best_schedule(jobs, hardware):
    """The most that any choice of jobs, order, budget and kind of step attains."""
    best = 0
    for size in range(1, len(jobs) + 1):
        for order in (o for c in combinations(range(len(jobs)), size) for o in permutations(c)):
            for budget in (5, 16, 1000):
                for decodes_first in (True, False):
                    results = play(jobs, order, hardware, budget, decodes_first)
                    best = max(best, sum(map(job_attained, results)))
                    if best == size == len(jobs):
                        return best
        if best < size:  # with more jobs no more attain
            return best
    return best


def tiny_case(seed):
    """Four jobs that come almost at once, with objectives around what an engine can just keep."""
    rng = np.random.default_rng(seed)
    base_s = float(rng.choice([0.010, 0.001]))
    hardware = Hardware(
        "tiny",
        1,
        StepTimeModel(
            ((0.0, 0.0, base_s), (float(rng.choice([5e-4, 1e-3])), 0.0, base_s / 4)),
            float(rng.choice([0.0, 1e-4])),
            pair_s=float(rng.choice([0.0, 1e-6])),
        ),
        int(rng.choice([80, 112, 4000])),
        max_num_seqs=int(rng.choice([2, 256])),
        frontend_s=float(rng.choice([0.0, 0.003])),
    )
    jobs = []
    for number in range(4):
        rounds = []
        for place in range(rng.choice([1, 1, 2])):
            prompt, answer = int(rng.choice([2, 12, 25])), int(rng.choice([1, 2, 5, 12]))
            alone_s = hardware.zero_load_ttft_s(prompt)
            rounds.append(
                one_round(
                    prompt,
                    answer,
                    float(rng.uniform(1.0, 2.2)) * alone_s,
                    float(rng.uniform(1.1, 2.5)) * base_s,
                    0.02 * place,
                )
            )
        jobs.append(job(str(number), float(rng.choice([0.0, 0.005, 0.03])), *rounds))
    return jobs, hardware


@pytest.mark.slow
def test_no_schedule_found_keeps_more_than_the_bound():
    tight = []
    for seed in range(200):
        jobs, hardware = tiny_case(seed)
        bound, found = most(jobs, hardware), best_schedule(jobs, hardware)
        assert found <= bound.most, (seed, found, bound)
        tight.append(found == bound.most < len(jobs))
    assert sum(tight) >= 5  # otherwise a bound far too high would pass as well


def promised_exactly(result):
    """The job with the objectives that it was served with, and no slack."""
    rounds = []
    for asked, got in zip(result.job.rounds, result.rounds, strict=True):
        ttft_s = got.token_times_s[0] - got.sent_s
        (tpot_s,) = stage_tpots_s(asked, got.token_times_s)
        stage = Stage(asked.output_tokens, math.inf if tpot_s is None else tpot_s)
        rounds.append(replace(asked, stages=(stage,), ttft_s=ttft_s))
    return replace(result.job, rounds=tuple(rounds))


@pytest.mark.slow
def test_what_a_schedule_did_is_never_out_of_bounds():
    """Jobs get as objectives what a schedule gave them, so all of them can attain."""
    for seed in range(400):
        rng = np.random.default_rng(seed)
        jobs, hardware = tiny_case(seed)
        more, _ = tiny_case(seed + 1000)
        jobs += [replace(one, job_id=f"{one.job_id}+") for one in more]
        order = rng.permutation(len(jobs)).tolist()
        budget = int(rng.choice([5, 16, 1000]))
        results = play(jobs, order, hardware, budget, bool(rng.integers(2)))
        asked = [promised_exactly(result) for result in results]
        assert all(
            job_attained(replace(result, job=one))
            for result, one in zip(results, asked, strict=True)
        )
        bound = most(asked, hardware)
        assert bound.most == len(asked), (seed, bound)


# --- the simulated systems -----------------------------------------------------------------------

WINDOWS = {
    "coder": Setting("coder", load_hardware("a100-opt-13b"), jobs=200, arrivals="poisson"),
    "toolllm": Setting("toolllm", load_hardware("a100-toolllama-7b"), jobs=120, arrivals="poisson"),
    "summarizer": Setting("summarizer", load_hardware("a100-opt-13b"), jobs=160),
}
RATES = {"coder": 5.5, "toolllm": 1.5, "summarizer": 1.8}
"""About the capacity of vllm-slo, jobs/s per GPU."""


@pytest.mark.slow
@pytest.mark.parametrize("scenario", WINDOWS)
def test_no_system_exceeds_the_bound(scenario):
    setting = WINDOWS[scenario]
    for factor in (1.0, 2.5):
        rate = RATES[scenario] * factor
        case = Case(setting, parse_system("vllm-slo"))
        bound = ceiling(case.window(rate, 0), setting.hardware)
        for name in ("vllm-slo", "fcfs-2048", "priority-512", "fcfs-512", "shed-edf-512"):
            window = measure_window(Case(setting, parse_system(name)), rate, 0)
            attained = sum(measure.attained for measure in window.measures)
            assert attained <= bound.most, (factor, name, attained, bound)


@pytest.mark.slow
def test_like_jobs_leave_a_good_schedule_little_room():
    """No choice among equal jobs makes the load lighter: a good schedule is near the bound."""
    hardware = load_hardware("a100-opt-13b")
    asked = one_round(800, 1, 5 * hardware.zero_load_ttft_s(800))
    arrivals_s = np.cumsum(np.random.default_rng(3).exponential(1 / 20, 300))
    jobs = [job(str(n), float(at_s), asked) for n, at_s in enumerate(arrivals_s)]
    run = simulate(jobs, parse_system("vllm-slo"), hardware, Conditions(overhead="none"))
    attained = sum(measure.attained for measure in measure_counted(run.results))
    bound = ceiling(jobs, hardware)
    assert 0.9 * bound.most <= attained <= bound.most < bound.counted


@pytest.mark.slow
def test_the_search_finds_ceilings_at_or_above_the_capacities():
    setting = replace(WINDOWS["coder"], jobs=80)
    cases = [Case(setting, parse_system(name)) for name in ("vllm-slo", "fcfs-512")]
    questions = (Question(0.9), Question(0.9, every=True))
    found = find_capacities(cases, questions, (0, 1), precision=0.2, processes=1)
    bounds = find_ceilings(cases, questions, (0, 1), precision=0.2, processes=1)
    for capacities, ceilings in zip(found, bounds, strict=True):
        for capacity, bound in zip(capacities, ceilings, strict=True):
            assert bound.question == capacity.question
            for low, high in zip(capacity.windows, bound.windows, strict=True):
                assert low.kept <= high.kept
    assert bounds[0] == bounds[1]  # the system does not matter


def test_slow_steps_lower_the_ceiling_and_speculation_has_none():
    setting = replace(WINDOWS["coder"], jobs=40)
    slow = replace(setting, conditions=Conditions(bias=1.5))
    system = parse_system("vllm-slo")
    cases = [Case(setting, system), Case(slow, system)]
    found = find_ceilings(cases, [Question(0.9)], (0,), precision=0.2, processes=1)
    (base,), (slower,) = found
    assert slower.rate < base.rate
    drafting = Case(setting, parse_system("vllm-slo-spec"))
    with pytest.raises(SimulationError, match="speculation"):
        find_ceilings([drafting], [Question(0.9)], (0,), processes=1)
