# SPDX-License-Identifier: Apache-2.0
"""Simulated workloads: true to SLOs-Serve's tables, the same at every rate, errors that tell."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.bench import traces
from vllm_slo.bench.traces import read_recording
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.sim import arrivals
from vllm_slo.sim.arrivals import ARRIVALS, Stretch, Trace, draw, read_trace, stretch
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import Hardware, load_hardware
from vllm_slo.sim.jobs import Job
from vllm_slo.sim.scenarios import SCENARIOS
from vllm_slo.sim.workload import make_jobs
from vllm_slo.traces.errors import TraceError

MODEL = StepTimeModel(((0.0, 0.0, 0.01), (1e-4, 0.0, 0.002)), 1e-7, pair_s=1e-9)
ROOMY = Hardware("roomy", 1, MODEL, 1_000_000, max_model_len=131_072, frontend_s=0.01)
PAPER = ("chatbot", "coder", "summarizer", "mixed", "toolllm", "reasoning")


def make(scenario: str = "chatbot", hardware: Hardware = ROOMY, **given: Any) -> list[Job]:
    return make_jobs(scenario, hardware, **({"rate": 2.0, "count": 300, "seed": 1} | given))


def shape(jobs: list[Job]) -> list[tuple[Any, ...]]:
    return [(job.job_id, job.application, job.rounds) for job in jobs]


# --- lengths: table 4 -----------------------------------------------------------------------------

CHATBOT, CODER, SUMMARIZER, TOOLLLM, REASONING = (
    "chatbot", "coder", "summarizer", "toolllm", "reasoning",
)  # fmt: skip
TABLE_4 = [  # application, column, mean, p99, standard deviation
    (CHATBOT, "prompt", 763, 1591, 424),
    (CHATBOT, "answer", 266, 619, 160),
    (CODER, "prompt", 847, 2010, 617),
    (CODER, "answer", 26, 232, 47),
    (REASONING, "prompt", 127, 421, 83),
    (REASONING, "thinking", 4693, 7297, 1442),
    (REASONING, "response", 803, 1650, 280),
    (SUMMARIZER, "prompt", 1333, 1946, 444),
    (SUMMARIZER, "answer", 202, 1508, 234),
    (TOOLLLM, "prompt", 690, 2131, 356),
    (TOOLLLM, "answer", 116, 363, 66),
]
COLUMNS: dict[str, Callable[[Job], list[int]]] = {
    "prompt": lambda job: [r.prompt_tokens for r in job.rounds],
    "answer": lambda job: [r.output_tokens for r in job.rounds],
    "thinking": lambda job: [r.stages[0].tokens for r in job.rounds],
    "response": lambda job: [r.stages[1].tokens for r in job.rounds],
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("scenario", "column", "mean", "p99", "std"), TABLE_4)
def test_lengths_are_table_4s(
    scenario: str, column: str, mean: float, p99: float, std: float, seed: int
) -> None:
    jobs = make(scenario, count=20_000, seed=seed, arrivals="poisson")
    tokens = [n for job in jobs for n in COLUMNS[column](job)][:20_000]
    assert min(tokens) >= 1
    assert np.mean(tokens) == pytest.approx(mean, rel=0.05)
    assert np.std(tokens) == pytest.approx(std, rel=0.15)
    assert np.percentile(tokens, 99) == pytest.approx(p99, rel=0.15)


def test_tool_rounds_are_table_4s() -> None:
    jobs = make("toolllm", count=20_000, arrivals="poisson")
    rounds = [len(job.rounds) for job in jobs]
    assert min(rounds) == 1
    assert np.mean(rounds) == pytest.approx(2.7, rel=0.02)
    assert np.std(rounds) == pytest.approx(1.1, rel=0.05)
    waits = [r.wait_s for job in jobs for r in job.rounds[1:]]
    assert np.mean(waits) == pytest.approx(1.0, rel=0.05)
    assert np.std(waits) == pytest.approx(1.0, rel=0.05)
    assert all(job.rounds[0].wait_s == 0 for job in jobs)


# --- objectives: tables 1 and 3 -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "slowdown", "tpots"),
    [
        ("chatbot", 5, [0.1]),
        ("coder", 5, [0.05]),
        ("summarizer", 3, [0.1]),
        ("reasoning", 3, [0.05, 0.1]),
    ],
)
def test_objectives_of_one_request(scenario: str, slowdown: float, tpots: list[float]) -> None:
    for job in make(scenario):
        (only,) = job.rounds
        assert [stage.tpot_s for stage in only.stages] == tpots
        assert only.ttft_s == pytest.approx(slowdown * ROOMY.zero_load_ttft_s(only.prompt_tokens))


def test_objectives_of_a_tool_loop() -> None:
    for job in make("toolllm"):
        context = 0
        for place, one in enumerate(job.rounds):
            (stage,) = one.stages
            assert stage.tpot_s == (0.1 if place == len(job.rounds) - 1 else 0.05)
            zero_load_s = ROOMY.zero_load_ttft_s(one.prompt_tokens, context)
            assert one.ttft_s == pytest.approx(3 * zero_load_s)
            context += one.prompt_tokens + one.output_tokens


def test_mixed_is_a_third_each() -> None:
    jobs = make("mixed", count=301)
    counts = Counter(job.application for job in jobs)
    assert counts == {"chatbot": 101, "coder": 100, "summarizer": 100}
    assert all(job.job_id == f"{job.application}-{i}" for i, job in enumerate(jobs))
    for job in jobs:
        tight = job.application == "coder"
        assert job.rounds[0].tightest_tpot_s == (0.05 if tight else 0.1)


def test_mixed_keeps_each_applications_arrivals() -> None:
    """The coders alone come in the coding trace's bursts; one kind for all mixes them."""
    jobs = make("mixed", count=900)
    coders = np.array([job.arrival_s for job in jobs if job.application == "coder"])
    alone = draw("azure-code", count=300, seed=1).at / (2.0 / 3)
    assert np.allclose(coders, alone)
    merged = make("mixed", count=900, arrivals="azure-conv")
    at = np.array([job.arrival_s for job in merged])
    assert np.allclose(at, draw("azure-conv", count=900, seed=1).at / 2.0)
    first = Counter(job.application for job in merged[:300])
    assert min(first[name] for name in ("chatbot", "coder", "summarizer")) > 60


