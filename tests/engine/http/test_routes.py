# SPDX-License-Identifier: Apache-2.0
"""Every generating route of a live server: objectives are honoured, reported, and refused in the
shape of that API, whole and streamed, whatever carries them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from patience import patience

pytest.importorskip("vllm")
pytest.importorskip("openai")

import httpx
import live_server
from depth import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import PROMPT, SMALL, LiveServer, command

from vllm_slo import tiny
from vllm_slo.engine.http.routes import ROUTES
from vllm_slo.slo.keys import INTERNAL_KEYS

pytestmark = pytest.mark.engine

# Plain requests are of a class that is declined for certain.
CONFIG = """\
classes:
  never: {ttft_ms: 0.001, on_unattainable: decline}
  chat: {ttft_ms: 60000, tpot_ms: 10000}
default_class: never
service_tiers: {gold: chat}
priorities: {7: chat}
sessions: {read_session_id: true}
decline_status: 529
"""
NEVER = {"ttft_ms": 0.001, "on_unattainable": "decline"}
TALK = [{"role": "user", "content": PROMPT}]

# Route -> body of a small request.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 4},
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 4},
    "/v1/chat/completions/batch": {"messages": [TALK, TALK], "max_tokens": 4},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 4},
    "/v1/messages": {"messages": TALK, "max_tokens": 4},
    "/invocations": {"prompt": PROMPT, "max_tokens": 4},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}},
    "/generative_scoring": {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]},
}
# Routes that this server does not have: audio needs a model that hears, Cohere's its SDK.
ELSEWHERE = {"/v1/audio/transcriptions", "/v1/audio/translations", "/cohere/v2/chat"}
ELSEWHERE |= {"/v1/systemone"}
CASES = [
    (route, stream)
    for route, info in ROUTES.items()
    if info.kind == "generates" and route not in ELSEWHERE
    for stream in (False, *((True,) if info.stream else ()))
]
routes = pytest.mark.parametrize(("route", "stream"), CASES, ids=str)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("routes")
    (folder / "slo.yaml").write_text(CONFIG)
    model = str(tiny.path("target"))
    arguments = [command("vllm"), "serve", model, "--scheduler-cls", "vllm_slo.Scheduler", *SMALL]
    arguments += ["--additional-config", '{"slo_config": "slo.yaml"}', "--enable-scale-out"]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        with live_server.running(arguments, model, folder) as live:
            yield live


def post(
    server: LiveServer, route: str, extra: dict[str, Any], headers: dict[str, str] | None = None
) -> httpx.Response:
    body = {"model": server.model, **BODIES[route], **extra}
    return httpx.post(f"{server.url}{route}", json=body, headers=headers, timeout=patience(60))


def assert_declined(answer: httpx.Response, reason: str = "expired") -> None:
    assert answer.status_code == 529, answer.text
    assert int(answer.headers["retry-after-ms"]) >= 1
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-slo-reason"] == reason
    assert "x-vllm-slo-declined" not in answer.headers
    error = answer.json()["error"]
    if answer.request.url.path == "/v1/messages":
        assert answer.json()["type"] == "error"
        assert error["type"] == "overloaded_error"
    else:
        assert (error["type"], error["code"]) == ("slo_unattainable", 529)


def reports_in(answer: httpx.Response) -> list[dict[str, Any]]:
    """The reports of a whole answer or of a stream, wherever the API has room for them."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        parts = [answer.json()]
    else:
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        parts = [json.loads(line.removeprefix("data: ")) for line in lines]
    found = [part.get("slo") or (part.get("response") or {}).get("slo") for part in parts]
    return [report for report in found if report]


@routes
def test_an_objective_is_kept_and_reported(server: LiveServer, route: str, stream: bool) -> None:
    said = {"stream": stream} if stream else {}
    answer = post(server, route, {"slo": {"class": "chat"}, **said})
    assert answer.status_code == 200, answer.text
    assert [report["promised"] for report in reports_in(answer)] == [True]
    assert '"vllm_slo"' not in answer.text
    by_header = post(server, route, said, {"x-slo-class": "chat"})
    assert [report["promised"] for report in reports_in(by_header)] == [True]


