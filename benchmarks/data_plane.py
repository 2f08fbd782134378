# SPDX-License-Identifier: Apache-2.0
"""What the front's data plane costs: the same streams straight from the replicas and through it.

Four replicas without engines send streams of tokens at a fixed rate; the front is the whole one,
HAProxy and decision service, as `vllm-slo front` starts it. Clients, replicas and front share the
machine. Direct and routed runs alternate. HAProxy's CPU is divided by the tokens, with all that
a request costs it; that of the decision service by the requests, with the replicas' state streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import uvloop
from common import markdown, write_result
from stream_replica import STREAM_RATE, TOKEN

from vllm_slo.router.child import Child
from vllm_slo.wire.ports import free_port

REPLICAS = 4
WARM_S = 1.0


@dataclass
class Stream(asyncio.Protocol):
    """One streamed request, on a connection of its own.

    Attributes:
        first_s: from sending to the first byte of the answer, seconds; None: there was none.
        gaps_s: between two pieces of the answer.
        whole: whether the answer came to its end.
    """

    tokens: int
    done: asyncio.Future[None]
    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    whole: bool = False
    _begun_s: float = 0.0
    _last_s: float = 0.0
    _tail: bytes = b""

    def connection_made(self, transport: Any) -> None:
        asked = {
            "model": "tiny",
            "prompt": "def add(a, b):\n    return",
            "max_tokens": self.tokens,
            "stream": True,
            "slo": {"ttft_ms": 5_000, "tpot_ms": 500},
        }
        body = json.dumps(asked).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-vllm-slo-token: %b\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        self._transport = transport
        self._begun_s = time.perf_counter()
        transport.write(head % (TOKEN.encode(), len(body)) + body)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self.first_s is None:
            self.first_s = now_s - self._begun_s
        else:
            self.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s
        self._tail = (self._tail + data)[-40:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self.whole = b"[DONE]" in self._tail
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True)
class Load:
    """What one run of streams saw.

    Attributes:
        proxy_s, service_s: CPU seconds of HAProxy and of the decision service meanwhile.
    """

    streams: list[Stream]
    proxy_s: float
    service_s: float

    def first_ms(self, share: float) -> float:
        return _quantile([s.first_s for s in self.streams if s.first_s is not None], share) * 1e3

    def gap_ms(self, share: float) -> float:
        return _quantile([gap for s in self.streams for gap in s.gaps_s], share) * 1e3

    @property
    def lost(self) -> int:
        return sum(not stream.whole for stream in self.streams)

    @property
    def token_us(self) -> float:
        """CPU of HAProxy per token."""
        return self.proxy_s * 1e6 / sum(stream.tokens for stream in self.streams)

    @property
    def request_ms(self) -> float:
        """CPU of the decision service per request."""
        return self.service_s * 1e3 / len(self.streams)


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


async def load(ports: list[int], streams: int, tokens: int, ramp_s: float, front: int) -> Load:
    """Begin the streams evenly over ``ramp_s`` seconds, and wait for their ends."""
    loop = asyncio.get_running_loop()
    begun: list[Stream] = []
    before = cpu_s(front)

    async def one(port: int) -> None:
        stream = Stream(tokens, loop.create_future())
        begun.append(stream)
        await loop.create_connection(lambda: stream, "127.0.0.1", port)
        await stream.done

    tasks = []
    started_s = loop.time()
    for number in range(streams):
        tasks.append(asyncio.create_task(one(ports[number % len(ports)])))
        await asyncio.sleep(max(started_s + (number + 1) * ramp_s / streams - loop.time(), 0.0))
    await asyncio.gather(*tasks)
    after = cpu_s(front)
    return Load(begun, after[0] - before[0], after[1] - before[1])


def cpu_s(front: int) -> tuple[float, float]:
    """CPU seconds of HAProxy and of the decision service so far."""
    found = {"haproxy": 0.0, "service": 0.0}
    for process in psutil.Process(front).children(recursive=True):
        name = "haproxy" if process.name() == "haproxy" else "service"
        found[name] += sum(process.cpu_times()[:2])
    return found["haproxy"], found["service"]


@contextmanager
def replicas(rate: float) -> Iterator[list[int]]:
    """The ports of the replicas, one process for all."""
    ports = [free_port() for _ in range(REPLICAS)]
    command = [sys.executable, "stream_replica.py", str(rate), *map(str, ports)]
    process = subprocess.Popen(command, cwd=Path(__file__).resolve().parent)
    try:
        yield ports
    finally:
        process.terminate()
        process.wait()


async def with_front(ports: list[int], cases: list[tuple[int, int, float]], repeats: int) -> Any:
    """For each case (streams, tokens, ramp): the direct and the routed runs."""
    port = free_port()
    front = Child(
        [sys.executable, "-m", "vllm_slo.router.front", "--host", "127.0.0.1", "--port", str(port),
         "--config", json.dumps({"slo_config": None})],
        os.environ,
    )  # fmt: skip
    await front.start()
    try:
        await front.read()
        entries = [
            {"name": str(n), "url": f"http://127.0.0.1:{p}", "token": TOKEN}
            for n, p in enumerate(ports)
        ]
        front.write({"replicas": entries})
        while (await front.read() or {}).get("ready") != len(ports):
            pass
        await load([port], 50, 20, WARM_S, front.pid)
        found = []
        for streams, tokens, ramp_s in cases:
            pairs = []
            for _ in range(repeats):
                direct = await load(ports, streams, tokens, ramp_s, front.pid)
                pairs.append((direct, await load([port], streams, tokens, ramp_s, front.pid)))
            found.append(pairs)
        return found
    finally:
        await front.terminate(10.0)


def row(streams: int, rate: float, pairs: list[tuple[Load, Load]]) -> list[str]:
    """Medians over the runs."""

    def of(what: Any) -> tuple[float, float]:
        return median(what(direct) for direct, _ in pairs), median(what(r) for _, r in pairs)

    ttft50, ttft99 = of(lambda run: run.first_ms(0.5)), of(lambda run: run.first_ms(0.99))
    gap99 = of(lambda run: run.gap_ms(0.99))
    lost = sum(run.lost for pair in pairs for run in pair)
    return [
        str(streams),
        f"{rate:g}",
        f"{median(routed.token_us for _, routed in pairs):.1f}",
        f"{median(routed.request_ms for _, routed in pairs):.2f}",
        f"{ttft50[0]:.1f} / {ttft50[1]:.1f}",
        f"{ttft99[0]:.1f} / {ttft99[1]:.1f}",
        f"{gap99[0]:.0f} / {gap99[1]:.0f}",
        str(lost),
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--many", type=int, default=5_000, help="streams of the last row; 0: none")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = []
    with replicas(STREAM_RATE) as ports:
        cases = [(100, 100, 2.0), (300, 100, 4.0)]
        for case, pairs in zip(
            cases, uvloop.run(with_front(ports, cases, args.repeats)), strict=True
        ):
            rows.append(row(case[0], STREAM_RATE, pairs))
    if args.many:
        with replicas(1.0) as ports:
            (pairs,) = uvloop.run(with_front(ports, [(args.many, 40, 25.0)], 1))
            rows.append(row(args.many, 1.0, pairs))
    head = [
        "streams", "tokens/s each", "HAProxy, us per token", "decisions, ms per request",
        "TTFT p50, ms", "TTFT p99, ms", "gap p99, ms", "lost",
    ]  # fmt: skip
    text = markdown(head, rows) + "\n\nTimes are direct / through the front."
    write_result("data_plane", __doc__ or "", text)


if __name__ == "__main__":
    main()
