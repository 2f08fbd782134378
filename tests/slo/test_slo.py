# SPDX-License-Identifier: Apache-2.0
"""The SLO of a request: ranges, carriers, precedence, and a fuzz of the validator."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from depth import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm_slo.errors import InvalidSLOError, VllmSLOError
from vllm_slo.slo.carriers import resolve_slo
from vllm_slo.slo.claims import HEADER_FIELDS
from vllm_slo.slo.keys import INTERNAL_KEYS, has_slo_key
from vllm_slo.slo.model import SLO

CLASSES = {
    "chat": SLO(ttft_ms=500, tpot_ms=50, value=2, slo_class="chat"),
    "strict": SLO(ttft_ms=100, on_unattainable="decline", slo_class="strict"),
    "batch": SLO(tier="best_effort", slo_class="batch"),
}
TIERS: dict[str, str | None] = {"priority": "chat"}
FIELDS = {
    "ttft_ms",
    "tpot_ms",
    "value",
    "tier",
    "on_unattainable",
    "expected_output_tokens",
    "tenant",
    "class",
}

names = st.from_regex(r"[A-Za-z0-9_.:@/-]{1,64}", fullmatch=True)
slos = st.builds(
    SLO,
    ttft_ms=st.floats(0.001, 86_400_000),
    tpot_ms=st.none() | st.floats(0.001, 3_600_000),
    value=st.floats(0.001, 1e6),
    tier=st.sampled_from([None, "guaranteed", "best_effort"]),
    on_unattainable=st.sampled_from(["best_effort", "decline"]),
    expected_output_tokens=st.none() | st.integers(1, 10_000_000),
    tenant=st.none() | names,
    slo_class=st.none() | names,
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**400)
    | st.floats()
    | st.text(max_size=200)
    | st.sampled_from(["guaranteed", "decline", "chat", "500", "nan", 500, 50])
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
body_keys = st.sampled_from(sorted(FIELDS)) | st.text(max_size=12)
xarg_keys = st.sampled_from(
    [*(f"slo_{key}" for key in sorted(FIELDS)), "prefill_ddl", "slo_tpot", "temperature"]
) | st.text(max_size=12).map(lambda text: "slo_" + text)


def resolve(**carriers: Any) -> SLO | None:
    return resolve_slo(classes=CLASSES, service_tiers=TIERS, arrival_s=1000.0, **carriers)


def refused(**carriers: Any) -> InvalidSLOError:
    with pytest.raises(InvalidSLOError) as caught:
        resolve(**carriers)
    return caught.value


def test_defaults_ask_for_nothing() -> None:
    assert SLO().effective_tier == "best_effort"
    assert SLO().to_extra_args() == {}
    assert resolve() is None
    assert (
        resolve(body_slo={}, xargs={"top": 1}, headers={"accept": "x"}, service_tier="auto") is None
    )
    assert SLO.from_extra_args(None) is None
    assert SLO.from_extra_args({"kv_transfer_params": {}}) is None


def test_an_objective_asks_for_a_guarantee() -> None:
    assert SLO(ttft_ms=1).effective_tier == "guaranteed"
    assert SLO(tpot_ms=1).effective_tier == "guaranteed"
    assert SLO(tpot_ms=1, tier="best_effort").effective_tier == "best_effort"


def test_frozen_and_numbers_are_normalised() -> None:
    numbers: dict[str, Any] = {
        "ttft_ms": np.float32(500),
        "tpot_ms": Fraction(1, 2),
        "expected_output_tokens": np.int64(3),
    }
    slo = SLO(**numbers)
    assert (slo.ttft_ms, slo.tpot_ms) == (500.0, 0.5)
    assert type(slo.ttft_ms) is float
    assert type(slo.expected_output_tokens) is int
    with pytest.raises(FrozenInstanceError):
        slo.ttft_ms = 1.0  # type: ignore[misc]  # the point of the test


BAD_NUMBERS: list[Any] = [
    *(0, -1, -0.0, math.nan, math.inf, -math.inf, True, "500", [1], {}, 10**400, 1e12, 1j),
    *(1e-322, 9e-7),
]
BAD_NAMES: list[Any] = ["", "a b", "x" * 65, "\u00e9", 5, [], "a\n"]
BAD: dict[str, list[Any]] = {
    "ttft_ms": BAD_NUMBERS,
    "tpot_ms": BAD_NUMBERS,
    "value": BAD_NUMBERS,
    "expected_output_tokens": [0, -1, 1.0, "3", True, 10_000_001, math.nan],
    "tier": ["", "gold", 1, [], "Guaranteed"],
    "on_unattainable": ["", "shed", 0, None],
    "tenant": BAD_NAMES,
    "slo_class": BAD_NAMES,
}


@pytest.mark.parametrize(("field", "bad"), [(name, bad) for name in BAD for bad in BAD[name]])
def test_bad_fields(field: str, bad: Any) -> None:
    with pytest.raises(InvalidSLOError) as caught:
        SLO(**{field: bad})
    assert caught.value.field == ("class" if field == "slo_class" else field)
    check_message(caught.value)


@pytest.mark.parametrize("field", ["ttft_ms", "tpot_ms", "value", "expected_output_tokens"])
def test_limits_are_inclusive_above(field: str) -> None:
    limits: dict[str, Any] = {"ttft_ms": 86_400_000, "tpot_ms": 3_600_000, "value": 1e6}
    high = limits.get(field, 10_000_000)
    assert getattr(SLO(**{field: high}), field) == high
    with pytest.raises(InvalidSLOError):
        SLO(**{field: high + 1})


def test_the_shortest_time_is_a_microsecond() -> None:
    """Time is divided by objectives: the engine must never find one that is 0 in seconds."""
    for field in ("ttft_ms", "tpot_ms", "thinking_tpot_ms"):
        least: dict[str, Any] = {field: 0.001}
        assert getattr(SLO(**least), field) == 0.001
        less: dict[str, Any] = {field: 0.000999}
        with pytest.raises(InvalidSLOError, match=r"give milliseconds from 0\.001 to "):
            SLO(**less)
    assert resolve(xargs={"slo_tpot": 1e-6}) == SLO(tpot_ms=0.001)


def test_guaranteed_needs_something_to_guarantee() -> None:
    with pytest.raises(InvalidSLOError, match="no objective"):
        SLO(tier="guaranteed")
    assert refused(body_slo={"class": "batch", "tier": "guaranteed"}).field == "tier"
    chat = resolve(body_slo={"class": "chat", "tier": "guaranteed"})
    assert chat is not None
    assert chat.ttft_ms == 500


def check_message(error: InvalidSLOError) -> None:
    text = str(error)
    assert text.startswith(f"{error.field}: ")
    assert error.problem
    assert error.fix
    assert error.fix in text
    assert "\n" not in text
    assert len(text) < 600
    text.encode()  # printable: no lone surrogates reach a response


def test_one_text_per_mistake_whichever_carrier() -> None:
    with pytest.raises(InvalidSLOError) as caught:
        SLO(ttft_ms=-1)
    texts = {
        str(caught.value),
        str(refused(body_slo={"ttft_ms": -1})),
        str(refused(xargs={"slo_ttft_ms": -1.0})),
    }
    assert len(texts) == 1
    assert str(refused(body_slo={"tier": "x"})) == str(refused(headers={"x-slo-tier": "x"}))
    assert str(refused(body_slo={"clas": "x"})) == str(refused(xargs={"slo_clas": "x"}))
    assert str(refused(body_slo={"class": "x"})) == str(refused(headers={"x-slo-class": "x"}))


def test_unknown_key_names_the_nearest() -> None:
    assert "did you mean ttft_ms?" in str(refused(body_slo={"ttft": 5}))
    assert "did you mean tpot_ms?" in str(refused(xargs={"slo_tpotms": 5}))
    assert refused(body_slo={"slo_class": "chat"}).field == "slo_class"
    assert "known: ttft_ms" in str(refused(body_slo={3: 5}))


@pytest.mark.parametrize("carrier", ["body_slo", "xargs"])
@pytest.mark.parametrize("shape", [[], "chat", 5, True])
def test_carriers_must_be_objects(carrier: str, shape: object) -> None:
    check_message(refused(**{carrier: shape}))


def test_header_numbers() -> None:
    for text, value in [("500", 500.0), (" 5e2 ", 500.0), ("+.5", 0.5), ("7.", 7.0)]:
        assert resolve(headers={"X-SLO-TTFT-ms": text}) == SLO(ttft_ms=value)
    for text in ["abc", "nan", "inf", "1_000", "0x10", "5ms", "\u0665", "1e9999", "1, 2", "-", "."]:
        check_message(refused(headers={"x-llm-d-slo-tpot-ms": text}))
    assert resolve(headers={"x-slo-class": "batch"}) == CLASSES["batch"]
    assert resolve(headers={"x-slo-tier": "best_effort"}) == SLO(tier="best_effort")
    assert resolve(headers={"x-slo-unknown": "?"}) is None


@pytest.mark.parametrize(
    ("text", "ttft_ms", "tpot_ms"),
    [
        *((text, 0.001, 0.001) for text in ("0", "-0", "-1", "-5e9", "0.0001", "1e-300")),
        *((text, 86_400_000.0, 3_600_000.0) for text in ("86400001", "1e999", "9" * 32)),
        ("3600001", 3_600_001.0, 3_600_000.0),
    ],
)
def test_times_in_headers_are_clamped(text: str, ttft_ms: float, tpot_ms: float) -> None:
    """A deadline that has passed stays one, and what is far off does not become the first."""
    for maker in ("x-slo", "x-llm-d-slo"):
        headers = {f"{maker}-ttft-ms": text, f"{maker}-tpot-ms": text}
        assert resolve(headers=headers) == SLO(ttft_ms=ttft_ms, tpot_ms=tpot_ms)


def test_of_two_headers_for_one_time_llm_ds_wins() -> None:
    said = {"x-slo-ttft-ms": "5", "x-llm-d-slo-ttft-ms": "6"}
    assert resolve(headers=said) == SLO(ttft_ms=6)
    assert resolve(headers={**said, "x-slo-ttft-ms": "soon"}) == SLO(ttft_ms=6)
    assert resolve(headers={**said, "x-llm-d-slo-ttft-ms": "  "}) == SLO(ttft_ms=5)
    # An empty header says nothing, whatever it is.
    assert resolve(headers=dict.fromkeys(HEADER_FIELDS, "")) is None
    assert refused(headers={**said, "x-llm-d-slo-ttft-ms": "soon"}).field == "ttft_ms"


def test_explicit_carriers_are_united() -> None:
    assert resolve(
        body_slo={"ttft_ms": 500, "tenant": None},
        xargs={"slo_tpot_ms": 50, "slo_ttft_ms": 500.0, "seed": 1},
        headers={"x-slo-tpot-ms": "50", "x-llm-d-slo-ttft-ms": "500"},
    ) == SLO(ttft_ms=500, tpot_ms=50)


@pytest.mark.parametrize(
    ("carriers", "named"),
    [
        (
            {"body_slo": {"ttft_ms": 500}, "headers": {"x-slo-ttft-ms": "400"}},
            ("body slo.ttft_ms", "header x-slo-ttft-ms"),
        ),
        (
            {"xargs": {"slo_class": "chat"}, "headers": {"x-slo-class": "batch"}},
            ("vllm_xargs slo_class", "header x-slo-class"),
        ),
        (
            {"xargs": {"slo_tpot_ms": 5}, "headers": {"x-llm-d-slo-tpot-ms": "6"}},
            ("vllm_xargs slo_tpot_ms", "header x-llm-d-slo-tpot-ms"),
        ),
        (
            {"xargs": {"slo_tpot": 0.05, "slo_tpot_ms": 60}},
            ("vllm_xargs slo_tpot", "vllm_xargs slo_tpot_ms"),
        ),
    ],
)
def test_contradictions_name_both_carriers(
    carriers: dict[str, Any], named: tuple[str, str]
) -> None:
    text = str(refused(**carriers))
    assert all(name in text for name in named)
    assert "send one value" in text


def test_explicit_beats_class_beats_service_tier() -> None:
    assert resolve(body_slo={"class": "chat"}) == CLASSES["chat"]
    assert resolve(body_slo={"class": "chat", "value": 1, "tpot_ms": 9}) == SLO(
        ttft_ms=500, tpot_ms=9, value=1, slo_class="chat"
    )
    assert resolve(service_tier="priority") == CLASSES["chat"]
    assert resolve(service_tier="priority", body_slo={"class": "batch"}) == CLASSES["batch"]
    assert resolve(service_tier="priority", body_slo={"tpot_ms": 9}) == SLO(
        ttft_ms=500, tpot_ms=9, value=2, slo_class="chat"
    )
    assert resolve(service_tier="flex") == SLO(tier="best_effort")
    assert resolve(service_tier="flex", body_slo={"ttft_ms": 5, "tier": "guaranteed"}) == SLO(
        ttft_ms=5, tier="guaranteed"
    )
    assert resolve(service_tier="flex", body_slo={"ttft_ms": 5}) == SLO(
        ttft_ms=5, tier="best_effort"
    )


def test_service_tier_values() -> None:
    tiers: list[Any] = ["auto", "default", "scale", None, "gold", "", 5, ["flex"], {}, True, 1e400]
    for tier in tiers:
        assert resolve(service_tier=tier) is None
    unmapped = resolve_slo(service_tier="priority", classes={}, service_tiers={})
    assert unmapped is None
    own = resolve_slo(service_tier="gold", classes=CLASSES, service_tiers={"gold": "chat"})
    assert own == CLASSES["chat"]


@pytest.mark.parametrize(
    ("hints", "carriers", "expected"),
    [
        ({"tenant": "a", "expected_output_tokens": 9}, {}, None),
        ({"session_id": "j"}, {}, None),
        ({"slo_class": "chat"}, {}, CLASSES["chat"]),
        ({"slo_class": "chat", "tenant": "a"}, {"body_slo": {"tpot_ms": 9}},
         SLO(ttft_ms=500, tpot_ms=9, value=2, tenant="a", slo_class="chat")),
        ({"tenant": "a"}, {"body_slo": {"tpot_ms": 9, "tenant": "b"}},
         SLO(tpot_ms=9, tenant="b")),
        ({"slo_class": "chat"}, {"body_slo": {"class": "batch"}}, CLASSES["batch"]),
        ({"slo_class": "batch"}, {"service_tier": "priority"}, CLASSES["chat"]),
        ({"slo_class": "chat"}, {"service_tier": "flex"},
         SLO(ttft_ms=500, tpot_ms=50, value=2, tier="best_effort", slo_class="chat")),
        ({"ttft_ms": 5.0, "on_unattainable": "decline"}, {},
         SLO(ttft_ms=5, on_unattainable="decline")),
        ({"ttft_ms": 5.0, "on_unattainable": "decline"}, {"xargs": {"slo_ttft_ms": 6}},
         SLO(ttft_ms=6, on_unattainable="decline")),
        ({"tenant": "a"}, {"service_tier": "priority"},
         SLO(ttft_ms=500, tpot_ms=50, value=2, tenant="a", slo_class="chat")),
    ],
)  # fmt: skip
def test_hints_fill_what_nobody_has_said(
    hints: dict[str, object], carriers: dict[str, Any], expected: SLO | None
) -> None:
    assert resolve(hints=hints, **carriers) == expected


def test_unknown_class() -> None:
    error = refused(body_slo={"class": "nope"})
    assert error.field == "class"
    assert "batch, chat, strict" in str(error)
    with pytest.raises(InvalidSLOError, match="none"):
        resolve_slo(body_slo={"class": "chat"}, classes={}, service_tiers={})


def test_slos_serve_keys() -> None:
    assert resolve(xargs={"prefill_ddl": 1000.5, "slo_tpot": 0.05}) == SLO(ttft_ms=500, tpot_ms=50)
    assert resolve(xargs={"prefill_ddl": 3}) == SLO(ttft_ms=0.001)
    deadlines: list[Any] = ["5", True, math.nan, math.inf, 1_000_000, 10**400, []]
    for bad in deadlines:
        assert refused(xargs={"prefill_ddl": bad}).field == "prefill_ddl"
    assert refused(xargs={"prefill_ddl": 0.5 - 86_400.0}).field == "prefill_ddl"
    seconds: list[Any] = [0, -1, "5", math.nan, 3601, 1e-322]
    for bad in seconds:
        assert refused(xargs={"slo_tpot": bad}).field == "slo_tpot"
    with pytest.raises(InvalidSLOError, match="arrival"):
        SLO.from_extra_args({"prefill_ddl": 5})
    assert has_slo_key({"prefill_ddl": 5})
    assert has_slo_key({"slo_x": 1})
    assert not has_slo_key({"other": 1})
    assert not has_slo_key(None)


@given(slos)
def test_round_trip(slo: SLO) -> None:
    flat = slo.to_extra_args()
    assert all(isinstance(value, str | int | float) for value in flat.values())
    assert SLO.from_extra_args(flat) == slo
    assert pickle.loads(pickle.dumps(slo)) == slo


@given(slos, st.sampled_from([None, *sorted(CLASSES)]))
def test_resolved_round_trip_keeps_what_the_client_said(slo: SLO, name: str | None) -> None:
    flat = {**slo.to_extra_args(), "slo_value": slo.value}
    flat.pop("slo_class", None)
    if name is not None:
        flat["slo_class"] = name
    resolved = SLO.from_extra_args(flat, classes=CLASSES)
    assert resolved is not None
    assert resolved.value == slo.value
    assert SLO.from_extra_args(resolved.to_extra_args(resolved=True), classes=CLASSES) == resolved


@pytest.mark.slow
@given(
    st.none() | json_values | st.dictionaries(body_keys, json_values, max_size=5),
    st.none() | json_values | st.dictionaries(xarg_keys, json_values, max_size=5),
    st.dictionaries(st.sampled_from(sorted(HEADER_FIELDS)), st.text(max_size=100), max_size=3),
    st.none() | json_values | st.sampled_from(["auto", "flex", "priority"]),
)
@settings(max_examples=examples(1000))
def test_fuzz_only_invalid_slo_error_comes_out(
    body: Any, xargs: Any, headers: dict[str, str], tier: Any
) -> None:
    try:
        slo = resolve(body_slo=body, xargs=xargs, headers=headers, service_tier=tier)
    except InvalidSLOError as error:
        check_message(error)
    else:
        assume(slo is not None)
        assert slo is not None
        assert SLO.from_extra_args(slo.to_extra_args(resolved=True), classes=CLASSES) == slo


def test_errors_pickle_and_echo_little() -> None:
    error = refused(body_slo={"tenant": "y" * 10_000})
    assert len(error.problem) < 120
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.field, copy.fix) == (str(error), error.field, error.fix)
    assert isinstance(error, ValueError)
    assert isinstance(error, VllmSLOError)


def test_import_is_light() -> None:
    code = (
        "import sys, vllm_slo.slo.model, vllm_slo.config.model;"
        "print([m for m in ('torch', 'vllm', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("key", INTERNAL_KEYS)
def test_the_marks_of_the_server_are_not_the_clients(key: str) -> None:
    assert SLO.from_extra_args({key: 1}) is None
    assert SLO.from_extra_args({key: 1, "slo_ttft_ms": 5}) == SLO(ttft_ms=5)
    assert has_slo_key({key: 1})
    with pytest.raises(InvalidSLOError, match=rf"^{key[4:]}: is not a field"):
        resolve_slo(xargs={key: 1}, classes={}, service_tiers={})
