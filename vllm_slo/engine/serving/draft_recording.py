# SPDX-License-Identifier: Apache-2.0
"""The scheduler with a record of the drafts of each engine step, and with drafts fixed at will."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_slo.core.speculation.benefit import Kind, Way
from vllm_slo.core.speculation.model_chain import Plan
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.speculation.messages import drafting_of
from vllm_slo.engine.speculation.trees import Trees


class StepDrafts(NamedTuple):
    """What an engine step did.

    Attributes:
        decodes: requests that decoded; 0: the step also read prompts.
        tokens: that they got.
        verified: draft tokens.
        drafting_s: seconds spent on drafting after it.
    """

    decodes: int
    tokens: int
    verified: int
    drafting_s: float


class DraftRecordingScheduler(Scheduler):
    """The scheduler; every step with tokens lands in :attr:`steps`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[StepDrafts] = []

    @property
    def trees(self) -> Trees:
        """What drafts and verifies."""
        trees = self.parts.speculation
        assert isinstance(trees, Trees)
        return trees

    def decode(self, way: Way, width: int) -> None:
        """Decode that way from the next step on.

        Args:
            width: of the trees that are drafted where the kind is a tree.
        """
        drafting: Any = self.trees.drafting
        if way.kind == Kind.SERVED:
            drafting.fixed, self.trees.fixed_nodes = None, None
            return
        chain = (0,) if way.length else ()
        width = width if way.kind == Kind.TREE else 1
        drafting.fixed = Plan(chain, way.length, width, way.length or 1)
        self.trees.fixed_nodes = way.length

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """As the scheduler's; the step is noted."""
        if scheduler_output.total_num_scheduled_tokens:
            self.steps.append(self._note(scheduler_output, model_runner_output))
        return super().update_from_output(scheduler_output, model_runner_output)

    def _note(self, output: SchedulerOutput, done: ModelRunnerOutput) -> StepDrafts:
        drafts = output.scheduled_spec_decode_tokens
        decodes = tokens = 0
        for name, scheduled in output.num_scheduled_tokens.items():
            request = self.requests.get(name)
            reads_prompt = scheduled != 1 + len(drafts.get(name, ()))
            if request is None or reads_prompt or not request.num_output_tokens:
                return StepDrafts(0, 0, 0, drafting_of(done).seconds)
            decodes += 1
            tokens += len(done.sampled_token_ids[done.req_id_to_index[name]])
        verified = sum(map(len, drafts.values()))
        return StepDrafts(decodes, tokens, verified, drafting_of(done).seconds)
