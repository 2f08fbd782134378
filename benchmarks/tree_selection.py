# SPDX-License-Identifier: Apache-2.0
"""What deciding about token trees costs in each step: selection, calibration, and their shape.

The candidates are beams over a peaked draft, a few levels deep; half of the requests have an
objective that asks for more than one token. A small budget verifies a node for every other request,
the full one all candidates.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
from common import markdown, write_result
from numpy.typing import NDArray
from routing_decision import timed

from vllm_slo.core.speculation.calibration import DraftCalibration
from vllm_slo.core.speculation.token_tree import path_rows, walk
from vllm_slo.core.speculation.tree_arrangement import arrange_trees
from vllm_slo.core.speculation.tree_selection import select_trees

WIDTH = 8
SIZES = ((64, 64), (256, 32))
"""Requests, and candidates of each."""
NOTE = """
The largest budget of each batch takes every candidate in, the worst case by far: every node passes
through the heap. Where there is something to choose, time goes with the budget.
"""
REACH_MS = {64: "0.5"}


class Candidates(NamedTuple):
    """A batch: where each request begins, each node's parent, q and path probability, the needs."""

    offsets: NDArray[np.int64]
    parent: NDArray[np.int32]
    q: NDArray[np.float64]
    path: NDArray[np.float64]
    required: NDArray[np.float64]
    depth: int


def beam(rng: np.random.Generator, depth: int) -> list[tuple[int, float, float]]:
    """(parent, q, path probability) of the nodes of a beam search ``WIDTH`` wide."""
    nodes: list[tuple[int, float, float]] = []
    level = [(-1, 1.0)]
    for _ in range(depth):
        grown = [
            (at, float(q), reached * float(q))
            for at, reached in level
            for q in rng.dirichlet(np.full(4 * WIDTH, 0.1))
        ]
        best = sorted(grown, key=lambda node: -node[2])[:WIDTH]
        level = [(len(nodes) + place, path) for place, (_, _, path) in enumerate(best)]
        nodes += best
    return nodes


def batch(requests: int, nodes: int) -> Candidates:
    """The candidate trees of a step."""
    rng = np.random.default_rng(0)
    depth = nodes // WIDTH
    parent, q, path = zip(
        *(node for _ in range(requests) for node in beam(rng, depth)), strict=True
    )
    return Candidates(
        np.arange(requests + 1) * nodes,
        np.array(parent, dtype=np.int32),
        np.array(q),
        np.array(path),
        rng.uniform(-1.0, 3.0, requests),
        depth,
    )


def selections(requests: int, nodes: int, repeats: int) -> list[list[str]]:
    """A row for each budget."""
    found = batch(requests, nodes)
    rows = []
    for each in (0.5, 3, 7, nodes):
        budget = requests + int(each * requests)

        def select(budget: int = budget) -> NDArray[np.int8]:
            return select_trees(
                found.offsets, found.path, found.parent, found.required, budget=budget
            )

        if np.count_nonzero(select()) != budget - requests:
            raise SystemExit(f"{requests} x {nodes}: the budget of {budget} is not used")
        name = f"select: {requests} requests x {nodes} candidates, budget {budget}"
        rows.append([name, *timed(select, repeats), REACH_MS.get(requests, "")])
    return rows


def calibrations(requests: int, nodes: int, repeats: int) -> list[list[str]]:
    """Rows about the calibration of a batch."""
    found = batch(requests, nodes)
    rng = np.random.default_rng(1)
    calibration = DraftCalibration()
    depth = np.tile(np.repeat(np.arange(1, found.depth + 1), WIDTH), requests)
    accepted = rng.random(len(depth)) < found.q**2
    few = slice(0, 4 * requests)
    what = f"{requests} x {nodes}"
    work = {
        f"observe {4 * requests} nodes": lambda: calibration.observe(
            depth[few], found.q[few], accepted[few]
        ),
        f"observe {what}": lambda: calibration.observe(depth, found.q, accepted),
        f"conditional probabilities of {what}": lambda: calibration.conditional(depth, found.q),
        f"path probabilities of {what}": lambda: calibration.path_probabilities(
            found.offsets, found.parent, found.q
        ),
    }
    return [[name, *timed(do, repeats), "0.2"] for name, do in work.items()]


def shapes(requests: int, nodes: int, repeats: int) -> list[list[str]]:
    """Rows about laying out chosen trees in the scheduler, and using them in a worker."""
    found = batch(requests, nodes)
    marks = select_trees(
        found.offsets, found.path, found.parent, found.required, budget=8 * requests
    )
    deepest = np.full(requests, found.depth)

    def arrange() -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
        return arrange_trees(found.offsets, found.path, found.parent, marks, deepest, 8 * requests)

    order, parents, counts = arrange()
    ends = np.cumsum(counts)
    trees = [
        (order[end - count : end].tolist(), parents[end - count : end].tolist())
        for end, count in zip(ends, counts, strict=True)
    ]

    def rows() -> object:
        return [path_rows(above) for _, above in trees]

    def accept() -> object:
        return [walk(tokens, above, [*tokens, 0]) for tokens, above in trees]

    name = f"{requests} trees of {counts.mean():.1f} nodes"
    work = {"arrange": arrange, "path_rows": rows, "walk": accept}
    return [[f"{what}: {name}", *timed(do, repeats), ""] for what, do in work.items()]


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=1_000)
    repeats = parser.parse_args().repeats
    rows = [row for size in SIZES for row in selections(*size, repeats)]
    rows += calibrations(*SIZES[0], repeats) + shapes(*SIZES[0], repeats)
    head = ["what", "median ms", "p99 ms", "reach"]
    write_result("tree_selection", __doc__, markdown(head, rows), note=NOTE)


if __name__ == "__main__":
    main()
