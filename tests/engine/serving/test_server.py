# SPDX-License-Identifier: Apache-2.0
"""A live server, started as users start it and asked as users ask: openai client and curl."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from patience import patience

pytest.importorskip("vllm")
pytest.importorskip("openai")
pytest.importorskip("httpx")

import httpx
import live_server
from live_server import SMALL, Answer, LiveServer, ask_curl, ask_openai, command, request_body

from vllm_slo import cli, tiny

pytestmark = pytest.mark.engine

KEY = "the key of acme, long and random"
CONFIG = f"""\
classes:
  chat: {{ttft_ms: 60000, tpot_ms: 10000}}
  code: {{ttft_ms: 120000, value: 2}}
service_tiers:
  priority: chat
access:
  keys:
    acme: {{sha256: {sha256(KEY.encode()).hexdigest()}, classes: [chat], objectives: false}}
  others: {{max_value: 1000000}}
quotas:
  tenants:
    acme: {{promised_tokens_per_s: 0.001, burst_tokens: 40}}
"""
Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "slo.yaml").write_text(CONFIG)
    model = str(tiny.path("target"))
    arguments = [command("vllm"), "serve", model, "--scheduler-cls", "vllm_slo.Scheduler", *SMALL]
    arguments += ["--additional-config", '{"slo_config": "slo.yaml"}']
    with live_server.running(arguments, model, folder, uniproc=False) as live:
        yield live


@pytest.fixture(params=["openai", "curl"])
def ask(request: pytest.FixtureRequest) -> Ask:
    if request.param == "curl" and shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    return ask_openai if request.param == "openai" else ask_curl


apis = pytest.mark.parametrize("api", ["completions", "chat"])
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])

# --- what is asked, and what comes back ----------------------------------------------------------

FLAT = {"slo_ttft_ms": 60000, "slo_tpot_ms": 10000}
# Carrier -> (body, headers, tier of the report or None, service tier served).
CARRIERS: dict[str, tuple[dict[str, Any], dict[str, str], str | None, str]] = {
    "body": ({"slo": {"ttft_ms": 60000, "tpot_ms": 10000}}, {}, "guaranteed", "default"),
    "xargs": ({"vllm_xargs": FLAT}, {}, "guaranteed", "default"),
    "slos_serve": ({"vllm_xargs": {"slo_tpot": 10}}, {}, "guaranteed", "default"),
    "headers": (
        {},
        {"x-llm-d-slo-ttft-ms": "60000", "x-llm-d-slo-tpot-ms": "1e4"},
        "guaranteed",
        "default",
    ),
    "aliases": ({}, {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "10000"}, "guaranteed", "default"),
    "class": ({"slo": {"class": "code"}}, {}, "guaranteed", "default"),
    "class_header": ({}, {"x-slo-class": "chat"}, "guaranteed", "default"),
    "tier_header": (
        {"slo": {"class": "chat"}},
        {"x-slo-tier": "best_effort"},
        "best_effort",
        "flex",
    ),
    "all_agree": (
        {"slo": {"class": "chat"}, "vllm_xargs": FLAT, "service_tier": "priority"},
        {"x-slo-ttft-ms": "60000"},
        "guaranteed",
        "priority",
    ),
    "flex": ({"service_tier": "flex"}, {}, "best_effort", "flex"),
    "priority": ({"service_tier": "priority"}, {}, "guaranteed", "priority"),
    "default": ({"service_tier": "default"}, {}, None, "default"),
    "auto": ({"service_tier": "auto"}, {}, None, "default"),
}


@pytest.mark.versions
@apis
@streams
@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_carrier(server: LiveServer, ask: Ask, api: str, stream: bool, carrier: str) -> None:
    body, headers, tier, service_tier = CARRIERS[carrier]
    if carrier == "slos_serve":
        body = {"vllm_xargs": {**body["vllm_xargs"], "prefill_ddl": time.time() + 60}}
    answer = ask(server, api, stream, body, headers)
    assert answer.status == 200, answer.error
    assert answer.text
    assert answer.stop_reasons == [None]
    named = "service_tier" in body
    assert answer.service_tiers == ([service_tier] if named else [])
    assert [report["tier"] for report in answer.reports] == ([] if tier is None else [tier])
    for report in answer.reports:
        assert report["promised"] is (tier == "guaranteed")
        assert report["ttft_ms"] > 0
        assert report["tpot_ms"] > 0
        assert isinstance(report["attained"], bool) or tier == "best_effort"


@apis
@streams
def test_an_objective_that_cannot_be_kept(
    server: LiveServer, ask: Ask, api: str, stream: bool
) -> None:
    late = ask(server, api, stream, {"slo": {"ttft_ms": 0.001}, "service_tier": "priority"})
    assert (late.status, late.service_tiers) == (200, ["flex"])
    assert late.text
    (report,) = late.reports
    assert (report["promised"], report["late"], report["attained"]) == (True, True, False)
    assert report["reason"] == "expired"
    assert report["late_promise"]["kept"] is True
    assert report["ttft_ms"] <= report["late_promise"]["ttft_ms"]
    hurried = ask(server, api, stream, {"slo": {"ttft_ms": 0.001, "max_wait_ms": 0.001}})
    assert (hurried.status, hurried.headers["x-slo-reason"]) == (429, "wait")
    assert "raise max_wait_ms" in hurried.error["message"]
    declined = ask(server, api, stream, {"slo": {"ttft_ms": 0.001, "on_unattainable": "decline"}})
    assert declined.status == 429
    assert int(declined.headers["retry-after"]) >= 1
    assert int(declined.headers["retry-after-ms"]) >= 1
    assert declined.headers["x-slo-reason"] == "expired"
    assert declined.error is not None
    assert declined.error["type"] == "slo_unattainable"


def test_a_deadline_in_the_past_is_served_late(server: LiveServer) -> None:
    answer = ask_openai(
        server, "completions", False, {"vllm_xargs": {"prefill_ddl": time.time() - 5}}
    )
    assert [r["late"] for r in answer.reports] == [True]
    assert answer.text


@pytest.mark.versions
@apis
def test_a_stream_says_the_same_as_a_whole_answer(server: LiveServer, api: str) -> None:
    plain = [ask_openai(server, api, stream, {}) for stream in (False, True)]
    asked = [
        ask_openai(server, api, stream, {"slo": {"class": "chat"}}) for stream in (False, True)
    ]
    assert len({answer.text for answer in plain + asked}) == 1
    assert not any(answer.reports for answer in plain)


@pytest.mark.versions
@apis
@streams
def test_stop_reasons_survive_the_report(server: LiveServer, api: str, stream: bool) -> None:
    asked = {"slo": {"class": "chat"}, "return_token_ids": True}
    body = {**request_body(server, api, asked), "stream": False}
    path = "chat/completions" if api == "chat" else "completions"
    whole = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=patience(60)).json()
    third = whole["choices"][0]["token_ids"][2]
    stopped = ask_openai(server, api, stream, {**asked, "stop_token_ids": [third]})
    assert stopped.stop_reasons == [third]
    assert len(stopped.reports) == 1


@pytest.mark.versions
@streams
def test_a_stop_string(server: LiveServer, stream: bool) -> None:
    # vLLM's API server matches it and aborts the request; the scheduler finds out why.
    whole = ask_openai(server, "completions", False, {})
    stop = whole.text.strip()[1:3]
    finished = server.settled_total("vllm_slo:requests_finished_total", slo_class="chat")
    asked = {"slo": {"class": "chat"}, "stop": stop, "max_tokens": 900, "ignore_eos": True}
    answer = ask_openai(server, "completions", stream, asked)
    assert answer.status == 200
    assert answer.stop_reasons == [stop]
    assert [(r["promised"], r["attained"]) for r in answer.reports] == [(True, True)]
    server.await_total(finished + 1, "vllm_slo:requests_finished_total", slo_class="chat")


@pytest.mark.versions
def test_each_choice_of_a_stream_has_its_report(server: LiveServer) -> None:
    extra = {"slo": {"class": "chat"}, "n": 2, "temperature": 1.0, "ignore_eos": True}
    answer = ask_openai(server, "completions", True, extra)
    assert len(answer.reports) == 2
    assert answer.service_tiers == []
    assert answer.stop_reasons == [None, None]


# --- mistakes ------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], dict[str, str], str, str]] = [
    ({"slo": {"ttft_ms": -5}}, {}, "ttft_ms", "give milliseconds from 0.001 to"),
    ({"slo": {"ttft_ms": 0}}, {}, "ttft_ms", "give milliseconds from 0.001 to"),
    ({"slo": {"tpot_ms": "fast"}}, {}, "tpot_ms", "is not a number"),
    ({"slo": {"ttft_ms": 1e12}}, {}, "ttft_ms", "to 86400000"),
    ({"vllm_xargs": {"prefill_ddl": 0.5}}, {}, "prefill_ddl", "give epoch seconds"),
    ({"slo": {"ttft": 5}}, {}, "ttft", "did you mean"),
    ({"slo": {"class": "nope"}}, {}, "class", "configured classes: chat, code"),
    ({"slo": {"tier": "gold"}}, {}, "tier", "use one of guaranteed, best_effort"),
    ({"slo": {"on_unattainable": "panic"}}, {}, "on_unattainable", "use one of"),
    ({"slo": [1]}, {}, "slo", "give an object"),
    ({"vllm_xargs": {"slo_tpot_ms": True}}, {}, "tpot_ms", "is not a number"),
    ({"vllm_xargs": {"slo_stream": 1}}, {}, "stream", "is not a field of an SLO"),
    ({}, {"x-slo-ttft-ms": "inf"}, "ttft_ms", "is not a number"),
    ({}, {"x-llm-d-slo-tpot-ms": "9" * 400}, "tpot_ms", "give milliseconds"),
    ({"slo": {"ttft_ms": 5}}, {"x-slo-ttft-ms": "6"}, "ttft_ms", "send one value"),
    ({"slo": {"class": "chat"}}, {"x-slo-class": "code"}, "class", "send one value"),
    ({"slo": {"tpot_ms": 5}, "vllm_xargs": {"slo_tpot": 1}}, {}, "tpot_ms", "send one value"),
]


@pytest.mark.versions
@apis
@streams
@pytest.mark.parametrize("case", BAD, ids=[f"{bad[2]}-{i}" for i, bad in enumerate(BAD)])
def test_mistakes_are_400(server: LiveServer, api: str, stream: bool, case: Any) -> None:
    body, headers, name, fix = case
    for ask in (ask_openai, ask_curl) if shutil.which("curl") and not stream else (ask_openai,):
        answer = ask(server, api, stream, body, headers)
        assert answer.status == 400, name
        assert answer.error is not None
        assert set(answer.error) == {"message", "type", "param", "code"}
        assert (answer.error["param"], answer.error["code"]) == (name, 400)
        assert answer.error["message"].startswith(f"{name}: ")
        assert fix in answer.error["message"]


def test_a_key_gets_what_it_is_granted_up_to_its_quota(server: LiveServer) -> None:
    held = {"authorization": f"Bearer {KEY}"}
    asked = {"slo": {"class": "chat"}, "max_tokens": 30, "ignore_eos": True}
    asks = [ask_openai, ask_curl] if shutil.which("curl") else [ask_openai]
    taken = server.total("vllm_slo:tenant_promised_tokens_total", tenant="acme")
    first, *later = (
        ask(server, "completions", False, asked, held).reports[0] for ask in (*asks, *asks)
    )
    assert (first["promised"], first["reason"]) == (True, None)
    # Of these one may be promised its last few tokens, when what is left in the bucket pays them.
    assert {report["reason"] for report in later} == {"quota"}
    total = server.settled_total("vllm_slo:tenant_promised_tokens_total", tenant="acme") - taken
    assert 30 < total <= 40
    ask = asks[-1]
    others = ask(server, "completions", False, asked)
    assert others.reports[0]["promised"]
    forbidden = [({"class": "code"}, "class"), ({"ttft_ms": 5}, "ttft_ms"), ({"value": 9}, "value")]
    for slo, name in (*forbidden, ({"class": "chat", "tenant": "mallory"}, "tenant")):
        answer = ask(server, "chat", False, {"slo": slo}, held)
        assert (answer.status, answer.error and answer.error["param"]) == (403, name)


@pytest.mark.parametrize("padding", [0, 33 << 20], ids=["short", "of 33 MiB"])
def test_an_escaped_key_is_read_in_a_body_of_any_length(server: LiveServer, padding: int) -> None:
    asked = {"vllm_xargs": {"slo_class": "code"}}
    text = json.dumps(request_body(server, "completions", asked))
    answer = httpx.post(
        f"{server.url}/v1/completions",
        content=text.replace("slo_class", "\\u0073lo_class") + " " * padding,
        headers={"content-type": "application/json", "authorization": f"Bearer {KEY}"},
        timeout=patience(120),
    )
    assert answer.status_code == 403, answer.text
    assert answer.json()["error"]["param"] == "class"


def bad_value(rng: random.Random) -> Any:
    """What no field of an SLO takes."""
    return rng.choice(
        [
            *(-1, 0, -0.0, 1e300, 10**400, float("nan"), float("inf"), float("-inf"), True, False),
            *("", "x" * 5000, "12ms", "\x00", "é" * 90, "NaN", [], [1], {}, {"ttft_ms": 5}),
            rng.uniform(-1e9, 0),
            "".join(chr(rng.randrange(1, 0xD7FF)) for _ in range(rng.randrange(1, 100))),
        ]
    )


def bad_request(rng: random.Random, good: dict[str, Any]) -> tuple[bytes, dict[str, str | bytes]]:
    """A body and headers with at least one mistake in them."""
    body, headers = dict(good), {"content-type": "application/json"}
    key = rng.choice(["ttft_ms", "tpot_ms", "tier", "on_unattainable", "expected_output_tokens"])
    kind = rng.randrange(8)
    if kind == 0:
        body["slo"] = {key: bad_value(rng)}
    elif kind == 1:
        body["slo"] = rng.choice([5, "chat", [], [{}], True, 0.5, "x" * 9000])
    elif kind == 2:
        body["vllm_xargs"] = {f"slo_{key}": bad_value(rng)}
    elif kind == 3:
        body["slo"] = {"".join(rng.choices("abcdefgh_ \n\"'{é", k=rng.randrange(1, 40))): 5}
    elif kind == 4:
        noise = bytes(rng.choice([*range(33, 127), *range(160, 256)]) for _ in range(40))
        return json.dumps(body).encode(), {**headers, "x-slo-ttft-ms": b"-" + noise}
    elif kind == 5:
        body["slo"], headers["x-slo-tpot-ms"] = {"tpot_ms": rng.randrange(1, 99)}, "100"
    elif kind == 6:
        body["slo"] = {"tier": rng.choice(["gold", 5, [], {}, "", "GUARANTEED", 1.5, True])}
    else:
        text = json.dumps({**body, "slo": {key: 5}}).encode()
        deep = b'{"slo": ' + b"[" * 20_000
        return rng.choice([text[: rng.randrange(1, len(text))], deep, b"\xff" + text]), headers
    return json.dumps(body).encode(), headers


async def storm(server: LiveServer, count: int, seed: int) -> tuple[list[Any], list[Any]]:
    """``count`` bad requests, every tenth followed by a good one; answers of both."""
    rng, gate = random.Random(seed), asyncio.Semaphore(16)
    url = f"{server.url}/v1/completions"
    good = request_body(server, "completions", {})
    plan: list[tuple[bool, bytes, Any]] = []
    for i in range(count):
        plan.append((False, *bad_request(rng, good)))
        if i % 10 == 0:
            asked = {**good, **rng.choice([{}, {"slo": {"class": "chat"}}, {"stream": True}])}
            plan.append((True, json.dumps(asked).encode(), {"content-type": "application/json"}))

    async with httpx.AsyncClient(timeout=patience(120)) as client:

        async def send(one: tuple[bool, bytes, Any]) -> tuple[bool, bytes, Any]:
            async with gate:
                return one[0], one[1], await client.post(url, content=one[1], headers=one[2])

        done = await asyncio.gather(*(send(one) for one in plan))
    bad = [(body, answer) for fine, body, answer in done if not fine]
    return bad, [answer for fine, _, answer in done if fine]


def test_a_thousand_bad_requests_among_good_ones(server: LiveServer) -> None:
    expected = ask_openai(server, "completions", False, {}).text
    bad, good = asyncio.run(storm(server, 1000, seed=2))
    for body, answer in bad:
        assert answer.status_code == 400, (body[:300], answer.text[:300])
        if b'"detail"' in answer.content:  # FastAPI's words for what is no JSON at all
            with pytest.raises((ValueError, RecursionError)):
                json.loads(body)
        else:
            assert answer.json()["error"]["message"]
    texts = set()
    for answer in good:
        assert answer.status_code == 200
        seen = Answer(200)
        for line in answer.text.splitlines():
            data = line.removeprefix("data: ")
            if data.startswith("{"):
                seen.take(json.loads(data))
        texts.add(seen.text)
    assert texts == {expected}
    assert len(good) == 100
    assert server.process.poll() is None
    assert ask_openai(server, "chat", True, {"slo": {"class": "chat"}}).reports


# --- quotes --------------------------------------------------------------------------------------


def quote(server: LiveServer, api: str, slo: dict[str, Any], **extra: Any) -> httpx.Response:
    body = request_body(server, api, {"slo": slo, **extra})
    return httpx.post(f"{server.url}/v1/slo/quote", json=body, timeout=patience(60))


@pytest.mark.versions
@apis
def test_a_quote_says_what_would_be_promised(server: LiveServer, api: str) -> None:
    yes = quote(server, api, {"class": "chat"}, stream=True)
    assert yes.status_code == 200, yes.text
    said = yes.json()
    assert said.pop("ttft_ms") > 0
    assert said.pop("tpot_ms") > 0
    assert said == {
        "object": "slo.quote",
        "promised": True,
        "reason": None,
        "retry_after_ms": None,
        "class": "chat",
        "cheapest": {"ttft_ms": 60000, "tpot_ms": 10000},
        "in_the_way": {},
    }
    no = quote(server, api, {"ttft_ms": 60000, "tpot_ms": 0.001}).json()
    assert (no["promised"], no["reason"], no["class"]) == (False, "decode", None)
    assert no["retry_after_ms"] >= 1
    assert no["cheapest"]["ttft_ms"] == 60000
    assert no["cheapest"]["tpot_ms"] >= said["cheapest"]["tpot_ms"] / 1e6
    # What is offered is promised, and kept where nobody else is served.
    offer = {name: 2 * ms for name, ms in no["cheapest"].items()}
    assert [one["promised"] for one in ask_openai(server, api, False, {"slo": offer}).reports] == [
        True
    ]


def test_a_thousand_quotes_at_once_break_no_promise(server: LiveServer) -> None:
    promised = {"slo": {"ttft_ms": 60000, "tpot_ms": 2000}, "max_tokens": 60, "ignore_eos": True}

    async def flood() -> tuple[list[int], list[dict[str, Any]]]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=patience(120), limits=limits) as client:
            url, body = f"{server.url}/v1/", request_body(server, "completions", promised)
            served = [
                asyncio.create_task(client.post(f"{url}completions", json=body)) for _ in range(3)
            ]
            await asyncio.sleep(0.5)
            asked = [client.post(f"{url}slo/quote", json=body) for _ in range(1000)]
            statuses = [answer.status_code for answer in await asyncio.gather(*asked)]
            return statuses, [(await task).json()["slo"] for task in served]

    statuses, reports = asyncio.run(flood())
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 8
    assert [(report["promised"], report["attained"]) for report in reports] == [(True, True)] * 3


def test_a_mistake_in_a_quote(server: LiveServer) -> None:
    bad = quote(server, "chat", {"ttft_ms": -5})
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "ttft_ms"
    assert quote(server, "completions", {"ttft_ms": 5}, model="nobody").status_code == 404
    assert quote(server, "completions", {"ttft_ms": 5}, max_tokens=-1).status_code == 400
    nothing = httpx.post(f"{server.url}/v1/slo/quote", content=b"{", timeout=patience(60))
    assert nothing.status_code == 400


def test_quotes_are_counted_apart(server: LiveServer) -> None:
    finished = server.settled_total("vllm_slo:requests_finished_total")
    yes = server.total("vllm_slo:quotes_total", slo_class="code", promised="true", reason="")
    for _ in range(2):
        assert quote(server, "completions", {"class": "code"}).json()["promised"]
    labels = {"slo_class": "code", "promised": "true", "reason": ""}
    server.await_total(yes + 2, "vllm_slo:quotes_total", **labels)
    assert server.settled_total("vllm_slo:requests_finished_total") == finished
    assert server.total("vllm:num_requests_running") == 0


def test_the_command_that_quotes(server: LiveServer) -> None:
    def run(*options: str, url: str = server.url) -> subprocess.CompletedProcess[str]:
        asked = [command("vllm-slo"), "quote", "--base-url", url, *options]
        return subprocess.run(
            asked, capture_output=True, text=True, timeout=patience(60), check=False
        )

    yes = run("--prompt", "def read(path):", "--ttft-ms", "60000")
    assert (yes.returncode, yes.stdout.splitlines()[0]) == (0, "promised: yes")
    no = run("--prompt", "hello", "--chat", "--class", "chat", "--tpot-ms", "0.001", "--json")
    assert no.returncode == 1
    assert json.loads(no.stdout)["reason"] == "decode"
    unknown = run("--prompt", "hello", "--class", "nope")
    assert unknown.returncode == 2
    assert "configured classes: chat, code" in unknown.stderr
    away = run("--prompt", "hello", "--ttft-ms", "5", url="http://127.0.0.1:9")
    assert away.returncode == 2
    assert "is the server running?" in away.stderr


# --- recorded traffic ----------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["completions", "chat", "responses"])
def test_a_recorded_trace_is_replayed(
    server: LiveServer, api: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten requests of two classes, four of them rounds of one session, get their promises."""
    lines = [{"schema": "vllm-slo-trace/1", "created": "2026-12-01T10:00:00Z", "block_tokens": 64}]
    for n in range(10):
        row: dict[str, Any] = {"timestamp": 50 * n, "input_length": 96 + 32 * n}
        row |= {"output_length": 3 + n, "hash_ids": [7, n], "class": ("wide", "deep")[n % 2]}
        row |= {"session": "job"} if n in (0, 3, 4, 7) else {}
        lines.append({**row, "ttft_ms": 80_000, "tpot_ms": 9_000 + n % 2})
    trace, out = tmp_path / "trace.jsonl", tmp_path / "report.json"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["replay", str(trace), "--base-url", server.url, "--api", api, "--json", str(out)]
    assert cli.main([*words, "--min-attainment", "1", "--every-class"]) == 0
    (run,) = json.loads(out.read_text())["servers"]
    assert {name: one["admitted"] for name, one in run["classes"].items()} == {"wide": 5, "deep": 5}
    assert [request["output_tokens"] for request in run["requests"]] == list(range(3, 13))
    assert run["prompt_tokens"]["most_off"] == 0
    # Responses do not say how many tokens an event has, which may be none of a character.
    assert not [told for told in run["warnings"] if api != "responses" or "per chunk" not in told]
    ends = [request["last_token_s"] for request in run["requests"]]
    starts = [request["arrival_s"] for request in run["requests"]]
    assert starts[3] >= ends[0] and starts[4] >= ends[3] and starts[7] >= ends[4]
    assert "wide" in capsys.readouterr().out


