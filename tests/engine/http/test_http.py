# SPDX-License-Identifier: Apache-2.0
"""The HTTP middleware and the gate, request side: carriers, fronts, pass-through, disconnect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from depth import examples
from http_app import (
    CHAT,
    COMPLETIONS,
    CONFIG,
    FORM,
    MESSAGES,
    OTHER,
    POOLING,
    ROUTES,
    Server,
    behind_a_front,
    refused,
    refused_in_any_shape,
    scope_of,
    talk,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import patience

from vllm_slo.engine.http.middleware import SLOMiddleware
from vllm_slo.slo.access import SEAL_VARIABLE, Seal
from vllm_slo.slo.body import MAX_BODY_BYTES
from vllm_slo.slo.claims import HEADER_FIELDS
from vllm_slo.slo.keys import EACH_KEY, GROUP_KEY, INTERNAL_KEYS

JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEAL_VARIABLE, "secret")


def flat(**keys: Any) -> dict[str, Any]:
    return {"slo_value": 1.0, "slo_on_unattainable": "best_effort", **keys}


def sealed(**keys: Any) -> dict[str, Any]:
    """Keys among which some are internal."""
    return Seal("secret").sealed(flat(**keys))


CHAT_KEYS = flat(slo_ttft_ms=500.0, slo_tpot_ms=50.0, slo_value=2.0, slo_class="chat")


# --- carriers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*ROUTES, OTHER, "/proxy/v1/completions"])
def test_the_field_slo_reaches_the_engine_and_the_body_passes(path: str) -> None:
    server = Server(root_path="/proxy") if path.startswith("/proxy") else Server()
    body = {"prompt": "x", "slo": {"ttft_ms": 500}, "vllm_xargs": {"seed": 3, "slo_value": 2}}
    assert server.reached(body, path) == {"seed": 3, **flat(slo_ttft_ms=500.0, slo_value=2.0)}


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"slo": {"ttft_ms": 500, "tpot_ms": 50}}, {}),
        ({"vllm_xargs": {"slo_ttft_ms": 500, "slo_tpot_ms": 50}}, {}),
        ({"vllm_xargs": {"prefill_ddl": 1000.5, "slo_tpot": 0.05}}, {}),
        ({}, {"x-llm-d-slo-ttft-ms": "500", "x-llm-d-slo-tpot-ms": "50"}),
        ({}, {"X-SLO-TTFT-MS": "500", "X-SLO-TPOT-MS": "5e1"}),
        ({"slo": {"ttft_ms": 500}}, {"x-slo-tpot-ms": "50", "x-slo-ttft-ms": "500.0"}),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, OTHER])
def test_every_carrier_means_the_same(
    path: str, body: dict[str, Any], headers: dict[str, str]
) -> None:
    seen = Server().reached({"prompt": "x", **body}, path, headers=headers)
    assert seen == flat(slo_ttft_ms=500.0, slo_tpot_ms=50.0)


def test_a_form_has_headers_and_its_own_field_of_xargs() -> None:
    server = Server()
    xargs = json.dumps({"seed": 3, "slo_tpot_ms": 50})
    headers = {"x-slo-ttft-ms": "500"}
    form: dict[str, Any] = {"files": {"file": b"abc"}, "headers": headers}
    assert server.post(FORM, data={"vllm_xargs": xargs}, **form).status_code == 200
    assert server.post(FORM, **form).status_code == 200
    assert [call.extra for call in server.engine.calls] == [
        {"seed": 3, **flat(slo_ttft_ms=500.0, slo_tpot_ms=50.0)},
        flat(slo_ttft_ms=500.0),
    ]
    wrong = server.post(FORM, data={"vllm_xargs": '{"slo_ttft_ms": -1}'}, files={"file": b"abc"})
    refused(wrong, "ttft_ms")
    disagreeing = server.post(FORM, data={"vllm_xargs": '{"slo_ttft_ms": 400}'}, **form)
    assert "send one value" in refused(disagreeing, "ttft_ms")
    assert len(server.engine.calls) == 2


def test_classes_and_service_tiers() -> None:
    server = Server(config={**CONFIG, "service_tiers": {"priority": "chat", "gold": "chat"}})
    assert server.reached({"slo": {"class": "chat"}}) == CHAT_KEYS
    assert server.reached({}, headers={"x-slo-class": "chat"}) == CHAT_KEYS
    assert server.reached({"service_tier": "priority"}) == CHAT_KEYS
    assert server.reached({"service_tier": "gold"}) == CHAT_KEYS
    assert server.reached({"service_tier": "flex"}) == flat(slo_tier="best_effort")
    kept = server.reached({"service_tier": "flex", "slo": {"class": "chat", "value": 1}})
    assert kept == {**CHAT_KEYS, "slo_value": 1.0, "slo_tier": "best_effort"}
    for tier in ("auto", "default", "scale", "silver", "", 5, ["flex"], {}, True, None):
        assert server.reached({"service_tier": tier}) == {}


@pytest.mark.parametrize(
    ("headers", "ttft_ms"),
    [
        ({"x-slo-ttft-ms": "0"}, 0.001),
        ({"x-slo-ttft-ms": "-5"}, 0.001),
        ({"x-slo-ttft-ms": "1e99"}, 86_400_000.0),
        ({"x-slo-ttft-ms": "700", "x-llm-d-slo-ttft-ms": "500"}, 500.0),
        ({"x-slo-ttft-ms": "500", "x-llm-d-slo-ttft-ms": " "}, 500.0),
        ({"x-slo-ttft-ms": ""}, None),
    ],
)
def test_times_in_headers_follow_llm_d(headers: dict[str, str], ttft_ms: float | None) -> None:
    expected = {} if ttft_ms is None else flat(slo_ttft_ms=ttft_ms)
    assert Server().reached({}, headers=headers) == expected


def test_null_carriers_say_nothing() -> None:
    server = Server()
    body = {"slo": None, "vllm_xargs": {"a": 1, "slo_ttft_ms": None}, "service_tier": None}
    assert server.reached(body) == {"a": 1, "slo_ttft_ms": None}


MISTAKES: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"slo": {"ttft_ms": -1}}, {}, "ttft_ms"),
    ({"vllm_xargs": {"slo_ttft_ms": -1}}, {}, "ttft_ms"),
    ({}, {"x-llm-d-slo-tpot-ms": "soon"}, "tpot_ms"),
    ({"slo": {"ttft_ms": 5}}, {"x-slo-ttft-ms": "6"}, "ttft_ms"),
    ({"slo": {"ttft": 5}}, {}, "ttft"),
    ({"vllm_xargs": {"slo_internal": 5}}, {}, "internal"),
    ({"slo": "chat"}, {}, "slo"),
    ({"slo": {}, "vllm_xargs": [1]}, {}, "vllm_xargs"),
    ({"slo": {"class": "nope"}}, {}, "class"),
    ({"slo": {"tier": "guaranteed"}}, {}, "tier"),
    ({"vllm_xargs": {"prefill_ddl": "x"}}, {}, "prefill_ddl"),
    ({"use_beam_search": True, "slo": {"ttft_ms": 5}}, {}, "use_beam_search"),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(("body", "headers", "param"), MISTAKES)
def test_mistakes_are_400_before_the_app_in_the_shape_of_the_api(
    body: dict[str, Any], headers: dict[str, str], param: str, path: str
) -> None:
    server = Server()
    response = server.post(path, json={"prompt": "x", **body}, headers=headers)
    assert refused_in_any_shape(response, path).startswith(f"{param}: ")
    if path == MESSAGES:
        assert response.json()["error"]["type"] == "invalid_request_error"
    else:
        refused(response, param)
        assert response.json()["error"]["type"] == "BadRequestError"
    assert server.bodies == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "headers", "param"), MISTAKES)
def test_on_other_routes_they_are_400_when_the_engine_is_asked(
    body: dict[str, Any], headers: dict[str, str], param: str, stream: bool
) -> None:
    server = Server()
    body = {"prompt": "x", "stream": stream, **body}
    refused(server.post(OTHER, json=body, headers=headers), param)
    assert len(server.bodies) == 1
    assert server.engine.calls == []


def test_a_header_sent_twice_must_agree() -> None:
    server = Server()
    twice = [("x-slo-ttft-ms", "5"), ("x-slo-ttft-ms", "5")]
    assert server.post(json={}, headers=twice).status_code == 200
    twice[1] = ("x-slo-ttft-ms", "6")
    assert "'5, 6'" in refused(server.post(json={}, headers=twice), "ttft_ms")


ESCAPED = [
    b'{"\\u0073lo": {"ttft_ms": -1}}',
    b'{"slo": {"ttf\\u0074_ms": -1}}',
    b'{"vllm_x\\u0061rgs": {"\\u0073lo_ttft_ms": -1}}',
    *('{"slo": {"ttft_ms": -1}}'.encode(code) for code in ("utf-8-sig", "utf-16", "utf-32")),
    '{"slo": {"ttft_ms": -1}}'.encode("utf-16-le"),
]


@pytest.mark.parametrize("body", ESCAPED)
def test_a_wrong_value_is_400_whatever_its_escapes_and_encoding(body: bytes) -> None:
    server = Server()
    refused(server.post(content=body, headers=JSON), "ttft_ms")
    refused(server.post(OTHER, content=body, headers=JSON), "ttft_ms")
    assert server.engine.calls == []


# --- hints ---------------------------------------------------------------------------------------

HINTED: dict[str, Any] = {
    **CONFIG,
    "priorities": {7: "chat"},
    "sessions": {"read_session_id": True},
}
TTL = flat(slo_ttft_ms=1500.0, slo_on_unattainable="decline")


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({}, {"x-llm-d-inference-objective": "chat"}, CHAT_KEYS),
        ({}, {"x-llm-d-inference-objective": "theirs"}, {}),
        ({}, {"x-gateway-inference-objective": "chat", "x-gateway-inference-fairness-id": "a"},
         {**CHAT_KEYS, "slo_tenant": "a"}),
        # llm-d's newer name goes before the older one.
        ({}, {"x-gateway-inference-objective": "theirs", "x-llm-d-inference-objective": "chat"},
         CHAT_KEYS),
        ({}, {"x-llm-d-inference-objective": "theirs", "x-gateway-inference-objective": "chat"},
         {}),
        ({}, {"x-llm-d-inference-ttl": "1.5s"}, TTL),
        ({}, {"x-llm-d-inference-ttl": "1s500ms", "x-llm-d-inference-fairness-id": "a"},
         {**TTL, "slo_tenant": "a"}),
        ({}, {"x-llm-d-inference-ttl": "1s500ms", "x-llm-d-inference-fairness-id": "no name"},
         TTL),
        ({}, {"x-llm-d-inference-fairness-id": "a"}, {}),
        ({}, {"x-llm-d-inference-ttl": "0s"}, {}),
        ({}, {"x-llm-d-inference-ttl": "soon"}, {}),
        ({"priority": 7}, {}, CHAT_KEYS),
        ({"priority": 8}, {}, {}),
        ({"priority": "7"}, {}, CHAT_KEYS),
        ({}, {"x-vllm-priority": "7"}, CHAT_KEYS),
        ({"nvext": {"agent_hints": {"priority": 7, "osl": 90}}}, {},
         {**CHAT_KEYS, "slo_expected_output_tokens": 90}),
        ({"nvext": {"agent_hints": {"priority": 7, "osl": "many"}}}, {}, CHAT_KEYS),
        ({"nvext": {"agent_hints": [7]}}, {}, {}),
        ({"nvext": 5, "priority": True, "session_id": ["a"]}, {}, {}),
        ({"session_id": "job"}, {}, {}),
        ({"session_id": "job", "slo": {"class": "chat"}}, {},
         {**CHAT_KEYS, "slo_session_id": "job"}),
        ({"slo": {"class": "chat"}}, {"x-session-id": "job"},
         {**CHAT_KEYS, "slo_session_id": "job"}),
        ({"slo": {"class": "chat"}}, {"x-session-id": "no name"}, CHAT_KEYS),
        # What is said to us wins over what is only hinted.
        ({"slo": {"ttft_ms": 900}}, {"x-llm-d-inference-ttl": "1.5s"},
         flat(slo_ttft_ms=900.0, slo_on_unattainable="decline")),
        ({"slo": {"ttft_ms": 900, "on_unattainable": "best_effort"}},
         {"x-llm-d-inference-ttl": "1.5s"}, flat(slo_ttft_ms=900.0)),
        ({"service_tier": "flex"}, {"x-llm-d-inference-objective": "chat"},
         {**CHAT_KEYS, "slo_tier": "best_effort"}),
    ],
)  # fmt: skip
def test_what_gateways_say_in_their_own_words(
    body: dict[str, Any], headers: dict[str, str], expected: dict[str, Any]
) -> None:
    assert Server(config=HINTED).reached({"prompt": "x", **body}, headers=headers) == expected


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"priority": 7}, {}),
        ({"session_id": "job"}, {}),
        ({}, {"x-vllm-priority": "7", "x-session-id": "job"}),
        ({"nvext": {"agent_hints": {"priority": 7}}}, {}),
    ],
)
def test_numbers_and_ids_mean_what_the_operator_says(
    body: dict[str, Any], headers: dict[str, str]
) -> None:
    assert Server().reached({"prompt": "x", **body}, headers=headers) == {}
    asked = {"prompt": "x", "slo": {"class": "chat"}, **body}
    assert Server().reached(asked, headers=headers) == CHAT_KEYS


# --- choices and prompts -------------------------------------------------------------------------

DECLINE = {"ttft_ms": 500, "on_unattainable": "decline"}
TALK = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body", "requests", "each", "grouped"),
    [
        (COMPLETIONS, {"prompt": "x"}, 1, False, False),
        (COMPLETIONS, {"prompt": ["x"]}, 1, False, False),
        (COMPLETIONS, {"prompt": [5, 6, 7]}, 1, False, False),
        (COMPLETIONS, {"prompt": []}, 1, False, False),
        (COMPLETIONS, {"prompt": "x", "n": 2}, 1, True, True),
        (COMPLETIONS, {"prompt": ["x", "y", "z"]}, 3, False, True),
        (COMPLETIONS, {"prompt": [[5], [6]], "n": 2}, 2, True, True),
        (COMPLETIONS, {"prompt": ["x"], "prompt_embeds": ["a", "b"]}, 1, False, True),
        (CHAT, {"messages": TALK * 3}, 1, False, False),
        (CHAT, {"messages": TALK, "n": 2}, 1, True, True),
        (OTHER, {"messages": [TALK, TALK]}, 1, False, True),
    ],
)
def test_choices_that_may_be_declined_share_a_group(
    path: str, body: dict[str, Any], requests: int, each: bool, grouped: bool
) -> None:
    server = Server()
    assert server.post(path, json={**body, "slo": DECLINE}).status_code == 200
    assert len(server.engine.calls) == requests
    said = server.engine.calls[0].extra
    assert all(call.extra == said for call in server.engine.calls)
    assert (EACH_KEY in said, GROUP_KEY in said) == (each, grouped)
    if each or grouped:
        Seal("secret").check(said)
        assert len(said.get(GROUP_KEY, "x" * 32)) == 32
    served = server.reached({**body, "slo": {"ttft_ms": 500}}, path)
    assert served == (sealed(slo_ttft_ms=500.0, slo_each=1) if each else flat(slo_ttft_ms=500.0))


def test_every_request_has_a_group_of_its_own() -> None:
    server = Server()
    groups = {server.reached({"n": 2, "slo": DECLINE})[GROUP_KEY] for _ in range(5)}
    assert len(groups) == 5


def test_a_beam_search_asks_for_nothing() -> None:
    body = {"prompt": "x", "use_beam_search": True}
    assert Server().reached(body) == {}
    exempt = Seal("secret").sealed({"slo_exempt": 1})
    assert Server(config={**CONFIG, "default_class": "chat"}).reached(body) == exempt
    assert Server(config=HINTED).reached({**body, "priority": 7}) == {}


# --- behind a front ------------------------------------------------------------------------------

SAID = {"age_ms": 250.0, "ticket": "7", "on_unattainable": None}
MARKS = {"slo_age_ms": 250.0, "slo_ticket": "7"}
HOP = {**SAID, "on_unattainable": "decline"}


def test_the_scheduler_is_told_what_the_front_says() -> None:
    server = behind_a_front(Server(), SAID)
    seen = server.reached({"prompt": "x", "slo": {"ttft_ms": 500}})
    assert seen == sealed(slo_ttft_ms=500.0, **MARKS)
    streamed = server.reached({"prompt": "x", "stream": True, "slo": {"ttft_ms": 500}})
    assert streamed == seen


def test_a_deadline_counts_from_the_arrival_at_the_front() -> None:
    server = behind_a_front(Server(), SAID)
    xargs = {"prefill_ddl": 1000.5, "slo_tpot": 0.05}
    # Due half a second after it came here, which is a quarter after it came to the front.
    expected = sealed(slo_ttft_ms=750.0, slo_tpot_ms=50.0, **MARKS)
    for path in (COMPLETIONS, OTHER):
        assert server.reached({"prompt": "x", "vllm_xargs": xargs}, path) == expected


@pytest.mark.parametrize(
    "body", [{"prompt": "x"}, {"prompt": [5, 6]}, {"n": 2}, {"prompt": ["x", "y"]}]
)
def test_a_hop_asks_for_a_refusal(body: dict[str, Any]) -> None:
    server = behind_a_front(Server(), HOP)
    seen = server.reached({**body, "slo": {"ttft_ms": 500}})
    assert seen["slo_on_unattainable"] == "decline"
    assert {key: seen[key] for key in MARKS} == MARKS
    assert (GROUP_KEY in seen) == (body in ({"n": 2}, {"prompt": ["x", "y"]}))
    Seal("secret").check(seen)


def test_a_hop_does_not_refuse_what_needs_no_promise() -> None:
    server = behind_a_front(Server(), HOP)
    seen = server.reached({"slo": {"ttft_ms": 500, "tier": "best_effort"}})
    assert seen["slo_on_unattainable"] == "best_effort"
    last = {**SAID, "on_unattainable": "best_effort"}
    assert behind_a_front(Server(), last).reached({"slo": DECLINE})["slo_on_unattainable"] == (
        "best_effort"
    )


@pytest.mark.parametrize("said", [SAID, HOP])
@pytest.mark.parametrize(
    "body", [b'{"prompt": "x" ,  "n":1}', b'{"service_tier" : "auto"}', b"[1]", b'{"slo": ']
)
def test_without_an_slo_nothing_is_told(said: dict[str, Any], body: bytes) -> None:
    server = behind_a_front(Server(), said)
    server.post(content=body, headers=JSON)
    assert server.bodies == [body]
    assert all(call.extra == {} for call in server.engine.calls)


def test_the_default_class_is_told_as_well() -> None:
    config = {**CONFIG, "default_class": "chat"}
    hop = behind_a_front(Server(config=config), HOP)
    asked = sealed(**{**CHAT_KEYS, **MARKS, "slo_on_unattainable": "decline"})
    assert hop.reached({"prompt": "x"}) == asked
    assert hop.reached({"prompt": "x", "stream": True}, OTHER) == asked
    ordinary = behind_a_front(Server(config=config), SAID)
    expected = {"a": 1, **sealed(**CHAT_KEYS, **MARKS)}
    assert ordinary.reached({"prompt": "x", "vllm_xargs": {"a": 1}}) == expected


def test_headers_of_the_front_mean_nothing_to_the_middleware() -> None:
    headers = {"x-vllm-slo-age-ms": "250", "x-vllm-slo-ticket": "7", "x-vllm-slo-hop": "1"}
    seen = Server().reached({"prompt": "x", "slo": {"ttft_ms": 500}}, headers=headers)
    assert seen == flat(slo_ttft_ms=500.0)


@pytest.mark.parametrize("key", INTERNAL_KEYS)
@pytest.mark.parametrize("path", [COMPLETIONS, OTHER])
@pytest.mark.parametrize("front", [False, True])
def test_clients_cannot_speak_for_the_server(key: str, path: str, front: bool) -> None:
    server = behind_a_front(Server(), SAID) if front else Server()
    for xargs in ({key: 5}, {key: 5, "slo_ttft_ms": 500}):
        response = server.post(path, json={"prompt": "x", "vllm_xargs": xargs})
        refused(response, key.removeprefix("slo_"))
    stolen = Seal("secret").sealed({"slo_ttft_ms": 500, key: 5})
    response = server.post(path, json={"prompt": "x", "vllm_xargs": stolen})
    assert response.status_code == 400
    assert server.engine.calls == []


def test_without_a_secret_the_scheduler_is_told_nothing_but_the_slo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(SEAL_VARIABLE)
    server = behind_a_front(Server(), SAID)
    assert server.reached({"slo": {"ttft_ms": 500}, "n": 2}) == flat(slo_ttft_ms=500.0)


# --- what passes untouched -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x" ,  "n":1}',
        b'{"prompt": "say \\"slo\\" and service_tier"}',
        b'{"service_tier" : "auto"}',
        b'{"service_tier" : null, "vllm_xargs": {"a": 1}}',
        b'["slo"]',
        b'{"slo": ',
        b'{"prompt": "\xff"}',
        b'{"slo": ' + b"[" * 100_000,
        b'{"prompt": ["\\ud800", NaN, 1e999, 1' + b"0" * 5000 + b"]}",
        b"",
        '{"prompt": 1}'.encode("utf-16"),
        b'{"slo": {"ttft_ms": 5}, "slo": {"ttft_ms": 6}}',
        b'{"vllm_xargs": [1]}',
        b'{"vllm_xargs": "a"}',
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, OTHER])
def test_pass_through_is_byte_for_byte(path: str, body: bytes) -> None:
    server = Server()
    server.post(path, content=body, headers=JSON)
    assert server.bodies == [body]
    assert server.headers[0]["content-length"] == str(len(body))


def test_what_is_asked_for_twice_in_one_body_is_what_vllm_would_read() -> None:
    server = Server()
    server.post(content=b'{"slo": {"ttft_ms": -5}, "slo": {"ttft_ms": 6}}', headers=JSON)
    assert server.engine.calls[0].extra == flat(slo_ttft_ms=6.0)


def test_a_body_of_many_parts_and_any_size_is_read() -> None:
    server = Server()
    large = json.dumps({"slo": {"ttft_ms": 5}}).encode()
    large = large[:-1] + b" " * MAX_BODY_BYTES + b"}"

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 1 << 22):
            yield large[start : start + (1 << 22)]

    for path in (COMPLETIONS, OTHER):
        assert server.post(path, content=chunks(), headers=JSON).status_code == 200
        assert server.engine.calls[-1].extra == flat(slo_ttft_ms=5.0)
    assert server.bodies == [large] * 2


def test_other_methods_and_types_pass() -> None:
    server = Server()
    body = json.dumps({"slo": {"ttft_ms": -1}}).encode()
    assert server.post(content=body, headers={"content-type": "text/plain"}).status_code == 200
    assert server.bodies == [body]
    assert server.engine.calls[-1].extra == {}
    listed = server.run(lambda client: client.get(COMPLETIONS))
    assert listed.status_code == 405


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/Vnd.Api+JSON"])
def test_json_is_json_whatever_it_is_called(kind: str) -> None:
    server = Server()
    headers = {"content-type": kind}
    refused(server.post(content=b'{"slo": 5}', headers=headers), "slo")
    assert server.bodies == []


def test_pooling_takes_no_objectives() -> None:
    server = Server(config={**CONFIG, "default_class": "strict"})
    assert server.post(POOLING, json={"input": "x", "priority": 3}).json() == {"data": [[0.5]]}
    for request in (
        {"json": {"input": "x", "slo": {"ttft_ms": 5}}},
        {"json": {"input": "x"}, "headers": {"x-slo-class": "chat"}},
        {"json": {"input": "x", "vllm_xargs": {"slo_value": 1}}},
    ):
        assert "pooling" in refused(server.post(POOLING, **request), "slo")
    assert len(server.engine.calls) == 1


def test_with_another_scheduler_nothing_changes() -> None:
    server = Server(scheduler=None)
    assert server.reached({"slo": {"ttft_ms": 5}, "vllm_xargs": {"a": 1}}) == {"a": 1}


def test_the_list_of_models_names_the_classes() -> None:
    strict = {"name": "strict", "ttft_ms": 100.0, "on_unattainable": "decline"}
    chat = {"name": "chat", "ttft_ms": 500.0, "tpot_ms": 50.0, "value": 2.0}
    for root in ("", "/proxy"):
        server = Server(root_path=root)
        listed = server.run(lambda client, root=root: client.get(f"{root}/v1/models"))
        assert listed.json()["data"] == [{"id": "m", "slo_classes": [chat, strict]}]
        assert listed.headers["content-length"] == str(len(listed.content))
    plain = Server(config={}).run(lambda client: client.get("/v1/models"))
    assert plain.json() == {"object": "list", "data": [{"id": "m"}]}


# --- who is let in -------------------------------------------------------------------------------


def test_nothing_is_read_before_the_app_lets_the_client_in() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    sent: list[Any] = []
    asyncio.run(talk(SLOMiddleware(app), b'{"slo": {"ttft_ms": -1}}', sent))
    assert [message.get("status", message.get("body")) for message in sent] == [401, b"no"]


# --- disconnects ---------------------------------------------------------------------------------


def test_disconnect_while_the_body_arrives() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["type"])

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError

    parts: list[Any] = [
        {"type": "http.request", "body": b'{"slo": ', "more_body": True},
        {"type": "http.disconnect"},
    ]
    asyncio.run(SLOMiddleware(app)(scope_of(), receive, send))
    assert seen == ["http.disconnect"]


@pytest.mark.parametrize("body", [b'{"slo": {"ttft_ms": 5}}', b"{}"])
def test_disconnect_after_the_body_reaches_the_app(body: bytes) -> None:
    async def run() -> list[str]:
        left, seen = asyncio.Event(), []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            seen.append((await receive())["type"])
            waiting = asyncio.create_task(receive())
            await asyncio.sleep(0.01)
            seen.append("early" if waiting.done() else "pending")
            left.set()
            seen.append((await waiting)["type"])

        await talk(SLOMiddleware(app), body, [], left=left)
        return seen

    assert asyncio.run(run()) == ["http.request", "pending", "http.disconnect"]


def test_who_leaves_ends_the_request_of_the_engine() -> None:
    async def run() -> None:
        left = asyncio.Event()

        async def script(call: Any) -> AsyncIterator[Any]:
            left.set()
            await asyncio.sleep(60)
            yield  # never reached; it makes this a generator

        server = Server(script)
        await talk(server.app, b'{"slo": {"ttft_ms": 5}}', [], left=left)
        while not server.engine.calls[0].closed:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), patience(10)))


def test_an_app_that_raises_after_a_refusal_changes_nothing() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 500, "headers": []})
        raise RuntimeError("client is gone")

    sent: list[Any] = []
    asyncio.run(talk(SLOMiddleware(app), b'{"slo": 5}', sent))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 400
    assert b"is not an object" in sent[1]["body"]


def test_errors_of_the_app_are_not_swallowed() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        raise RuntimeError("bug")

    with pytest.raises(RuntimeError, match="bug"):
        asyncio.run(talk(SLOMiddleware(app), b'{"slo": {"ttft_ms": 5}}', []))


def test_requests_at_the_same_time_keep_apart() -> None:
    """Each call of the engine has the SLO of the request in whose context it was made."""
    server = Server()

    async def ask(client: httpx.AsyncClient) -> None:
        sent = [
            client.post(ROUTES[i % 4], json={"prompt": f"{i}", "slo": {"ttft_ms": i + 1}})
            for i in range(40)
        ]
        await asyncio.gather(*sent, *(client.post(COMPLETIONS, json={}) for _ in range(10)))

    server.run(ask)
    told = {call.prompt: call.extra for call in server.engine.calls}
    assert told.pop("x") == {}
    assert told == {f"{i}": flat(slo_ttft_ms=i + 1.0) for i in range(40)}


# --- fuzz ----------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["flex", "priority", "chat", "decline", "guaranteed", 500, -1, 10**30])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
slo_keys = st.sampled_from(["ttft_ms", "tpot_ms", "value", "tier", "class", "tenant"])
names = ["slo", "vllm_xargs", "service_tier", "prompt", "stream", "n", "messages", "nvext"]
names += ["priority", "session_id", "use_beam_search"]
bodies = st.dictionaries(
    st.sampled_from(names),
    values
    | st.dictionaries(slo_keys, values, max_size=3)
    | st.dictionaries(slo_keys.map(lambda key: "slo_" + key) | st.text(max_size=5), values),
)
DECLINING = b'{"slo": {"ttft_ms": 5, "on_unattainable": "decline"}, "prompt": '
raw_bodies = (
    bodies.map(lambda body: json.dumps(body).encode())
    | bodies.map(lambda body: json.dumps(body).encode()[:-3])
    | st.binary(max_size=40).map(lambda tail: b'{"slo": ' + tail)
    | st.sampled_from([b"[1e999]", b'["\\ud800"]', b"[[NaN]]", b"[1e-9999]"]).map(
        lambda prompt: DECLINING + prompt + b"}"
    )
)
raw_headers = st.dictionaries(
    st.sampled_from([*sorted(HEADER_FIELDS), "x-llm-d-inference-ttl", "x-session-id"]).map(
        str.encode
    ),
    st.binary(max_size=30) | st.sampled_from([b"5", b"chat", b"flex", b"1m"]),
    max_size=2,
)


FUZZED = Server(config=HINTED)


@pytest.mark.slow
@given(raw_bodies, raw_headers, st.sampled_from([COMPLETIONS, OTHER, POOLING]))
@settings(max_examples=examples(1000))
def test_fuzz_never_500(body: bytes, headers: dict[bytes, bytes], path: str) -> None:
    server, sent = FUZZED, []
    server.bodies, server.engine.calls = [], []

    length = (b"content-length", b"%d" % len(body))
    asyncio.run(talk(server.app, body, sent, path, headers=[*headers.items(), length]))
    assert sent[0]["status"] in (200, 400)
    assert server.bodies in ([], [body])
    if not server.bodies or path != POOLING:
        assert (sent[0]["status"] == 200) == bool(server.engine.calls)
    if not server.bodies:
        error = json.loads(sent[1]["body"])["error"]
        assert error["message"].startswith(error["param"])
