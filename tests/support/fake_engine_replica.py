# SPDX-License-Identifier: Apache-2.0
"""`fake_replica.py` with an engine: a process of its own whose death it reports as vLLM does.

A prompt that contains ``wait`` gets no token for `WAIT_S`; every token takes `TOKEN_S`. When the
engine dies, the state stream says so, running requests end with vLLM's in-band error, those that
have not started with status 500, and the process leaves with status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
from typing import Any

from aiohttp import web
from fake_replica import FakeReplica, Knobs, _end_with_parent, _error_event
from patience import patience

from vllm_slo.wire.front_protocol import TOKEN_VARIABLE

WAIT_S = patience(1.5)
TOKEN_S = 0.05
LEAVE_S = 0.7


class EngineReplica(FakeReplica):
    """A fake whose engine can be killed."""

    engine: subprocess.Popen[bytes]

    def __init__(self, name: str, drain_s: float) -> None:
        knobs = Knobs(token_s=TOKEN_S, token=os.environ.get(TOKEN_VARIABLE, ""))
        super().__init__(name, knobs, drain_s)

    async def stream(
        self, request: web.Request, asked: dict[str, Any], count: int, record: dict[str, Any]
    ) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream; charset=utf-8"}
        response = web.StreamResponse(headers=headers)
        slept = asyncio.sleep(WAIT_S if "wait" in asked["prompt"] else 0.0)
        await self.unless_dead(slept)
        if self.dead.is_set():
            return self.error(500, "InternalServerError", f"the engine of {self.name} is dead")
        await response.prepare(request)
        self.begin(record)
        for number in range(count):
            if self.dead.is_set():
                await response.write(_error_event(self.name) + b"data: [DONE]\n\n")
                return response
            last = "length" if number == count - 1 else None
            choice = {"text": f" t{number}", "finish_reason": last}
            said = json.dumps(self.base(asked, "text_completion", {"index": 0, **choice}))
            await response.write(f"data: {said}\n\n".encode())
            record["tokens"] += 1
            await self.unless_dead(asyncio.sleep(TOKEN_S))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def unless_dead(self, slept: Any) -> None:
        tasks = [asyncio.ensure_future(slept), asyncio.ensure_future(self.dead.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def live(self, host: str) -> None:
        serving = asyncio.create_task(self.run(host))
        dying = asyncio.create_task(self.dead.wait())
        await asyncio.wait([serving, dying], return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            await asyncio.sleep(LEAVE_S)
            sys.stderr.write("RuntimeError: the engine core is dead\n")
            sys.stderr.flush()
            os._exit(1)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--private-host", required=True)
    parser.add_argument("--drain-s", type=float, default=30.0)
    given, rest = parser.parse_known_args()
    if "--no-such-flag" in rest:
        sys.stderr.write("usage: vllm serve\nvllm serve: error: unrecognized arguments\n")
        sys.exit(2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    replica = EngineReplica(f"fake-{os.getpid()}", given.drain_s)
    engine = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    loop = asyncio.get_running_loop()

    def watch() -> None:
        engine.wait()
        loop.call_soon_threadsafe(replica.dead.set)

    threading.Thread(target=watch, daemon=True).start()
    try:
        await replica.live(given.private_host)
    finally:
        engine.kill()


if __name__ == "__main__":
    asyncio.run(main())
