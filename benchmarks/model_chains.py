# SPDX-License-Identifier: Apache-2.0
"""Chains of models chosen all the time against every fixed one, on the real CPU engine.

Twins of the built-in models, as far apart in cost as two cores let them resemble 68M, 1.1B and 7B,
serve prompts of HumanEval, GSM8K and Spec-Bench. In one engine, by turns: plain decoding, the draft
alone with 2, 4 and 7 tokens, the middle model alone with 4, the chain of both with 4 and 8, and the
chooser. Of chains it knows what it has seen in its own turns; step times are learnt in all turns.
A fixed chain verifies all that it drafts. First batches of one kind each, of which the chooser has
seen 200 steps before, or half a minute; then a shift of domain and a step of load, in which a fixed
chain stays what it is. Only steps in which all requests of a batch decode count. Each mode serves
the same prompts in each turn; the turns begin with another mode each time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean, median, quantiles
from typing import Any, Final, NamedTuple

import adaserve_engine
from adaserve_systems import in_own_process, say, twin
from common import markdown, write_result

from vllm_slo import tiny
from vllm_slo.bench import traces
from vllm_slo.config import profiles
from vllm_slo.config.class_names import SCHEDULER, TREE_PROPOSER, TREE_WORKER

OURS: Final = "chooser"
PLAIN: Final = "plain"
STATIC: Final = {
    "draft, 2": ((0,), 2, 1, 2),
    "draft, 4": ((0,), 4, 1, 4),
    "draft, 7": ((0,), 7, 1, 7),
    "middle, 4": ((1,), 4, 1, 4),
    "draft > middle, 4": ((0, 1), 4, 1, 4),
    "draft > middle, 8": ((0, 1), 8, 1, 4),
}
"""Name -> chain, depth, width, window."""
MODES: Final = (PLAIN, *STATIC, OURS)
SHIFT_MODES: Final = (PLAIN, "draft, 2", "draft, 4", "draft > middle, 4", OURS)
COLLECTIONS: Final = ("HumanEval", "GSM8K", "Spec-Bench")
PROMPT: Final = 64
"""Most tokens of a prompt."""
ANSWER: Final = 48
LARGE, MANY = 8, 32
"""Answers of batches above the first have two thirds of the tokens, above the second half; batches
above the second are of one collection."""
MAX_DEPTH: Final = 8
SETTLING: Final = 200
SETTLING_S: Final = 30.0
RESAMPLES: Final = 2000
PHASES: Final = (
    ("HumanEval", 4, 3),
    ("GSM8K", 4, 3),
    ("HumanEval", 1, 3),
    ("HumanEval", 16, 1),
)
"""(collection, batch, waves of requests) of the run that changes."""


class Wave(NamedTuple):
    """Requests that come at once."""

    collection: str
    batch: int


def answer_tokens(batch: int) -> int:
    """Of each request of a batch, so that large batches take less of the whole time."""
    return ANSWER if batch <= LARGE else ANSWER * 2 // 3 if batch <= MANY else ANSWER // 2


# --- in an engine's own process -------------------------------------------------------------------


def texts(collection: str) -> Iterator[str]:
    """Prompts of a public collection, again and again."""
    found = traces.public_prompts(collection)
    if not found:
        raise SystemExit("the public prompts are not at hand; see the README's section on data")
    return itertools.cycle(found[::3] if collection == "Spec-Bench" else found[:300])


class Chosen:
    """The engine's chains: those of the chooser, or a fixed one.

    Attributes:
        plans: chain, depth and batch of each step in which something decoded.
        decisions_s: what each of the chooser's decisions took.
    """

    def __init__(self, server: adaserve_engine.Server) -> None:
        from vllm_slo.core.speculation.model_chain import ModelChains, Plan

        self.plans: list[tuple[tuple[int, ...], int, int]] = []
        self.decisions_s: list[float] = []
        self._trees = server.steps.scheduler.parts.speculation
        self._drafting = self._trees.drafting
        self._plan, self._ours = Plan, self._drafting.chains
        self._aside = ModelChains(self._drafting.pool, MAX_DEPTH, 1)
        choose = self._ours.choose

        def noting(load: Any, *args: Any) -> Any:
            began_s = time.perf_counter()
            plan = choose(load, *args)
            self.decisions_s.append(time.perf_counter() - began_s)
            self.plans.append((plan.chain, plan.depth, load.active))
            return plan

        self._ours.choose = noting

    def use(self, mode: str) -> None:
        """From now on."""
        if mode == OURS:
            self._drafting.chains, self._drafting.fixed = self._ours, None
            self._trees.fixed_nodes = None
            return
        plan = self._plan(*STATIC[mode]) if mode in STATIC else self._plan()
        self._drafting.chains, self._drafting.fixed = self._aside, plan
        self._trees.fixed_nodes = plan.depth


class Bench:
    """Serves waves of requests in each mode."""

    def __init__(self, ask: dict[str, Any]) -> None:
        from tokenizers import Tokenizer

        self.server = adaserve_engine.Server(ask["run"])
        self.chosen = Chosen(self.server)
        self.server.warm_up(turns=1)
        self._tokenizer = Tokenizer.from_file(str(tiny.path("target") / "tokenizer.json"))
        self._texts = {name: texts(name) for name in COLLECTIONS}
        self._limit_s = ask["run"]["limit_s"]
        self._count = itertools.count()

    def prompts(self, wave: Wave) -> list[list[int]]:
        """The next prompts of a collection."""
        source = self._texts[wave.collection]
        return [self._tokenizer.encode(next(source)).ids[:PROMPT] for _ in range(wave.batch)]

    def serve(self, mode: str, prompts: Sequence[list[int]]) -> dict[str, Any]:
        """Serve prompts to their end; tokens and seconds of the steps in which all decode."""
        self.chosen.use(mode)
        turn, server, batch = next(self._count), self.server, len(prompts)
        asked = [
            adaserve_engine.Asked(
                request_id=f"r{turn}-{n}", category="", arrival_s=0.0, prompt=ids,
                output_tokens=answer_tokens(batch), tpot_slo_s=1.0,
            )
            for n, ids in enumerate(prompts)
        ]  # fmt: skip
        server.steps.rows.clear()
        self.chosen.plans.clear()
        server.engine.reset_prefix_cache()
        server.serve(asked, self._limit_s)
        rows = [row for row in server.steps.rows if row["decodes"] == batch][1:]
        if not rows:
            raise RuntimeError(f"{mode}, batch {batch}: no two steps in which all of them decode")
        plans = [plan[:2] for plan in self.chosen.plans if plan[2] == batch]
        return {
            "mode": mode,
            "batch": batch,
            "tokens": sum(row["given"] for row in rows),
            "seconds": sum(row["took_s"] for row in rows),
            "steps": len(rows),
            "nodes": sum(row["draft_tokens"] for row in rows),
            "plans": plans if mode == OURS else [],
        }

    def settle(self, wave: Wave) -> None:
        """Let the chooser see `SETTLING` steps of such requests, as far as there is time for it."""
        until_s, steps = time.perf_counter() + SETTLING_S, 0
        while steps < SETTLING and time.perf_counter() < until_s:
            steps += self.serve(OURS, self.prompts(wave))["steps"]


def measure(ask: dict[str, Any]) -> dict[str, Any]:
    """All that is asked for of one engine."""
    bench = Bench(ask)
    found: dict[str, Any] = {"batches": [], "shift": [], "passes": {}}
    for batch, collection in itertools.product(ask["batches"], COLLECTIONS):
        if batch > MANY and collection != COLLECTIONS[0]:
            continue
        bench.settle(Wave(collection, batch))
        for turn in range(ask["rounds"]):
            prompts = bench.prompts(Wave(collection, batch))
            for mode in rotated(MODES, turn):
                one = bench.serve(mode, prompts)
                found["batches"].append({**one, "collection": collection, "turn": turn})
        known = bench.chosen._ours
        found["passes"][batch] = [times.pass_s(batch) for times in known.times]
        print(f"batch {batch}, {collection}: done", file=sys.stderr, flush=True)
    found["shift"] = shifting(bench, ask["shifts"])
    found["decisions_s"] = bench.chosen.decisions_s
    return found


def rotated(modes: Sequence[str], turn: int) -> list[str]:
    """The order of the modes in a turn."""
    first = turn % len(modes)
    return [*modes[first:], *modes[:first]]


def shifting(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """A run that changes, in every mode; of the chooser also what it chose in each step."""
    found = []
    for turn in range(rounds):
        waves = [Wave(name, batch) for name, batch, count in PHASES for _ in range(count)]
        prompts = [bench.prompts(wave) for wave in waves]
        phase_of = [p for p, (_, _, count) in enumerate(PHASES) for _ in range(count)]
        for mode in rotated(SHIFT_MODES, turn):
            for given, phase in zip(prompts, phase_of, strict=True):
                found.append({**bench.serve(mode, given), "phase": phase, "turn": turn})
    return found


# --- the whole ------------------------------------------------------------------------------------


def ask_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the engine's process is to do."""
    draft = twin("draft", 0.0, args.models)
    middle = twin("middle", args.middle, args.models)
    most = max([*args.batches, *(batch for _, batch, _ in PHASES)])
    engine = {
        "model": str(twin("target", args.parameters, args.models)),
        "dtype": args.dtype,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": most,
        "max_num_batched_tokens": max(1024, PROMPT * most),  # all prompts of a batch in one step
        "block_size": 32,
        "scheduler_cls": SCHEDULER,
        "worker_cls": TREE_WORKER,
        "speculative_config": {
            "method": "custom_class", "model": TREE_PROPOSER, "num_speculative_tokens": 24,
        },
        "additional_config": {
            "draft_model": [str(draft), str(middle)],
            "slo_config": {
                "speculation": {"max_depth": MAX_DEPTH, "draft_tokens": max(64, most * 4)}
            },
        },
    }  # fmt: skip
    run = {
        "engine": engine, "requests": [{"tpot_slo_s": 1.0}], "send_slo": False,
        "by_priority": False, "without": "", "alone": False, "temperature": 0.0, "limit_s": 900.0,
    }  # fmt: skip
    return {"run": run, "batches": args.batches, "rounds": args.rounds, "shifts": args.shifts}


