# SPDX-License-Identifier: Apache-2.0
"""The floors of the package and of its engine, as the import law in pyproject.toml has them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from style import BLUE, GREEN, GREY, ORANGE, canvas, svg

PROJECT: Final = Path(__file__).resolve().parents[2] / "pyproject.toml"

PACKAGE: Final = {
    "cli": "the command vllm-slo",
    "check": "what a file is, and whether it is valid",
    "completion": "for shells",
    "router": "one port for several replicas",
    "sim": "the scheduler in virtual time",
    "bench": "loads for any OpenAI endpoint",
    "engine": "what runs in vLLM's processes; the lower picture shows its floors",
    "traces": "recorded requests, from files of any format",
    "live": "the live page",
    "config": "the YAML file, checked",
    "slo": "what a request asks for, and how it says so",
    "wire": "sockets, ports, messages",
    "core": "the policies, pure",
    "tiny": "built-in models",
    "arguments": "of all commands",
    "errors": "every exception",
}
ENGINE: Final = {
    "serving": "start, plugin, LLM, profile",
    "http": "middleware, routes, quotes",
    "proposers": "names for flags",
    "gate": "wraps vLLM's generate",
    "scheduler": "vLLM's, subclassed",
    "composition": "builds the parts of one scheduler",
    "worker": "draft models, attention and sampling of token trees",
    "speculation": "drafts on the scheduler's side: trees, chains, draft servers",
    "scheduling": "promises, plans and outcomes: the owners of the scheduler's state",
    "telemetry": "metrics, traces, the state of a replica",
    "compat": "vLLM's private names and its version",
}
"""Package or module -> what it is. One that is missing here ends the build with a KeyError."""
COLOURS: Final = {"engine": ORANGE, "core": GREEN, "scheduler": BLUE, "scheduling": BLUE}
GAP: Final = 0.012
"""Between two boxes of a floor, as a share of the picture's width."""


def floors(container: str) -> list[list[str]]:
    """The floors of a package from the top, each with the names that stand on it."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    (layers,) = (
        contract["layers"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and contract["containers"] == [container]
    )
    return [layer.split(" | ") for layer in layers]


def draw_floors(axes: Any, container: str, notes: Mapping[str, str]) -> None:
    """Draw each floor as a row of boxes."""
    rows = floors(container)
    for depth, names in enumerate(rows):
        width = (1 + GAP) / len(names)
        for place, name in enumerate(names):
            colour = COLOURS.get(name, GREY)
            axes.barh(
                depth, width - GAP, 0.86, place * width, color=colour, alpha=0.35, align="center"
            )
            middle = place * width + (width - GAP) / 2
            axes.text(middle, depth - 0.17, name, ha="center", va="center", weight="bold")
            axes.text(middle, depth + 0.2, notes[name], ha="center", va="center", size=8.5)
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5), title=f"{container.replace('.', '/')}/")
    axes.axis("off")


def draw() -> str:
    """Both packages as SVG."""
    drawing, (package, engine) = canvas(2, 8.0)
    draw_floors(package, "vllm_slo", PACKAGE)
    draw_floors(engine, "vllm_slo.engine", ENGINE)
    return svg(drawing)
