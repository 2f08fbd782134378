# SPDX-License-Identifier: Apache-2.0
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_stream import StateDecoder, StateEncoder
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand

MODEL = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
IDLE = ReplicaState(MODEL, total_blocks=100, free_blocks=100.0, block_sizes=(16,), seats=8)

TIMES = st.floats(0.0, 1e9) | st.just(math.inf)
NAMES = st.sampled_from(["a", "b", "cmpl-" + "x" * 300, "\u00fc"])
PROMISES = st.builds(
    Demand, NAMES, TIMES, st.integers(0, 99), TIMES, st.integers(0, 9), st.floats(0.1, 9.0),
    st.integers(0, 99),
)  # fmt: skip
FRONTS = st.sampled_from(["", "a", "b1"])
STATES = st.builds(
    ReplicaState,
    st.sampled_from([MODEL, MODEL.scaled(1.1)]),
    now_s=st.floats(0.0, 1e9),
    start_s=st.floats(0.0, 1e9),
    committed=st.lists(PROMISES, max_size=3, unique_by=lambda d: d.request_id).map(tuple),
    decoding=st.dictionaries(TIMES, st.integers(1, 9), max_size=2),
    decoding_context=st.integers(0, 3),
    free_blocks=st.sampled_from([0.0, 5.0]),
    block_sizes=st.sampled_from([(), (16,), (16, 32)]),
    seats=st.integers(-1, 2),
    running=st.integers(0, 2),
    tickets=st.dictionaries(FRONTS, st.frozensets(st.integers(1, 5), min_size=1), max_size=2),
    seen=st.dictionaries(FRONTS, st.integers(1, 3), max_size=2),
    lengths=st.dictionaries(st.sampled_from(["x", "y"]), st.just((1, 2)) | st.just((3,))),
)
LINES = st.lists(
    st.tuples(st.none() | STATES, st.booleans(), st.booleans(), st.floats(0.0, 9.0)), max_size=8
)


def content(state: ReplicaState | None) -> Any:
    """A state without the ids and the order of its promises."""
    if state is None:
        return None
    nameless = sorted((replace(d, request_id="") for d in state.committed), key=repr)
    return replace(state, committed=tuple(nameless))


@settings(max_examples=examples(200))
@given(LINES, st.integers(0, 2**40))
def test_every_state_is_read_as_it_was_written(lines: Any, first: int) -> None:
    encoder, decoder = StateEncoder(first), StateDecoder()
    for state, draining, dead, age_s in lines:
        line = encoder.line(state, age_s=age_s, draining=draining, dead=dead)
        assert line.endswith(b"\n") and line.count(b"\n") == 1
        read = decoder.read(line)
        assert content(read.state) == content(state)
        assert (read.draining, read.dead, read.problem) == (draining, dead, None)
        assert read.age_s == pytest.approx(age_s, abs=1e-6)


@settings(max_examples=examples(100))
@given(LINES.filter(lambda lines: len(lines) > 2), st.data())
def test_a_line_that_is_missing_is_noticed(lines: Any, data: Any) -> None:
    encoder, decoder = StateEncoder(5), StateDecoder()
    written = [encoder.line(state) for state, *_ in lines]
    lost = data.draw(st.integers(0, len(written) - 2))
    for line in written[:lost]:
        decoder.read(line)
    for line in written[lost + 1 :]:
        with pytest.raises(ValueError, match="does not follow"):
            decoder.read(line)
    # Another stream begins with a whole line.
    assert content(decoder.read(StateEncoder(9).line(lines[0][0])).state) == content(lines[0][0])