@routes
def test_a_decline_has_the_shape_of_the_api(server: LiveServer, route: str, stream: bool) -> None:
    said = {"stream": stream} if stream else {}
    assert_declined(post(server, route, {"slo": NEVER, **said}))
    assert_declined(post(server, route, said))  # the default class


@routes
def test_a_mistake_is_a_400(server: LiveServer, route: str, stream: bool) -> None:
    said = {"stream": stream} if stream else {}
    for answer in (
        post(server, route, {"slo": {"ttft_ms": -5}, **said}),
        post(server, route, said, {"x-slo-ttft-ms": "abc"}),
    ):
        assert answer.status_code == 400, answer.text
        assert "ttft_ms: " in answer.json()["error"]["message"]


@pytest.mark.parametrize("key", ["slo_quote", "slo_ticket", "slo_seal", "slo_age_ms", "slo_group"])
@routes
def test_internal_keys_are_nobody_elses(
    server: LiveServer, route: str, stream: bool, key: str
) -> None:
    said = {"stream": stream} if stream else {}
    if route == "/inference/v1/generate":
        said["sampling_params"] = {"max_tokens": 4, "extra_args": {key: 2**62}}
    answer = post(server, route, {"vllm_xargs": {key: 2**62}, **said})
    assert answer.status_code == 400, answer.text
    assert "is not a field of an SLO" in answer.json()["error"]["message"]


def test_keys_of_a_place_that_only_the_route_knows(server: LiveServer) -> None:
    route = "/inference/v1/generate"

    def send(**extra: Any) -> httpx.Response:
        return post(server, route, {"sampling_params": {"max_tokens": 4, "extra_args": extra}})

    assert [r["promised"] for r in reports_in(send(slo_class="chat"))] == [True]
    assert_declined(send(slo_ttft_ms=0.001, slo_on_unattainable="decline"))
    assert send(slo_ttft_ms=-4).status_code == 400


