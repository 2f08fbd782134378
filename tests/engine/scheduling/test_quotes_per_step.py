# SPDX-License-Identifier: Apache-2.0
"""Many quotes at once: a step answers a few of them, and none is forgotten or served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import RequestStatus

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.scheduling.quotes import MOST_IN_STEP, TIME_SHARE
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.slo.verdicts import unpack_quote

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
STEP_S = ROOFLINE.predict_s(1)
ASKED = SLO(ttft_ms=5000, tpot_ms=100)

Make = Callable[..., "AskedEngine"]


class AskedEngine(VirtualEngine):
    """A virtual engine in which a quote takes ``quote_s`` seconds of the scheduler's time.

    Attributes:
        per_step: how many quotes each ``schedule()`` worked out.
    """

    def __init__(self, *args: Any, quote_s: float = 0.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.per_step: list[int] = []
        parts = self.scheduler.parts
        answer, schedule = parts.quotes.answer, self.scheduler.schedule

        def timed_answer(*arguments: Any) -> Any:
            self.clock.advance(quote_s)
            self.per_step[-1] += 1
            return answer(*arguments)

        def counted_schedule(*arguments: Any) -> Any:
            self.per_step.append(0)
            return schedule(*arguments)

        parts.quotes.answer = timed_answer
        self.scheduler.schedule = counted_schedule

    def ask(self, count: int, **options: Any) -> list[str]:
        """So many quotes at once; their ids."""
        names = [f"ask{i}" for i in range(count)]
        for name in names:
            self.add(name, 200, 50, ASKED, quote=True, **options)
        return names

    def answers(self, names: list[str]) -> list[Any]:
        return [unpack_quote(self.outcomes[name].stop_reason) for name in names]

    def served(self) -> set[str]:
        """Requests that were ever in a step."""
        return {name for output in self.history for name in output.num_scheduled_tokens}


@pytest.fixture
def engine(config_folder: Path) -> Make:
    def make(**options: Any) -> AskedEngine:
        options.setdefault("shape", EngineShape(max_num_seqs=1200))
        return AskedEngine(
            Scheduler, config_folder, ROOFLINE.predict_shape_s, believed=ROOFLINE, **options
        )

    return make


@pytest.mark.parametrize("overlap", [False, True])
def test_a_flood_of_quotes_breaks_no_promise(engine: Make, overlap: bool) -> None:
    one = engine(quote_s=0.0015, overlap=overlap)
    promised = [f"r{i}" for i in range(16)]
    for name in promised:
        one.add(name, 64, 600, SLO(ttft_ms=3000, tpot_ms=40))
    for _ in range(20):
        one.step()
    asking = one.ask(1000)
    one.run()
    assert max(one.per_step) <= MOST_IN_STEP
    assert None not in one.answers(asking)
    assert all(answer["promised"] for answer in one.answers(asking))
    reports = [one.outcomes[name].report for name in promised]
    assert all(report and report["promised"] and report["attained"] for report in reports)
    assert one.served() == set(promised)


@pytest.mark.parametrize(
    ("quote_s", "most"),
    [(0.0, MOST_IN_STEP), (TIME_SHARE * STEP_S / 3.5, 3), (10 * STEP_S, 1)],
)
def test_a_step_answers_so_many_and_takes_no_longer(
    engine: Make, quote_s: float, most: int
) -> None:
    one = engine(quote_s=quote_s)
    names = one.ask(20)
    one.run()
    assert one.per_step[: 20 // most] == [most] * (20 // most)
    assert sum(one.per_step) == 20
    assert None not in one.answers(names)


@pytest.mark.parametrize("overlap", [False, True])
def test_long_steps_leave_time_for_more_quotes(engine: Make, overlap: bool) -> None:
    """One request runs, but each step has 2,048 tokens of its prompt."""
    long_step_s = ROOFLINE.predict_s(2048)
    one = engine(quote_s=TIME_SHARE * long_step_s / 4.5, overlap=overlap)
    one.add("prompts", 3900, 1)
    one.add("more", 3900, 1)
    one.step()
    one.step()
    names = one.ask(20)
    first = len(one.per_step)
    one.step()
    one.step()
    assert one.per_step[first : first + 2] == [4, 4]
    one.run()
    assert None not in one.answers(names)


@pytest.mark.parametrize("order", ["fcfs", "laps_sd"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_quotes_that_wait_are_never_served_and_hold_up_nobody(
    engine: Make, order: str, policy: str
) -> None:
    one = engine(scheduling_policy=policy, slo_config={"best_effort": {"order": order}})
    names = one.ask(50)
    one.add("plain", 100, 5)
    one.add("chat", 100, 5, ASKED)
    one.step()
    # Both began at once, though the quotes came before them.
    assert set(one.history[0].num_scheduled_tokens) == {"plain", "chat"}
    one.run()
    assert one.served() == {"plain", "chat"}
    assert None not in one.answers(names)
    assert not one.scheduler.requests


def test_one_who_leaves_is_dropped(engine: Make) -> None:
    one = engine()
    names = one.ask(30)
    one.step()
    for name in names[8:20]:
        one.abort(name)
    one.run()
    assert one.per_step[:3] == [8, 8, 2]
    assert None not in one.answers(names[:8] + names[20:])
    assert {one.outcomes[name].stop_reason for name in names[8:20]} == {None}
    assert not one.scheduler.parts.quotes
    assert not one.scheduler.requests


def test_all_are_dropped_when_everything_is_aborted(engine: Make) -> None:
    one = engine()
    one.ask(30)
    one.step()
    one.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert not one.scheduler.parts.quotes
    assert not one.scheduler.requests
    assert one.scheduler.get_request_counts() == (0, 0)


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_quotes_outlast_a_pause(engine: Make, state: PauseState) -> None:
    one = engine()
    one.add("runs", 50, 20, ASKED)
    one.step()
    names = one.ask(20)
    one.scheduler.set_pause_state(state)
    for _ in range(40):
        one.step()
    # vLLM waits for this before it says that it is paused.
    assert not one.scheduler.has_requests()
    assert one.per_step == [0] * len(one.per_step)
    one.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert one.scheduler.has_requests()
    one.run()
    assert None not in one.answers(names)
    assert max(one.per_step) == MOST_IN_STEP


def test_steps_go_on_until_every_quote_is_answered(engine: Make) -> None:
    """As vLLM's engine does it: it steps as long as ``has_requests()`` says so."""
    one = engine()
    names = one.ask(20)
    steps = 0
    while one.scheduler.has_requests():
        assert one.scheduler.get_request_counts()[0] == 0
        one.step()
        steps += 1
        assert steps < 10
    assert None not in one.answers(names)
    assert not one.scheduler.has_requests()


def test_quotes_that_wait_do_not_shorten_a_lone_prompt(engine: Make) -> None:
    """vLLM cuts long prompts only where somebody else is to be served."""
    one = engine(long_prefill_token_threshold=100)
    one.ask(50)
    one.add("long", 1500, 5)
    one.step()
    assert one.history[0].num_scheduled_tokens == {"long": 1500}


def test_a_front_is_not_told_of_quotes(engine: Make) -> None:
    one = engine()
    one.ask(50)
    state = one.scheduler.state()
    assert (state.running, state.waiting, state.backlog_tokens) == (0, 0, 0)


def test_the_queue_of_vllm_holds_no_quote(engine: Make) -> None:
    one = engine()
    one.ask(5)
    queue: RequestQueue = one.scheduler.waiting
    assert not list(queue)
    assert one.scheduler.get_request_counts() == (0, 5)
