# SPDX-License-Identifier: Apache-2.0
"""Draft tokens granted to four clients, for the most tokens and in fair shares."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray
from style import BLUE, GREY, canvas, svg

from vllm_slo.core.speculation.acceptance import expected_tokens
from vllm_slo.core.speculation.proportional_fairness import GradientScheduler

ACCEPTANCE: Final = {"90%": 0.9, "80%": 0.8, "60%": 0.6, "30%": 0.3}
BUDGET: Final = 16
ROUNDS: Final = 600
"""Of which the first half is not counted."""


def rounds(alpha: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean grant and mean tokens of each client over the second half of the rounds."""
    clients, fair = list(ACCEPTANCE), GradientScheduler(alpha=alpha)
    for client in clients:
        fair.add(client)
    grants, tokens = np.zeros((2, ROUNDS, len(clients)))
    for number in range(ROUNDS):
        grants[number] = fair.grants(clients, BUDGET)
        for place, (client, share) in enumerate(ACCEPTANCE.items()):
            drafts = int(grants[number, place])
            tokens[number, place] = expected_tokens(share, 1 + drafts)
            fair.observe(client, [share] * drafts, tokens[number, place])
    return grants[ROUNDS // 2 :].mean(0), tokens[ROUNDS // 2 :].mean(0)


def draw() -> str:
    """Grants and what they yield as SVG; every round is the scheduler's own."""
    drawing, panels = canvas(2, 4.0, sharex=True)
    ways = {"most tokens": rounds(0.0), "fair (GoodSpeed)": rounds(1.0)}
    for axes, part, title in zip(panels, (0, 1), ("draft tokens granted", "tokens"), strict=True):
        for number, (way, colour) in enumerate(zip(ways, (GREY, BLUE), strict=True)):
            places = np.arange(len(ACCEPTANCE)) + 0.38 * (number - 0.5)
            axes.bar(places, ways[way][part], 0.36, color=colour, alpha=0.8, label=way)
        axes.set_ylabel(title)
        axes.set_xticks(range(len(ACCEPTANCE)), list(ACCEPTANCE))
    panels[0].legend(loc="upper right")
    panels[1].set_xlabel("clients by the share of their drafts that is accepted")
    return svg(drawing)
