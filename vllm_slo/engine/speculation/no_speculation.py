# SPDX-License-Identifier: Apache-2.0
"""What the scheduler asks of speculation in a step, and the engine that has none."""

from __future__ import annotations

from typing import Protocol

from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_slo.core.step_time.model import BatchShape
from vllm_slo.engine.scheduling.decode_model import DecodeModel, PlainDecoding
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.step_schedule import StepSchedule


class Speculation(DecodeModel, Protocol):
    """The scheduler's side of drafts, in the order in which a step calls it.

    Attributes:
        draft_padding: placeholders of drafts that vLLM adds to a request that starts.
        verifies_trees: whether steps verify trees, which have bit masks of their own.
    """

    draft_padding: int
    verifies_trees: bool

    def propose(self, *, active: bool) -> None:
        """Before a step is planned: choose the drafts it is planned with, and what is drafted after
        it. ``active``: whether steps are planned at all."""

    def select(self, schedule: StepSchedule | None, /) -> None:
        """Choose the drafts of the step within the time that its plan leaves; the grants in
        ``schedule`` are raised by them. None: vLLM plans by itself."""

    def attach(self, output: SchedulerOutput, shape: BatchShape, /) -> BatchShape:
        """Send with the step what the worker must know; returns the step's shape as far as its
        time without drafting is concerned."""

    def receive(self, drafts: DraftTokenIds, /) -> bool:
        """Take what the worker drafted after the last step; False: vLLM is to take it."""

    def tree_masks(self, output: SchedulerOutput, /) -> GrammarOutput | None:
        """The bit masks of a step's structured requests, where it `verifies_trees`."""

    def drafting_s(self, output: SchedulerOutput, done: ModelRunnerOutput, /) -> float:
        """Seconds of a step that went into drafting for the next one."""

    def observe(self, output: SchedulerOutput, done: ModelRunnerOutput, /) -> None:
        """Learn from a step that is done, before its tokens are given to the requests."""

    def forget(self, request_id: str, /) -> None:
        """A request has ended."""


def wants_no_drafts(tracked: SLORequest | None) -> bool:
    """Whether a request, or its class, has speculation off; None: it has no objective."""
    return tracked is not None and tracked.slo.speculation == "off"


class NoSpeculation(PlainDecoding):
    """An engine without drafts, or whose drafts are left to vLLM.

    Args:
        clock: the step times.
        draft_padding: placeholders of drafts that vLLM adds to a request that starts.
    """

    verifies_trees = False

    def __init__(self, clock: StepClock, draft_padding: int) -> None:
        super().__init__(clock)
        self.draft_padding = draft_padding

    def propose(self, *, active: bool) -> None: ...

    def select(self, _schedule: StepSchedule | None, /) -> None: ...

    def attach(self, _output: SchedulerOutput, shape: BatchShape, /) -> BatchShape:
        return shape

    def receive(self, _drafts: DraftTokenIds, /) -> bool:
        return False

    def tree_masks(self, _output: SchedulerOutput, /) -> GrammarOutput | None:
        return None

    def drafting_s(self, _output: SchedulerOutput, _done: ModelRunnerOutput, /) -> float:
        return 0.0

    def observe(self, _output: SchedulerOutput, _done: ModelRunnerOutput, /) -> None: ...

    def forget(self, _request_id: str, /) -> None: ...
