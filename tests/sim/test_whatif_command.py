# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo whatif`` from files to files: what it refuses and writes, which requests count."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from vllm_slo import cli
from vllm_slo.sim.cluster import Run
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.jobs import JobResult, RoundResult
from vllm_slo.sim.systems import parse_system
from vllm_slo.sim.traffic import Traffic
from vllm_slo.sim.whatif import command, comparison
from vllm_slo.sim.whatif.comparison import Comparison
from vllm_slo.traces.classes import TrafficClasses
from vllm_slo.traces.own_format import header_line, request_line
from vllm_slo.traces.request import Served, TraceRequest
from vllm_slo.traces.selection import load

CONFIG = """\
classes:
  chat: {ttft_ms: 500, tpot_ms: 50}
  strict: {ttft_ms: 200, on_unattainable: decline}
  batch: {tier: best_effort}
"""
RULES = "rules: [{class: strict, prompt_tokens: '300-'}]\ndefault: chat\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run: a recording, a trace of another format, a configuration, rules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slo.yaml").write_text(CONFIG)
    (tmp_path / "rules.yaml").write_text(RULES)
    (tmp_path / "own.jsonl").write_text(recording())
    rows = "".join(f"2024-05-10 00:00:{i:02}.5,{100 + 10 * i},{5 + i}\n" for i in range(40))
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    (tmp_path / "once.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2024-05-10 00:00:00,5,5\n" * 3
    )
    return tmp_path


def recording() -> str:
    """60 requests, two a second: of every six one is batch; 5 and 11 were left by their client,
    7 declined before its first token, 8 failed."""
    lines = []
    for i in range(60):
        name = "batch" if i % 6 == 0 else "chat"
        end: Any = {5: "aborted", 11: "aborted", 7: "declined", 8: "failed"}.get(i, "completed")
        slow = i % 4 == 3
        served = Served(
            end,
            "in_time" if name == "chat" and not slow else "none",
            None if end == "declined" else 0.9 if slow else 0.3,
            None if end == "declined" else 0.02,
            0.9 if end == "declined" else 2.0,
        )
        lines.append(
            request_line(
                TraceRequest(
                    100.0 + i / 2,
                    200,
                    0 if end == "declined" else 50,
                    name,
                    ttft_ms=None if name == "batch" else 400,
                    served=served,
                ),
                100.0,
            )
        )
    return header_line(datetime(2026, 11, 30, tzinfo=UTC), 64, "tiny") + "".join(lines)


def fake_simulate(jobs: Any, system: Any, hardware: Any, conditions: Any) -> Run:
    """Stock gives each first token after 0.6 s, ours after 0.1 s; tokens take 10 ms."""
    results = []
    for job in jobs:
        rounds = []
        for asked in job.rounds:
            wait_s = 0.1 if system.policy == "slo" else 0.6
            times = tuple(job.arrival_s + wait_s + 0.01 * i for i in range(asked.output_tokens))
            promised = asked.has_objective if system.policy == "slo" else None
            rounds.append(RoundResult(job.arrival_s, times, True, promised))
        results.append(JobResult(job, tuple(rounds)))
    return Run(results, 1.0, 1, 1, 1, 0.0, 0.0, False)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "simulate", fake_simulate)
    monkeypatch.setattr(command, "need_vllm", lambda: None)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    try:
        status = cli.main(["whatif", *words])
    except SystemExit as stop:
        status = int(str(stop.code))
    out, err = capsys.readouterr()
    return status, out, err


# --- what it refuses -----------------------------------------------------------------------------

GOOD = ["own.jsonl", "--slo-config", "slo.yaml", "--hardware", "h100-llama-8b"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["own.jsonl"], "the following arguments are required: --hardware"),
        (GOOD[1:], "the following arguments are required: TRACE"),
        ([*GOOD, "--replicas", "0"], "--replicas: must be at least 1"),
        ([*GOOD, "--routing", "roundrobin"], "did you mean round_robin?"),
        ([*GOOD, "--bias", "0"], "--bias: must be above 0"),
        ([*GOOD, "--noise", "2"], "--noise: must be at least 0 and at most 1"),
        ([*GOOD, "--warmup", "1"], "--warmup: must be at least 0 and at most 0.95"),
        ([*GOOD, "--acceptance", "2"], "--acceptance"),
        ([*GOOD, "--draft-step-ms", "x"], "--draft-step-ms: 'x' is not a number"),
        ([*GOOD, "--processes", "0"], "--processes: must be at least 1"),
        ([*GOOD, "--seed", "-1"], "--seed: must be at least 0"),
        ([*GOOD, "--systems", ","], "--systems: name at least one"),
        ([*GOOD, "--kv-tokens", "x"], "--kv-tokens"),
        ([*GOOD, "--systems", "magic"], "systems: 'magic' is not known"),
        ([*GOOD, "--hardware", "abacus"], "hardware: no profile is called 'abacus'"),
        ([*GOOD, "--slo-config", "none.yaml"], "none.yaml"),
        ([*GOOD, "--rules", "none.yaml"], "cannot read none.yaml"),
        ([*GOOD, "--html", "/dev/null/x.html"], "--html: cannot make /dev/null"),
        ([*GOOD, "--json", "/dev/null/x.json"], "--json: cannot make /dev/null"),
        (
            [*GOOD, "--hardware", "a100-qwen-1.5b", "--systems", "vllm-slo-spec"],
            "hardware a100-qwen-1.5b: it has no draft",
        ),
        (["none.csv", *GOOD[1:]], "cannot read none.csv"),
        (["slo.yaml", *GOOD[1:]], "slo.yaml"),
        ([*GOOD, "--from", "1000"], "own.jsonl has no rows in this selection"),
        (["once.csv", *GOOD[1:]], "all requests that count arrive at the same time"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    folder: Path,
    faked: None,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    named: str,
) -> None:
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert named in err
    (line,) = [line for line in err.splitlines() if "error: " in line]
    assert named in line


