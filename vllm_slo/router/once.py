# SPDX-License-Identifier: Apache-2.0
"""Results of expensive calls, shared by all who ask at about the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

KEPT_S: Final = 2.0
"""Largest age of an answer, seconds: the period of the live page and of servers' samples."""

T = TypeVar("T")


class Once(Generic[T]):
    """The result of a call that is made once for all who ask meanwhile, and kept for a while.

    The call goes on if those who wait for it are cancelled.

    Args:
        kept_s: largest age of the result, seconds from the end of the call.
    """

    def __init__(self, call: Callable[[], Awaitable[T]], kept_s: float) -> None:
        self._call = call
        self._kept_s = kept_s
        self._task: asyncio.Task[T] | None = None
        self._ended_s = 0.0

    async def get(self) -> T:
        """The result.

        Raises:
            Exception: whatever the call raised.
        """
        task = self._task
        if task is None or (task.done() and time.monotonic() - self._ended_s >= self._kept_s):
            task = self._task = asyncio.create_task(self._run())
        return await asyncio.shield(task)

    async def _run(self) -> T:
        try:
            return await self._call()
        finally:
            self._ended_s = time.monotonic()
