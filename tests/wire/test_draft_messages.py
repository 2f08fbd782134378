# SPDX-License-Identifier: Apache-2.0
"""The wire format of draft servers: what is sent is what comes, and nothing else gets through."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.wire import draft_messages
from vllm_slo.wire.draft_messages import (
    MAX_ANSWER_BYTES,
    MAX_ASKED_TOKENS,
    MAX_DRAFT_BYTES,
    MAX_GRANT,
    MAX_NAME,
    MAX_SESSIONS,
    NAME_PATTERN,
    WIRE,
    Answer,
    Ask,
    Draft,
    Drafted,
    Hello,
    Ping,
    Pong,
    Refused,
    Welcome,
    WireError,
    WireVersionError,
    encode,
    from_drafter,
    from_verifier,
    vocabulary_digest,
)

pack = msgspec.msgpack.encode

counts = st.integers(0, 2**63 - 1)
token_ids = st.integers(0, 2**31 - 1)
probabilities = st.floats(0.0, 1.0)
hellos = st.builds(
    Hello,
    wire=st.just(WIRE),
    name=st.from_regex(re.compile(NAME_PATTERN), fullmatch=True).filter(
        lambda name: len(name) <= MAX_NAME
    ),
    model=st.text(max_size=40),
    vocab_size=st.integers(1, 2**31 - 1),
    vocabulary=st.text(max_size=40),
    max_model_len=st.integers(1, 2**31 - 1),
    max_sessions=st.integers(1, MAX_SESSIONS),
)
answers = st.builds(
    Answer,
    session=counts,
    at=counts,
    tokens=st.lists(token_ids, max_size=MAX_GRANT),
    probabilities=st.lists(probabilities, max_size=MAX_GRANT),
)
of_drafters = st.one_of(
    hellos,
    st.builds(
        Drafted,
        epoch=counts,
        round=counts,
        answers=st.lists(answers, max_size=4),
        lost=st.lists(counts, max_size=4),
        draft_s=st.floats(0.0, 60.0),
    ),
    st.just(Pong()),
)
asks = st.builds(
    Ask,
    session=counts,
    keep=counts,
    tokens=st.lists(token_ids, max_size=9),
    grant=st.integers(1, MAX_GRANT),
    temperature=st.floats(0.0, 2.0),
)
of_verifiers = st.one_of(
    st.builds(Welcome, epoch=counts),
    st.builds(Refused, reason=st.text(max_size=40)),
    st.builds(
        Draft,
        epoch=counts,
        round=counts,
        deadline_s=st.floats(0.0, 60.0),
        asks=st.lists(asks, max_size=4),
        ended=st.lists(counts, max_size=4),
    ),
    st.just(Ping()),
)


def fields_of(message: Any) -> dict[str, Any]:
    """A valid message as a plain map, to be spoilt."""
    return msgspec.msgpack.decode(encode(message))


def complaint(read: Callable[[bytes], object], data: bytes) -> str:
    """Why it is no message; "" if it is one. Any other exception fails the test."""
    try:
        read(data)
    except WireError as error:
        return str(error)
    return ""


HELLO = Hello(
    wire=WIRE,
    name="one",
    model="m",
    vocab_size=9,
    vocabulary="",
    max_model_len=99,
    max_sessions=4,
)
DRAFTED = Drafted(
    epoch=1,
    round=2,
    answers=[Answer(session=3, at=4, tokens=[5], probabilities=[0.5])],
    lost=[6],
    draft_s=0.25,
)
DRAFT = Draft(
    epoch=1,
    round=2,
    deadline_s=0.05,
    asks=[Ask(session=3, keep=1, tokens=[4, 5], grant=6, temperature=0.0)],
    ended=[7],
)


@given(of_drafters)
def test_the_verifier_reads_what_drafters_write(message: Any) -> None:
    assert from_drafter(encode(message)) == message


@given(of_verifiers)
def test_drafters_read_what_the_verifier_writes(message: Any) -> None:
    assert from_verifier(encode(message)) == message


def test_the_bytes_are_those_documented() -> None:
    """Another program may write them: a msgpack map, its kind under ``type``."""
    assert fields_of(DRAFT) == {
        "type": "draft",
        "epoch": 1,
        "round": 2,
        "deadline_s": 0.05,
        "asks": [{"session": 3, "keep": 1, "tokens": [4, 5], "grant": 6, "temperature": 0.0}],
        "ended": [7],
    }
    assert encode(Pong()) == b"\x81\xa4type\xa4pong"
    for message in (HELLO, DRAFTED, DRAFT, Ping(), Pong(), Welcome(epoch=1), Refused(reason="r")):
        fields = fields_of(message)
        assert f"| ``{fields['type']}`` |" in (draft_messages.__doc__ or "")
        parts = [fields, *fields.get("asks", []), *fields.get("answers", [])]
        assert all(f"``{key}``" in (draft_messages.__doc__ or "") for part in parts for key in part)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_an_error_of_ours(data: bytes) -> None:
    for read in (from_drafter, from_verifier):
        assert "\n" not in complaint(read, data)


@given(st.one_of(of_drafters, of_verifiers), st.data())
def test_spoilt_messages_are_a_message_or_an_error_of_ours(message: Any, data: Any) -> None:
    whole = bytearray(encode(message))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    for read in (from_drafter, from_verifier):
        assert "\n" not in complaint(read, cut)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\x82\xa4type\xa7drafted\xa7answers\xdd\xff\xff\xff\xff",
        b"\x81\xa4type\xa4\xff\xff\xff\xff",  # not UTF-8
        b"\x82\xa4type\xa4pong\xa1x" + b"\x91" * 100_000,  # nested until the stack ends
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os",  # a pickle
        encode(Pong()) + b"\x00",
        encode(Ping()),
        encode(DRAFT),
    ],
)
def test_what_is_no_message_of_a_drafter_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="not a message of wire version 1"):
        from_drafter(data)


@pytest.mark.parametrize(
    "changed",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": "a\n"},
        {"name": "x" * (MAX_NAME + 1)},
        {"model": "x" * 2000},
        {"vocab_size": 0},
        {"vocab_size": 2**31},
        {"max_model_len": -1},
        {"max_sessions": 0},
        {"max_sessions": MAX_SESSIONS + 1},
        {"max_sessions": True},
        {"max_sessions": 4.0},
        {"wire": "1"},
    ],
)
def test_a_hello_out_of_bounds_is_malformed(changed: dict[str, Any]) -> None:
    fields = fields_of(HELLO)
    assert from_drafter(pack(fields)) == HELLO
    with pytest.raises(WireError, match="not a message"):
        from_drafter(pack({**fields, **changed}))


@pytest.mark.parametrize(
    "changed",
    [
        {"answers": [fields_of(DRAFTED)["answers"][0]] * (MAX_SESSIONS + 1)},
        {
            "answers": [
                {"session": 3, "at": 4, "tokens": [1] * (MAX_GRANT + 1), "probabilities": []}
            ]
        },
        {"answers": [{"session": 3, "at": 4, "tokens": [1.5], "probabilities": []}]},
        {"answers": [{"session": 3, "tokens": [1], "probabilities": [1.0]}]},
        {"lost": [0] * (MAX_SESSIONS + 1)},
        {"lost": None},
        {"draft_s": "soon"},
        {"round": 1.0},
    ],
)
def test_answers_out_of_bounds_are_malformed(changed: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="not a message"):
        from_drafter(pack({**fields_of(DRAFTED), **changed}))


@pytest.mark.parametrize(
    "changed",
    [
        {"keep": -1},
        {"tokens": [-1]},
        {"tokens": [2**31]},
        {"grant": 0},
        {"grant": MAX_GRANT + 1},
        {"temperature": -0.1},
        {"temperature": math.nan},
    ],
)
def test_asks_out_of_bounds_are_malformed(changed: dict[str, Any]) -> None:
    fields = fields_of(DRAFT)
    with pytest.raises(WireError, match="not a message"):
        from_verifier(pack({**fields, "asks": [{**fields["asks"][0], **changed}]}))
    with pytest.raises(WireError, match="not a message"):
        from_verifier(pack({**fields, "deadline_s": math.nan}))


@pytest.mark.parametrize("wire", [0, WIRE + 1, 2**63 - 1])
def test_another_version_is_known_by_its_hello(wire: int) -> None:
    """Whatever else it has become."""
    for fields in (fields_of(HELLO), {"type": "hello", "name": {"first": 1}}):
        with pytest.raises(WireVersionError) as caught:
            from_drafter(pack({**fields, "wire": wire}))
        assert caught.value.wire == wire


def test_unknown_keys_do_not_matter() -> None:
    assert from_drafter(pack({**fields_of(DRAFTED), "colour": [1, {"a": None}]})) == DRAFTED


def test_the_largest_messages_keep_their_size() -> None:
    """So whoever keeps the other bounds is not cut off for the size of a message."""
    most = 2**31 - 1
    answer = Answer(
        session=most, at=most, tokens=[most] * MAX_GRANT, probabilities=[0.3] * MAX_GRANT
    )
    lost = [most] * MAX_SESSIONS
    drafted = Drafted(
        epoch=2**63 - 1, round=2**63 - 1, answers=[answer] * MAX_SESSIONS, lost=lost, draft_s=0.1
    )
    assert len(encode(drafted)) <= MAX_ANSWER_BYTES
    tokens = [most] * (MAX_ASKED_TOKENS // MAX_SESSIONS)
    ask = Ask(session=most, keep=most, tokens=tokens, grant=MAX_GRANT, temperature=0.1)
    draft = Draft(
        epoch=2**63 - 1, round=2**63 - 1, deadline_s=0.1, asks=[ask] * MAX_SESSIONS, ended=lost
    )
    assert len(encode(draft)) <= MAX_DRAFT_BYTES


def test_a_vocabulary_is_known_by_its_digest() -> None:
    ids = {"a": 0, "b": 1, "c": 2}
    assert vocabulary_digest(ids) == vocabulary_digest(dict(reversed(ids.items())))
    others = [{"a": 0, "b": 2, "c": 1}, {"a": 0, "b": 1}, {**ids, "d": 3}, {"ab": 0, "": 1, "c": 2}]
    assert len({vocabulary_digest(other) for other in [ids, *others]}) == 5
    assert vocabulary_digest({}) == ""
