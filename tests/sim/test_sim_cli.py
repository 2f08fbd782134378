# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo simulate`` and ``vllm-slo plan``: options, tables, files."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from test_sim_capacity import fake_simulate

from vllm_slo import cli
from vllm_slo.sim import main, options, terminal, windows
from vllm_slo.sim.demand import demand
from vllm_slo.sim.hardware import load_hardware
from vllm_slo.sim.measure import Load
from vllm_slo.sim.plot import draw_attainment, draw_load, draw_scaling
from vllm_slo.sim.questions import Question
from vllm_slo.sim.replicas_needed import Cost, Search
from vllm_slo.sim.report import Report, percent
from vllm_slo.sim.setting import Setting
from vllm_slo.sim.systems import System

ONE_PROCESS = ["--processes", "1"]
QUICK = ["--jobs", "60", "--windows", "2", "--arrivals", "poisson", *ONE_PROCESS]


@pytest.fixture
def faked(monkeypatch):
    monkeypatch.setattr(windows, "simulate", fake_simulate)
    monkeypatch.setattr(terminal, "find_spec", lambda name: True)


@pytest.fixture
def trace(tmp_path):
    """Sixteen requests in eight seconds, without objectives."""
    path = tmp_path / "azure.csv"
    rows = [f"2024-01-01 00:00:{n // 2:02d}.{n % 2 * 5},{100 + n},{10 + n}" for n in range(16)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture
def classes(tmp_path):
    """Options: class chat for short prompts, which has objectives, and batch, which has none."""
    config, rules = tmp_path / "slo.yaml", tmp_path / "rules.yaml"
    config.write_text("classes: {chat: {ttft_ms: 900, tpot_ms: 60}, batch: {}}\n")
    rules.write_text("rules: [{class: chat, prompt_tokens: 0-111}]\ndefault: batch\n")
    return ["--slo-config", str(config), "--rules", str(rules)]


def run(capsys, *words):
    """Exit status, standard output, standard error."""
    try:
        status = cli.main(list(words))
    except SystemExit as ended:  # argparse's own
        status = ended.code
    out, err = capsys.readouterr()
    return status, out, err


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["simulate", "plan"])
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rate", "fast"], "argument --rate: 'fast' is not a number"),
        (["--rate", "0"], "argument --rate: must be above 0, got 0"),
        (["--rate", "-1"], "argument --rate: must be above 0, got -1"),
        (["--rate", "nan"], "argument --rate: must be above 0"),
        (["--rate", "inf"], "argument --rate: must be above 0"),
        (["--jobs", "0"], "argument --jobs: must be at least 1"),
        (["--jobs", "2.5"], "argument --jobs: '2.5' is not a whole number"),
        (["--windows", "0"], "argument --windows: must be at least 1"),
        (["--seed", "-1"], "argument --seed: must be at least 0"),
        (["--bias", "0"], "argument --bias: must be above 0"),
        (["--noise", "2"], "argument --noise: must be at least 0 and at most 1"),
        (["--system-tokens", "-1"], "argument --system-tokens: must be at least 0"),
        (["--systems", "vllm-slo-spec0"], "drafts are 1 to 32"),
        (["--systems", "shed-edf-512-spec2"], "argument --systems: 'shed-edf-512-spec2'"),
        (["--systems", "magic"], "argument --systems: 'magic'"),
        (["--systems", ","], "argument --systems: name at least one"),
        (["--draft-step-ms", "-1"], "argument --draft-step-ms: must be at least 0"),
        (["--overhead", "heavy"], "argument --overhead: 'heavy' is unknown; use modelled"),
        (["--acceptance", "2"], "argument --acceptance: must be at least 0 and at most 1"),
        (["--warmup", "2"], "argument --warmup"),
        (["--processes", "0"], "argument --processes"),
        (["--min-attainment", "1.5"], "argument --min-attainment"),
        (["--scenario", "chattbot"], "'chattbot' is unknown; did you mean chatbot?"),
        (["--arrivals", "never"], "argument --arrivals: 'never' is unknown"),
        (["--fit", "squeeze"], "argument --fit: 'squeeze' is unknown"),
        (["--routing", "luck"], "argument --routing: 'luck' is unknown"),
        (["--lengths", "short"], "argument --lengths: 'short' is unknown"),
        (["--kv-tokens", "x"], "argument --kv-tokens: 'x' is not a whole number"),
        (["--thin", "0"], "argument --thin"),
    ],
)
def test_argparse_names_a_value_that_cannot_be(command, words, named, capsys):
    status, out, err = run(capsys, command, "--rate", "1", *words)
    assert (status, out) == (2, "")
    assert named in err.splitlines()[-1]


