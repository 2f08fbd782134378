# SPDX-License-Identifier: Apache-2.0
"""What routing costs the front: to decide where a request goes, and to take in replicas' states.

Every replica has about 100 promises, 5 of them before their first token, in three tiers. A request
lives for ten seconds, so ten come and go in a second; a step takes 20 ms. Nobody can promise. All
replicas are asked, or as many as ``routing.max_hops`` says by default.

At rest no state comes. Else the replicas, in a process of their own, send states as theirs do, over
loopback sockets, to the front's own reader on uvloop, and ten requests a second and replica are
judged meanwhile. A share of a core is CPU time of the reading process, with nothing to decide.
"Whole states" are what was sent before: all of the state, with each step.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import uvloop
from common import markdown, write_result
from scheduler_overhead import engine
from state_load import LIFE_S, PROMISES, How, MadeUpReplica, followed

from vllm_slo import Scheduler
from vllm_slo.config.sections import RoutingConfig
from vllm_slo.core.routing.policy import route
from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.engine.telemetry.state import MAX_MESSAGE_BYTES, SOCKET_VARIABLE

REPLICAS = (8, 64)
TARGETS_MS = {8: "0.2", 64: "0.5"}
TARGET_SHARE = "5%"
HOPS = RoutingConfig().max_hops
HOPELESS = RoutedRequest(7_000, 300, 0.6, 0.05, True, slo_class="chat")
"""Its prompt alone takes longer than its deadline."""


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
    return milliseconds(seconds)


def milliseconds(seconds: Sequence[float]) -> tuple[str, str]:
    """(median, 99th percentile) as text."""
    return f"{np.median(seconds) * 1e3:.3f}", f"{np.percentile(seconds, 99) * 1e3:.3f}"


def decide(
    replicas: Sequence[VirtualReplica], now_s: float, rng: random.Random, hops: int = 1_000
) -> None:
    """Decide where a request goes that nobody can promise; so many are asked at most."""
    request = replace(HOPELESS, deadline_s=now_s + HOPELESS.deadline_s)
    found = route(request, replicas, now_s, max_hops=hops, rng=rng)
    if found.hops != min(len(replicas), hops) or found.promised:
        raise SystemExit(f"not refused by everybody: {found}")


def at_rest(count: int, repeats: int) -> list[str]:
    """A row for ``count`` replicas from which no state comes."""
    rng, replicas, now_s = random.Random(0), [VirtualReplica(f"r{n}") for n in range(count)], 1e3
    for seed, replica in enumerate(replicas):
        replica.update(MadeUpReplica(seed).state(time.monotonic()), now_s)
    took = timed(lambda: decide(replicas, now_s, rng), repeats)
    return [f"decision among {count} replicas at rest", *took, TARGETS_MS[count]]


class Arriving(NamedTuple):
    """What states cost that arrive.

    Attributes:
        share: of a core, with nothing to decide.
        lines: a second, of all replicas together.
        decisions_s: how long each decision took in which all were asked.
        bounded_s: the same with the default number of hops.
    """

    share: float
    lines: float
    decisions_s: list[float]
    bounded_s: list[float]


async def arriving(count: int, how: How, seconds: float) -> Arriving:
    """Follow ``count`` replicas for so long twice: to read, and to read and decide."""
    rng, lines = random.Random(0), 0
    async with followed(count, how) as upstreams:
        for upstream in upstreams:
            read = upstream.virtual.update

            def update(state: object, taken_s: float, read: Callable[..., None] = read) -> None:
                nonlocal lines
                lines += 1
                read(state, taken_s)

            upstream.virtual.update = update  # type: ignore[method-assign]
        await asyncio.sleep(1.0)
        lines, begun, cpu = 0, time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        share = (time.process_time() - cpu) / (time.perf_counter() - begun)
        per_s = lines / (time.perf_counter() - begun)
        replicas = [upstream.virtual for upstream in upstreams]
        took: dict[int, list[float]] = {1_000: [], HOPS: []}
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            await asyncio.sleep(rng.expovariate(count * PROMISES / LIFE_S))
            now_s = time.monotonic()
            hops = rng.choice(list(took))
            begun = time.perf_counter()
            decide(replicas, now_s, rng, hops)
            took[hops].append(time.perf_counter() - begun)
    return Arriving(share, per_s, took[1_000], took[HOPS])


def scheduler_rows(repeats: int) -> list[list[str]]:
    """What a scheduler with 100 promises pays to tell how it stands."""
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reader:
        reader.bind(f"{folder}/state")
        os.environ[SOCKET_VARIABLE] = f"{folder}/state"
        one = engine(Scheduler, PROMISES)
        parts = one.scheduler.parts

        def publish() -> None:
            parts.clock.tick()  # a new step: nothing is known any more
            parts.reports.publish()
            reader.recv(MAX_MESSAGE_BYTES)

        reader.setblocking(False)
        with suppress(BlockingIOError):
            while reader.recv(MAX_MESSAGE_BYTES):
                pass
        rows = [["a scheduler publishes a state", *timed(publish, repeats), ""]]
        rows.append(
            ["a step at which none is due", *timed(parts.reports.publish_with_step, repeats), ""]
        )
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--note", default="", help="a sentence for the result")
    asked = parser.parse_args()
    rows = [at_rest(count, asked.repeats) for count in REPLICAS]
    shares = []
    for count in REPLICAS:
        for how, name in (("changes", "changes"), ("whole", "whole states")):
            found = uvloop.run(arriving(count, how, asked.seconds))  # type: ignore[arg-type]
            if how == "changes":
                text = f"decision among {count} replicas, states arriving"
                rows.append([text, *milliseconds(found.decisions_s), TARGETS_MS[count]])
                if count > HOPS:
                    text += f", {HOPS} asked, as by default"
                    rows.append([text, *milliseconds(found.bounded_s), TARGETS_MS[count]])
            target = TARGET_SHARE if (count, how) == (64, "changes") else ""
            shares.append(
                [f"{count} replicas, {name}", f"{found.lines:.0f}", f"{found.share:.1%}", target]
            )
    rows += scheduler_rows(asked.repeats)
    table = markdown(["what", "median ms", "p99 ms", "target"], rows)
    costs = markdown(["states taken in", "lines/s", "share of a core", "target"], shares)
    load = f"Load average of the machine at the end, this run included: {os.getloadavg()[0]:.1f}."
    note = f"{load} {asked.note}"
    write_result("routing_decision", __doc__, f"{table}\n\n{costs}", note=note)


if __name__ == "__main__":
    main()
