# SPDX-License-Identifier: Apache-2.0
"""How long the front takes to decide where a request goes, and to take in a replica's state.

Every replica has 64 promises, 8 of them before their first token, in three tiers. At worst nobody
can promise and all are asked (the hop limit is lifted for that); at best the first one can.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable

import numpy as np
from common import markdown, write_result

from vllm_slo.core.routing.policy import Route, RoutedRequest, VirtualReplica, route
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand

REACH = {8: "0.2", 64: "1.5"}
RUNNING, PENDING = 64, 8
TIERS = (0.03, 0.05, 0.1)
A100_OPT_13B = StepTimeModel(((0.0, 0.0, 0.02), (1.1e-4, 0.0, 0.004)), kv_s=2e-8)


def state(seed: int) -> ReplicaState:
    """A replica with ``RUNNING`` promises."""
    rng = random.Random(seed)
    committed = tuple(
        Demand(
            f"p{n}",
            rng.uniform(0.3, 3.0),
            rng.randint(50, 400),
            rng.choice(TIERS),
            rng.randint(20, 90),
            context_tokens=rng.randint(300, 1500),
        )
        for n in range(PENDING)
    )
    decoding = dict.fromkeys(TIERS, 0)
    for _ in range(RUNNING - PENDING):
        decoding[rng.choice(TIERS)] += 1
    return ReplicaState(
        A100_OPT_13B,
        committed=committed,
        decoding=decoding,
        decoding_context=900 * (RUNNING - PENDING),
        free_blocks=5_000,
        total_blocks=10_000,
        block_sizes=(16,),
        seats=192,
        max_step_tokens=8192,
        max_model_len=8192,
        running=RUNNING - PENDING,
        waiting=PENDING,
        backlog_tokens=2_000,
        tickets=tuple(range(1, RUNNING + 1)),
        seen=RUNNING,
        lengths=dict.fromkeys(("chat", "code"), (400, 10, 40, 80, 120, 200, 300, 500, 900)),
    )


def timed(work: Callable[[], object], repeats: int) -> tuple[str, str]:
    """(median, 99th percentile) in milliseconds."""
    work()
    seconds = []
    gc.disable()
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    gc.enable()
    return f"{np.median(seconds) * 1e3:.3f}", f"{np.percentile(seconds, 99) * 1e3:.3f}"


def decisions(count: int, repeats: int) -> list[list[str]]:
    """Two rows for ``count`` replicas: none can promise, and the first can."""
    rng = random.Random(0)
    replicas = [VirtualReplica(f"r{n}") for n in range(count)]
    for seed, replica in enumerate(replicas):
        replica.update(state(seed), 0.0)
    rows = []
    for name, prompt, asked in (("nobody promises", 7_000, count), ("the first one does", 60, 1)):
        request = RoutedRequest(prompt, 300, 0.6, 0.05, True, slo_class="chat")

        def decide(request: RoutedRequest = request) -> Route:
            return route(request, replicas, 0.0, max_hops=1_000, rng=rng)

        if decide().hops != asked:
            raise SystemExit(f"{name}: {decide()}")
        reach = REACH[count] if asked == count else ""
        rows.append([f"{count} replicas, {name}", *timed(decide, repeats), reach])
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=2_000)
    repeats = parser.parse_args().repeats
    rows = [row for count in REACH for row in decisions(count, repeats)]
    line = state(0).to_json()
    shadow = VirtualReplica("one")

    def take_in() -> None:
        shadow.update(ReplicaState.from_json(line), 0.0)

    take_in()
    for tpot_s in TIERS:
        shadow.judge(RoutedRequest(60, 300, 0.6, tpot_s, True), 0.0)
    rows.append([f"one state taken in ({len(line)} bytes)", *timed(take_in, repeats), ""])
    head = ["what", "median ms", "p99 ms", "reach"]
    write_result("routing_decision", __doc__, markdown(head, rows))


if __name__ == "__main__":
    main()
