# SPDX-License-Identifier: Apache-2.0
"""The front: what reaches replicas, what comes back, where requests go by their SLO."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from front_stack import (
    LOADED,
    PATIENCE_S,
    Fake,
    FrontProcess,
    events,
    eventually,
    http,
    processes,
    states_arrive,
)
from patience import patience

from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.router.haproxy_config import BUFFER_BYTES
from vllm_slo.slo.body import MAX_BODY_BYTES
from vllm_slo.slo.carriers import ROUTES

ROUTING = {"stale_after_s": patience(5.0), "dead_after_s": patience(10.0), "drain_s": 5.0}
SLO = {"ttft_ms": 2_000}
KEY = "sk-secret"


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Any]]:
    """Three replicas, and one front for each way of routing."""
    with processes() as keep:
        fakes, front = [keep(Fake(name)) for name in "abc"], keep(FrontProcess(ROUTING))
        front.line("listening")  # it has compiled what the others load
        yield {
            "fakes": fakes,
            "front": front,
            "one_hop": keep(FrontProcess({**ROUTING, "max_hops": 1})),
            "best_effort": keep(FrontProcess({**ROUTING, "backup": "best_effort"})),
            "decline": keep(
                FrontProcess(
                    {**ROUTING, "backup": "decline"},
                    api_key_sha256=[hashlib.sha256(KEY.encode()).hexdigest()],
                )
            ),
        }


@pytest.fixture
def fakes(started: dict[str, Any]) -> list[Fake]:
    for fake in started["fakes"]:
        fake.reset()
    return list(started["fakes"])


def ready(started: dict[str, Any], name: str) -> FrontProcess:
    front: FrontProcess = started[name]
    front.serve(*started["fakes"])
    states_arrive(front, started["fakes"])
    return front


@pytest.fixture
def front(started: dict[str, Any], fakes: list[Fake]) -> FrontProcess:
    return ready(started, "front")


def everything_seen(fakes: list[Fake]) -> list[dict[str, Any]]:
    return [{"by": fake.name, **one} for fake in fakes for one in fake.seen()]


# --- the openai client ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("slo", [None, SLO])
def test_the_openai_client_is_served(front: FrontProcess, stream: bool, slo: Any) -> None:
    extra = {} if slo is None else {"slo": slo}
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        chat: Any = client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=3,
            stream=stream,
            extra_body=extra,
        )
        plain: Any = client.completions.create(
            model="fake", prompt="hello", max_tokens=3, stream=stream, extra_body=extra
        )
        if stream:
            said = "".join(part.choices[0].delta.content or "" for part in chat)
            texts = [said, "".join(part.choices[0].text for part in plain)]
        else:
            texts = [chat.choices[0].message.content, plain.choices[0].text]
    assert texts == [" t0 t1 t2"] * 2


def test_responses_are_routed_too(front: FrontProcess, fakes: list[Fake]) -> None:
    answer = front.post("/v1/responses", json={"input": "x", "stream": True, "slo": SLO})
    assert answer.status_code == 200
    assert events(answer.text)[0]["type"] == "response.created"
    assert everything_seen(fakes)[0]["ticket"]


# --- what reaches the replica, and what comes back -----------------------------------------------


def test_the_request_arrives_as_it_was_sent(front: FrontProcess, fakes: list[Fake]) -> None:
    body = b'{ "prompt" : "\\u00fc",\t"max_tokens":1, "slo": {"ttft_ms": 2000}}\n'
    headers = {
        "content-type": "application/json",
        "authorization": "Bearer mine",
        "x-request-id": "id-1",
        "x-custom": "kept",
        "x-vllm-slo-token": "forged",
        "x-vllm-slo-ticket": "999",
        "x-vllm-slo-anything": "forged",
        "x-dropped": "y",
        "connection": "keep-alive, x-dropped",
        "te": "trailers",
    }
    answer = front.post("/v1/completions?a=1&b=%20", content=body, headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "id-1"
    (seen,) = everything_seen(fakes)
    assert seen["body"].encode() == body
    assert seen["path"] == "/v1/completions?a=1&b=%20"
    assert answer.headers["x-vllm-slo-replica"] == seen["by"]
    got = seen["headers"]
    assert got["authorization"] == "Bearer mine"
    assert got["x-custom"] == "kept"
    assert got["x-request-id"] == "id-1"
    assert got["content-length"] == str(len(body))
    assert not {"te", "x-vllm-slo-anything"} & set(got)
    assert seen["ticket"] != "999"
    assert 0 <= seen["age_ms"] < 1e3 * PATIENCE_S
    assert [one.lower() for one in seen["header_names"]].count("x-vllm-slo-token") == 1


def test_a_request_id_is_made_where_there_is_none(front: FrontProcess, fakes: list[Fake]) -> None:
    first, second = front.post(), front.post()
    ids = {first.headers["x-request-id"], second.headers["x-request-id"]}
    assert len(ids) == 2
    assert {one["headers"]["x-request-id"] for one in everything_seen(fakes)} == ids


def test_headers_may_hold_more_than_ascii(front: FrontProcess, fakes: list[Fake]) -> None:
    assert front.post(headers={b"x-name": "\u00fc".encode()}).status_code == 200
    assert everything_seen(fakes)[0]["headers"]["x-name"] == "\u00fc"


def test_an_absolute_target_leads_nowhere_else(front: FrontProcess, fakes: list[Fake]) -> None:
    target, host = b"http://other.example/v1/models", b"other.example"
    status, body = raw(front, b"GET %b HTTP/1.1\r\nHost: %b\r\n\r\n" % (target, host))
    assert status == 200
    assert json.loads(body)["from"] in "abc"
    assert raw(front, b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % target)[0] == 400


def test_tickets_grow(front: FrontProcess, fakes: list[Fake]) -> None:
    for _ in range(6):
        assert front.post().status_code == 200
    assert sum(len(fake.seen()) for fake in fakes) == 6
    for fake in fakes:
        tickets = [Ticket.parse(one["ticket"]) for one in fake.seen()]
        assert tickets == sorted(set(tickets))
    eventually(front.quiet, "all tickets have ended")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", sorted(ROUTES))
def test_the_answer_is_the_replicas_own(
    front: FrontProcess, fakes: list[Fake], path: str, stream: bool, split: bool
) -> None:
    for fake in fakes:
        fake.knobs(split=split)
    asked = {"prompt": "x", "max_tokens": 5, "stream": stream}
    asked["stream_options"] = {"include_usage": True}
    through = front.post(path, json=asked)
    name = through.headers["x-vllm-slo-replica"]
    entry = next(fake.entry for fake in fakes if fake.name == name)
    direct = http(
        "POST", entry["url"] + path, json=asked, headers={"x-vllm-slo-token": entry["token"]}
    )
    assert through.content == direct.content
    assert through.status_code == direct.status_code == 200
    added = {"x-vllm-slo-replica", "x-request-id", "date"}
    kept = {k: v for k, v in through.headers.items() if k not in added}
    assert kept == {k: v for k, v in direct.headers.items() if k != "date"}


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", "application/json"),
        (b"[1]", "application/json"),
        (b"\xff\xfe", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b"x=1", "application/x-www-form-urlencoded"),
        (b"", "application/json"),
        (b'["\\ud800"]', "application/json"),
    ],
)
def test_what_is_not_a_json_object_is_the_replicas_to_refuse(
    front: FrontProcess, fakes: list[Fake], content: bytes, kind: str
) -> None:
    answer = front.post(content=content, headers={"content-type": kind})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "not a JSON object"
    (seen,) = everything_seen(fakes)
    assert seen["size"] == len(content)


def test_half_a_character_is_forwarded(front: FrontProcess) -> None:
    body = b'{"prompt": "\\ud800", "messages": [{"content": "\\ud800"}]}'
    headers = {"content-type": "application/json"}
    assert front.post(content=body, headers=headers).status_code == 200


def test_odd_requests_are_forwarded(front: FrontProcess, fakes: list[Fake]) -> None:
    odd: list[dict[str, Any]] = [
        {"prompt": [1, "x", [2]]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": ["a", "b"]},
        {"prompt": [1, {}] * 64},
        {"prompt": None, "max_tokens": None},
        {"messages": 5},
        {"messages": ["x", {"content": [{"type": "image_url", "image_url": {"url": "u"}}, 5]}]},
        {"messages": [{"role": [], "content": {"a": 1}, "tool_calls": [1]}], "tools": [{}]},
        {"input": [{"role": "user", "content": [{"text": "x"}]}], "instructions": "y"},
        {"model": {"a": []}, "prompt": "x", "max_tokens": -3, "cache_salt": []},
    ]
    for number, asked in enumerate(odd):
        answer = front.post(json={**asked, "slo": SLO})
        assert answer.status_code in (200, 500), asked  # 500: the fake does not like max_tokens -3
        assert len(everything_seen(fakes)) > number


def test_connections_are_kept(front: FrontProcess, fakes: list[Fake]) -> None:
    for stream in (False, True) * 6:
        front.post(json={"prompt": "x", "max_tokens": 3, "stream": stream})
    seen = everything_seen(fakes)
    assert len(seen) == 12
    assert len({one["port"] for one in seen}) == len({one["by"] for one in seen})


# --- other routes --------------------------------------------------------------------------------


def test_other_routes_go_round(front: FrontProcess, fakes: list[Fake]) -> None:
    names = [front.get("/v1/models").json()["from"] for _ in range(6)]
    assert sorted(names) == sorted("aabbcc")
    assert names[:3] == names[3:]
    answer = front.post("/v1/embeddings?x=%2F", json={"input": "x"})
    assert answer.status_code == 200
    assert front.get("/version").status_code == front.post("/tokenize").status_code == 200
    seen = [one for one in everything_seen(fakes) if one["path"] == "/v1/embeddings?x=%2F"]
    assert len(seen) == 1
    eventually(front.quiet, "what was answered is under way no more")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/docs", 404),
        ("POST", "/sleep", 404),
        ("GET", "/vllm-slo/state", 404),
        ("GET", "/fake/seen", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/load_lora_adapter", 501),
        ("POST", "/v1/unload_lora_adapter", 501),
        ("GET", "/v1/responses/resp_1", 501),
        ("POST", "/v1/responses/resp_1/cancel", 501),
        ("PUT", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/metrics/replicas/nobody", 404),
        ("GET", "/v1/unknown", 404),
    ],
)
def test_what_is_not_served(front: FrontProcess, method: str, path: str, status: int) -> None:
    answer = http(method, front.url + path, json={"a": 1})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == status
    if "lora_adapter" in path and "unload" not in path:
        assert "--lora-modules" in error["message"]


def raw(front: FrontProcess, data: bytes, patience_s: float = PATIENCE_S) -> tuple[int, bytes]:
    """Send bytes; status and everything that follows, until the server closes or is silent."""
    with socket.create_connection(("127.0.0.1", front.port), patience_s) as connection:
        connection.sendall(data)
        said = b""
        while b"\r\n\r\n" not in said:
            part = connection.recv(65_536)
            assert part, said
            said += part
        length = int(said.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
        head, _, body = said.partition(b"\r\n\r\n")
        while len(body) < length:
            body += connection.recv(65_536)
    return int(head.split()[1]), body


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../vllm-slo/state",
        "/v1/../fake/seen",
        "/v1/./models",
        "/v1//models",
        "/v1/x/..",
        "//v1/models",
        "/v1/models/",
        "/v1/",
    ],
)
def test_no_path_leads_around_the_list(front: FrontProcess, fakes: list[Fake], path: str) -> None:
    status, body = raw(front, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert status == 404
    assert b"header_names" not in body
    assert everything_seen(fakes) == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completion%73",
        "/v1/%63ompletions",
        "/v1/slo/quot%65",
        "/v1/load%5Flora_adapter",
        "/v1/load%255Flora_adapter",
        "/v1/response%73/resp_1",
        "/v1%2Fcompletions",
        "/v1/%2e%2e/fake/seen",
        "/v1/..%2ffake/seen",
        "/v1/models%2F",
        "/v1/models%",
        "/tokeniz%65",
        "/%761/models",
        "/health%2F..",
        "/metric%73",
        "/metrics/replicas/%61",
        "/slo%2Fdata",
    ],
)
def test_an_encoded_path_is_refused(front: FrontProcess, fakes: list[Fake], path: str) -> None:
    """What it means is up to whoever decodes it: nothing is matched twice."""
    body = b'{"slo": {"ttft_ms": -1}}'
    for method in (b"POST", b"GET"):
        head = b"%b %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        status, said = raw(front, head % (method, path.encode()) + length + body)
        error = json.loads(said)["error"]
        assert (status, error["code"], error["type"]) == (404, 404, "NotFoundError")
        assert "unencoded" in error["message"]
    assert everything_seen(fakes) == []


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/chat/completions/", "/v1/models/"])
def test_a_slash_at_the_end_leads_nowhere(
    front: FrontProcess, fakes: list[Fake], path: str
) -> None:
    answer = front.post(path)
    assert answer.status_code == answer.json()["error"]["code"] == 404
    assert "location" not in answer.headers
    assert everything_seen(fakes) == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_does_not_tell_a_replicas_address(
    front: FrontProcess, fakes: list[Fake], status: int
) -> None:
    told = {
        "location": "http://{address}/v1/models",
        "content-location": "HTTP://{address}/v1/models",
        "link": "<http://{address}/v1/next>; rel=next",
        "refresh": "0; url=http://{address}/",
        "x-served-by": "{address}",
    }
    for fake in fakes:
        fake.knobs(headers={**told, "x-kept": "/v1/models"}, status=status, status_times=1)
    answer = front.get("/v1/models")
    assert answer.status_code == 404
    assert not told.keys() & answer.headers.keys()
    address = next(fake for fake in fakes if fake.seen()).entry["url"].partition("://")[2]
    assert address not in str(answer.headers) + answer.text


# --- bounds --------------------------------------------------------------------------------------


def post_head(*headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return "\r\n".join([*lines, *headers, "", ""]).encode()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post_head("X-Big: " + "y" * 100_000), 431),
        (b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\n\r\n", 431),
        (post_head(*(f"X-{n}: y" for n in range(2_000))), 400),
        (b"nonsense\r\n\r\n", 400),
        (post_head("Content-Length: -1"), 400),
        (post_head("Content-Length: 0", "X-Raw: ?").replace(b"?", b"\xff\xfe"), 400),
        (b"GET /v1/\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /v1/models?\xc3\xbc HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (post_head("Transfer-Encoding: chunked") + b"zz\r\n", 400),
        (post_head(f"Content-Length: {MAX_BODY_BYTES + 1}"), 413),
    ],
)
def test_what_is_out_of_bounds_is_refused(
    front: FrontProcess, fakes: list[Fake], data: bytes, status: int
) -> None:
    got, body = raw(front, data)
    assert got == status
    if body.startswith(b"{"):  # HAProxy's own words are for what is no HTTP
        assert json.loads(body)["error"]["code"] == status
    else:
        assert status == 400
    assert everything_seen(fakes) == []
    assert front.post().status_code == 200


def test_a_large_body_without_a_length_is_refused(front: FrontProcess, fakes: list[Fake]) -> None:
    part = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", front.port), patience(20)) as connection:
        connection.sendall(post_head("Transfer-Encoding: chunked"))
        for _ in range(BUFFER_BYTES // 0x1000 - 4):
            connection.sendall(part)
        assert connection.recv(12) == b"HTTP/1.1 411"
    assert everything_seen(fakes) == []


def test_a_large_body_within_bounds_passes(front: FrontProcess, fakes: list[Fake]) -> None:
    body = json.dumps({"prompt": "x" * 5_000_000, "max_tokens": 1}).encode()
    head = post_head(f"Content-Length: {len(body)}", "Expect: 100-continue", "Connection: close")
    with socket.create_connection(("127.0.0.1", front.port), patience(20)) as connection:
        connection.sendall(head)
        assert connection.recv(1_000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
    (seen,) = everything_seen(fakes)
    assert seen["size"] == len(body)
    assert "expect" not in seen["headers"]


def test_http_1_0_gets_a_stream(front: FrontProcess) -> None:
    body = b'{"prompt": "x", "max_tokens": 2, "stream": true}'
    head = post_head(f"Content-Length: {len(body)}").replace(b"HTTP/1.1", b"HTTP/1.0")
    said = b""
    with socket.create_connection(("127.0.0.1", front.port), patience(20)) as connection:
        connection.sendall(head + body)
        while part := connection.recv(65_536):
            said += part
    assert said.startswith(b"HTTP/1.0 200")
    assert said.endswith(b"data: [DONE]\n\n")


# --- keys ----------------------------------------------------------------------------------------


def test_keys(started: dict[str, Any], fakes: list[Fake]) -> None:
    front = ready(started, "decline")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
        for answer in (front.post(headers=headers), front.get("/v1/models", headers=headers)):
            assert answer.status_code == 401
            assert answer.json() == {"error": "Unauthorized"}
    # Before the body: this one never comes.
    assert raw(front, post_head("Content-Length: 1000"))[0] == 401
    assert everything_seen(fakes) == []
    good = {"authorization": f"bearer {KEY}"}
    assert front.post(headers=good).status_code == 200
    assert front.get("/v1/models", headers=good).status_code == 200
    assert {one["headers"]["authorization"] for one in everything_seen(fakes)} == {f"bearer {KEY}"}
    pages = ("/health", "/-/healthz", "/metrics")
    assert [front.get(page).status_code for page in pages] == [200] * 3


# --- routing by SLO ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"json": {"slo": {"ttft_ms": -1}}}, "ttft_ms"),
        ({"json": {"vllm_xargs": {"slo_nothing": 1}}}, "nothing"),
        ({"json": {}, "headers": {"x-slo-ttft-ms": "soon"}}, "ttft_ms"),
        ({"json": {"slo": []}}, "slo"),
    ],
)
def test_a_mistake_in_an_slo_is_400(
    front: FrontProcess, fakes: list[Fake], request_: Any, param: str
) -> None:
    answer = front.post(**request_)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", param, 400)
    assert everything_seen(fakes) == []


CARRIERS = [
    {"json": {"prompt": "x", "slo": SLO}},
    {"json": {"prompt": "x", "vllm_xargs": {"slo_ttft_ms": 2000}}},
    {"json": {"prompt": "x"}, "headers": {"x-slo-ttft-ms": "2000"}},
]


@pytest.mark.parametrize("request_", CARRIERS)
def test_an_slo_leads_past_loaded_replicas(
    front: FrontProcess, fakes: list[Fake], request_: Any
) -> None:
    states_arrive(front, fakes[:2], **LOADED)
    before = front.total("hops_sum")
    for _ in range(3):
        assert front.post(**request_).headers["x-vllm-slo-replica"] == "c"
    assert front.total("hops_sum") - before == 3 + 2 + 1  # each began at another one
    assert [len(fake.seen()) for fake in fakes] == [0, 0, 3]


def test_without_an_slo_the_least_loaded_gets_it(front: FrontProcess, fakes: list[Fake]) -> None:
    states_arrive(front, fakes[1:], backlog_tokens=50)
    assert {front.post().headers["x-vllm-slo-replica"] for _ in range(3)} == {"a"}


def test_idle_replicas_take_turns(front: FrontProcess) -> None:
    request: Any = {"json": {"prompt": "x", "slo": SLO}}
    names = [front.post(**request).headers["x-vllm-slo-replica"] for _ in range(6)]
    assert sorted(names) == sorted("aabbcc")


def test_hops_are_asked_for_only_while_others_are_left(
    front: FrontProcess, fakes: list[Fake]
) -> None:
    for _ in range(3):
        assert front.post(json={"prompt": "x", "slo": SLO}).status_code == 200
    assert [one["hop"] for one in everything_seen(fakes)] == [True] * 3
    states_arrive(front, fakes[1:], **LOADED)
    for fake in fakes:
        fake.knobs(state=LOADED if fake.name != "a" else {})
    hops = []
    for _ in range(3):
        front.post(json={"prompt": "x", "slo": SLO})
        hops.append(fakes[0].seen()[-1]["hop"])
    assert sorted(hops) == [False, True, True]  # without: it was the last in its turn


def test_the_hop_limit_is_kept(started: dict[str, Any], fakes: list[Fake]) -> None:
    front = ready(started, "one_hop")
    states_arrive(front, fakes[:2], **LOADED)
    declining = {"prompt": "x", "slo": {**SLO, "on_unattainable": "decline"}}
    answers = [front.post(json=declining) for _ in range(3)]
    assert sorted(one.status_code for one in answers) == [200, 429, 429]
    assert front.total("hops_count") == front.total("hops_sum") == 3
    assert [len(fake.seen()) for fake in fakes] == [0, 0, 1]
    # As asked: the others are served best effort, by the least loaded.
    served = [front.post(json={"prompt": "x", "slo": SLO}) for _ in range(3)]
    assert [one.headers["x-vllm-slo-replica"] for one in served] == ["c"] * 3
    assert front.total("requests_total", result="best_effort") == 2
    assert front.total("requests_total", result="promised") == 2
    assert front.total("requests_total", result="declined") == 2


def declined(answer: httpx.Response) -> int:
    """Check a refusal for want of a promise; its retry-after-ms."""
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], error["param"], error["code"]) == ("slo_unattainable", "slo", 429)
    assert answer.headers["x-slo-reason"] in error["message"]
    assert answer.headers["x-slo-reason"] in ("prefill", "decode", "seats", "expired")
    retry_ms = int(answer.headers["retry-after-ms"])
    assert int(answer.headers["retry-after"]) == max(1, -(-retry_ms // 1000))
    assert str(retry_ms) in error["message"]
    return retry_ms


LATE = {"prompt": "x", "slo": SLO}
NEVER = {"prompt": "x", "slo": {**SLO, "on_unattainable": "decline"}}


def test_backup_as_asked(front: FrontProcess, fakes: list[Fake]) -> None:
    states_arrive(front, fakes, **LOADED)
    assert declined(front.post(json=NEVER)) >= 1
    assert everything_seen(fakes) == []
    states_arrive(front, fakes[:2], **{**LOADED, "backlog_tokens": 200_000})
    assert front.post(json=LATE).headers["x-vllm-slo-replica"] == "c"
    (seen,) = everything_seen(fakes)
    assert not seen["hop"]


def test_backup_best_effort(started: dict[str, Any], fakes: list[Fake]) -> None:
    front = ready(started, "best_effort")
    states_arrive(front, fakes, **LOADED)
    for asked in (NEVER, LATE):
        assert front.post(json=asked).status_code == 200
    seen = everything_seen(fakes)
    assert [one["unattainable"] for one in seen] == ["best_effort"] * 2  # whatever the client says


def test_the_operators_status_of_a_refusal(fakes: list[Fake]) -> None:
    with processes() as keep:
        front = keep(FrontProcess(ROUTING, slo={"decline_status": 529}))
        front.serve(*fakes)
        states_arrive(front, fakes, **LOADED)
        answer = front.post(json=NEVER)
        assert (answer.status_code, answer.json()["error"]["code"]) == (529, 529)
        assert answer.headers["x-slo-reason"] == "prefill"


def test_backup_decline(started: dict[str, Any], fakes: list[Fake]) -> None:
    front = ready(started, "decline")
    key = {"authorization": f"Bearer {KEY}"}
    states_arrive(front, fakes, **LOADED)
    for asked in (NEVER, LATE):
        declined(front.post(json=asked, headers=key))
    assert everything_seen(fakes) == []
    assert front.post(json={"prompt": "x"}, headers=key).status_code == 200  # asks for nothing


@pytest.mark.parametrize("status", [429, 503, 529, 400])
def test_a_refusal_leads_to_the_next(front: FrontProcess, fakes: list[Fake], status: int) -> None:
    """Whatever the operator chose as its status: a header says what it is."""
    before = front.total("refused_after_promise_total")
    for fake in fakes[:2]:
        fake.knobs(refuse_hops=True, decline_status=status)
    for _ in range(3):
        assert front.post(json=LATE).headers["x-vllm-slo-replica"] == "c"
    assert front.total("refused_after_promise_total") - before == 3  # 2, 1 and 0 before c's turn
    eventually(front.quiet, "refused tickets have ended")


def test_when_all_refuse_the_backup_acts(started: dict[str, Any], fakes: list[Fake]) -> None:
    front = ready(started, "front")
    for fake, retry_ms in zip(fakes, (3_000, 2_500, 4_000), strict=True):
        fake.knobs(refuse_hops=True, retry_after_ms=retry_ms)
    assert front.post(json=LATE).status_code == 200
    assert sorted(one["hop"] for one in everything_seen(fakes)) == [False, True, True]
    for fake in fakes:
        fake.knobs(declines=True, decline_status=503)
    answer = front.post(json=NEVER)  # the last replica's own verdict, no failure
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].endswith("cannot keep it")
    assert "x-vllm-slo-declined" not in answer.headers
    assert answer.headers["x-vllm-slo-replica"] in "abc"

    front = ready(started, "decline")
    for fake in fakes:
        fake.reset()
    for fake, retry_ms in zip(fakes, (3_000, 2_500, 4_000), strict=True):
        fake.knobs(refuse_hops=True, retry_after_ms=retry_ms)
    counted_here = front.total("declined_total")
    answer = front.post(json=LATE, headers={"authorization": f"Bearer {KEY}"})
    assert declined(answer) == 2_500  # the soonest
    assert front.total("declined_total") == counted_here  # each replica has counted it
    assert [one["hop"] for one in everything_seen(fakes)] == [True] * 3

    front = ready(started, "one_hop")
    for fake in fakes:
        fake.reset()
        fake.knobs(refuse_hops=True)
    assert front.post(json=LATE).status_code == 200
    assert sorted(one["hop"] for one in everything_seen(fakes)) == [False, True]


def test_a_long_prompt_finds_its_prefix(front: FrontProcess, fakes: list[Fake]) -> None:
    prompt = "a conversation that goes on and on. " * 60
    for extra in ({}, {"slo": SLO}):
        text = json.dumps(extra) + prompt
        first = front.post(json={"prompt": text, **extra}).headers["x-vllm-slo-replica"]
        for turn in range(4):
            text += f" turn {turn} " * 50
            eventually(front.quiet, "the front has heard of the turn before")
            answer = front.post(json={"prompt": text, **extra})
            assert answer.headers["x-vllm-slo-replica"] == first
    names = {
        front.post(json={"prompt": str(n) + prompt}).headers["x-vllm-slo-replica"] for n in range(6)
    }
    assert len(names) > 1  # other prompts go elsewhere


# --- quotes --------------------------------------------------------------------------------------

YES = {"promised": True, "reason": None, "retry_after_ms": None}


def offered(ttft_ms: float, retry_after_ms: int = 900) -> dict[str, Any]:
    cheapest = {"ttft_ms": ttft_ms, "tpot_ms": None}
    return {"cheapest": cheapest, "retry_after_ms": retry_after_ms}


def quoted(front: FrontProcess, **request: Any) -> dict[str, Any]:
    answer = front.post("/v1/slo/quote", **{"json": {"prompt": "x", "slo": SLO}, **request})
    assert answer.status_code == 200, answer.text
    said = dict(answer.json())
    assert answer.headers["x-vllm-slo-replica"] == said["class"]
    return said


def test_a_quote_is_the_first_yes(front: FrontProcess, fakes: list[Fake]) -> None:
    states_arrive(front, fakes[:1], **LOADED)
    fakes[2].knobs(quote=YES)
    for _ in range(3):
        assert quoted(front)["promised"]
    # Whose double says that it has no room is not asked before the others.
    assert [len(fake.seen()) for fake in fakes] == [0, len(fakes[1].seen()), 3]
    fakes[0].knobs(quote=YES)
    fakes[2].knobs(quote={})
    assert quoted(front)["class"] == "a"


def test_without_a_yes_the_nearest_offer_is_told(front: FrontProcess, fakes: list[Fake]) -> None:
    offers = ({"cheapest": None}, offered(9_000), offered(4_000))
    for fake, offer in zip(fakes, offers, strict=True):
        fake.knobs(quote=offer)
    told = []
    for nearest in "cccaaa":
        if nearest == "a":
            fakes[0].knobs(quote=offered(4_000, retry_after_ms=500))
        front.post(json={"prompt": "x", "slo": SLO})  # the next quote begins at another one
        told.append(quoted(front)["class"])
    assert "".join(told) == "cccaaa"


def test_a_quote_is_no_request(front: FrontProcess, fakes: list[Fake]) -> None:
    counts = [front.total("requests_total"), front.total("hops_count")]
    names = []
    for _ in range(6):  # two between requests, whose turns go on as without
        quoted(front)
        quoted(front)
        names.append(front.post(json={"prompt": "x", "slo": SLO}).headers["x-vllm-slo-replica"])
    assert sorted(names) == sorted("aabbcc")
    assert [front.total("requests_total"), front.total("hops_count")] == [
        counts[0] + 6,
        counts[1] + 6,
    ]
    asked = [one for one in everything_seen(fakes) if one["path"] == "/v1/slo/quote"]
    assert len(asked) == 12 * 3
    assert not any("x-vllm-slo-ticket" in one["headers"] for one in asked)


def test_a_mistake_in_a_quote_is_400(front: FrontProcess, fakes: list[Fake]) -> None:
    before = front.total("requests_total", result="invalid")
    answer = front.post("/v1/slo/quote", json={"prompt": "x", "slo": {"ttft_ms": -1}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "ttft_ms"
    assert everything_seen(fakes) == []
    assert front.total("requests_total", result="invalid") == before


def test_a_quote_outlives_replicas_that_fail(front: FrontProcess, fakes: list[Fake]) -> None:
    fakes[0].knobs(status=500, status_times=1)
    fakes[1].knobs(cut_after_tokens=0)
    fakes[2].knobs(quote=offered(3_000))
    assert quoted(front)["class"] == "c"
    for fake in fakes:
        fake.knobs(status=500, status_times=1, cut_after_tokens=None)
    assert front.post("/v1/slo/quote").status_code == 500
    # One that works out too many already is passed over; where all do, the client comes back.
    for fake in fakes[:2]:
        fake.knobs(status=429, status_times=1)
    fakes[2].knobs(status_times=0)
    assert quoted(front)["class"] == "c"
    for fake in fakes:
        fake.knobs(status=429, status_times=1)
    assert front.post("/v1/slo/quote").status_code == 429
    # What a replica refuses is the answer: another would refuse it, too.
    for fake in fakes:
        fake.knobs(status=404, status_times=1)
    assert front.post("/v1/slo/quote").status_code == 404
    assert sum(len(fake.seen()) for fake in fakes) == 3 + 3 + 3 + 3 + 1


def test_quotes_need_a_key_and_keep_to_the_hops(started: dict[str, Any], fakes: list[Fake]) -> None:
    keyed = ready(started, "decline")
    assert keyed.post("/v1/slo/quote").status_code == 401
    quoted(keyed, headers={"authorization": f"Bearer {KEY}"})
    assert [len(fake.seen()) for fake in fakes] == [1, 1, 1]
    one_hop = ready(started, "one_hop")
    quoted(one_hop)
    assert sum(len(fake.seen()) for fake in fakes) == 4


# --- start ---------------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_slo.router.front", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


def test_a_port_in_use_is_one_line(front: FrontProcess) -> None:
    done = start("--host", "127.0.0.1", "--port", str(front.port))
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-slo: error: cannot listen on 127.0.0.1:")
    assert "in use" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "--config is not JSON"),
        ("[]", "expected an object"),
        ('{"slo_config": {"routing": {"max_hop": 1}}}', "max_hops"),
        ('{"slo_config": "/nowhere.yaml"}', "/nowhere.yaml"),
        ('{"api_key_sha256": ["abc"]}', "--config"),
        ('{"api_key_sha256": ["ab"]}', "SHA-256"),
    ],
)
def test_a_bad_configuration_is_one_line(config: str, says: str) -> None:
    done = start("--config", config)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-slo: error: ")
    assert says in line
