# SPDX-License-Identifier: Apache-2.0
"""Token trees against chains of as many draft tokens, on the real CPU engine, by context length.

The costlier twin of the built-in target serves a batch that decodes together; every step verifies
four nodes for each request. vLLM's own chain runs in an engine of its own, three shapes by turns
in one engine of ours: a chain (one guess after the other), a tree (the most probable nodes of beams
four wide and four deep, of the whole batch), and a star (four guesses at the next token), the shape
for which path rows read a request's context most often. Prompts are AdaServe's, put together to the
length. Only steps in which everybody decodes and all nodes are verified count; medians over them,
the engines taking turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import adaserve_engine
from adaserve_systems import Kitchen, Models, System, in_own_process, say, twin
from adaserve_workload import load_trace
from common import markdown, write_result

from vllm_slo import tiny
from vllm_slo.config import profiles

NODES: Final = 4
SHAPES: Final = {"chain": (NODES, 1), "tree": (NODES, 4), "star": (1, NODES)}
"""Depth and width of what is drafted."""
CONTEXTS: Final = (128, 512, 1024, 1900)
BATCHES: Final = (1, 8)
ANSWER: Final = 60


# --- in an engine's own process -------------------------------------------------------------------


class Fixed:
    """Every request's tree has the same shape, and every step verifies ``NODES`` for each."""

    def __init__(self, scheduler: Any) -> None:
        self._trees = scheduler.parts.speculation
        self._trees.fixed_nodes = NODES
        self.use("tree")

    def use(self, shape: str) -> None:
        """From now on."""
        from vllm_slo.core.speculation.model_chain import Plan

        depth, width = SHAPES[shape]
        self._trees.drafting.fixed = Plan((0,), depth, width)


def prompts(context: int, count: int) -> list[list[int]]:
    """Prompts of one length, each with another beginning."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny.path("target") / "tokenizer.json"))
    rows, _ = load_trace("rps3.6", 0)
    texts = itertools.cycle([row.text for row in rows])
    found = []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < context:
            ids += tokenizer.encode(next(texts)).ids
        found.append(ids[:context])
    return found


def measure(ask: dict[str, Any]) -> list[dict[str, Any]]:
    """Each batch at each context in each shape: accepted tokens, seconds."""
    server = adaserve_engine.Server(ask["run"])
    fixed = None if ask["chain"] else Fixed(server.steps.scheduler)
    server.warm_up(turns=2)
    found = []
    for context, batch in itertools.product(ask["contexts"], ask["batches"]):
        given = prompts(context, batch)
        for turn, shape in enumerate(list(SHAPES) if fixed else ["vLLM's chain"]):
            if fixed:
                fixed.use(shape)
            asked = [
                adaserve_engine.Asked(
                    request_id=f"r{n}-{turn}", category="", arrival_s=0.0, prompt=ids,
                    output_tokens=ANSWER, tpot_slo_s=1.0,
                )
                for n, ids in enumerate(given)
            ]  # fmt: skip
            server.steps.rows.clear()
            server.serve(asked, ask["run"]["limit_s"])
            whole = [
                row
                for row in server.steps.rows
                if row["decodes"] == batch and row["tokens"] == batch * (1 + NODES)
            ]
            found += [
                {
                    "context": context, "batch": batch, "shape": shape,
                    "accepted": row["given"] / batch - 1.0,
                    "verify_s": row["took_s"] - row["draft_s"], "draft_s": row["draft_s"],
                }
                for row in whole
            ]  # fmt: skip
    return found


# --- the whole ------------------------------------------------------------------------------------


def ask_of(system: System, args: argparse.Namespace) -> dict[str, Any]:
    """The input of an engine's process."""
    run = {
        "engine": dict(system.engine), "requests": [{"tpot_slo_s": 1.0}], "send_slo": False,
        "by_priority": False, "without": "", "alone": False, "temperature": 0.0, "limit_s": 600.0,
    }  # fmt: skip
    chain = not system.ours
    return {"chain": chain, "run": run, "contexts": args.contexts, "batches": args.batches}


def table(steps: Sequence[dict[str, Any]], args: argparse.Namespace) -> str:
    """A row for each batch and context."""
    groups = defaultdict(list)
    for step in steps:
        groups[step["batch"], step["context"], step["shape"]].append(step)

    def verify_ms(key: tuple[int, int, str]) -> float:
        return 1e3 * float(median(step["verify_s"] for step in groups[key]))

    shapes = ["vLLM's chain", *SHAPES]
    lines = []
    for batch, context in itertools.product(args.batches, args.contexts):
        keys = {shape: (batch, context, shape) for shape in shapes}
        if not all(groups[key] for key in keys.values()):
            continue
        accepted = {s: fmean(step["accepted"] for step in groups[k]) for s, k in keys.items()}
        ms = {shape: verify_ms(key) for shape, key in keys.items()}
        draft_ms = {s: 1e3 * median(step["draft_s"] for step in groups[k]) for s, k in keys.items()}
        lines.append(
            [batch, context, *(f"{accepted[s]:.2f}" for s in shapes),
             f"{(1 + accepted['tree']) / (1 + accepted['chain']):.2f}x",
             *(f"{ms[s]:.1f}" for s in shapes),
             f"{ms['tree'] / ms['chain']:.2f}x", f"{ms['star'] / ms['chain']:.2f}x",
             f"{ms['chain'] / ms[shapes[0]]:.2f}x",
             *(f"{draft_ms[s]:.1f}" for s in shapes)]
        )  # fmt: skip
    head = [
        "batch", "context", *(f"accepted: {s}" for s in shapes), "tokens a step, tree / chain",
        *(f"ms: {s}" for s in shapes), "time, tree / chain", "time, star / chain",
        "time, our chain / vLLM's", *(f"drafting, ms: {s}" for s in shapes),
    ]  # fmt: skip
    return markdown(head, lines)


NOTE: Final = """
*accepted*: draft tokens accepted per request and step. *ms*: a step, scheduling included, drafting
left out (columns of its own). *time, tree / chain* and *star / chain* compare shapes within one
engine; *our chain / vLLM's* compares two engines that took turns, so the machine's drift between
them is in it.
"""


def main() -> None:
    """Both engines by turns, then the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="shows that it runs; writes nothing")
    add("--rounds", type=int, default=2)
    add("--parameters", type=float, default=300e6, help="of the target's twin; 0: itself")
    add("--models", type=Path, default=profiles.cache_dir() / "models")
    add("--contexts", type=lambda t: [int(n) for n in t.split(",")], default=list(CONTEXTS))
    add("--batches", type=lambda t: [int(n) for n in t.split(",")], default=list(BATCHES))
    add("--ask", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        sys.stdout.write("\n" + json.dumps(measure(json.loads(args.ask.read_text()))) + "\n")
        return
    if args.quick:
        args.parameters, args.rounds, args.contexts, args.batches = 0.0, 1, [64], [2]
    models = Models(
        twin("target", args.parameters, args.models),
        twin("draft", 0.0, args.models),
    )
    kitchen = Kitchen(models, {}, {})
    steps = []
    for turn in range(args.rounds):
        names = ("ours", f"chain-{NODES}")
        for name in names if turn % 2 == 0 else reversed(names):
            say(f"round {turn + 1}: {name}")
            steps += in_own_process(__file__, ask_of(kitchen.system(name), args))
    found = table(steps, args)
    if args.quick:
        print(found)
        return
    write_result("tree_against_chain", __doc__ or "", found, note=NOTE)


if __name__ == "__main__":
    main()