# --- metrics, and clients that leave -------------------------------------------------------------


@pytest.mark.versions
def test_metrics_stand_beside_those_of_vllm(server: LiveServer) -> None:
    labels = {"slo_class": "code", "promised": "true"}
    before = server.total("vllm_slo:requests_finished_total", **labels)
    tokens = server.total("vllm_slo:generation_tokens_total", slo_class="code")
    for _ in range(3):
        body = {"slo": {"class": "code"}, "ignore_eos": True}
        assert ask_openai(server, "completions", True, body).reports
    server.await_total(before + 3, "vllm_slo:requests_finished_total", **labels)
    server.await_total(tokens + 18, "vllm_slo:generation_tokens_total", slo_class="code")
    server.await_total(0, "vllm_slo:promised_requests")
    server.await_total(0, "vllm_slo:best_effort_requests")
    server.await_total(0, "vllm:num_requests_running")
    finished = server.total("vllm_slo:requests_finished_total", slo_class="code")
    assert server.total("vllm_slo:ttft_seconds_count", slo_class="code") == finished
    assert server.total("vllm_slo:admissions_total", slo_class="code", outcome="promised") >= 3
    assert server.total("vllm_slo:step_time_margin_ratio") >= 1
    assert server.total("vllm_slo:step_time_bias_ratio") > 0
    assert server.total("vllm_slo:step_time_ratio_count") > 0
    assert server.total("vllm_slo:step_seconds_total") > 0
    assert server.total("vllm_slo:step_predicted_seconds_total") > 0
    assert server.total("vllm:time_to_first_token_seconds_count") >= finished
    ours = {name for name, _ in server.metrics() if name.startswith("vllm_slo:")}
    theirs = {name for name, _ in server.metrics() if name.startswith("vllm:")}
    assert ours and theirs


