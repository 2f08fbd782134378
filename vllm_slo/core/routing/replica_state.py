# SPDX-License-Identifier: Apache-2.0
"""The state that a replica sends to its controllers, which plan with a shadow of the replica.

SLOs-Serve, section 4.2: a controller virtualises each replica by its step-time model and asks the
same admission program that runs in the replica. `core.routing.state_stream` says how a state
travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica's own account of its promises, memory and speed.

    Times are seconds on a clock of the replica, so that a promise which does not change has the
    same numbers in every state. Two machines share no clock: a reader knows only how long ago
    ``now_s`` was.

    Attributes:
        model: step times, with the margin that its promises keep.
        now_s: when the state was taken.
        start_s: when its next step can begin.
        committed: promises whose first token is still to come, in any order. A promise keeps its id
            from one state to the next.
        decoding: TPOT in seconds -> promised requests that decode.
        decoding_context: KV tokens those read in one step, together.
        free_blocks: KV blocks that no promise has spoken for.
        total_blocks: KV blocks there are.
        block_sizes: tokens per block, one entry per kind of cache that grows with a request.
        seats: requests that could still be promised to run at once.
        max_step_tokens: most tokens of one step.
        token_share: share of every step's tokens that promises may use.
        finish_interval_s: observed seconds between two promises that ended.
        max_model_len: longest request, prompt and output, in tokens.
        running: requests in the engine's batch, with and without a promise.
        waiting: requests that wait for it.
        backlog_tokens: prompt tokens that all of them still have to compute.
        kv_usage: share of all KV blocks that requests hold now, with a promise and without.
        tickets: front -> numbers of its live requests that this state accounts for, never empty;
            see ``core.routing.tickets``.
        seen: front -> the highest number that this replica has ever seen of it.
        lengths: class -> learnt output lengths, `OutputLengthPredictor.points`.
    """

    model: StepTimeModel
    now_s: float = 0.0
    start_s: float = 0.0
    committed: tuple[Demand, ...] = ()
    decoding: Mapping[float, int] = field(default_factory=dict)
    decoding_context: int = 0
    free_blocks: float = 0.0
    total_blocks: int = 0
    block_sizes: tuple[int, ...] = ()
    seats: int = 0
    max_step_tokens: int = 1
    token_share: float = 1.0
    finish_interval_s: float = 1.0
    max_model_len: int = 1
    running: int = 0
    waiting: int = 0
    backlog_tokens: int = 0
    kv_usage: float = 0.0
    tickets: Mapping[str, frozenset[int]] = field(default_factory=dict)
    seen: Mapping[str, int] = field(default_factory=dict)
    lengths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
