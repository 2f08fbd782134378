# SPDX-License-Identifier: Apache-2.0
"""Workloads of the bench: deterministic, true to their statistics; bad input is named."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.bench import traces
from vllm_slo.bench.classes import parse_classes
from vllm_slo.bench.command import parse_server
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.main import build_workload
from vllm_slo.bench.planned import Workload
from vllm_slo.bench.workload import DEFAULT_CLASSES, ClassSpec, Lengths, WorkloadOptions
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.traces.errors import TraceError

ZERO = ZeroLoad(((16, 0.02), (256, 0.05), (1024, 0.2)), 0.01, "lone")


def test_zero_load_interpolates_and_extrapolates() -> None:
    assert ZERO.ttft_s(1) == ZERO.ttft_s(16) == 0.02
    assert ZERO.ttft_s(136) == pytest.approx(0.035)
    assert ZERO.ttft_s(1024) == pytest.approx(0.2)
    assert ZERO.ttft_s(1792) == pytest.approx(0.35)
    assert ZeroLoad.from_dict(json.loads(json.dumps(ZERO.to_dict()))) == ZERO


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"ttft_points": [], "tpot_s": 1},
        {"ttft_points": [[16, -1]], "tpot_s": 1},
        {"ttft_points": [[16, 1], [8, 2]], "tpot_s": 1},
        {"ttft_points": [[16, 1]], "tpot_s": 0},
        {"ttft_points": [[16]], "tpot_s": 1},
        {"ttft_points": [[16, 1]], "tpot_s": None},
    ],
)
def test_zero_load_refuses_nonsense(broken: dict[str, Any]) -> None:
    with pytest.raises(BenchError, match="--zero-load"):
        ZeroLoad.from_dict(broken)


def synthetic(**changes: Any) -> Workload:
    return build_workload(replace(WorkloadOptions(rate=5.0, duration_s=60.0), **changes), ZERO)


def test_synthetic_is_deterministic_and_hits_its_statistics() -> None:
    workload = synthetic(rate=10.0, duration_s=200.0)
    assert workload == synthetic(rate=10.0, duration_s=200.0)
    assert workload != synthetic(rate=10.0, duration_s=200.0, seed=1)
    assert workload.rate == 10.0
    times = [r.at_s for r in workload.requests]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 200
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.1)  # Poisson
    counts = Counter(r.slo_class for r in workload.requests)
    assert counts == {"chat": 800, "code": 600, "summary": 400, "batch": 200}
    chat = [r for r in workload.requests if r.slo_class == "chat"]
    assert np.mean([r.prompt_tokens for r in chat]) == pytest.approx(380, rel=0.1)
    assert np.std([r.prompt_tokens for r in chat]) == pytest.approx(210, rel=0.2)
    assert np.mean([r.output_tokens for r in chat]) == pytest.approx(130, rel=0.1)


def test_objectives_are_multiples_of_zero_load() -> None:
    workload = synthetic()
    for r in workload.requests:
        spec = next(c for c in DEFAULT_CLASSES if c.name == r.slo_class)
        if spec.ttft_slowdown is None or spec.tpot_multiple is None:
            assert r.slo_body() is None
            continue
        assert r.ttft_slo_s == pytest.approx(spec.ttft_slowdown * ZERO.ttft_s(r.prompt_tokens))
        assert r.tpot_slo_s == pytest.approx(spec.tpot_multiple * 0.01)
        body = r.slo_body()
        assert body is not None
        assert body["tpot_ms"] == pytest.approx(1e3 * r.tpot_slo_s)
    tightened = synthetic(slo_scale=0.5)
    assert tightened.requests[0].at_s == workload.requests[0].at_s
    for loose, tight in zip(workload.requests, tightened.requests, strict=True):
        if loose.tpot_slo_s is not None:
            assert tight.tpot_slo_s == pytest.approx(loose.tpot_slo_s / 2)


def test_square_wave_bursts() -> None:
    workload = synthetic(
        rate=20.0, duration_s=100.0, arrivals="square", burst_factor=3.0, burst_period_s=10.0
    )
    assert workload.rate == 20.0
    in_burst = sum(r.at_s % 10 < 2.5 for r in workload.requests)
    assert in_burst / len(workload.requests) == pytest.approx(0.75, abs=0.04)
    assert max(r.at_s for r in workload.requests) < 100
    everything = synthetic(arrivals="square", burst_factor=4.0)  # silence between the bursts
    assert all(r.at_s % 20 <= 5 for r in everything.requests)


@settings(max_examples=examples(40))
@given(
    rate=st.floats(0.05, 30),
    duration_s=st.floats(0.5, 90),
    max_context=st.integers(8, 5000),
    seed=st.integers(0, 2**32),
    square=st.booleans(),
    scale=st.one_of(st.none(), st.floats(0.001, 50)),
)
def test_any_synthetic_workload_is_well_formed(
    rate: float, duration_s: float, max_context: int, seed: int, square: bool, scale: float | None
) -> None:
    workload = synthetic(
        rate=rate,
        duration_s=duration_s,
        max_context=max_context,
        seed=seed,
        arrivals="square" if square else "poisson",
        length_scale=scale,
    )
    assert len(workload.requests) == max(1, round(rate * duration_s))
    previous_s = 0.0
    for r in workload.requests:
        assert previous_s <= r.at_s < duration_s
        previous_s = r.at_s
        assert r.prompt_tokens >= 1
        assert r.output_tokens >= 1
        assert r.prompt_tokens + r.output_tokens <= max_context
    assert len({r.request_id for r in workload.requests}) == len(workload.requests)
    json.dumps(workload.describe(), allow_nan=False)


def test_prompts_are_reproducible_and_share_no_prefix() -> None:
    workload = synthetic()
    first, second = workload.requests[:2]
    ids = workload.prompt_ids(first, 512)
    assert ids == synthetic().prompt_ids(first, 512)
    assert len(ids) == first.prompt_tokens
    assert 16 <= min(ids) <= max(ids) < 512
    assert ids[:8] != workload.prompt_ids(second, 512)[:8]
    assert set(workload.prompt_ids(first, 2)) == {1}


made_and_real = pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=pytest.mark.real_data)], ids=["made", "real"]
)


@made_and_real
@pytest.mark.parametrize("name", ["azure", "azure-code", "azure-conv"])
def test_azure_hits_its_rate_and_keeps_its_shape(
    name: str, real: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not real:
        monkeypatch.setattr(traces, "data_folder", lambda: None)
    options = WorkloadOptions(workload=name, rate=4.0, duration_s=100.0, max_context=1024)
    workload = build_workload(options, ZERO)
    assert workload == build_workload(options, ZERO)
    assert workload.rate == pytest.approx(4.0, abs=0.01)  # two kinds round separately
    assert ("stand-in" in workload.source) is not real
    assert all(0 <= r.at_s <= 100 for r in workload.requests)
    assert max(r.prompt_tokens + r.output_tokens for r in workload.requests) <= 1024
    wanted = {"azure-code": {"code"}, "azure-conv": {"chat"}}.get(name, {"code", "chat"})
    assert {r.slo_class for r in workload.requests} == wanted
    per_5s, _ = np.histogram([r.at_s for r in workload.requests], 20, (0, 100))
    if name == "azure-code":  # bursts: far from Poisson, whose variance equals its mean
        assert per_5s.var() > 3 * per_5s.mean()


@pytest.mark.real_data
@pytest.mark.parametrize("kind", ["code", "conv"])
def test_stand_in_has_the_statistics_of_the_real_trace(kind: traces.AzureKind) -> None:
    folder = traces.data_folder()
    assert folder is not None
    real = traces.read_recording(folder / f"azure_llm_2023_{kind}.csv", "x").rows
    made = traces.standin_azure(kind, 0)
    assert len(made) == len(real)
    for field_name in ("prompt_tokens", "output_tokens"):
        a, b = ([getattr(r, field_name) for r in rows] for rows in (real, made))
        assert np.mean(b) == pytest.approx(np.mean(a), rel=0.15)
        assert np.std(b) == pytest.approx(np.std(a), rel=0.35)
    spans = [rows[-1].at_s - rows[0].at_s for rows in (real, made)]
    assert spans[1] == pytest.approx(spans[0], rel=0.05)
    index = []
    for rows in (real, made):
        counts, _ = np.histogram([r.at_s - rows[0].at_s for r in rows], np.arange(0, 3400, 10))
        index.append(counts.var() / counts.mean())
    assert index[1] == pytest.approx(index[0], rel=0.5)  # burstiness in windows of 10 s


@made_and_real
def test_adaserve(real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not real:
        monkeypatch.setattr(traces, "data_folder", lambda: None)
    options = WorkloadOptions(workload="adaserve", rate=3.0, duration_s=120.0)
    workload = build_workload(options, ZERO)
    assert workload.rate == 3.0
    objectives = {r.slo_class: r.tpot_slo_s for r in workload.requests}
    slower = ZERO.tpot_s / traces.ADASERVE_ZERO_LOAD_TPOT_S
    assert objectives["copilot"] == pytest.approx(1.2 * ZERO.tpot_s)
    assert objectives["chatbot"] == pytest.approx(0.05 * slower)
    assert objectives["summarization"] == pytest.approx(0.15 * slower)
    assert all(r.ttft_slo_s is None for r in workload.requests)
    peak = {
        name: np.mean([r.at_s for r in workload.requests if r.slo_class == name])
        for name in objectives
    }
    assert peak["chatbot"] < peak["copilot"] < peak["summarization"]
    native = build_workload(replace(options, rate=None, duration_s=30.0), ZERO)
    assert len(native.requests) > 100  # this machine is 3.3 times as fast: 100 s of theirs
    assert max(r.at_s for r in native.requests) < 30


GOOD_CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n"
GOOD_ROW: dict[str, Any] = {
    "emission_time_ms": 0.0,
    "input_length": 4,
    "output_length": 5,
    "slo_ratio": 1.2,
}


def from_file(path: Path, workload: str, **changes: Any) -> Workload:
    options = WorkloadOptions(workload=workload, duration_s=1.0, rate=1.0, trace=path, **changes)
    return build_workload(options, ZERO)


def test_where_recorded_data_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "repository" / "vllm_slo" / "bench"
    beside = tmp_path / "shared" / "data"
    for folder in (package, beside, tmp_path / "named"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(traces, "__file__", str(package / "traces.py"))
    for value, found in [
        (None, beside),
        ("", None),
        (str(tmp_path / "named"), tmp_path / "named"),
        (str(tmp_path / "nowhere"), None),
    ]:
        if value is None:
            monkeypatch.delenv(traces.DATA_VARIABLE)
        else:
            monkeypatch.setenv(traces.DATA_VARIABLE, value)
        assert traces.data_folder() == found


def test_public_prompts_are_read_packed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "data_folder", lambda: tmp_path)
    assert traces.public_prompts("GSM8K") == []
    packed = gzip.compress(json.dumps({"prompt": "def é():"}).encode() + b"\n")
    (tmp_path / "HumanEval.jsonl.gz").write_bytes(packed)
    turns = [{"turns": ["first", "second"]}, {"turns": ["other"]}]
    (tmp_path / "spec_bench.jsonl").write_text("\n".join(map(json.dumps, turns)) + "\n")
    assert traces.public_prompts("HumanEval") == ["def é():"]
    assert traces.public_prompts("Spec-Bench") == ["first", "other"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("TIMESTAMP,ContextTokens\n", "line 1: column GeneratedTokens is missing"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no rows"),
        (GOOD_CSV + "yesterday,1,2\n", "line 3, field TIMESTAMP: 'yesterday'"),
        (GOOD_CSV + "2023-11-16 18:17:04.x,1,2\n", "line 3, field TIMESTAMP"),
        (GOOD_CSV + "2023-11-16 18:17:04,many,2\n", "line 3, field ContextTokens: 'many'"),
        (GOOD_CSV + "2023-11-16 18:17:04,-5,2\n", "line 3, field ContextTokens: '-5'"),
        (GOOD_CSV + "2023-11-16 18:17:04,5,1.5\n", "line 3, field GeneratedTokens: '1.5'"),
        (GOOD_CSV + "2023-11-16 18:17:04,5\n", "line 3, field GeneratedTokens"),
        (GOOD_CSV + "\n", None),
        (GOOD_CSV, None),
    ],
)
def test_malformed_csv(tmp_path: Path, text: str, message: str | None) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    if message is None:
        assert len(from_file(path, "azure-code").requests) == 1
        return
    with pytest.raises(TraceError) as caught:
        from_file(path, "azure-code")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("[\n{", "line 2 is not JSON"),
        ("{}", "looks like Mooncake JSON lines; this workload takes AdaServe JSON"),
        ("[]", "must hold a list"),
        ("[1]", "request 0 is not an object"),
        ([GOOD_ROW, GOOD_ROW | {"slo_ratio": "fast"}], "request 1, field slo_ratio: 'fast'"),
        ([GOOD_ROW | {"slo_ratio": 0}], "field slo_ratio: 0 is no objective"),
        ('[{"emission_time_ms": NaN}]', "field input_length: missing"),
        ([GOOD_ROW | {"emission_time_ms": -1}], "field emission_time_ms: -1.0 is negative"),
        ([GOOD_ROW | {"input_length": True}], "field input_length: 'True'"),
        ([GOOD_ROW | {"output_length": -2}], "field output_length: '-2'"),
        ([{k: v for k, v in GOOD_ROW.items() if k != "output_length"}], "output_length: missing"),
    ],
)
def test_malformed_adaserve(tmp_path: Path, data: Any, message: str) -> None:
    path = tmp_path / "emission.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(TraceError) as caught:
        from_file(path, "adaserve")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"rate": -1.0}, "--rate"),
        ({"rate": 0.0}, "--rate"),
        ({"rate": float("nan")}, "--rate"),
        ({"duration_s": 0.0}, "--duration"),
        ({"duration_s": float("inf")}, "--duration"),
        ({"seed": -1}, "--seed"),
        ({"classes": ()}, "--classes"),
        ({"classes": DEFAULT_CLASSES[:1] * 2}, "--classes"),
        ({"workload": "sythetic"}, "--workload"),
        ({"arrivals": "never"}, "--arrivals"),
        ({"arrivals": "square", "burst_factor": 5.0}, "--burst-factor"),
        ({"arrivals": "square", "burst_period_s": 0.0}, "--burst-period"),
        ({"max_context": 4}, "--max-context"),
        ({"length_scale": 0.0}, "--length-scale"),
        ({"slo_scale": -2.0}, "--slo-scale"),
        ({"trace": Path("x.csv")}, "--trace"),
        ({"workload": "azure", "trace": Path("x.csv")}, "--trace"),
        ({"workload": "azure-code", "classes": DEFAULT_CLASSES[:1]}, "--classes"),
        ({"workload": "azure-code", "rate": 1e6}, "--duration"),
        ({"workload": "azure-code", "rate": -3.0}, "--rate"),
        ({"workload": "adaserve", "rate": -3.0}, "--rate"),
    ],
)
def test_bad_workload_options(changes: dict[str, Any], option: str) -> None:
    with pytest.raises(BenchError) as caught:
        synthetic(**changes)
    assert caught.value.option == option
    assert str(caught.value).startswith(f"{option}: ")


def test_a_trace_that_is_not_there() -> None:
    with pytest.raises(TraceError, match=r"cannot read no/such\.csv: No such file"):
        synthetic(workload="azure-code", trace=Path("no/such.csv"))


def test_classes_option(tmp_path: Path) -> None:
    chosen = parse_classes("chat=3, code=1")
    assert [(c.name, c.share) for c in chosen] == [("chat", 3.0), ("code", 1.0)]
    path = tmp_path / "classes.yaml"
    path.write_text("mine: {share: 1, prompt: 40, output: {mean: 9, std: 3}, ttft_slowdown: 4}\n")
    (mine,) = parse_classes(str(path))
    assert mine == ClassSpec("mine", 1.0, Lengths(40), Lengths(9, 3), 4.0)
    for text, message in (
        ("", "at least one"),
        ("chta", "did you mean chat"),
        ("chat=lots", "'lots' is not a number"),
        ("chat=-1", "share must be above 0"),
        ("none.yaml", "cannot read"),
    ):
        with pytest.raises(BenchError, match=message):
            parse_classes(text)
    for content in ("[", "a", "{}", "x: 1", "x: {output: 1}", "x: {prompt: [], output: 1}",
                    "x: {prompt: 1, output: 1, colour: red}", "x: {prompt: 0, output: 1}",
                    "x: {prompt: {middle: 3}, output: 1}",
                    "x: {prompt: 1, output: 1, ttft_slowdown: 0}"):  # fmt: skip
        path.write_text(content)
        with pytest.raises(BenchError, match="--classes"):
            parse_classes(str(path))


def test_server_option() -> None:
    target = parse_server("http://127.0.0.1:8000/v1=stock", None, ["stock"])
    assert (target.name, target.api_url, target.send_slo) == (
        "stock",
        "http://127.0.0.1:8000/v1",
        False,
    )
    assert parse_server("http://127.0.0.1:8000/", None, []).api_url.endswith(":8000/v1")
    assert parse_server("http://127.0.0.1:8000", None, []).name == "127.0.0.1:8000"
    for text in ("localhost:8000", "=name", "ftp://x", ""):
        with pytest.raises(BenchError, match="--base-url"):
            parse_server(text, None, [])
