# SPDX-License-Identifier: Apache-2.0
"""Parts of traces: each selection against a filter that needs no cleverness."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.own_format import header_line, request_line
from vllm_slo.traces.request import Served, TraceRequest
from vllm_slo.traces.selection import (
    Selection,
    add_selection_arguments,
    load,
    selected,
    selection_of,
)
from vllm_slo.traces.times import seconds_of

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
times = st.lists(st.integers(0, 5000).map(lambda n: n / 8), max_size=60)


def at(*seconds: float) -> list[TraceRequest]:
    return [TraceRequest(s, 10 + i, 5) for i, s in enumerate(seconds)]


def recording(tmp_path: Path, requests: list[TraceRequest]) -> Path:
    path = tmp_path / "recording.jsonl"
    lines = [request_line(r, created_s=0.0) for r in requests]
    path.write_text(header_line(NOON, 64, None) + "".join(lines))
    return path


@given(times, st.integers(0, 300), st.integers(1, 400), st.floats(0.25, 8))
def test_a_stretch_is_what_a_filter_keeps(
    arrivals: list[float], low: int, width: int, speed: float
) -> None:
    requests = at(*arrivals)
    first = arrivals[0] if arrivals else 0.0
    kept = [r for r in requests if first + low <= r.at_s < first + low + width]
    assert list(selected(requests, Selection(low, low + width))) == kept
    rows = list(selected(requests, Selection(low, low + width, rows=3, speed=speed)))
    assert [r.prompt_tokens for r in rows] == [r.prompt_tokens for r in kept[:3]]
    for fast, slow in zip(rows, kept, strict=False):
        assert fast.at_s - first == pytest.approx((slow.at_s - first) / speed)


@given(times, st.floats(0.05, 1.0), st.integers(0, 5), st.integers(0, 400))
def test_thinning_keeps_order_and_knows_no_window(
    arrivals: list[float], thin: float, seed: int, low: int
) -> None:
    requests = at(*arrivals)
    kept = list(selected(requests, Selection(thin=thin, seed=seed)))
    places = [r.prompt_tokens for r in kept]
    assert places == sorted(places)
    first = arrivals[0] if arrivals else 0.0
    late = list(selected(requests, Selection(from_s=low, thin=thin, seed=seed)))
    assert late == [r for r in kept if r.at_s >= first + low]


def test_thinning_keeps_its_share_and_seeds_differ() -> None:
    requests = at(*range(20_000))
    kept = list(selected(requests, Selection(thin=0.3)))
    assert len(kept) == pytest.approx(6000, abs=260)  # four standard deviations
    assert kept == list(selected(requests, Selection(thin=0.3)))
    assert kept != list(selected(requests, Selection(thin=0.3, seed=1)))


def test_a_selection_stops_reading_after_its_rows() -> None:
    def endless() -> object:
        yield from at(0.0, 1.0)
        raise AssertionError("read on")

    assert len(list(selected(endless(), Selection(rows=2)))) == 2  # type: ignore[arg-type]


def test_moments_need_dates() -> None:
    half_past = NOON.replace(minute=30)
    dated = at(*(seconds_of(NOON) + s for s in (0.0, 1799.0, 1800.0, 3600.0)))
    assert [r.prompt_tokens for r in selected(dated, Selection(half_past))] == [12, 13]
    assert [r.prompt_tokens for r in selected(dated, Selection(None, half_past))] == [10, 11]
    with pytest.raises(TraceError, match="the trace has no dates; give seconds"):
        list(selected(at(0.0, 5.0), Selection(half_past)))


def test_a_recording_is_by_time_and_counts_from_its_earliest_request(tmp_path: Path) -> None:
    """A recording's lines are in the order of ends, so its first line may not be the earliest."""
    path = recording(tmp_path, at(9.0, 2.0, 5.0))
    loaded = load(path)
    assert [(r.at_s, r.prompt_tokens) for r in loaded.requests] == [(0, 11), (3, 12), (7, 10)]
    assert (loaded.source, loaded.format) == ("recording.jsonl", "vllm-slo's recording")
    late = load(path, Selection(from_s=3.0, speed=2.0))
    assert [(r.at_s, r.prompt_tokens) for r in late.requests] == [(0, 12), (2, 10)]
    assert len(load(path, Selection(rows=2)).requests) == 2
    with pytest.raises(TraceError, match="has no rows in this selection"):
        load(path, Selection(from_s=100.0))


def test_requests_without_an_answer(tmp_path: Path) -> None:
    """A refused request keeps its place, with a length of its class; others are left out."""
    declined, aborted = Served("declined"), Served("aborted")
    path = recording(
        tmp_path,
        [
            TraceRequest(0.0, 10, 40, "chat"),
            TraceRequest(1.0, 11, 0, "chat", served=declined),
            TraceRequest(2.0, 12, 0, "chat", served=Served("completed")),
            TraceRequest(3.0, 13, 0, "chat"),
            TraceRequest(4.0, 14, 3, "chat", served=aborted),
            TraceRequest(5.0, 15, 900, "batch", served=Served("completed")),
            TraceRequest(6.0, 16, 0, "batch", served=declined),
            TraceRequest(7.0, 0, 0, "batch", served=declined),
        ],
    )
    loaded = load(path)
    found = [(r.prompt_tokens, r.output_tokens) for r in loaded.requests]
    assert found == [(10, 40), (11, 40), (14, 3), (15, 900), (16, 900)]
    assert (loaded.left_out, loaded.estimated) == (3, 2)
    alone = recording(tmp_path, [TraceRequest(0.0, 10, 0, served=declined)])
    with pytest.raises(TraceError, match="has no rows with prompt and output tokens"):
        load(alone)


def parsed(*words: str) -> Selection:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_selection_arguments(parser)
    return selection_of(parser.parse_args(words))


def test_flags() -> None:
    assert parsed() == Selection()
    words = ["--from", "60", "--to", "120.5", "--rows", "9", "--thin", "50%", "--speed", "2"]
    assert parsed(*words) == Selection(60.0, 120.5, 9, 0.5, 2.0)
    moments = parsed("--from", "2026-11-30T12:00", "--to", "2026-11-30 13:30:00+01:00")
    assert (moments.from_s, moments.to_s) == (NOON, NOON.replace(minute=30))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--from soon", "'soon' is neither a number of seconds nor a date and time"),
        ("--from -1", "must be at least 0"),
        ("--to nan", "must be at least 0"),
        ("--rows 0", "must be at least 1"),
        ("--thin 0", "must be above 0"),
        ("--speed 0", "must be above 0"),
        ("--from 5 --to 5", "--to: must be later than --from"),
        ("--from 2026-02-01 --to 2026-01-01", "--to: must be later than --from"),
    ],
)
def test_flags_that_make_no_sense(words: str, message: str) -> None:
    with pytest.raises((argparse.ArgumentError, TraceError)) as caught:
        parsed(*words.split())
    assert message in str(caught.value)
