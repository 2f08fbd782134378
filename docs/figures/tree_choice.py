# SPDX-License-Identifier: Apache-2.0
"""Two candidate trees of one step, and which of their nodes are verified."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from style import BLUE, GREY, ORANGE, TEXT, canvas, svg

from vllm_slo.core.speculation.tree_selection import (
    FOR_SLO,
    FOR_THROUGHPUT,
    NOT_CHOSEN,
    select_trees,
)

STEP_S: Final = 0.060
BUDGET: Final = 9
COLOURS: Final = {FOR_SLO: ORANGE, FOR_THROUGHPUT: BLUE, NOT_CHOSEN: "none"}


class Candidate(NamedTuple):
    """A token that the draft guesses: its text, its parent's place, and how likely its path is."""

    text: str
    parent: int
    path: float


class Asker(NamedTuple):
    """A request: its title, its TPOT and what it has so far, and its candidate tree."""

    title: str
    tpot_s: float
    latency_s: float
    tokens_out: int
    root: str
    tree: tuple[Candidate, ...]


ASKERS: Final = (
    Asker(
        "in a hurry: TPOT 30 ms",
        0.030,
        0.600,
        20,
        "def",
        (
            Candidate("read", -1, 0.52),
            Candidate("write", -1, 0.25),
            Candidate("(", 0, 0.46),
            Candidate("_all", 0, 0.05),
            Candidate("path", 2, 0.30),
            Candidate("self", 2, 0.12),
            Candidate("(", 1, 0.20),
        ),
    ),
    Asker(
        "at ease: TPOT 200 ms",
        0.200,
        0.600,
        4,
        "import",
        (
            Candidate("os", -1, 0.71),
            Candidate("sys", -1, 0.17),
            Candidate("\\n", 0, 0.64),
            Candidate(".path", 0, 0.06),
            Candidate("import", 2, 0.48),
            Candidate("from", 2, 0.10),
            Candidate("\\n", 1, 0.14),
        ),
    ),
)


def depth(tree: tuple[Candidate, ...], node: int) -> int:
    """How many tokens ahead a node is; the root is at 0."""
    return 0 if node < 0 else 1 + depth(tree, tree[node].parent)


def plant(axes: Any, asker: Asker, marks: list[int], needed: float) -> None:
    """Draw one tree from left to right."""
    tree = asker.tree
    leaves = [n for n in range(len(tree)) if all(c.parent != n for c in tree)]
    leaves.sort(key=lambda n: _path(tree, n))
    height = {node: float(len(leaves) - place) for place, node in enumerate(leaves)}
    for node in reversed(range(-1, len(tree))):
        below = [height[n] for n, c in enumerate(tree) if c.parent == node]
        height.setdefault(node, sum(below) / max(len(below), 1))
    for node, candidate in enumerate(tree):
        above = candidate.parent
        x, y = depth(tree, node), height[node]
        chosen = marks[node] != NOT_CHOSEN
        line = {"color": TEXT, "lw": 1.2} if chosen else {"color": GREY, "lw": 0.8, "ls": ":"}
        axes.plot([x - 1 + 0.2, x - 0.2], [height[above], y], zorder=1, **line)
        box(axes, x, y, candidate.text, COLOURS[marks[node]], f"{candidate.path:.2f}")
    box(axes, 0, height[-1], asker.root, GREY, "")
    expected = 1 + sum(c.path for c, mark in zip(tree, marks, strict=True) if mark != NOT_CHOSEN)
    axes.set_title(f"{asker.title}: needs {max(needed, 1):.1f} tokens, may expect {expected:.1f}")
    axes.set(xlim=(-0.35, 3.4), ylim=(0.3, len(leaves) + 0.7))
    axes.axis("off")


def _path(tree: tuple[Candidate, ...], node: int) -> tuple[int, ...]:
    return () if node < 0 else (*_path(tree, tree[node].parent), node)


def box(axes: Any, x: float, y: float, text: str, colour: str, share: str) -> None:
    """A node: its token, in the colour of why it is verified, and its path probability."""
    face = "none" if colour == "none" else (colour, 0.55)
    edge = GREY if colour == "none" else colour
    style = {"boxstyle": "round,pad=0.3", "facecolor": face, "edgecolor": edge}
    axes.text(x, y, text, ha="center", va="center", family="monospace", bbox=style)
    axes.text(x, y - 0.46, share, ha="center", va="center", fontsize=8.5)


def draw() -> str:
    """Both trees as SVG; what is chosen is `select_trees`' own answer."""
    nodes = [node for asker in ASKERS for node in asker.tree]
    sizes = [len(asker.tree) for asker in ASKERS]
    # AdaServe's A(r), equation 3.
    needed = [(a.latency_s + STEP_S) / a.tpot_s - a.tokens_out for a in ASKERS]
    marks = select_trees(
        [0, sizes[0], sum(sizes)],
        [node.path for node in nodes],
        [node.parent for node in nodes],
        needed,
        budget=BUDGET,
    ).tolist()
    drawing, panels = canvas(2, 5.4)
    for axes, asker, need in zip(panels, ASKERS, needed, strict=True):
        plant(axes, asker, marks[: len(asker.tree)], need)
        del marks[: len(asker.tree)]
    return svg(drawing)