# --- encodings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("carrier", ["slo", "vllm_xargs"])
def test_a_carrier_is_read_however_it_is_written(
    server: LiveServer, encoding: str, escaped: bool, carrier: str
) -> None:
    said = {"slo": {"ttft_ms": -5}} if carrier == "slo" else {"vllm_xargs": {"slo_ttft_ms": -5}}
    text = json.dumps({"model": server.model, **BODIES["/v1/completions"], **said})
    if escaped:
        text = text.replace("slo", "\\u0073l\\u006f").replace("ttft", "t\\u0074ft")
    content = text.encode(encoding)
    headers = {"content-type": "application/json"}
    answer = httpx.post(
        f"{server.url}/v1/completions", content=content, headers=headers, timeout=patience(60)
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith("ttft_ms: ")


# --- kinds of requests ----------------------------------------------------------------------------

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "several choices": ("/v1/completions", {"n": 3, "temperature": 1.0}),
    "several prompts": ("/v1/completions", {"prompt": [PROMPT, "x", "y"]}),
    "prompts of tokens": ("/v1/completions", {"prompt": [[5, 6], [7, 8]], "n": 2}),
    "echo and logprobs": ("/v1/completions", {"echo": True, "logprobs": 1}),
    "logprobs": ("/v1/completions", {"logprobs": 2}),
    "usage": ("/v1/completions", {"stream_options": {"include_usage": True}}),
    "continuous usage": (
        "/v1/chat/completions",
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "stop string": ("/v1/completions", {"stop": ["e"]}),
    "one token": ("/v1/completions", {"max_tokens": 1}),
    "choices of a chat": ("/v1/chat/completions", {"n": 2, "temperature": 1.0}),
    "continued": (
        "/v1/chat/completions",
        {
            "messages": [*TALK, {"role": "assistant", "content": "abc"}],
            "echo": True,
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    "structured": ("/v1/chat/completions", {"structured_outputs": {"choice": ["yes", "no"]}}),
    "forced tool": (
        "/v1/chat/completions",
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        },
    ),
    "token ids": ("/v1/completions", {"return_token_ids": True}),
    "prompt logprobs": ("/v1/completions", {"prompt_logprobs": 1}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_every_kind_of_request(server: LiveServer, kind: str, stream: bool) -> None:
    route, body = KINDS[kind]
    if stream and kind == "prompt logprobs":
        pytest.skip("vLLM does not stream them")
    if not stream:
        body = {key: value for key, value in body.items() if key != "stream_options"}
    assert_declined(post(server, route, {**body, "slo": NEVER, "stream": stream}))
    best_effort = {"ttft_ms": 0.001}
    for slo, promised in (({"class": "chat"}, True), (best_effort, False)):
        answer = post(server, route, {**body, "slo": slo, "stream": stream})
        assert answer.status_code == 200, answer.text
        assert "abort" not in answer.text
        found = [report["promised"] and not report["late"] for report in reports_in(answer)]
        choices = body.get("n", 1) * (
            len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        )
        assert found == [promised] * (choices if stream else 1)
    asked = {**BODIES[route], **body, "slo": {"class": "chat"}, "stream": stream}
    quoted = post_quote(server, asked)
    if isinstance(body.get("prompt"), list):
        assert quoted.status_code == 400
    else:
        assert quoted.status_code == 200, quoted.text
        assert quoted.json()["promised"] is True


def post_quote(server: LiveServer, body: dict[str, Any]) -> httpx.Response:
    body = {"model": server.model, **body}
    return httpx.post(f"{server.url}/v1/slo/quote", json=body, timeout=patience(60))


def test_a_beam_search_takes_no_objectives(server: LiveServer) -> None:
    beams = {"use_beam_search": True, "n": 2, "max_tokens": 3}
    counted = server.settled_total("vllm_slo:admissions_total")
    answer = post(server, "/v1/completions", beams)
    assert answer.status_code == 200, answer.text  # the default class would decline it
    assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"length"}
    refused = post(server, "/v1/completions", {**beams, "slo": {"class": "chat"}})
    assert refused.status_code == 400
    assert "use_beam_search" in refused.json()["error"]["message"]
    assert server.settled_total("vllm_slo:admissions_total") == counted


def test_stored_and_background_responses(server: LiveServer) -> None:
    asked = {"background": True, "store": True}
    answer = post(server, "/v1/responses", {**asked, "slo": NEVER})
    assert (answer.status_code, answer.json()["status"]) == (200, "queued")
    url = f"{server.url}/v1/responses/{answer.json()['id']}"
    assert await_status(url) == "failed"
    assert_declined(post(server, "/v1/responses", {**asked, "slo": NEVER, "stream": True}))
    assert_declined(post(server, "/v1/responses", {"store": True, "slo": NEVER}))
    kept = post(server, "/v1/responses", {**asked, "slo": {"class": "chat"}})
    assert await_status(f"{server.url}/v1/responses/{kept.json()['id']}") in (
        *("completed", "incomplete"),
    )
    long = {"max_output_tokens": 900, "slo": {"class": "chat"}}
    going = post(server, "/v1/responses", {**asked, **long, "ignore_eos": True})
    cancelled = httpx.post(f"{server.url}/v1/responses/{going.json()['id']}/cancel")
    assert cancelled.json()["status"] == "cancelled"


def await_status(url: str) -> str:
    """The status of a stored response, once it is made."""
    end = time.monotonic() + patience(60)
    while (status := httpx.get(url).json()["status"]) in ("queued", "in_progress"):
        assert time.monotonic() < end, status
        time.sleep(0.1)
    return str(status)


# --- dialects -------------------------------------------------------------------------------------


def test_dialects_of_gateways(server: LiveServer) -> None:
    def outcome(extra: dict[str, Any], headers: dict[str, str]) -> bool | str | None:
        answer = post(server, "/v1/completions", extra, headers)
        if answer.status_code != 200:
            assert_declined(answer, answer.headers.get("x-slo-reason", ""))
            return str(answer.headers["x-slo-reason"])
        found = reports_in(answer)
        return found[0]["promised"] and not found[0]["late"] if found else None

    assert outcome({}, {"x-llm-d-inference-objective": "chat"}) is True
    assert outcome({}, {"x-llm-d-inference-objective": "unknown"}) == "expired"  # the default class
    assert outcome({}, {"x-llm-d-inference-ttl": "60s"}) is True
    assert outcome({}, {"x-llm-d-inference-ttl": "1us"}) == "expired"
    assert outcome({"priority": 7}, {}) is True
    assert outcome({}, {"x-vllm-priority": "7"}) is True
    assert outcome({"nvext": {"agent_hints": {"priority": 7, "osl": 4}}}, {}) is True
    assert outcome({"service_tier": "gold"}, {}) is True
    for tier in ("standard", "fast", "on_demand", "auto"):
        assert outcome({"service_tier": tier}, {}) == "expired"
    assert outcome({"slo": {"class": "chat"}}, {"x-llm-d-slo-ttft-ms": "0"}) is False
    assert outcome({"slo": {"class": "chat"}}, {"x-llm-d-slo-ttft-ms": "86400001"}) is True
    assert outcome({"slo": {"class": "chat"}}, {"x-slo-ttft-ms": ""}) is True
    both = {"x-llm-d-slo-ttft-ms": "60000", "x-slo-ttft-ms": "1"}
    assert outcome({"slo": {"class": "chat"}}, both) is True


def test_the_tier_is_sent_back_only_where_the_request_named_one(server: LiveServer) -> None:
    silent = post(server, "/v1/chat/completions", {"slo": {"class": "chat"}})
    assert silent.json()["service_tier"] is None
    named = post(server, "/v1/chat/completions", {"slo": {"class": "chat"}, "service_tier": "auto"})
    assert named.json()["service_tier"] == "default"


def test_the_end_of_an_answer_is_an_objective(server: LiveServer) -> None:
    kept = reports_in(post(server, "/v1/completions", {"slo": {"e2e_ms": 60_000}}))[0]
    assert kept["promised"] and kept["attained"]
    assert kept["ttft_ms"] <= kept["e2e_ms"] <= 60_000
    late = reports_in(post(server, "/v1/completions", {"slo": {"e2e_ms": 0.5}}))[0]
    assert (late["late"], late["attained"]) == (True, False)


def test_classes_are_listed_with_the_models(server: LiveServer) -> None:
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [one["name"] for one in model["slo_classes"]] == ["never", "chat"]
    assert model["slo_classes"][1] == {"name": "chat", "ttft_ms": 60000.0, "tpot_ms": 10000.0}


# --- whatever comes -------------------------------------------------------------------------------

ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32")
VALUES = st.sampled_from(
    [
        *(NEVER, {"ttft_ms": 0.001}, {"class": "chat"}, {"class": "never"}, {"class": "nope"}),
        *({"ttft_ms": -1}, {"tpot_ms": 1e300}, {"ttft_ms": 60_000, "value": 2}, {"ttf": 1}),
        *([], 5, "chat", None, True, {}, {"e2e_ms": 50_000}, {"stages": [{"tpot_ms": 1000}]}),
        *({"tier": "best_effort"}, {"session_id": "a", "session_e2e_ms": 1e5}, {"tenant": "é"}),
    ]
)
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            *("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-class"),
            *("x-slo-tier", "x-slo-session-id", "x-llm-d-inference-objective"),
            *("x-llm-d-inference-ttl", "x-vllm-slo-ticket", "x-vllm-slo-unattainable"),
        ]
    ),
    st.sampled_from(["", "0", "-1", "1e9", "60000", "abc", "chat", "never", "1ms", "1h", "9" * 40]),
    max_size=2,
)


