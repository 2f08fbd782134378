# SPDX-License-Identifier: Apache-2.0
"""Reads the body of a generation request: its objectives, prompt and most tokens.

Parsing JSON is one C call that holds the interpreter's lock, so a large body stops all streams of
the front, even in another thread. Longest gap of a heartbeat in the event loop while one body was
read (uvloop, two cores of an AMD EPYC that also did other work):

============================  =======  ========  =======
body                          in loop  a thread  process
============================  =======  ========  =======
256 KiB, text                    5 ms      4 ms     2 ms
256 KiB, empty lists            16 ms     23 ms     2 ms
1 MB, token ids                 22 ms     30 ms     3 ms
1 MB, empty lists              119 ms    165 ms     4 ms
32 MiB, text                   295 ms     77 ms    49 ms
32 MiB, token ids              945 ms    955 ms    64 ms
32 MiB, empty lists          8,692 ms 10,006 ms    65 ms
============================  =======  ========  =======

msgspec instead of json halves the times of text, gains nothing on empty lists, and refuses input
that vLLM accepts (NaN, lone surrogates, UTF-16). So another process reads bodies above
`LARGE_BYTES`. It starts with the first such body, which takes about a second.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic_core import from_json

from vllm_slo.router.prompts import Prompt, read_max_tokens, read_prompt
from vllm_slo.slo.body import read_body
from vllm_slo.slo.carriers import Policy, asked_by, carriers_of
from vllm_slo.slo.model import SLO

LARGE_BYTES: Final = 256 * 1024
"""Largest body that is read in the event loop: 16 ms at worst, as measured above."""


_PROMPTS: Final = frozenset({"prompt", "messages", "input"})


class UnreadError(Exception):
    """The process that reads large bodies died; the request may be sent again."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The parts of a generation request that routing needs.

    Attributes:
        prompt: as estimated without a tokenizer.
        max_tokens: most tokens of the answer; None: only the model's length limits it.
    """

    slo: SLO | None
    prompt: Prompt
    max_tokens: int | None


def read(body: bytes, headers: Mapping[str, str], policy: Policy, now_s: float) -> Asked | None:
    """Read a body; None if vLLM would refuse it, because the replica answers that itself.

    Args:
        headers: as `slo_headers` gives them.
        now_s: epoch seconds, for `prefill_ddl`.

    Raises:
        InvalidSLOError: a carrier has a mistake, or two carriers disagree.
    """
    request = read_body(body)
    if request is None:
        return None
    try:
        slo, _ = asked_by(request, carriers_of(request, headers), policy, now_s)
        prompt = read_prompt(request)
    except RecursionError:
        return None
    return Asked(slo, prompt, read_max_tokens(request))


def read_beginning(
    body: bytes, total_bytes: int, headers: Mapping[str, str], policy: Policy, now_s: float
) -> Asked:
    """Read a body of which only the beginning is here, or nothing.

    The last field that has begun may be cut off, so it is read only as a prompt. What is missing
    counts as text of that prompt. In a prompt with media it counts nothing, because most of it is
    media. A carrier that has not arrived is not missed: the replica reads it.

    Args:
        total_bytes: length of the whole body, or the best estimate of it.
        headers, policy, now_s: as for `read`.

    Raises:
        InvalidSLOError: a carrier has a mistake, or two carriers disagree.
    """
    try:
        given = from_json(body, allow_partial="trailing-strings")
    except (ValueError, RecursionError):
        given = None
    request = given if isinstance(given, dict) else {}
    cut = next(reversed(request), "")
    whole = {name: value for name, value in request.items() if name != cut}
    slo, _ = asked_by(whole, carriers_of(whole, headers), policy, now_s)
    try:
        prompt = read_prompt(request)
    except RecursionError:
        prompt = Prompt()
    if not request:
        prompt = Prompt(size=total_bytes)
    elif cut in _PROMPTS and prompt.is_plain:
        prompt = _lengthened(prompt, len(body), max(total_bytes - len(body), 0))
    most = read_max_tokens({"prompt": None, "max_tokens": None, **whole})
    return Asked(slo, replace(prompt, is_plain=False), most)


def _lengthened(prompt: Prompt, read_bytes: int, missing: int) -> Prompt:
    """A prompt with what is missing of it."""
    if not prompt.is_ids:
        return replace(prompt, size=prompt.size + missing)
    return replace(prompt, tokens=round(prompt.tokens * (read_bytes + missing) / read_bytes))


class BodyReader:
    """Reads small bodies at once and large ones in another process."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._pool: ProcessPoolExecutor | None = None

    async def read(
        self,
        body: bytes,
        headers: Mapping[str, str],
        now_s: float,
        total_bytes: int | None = None,
    ) -> Asked | None:
        """As the function `read`, or as `read_beginning` if ``total_bytes`` is given.

        Raises:
            InvalidSLOError: as there.
            UnreadError: the process died.
        """
        call: tuple[Any, ...] = (read, body, headers, self._policy, now_s)
        if total_bytes is not None:
            call = (read_beginning, body, total_bytes, headers, self._policy, now_s)
        if len(body) <= LARGE_BYTES:
            return call[0](*call[1:])
        if self._pool is None:
            spawning = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, spawning, _begin)
        pool, loop = self._pool, asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(pool, *call)
        except BrokenProcessPool as error:
            if self._pool is pool:
                self._pool = None
            raise UnreadError("the process that reads large bodies died") from error

    def close(self) -> None:
        """End the process; bodies that it has not begun to read are dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """Set up the process: it ignores signals to its group and ends with the front."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # JSON has no cycles, and looking for them takes most of the time
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)
