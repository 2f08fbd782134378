# SPDX-License-Identifier: Apache-2.0
"""Times streamed completions over one of several ways to a replica."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Way:
    """One way to a replica: a session that keeps its connections, a URL, and what is asked."""

    session: aiohttp.ClientSession
    url: str
    body: Mapping[str, Any]

    async def timed(self) -> tuple[float, float]:
        """Seconds to the first and to the last byte of one answer."""
        begun = time.perf_counter()
        async with self.session.post(f"{self.url}/v1/completions", json=self.body) as answer:
            answer.raise_for_status()
            text = await answer.content.readany()
            first = time.perf_counter()
            text += await answer.content.read()
        ended = time.perf_counter()
        if not text.rstrip().endswith(b"[DONE]") or b'"error"' in text:
            raise SystemExit(f"an answer ended with {text[-200:]!r}")
        return first - begun, ended - begun
