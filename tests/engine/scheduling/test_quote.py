# SPDX-License-Identifier: Apache-2.0
"""Quotes: what is found, that nothing changes by asking, and that answers agree with admission."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import patience
from starlette.middleware import Middleware

pytest.importorskip("vllm")

from http_app import CONFIG, Call, Server, choice, ending, output, refused
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput

from vllm_slo import SLO
from vllm_slo.bench.quote import in_words
from vllm_slo.core.admission.incremental import IncrementalAdmission, Verdict
from vllm_slo.core.admission.program import Capacity, Speculated, plan_admission
from vllm_slo.core.admission.quote import PRECISION, Competition, quote
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY, Demand
from vllm_slo.engine.http import quote as http_quote
from vllm_slo.engine.http.quote import MAX_QUOTES
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.slo.access import SEAL_VARIABLE, Seal
from vllm_slo.slo.keys import QUOTE_KEY
from vllm_slo.slo.verdicts import Invalid, pack_quote, unpack_quote

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)

# --- the search ----------------------------------------------------------------------------------


def threshold(least_ttft_s: float, least_tpot_s: float) -> Callable[[float, float], Verdict]:
    """Promised from these on; a long TTFT does not help against a short TPOT."""

    def ask(ttft_s: float, tpot_s: float) -> Verdict:
        if tpot_s < least_tpot_s:
            return Verdict(False, "decode", 2.0)
        return Verdict(True) if ttft_s >= least_ttft_s else Verdict(False, "prefill", 1.0)

    return ask


times = st.floats(0.01, 500)


@given(times, times, times | st.just(INFINITY), times)
def test_the_shortest_objectives_are_found(
    least_ttft: float, least_tpot: float, ttft: float, tpot: float
) -> None:
    found = quote(ttft, tpot, threshold(least_ttft, least_tpot), 0.01, 0.01)
    assert found.promised == (ttft >= least_ttft and tpot >= least_tpot)
    if tpot >= least_tpot:
        assert found.ttft_s is not None
        assert least_ttft <= found.ttft_s <= least_ttft * PRECISION
    else:
        assert found.ttft_s is None
    if ttft >= least_ttft:
        assert found.tpot_s is not None
        assert least_tpot <= found.tpot_s <= least_tpot * PRECISION
    # What is offered would be promised, and is what was asked wherever that would do.
    assert found.cheapest is not None
    assert found.cheapest[0] >= least_ttft
    assert found.cheapest[1] >= least_tpot
    if found.promised:
        assert found.cheapest == (ttft, tpot)
    else:
        assert found.cheapest[0] >= ttft
        assert found.cheapest[1] >= tpot


def test_what_no_waiting_helps_is_not_searched() -> None:
    asked = []

    def ask(ttft_s: float, tpot_s: float) -> Verdict:
        asked.append(ttft_s)
        return Verdict(False, "memory", 3.0)

    found = quote(1.0, 0.1, ask, 0.1, 0.01)
    assert found == (False, "memory", 3.0, None, None, None)
    assert len(asked) == 1


@pytest.mark.parametrize("tokens_out", [1.0, 1.7])
def test_an_outlook_with_trees_judges_as_the_program_does(tokens_out: float) -> None:
    rng = random.Random(int(tokens_out * 10))
    speculated = Speculated(tokens_out, 2.5 if tokens_out > 1 else 1.0)
    said = set()
    for _ in range(200):
        committed = [
            Demand(f"c{i}", rng.uniform(0.1, 3), rng.randint(1, 900), rng.choice([0.03, 0.1]), 1)
            for i in range(rng.randint(0, 5))
        ]
        decoding = {0.05: rng.randint(0, 20), 0.2: rng.randint(0, 60)}
        capacity = Capacity(100.0, 50, 512)
        demand = Demand("n", rng.uniform(0.05, 2), rng.randint(1, 1500), rng.choice([0.03, 0.1]), 1)
        options: dict[str, Any] = {"decoding_context": 20_000, "speculated": speculated}
        plan = plan_admission(0.0, [demand], committed, decoding, ROOFLINE, capacity, **options)
        outlook = IncrementalAdmission(committed, decoding, ROOFLINE, capacity, **options)
        verdict = outlook.judge(demand, 0.0)
        assert verdict.promised == bool(plan.admitted)
        assert verdict.reason == plan.refused.get("n")
        said.add(verdict.promised)
    assert said == {True, False}


# --- the scheduler -------------------------------------------------------------------------------


@pytest.fixture
def engine(config_folder: Path) -> Callable[..., VirtualEngine]:
    def make(**options: Any) -> VirtualEngine:
        return VirtualEngine(
            Scheduler, config_folder, ROOFLINE.predict_shape_s, believed=ROOFLINE, **options
        )

    return make


def loaded(engine: VirtualEngine, rng: random.Random, steps: int) -> None:
    """Drive a mixed load for a while."""
    for _ in range(steps):
        if rng.random() < 0.25:
            slo = rng.choice(
                [SLO(ttft_ms=800, tpot_ms=50), SLO(ttft_ms=2000, tpot_ms=100), SLO(tpot_ms=80)]
            )
            name = f"load{sum(n.startswith('load') for n in engine.outcomes)}"
            engine.add(name, rng.randint(20, 900), rng.randint(20, 150), slo)
        engine.step()


SLOS = [
    SLO(ttft_ms=300, tpot_ms=40),
    SLO(ttft_ms=1500, tpot_ms=60),
    SLO(ttft_ms=600),
    SLO(tpot_ms=45),
    SLO(ttft_ms=4000, tpot_ms=200),
]


def quoted_now(engine: VirtualEngine, name: str, prompt: int, slo: SLO) -> Any:
    """A quote of this very moment, in which nothing else is promised."""
    engine.add(name, prompt, 50, slo, quote=True)
    parts = engine.scheduler.parts
    ((_, answer),) = parts.quotes.answers(parts.clock.next_start_s(parts.clock.tick()))
    engine.abort(name)
    return unpack_quote(answer)


@pytest.mark.slow
def test_quotes_agree_with_admission(engine: Any) -> None:
    one, rng = engine(slo_config={"quote_holds_s": 0}), random.Random(5)
    said: dict[bool, list[bool]] = {True: [], False: []}
    for number in range(400):
        loaded(one, rng, 4)
        slo, prompt = rng.choice(SLOS), rng.randint(20, 1200)
        quoted = quoted_now(one, f"ask{number}", prompt, slo)
        one.add(f"sent{number}", prompt, 50, slo)
        promised = one.scheduler.promise_now(f"sent{number}")
        said[quoted["promised"]].append(promised)
    assert min(map(len, said.values())) > 40
    # Others who wait are promised in the same breath, if they are worth it.
    assert sum(said[True]) >= 0.98 * len(said[True])
    assert sum(said[False]) <= 0.02 * len(said[False])


@pytest.mark.slow
def test_a_yes_holds_until_the_request_comes(engine: Any) -> None:
    slos = [SLO(ttft_ms=300, tpot_ms=40), *(SLO(ttft_ms=ms, tpot_ms=60) for ms in (800, 1500))]
    still = {}
    for holds_s in (0.0, 0.05):
        one, rng = engine(slo_config={"quote_holds_s": holds_s}), random.Random(6)
        come: list[bool] = []
        for number in range(600):
            loaded(one, rng, 2)
            slo, prompt = rng.choice(slos), rng.randint(20, 500)
            quoted, asked_s = quoted_now(one, f"ask{number}", prompt, slo), one.clock.now_s
            while one.clock.now_s < asked_s + 0.05:
                loaded(one, rng, 1)
            one.add(f"sent{number}", prompt, 50, slo)
            promised = one.scheduler.promise_now(f"sent{number}")
            if quoted["promised"]:
                come.append(promised)
        assert len(come) > 80
        still[holds_s] = sum(come) / len(come)
    assert still[0.05] >= 0.96 > still[0.0], still


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 4000)), max_size=30),
    st.floats(0.0, 1.0),
)
def test_competition_is_what_was_promised_of_late(
    promised: list[tuple[float, int]], within_s: float
) -> None:
    competition, now_s = Competition(), 100.0
    for gap_s, tokens in promised:
        now_s += gap_s
        competition.promised(tokens, now_s)
    ends_s = np.cumsum([gap for gap, _ in promised]) + 100.0
    faded = np.exp((ends_s - now_s) / 10.0)
    sizes = np.array([tokens for _, tokens in promised], dtype=float)
    deviation = math.sqrt(within_s / 10.0 * float(faded @ sizes**2))
    assert competition.tokens(within_s, now_s) == pytest.approx(deviation)
    assert competition.tokens(within_s, now_s + 1e6) == pytest.approx(0.0)
    assert competition.tokens(0.0, now_s) == 0.0


@pytest.mark.slow
def test_what_is_offered_is_promised(engine: Any) -> None:
    one, rng = engine(), random.Random(7)
    offers: list[bool] = []
    for number in range(150):
        loaded(one, rng, 5)
        slo, prompt = rng.choice(SLOS), rng.randint(20, 1200)
        one.add(f"ask{number}", prompt, 50, slo, quote=True)
        one.step()
        quoted = unpack_quote(one.outcomes[f"ask{number}"].stop_reason)
        assert quoted is not None
        if quoted["promised"] or quoted["cheapest"] is None:
            continue
        # A step has passed since then: allow for it.
        longer = {name: ms and ms * 1.1 for name, ms in quoted["cheapest"].items()}
        one.add(f"sent{number}", prompt, 50, SLO(**longer))
        offers.append(one.scheduler.promise_now(f"sent{number}"))
    assert len(offers) > 20
    assert sum(offers) >= 0.9 * len(offers), (sum(offers), len(offers))


def history(engine: VirtualEngine) -> list[Any]:
    served = [dict(out.num_scheduled_tokens) for out in engine.history if out.num_scheduled_tokens]
    reports = {n: o.report for n, o in engine.outcomes.items() if n.startswith("load")}
    return [served, reports, engine.clock.now_s]


@pytest.mark.parametrize("order", ["fcfs", "laps_sd"])
def test_asking_changes_nothing(engine: Any, order: str) -> None:
    config = {"best_effort": {"order": order}}
    asked, plain = engine(slo_config=config), engine(slo_config=config)
    for one in (asked, plain):
        rng = random.Random(11)
        for number in range(60):
            loaded(one, rng, 3)
            if one is asked:
                # A prompt that others have, too: its blocks must not be touched.
                one.add(f"ask{number}", 700, 50, SLOS[number % len(SLOS)], quote=True)
        one.run()
    assert history(asked) == history(plain)
    answers = [unpack_quote(o.stop_reason) for n, o in asked.outcomes.items() if n[:3] == "ask"]
    assert len(answers) == 60
    assert None not in answers
    parts = asked.scheduler.parts
    assert not parts.tracker.live
    assert not parts.guard.since_s
    counted = asked.scheduler.parts.metrics.registry
    both = (counted, plain.scheduler.parts.metrics.registry)
    admissions = [
        sum(s.value for m in r.collect() if m.name == "vllm_slo:admissions" for s in m.samples)
        for r in both
    ]
    assert admissions[0] == pytest.approx(admissions[1], rel=1e-3)


def test_a_quote_that_counts_on_drafts_leaves_others_what_they_count_on(engine: Any) -> None:
    one = engine()
    parts, asked = one.scheduler.parts, []
    parts.speculation.speculates = True
    parts.speculation.speculative = asked.append  # plain steps, but it is noted
    one.add("chat", 100, 50, SLO(ttft_ms=1000, tpot_ms=100))
    quoted_now(one, "ask", 100, SLO(ttft_ms=1000, tpot_ms=25))
    assert min(asked) == 0.025
    asked.clear()
    parts.workload.ways_to_decode()
    assert asked == [0.1]


def test_a_quote_comes_from_an_idle_engine_too(engine: Any) -> None:
    one = engine()
    one.add("ask", 100, 50, SLO(ttft_ms=1000, tpot_ms=100), quote=True)
    one.run()
    quoted = unpack_quote(one.outcomes["ask"].stop_reason)
    assert quoted is not None
    assert quoted["promised"]
    assert quoted["reason"] is None
    assert quoted["cheapest"] == {"ttft_ms": 1000, "tpot_ms": 100}
    # Alone, its prompt takes 50 ms, and a token 20.
    assert 50 <= quoted["ttft_ms"] <= 90
    assert 20 <= quoted["tpot_ms"] <= 22


def test_quotes_are_counted(engine: Any) -> None:
    one = engine(slo_config={"classes": {"chat": {"ttft_ms": 9000, "tpot_ms": 25}}})
    for number in range(3):
        one.add(f"yes{number}", 16, 50, SLO(slo_class="chat"), quote=True)
    one.add("no", 16, 50, SLO(tpot_ms=0.001), quote=True)
    one.step()
    registry = one.scheduler.parts.metrics.registry

    def count(**labels: str) -> float | None:
        return registry.get_sample_value("vllm_slo:quotes_total", {"engine": "0", **labels})

    assert count(slo_class="chat", promised="true", reason="") == 3
    assert count(slo_class="custom", promised="false", reason="decode") == 1


def test_what_stands_in_the_way_is_told_by_class(engine: Any) -> None:
    one = engine(slo_config={"classes": {"chat": {"ttft_ms": 9000, "tpot_ms": 25}}})
    for number in range(64):
        one.add(f"c{number}", 16, 100, SLO(slo_class="chat"))
    for _ in range(60):
        one.step()
    one.add("ask", 10, 50, SLO(ttft_ms=500, tpot_ms=22), quote=True)
    one.step()
    quoted = unpack_quote(one.outcomes["ask"].stop_reason)
    assert quoted is not None
    assert not quoted["promised"]
    assert quoted["reason"] in ("decode", "prefill")
    assert set(quoted["in_the_way"]) == {"chat"}
    assert quoted["in_the_way"]["chat"] > 5
    assert quoted["retry_after_ms"] >= 1


@pytest.mark.parametrize(
    ("slo", "reason"),
    [
        (None, "no_objective"),
        (SLO(ttft_ms=500, tier="best_effort"), "best_effort"),
        (SLO(ttft_ms=0.001), "expired"),
    ],
)
def test_who_would_get_no_promise_is_told_what_it_could_ask_for(
    engine: Any, slo: SLO | None, reason: str
) -> None:
    one = engine()
    one.clock.advance(5.0)
    one.add("ask", 100, 50, slo, quote=True, arrival_s=one.clock.now_s - 0.01)
    one.step()
    quoted = unpack_quote(one.outcomes["ask"].stop_reason)
    assert quoted is not None
    assert not quoted["promised"]
    assert quoted["reason"] == reason
    assert quoted["ttft_ms"] > 0


def test_memory_and_seats_are_named(engine: Any) -> None:
    small = EngineShape(num_blocks=40, max_num_seqs=2)
    one = engine(shape=small)
    declared = SLO(ttft_ms=5000, tpot_ms=100, expected_output_tokens=300)
    one.add("a", 200, 300, declared)
    one.step()
    one.add("ask", 200, 300, declared, quote=True)
    one.step()
    quoted = unpack_quote(one.outcomes["ask"].stop_reason)
    assert quoted is not None
    assert (quoted["reason"], quoted["cheapest"]) == ("memory", None)
    assert quoted["in_the_way"] == {"custom": 1}


# --- over HTTP -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEAL_VARIABLE, "secret")


YES = {
    "promised": True,
    "reason": None,
    "retry_after_ms": None,
    "class": None,
    "ttft_ms": 10.0,
    "tpot_ms": 5.0,
    "cheapest": {"ttft_ms": 500.0, "tpot_ms": None},
    "in_the_way": {},
}


QUOTING = ending("", pack_quote(YES), finish="abort")
QUOTE = "/v1/slo/quote"
PROMPTS: list[dict[str, Any]] = [{"prompt": "x"}, {"messages": [{"role": "user"}]}]


@pytest.mark.parametrize("prefix", ["", "/proxy"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_quote_over_http(prompt: dict[str, Any], prefix: str) -> None:
    server = Server(QUOTING, root_path=prefix)
    body = {**prompt, "slo": {"ttft_ms": 500}, "stream": True, "n": 3, "stream_options": {}}
    response = server.post(f"{prefix}{QUOTE}", json=body)
    assert response.status_code == 200
    assert response.json() == {"object": "slo.quote", **YES}
    (call,) = server.engine.calls
    flat = SLO(ttft_ms=500).to_extra_args(resolved=True)
    assert call.extra == Seal("secret").sealed({**flat, QUOTE_KEY: 1})
    # The body passes byte for byte, and the engine is let go.
    assert [json.loads(sent) for sent in server.bodies] == [body]
    assert server.headers[-1]["content-length"] == str(len(server.bodies[-1]))
    assert call.closed


@pytest.mark.parametrize("prompt", PROMPTS)
def test_all_carriers_are_read_for_a_quote(prompt: dict[str, Any]) -> None:
    server = Server(QUOTING, config={**CONFIG, "default_class": "strict"})
    for headers, ttft_ms in (({"x-slo-ttft-ms": "70"}, 70.0), ({}, 100.0)):
        assert server.post(QUOTE, json=prompt, headers=headers).status_code == 200
        assert server.engine.calls[-1].extra["slo_ttft_ms"] == ttft_ms


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "slo": {"ttft": 5}}, "ttft"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[5], [6]]}, "prompt"),
        ({"slo": {}}, "prompt"),
        ({"messages": [], "slo": {"tpot_ms": -1}}, "tpot_ms"),
        ({"messages": [[], []], "slo": {"tpot_ms": 1}}, "prompt"),
    ],
)
def test_a_mistake_in_what_is_quoted_is_refused(body: dict[str, Any], param: str) -> None:
    server = Server(QUOTING)
    refused(server.post(QUOTE, json=body), param)
    assert server.engine.calls == []


@pytest.mark.parametrize("body", [b"[1]", b"{", b"", b"{}", b'{"prompt": [1e999, ', b"null"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    headers = {"content-type": "application/json"}
    server = Server(QUOTING)
    refused(server.post(QUOTE, content=body, headers=headers), None)
    assert server.bodies == []


def test_odd_bodies_are_answered_all_the_same() -> None:
    headers = {"content-type": "application/json"}
    server = Server(QUOTING)
    for body in (
        b'{"prompt": [1e999]}',
        b'{"prompt": ["\\ud800"]}',
        '{"prompt": "x"}'.encode("utf-16"),
    ):
        assert server.post(QUOTE, content=body, headers=headers).json()["promised"]


def test_a_body_too_long_for_a_quote_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_quote, "MAX_BODY_BYTES", 40)
    server = Server(QUOTING)
    refused(server.post(QUOTE, json={"prompt": "x" * 60}), None, 413)
    assert server.post(QUOTE, json={"prompt": "x"}).status_code == 200


def test_clients_cannot_mark_a_request_of_their_own() -> None:
    server = Server(QUOTING)
    refused(server.post(json={"prompt": "x", "vllm_xargs": {QUOTE_KEY: 1}}), "quote")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_quote_needs_the_key_of_the_server(prompt: dict[str, Any]) -> None:
    server = Server(QUOTING)
    # As vLLM adds it: within our middleware, and before anybody has read the body.
    server.app.user_middleware.append(Middleware(AuthenticationMiddleware, tokens=["secret"]))
    refusal = server.post(QUOTE, json=prompt)
    assert refusal.status_code == 401
    wrong = server.post(QUOTE, json=prompt, headers={"authorization": "Bearer guess"})
    assert wrong.status_code == 401
    assert server.bodies == []
    right = server.post(QUOTE, json=prompt, headers={"authorization": "Bearer secret"})
    assert right.json() == {"object": "slo.quote", **YES}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_quotes_beyond_what_the_engine_may_have_are_refused(prompt: dict[str, Any]) -> None:
    may = asyncio.Event()

    async def slowly(call: Call) -> AsyncIterator[RequestOutput]:
        await may.wait()
        yield output(choice("", "abort", pack_quote(YES)))

    server = Server(slowly)
    calls = server.engine.calls

    async def trickled() -> AsyncIterator[bytes]:
        await may.wait()
        yield json.dumps(prompt).encode()

    async def run(client: httpx.AsyncClient) -> tuple[list[httpx.Response], httpx.Response]:
        async def ask(**body: Any) -> httpx.Response:
            headers = {"content-type": "application/json"}
            return await client.post(QUOTE, headers=headers, **body)

        # Who has not said yet what it asks keeps nobody out.
        reading = [asyncio.ensure_future(ask(content=trickled())) for _ in range(2 * MAX_QUOTES)]
        await asyncio.sleep(0)
        asking = [asyncio.ensure_future(ask(json=prompt)) for _ in range(MAX_QUOTES)]
        while len(calls) < MAX_QUOTES:
            await asyncio.sleep(0)
        refusal = await ask(json=prompt)
        asking[0].cancel()  # a client that leaves makes room
        await asyncio.wait(asking[:1])
        last = asyncio.ensure_future(ask(json=prompt))
        while len(calls) == MAX_QUOTES:
            await asyncio.sleep(0)
        may.set()
        await asyncio.gather(*reading)
        return [*await asyncio.gather(*asking[1:]), await last], refusal

    answers, refusal = server.run(lambda client: asyncio.wait_for(run(client), patience(30)))
    assert [answer.status_code for answer in answers] == [200] * MAX_QUOTES
    assert refusal.headers["retry-after"] == "1"
    assert refusal.headers["retry-after-ms"] == "1000"
    assert refusal.headers["x-slo-reason"] == "too_many_quotes"
    assert "ask one after another" in refused(refusal, None, 429)
    assert refusal.json()["error"]["type"] == "RateLimitError"


async def broken(call: Call) -> AsyncIterator[RequestOutput]:
    raise RuntimeError("engine died")
    yield  # never reached; it makes this a generator


def test_quotes_that_come_to_nothing_leave_room() -> None:
    server, failing = Server(QUOTING), Server(broken)
    for _ in range(MAX_QUOTES + 1):
        refused(server.post(QUOTE, json={"prompt": "x", "slo": {"ttft": 5}}), "ttft")
        with pytest.raises(RuntimeError, match="engine died"):
            failing.post(QUOTE, json={"prompt": "x"})
    assert server.post(QUOTE, json={"prompt": "x"}).status_code == 200


def test_a_server_with_another_scheduler_gives_no_quotes() -> None:
    response = Server(scheduler=None).post(QUOTE, json={"prompt": "x"})
    assert response.status_code == 501
    assert "vllm_slo.Scheduler" in response.json()["error"]["message"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_error_of_the_server_comes_as_it_is(prompt: dict[str, Any]) -> None:
    async def wrong(call: Call) -> AsyncIterator[RequestOutput]:
        raise VLLMValidationError("the prompt is too long", parameter="prompt")
        yield  # never reached; it makes this a generator

    response = Server(wrong).post(QUOTE, json={**prompt, "stream": False})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert "too long" in response.json()["error"]["message"]


def test_what_the_scheduler_finds_wrong_is_told() -> None:
    invalid = ending("", Invalid("ttft_ms: is odd").pack(), finish="abort")
    assert (
        refused(Server(invalid).post(QUOTE, json={"prompt": "x"}), "ttft_ms") == "ttft_ms: is odd"
    )


def test_a_quote_in_words() -> None:
    assert in_words(YES)[0] == "promised: yes"
    no = {
        **YES,
        "promised": False,
        "reason": "prefill",
        "retry_after_ms": 800,
        "cheapest": {"ttft_ms": 740.0, "tpot_ms": 50.0},
        "in_the_way": {"chat": 12},
    }
    text = "\n".join(in_words(no))
    assert "its prompt would not be done in time" in text
    assert "12 of chat" in text
    assert "800 ms" in text
    assert "TTFT 740 ms, TPOT 50 ms" in text
    later = in_words({**no, "cheapest": {"ttft_ms": 1864.492, "tpot_ms": 9.876}})
    assert "would be promised now: TTFT 1864 ms, TPOT 9.88 ms" in later


def test_numbers_that_are_packed_come_back() -> None:
    assert unpack_quote(pack_quote(YES)) == YES
    assert unpack_quote("slo_declined:5") is None
    assert unpack_quote(None) is None