NO_DRAFT = ["--hardware", "a100-qwen-1.5b"]


@pytest.mark.parametrize("command", ["simulate", "plan"])
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--rate: give"),
        (
            ["--rate", "1", "--systems", "vllm-slo-spec", *NO_DRAFT],
            "hardware a100-qwen-1.5b: it has no draft",
        ),
        (["--rate", "1", "--acceptance", "coder=0.5"], "--acceptance: unknown application 'coder'"),
        (["--rate", "1", "--warmup", "1"], "--jobs: none are left after the warm-up"),
        (["--rate", "1", "--hardware", "abacus"], "hardware: no profile is called 'abacus'"),
        (["--rate", "1", "--trace", "nowhere.csv"], "cannot read nowhere.csv"),
        (["--rate", "1", "--rows", "5"], "choose a part of --trace"),
        (["--rate", "1", "--rules", "rules.yaml"], "cannot read rules.yaml"),
        (["--rate", "1", "--slo-config", "none.yaml"], "cannot read the file 'none.yaml'"),
        (["--trace", "TRACE"], "no request has an objective; give classes with --slo-config"),
        (["--trace", "TRACE", "--scenario", "coder"], "add --lengths table"),
        (["--trace", "TRACE", "--arrivals", "poisson"], "--arrivals: the requests of --trace"),
    ],
)
def test_what_does_not_go_together_is_one_line(command, words, named, capsys, trace):
    words = [str(trace) if word == "TRACE" else word for word in words]
    status, out, err = run(capsys, command, *words)
    assert (status, out) == (2, "")
    assert err.startswith("vllm-slo: error: ") and named in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rate", "1", "--find-capacity"], "--rate: give either a rate or --find-capacity"),
        (["--rate", "1", "--min-attainment", "0.5,0.9"], "--min-attainment: give one share"),
        (["--rate", "1", "--out", "/dev/null/x"], "--out: cannot make /dev/null/x"),
    ],
)
def test_simulate_names_what_only_it_has(words, named, capsys):
    status, out, err = run(capsys, "simulate", *words)
    assert (status, out) == (2, "")
    assert err.startswith("vllm-slo: error: ") and named in err


@pytest.mark.parametrize(
    ("command", "words", "new"),
    [
        ("simulate", ["--attainment", "0.9", "--rate", "1"], "--min-attainment"),
        ("plan", ["--attainment", "0.9", "--rate", "1"], "--min-attainment"),
        ("plan", ["--system", "fcfs-1000", "--rate", "1"], "--systems"),
        ("plan", ["--trace-file", "TRACE", "--rate", "1"], "--trace FILE --lengths table"),
    ],
)
def test_an_old_name_works_and_says_the_new_one(command, words, new, faked, capsys, trace):
    words = [str(trace) if word == "TRACE" else word for word in words]
    status, out, err = run(capsys, command, *words, "--jobs", "4", "--windows", "1", *ONE_PROCESS)
    assert status == 0
    assert f"is now called {new}; the old name goes away" in err
    assert out


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_without_vllm_it_says_what_to_install(command, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "find_spec", lambda name: None)
    status, _, err = run(capsys, command, "--rate", "1")
    assert status == 2
    assert "pip install 'vllm-slo[cpu]'" in err


