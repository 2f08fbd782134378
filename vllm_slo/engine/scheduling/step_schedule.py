# SPDX-License-Identifier: Apache-2.0
"""What vLLM's ``schedule()`` is to find for one step."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.request import Request


@dataclass(slots=True)
class StepSchedule:
    """The plan of a step, in vLLM's terms.

    Attributes:
        preempt: best-effort requests whose KV goes first.
        running: the running list in the order in which it gives way (last first), or None: as is.
        waiting: waiting requests that may start, in order.
        tokens: request id -> most tokens of this step.
        token_budget: tokens of the whole step.
        limit_s: the step time that promises, and best effort by itself, allow.
        deadline_s: the step time that a prompt's deadline allows.
        timestamp: for vLLM's preemption event.
    """

    preempt: list[Request]
    running: list[Request] | None
    waiting: list[Request]
    tokens: dict[str, int]
    token_budget: int
    limit_s: float
    deadline_s: float
    timestamp: float

    def serves(self, request_id: str) -> bool:
        """Whether a request gets tokens in this step."""
        return self.tokens.get(request_id, 0) > 0
