# SPDX-License-Identifier: Apache-2.0
"""Which replica: SLO-driven routing over virtual replicas.

Source: SLOs-Serve, section 4.2 and figure 7. Each replica has a shadow in the controller that
judges a request by the admission program the replica itself runs. A request goes to the replica
whose turn it is; if that one cannot keep its objectives, to the next, sequentially; when as many
were asked as may be, a backup policy declines it or gives it best effort.

A shadow knows what its replica said last (`ReplicaState`) and what was sent there since. A request
is known to both sides by its ticket, a number that grows with every request sent to that replica.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from vllm_slo.core.admission.incremental import IncrementalAdmission, Verdict
from vllm_slo.core.admission.program import Capacity, work_tokens
from vllm_slo.core.lengths.output_length import hold_of, length_of
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.types import INFINITY, Backup, Demand, RoutingPolicy

STALE_S: Final = 30.0
"""What an idle replica said so long ago it may not say any more."""
LOST_AFTER_S: Final = 0.5
"""A request that its replica has seen, by its ticket or a later one, and does not list so long
after it was sent has ended or never asked for anything."""

MAX_PREPARED: Final = 8


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as far as routing is concerned.

    Attributes:
        prompt_tokens: its prompt, in tokens; an estimate may do.
        max_tokens: most tokens of its answer; None: as many as the model takes.
        deadline_s: when its first token is due, on the clock of ``now_s``; infinite without a TTFT.
        tpot_s: seconds per output token; infinite without a TPOT.
        wants_promise: whether it asks for a promise.
        declines: whether its owner prefers a refusal over best effort.
        slo_class: the name by which output lengths are learnt.
        expected_output_tokens: what its owner expects, or None.
        cached_tokens: replica -> prompt tokens that its prefix cache is believed to hold.
    """

    prompt_tokens: int
    max_tokens: int | None = None
    deadline_s: float = INFINITY
    tpot_s: float = INFINITY
    wants_promise: bool = False
    declines: bool = False
    slo_class: str = "none"
    expected_output_tokens: int | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Sent:
    """A request that was sent and has not ended. ``demand`` is None without a promise."""

    request: RoutedRequest
    sent_s: float
    demand: Demand | None
    tokens: int
    began: bool = False
    known: bool = False


