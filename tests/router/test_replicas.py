# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo serve tiny --replicas 2`` with real engines: served, routed, killed, stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from patience import patience

pytest.importorskip("ray")

from live_replicas import LiveReplicas, await_whole, running, sigkill, volley
from prometheus_client.parser import text_string_to_metric_families

from vllm_slo.slo.carriers import ROUTES
from vllm_slo.traces.files import read

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

ENGINES = [
    *("--replicas", "2", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "10"),
    *("--dtype", "float32", "--gpu-memory-utilization", "0.2"),
]
EASY = {"ttft_ms": 60_000, "tpot_ms": 5_000}
NEVER = {"ttft_ms": 0.01, "on_unattainable": "decline"}
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "import os"}
]
TOKENS = 101
"""Of answers that no other test asks for."""
START_S = patience(300.0)
PROMPT_S = patience(30.0)
"""Seconds until clients are told, on two cores that other tests and engines share; 2 to 5 alone."""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of recorded requests, by the name that the command line has."""
    return tmp_path_factory.mktemp("recording") / "requests.jsonl"


@pytest.fixture(scope="module")
def live(recording: Path) -> Iterator[LiveReplicas]:
    with running(*ENGINES, "--record", str(recording), within_s=START_S) as live:
        assert "2 replicas of tiny behind http://127.0.0.1:" in live.lines[0]
        yield live


@pytest.fixture
def client(live: LiveReplicas) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def total(live: LiveReplicas, series: str, page: str = "/metrics") -> float:
    text = httpx.get(f"{live.url}{page}", timeout=patience(30)).text
    families = list(text_string_to_metric_families(text))
    return sum(s.value for family in families for s in family.samples if s.name == series)


def test_completions(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked, extra_body={"slo": EASY})
    report = whole.model_extra["slo"]
    assert (report["promised"], report["attained"]) == (True, True)
    assert whole.service_tier is None
    parts = list(client.completions.create(**asked, stream=True, extra_body={"slo": EASY}))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert parts[-1].model_extra["slo"]["attained"] is True
    plain = client.completions.create(**asked)
    assert plain.choices[0].text == whole.choices[0].text


def test_each_replica_records_into_a_file_of_its_own(
    live: LiveReplicas, client: openai.OpenAI, recording: Path
) -> None:
    files = [recording.with_name(f"requests.replica-{number}.jsonl") for number in range(2)]
    prompt = "# the same beginning of all these prompts, longer than a block of tokens\n" * 8

    def ask(number: int) -> None:
        client.completions.create(
            model="tiny", prompt=prompt, max_tokens=TOKENS, extra_body={"ignore_eos": True}
        )

    with ThreadPoolExecutor(16) as clients:
        list(clients.map(ask, range(16)))
    until_s = time.monotonic() + PROMPT_S
    while True:
        new = [[r for r in read(file) if r.output_tokens == TOKENS] for file in files]
        if sum(map(len, new)) == 16:
            break
        assert time.monotonic() < until_s
        time.sleep(0.1)
    assert all(new), "one replica had all requests"
    ids = {request.hash_ids for part in new for request in part}
    assert len(ids) == 1 and ids != {()}  # under one salt
    assert not recording.exists()


def test_a_late_promise_comes_through_the_front(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0}
    late = client.completions.create(**asked, extra_body={"slo": {"ttft_ms": 0.001}})
    report = late.model_extra["slo"]
    assert (report["promised"], report["late"], report["attained"]) == (True, True, False)
    assert report["late_promise"]["kept"] is True


def test_chat(client: openai.OpenAI) -> None:
    headers = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "5000"}
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked, extra_headers=headers)
    assert whole.model_extra["slo"]["promised"] is True
    parts = list(client.chat.completions.create(**asked, stream=True, extra_headers=headers))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    assert parts[-1].model_extra["slo"]["promised"] is True


def test_requests_take_turns_and_say_who_served(live: LiveReplicas) -> None:
    served = [
        httpx.post(
            f"{live.url}/v1/completions",
            json={"model": "tiny", "prompt": f"{turn} = ", "max_tokens": 2, "slo": EASY},
            timeout=patience(60),
        ).headers["x-vllm-slo-replica"]
        for turn in range(4)
    ]
    assert set(served) == live.ready()
    pages = httpx.get(f"{live.url}/metrics/targets", timeout=patience(30)).json()
    assert {one["labels"]["replica"] for one in pages} == live.ready()
    for one in pages:
        page = one["labels"]["__metrics_path__"]
        assert total(live, "vllm_slo:requests_finished_total", page) > 0
    assert total(live, "vllm_slo:front_requests_total") >= 4


def test_the_live_page_is_that_of_both_replicas(live: LiveReplicas) -> None:
    assert httpx.get(f"{live.url}/slo", timeout=patience(30)).text.startswith("<!doctype html>")
    pages = httpx.get(f"{live.url}/metrics/targets", timeout=patience(30)).json()
    paths = [one["labels"]["__metrics_path__"] for one in pages]
    end_s, shown, wanted = time.monotonic() + patience(30), -1.0, [0.0]
    while time.monotonic() < end_s and shown != sum(wanted):  # both are written with a delay
        time.sleep(0.5)
        wanted = [total(live, "vllm_slo:requests_finished_total", path) for path in paths]
        data = httpx.get(f"{live.url}/slo/data", timeout=patience(30)).json()
        names = [name for name, *_ in data["series"]]
        shown = sum(
            count
            for _, _, counts, _ in data["samples"]
            for place, count in counts.items()
            if names[int(place)] == "vllm_slo:requests_finished_total"
        )
    assert len(wanted) == 2 and min(wanted) > 0
    assert shown == sum(wanted)


def test_what_nobody_can_keep_is_declined(client: openai.OpenAI) -> None:
    with pytest.raises(openai.RateLimitError) as refusal:
        client.completions.create(model="tiny", prompt="x", extra_body={"slo": NEVER})
    assert int(refusal.value.response.headers["retry-after"]) >= 1
    assert refusal.value.response.json()["error"]["type"] == "slo_unattainable"


ROUTED = {
    "/v1/completions": {"prompt": "import os", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/chat/completions/batch": {"messages": [MESSAGES, MESSAGES], "max_tokens": 4},
    "/v1/responses": {"input": "import os", "max_output_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTED)
def test_every_generating_route(live: LiveReplicas, route: str, stream: bool) -> None:
    assert set(ROUTED) == ROUTES
    if stream and route.endswith("/batch"):
        pytest.skip("vLLM does not stream these")
    said = {"stream": True} if stream else {}

    def post(slo: object, path: str = route) -> httpx.Response:
        body = {"model": "tiny", **ROUTED[route], **said, "slo": slo}
        return httpx.post(f"{live.url}{path}", json=body, timeout=patience(60))

    kept = post(EASY)
    assert kept.status_code == 200, kept.text
    assert kept.text.count('"promised":true') == 1
    declined, bad, elsewhere = post(NEVER), post({"ttft_ms": -5}), post(EASY, f"{route}/")
    assert (declined.status_code, bad.status_code, elsewhere.status_code) == (429, 400, 404)
    assert int(declined.headers["retry-after-ms"]) >= 1
    assert not [name for name in declined.headers if name == "x-vllm-slo-declined"]
    for answer in (declined, bad, elsewhere):
        shape = {"type", "message"} if route == "/v1/messages" else {"message", "type", "param"}
        assert shape <= answer.json()["error"].keys()
        assert ("code" in answer.json()["error"]) == (route != "/v1/messages")


def test_a_mistake_is_a_400_that_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="ttft_ms"):
        client.completions.create(model="tiny", prompt="x", extra_body={"slo": {"ttft_ms": -1}})
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_a_replicas_port_is_closed_without_its_token(live: LiveReplicas) -> None:
    found = 0
    for child in live.children("Replica"):
        for one in child.net_connections("tcp"):
            if one.status == "LISTEN" and one.laddr.ip == "127.0.0.1":
                answer = httpx.get(
                    f"http://127.0.0.1:{one.laddr.port}/v1/models", timeout=patience(10)
                )
                assert answer.status_code == 401
                found += 1
    assert found == 2


@pytest.mark.parametrize("part", [pytest.param("engine", marks=pytest.mark.deep), "front"])
def test_a_part_is_killed(live: LiveReplicas, part: str) -> None:
    """20 streams take all seats, so that 20 more wait in the engines; then a part is killed.

    A stream that got no seat begins when another ends, and so may one of the 20 others. Streams are
    of one length, so if all were waited for, there might be none left to cut off.

    The deaths of a replica's child and actor: test_router_kill.py, and what they leave of a real
    engine: test_replica.py.
    """
    before = await_whole(live, set(), 0, START_S)
    victims = {"engine": live.engines, "front": lambda: live.children("Front")}[part]()
    kill = partial(sigkill, victims[0])
    retries = round(patience(6)) if part == "front" else 0
    seen = asyncio.run(volley(live, kill, retries=retries, begun=16, stream_tokens=400))
    assert [one for one in seen.waiting if one.error is not None and not one.tokens] == []
    failed = [one for one in seen.streaming if one.error is not None]
    assert 1 <= len(failed) <= (20 if part == "front" else 19)
    assert max(one.ended_s for one in failed) - seen.killed_s < PROMPT_S
    assert all(one.whole or one.error for one in (*seen.waiting, *seen.streaming))
    assert sum(one.whole for one in seen.waiting) >= 5
    await_whole(live, before, 2 if part == "front" else 1, START_S)