def test_without_matplotlib_it_says_so_before_simulating(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(terminal, "find_spec", lambda name: None if name == "matplotlib" else True)
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
    for word in (
        "1 jobs/s (1 per GPU)",
        "4 jobs/s (4 per GPU)",
        "fcfs-2048",
        "vllm-slo",
        "summarizer",
    ):
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
    words = ["--find-capacity", "--replicas", "1,2", "--systems", "fcfs-1000,fcfs-4000"]
    words += ["--min-attainment", "0.9,0.5", "--scenario", "mixed", "--out", str(tmp_path)]
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
    words = ["--acceptance", "0.6,coder=0.3", "--scenario", "mixed"]
    mixed, adaserve = settings(*words), settings("--scenario", "adaserve", "--acceptance", "0.6")
    assert mixed[0].conditions.acceptance == {"chatbot": 0.6, "coder": 0.3, "summarizer": 0.6}
    found = adaserve[0].conditions.acceptance
    jobs = Setting("adaserve", load_hardware("h100-llama-8b")).make(1.0, 200, 0)
    assert {job.application for job in jobs} <= set(found)
    assert set(found.values()) == {0.6}


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


def settings(*words):
    parser = argparse.ArgumentParser()
    options.add_setting_arguments(parser)
    return options.settings_of(parser.parse_args(words), own_pace=False)


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


@pytest.mark.parametrize(("least", "status"), [("0.2", 0), ("0.9", 1)])
def test_too_little_attainment_is_a_no(least, status, faked, capsys):
    # The made-up system serves 1 job/s.
    words = ["--rate", "3", "--systems", "fcfs-1000", "--min-attainment", least]
    assert run(capsys, "simulate", *words, *QUICK)[0] == status


def test_a_rate_is_that_of_all_replicas_unless_told_otherwise(faked, capsys):
    words = ["simulate", "--rate", "3", "--replicas", "1,3", "--systems", "fcfs-1000"]
    for more, rates in (([], [3, 3]), (["--per-gpu"], [3, 9])):
        out = run(capsys, *words, *more, *QUICK, "--json", "-")[1]
        found = [one["points"][0] for one in json.loads(out)["results"]]
        assert [point["rate"] for point in found] == pytest.approx(rates)
        assert [point["rate_per_gpu"] for point in found] == pytest.approx([3, rates[1] / 3])


def test_json_goes_to_a_file_beside_the_table_or_alone_to_stdout(faked, capsys, tmp_path):
    path = tmp_path / "deep" / "answer.json"
    for command in ("simulate", "plan"):
        words = [command, "--rate", "1", "--systems", "fcfs-2048", *QUICK]
        status, out, _ = run(capsys, *words, "--json", str(path))
        assert status == 0 and "fcfs-2048" in out
        beside = json.loads(path.read_text())
        alone = json.loads(run(capsys, *words, "--json", "-")[1])
        assert beside["schema"] == alone["schema"] and set(beside) == set(alone)
    assert run(capsys, *words, "--json", "/dev/null/x")[0] == 2


# --- traces and classes --------------------------------------------------------------------------


def test_a_trace_at_its_own_pace(faked, capsys, trace, classes):
    words = ["simulate", "--trace", str(trace), *classes, "--warmup", "0", *ONE_PROCESS]
    status, out, err = run(capsys, *words, "--systems", "fcfs-1000")
    assert (status, err) == (0, "")
    assert "azure.csv on h100-llama-8b: 1 window of 16 requests as recorded" in out
    data = json.loads(run(capsys, *words, "--windows", "2", "--json", "-")[1])
    assert data["seeds"] == [0, 1]
    (point,) = data["results"][0]["points"]
    # 15 gaps of half a second, and one mean gap.
    assert point["rate"] == pytest.approx(2.0)
    assert point["jobs"] == 16
    assert set(point["by_application"]) == {"chat"}  # batch has no objective to keep


def test_a_trace_at_a_rate_and_with_the_lengths_of_a_scenario(faked, capsys, trace, classes):
    common = ["--rate", "4", "--jobs", "12", "--windows", "2", "--warmup", "0", *ONE_PROCESS]
    words = ["simulate", "--trace", str(trace), "--systems", "fcfs-1000", *common, "--json", "-"]
    recorded = json.loads(run(capsys, *words, *classes)[1])["results"][0]
    assert recorded["trace"] == "azure.csv" and recorded["lengths"] == "trace"
    assert recorded["points"][0]["jobs"] == 24
    table = json.loads(run(capsys, *words, "--lengths", "table", "--scenario", "mixed")[1])
    (point,) = table["results"][0]["points"]
    assert set(point["by_application"]) == {"chatbot", "coder", "summarizer"}


def test_a_scenario_with_the_operators_classes(faked, capsys, tmp_path):
    (tmp_path / "slo.yaml").write_text("classes: {chatbot: {ttft_ms: 5}, coder: {tpot_ms: 20}}\n")
    words = ["simulate", "--rate", "1", "--scenario", "mixed", "--systems", "fcfs-4000", *QUICK]
    words += ["--slo-config", str(tmp_path / "slo.yaml")]
    data = json.loads(run(capsys, *words, "--json", "-")[1])["results"][0]
    assert set(data["points"][0]["by_application"]) == {"chatbot", "coder"}
    assert data["conditions"]["config"]["classes"]["coder"]["tpot_ms"] == 20


def test_notes_on_what_is_not_as_recorded(faked, capsys, trace, classes):
    with trace.open("a") as file:
        file.write("2024-01-01 00:00:20,5,0\n2024-01-01 00:00:21,40000,9\n")
    words = ["plan", "--trace", str(trace), *classes, "--systems", "fcfs-4000", *ONE_PROCESS]
    err = run(capsys, *words)[2].splitlines()
    assert err == [
        "azure.csv: 1 row with 0 prompt or output tokens is left out",
        (
            "azure.csv: 1 of the requests are cut to the context of h100-llama-8b, "
            "prompt and answer together"
        ),
    ]


# --- plan ----------------------------------------------------------------------------------------


def test_a_plan_is_the_smallest_number_that_keeps_every_window(faked, capsys):
    words = ["plan", "--rate", "9.5", "--systems", "fcfs-1000", *QUICK]
    status, out, _ = run(capsys, *words)
    assert status == 0
    # Each replica of the made-up system serves 1 job/s.
    assert "10 replicas of fcfs-1000 (10 GPUs) keep 90% in every window" in out
    assert "what binds with" in out and "one replica fewer: -" in out
    data = json.loads(run(capsys, *words, "--json", "-")[1])
    assert data["schema"] == "vllm-slo-plan/2"
    (answer,) = data["answers"]
    (plan,) = answer["plans"]
    tried = {one["replicas"]: one for one in plan["tried"]}
    assert {9, 10, 11} <= set(tried)
    assert min(tried[10]["attainment_by_window"]) >= 0.9 > min(tried[9]["attainment_by_window"])
    assert plan["replicas_on_average"] <= plan["replicas"] == plan["gpus"] == 10
    assert tried[plan["replicas_on_average"]]["attainment"] >= 0.9
    assert plan["binding"] in ("prefill", "decode", "memory")
    assert 1 <= answer["fluid"]["without_objectives"] <= answer["fluid"]["replicas"] <= 10


def test_a_plan_for_a_trace_with_prices(faked, capsys, trace, classes):
    words = ["plan", "--trace", str(trace), *classes, "--warmup", "0", "--gpu-price", "3",
             "--systems", "fcfs-1000,fcfs-4000", *ONE_PROCESS]  # fmt: skip
    status, out, _ = run(capsys, *words)
    assert status == 0
    assert "azure.csv, 2 requests/s as recorded on h100-llama-8b" in out
    (answer,) = json.loads(run(capsys, *words, "--json", "-")[1])["answers"]
    plans = {plan["system"]: plan for plan in answer["plans"]}
    assert plans["fcfs-1000"]["replicas"] > plans["fcfs-4000"]["replicas"]
    for one in plans["fcfs-1000"]["tried"]:
        assert one["dollars_per_hour"] == 3 * one["gpus"]
        hourly_mtok = one["output_tokens_per_s"] * 3600 / 1e6
        assert one["dollars_per_mtok"] == pytest.approx(one["dollars_per_hour"] / hourly_mtok)
        assert one["dollars_per_mtok_total"] < one["dollars_per_mtok"]


def test_without_a_price_gpu_hours_are_told(faked, capsys):
    out = run(capsys, "plan", "--rate", "1", "--systems", "fcfs-4000", *QUICK)[1]
    assert "no price is known; --gpu-price USD gives one" in out
    cost = Cost.of(4, None, 100.0, 1000.0)
    assert cost.gpu_hours_per_mtok == pytest.approx(4 / 0.36)
    assert cost.dollars_per_hour is cost.dollars_per_mtok is None
    assert Cost.of(1, 2.0, 0.0, 0.0) == Cost(None, 2.0, None, None)


def test_the_fluid_answer_needs_no_simulation(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "find_spec", lambda name: None)  # no vLLM
    words = ["plan", "--rate", "40", "--scenario", "coder", "--fluid", "--max-replicas"]
    status, out, _ = run(capsys, *words, "64", *QUICK)
    assert status == 0
    assert "without objectives at least 2 replicas (1.17 are busy on average)" in out
    assert run(capsys, *words, "1", *QUICK)[0] == 1


def test_a_plan_that_does_not_fit_says_so(faked, capsys):
    words = ["plan", "--rate", "10", "--systems", "fcfs-1000", "--max-replicas", "3", *QUICK]
    status, out, _ = run(capsys, *words)
    assert status == 1
    assert "3 replicas of fcfs-1000 cannot keep 90%" in out
    assert "--max-replicas" in out


def test_one_replica_that_suffices(faked, capsys):
    status, out, _ = run(capsys, "plan", "--rate", "0.5", "--systems", "fcfs-1000", *QUICK)
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
    [setting] = settings(*QUICK)
    system = System("fcfs-1000", "fcfs", 1000)
    plan = Search(setting, system, 6.0, Question(0.9), (0, 1), 8, 1).plan()
    assert plan.enough is not None
    full = max(seen.values(), key=len)
    assert len(full) == 2
    assert all(found <= full for found in seen.values())
    shares = [sum(plan.shares[n].values()) for n in sorted(plan.shares)]
    assert shares == sorted(shares, reverse=True) and len(set(shares)) > 1


@pytest.mark.parametrize("target", [0.5, 0.9, 0.97])
def test_a_plan_finds_what_trying_every_number_finds(faked, target):
    [setting] = settings(*QUICK)
    question, system = Question(target), System("fcfs-1000", "fcfs", 1000)
    search = Search(setting, system, 5.0, question, (0, 1, 2), 12, 1)
    points = {n: search.point(n) for n in range(1, 13)}
    plan = Search(setting, system, 5.0, question, (0, 1, 2), 12, 1).plan()
    every = next(n for n, point in points.items() if min(point.attainments) >= target)
    average = next(n for n, point in points.items() if point.summary.attainment >= target)
    assert (plan.enough, plan.on_average) == (every, average)
    assert all(plan.points[n] == points[n] for n in plan.points)


def test_a_number_that_cannot_do_the_work_is_never_enough(faked):
    [setting] = settings(*QUICK)
    generous = System("fcfs-999000", "fcfs", 999_000)  # the made-up system keeps everything
    need = demand(replace(setting, fit="rescale").make(90.0, 60, 0), setting.hardware)
    plan = Search(setting, generous, 90.0, Question(0.9), (0,), 16, 1).plan()
    assert plan.enough == plan.on_average == math.ceil(90 * (need.prefill_s + need.decode_s)) > 1
    few = Search(setting, generous, 90.0, Question(0.9), (0,), plan.enough - 1, 1).plan()
    assert few.enough is None and few.on_average is None


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
