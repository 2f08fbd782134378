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

from collections.abc import Sequence
from typing import NamedTuple

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


def fitting(
    ranked: Sequence[BestEffortView], memory: Memory, starved: str | None = None
) -> list[BestEffortView]:
    """The requests of best effort for which there is memory, in the order given.

    A request starts if all that best effort is expected to hold, its own blocks included, leaves
    `spread` blocks beside what is set aside for promises. So a request that has begun is seldom
    dropped. It also leaves the warm blocks; those of its own session are not in its
    ``needed_blocks``. Tokens planned for a request that cannot start would be taken from those that
    hold the memory it waits for.

    The ``starved`` request may take all that is free, warm blocks only if no other request of best
    effort holds memory that it could wait for. While it waits, no request behind it takes what it
    needs.
    """
    held = sum(r.hold_blocks for r in ranked if not r.needed_blocks)
    room = memory.total - memory.promised - memory.spread - memory.warm - held
    free = memory.free
    fit = []
    for request in ranked:
        if request.needed_blocks:
            first = request.request_id == starved
            takes = free if first and not held else free - memory.warm
            fits = request.needed_blocks <= takes and (first or request.hold_blocks <= room)
            if fits or first:
                room -= request.hold_blocks
                free -= request.needed_blocks
            if not fits:
                continue
        fit.append(request)
    return fit