@pytest.mark.versions
@apis
def test_a_client_that_leaves_frees_its_request(server: LiveServer, api: str) -> None:
    finished = server.settled_total("vllm_slo:requests_finished_total", slo_class="chat")
    extra = {"slo": {"class": "chat"}, "max_tokens": 960, "ignore_eos": True, "stream": True}
    path = "chat/completions" if api == "chat" else "completions"
    body = request_body(server, api, extra)
    with httpx.stream("POST", f"{server.url}/v1/{path}", json=body, timeout=patience(60)) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        server.await_total(1, "vllm:num_requests_running")
    server.await_total(0, "vllm:num_requests_running")
    server.await_total(0, "vllm_slo:promised_requests")
    assert server.total("vllm_slo:requests_finished_total", slo_class="chat") == finished


# --- stages and sessions -------------------------------------------------------------------------

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def example(name: str, server: LiveServer) -> list[str]:
    """What an example prints, asking this server."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), f"{server.url}/v1"],
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_a_reasoning_request_tells_how_each_stage_went(server: LiveServer) -> None:
    first, thinking, answer = example("stages.py", server)
    assert first.startswith("promised: ")
    tokens = [int(line.split()[1]) for line in (thinking, answer)]
    assert sum(tokens) <= 120
    assert min(tokens) >= 1
    asked = [int(line.split("at most ")[1].split()[0]) for line in (thinking, answer)]
    assert asked == [40, 100]
    for line, tpot_ms in zip((thinking, answer), asked, strict=True):
        measured = float(line.split("asked, ")[1].split()[0])
        assert line.endswith(f"attained: {measured <= tpot_ms}")


def test_a_tool_loop_of_three_rounds_is_one_session(server: LiveServer) -> None:
    before = server.total("vllm_slo:sessions_finished_total")
    lines = example("agent.py", server)
    assert [line.split(":")[0] for line in lines] == ["round 1", "round 2", "round 3"]
    elapsed = [float(line.split("the job after ")[1].split()[0]) for line in lines]
    assert elapsed[0] + 0.6 < elapsed[2] < patience(20)  # two tools lie between
    kept = [line.endswith("attained so far: True") for line in lines]
    rounds = ["attained: True;" in line for line in lines]
    assert kept == [all(rounds[: n + 1]) for n in range(3)]
    server.await_total(before + 1, "vllm_slo:sessions_finished_total")


def test_thinking_needs_a_reasoning_parser(server: LiveServer) -> None:
    answer = ask_openai(server, "completions", False, {"slo": {"thinking_tpot_ms": 20}})
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["param"] == "thinking_tpot_ms"
    assert "--reasoning-parser" in answer.error["message"]