# --- arrivals -------------------------------------------------------------------------------------


def test_defaults_are_table_2s() -> None:
    assert set(SCENARIOS) == {*PAPER, "adaserve"}
    by_default = {name: scenario.arrivals for name, scenario in SCENARIOS.items()}
    assert by_default == {
        "chatbot": ("azure-conv",),
        "coder": ("azure-code",),
        "summarizer": ("azure-conv",),
        "mixed": ("azure-conv", "azure-code"),
        "toolllm": ("azure-code",),
        "reasoning": ("azure-conv",),
        "adaserve": ("adaserve",),
    }


@settings(max_examples=examples(60))
@given(
    scenario=st.sampled_from(sorted(SCENARIOS)),
    kind=st.sampled_from([None, *ARRIVALS]),
    count=st.integers(1, 400),
    seed=st.integers(0, 2**40),
    rate=st.floats(0.01, 1000),
)
def test_the_rate_only_scales_time(
    scenario: str, kind: str | None, count: int, seed: int, rate: float
) -> None:
    given: Any = {"count": count, "seed": seed, "arrivals": kind}
    unit, other = make(scenario, rate=1.0, **given), make(scenario, rate=rate, **given)
    assert len(unit) == count
    assert shape(unit) == shape(other)
    assert [j.arrival_s / rate for j in unit] == pytest.approx([j.arrival_s for j in other])
    at = [job.arrival_s for job in other]
    assert at == sorted(at) and at[0] >= 0
    assert at[-1] < count / rate * (1 + 1e-9)
    assert other == make(scenario, rate=rate, **given)
    for job in other:
        assert all(n > 0 for r in job.rounds for n in (r.prompt_tokens, r.output_tokens, r.ttft_s))


@pytest.mark.parametrize("kind", ["azure-code", "azure-conv"])
def test_rescaled_rate_is_exact_over_its_window(kind: str) -> None:
    at = draw(kind, count=1500, seed=3).at
    assert at[0] == 0
    assert at[-1] + np.mean(np.diff(at)) == pytest.approx(1500)


