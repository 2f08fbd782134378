# SPDX-License-Identifier: Apache-2.0
"""The demo several times, each with arrivals of its own: is vllm-slo ahead in every one?

python benchmarks/demo_pairs.py --runs 5      # four minutes each; writes results/demo.md, demo.png
python benchmarks/demo_pairs.py --runs 2 --loads 0.5 0.7 0.9 --name colocation_engine
python benchmarks/demo_pairs.py --speculate   # and with a draft; writes results/demo_speculate.md

A run is a pair: all servers get the same arrivals, on the same machine, one after the other. In
every second run the server with a draft comes before the one without. A load is a multiple of what
stock vLLM can serve; batch work comes beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any, Final, TypeAlias

from common import RESULTS, markdown, write_result

from vllm_slo.bench.demo_load import LOAD

Report: TypeAlias = dict[str, Any]
ONLINE: Final = ("chat", "code", "summary")
"""Classes that have an objective."""


def run_demo(load: float, seed: int, folder: Path, *, speculate: bool) -> Report:
    """Run one demo in ``folder``; returns its report, with its load and the time that it took."""
    begun_s = time.monotonic()
    options = [f"--load={load:g}", f"--seed={seed}", f"--out={folder}"]
    options += ["--speculate"] * speculate
    subprocess.run([sys.executable, "-m", "vllm_slo.cli", "demo", *options], check=True)
    report: Report = json.loads((folder / "demo.json").read_text())
    return {**report, "load": load, "took_s": time.monotonic() - begun_s}


def kept(server: Report) -> float:
    """Share of objectives kept."""
    return float(server["total"]["attainment"])


def is_ahead(report: Report) -> bool:
    """Whether ours kept more objectives than stock."""
    stock, ours = report["servers"][:2]
    return kept(ours) > kept(stock)


def is_no_worse(report: Report) -> bool:
    """Whether ours kept as many objectives with a draft as without, or more."""
    _, ours, drafting = report["servers"]
    return kept(drafting) >= kept(ours)


def each(report: Report, read: Any, form: str) -> str:
    """A number of every server."""
    return ", ".join(format(read(server), form) for server in report["servers"])


def class_kept(name: str) -> Any:
    """A function that reads the share of a class."""
    return lambda server: server["classes"][name]["attainment"]


def slowest_first_token_s(server: Report) -> float:
    """TTFT at the 99th percentile of the slowest class that has an objective, seconds."""
    classes = [server["classes"][name] for name in ONLINE]
    return max(float(one["ttft_p99_s"]) for one in classes)


def rows(reports: list[Report]) -> list[list[str]]:
    """A row for each run; of several figures the first is stock's, the next ours."""
    found = []
    for report in reports:
        asking = sum(server["total"]["with_objective"] for server in report["servers"][:1])
        taken = [server["disturbance"] for server in report["servers"]]
        found.append(
            [
                f"{report['load']:g}",
                str(report["seed"]),
                f"{asking} + {report['workload']['requests'] - asking}",
                each(report, kept, ".0%"),
                *(each(report, class_kept(name), ".0%") for name in ONLINE),
                each(report, lambda s: s["total"]["ttft_p50_s"], ".2f"),
                each(report, lambda s: s["total"]["ttft_p99_s"], ".1f"),
                each(report, slowest_first_token_s, ".1f"),
                each(report, lambda s: 1e3 * s["total"]["tpot_p50_s"], ".0f"),
                each(report, lambda s: 1e3 * s["total"]["tpot_p99_s"], ".0f"),
                each(report, lambda s: s["batch_tokens_per_s"], ".0f"),
                each(report, lambda s: s["elapsed_s"], ".0f"),
                ", ".join(f"{one['others'] + one['stolen']:.0%}" for one in taken),
                f"{report['took_s']:.0f}",
            ]
        )
    return found


HEADINGS: Final = [
    *("load", "seed", "requests + batch", "objectives kept", "chat", "code", "summary"),
    *("TTFT p50 (s)", "TTFT p99 (s)", "the same, slowest class with an objective"),
    *("TPOT p50 (ms)", "TPOT p99 (ms)"),
    *("batch tokens/s", "all done (s)", "taken by others", "demo (s)"),
]


TEXT: Final = """
vllm-slo keeps more objectives than stock vLLM in {ahead} of {count} paired runs, {ours:.0%} against
{stock:.0%} in the mean.

A run is `vllm-slo demo` with arrivals of its own. Each server gets requests of three classes at
{loads} times the rate that stock vLLM carries here, and a backlog of batch work without objectives
all at once. TTFT and TPOT (the worst 10 tokens) are those of everybody, with an objective or
without. Of several figures the first is stock vLLM's, the second vllm-slo's{third}.
"""
DRAFTING: Final = """
With the built-in draft model vllm-slo keeps as many objectives as without, or more, in {ahead} of
{count} runs, {drafting:.0%} against {ours:.0%} in the mean. In every second run the
server with the draft runs before the one without.
"""
NOTE: Final = """
What vllm-slo does not promise waits longer, above all the batch work: that is the price. "All done"
is when the last request of all has ended. "Taken by others" is the share of the cores that other
processes and the host took during each run. The last column is the time of the whole command,
installation not included. The picture is the first run's.

![Objectives kept by class, what everybody got, latency against objectives, load]({name}.png)
"""


def text(reports: list[Report]) -> str:
    """The result in words."""
    stock, ours, *drafting = (
        mean(kept(server) for server in servers)
        for servers in zip(*(report["servers"] for report in reports), strict=True)
    )
    count, ahead = len(reports), sum(map(is_ahead, reports))
    loads = ", ".join(dict.fromkeys(f"{report['load']:g}" for report in reports))
    third = ", the third vllm-slo's with a draft" if drafting else ""
    told = TEXT.format(ahead=ahead, count=count, stock=stock, ours=ours, loads=loads, third=third)
    if drafting:
        ahead = sum(map(is_no_worse, reports))
        told = DRAFTING.format(ahead=ahead, count=count, drafting=drafting[0], ours=ours) + told
    return told


def main() -> None:
    """Run the demos and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--loads", type=float, nargs="+", default=[LOAD])
    parser.add_argument("--name", help="of the page, and of its picture")
    parser.add_argument("--speculate", action="store_true", help="a third server, with a draft")
    args = parser.parse_args()
    args.name = args.name or ("demo_speculate" if args.speculate else "demo")
    with tempfile.TemporaryDirectory() as folder:
        reports = [
            run_demo(load, seed, Path(folder) / f"{load:g}-{seed}", speculate=args.speculate)
            for load in args.loads
            for seed in range(args.runs)
        ]
        shutil.copy(
            Path(folder) / f"{args.loads[0]:g}-0" / "demo.png", RESULTS / f"{args.name}.png"
        )
    note = NOTE.format(name=args.name)
    write_result(args.name, text(reports), markdown(HEADINGS, rows(reports)), note=note)


if __name__ == "__main__":
    main()
