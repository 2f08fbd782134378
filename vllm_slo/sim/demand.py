# SPDX-License-Identifier: Apache-2.0
"""What jobs ask of an engine on average, by hand: shares of its time and of its memory.

An estimate without queues: what a rate needs at least, to say which resource binds and where a
search for the capacity may begin. It is never reported as a capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from vllm_slo.core.step_time.model import chunk_pairs
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job

if TYPE_CHECKING:
    from vllm_slo.sim.capacity import Setting

Resource = Literal["prefill", "decode", "memory"]

_SAMPLE: Final = 1000
_START_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Demand:
    """What the mean job asks for.

    Attributes:
        prefill_s: seconds of compute for its prompts: tokens at the compute-bound line's slope,
            and their attention.
        decode_s: the same for its answer, and reading its KV in each step.
        kv_token_s: KV tokens times the seconds it holds them (its prompts at a lone request's
            pace, its answer at its objective's: an engine near its capacity is not faster).
        idle_s: share of each second that steps cost whatever is in them, at the slowest pace that
            keeps the tightest TPOT.
    """

    prefill_s: float
    decode_s: float
    kv_token_s: float
    idle_s: float

    def shares(self, rate: float, hardware: Hardware) -> dict[Resource, float]:
        """Shares of one engine that ``rate`` jobs/s take; prefill and decode share one second."""
        return {
            "prefill": rate * self.prefill_s,
            "decode": rate * self.decode_s + self.idle_s,
            "memory": rate * self.kv_token_s / hardware.kv_tokens,
        }

    def limit(self, hardware: Hardware) -> float:
        """Jobs/s of one engine beyond which its time or its memory does not suffice on average."""
        free_s = 1.0 - self.idle_s if self.idle_s < 0.9 else 0.1
        work_s = max(self.prefill_s + self.decode_s, 1e-12)
        return min(free_s / work_s, hardware.kv_tokens / max(self.kv_token_s, 1e-12))


def demand(jobs: Sequence[Job], hardware: Hardware) -> Demand:
    """Means over ``jobs``; times in seconds."""
    model = hardware.step_time
    slope_s = max(term[0] for term in model.terms)
    prefill_s = decode_s = kv_token_s = 0.0
    for job in jobs:
        context = 0
        for one in job.rounds:
            pairs = chunk_pairs(one.prompt_tokens, context)
            prefill_s += slope_s * one.prompt_tokens + model.pair_s * pairs
            held = context + one.prompt_tokens
            alone_s = hardware.zero_load_ttft_s(one.prompt_tokens, context) - hardware.frontend_s
            kv_token_s += held * alone_s
            for stage in one.stages:
                mean = held + stage.tokens / 2
                decode_s += stage.tokens * (slope_s + (model.kv_s + model.pair_s) * mean)
                kv_token_s += mean * stage.tokens * stage.tpot_s
                held += stage.tokens
            context = held
    count = max(1, len(jobs))
    tightest_s = min(one.tightest_tpot_s for job in jobs for one in job.rounds)
    idle_s = min(1.0, model.predict_s(1) / max(tightest_s, 1e-9))
    return Demand(prefill_s / count, decode_s / count, kv_token_s / count, idle_s)


def binding(shares: dict[Resource, float]) -> Resource:
    """What is used most: memory, or where time is, the larger of prefill and decode."""
    if shares["memory"] > shares["prefill"] + shares["decode"]:
        return "memory"
    return "prefill" if shares["prefill"] >= shares["decode"] else "decode"


def start_rate(setting: Setting) -> float:
    """A rate in jobs/s per GPU at which a search may begin: half of the average limit."""
    # Lengths are the same however a trace is fitted, and thinning may refuse this rate.
    jobs = replace(setting, fit="rescale").make(1.0, min(setting.jobs, _SAMPLE), 0)
    return (
        _START_SHARE
        * demand(jobs, setting.hardware).limit(setting.hardware)
        / (setting.hardware.gpus)
    )