@pytest.mark.parametrize("kind", ["azure-code", "azure-conv"])
@pytest.mark.parametrize("count", [50, 1500])
def test_seeds_give_other_stretches(kind: str, count: int) -> None:
    drawn = [draw(kind, count=count, seed=seed) for seed in range(20)]
    assert len({one.at.tobytes() for one in drawn}) == 20
    for one in drawn:
        assert len(np.unique(one.at)) > 0.9 * count
        assert len(one.rows) == count


@pytest.mark.parametrize("kind", ["azure-code", "azure-conv"])
def test_a_whole_trace_starts_anywhere(kind: str) -> None:
    """A ring: even with every row in use, seeds give stretches of their own, without a jump."""
    trace = read_trace(kind)
    total = len(trace.rows)
    one, other = (draw(kind, count=total, seed=seed) for seed in (1, 2))
    assert one.rows[0] is not other.rows[0]
    assert set(map(id, one.rows)) == set(map(id, other.rows))
    assert np.diff(one.at).min() >= 0


def test_the_coding_trace_is_burstier_than_chat_and_poisson() -> None:
    def spread(kind: str) -> float:
        counts, _ = np.histogram(draw(kind, count=1500, seed=2).at, bins=50, range=(0, 1500))
        return float(counts.var() / counts.mean())

    assert spread("azure-code") > 5 * spread("azure-conv")
    assert 0.5 < spread("poisson") < 2


@pytest.mark.parametrize("count", [90, 1500, 1000])
def test_the_square_waves_high_half_has_three_times_the_rate(count: int) -> None:
    at = np.concatenate([draw("square", count=count, seed=seed).at for seed in range(40)])
    periods = max(1, round(count / arrivals.SQUARE_PERIOD))
    phase = (at * periods / count) % 1.0
    high = np.count_nonzero(phase < 0.5)
    assert high / (len(at) - high) == pytest.approx(3.0, rel=0.15)
    assert at.min() >= 0 and at.max() < count


def test_thin_keeps_the_recorded_pace() -> None:
    jobs = make("chatbot", rate=1.0, count=600, fit="thin")
    trace = read_trace("azure-conv")
    recorded = {round(float(t), 5) for t in trace.at_s}
    rows = draw("azure-conv", count=600, seed=1, rate=1.0, fit="thin").rows
    gaps = np.diff([row.at_s for row in rows])
    assert np.allclose(np.diff([job.arrival_s for job in jobs]), gaps)
    assert {round(row.at_s, 5) for row in rows} <= recorded
    assert jobs[-1].arrival_s < 600
    assert shape(jobs) == shape(make("chatbot", rate=2.0, count=600, fit="thin"))
    assert shape(jobs) == shape(make("chatbot", rate=1.0, count=600))


