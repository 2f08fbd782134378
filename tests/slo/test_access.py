# SPDX-License-Identifier: Apache-2.0
"""Which API key may ask for what: the configuration, the middleware, and the scheduler's seal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

import yaml
from http_app import (
    COMPLETIONS,
    CONFIG,
    MESSAGES,
    OTHER,
    POOLING,
    REPORT,
    ROUTES,
    Server,
    choice,
    output,
    refused,
    refused_in_any_shape,
    reported,
    saying,
)
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo import SLO, SLOConfig
from vllm_slo.config.command_line import Flags
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.serving import plugin
from vllm_slo.errors import ConfigError, ForbiddenSLOError, InvalidSLOError
from vllm_slo.sim.harness import VirtualEngine
from vllm_slo.slo.access import SEAL_VARIABLE, Access, Seal, bearer_of
from vllm_slo.slo.access_config import (
    AccessConfig,
    GrantConfig,
    KeyConfig,
    QuotaConfig,
    QuotasConfig,
)
from vllm_slo.slo.keys import INTERNAL_KEYS, SEAL_KEY
from vllm_slo.slo.verdicts import unpack_quote, unpack_report

GOLD, SILVER, OPS = "gold-key-0123456789", "silver-key-0123456789", "ops-key-0123456789"


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


KEYS: dict[str, Any] = {
    "gold": {
        "sha256": sha256(GOLD),
        "tenant": "acme",
        "min_ttft_ms": 300,
        "min_tpot_ms": 40,
        "max_value": 3,
    },
    "silver": {"sha256": sha256(SILVER), "classes": ["chat"], "objectives": False},
    "ops": {"sha256": sha256(OPS), "tiers": ["best_effort"]},
}
GUARDED = {**CONFIG, "access": {"keys": KEYS}}


SEALED = Seal("secret")


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEAL_VARIABLE, "secret")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def server(**access: Any) -> Server:
    return Server(config={**GUARDED, "access": {"keys": KEYS, **access}})


# --- over HTTP -----------------------------------------------------------------------------------

ALLOWED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (GOLD, {"ttft_ms": 300, "value": 3}, {"slo_ttft_ms": 300.0, "slo_value": 3.0}),
    (GOLD, {"class": "strict"}, {"slo_ttft_ms": 100.0, "slo_class": "strict"}),
    (GOLD, {"class": "strict", "tpot_ms": 40}, {"slo_tpot_ms": 40.0}),
    (GOLD, {"ttft_ms": 900, "tenant": "acme"}, {}),
    (SILVER, {"class": "chat"}, {"slo_tpot_ms": 50.0, "slo_value": 2.0}),
    (SILVER, {"class": "chat", "tpot_ms": 50, "expected_output_tokens": 9}, {"slo_tpot_ms": 50.0}),
    (SILVER, {"tier": "best_effort", "speculation": "off"}, {"slo_tier": "best_effort"}),
    (SILVER, {"class": "chat", "value": 1.5}, {"slo_value": 1.5}),
    (SILVER, {"class": "chat", "session_id": "j", "session_last": True}, {"slo_session_id": "j"}),
    (OPS, {"class": "chat", "tier": "best_effort"}, {"slo_tier": "best_effort"}),
]
TENANTS = {GOLD: "acme", SILVER: "silver", OPS: "ops"}


@pytest.mark.parametrize(("key", "slo", "expected"), ALLOWED)
def test_what_a_key_may_ask_for_passes_with_its_tenant(
    key: str, slo: dict[str, Any], expected: dict[str, Any]
) -> None:
    seen = server().reached({"prompt": "x", "slo": slo}, headers=bearer(key))
    assert seen["slo_tenant"] == TENANTS[key]
    assert seen == {**seen, **expected}


FORBIDDEN: list[tuple[str | None, dict[str, Any], str, str]] = [
    (GOLD, {"slo": {"ttft_ms": 299}}, "ttft_ms", "300 or more"),
    (GOLD, {"slo": {"class": "chat", "tpot_ms": 39.9}}, "tpot_ms", "40 or more"),
    (GOLD, {"slo": {"class": "strict", "ttft_ms": 99}}, "ttft_ms", "99 is not allowed"),
    (GOLD, {"vllm_xargs": {"slo_tpot": 0.001}}, "tpot_ms", "40 or more"),
    (GOLD, {"slo": {"ttft_ms": 900, "value": 3.5}}, "value", "at most 3"),
    (GOLD, {"slo": {"ttft_ms": 900, "tenant": "silver"}}, "tenant", "leave it out, or say acme"),
    (GOLD, {"slo": {"tier": "best_effort", "tenant": "silver"}}, "tenant", "silver"),
    (GOLD, {"slo": {"stages": [{"until": "x", "tpot_ms": 9}, {}]}}, "tpot_ms", "9 is not allowed"),
    (SILVER, {"slo": {"class": "strict"}}, "class", "allowed: chat"),
    (SILVER, {"slo": {"class": "chat", "ttft_ms": 400}}, "ttft_ms", "objectives of a class"),
    (SILVER, {"slo": {"class": "chat", "ttft_ms": 600}}, "ttft_ms", "objectives of a class"),
    (SILVER, {"slo": {"tpot_ms": 50}}, "tpot_ms", "objectives of a class"),
    (SILVER, {"slo": {"class": "chat", "value": 2.1}}, "value", "at most 2"),
    (GOLD, {"slo": {"session_id": "j", "session_e2e_ms": 900}}, "session_e2e_ms", "sets the pace"),
    (
        SILVER,
        {"slo": {"class": "chat", "session_id": "j", "session_rounds": 9_000}},
        "session_rounds",
        "sets the pace",
    ),
    (
        SILVER,
        {"slo": {"class": "chat", "session_id": "j", "expected_output_tokens": 9}},
        "expected_output_tokens",
        "sets the pace",
    ),
    (OPS, {"slo": {"class": "chat"}}, "tier", "allowed: best_effort"),
    (OPS, {"service_tier": "priority"}, "tier", "guaranteed is not allowed"),
    ("unknown", {"slo": {"class": "chat"}}, "class", "allowed: none"),
    ("unknown", {"service_tier": "priority"}, "class", "chat is not allowed"),
    (None, {"slo": {"ttft_ms": 500}}, "tier", "allowed: best_effort"),
    (None, {"slo": {"ttft_ms": 500, "tier": "best_effort"}}, "ttft_ms", "objectives of a class"),
    (None, {"slo": {"tier": "best_effort", "tenant": "acme"}}, "tenant", "say nothing"),
]


@pytest.mark.parametrize("path", [*ROUTES, OTHER])
@pytest.mark.parametrize(("key", "body", "param", "says"), FORBIDDEN)
def test_what_it_may_not_is_403_and_names_the_field(
    key: str | None, body: dict[str, Any], param: str, says: str, path: str
) -> None:
    one = server()
    headers = {} if key is None else bearer(key)
    response = one.post(path, json={"prompt": "x", **body}, headers=headers)
    text = refused_in_any_shape(response, path, 403)
    assert text.startswith(f"{param}: ") and says in text
    if path == MESSAGES:
        assert response.json()["error"]["type"] == "permission_error"
    else:
        assert refused(response, param, 403) == text
        assert response.json()["error"]["type"] == "PermissionDeniedError"
    assert one.engine.calls == []
    assert len(one.bodies) == (path == OTHER)


def test_a_mistake_is_still_400() -> None:
    refused(server().post(json={"slo": {"ttft_ms": -1}}, headers=bearer(GOLD)), "ttft_ms", 400)


@pytest.mark.parametrize("tier", ["auto", "default", "flex", None])
def test_who_asks_for_nothing_needs_no_key(tier: str | None) -> None:
    body = {"prompt": "x"} if tier is None else {"prompt": "x", "service_tier": tier}
    assert server().post(json=body).status_code == 200


def test_others_may_be_granted_something() -> None:
    one = server(others={"classes": ["chat"], "objectives": False, "tenant": "guests"})
    for headers in ({}, bearer("unknown"), {"authorization": f"Basic {GOLD}"}):
        seen = one.reached({"slo": {"class": "chat"}}, headers=headers)
        assert seen["slo_tenant"] == "guests"
        refused(one.post(json={"slo": {"class": "strict"}}, headers=headers), "class", 403)


def test_the_default_class_is_for_those_who_may_have_it() -> None:
    one = Server(config={**GUARDED, "default_class": "strict"})
    gold = one.reached({"prompt": "x"}, headers=bearer(GOLD))
    assert (gold["slo_class"], gold["slo_tenant"]) == ("strict", "acme")
    silver = one.reached({"prompt": "x"}, headers=bearer(SILVER))
    assert silver == {
        "slo_tier": "best_effort",
        "slo_tenant": "silver",
        "slo_value": 1.0,
        "slo_on_unattainable": "best_effort",
        "slo_seal": SEALED.of(silver),
    }


def test_the_tenant_is_who_the_key_says_whatever_a_gateway_hints() -> None:
    headers = {**bearer(SILVER), "x-llm-d-inference-fairness-id": "acme"}
    seen = server().reached({"slo": {"class": "chat"}}, headers=headers)
    assert seen["slo_tenant"] == "silver"


CHAT = {"slo_class": "chat", "slo_ttft_ms": 500.0, "slo_tpot_ms": 50.0}
HINTED: list[tuple[str, dict[str, Any], dict[str, str], dict[str, Any] | None]] = [
    # key, body, hints, what the scheduler is told of it (None: nothing)
    (SILVER, {}, {"x-llm-d-inference-objective": "chat"}, CHAT),
    (SILVER, {}, {"x-llm-d-inference-objective": "strict"}, None),
    (SILVER, {}, {"x-vllm-priority": "1"}, None),
    (SILVER, {"priority": 1}, {}, None),
    (SILVER, {}, {"x-llm-d-inference-ttl": "2s"}, None),
    (SILVER, {}, {"x-llm-d-inference-objective": "chat", "x-llm-d-inference-ttl": "2s"}, CHAT),
    (
        SILVER,
        {"slo": {"class": "chat"}, "nvext": {"agent_hints": {"osl": 7}}},
        {"x-session-id": "j"},
        {**CHAT, "slo_session_id": "j"},
    ),
    (GOLD, {}, {"x-llm-d-inference-ttl": "2s"}, {"slo_ttft_ms": 2000.0}),
    (GOLD, {}, {"x-llm-d-inference-ttl": "299ms"}, None),
    (GOLD, {"slo": {"tpot_ms": 50}}, {"x-llm-d-inference-ttl": "299ms"}, {"slo_tpot_ms": 50.0}),
    (OPS, {}, {"x-llm-d-inference-ttl": "2s", "x-llm-d-inference-objective": "chat"}, None),
    ("no key of ours", {}, {"x-llm-d-inference-ttl": "2s", "x-vllm-priority": "1"}, None),
]


@pytest.mark.parametrize("case", HINTED, ids=map(str, range(len(HINTED))))
def test_a_hint_that_a_key_may_not_have_is_ignored(case: Any) -> None:
    key, body, hints, expected = case
    config = {**GUARDED, "priorities": {1: "strict"}, "sessions": {"read_session_id": True}}
    seen = Server(config=config).reached({"prompt": "x", **body}, headers={**bearer(key), **hints})
    if expected is None:
        assert not any(name.startswith("slo_") for name in seen or {})
    else:
        assert expected.items() <= seen.items()


def test_what_a_request_says_itself_is_refused_whatever_is_hinted() -> None:
    hints = {"x-llm-d-inference-objective": "chat", "x-llm-d-inference-ttl": "2s"}
    answer = server().post(json={"slo": {"class": "strict"}}, headers={**bearer(SILVER), **hints})
    refused(answer, "class", 403)


def test_answers_are_as_without_access() -> None:
    one = server()
    one.engine.script = saying(output(choice("a", "stop"), carried=reported()))
    body = {"slo": {"class": "chat"}, "service_tier": "auto"}
    answer = one.post(json=body, headers=bearer(SILVER)).json()
    assert answer["slo"] == REPORT and answer["service_tier"] == "default"


def test_the_first_authorization_counts_as_in_vllm() -> None:
    twice = [(b"authorization", b"bearer one"), (b"authorization", b"Bearer two")]
    assert bearer_of(twice) == b"one"
    assert bearer_of([(b"authorization", b"Bearer  spaced")]) == b" spaced"
    assert bearer_of([(b"authorization", b"\xff\xfe")]) is None
    assert bearer_of([]) is None


# --- the configuration ---------------------------------------------------------------------------


def test_keys_come_from_the_environment_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{GOLD}\n")
    keys = {"a": {"file": str(tmp_path / "key")}, "b": {"env": "SILVER_KEY"}}
    access = Access(AccessConfig.model_validate({"keys": keys}), {"SILVER_KEY": SILVER})
    for key, tenant in ((GOLD, "a"), (SILVER, "b")):
        headers = [(b"authorization", f"Bearer {key}".encode())]
        assert access.ruled(SLO(ttft_ms=5), headers, {}, own=True).tenant == tenant
    with pytest.raises(ForbiddenSLOError, match=r"^tier: "):
        access.ruled(SLO(ttft_ms=5), [(b"authorization", b"Bearer x")], {}, own=True)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"a": {"env": "NOT_SET"}}, "access.keys.a.env: the variable NOT_SET holds no key"),
        ({"a": {"file": "/nowhere"}}, "access.keys.a.file: /nowhere: No such file"),
        ({"a": {"sha256": sha256("x")}, "b": {"env": "X"}}, "access.keys.b: another name has"),
    ],
)
def test_keys_that_cannot_be_had(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Access(AccessConfig.model_validate({"keys": keys}), {"X": "x"})
    assert str(caught.value).startswith(says)


DIGEST = "sha256: " + "ab" * 32


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("access:\n  key: {}", 2, "access.key: unknown key; did you mean 'keys'?"),
        ("access:\n  keys:\n    a:\n      key: sk-1", 4, "access.keys.a.key: unknown key; known:"),
        ("access:\n  keys:\n    a: {}", 3, "access.keys.a: give exactly one of sha256, env, file"),
        ("access:\n  keys:\n    a: {env: A, file: B}", 3, "access.keys.a: give exactly one of"),
        ("access:\n  keys:\n    a: {sha256: sk-12345}", 3, "access.keys.a.sha256: String should"),
        (f"access:\n  keys:\n    a: {{{DIGEST}, tenant: a b}}", 3, "tenant: 'a b' is not a name"),
        (f"access:\n  keys:\n    a b: {{{DIGEST}}}", 1, "access: tenant: 'a b' is not a name"),
        (f"access:\n  keys:\n    a: {{{DIGEST}, tiers: []}}", 3, "at least one of guaranteed"),
        (f"access:\n  keys:\n    a: {{{DIGEST}, clases: []}}", 3, "did you mean 'classes'?"),
        (
            f"access:\n  keys:\n    a: {{{DIGEST}, classes: [x]}}",
            3,
            "access.keys.a.classes: class 'x' is not configured",
        ),
        ("access:\n  others: {classes: [x]}", 2, "access.others.classes: class 'x'"),
        ("access:\n  others: {max_valu: 1}", 2, "did you mean 'max_value'?"),
        ("access:\n  others: {min_tpot_ms: 0}", 2, "access.others.min_tpot_ms: Input should"),
        ("quotas:\n  tenant: {}", 2, "quotas.tenant: unknown key; did you mean 'tenants'?"),
        ("quotas:\n  default: {burst: 1}", 2, "quotas.default.promised_tokens_per_s: Field req"),
        (
            "quotas:\n  tenants:\n    a: {promised_tokens_per_s: 0, burst_tokens: 5}",
            3,
            "quotas.tenants.a.promised_tokens_per_s: Input should be greater than 0",
        ),
        (
            "quotas:\n  tenants:\n    a b: {promised_tokens_per_s: 1, burst_tokens: 5}",
            1,
            "quotas: tenant: 'a b' is not a name",
        ),
    ],
)
def test_mistakes(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        SLOConfig.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ") and says in message
    assert "\n" not in message and "sk-1" not in message


def test_every_field_is_documented() -> None:
    for model in (AccessConfig, GrantConfig, KeyConfig, QuotaConfig, QuotasConfig):
        for spec in model.model_fields.values():
            assert "Scope: " in (spec.description or "") and len(spec.description or "") > 60


def test_a_broken_key_stops_the_server_before_it_loads_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"slo_config": {"access": {"keys": {"a": {"env": "NOT_SET_ANYWHERE"}}}}}
    flags = Flags(["vllm", "serve", "--additional-config", json.dumps(config)])
    monkeypatch.delenv(SEAL_VARIABLE, raising=False)
    with pytest.raises(SystemExit, match=r"^vllm-slo: error: access\.keys\.a\.env: "):
        plugin._check_or_exit(flags)


def test_the_first_process_makes_up_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEAL_VARIABLE, "x")
    monkeypatch.delenv(SEAL_VARIABLE)  # so that it is put back as it was
    # However vLLM is told of the configuration, see `--additional-config.slo_config`.
    flags = Flags(["vllm", "serve"])
    plugin._check_or_exit(flags)
    first = Seal.from_environment()
    plugin._check_or_exit(flags)
    second = Seal.from_environment()
    assert first and second and first.of({"slo_value": 1}) == second.of({"slo_value": 1})


# --- the seal ------------------------------------------------------------------------------------

flats = st.dictionaries(
    st.sampled_from(["slo_ttft_ms", "slo_value", "slo_tenant", "slo_tier", "prefill_ddl"]),
    st.integers() | st.floats() | st.text(max_size=8),
    min_size=1,
)


@given(flats, flats, st.text(max_size=8))
def test_a_seal_covers_every_slo_key(one: dict[str, Any], other: dict[str, Any], key: str) -> None:
    seal = Seal("secret")
    sealed = {**one, SEAL_KEY: seal.of(one), f"x{key}": 1, "top": [1, {}]}
    seal.check(sealed)
    seal.check(json.loads(json.dumps(sealed)))
    if repr(sorted(one.items())) != repr(sorted(other.items())) and seal.of(one) != seal.of(other):
        with pytest.raises(InvalidSLOError, match=r"^slo: "):
            seal.check({**other, SEAL_KEY: seal.of(one)})
    with pytest.raises(InvalidSLOError):
        seal.check({**one, "slo_extra": 1, SEAL_KEY: seal.of(one)})
    with pytest.raises(InvalidSLOError):
        Seal("another").check(sealed)


def test_forged_seals_and_odd_values_are_refused() -> None:
    for value in (1, 10**5000, [[[]]], "\ud800", float("nan"), None):
        for forged in (None, "", "0" * 64, "\ud800", 5, 10**5000, [], {"a": 1}):
            with pytest.raises(InvalidSLOError, match="access is not checked"):
                Seal("secret").check({"slo_value": value, SEAL_KEY: forged})


def test_different_values_have_different_seals() -> None:
    said = [1, "1", "'1'", 2, 1.5, "1.5", "", "\n", "a", "A"]
    assert len({Seal("s").of({"slo_value": value}) for value in said}) == len(said)
    assert Seal("s").of({"slo_value": 1}) == Seal("s").of({"slo_value": 1.0})
    injected = {"slo_tenant": "a\nslo_value=5"}
    assert Seal("s").of(injected) != Seal("s").of({"slo_tenant": "a", "slo_value": 5})


MODEL = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), max_tokens=8192)


@pytest.fixture
def guarded(config_folder: Path) -> VirtualEngine:
    return VirtualEngine(
        Scheduler, config_folder, MODEL.predict_shape_s, believed=MODEL, slo_config=GUARDED
    )


def send(engine: VirtualEngine, name: str, extra: dict[str, Any]) -> None:
    """A request as it reaches the scheduler from whatever route."""
    engine.add(name, 20, 5, cast(SLO, SimpleNamespace(to_extra_args=lambda: extra)))


@pytest.mark.slow
def test_the_scheduler_believes_no_key_that_was_not_checked(guarded: VirtualEngine) -> None:
    flat = {"slo_ttft_ms": 900.0, "slo_tenant": "acme"}
    sealed = {**flat, SEAL_KEY: SEALED.of(flat), "other": 1}
    cases: dict[str, dict[str, Any]] = {
        "sealed": sealed,
        "plain": {"other": 1},
        "bare": flat,
        "raised": {**sealed, "slo_value": 1e6},
        "ticket": {"slo_ticket": "9:9", "slo_age_ms": 5.0},
        "each": {"slo_each": 1},
        "other seal": Seal("another").sealed(flat),
        "exempt": SEALED.sealed({"slo_exempt": 1}),
        "quote": {**sealed, "slo_quote": 1},
    }
    for name, extra in cases.items():
        send(guarded, name, extra)
    guarded.run()
    believed = {"sealed", "plain", "exempt"}
    for name, outcome in guarded.outcomes.items():
        refused_as = str(outcome.stop_reason or "")
        assert refused_as.startswith("slo_invalid:slo: ") == (name not in believed), name
        assert (outcome.finish_reason == "stop") == (name in believed), name
    assert guarded.outcomes["sealed"].report["promised"]
    assert guarded.scheduler.state().seen == {}


@pytest.mark.slow
@pytest.mark.parametrize("key", [key for key in INTERNAL_KEYS if key != SEAL_KEY])
def test_internal_keys_are_believed_with_a_seal_only_whether_or_not_access_is_checked(
    config_folder: Path, key: str
) -> None:
    one = VirtualEngine(Scheduler, config_folder, MODEL.predict_shape_s, believed=MODEL)
    flat = {"slo_ttft_ms": 900.0, "slo_tenant": "acme"}
    for name, extra in {
        "client's own": flat,
        "sealed": SEALED.sealed({**flat, key: 1}),
        "bare": {**flat, key: 1},
        "other seal": Seal("another").sealed({**flat, key: 1}),
        "of another": {**SEALED.sealed(flat), key: 1},
        "no more than a key": {key: 1},
        "no more than a seal": {SEAL_KEY: "x"},
    }.items():
        send(one, name, extra)
    one.run()
    refused = {
        name
        for name, outcome in one.outcomes.items()
        if str(outcome.stop_reason).startswith("slo_invalid:")
    }
    assert one.outcomes.keys() - refused == {"client's own", "sealed", "no more than a seal"}


def test_what_the_middleware_passes_on_is_believed(guarded: VirtualEngine) -> None:
    one = server()
    for number, (key, slo, _) in enumerate(ALLOWED):
        body = {"prompt": "x", "slo": slo, "n": 1 + number % 2}
        passed = one.reached(body, [COMPLETIONS, OTHER][number % 2], headers=bearer(key))
        assert SEAL_KEY in passed
        send(guarded, f"r{number}", passed)
    guarded.run()
    for number, outcome in enumerate(guarded.outcomes.values()):
        told, _ = unpack_report(outcome.stop_reason)
        assert (told is not None) == (number % 2 == 1)
    assert {outcome.finish_reason for outcome in guarded.outcomes.values()} == {"stop"}


def test_a_quote_is_for_who_may_have_it_and_sealed(guarded: VirtualEngine) -> None:
    one = server()
    forbidden = {"prompt": "x", "slo": {"class": "strict"}}
    refused(one.post("/v1/slo/quote", json=forbidden, headers=bearer(SILVER)), "class", 403)
    assert one.bodies == []
    one.post("/v1/slo/quote", json={**forbidden, "slo": {"class": "chat"}}, headers=bearer(SILVER))
    send(guarded, "quote", one.engine.calls[-1].extra)
    guarded.run()
    assert unpack_quote(guarded.outcomes["quote"].stop_reason) is not None


def test_who_offers_a_seal_over_http_is_refused() -> None:
    response = server().post(json={"vllm_xargs": {"slo_seal": "x"}}, headers=bearer(GOLD))
    refused(response, "seal", 400)


TOO_MUCH = {"slo_value": 1_000_000, "slo_ttft_ms": 1}


@pytest.mark.parametrize(
    "trick",
    [
        {"content": b'{"vllm_xargs": {"\\u0073lo_value": 1000000, "\\u0073lo_ttft_ms": 1}}'},
        {"content": json.dumps({"vllm_xargs": TOO_MUCH}).encode("utf-16")},
        {"json": {"vllm_xargs": TOO_MUCH}, "headers": {"content-type": "text/plain"}},
        {"json": {"vllm_xargs": TOO_MUCH}},
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, OTHER])
def test_nothing_slips_by_the_gate(trick: dict[str, Any], path: str) -> None:
    one = server()
    trick = {"headers": {"content-type": "application/json"}, **trick}
    assert one.post(path, **trick).status_code == 403
    assert one.engine.calls == []


def test_pooling_is_for_all_who_ask_for_nothing_else() -> None:
    one = server()
    assert one.post(POOLING, json={"input": "x"}).status_code == 200
    refused(one.post(POOLING, json={"slo": {"class": "chat"}}, headers=bearer(GOLD)), "slo")


@pytest.mark.parametrize("first", ["application/json", "text/plain"])
def test_of_two_content_types_the_first_counts_as_in_vllm(first: str) -> None:
    one = server()
    both = {first: 1, "application/json": 2, "text/plain": 3}
    headers = [*(("content-type", kind) for kind in both), ("authorization", f"Bearer {GOLD}")]
    one.post(content=b'{"slo": {"class": "strict"}}', headers=headers)
    assert ("slo_tenant" in one.engine.calls[-1].extra) == (first == "application/json")


def test_a_default_class_is_not_given_past_the_check(config_folder: Path) -> None:
    config = {**GUARDED, "default_class": "strict"}
    one = VirtualEngine(
        Scheduler, config_folder, MODEL.predict_shape_s, believed=MODEL, slo_config=config
    )
    send(one, "other route", {})
    assert not one.scheduler.parts.tracker.live
    one.run()
    assert one.outcomes["other route"].finish_reason == "stop"


def test_an_engine_that_could_not_check_the_seal_does_not_start(
    config_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SEAL_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"^access: VLLMSLO_SEAL is not set"):
        VirtualEngine(
            Scheduler,
            config_folder,
            MODEL.predict_shape_s,
            believed=MODEL,
            slo_config=GUARDED,
            options={"seal": None},  # as without the simulation
        )


# --- the documentation ---------------------------------------------------------------------------


def test_the_example_in_the_documentation_is_valid() -> None:
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in text.split("```yaml\n")[1:]]
    configs = [SLOConfig._from_yaml(block, "security.md") for block in blocks]
    (config,) = [one for one in configs if one.access is not None]
    assert config.quotas.on and config.access
    access = Access(config.access, {"NIGHTLY_KEY": "a long random key"})
    headers = [(b"authorization", b"Bearer correct horse battery staple")]
    slo = access.ruled(SLO(slo_class="chat"), headers, config.slo_classes(), own=True)
    assert slo.tenant == "acme"
    assert set(yaml.safe_load(blocks[0])["quotas"]["tenants"]) <= config.access.tenants
