# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo profile MODEL --draft-model D``: errors, and real figures of the built-in models."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo import cli, tiny
from vllm_slo.config.profiles import ProfileKey, ProfileReport
from vllm_slo.core.speculation.benefit import Effect, Kind, Run, benefits
from vllm_slo.core.step_time.fit import fit
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.engine.serving import profile, profile_prompts, profile_speculation
from vllm_slo.engine.serving import speculation_measurement as measurement
from vllm_slo.engine.serving.profile_measurement import Limits
from vllm_slo.engine.serving.profile_speculation import DraftedEngine, SpeculationReport
from vllm_slo.errors import ConfigError, ProfileError

# --- errors, before any engine starts -------------------------------------------------------------


@pytest.fixture
def other_vocabulary(tmp_path: Path) -> Path:
    """The built-in draft model, to which one token has another id."""
    folder = tmp_path / "other"
    shutil.copytree(tiny.path("draft"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    first, second = list(ids)[300:302]
    ids[first], ids[second] = ids[second], ids[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def complaint(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which the command ends."""
    assert cli.main(["profile", "tiny", *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line


def test_what_cannot_be_measured_is_refused_with_one_line(
    tmp_path: Path,
    other_vocabulary: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(profile, "profile", lambda *_, **__: pytest.fail("an engine was started"))
    monkeypatch.setattr(profile_speculation, "_measured", profile.profile)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    texts, empty = tmp_path / "texts.txt", tmp_path / "empty.txt"
    texts.write_text("def f(x):\n")
    empty.write_text("\n  \n")
    broken, other = tmp_path / "broken.jsonl", tmp_path / "other.jsonl"
    broken.write_text('{"prompt": "a"}\n{"prompt": \n')
    other.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    draft = ("--draft-model", "tiny")
    for words, expected in {
        ("--prompts", str(texts)): "--prompts: they are for measuring drafts; name a --draft-model",
        (*draft, "--prompts", str(tmp_path / "none")): "--prompts: cannot read ",
        (*draft, "--prompts", str(empty)): "--prompts: there is no prompt in ",
        (*draft, "--prompts", str(broken)): f"--prompts: {broken}:2: not JSON: ",
        (*draft, "--prompts", str(other)): f'--prompts: {other}:2: there is no text in "prompt"',
        (*draft, "--draft-model", "tiny-middle"): "--draft-model: 2 are given; ",
        ("--draft-model", str(other_vocabulary)): "use a draft of the same family",
        ("--draft-model", str(tmp_path / "no/such")): "there is no folder ",
    }.items():
        assert expected in complaint(capfd, *words), words


def test_an_engine_without_room_is_refused() -> None:
    limits = Limits(requests=256, step_tokens=4096, request_tokens=4096, kv_tokens=262_144)
    small: dict[str, Any] = {
        "max_model_len": Limits(256, 4096, measurement.SHORTEST - 1, 262_144),
        "KV cache": Limits(256, 4096, 4096, 200),
        "max_num_batched_tokens": Limits(256, 5, 4096, 262_144),
    }
    for named, too_small in small.items():
        with pytest.raises(ProfileError, match=named):
            measurement.batches_within(too_small, 5)
    assert measurement.batches_within(limits, 5) == [1, 4, 16, 64]
    assert measurement.lengths_of(5) == [1, 2, 4, 5]
    assert measurement.lengths_of(16) == [1, 2, 4, 7]


@given(
    *(st.integers(1, 300), st.integers(1, 8192), st.integers(96, 8192), st.integers(64, 500_000)),
    st.integers(1, 16),
)
def test_batches_stay_within_the_engine(
    requests: int, step_tokens: int, request_tokens: int, kv_tokens: int, deepest: int
) -> None:
    limits = Limits(requests, step_tokens, request_tokens, kv_tokens)
    try:
        batches = measurement.batches_within(limits, deepest)
    except ProfileError:
        return
    assert batches == sorted(set(batches))
    assert 1 <= batches[0] <= batches[-1] <= min(requests, 64)
    assert batches[-1] * (1 + deepest) <= step_tokens
    needed = min(measurement.PROMPT + 2 * measurement.ANSWER, request_tokens)
    assert batches[-1] * needed <= kv_tokens


def test_a_number_of_requests_is_measured_twice_or_not_at_all() -> None:
    hurried = measurement._Pace([1, 4, 16], time.monotonic() - 1.0)
    for turn in range(3):
        for batch in (1, 4, 16):
            if allowed := hurried.has_time(turn, batch):
                with hurried.timing(batch):
                    pass
            assert allowed == (batch == 1 and turn < 2)
    at_leisure = measurement._Pace([1, 4, 16], time.monotonic() + 3600.0)
    assert at_leisure.has_time(0, 1)
    with at_leisure.timing(1):
        pass
    assert at_leisure.has_time(0, 4)
    assert not at_leisure.has_time(1, 16)  # not in the first turn, so not later


# --- prompts and the engine's arguments -----------------------------------------------------------


def test_prompts_are_read_from_text_and_from_json_lines(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text('{"prompt": "no JSON here"}\n\ndef f():\n')
    lines.write_text('{"prompt": "one\\ntwo", "id": 1}\n\n{"prompt": "three"}\n')
    assert profile_prompts.read_prompts(text) == ['{"prompt": "no JSON here"}', "def f():"]
    assert profile_prompts.read_prompts(lines) == ["one\ntwo", "three"]
    text.write_text("word " * 10_000 + "\n" + "x\n" * 1_000)
    many = profile_prompts.read_prompts(text)
    assert len(many) == profile_prompts.MOST_PROMPTS
    assert len(many[0]) == profile_prompts.MOST_LETTERS


def test_there_are_built_in_prompts() -> None:
    prompts = profile_prompts.built_in_prompts()
    assert 64 <= len(prompts) <= profile_prompts.MOST_PROMPTS
    assert len(set(prompts)) == len(prompts)


def test_the_engine_is_that_of_serve() -> None:
    engine = DraftedEngine.of("tiny", ["tiny"], {"max_num_seqs": 8})
    assert engine.model == str(tiny.path("target"))
    assert engine.arguments["additional_config"] == {"draft_model": str(tiny.path("draft"))}
    assert engine.arguments["speculative_config"]["num_speculative_tokens"] == 24
    plain = engine.without_drafts()
    assert plain == {
        name: engine.arguments[name]
        for name in ("kv_cache_memory_bytes", "max_num_seqs", "block_size")
    }  # a profile has the block size in its key
    own = DraftedEngine.of("tiny", ["tiny"], {"block_size": 64, "gpu_memory_utilization": 0.1})
    assert own.without_drafts() == {"block_size": 64, "gpu_memory_utilization": 0.1}
    with pytest.raises(ConfigError, match="worker_cls"):
        DraftedEngine.of("tiny", ["tiny"], {"worker_cls": "x"})


# --- the real thing -------------------------------------------------------------------------------


def stored_profile() -> ProfileReport:
    """Step times that were not measured: another test measures them."""
    key = ProfileKey("CPU", "target", "0" * 64, 1, 1, "float32", "0.32.0", 32)
    true = StepTimeModel(((0.0, 0.0, 0.008), (0.00003, 0.0, 0.004)), 2e-8, pair_s=5e-10)
    shapes = [BatchShape.of([(n, c)]) for n in (1, 16, 256) for c in (0, 500, 4000)]
    samples = tuple((shape, true.predict_shape_s(shape)) for shape in shapes)
    return ProfileReport(key, fit(samples), samples)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_figures_are_consistent_and_the_verdict_agrees_with_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, where all ways yield the same answers to the same prompts."""
    pytest.importorskip("vllm")
    reports: list[SpeculationReport] = []
    show = profile._print_drafted

    def noting(console: Any, report: SpeculationReport, title: str) -> None:
        reports.append(report)
        show(console, report, title)

    monkeypatch.setattr(profile, "_print_drafted", noting)
    monkeypatch.setattr(profile, "profile", lambda *_, **__: stored_profile())
    monkeypatch.setattr(profile_speculation, "QUICK_LIMIT_S", 8.0)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    prompts = tmp_path / "prompts.jsonl"
    texts = profile_prompts.built_in_prompts()[:8]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    words = ["--quick", "--enforce-eager", "--dtype", "float32", "--max-num-seqs", "2"]
    words += ["--max-model-len", "512", "--prompts", str(prompts)]
    out = tmp_path / "profile.json"
    status = cli.main(["profile", "tiny", "--draft-model", "tiny", *words, "--json", str(out)])
    printed = capfd.readouterr()
    assert status == 0, printed.out + printed.err
    assert out.is_file()

    (report,) = reports
    runs = report.runs
    assert list(report.found) == benefits(runs)
    assert [one.requests for one in report.found] == [1, 2][: len(report.found)]
    assert {run.way.kind for run in runs} == set(Kind)
    for run in runs:
        check_run(run)
    for one in report.found:
        assert one.turns >= 2
        lengths = [gain.way.length for gain in one.chains]
        assert lengths == [1, 2, 4, 5]
        assert one.chains[0].accepted < one.chains[-1].accepted  # the same texts, guessed further
        assert one.served is not None
    check_printed(report, printed.out)


def check_run(run: Run) -> None:
    assert run.tokens_per_s * run.seconds == pytest.approx(run.tokens)
    assert run.token_s * run.tokens_per_s == pytest.approx(run.requests)
    assert 0.0 <= run.drafting_s < run.seconds
    assert run.requests * run.steps <= run.tokens <= run.requests * run.steps + run.verified
    if run.way.kind == Kind.PLAIN:
        assert (run.verified, run.drafted, run.drafting_s, run.accepted) == (0, 0, 0.0, 0.0)
    elif run.way.length:
        # Less than the whole only in steps whose requests have just had their first token.
        whole = run.way.length * run.requests * run.steps
        assert 0.85 * whole <= run.verified <= whole
        assert 0.0 < run.accepted <= run.way.length
        assert run.drafting_s > 0.0


def check_printed(report: SpeculationReport, printed: str) -> None:
    first = report.found[0]
    assert f"{first.plain_tokens_per_s:.0f}" in printed
    said = " ".join(printed.split())
    assert ("Speculation helps " in said) == any(one.effect is Effect.HELPS for one in report.found)
    assert ("drafting costs more than it gives" in said) == any(
        one.effect is Effect.COSTS for one in report.found
    )
    assert first.is_unsteady == ("Nothing can be said with 1 " in said)
    assert first.is_unsteady or f"{first.best.speedup.value:.2f}x" in said
    assert "Python code" not in said  # the prompts were the user's


@pytest.mark.engine
@pytest.mark.slow
def test_an_engine_that_does_not_start_says_why_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    engine = DraftedEngine(str(tmp_path), {}, "tiny")
    with pytest.raises(ProfileError, match=r"^the engine with the draft model failed: .+$"):
        profile_speculation.profile_speculation(engine, quick=True)
