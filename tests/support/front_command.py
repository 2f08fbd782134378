# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo front`` as users start it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil
from front_stack import START_S, eventually, http
from patience import patience

from vllm_slo.wire.ports import free_port


@contextmanager
def front(*arguments: str) -> Iterator[str]:
    """A front on a port of its own; its URL. Nothing of it is left at the end."""
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm_slo.cli", "front", *arguments),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        process_group=0,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: _is_healthy(url), "the front is healthy", START_S)
        children = psutil.Process(process.pid).children(recursive=True)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(patience(20)) == 0
        assert psutil.wait_procs(children, patience(10))[1] == []
    finally:
        process.kill()
        process.wait()


def _is_healthy(url: str) -> bool:
    try:
        return http("GET", f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False
