# SPDX-License-Identifier: Apache-2.0
"""The requests that the scheduler itself ends, and what their clients are told."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request

from vllm_slo.engine.compat.scheduler_state import SchedulerState


class Endings:
    """Ends requests, and keeps those whose clients have not been told.

    Attributes:
        refused: the requests that the next step ends before it serves any, and the stop reasons
            that their clients are told.
        untold: requests that have ended; the next output tells their clients.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.refused: dict[Request, str] = {}
        self.untold: deque[Request] = deque()

    def refuse(self, request: Request, stop_reason: str) -> None:
        """End a request that has just arrived with the next step."""
        self.refused[request] = stop_reason

    def end_refused(self) -> None:
        """End those that were refused. What is not ended, because this fails, is kept."""
        while self.refused:
            request, stop_reason = next(iter(self.refused.items()))
            self.end(request, stop_reason)
            self.refused.pop(request, None)

    def end(self, request: Request, stop_reason: str) -> None:
        """End a request that never got a token."""
        if request.is_finished():  # its client left
            return
        self._state.finish(request, stop_reason)
        self.untold.append(request)

    def on_end(self, request: Request) -> None:
        """A request has ended, by itself or because its client left."""
        self.refused.pop(request, None)

    def retain(self, live: Container[str]) -> None:
        """Forget the requests that are not live."""
        for request in [r for r in self.refused if r.request_id not in live]:
            del self.refused[request]

    def tell(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the ends of those whose clients have not been told to a step's outputs."""
        while self.untold:
            _tell_end(outputs, self.untold[0])
            self.untold.popleft()


def _tell_end(outputs: dict[int, EngineCoreOutputs], request: Request) -> None:
    output = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=FinishReason.ABORT,
        stop_reason=request.stop_reason,
        events=request.take_events(),
        trace_headers=request.trace_headers,
    )
    if request.client_index not in outputs:
        outputs[request.client_index] = EngineCoreOutputs()
    outputs[request.client_index].outputs.append(output)
