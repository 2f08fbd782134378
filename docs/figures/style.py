# SPDX-License-Identifier: Apache-2.0
"""How the documentation's pictures look: text and axes in the page's own colour, light or dark."""

from __future__ import annotations

import io
import re
from typing import Any, Final

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

TEXT: Final = "#010203"
"""Stands for the colour of the page's text."""
BLUE: Final = "#3f8fd2"
GREEN: Final = "#2fa36b"
GREY: Final = "#8a8f98"
ORANGE: Final = "#e58a1f"
RED: Final = "#e0504b"
VIOLET: Final = "#8e6bd1"


def canvas(rows: int = 1, height: float = 3.4, **options: Any) -> tuple[Any, Any]:
    """A figure as wide as a phone bears, and its axes one below the other."""
    plt.rcParams.update(
        {
            "svg.hashsalt": "vllm-slo",
            "font.size": 11,
            "text.color": TEXT,
            "axes.edgecolor": TEXT,
            "axes.labelcolor": TEXT,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "xtick.color": TEXT,
            "ytick.color": TEXT,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "legend.frameon": False,
        }
    )
    return plt.subplots(rows, 1, figsize=(6.4, height), layout="constrained", **options)


def svg(drawing: Any) -> str:
    """The figure as one element of a page."""
    out = io.StringIO()
    drawing.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    plt.close(drawing)
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(TEXT, "currentColor")
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    # A blank line would end the block of HTML that the page's Markdown sees.
    return re.sub(r"\s*\n\s*", " ", re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL))
