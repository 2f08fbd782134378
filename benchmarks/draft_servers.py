# SPDX-License-Identifier: Apache-2.0
"""GoodSpeed on the real CPU engine: four draft servers, where the time goes, and one that dies.

A twin of the built-in target verifies, four ``vllm-slo draft-server`` processes draft, all on the
same cores. As in the paper each draft server has a collection of prompts of its own, and here a
temperature; it drafts for two requests at a time. *Fixed-S*, *Random-S* and *GoodSpeed, C* grant
the same budget C in every step, verify all of it, and wait until it is there. *GoodSpeed* is what
``vllm-slo serve --draft-servers`` does: C and the wait are chosen at every step. Time is split as
in the paper's figure 3: until drafts are there (receive), sending, and the rest of a step (verify).
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Final

import draft_servers_engine
import numpy as np
from adaserve_systems import in_own_process, say, twin
from common import RESULTS, markdown, write_result
from draft_servers_engine import CLIENTS, EACH, FIXED, MODES, OURS, PHASES, VICTIM, Step

from vllm_slo.bench.style import INK, PICTURE
from vllm_slo.config import profiles


def split(steps: Sequence[Step]) -> list[str]:
    """Mean milliseconds of a step and its parts: step, receive, verify, send."""
    parts = (
        [s.took_s for s in steps],
        [s.receive_s for s in steps],
        [s.verify_s for s in steps],
        [s.send_s for s in steps],
    )
    return [f"{1e3 * fmean(part):.{1 if n < 3 else 2}f}" for n, part in enumerate(parts)]


def utility(steps: Sequence[Step]) -> float:
    """Sum of the logs of the clients' tokens per second."""
    took_s = sum(step.took_s for step in steps)
    tokens: Counter[str] = Counter()
    for step in steps:
        tokens.update(step.by_client)
    return sum(math.log(tokens[name] / took_s) for name in CLIENTS)


def verify_ms(steps: Sequence[Step]) -> float:
    """Milliseconds of verification for each token that came."""
    return 1e3 * sum(step.verify_s for step in steps) / sum(step.given for step in steps)


def mode_table(steps: dict[str, list[Step]]) -> str:
    """The parts of a step's time, and its tokens."""
    rows = []
    for mode, own in steps.items():
        took_s, given = sum(s.took_s for s in own), sum(s.given for s in own)
        by_client = Counter[str]()
        for step in own:
            by_client.update(step.by_client)
        goodputs = " / ".join(f"{by_client[name] / took_s:.0f}" for name in CLIENTS)
        cells = [f"{fmean(s.drafted for s in own):.1f}", f"{given / len(own):.1f}"]
        rates = [f"{given / took_s:.0f}", goodputs, f"{utility(own):.2f}"]
        rows.append([mode, len(own), *split(own), *cells, *rates, f"{verify_ms(own):.2f}"])
    head = ["system", "steps", "step, ms", "receive", "verify", "send", "drafts", "tokens"]
    return markdown([*head, "tokens/s", "by client", "utility", "verify, ms a token"], rows)


def death_table(steps: Sequence[Step], began_s: Sequence[float]) -> str:
    """The phases of the run in which a draft server dies."""
    rows = []
    for name, since_s, until_s in zip(PHASES, began_s, began_s[1:], strict=False):
        own = [step for step in steps if since_s <= step.at_s < until_s]
        took_s = sum(step.took_s for step in own)
        rows.append(
            [
                *(name, len(own), f"{until_s - since_s:.0f}", *split(own)),
                f"{1e3 * max(step.longest_s for step in own):.0f}",
                f"{fmean(step.asked for step in own):.1f}",
                f"{sum(step.given for step in own) / len(own):.1f}",
                f"{sum(step.given for step in own) / took_s:.0f}",
            ]
        )
    head = ["phase", "steps", "s", "step, ms", "receive", "verify", "send", "longest wait"]
    return markdown([*head, "asked", "tokens", "tokens/s"], rows)