def test_a_recording_that_every_client_left_counts_for_nothing(folder: Path) -> None:
    text = recording().replace('"completed"', '"aborted"').replace('"declined"', '"aborted"')
    (folder / "left.jsonl").write_text(text.replace('"failed"', '"aborted"'))
    with pytest.raises(SimulationError, match="clients of all requests left"):
        comparing("left.jsonl")


# --- what counts ---------------------------------------------------------------------------------


def comparing(name: str, rules: str | None = None, warmup: float = 0.0) -> Comparison:
    classes = TrafficClasses.load(Path("slo.yaml"), Path(rules) if rules else None)
    traffic = Traffic(load(Path(name)), classes)
    return Comparison(traffic, load_hardware("h100-llama-8b"), Conditions(), warmup)


@pytest.fixture
def numbers_of(folder: Path, faked: None) -> Any:
    def run(*args: Any, systems: str = command.DEFAULT_SYSTEMS, **more: Any) -> Any:
        found = comparing(*args, **more)
        return found, found.run([parse_system(word) for word in systems.split(",")], 1)

    return run


def test_who_left_and_the_warm_up_count_in_no_column(numbers_of: Any) -> None:
    found, numbers = numbers_of("own.jsonl", warmup=0.1)
    assert (found.trace.requests, found.trace.warmup, found.trace.aborted) == (60, 6, 1)
    assert found.trace.estimated == 1  # the declined one
    assert numbers.all.requests == 60 - 6 - 1
    assert (numbers.measured.from_s, numbers.measured.to_s) == (3.0, 29.5)
    # All of them are in the picture of the load, and were simulated.
    assert [len(column.spans) for column in numbers.columns] == [60, 60, 60]


def test_the_columns_are_judged_by_the_new_objectives(numbers_of: Any) -> None:
    _, numbers = numbers_of("own.jsonl")
    assert [(c.title, c.kind) for c in numbers.columns] == [
        ("As served", "served"), ("Stock vLLM", "stock"), ("vllm-slo", "ours"),
    ]  # fmt: skip
    chat = next(row for row in numbers.classes if row.name == "chat")
    asked = [i for i in range(60) if i % 6 and i not in (5, 11)]
    assert chat.requests == len(asked)
    kept = [i for i in asked if i % 4 != 3 and i not in (7, 8)]
    served, stock, ours = (cell.attained for cell in chat.cells)
    assert (served.kept, served.of) == (len(kept), len(asked))
    assert (stock.kept, ours.kept) == (0, len(asked))
    assert (chat.cells[0].declined, chat.cells[0].failed) == (1, 1)
    promised = [i for i in asked if i % 4 != 3]
    assert (chat.cells[0].promised, chat.cells[2].promised) == (len(promised), len(asked))
    assert chat.cells[0].promised_kept == len(kept)
    assert [row.name for row in numbers.classes] == ["chat", "batch"]
    assert numbers.batch is not None and numbers.batch[2].tokens_per_s > 0


def test_a_server_that_promised_nothing_is_one_that_never_does(
    numbers_of: Any, folder: Path
) -> None:
    (folder / "own.jsonl").write_text(recording().replace('"in_time"', '"none"'))
    _, numbers = numbers_of("own.jsonl")
    assert (numbers.all.cells[0].promised, numbers.all.cells[0].late) == (None, None)
    assert not numbers.columns[0].load(30.0).promises


def test_a_trace_without_outcomes_has_no_served_column_and_rules_give_classes(
    numbers_of: Any,
) -> None:
    found, numbers = numbers_of("azure.csv", "rules.yaml")
    assert "Azure CSV" in found.trace.unrecorded
    assert [column.system for column in numbers.columns] == ["fcfs-2048", "vllm-slo"]
    assert {row.name: row.requests for row in numbers.classes} == {"chat": 20, "strict": 20}
    assert numbers.batch is None


