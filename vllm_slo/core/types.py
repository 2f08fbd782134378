# SPDX-License-Identifier: Apache-2.0
"""The values that pass between the policies and whoever drives them.

All times are seconds on one monotonic (or virtual) clock, all sizes are tokens or KV-cache blocks.
A view is a snapshot: policies read views and return plans, and change nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

INFINITY = math.inf

RoutingPolicy: TypeAlias = Literal["slo", "round_robin", "least_loaded", "power_of_two", "scorers"]
BestEffortOrder: TypeAlias = Literal["fcfs", "laps_sd", "las", "lp_sjf"]
"""The order in which best effort is served; see `core.ordering.least_perceived_service`."""
DraftShares: TypeAlias = Literal["throughput", "tenants"]
"""Which requests get the drafts that no objective needs: those whose drafts are likeliest to be
accepted, or tenants in proportional fairness; see `core.speculation.proportional_fairness`."""
LengthSource: TypeAlias = Literal["quantile", "learnt"]
"""What predicts the length of an answer; see `core.lengths.forecast`."""
Backup: TypeAlias = Literal["as_asked", "best_effort", "decline"]
"""What becomes of a request that no replica can promise: what its client asked for, or always one
of the two."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What serving one request within its objectives asks of the engine.

    A line of SLOs-Serve's figure 5: ``prefill_tokens`` are due at ``deadline_s``; from then on the
    request draws one token every ``tpot_s``. A request that already decodes has no prefill tokens
    left and a deadline that is not in the future.

    Attributes:
        request_id: unique among the demands of one call.
        deadline_s: absolute time by which the first token must be out; infinite without a TTFT.
        prefill_tokens: tokens still to compute before the first token appears.
        tpot_s: seconds per output token; infinite without a TPOT (draws no decode budget).
        blocks: KV-cache blocks the request will hold when it ends, beyond those it shares.
        value: what keeping this promise is worth (SLOs-Serve's v_i).
        context_tokens: KV length the request will attend to while it decodes.
    """

    request_id: str
    deadline_s: float
    prefill_tokens: int
    tpot_s: float
    blocks: int
    value: float = 1.0
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """The outcome of one run of the dynamic program.

    Attributes:
        admitted: ids of the new requests whose objectives are promised, by deadline.
        refused: the others, each with the resource that binds: ``prefill`` (token budget before a
            deadline), ``decode`` (steady token rate), ``memory`` or ``seats``.
        retry_after_s: for each refused id, when the same request might be admitted (prediction).
    """

    admitted: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    retry_after_s: dict[str, float] = field(default_factory=dict)


class DecodeView(NamedTuple):
    """A promised request that is decoding.

    Attributes:
        request_id: its id.
        due_s: when its next token is due to stay on schedule within its TPOT window.
        window_end_s: when the last token of that window is due.
        window_left: steps' worth of tokens of that window that are still to come, at least 1.
        tpot_s: its objective.
        tokens: tokens one decode step verifies for it (1 without speculation).
        context_tokens: KV length it attends to.
        may_end: whether the answer may end before its first window is full.
        spare_s: seconds of the longest step that its window can spare: drafts surely keep it in
            later steps, which leave out the decodes that can wait. 0: no drafts are counted on.
    """

    request_id: str
    due_s: float
    window_end_s: float
    window_left: float
    tpot_s: float
    tokens: int = 1
    context_tokens: int = 0
    may_end: bool = False
    spare_s: float = 0.0


class PrefillView(NamedTuple):
    """A promised request whose first token is not out yet.

    Attributes:
        request_id: its id.
        deadline_s: when the first token is due; infinite where it can wait for ever.
        remaining_tokens: tokens still to compute until it samples.
        tpot_s: its decode objective once it has begun; infinite without one.
        context_tokens: KV length that its next token attends to: computed, or found in the prefix
            cache.
        starts: whether it has no seat yet.
    """

    request_id: str
    deadline_s: float
    remaining_tokens: int
    tpot_s: float
    context_tokens: int = 0
    starts: bool = False


class BestEffortView(NamedTuple):
    """A request without a promise.

    Attributes:
        request_id: its id.
        waiting_since_s: when it arrived, or when it last received tokens, whichever is later.
        remaining_tokens: tokens it could use in this step (1 when it decodes).
        decoding: whether those tokens are a decode step, which cannot be split.
        context_tokens: KV length it attends to, as in `PrefillView`.
        needed_blocks: KV blocks that it must find free to start; 0 where it holds its own.
        begun: whether its client has tokens of it already.
        starts: whether it has no seat yet.
        hold_blocks: KV blocks that it is expected to hold at most.
        asked: whether it asked for a promise that it did not get.
    """

    request_id: str
    waiting_since_s: float
    remaining_tokens: int
    decoding: bool
    context_tokens: int = 0
    needed_blocks: int = 0
    begun: bool = False
    starts: bool = False
    hold_blocks: int = 0
    asked: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one engine step may do.

    Attributes:
        token_budget: tokens of the whole step.
        tokens: the most each named request may be given; 0 keeps it out of this step.
        predicted_s: predicted step time if every grant is used.
        limit_s: the step time that the promises allow; infinite when nothing limits it.
        deadline_s: the step time that a prompt's deadline allows; infinite where it does not end
            the step sooner than the decodes do.
    """

    token_budget: int
    tokens: dict[str, int]
    predicted_s: float
    limit_s: float
    deadline_s: float = INFINITY
