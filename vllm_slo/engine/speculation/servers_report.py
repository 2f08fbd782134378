# SPDX-License-Identifier: Apache-2.0
"""What the worker tells the scheduler of draft servers, with each step. Needs no vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm_slo.engine.speculation.draft_link import DrafterView

__all__ = ["DrafterRound", "ServersReport"]


class DrafterRound(NamedTuple):
    """What one draft server did in a step.

    Attributes:
        drafter: its name.
        wait_s: from when all were asked until its answer was there, or the deadline.
        draft_s: of these, what it spent drafting; None: its answer was not there in time.
        tokens: of its longest draft, or without an answer of the longest that was asked for.
    """

    drafter: str
    wait_s: float
    draft_s: float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class ServersReport:
    """What the draft servers of an engine did in a step.

    Attributes:
        drafters: those that said hello.
        rounds: of those that were asked.
        dropped: (drafter, reason, times): what was dropped since the last report; "" as the name of
            those that were never welcomed.
        send_s, receive_s: spent on sending to them, and on waiting for them.
    """

    drafters: tuple[DrafterView, ...]
    rounds: tuple[DrafterRound, ...] = ()
    dropped: tuple[tuple[str, str, int], ...] = ()
    send_s: float = 0.0
    receive_s: float = 0.0
