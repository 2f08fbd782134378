# SPDX-License-Identifier: Apache-2.0
"""What policies see of a request: views, and how a tracked request is doing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from vllm_slo.core.attainment import WindowTPOT
from vllm_slo.core.lengths.output_length import LengthPrediction
from vllm_slo.core.types import INFINITY
from vllm_slo.engine.scheduling import request_facts, request_views
from vllm_slo.engine.scheduling.decode_model import TokenYields
from vllm_slo.engine.scheduling.slo_request import UNCLASSED, SLORequest
from vllm_slo.slo.model import SLO


def request(**fields: Any) -> Any:
    """A running request that decodes, as far as views look."""
    plain = {
        "request_id": "r",
        "arrival_time": 1000.0,
        "num_tokens": 20,
        "num_tokens_with_spec": 20,
        "num_output_placeholders": 0,
        "num_computed_tokens": 19,
        "num_prompt_tokens": 15,
        "max_tokens": 100,
        "num_output_tokens": 5,
        "is_prefill_chunk": False,
        "status": RequestStatus.RUNNING,
        "lora_request": None,
        "sampling_params": None,
    }
    return SimpleNamespace(**(plain | fields))


def tracked(slo: SLO | None = None, times: list[float] | None = None, **fields: Any) -> SLORequest:
    one = SLORequest(request(**fields), slo or SLO(ttft_ms=2000, tpot_ms=1000), 100.0, window=10)
    for time_s in times or []:
        one.on_tokens(1, time_s)
    return one


# --- SLORequest
# -------------------------------------------------------------------------------------


def test_objectives_become_times() -> None:
    one = tracked(SLO(ttft_ms=1500, tpot_ms=40, slo_class="chat"))
    assert (one.deadline_s, one.tpot_s, one.slo_class) == (101.5, 0.04, "chat")
    none = tracked(SLO(tier="best_effort"))
    assert (none.deadline_s, none.tpot_s, none.slo_class) == (INFINITY, INFINITY, UNCLASSED)


@pytest.mark.parametrize(
    ("times", "missed"),
    [
        ([], False),
        ([102.0], False),  # equality keeps it
        ([102.001], True),
        ([101.0, 109.0], False),  # the window is open: eight tokens may still come at once
        ([101.0 + i * 1.05 for i in range(10)], False),
        ([101.0 + i * 1.05 for i in range(11)], True),  # full, and half a second late
        ([101.0 + i for i in range(31)], False),
        # A full window in time, then a late token: the second window may recover.
        ([*[101.0 + i for i in range(11)], 113.0], False),
        ([*[101.0 + i for i in range(11)], *[113.0 + i for i in range(10)]], True),
        # A late window is not forgotten after a fast one.
        ([*[101.0 + 2 * i for i in range(11)], *[121.5 + i / 10 for i in range(30)]], True),
    ],
)
def test_only_what_cannot_recover_is_missed(times: list[float], missed: bool) -> None:
    one = tracked(times=times)
    assert one.missed is missed


def test_without_a_tpot_no_pace_is_missed() -> None:
    assert not tracked(SLO(ttft_ms=2000), [101.0 + 60 * i for i in range(40)]).missed


@given(st.lists(st.floats(0, 3), min_size=10, max_size=45))
def test_a_request_that_missed_its_pace_can_end_well_only_in_the_tail_of_that_window(
    gaps: list[float],
) -> None:
    times = [101.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    ended = tracked(times=times)
    # Two full windows later nothing can join the late one any more.
    early = tracked(times=times[: max(len(times) - 20, 1)])
    if early.missed:
        assert ended.attained() is False
    if ended.attained() and len(gaps) % 10 == 0:
        assert not ended.missed


@given(st.lists(st.floats(0, 3), max_size=45), st.integers(1, 12))
def test_the_worst_full_window_against_its_definition(gaps: list[float], window: int) -> None:
    times = [5.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    measured = WindowTPOT(window)
    for count, time_s in enumerate(times):
        measured.add(time_s)
        starts = range(0, count - window + 1, window)
        full = [(times[i + window] - times[i]) / window for i in starts]
        assert measured.worst_full_s == max(full, default=None)


def test_a_promise_is_asked_for_while_it_can_be_kept() -> None:
    assert tracked().wants_promise(101.9)
    assert not tracked().wants_promise(102.0)
    assert tracked(SLO(tpot_ms=50)).wants_promise(1e9)
    assert not tracked(SLO(ttft_ms=2000, tier="best_effort")).wants_promise(101.0)
    assert tracked(times=[101.0]).wants_promise(500.0)  # its first token was in time
    assert not tracked(times=[103.0]).wants_promise(103.0)
    one = tracked()
    one.promise()
    assert not one.wants_promise(101.0)
    assert one.was_promised


@pytest.mark.parametrize(
    ("slo", "times", "expected"),
    [
        (SLO(ttft_ms=2000, tpot_ms=1000), [101.0, 102.0, 103.0], True),
        (SLO(ttft_ms=2000, tpot_ms=1000), [101.0], True),  # one token has no pace
        (SLO(ttft_ms=2000, tpot_ms=1000), [102.5, 103.0], False),
        (SLO(ttft_ms=2000, tpot_ms=1000), [101.0, 103.0], False),
        (SLO(ttft_ms=2000), [], False),
        (SLO(tpot_ms=1000), [900.0, 901.0], True),
        (SLO(tier="best_effort"), [900.0], None),
    ],
)
def test_attainment(slo: SLO, times: list[float], expected: bool | None) -> None:
    assert tracked(slo, times).attained() is expected


def test_the_report_is_in_milliseconds() -> None:
    one = tracked(times=[101.25, 101.75])
    assert one.report(one.attained()) == {
        "tier": "best_effort",
        "promised": False,
        "late": False,
        "reason": None,
        "ttft_ms": 1250.0,
        "tpot_ms": 500.0,
        "attained": True,
    }
    one.promise()
    one.promised = False  # withdrawn later: it was given all the same
    assert one.report(False)["tier"] == "guaranteed"
    assert one.report(False)["promised"] is True
    silent = tracked().report(None)
    assert (silent["ttft_ms"], silent["tpot_ms"], silent["attained"]) == (None, None, None)


@pytest.mark.parametrize(
    ("now_s", "age_s"),
    [(1002.5, 2.5), (1000.0, 0.0), (400.0, 0.0), (1e9, 86_400.0)],
)
def test_age_survives_clocks_that_jump(now_s: float, age_s: float) -> None:
    assert request_facts.age_s(request(), now_s) == age_s


# --- decode views --------------------------------------------------------------------------------


def test_a_decode_is_due_one_tpot_after_the_last_token() -> None:
    view = request_views.decode_view(tracked(times=[101.0]), 101.0)
    assert view == ("r", 102.0, 111.0, 10, 1.0, 1, 19, True, 0.0)


def test_lateness_stays_within_its_window() -> None:
    late = [101.0, 103.0, 104.0]  # the first gap took two
    view = request_views.decode_view(tracked(times=late), 104.0)
    assert (view.due_s, view.window_end_s, view.window_left) == (104.0, 111.0, 8)
    late += [105.0 + i for i in range(8)]
    view = request_views.decode_view(tracked(times=late), 112.0)
    assert (view.due_s, view.window_end_s, view.window_left) == (113.0, 122.0, 10)


def test_tokens_in_flight_count() -> None:
    one = tracked(times=[101.0, 102.0], num_output_placeholders=1)
    view = request_views.decode_view(one, 102.5)
    assert (view.due_s, view.window_end_s, view.window_left) == (104.0, 111.0, 8)


def test_tokens_in_flight_that_end_a_window_begin_the_next_where_they_come_out() -> None:
    one = tracked(times=[101.0 + i for i in range(10)], num_output_placeholders=1)
    view = request_views.decode_view(one, 110.75)
    assert (view.due_s, view.window_end_s, view.window_left) == (111.75, 120.75, 10)
    one.request.num_output_placeholders = 3  # speculation: more than one token in flight
    view = request_views.decode_view(one, 110.75)
    assert view.window_left == 8


@pytest.mark.parametrize("start_s", [0.5, 5000.0])
def test_a_first_token_in_flight_is_followed_one_tpot_later(start_s: float) -> None:
    """Whatever the clock reads: nothing about the request's past says when that is."""
    view = request_views.decode_view(tracked(num_output_placeholders=1), start_s)
    assert (view.due_s, view.window_left) == (start_s + 1.0, 10)


