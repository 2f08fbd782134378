# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared: vllm-slo, vLLM's own settings, and patched policies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.sim.errors import SimulationError

Policy = Literal[
    "slo", "fcfs", "priority", "prefill_first", "shed_edf", "latency_budget", "disaggregated"
]

OVERHEAD_S: Final[Mapping[bool, tuple[float, float]]] = {
    False: (20e-6, 13e-6),
    True: (250e-6, 18e-6),
}
"""Whether it is vllm-slo's scheduler -> seconds to schedule: per step, and per request in it.

Measured on the real scheduler objects with a prompt in every step, 16 to 256 requests, on one core
of an Intel Xeon with AMX (benchmarks/scheduler_overhead.py).
"""
DRAFTS: Final = 8
"""Tokens drafted if a name has no number. With the verifier's own token a length stays below 10
(SLOs-Serve, appendix D)."""
MOST_DRAFTS: Final = 32

SWEPT_BUDGETS: Final = (256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class System:
    """How one replica is set up.

    Attributes:
        name: as ``parse_system`` reads it.
        token_budget: most tokens of a step (``--max-num-batched-tokens``).
        prefill, decode: engines of each kind if disaggregated, else 0.
        drafts: tokens drafted for each decoding request in a step; 0: no speculation.
        step_ms: latency budget of a step; 0: none.
        trees: whether a draft model drafts token trees, as ``vllm-slo serve --draft-model`` does.
    """

    name: str
    policy: Policy
    token_budget: int = 8192
    prefill: int = 0
    decode: int = 0
    drafts: int = 0
    step_ms: int = 0
    trees: bool = False

    @property
    def speculates(self) -> bool:
        return self.trees or self.drafts > 0

    @property
    def engines(self) -> int:
        return self.prefill + self.decode or 1

    @property
    def stock(self) -> bool:
        """Whether vLLM's own flags are enough to run it."""
        return self.policy in ("fcfs", "priority")

    def overhead_s(self, requests: int) -> float:
        step_s, request_s = OVERHEAD_S[self.policy == "slo"]
        return step_s + request_s * requests


OURS: Final = System("vllm-slo", "slo")
TREES: Final = replace(OURS, name="vllm-slo-trees", trees=True)
_NAME: Final = re.compile(
    r"(?P<policy>fcfs|priority|prefill-first|shed-edf|latency-budget|disaggregated)"
    r"(-(?P<prefill>\d+):(?P<decode>\d+))?(-(?P<budget>\d+))?"
)
_DRAFTED: Final = re.compile(r"(?P<plain>(vllm-slo|fcfs|priority)(-\d+)?)-spec(?P<drafts>\d*)")


def system(policy: Policy, token_budget: int, prefill: int = 0, decode: int = 0) -> System:
    """A system under its usual name."""
    ratio = f"-{prefill}:{decode}" if prefill else ""
    name = f"{policy.replace('_', '-')}{ratio}-{token_budget}"
    return System(name, policy, token_budget, prefill, decode)


def speculating(plain: System, drafts: int = DRAFTS) -> System:
    """The same system with speculation; see ``System.drafts``."""
    length = "" if drafts == DRAFTS else drafts
    return replace(plain, name=f"{plain.name}-spec{length}", drafts=drafts)


def parse_system(text: str) -> System:
    """``vllm-slo``, ``fcfs-2048``, ``shed-edf-1024``, ``disaggregated-2:1-8192`` and so on;
    ``vllm-slo-spec``, ``fcfs-2048-spec3``, ``vllm-slo-trees`` with speculation.

    Raises:
        SimulationError: anything else.
    """
    if drafted := _DRAFTED.fullmatch(text):
        drafts = int(drafted["drafts"] or DRAFTS)
        if not 1 <= drafts <= MOST_DRAFTS:
            raise SimulationError(f"systems: {text!r}: drafts are 1 to {MOST_DRAFTS}")
        return speculating(parse_system(drafted["plain"]), drafts)
    for ours in (OURS, TREES):
        if text == ours.name:
            return ours
    match = _NAME.fullmatch(text)
    policy = match["policy"].replace("-", "_") if match else ""
    apart = policy == "disaggregated"
    if match is None or policy not in get_args(Policy) or apart != bool(match["prefill"]):
        raise SimulationError(
            f"systems: {text!r} is not known; use vllm-slo, vllm-slo-trees, fcfs-N, priority-N, "
            "prefill-first-N, shed-edf-N (N: tokens per step), latency-budget-N (N: ms per step) "
            "or disaggregated-P:D-N (P prefill, D decode engines); "
            "vllm-slo, fcfs-N and priority-N with -specK for K drafts"
        )
    prefill, decode = int(match["prefill"] or 0), int(match["decode"] or 0)
    if policy == "latency_budget":
        step_ms = int(match["budget"] or 0)
        if step_ms < 1:
            raise SimulationError(
                f"systems: {text!r}: a step is at least 1 ms, latency-budget-50 for example"
            )
        return System(text, "latency_budget", step_ms=step_ms)
    budget = int(match["budget"] or 8192)
    if budget < 1 or (apart and min(prefill, decode) < 1):
        raise SimulationError(f"systems: {text!r}: engines and tokens per step are at least 1")
    return system(policy, budget, prefill, decode)  # type: ignore[arg-type]


def families(step_time: StepTimeModel, tightest_tpot_s: float) -> dict[str, tuple[System, ...]]:
    """Name of a baseline -> the settings among which the best is chosen.

    ``tightest_tpot_s``: of the scenario; Sarathi's token budget is the largest step within it.
    """
    sarathi = min(max(step_time.time_to_tokens(tightest_tpot_s), 64), 8192)
    swept = sorted({*SWEPT_BUDGETS, sarathi})
    return {
        OURS.name: (OURS,),
        "vLLM fcfs 2048": (system("fcfs", 2048),),
        "vLLM fcfs 8192": (system("fcfs", 8192),),
        "Sarathi (tightest TPOT)": (system("fcfs", sarathi),),
        "Sarathi (best budget)": tuple(system("fcfs", n) for n in swept),
        "vLLM priority = deadline": tuple(system("priority", n) for n in (512, 2048)),
        "prefill first": tuple(system("prefill_first", n) for n in (2048, 8192)),
        "shed + EDF": tuple(system("shed_edf", n) for n in swept),
        "disaggregated": tuple(
            system("disaggregated", 8192, p, d) for p, d in ((1, 1), (2, 1), (1, 2))
        ),
    }


STOCK_FAMILIES: Final = (
    "vLLM fcfs 2048",
    "vLLM fcfs 8192",
    "Sarathi (tightest TPOT)",
    "Sarathi (best budget)",
    "vLLM priority = deadline",
)
"""Baselines that need only vLLM's own flags."""