@settings(max_examples=examples(100))
@given(st.lists(STATES, min_size=1, max_size=6), st.integers(0, 5), st.data())
def test_a_reader_that_was_busy_gets_one_line_to_the_newest(
    states: list[ReplicaState], skipped: int, data: Any
) -> None:
    """Every reader has an encoder, and the order of what the others read does not matter."""
    quick, slow = (StateEncoder(0), StateDecoder()), (StateEncoder(100), StateDecoder())
    for state in states:
        quick[1].read(quick[0].line(state))
        if data.draw(st.booleans()):
            slow[1].read(slow[0].line(state))
    read = [decoder.read(encoder.line(states[-1])) for encoder, decoder in (quick, slow)]
    assert [content(line.state) for line in read] == [content(states[-1])] * 2


def test_a_promise_that_does_not_change_costs_nothing() -> None:
    encoder = StateEncoder()
    promises = tuple(Demand(f"cmpl-{n}", 100.0 + n, 50, 0.1, 3) for n in range(100))
    before = replace(IDLE, now_s=10.0, committed=promises, tickets={"": frozenset(range(1, 101))})
    assert len(encoder.line(before)) > 3_000
    after = replace(before, now_s=10.02, start_s=10.03)
    assert json.loads(encoder.line(after))["state"] == {"now_s": 10.02, "start_s": 10.03}
    assert len(encoder.line(after)) < 30
    made = replace(
        after,
        committed=(*promises[1:], Demand("new", 200.0, 5, 0.1, 3)),
        tickets={"": frozenset(range(2, 102))},
    )
    changes = json.loads(encoder.line(made))["state"]
    assert changes == {
        "committed": {"1": None, "101": [200.0, 5, 0.1, 3, 1.0, 0]},
        "tickets": {"": [[101], [1]]},
    }


def test_a_stream_that_begins_anew_keeps_the_keys() -> None:
    encoder, decoder = StateEncoder(), StateDecoder()
    state = replace(IDLE, committed=tuple(Demand(name, 1.0, 1, 1.0, 1) for name in ("x", "y")))
    decoder.read(encoder.line(state))
    encoder.begin_anew()
    one = replace(state, committed=state.committed[1:])
    found = StateDecoder().read(encoder.line(one)).state
    assert found is not None
    assert [d.request_id for d in found.committed] == ["2"]


def test_what_a_newer_replica_writes_beside_is_ignored() -> None:
    content = json.loads(StateEncoder().line(IDLE))
    content["colour"] = content["state"]["colour"] = [1]
    assert StateDecoder().read(json.dumps(content)).state == IDLE


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[]", b"null", b"[" * 100_000, b'"x"', b"\xff", b'{"n":1}', b'{"n":1.5}',
     b'{"n":true,"whole":true}', b'{"n":1,"state":{}}'],
)  # fmt: skip
def test_nonsense_is_not_a_line(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        StateDecoder().read(line)


@pytest.mark.parametrize(
    "state", [{}, 3, [], {"model": 3}, {"committed": {"1": [1]}}, {"tickets": {"": 1}}, "x"]
)
def test_a_state_that_is_not_understood_is_the_problem_of_its_stream(state: Any) -> None:
    decoder = StateDecoder()
    whole = {"n": 1, "whole": True, "draining": True, "state": state}
    read = decoder.read(json.dumps(whole))
    assert read.problem is not None
    assert (read.state, read.is_new, read.draining) == (None, False, True)
    read = decoder.read(json.dumps({"n": 2, "dead": True, "state": {"running": 1}}))
    assert (read.state, read.is_new, read.dead) == (None, False, True)
    assert decoder.read(StateEncoder(7).line(IDLE)).state == IDLE


def test_a_change_that_is_not_understood_asks_for_another_stream() -> None:
    encoder, decoder = StateEncoder(), StateDecoder()
    decoder.read(encoder.line(IDLE))
    broken = {"n": 1, "state": {"committed": {"77": None}}}
    with pytest.raises(ValueError, match="not the state"):
        decoder.read(json.dumps(broken))
    encoder.line(IDLE)
    with pytest.raises(ValueError, match="does not follow"):
        decoder.read(encoder.line(replace(IDLE, running=1)))