def draw(modes: dict[str, list[Step]], steps: Sequence[Step], began_s: Sequence[float]) -> None:
    """Draw the parts of a step as in the paper's figure 3, and the kill second by second."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with mpl.rc_context(PICTURE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.0), layout="constrained", width_ratios=(1.0, 1.35)
        )
        figure.suptitle(
            "Four draft servers on the CPU engine", x=0.01, ha="left", color=INK, fontsize=12,
            fontweight="bold",
        )  # fmt: skip
        bottom = np.zeros(len(modes))
        for part, colour in (
            ("verify_s", "#0072b2"),
            ("receive_s", "#e69f00"),
            ("send_s", "#d55e00"),
        ):
            per_token = [
                1e3 * sum(getattr(s, part) for s in own) / sum(s.given for s in own)
                for own in modes.values()
            ]
            left.bar(
                list(modes), per_token, bottom=bottom, color=colour, label=part[:-2], width=0.6
            )
            bottom += np.array(per_token)
        left.set_title("Time of a token by part")
        left.set_ylabel("ms")
        left.tick_params(axis="x", labelrotation=25)
        left.set_ylim(top=1.2 * bottom.max())
        left.legend(loc="upper left", ncols=3)
        at_s = np.array([step.at_s for step in steps]) - began_s[0]
        rate = [0.0] * int(at_s[-1] + 1)
        for second in range(len(rate)):
            own = [s for s, at in zip(steps, at_s, strict=True) if second <= at < second + 1]
            rate[second] = sum(s.given for s in own) / max(sum(s.took_s for s in own), 1e-9)
        right.plot(np.arange(len(rate)) + 0.5, rate, color="#0072b2", linewidth=2.0)
        for name, begun_s in zip(PHASES, began_s, strict=False):
            right.axvline(begun_s - began_s[0], color="#7a7a7a", linewidth=0.8, linestyle=":")
            right.annotate(
                name, (begun_s - began_s[0], 1.0), xycoords=("data", "axes fraction"),
                xytext=(3, -11), textcoords="offset points", fontsize=8.5, color=INK,
            )  # fmt: skip
        right.set_title("Tokens per second while one is killed")
        right.set_xlabel("seconds")
        right.set_ylim(bottom=0, top=1.15 * max(rate))
        figure.savefig(RESULTS / "draft_servers.png", dpi=110)
        plt.close(figure)


NOTE: Final = """
By client: tokens per second of each draft server's requests. Verifying takes GoodSpeed with the
same C {step:+.1%} of Fixed-S's time by step, and {token:+.1%} by token. In the paper receiving and
verifying dominate, and Random-S is the slowest, as here; sending is below 0.1%, here it is 1%.
Draft servers that share two cores with the verifier cost more than they bring: plain decoding is
the fastest, and what is shipped finds that out and asks for little, which costs some percent. While
a process starts anew its imports and its model take the cores from everybody: that is this
machine's doing and not the link's. Processes other than the verifier, draft servers among them,
took {others:.0%} of the machine during the turns.
"""


def main() -> None:
    """One engine's turns, then tables and picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="shows that it runs; writes nothing")
    add("--turns", type=int, default=6)
    add("--budget", type=int, default=24, help="C, draft tokens a step; the paper's is 16 to 28")
    add("--seconds", type=float, default=20.0, help="of each phase of the run with a death")
    add("--parameters", type=float, default=300e6, help="of the target's twin; 0: itself")
    add("--dtype", default="bfloat16")
    add("--models", type=Path, default=profiles.cache_dir() / "models")
    args = parser.parse_args()
    if args.quick:
        args.parameters, args.turns, args.seconds = 0.0, 1, 3.0
    engine = {
        "model": str(twin("target", args.parameters, args.models)), "dtype": args.dtype,
        "enforce_eager": True, "max_model_len": 512, "max_num_seqs": EACH * len(CLIENTS),
        "max_num_batched_tokens": 1024, "gpu_memory_utilization": 0.1, "seed": 0,
    }  # fmt: skip
    say("one engine, all systems by turns")
    ask = {"engine": engine, "turns": args.turns, "budget": args.budget, "seconds": args.seconds}
    found = in_own_process(draft_servers_engine.__file__, ask)
    modes: dict[str, list[Step]] = {mode: [] for mode in MODES}
    for turn in found["turns"]:
        modes[turn["mode"]] += [Step(**step) for step in turn["steps"]]
    death = [Step(**step) for step in found["death"]["steps"]]
    began_s = found["death"]["began_s"]
    dying = [step for step in death if began_s[1] <= step.at_s][:3]
    usual_ms = 1e3 * median(step.took_s for step in death if step.at_s < began_s[1])
    told = (
        f"{found['death']['ended']} requests ended meanwhile, {found['death']['failed']} failed. "
        f"The first steps after the kill took {', '.join(f'{1e3 * s.took_s:.0f}' for s in dying)} "
        f"ms; the median step before it {usual_ms:.0f}."
    )
    tables = [
        f"Milliseconds of a step, C = {args.budget}:", mode_table(modes),
        f"Requests without end, {VICTIM} killed with SIGKILL, and later started again:",
        death_table(death, began_s),
        told,
    ]  # fmt: skip
    if args.quick:
        print("\n\n".join(tables))
        return
    draw(modes, death, began_s)
    tables.append("![Time of a token by part, and a death](draft_servers.png)")
    ours, fixed = modes[OURS], modes[FIXED]
    step = fmean(s.verify_s for s in ours) / fmean(s.verify_s for s in fixed) - 1.0
    token = (verify_ms(ours) / verify_ms(fixed)) - 1.0
    note = NOTE.format(step=step, token=token, others=found["others"])
    write_result("draft_servers", __doc__ or "", "\n\n".join(tables), note=note)


if __name__ == "__main__":
    main()