def test_a_working_tpot_is_tighter_than_the_objective() -> None:
    view = request_views.decode_view(tracked(times=[101.0]), 101.0, strength=0.9)
    assert (view.due_s, view.window_end_s, view.tpot_s) == (101.9, 110.0, 0.9)


def test_without_a_tpot_a_decode_is_never_due() -> None:
    view = request_views.decode_view(tracked(SLO(ttft_ms=2000), [101.0]), 101.0)
    assert (view.due_s, view.window_end_s, view.tpot_s) == (INFINITY,) * 3
    assert view.window_left == 1


def test_speculated_tokens_are_part_of_a_decode_step() -> None:
    assert request_views.decode_view(tracked(times=[1.0], num_tokens_with_spec=24), 1.0).tokens == 5
    assert (
        request_views.best_effort_view(request(num_tokens_with_spec=24), 7.0).remaining_tokens == 5
    )


def test_a_first_window_has_a_strength_of_its_own() -> None:
    """An answer that ends in it is judged by the few steps that it had."""
    young = tracked(times=[101.0, 102.0], spec_token_ids=[])
    old = tracked(times=[101.0 + i for i in range(12)], spec_token_ids=[])
    for one, due_s in ((young, 0.8), (old, 0.95)):
        start_s = one.last_token_s
        (view_s,) = request_views.decode_rows([one], start_s, (0.95, 0.8), TokenYields()).tpot_s
        assert view_s == pytest.approx(due_s)


