# SPDX-License-Identifier: Apache-2.0
"""Requests in the queues of LAPS-SD: what is unknown of them goes down, what is known is placed."""

from __future__ import annotations

from typing import Final

from style import BLUE, GREY, ORANGE, canvas, svg

from vllm_slo.config.sections import BestEffortConfig
from vllm_slo.core.ordering.least_perceived_service import ServiceQueues, execution_s

CONFIG: Final = BestEffortConfig()
STEP_S: Final = 0.030
DRAFT_S: Final = 0.002
DRAFTS: Final = 4
UNTIL_S: Final = 60.0
KNOWN: Final = (("40 tokens", 40, 0.9), ("200 tokens", 200, 0.8), ("1200 tokens", 1200, 0.3))
"""Answers: a name, tokens still to come, share of drafts that is accepted."""


def draw() -> str:
    """The thresholds and the places as SVG; both are the policy's own."""
    queues = ServiceQueues(CONFIG.queues, CONFIG.first_queue_s, CONFIG.queue_ratio)
    drawing, axes = canvas(1, 3.0)
    edges = [0.1, *(CONFIG.first_queue_s * CONFIG.queue_ratio**j for j in range(CONFIG.queues - 1))]
    for place, since in enumerate(edges):
        until = edges[place + 1] if place + 1 < len(edges) else UNTIL_S
        axes.axvspan(since, until, color=BLUE, alpha=0.12 + 0.1 * place, lw=0)
        axes.text(
            (since * until) ** 0.5,
            3.45,
            f"queue {queues.level((since * until) ** 0.5) + 1}",
            ha="center",
        )
    for height, (name, tokens, share) in enumerate(KNOWN):
        work_s = execution_s(tokens, DRAFTS, share, DRAFT_S, STEP_S)
        axes.plot([work_s], [2.7 - height * 0.55], "o", color=ORANGE, ms=8)
        far = work_s > 1.0
        text, x = f"{name}, {share:.0%} accepted", work_s * (0.85 if far else 1.17)
        axes.text(x, 2.7 - height * 0.55, text, ha="right" if far else "left", va="center")
    axes.annotate("", (40, 0.6), xytext=(0.12, 0.6), arrowprops={"arrowstyle": "->", "color": GREY})
    axes.text(0.12, 0.75, "a newcomer: down as it is served, until its rate is known")
    axes.set(xscale="log", xlim=(0.1, UNTIL_S), ylim=(0.2, 3.8), xlabel="work, seconds")
    axes.set_xticks([0.1, *edges[1:], UNTIL_S], [f"{x:g}" for x in (0.1, *edges[1:], UNTIL_S)])
    axes.minorticks_off()
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    return svg(drawing)