@pytest.mark.parametrize(
    ("rate", "count", "message"),
    [(1.0, 8000, "lasts .* s; use fewer jobs"), (1000.0, 5000, "window too small")],
)
def test_thin_says_when_the_trace_cannot(rate: float, count: int, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        make("coder", rate=rate, count=count, fit="thin")


# --- trace lengths and files ----------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["chatbot", "coder", "mixed"])
@pytest.mark.parametrize("fit", ["rescale", "thin"])
def test_trace_lengths_are_the_rows(scenario: str, fit: str) -> None:
    jobs = make(scenario, rate=1.0, lengths="trace", fit=fit)
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for job in jobs:
        kind = "azure-code" if job.application == "coder" else "azure-conv"
        (only,) = job.rounds
        by_kind.setdefault(kind, []).append((only.prompt_tokens, only.output_tokens))
        slowdown = 3 if job.application == "summarizer" else 5
        assert only.ttft_s == pytest.approx(slowdown * ROOMY.zero_load_ttft_s(only.prompt_tokens))
    for kind, found in by_kind.items():
        share = len(found) / len(jobs)
        stretch = draw(kind, count=len(found), seed=1, rate=share, fit=fit)  # type: ignore[arg-type]
        assert found == [(row.prompt_tokens, row.output_tokens) for row in stretch.rows]


@pytest.mark.parametrize(
    ("scenario", "kind", "message"),
    [
        ("chatbot", "poisson", "poisson arrivals have no lengths"),
        ("toolllm", None, "toolllm has more than one prompt"),
        ("reasoning", None, "reasoning has more than one prompt"),
    ],
)
def test_trace_lengths_that_do_not_exist(scenario: str, kind: str | None, message: str) -> None:
    with pytest.raises(SimulationError, match=f"lengths: trace: {message}"):
        make(scenario, arrivals=kind, lengths="trace")


def csv(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "trace.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    path.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")
    return path


def times_of(path: Path, count: int = 10) -> Stretch:
    """The first rows of a file as arrivals for ``make``."""
    read = read_recording(path, "chat")
    times_s = np.array([row.at_s for row in read.rows])
    return stretch(Trace(read.source, times_s, tuple(read.rows)), count, 0, 2.0, "rescale")


def test_arrivals_of_another_trace_replace_the_scenarios(tmp_path: Path) -> None:
    rows = [f"2024-01-01 00:00:{i:02d}.5,{100 + i},{10 + i}" for i in range(10)]
    path = csv(tmp_path, *rows)
    jobs = make(count=10, lengths="trace", stretch=times_of(path))
    assert sorted(job.rounds[0].prompt_tokens for job in jobs) == list(range(100, 110))
    assert np.allclose(np.diff([job.arrival_s for job in jobs]), 0.5)
    table = make("mixed", count=10, stretch=times_of(path))
    assert np.allclose(np.diff([job.arrival_s for job in table]), 0.5)
    assert len({job.application for job in table}) == 3
    with pytest.raises(SimulationError, match=r"10 jobs are more than the 9 rows of trace\.csv"):
        times_of(csv(tmp_path, *rows[:9]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["2024-01-01 00:00:00,5,5", "2024-01-01 00:00:01,many,5"], r"line 3, field ContextTokens"),
        (["2024-01-01 00:00:00,5,-1"], r"line 2, field GeneratedTokens: '-1'"),
        (["yesterday,5,5"], r"line 2, field TIMESTAMP: 'yesterday'"),
        (["2024-01-01 00:00:00,5"], r"line 2, field GeneratedTokens"),
        ([], "has no rows"),
        (["2024-01-01 00:00:00,5,5"] * 4, r"empty window: 2 rows of trace\.csv have the same time"),
    ],
)
def test_a_bad_trace_is_named_with_line_and_field(
    tmp_path: Path, rows: list[str], message: str
) -> None:
    with pytest.raises((SimulationError, TraceError), match=message) as caught:
        times_of(csv(tmp_path, *rows), 2)
    assert "trace.csv" in str(caught.value)


def test_thin_needs_a_trace() -> None:
    with pytest.raises(SimulationError, match="fit: thin: square arrivals come from no trace"):
        make(arrivals="square", fit="thin")


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_without_data_a_stand_in_is_used(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "data_folder", lambda: None)
    kind = SCENARIOS[scenario].arrivals[0]
    assert read_trace(kind).source.startswith("synthetic stand-in for")
    jobs = make(scenario, count=1200)
    assert jobs[-1].arrival_s == pytest.approx(600, rel=0.01)
    assert shape(jobs) == shape(make(scenario, count=1200, rate=7.0))


# --- context, AdaServe, arguments -----------------------------------------------------------------


@settings(max_examples=examples(40))
@given(
    scenario=st.sampled_from(sorted(SCENARIOS)),
    seed=st.integers(0, 1000),
    limit=st.integers(200, 9000),
)
def test_every_job_fits_the_context(scenario: str, seed: int, limit: int) -> None:
    hardware = Hardware("small", 1, MODEL, 9000, max_model_len=limit)
    if any(a.mean_tokens > limit for a in SCENARIOS[scenario].applications):
        with pytest.raises(SimulationError, match="cannot hold a mean job"):
            make(scenario, hardware, count=60, seed=seed)
        return
    jobs = make(scenario, hardware, count=60, seed=seed)
    assert all(job.tokens <= limit for job in jobs)
    assert all(job.rounds for job in jobs)


