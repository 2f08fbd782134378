# SPDX-License-Identifier: Apache-2.0
"""The pure parts of ``benchmarks/adaserve.py`` and what its engine process notes; no engine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_script import FOLDER, load

pytestmark = pytest.mark.slow

engine = load("adaserve_engine")
quiet = load("quiet")
traces = load("adaserve_workload")
ways = load("adaserve_systems")
report = load("adaserve_report")
bench = load("adaserve")
virtual = load("adaserve_virtual")

RATIOS = {"copilot": 1.2, "chatbot": -50.0, "summarization": -150.0}
LENGTHS = traces.Lengths(prompt=0.5, output=0.25, most=100)
MODELS = ways.Models(Path("/target"), Path("/draft"))
KITCHEN = ways.Kitchen(
    MODELS,
    {"tpot_window_tokens": 64, "speculation": {"max_depth": 4}},
    {"ours-narrow": {"speculation": {"max_width": 1, "max_nodes": 4}}},
)


def rows(count=30):
    names = [("copilot", "chatbot", "summarization")[i % 3] for i in range(count)]
    return [
        traces.Row(10.0 + 0.5 * i + 0.3 * (i % 2), name, RATIOS[name], f"text {i}", 10 * i, 256)
        for i, name in enumerate(names)
    ]


def point(rate=2.0, urgent=None, scale=1.2):
    return traces.Point(rate, urgent, scale)


# The workload.


def write_trace(path, lengths):
    """Requests out of order in time; the text of each is its place and its length."""
    data = [
        {
            "emission_time_ms": at_ms, "input_length": length, "output_length": 256,
            "prompt": "x" * 40, "slo_ratio": 1.2,
        }
        for at_ms, length in zip((2000.0, 0.0, 1000.0), lengths, strict=True)
    ]  # fmt: skip
    for place, item in enumerate(data):
        item["prompt"] = str(place) * 40
    path.write_text(json.dumps(data))
    return path


def test_a_trace_is_read_in_order_of_time_with_its_texts(tmp_path):
    read = traces.read_trace(write_trace(tmp_path / "a.json", (7, 8, 9)))
    assert [(r.at_s, r.text[0], r.prompt_tokens) for r in read] == [
        (0.0, "1", 8), (1.0, "2", 9), (2.0, "0", 7),
    ]  # fmt: skip
    assert {r.category for r in read} == {"copilot"}


def test_lengths_in_characters_become_tokens(tmp_path):
    read = traces.read_trace(write_trace(tmp_path / "a.json", (40, 40, 40)))
    assert [r.prompt_tokens for r in read] == [10, 10, 10]


def test_the_stand_in_has_every_category_and_text_enough():
    read = traces.stand_in(0)
    assert {r.category for r in read} == set(traces.CATEGORIES)
    assert all(len(r.text) >= r.prompt_tokens for r in read)


def test_arrivals_have_the_rate_and_keep_their_shape():
    chosen = rows(21)
    found = traces.arrivals_s(chosen, 4.0)
    assert found[0] == 0.0
    assert found[-1] == pytest.approx(20 / 4.0)
    gaps, before = np.diff(found), np.diff([r.at_s for r in chosen])
    assert gaps / before == pytest.approx(np.full(20, gaps[0] / before[0]))


def test_requests_that_came_at_once_still_do():
    assert traces.arrivals_s([rows(1)[0]] * 3, 2.0) == [0.0, 0.0, 0.0]


def test_objectives_are_rescaled_to_the_machine():
    zero_s = 0.050
    assert traces.objective_s(1.2, 1.2, zero_s) == pytest.approx(0.060)
    assert traces.objective_s(1.2, 0.8, zero_s) == pytest.approx(0.040)
    assert traces.objective_s(-50.0, 0.8, zero_s) == pytest.approx(1.5 * zero_s)
    assert traces.objective_s(-150.0, 1.2, zero_s) == pytest.approx(4.5 * zero_s)


def test_a_window_is_the_same_at_every_rate_and_scale_but_not_for_every_seed():
    def texts(rate, seed, scale=1.2):
        made = traces.workload(rows(), 8, point(rate, None, scale), seed, LENGTHS, 0.05)
        return [one.text for one in made]

    assert texts(1.0, 0) == texts(3.0, 0) == texts(1.0, 0, 0.8)
    assert len({tuple(texts(1.0, seed)) for seed in range(6)}) > 1
    places = [int(text.split()[1]) for text in texts(1.0, 0)]
    assert places == list(range(places[0], places[0] + 8))


def test_requests_of_a_window():
    made = traces.workload(rows(), 30, point(), 0, LENGTHS, 0.05)
    assert [one.prompt_tokens for one in made[:2]] == [4, 5]  # never below 4
    assert made[-1].prompt_tokens == 100  # never above the most
    assert {one.output_tokens for one in made} == {64}
    assert len({one.request_id for one in made}) == 30
    assert made[1].tpot_slo_s == pytest.approx(0.075)


def test_a_window_longer_than_the_trace_is_refused():
    with pytest.raises(SystemExit, match="the trace has 30"):
        traces.workload(rows(), 31, point(), 0, LENGTHS, 0.05)


@pytest.mark.parametrize("urgent", [0.0, 0.3, 0.9, 1.0])
def test_the_mix_can_be_drawn_anew(urgent):
    pool = rows(300)
    made = traces.redrawn(pool, pool, urgent, np.random.default_rng(1))
    assert [r.at_s for r in made] == [r.at_s for r in pool]
    share = {n: sum(r.category == n for r in made) / 300 for n in traces.CATEGORIES}
    assert share["copilot"] == pytest.approx(urgent, abs=0.1)
    assert share["chatbot"] == pytest.approx(share["summarization"], abs=0.1)
    assert all(r.slo_ratio == RATIOS[r.category] for r in made)
    assert {r.text for r in made} <= {r.text for r in pool}


def test_prompts_are_cut_to_their_length():
    made = traces.workload(rows(), 30, point(), 0, LENGTHS, 0.05)
    long = replace(made[0], text="def f(x):\n    return x\n" * 50, prompt_tokens=17)
    (asked,) = traces.tokenised([long])
    assert len(asked["prompt"]) == 17
    assert set(asked) == set(engine.Asked.__annotations__)


# The systems.


def test_vllms_own_ways():
    stock, chain = KITCHEN.system("stock"), KITCHEN.system("chain-3")
    assert not stock.ours
    assert "speculative_config" not in stock.engine
    assert chain.engine["speculative_config"] == {
        "method": "draft_model", "model": "/draft", "num_speculative_tokens": 3,
    }  # fmt: skip
    assert KITCHEN.system("priority").engine["scheduling_policy"] == "priority"
    assert KITCHEN.system("priority").by_priority
    assert KITCHEN.system("sarathi").engine["max_num_batched_tokens"] == ways.CHUNK
    both = KITCHEN.system("chain-2+priority+chunk-64")
    assert both.by_priority and both.engine["max_num_batched_tokens"] == 64
    dynamic = KITCHEN.system("dynamic").engine["speculative_config"]
    assert dynamic["num_speculative_tokens"] == 4
    assert dynamic["num_speculative_tokens_per_batch_size"][0] == [1, 4, 4]


def test_ours_its_variants_and_without_trees():
    ours, narrow = KITCHEN.system("ours"), KITCHEN.system("ours-narrow")
    assert ours.ours and ours.send_slo and narrow.ours
    assert ours.engine["speculative_config"]["num_speculative_tokens"] == ways.MAX_NODES
    assert ours.engine["additional_config"] == {
        "draft_model": "/draft", "slo_config": KITCHEN.slo_config,
    }  # fmt: skip
    assert narrow.engine["speculative_config"]["num_speculative_tokens"] == 4
    assert narrow.engine["additional_config"]["slo_config"] == {
        "tpot_window_tokens": 64,
        "speculation": {"max_depth": 4, "max_width": 1, "max_nodes": 4},
    }
    plain = KITCHEN.system("ours-no-trees")
    assert plain.ours and "worker_cls" not in plain.engine
    assert plain.engine["scheduler_cls"] == ways.SCHEDULER


def test_ours_with_vllms_chains():
    chain = KITCHEN.system("ours-chain-3-without-lengths")
    assert chain.ours and chain.send_slo and chain.without == "lengths"
    assert (
        chain.engine["speculative_config"] == KITCHEN.system("chain-3").engine["speculative_config"]
    )
    assert chain.engine["scheduler_cls"] == ways.SCHEDULER and "worker_cls" not in chain.engine


def test_ours_without_a_part():
    assert KITCHEN.system("ours").without == ""
    for part in engine.ABLATIONS:
        system = KITCHEN.system(f"ours-without-{part}")
        assert system.ours and system.without == part
    with pytest.raises(SystemExit, match="'walls' is unknown: one of"):
        KITCHEN.system("ours-without-walls")


def test_every_part_that_can_be_left_out_is_there():
    """Each replaces what it names in a process of its own; a renamed one is an error."""
    code = "import adaserve_engine as e; [leave_out() for leave_out in e.ABLATIONS.values()]"
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.parametrize(
    "name",
    ["chain", "chain-0", "chain-x", "magic", "stock+fast", "ngram", "ours-chain-0", "ours-magic"],
)
def test_unknown_systems_are_refused(name):
    with pytest.raises(SystemExit, match="unknown"):
        KITCHEN.system(name)


def test_systems_take_turns():
    systems = [SimpleNamespace(name=n) for n in "abc"]
    orders = ["".join(s.name for s in bench.order_of(systems, turn)) for turn in range(6)]
    assert orders == ["abc", "bca", "cab", "cba", "acb", "bac"]


# The metrics.


def request(name, category="copilot", slo_s=0.05, arrival_s=1.0):
    return traces.Request(name, category, arrival_s, "", 10, 5, slo_s)


def given(first_s, gap_s, tokens=5, finished=True):
    return {"times_s": [first_s + gap_s * i for i in range(tokens)], "finished": finished}


def step(**changed):
    return {
        "begun_s": 0.0, "took_s": 0.05, "tokens": 4, "requests": 2, "draft_tokens": 2,
        "decodes": 2, "given": 3, "draft_s": 0.01, "choosing_s": 0.001, **changed,
    }  # fmt: skip


REQUESTS = [
    request("fast"),
    request("slow", "chatbot", 0.075, 1.5),
    request("stuck", "chatbot", 0.075, 2.0),
]
RUN = {
    "requests": {
        "fast": given(1.2, 0.04),
        "slow": given(2.0, 0.08),
        "stuck": given(3.0, 0.01, tokens=3, finished=False),
    },
    "steps": [step(), step(took_s=0.15, tokens=8, decodes=2, given=7)],
    "others": 0.02,
    "slower": 1.03,
}


def test_numbers_of_one_run():
    found = report.numbers_of(REQUESTS, RUN)
    assert found.violations == pytest.approx(2 / 3)
    assert found.by_category == {"chatbot": 1.0, "copilot": 0.0}
    lasted_s = 3.02 - 1.0  # from the first arrival to the last token
    assert found.goodput == pytest.approx(5 / lasted_s)
    assert found.throughput == pytest.approx(13 / lasted_s)
    assert found.ttft_s == pytest.approx((0.2 + 0.5 + 1.0) / 3)
    assert found.accepted == pytest.approx(10 / 4 - 1)
    assert found.tokens_per_step == 6.0
    assert found.step_s == pytest.approx(0.1)
    assert found.draft_share == pytest.approx(0.02 / 0.2)
    assert found.unfinished == pytest.approx(1 / 3)
    assert found.others == 0.02
    assert "violations 66.7%" in found.line()


def test_the_mean_over_the_answer_counts_and_equality_attains():
    # A slow beginning, then several tokens at once: the worst ten take 0.2 s each.
    times = [1.0 + 0.2 * i for i in range(11)] + [3.0] * 30
    run = {**RUN, "requests": {"one": {"times_s": times, "finished": True}}}
    kept = report.numbers_of([request("one", slo_s=0.05)], run)
    assert (kept.violations, kept.goodput) == (0.0, pytest.approx(41 / 2.0))
    missed = report.numbers_of([request("one", slo_s=0.0499)], run)
    assert (missed.violations, missed.goodput) == (1.0, 0.0)


def test_a_run_in_which_nothing_came():
    run = {
        "requests": {"one": given(1.0, 0.1, 0, False)},
        "steps": [],
        "others": 0.0,
        "slower": 1.0,
    }
    found = report.numbers_of([request("one")], run)
    assert (found.violations, found.goodput, found.accepted) == (1.0, 0.0, 0.0)
    assert math.isinf(found.ttft_s)


def numbers(violations, goodput, **changed):
    base = report.numbers_of(REQUESTS, RUN)
    return replace(base, violations=violations, goodput=goodput, **changed)


def test_medians_are_of_each_number():
    runs = [
        numbers(0.1, 50.0),
        numbers(0.3, 70.0),
        numbers(0.2, 10.0, by_category={"copilot": 1.0}),
    ]
    found = report.middle(runs)
    assert (found.violations, found.goodput) == (0.2, 50.0)
    assert found.by_category == {"chatbot": 1.0, "copilot": 0.0}


LOW, HIGH = point(1.0), point(3.0)
FOUND = {
    (LOW, "stock"): [numbers(0.0, 100.0)],
    (LOW, "chain-2"): [numbers(0.1, 90.0)],
    (LOW, "ours"): [numbers(0.0, 99.0)],
    (HIGH, "stock"): [numbers(0.9, 20.0)],
    (HIGH, "chain-2"): [numbers(0.5, 90.0), numbers(0.7, 80.0), numbers(0.6, 100.0)],
    (HIGH, "ours"): [numbers(0.2, 180.0)],
}


def test_the_best_baseline_is_chosen_in_each_respect():
    low, high = report.against(FOUND, ["stock", "chain-2"], "ours")
    assert (low.fewest, low.fewer, low.worse) == ("stock", 1.0, False)
    assert low.more == pytest.approx(0.99)
    assert (high.fewest, high.most) == ("chain-2", "chain-2")
    assert high.fewer == pytest.approx(3.0)
    assert high.more == pytest.approx(2.0)


def test_worse_in_one_respect_is_worse():
    one = report.Versus(LOW, "stock", 0.10, 0.13, "stock", 100.0, 150.0)
    assert one.worse
    assert not replace(one, ours_violations=0.11).worse
    assert replace(one, ours_violations=0.0, ours_goodput=90.0).worse


def test_no_violations_at_all():
    one = report.Versus(LOW, "stock", 0.1, 0.0, "stock", 0.0, 5.0)
    assert math.isinf(one.fewer) and math.isinf(one.more)
    assert report.times(one.fewer) == "all"
    assert "avoids all violations" in report.verdict([one], "rate")


def test_the_tables():
    versus = report.against(FOUND, ["stock", "chain-2"], "ours")
    head, low, high = report.headline(versus, "rate")
    assert len(head) == len(low)
    assert low[:4] == ["1", "0.0% (stock)", "0.0%", "1.00x"]
    assert high == ["3", "60.0% (chain-2)", "20.0%", "3.00x", "90.0 (chain-2)", "180.0", "2.00x"]
    said = report.verdict(versus, "rate")
    assert "3.00x fewer at 3" in said
    assert said.endswith("none.")
    head, *lines = report.main_table(FOUND, "rate")
    assert len(lines) == len(FOUND)
    assert {len(line) for line in lines} == {len(head)}
    assert lines[4][:3] == ["3", "chain-2", "60.0% (50.0% to 70.0%)"]


def test_where_there_is_nothing_to_compare_with():
    assert report.against({(LOW, "ours"): [numbers(0.0, 1.0)]}, ["stock"], "ours") == []
    assert report.verdict([], "rate") == ""


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    variants = {(LOW, "ours-narrow"): [numbers(0.1, 90.0)], **FOUND}
    report.draw(variants, "rate", tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


# The command line.


def test_a_sweep_has_one_direction():
    args = bench.parse_args(["--rates", "2", "--urgent", "0.3,0.6"])
    points = bench.points_of(args)
    assert [p.urgent for p in points] == [0.3, 0.6]
    assert report.axis_of(points) == "urgent"
    args = bench.parse_args(["--rates", "2", "--slo-scale", "0.8,1,1.2"])
    assert report.axis_of(bench.points_of(args)) == "scale"
    assert report.axis_of(bench.points_of(bench.parse_args([]))) == "rate"
    with pytest.raises(SystemExit, match="only one"):
        bench.points_of(bench.parse_args(["--rates", "1,2", "--slo-scale", "0.8,1"]))


def test_variants_are_systems_and_quick_is_small():
    args = bench.parse_args(["--quick", "--variant", 'ours-flat={"speculation": {"max_width": 1}}'])
    assert args.systems == [*bench.SYSTEMS, "ours-flat"]
    args = bench.parse_args(["--quick"])
    assert args.systems == ["stock", "ours"]
    assert (args.requests, args.parameters) == (12, 0.0)
    made = bench.prepare(args, MODELS, Path(), None)
    assert made.slo_config == {}


def test_a_kept_run_must_be_the_same(tmp_path):
    path = tmp_path / "run.json"
    assert bench.kept(path, "a") is None
    path.write_text(json.dumps({"asked": "a"}))
    assert bench.kept(path, "a") == {"asked": "a"}
    with pytest.raises(SystemExit, match="another run"):
        bench.kept(path, "b")


def test_the_reason_of_a_failure():
    said = (
        "ValidationError: 1 validation error\n  Value error, no such runner [type=value_error]\n"
        "    For further information visit https://errors.example/value_error\n\n"
    )
    assert bench.reason(said) == "Value error, no such runner"
    assert bench.reason("exit status 9\n") == "exit status 9"
    assert bench.reason("") == "?"


# What the engine's process notes.


class FakeScheduler:
    """Two requests: one decodes and gets two tokens, one has its prompt computed."""

    def __init__(self):
        self.requests = {
            "old": SimpleNamespace(num_output_tokens=3),
            "new": SimpleNamespace(num_output_tokens=0),
        }

    def schedule(self):
        return SimpleNamespace(
            total_num_scheduled_tokens=14,
            num_scheduled_tokens={"old": 4, "new": 10},
            scheduled_spec_decode_tokens={"old": [5, 6, 7]},
        )

    def update_from_output(self, output, done):
        return "done"


def test_steps_are_noted():
    scheduler = FakeScheduler()
    runner = SimpleNamespace(propose_draft_token_ids=lambda: "drafts")
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    core = SimpleNamespace(
        scheduler=scheduler, model_executor=SimpleNamespace(driver_worker=worker)
    )
    steps = engine.Steps(SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)))
    output = scheduler.schedule()
    assert runner.propose_draft_token_ids() == "drafts"
    done = SimpleNamespace(req_id_to_index={"old": 1, "new": 0}, sampled_token_ids=[[9], [5, 8]])
    assert scheduler.update_from_output(output, done) == "done"
    steps.end(1.0, 0.05)
    steps.end(1.1, 0.01)  # nothing was scheduled
    (row,) = steps.rows
    assert row["draft_s"] > 0.0
    assert {**row, "draft_s": 0.0} == {
        "begun_s": 1.0, "took_s": 0.05, "tokens": 14, "requests": 2, "draft_tokens": 3,
        "decodes": 1, "given": 2, "draft_s": 0.0, "choosing_s": 0.0,
    }  # fmt: skip


def test_tokens_of_one_step_share_its_end():
    seen = engine.Given(times_s=[], finished=False)
    first = SimpleNamespace(token_ids=[1, 2], finish_reason=None)
    last = SimpleNamespace(token_ids=[3], finish_reason="length")
    engine.note(seen, SimpleNamespace(outputs=[first]), 1.5)
    assert seen == {"times_s": [1.5, 1.5], "finished": False}
    engine.note(seen, SimpleNamespace(outputs=[last]), 2.0)
    assert seen == {"times_s": [1.5, 1.5, 2.0], "finished": True}


def test_a_quiet_machine_has_no_disturbance(monkeypatch):
    busy = iter((10.0, 14.0))
    clock = iter((0.0, 4.0))
    monkeypatch.setattr(engine, "machine_busy_s", lambda: next(busy))
    monkeypatch.setattr(engine.Disturbance, "_own_s", staticmethod(lambda: 0.0))
    monkeypatch.setattr(engine.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(engine.os, "cpu_count", lambda: 2)
    assert engine.Disturbance().share() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("others", "probes", "runs", "kept"),
    [
        ([0.0], [1.0, 1.0], 1, 1.0),
        ([0.2, 0.0], [1.0, 1.0, 1.0, 1.0], 2, 1.0),
        ([0.0, 0.0], [1.0, 1.3, 1.0, 0.95], 2, 0.95),
        ([0.0, 0.0], [1.0, 1.3, 1.25, 1.2], 2, 1.25),
    ],
    ids=["quiet", "others were there", "slower, then not", "slower for good"],
)
def test_a_disturbed_run_is_run_again_and_the_best_counts(others, probes, runs, kept):
    machine = quiet.Machine.__new__(quiet.Machine)  # without its weights
    machine.limits = quiet.Limits(others=0.05, drift=0.1, wait_s=0.0, retries=1)
    machine.usual_s = 2.0
    machine._say = lambda _: None
    times = iter(probes)
    machine.probe_s = lambda: 2.0 * next(times)
    left = list(others)
    found = machine.undisturbed(lambda: {"others": left.pop(0)})
    assert len(others) - len(left) == runs
    assert found["slower"] == pytest.approx(kept)


# Engines that stay.

CHILD = """
import json, os, sys
for line in sys.stdin:
    ask = json.loads(line)
    if ask.get("fail"):
        sys.exit("no such model")
    print("noise")
    print("answer: " + json.dumps({"pid": os.getpid(), "asked": ask["requests"]}), flush=True)
