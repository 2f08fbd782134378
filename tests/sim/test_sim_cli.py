# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo simulate`` and ``vllm-slo plan``: options, tables, files."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest
from test_sim_capacity import fake_simulate

from vllm_slo import cli
from vllm_slo.sim import main, options, windows
from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.measure import Load
from vllm_slo.sim.plan import make_plan
from vllm_slo.sim.plot import draw_attainment, draw_load, draw_scaling
from vllm_slo.sim.questions import Question
from vllm_slo.sim.report import Report, percent
from vllm_slo.sim.setting import Setting
from vllm_slo.sim.systems import System

QUICK = ["--jobs", "60", "--windows", "2", "--arrivals", "poisson", "--processes", "1"]


@pytest.fixture
def faked(monkeypatch):
    monkeypatch.setattr(windows, "simulate", fake_simulate)
    monkeypatch.setattr(options, "find_spec", lambda name: True)


def run(capsys, *words):
    """Exit status, standard output, standard error."""
    status = cli.main(list(words))
    out, err = capsys.readouterr()
    return status, out, err


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--rate"),
        (["--rate", "1", "--find-capacity"], "--rate"),
        (["--rate", "fast"], "--rate: 'fast' is not a number"),
        (["--rate", "0"], "--rate: must be above 0, got 0"),
        (["--rate", "-1"], "--rate: must be above 0"),
        (["--rate", "nan"], "--rate"),
        (["--rate", "inf"], "--rate"),
        (["--rate", ","], "--rate: name at least one"),
        (["--rate", "1", "--jobs", "0"], "--jobs: must be at least 1"),
        (["--rate", "1", "--jobs", "2.5"], "--jobs: '2.5' is not a whole number"),
        (["--rate", "1", "--windows", "0"], "--windows"),
        (["--rate", "1", "--seed", "-1"], "--seed"),
        (["--rate", "1", "--replicas", "0"], "--replicas"),
        (["--rate", "1", "--bias", "0"], "--bias"),
        (["--rate", "1", "--noise", "2"], "--noise"),
        (["--rate", "1", "--system-tokens", "-1"], "--system-tokens: must be at least 0"),
        (["--rate", "1", "--systems", "vllm-slo-spec0"], "drafts are 1 to 32"),
        (["--rate", "1", "--systems", "shed-edf-512-spec2"], "systems: 'shed-edf-512-spec2'"),
        (
            ["--rate", "1", "--systems", "vllm-slo-spec", "--hardware", "a100-qwen-1.5b"],
            "hardware a100-qwen-1.5b: it has no draft",
        ),
        (["--rate", "1", "--draft-step-ms", "-1"], "--draft-step-ms: must be at least 0"),
        (["--rate", "1", "--draft-step-ms", "fast"], "--draft-step-ms: 'fast' is not a number"),
        (["--rate", "1", "--overhead", "heavy"], "--overhead"),
        (["--rate", "1", "--acceptance", "2"], "--acceptance"),
        (["--rate", "1", "--acceptance", "coder=0.5"], "--acceptance: unknown application 'coder'"),
        (["--rate", "1", "--warmup", "1"], "--warmup"),
        (["--rate", "1", "--processes", "0"], "--processes"),
        (["--rate", "1", "--attainment", "1.5"], "--attainment"),
        (["--rate", "1", "--precision", "0"], "--precision"),
        (["--rate", "1", "--scenario", "chess"], "--scenario: 'chess' is unknown"),
        (["--rate", "1", "--arrivals", "never"], "--arrivals"),
        (["--rate", "1", "--fit", "squeeze"], "--fit"),
        (["--rate", "1", "--systems", "magic"], "systems: 'magic'"),
        (["--rate", "1", "--hardware", "abacus"], "hardware"),
        (["--rate", "1", "--kv-tokens", "x"], "--kv-tokens"),
        (["--rate", "1", "--trace-file", "/nowhere.csv"], "cannot read"),
        (["--rate", "1", "--out", "/dev/null/x"], "--out"),
    ],
)
def test_each_bad_option_is_one_line_that_names_it(words, named, capsys):
    status, out, err = run(capsys, "simulate", *words)
    assert (status, out) == (2, "")
    assert err.startswith("vllm-slo: error: ") and named in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rate", "x"], "--rate"),
        (["--rate", "1", "--attainment", "0"], "--attainment"),
        (["--rate", "1", "--max-replicas", "0"], "--max-replicas"),
        (["--rate", "1", "--system", "magic"], "systems: 'magic'"),
        (
            ["--rate", "1", "--system", "vllm-slo-spec", "--hardware", "a100-qwen-1.5b"],
            "it has no draft",
        ),
        (["--rate", "1", "--scenario", "chess"], "--scenario"),
    ],
)
def test_plan_names_bad_options_too(words, named, capsys):
    status, out, err = run(capsys, "plan", *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert named in err


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_without_vllm_it_says_what_to_install(command, monkeypatch, capsys):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    status, _, err = run(capsys, command, "--rate", "1")
    assert status == 2
    assert "pip install 'vllm-slo[cpu]'" in err


def test_without_matplotlib_it_says_so_before_simulating(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "matplotlib" else True)
    status, _, err = run(capsys, "simulate", "--rate", "1", "--out", str(tmp_path))
    assert status == 2
    assert "vllm-slo[bench]" in err


def test_the_modules_import_without_vllm():
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['torch'] = None\n"
        "import vllm_slo.sim.main, vllm_slo.sim.plan, vllm_slo.sim.plot"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- simulate ------------------------------------------------------------------------------------


def test_rates_in_a_table_and_in_files(faked, capsys, tmp_path):
    words = ["--rate", "1,4", "--scenario", "chatbot,mixed", "--out", str(tmp_path), *QUICK]
    status, out, err = run(capsys, "simulate", *words)
    assert (status, err) == (0, "")
    for word in ("1 jobs/s per GPU", "4 jobs/s per GPU", "fcfs-2048", "vllm-slo", "summarizer"):
        assert word in out
    data = json.loads((tmp_path / "simulate.json").read_text())
    assert data["schema"] == "vllm-slo-simulate/1"
    assert data["seeds"] == [0, 1]
    assert [one["scenario"] for one in data["results"]] == ["chatbot"] * 3 + ["mixed"] * 3
    points = data["results"][0]["points"]
    assert [point["rate_per_gpu"] for point in points] == [1.0, 4.0]
    assert points[0]["jobs"] == 96
    assert {path.name for path in tmp_path.iterdir()} == {
        "simulate.json", "attainment.png", "load.png",
    }  # fmt: skip


def test_capacities_with_ratios_and_the_scaling_picture(faked, capsys, tmp_path):
    words = ["--find-capacity", "--replicas", "1,2", "--systems", "fcfs-1000,fcfs-4000",
             "--attainment", "0.9,0.5", "--scenario", "mixed", "--out", str(tmp_path)]  # fmt: skip
    status, out, _ = run(capsys, "simulate", *words, *QUICK)
    assert status == 0
    assert "of every application" in out
    assert "mixed on h100-llama-8b, 2 replicas: 2 windows of 60 jobs per engine: capacity" in out
    data = json.loads((tmp_path / "simulate.json").read_text())
    one, four, *_ = data["results"]
    assert [(c["attainment"], c["every"]) for c in one["capacities"]] == [
        (0.9, False), (0.9, True), (0.5, False), (0.5, True),
    ]  # fmt: skip
    assert four["capacities"][0]["times_first_stock_system"][0] == pytest.approx(4, rel=0.1)
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")


def test_systems_that_speculate_beside_those_that_do_not(faked, capsys, tmp_path):
    systems = "vllm-slo,vllm-slo-spec,fcfs-2048-spec3"
    words = ["--rate", "1", "--systems", systems, "--hardware", "a100-qwen-1.5b",
             "--draft-step-ms", "2.5", "--acceptance", "chatbot=0.6"]  # fmt: skip
    status, out, _ = run(capsys, "simulate", *words, "--out", str(tmp_path), *QUICK)
    assert status == 0
    assert all(name in out for name in systems.split(","))
    data = json.loads((tmp_path / "simulate.json").read_text())
    assert [one["system"]["drafts"] for one in data["results"]] == [0, 8, 3]
    assert {one["conditions"]["acceptance"]["chatbot"] for one in data["results"]} == {0.6}
    assert [term[1] for term in data["hardware"]["step_time"]["terms"]] == [0.0025, 0.0025]
    assert data["hardware"]["sources"]["draft.step_s"] == "given by the caller"


def test_acceptance_of_every_application_of_every_scenario():
    found = options.acceptance("0.6", ["mixed", "adaserve"])
    assert set(found.values()) == {0.6}
    assert {"chatbot", "coder", "summarizer"} < set(found)
    jobs = Setting("adaserve", load_hardware("h100-llama-8b")).make(1.0, 200, 0)
    assert {job.application for job in jobs} < set(found)


def test_families_are_tuned_and_labelled(faked, capsys):
    words = ["--find-capacity", "--systems", "families", "--precision", "0.5"]
    status, out, _ = run(capsys, "simulate", *words, *QUICK)
    assert status == 0
    assert "shed + EDF [shed-edf-" in out
    assert "vLLM fcfs 2048 [fcfs-2048]" in out


@pytest.mark.slow
def test_the_result_does_not_depend_on_the_number_of_processes(capsys):
    pytest.importorskip("vllm")
    words = ["simulate", "--rate", "3", "--systems", "fcfs-2048", "--jobs", "20", "--windows", "2",
             "--noise", "0.1"]  # fmt: skip
    outs = [run(capsys, *words, "--processes", n)[1] for n in ("1", "2")]
    # Where this process is the first to import vLLM, its logger talks to the captured stream.
    tables = [[line for line in out.splitlines() if "WARNING" not in line] for out in outs]
    assert tables[0] == tables[1]
    assert any("fcfs-2048" in line for line in tables[0])
    assert "fcfs-2048" in outs[0]


def report_of(words):
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    args = parser.parse_args([*words, *QUICK])
    chosen = main.options_of(args)
    from rich.console import Console

    console = Console(file=open(os.devnull, "w"))  # noqa: PTH123, SIM115 (closed with the test)
    rows = (main.run_capacities if args.find_capacity else main.run_rates)(chosen, console)
    console.file.close()
    return Report(tuple(rows), chosen.seeds, "command")


def test_pictures_hold_what_was_measured(faked):
    pytest.importorskip("matplotlib")
    report = report_of(["--rate", "1,2,4", "--systems", "fcfs-1000,fcfs-4000"])
    figure = draw_attainment(report, 0.9)
    [axes] = [one for one in figure.axes if one.get_visible()]
    lines = {line.get_label(): line for line in axes.lines}
    want = [100 * p.summary.attainment for p in report.rows[0].points]
    assert lines["fcfs-1000"].get_ydata().tolist() == pytest.approx(want)
    assert "jobs/s" in axes.get_xlabel() and "%" in axes.get_ylabel()
    assert draw_scaling(report) is None
    assert draw_load(report) is None


def test_one_rate_is_no_curve(faked):
    pytest.importorskip("matplotlib")
    assert draw_attainment(report_of(["--rate", "1"]), 0.9) is None


def test_promised_and_best_effort_are_two_lines(faked):
    from dataclasses import replace

    pytest.importorskip("matplotlib")
    report = report_of(["--rate", "1", "--systems", "vllm-slo,fcfs-2048"])
    loads = [Load((0.0, 1.0), (2, 3), (0, 1), True), Load((0.0, 1.0), (0, 0), (4, 5), False)]
    rows = [
        replace(row, points=(replace(row.points[0], load=load),))
        for row, load in zip(report.rows, loads, strict=True)
    ]
    [axes] = draw_load(replace(report, rows=tuple(rows))).axes
    labels = [line.get_label() for line in axes.lines]
    assert labels == ["vllm-slo, promised", "vllm-slo, best effort", "fcfs-2048"]


def test_percent_never_rounds_a_miss_away():
    assert [percent(x) for x in (None, 0.0, 0.899999, 0.99999, 1.0)] == [
        "-", "0.0", "90.0", "99.9", "100.0",
    ]  # fmt: skip


# --- plan ----------------------------------------------------------------------------------------


def test_a_plan_is_the_smallest_number_that_keeps_every_window(faked, capsys):
    words = ["plan", "--rate", "9.5", "--system", "fcfs-1000", *QUICK]
    status, out, _ = run(capsys, *words)
    assert status == 0
    # Each replica of the made-up system serves 1 job/s.
    assert "10 replicas of fcfs-1000 (10 GPUs) keep 90% in every window" in out
    assert "what binds with" in out
    status, out, _ = run(capsys, *words, "--json")
    data = json.loads(out)
    assert data["schema"] == "vllm-slo-plan/1"
    few, enough = data["tried"]
    assert enough["replicas"] == data["replicas"] == few["replicas"] + 1
    assert min(enough["attainment_by_window"]) >= 0.9 > min(few["attainment_by_window"])
    assert data["binding"] in ("prefill", "decode", "memory")


def test_a_plan_that_does_not_fit_says_so(faked, capsys):
    words = ["plan", "--rate", "10", "--system", "fcfs-1000", "--max-replicas", "3", *QUICK]
    status, out, _ = run(capsys, *words)
    assert status == 1
    assert "3 replicas of fcfs-1000 cannot keep 90%" in out
    assert "--max-replicas" in out


def test_one_replica_that_suffices(faked, capsys):
    status, out, _ = run(capsys, "plan", "--rate", "0.5", "--system", "fcfs-1000", *QUICK)
    assert status == 0
    assert "1 replica of fcfs-1000 (1 GPU)" in out
    assert "nothing binds" in out


def test_all_replica_numbers_meet_the_same_jobs(monkeypatch):
    seen = {}

    def simulate(jobs, system, hardware, conditions, *, watch=None):
        key = (conditions.seed, tuple((j.job_id, round(j.arrival_s, 6)) for j in jobs))
        seen.setdefault(conditions.replicas, set()).add(key)
        return fake_simulate(jobs, system, hardware, conditions, watch=watch)

    monkeypatch.setattr(windows, "simulate", simulate)
    parser = argparse.ArgumentParser()
    options.add_setting_arguments(parser)
    [setting] = options.settings_of(parser.parse_args(QUICK))
    plan = make_plan(setting, System("fcfs-1000", "fcfs", 1000), 6.0, Question(0.9), (0, 1), 8, 1)
    assert plan.replicas is not None
    full = max(seen.values(), key=len)
    assert len(full) == 2
    assert all(found <= full for found in seen.values())
    few, enough = (sum(plan.shares[n].values()) for n in sorted(plan.shares))
    assert few > enough


# --- one real run --------------------------------------------------------------------------------


def test_a_real_plan(capsys):
    pytest.importorskip("vllm")
    words = ["plan", "--rate", "4", "--jobs", "15", "--windows", "1", "--processes", "1"]
    status, out, _ = run(capsys, *words, "--scenario", "coder", "--arrivals", "poisson")
    assert status == 0
    assert "of vllm-slo" in out


def test_help_has_units(capsys):
    for command in ("simulate", "plan"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert "jobs/s" in text and "tokens" in text


def test_the_scaling_picture_leaves_out_what_has_one_size(faked):
    pytest.importorskip("matplotlib")
    words = ["--find-capacity", "--replicas", "1,2", "--systems", "fcfs-1000,fcfs-4000"]
    report = report_of(words)
    assert {row.label for row in report.rows} == {"fcfs-1000", "fcfs-4000"}
    kept = [row for row in report.rows if row.label == "fcfs-1000" or row.replicas == 1]
    figure = draw_scaling(Report(tuple(kept), report.seeds, "command"))
    [axes] = [one for one in figure.axes if one.get_visible()]
    assert axes.get_legend_handles_labels()[1] == ["fcfs-1000"]
    line = axes.lines[0]
    found = [row.capacities[0].rate * row.replicas for row in kept if row.label == "fcfs-1000"]
    assert line.get_xdata().tolist() == [1, 2]
    assert line.get_ydata().tolist() == pytest.approx(found)