@dataclass(frozen=True)
class Odd:
    """One request of the fuzz, and whether it carries what has to be answered for."""

    route: str
    content: bytes
    headers: dict[str, str]
    asks: bool


@st.composite
def odd_requests(draw: st.DrawFn, model: str) -> Odd:
    route = draw(st.sampled_from(sorted(BODIES)))
    body: dict[str, Any] = {"model": model, **BODIES[route]}
    kind = draw(st.sampled_from([None, *KINDS]))
    if kind is not None and KINDS[kind][0] == route:
        body |= KINDS[kind][1]
    if draw(st.booleans()):
        body["stream"] = draw(st.booleans())
    asks = False
    carrier = draw(st.sampled_from(["slo", "vllm_xargs", "internal", "service_tier", "none"]))
    if carrier == "slo":
        body["slo"] = draw(VALUES)
        asks = body["slo"] is not None and body["slo"] != {}
    elif carrier == "vllm_xargs":
        said = draw(VALUES.filter(lambda value: isinstance(value, dict)))
        body["vllm_xargs"] = {f"slo_{key}": value for key, value in said.items()}
        asks = bool(said)
    elif carrier == "internal":
        key = draw(st.sampled_from(INTERNAL_KEYS))
        body["vllm_xargs"] = {key: draw(st.sampled_from([1, "x", 2**62, -1.5]))}
        asks = True
    elif carrier == "service_tier":
        body["service_tier"] = draw(st.sampled_from(["flex", "gold", "priority", "fast", 5, {}]))
    text = json.dumps(body)
    if draw(st.booleans()):
        text = text.replace("slo", "\\u0073lo").replace("vllm_xargs", "vllm\\u005fxargs")
    headers = {"content-type": "application/json", **draw(HEADERS)}
    return Odd(route, text.encode(draw(st.sampled_from(ENCODINGS))), headers, asks)


