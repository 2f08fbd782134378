# SPDX-License-Identifier: Apache-2.0
"""The front when things fail: none lost that had not started, none hung, service back by itself."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from typing import Any

import httpx
import openai
import psutil
import pytest
from front_stack import Fake, FrontProcess, events, eventually, processes
from patience import patience

pytestmark = pytest.mark.slow

STALE_S, DEAD_S = patience(1.0), patience(2.0)
ROUTING = {
    "stale_after_s": STALE_S,
    "dead_after_s": DEAD_S,
    "drain_s": patience(20.0),
    "retries": 2,
}
MANY = 20
PROMPTLY_S = patience(10.0)
LONG_S = patience(60.0)
"""What takes so long is over only if somebody ends it."""


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[FrontProcess, list[Fake]]]:
    """Two replicas that last, and a front."""
    with processes() as keep:
        yield keep(FrontProcess(ROUTING)), [keep(Fake("a")), keep(Fake("b"))]


@pytest.fixture
def front(started: tuple[FrontProcess, list[Fake]], fakes: list[Fake]) -> FrontProcess:
    started[0].serve(*fakes)
    return started[0]


@pytest.fixture(scope="module")
def lenient() -> Iterator[FrontProcess]:
    """A front that takes nobody for dead."""
    with processes() as keep:
        yield keep(FrontProcess({**ROUTING, "dead_after_s": 3_600.0}))


@pytest.fixture
def patient(lenient: FrontProcess, fakes: list[Fake]) -> FrontProcess:
    lenient.serve(*fakes)
    return lenient


@pytest.fixture
def fakes(started: tuple[FrontProcess, list[Fake]]) -> list[Fake]:
    for fake in started[1]:
        fake.reset()
    return started[1]


@pytest.fixture
def keep() -> Iterator[Callable[[Any], Any]]:
    with processes() as taken:
        yield taken


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(MANY) as threads:
        yield threads


def asked(stream: bool, max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": max_tokens, "stream": stream, **more}


def submit(
    pool: ThreadPoolExecutor, front: FrontProcess, count: int, **request: Any
) -> list[Future[httpx.Response]]:
    """``count`` requests at once, streamed or not in turn unless ``stream`` says."""
    bodies = [asked(**{"stream": bool(n % 2), **request}) for n in range(count)]
    return [pool.submit(front.post, json=body) for body in bodies]


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    if "event-stream" not in answer.headers["content-type"]:
        return str(answer.json()["choices"][0]["text"])
    parts = events(answer.text)
    assert parts.pop() == "[DONE]"
    return "".join(part["choices"][0]["text"] for part in parts)


def ends_with_one_error(answer: httpx.Response) -> dict[str, Any]:
    """Check a stream that was broken off: whole events, one error, [DONE]; the error."""
    parts = events(answer.text)
    assert parts.pop() == "[DONE]"
    error: dict[str, Any] = parts.pop()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert all("choices" in part for part in parts)
    return error


def status_of(front: FrontProcess, name: str) -> str:
    return str(front.replicas().get(name, {}).get("status"))


# --- before the answer begins --------------------------------------------------------------------


@pytest.mark.parametrize("slo", [None, {"ttft_ms": 30_000}])
def test_requests_that_had_not_started_survive_a_kill(
    front: FrontProcess, fakes: list[Fake], pool: ThreadPoolExecutor, keep: Any, slo: Any
) -> None:
    victim = keep(Fake("victim", hold_at=0))
    front.serve(victim, fakes[0])
    fakes[0].knobs(hold_at=0)  # none ends before all are sent: both get their share
    before = front.total("retries_total", reason="connection")
    more = {} if slo is None else {"slo": slo}
    answers = submit(pool, front, MANY, **more)
    eventually(lambda: len(victim.seen()) + len(fakes[0].seen()) == MANY, "all are sent")
    sent = len(victim.seen())
    assert sent >= 5
    victim.signal(signal.SIGKILL)
    fakes[0].knobs(hold_at=None)
    assert [text_of(answer.result(PROMPTLY_S)) for answer in answers] == [" t0 t1 t2 t3"] * MANY
    assert front.total("retries_total", reason="connection") - before == sent
    retried = [one["age_ms"] for one in fakes[0].seen()][-sent:]
    assert min(retried) > 1.0  # the clock of their TTFT went on
    eventually(front.quiet, "all tickets have ended")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_server_error_is_retried(
    front: FrontProcess, fakes: list[Fake], status: int, stream: bool
) -> None:
    for fake in fakes:
        fake.knobs(status=status)
    fakes[0].knobs(status_times=1)
    for _ in range(2):
        assert front.post(json=asked(stream)).headers["x-vllm-slo-replica"] in "ab"
    assert [len(fake.seen()) for fake in fakes] in ([1, 2], [2, 1])


def test_other_routes_are_retried_too(front: FrontProcess, fakes: list[Fake]) -> None:
    fakes[0].knobs(status_times=1)
    assert [front.get("/v1/models").status_code for _ in range(2)] == [200, 200]
    assert sum(len(fake.seen()) for fake in fakes) == 3


def test_a_client_error_is_not_retried(front: FrontProcess, fakes: list[Fake]) -> None:
    for fake in fakes:
        fake.knobs(status=422, status_times=1)
    assert front.post().status_code == 422
    assert sum(len(fake.seen()) for fake in fakes) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_an_error_as_first_event_is_retried(
    front: FrontProcess, fakes: list[Fake], path: str
) -> None:
    fakes[0].knobs(error_event_times=1)
    before = front.total("retries_total", reason="connection")
    for _ in range(2):
        answer = front.post(path, json={**asked(True), "input": "x"})
        assert answer.status_code == 200
        assert "error" not in answer.text
    assert front.total("retries_total", reason="connection") - before == 1


def test_when_all_fail_the_last_word_is_passed_on(front: FrontProcess, fakes: list[Fake]) -> None:
    for fake in fakes:
        fake.knobs(status=500, status_times=1, error_event_times=1)
    answer = front.post()
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].endswith("is told to fail")
    assert {len(fake.seen()) for fake in fakes} == {1}  # never the same one again
    answer = front.post(json=asked(True))  # nothing has begun, so it need not be a stream
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].endswith("is dead")


def test_retries_are_bounded(fakes: list[Fake], keep: Any) -> None:
    front = keep(FrontProcess({**ROUTING, "retries": 0}))
    front.serve(*fakes)
    for fake in fakes:
        fake.knobs(cut_after_tokens=0)
    for stream in (False, True):
        answer = front.post(json=asked(stream))
        assert answer.status_code == 502
        assert answer.json()["error"]["type"] == "BadGatewayError"
    assert sum(len(fake.seen()) for fake in fakes) == 2


def test_a_cut_answer_is_retried_while_it_is_not_a_stream(
    front: FrontProcess, fakes: list[Fake]
) -> None:
    fakes[0].knobs(cut_after_tokens=3)
    assert [text_of(front.post(json=asked(False))) for _ in range(2)] == [" t0 t1 t2 t3"] * 2
    fakes[1].knobs(cut_after_tokens=0)
    answer = front.post(json=asked(False))  # nobody is left to ask
    assert answer.status_code == 502
    assert answer.headers["retry-after"] == "1"


# --- after it has begun --------------------------------------------------------------------------


def test_streams_break_off_when_their_replica_is_killed(
    front: FrontProcess, fakes: list[Fake], pool: ThreadPoolExecutor, keep: Any
) -> None:
    """Nobody takes what came for a whole answer: the last chunk is missing."""
    victim = keep(Fake("victim", hold_at=3))
    fakes[0].knobs(hold_at=3)
    front.serve(victim, fakes[0])
    answers = submit(pool, front, MANY, stream=True, max_tokens=100)
    eventually(
        lambda: sum(one["tokens"] == 3 for f in (victim, fakes[0]) for one in f.seen()) == MANY,
        "all have begun",
    )
    sent = len(victim.seen())
    assert sent >= 5
    victim.signal(signal.SIGKILL)
    fakes[0].knobs(hold_at=None)
    broken = 0
    for answer in answers:
        try:
            assert len(text_of(answer.result(PROMPTLY_S)).split()) == 100
        except httpx.RemoteProtocolError:
            broken += 1
    assert broken == sent
    eventually(front.quiet, "all tickets have ended")


def test_a_stream_breaks_off_and_the_openai_client_says_so(front: FrontProcess, keep: Any) -> None:
    """With its connection: nobody waits until it has been silent for too long."""
    victim = keep(Fake("victim", hold_at=3))
    front.serve(victim)
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(
            model="fake", prompt="x", max_tokens=10_000, stream=True, timeout=PROMPTLY_S
        )
        next(iter(stream))
        victim.signal(signal.SIGKILL)
        with pytest.raises((openai.APIError, httpx.RemoteProtocolError)):
            for _ in stream:
                pass


def test_the_engines_own_error_is_not_repeated(front: FrontProcess, fakes: list[Fake]) -> None:
    for fake in fakes:
        fake.knobs(error_after_tokens=2)
    error = ends_with_one_error(front.post(json=asked(True)))
    assert error["message"].startswith("the engine of")


def test_a_stream_that_has_said_done_is_complete(front: FrontProcess, fakes: list[Fake]) -> None:
    for fake in fakes:
        fake.knobs(cut_at_end=True)
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="x", max_retries=0) as client:
        parts = client.completions.create(model="fake", prompt="x", max_tokens=4, stream=True)
        assert "".join(part.choices[0].text for part in parts) == " t0 t1 t2 t3"


# --- silence -------------------------------------------------------------------------------------


def test_a_stopped_replica_is_left_and_taken_back(
    front: FrontProcess, fakes: list[Fake], pool: ThreadPoolExecutor, keep: Any
) -> None:
    victim = keep(Fake("victim", token_s=0.05))
    slow = keep(Fake("slow", hold_at=0))
    front.serve(victim, slow)
    slow.knobs(state={"backlog_tokens": 10**6})
    eventually(lambda: front.replicas()["slow"]["load_tokens"] == 10**6, "the load is known")
    streams = submit(pool, front, 5, stream=True, max_tokens=10_000)
    eventually(lambda: [one["tokens"] > 1 for one in victim.seen()] == [True] * 5, "all began")
    slow.knobs(state={})
    eventually(lambda: front.replicas()["slow"]["load_tokens"] == 0, "the load is gone")
    victim.knobs(ttft_s=LONG_S)
    waiting = submit(pool, front, 8)
    eventually(lambda: len(victim.seen()) + len(slow.seen()) == 13, "all are sent")
    front.tell([victim, slow, fakes[0]])
    eventually(lambda: status_of(front, "a") == "ready", "a is ready")
    stopped = [one for one in (victim, slow) if one.seen()]
    for one in stopped:
        one.signal(signal.SIGSTOP)
    eventually(lambda: status_of(front, "victim") == "stale", "it is stale")
    assert front.post().headers["x-vllm-slo-replica"] == "a"  # no new requests
    for answer in streams:
        with pytest.raises(httpx.RemoteProtocolError):
            answer.result(PROMPTLY_S)
    for answer in waiting:
        assert text_of(answer.result(PROMPTLY_S)) == " t0 t1 t2 t3"
        assert answer.result().headers["x-vllm-slo-replica"] == "a"
    assert status_of(front, "victim") == "dead"
    for one in stopped:
        one.signal(signal.SIGCONT)
    eventually(lambda: status_of(front, "victim") == "ready", "it is taken back")
    # Its aborted requests have been noticed there.
    eventually(lambda: all(one["ended"] for one in victim.seen()), "they were aborted")


def test_a_silent_replica_gets_nothing_new_and_keeps_what_it_has(
    patient: FrontProcess, fakes: list[Fake], pool: ThreadPoolExecutor
) -> None:
    front = patient
    for fake in fakes:
        fake.knobs(hold_at=2)
    (running,) = submit(pool, front, 1, stream=True, max_tokens=18)
    eventually(lambda: any(fake.seen() for fake in fakes), "it is sent")
    one, other = sorted(fakes, key=lambda fake: -len(fake.seen()))
    one.knobs(heartbeats=False)
    eventually(lambda: status_of(front, one.name) == "stale", "it is stale")
    other.knobs(hold_at=None)
    assert front.post().headers["x-vllm-slo-replica"] == other.name
    one.knobs(heartbeats=True, hold_at=None)
    assert len(text_of(running.result(PROMPTLY_S)).split()) == 18
    eventually(lambda: status_of(front, one.name) == "ready", "it is taken back")


def test_a_lost_state_stream_is_opened_again(
    patient: FrontProcess, fakes: list[Fake], pool: ThreadPoolExecutor
) -> None:
    front = patient
    for fake in fakes:
        fake.knobs(hold_at=2)
    running = submit(pool, front, 4, stream=True, max_tokens=20)
    eventually(lambda: sum(len(fake.seen()) for fake in fakes) == 4, "they are sent")
    for fake in fakes:
        fake.knobs(close_streams=True)
    eventually(lambda: front.get("/health").status_code == 503, "no replica is ready")
    for fake in fakes:
        fake.knobs(close_streams=False)
    eventually(lambda: front.get("/health").status_code == 200, "they are back")
    for fake in fakes:
        fake.knobs(hold_at=None)
    assert {len(text_of(one.result(PROMPTLY_S)).split()) for one in running} == {20}


def test_a_state_that_is_not_understood_does_not_matter(
    front: FrontProcess, fakes: list[Fake]
) -> None:
    for fake in fakes:
        fake.knobs(null_state=True)
    time.sleep(0.4)
    assert front.post(json=asked(False, slo={"ttft_ms": 1000})).status_code == 200


def test_a_front_that_was_held_up_does_not_blame_its_replicas(
    front: FrontProcess, fakes: list[Fake], pool: ThreadPoolExecutor
) -> None:
    for fake in fakes:
        fake.knobs(hold_at=5)
    running = submit(pool, front, 4, stream=True, max_tokens=60)
    eventually(lambda: sum(len(fake.seen()) for fake in fakes) == 4, "they are sent")
    front.signal(signal.SIGSTOP)
    late = submit(pool, front, 4)  # the first thing it finds when it goes on
    time.sleep(DEAD_S + 1.0)
    front.signal(signal.SIGCONT)
    assert {len(text_of(one.result(PROMPTLY_S)).split()) for one in late} == {4}
    for fake in fakes:
        fake.knobs(hold_at=None)
    assert {len(text_of(one.result(PROMPTLY_S)).split()) for one in running} == {60}


# --- the set of replicas -------------------------------------------------------------------------


def test_a_new_decision_service_waits_for_states(front: FrontProcess, fakes: list[Fake]) -> None:
    """Until then HAProxy uses the replicas that it knows: nothing is refused."""

    def service() -> int | None:
        children = psutil.Process(front.process.pid).children()
        found = [one.pid for one in children if "decision_service" in " ".join(one.cmdline())]
        return found[0] if found else None

    def decides() -> bool:
        with suppress(httpx.HTTPError):
            answer = front.get("/replicas")
            ready = [one["status"] for one in answer.json()] if answer.status_code == 200 else []
            return ready == ["ready"] * len(fakes) and service() not in (None, before)
        return False

    before = service()
    assert before is not None
    for fake in fakes:
        fake.knobs(greet_s=0.3)
    psutil.Process(before).kill()
    answers = []
    end_s = time.monotonic() + PROMPTLY_S
    while time.monotonic() < end_s and not (answers and decides()):
        answers += [front.post(json=asked(False)) for _ in range(3)]
    assert service() not in (None, before)
    assert [one.text for one in answers if one.status_code != 200] == []


def test_one_of_two_fronts_is_killed(front: FrontProcess, fakes: list[Fake], keep: Any) -> None:
    """A client that turns to the other front loses nothing that had not begun."""
    other = keep(FrontProcess(ROUTING))
    other.serve(*fakes)
    for fake in fakes:
        fake.knobs(hold_at=0)

    def ask(*fronts: FrontProcess) -> tuple[int, str]:
        for place, each in enumerate(fronts):
            with suppress(httpx.HTTPError):
                return place, text_of(each.post(json=asked(True)))
        raise AssertionError("no front answered")

    with ThreadPoolExecutor(2 * MANY) as pool:
        here = [pool.submit(ask, front) for _ in range(MANY)]
        there = [pool.submit(ask, other, front) for _ in range(MANY)]
        eventually(lambda: _seen(fakes) == 2 * MANY, "all are sent")
        other.process.kill()
        eventually(lambda: _seen(fakes) == 3 * MANY, "those of the other are sent again")
        for fake in fakes:
            fake.knobs(hold_at=None)
        assert {one.result(PROMPTLY_S)[0] for one in here} == {0}
        assert {one.result(PROMPTLY_S)[0] for one in there} == {1}
    eventually(front.quiet, "nothing is under way")


def _seen(fakes: list[Fake]) -> int:
    return sum(len(fake.seen()) for fake in fakes)


def test_without_replicas_it_says_so(front: FrontProcess, fakes: list[Fake]) -> None:
    front.tell([])
    eventually(lambda: not front.replicas(), "there are none")
    for answer in (front.post(), front.get("/v1/models")):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == 503
    assert front.get("/health").status_code == 503
    front.serve(*fakes)
    assert front.post().status_code == front.get("/health").status_code == 200


def test_a_replica_that_leaves_the_set_ends_its_work(
    front: FrontProcess, fakes: list[Fake], pool: ThreadPoolExecutor
) -> None:
    for fake in fakes:
        fake.knobs(hold_at=2)
    (running,) = submit(pool, front, 1, stream=True, max_tokens=15)
    eventually(lambda: any(fake.seen() for fake in fakes), "it is sent")
    one, other = sorted(fakes, key=lambda fake: -len(fake.seen()))
    front.tell([other])
    eventually(lambda: status_of(front, one.name) == "draining", "it leaves")
    other.knobs(hold_at=None)
    eventually(lambda: status_of(front, other.name) == "ready", "it stays")
    assert {front.post().headers["x-vllm-slo-replica"] for _ in range(3)} == {other.name}
    one.knobs(hold_at=None)
    assert len(text_of(running.result(PROMPTLY_S)).split()) == 15
    eventually(lambda: one.name not in front.replicas(), "it is gone")


def test_replicas_are_replaced_without_a_failed_request(
    fakes: list[Fake], pool: ThreadPoolExecutor, keep: Any
) -> None:
    """One after the other: a new one joins, an old one leaves and ends when it is idle."""
    front = keep(FrontProcess(ROUTING))
    listed = [keep(Fake("old 1")), keep(Fake("old 2"))]
    front.serve(*listed)
    stop = threading.Event()

    def ask() -> list[str]:
        texts = []
        while not stop.is_set():
            texts.append(text_of(front.post(json=asked(True))))
        return texts

    clients = [pool.submit(ask) for _ in range(4)]
    for number in (1, 2):
        old = listed.pop(0)
        listed.append(keep(Fake(f"new {number}")))
        front.tell([old, *listed])
        eventually(lambda: status_of(front, listed[-1].name) == "ready", "it joins")
        front.tell(listed)
        eventually(lambda n=old.name: n not in front.replicas(), "it has left", PROMPTLY_S)
        old.process.kill()
    eventually(lambda: all(len(fake.seen()) > 3 for fake in listed), "the new ones serve")
    stop.set()
    assert {text for client in clients for text in client.result(PROMPTLY_S)} == {" t0 t1 t2 t3"}


def test_a_draining_replica_gets_nothing_new(
    front: FrontProcess, fakes: list[Fake], pool: ThreadPoolExecutor, keep: Any
) -> None:
    leaver = keep(Fake("leaver", hold_at=2))
    front.serve(leaver)
    (running,) = submit(pool, front, 1, stream=True, max_tokens=20)
    eventually(leaver.seen, "it is sent")
    front.tell([leaver, fakes[0]])
    eventually(lambda: status_of(front, "a") == "ready", "a is ready")
    leaver.signal(signal.SIGTERM)
    eventually(lambda: status_of(front, "leaver") == "draining", "it drains")
    assert {front.post().headers["x-vllm-slo-replica"] for _ in range(3)} == {"a"}
    leaver.knobs(hold_at=None)
    assert len(text_of(running.result(PROMPTLY_S)).split()) == 20
    assert leaver.process.wait(PROMPTLY_S) == 0


def test_a_restarted_replica_has_another_address(
    front: FrontProcess, fakes: list[Fake], keep: Any
) -> None:
    first = keep(Fake("same"))
    front.serve(first)
    assert front.post().status_code == 200
    first.signal(signal.SIGKILL)
    second = keep(Fake("same"))
    front.serve(second)
    assert front.post().status_code == 200
    assert len(second.seen()) == 1


def test_nonsense_on_stdin_changes_nothing(front: FrontProcess) -> None:
    assert front.process.stdin is not None
    for line in (b"nonsense", b"[]", b'{"replicas": [{"name": "x"}]}', b'{"replicas": [5]}', b""):
        front.process.stdin.write(line + b"\n")
    front.process.stdin.flush()
    time.sleep(0.2)
    assert set(front.replicas()) == {"a", "b"}
    assert front.post().status_code == 200


# --- clients that leave --------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(
    front: FrontProcess, fakes: list[Fake], stream: bool, begun: bool
) -> None:
    for fake in fakes:
        fake.knobs(**({"token_s": 0.02} if begun else {"hold_at": 0}))
    before = front.total("client_gone_total")
    body = json.dumps(asked(stream, 10_000)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", front.port), PROMPTLY_S) as client:
        client.sendall(head.encode() + body)
        seen = eventually(lambda: fakes[0].seen() + fakes[1].seen(), "it is sent")
        if stream and begun:
            assert client.recv(12) == b"HTTP/1.1 200"
    assert len(seen) == 1
    eventually(
        lambda: [one["ended"] for fake in fakes for one in fake.seen()] == ["aborted"],
        "it is aborted",
    )
    eventually(front.quiet, "its ticket has ended")
    eventually(lambda: front.total("client_gone_total") == before + 1, "it is counted")
    assert front.total("in_flight") == 0


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "stdin"])
def test_a_drain_lets_requests_end(
    fakes: list[Fake], pool: ThreadPoolExecutor, keep: Any, how: str
) -> None:
    front = keep(FrontProcess(ROUTING))
    front.serve(*fakes)
    for fake in fakes:
        fake.knobs(hold_at=2)
    answers = submit(pool, front, 4, max_tokens=20)
    eventually(lambda: sum(len(fake.seen()) for fake in fakes) == 4, "they are sent")
    kept = http.client.HTTPConnection("127.0.0.1", front.port, timeout=PROMPTLY_S)

    def health() -> int:
        kept.request("GET", "/health")
        answer = kept.getresponse()
        answer.read()
        return answer.status

    assert health() == 200
    if how == "stdin":
        front.close_stdin()
    else:
        front.signal(getattr(signal, how))
    eventually(lambda: not _connects(front.port), "it accepts nobody")
    eventually(lambda: health() == 503, "open connections are told")
    kept.close()
    for fake in fakes:
        fake.knobs(hold_at=None)
    assert {len(text_of(answer.result(PROMPTLY_S)).split()) for answer in answers} == {20}
    assert front.process.wait(PROMPTLY_S) == 0


def _connects(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), PROMPTLY_S):
        return True
    return False


def test_a_drain_does_not_take_for_ever(
    fakes: list[Fake], pool: ThreadPoolExecutor, keep: Any
) -> None:
    front = keep(FrontProcess({**ROUTING, "drain_s": 0.3}))
    front.serve(*fakes)
    for fake in fakes:
        fake.knobs(token_s=0.05)
    answers = submit(pool, front, 4, max_tokens=10_000)
    eventually(lambda: sum(len(fake.seen()) for fake in fakes) == 4, "they are sent")
    eventually(lambda: all(o["tokens"] for f in fakes for o in f.seen()), "they have begun")
    front.signal(signal.SIGTERM)
    for number, answer in enumerate(answers):
        if number % 2:  # a stream
            with pytest.raises(httpx.RemoteProtocolError):
                answer.result(PROMPTLY_S)
        else:
            assert answer.result(PROMPTLY_S).status_code == 503
    assert front.process.wait(PROMPTLY_S) == 0


def test_the_parent_is_told_what_is_wanted_and_ready(fakes: list[Fake], keep: Any) -> None:
    front = keep(FrontProcess(ROUTING))
    assert front.line("listening") == {"listening": front.url}
    assert front.line("ready") == {"wanted": 0, "ready": [], "load": [False, 0.0, 0.0]}
    front.serve(*fakes)
    eventually(lambda: len(front.line("ready")["ready"]) == 2, "two are ready")
    for fake in fakes:
        fake.knobs(state={"seats": 0})
    eventually(lambda: _is_refused(front), "promises are refused")
    eventually(lambda: front.line("wanted")["wanted"] > 2, "more are wanted")
    assert front.total("wanted_replicas") > 2
    asked_for, work, refused = front.line("wanted")["load"]
    assert asked_for and work > 0.0 and refused > 0.0
    assert all(set(line) <= {"listening", "wanted", "ready", "load"} for line in front.lines)
    assert all(one != other for one, other in pairwise(front.lines)), "it says what is new"


def _is_refused(front: FrontProcess) -> bool:
    slo = {"ttft_ms": 2000, "on_unattainable": "decline"}
    return front.post(json=asked(False, slo=slo)).status_code == 429
