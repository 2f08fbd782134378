# SPDX-License-Identifier: Apache-2.0
"""The pure parts of ``benchmarks/sim_validation.py``: conditions, what is told, rows, tables."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_script import load

from vllm_slo.core.clock import VirtualClock
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, JobResult, Round, RoundResult, Stage
from vllm_slo.sim.measure import measure_job

engine = load("sim_validation_engine")
conditions = load("sim_validation_conditions")
told = load("sim_validation_simulated")
live = load("sim_validation_live")
report = load("sim_validation_report")

MODEL = StepTimeModel(((0.0, 0.0, 0.010), (5e-4, 0.0, 0.008)), kv_s=1e-6)
HARDWARE = Hardware("test", 1, MODEL, conditions.PLENTY, 32, 64, 2048)
BY_NAME = {condition.name: condition for condition in conditions.CONDITIONS}


def measured(name, first_s, gap_s, *, application="chat", tokens=11):
    """A request of TTFT objective 1 s and TPOT objective 0.1 s."""
    job = Job(name, application, 5.0, (Round(10, (Stage(tokens, 0.1),), 1.0),))
    times = tuple(5.0 + first_s + gap_s * i for i in range(tokens))
    return measure_job(JobResult(job, (RoundResult(5.0, times, True, None),)))


GOOD = measured("a", 0.5, 0.05)
LATE = measured("b", 2.0, 0.05)
SLOW = measured("c", 0.5, 0.2, application="code")


def row(real, simulated, kind=report.DRIFT, system="stock vLLM", condition="plain"):
    runs = tuple(map(tuple, real))
    return report.Row(
        condition, system, kind, runs, tuple(tuple(map(tuple, one)) for one in simulated)
    )


# Conditions.


def make(name, load=1.0, seed=3, duration_s=20.0):
    workload = BY_NAME[name].workload
    return conditions.make_jobs(
        replace(workload, load=load * workload.load), HARDWARE, seed, duration_s
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_jobs_fit_the_engine_and_state_their_objectives(name):
    jobs = make(name)
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    multiples = {spec.name: spec.tpot_multiple for spec in conditions.CLASSES}
    assert {job.application for job in jobs} == set(multiples)
    for job in jobs:
        assert job.tokens <= engine.MAX_CONTEXT
        for asked in job.rounds:
            tpot_s = multiples[job.application] * MODEL.predict_s(1)
            assert asked.stages[0].tpot_s == pytest.approx(tpot_s)
            assert math.isfinite(asked.ttft_s) and asked.ttft_s > 0
    assert make(name) == jobs
    assert make(name, seed=4) != jobs
    assert len(make(name, load=2.0)) == pytest.approx(2 * len(jobs), rel=0.35)


def test_prefixes_are_shared_and_leave_an_own_part():
    jobs = make("prefix sharing", load=3.0)
    details = [job.rounds[0].details for job in jobs]
    texts = {one.hash_ids for one in details}
    assert (
        len(texts) == len({ids[0] for ids in texts}) == BY_NAME["prefix sharing"].workload.prefixes
    )
    tokens = [len(one.hash_ids) * one.block_tokens for one in details]
    assert all(job.rounds[0].prompt_tokens > n for job, n in zip(jobs, tokens, strict=True))
    assert all(one.slo.slo_class == job.application for job, one in zip(jobs, details, strict=True))
    prompts = live.prompts_of(jobs)
    one, other = [n for n, these in enumerate(details) if these.hash_ids == details[0].hash_ids][:2]
    shared = tokens[0]
    assert prompts[one, 0][:shared] == prompts[other, 0][:shared]
    assert prompts[one, 0][shared:][:6] != prompts[other, 0][shared:][:6]


def test_sessions_have_rounds_and_prompts_that_go_on():
    jobs = make("sessions", load=3.0)
    assert {len(job.rounds) for job in jobs} == {2, 3, 4}
    prompts = live.prompts_of(jobs)
    for number, job in enumerate(jobs):
        for place in range(1, len(job.rounds)):
            before, prompt = prompts[number, place - 1], prompts[number, place]
            assert prompt[: len(before)] == before
            told_tokens = job.rounds[place - 1].output_tokens + job.rounds[place].prompt_tokens
            assert len(prompt) == len(before) + told_tokens


def test_prompts_of_a_text_are_parts_of_it():
    jobs, text = make("drafts"), list(range(5000))
    for (number, _), prompt in live.prompts_of(jobs, text).items():
        assert len(prompt) == jobs[number].rounds[0].prompt_tokens
        assert prompt == text[prompt[0] : prompt[0] + len(prompt)]


def test_memory_pressure_has_less_memory_than_requests_want():
    condition = BY_NAME["memory pressure"]
    assert condition.max_model_len <= condition.kv_tokens < conditions.PLENTY / 4
    jobs = make("memory pressure", duration_s=60.0)
    assert max(job.tokens for job in jobs) <= condition.max_model_len
    assert sum(sorted(job.tokens for job in jobs)[-8:]) > 2 * condition.kv_tokens


# The engine's process.


class Base:
    """Stands for a scheduler: hands back what it is given."""

    vllm_config = SimpleNamespace(speculative_config=None)

    def _update_request_with_output(self, request, new_token_ids, is_stale=False):
        return new_token_ids, bool(new_token_ids) and new_token_ids[-1] == engine.STOP_TOKEN


def test_answers_end_at_their_length_whatever_the_model_says():
    recorded = type("Recorded", (engine.Recorder, Base), {})()
    recorded.lengths["r"] = 3
    ends = []
    for made in range(3):
        request = SimpleNamespace(request_id="r", num_output_tokens=made)
        sampled = [engine.STOP_TOKEN]
        ends.append(recorded._update_request_with_output(request, sampled)[1])
        assert sampled == [engine.STOP_TOKEN]  # the worker's own tokens stay as they are
    assert ends == [False, False, True]
    prefill = SimpleNamespace(request_id="r", num_output_tokens=0)
    assert recorded._update_request_with_output(prefill, []) == ([], False)


@pytest.mark.parametrize(
    ("tokens", "parents", "given", "found"),
    [
        ([7, 8, 9], [-1, 0, 1], [7, 8, 9, 1], (3, 3)),
        ([7, 8, 9], [-1, 0, 1], [7, 4], (2, 1)),
        ([7, 8, 9], [-1, 0, 1], [4], (1, 0)),
        ([7, 8, 9], [-1, -1, 1], [8, 9, 1], (2, 1)),  # the second guess was right, then the best
        ([], [], [4], (0, 0)),
    ],
)
def test_best_guesses(tokens, parents, given, found):
    assert engine.best_guesses(tokens, parents, given) == found


# What the simulator is told.


def step(shape, took_s, scheduling_s=0.0, gap_s=0.0, drafting=()):
    return engine.LiveStep(shape, took_s, scheduling_s, gap_s, drafting)


@pytest.mark.parametrize(
    ("points", "found"),
    [
        ([(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)], (1.0, 2.0)),
        ([(1.0, 3.0), (2.0, 2.0)], (2.5, 0.0)),  # falling
        ([(1.0, 1.0), (2.0, 3.0)], (0.0, 1.4)),  # through the origin
    ],
)
def test_lines_have_no_negative_number(points, found):
    assert told.line(points) == pytest.approx(found)


def test_scheduling_beyond_the_profile_is_charged_by_requests():
    shapes = [BatchShape(n, 0, 0, n) for n in (1, 4, 16)] * 3
    ours = told.scheduling_line([step(s, 0.02, 1e-3 + 1e-4 * s.requests) for s in shapes])
    stock = told.scheduling_line([step(s, 0.02, 2e-4 + 1e-5 * s.requests) for s in shapes])
    assert told.less(ours, stock) == pytest.approx((8e-4, 9e-5))
    plain = conditions.SLO
    fields = {name: getattr(plain, name) for name in type(plain).__dataclass_fields__}
    charged = told.Scheduled(**fields, scheduling=(8e-4, 9e-5))
    assert charged.overhead_s(10) == pytest.approx(1.7e-3)
    assert told.Scheduled(**fields, scheduling=(-8e-4, 0.0)).overhead_s(10) == 0.0


def test_time_between_steps_that_follow_each_other():
    steps = [step(BatchShape(1), 0.02, gap_s=gap_s) for gap_s in (0.0, 3e-4, 2e-4, 9e-3)]
    assert told.gap_s(steps) == 3e-4
    assert told.gap_s(steps[:1]) == 0.0


def test_errors_are_replayed_in_stretches_and_by_length():
    short = tuple(np.linspace(0.5, 1.5, 1000))
    world = told.Scattered(errors=told.StepErrors(0.05, short, (1.02,) * 9), seed=1)
    taken = world.true_step_time(HARDWARE, 0, VirtualClock())
    shape, long = BatchShape(1), BatchShape(500, requests=1)
    found = []
    for _ in range(5000):
        found.append(taken(shape) / MODEL.predict_s(1))
        assert taken(long) == pytest.approx(1.02 * MODEL.predict_shape_s(long))
    assert np.mean(found) == pytest.approx(1.0, abs=0.1)
    # Neighbours stay neighbours, in their order.
    steps = np.diff(found)
    assert (np.abs(steps) < 2e-3).mean() > 0.9
    assert (steps > 0).mean() > 0.9
    assert not world.is_known(0)
    assert told.Scattered().is_known(0)
    taken = told.Scattered().true_step_time(HARDWARE, 0, VirtualClock())
    assert taken(shape) == MODEL.predict_s(1)


def test_schedulers_start_with_their_profile_whatever_the_steps_take():
    profile = MODEL.scaled(1.5)
    world = told.Scattered(profile=profile, errors=told.StepErrors(0.0, (1.0,), (1.0,)))
    assert world.believed(HARDWARE, 0) is profile
    taken = world.true_step_time(HARDWARE, 0, VirtualClock())
    assert taken(BatchShape(1)) == MODEL.predict_s(1)
    assert told.Scattered().believed(HARDWARE, 0) is MODEL


def test_drift_is_the_speed_of_the_machine_at_each_moment():
    ends = [0.1 * n for n in range(200)]
    steps = [(at_s, 0.05, 0.05 * (1.0 if at_s < 10.0 else 1.4)) for at_s in ends]
    drift = told.Drift.of(steps)
    assert [drift.at(at_s) for at_s in (1.0, 8.0, 12.0, 500.0)] == pytest.approx([1, 1, 1.4, 1.4])
    assert 1.0 < drift.at(10.0) < 1.4
    assert told.Drift.of([]).at(3.0) == 1.0
    # A stretch in which an engine hardly worked says nothing.
    lone = told.Drift.of([*steps, (60.0, 0.01, 0.1)])
    assert lone.at(60.0) == pytest.approx(1.4)


def test_steps_take_as_long_as_the_machine_is_slow_then():
    clock = VirtualClock()
    drifts = (told.Drift(), told.Drift((0.0, 10.0), (1.0, 2.0)))
    world = told.Scattered(drifts=drifts)
    alike, drifting = (world.true_step_time(HARDWARE, n, clock) for n in (0, 1))
    for at_s, factor in ((0.0, 1.0), (5.0, 1.5), (20.0, 2.0)):
        clock.now_s = at_s
        assert alike(BatchShape(1)) == pytest.approx(MODEL.predict_s(1))
        assert drifting(BatchShape(1)) == pytest.approx(factor * MODEL.predict_s(1))


def test_the_drift_of_runs_is_in_the_time_of_the_simulation():
    def ran(began_s, factor):
        took_s = factor * MODEL.predict_s(1)
        return engine.Record(
            steps=[
                step(BatchShape(1), took_s)._replace(ended_s=began_s + 0.02 * n) for n in range(500)
            ]
        )

    begins = told.begins_s([1000.0, 1020.0])
    assert begins == [0.0, 20.0 + told.APART_S]
    plain = told.Told(HARDWARE, MODEL, (0.0, 0.0), 0.0, told.StepErrors())
    runs = [[ran(1000.0, 1.0), ran(1000.0, 2.0)], [ran(1020.0, 3.0), ran(1020.0, 4.0)]]
    found = told.with_drift(plain, runs, [begins[0] - 1000.0, begins[1] - 1020.0])
    assert [d.at(5.0) for d in found.drifts] == pytest.approx([1.0, 2.0])
    assert [d.at(begins[1] + 5.0) for d in found.drifts] == pytest.approx([3.0, 4.0])
    errors = (*found.errors.short, *found.errors.long)
    assert len(errors) == 2000
    assert np.median(errors) == pytest.approx(1.0, abs=1e-6)


def test_the_way_of_a_request_to_an_idle_engine_is_told():
    records = [engine.Record(deliveries_s=[0.001, 0.002]), engine.Record(deliveries_s=[0.009])]
    assert told.delivered_s(records) == 0.002
    assert told.delivered_s([engine.Record()]) == 0.0


def test_errors_leave_scheduling_out():
    hardware = HARDWARE.with_draft_step(0.002)
    hardware = replace(hardware, draft=replace(hardware.draft, token_s=1e-4))
    plain, drafted = BatchShape(1), BatchShape(40, 3, requests=10)
    steps = [
        step(plain, 1.1 * MODEL.predict_s(1) + 1e-3),
        step(drafted, 0.9 * (MODEL.predict_shape_s(drafted) + 0.006 + 0.004) + 1e-3),
    ]
    found = told.misfit([engine.Record(steps=steps)], hardware, (1e-3, 0.0))
    assert (found.short, found.long) == (pytest.approx((1.1,)), pytest.approx((0.9,)))


def test_long_steps_hold_half_of_the_time():
    found = told.StepErrors.of([(1.0, 1.1)] * 30 + [(10.0, 10.0)] * 2 + [(20.0, 30.0)])
    assert found.split_s == 10.0
    assert (set(found.short), set(found.long)) == ({1.1}, {1.0, 1.5})
    assert told.StepErrors.of([]) == told.StepErrors()


def test_a_profile_from_before_and_after_is_one():
    shapes = [BatchShape(n, 0, 10 * n, n) for n in (1, 4, 16, 64, 256)] * 4

    def profiled(factor):
        samples = tuple((s, factor * MODEL.predict_shape_s(s)) for s in shapes)
        steps = tuple(step(*sample) for sample in samples)
        return SimpleNamespace(report=SimpleNamespace(samples=samples), steps=steps)

    served = BY_NAME["plain"].systems[0]
    record = engine.Record(steps=[step(s, MODEL.predict_shape_s(s)) for s in shapes])
    found = told.told(served, HARDWARE, [profiled(0.9), profiled(1.1)], [record])
    model = found.hardware.step_time
    for shape in shapes:
        assert model.predict_shape_s(shape) == pytest.approx(MODEL.predict_shape_s(shape), rel=0.12)
    assert told.bias(record.steps, found) == pytest.approx(1.0, abs=0.12)


def test_the_short_run_of_every_engine_tells_how_far_live_steps_are_from_the_profile():
    shapes = [BatchShape(n, 0, 10 * n, n) for n in (1, 4, 16, 64, 256)] * 4
    samples = tuple((s, MODEL.predict_shape_s(s)) for s in shapes)
    steps = tuple(step(*sample) for sample in samples)
    profile = SimpleNamespace(report=SimpleNamespace(samples=samples), steps=steps)
    records = [
        engine.Record(steps=[step(s, factor * took_s) for s, took_s in samples])
        for factor in (1.1, 1.3)
    ]
    served = BY_NAME["two replicas"].systems[0]
    known = told.told(served, HARDWARE, [profile], records)
    found = (*known.errors.short, *known.errors.long)
    assert len(found) == 40
    assert np.mean(found) == pytest.approx(1.2, abs=0.02)
    assert known.profile is HARDWARE.step_time


def test_shapes_that_the_profile_gets_wrong_are_learnt_from_the_short_run():
    shapes = [BatchShape(n, 0, 10 * n, n) for n in (1, 4, 16, 64, 256)] * 4
    samples = tuple((s, MODEL.predict_shape_s(s)) for s in shapes)
    profile = SimpleNamespace(
        report=SimpleNamespace(samples=samples), steps=tuple(step(*s) for s in samples)
    )
    # Under load, steps with long contexts take longer than a profile of short ones says.
    far = [BatchShape(n, 0, 4000 * n, n) for n in (4, 8, 16)] * 40
    truth = replace(MODEL, kv_s=3 * MODEL.kv_s)
    near = [BatchShape(n, 0, 10 * n, n) for n in (4, 16, 64)] * 40
    steps = [
        step(s, truth.predict_shape_s(s))._replace(ended_s=0.1 * n)
        for n, s in enumerate(s for pair in zip(far, near, strict=True) for s in pair)
    ]
    served = BY_NAME["plain"].systems[0]
    model = told.told(served, HARDWARE, [profile], [engine.Record(steps=steps)]).hardware.step_time
    off = {s: model.predict_shape_s(s) / truth.predict_shape_s(s) for s in (*far, *near)}
    profiled = {s: MODEL.predict_shape_s(s) / truth.predict_shape_s(s) for s in (*far, *near)}
    ratio = max(off.values()) / min(off.values())
    assert ratio < 1.15 < max(profiled.values()) / min(profiled.values())


def test_what_drafts_take_is_what_the_profile_does_not_explain():
    served = BY_NAME["drafts"].systems[1]
    sizes = [(n, passes) for n in (1, 2, 4, 8, 16) for passes in (1, 2, 3)] * 4
    shapes = [BatchShape(n + n * passes, passes, 100 * n, n) for n, passes in sizes]
    plain = [BatchShape(n, 0, c * n, n) for n in (1, 2, 4, 8, 16, 64, 256) for c in (9, 100, 500)]
    samples = tuple((s, MODEL.predict_shape_s(s)) for s in plain)
    profile = SimpleNamespace(
        report=SimpleNamespace(samples=samples), steps=tuple(step(*s) for s in samples)
    )
    taken = [
        step(s, MODEL.predict_shape_s(s) + 0.003 + 0.002 * s.spec_steps + 1e-4 * s.tokens)
        for s in shapes
    ]
    found = told.told(served, HARDWARE, [profile], [engine.Record(steps=taken)])
    model = found.hardware.step_time
    assert model.predict_s(1) - MODEL.predict_s(1) == pytest.approx(0.003, rel=0.1)
    pass_s = model.predict_s(1, 0, 1) - model.predict_s(1)
    assert pass_s == pytest.approx(0.002, rel=0.1)
    assert found.hardware.draft.token_s == pytest.approx(1e-4, rel=0.3)
    assert told.bias(taken, found) == pytest.approx(1.0, abs=0.01)


def test_acceptance_is_pooled_by_application():
    one = engine.Record(tried={"chat": 10, "code": 0}, accepted={"chat": 5, "code": 0})
    other = engine.Record(tried={"chat": 30}, accepted={"chat": 25})
    assert told.acceptance([one, other]) == {"chat": 0.75}


# The report.


def test_numbers_pool_runs():
    found = report.numbers([[GOOD, LATE], [SLOW]])
    assert found.attained == pytest.approx(1 / 3)
    assert (found.ttft_p50_s, found.ttft_p99_s) == pytest.approx((0.5, 1.97))
    assert (found.tpot_p50_s, found.tpot_p99_s) == pytest.approx((0.05, 0.197))


def test_a_run_has_no_error_against_itself():
    found = report.errors([[GOOD, LATE]], [[[GOOD, LATE], [GOOD, LATE]]])
    assert (found.points, found.by_run, found.same) == (0.0, (0.0,), 1.0)
    assert (found.ttft_p50, found.ttft_p99, found.tpot_p50, found.tpot_p99) == (0.0,) * 4
    assert found.misses == []


def test_errors_are_relative_and_by_run():
    found = report.errors([[GOOD, GOOD], [GOOD, LATE]], [[[LATE, GOOD]], [[GOOD, GOOD]]])
    assert found.points == 0.0
    assert found.by_run == (-50.0, 50.0)
    assert found.same == 0.5
    found = report.errors([[GOOD]], [[[LATE]]])
    assert (found.points, found.ttft_p50) == pytest.approx((-100.0, 3.0))
    assert found.misses == ["attained", "TTFT p50", "TTFT p99"]


@pytest.mark.parametrize(("first_s", "missed"), [(0.549, []), (0.551, ["TTFT p50"])])
def test_targets_are_bounds(first_s, missed):
    off = measured("a", first_s, 0.05)
    assert report.errors([[GOOD]], [[[off]]]).misses == missed


def test_table_is_rectangular_and_says_what_missed():
    rows = [row([[GOOD]], [[[GOOD]]]), row([[GOOD], [SLOW]], [[[LATE]], [[SLOW]]])]
    lines = [report.cells(one) for one in rows]
    assert {len(line) for line in lines} == {len(report.HEAD)}
    assert lines[0][-1] == "yes"
    assert lines[1][-1] == "no: attained, TTFT p50, TTFT p99"
    assert lines[1][6] == "-50.0 (-100.0, +0.0)"
    assert lines[1][7] == "500 / 500"


def test_bounds_name_the_worst_row_that_knows_the_step_times():
    rows = [
        row([[GOOD]], [[[GOOD]]]),
        row([[GOOD]], [[[LATE]]], system="vllm-slo"),
        row([[GOOD]], [[[SLOW]]], kind=report.FORECAST, condition="trees"),
    ]
    text = report.bounds(rows)
    assert "1 of 2 rows that know the step times, and 0 of 1 forecasts" in text
    assert "attainment -100.0 points (plain, vllm-slo)" in text
    assert "TTFT p50 +300% (plain, vllm-slo)" in text
    assert "trees" not in text


def test_repeated_runs_are_compared():
    assert "attainment -100.0 points, TTFT p50 +300%" in report.again(
        "plain", "vllm-slo", (GOOD,), (LATE,)
    )


def test_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row([[GOOD, SLOW]], [[[LATE, SLOW]]]), row([[GOOD]], [[[GOOD]]], condition="trees")]
    report.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
