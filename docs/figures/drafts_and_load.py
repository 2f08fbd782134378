# SPDX-License-Identifier: Apache-2.0
"""How many drafts pay, by how many requests decode together."""

from __future__ import annotations

from typing import Final

import numpy as np
from style import BLUE, GREEN, GREY, ORANGE, canvas, svg

from vllm_slo.core.speculation.acceptance import expected_tokens
from vllm_slo.core.step_time.model import StepTimeModel

MODEL: Final = StepTimeModel(((0.0, 0.0, 0.035), (4.5e-4, 0.0, 0.028)))
DRAFT_PASS_S: Final = 0.002
ACCEPTANCE: Final = 0.7
COLOURS: Final = {0: GREY, 2: GREEN, 4: BLUE, 8: ORANGE}


def draw() -> str:
    """Tokens per second of all requests as SVG, over what they get without drafts."""
    requests = np.arange(1, 97)
    drawing, axes = canvas(1, 3.2)
    plain = np.array([n / MODEL.predict_s(int(n)) for n in requests])
    for drafts, colour in COLOURS.items():
        step_s = [MODEL.predict_s(int(n) * (1 + drafts)) + drafts * DRAFT_PASS_S for n in requests]
        rate = requests * expected_tokens(ACCEPTANCE, 1 + drafts) / np.array(step_s)
        axes.plot(requests, rate / plain, color=colour, lw=2, label=f"{drafts} drafts")
    axes.set(xlabel="requests that decode together", ylabel="speed over plain decoding")
    axes.set(xscale="log", ylim=(0.4, 2.7))
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axes.minorticks_off()
    axes.legend(loc="upper right", ncols=2)
    return svg(drawing)
