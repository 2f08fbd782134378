# SPDX-License-Identifier: Apache-2.0
"""When requests are sent: open and closed loop, sessions, the end of a run; on virtual time."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.bench.pacing import closed_loop, open_loop
from vllm_slo.bench.planned import PlannedRequest

NEVER_S = 1e6


class _Selector(selectors.DefaultSelector):
    """Never waits: the time that would pass is added to the loop's clock."""

    loop: Any = None

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout:
            self.loop.virtual_s += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while all tasks sleep."""

    virtual_s = 0.0

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.virtual_s


def request(at_s: float, session: str = "", think_s: float = 0.0, lasts_s: int = 1) -> Any:
    """``lasts_s``: how long its answer takes."""
    made = PlannedRequest("", at_s, "c", 5, lasts_s, None, None, session=session)
    return replace(made, think_s=think_s)


class Server:
    """Answers in as many seconds as tokens are asked for; notes when it got and ended what."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, float]] = []
        self.open = 0
        self.most_open = 0

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def send(self, asked: PlannedRequest, due_s: float) -> tuple[float, float, float | None]:
        """(due, sent, ended); a request that is cut off has no end."""
        sent_s = self.now_s()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(asked.output_tokens)
        except asyncio.CancelledError:
            return due_s, sent_s, None
        finally:
            self.open -= 1
        return due_s, sent_s, self.now_s()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def opened(requests: Sequence[PlannedRequest], drain_s: float = NEVER_S) -> list[Any]:
    server = Server()
    return list(run(open_loop(requests, server.send, server.now_s, drain_s)))


def closed(
    requests: Sequence[PlannedRequest], concurrency: int, drain_s: float = NEVER_S
) -> tuple[list[Any], Server]:
    server = Server()
    results = run(closed_loop(requests, server.send, server.now_s, drain_s, concurrency))
    return list(results), server


def test_open_loop_waits_for_no_answer() -> None:
    results = opened([request(0.0, lasts_s=50), request(1.0, lasts_s=50), request(1.0)])
    assert [sent_s for _, sent_s, _ in results] == [0.0, 1.0, 1.0]
    assert [ended_s for *_, ended_s in results] == [50.0, 51.0, 2.0]


def test_a_round_waits_for_the_answer_before_it_and_the_think_time() -> None:
    results = opened(
        [
            request(0.0, "a", lasts_s=10),
            request(2.0, "b", lasts_s=1),
            request(4.0, "a", think_s=3.0, lasts_s=1),  # the first answer ends at 10
            request(5.0, "a", think_s=1.0, lasts_s=1),
            request(6.0, "b", think_s=1.0, lasts_s=1),  # the answer ended at 3, thought until 4
        ]
    )
    assert [sent_s for _, sent_s, _ in results] == [0.0, 2.0, 13.0, 15.0, 6.0]
    assert all(due_s == sent_s for due_s, sent_s, _ in results)


def test_what_is_unfinished_is_cut_off() -> None:
    results = opened([request(0.0, "a", lasts_s=90), request(1.0), request(2.0, "a")], drain_s=5.0)
    assert results == [(0.0, 0.0, None), (1.0, 1.0, 2.0), None]
    thinks = [request(0.0, "a"), request(1.0, "a", think_s=50.0)]
    assert opened(thinks, drain_s=5.0) == [(0.0, 0.0, 1.0), None]


def test_closed_loop_keeps_so_many_open() -> None:
    requests = [request(at_s, lasts_s=at_s) for at_s in (30, 10, 10, 10)]
    results, server = closed(requests, 2)
    assert [sent_s for _, sent_s, _ in results] == [0, 0, 10, 20]
    assert server.most_open == 2


def test_a_round_of_a_closed_loop_lets_others_pass() -> None:
    requests = [request(0.0, "a", lasts_s=9), request(0.0, "a", think_s=99.0), request(0.0)]
    results, server = closed(requests, 2)
    assert [sent_s for _, sent_s, _ in results] == [0, 9, 0]
    assert server.most_open == 2


def test_a_closed_loop_ends_if_no_answer_does() -> None:
    stuck = [request(0.0, lasts_s=1), request(0.0, lasts_s=900), request(0.0, lasts_s=900)]
    results, _ = closed([*stuck, request(0.0)], 2, drain_s=60.0)
    assert [result and result[2] for result in results] == [1.0, None, None, None]
    assert results[3] is None
    assert results[2] is not None


arrivals = st.lists(
    st.tuples(st.integers(0, 20), st.sampled_from(["", "", "a", "b"]), st.integers(1, 9)),
    min_size=1,
    max_size=12,
)


@given(arrivals, st.integers(1, 4))
def test_any_replay_sends_all_and_keeps_the_order_of_rounds(
    rows: list[tuple[int, str, int]], concurrency: int
) -> None:
    requests = [request(at_s, name, 0.5, lasts_s=long) for at_s, name, long in sorted(rows)]
    results, server = closed(requests, concurrency)
    assert server.most_open <= concurrency
    for sent in (results, opened(requests)):
        assert None not in sent
        for name in ("a", "b"):
            pairs = zip(requests, sent, strict=True)
            rounds = [times for asked, times in pairs if asked.session == name]
            for (_, _, ended_s), (_, next_s, _) in itertools.pairwise(rounds):
                assert next_s >= ended_s
    for asked, (_, sent_s, _) in zip(requests, opened(requests), strict=True):
        assert sent_s >= asked.at_s
        assert asked.session or sent_s == pytest.approx(asked.at_s)
