# SPDX-License-Identifier: Apache-2.0
"""Our own format: what is written is read again; each mistake is named."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.files import detect, read
from vllm_slo.traces.own_format import SCHEMA, header_line, request_line
from vllm_slo.traces.request import Served, TraceRequest
from vllm_slo.traces.times import moment_of, seconds_of

CREATED = datetime(2026, 11, 30, 12, 0, 0, 250_000, UTC)
HEADER = header_line(CREATED, 64, "tiny")
LINE: dict[str, Any] = {"timestamp": 1500.5, "input_length": 130, "output_length": 7}


def written(tmp_path: Path, *lines: str | dict[str, Any]) -> Path:
    path = tmp_path / "recording.jsonl"
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
    return path


def requests(path: Path) -> list[TraceRequest]:
    assert detect(path) == "vllm-slo"
    return list(read(path))


names = st.text(min_size=1, max_size=12)
ms = st.none() | st.integers(1, 10**9).map(lambda n: n / 1000)
seconds = st.none() | st.integers(0, 10**9).map(lambda n: n / 1_000_000)
served = st.builds(
    Served,
    st.sampled_from(["completed", "declined", "aborted", "failed"]),
    st.sampled_from(["in_time", "late", "none", None]),
    seconds,
    seconds,
    seconds,
    st.sampled_from([True, False, None]),
    st.sampled_from([True, False, None]),
)


@st.composite
def traffic(draw: st.DrawFn) -> TraceRequest:
    ids = draw(st.lists(st.integers(0, 2**64 - 1), max_size=4))
    return TraceRequest(
        draw(st.integers(0, 10**9)) / 1000,
        max(0, len(ids) - 1) * 64 + draw(st.integers(1, 64)),
        draw(st.integers(0, 10**6)),
        draw(names | st.just("")),
        draw(st.none() | names),
        draw(names),
        draw(st.none() | names),
        draw(st.integers(-(2**31), 2**31)),
        draw(ms),
        draw(ms),
        draw(ms),
        hash_ids=tuple(ids),
        block_tokens=64,
        served=draw(st.none() | served),
    )


@given(st.lists(traffic(), max_size=5))
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, made: list[TraceRequest]
) -> None:
    path = written(
        tmp_path_factory.mktemp("own"), HEADER, *(request_line(r, created_s=0.0) for r in made)
    )
    back = requests(path)
    assert len(back) == len(made)
    for before, after in zip(made, back, strict=True):
        assert after.at_s - seconds_of(CREATED) == pytest.approx(before.at_s, abs=3e-7, rel=0)
        for field in TraceRequest.__struct_fields__:
            if field not in ("at_s", "served"):
                assert getattr(after, field) == getattr(before, field)
        assert (after.served is None) == (before.served is None)
        for field in Served.__slots__ if before.served else ():
            told, read_again = getattr(before.served, field), getattr(after.served, field)
            assert read_again == (pytest.approx(told) if isinstance(told, float) else told)


def test_the_header_and_a_line_have_these_keys() -> None:
    assert json.loads(HEADER) == {
        "schema": "vllm-slo-trace/1",
        "created": "2026-11-30T12:00:00.250000Z",
        "block_tokens": 64,
        "model": "tiny",
    }
    east = datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert json.loads(header_line(east, 16, None)) == {
        "schema": "vllm-slo-trace/1",
        "created": "2026-01-01T00:00:00Z",
        "block_tokens": 16,
    }
    plain = TraceRequest(11.5, 130, 7)
    assert json.loads(request_line(plain, 10.0)) == LINE | {"timestamp": 1500.0}
    rich = TraceRequest(
        10.0, 130, 7, "chat", "acme", "tiny", "s1", -2, 500.0, 50.0, 9000.0,
        hash_ids=(1, 2), block_tokens=64,
        served=Served("aborted", "late", 0.1234567, 0.02, 1.5, True, False),
    )  # fmt: skip
    assert json.loads(request_line(rich, 10.0)) == {
        "timestamp": 0.0, "input_length": 130, "output_length": 7, "hash_ids": [1, 2],
        "class": "chat", "tenant": "acme", "model": "tiny", "session": "s1", "priority": -2,
        "ttft_ms": 500.0, "tpot_ms": 50.0, "e2e_ms": 9000.0, "end": "aborted", "promise": "late",
        "served_ttft_ms": 123.457, "served_tpot_ms": 20.0, "served_e2e_ms": 1500.0,
        "late_kept": True, "attained": False,
    }  # fmt: skip


def test_joined_files_keep_their_times_and_models(tmp_path: Path) -> None:
    later = header_line(CREATED + timedelta(hours=1), 16, None)
    many = LINE | {"hash_ids": [1, 2, 3]}
    first, second, third = requests(
        written(tmp_path, HEADER, many, "\n", later, LINE, LINE | {"model": "other"})
    )
    assert moment_of(first.at_s) == CREATED + timedelta(milliseconds=1500.5)
    assert second.at_s - first.at_s == 3600.0
    assert [r.model for r in (first, second, third)] == ["tiny", None, "other"]
    assert [r.block_tokens for r in (first, second, third)] == [64, 16, 16]


def test_a_line_that_is_being_written_is_passed_over(tmp_path: Path) -> None:
    assert len(requests(written(tmp_path, HEADER, LINE, json.dumps(LINE)[:30]))) == 1
    assert len(requests(written(tmp_path, HEADER, LINE, json.dumps(LINE)))) == 2
    with pytest.raises(TraceError, match="line 2 is not JSON"):
        requests(written(tmp_path, HEADER, json.dumps(LINE)[:30] + "\n"))


def test_keys_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    (one,) = requests(written(tmp_path, HEADER, LINE | {"colour": [1], "tenant": None}))
    assert (one.prompt_tokens, one.output_tokens, one.tenant) == (130, 7, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"timestamp": "soon"}, "field timestamp: 'soon' is not a number"),
        ({"input_length": -1}, "field input_length: '-1' is not a number of tokens"),
        ({"class": 3}, "field class: '3' is not a name"),
        ({"tenant": ["a"]}, "field tenant: "),
        ({"priority": 1.5}, "field priority: '1.5' is not a whole number"),
        ({"ttft_ms": 0}, "field ttft_ms: '0' is not an objective in ms"),
        ({"tpot_ms": -5}, "field tpot_ms: '-5' is not an objective"),
        ({"e2e_ms": 1e300}, "field e2e_ms: '1e+300' is not an objective"),
        ({"end": "finished"}, "field end: 'finished' is not one of completed, declined, aborted"),
        ({"end": "failed", "promise": "no"}, "field promise: 'no' is not one of in_time, late"),
        ({"end": "failed", "served_ttft_ms": -1}, "field served_ttft_ms: '-1' is not a time"),
        ({"end": "failed", "attained": 1}, "field attained: '1' is not true or false"),
        ({"hash_ids": [1, 2, 3, 4]}, "field hash_ids: 4 ids are too many for 130 tokens"),
        ({"hash_ids": ["a"]}, "field hash_ids: "),
    ],
)
def test_a_mistake_is_told_with_line_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, HEADER, LINE, LINE | change)
    with pytest.raises(TraceError) as caught:
        requests(path)
    assert str(caught.value).startswith(
        f"{path} looks like vllm-slo's recording; line 3, {message}"
    )


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"schema": "vllm-slo-trace/2"}, f"'vllm-slo-trace/2' is not '{SCHEMA}'"),
        ({"schema": SCHEMA}, "field created: missing"),
        ({"schema": SCHEMA, "created": "2026-01-01"}, "field block_tokens: missing"),
        ({"schema": SCHEMA, "created": 5, "block_tokens": 64}, "'5' is not a date and time"),
        ({"schema": SCHEMA, "created": "2026-01-01", "block_tokens": 0}, "is not a size of blocks"),
    ],
)
def test_a_broken_header_is_told(tmp_path: Path, header: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match="line 1, field ") as caught:
        requests(written(tmp_path, header, LINE))
    assert message in str(caught.value)
