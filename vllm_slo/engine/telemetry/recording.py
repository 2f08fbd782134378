# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with a record of the shape and the time of each engine step."""

import time
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from vllm_slo.core.step_time.model import BatchShape, chunk_pairs


def shape_of(output: SchedulerOutput) -> BatchShape:
    """The shape of a scheduled batch, for the step-time model.

    Context tokens are each request's computed tokens before this step. #SpecStep (SLOs-Serve) is
    the longest scheduled draft.
    """
    scheduled, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    contexts = cached.num_computed_tokens
    context, requests = sum(contexts), len(scheduled)
    if output.total_num_scheduled_tokens == requests == len(contexts):  # one token of each
        return BatchShape(requests, 0, context, requests, context + requests)
    known = dict(zip(cached.req_ids, contexts, strict=True))
    known.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
    context = sum(known.values())
    pairs = context + requests  # of one token each
    for name, tokens in scheduled.items():
        if tokens != 1:
            pairs += chunk_pairs(tokens, known[name]) - chunk_pairs(1, known[name])
    drafts = max(map(len, output.scheduled_spec_decode_tokens.values()), default=0)
    return BatchShape(output.total_num_scheduled_tokens, drafts, context, requests, pairs)


class RecordingScheduler(Scheduler):
    """vLLM's synchronous scheduler; every step with tokens lands in :attr:`steps`.

    The time of a step runs from the entry of ``schedule`` to the exit of ``update_from_output``:
    scheduling, execution and sampling. Asynchronous scheduling is off, since it overlaps the first
    part of a step with the execution of the one before. A server that has it on is a little faster,
    which the online correction learns.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[tuple[BatchShape, float]] = []
        self._began_s = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM's; the step's time begins here."""
        self._began_s = time.perf_counter()
        return super().schedule(*args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """As vLLM's; the step's time ends here."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens:
            took_s = time.perf_counter() - self._began_s
            self.steps.append((shape_of(scheduler_output), took_s))
        return outputs
