# SPDX-License-Identifier: Apache-2.0
"""A scheduler for `quotes.py`: promises one tenant what it asks, whatever admission says."""

from __future__ import annotations

from vllm.v1.request import Request

from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.scheduling.ruling import Ruling

FORCED = "forced"
"""The tenant."""


class ForcedPromises(Scheduler):
    """As `Scheduler`, but for the tenant's requests: they are promised when they come, and from
    then on planned and counted as any promise is."""

    def add_request(self, request: Request) -> None:
        """Take a request; one of the tenant leaves with a promise, unless it came too late."""
        super().add_request(request)
        parts = self.parts
        tracked = parts.tracker.get(request.request_id)
        if tracked is None or tracked.slo.tenant != FORCED:
            return
        start_s = parts.clock.next_start_s(parts.clock.tick())
        if tracked.wants_promise(start_s):
            prefill_s = parts.clock.promise_model.predict_s(tracked.remaining_tokens)
            due_s = tracked.due_s(start_s, prefill_s)
            parts.promises.carry_out(Ruling({request.request_id: due_s}))
