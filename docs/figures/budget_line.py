# SPDX-License-Identifier: Apache-2.0
"""The budget line of admission: what the engine can process, and what is asked of it by when."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from style import BLUE, GREEN, GREY, ORANGE, RED, TEXT, VIOLET, canvas, svg

from vllm_slo.core.admission.budget_line import longest_step_s, processed_by
from vllm_slo.core.admission.program import Capacity, engine_of, plan_admission
from vllm_slo.core.arrays import Floats
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand

MODEL: Final = StepTimeModel(((0.0, 0.0, 0.035), (4.5e-4, 0.0, 0.035)))
"""Seconds: 0.035 for a step, and 0.00045 more for each token."""
CAPACITY: Final = Capacity(blocks=1000, seats=64, max_step_tokens=512)
RUNNING: Final = {0.060: 12}
ASKING: Final = [
    Demand("A", 0.8, 400, 0.080, 10),
    Demand("B", 1.6, 500, 0.080, 10),
    Demand("C", 2.2, 800, 0.050, 10),
    Demand("D", 3.2, 600, 0.080, 10),
]
UNTIL_S: Final = 4.0
STEP_TOKENS: Final = 60
"""About what one step processes: the budget line is a stair of such height."""
COLOURS: Final = {"A": BLUE, "B": GREEN, "C": ORANGE, "D": VIOLET}


def budget(times: Floats, served: Sequence[Demand]) -> Floats:
    """Tokens that the engine can have processed by each of ``times``, beside ``served``."""
    engine = engine_of(MODEL, CAPACITY)
    tpots = np.array([*RUNNING, *(d.tpot_s for d in served)])
    total, edges = np.zeros(len(times)), sorted({0.0, *(d.deadline_s for d in served), math.inf})
    for since, until in itertools.pairwise(edges):
        decoding = [int(d.deadline_s <= since) for d in served]
        counts = np.array([*RUNNING.values(), *decoding])
        step = longest_step_s(counts, np.stack([tpots, np.ones(len(tpots))]), engine)
        for place, time in enumerate(times):
            end = min(time, until)
            if end > since:
                total[place] += processed_by(end, step, engine) - processed_by(since, step, engine)
    return total


def asked(times: Floats, demand: Demand) -> Floats:
    """Tokens that a request has drawn by each of ``times``: its line."""
    decoded = np.maximum(times - demand.deadline_s, 0.0) / demand.tpot_s
    return np.where(times >= demand.deadline_s, demand.prefill_tokens + decoded, 0.0)


def panel(axes: Any, served: Sequence[Demand], title: str) -> None:
    """Lines of ``served``, one upon the other, below the budget line or not."""
    times = np.linspace(0.0, UNTIL_S, 801)
    supply, below = budget(times, served), times * sum(n / tpot for tpot, n in RUNNING.items())
    axes.fill_between(times, 0, below, color=GREY, alpha=0.45, lw=0)
    axes.text(UNTIL_S - 0.05, below[-1] / 2, "12 running", ha="right", va="center")
    for demand in served:
        above = below + asked(times, demand)
        axes.fill_between(times, below, above, color=COLOURS[demand.request_id], alpha=0.55, lw=0)
        axes.text(
            UNTIL_S - 0.05, (below[-1] + above[-1]) / 2, demand.request_id, ha="right", va="center"
        )
        axes.axvline(demand.deadline_s, color=GREY, lw=0.8, ls=":")
        below = above
    axes.plot(times, supply, color=TEXT, lw=2)
    late = below > supply + STEP_TOKENS
    axes.fill_between(times, supply, below, where=late, color=RED, alpha=0.8, lw=0)
    if late.any():
        first = int(np.argmax(late))
        axes.annotate(
            "too late",
            (times[first], below[first]),
            xytext=(times[first] - 0.7, below[first] + 700),
            color=RED,
            arrowprops={"arrowstyle": "->", "color": RED},
        )
    axes.set(title=title, ylabel="tokens", xlim=(0, UNTIL_S), ylim=(0, 3800))
    axes.set_xticks([0, *(d.deadline_s for d in ASKING), UNTIL_S])


def draw() -> str:
    """Both panels as SVG; which requests are promised is the dynamic program's own answer."""
    plan = plan_admission(0.0, ASKING, [], RUNNING, MODEL, CAPACITY)
    promised = [d for d in ASKING if d.request_id in plan.admitted]
    (refused,) = plan.refused
    names = ", ".join(plan.admitted)
    drawing, (everybody, chosen) = canvas(2, 6.2, sharex=True)
    panel(everybody, ASKING, "all four: what is asked exceeds the budget")
    panel(chosen, promised, f"{names} are promised; {refused} is served best effort")
    chosen.set_xlabel("seconds from now; dotted: the deadlines of first tokens")
    chosen.text(1.5, 1560, "budget line", rotation=29)
    return svg(drawing)
