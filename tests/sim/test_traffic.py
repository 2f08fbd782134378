# SPDX-License-Identifier: Apache-2.0
"""Recorded requests as jobs: times, lengths, classes, sessions, shared prefixes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.sim.ceiling import ceiling
from vllm_slo.sim.cluster import Run, simulate, slo_of
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.demand import demand
from vllm_slo.sim.fluid import least_work_s
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, hashed_text
from vllm_slo.sim.measure import job_attained, measure_counted, summarise
from vllm_slo.sim.questions import Question, Watcher
from vllm_slo.sim.setting import Case, Setting
from vllm_slo.sim.stretches import chosen
from vllm_slo.sim.systems import OURS, parse_system
from vllm_slo.sim.traffic import NO_CLASS, Traffic, with_classes
from vllm_slo.sim.windows import measure_window
from vllm_slo.sim.workload import make_jobs
from vllm_slo.slo.model import SLO
from vllm_slo.traces.classes import TrafficClasses
from vllm_slo.traces.request import Served, TraceRequest
from vllm_slo.traces.rules import Rules
from vllm_slo.traces.selection import Recording, Selection, load

STEP_TIME = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
HARDWARE = Hardware("test", 1, STEP_TIME, 32_768, max_num_seqs=64, max_model_len=4096)
FCFS = parse_system("fcfs-2048")
CONFIG = SLOConfig.model_validate(
    {
        "classes": {
            "chat": {"ttft_ms": 900, "tpot_ms": 60},
            "think": {"thinking_tpot_ms": 40, "tpot_ms": 90, "ttft_ms": 2000},
            "whole": {"e2e_ms": 1500},
            "batch": {},
        }
    }
)


def traffic(*requests: TraceRequest, config: SLOConfig = CONFIG, **more: Any) -> Traffic:
    return Traffic(Recording("here", "ours", requests, 0), TrafficClasses(config, **more))


def run(jobs: Sequence[Job], system: str = "fcfs-2048", **conditions: Any) -> Run:
    given = Conditions(config=CONFIG, overhead="none", **conditions)
    return simulate(jobs, parse_system(system), HARDWARE, given)


def sent(made: Run) -> list[list[float]]:
    return [[got.sent_s for got in result.rounds] for result in made.results]


# Jobs.


def test_one_request_with_all_that_it_says() -> None:
    request = TraceRequest(
        3.0, 700, 40, "chat", "acme", priority=4, hash_ids=(7, 8), block_tokens=512
    )
    (job,) = traffic(request).jobs(HARDWARE)
    (asked,) = job.rounds
    assert (job.job_id, job.application, job.arrival_s) == ("0", "chat", 3.0)
    assert (asked.prompt_tokens, asked.output_tokens, asked.ttft_s) == (700, 40, 0.9)
    assert asked.tightest_tpot_s == pytest.approx(0.06)
    assert slo_of(job, 0) == SLO(ttft_ms=900, tpot_ms=60, tenant="acme", slo_class="chat")
    details = asked.details
    assert details is not None
    assert (details.row, details.priority, details.hash_ids) == (0, 4, (7, 8))


def naive(requests: Sequence[TraceRequest], classes: TrafficClasses) -> list[tuple[Any, ...]]:
    """What requests without sessions become, written down at once."""
    found: list[tuple[Any, ...]] = []
    for row, one in enumerate(requests):
        slo = classes.slo_of(one, row)
        prompt = min(one.prompt_tokens, 4096 - one.output_tokens)
        limits = (math.inf, math.inf)
        if slo is not None:
            limits = tuple(
                math.inf if ms is None else ms / 1e3 for ms in (slo.ttft_ms, slo.tightest_tpot_ms)
            )  # type: ignore[assignment]
        found.append((one.at_s, prompt, one.output_tokens, *limits, slo and slo.slo_class))
    return found


@st.composite
def recordings(draw: st.DrawFn) -> list[TraceRequest]:
    gaps = draw(st.lists(st.integers(0, 30), min_size=1, max_size=12))
    names = st.sampled_from(["chat", "think", "whole", "batch", "unknown", ""])
    requests, at_s = [], 0.0
    for place, gap in enumerate(gaps):
        at_s += gap / 10 if place else 0.0
        lengths = draw(st.tuples(st.integers(1, 5000), st.integers(1, 60)))
        ids = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
        requests.append(
            TraceRequest(
                at_s,
                *lengths,
                draw(names),
                session=draw(st.sampled_from([None, "a", "b"])),
                hash_ids=ids,
                block_tokens=64,
                served=draw(st.sampled_from([None, Served(e2e_s=0.7)])),
            )
        )
    return requests


@settings(max_examples=examples(60))
@given(recordings())
def test_jobs_are_what_was_recorded(requests: list[TraceRequest]) -> None:
    made = traffic(*(
        TraceRequest(one.at_s, one.prompt_tokens, one.output_tokens, one.slo_class)
        for one in requests
    ))  # fmt: skip
    found = [
        (
            job.arrival_s,
            asked.prompt_tokens,
            asked.output_tokens,
            asked.ttft_s,
            asked.tightest_tpot_s,
            asked.details and asked.details.slo and asked.details.slo.slo_class,
        )
        for job in made.jobs(HARDWARE)
        for asked in job.rounds
    ]
    want = naive(made.recording.requests, made.classes)
    assert [one[:3] for one in found] == [one[:3] for one in want]
    assert [one[3:5] for one in found] == [pytest.approx(one[3:5]) for one in want]
    assert [one[5] for one in found] == [one[5] for one in want]
    too_long = sum(one.prompt_tokens + one.output_tokens > 4096 for one in requests)
    assert made.clipped(HARDWARE) == too_long


@settings(max_examples=examples(25), deadline=None)
@given(recordings(), st.sampled_from(["vllm-slo", "fcfs-2048"]))
def test_every_recorded_request_is_served_once_and_never_early(
    requests: list[TraceRequest], system: str
) -> None:
    made = traffic(*requests)
    jobs = made.jobs(HARDWARE)
    rows = [asked.details.row for job in jobs for asked in job.rounds if asked.details]
    assert sorted(rows) == list(range(len(requests)))
    for result in run(jobs, system).results:
        assert len(result.rounds) == len(result.job.rounds)
        ends_s, held = 0.0, 0
        for (asked, before), got in zip(result.job.in_context(), result.rounds, strict=True):
            assert asked.details is not None
            request = requests[asked.details.row]
            assert got.finished and len(got.token_times_s) == request.output_tokens
            assert got.sent_s >= ends_s
            whole = min(request.prompt_tokens, 4096 - request.output_tokens)
            assert before + asked.prompt_tokens == whole and before <= held
            ends_s, held = got.token_times_s[-1], whole + request.output_tokens
    parts = [part for job in jobs for part in job.by_request()]
    assert len(parts) == len(requests) == len({part.job_id for part in parts})


def test_an_empty_class_and_one_that_is_not_configured() -> None:
    plain, named = traffic(TraceRequest(0.0, 5, 5), TraceRequest(1.0, 5, 5, "no")).jobs(HARDWARE)
    assert (plain.application, named.application) == (NO_CLASS, "no")
    assert slo_of(plain, 0) is slo_of(named, 0) is None
    own = traffic(TraceRequest(0.0, 5, 5, "no", ttft_ms=70, e2e_ms=900))
    (asked,) = own.jobs(HARDWARE)[0].rounds
    assert (asked.ttft_s, asked.e2e_s) == (0.07, 0.9)


def test_stages_are_judged_by_the_tightest() -> None:
    (job,) = traffic(TraceRequest(0.0, 5, 30, "think")).jobs(HARDWARE)
    assert slo_of(job, 0) == SLO(ttft_ms=2000, tpot_ms=40, slo_class="think")
    result = run([job], "vllm-slo").results[0]  # the class has no stages in the engine either
    assert result.rounds[0].promised


def test_adaserves_ratios_are_objectives() -> None:
    made = traffic(TraceRequest(0.0, 5, 5, slo_ratio=1.2), TraceRequest(1.0, 5, 5, slo_ratio=-50.0))
    jobs = made.jobs(HARDWARE)
    assert [job.application for job in jobs] == ["copilot", "chatbot"] != made.applications
    tpots = [job.rounds[0].tightest_tpot_s for job in jobs]
    assert tpots == pytest.approx([1.2 * HARDWARE.zero_load_tpot_s(), 0.05])


def test_rules_see_the_row_of_the_recording(tmp_path: Any) -> None:
    (tmp_path / "rules.yaml").write_text("rules: [{class: chat, share: 0.5}]\ndefault: batch\n")
    rules = Rules.load(tmp_path / "rules.yaml")
    whole = traffic(*(TraceRequest(float(n), 9, 9) for n in range(40)), rules=rules)
    names = [job.application for job in whole.jobs(HARDWARE)]
    assert set(names) == {"chat", "batch"}
    parts = [job.application for part in whole.parts(4) for job in part.jobs(HARDWARE)]
    assert parts == names
    moved = whole.jobs_of(whole.stretch(2.0, 10, 3), 2.0, HARDWARE)
    assert [job.application for job in moved] == [names[int(job.job_id)] for job in moved]


# Sessions.


def session(*rows: tuple[float, int, int], e2e_s: float | None = None) -> list[TraceRequest]:
    served = None if e2e_s is None else Served(e2e_s=e2e_s)
    return [TraceRequest(*row, "chat", session="s", served=served) for row in rows]


def test_a_round_comes_at_its_own_time_but_not_before_the_answer() -> None:
    # Alone, 200 tokens take 0.09 s and each of 9 more tokens 0.02 s.
    made = run(traffic(*session((0.0, 200, 10), (5.0, 300, 10), (5.1, 400, 10))).jobs(HARDWARE))
    (times,) = sent(made)
    (result,) = made.results
    assert times[:2] == [0.0, 5.0]
    assert times[2] == result.rounds[1].token_times_s[-1] > 5.1


def test_a_client_thinks_for_as_long_as_it_did() -> None:
    rows = ((0.0, 200, 10), (5.0, 300, 10), (5.5, 400, 10))
    (result,) = run(traffic(*session(*rows, e2e_s=3.0)).jobs(HARDWARE)).results
    first, second, third = result.rounds
    assert second.sent_s == pytest.approx(first.token_times_s[-1] + 2.0)
    assert third.sent_s == second.token_times_s[-1]  # it had not waited for the answer


def test_a_client_of_a_trace_twice_as_fast_thinks_half_as_long(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    path.write_text(
        "time,prompt_tokens,output_tokens,session,end,served_e2e_ms\n"
        "0,200,10,s,completed,3000\n5,300,10,s,completed,3000\n"
    )
    waits = []
    for speed in (1.0, 2.0):
        recorded = Traffic(load(path, Selection(speed=speed)), TrafficClasses(CONFIG))
        (job,) = recorded.jobs(HARDWARE)
        waits.append(job.rounds[1].wait_s)
    assert waits == [2.0, 1.0]


def test_a_later_prompt_continues_the_text_or_repeats_the_prompt() -> None:
    rows = ((0.0, 320, 32), (1.0, 500, 8), (2.0, 505, 8), (3.0, 100, 8))
    (job,) = traffic(*session(*rows)).jobs(HARDWARE)
    assert [before for _, before in job.in_context()] == [0, 352, 500, 0]
    computed = run([job]).computed_tokens
    # Whole blocks of 16 tokens are cached; of an answer all but the last token's.
    cached = (320 + 31) // 16 * 16 + 500 // 16 * 16
    answers = 31 + 7 + 7 + 7
    assert computed == 320 + 500 + 505 + 100 - cached + answers


def test_hash_ids_say_what_a_round_repeats() -> None:
    first = TraceRequest(0.0, 128, 64, session="s", hash_ids=(1, 2), block_tokens=64)
    (kept,) = traffic(
        first, TraceRequest(9.0, 256, 4, session="s", hash_ids=(1, 2, 3, 4), block_tokens=64)
    ).jobs(HARDWARE)
    (other,) = traffic(
        first, TraceRequest(9.0, 256, 4, session="s", hash_ids=(1, 5, 6, 7), block_tokens=64)
    ).jobs(HARDWARE)
    assert [before for _, before in kept.in_context()] == [0, 192]
    assert [before for _, before in other.in_context()] == [0, 64]


def test_a_session_goes_on_after_a_request_that_was_dropped() -> None:
    rows = [replace_class(one, "whole") for one in session((0.0, 3000, 5), (2.0, 3100, 5))]
    drop = SLOConfig.model_validate(
        {"classes": {"whole": {"ttft_ms": 1, "on_unattainable": "decline"}}}
    )
    jobs = traffic(*rows, config=drop).jobs(HARDWARE)
    made = simulate(jobs, OURS, HARDWARE, Conditions(config=drop))
    (result,) = made.results
    assert [got.finished for got in result.rounds] == [False, False]
    assert result.rounds[1].sent_s == 2.0


def replace_class(request: TraceRequest, name: str) -> TraceRequest:
    return TraceRequest(
        request.at_s, request.prompt_tokens, request.output_tokens, name, session=request.session
    )


# Prefixes.


def test_leading_ids_give_the_same_tokens() -> None:
    one, other = (hashed_text(ids, 32, 0, 90) for ids in ((1, 2, 3), (1, 2, 4)))
    assert one[:64] == other[:64] and one[64] != other[64] and len(one) == 90
    assert hashed_text((1, 2, 3), 32, 40, 90) == one[40:]
    assert len(hashed_text((1, 2), 32, 0, 90)) == 64


def test_shared_prefixes_are_computed_once() -> None:
    rows = [TraceRequest(n * 2.0, 160, 1, hash_ids=(1, 2, n + 10), block_tokens=64)
            for n in range(4)]  # fmt: skip
    apart = [TraceRequest(n * 2.0, 160, 1) for n in range(4)]
    jobs = traffic(*rows).jobs(HARDWARE)
    assert run(traffic(*apart).jobs(HARDWARE)).computed_tokens == 4 * 160
    assert run(jobs).computed_tokens == 160 + 3 * 32
    assert [job.rounds[0].least_prompt(0) for job in jobs] == [(160, 0), *[(32, 128)] * 3]
    saved = demand(traffic(*apart).jobs(HARDWARE), HARDWARE).prefill_s
    assert demand(jobs, HARDWARE).prefill_s < saved


# Measures.


def test_each_request_of_a_session_counts() -> None:
    jobs = traffic(*session((0.0, 3000, 5), (9.0, 3100, 5))).jobs(HARDWARE)
    made = run(jobs)
    parts = made.results[0].by_request()
    assert [job_attained(part) for part in parts] == [False, True]  # 3,000 tokens take 1.2 s
    assert not job_attained(made.results[0])
    summary = summarise(measure_counted(made.results, 0.0), 9.0)
    assert (summary.jobs, summary.attainment) == (2, 0.5)
    watcher = Watcher(jobs, 0.0, [Question(0.6)])
    assert watcher(made.results[0])
    assert watcher.evidence.answer(Question(0.5)) and not watcher.evidence.answer(Question(0.6))


def test_what_has_no_objective_is_no_attainment() -> None:
    rows = [TraceRequest(0.0, 3000, 5, "chat"), TraceRequest(0.0, 5, 50, "batch")]
    summary = summarise(measure_counted(run(traffic(*rows).jobs(HARDWARE)).results, 0.0), 1.0)
    assert summary.attainment == 0.0 and summary.by_application == {"chat": 0.0}
    assert (summary.goodput_jobs_per_s, summary.output_tokens_per_s) == (0.0, 55.0)
    alone = summarise(measure_counted(run(traffic(rows[1]).jobs(HARDWARE)).results, 0.0), 1.0)
    assert alone.attainment == 1.0


def test_the_whole_answer_may_have_a_time() -> None:
    quick, slow = traffic(
        TraceRequest(0.0, 5, 50, "whole"), TraceRequest(9.0, 5, 90, "whole")
    ).jobs(HARDWARE)
    # A step takes 20 ms, so 50 tokens take 1 s and 90 tokens 1.8 s.
    assert [job_attained(result) for result in run([quick, slow]).results] == [True, False]
    assert ceiling([quick, slow], HARDWARE, warmup=0.0).most == 1


def test_tpot_windows_are_the_servers() -> None:
    config = SLOConfig.model_validate({"classes": {"chat": {}}, "tpot_window_tokens": 3})
    (job,) = traffic(TraceRequest(0.0, 5, 7, "chat"), config=config).jobs(HARDWARE)
    assert job.rounds[0].window_tokens == 3


# The operator's configuration.


def test_the_engine_reads_the_operators_configuration() -> None:
    quotas = {"default": {"promised_tokens_per_s": 1.0, "burst_tokens": 1.0}}
    config = SLOConfig.model_validate({"classes": {"chat": {"ttft_ms": 900}}, "quotas": quotas})
    requests = [TraceRequest(n * 1.0, 100, 5, "chat", "acme") for n in range(3)]
    free, bound = (
        simulate(
            traffic(*requests, config=one).jobs(HARDWARE), OURS, HARDWARE, Conditions(config=one)
        )
        for one in (CONFIG, config)
    )
    assert all(result.rounds[0].promised for result in free.results)
    assert not any(result.rounds[0].promised for result in bound.results)
    assert {result.rounds[0].reason for result in bound.results} == {"quota"}


def test_what_a_simulation_cannot_have_is_left_out() -> None:
    config = SLOConfig.model_validate(
        {
            "classes": {"chat": {"ttft_ms": 900}},
            "default_class": "chat",
            "profile": "nowhere.json",
            "best_effort": {"order": "laps_sd", "output_length": "learnt"},
            "speculation": {"draft_model": "nowhere", "max_depth": 2},
            "service_tiers": {"priority": "chat"},
        }
    )
    plain, asked = traffic(
        TraceRequest(0.0, 5, 5), TraceRequest(1.0, 5, 5, "free"), config=config
    ).jobs(HARDWARE)
    assert plain.application == "chat"  # the default class is the request's, not the engine's
    draft = HARDWARE.with_draft_step(0.003)
    for system in (OURS, parse_system("vllm-slo-trees")):
        conditions = Conditions(config=config, acceptance={"chat": 0.9})
        made = simulate([plain, asked], system, draft, conditions)
        assert [result.rounds[0].promised for result in made.results] == [True, None]


# Windows.


def steady(count: int, gap_s: float = 0.5) -> Traffic:
    return traffic(*(TraceRequest(n * gap_s, 100 + n, 5, "chat") for n in range(count)))


def test_parts_last_equally_long_and_keep_every_request() -> None:
    whole = steady(10)
    assert (whole.duration_s, whole.rate) == (5.0, 2.0)
    parts = whole.parts(3)
    assert [part.duration_s for part in parts] == pytest.approx([5 / 3] * 3)
    assert [len(part.recording.requests) for part in parts] == [4, 3, 3]
    rows = [part.first_row for part in parts]
    assert rows == [0, 4, 7]
    times = [part.recording.requests[0].at_s for part in parts]
    assert times == pytest.approx([0.0, 2 - 5 / 3, 3.5 - 10 / 3])
    assert whole.parts(1) == [whole]


def test_a_window_at_a_rate_takes_neighbouring_rows() -> None:
    setting = Setting("here", HARDWARE, lengths="trace", traffic=(steady(10),))
    jobs = setting.make(4.0, 5, 1)
    prompts = [job.rounds[0].prompt_tokens - 100 for job in jobs]
    assert prompts == [(prompts[0] + n) % 10 for n in range(5)]
    assert [job.arrival_s for job in jobs] == pytest.approx([n / 4 for n in range(5)])
    assert len(setting.make(4.0, 99, 0)) == 10
    assert setting.make(None, 1, 0) == setting.traffic[0].jobs(HARDWARE)


def test_a_window_as_recorded_knows_how_long_it_lasted() -> None:
    setting = Setting("here", HARDWARE, lengths="trace", traffic=tuple(steady(20).parts(2)))
    case = Case(replace(setting, warmup=0.2), FCFS)
    window = measure_window(case, None, 1)
    assert len(window.measures) == 8
    assert window.window_s == pytest.approx(4.0)
    assert case.shown_rate(None) == 2.0


def test_the_busiest_stretch_and_others_at_random() -> None:
    quiet = [TraceRequest(n * 1.0, 50, 5, "chat") for n in range(100)]
    busy = [TraceRequest(60.2 + n * 0.1, 3000, 50, "chat") for n in range(20)]
    made = traffic(*sorted(quiet + busy, key=lambda one: one.at_s))
    picked = chosen(made, HARDWARE, 3, 20, seed=0)
    assert len(picked) == 3
    assert max(one.prompt_tokens for one in picked[0].recording.requests) == 3000
    assert [part.first_row for part in picked[1:]] == sorted(part.first_row for part in picked[1:])
    assert len({part.first_row for part in picked}) == 3
    others = {tuple(part.first_row for part in chosen(made, HARDWARE, 3, 20, n)) for n in range(9)}
    assert len(others) > 1 and all(rows[0] == picked[0].first_row for rows in others)
    assert chosen(made, HARDWARE, 3, 50, 0) == tuple(made.parts(3))


def test_a_scenarios_jobs_with_the_operators_classes() -> None:
    jobs = make_jobs("mixed", HARDWARE, rate=2.0, count=9, seed=0)
    config = SLOConfig.model_validate({"classes": {"coder": {"ttft_ms": 400, "tpot_ms": 30}}})
    classed = with_classes(jobs, TrafficClasses(config))
    assert [job.arrival_s for job in classed] == [job.arrival_s for job in jobs]
    assert [job.tokens for job in classed] == [job.tokens for job in jobs]
    for job, before in zip(classed, jobs, strict=True):
        (asked,) = job.rounds
        named = before.application == "coder"
        assert asked.ttft_s == (0.4 if named else math.inf)
        assert slo_of(job, 0) == (
            SLO(ttft_ms=400, tpot_ms=30, slo_class="coder") if named else None
        )


# Bounds.


def test_the_least_work_of_a_lone_request_is_what_it_takes() -> None:
    (job,) = traffic(TraceRequest(0.0, 1000, 1, "chat")).jobs(HARDWARE)
    # It takes 0.4 s, and its share of a step whose memory is full.
    assert least_work_s([job], HARDWARE) == pytest.approx(0.4 + 0.01 * 1000 / 32_768)
    # Answers share steps: 64 requests fit in one, and a step of 64 tokens takes 35.6 ms.
    many = traffic(*(TraceRequest(0.0, 1, 101, "chat") for _ in range(64))).jobs(HARDWARE)
    least = least_work_s(many, HARDWARE)
    assert 0.02 * 101 < least <= run(many).end_s + 1e-9


@settings(max_examples=examples(15), deadline=None)
@given(recordings())
def test_no_run_undercuts_the_least_work(requests: list[TraceRequest]) -> None:
    jobs = traffic(*requests).jobs(HARDWARE)
    made = run(jobs)
    idle = sum(asked.wait_s for job in jobs for asked in job.rounds) + jobs[-1].arrival_s
    assert least_work_s(jobs, HARDWARE) <= made.end_s + 1e-9 or idle > made.end_s


@settings(max_examples=examples(15), deadline=None)
@given(recordings())
def test_no_run_attains_more_than_the_bound(requests: list[TraceRequest]) -> None:
    alone = [replace_class(one, one.slo_class) for one in requests]
    alone = [TraceRequest(o.at_s, o.prompt_tokens, o.output_tokens, o.slo_class) for o in alone]
    jobs = traffic(*alone).jobs(HARDWARE)
    made = measure_counted(run(jobs, "vllm-slo").results, 0.0)
    bound = ceiling(jobs, HARDWARE, warmup=0.0)
    asking = [one for one in made if one.has_objective] or made
    assert sum(one.attained for one in asking) <= bound.most
    assert bound.counted == len(asking)