def batch_table(runs: Sequence[dict[str, Any]], passes: dict[str, list[float]]) -> str:
    """Speed of each mode over plain decoding of the same prompts, by batch and collection."""
    speeds: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in sorted(runs, key=lambda run: run["turn"]):
        speed = run["tokens"] / run["seconds"]
        speeds[run["batch"], run["collection"]][run["mode"]].append(speed)
    rows = []
    for (batch, collection), found in sorted(speeds.items()):
        over = {mode: over_turns(found[mode], found[PLAIN]) for mode in MODES}
        best = max((mode for mode in MODES if mode != OURS), key=over.__getitem__)
        plain_s = batch / median(found[PLAIN])
        costs = " : ".join(f"{plain_s / s:.0f}" for s in passes[str(batch)])
        rows.append(
            [
                *(batch, collection, len(found[PLAIN])),
                *(f"{over[mode]:.2f}" for mode in MODES[1:]),
                *(best, with_interval(found[OURS], found[best]), costs),
            ]
        )
    head = ["batch", "prompts", "turns", *MODES[1:], "best fixed", "chooser / best fixed"]
    return markdown([*head, "plain step / pass of draft : middle"], rows)


def over_turns(speeds: Sequence[float], others: Sequence[float]) -> float:
    """How many times as fast, turn by turn; the geometric mean."""
    return geometric_mean(one / other for one, other in zip(speeds, others, strict=True))


