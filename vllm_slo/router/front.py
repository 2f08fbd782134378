# SPDX-License-Identifier: Apache-2.0
"""The process of the front, the one public port before several replicas.

`python -m vllm_slo.router.front --host H --port P --config JSON`, started by a parent:

- stdin: JSON lines, each with all replicas; the front stops at the end of stdin.
- stdout: JSON lines: ``{"listening": url}`` once, then ``{"wanted": n, "ready": m}`` on change.
- SIGTERM, or the end of stdin: running requests have `RoutingConfig.drain_s` to end.

Exit status: 0 after a drain, 2 if it cannot start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from vllm_slo.errors import ConfigError
from vllm_slo.router.front_server import Front, FrontConfig
from vllm_slo.router.upstream import ReplicaSpec

logger = logging.getLogger("vllm_slo.front")

MAX_STDIN_LINE_BYTES: Final = 16 * 1024 * 1024


def _report_line(message: Mapping[str, Any]) -> None:
    """Write one line to stdout; the line is dropped if the parent does not read."""
    with suppress(OSError):
        os.write(1, json.dumps(message).encode() + b"\n")


def _read_stdin(loop: asyncio.AbstractEventLoop, front: Front) -> None:
    """In a thread: pass every line of stdin to the loop; the end of stdin stops the front."""
    held = b""
    with suppress(OSError):
        while chunk := os.read(0, 65_536):
            *lines, held = (held + chunk).split(b"\n")
            if len(held) > MAX_STDIN_LINE_BYTES:
                break
            for line in lines:
                loop.call_soon_threadsafe(_take_replicas, front, line)
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(front.stop.set)


def _take_replicas(front: Front, line: bytes) -> None:
    try:
        given = json.loads(line)["replicas"]
        specs = [ReplicaSpec.from_json(entry) for entry in given]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        logger.error("a line on stdin cannot be read: %s", type(error).__name__)
        return
    if front.cluster.is_open:
        front.cluster.replace(specs)


async def _serve(config: FrontConfig, host: str, port: int) -> None:
    front = Front(config, _report_line)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, front.stop.set)
    threading.Thread(target=_read_stdin, args=(loop, front), daemon=True).start()
    await front.run(host, port)


def _run(main: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the front; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vllm_slo.router.front")
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--config", default="{}")
    given = parser.parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        config = FrontConfig.from_json(given.config)
        with suppress(OSError):
            os.set_blocking(1, False)
        _run(_serve(config, given.host, given.port))
    except (ConfigError, OSError, OverflowError) as error:
        sys.stderr.write(f"vllm-slo: error: {_one_line(error, given)}\n")
        return 2
    return 0


def _one_line(error: BaseException, given: argparse.Namespace) -> str:
    if isinstance(error, OSError | OverflowError):
        reason = getattr(error, "strerror", None) or error
        return f"cannot listen on {given.host or '*'}:{given.port}: {reason}; choose another --port"
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
