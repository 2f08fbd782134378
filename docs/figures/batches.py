# SPDX-License-Identifier: Apache-2.0
"""One second of steps: how long each takes, and who gets its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from style import BLUE, GREY, ORANGE, TEXT, canvas, svg

from vllm_slo.core.batching.step import StepLimits, plan_step
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import BestEffortView, DecodeView, PrefillView, StepPlan

MODEL: Final = StepTimeModel(((0.0, 0.0, 0.020), (3e-4, 0.0, 0.018)))
LIMITS: Final = StepLimits(max_step_tokens=512, best_effort_step_s=0.1)
WINDOW: Final = 10
COLOURS: Final = {"decode": ORANGE, "prompt": BLUE, "best effort": GREY}
UNTIL_S: Final = 1.0
LEAVES_S: Final = 0.55
"""When the requests of the tight class have ended."""


@dataclass
class Decoding:
    """A promised request that decodes from time 0 on."""

    name: str
    tpot_s: float
    tokens: int = 0

    def view(self) -> DecodeView:
        """What the policy sees of it."""
        done = self.tokens % WINDOW
        end_s = (self.tokens - done + WINDOW) * self.tpot_s
        due_s = (self.tokens + 1) * self.tpot_s
        return DecodeView(self.name, due_s, end_s, float(WINDOW - done), self.tpot_s)


def steps() -> list[tuple[float, StepPlan]]:
    """When each step begins, and its plan."""
    tight = [Decoding(f"decode {n}", 0.040) for n in range(4)]
    loose = [Decoding(f"decode slow {n}", 0.080) for n in range(8)]
    prompts = {"prompt 1": (0.30, 250), "prompt 2": (0.45, 220)}
    left = {**{name: tokens for name, (_, tokens) in prompts.items()}, "best effort": 4_000}
    now_s, planned = 0.0, []
    while now_s < UNTIL_S:
        decoding = [*loose] if now_s >= LEAVES_S else [*tight, *loose]
        plan = plan_step(
            now_s,
            [request.view() for request in decoding],
            [
                PrefillView(name, deadline_s, left[name], 0.08)
                for name, (deadline_s, _) in prompts.items()
                if left[name]
            ],
            [BestEffortView("best effort", 0.0, left["best effort"], decoding=False)],
            MODEL,
            LIMITS,
        )
        for name in left:
            left[name] -= plan.tokens.get(name, 0)
        for request in decoding:
            request.tokens += plan.tokens.get(request.name, 0) > 0
        planned.append((now_s, plan))
        now_s += plan.predicted_s
    return planned


def draw() -> str:
    """The steps as SVG; every one is `plan_step`'s own answer."""
    drawing, axes = canvas(1, 3.4)
    for start_s, plan in steps():
        below = 0
        for kind, colour in COLOURS.items():
            tokens = sum(n for name, n in plan.tokens.items() if name.startswith(kind))
            axes.bar(
                start_s,
                tokens,
                plan.predicted_s,
                below,
                align="edge",
                color=colour,
                alpha=0.7,
                edgecolor=TEXT,
                lw=0.4,
            )
            below += tokens
    for kind, colour in COLOURS.items():
        axes.bar(0, 0, color=colour, alpha=0.7, label=kind)
    axes.axvline(LEAVES_S, color=GREY, lw=0.8, ls=":")
    axes.set(xlabel="seconds; a bar is a step, as wide as it takes", ylabel="tokens of the step")
    axes.set_xlim(0, UNTIL_S)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    return svg(drawing)
