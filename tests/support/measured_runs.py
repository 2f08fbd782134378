# SPDX-License-Identifier: Apache-2.0
"""Runs of decoding with drafts and without, of known speeds."""

from __future__ import annotations

from vllm_slo.core.speculation.benefit import Benefit, Kind, Run, Way, benefits

PLAIN, CHAIN_2, CHAIN_4 = Way(Kind.PLAIN), Way(Kind.CHAIN, 2), Way(Kind.CHAIN, 4)
TREE, SERVED = Way(Kind.TREE, 4), Way(Kind.SERVED)


def run_of(
    way: Way,
    requests: int = 1,
    turn: int = 0,
    *,
    steps: int = 10,
    per_step: float = 1.0,
    step_ms: float = 10.0,
    drafting_ms: float = 0.0,
) -> Run:
    """A run whose requests get ``per_step`` tokens in each step of ``step_ms``, drafting apart."""
    return Run(
        requests, turn, way, steps,
        tokens=round(steps * requests * per_step),
        verified=way.length * requests * steps,
        drafted=steps if way.length else 0,
        seconds=steps * (step_ms + drafting_ms) / 1e3,
        drafting_s=steps * drafting_ms / 1e3,
    )  # fmt: skip


def of_speeds(speeds: dict[int, float], spread: float = 0.0) -> list[Benefit]:
    """What is found where a chain of 2 has these speedups, by the number of requests."""
    return benefits(
        run
        for requests, speed in speeds.items()
        for turn, off in enumerate((-spread, 0.0, spread))
        for run in (
            run_of(PLAIN, requests, turn, step_ms=12.0),
            run_of(CHAIN_2, requests, turn, per_step=2.0, step_ms=24.0 / (speed + off)),
        )
    )
