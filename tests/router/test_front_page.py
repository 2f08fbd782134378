# SPDX-License-Identifier: Apache-2.0
"""What anybody may ask the front about its replicas, and what it costs them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from depth import examples
from front_stack import Fake, FrontProcess, processes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from patience import patience
from prometheus_client import Metric

from vllm_slo.live.history import History
from vllm_slo.live.merge import LAG_MS, RECENT, MergedHistory, merged
from vllm_slo.router.upstream import KEPT_S, Once

ROUTING = {"stale_after_s": patience(5.0), "dead_after_s": patience(10.0)}
T0 = 1_700_000_000.0
STEP_S = 2.0


@pytest.fixture(scope="module")
def lasting() -> Iterator[FrontProcess]:
    with processes() as keep:
        yield keep(FrontProcess(ROUTING))


@pytest.fixture
def fakes() -> Iterator[list[Fake]]:
    """Replicas of which the front knows nothing yet."""
    with processes() as keep:
        yield [keep(Fake("a")), keep(Fake("b"))]


@pytest.fixture
def front(lasting: FrontProcess, fakes: list[Fake]) -> FrontProcess:
    time.sleep(KEPT_S)
    lasting.serve(*fakes)
    return lasting


def told(*requests: float, first: int = 0, reset: bool = False) -> dict[str, Any]:
    """What a replica says of its past, two seconds a sample, long ago."""
    times = (1_000_000 + 2_000 * (first + n) for n in range(len(requests)))
    return {
        "now": 2_000_000,
        "about": {"model": "fake", "classes": {}, "silent_s": 1.0},
        "series": [["vllm_slo:admissions_total", "chat", "promised", ""]],
        "samples": [[at, 2.0, {"0": count}, {}] for at, count in zip(times, requests, strict=True)],
        "reset": reset,
    }


def asked(fake: Fake) -> list[str]:
    return [one["path"] for one in fake.seen()]


def counts(answer: dict[str, Any]) -> list[float]:
    return [sample[2]["0"] for sample in answer["samples"]]


def test_the_page_adds_up_what_replicas_say(front: FrontProcess, fakes: list[Fake]) -> None:
    fakes[0].knobs(page=told(3, 5, reset=True))
    fakes[1].knobs(page=told(4, 6, reset=True))
    page = front.get("/slo")
    assert page.headers["content-type"].startswith("text/html")
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
    first = front.get("/slo/data").json()
    assert first["samples"] == [[1_000_000, 2.0, {"0": 7}, {}], [1_002_000, 2.0, {"0": 11}, {}]]
    assert first["reset"]
    assert first["about"]["model"] == "fake"
    later = front.get("/slo/data?since=1000000&other=1&minutes=2").json()
    assert counts(later) == [11]
    assert not later["reset"]
    for fake in fakes:
        assert asked(fake) == ["/slo/data?since=0"]


def test_replicas_are_asked_for_what_is_new(front: FrontProcess, fakes: list[Fake]) -> None:
    for fake in fakes:
        fake.knobs(page=told(1, 2, first=100, reset=True))
    assert counts(front.get("/slo/data").json()) == [2, 4]
    for fake in fakes:
        fake.knobs(page=told(3, first=102))
    time.sleep(KEPT_S + 0.1)
    assert counts(front.get("/slo/data?since=1202000").json()) == [6]
    assert counts(front.get("/slo/data").json()) == [2, 4, 6]
    for fake in fakes:
        assert asked(fake) == ["/slo/data?since=0", "/slo/data?since=1202000"]
        fake.knobs(page=told(9, first=103, reset=fake is fakes[0]))  # which began anew
    time.sleep(KEPT_S + 0.1)
    after = front.get("/slo/data?since=1204000").json()
    assert after["reset"]
    assert counts(after) == [1, 2, 3, 18]


def test_many_pages_cost_replicas_one_question(front: FrontProcess, fakes: list[Fake]) -> None:
    for fake in fakes:
        fake.knobs(page=told(*range(1, 9), reset=True))

    def ask(number: int) -> int:
        since = (0, number, 1_000_000 + 2_000 * (number % 9), 10**15 - 1 - number)[number % 4]
        minutes = "&minutes=1" if number % 2 else ""
        return front.get(f"/slo/data?since={since}{minutes}&n={number}").status_code

    begun_s = time.monotonic()
    with ThreadPoolExecutor(50) as pool:
        assert set(pool.map(ask, range(200))) == {200}
    rounds = 1 + (time.monotonic() - begun_s) // KEPT_S
    for fake in fakes:
        paths = asked(fake)
        assert 2 <= len(paths) <= 2 * rounds
        assert sum("minutes" in path for path in paths) <= rounds


def test_many_scrapes_cost_a_replica_one(front: FrontProcess, fakes: list[Fake]) -> None:
    begun_s = time.monotonic()
    with ThreadPoolExecutor(20) as pool:
        pages = list(pool.map(lambda _: front.get("/metrics/replicas/a"), range(100)))
    rounds = 1 + (time.monotonic() - begun_s) // KEPT_S
    assert {page.text for page in pages} == {'fake_replica{name="a"} 1\n'}
    assert 1 <= asked(fakes[0]).count("/metrics") <= rounds


def test_a_replica_without_a_page_is_left_out(front: FrontProcess, fakes: list[Fake]) -> None:
    assert front.get("/slo/data").status_code == 503
    fakes[1].knobs(page=told(4, reset=True))
    assert front.get("/slo/data").status_code == 503  # that is known for a while
    time.sleep(KEPT_S + 0.1)
    assert counts(front.get("/slo/data?since=%0d%0ax").json()) == [4]
    assert set(asked(fakes[1])) == {"/slo/data?since=0"}


# --- once for all ---------------------------------------------------------------------------------


def test_who_leaves_does_not_end_the_call() -> None:
    calls: list[int] = []

    async def call() -> int:
        calls.append(len(calls))
        await asyncio.sleep(0.1)
        return calls[-1]

    async def check() -> None:
        once = Once(call, 0.2)
        for _ in range(20):  # one after the other
            with suppress(TimeoutError):
                async with asyncio.timeout(0.002):
                    await once.get()
        assert await once.get() == 0
        assert await asyncio.gather(*(once.get() for _ in range(50))) == [0] * 50
        await asyncio.sleep(0.3)
        assert await asyncio.gather(*(once.get() for _ in range(50))) == [1] * 50
        assert calls == [0, 1]

    asyncio.run(check())


def test_a_failure_is_told_to_all_and_kept_no_longer() -> None:
    calls: list[int] = []

    async def call() -> None:
        calls.append(1)
        await asyncio.sleep(0)
        raise OSError("gone")

    async def check() -> None:
        once = Once(call, 0.1)
        said = await asyncio.gather(*(once.get() for _ in range(9)), return_exceptions=True)
        assert {type(one) for one in said} == {OSError}
        await asyncio.sleep(0.15)
        with pytest.raises(OSError, match="gone"):
            await once.get()
        assert len(calls) == 2

    asyncio.run(check())


# --- several servers as one, look by look ---------------------------------------------------------


def grown(values: dict[str, float]) -> list[Metric]:
    """A counter of each class, as servers show it."""
    metric = Metric("vllm_slo:generation_tokens", "", "counter")
    for slo_class, value in values.items():
        labels = {"slo_class": slo_class, "attained": "true"}
        metric.add_sample("vllm_slo:generation_tokens_total", labels, value)
    return [metric]


class Server:
    """One with a past: it takes samples, and says what it knows."""

    def __init__(self, number: int) -> None:
        self.history = History()
        self.values = {f"class{number}": 0.0, "all": 0.0}

    def sample(self, now_s: float, increment: float) -> None:
        self.values = {name: value + increment for name, value in self.values.items()}
        self.history.add(now_s, grown(self.values))

    def answer(self, now_s: float, since_ms: int, *, coarse: bool) -> dict[str, Any]:
        about = {"model": "m", "classes": {}, "silent_s": 0.0}
        said = {"now": round(now_s * 1e3), "about": about}
        return json.loads(json.dumps({**said, **self.history.since(since_ms, coarse=coarse)}))


class Page:
    """What the page's script keeps."""

    def __init__(self) -> None:
        self.samples: dict[int, list[Any]] = {}

    def poll(self, past: MergedHistory, grid_ms: int) -> None:
        since_ms = max((sample[0] for sample in self.samples.values()), default=0)
        answer = json.loads(past.answer(since_ms))
        if answer["reset"]:
            self.samples.clear()
        series = ["/".join(one) for one in answer["series"]]
        for sample in answer["samples"]:
            named = {series[int(place)]: count for place, count in sample[2].items()}
            self.samples[sample[0] // grid_ms] = [*sample[:2], named]


class World(RuleBasedStateMachine):
    """Servers come, go, begin anew and do not always answer; a page polls meanwhile."""

    coarse = False

    def __init__(self) -> None:
        super().__init__()
        self.past, self.page = MergedHistory(coarse=self.coarse), Page()
        self.grid_ms = 60_000 if self.coarse else 1
        self.now_s = T0
        self.there: dict[str, Server] = {}
        self.started = 0
        self.heard = False

    @rule(steps=st.integers(1, 40))
    def time(self, steps: int) -> None:
        for _ in range(steps):
            self.now_s += STEP_S
            for increment, server in enumerate(self.there.values(), 1):
                server.sample(self.now_s, float(increment))

    @precondition(lambda self: len(self.there) < 3)
    @rule()
    def join(self) -> None:
        self.started += 1
        self.there[str(self.started)] = server = Server(self.started % 3)
        server.sample(self.now_s, 1.0)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        del self.there[data.draw(st.sampled_from(sorted(self.there)))]

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        self.ask(data.draw(st.sets(st.sampled_from(sorted(self.there)))))

    @precondition(lambda self: self.heard)
    @rule()
    def poll(self) -> None:
        self.page.poll(self.past, self.grid_ms)

    def ask(self, names: Iterable[str]) -> None:
        answers = {
            name: self.there[name].answer(self.now_s, self.past.known_ms(name), coarse=self.coarse)
            for name in names
        }
        if answers:
            self.past.take(answers, list(self.there))
            self.heard = True

    def teardown(self) -> None:
        """The page knows what one does that is opened now, which is all that servers say."""
        if not self.there:
            return
        self.ask(self.there)
        said = [one.answer(self.now_s, 0, coarse=self.coarse) for one in self.there.values()]
        whole = merged(said, coarse=self.coarse)
        names = ["/".join(one) for one in whole["series"]]
        right = {
            sample[0] // self.grid_ms: {
                names[int(place)]: count for place, count in sample[2].items()
            }
            for sample in whole["samples"]
        }
        opened = Page()
        opened.poll(self.past, self.grid_ms)
        shown = {key: sample[2] for key, sample in opened.samples.items()}
        assert {key: shown.pop(key) for key in right} == right
        assert max(shown, default=0) < min(right, default=1)  # servers have forgotten those
        self.page.poll(self.past, self.grid_ms)
        assert opened.samples.items() <= self.page.samples.items()


