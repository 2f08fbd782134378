# SPDX-License-Identifier: Apache-2.0
"""Rules give requests their classes, and the configuration gives classes their objectives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.errors import ConfigError
from vllm_slo.slo.model import SLO
from vllm_slo.traces.classes import TrafficClasses
from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.rules import Rules

CONFIG = """
classes:
  chat: {ttft_ms: 500, tpot_ms: 50}
  agent: {ttft_ms: 2000, session_e2e_ms: 60000}
  batch: {tier: best_effort}
default_class: batch
priorities: {-5: chat}
"""
ONE = TraceRequest(0.0, 100, 20)


def rules(tmp_path: Path, text: str, classes: list[str] | None = None) -> Rules:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    return Rules.load(path, classes)


def configured(tmp_path: Path, ruled: str | None = None) -> TrafficClasses:
    config, path = tmp_path / "slo.yaml", tmp_path / "rules.yaml"
    config.write_text(CONFIG)
    if ruled is not None:
        path.write_text(ruled)
    return TrafficClasses.load(config, path if ruled is not None else None)


# --- rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "meets", "fails"),
    [
        ('model: "llama*"', {"model": "llama-3"}, [{"model": "qwen"}, {}]),
        ('tenant: "acme?"', {"tenant": "acme1"}, [{"tenant": "acme"}, {"tenant": "acme12"}, {}]),
        ("recorded_class: chat", {"slo_class": "chat"}, [{"slo_class": "chatty"}, {}]),
        ('recorded_class: ""', {}, [{"slo_class": "chat"}]),
        ("prompt_tokens: 0-2000", {"prompt_tokens": 2000}, [{"prompt_tokens": 2001}]),
        ('prompt_tokens: "101-"', {"prompt_tokens": 10**9}, [{"prompt_tokens": 100}]),
        ('prompt_tokens: "-99"', {"prompt_tokens": 0}, [{"prompt_tokens": 100}]),
        ("output_tokens: 7", {"output_tokens": 7}, [{"output_tokens": 6}, {"output_tokens": 8}]),
        (
            'tenant: "*", output_tokens: " 5 - 9 "',
            {"tenant": "x", "output_tokens": 9},
            [{"tenant": "x", "output_tokens": 10}],
        ),
    ],
)
def test_a_rule_needs_all_its_conditions(
    tmp_path: Path, condition: str, meets: dict[str, object], fails: list[dict[str, object]]
) -> None:
    found = rules(tmp_path, f"rules: [{{class: a, {condition}}}]")
    base = {"at_s": 0.0, "prompt_tokens": 100, "output_tokens": 20}
    assert found.class_of(TraceRequest(**{**base, **meets}), 0) == "a"  # type: ignore[arg-type]
    for other in fails:
        assert found.class_of(TraceRequest(**{**base, **other}), 0) is None  # type: ignore[arg-type]


def test_the_first_rule_counts_and_then_the_default(tmp_path: Path) -> None:
    text = 'rules: [{class: a, tenant: "x*"}, {class: b, tenant: "xy*"}]\ndefault: c\n'
    found = rules(tmp_path, text)
    assert found.class_of(TraceRequest(0, 1, 1, tenant="xyz"), 0) == "a"
    assert found.class_of(TraceRequest(0, 1, 1, tenant="z"), 0) == "c"


@given(st.floats(0.02, 0.98), st.floats(0.02, 0.98), st.integers(0, 99))
def test_shares_hold_in_any_order_of_reading(
    tmp_path_factory: pytest.TempPathFactory, first: float, second: float, seed: int
) -> None:
    text = f"rules: [{{class: a, share: {first}}}, {{class: b, share: {second}}}]"
    found = rules(tmp_path_factory.mktemp("rules"), text)
    count = 2000
    places = list(range(count))
    classes = {i: found.class_of(ONE, i) for i in places}
    random.Random(seed).shuffle(places)
    assert {i: found.class_of(ONE, i) for i in places} == classes
    for name, share in (("a", first), ("b", (1 - first) * second)):
        counted = sum(1 for c in classes.values() if c == name)
        deviation = (count * share * (1 - share)) ** 0.5
        assert abs(counted - count * share) < 6 * deviation + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": a file of rules begins with the key rules"),
        ("- a\n", ": a file of rules begins with the key rules"),
        ("rules: []\n", ":1: rules: List should have at least 1 item"),
        ("rules: [\n", ":2: broken YAML"),
        ("rules:\n  - {model: x}\n", ":2: rules.0.class: Field required"),
        (
            "rules:\n  - class: a\n    tenent: x\n",
            ":3: rules.0.tenent: unknown key; did you mean 't",
        ),
        ("rule: [{class: a}]\n", "rules: Field required"),
        ("rules: [{class: a}]\ndefaults: b\n", ":2: defaults: unknown key; did you mean 'default'"),
        (
            "rules:\n  - class: a\n    prompt_tokens: many\n",
            ":3: rules.0.prompt_tokens: 'many' is no",
        ),
        ("rules: [{class: a, output_tokens: 9-5}]\n", "'9-5' ends before it begins"),
        ("rules: [{class: a, output_tokens: '-'}]\n", "'-' is no range of tokens"),
        ("rules: [{class: a, output_tokens: true}]\n", "is no range of tokens"),
        ("rules: [{class: a, share: 0}]\n", "rules.0.share: Input should be greater than 0"),
        ("rules: [{class: a, share: 1.5}]\n", "rules.0.share: Input should be less than or equal"),
        ("rules: [{class: a b}]\n", "'a b' is no name of a class"),
        ("rules: [{class: a, class: b}]\n", "duplicate key"),
    ],
)
def test_a_mistake_in_the_rules_is_told_with_its_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(TraceError) as caught:
        rules(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "rules.yaml"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_name_configured_classes(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"rules.yaml:2: class 'caht' is not configured; did you"):
        configured(tmp_path, "rules:\n  - class: caht\n")
    with pytest.raises(TraceError, match=r"rules.yaml:2: class 'other' is not configured; known"):
        configured(tmp_path, "rules: [{class: chat}]\ndefault: other\n")
    (tmp_path / "rules.yaml").write_text("rules: [{class: anything}]\n")
    free = TrafficClasses.load(None, tmp_path / "rules.yaml")
    assert (free.class_of(ONE, 0), free.slo_of(ONE, 0)) == ("anything", None)
    with pytest.raises(TraceError, match="cannot read no/such: No such file"):
        TrafficClasses.load(None, Path("no/such"))
    with pytest.raises(ConfigError, match="cannot read"):
        TrafficClasses.load(Path("no/such"), None)


# --- classes -------------------------------------------------------------------------------------


def test_without_a_configuration_the_record_counts() -> None:
    plain = TrafficClasses.load(None, None)
    assert (plain.class_of(ONE, 0), plain.slo_of(ONE, 0)) == ("", None)
    named = TraceRequest(0.0, 1, 1, "gold", tenant="acme", ttft_ms=300.0, tpot_ms=20.0)
    assert plain.class_of(named, 0) == "gold"
    assert plain.slo_of(named, 0) == SLO(300.0, 20.0, slo_class="gold", tenant="acme")
    odd = TraceRequest(0.0, 1, 1, "two words", e2e_ms=900.0)
    slo = plain.slo_of(odd, 0)
    assert slo is not None and (slo.e2e_ms, len(slo.slo_class or "")) == (900.0, 32)


def test_a_configured_class_replaces_what_was_recorded(tmp_path: Path) -> None:
    classes = configured(tmp_path)
    chat = TraceRequest(0.0, 1, 1, "chat", ttft_ms=9.0, tpot_ms=9.0)
    assert classes.slo_of(chat, 0) == SLO(500.0, 50.0, slo_class="chat")
    assert classes.class_of(TraceRequest(0.0, 1, 1, priority=-5), 0) == "chat"
    assert classes.class_of(TraceRequest(0.0, 1, 1, "agent", priority=-5), 0) == "agent"
    assert classes.class_of(ONE, 0) == "batch"
    assert classes.slo_of(ONE, 0) == SLO(tier="best_effort", slo_class="batch")
    own = TraceRequest(0.0, 1, 1, "gold", ttft_ms=300.0)
    assert classes.class_of(own, 0) == "gold"
    assert classes.slo_of(own, 0) == SLO(300.0, slo_class="gold")
    unknown = TraceRequest(0.0, 1, 1, "gold")
    assert (classes.class_of(unknown, 0), classes.slo_of(unknown, 0)) == ("gold", None)


def test_rules_come_before_the_record(tmp_path: Path) -> None:
    classes = configured(tmp_path, "rules: [{class: batch, recorded_class: chat}]\n")
    assert classes.class_of(TraceRequest(0.0, 1, 1, "chat"), 0) == "batch"
    assert classes.class_of(TraceRequest(0.0, 1, 1, "agent"), 0) == "agent"


def test_sessions_and_tenants_stay(tmp_path: Path) -> None:
    classes = configured(tmp_path)
    alone = classes.slo_of(TraceRequest(0.0, 1, 1, "agent"), 0)
    assert alone is not None and (alone.session_id, alone.session_e2e_ms) == (None, None)
    joined = classes.slo_of(TraceRequest(0.0, 1, 1, "agent", "acme", session="s1"), 0)
    assert joined == SLO(
        2000.0, tenant="acme", session_id="s1", session_e2e_ms=60_000, slo_class="agent"
    )


def test_recorded_objectives_out_of_range(tmp_path: Path) -> None:
    far = TraceRequest(0.0, 1, 1, "gold", ttft_ms=1e-9)
    with pytest.raises(TraceError, match="request 3 of the trace: ttft_ms: 1e-09 is out of range"):
        configured(tmp_path).slo_of(far, 3)
