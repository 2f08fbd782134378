# SPDX-License-Identifier: Apache-2.0
"""The decision service in this process, on the loop that it has in its own."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("uvloop")

from patience import patience

from vllm_slo.router.child_process import run
from vllm_slo.router.decision_service import DecisionService
from vllm_slo.router.front_config import FrontConfig
from vllm_slo.router.haproxy_config import FrontFolder
from vllm_slo.wire.socket_folder import make_socket_folder


def test_it_still_listens_after_a_collection_of_garbage() -> None:
    """uvloop closes a listener to which nothing in Python refers."""
    folder = FrontFolder(make_socket_folder("vllm-slo-test-"))
    deciding = asyncio.Event()
    service = DecisionService(FrontConfig.from_json("{}"), folder, lambda _: deciding.set())

    async def connects(path: Path) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(path)
        except ConnectionError:
            return False
        writer.close()
        await writer.wait_closed()
        return True

    async def main() -> None:
        serving = asyncio.create_task(service.run())
        async with asyncio.timeout(patience(60)):
            await deciding.wait()
            gc.unfreeze()  # the service froze what was there before
            gc.collect()
            connected = [await connects(path) for path in (folder.decide, folder.pages)]
            service.stop.set()
            await serving
        assert connected == [True, True]

    run(main())