class VirtualReplica:
    """One replica as the controller sees it. Times are on the controller's clock.

    Args:
        name: the replica's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: ReplicaState | None = None
        self._taken_s = 0.0
        self._sent: dict[int, _Sent] = {}
        self._outlook: IncrementalAdmission | None = None
        self._asked: dict[float, None] = {}
        self._unseen_tokens = 0

    @property
    def outstanding(self) -> int:
        """Requests sent here that have not ended."""
        return len(self._sent)

    @property
    def load_tokens(self) -> float:
        """Tokens to compute before a new prompt would begin, and one for each running request."""
        state = self.state
        known = 0 if state is None else state.backlog_tokens + state.running + state.waiting
        return known + self._unseen_tokens

    def update(self, state: ReplicaState, taken_s: float) -> None:
        """The replica's own account of how it stood at ``taken_s``."""
        self.state, self._taken_s = state, taken_s
        listed = set(state.tickets)
        self._unseen_tokens = 0
        for ticket, sent in self._sent.items():
            late = taken_s > sent.sent_s + LOST_AFTER_S and state.seen >= ticket
            sent.known = ticket in listed or sent.began or late
            if not sent.known:
                self._unseen_tokens += sent.tokens
        self._look_out()

    def sent(self, ticket: int, request: RoutedRequest, now_s: float, *, promised: bool) -> None:
        """A request is on its way to the replica."""
        demand = self.demand(request, str(ticket)) if promised and self.state else None
        tokens = max(request.prompt_tokens - request.cached_tokens.get(self.name, 0), 1)
        self._sent[ticket] = _Sent(request, now_s, demand, tokens)
        self._unseen_tokens += tokens
        if demand is not None:
            self._look_out()

    def began(self, ticket: int) -> None:
        """The first byte of its answer came."""
        sent = self._sent.get(ticket)
        if sent is None or sent.began:
            return
        sent.began = True
        if not sent.known:
            self._unseen_tokens -= sent.tokens
            if sent.demand is not None:
                sent.demand = replace(sent.demand, prefill_tokens=0)
                self._outlook = None

    def ended(self, ticket: int) -> None:
        """It was answered, or failed, or its client left."""
        sent = self._sent.pop(ticket, None)
        if sent is None:
            return
        if not sent.known and not sent.began:
            self._unseen_tokens -= sent.tokens
        if not sent.known and sent.demand is not None:
            self._outlook = None

    def demand(self, request: RoutedRequest, name: str = "") -> Demand:
        """The line of SLOs-Serve's figure 5 that a request would draw on this replica.

        As the replica would see it (``engine.scheduling.request_views.demand``), from the lengths
        that it has learnt. An answer of one token decodes nothing, so any TPOT is kept. Needs a
        state.
        """
        state = self.state
        assert state is not None
        room = max(state.max_model_len - request.prompt_tokens, 1)
        most = room if request.max_tokens is None else min(request.max_tokens, room)
        points = state.lengths.get(request.slo_class, ())
        declared = request.expected_output_tokens
        cached = min(request.cached_tokens.get(self.name, 0), request.prompt_tokens - 1)
        tokens = max(request.prompt_tokens - max(cached, 0), 1)
        held = hold_of(points, request.prompt_tokens, most, declared)
        blocks = sum(-(-held // size) for size in state.block_sizes)
        return Demand(
            name,
            request.deadline_s - state.model.predict_s(0),
            max(round(work_tokens(state.model, tokens, cached)), 1),
            request.tpot_s if most > 1 else INFINITY,
            min(blocks, state.total_blocks),
            context_tokens=request.prompt_tokens + length_of(points, most, declared) // 2,
        )

    def judge(self, request: RoutedRequest, now_s: float) -> Verdict:
        """Whether the replica could promise a request its objectives if it came now; one that has
        long been idle is to say so itself."""
        state = self.state
        if state is None:
            return Verdict(False, "unknown", 1.0)
        start_s = max(self._taken_s + state.start_s, now_s)
        if request.deadline_s <= start_s:
            return Verdict(False, "expired", state.finish_interval_s)
        outlook, demand = self._outlook or self._look_out(), self.demand(request)
        if demand.tpot_s not in self._asked:
            self._asked[demand.tpot_s] = None
            if len(self._asked) > MAX_PREPARED:
                del self._asked[next(iter(self._asked))]
        verdict = outlook.judge(demand, start_s)
        # How fast it is now only itself can find out; see ``idle_probe``.
        idle = not (self._sent or state.running or state.waiting)
        stale = idle and now_s - self._taken_s >= STALE_S
        return Verdict(True) if stale and verdict.reason in ("prefill", "decode") else verdict

    def work_s(self, request: RoutedRequest) -> float:
        """Share of this replica, times how long, that a request takes: of its time, or of its KV
        memory where that is more."""
        state = self.state
        if state is None:
            return 0.0
        demand, model = self.demand(request), state.model
        slope_s = model.predict_s(state.max_step_tokens) / state.max_step_tokens
        output = 2 * max(demand.context_tokens - request.prompt_tokens, 0) + 1
        read = 1.0 + model.kv_s * demand.context_tokens / slope_s
        compute_s = slope_s * (demand.prefill_tokens + output * read)
        held = demand.blocks / max(state.total_blocks, 1)
        # A token takes no longer than a step of as many such requests as memory holds, however
        # loose the objective is.
        together = min(1.0 / held, state.max_step_tokens) if held else 1.0
        full_s = model.predict_s(together, together * demand.context_tokens)
        token_s = min(request.tpot_s, full_s)
        return max(compute_s, held * (slope_s * demand.prefill_tokens + output * token_s))

    def _look_out(self) -> IncrementalAdmission:
        """What is promised there: by the replica's account, and by what was sent since.

        Prepared when that changes, so that a decision does not wait for it.
        """
        state, taken_s = self.state, self._taken_s
        assert state is not None
        committed = [replace(d, deadline_s=d.deadline_s + taken_s) for d in state.committed]
        decoding, context = dict(state.decoding), state.decoding_context
        blocks = seats = 0
        for sent in self._sent.values():
            demand = sent.demand
            if demand is None or sent.known:
                continue
            blocks, seats = blocks + demand.blocks, seats + 1
            if demand.prefill_tokens:
                committed.append(demand)
            else:
                decoding[demand.tpot_s] = decoding.get(demand.tpot_s, 0) + 1
                context += sent.request.prompt_tokens
        self._outlook = IncrementalAdmission(
            committed,
            decoding,
            state.model,
            Capacity(
                blocks=state.free_blocks - blocks,
                seats=state.seats - seats,
                max_step_tokens=state.max_step_tokens,
                token_share=state.token_share,
                finish_interval_s=state.finish_interval_s,
            ),
            decoding_context=context,
        )
        for tpot_s in self._asked:
            self._outlook.prepare(tpot_s)
        return self._outlook


Rank = Callable[[RoutedRequest, Sequence[VirtualReplica], int, Random], list[VirtualReplica]]
"""(request, replicas, turn, randomness) -> replicas in the order in which they are to be tried."""


def round_robin(
    request: RoutedRequest, replicas: Sequence[VirtualReplica], turn: int, rng: Random
) -> list[VirtualReplica]:
    """From the one whose turn it is, in order."""
    first = turn % len(replicas)
    return [*replicas[first:], *replicas[:first]]


def prefix_first(
    request: RoutedRequest, replicas: Sequence[VirtualReplica], turn: int, rng: Random
) -> list[VirtualReplica]:
    """In turn, but those that hold more of the prompt in their prefix cache before the others."""
    ranked = round_robin(request, replicas, turn, rng)
    if request.cached_tokens:
        ranked.sort(key=lambda replica: -request.cached_tokens.get(replica.name, 0))
    return ranked


def least_loaded(
    request: RoutedRequest, replicas: Sequence[VirtualReplica], turn: int, rng: Random
) -> list[VirtualReplica]:
    """By tokens to compute, what a prefix cache saves taken off; in turn among equals."""
    ranked = round_robin(request, replicas, turn, rng)
    ranked.sort(key=lambda one: one.load_tokens - request.cached_tokens.get(one.name, 0))
    return ranked


def power_of_two(
    request: RoutedRequest, replicas: Sequence[VirtualReplica], turn: int, rng: Random
) -> list[VirtualReplica]:
    """The less loaded one of two at random first."""
    pair = rng.sample(range(len(replicas)), min(2, len(replicas)))
    best = min(pair, key=lambda place: replicas[place].load_tokens)
    return [replicas[best], *(one for n, one in enumerate(replicas) if n != best)]


RANKS: Final[Mapping[RoutingPolicy, Rank]] = {
    "slo": prefix_first,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
}


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    Attributes:
        target: a replica's name; None: it is declined, or there is no replica.
        promised: whether the target's shadow says that every objective can be kept.
        hops: replicas that were asked for a promise.
        backup: what acted when none of them gave one: ``best_effort``, ``decline``, or None.
        reason: what stood in the way at the replica asked first.
        retry_after_s: when one of those asked may have room again (prediction).
        left: replicas that were not asked, in order.
    """

    target: str | None
    promised: bool = False
    hops: int = 0
    backup: str | None = None
    reason: str | None = None
    retry_after_s: float = 1.0
    left: tuple[str, ...] = ()


def route(
    request: RoutedRequest,
    replicas: Sequence[VirtualReplica],
    now_s: float,
    *,
    policy: RoutingPolicy = "slo",
    turn: int = 0,
    max_hops: int = 8,
    backup: Backup = "as_asked",
    rng: Random,
    already_asked: int = 0,
) -> Route:
    """Choose a replica for a request; nothing is changed.

    Args:
        replicas: those that may get requests.
        policy: only ``slo`` asks for promises; the others send to the first of their ranking.
        turn: counts requests, for round robin.
        max_hops: replicas asked before the backup acts.
        already_asked: hops that this request has made before.
    """
    if not replicas:
        return Route(None)
    asks = policy == "slo" and request.wants_promise
    if not asks:
        # Without a promise to look for, the shortest queue that knows the prompt serves best.
        rank = least_loaded if policy == "slo" else RANKS[policy]
        ranked = rank(request, replicas, turn, rng)
        return Route(ranked[0].name, left=tuple(one.name for one in ranked[1:]))
    ranked = RANKS[policy](request, replicas, turn, rng)
    may_ask = max(max_hops - already_asked, 0)
    reason, retry_after_s = None, INFINITY
    for place, replica in enumerate(ranked[:may_ask]):
        verdict = replica.judge(request, now_s)
        if verdict.promised:
            left = tuple(one.name for one in ranked[place + 1 :])
            return Route(replica.name, True, already_asked + place + 1, left=left)
        reason = reason or verdict.reason
        retry_after_s = min(retry_after_s, verdict.retry_after_s)
    hops = already_asked + min(may_ask, len(ranked))
    retry_after_s = retry_after_s if math.isfinite(retry_after_s) else 1.0
    if backup == "decline" or (backup == "as_asked" and request.declines):
        return Route(None, False, hops, "decline", reason, retry_after_s)
    target = least_loaded(request, replicas, turn, rng)[0].name
    return Route(target, False, hops, "best_effort", reason, retry_after_s)


class DemandMeter:
    """How many replicas the demand of late would have needed, promises that nobody gave included.

    Autoscaling follows this and not the number of requests: what counts is the work that could not
    be promised. A request's work is the time it occupies an otherwise idle replica; it is given up
    to ``target`` of a replica's time.

    Args:
        window_s: how far back demand is looked at.
        target: share of a replica's time that is to be filled, 0 < target <= 1.
    """

    def __init__(self, window_s: float = 30.0, target: float = 0.7) -> None:
        self.window_s = window_s
        self.target = target
        self._seen: deque[tuple[float, float, bool]] = deque()
        self._since_s: float | None = None

    def routed(self, request: RoutedRequest, route: Route, now_s: float, work_s: float) -> None:
        """Record a decision about a request that takes ``work_s`` of a replica's time."""
        self._since_s = now_s if self._since_s is None else self._since_s
        self._seen.append((now_s, work_s, request.wants_promise and not route.promised))
        self._forget(now_s)

    def _forget(self, now_s: float) -> None:
        while self._seen and self._seen[0][0] <= now_s - self.window_s:
            self._seen.popleft()

    def wanted(self, ready: int, now_s: float) -> int:
        """Replicas wanted, at least 1: one more at least while promises are refused, fewer only
        when none was refused in the window and the rest would not be too full."""
        self._forget(now_s)
        if self._since_s is None or not self._seen:
            return 1 if self._since_s is None or now_s - self._since_s > self.window_s else ready
        span_s = min(max(now_s - self._since_s, 1.0), self.window_s)
        total_s = sum(work_s for _, work_s, _ in self._seen)
        refused_s = sum(work_s for _, work_s, refused in self._seen if refused)
        needed = max(math.ceil(total_s / span_s / self.target), 1)
        if refused_s > 0.0:
            return max(needed, ready + math.ceil(refused_s / span_s))
        return needed if needed < ready else max(ready, 1)