"""


@pytest.fixture
def engines(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(ways, "CHILD", script)
    with contextlib.closing(ways.Engines()) as made:
        yield made


def ask_for(model, requests=(), **more):
    return {"engine": {"model": model}, "without": "", "requests": list(requests), **more}


def test_an_engine_stays_and_each_kind_has_its_own(engines):
    first = engines.ask(ask_for("a", [1]))
    again = engines.ask(ask_for("a", [2]))
    other = engines.ask({**ask_for("a"), "without": "slo"})
    assert first["pid"] == again["pid"] != other["pid"]
    assert (first["asked"], again["asked"]) == ([1], [2])
    engines.close()
    for found in (first, other):
        with pytest.raises(ProcessLookupError):
            os.kill(found["pid"], 0)


def test_an_engine_that_ends_says_why(engines):
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such model"):
            engines.ask(ask_for("b", fail=True))
    assert engines.ask(ask_for("a"))["asked"] == []


# Virtual time.


def test_what_drafting_costs_by_hand():
    """0.9 ms at all, 1.5 ms for each of three passes, 0.02 ms for each of their 30 tokens."""
    cost = virtual.Cost()
    assert cost.drafting_s([]) == 0.0
    assert cost.drafting_s([20, 5, 5]) == pytest.approx(0.9e-3 + 4.5e-3 + 0.6e-3)
    assert "0.65 ms for each token" in cost.describe()


def test_every_system_meets_the_same_machine():
    calm = virtual.VirtualTime(virtual.Cost(drift=0.0, jitter=0.0, pauses=0.0))
    calm.take(0.25)
    assert calm.now_s == virtual.BEGAN_S + 0.25
    one, other = (virtual.VirtualTime(virtual.Cost()) for _ in range(2))
    for _ in range(50):
        one.take(0.1)
        other.take(0.1)
    assert one.now_s == other.now_s != virtual.BEGAN_S + 5.0
