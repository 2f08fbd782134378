# SPDX-License-Identifier: Apache-2.0
"""How much load stock vLLM carries on a machine: ``python -m vllm_slo.sim.stock_load``.

Reads a question as JSON from standard input and writes the answer as JSON. vLLM's own scheduler
serves the workload in virtual time, with the step times of the question; the workload is sped up
until too few of its requests attain their objectives.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.sim.capacity import find_threshold
from vllm_slo.sim.cluster import Conditions, simulate
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, Round, Stage
from vllm_slo.sim.measure import measure_job
from vllm_slo.sim.systems import system

PRECISION: Final = 0.05
"""Of the rate, relative. Windows of a few hundred requests tell no more."""
NOISE: Final = 0.1
"""Relative deviation of a step's time, as on a CPU that does other things besides."""


def find_speedup(question: Mapping[str, Any]) -> float:
    """By how much the workload can be sped up so that it still attains what is asked.

    Args:
        question: ``step_time`` (two triples, see `StepTimeModel`), ``frontend_s``, ``kv_tokens``,
            ``max_num_seqs``, ``max_model_len``, ``step_tokens``; ``attainment``, a share; and
            ``windows``: lists of requests, each an object with ``at_s``, ``prompt_tokens``,
            ``output_tokens``, ``ttft_s``, ``tpot_s``. Times in seconds.

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

    found = find_threshold(keeps, 1.0, precision=PRECISION)
    return found.kept or found.lowest


def jobs(window: Sequence[Mapping[str, Any]], speedup: float) -> list[Job]:
    """A window's requests, arriving so many times as fast."""

    def objective(seconds: float | None) -> float:
        return math.inf if seconds is None else seconds

    return [
        Job(
            f"{number}",
            "demo",
            one["at_s"] / speedup,
            (
                Round(
                    one["prompt_tokens"],
                    (Stage(one["output_tokens"], objective(one["tpot_s"])),),
                    objective(one["ttft_s"]),
                ),
            ),
        )
        for number, one in enumerate(window)
    ]


def main() -> None:
    """Answer the question on standard input."""
    answer = {"speedup": find_speedup(json.load(sys.stdin))}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