def test_each_request_of_a_session_counts(numbers_of: Any, folder: Path) -> None:
    """A session is one job of several rounds; its requests are judged one by one."""
    lines = []
    for i in range(12):
        request = TraceRequest(
            i * 1.0, 100, 20, "chat", session="a" if i % 3 else None, served=Served(e2e_s=0.5)
        )
        lines.append(request_line(request, 0.0))
    header = header_line(datetime(2026, 11, 30, tzinfo=UTC), 64, None)
    (folder / "sessions.jsonl").write_text(header + "".join(lines))
    found, numbers = numbers_of("sessions.jsonl")
    assert len(found.asked) == 12
    served, _, ours = numbers.columns
    assert len(ours.outcomes) == 12 and len(ours.spans) == 12
    # The recording has no TTFT, so it cannot be judged; the simulation can.
    assert all(outcome.attained is None for outcome in served.outcomes)
    cell = numbers.classes[0].cells
    assert cell[0].attained is None and cell[2].attained.of == 12


def test_several_systems_are_told_apart(numbers_of: Any) -> None:
    names = "fcfs-2048,fcfs-8192,vllm-slo,priority-512,shed-edf-512"
    _, numbers = numbers_of("azure.csv", systems=names)
    assert [(c.title, c.kind) for c in numbers.columns] == [
        ("vLLM fcfs-2048", "stock"), ("vLLM fcfs-8192", "other"), ("vllm-slo", "ours"),
        ("vLLM priority-512", "other"), ("shed-edf-512", "other"),
    ]  # fmt: skip


# --- what it writes ------------------------------------------------------------------------------


@pytest.mark.usefixtures("faked")
def test_files_and_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*GOOD, "--processes", "1", "--from", "2", "--rows", "40"]
    status, out, err = run(capsys, *words, "--html", "report/page.html", "--json", "numbers.json")
    assert (status, err) == (0, "")
    data = json.loads((folder / "numbers.json").read_text())
    assert data["schema"] == "vllm-slo-whatif/1"
    assert (data["trace"]["name"], data["setup"]["slo_config"]) == ("own.jsonl", "slo.yaml")
    assert data["trace"]["selection"] == "from 2 s, at most 40 requests"
    assert data["trace"]["warmup"] == 2
    html = (folder / "report" / "page.html").read_text(encoding="utf-8")
    for cell in data["all"]["systems"].values():
        share = 100 * cell["attained"]["share"]
        assert f"{share:.1f}%" in html and f"{share:.1f}" in out
    assert "written: report/page.html" in out and "written: numbers.json" in out
    assert "chat" in out and "batch" in out and "As served" in out


@pytest.mark.usefixtures("faked", "folder")
def test_json_alone_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *GOOD, "--processes", "1", "--json", "-")
    data = json.loads(out)
    assert (status, err, data["schema"]) == (0, "", "vllm-slo-whatif/1")
    assert data["trace"]["selection"] == "" and set(data["all"]["systems"]) == {
        "served", "fcfs-2048", "vllm-slo",
    }  # fmt: skip


@pytest.mark.usefixtures("faked", "folder")
def test_a_long_trace_is_noted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MANY", 59)
    status, _, err = run(capsys, *GOOD, "--processes", "1", "--json", "-")
    assert status == 0 and err.count("\n") == 1
    assert err.startswith("vllm-slo: note: 60 requests are simulated") and "--rows" in err


@pytest.mark.usefixtures("faked")
def test_a_file_that_cannot_be_written_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "page.html").mkdir()
    status, _, err = run(capsys, *GOOD, "--processes", "1", "--html", "page.html")
    assert status == 2 and "error: --html: cannot write page.html: Is a directory" in err


@pytest.mark.slow
def test_the_real_schedulers_keep_more(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A burst that stock vLLM serves in order of arrival; the same in one process and in two."""
    pytest.importorskip("vllm")
    rows = "".join(
        f"2024-05-10 00:00:{i / 12:09.6f},{3000 if i % 3 else 200},{20 + i % 40}\n"
        for i in range(120)
    )
    (folder / "burst.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    (folder / "tight.yaml").write_text(
        "classes:\n  chat: {ttft_ms: 1500, tpot_ms: 40}\n  batch: {tier: best_effort}\n"
    )
    (folder / "short.yaml").write_text(
        "rules: [{class: chat, prompt_tokens: '-500'}]\ndefault: batch\n"
    )
    words = ["burst.csv", "--slo-config", "tight.yaml", "--rules", "short.yaml"]
    words += ["--hardware", "h100-llama-8b", "--json", "-"]
    status, out, _ = run(capsys, *words, "--processes", "1")
    data = json.loads(re.sub(r"^[^{]*", "", out))  # vLLM may log before
    assert status == 0
    stock, ours = (data["all"]["systems"][name] for name in ("fcfs-2048", "vllm-slo"))
    assert ours["attained"]["kept"] > stock["attained"]["kept"]
    assert ours["promised"] and ours["promised_kept"] == ours["promised"]
    assert stock["promised"] is None
    again = json.loads(re.sub(r"^[^{]*", "", run(capsys, *words, "--processes", "2")[1]))
    assert again["all"] == data["all"] and again["classes"] == data["classes"]
