# SPDX-License-Identifier: Apache-2.0
"""What each part of the learning of chains is worth: seconds per token without it.

The chooser serves prompts of HumanEval, GSM8K and Spec-Bench in virtual time (`chain_worlds`), on
guesses that the built-in models made of them: 1, 16 and 64 requests at once, load and prompts that
change, and steps with room for few nodes, each on two machines. Each change is measured alone, with
the same prompts and the same noise of measured times.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import Any, Final, NamedTuple

from chain_worlds import COLLECTIONS, FIXED, Guesses, World, played, recorded, worlds
from common import markdown, write_result

from vllm_slo.core.speculation.chain_costs import Edges
from vllm_slo.core.speculation.chain_forecast import ChainForecasts
from vllm_slo.core.speculation.chain_learning import Predictability, Probes
from vllm_slo.core.speculation.draft_shape import DraftShape
from vllm_slo.core.speculation.pass_times import PassTimes


class Change(NamedTuple):
    """One attribute with another value."""

    owner: Any
    name: str
    value: Any
    text: str = ""

    def __str__(self) -> str:
        return self.text or f"{self.owner.__name__}.{self.name} = {self.value}"


CHANGES: Final = (
    Change(Predictability, "GAIN", 0.0),
    Change(Predictability, "GAIN", 0.3),
    Change(Predictability, "GAIN", 1.2),
    Change(Predictability, "LIMIT", 5.0),
    Change(Predictability, "LIMIT", 1.0),
    Change(Probes, "SHARE", 0.0),
    Change(Probes, "SHARE", 0.005),
    Change(Probes, "SHARE", 0.02),
    Change(Probes, "STALE", 32),
    Change(Probes, "STALE", 512),
    Change(Probes, "STALE", 2048),
    Change(ChainForecasts, "TREES", 32.0),
    Change(ChainForecasts, "TREES", 100.0),
    Change(ChainForecasts, "TREES", 1000.0),
    Change(DraftShape, "PRIOR", 4.0),
    Change(Edges, "MEMORY", 50.0),
    Change(Edges, "MEMORY", 600.0),
    Change(PassTimes, "SHARE", 0.03),
    Change(PassTimes, "SHARE", 0.3),
)


@contextlib.contextmanager
def made(change: Change | None) -> Iterator[None]:
    """Make a change for a while."""
    if change is None:
        yield
        return
    before = getattr(change.owner, change.name)
    setattr(change.owner, change.name, change.value)
    try:
        yield
    finally:
        setattr(change.owner, change.name, before)


def token_s(
    all_worlds: Sequence[World], guesses: Mapping[str, Guesses], seeds: int
) -> dict[tuple[str, int], float]:
    """Seconds per token of the chooser, by world and seed."""
    found = {}
    for world in all_worlds:
        for seed in range(seeds):
            engine = played(world, dict(guesses), seed)
            found[world.name, seed] = engine.seconds / engine.tokens
    return found


def longer(changed: Mapping[Any, float], usual: Mapping[Any, float]) -> tuple[float, float]:
    """By which share a token takes longer with a change, and half the 95% interval of that."""
    logs = [math.log(changed[key] / usual[key]) for key in usual]
    return math.expm1(mean(logs)), 1.96 * stdev(logs) / math.sqrt(len(logs))


def change_table(
    all_worlds: Sequence[World],
    guesses: Mapping[str, Guesses],
    seeds: int,
    usual: Mapping[Any, float],
) -> str:
    """By how much longer tokens take with each change."""
    rows = []
    for change in CHANGES:
        with made(change):
            changed = token_s(all_worlds, guesses, seeds)
        share, error = longer(changed, usual)
        worst = max(
            {name for name, _ in usual}, key=lambda n: longer(_of(changed, n), _of(usual, n))[0]
        )
        most = longer(_of(changed, worst), _of(usual, worst))[0]
        rows.append(
            [change, f"{100 * share:+.2f} ± {100 * error:.2f}", f"{100 * most:+.1f} ({worst})"]
        )
        print(*rows[-1], flush=True)
    return markdown(["change", "a token takes longer, %", "most in a world, %"], rows)


def _of(found: Mapping[tuple[str, int], float], name: str) -> dict[tuple[str, int], float]:
    return {key: value for key, value in found.items() if key[0] == name}


def world_table(
    all_worlds: Sequence[World],
    guesses: Mapping[str, Guesses],
    seeds: int,
    usual: Mapping[Any, float],
) -> str:
    """The chooser against the fixed chain that was fastest in each world."""
    rows = []
    for world in all_worlds:
        fixed = []
        for plan in FIXED:
            engines = [played(world, dict(guesses), seed, plan) for seed in range(seeds)]
            fixed.append(mean(one.seconds / one.tokens for one in engines))
        ours_s, best = (
            mean(_of(usual, world.name).values()),
            min(range(len(fixed)), key=fixed.__getitem__),
        )
        chain = " > ".join(("draft", "middle")[m] for m in FIXED[best].chain) or "plain"
        name = f"{chain}, {FIXED[best].depth}" if FIXED[best].depth else chain
        rows.append(
            [
                world.name,
                f"{fixed[0] / ours_s:.2f}",
                f"{fixed[0] / fixed[best]:.2f}",
                name,
                f"{fixed[best] / ours_s:.3f}",
            ]
        )
        print(*rows[-1], flush=True)
    return markdown(
        ["world", "chooser / plain", "best fixed / plain", "best fixed", "chooser / best fixed"],
        rows,
    )


def main() -> None:
    """Record guesses, then play."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shows that it runs; writes nothing")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=64, help="of each collection")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.prompts = 1, 8
    guesses = {name: recorded(name, args.prompts) for name in COLLECTIONS}
    all_worlds = list(worlds())[:: 7 if args.quick else 1]
    usual = token_s(all_worlds, guesses, args.seeds)
    tables = [
        world_table(all_worlds, guesses, args.seeds, usual),
        change_table(all_worlds, guesses, args.seeds, usual),
    ]
    if not args.quick:
        write_result("chain_learning", __doc__ or "", "\n\n".join(tables))


if __name__ == "__main__":
    main()