# --- the other views -----------------------------------------------------------------------------


def test_a_waiting_request_wants_its_prompt() -> None:
    waiting: dict[str, Any] = {"num_computed_tokens": 0, "num_tokens": 15, "num_output_tokens": 0}
    waiting["status"] = RequestStatus.WAITING
    view = request_views.best_effort_view(request(**waiting), 7.0)
    assert view == ("r", 7.0, 15, False, 0, 0, False, True, 0, False)
    assert request_views.prefill_view(tracked(**waiting)) == ("r", 102.0, 15, 1.0, 0, True)


def test_a_first_token_is_to_come_before_what_its_last_step_may_overrun() -> None:
    assert request_views.prefill_view(tracked(), 0.25).deadline_s == 101.75
    resumed = tracked(times=[101.0], num_computed_tokens=0)
    assert request_views.prefill_view(resumed, 0.25).deadline_s == 100.0


def test_what_the_prefix_cache_holds_is_context_and_not_computed_again() -> None:
    waiting: dict[str, Any] = {"num_computed_tokens": 0, "num_tokens": 15, "num_output_tokens": 0}
    waiting["status"] = RequestStatus.WAITING
    one = tracked(**waiting)
    one.cached_tokens = 12
    assert request_views.prefill_view(one) == ("r", 102.0, 3, 1.0, 12, True)
    view = request_views.best_effort_view(request(**waiting), 7.0, 1)
    view = request_views.with_cached(view, 12)
    assert (view.remaining_tokens, view.context_tokens, view.starts) == (3, 12, True)
    begun = tracked(num_computed_tokens=14, num_tokens=15, num_output_tokens=0)
    begun.cached_tokens = 12
    assert request_views.prefill_view(begun) == ("r", 102.0, 1, 1.0, 14, False)


def test_a_preempted_request_is_resumed_by_one_prefill() -> None:
    """Its generated tokens are kept; its first token was out, so it is late already."""
    back = {"num_computed_tokens": 0, "status": RequestStatus.PREEMPTED}
    view = request_views.prefill_view(tracked(times=[101.0], **back))
    assert view.remaining_tokens == 20
    assert view.deadline_s <= 101.0
    other = request_views.best_effort_view(request(**back), 0.0)
    assert (other.decoding, other.begun) == (False, True)


def test_a_demand_is_a_prefill_until_the_first_token_and_a_rate_after_it() -> None:
    length = LengthPrediction(40, "learnt")
    waiting = tracked(num_computed_tokens=0, num_tokens=15)
    new = request_views.demand(waiting, 101.0, 102.0, 15.4, length, 3, guard_s=0.25)
    assert (new.deadline_s, new.prefill_tokens, new.blocks) == (101.75, 15, 3)
    assert new.context_tokens == 15 + 20
    begun = request_views.demand(tracked(times=[101.5]), 105.0, 102.0, 1.0, length, 3)
    assert (begun.deadline_s, begun.prefill_tokens, begun.tpot_s) == (105.0, 0, 1.0)


def test_small_questions() -> None:
    assert request_facts.is_decoding(request())
    assert not request_facts.is_decoding(request(is_prefill_chunk=True))
    assert not request_facts.is_decoding(request(num_computed_tokens=0))
    assert not request_facts.is_blocked(request(status=RequestStatus.WAITING))
    assert not request_facts.is_blocked(request(status=RequestStatus.PREEMPTED))
    assert request_facts.is_blocked(request(status=RequestStatus.WAITING_FOR_REMOTE_KVS))
    assert request_facts.holds_kv(request())
    assert request_facts.lora_id(request()) == 0
    assert request_facts.lora_id(request(lora_request=SimpleNamespace(lora_int_id=4))) == 4
