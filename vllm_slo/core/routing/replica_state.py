# SPDX-License-Identifier: Apache-2.0
"""The state that a replica sends to its controller, which plans with a shadow of the replica.

SLOs-Serve, section 4.2: a controller virtualises each replica by its step-time model and asks the
same admission program that runs in the replica. Times are seconds relative to the moment at which
the state was taken, since two machines share no clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand
from vllm_slo.errors import ProfileError


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica's own account of its promises, memory and speed.

    Attributes:
        model: step times, with the margin that its promises keep.
        start_s: when its next step can begin.
        committed: promises whose first token is still to come; deadlines relative.
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
        tickets: of the live requests that this state accounts for; see
            ``core.routing.virtual_replica``.
        seen: the highest ticket that this replica has ever seen.
        lengths: class -> learnt output lengths, `OutputLengthPredictor.points`.
    """

    model: StepTimeModel
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
    tickets: tuple[int, ...] = ()
    seen: int = 0
    lengths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """One line of JSON; infinite times are null.

        Each promise is called by its place: its id may be of any length, and no other machine needs
        it.
        """
        written: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        written["model"] = self.model.to_dict()
        written["committed"] = [
            [
                str(place),
                _finite(d.deadline_s),
                d.prefill_tokens,
                _finite(d.tpot_s),
                d.blocks,
                d.value,
                d.context_tokens,
            ]
            for place, d in enumerate(self.committed)
        ]
        written["decoding"] = [[_finite(tpot_s), n] for tpot_s, n in self.decoding.items()]
        return json.dumps(written, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, line: bytes | str) -> ReplicaState:
        """Inverse of `to_json`, except for ids. Unknown keys are ignored: a newer replica may send
        more.

        Raises:
            ValueError: the line is not such a state.
        """
        try:
            return cls.from_dict(json.loads(line))
        except RecursionError as error:
            raise ValueError(f"not the state of a replica: {error!r}") from error

    @classmethod
    def from_dict(cls, data: Any) -> ReplicaState:
        """From the parsed JSON of `to_json`.

        Raises:
            ValueError: it is not such a state.
        """
        try:
            plain = {name: data[name] for name in _PLAIN}
            for name in ("block_sizes", "tickets"):
                plain[name] = tuple(plain[name])
            plain["lengths"] = {name: tuple(points) for name, points in plain["lengths"].items()}
            return cls(
                model=StepTimeModel.from_dict(data["model"]),
                committed=tuple(
                    Demand(name, _infinite(due), tokens, _infinite(tpot), blocks, value, context)
                    for name, due, tokens, tpot, blocks, value, context in data["committed"]
                ),
                decoding={_infinite(tpot): n for tpot, n in data["decoding"]},
                **plain,
            )
        except (KeyError, TypeError, AttributeError, ProfileError) as error:
            raise ValueError(f"not the state of a replica: {error!r}") from error


_PLAIN = tuple(
    each.name
    for each in fields(ReplicaState)
    if each.name not in ("model", "committed", "decoding")
)
"""Fields that are written as they are."""


def _finite(time_s: float) -> float | None:
    return time_s if math.isfinite(time_s) else None


def _infinite(time_s: float | None) -> float:
    return math.inf if time_s is None else time_s