class CoarseWorld(World):
    coarse = True


TestLooks = World.TestCase
TestLooks.settings = settings(max_examples=examples(40), deadline=None)
TestCoarseLooks = CoarseWorld.TestCase
TestCoarseLooks.settings = TestLooks.settings


def test_a_page_that_slept_gets_everything() -> None:
    server, past = Server(0), MergedHistory(coarse=False)
    for step in range(RECENT + 20):
        server.sample(T0 + step * STEP_S, 1.0)
    past.take({"0": server.answer(T0 + 10_000, 0, coarse=False)}, ["0"])
    everything = json.loads(past.answer(0))
    assert everything["reset"] and len(everything["samples"]) == RECENT + 20
    times = [sample[0] for sample in everything["samples"]]
    assert json.loads(past.answer(times[-RECENT - 1])) == everything
    newest = json.loads(past.answer(times[-RECENT]))
    assert [sample[0] for sample in newest["samples"]] == times[-RECENT + 1 :]
    assert not newest["reset"]


def test_young_samples_are_held_back_until_all_have_taken_theirs() -> None:
    servers, past = [Server(0), Server(1)], MergedHistory(coarse=False)
    page, now_s = Page(), T0
    for step in range(20):
        now_s = T0 + step * STEP_S
        for number, server in enumerate(servers):
            if number == 0 or step % 2 == 0:  # the other is a sample late
                server.sample(now_s if number == 0 else now_s - 1e-3 * LAG_MS / 2, 1.0)
        answers = {
            str(number): server.answer(now_s, past.known_ms(str(number)), coarse=False)
            for number, server in enumerate(servers)
        }
        past.take(answers, ["0", "1"])
        page.poll(past, 1)
    fresh = Page()
    fresh.poll(past, 1)
    assert page.samples == fresh.samples
