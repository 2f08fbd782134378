# SPDX-License-Identifier: Apache-2.0
"""Jobs of several rounds: what a round may take, what stays in the cache, what is reported."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm_slo import SLO
from vllm_slo.core.sessions.rounds import TIGHT, UNPACED, Session, Sessions
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.errors import InvalidSLOError
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.sim.jobs import own_text
from vllm_slo.slo.carriers import resolve_slo

KEY = (None, "job")
ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)

# --- what a round may take -----------------------------------------------------------------------


def begun(sessions: Sessions, now_s: float, **more: Any) -> Session:
    return sessions.begin(KEY, "agent", now_s, **{"has_objective": True, **more})


def test_what_is_left_is_divided_anew_for_every_round() -> None:
    sessions = Sessions(300.0)
    one = begun(sessions, 100.0, e2e_s=30.0, expected=3)
    first = sessions.pace(one, 100.0, 0.5, 21, last=False)
    assert first.ttft_s == TIGHT * 0.5
    assert first.ttft_s + 20 * first.tpot_s == pytest.approx(10.0)  # a third of the time
    # It took 4 s, its tool 2: 24 s are left, less one more tool, for two rounds.
    sessions.end(KEY, 104.0, attained=True, last=False)
    one = begun(sessions, 106.0)
    second = sessions.pace(one, 106.0, 0.5, 21, last=False)
    assert second.ttft_s + 20 * second.tpot_s == pytest.approx((24.0 - 2.0) / 2)
    # This one took 18 s: the last one has 4 s, whatever else it had asked for.
    sessions.end(KEY, 124.0, attained=True, last=False)
    one = begun(sessions, 126.0)
    assert one.rounds == 3
    third = sessions.pace(one, 126.0, 0.5, 21, last=True)
    assert third.ttft_s + 20 * third.tpot_s == pytest.approx(4.0)
    assert third.ttft_s == TIGHT * 0.5


@given(
    st.floats(0.1, 100),
    st.lists(st.tuples(st.floats(0.01, 1.0), st.floats(0, 2)), min_size=1, max_size=8),
    st.floats(0.001, 1),
)
def test_rounds_that_keep_their_pace_are_in_time_together(
    e2e_s: float, rounds: list[tuple[float, float]], lone_s: float
) -> None:
    """Each round takes a share of what it may; tools take what they take."""
    sessions, now_s = Sessions(1e9), 0.0
    tools_s = 0.0
    for number, (share, tool_s) in enumerate(rounds, start=1):
        one = begun(sessions, now_s, e2e_s=e2e_s, expected=len(rounds))
        last = number == len(rounds)
        pace = sessions.pace(one, now_s, lone_s, 11, last=last)
        if one.deadline_s <= now_s:
            assert pace == UNPACED
            return
        assert 0 < pace.ttft_s <= one.deadline_s - now_s
        assert pace.tpot_s > 0
        if pace.tpot_s < INFINITY:
            now_s += share * (pace.ttft_s + 10 * pace.tpot_s)
        assert now_s <= one.deadline_s * (1 + 1e-9)
        sessions.end(KEY, now_s, attained=True, last=last)
        tools_s += tool_s
        now_s += 0 if last else tool_s
    if tools_s == 0:
        assert now_s <= e2e_s * (1 + 1e-9)


def test_tools_that_take_longer_than_what_is_left_leave_a_round_some_of_it() -> None:
    sessions = Sessions(300.0)
    begun(sessions, 0.0, e2e_s=10.0, expected=3)
    sessions.end(KEY, 1.0, attained=True, last=False)
    one = begun(sessions, 8.0)  # its tool took 7 s, and 2 s are left with another one to come
    pace = sessions.pace(one, 8.0, 0.5, 21, last=False)
    assert pace.ttft_s + 20 * pace.tpot_s == pytest.approx(0.1 * 2.0 / 2)


def test_requests_that_overlap_are_one_round() -> None:
    sessions = Sessions(300.0)
    assert begun(sessions, 0.0).rounds == 1
    assert begun(sessions, 1.0).rounds == 1
    sessions.end(KEY, 2.0, attained=True, last=False)
    assert begun(sessions, 3.0).rounds == 1
    sessions.end(KEY, 4.0, attained=True, last=False)
    sessions.end(KEY, 4.0, attained=True, last=False)
    assert begun(sessions, 5.0).rounds == 2


def test_rounds_and_tools_are_learnt_by_class() -> None:
    sessions = Sessions(300.0)
    for _ in range(5):
        now_s = 0.0
        for number in range(1, 5):
            begun(sessions, now_s)
            sessions.end(KEY, now_s + 1, attained=True, last=number == 4)
            now_s += 3
    one = begun(sessions, 100.0, e2e_s=42.0)
    pace = sessions.pace(one, 100.0, 0.1, 11, last=False)
    # Three more rounds and three tools of 2 s are to come.
    assert pace.ttft_s + 10 * pace.tpot_s == pytest.approx((42 - 3 * 2) / 4)


def test_an_objective_that_is_lost_is_lost_for_the_whole_job() -> None:
    sessions = Sessions(300.0)
    begun(sessions, 0.0, e2e_s=10.0)
    sessions.end(KEY, 1.0, attained=False, last=False)
    begun(sessions, 2.0)
    closed = sessions.end(KEY, 3.0, attained=True, last=True)
    assert closed is not None
    assert closed.attained is False
    begun(sessions, 0.0, e2e_s=10.0)
    late = sessions.end(KEY, 11.0, attained=True, last=True)
    assert late is not None
    assert late.attained is False


@pytest.mark.slow
def test_quiet_sessions_end_and_there_are_never_too_many() -> None:
    sessions = Sessions(60.0)
    begun(sessions, 0.0)
    assert sessions.take_quiet(1000.0) == []  # its request is live
    sessions.end(KEY, 1000.0, attained=True, last=False)
    assert sessions.take_quiet(1059.0) == []
    assert [one.attained for one in sessions.take_quiet(1061.0)] == [True]
    for number in range(5000):
        sessions.begin((None, str(number)), "agent", 2000.0)
        sessions.end((None, str(number)), 2000.0, attained=None, last=False)
        sessions.take_quiet(2000.0)
    assert len(sessions) == 4096


# --- what is asked -------------------------------------------------------------------------------


def test_a_session_travels_in_every_carrier() -> None:
    slo = SLO(session_id="job-1", session_e2e_ms=5000, session_rounds=3, session_last=True)
    assert SLO.from_extra_args(slo.to_extra_args()) == slo
    nothing: dict[str, Any] = {"classes": {}, "service_tiers": {}}
    body = {
        "session_id": "job-1",
        "session_e2e_ms": 5000,
        "session_rounds": 3,
        "session_last": True,
    }
    assert resolve_slo(body_slo=body, **nothing) == slo
    named = resolve_slo(headers={"X-SLO-Session-Id": "job-1"}, **nothing)
    assert named == SLO(session_id="job-1")
    assert not SLO(session_id="job-1").has_objective
    assert slo.effective_tier == "guaranteed"


@pytest.mark.parametrize("field", ["session_e2e_ms", "session_rounds", "session_last"])
def test_what_is_said_of_no_session_is_refused(field: str) -> None:
    alone: dict[str, Any] = {field: 1}
    with pytest.raises(InvalidSLOError, match="add session_id") as caught:
        SLO(ttft_ms=5, **alone)
    assert caught.value.field == field


def test_a_class_of_sessions_says_nothing_of_requests_that_are_in_none() -> None:
    classes = {"agent": SLO(ttft_ms=500, session_e2e_ms=9000, slo_class="agent")}
    plain = resolve_slo(body_slo={"class": "agent"}, classes=classes, service_tiers={})
    assert plain is not None
    assert plain.session_e2e_ms is None
    round_ = resolve_slo(
        body_slo={"class": "agent", "session_id": "x"}, classes=classes, service_tiers={}
    )
    assert round_ is not None
    assert round_.session_e2e_ms == 9000


# --- the scheduler -------------------------------------------------------------------------------


@pytest.fixture
def engine(config_folder: Path) -> Callable[..., VirtualEngine]:
    def make(model: StepTimeModel = ROOFLINE, **options: Any) -> VirtualEngine:
        return VirtualEngine(
            Scheduler, config_folder, model.predict_shape_s, believed=model, **options
        )

    return make


def rounds(
    engine: VirtualEngine, count: int, slo: dict[str, Any], tool_s: float = 0.5
) -> list[dict[str, Any]]:
    """A tool loop through the engine; its reports."""
    text: list[int] = list(range(3, 67))
    reports = []
    for number in range(count):
        last = number + 1 == count
        name = f"round{number}"
        asked = SLO(session_id="job", session_last=last, **slo)
        engine.add(name, text, 20, asked, max_tokens=40)
        engine.run()
        seen = engine.outcomes[name]
        assert seen.report is not None
        reports.append(seen.report)
        text = [*text, *seen.token_ids, *range(3, 35)]
        engine.clock.advance(tool_s)
    return reports


def test_every_round_tells_how_the_session_is_doing(engine: Any) -> None:
    one = engine()
    reports = rounds(one, 3, {"ttft_ms": 500, "tpot_ms": 100, "session_e2e_ms": 60_000})
    assert [report["session"]["round"] for report in reports] == [1, 2, 3]
    assert all(report["promised"] and report["attained"] for report in reports)
    assert all(report["session"]["attained"] for report in reports)
    elapsed = [report["session"]["elapsed_ms"] for report in reports]
    assert elapsed == sorted(elapsed)
    assert elapsed[2] > elapsed[0] + 1000  # two tools
    count = one.scheduler.parts.metrics.registry.get_sample_value
    labels = {"engine": "0", "slo_class": "custom", "attained": "true"}
    assert count("vllm_slo:sessions_finished_total", labels) == 1


def test_a_whole_job_that_is_late_has_not_attained(engine: Any) -> None:
    reports = rounds(engine(), 3, {"ttft_ms": 500, "session_e2e_ms": 900}, tool_s=0.4)
    assert [report["session"]["attained"] for report in reports] == [True, False, False]
    assert reports[2]["attained"] is False


def test_a_session_paces_a_round_that_asks_for_nothing_else(engine: Any) -> None:
    one = engine()
    asked = SLO(session_id="job", session_e2e_ms=4000, session_rounds=2, expected_output_tokens=21)
    one.add("round", 64, 21, asked, max_tokens=40)
    tracked = one.scheduler.parts.tracker.live["round"]
    lone_s = ROOFLINE.predict_s(64)
    assert tracked.deadline_s == pytest.approx(TIGHT * lone_s)
    assert tracked.tpot_s == pytest.approx((2.0 - TIGHT * lone_s) / 20)
    one.run()
    report = one.outcomes["round"].report
    assert report["promised"]
    assert report["attained"]


def test_a_round_is_judged_by_what_it_asked_for_itself(engine: Any) -> None:
    # By its session it is to begin within 0.1 s; its own objective is 5 s, and it takes longer.
    one = engine()
    one.add("busy", 1500, 40, None)
    one.step()
    asked = SLO(ttft_ms=5000, session_id="job", session_e2e_ms=600, session_last=True)
    one.add("round", 64, 4, asked, max_tokens=8)
    one.clock.advance(0.3)
    one.run()
    report = one.outcomes["round"].report
    assert report["ttft_ms"] > 250
    assert report["attained"] is (report["session"]["elapsed_ms"] <= 600)


def flood(engine: VirtualEngine, tokens: int, seed: int) -> None:
    """Prompts that nobody else has, one after the other."""
    rng = random.Random(seed)
    done = 0
    while done < tokens:
        length = rng.randint(100, 400)
        engine.add(f"flood{seed}.{done}", length, 4)
        engine.run()
        done += length


@pytest.mark.parametrize(("share", "found"), [(0.25, True), (0.0, False)])
def test_a_prefix_stays_while_tools_run(engine: Any, share: float, found: bool) -> None:
    one = engine(shape=EngineShape(num_blocks=201), slo_config={"sessions": {"kv_share": share}})
    one.add("first", 320, 32, SLO(ttft_ms=5000, session_id="job"))
    one.run()
    text = [*own_text("first", 320), *one.outcomes["first"].token_ids]
    flood(one, 12_000, 1)  # nearly four times what the cache holds
    request = one.add("second", [*text, *range(3, 50)], 4, SLO(ttft_ms=5000, session_id="job"))
    one.run()
    computed = sum(out.num_scheduled_tokens.get("second", 0) for out in one.history)
    cached = request.num_prompt_tokens + 3 - computed  # the last token is not computed
    assert (cached >= 320) is found


def test_a_round_that_a_stop_string_ended_counts_and_stays_warm(engine: Any) -> None:
    one = engine()
    parts = one.scheduler.parts
    parts.marks.has_stopped = lambda request: request.request_id == "stops"
    for name in ("stops", "leaves"):
        one.add(name, 64, 32, SLO(ttft_ms=5000, session_id=name))
        for _ in range(4):
            one.step()
        before = parts.sessions.gauges()["warm_prefix_blocks"]
        one.abort(name)  # as vLLM's API server does for either
        warm = parts.sessions.gauges()["warm_prefix_blocks"]
        assert (warm > before) is (name == "stops")
    samples = [s for metric in parts.metrics.registry.collect() for s in metric.samples]
    finished = [s.value for s in samples if s.name == "vllm_slo:requests_finished_total"]
    assert sum(finished) == pytest.approx(1)


def test_warm_prefixes_withhold_no_memory(engine: Any) -> None:
    one = engine(shape=EngineShape(num_blocks=101, max_num_seqs=8))
    pool = one.scheduler.kv_cache_manager.block_pool
    for number in range(6):
        one.add(f"job{number}", 60, 4, SLO(ttft_ms=5000, session_id=f"job{number}"))
        one.run()
    parts = one.scheduler.parts
    assert 0 < parts.sessions.gauges()["warm_prefix_blocks"] <= 50
    assert pool.get_num_free_blocks() == 100
    one.add("large", 1500, 64, SLO(ttft_ms=9000))
    one.run()
    assert one.outcomes["large"].finish_reason == "stop"
    assert one.outcomes["large"].report["attained"]
    flood(one, 3000, 2)
    assert pool.get_num_free_blocks() == 100
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)


def test_best_effort_leaves_a_warm_prefix_alone(engine: Any) -> None:
    """Beside a promise, so that steps are planned, best effort could use eight times the cache."""
    one = engine(shape=EngineShape(num_blocks=201))
    for number in range(10):  # how long such answers are is known from now on
        one.add(f"before{number}", 60, 200)
    one.run()
    one.add("first", 640, 32, SLO(ttft_ms=5000, session_id="job"))
    one.run()
    text = [*own_text("first", 640), *one.outcomes["first"].token_ids]
    warm = one.scheduler.parts.sessions.gauges()["warm_prefix_blocks"]
    one.add("promised", 32, 400, SLO(ttft_ms=5000, tpot_ms=200, expected_output_tokens=400))
    for number in range(32):
        one.add(f"batch{number}", 600, 200)
    for _ in range(300):
        one.step()
    assert one.scheduler.parts.sessions.gauges()["warm_prefix_blocks"] == warm
    one.add("second", [*text, *range(3, 50)], 4, SLO(ttft_ms=5000, session_id="job"))
    one.run()
    computed = sum(out.num_scheduled_tokens.get("second", 0) for out in one.history)
    assert computed < 100, "only what is new is computed"
    assert one.outcomes["second"].report["attained"]


def test_a_round_without_a_promise_finds_its_own_warm_prefix(engine: Any) -> None:
    """Of 100 blocks 41 are warm and 25 are set aside: the round needs 46, where 34 are left."""
    one = engine(shape=EngineShape(num_blocks=101))
    for number in range(10):
        one.add(f"before{number}", 20, 8)
    one.run()
    one.add("first", 640, 32, SLO(ttft_ms=5000, session_id="job"))
    one.run()
    text = [*own_text("first", 640), *one.outcomes["first"].token_ids]
    one.add("promised", 32, 368, SLO(ttft_ms=5000, tpot_ms=400, expected_output_tokens=368))
    for _ in range(4):
        one.step()
    asked = SLO(ttft_ms=5000, session_id="job", tier="best_effort")
    one.add("second", [*text, *range(3, 50)], 8, asked)
    for _ in range(20):
        one.step()
    assert one.outcomes["second"].finish_reason == "stop"
    computed = sum(out.num_scheduled_tokens.get("second", 0) for out in one.history)
    assert computed < 100


def test_sessions_that_begin_alike_are_kept_warm_in_bounds(engine: Any) -> None:
    """Half of 40 blocks may be warm, and each may be part of two prefixes on average."""
    one = engine(shape=EngineShape(num_blocks=41))
    system = list(range(3, 3 + 160))
    for number in range(8):
        name = f"job{number}"
        one.add(name, [*system, *own_text(name, 32)], 1, SLO(ttft_ms=5000, session_id=name))
        one.run()
    warm = one.scheduler.parts.sessions.gauges()["warm_prefix_blocks"]
    assert warm == 10 + 3 * 2  # three prefixes of twelve blocks are 36 of 40 entries


def test_a_starved_request_may_take_warm_blocks(engine: Any) -> None:
    one = engine(shape=EngineShape(num_blocks=101), slo_config={"ageing_s": 1.0})
    one.add("first", 640, 32, SLO(ttft_ms=5000, session_id="job"))
    one.run()
    one.add("promised", 32, 400, SLO(ttft_ms=5000, tpot_ms=200))
    one.add("large", 1200, 16)
    for _ in range(200):
        one.step()
    assert one.outcomes["large"].finish_reason == "stop"
    assert one.scheduler.requests, "the promised request has not ended yet"


def test_shared_blocks_of_warm_prefixes_count_once(engine: Any) -> None:
    one = engine(shape=EngineShape(num_blocks=201))
    system = list(range(3, 3 + 320))
    for job in ("a", "b", "c"):
        one.add(job, [*system, *own_text(job, 64)], 1, SLO(ttft_ms=5000, session_id=job))
        one.run()
    assert one.scheduler.parts.sessions.gauges()["warm_prefix_blocks"] == 20 + 3 * 4


def test_a_session_that_is_lost_stands_back(engine: Any) -> None:
    one = engine()
    asked: dict[str, Any] = {"ttft_ms": 600, "session_id": "job"}
    one.add("lost", 64, 4, SLO(**{**asked, "ttft_ms": 0.001}))
    one.run()
    one.add("next", 64, 4, SLO(**asked))
    one.add("strict", 64, 4, SLO(**asked, on_unattainable="decline"))
    one.add("other", 64, 4, SLO(**{**asked, "session_id": "other"}))
    one.run()
    following = one.outcomes["next"].report
    assert (following["promised"], following["reason"]) == (False, "session")
    assert following["attained"]
    assert following["session"]["attained"] is False
    assert one.outcomes["strict"].report["promised"]
    assert one.outcomes["other"].report["promised"]
