# SPDX-License-Identifier: Apache-2.0
"""Which stretches of a long trace stand for it: the busiest, and others at random.

A plan has to keep its objectives at the busiest time, and hours of a quiet trace say nothing about
that. So of a long trace only some stretches are simulated, of equal duration.
"""

from __future__ import annotations

import math

import numpy as np

from vllm_slo.sim.demand import demand
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.traffic import Traffic


def chosen(
    traffic: Traffic, hardware: Hardware, windows: int, requests: int, seed: int
) -> tuple[Traffic, ...]:
    """``windows`` stretches of about ``requests`` requests, the busiest first.

    The busiest one takes most of an engine's time or memory. The others are drawn at random. A
    trace that is no longer than all of them is cut into parts of equal duration.
    """
    total = len(traffic.recording.requests)
    pieces = max(1, math.floor(total / requests))
    if pieces <= windows:
        return tuple(traffic.parts(windows))
    parts = traffic.parts(pieces)
    busiest = max(range(len(parts)), key=lambda place: _load(parts[place], hardware))
    others = [place for place in range(len(parts)) if place != busiest]
    rng = np.random.default_rng([seed, *b"stretches"])
    drawn = rng.choice(others, min(windows - 1, len(others)), replace=False).tolist()
    return tuple(parts[place] for place in (busiest, *sorted(drawn)))


def _load(part: Traffic, hardware: Hardware) -> float:
    """Engines that the requests of a stretch need on average, to compare stretches."""
    jobs = part.jobs(hardware)
    shares = demand(jobs, hardware).shares(len(jobs) / part.duration_s, hardware)
    return max(shares["prefill"] + shares["decode"], shares["memory"])
