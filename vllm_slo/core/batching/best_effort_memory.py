# SPDX-License-Identifier: Apache-2.0
"""The KV memory that best effort may take beside promises.

A promise that needs blocks takes them from best effort, whose prompts and answers are then computed
again. If best effort fills all that is free, that happens with nearly every arrival. So best effort
leaves as much free as promises are likely to need beyond what is set aside for them already.

If requests come in a Poisson process, the number that are being served is Poisson distributed. What
they hold together then has the standard deviation sqrt(sum of holds squared), which `spread` takes
from the requests that are promised now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from vllm_slo.core.types import BestEffortView


class Memory(NamedTuple):
    """KV blocks of an engine.

    Attributes:
        total: all there are.
        free: those that no request holds, and that promises do not need in this step.
        promised: those set aside for promises.
        spread: standard deviation of what promises hold.
        warm: free ones that hold the prefixes of sessions whose next round is to come.
    """

    total: int
    free: int
    promised: int
    spread: float
    warm: int = 0


MOST_ASKED: Final = 8
"""Requests of a step for which the prefix cache is asked, if there is no memory for them otherwise.
This limits the time of a step: asking takes some 20 microseconds, and 0.3 ms for a prompt of 10,000
tokens."""


def fitting(
    ranked: Sequence[BestEffortView],
    memory: Memory,
    starved: str | None = None,
    *,
    present: Callable[[str], int] = lambda _: 0,
) -> list[BestEffortView]:
    """The requests of best effort for which there is memory, in the order given.

    A request starts if all that best effort is expected to hold, its own blocks included, leaves
    `spread` blocks beside what is set aside for promises. So a request that has begun is seldom
    dropped. It does not use warm blocks, except those of its own session. Tokens planned for a
    request that cannot start would be taken from those that hold the memory it waits for.

    The ``starved`` request may take all that is free, warm blocks only if no other request of best
    effort holds memory that it could wait for. While it waits for such a request, no request behind
    it takes what it needs.

    Args:
        ranked: the requests of best effort.
        memory: what there is.
        starved: its id; None: there is none.
        present: id of a request that has not started -> blocks of it that need not be allocated:
            running requests hold them, or they are warm and of its own session.
    """
    left = _Left(memory, sum(r.hold_blocks for r in ranked if not r.needed_blocks))
    asked, fit = 0, []
    for request in ranked:
        if not request.needed_blocks:
            fit.append(request)
            continue
        first, starting = request.request_id == starved, request
        fits = left.has_room(starting, first=first)
        if not fits and asked < MOST_ASKED and left.has_any(first=first):
            asked += 1
            starting = _without(request, present(request.request_id))
            fits = left.has_room(starting, first=first)
        if fits or (first and left.comes_free(starting)):
            left.take(starting)
        if fits:
            fit.append(starting)
    return fit


def _without(request: BestEffortView, blocks: int) -> BestEffortView:
    """A request that needs so many blocks less, and still has to start."""
    needed = max(request.needed_blocks - blocks, 1)
    return request._replace(needed_blocks=needed, hold_blocks=max(request.hold_blocks - blocks, 1))


class _Left:
    """What is left for best effort that starts; ``held`` blocks belong to best effort that runs."""

    def __init__(self, memory: Memory, held: int) -> None:
        self._held = held
        self._warm = memory.warm
        self._free = memory.free
        self._room = memory.total - memory.promised - memory.spread - memory.warm - held

    def _usable(self, *, first: bool) -> int:
        return self._free if first and not self._held else self._free - self._warm

    def has_room(self, request: BestEffortView, *, first: bool) -> bool:
        fits = request.needed_blocks <= self._usable(first=first)
        return fits and (first or request.hold_blocks <= self._room)

    def has_any(self, *, first: bool) -> bool:
        """Whether a request could start that needs one block."""
        return self._usable(first=first) >= 1 and (first or self._room >= 1)

    def comes_free(self, request: BestEffortView) -> bool:
        """Whether there is memory for a request once best effort that runs has ended."""
        return request.needed_blocks <= self._free + self._held

    def take(self, request: BestEffortView) -> None:
        self._free -= request.needed_blocks
        self._room -= request.hold_blocks
