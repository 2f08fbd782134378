# SPDX-License-Identifier: Apache-2.0
"""Four ways of routing over two real engines (built-in model as a twin of 200M parameters).

Two servers, one thread each, run all the time. For each load and seed a front with each policy in
turn sends them the same arrivals in three bursts: long prompts, short ones, and requests without an
objective. The order of the policies changes from seed to seed. Engines, front and client share two
cores, so steps are noisy, and objectives are twice as loose as in the demo of one server: TTFT 6
and 10 times what a lone request gets, TPOT 6 and 12 lone steps.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Final

from common import markdown, mean_points, write_result
from rich.console import Console

from vllm_slo.bench.client import ClientOptions, ServerRun
from vllm_slo.bench.command import bench_server
from vllm_slo.bench.demo import REPLICAS_PARAMETERS, bursts
from vllm_slo.bench.demo_load import VOCABULARY, choose_model
from vllm_slo.bench.demo_servers import MAX_CONTEXT, OURS, Candidate, servers, wait_until_ready
from vllm_slo.bench.endpoint import ServerTarget
from vllm_slo.bench.main import build_workload
from vllm_slo.bench.probes import measure_zero_load
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.core.attainment import summarise, summarise_class
from vllm_slo.core.types import RoutingPolicy
from vllm_slo.wire.front_protocol import TOKEN_VARIABLE
from vllm_slo.wire.ports import free_port

POLICIES: Final[tuple[RoutingPolicy, ...]] = ("round_robin", "least_loaded", "scorers", "slo")
REPLICAS: Final = 2
REST_S: Final = 2.0
"""Time between two runs, for the engines to end what the client gave up."""


@contextmanager
def front(policy: RoutingPolicy, urls: Sequence[str], folder: Path) -> Iterator[str]:
    """A front of these servers; yields its address when it routes to all of them."""
    config, log = folder / f"{policy}.yaml", folder / f"{policy}.log"
    config.write_text(f"routing: {{policy: {policy}}}\n")
    port = free_port()
    command = [sys.executable, "-m", "vllm_slo.cli", "front", "--host=127.0.0.1", f"--port={port}"]
    command += [f"--slo-config={config}", *(f"--replica={url}" for url in urls)]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, len(urls), process, log)
        yield url
    finally:
        process.terminate()
        process.wait(60.0)


def row_of(run: ServerRun) -> dict[str, float]:
    """What the table says of a run; NaN where nothing is counted."""
    total = summarise_class("total", run.records, run.elapsed_s)
    tight = summarise(run.records, run.elapsed_s)["code"]
    promised = [record for record in run.records if record.outcome == "admitted"]
    whole = summarise_class("promised", promised, run.elapsed_s)
    found = {
        "kept": total.attainment,
        "tight": tight.attainment,
        "promises kept": whole.attainment,
        "ttft_p50_s": total.ttft_p50_s,
        "ttft_p99_s": total.ttft_p99_s,
    }
    return {name: math.nan if value is None else value for name, value in found.items()}


Found = dict[tuple[float, RoutingPolicy], list[dict[str, float]]]


def table_of(found: Found) -> str:
    """A row for each load and policy; means over seeds, differences paired by seed."""
    rows = []
    for (load, policy), runs in found.items():
        ours = found[load, "slo"]

        def mean(name: str, runs: list[dict[str, float]] = runs) -> float:
            return statistics.mean(run[name] for run in runs)

        ahead = ""
        if policy != "slo":
            pairs = zip(ours, runs, strict=True)
            ahead = mean_points([100 * (a["kept"] - b["kept"]) for a, b in pairs])
        rows.append(
            [
                f"{load:g}",
                policy.replace("_", " "),
                ", ".join(f"{run['kept']:.0%}" for run in runs),
                f"{mean('kept'):.1%}",
                f"{mean('tight'):.1%}",
                f"{mean('promises kept'):.1%}",
                f"{mean('ttft_p50_s'):.2f} / {mean('ttft_p99_s'):.1f}",
                ahead,
            ]
        )
    head = ["load", "routing", "objectives kept, by seed", "mean", "tight class (code)",
            "promises kept", "TTFT p50 / p99, s", "slo ahead by, points"]  # fmt: skip
    return markdown(head, rows)


def measured(
    loads: Sequence[float], seeds: int, duration_s: float | None, folder: Path, console: Console
) -> tuple[Found, ZeroLoad]:
    """The runs by load and policy, each list by seed; and the latency of a lone request."""
    model = choose_model(REPLICAS_PARAMETERS, console)
    client = ClientOptions(vocab_size=VOCABULARY, drain_s=120.0, ready_requests=8)
    found: Found = {(load, policy): [] for load in loads for policy in POLICIES}
    both = [Candidate(f"replica {number}", OURS) for number in range(REPLICAS)]
    with servers(both, model.folder, folder, console, model.options) as urls:
        zero = measure_zero_load(ServerTarget("replica", urls[0]), MAX_CONTEXT, client)
        for seed, load in product(range(seeds), loads):
            given = argparse.Namespace(replicas=REPLICAS, seed=seed, duration=duration_s)
            workload = build_workload(bursts(given, zero, load), zero)
            turn = seed % len(POLICIES)
            for policy in (*POLICIES[turn:], *POLICIES[:turn]):
                with front(policy, urls, folder) as url:
                    target = ServerTarget(policy, url)
                    found[load, policy].append(
                        row_of(bench_server(target, workload, client, console))
                    )
                console.print(seed, load, policy, found[load, policy][-1])
                time.sleep(REST_S)
    return found, zero


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loads", default="0.4,0.6", help="shares of what the machine can process")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="shows that it runs; writes nothing")
    args = parser.parse_args()
    os.environ |= {
        TOKEN_VARIABLE: secrets.token_urlsafe(16),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    console, began_s = Console(stderr=True), time.monotonic()
    loads, seeds = [float(load) for load in args.loads.split(",")], args.seeds
    duration_s = None
    if args.quick:
        loads, seeds, duration_s = loads[:1], 1, 8.0
    with tempfile.TemporaryDirectory() as folder:
        found, zero = measured(loads, seeds, duration_s, Path(folder), console)
    if args.quick:
        sys.stdout.write(table_of(found) + "\n")
        return
    note = (
        f"Loads are shares of the tokens that the machine can process. {args.seeds} seeds; "
        f"differences are paired by seed, with 95% intervals. A lone request's TTFT is "
        f"{zero.ttft_s(MAX_CONTEXT // 2):.2f} s for {MAX_CONTEXT // 2} tokens, its TPOT "
        f"{1e3 * zero.tpot_s:.0f} ms. {(time.monotonic() - began_s) / 60:.0f} min."
    )
    write_result("replica_routing", __doc__ or "", table_of(found), note=note)


if __name__ == "__main__":
    main()
