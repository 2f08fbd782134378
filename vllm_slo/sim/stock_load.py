# SPDX-License-Identifier: Apache-2.0
"""How much load stock vLLM can serve on a machine: ``python -m vllm_slo.sim.stock_load``.

It reads a question as JSON from standard input and writes the answer as JSON. vLLM's own scheduler
serves the workload in virtual time, with the step times of the question. The workload is sped up
until too few of its requests attain their objectives.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.sim.cluster import simulate
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, Round, Stage
from vllm_slo.sim.measure import measure_job
from vllm_slo.sim.search import find_threshold
from vllm_slo.sim.systems import system

PRECISION: Final = 0.05
"""Relative precision of the rate. Windows of a few hundred requests give no better one."""
NOISE: Final = 0.1
"""Relative deviation of a step's time, as on a CPU that also does other work."""


def find_speedup(question: Mapping[str, Any]) -> float:
    """The largest speed-up of the workload at which enough requests attain.

    ``question``: ``step_time`` (two triples, see `StepTimeModel`), ``frontend_s``, ``kv_tokens``,
    ``max_num_seqs``, ``max_model_len``, ``step_tokens``; ``attainment``, a share; and ``windows``:
    lists of requests, each an object with ``at_s``, ``prompt_tokens``, ``output_tokens``,
    ``ttft_s``, ``tpot_s``. Times in seconds.

    Raises:
        SimulationError: a number is out of range.
    """
    first, second = question["step_time"]
    hardware = Hardware(
        "this machine",
        1,
        StepTimeModel((tuple(first), tuple(second))),
        question["kv_tokens"],
        max_num_seqs=question["max_num_seqs"],
        max_model_len=question["max_model_len"],
        frontend_s=question["frontend_s"],
        scheduled=True,
    )
    stock = system("fcfs", question["step_tokens"])

    def keeps(speedup: float) -> bool:
        kept = [
            measure_job(result).attained
            for seed, window in enumerate(question["windows"])
            for result in simulate(
                jobs(window, speedup), stock, hardware, Conditions(noise=NOISE, seed=seed)
            ).results
        ]
        return sum(kept) >= question["attainment"] * len(kept)

    threshold = find_threshold(keeps, 1.0, precision=PRECISION)
    return threshold.kept or threshold.lowest


def jobs(window: Sequence[Mapping[str, Any]], speedup: float) -> list[Job]:
    """A window's requests, arriving ``speedup`` times as fast."""

    def objective(seconds: float | None) -> float:
        return math.inf if seconds is None else seconds

    return [
        Job(
            f"{number}",
            "demo",
            request["at_s"] / speedup,
            (
                Round(
                    request["prompt_tokens"],
                    (Stage(request["output_tokens"], objective(request["tpot_s"])),),
                    objective(request["ttft_s"]),
                ),
            ),
        )
        for number, request in enumerate(window)
    ]


def main() -> None:
    """Answer the question on standard input."""
    answer = {"speedup": find_speedup(json.load(sys.stdin))}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
