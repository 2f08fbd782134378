# SPDX-License-Identifier: Apache-2.0
"""What is read of a body without building it is what vLLM reads; and what headers say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from depth import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_slo.config.model import SLOConfig
from vllm_slo.slo.body import peek, prompts_in, read_body
from vllm_slo.slo.carriers import carriers_of, slo_headers
from vllm_slo.slo.hints import fields_of_hints, hints_of
from vllm_slo.slo.keys import slo_keys_of

CARRIERS = ("slo", "vllm_xargs", "service_tier", "nvext", "priority", "session_id")
PROMPTS = ("prompt", "prompt_embeds", "messages")
FIELDS = (*CARRIERS, *PROMPTS, "background", "use_beam_search")
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")

# --- any JSON text -------------------------------------------------------------------------------

spaces = st.sampled_from(["", "", "", " ", "\n\t", "\r\n  "])


def quoted(text: str, escaped: list[bool]) -> str:
    """A JSON string in which some characters are written as escapes, though nobody needs to."""
    marks = [*escaped, *[False] * len(text)]
    written = []
    for char, escape in zip(text, marks, strict=False):
        units = char.encode("utf-16-be", "surrogatepass")
        pairs = [units[i : i + 2].hex() for i in range(0, len(units), 2)]
        plain = json.dumps(char, ensure_ascii=False)[1:-1]
        written.append("".join(f"\\u{pair}" for pair in pairs) if escape else plain)
    return '"' + "".join(written) + '"'


characters = st.characters() | st.characters(categories=["Cs"])
strings = st.builds(
    quoted,
    st.text(characters, max_size=12)
    | st.sampled_from([*FIELDS, "ttft_ms", "slo_ttft_ms", "\ud83d\ude00", "\ude00\ud83d"]),
    st.lists(st.booleans(), max_size=12),
)
numbers = (
    st.integers(-(10**30), 10**30).map(str)
    | st.floats(allow_nan=False, allow_infinity=False).map(repr)
    | st.integers(1, 4200).map(lambda digits: "9" * digits)
    | st.from_regex(r"-?(0|[1-9][0-9]{0,24})(\.[0-9]{1,24})?([eE][+-]?[0-9]{1,4})?", fullmatch=True)
    | st.sampled_from(
        ["NaN", "Infinity", "-Infinity", "-0", "-0.0", "1e999", "-1E-999", "01", "+1"]
    )
)
scalars = st.sampled_from(["null", "true", "false", "nul"]) | strings | numbers


def listed(items: list[str], space: str) -> str:
    return f"[{space}{f'{space},{space}'.join(items)}{space}]"


def paired(pairs: list[tuple[str, str]], space: str) -> str:
    inner = f"{space},{space}".join(f"{key}{space}:{space}{value}" for key, value in pairs)
    return f"{{{space}{inner}{space}}}"


values = st.recursive(
    scalars,
    lambda inner: (
        st.builds(listed, st.lists(inner, max_size=4), spaces)
        | st.builds(paired, st.lists(st.tuples(strings, inner), max_size=4), spaces)
    ),
    max_leaves=8,
)
names = st.builds(quoted, st.sampled_from(FIELDS), st.lists(st.booleans(), max_size=15))
objects = st.builds(paired, st.lists(st.tuples(names | strings, values), max_size=6), spaces)
texts = objects | objects | values | st.text(max_size=20)
bodies = st.builds(
    lambda text, code: text.encode(code, "surrogatepass"), texts, st.sampled_from(ENCODINGS)
)
cut = st.builds(
    lambda body, place, other: body[:place] + other + body[place + len(other) :],
    bodies,
    st.integers(0, 60),
    st.binary(max_size=3),
)


def is_utf8(body: bytes) -> bool:
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def built(fields: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Peeked fields with nothing left raw."""
    if fields is None:
        return None
    raw = {name: bytes(one) for name, one in fields.items() if isinstance(one, msgspec.Raw)}
    return {**fields, **{name: json.loads(text) for name, text in raw.items()}}


def in_order(fields: Mapping[str, Any] | None) -> str:
    """What compares: 1 and 1.0 are two things here, and NaN is NaN."""
    return repr(fields and {name: fields[name] for name in FIELDS if name in fields})


@pytest.mark.slow
@given(bodies | cut)
@settings(max_examples=examples(1500))
@example(b'{"prompt": ["\xed\xa0\x80", 1e999], "slo": {"ttft_ms": 1e999}}')
@example(b'{"slo": 1, "slo": {"a": 1, "a": 2}, "sl\\u006f": {"ttft_ms": 5}}')
@example(b'{"prompt": "a\nb"}')
@example(b'{"prompt": "\\ud800\\udc00 \\ud800", "slo": "\\udc00"}')
@example(b'{"slo": 123456789012345678901234567890, "priority": -0}')
@example(b"{}")
@example(b"[]")
@example(b"")
@example(b'{"slo": 1}\x00')
def test_what_is_peeked_is_what_json_loads_gives(body: bytes) -> None:
    peeked, read = peek(body), read_body(body)
    if read is None and not is_utf8(body):
        return  # in what is skipped such bytes may pass; vLLM refuses them
    assert in_order(built(peeked)) == in_order(read)


