# SPDX-License-Identifier: Apache-2.0
"""The interface of a simulated replica: it takes requests and hands out results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.sim.jobs import RoundResult
from vllm_slo.slo.model import SLO


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """One round of a job as a request.

    Attributes:
        name: unique in the run.
        prompt: token ids.
        output_tokens: length of the answer; policies do not see it.
        sent_s, seen_s: when the client sent it, and when an engine can see it.
        acceptance: probability that a drafted token of its answer is accepted.
        stage_ends: number of the last token of each stage but the last; policies learn an end when
            it is reached.
    """

    name: str
    prompt: list[int]
    output_tokens: int
    slo: SLO
    sent_s: float
    seen_s: float
    acceptance: float
    stage_ends: tuple[int, ...] = ()


class Replica(Protocol):
    """Serves requests on its own clock."""

    steps: int

    @property
    def scheduler_s(self) -> float:
        """Wall-clock seconds that its schedulers have taken so far."""

    @property
    def busy(self) -> bool:
        """Whether it has anything to do."""

    @property
    def now_s(self) -> float:
        """Virtual time of its next step."""

    def state(self) -> ReplicaState | None:
        """The state that a front may see; None if the replica promises nothing."""

    def promise(self, request: RoundRequest, ticket: int) -> bool:
        """Take the request if its objectives can be promised now; whether it was taken."""

    def accept(self, request: RoundRequest, ticket: int) -> None:
        """Take the request."""

    def step(self) -> list[str]:
        """Do one step; names of the requests that ended."""

    def take(self, name: str) -> tuple[RoundResult, list[int]]:
        """Remove a request that ended; its result, and its prompt with the answer."""
