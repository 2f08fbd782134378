# SPDX-License-Identifier: Apache-2.0
"""Routes of other APIs at the front: Anthropic's Messages, and batches of conversations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from front_stack import LOADED, Fake, FrontProcess, eventually, http, processes, states_arrive
from patience import patience

from vllm_slo.slo.body import MAX_BODY_BYTES
from vllm_slo.slo.carriers import ROUTES

ROUTING = {"stale_after_s": patience(5.0), "dead_after_s": patience(10.0), "retries": 1}
MESSAGES, BATCH = "/v1/messages", "/v1/chat/completions/batch"
SLO = {"ttft_ms": 2_000}
KEY = "sk-secret"
CONVERSATION = [{"role": "user", "content": "hello"}]
ASKED = {"model": "fake", "max_tokens": 3, "messages": CONVERSATION}


@pytest.fixture(scope="module")
def stack() -> Iterator[tuple[dict[str, FrontProcess], list[Fake]]]:
    with processes() as keep:
        fronts = {"front": keep(FrontProcess(ROUTING))}
        fronts["front"].line("listening")  # it has compiled what the other loads
        keys = [hashlib.sha256(KEY.encode()).hexdigest()]
        fronts["keyed"] = keep(FrontProcess(ROUTING, api_key_sha256=keys))
        yield fronts, [keep(Fake("a")), keep(Fake("b"))]


@pytest.fixture
def fakes(stack: tuple[dict[str, FrontProcess], list[Fake]]) -> list[Fake]:
    for fake in stack[1]:
        fake.reset()
    return stack[1]


@pytest.fixture
def front(stack: tuple[dict[str, FrontProcess], list[Fake]], fakes: list[Fake]) -> FrontProcess:
    one = stack[0]["front"]
    one.serve(*fakes)
    states_arrive(one, fakes)
    return one


def seen(fakes: list[Fake]) -> list[dict[str, Any]]:
    return [one for fake in fakes for one in fake.seen()]


def anthropic_error(answer: httpx.Response, status: int, kind: str) -> str:
    """Check an error in Anthropic's shape; its message."""
    assert answer.status_code == status, answer.text
    said = answer.json()
    assert list(said) == ["type", "error"]
    assert said["type"] == "error"
    assert list(said["error"])[:2] == [
        "type",
        "message",
    ]  # the front's own have more
    assert said["error"]["type"] == kind
    return str(said["error"]["message"])


def test_they_are_among_the_routes_that_carry_an_slo() -> None:
    assert {MESSAGES, BATCH} <= ROUTES


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (MESSAGES, {"system": "be brief"}),
        (MESSAGES, {"system": [{"type": "text", "text": "be brief"}]}),
        (BATCH, {"messages": [CONVERSATION, CONVERSATION]}),
    ],
)
def test_they_are_routed_by_their_slo(
    front: FrontProcess, fakes: list[Fake], path: str, more: dict[str, Any]
) -> None:
    before = front.total("requests_total", result="promised")
    states_arrive(front, fakes[:1], **LOADED)
    for _ in range(2):
        answer = front.post(path, json={**ASKED, **more, "slo": SLO})
        assert answer.status_code == 200
        assert answer.headers["x-vllm-slo-replica"] == "b"
    assert front.total("requests_total", result="promised") == before + 2
    assert all(one["ticket"] for one in seen(fakes))


def test_the_fronts_refusals_have_the_shape_of_the_api(
    front: FrontProcess, fakes: list[Fake]
) -> None:
    bad = front.post(MESSAGES, json={**ASKED, "slo": {"ttft_ms": -1}})
    assert "ttft_ms" in anthropic_error(bad, 400, "invalid_request_error")
    anthropic_error(front.post(f"{MESSAGES}/"), 404, "not_found_error")
    anthropic_error(front.get(f"{MESSAGES}/%61"), 404, "not_found_error")
    put = http("PUT", front.url + MESSAGES, json=ASKED)
    anthropic_error(put, 405, "invalid_request_error")
    large = front.post(MESSAGES, content=b" " * (MAX_BODY_BYTES + 1))
    anthropic_error(large, 413, "request_too_large")
    states_arrive(front, fakes, **LOADED)
    declining = {**ASKED, "slo": {**SLO, "on_unattainable": "decline"}}
    declined = front.post(MESSAGES, json=declining)
    text = anthropic_error(declined, 429, "rate_limit_error")
    assert declined.headers["retry-after-ms"] in text
    assert seen(fakes) == []
    # The same on a route of OpenAI's.
    said = front.post(BATCH, json={**declining, "messages": [CONVERSATION]}).json()
    assert list(said["error"]) == ["message", "type", "param", "code"]


def test_failures_have_the_shape_of_the_api(front: FrontProcess, fakes: list[Fake]) -> None:
    for fake in fakes:
        fake.knobs(cut_after_tokens=0)
    anthropic_error(front.post(MESSAGES, json=ASKED), 502, "api_error")
    front.tell([])
    eventually(lambda: not front.replicas(), "there are none")
    anthropic_error(front.post(MESSAGES, json=ASKED), 503, "overloaded_error")


def test_a_missing_key_in_the_shape_of_the_api(
    stack: tuple[dict[str, FrontProcess], list[Fake]], fakes: list[Fake]
) -> None:
    keyed = stack[0]["keyed"]
    keyed.serve(*fakes)
    anthropic_error(keyed.post(MESSAGES, json=ASKED), 401, "authentication_error")
    anthropic_error(keyed.post(f"{MESSAGES}/count_tokens"), 401, "authentication_error")
    assert keyed.post(BATCH, json=ASKED).json() == {"error": "Unauthorized"}
    authorization = {"authorization": f"Bearer {KEY}"}
    assert keyed.post(MESSAGES, json=ASKED, headers=authorization).status_code == 200


# --- streams --------------------------------------------------------------------------------------


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names are those of their data."""
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


STREAM = {**ASKED, "stream": True}


def test_a_failure_after_the_preface_leads_to_another_replica(
    front: FrontProcess, fakes: list[Fake]
) -> None:
    before = front.total("retries_total", reason="connection")
    fakes[0].knobs(error_event_times=1)
    for _ in range(2):
        kinds = [one["type"] for one in events(front.post(MESSAGES, json=STREAM))]
        assert kinds[:3] == ["message_start", "ping", "content_block_start"]
        assert kinds.count("message_start") == kinds.count("message_stop") == 1
        assert "error" not in kinds
    assert front.total("retries_total", reason="connection") - before == 1
    for fake in fakes:
        fake.knobs(error_event_times=1)
    last = anthropic_error(front.post(MESSAGES, json=STREAM), 500, "api_error")
    assert last.endswith("is dead")  # nothing has begun, so it need not be a stream
