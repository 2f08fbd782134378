# SPDX-License-Identifier: Apache-2.0
"""The shares of an engine's time and memory that jobs need on average.

This is an estimate without queues: the least that a rate needs. It names the resource that binds
and gives a search for the capacity its first rate. It is never reported as a capacity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from vllm_slo.core.step_time.model import chunk_pairs
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job
from vllm_slo.sim.setting import Setting

Resource = Literal["prefill", "decode", "memory"]

_SAMPLE: Final = 1000
"""Most jobs over which ``start_rate`` takes means."""
_START_SHARE: Final = 0.5
"""First rate of a search, as a share of the average limit. Bisection corrects any start."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the mean job needs.

    Attributes:
        prefill_s: seconds of compute for its prompts: tokens at the slope of the compute-bound
            line, and their attention.
        decode_s: the same for its answer, and reading its KV in each step.
        kv_token_s: KV tokens times the seconds it holds them. Its prompts take the time of a lone
            request. Its answer takes its TPOT: an engine near its capacity is not faster. Without
            a TPOT it takes the pace of an engine whose KV cache is full.
        idle_s: share of each second that empty steps would take, at the slowest pace that keeps
            the tightest TPOT.
    """

    prefill_s: float
    decode_s: float
    kv_token_s: float
    idle_s: float

    def shares(self, rate: float, hardware: Hardware) -> dict[Resource, float]:
        """Shares of one engine that ``rate`` jobs/s take; prefill and decode add up to its time."""
        return {
            "prefill": rate * self.prefill_s,
            "decode": rate * self.decode_s + self.idle_s,
            "memory": rate * self.kv_token_s / hardware.kv_tokens,
        }

    def limit(self, hardware: Hardware) -> float:
        """Jobs/s above which one engine's time or memory is too little on average."""
        free_s = 1.0 - self.idle_s if self.idle_s < 0.9 else 0.1
        work_s = max(self.prefill_s + self.decode_s, 1e-12)
        return min(free_s / work_s, hardware.kv_tokens / max(self.kv_token_s, 1e-12))


def demand(jobs: Sequence[Job], hardware: Hardware) -> Demand:
    """Means over ``jobs``; times in seconds."""
    model = hardware.step_time
    slope_s = max(term[0] for term in model.terms)
    full_pace_s = model.predict_s(hardware.max_num_seqs, hardware.kv_tokens)
    prefill_s = decode_s = kv_token_s = 0.0
    for job in jobs:
        for asked, before in job.in_context():
            prompt, context = asked.least_prompt(before)
            pairs = chunk_pairs(prompt, context)
            prefill_s += slope_s * prompt + model.pair_s * pairs
            held = context + prompt
            alone_s = hardware.zero_load_ttft_s(prompt, context) - hardware.frontend_s
            kv_token_s += held * alone_s
            for stage in asked.stages:
                mean = held + stage.tokens / 2
                decode_s += stage.tokens * (slope_s + (model.kv_s + model.pair_s) * mean)
                pace_s = stage.tpot_s if math.isfinite(stage.tpot_s) else full_pace_s
                kv_token_s += mean * stage.tokens * pace_s
                held += stage.tokens
    count = max(1, len(jobs))
    tightest_s = min(asked.tightest_tpot_s for job in jobs for asked in job.rounds)
    idle_s = min(1.0, model.predict_s(1) / max(tightest_s, 1e-9))
    return Demand(prefill_s / count, decode_s / count, kv_token_s / count, idle_s)


def binding(shares: dict[Resource, float]) -> Resource:
    """The resource used most: memory, or if that is time, the larger part of it."""
    if shares["memory"] > shares["prefill"] + shares["decode"]:
        return "memory"
    return "prefill" if shares["prefill"] >= shares["decode"] else "decode"


def start_rate(setting: Setting) -> float:
    """First rate of a search, jobs/s per GPU: half of the average limit."""
    hardware = setting.hardware
    limit = demand(setting.sample(_SAMPLE), hardware).limit(hardware)
    return _START_SHARE * limit / hardware.gpus
