# SPDX-License-Identifier: Apache-2.0
"""Step-time profiles: their keys, where they are kept, and one measured on a real engine."""

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from patience import patience

from vllm_slo import tiny
from vllm_slo.config import profiles
from vllm_slo.config.profiles import ProfileKey, ProfileReport
from vllm_slo.core.step_time.fit import fit
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.engine.serving import profile, profile_measurement
from vllm_slo.engine.serving.profile_measurement import Limits, scenarios
from vllm_slo.errors import ProfileError

KEY = ProfileKey(
    device="Some GPU 80GB HBM3",
    model="Llama-8B",
    model_hash="0123456789abcdef" * 4,
    tensor_parallel=2,
    pipeline_parallel=1,
    dtype="bfloat16",
    vllm_version="0.32.0",
    block_size=16,
)
TRUE = StepTimeModel(((0.0, 0.0, 0.008), (0.00003, 0.0, 0.004)), 2e-8, pair_s=5e-10)
ANOTHER: dict[str, Any] = {
    "device": "Other GPU", "model_hash": "f" * 64, "tensor_parallel": 1, "pipeline_parallel": 4,
    "dtype": "float16", "vllm_version": "0.33.0", "block_size": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_SLO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def report() -> ProfileReport:
    chunks = [[(n, c)] for n in (1, 16, 256, 1024) for c in (0, 500, 4000)]
    decodes = [[(1, c)] * b for b in (1, 8, 64) for c in (20, 1000)]
    shapes = [BatchShape.of(batch) for batch in chunks + decodes]
    samples = tuple((shape, TRUE.predict_shape_s(shape)) for shape in shapes)
    return ProfileReport(KEY, fit(samples), samples)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert profiles.cache_dir() == cache
    monkeypatch.delenv("VLLM_SLO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert profiles.cache_dir() == Path("/somewhere/vllm-slo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profiles.cache_dir() == Path.home() / ".cache" / "vllm-slo"


def test_every_field_of_the_key_has_its_own_file() -> None:
    others = [replace(KEY, **{name: value}) for name, value in ANOTHER.items()]
    paths = {profiles.default_path(key) for key in [KEY, *others]}
    assert len(paths) == 1 + len(ANOTHER)
    assert KEY.slug() == (
        "Some-GPU-80GB-HBM3_Llama-8B_0123456789ab_tp2_pp1_bfloat16_vllm0.32.0_block16"
    )
    assert "/" not in replace(KEY, device="../../etc/passwd", model="..").slug()


def test_round_trip_through_the_cache(report: ProfileReport, cache: Path) -> None:
    assert profiles.find(KEY) is None
    path = profiles.save(report)
    assert path.parent == cache / "profiles"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert profiles.load(path) == report
    assert profiles.find(KEY) == report.model
    assert profiles.find(KEY, path) == report.model
    assert profiles.find(replace(KEY, model="a-copy-of-llama"), path) == report.model
    assert profiles.find(replace(KEY, block_size=32)) is None


@pytest.mark.parametrize("field", ANOTHER)
def test_a_profile_of_another_setup_is_refused(
    report: ProfileReport, tmp_path: Path, field: str
) -> None:
    path = profiles.save(report, tmp_path / "mine.json")
    named = "model" if field == "model_hash" else field
    with pytest.raises(ProfileError, match=f"another {named}: .*vllm-slo profile"):
        profiles.find(replace(KEY, **{field: ANOTHER[field]}), path)


def break_(data: Any, *where: Any, value: Any = None) -> str:
    inner = data
    for step in where[:-1]:
        inner = inner[step]
    if value is None:
        del inner[where[-1]]
    else:
        inner[where[-1]] = value
    return json.dumps(data)


def test_broken_files_are_refused(report: ProfileReport) -> None:
    path = profiles.save(report)
    good = path.read_text()
    texts = [
        "", "{", "[]", "null", "1", '{"format": 1}', "[" * 100_000, good[: len(good) // 2],
        break_(json.loads(good), "format", value=2),
        break_(json.loads(good), "key"),
        break_(json.loads(good), "key", "device"),
        break_(json.loads(good), "key", "device", value=7),
        break_(json.loads(good), "key", "colour", value="red"),
        break_(json.loads(good), "model"),
        break_(json.loads(good), "model", "terms", 0, 1, value=-1.0),
        break_(json.loads(good), "model", "terms", value=[[0.0, 0.0, 0.0]] * 2),
        break_(json.loads(good), "model", "kv_s", value=math.nan),
        break_(json.loads(good), "model", "max_tokens", value=0),
        break_(json.loads(good), "fit", "r2"),
        break_(json.loads(good), "samples", 0, value=[1, 2]),
    ]  # fmt: skip
    for text in texts:
        path.write_text(text)
        with pytest.raises(ProfileError, match="vllm-slo profile"):
            profiles.find(KEY)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="cannot read"):
        profiles.find(KEY)
    with pytest.raises(ProfileError, match="cannot read"):
        profiles.find(KEY, path.parent / "missing.json")


def test_an_unwritable_place_is_named(report: ProfileReport, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="--json"):
        profiles.save(report, tmp_path / "file" / "profile.json")


def test_medians_ignore_a_hiccup() -> None:
    shapes = [BatchShape.of([(1, 1000 + i)] * 4) for i in range(3)]
    other = (BatchShape.of([(64, 0)]), 0.3)
    steps = [(shapes[0], 0.1), (shapes[1], 9.0), (shapes[2], 0.11), other]
    assert profile_measurement.medians(steps) == [other, (shapes[2], 0.11)]


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    "limits",
    [
        Limits(requests=24, step_tokens=512, request_tokens=2000, kv_tokens=20_000),
        Limits(requests=256, step_tokens=8192, request_tokens=131_072, kv_tokens=400_000),
        Limits(requests=8, step_tokens=256, request_tokens=600, kv_tokens=3_000),
    ],
)
def test_the_grid_stays_within_the_engine(limits: Limits, quick: bool) -> None:
    plan = scenarios(limits, fill_tokens=10_000, quick=quick)
    for s in plan:
        assert list(s.batches) == sorted(s.batches, reverse=True)
        assert s.batches[0] + (len(s.chunks) > 0) <= limits.requests
        assert s.batches[0] + max(s.chunks, default=0) <= limits.step_tokens
        assert s.chunk_context + sum(s.chunks) < limits.request_tokens
        assert s.decode_context < limits.request_tokens
        assert s.batches[0] <= 1 or s.batches[0] * s.decode_context <= 10_000
        assert s.batches[0] * s.decode_context + s.chunk_context < limits.kv_tokens
    assert {s.batches[0] > 0 for s in plan} == {True, False}
    assert any(s.chunks and s.chunk_context for s in plan)
    assert any(s.chunks and s.batches[0] for s in plan)
    assert scenarios(replace(limits, request_tokens=16), fill_tokens=10_000) == []


def test_picture(report: ProfileReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = profile.draw(report, tmp_path / "fit.png")
    assert path.read_bytes().startswith(b"\x89PNG")


COMMAND = """
import argparse, sys
from vllm_slo.engine.serving import profile
parser = argparse.ArgumentParser()
profile.add_arguments(parser)
sys.exit(profile.run(parser.parse_args()))
"""


@pytest.mark.engine
@pytest.mark.slow
def test_a_real_engine_is_measured_stored_and_found(tmp_path: Path) -> None:
    """One quick profile of the shipped draft model, through the command's own entry.

    In a process of its own: vLLM binds the threads of the one it runs in to cores for good.
    """
    pytest.importorskip("vllm")
    out = tmp_path / "profile.json"
    arguments = [str(tiny.path("draft")), "--quick", "--enforce-eager", "--max-num-seqs", "8"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *arguments, "--json", str(out)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=patience(200), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "R\u00b2" in done.stdout

    report = profiles.load(out)
    assert report.fit.n == len(report.samples) > 10
    assert math.isfinite(report.fit.r2)
    measured = [took_s for _, took_s in report.samples]
    unseen = report.model.predict_shape_s(BatchShape.of([(1, 100), (1, 200), (30, 10)]))
    assert min(measured) / 10 < unseen < 10 * max(measured)
    assert profiles.find(report.key, out) == report.model
    assert report.key.model == "draft"
    assert report.key.vllm_version.startswith("0.")


def test_a_fit_of_noise_is_stored_only_on_demand(
    report: ProfileReport,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    noise = replace(report, fit=replace(report.fit, r2=0.1))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setattr(profile, "profile", lambda *_, **__: noise)
    with pytest.raises(ProfileError, match="quiet machine"):
        profile.run(parser.parse_args(["model"]))
    assert profiles.find(KEY) is None
    assert profile.run(parser.parse_args(["model", "--json", str(tmp_path / "it.json")])) == 0
    assert profiles.find(KEY, tmp_path / "it.json") == report.model


def test_the_command_fails_with_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    args = parser.parse_args(["model", "--block-size", "32"])
    assert (args.block_size, args.quick, hasattr(args, "dtype")) == (32, False, False)

    def refuse(*_: object, **engine_args: object) -> None:
        raise ProfileError(f"no such engine {engine_args['block_size']}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "profile", refuse)
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        with pytest.raises(ProfileError, match="no such engine 32"):
            profile.run(args)