def with_interval(speeds: Sequence[float], others: Sequence[float]) -> str:
    """`over_turns` with its 95% interval by resampling of the turns."""
    ratios = [one / other for one, other in zip(speeds, others, strict=True)]
    dice = random.Random(0)
    means = [geometric_mean(dice.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)]
    low, *_, high = quantiles(means, n=40)
    return f"{geometric_mean(ratios):.2f} ({low:.2f}-{high:.2f})"


def choice_table(runs: Sequence[dict[str, Any]]) -> str:
    """What the chooser chose for each batch and collection."""
    rows = []
    ours = [run for run in runs if run["mode"] == OURS]
    for batch, collection in sorted({(run["batch"], run["collection"]) for run in ours}):
        parts = [r for r in ours if (r["batch"], r["collection"]) == (batch, collection)]
        plans = [(tuple(chain), depth) for run in parts for chain, depth in run["plans"]]
        depths = [depth for chain, depth in plans if chain]
        nodes = sum(r["nodes"] for r in parts) / sum(r["steps"] * r["batch"] for r in parts)
        tokens = sum(r["tokens"] for r in parts) / sum(r["steps"] * r["batch"] for r in parts)
        rows.append(
            [
                *(batch, collection, shares([chain for chain, _ in plans])),
                *(f"{fmean(depths):.1f}" if depths else "-", f"{nodes:.1f}", f"{tokens:.2f}"),
            ]
        )
    head = ["batch", "prompts", "chains", "mean depth", "nodes verified", "tokens"]
    return markdown(head, rows)


def shift_table(runs: Sequence[dict[str, Any]]) -> str:
    """Speed in a run that changes, the whole and its parts, over plain decoding."""

    def speeds(mode: str, phase: int | None) -> list[float]:
        """Turn by turn, for as many tokens as everybody gets."""
        found: dict[int, float] = defaultdict(float)
        for r in runs:
            if r["mode"] == mode and phase in (None, r["phase"]):
                asked = r["batch"] * answer_tokens(r["batch"])
                found[r["turn"]] += asked * r["seconds"] / r["tokens"]
        return [1.0 / found[turn] for turn in sorted(found)]

    rows = []
    labels = [f"{name}, batch {batch}" for name, batch, _ in PHASES]
    for phase, label in [*enumerate(labels), (None, "all of it")]:
        found = {mode: speeds(mode, phase) for mode in SHIFT_MODES}
        over = {mode: over_turns(found[mode], found[PLAIN]) for mode in SHIFT_MODES}
        best = max((mode for mode in SHIFT_MODES if mode != OURS), key=over.__getitem__)
        rows.append(
            [
                *(label, len(found[PLAIN])),
                *(f"{over[mode]:.2f}" for mode in SHIFT_MODES[1:]),
                *(best, with_interval(found[OURS], found[best])),
            ]
        )
    return markdown(
        ["phase", "turns", *SHIFT_MODES[1:], "best fixed", "chooser / best fixed"], rows
    )


