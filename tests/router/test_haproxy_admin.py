# SPDX-License-Identifier: Apache-2.0
"""HAProxy's slots, as the decision service keeps them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from vllm_slo.router import haproxy_admin
from vllm_slo.router.haproxy_admin import Place, ProxyAdmin


def test_a_replica_is_reached_while_its_part_in_fallback_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It changes when the first replica of the list leaves, if replicas have their own tokens."""

    async def taken(admin: Path, command: str) -> str:
        return ""

    async def main() -> None:
        admin = ProxyAdmin(Path("/nowhere"))
        admin.started(1)
        admin.want("a", Place("10.0.0.1", 8000, fallback=False))
        assert not admin.is_placed("a")
        running = asyncio.create_task(admin.run())
        await admin.settled(1)
        assert admin.is_placed("a")
        admin.want("a", Place("10.0.0.1", 8000, fallback=True))
        assert admin.is_placed("a")
        admin.want("a", Place("10.0.0.1", 8001, fallback=True))
        assert not admin.is_placed("a")
        running.cancel()

    monkeypatch.setattr(haproxy_admin, "ask", taken)
    asyncio.run(main())