@pytest.mark.slow
@given(bodies | cut)
@settings(max_examples=examples(1000))
@example(b'{"prompt": [1e999]}')
@example(b'{"messages": [{"x": 1e999}]}')
@example(b'{"prompt": ["\xff", "b"]}')
@example(b'{"prompt": [\n"a" , "b"], "prompt_embeds": "c"}')
@example(b'{"prompt": [[1], [2]], "messages": [[{}], [{}], [{}]]}')
def test_prompts_are_counted_as_vllm_would(body: bytes) -> None:
    peeked, read = peek(body), read_body(body)
    if peeked is None:
        return
    counted = prompts_in(peeked)
    assert counted >= 1
    if read is None:
        assert not is_utf8(body)
        return
    lists = (read.get(name) for name in PROMPTS)
    several = [one for one in lists if isinstance(one, list) and one]
    assert counted == max(sum(len(one) for one in several if isinstance(one[0], str | list)), 1)


# --- every carrier -------------------------------------------------------------------------------


@given(
    st.sampled_from(FIELDS),
    st.lists(st.booleans(), min_size=15, max_size=15),
    st.sampled_from(ENCODINGS),
    st.sampled_from(['"before": [{}, "x"], ', '"slo": 0, "slo": 0, ', ""]),
)
def test_a_key_is_read_however_it_is_written(
    name: str, escaped: list[bool], encoding: str, before: str
) -> None:
    body = f"{{{before}{quoted(name, escaped)}: [5]}}".encode(encoding)
    fields = built(peek(body))
    assert fields is not None and fields[name] == [5]


POLICY = SLOConfig.from_additional_config(
    {
        "slo_config": {
            "classes": {"chat": {"ttft_ms": 500}},
            "priorities": {"7": "chat"},
            "sessions": {"read_session_id": True},
        }
    }
).http_policy()
SAYING: dict[str, str] = {
    "slo": '{"ttft_ms": 500}',
    "vllm_xargs": '{"slo_ttft_ms": 500}',
    "service_tier": '"flex"',
    "nvext": '{"agent_hints": {"priority": 7}}',
    "priority": "7",
}


@given(
    st.sampled_from(sorted(SAYING)),
    st.lists(st.booleans(), max_size=12),
    st.sampled_from(ENCODINGS),
)
def test_every_carrier_says_the_same_with_escapes(
    name: str, escaped: list[bool], encoding: str
) -> None:
    body = f"{{{quoted(name, escaped)}: {SAYING[name]}}}".encode(encoding)
    carriers = carriers_of(peek(body) or {}, {})
    assert not carriers.empty
    assert carriers.explicit == (name in ("slo", "vllm_xargs"))
    slo = carriers.resolve(POLICY, 0.0)
    assert slo is not None
    assert slo.tier == "best_effort" if name == "service_tier" else slo.ttft_ms == 500


def test_the_keys_of_an_slo_are_told_from_others() -> None:
    assert slo_keys_of(None) == slo_keys_of({"a": 1, 5: 6, "slo": 3}) == {}
    assert slo_keys_of({"slo_x": 1, "prefill_ddl": 2, "a": 3}) == {"slo_x": 1, "prefill_ddl": 2}


# --- headers -------------------------------------------------------------------------------------


def test_only_carriers_are_kept_and_empty_ones_are_absent() -> None:
    raw = [
        (b"X-SLO-TTFT-MS", b" 5 "),
        (b"x-slo-tpot-ms", b"  "),
        (b"authorization", b"Bearer x"),
        (b"x-session-id", b"\xff"),
        (b"x-slo-class", b"a"),
        (b"x-slo-class", b"b"),
    ]
    expected = {"x-slo-ttft-ms": "5", "x-session-id": "\xff", "x-slo-class": "a, b"}
    assert slo_headers(raw) == expected


@pytest.mark.parametrize(
    ("text", "ttft_ms"),
    [
        ("1500ms", 1500.0),
        ("1m30s", 90_000.0),
        ("1.5h", 5_400_000.0),
        ("2h45m30.5s", 9_930_500.0),
        ("1ns", 0.001),
        ("0.5us", 0.001),
        ("1us", 0.001),
        ("1\xb5s", 0.001),
        ("250.s", 250_000.0),
        ("999999h", 86_400_000.0),
        ("0s", None),
        ("0", None),
        ("5", None),
        ("-5s", None),
        ("5 s", None),
        ("5d", None),
        ("s", None),
        (".5s", None),
        ("1e3s", None),
        ("1" * 13 + "s", None),
    ],
)
def test_durations_as_go_writes_them(text: str, ttft_ms: float | None) -> None:
    hints = hints_of({}, {"x-llm-d-inference-ttl": text})
    hinted = fields_of_hints(hints, classes=(), priorities={}, reads_session_id=False)
    assert hinted == ({} if ttft_ms is None else {"ttft_ms": ttft_ms, "on_unattainable": "decline"})


@given(st.text(st.sampled_from("0123456789.numshµ "), max_size=14) | st.text(max_size=8))
def test_any_duration_is_valid_or_says_nothing(text: str) -> None:
    carriers = carriers_of({}, {"x-llm-d-inference-ttl": text})
    slo = carriers.resolve(POLICY, 0.0)
    assert slo is None or 0.001 <= (slo.ttft_ms or 0) <= 86_400_000