def test_prompts_are_clipped_and_answers_kept() -> None:
    opt = load_hardware("a100-opt-13b")
    roomy, tight = make("summarizer", count=2000), make("summarizer", opt, count=2000)
    for free, clipped in zip(roomy, tight, strict=True):
        (a,), (b,) = free.rounds, clipped.rounds
        if free.tokens <= 2048:
            assert (b.prompt_tokens, b.output_tokens) == (a.prompt_tokens, a.output_tokens)
        else:
            assert clipped.tokens <= 2048
            assert b.output_tokens == min(a.output_tokens, 1792)
    assert any(free.tokens > 2048 for free in roomy)


def test_a_full_conversation_ends_early_with_the_last_rounds_objective() -> None:
    hardware = Hardware("small", 1, MODEL, 50_000, max_model_len=2500)
    jobs, free = make("toolllm", hardware), make("toolllm")
    assert any(len(a.rounds) < len(b.rounds) for a, b in zip(jobs, free, strict=True))
    assert all(job.rounds[-1].stages[0].tpot_s == 0.1 for job in jobs)


def test_a_scenario_that_cannot_fit_is_refused() -> None:
    opt = load_hardware("a100-opt-13b")
    with pytest.raises(SimulationError, match=r"2048 tokens cannot hold .* of reasoning \(5623\)"):
        make("reasoning", opt)


def test_adaserve_states_tpot_alone() -> None:
    jobs = make("adaserve", count=1000)
    step_s = ROOMY.zero_load_tpot_s()
    expected = {"copilot": 1.2 * step_s, "chatbot": 0.05, "summarization": 0.15}
    assert {job.application for job in jobs} == set(expected)
    for job in jobs:
        (only,) = job.rounds
        assert only.ttft_s == math.inf
        assert only.tightest_tpot_s == pytest.approx(expected[job.application])
    assert make("adaserve", arrivals="adaserve", count=1000) == jobs
    steady = make("adaserve", arrivals="poisson", count=1000)
    assert shape(steady) == shape(jobs)
    assert steady[-1].arrival_s != jobs[-1].arrival_s


def test_adaserve_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "emission.json"
    path.write_text('[{"emission_time_ms": 0, "input_length": 5, "output_length": 5}]')
    with pytest.raises(TraceError, match="request 0, field slo_ratio: missing"):
        read_recording(path)
    with pytest.raises(SimulationError, match="more than the 1445 rows"):
        make("adaserve", count=1446)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scenario": "chatbott"}, "scenario: 'chatbott' is unknown; did you mean 'chatbot'"),
        ({"rate": 0.0}, "rate: must be"),
        ({"rate": math.nan}, "rate: must be"),
        ({"rate": math.inf}, "rate: must be"),
        ({"count": 0}, "count: must be a whole number"),
        ({"count": 1.5}, "count: must be a whole number"),
        ({"seed": -1}, "seed: must be a whole number"),
        ({"arrivals": "azure"}, "arrivals: 'azure' is unknown; use one of azure-code"),
        ({"arrivals": "adaserve"}, "arrivals: 'adaserve' is unknown"),
        ({"fit": "stretch"}, "fit: must be rescale or thin"),
        ({"lengths": "real"}, "lengths: must be table or trace"),
        ({"count": 20_000}, "20000 jobs are more than the 19366 rows"),
    ],
)
def test_a_bad_argument_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        make(**given)


@pytest.mark.parametrize("scenario", PAPER)
def test_1500_jobs_are_made_with_little_work(scenario: str) -> None:
    """However many there are, each takes some dozens of calls; traces are read once."""
    make(scenario, count=1500)  # reads the traces
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        make(scenario, count=1500)
    finally:
        sys.setprofile(before)
    assert calls < 100 * 1500


def test_workloads_need_neither_torch_nor_vllm() -> None:
    heavy = "{'torch', 'vllm', 'ray', 'numba', 'httpx', 'matplotlib', 'openai'}"
    code = f"import sys, vllm_slo.sim.scenarios; print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert done.stdout.strip() == "set()"