def change_table(runs: Sequence[dict[str, Any]]) -> str:
    """Which chains the chooser took in each phase, and when the one it ends with took over."""
    rows = []
    ours = [run for run in runs if run["mode"] == OURS]
    for phase, (name, batch, _) in enumerate(PHASES):
        settled, all_chains, all_depths = [], [], []
        for turn in sorted({run["turn"] for run in ours}):
            parts = [r for r in ours if r["turn"] == turn and r["phase"] == phase]
            plans = [(tuple(chain), depth) for run in parts for chain, depth in run["plans"]]
            chains = [chain for chain, _ in plans]
            if not chains:
                continue
            last = Counter(chains[-len(chains) // 3 :]).most_common(1)[0][0]
            settled.append(
                next(
                    (i for i in range(len(chains)) if chains[i : i + 8].count(last) >= 7),
                    len(chains),
                )
            )
            all_chains += chains
            all_depths += [depth for chain, depth in plans if chain]
        if settled:
            depth = f"{fmean(all_depths):.1f}" if all_depths else "-"
            each = len(all_chains) // len(settled)
            rows.append(
                [
                    f"{name}, batch {batch}",
                    each,
                    shares(all_chains),
                    depth,
                    f"{median(settled):.0f}",
                ]
            )
    head = ["phase", "steps", "chains", "mean depth", "steps until the last one rules"]
    return markdown(head, rows)


def shares(chains: Sequence[tuple[int, ...]]) -> str:
    """The three chains that were taken most, with their shares of the steps."""
    return ", ".join(
        f"{label_of(chain)} {100 * n / len(chains):.0f}%"
        for chain, n in Counter(chains).most_common(3)
    )


def decisions(took_s: Sequence[float]) -> str:
    """What choosing took."""
    *_, last = quantiles(took_s, n=100)
    return (
        f"The chooser's {len(took_s)} decisions took {1e6 * median(took_s):.0f} us in the median, "
        f"{1e6 * last:.0f} us in the 99th percentile."
    )


def label_of(chain: tuple[int, ...]) -> str:
    """A chain by the names of its models."""
    return " > ".join(("draft", "middle")[model] for model in chain) or PLAIN


NOTE: Final = """
Speed is tokens per second over those of plain decoding in the same turn, the geometric mean over
turns; the last columns compare with whichever fixed chain was fastest there, known only afterwards,
with the 95% interval from resampled turns. *nodes verified* and *tokens* are of one request in one
step. *plain
step / pass* is how many passes of each draft model, over one token of each request, a plain step of
the target takes as long as.

Asked for are 0.97 times the best fixed chain at any batch, 1.05 times where load or prompts change,
never less than plain decoding, and at most 50 us for a decision. On two cores a plain step takes as
long as 40 to 55 passes of the draft, where a 7B model takes 103 of a 68M one by their parameters,
and a step of many requests is bound by arithmetic. Decisions are timed between steps, which leave
the caches cold.
"""


def main() -> None:
    """The engine's turns, then the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="shows that it runs; writes nothing")
    add("--rounds", type=int, default=10, help="turns of each batch and collection")
    add("--shifts", type=int, default=10, help="turns of the run that changes")
    add("--parameters", type=float, default=300e6, help="of the target's twin; 0: itself")
    add("--middle", type=float, default=20e6, help="of the middle model's; 0: itself")
    add("--dtype", default="float32")
    add("--batches", type=lambda t: [int(n) for n in t.split(",")], default=[1, 16, 64])
    add("--models", type=Path, default=profiles.cache_dir() / "models")
    add("--ask", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        sys.stdout.write("\n" + json.dumps(measure(json.loads(args.ask.read_text()))) + "\n")
        return
    if args.quick:
        args.parameters, args.middle, args.rounds, args.shifts, args.batches = 0.0, 0.0, 2, 2, [2]
    say("one engine, all modes by turns")
    found = in_own_process(__file__, ask_of(args), kv_gb=4)
    tables = [
        batch_table(found["batches"], found["passes"]),
        "What the chooser did:",
        choice_table(found["batches"]),
    ]
    if found["shift"]:
        tables += [
            "A run that changes, the whole of it by each mode:", shift_table(found["shift"]),
            "What the chooser did in it:", change_table(found["shift"]),
        ]  # fmt: skip
    tables.append(decisions(found["decisions_s"]))
    if args.quick:
        print("\n\n".join(tables))
        return
    write_result("model_chains", __doc__ or "", "\n\n".join(tables), note=NOTE)


if __name__ == "__main__":
    main()