def test_whatever_comes_is_answered_and_nobody_else_is_disturbed(server: LiveServer) -> None:
    """Carrier x encoding x route x kind of request, among good requests."""
    stop, good = threading.Event(), []

    def go_on() -> None:
        while not stop.is_set():
            body = {"slo": {"class": "chat"}, "ignore_eos": True, "max_tokens": 8}
            good.append(reports_in(post(server, "/v1/completions", body)))

    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=patience(60)) as client:
        going = pool.submit(go_on)

        @settings(
            max_examples=examples(500), deadline=None, suppress_health_check=list(HealthCheck)
        )
        @given(odd_requests(server.model))
        def ask(odd: Odd) -> None:
            url = f"{server.url}{odd.route}"
            answer = client.post(url, content=odd.content, headers=odd.headers)
            assert answer.status_code in (200, 400, 422, 529), (odd, answer.text)
            if answer.status_code == 200:
                assert '"abort"' not in answer.text, odd
                assert '"error"' not in answer.text, (odd, answer.text)
                assert reports_in(answer) or not odd.asks, odd

        try:
            ask()
        finally:
            stop.set()
        going.result()
    assert good
    assert all([report["promised"] for report in reports] == [True] for reports in good)


# --- the list of routes ---------------------------------------------------------------------------


def test_every_route_is_in_the_list(server: LiveServer) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {path for path, methods in paths.items() if "post" in methods} <= ROUTES.keys()


def test_a_route_that_a_plugin_adds_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.plugins
    from fastapi import FastAPI
    from open_routes import arguments
    from vllm.entrypoints.launchers.app import build_app

    def attach_router(app: FastAPI) -> None:
        @app.post("/v1/brand-new")
        async def brand_new() -> None: ...

    stub = SimpleNamespace(name="stub", required_tasks=None, attach_router=attach_router)
    given = arguments("--enable-scale-out")
    for plugins, expected in (([], set()), ([stub], {"/v1/brand-new"})):
        monkeypatch.setattr(vllm.plugins, "load_endpoint_plugins", lambda _, p=plugins: p)
        app = build_app(given, ("generate", "transcription", "realtime", "render"))
        posts = {
            route.path  # type: ignore[attr-defined]
            for route in app.routes
            if "POST" in (getattr(route, "methods", None) or ())
        }
        assert set(posts) - ROUTES.keys() == expected


# --- the log --------------------------------------------------------------------------------------


def test_refusals_leave_no_traceback_in_the_log(server: LiveServer) -> None:
    """Runs last: after all that was refused above."""
    log = server.log.read_text(errors="replace")
    assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
    assert "never retrieved" not in log
