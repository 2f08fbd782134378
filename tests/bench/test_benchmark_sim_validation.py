# SPDX-License-Identifier: Apache-2.0
"""The pure parts of ``benchmarks/sim_validation.py``: workload, rows, errors, tables."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from benchmark_script import load

from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, JobResult, Round, RoundResult, Stage
from vllm_slo.sim.measure import measure_job

live = load("sim_validation_engine")
report = load("sim_validation_report")

MODEL = StepTimeModel(((0.0, 0.0, 0.010), (5e-4, 0.0, 0.008)), kv_s=1e-6)
HARDWARE = Hardware("test", 1, MODEL, live.KV_TOKENS, 32, 64, 2048)


def measured(name, first_s, gap_s, *, application="chat", promised=None, tokens=11):
    """A request of TTFT objective 1 s and TPOT objective 0.1 s."""
    job = Job(name, application, 5.0, (Round(10, (Stage(tokens, 0.1),), 1.0),))
    times = tuple(5.0 + first_s + gap_s * i for i in range(tokens))
    return measure_job(JobResult(job, (RoundResult(5.0, times, True, promised),)))


GOOD = measured("a", 0.5, 0.05)
LATE = measured("b", 2.0, 0.05)
SLOW = measured("c", 0.5, 0.2, application="code")


def row(*runs, kind="real, run 1", system="stock vLLM"):
    return report.Row(system, kind, tuple(map(tuple, runs)))


def test_numbers_of_one_run():
    found = report.numbers(row([GOOD, LATE, SLOW]))
    assert found.attainment == pytest.approx(1 / 3)
    assert found.by_class == {"chat": 0.5, "code": 0.0}
    assert found.ttft_s == pytest.approx(np.percentile([0.5, 2.0, 0.5], (50, 90, 99)))
    assert found.tpot_s == pytest.approx(np.percentile([0.05, 0.05, 0.2], (50, 90, 99)))
    assert found.finished == 3
    assert found.promised is None
    assert found.kept is None


def test_runs_are_pooled_and_counts_are_means():
    kept, broken = measured("a", 0.5, 0.05, promised=True), measured("a", 2.0, 0.05, promised=True)
    not_promised = measured("b", 2.0, 0.05, promised=False)
    found = report.numbers(row([kept, not_promised], [broken, not_promised]))
    assert found.attainment == 0.25
    assert found.finished == 2
    assert found.promised == 1.0
    assert found.kept == 0.5


def test_agreement_goes_over_all_pairs_of_runs():
    one, other = row([GOOD, LATE]), row([GOOD, LATE], [LATE, GOOD])
    assert report.agreement(one, one) == 1.0
    assert report.agreement(one, other) == 0.5


def test_difference_of_a_row_from_itself_is_none():
    one = row([GOOD, LATE, SLOW])
    found = report.difference(one, one)
    assert found.points == 0.0
    assert found.class_points == {"chat": 0.0, "code": 0.0}
    assert found.ttft == found.tpot == (0.0, 0.0, 0.0)
    assert found.same == 1.0


def test_difference_is_relative_to_the_reference():
    found = report.difference(row([LATE]), row([GOOD]))
    assert found.points == -100.0
    assert found.ttft == pytest.approx((3.0, 3.0, 3.0))
    assert found.tpot == pytest.approx((0.0, 0.0, 0.0))
    assert found.same == 0.0


def test_simulated_rows_are_held_against_all_real_runs_of_their_system():
    rows = [
        row([GOOD], kind="real, run 1"),
        row([LATE], kind="real, run 2"),
        row([GOOD], kind="simulated"),
        row([SLOW], kind="real, run 1", system="vllm-slo"),
        row([SLOW], kind="simulated", system="vllm-slo"),
    ]
    found = report.compare(rows)
    assert [(name, what, one.points) for name, what, one in found] == [
        ("stock vLLM", "simulated, against real", 50.0),
        ("stock vLLM", "real, run 2, against real, run 1", -100.0),
        ("vllm-slo", "simulated, against real", 0.0),
    ]


def test_tables_are_rectangular_and_show_units_and_signs():
    rows = [row([GOOD, SLOW]), row([LATE, SLOW], kind="simulated")]
    head, *lines = report.main_table(rows)
    assert {len(line) for line in lines} == {len(head)}
    assert lines[0][2:5] == ["50.0%", "100%", "0%"]
    assert lines[1][5] == "1,250 / 1,850 / 1,985"
    assert lines[0][-3:] == ["2", "-", "-"]
    head, *lines = report.error_table(report.compare(rows))
    assert {len(line) for line in lines} == {len(head)}
    assert lines[0][2] == "-50.0"
    assert lines[0][5].startswith("+150%")


def test_step_error_of_a_biased_noisy_engine():
    shapes = [BatchShape(n, 0, 10 * n, n) for n in (1, 8, 64, 256)] * 500
    rng = np.random.default_rng(0)
    steps = [(s, 1.1 * MODEL.predict_shape_s(s) * rng.normal(1.0, 0.05)) for s in shapes]
    found = report.step_error(steps, MODEL)
    assert found.bias == pytest.approx(1.1, abs=0.01)
    assert found.noise == pytest.approx(0.05, abs=0.005)
    assert found.steps == 2000


def test_jobs_survive_their_way_to_the_engine(tmp_path):
    jobs = live.make_jobs(HARDWARE, 0.5, 20.0, 3)
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps([asdict(job) for job in jobs]))
    assert live.read_jobs(path) == jobs


def test_workload_fits_the_engine_and_states_its_objectives():
    jobs = live.make_jobs(HARDWARE, 0.5, 20.0, 3)
    assert {job.application for job in jobs} == {spec.name for spec in live.CLASSES}
    assert [job.arrival_s for job in jobs] == sorted(job.arrival_s for job in jobs)
    lone = {spec.name: spec for spec in live.CLASSES}
    for job in jobs:
        (asked,) = job.rounds
        spec = lone[job.application]
        assert job.tokens <= live.MAX_CONTEXT
        assert asked.stages[0].tpot_s == pytest.approx(spec.tpot_multiple * MODEL.predict_s(1))
        assert math.isfinite(asked.ttft_s) and asked.ttft_s > 0
    more = live.make_jobs(HARDWARE, 1.0, 20.0, 3)
    assert len(more) == pytest.approx(2 * len(jobs), abs=1)


class Base:
    """Stands for a scheduler: hands back what it is given."""

    def _update_request_with_output(self, request, new_token_ids, is_stale):
        return new_token_ids, bool(new_token_ids) and new_token_ids[0] == live.STOP_TOKEN


def test_answers_end_at_their_length_whatever_the_model_says():
    recorded = type("Recorded", (live.Recorder, Base), {})()
    recorded.lengths["r"] = 3
    ends = []
    for made in range(3):
        request = SimpleNamespace(request_id="r", num_output_tokens=made)
        ends.append(recorded._update_request_with_output(request, [live.STOP_TOKEN])[1])
    assert ends == [False, False, True]
    prefill = SimpleNamespace(request_id="r", num_output_tokens=0)
    assert recorded._update_request_with_output(prefill, []) == ([], False)


def test_a_live_run_is_read_back(tmp_path):
    asked = Round(10, (Stage(2, 0.1),), 1.0)
    jobs = [Job("a", "chat", 1.0, (asked,)), Job("b", "chat", 2.0, (asked,))]
    data = {
        "kv_tokens": live.KV_TOKENS,
        "requests": {
            "a": {"times_s": [1.5, 1.6], "finished": True, "promised": True},
            "b": {"times_s": [2.5], "finished": False, "promised": None},
        },
        "steps": [[10, 0, 0, 1, 55, 0.02]],
    }
    path = tmp_path / "live.json"
    path.write_text(json.dumps(data))
    run = live.read_live(path, jobs)
    assert [measure_job(result).attained for result in run.results] == [True, False]
    assert run.results[0].rounds[0].promised is True
    assert run.steps == ((BatchShape(10, 0, 0, 1, 55), 0.02),)
    path.write_text(json.dumps({**data, "kv_tokens": 1}))
    with pytest.raises(SystemExit, match="KV tokens"):
        live.read_live(path, jobs)


def test_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row([GOOD, SLOW]), row([LATE, SLOW], kind="simulated")]
    report.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
