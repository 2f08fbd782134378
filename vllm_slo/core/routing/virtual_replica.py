# SPDX-License-Identifier: Apache-2.0
"""A replica as its controller sees it, and the requests that are routed.

Source: SLOs-Serve, section 4.2. Each replica has a shadow in the controller, which judges a request
by the admission program that the replica itself runs. A shadow knows what its replica said last
(`ReplicaState`) and what its own front has sent there since. What other fronts sent there is a part
of what the replica says. A request is known to both sides by its ticket (`core.routing.tickets`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from vllm_slo.core.admission.incremental import IncrementalAdmission, Verdict
from vllm_slo.core.admission.program import Capacity, work_tokens
from vllm_slo.core.lengths.output_length import hold_of, length_of
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.types import INFINITY, Demand

STALE_S: Final = 30.0
"""Seconds after which the refusal of an idle replica is not taken from its last state: the replica
is asked itself, see `core.admission.idle_probe`. The value is a choice."""
LOST_AFTER_S: Final = 0.5
"""Seconds. A request that its replica has seen, by its ticket or a later one, and does not list so
long after it was sent has ended, or never asked for anything. The value is a choice: longer than a
request takes to arrive, so that none is given up on its way."""
UNLISTED_AFTER_S: Final = 60.0
"""Seconds after which a request that its replica never listed is forgotten, whether it was seen or
not. Replicas list no requests without an SLO. The value is a choice: longer than most of those
take, since until then they count as outstanding."""
_NONE: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as far as routing is concerned.

    Attributes:
        prompt_tokens: its prompt, in tokens; an estimate may do.
        max_tokens: most tokens of its answer; None: as many as the model takes.
        deadline_s: when its first token is due, on the clock of ``now_s``; infinite without a TTFT.
        tpot_s: seconds per output token; infinite without a TPOT.
        wants_promise: whether it asks for a promise.
        declines: whether its client prefers a refusal to best effort.
        slo_class: the name by which output lengths are learnt.
        expected_output_tokens: what its client expects, or None.
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
    """A request that was sent and has not ended.

    Attributes:
        demand: what it was promised; None without a promise.
        tokens: of its prompt, to compute.
        known: whether the replica's last state accounts for it.
    """

    request: RoutedRequest
    sent_s: float
    demand: Demand | None
    tokens: int
    began: bool = False
    known: bool = False


class VirtualReplica:
    """One replica as a front sees it. Times are on the front's clock.

    The end of a request may be told (`ended`). Where it is not, the replica's states tell it: a
    request that was listed and is not any more has ended.

    Args:
        name: the replica's.
        front: the front's, as in its tickets.

    Attributes:
        token_s: seconds for a token of a full step, by the state.
    """

    def __init__(self, name: str, front: str = "") -> None:
        self.name = name
        self.front = front
        self.state: ReplicaState | None = None
        self._offset_s = 0.0
        """This clock less the replica's."""
        self._taken_s = 0.0
        self._sent: dict[int, _Sent] = {}
        self._unlisted: dict[int, _Sent] = {}
        """Those of `_sent` that no state has listed."""
        self._listed = _NONE
        self._admission: IncrementalAdmission | None = None
        self._unseen_tokens = 0
        self.token_s = self._empty_step_s = 0.0

    @property
    def outstanding(self) -> int:
        """Requests sent here that have not ended."""
        return len(self._sent)

    @property
    def load_tokens(self) -> float:
        """Tokens to compute before a new prompt would begin, and one for each running request."""
        state = self.state
        listed = 0 if state is None else state.backlog_tokens + state.running + state.waiting
        return listed + self._unseen_tokens

    def update(self, state: ReplicaState, taken_s: float) -> None:
        """Take in the replica's own account of how it stood at ``taken_s``."""
        self.state, self._taken_s = state, taken_s
        self._offset_s = taken_s - state.now_s
        self._admission = None
        self.token_s = state.model.predict_s(state.max_step_tokens) / state.max_step_tokens
        self._empty_step_s = state.model.predict_s(0)
        listed = state.tickets.get(self.front, _NONE)
        for ticket in self._listed - listed:
            self._sent.pop(ticket, None)
        self._listed = listed
        self._look_for_unlisted(taken_s)

    def confirm(self, now_s: float) -> None:
        """The replica has said that it had no newer state at ``now_s``."""
        if self._unlisted:
            self._admission = None
            self._look_for_unlisted(now_s)

    def _look_for_unlisted(self, now_s: float) -> None:
        """Find out which of the requests that were not listed yet the state accounts for, and which
        have ended by it, as it held at ``now_s``."""
        state, listed = self.state, self._listed
        if state is None or not self._unlisted:
            return
        seen = state.seen.get(self.front, 0)
        is_idle = not (state.running or state.waiting)
        self._unseen_tokens = 0
        for ticket, sent in list(self._unlisted.items()):
            if ticket in listed:
                del self._unlisted[ticket]
                continue
            age_s = now_s - sent.sent_s
            if (age_s > LOST_AFTER_S and (seen >= ticket or is_idle)) or age_s > UNLISTED_AFTER_S:
                del self._unlisted[ticket], self._sent[ticket]
                continue
            # What asked for no promise is never listed, but counted among those that run or wait.
            sent.known = sent.began or (sent.demand is None and age_s > LOST_AFTER_S)
            if not sent.known:
                self._unseen_tokens += sent.tokens

    def sent(self, ticket: int, request: RoutedRequest, now_s: float, *, promised: bool) -> None:
        """Note that a request is on its way to the replica."""
        demand = self.demand(request) if promised and self.state else None
        tokens = max(request.prompt_tokens - request.cached_tokens.get(self.name, 0), 1)
        self._sent[ticket] = self._unlisted[ticket] = _Sent(request, now_s, demand, tokens)
        self._unseen_tokens += tokens
        if demand is not None:
            self._admission = None

    def began(self, ticket: int) -> None:
        """Note that the first byte of an answer came."""
        sent = self._unlisted.get(ticket)
        if sent is None or sent.began:
            return
        sent.began = True
        if not sent.known:
            self._unseen_tokens -= sent.tokens
            if sent.demand is not None:
                sent.demand = replace(sent.demand, prefill_tokens=0)
                self._admission = None

    def ended(self, ticket: int) -> None:
        """Note that a request was answered, or failed, or its client left."""
        self._sent.pop(ticket, None)
        sent = self._unlisted.pop(ticket, None)
        if sent is None:
            return
        if not sent.known and not sent.began:
            self._unseen_tokens -= sent.tokens
        if not sent.known and sent.demand is not None:
            self._admission = None

    def demand(self, request: RoutedRequest) -> Demand:
        """The line of SLOs-Serve's figure 5 that a request would draw on this replica.

        The replica would see the same (``engine.scheduling.request_views.demand``), but for KV
        blocks that it would share there: it is made from the lengths that the replica has learnt.
        A cached prefix saves blocks only while another promise holds it, which is not known here.
        An answer of one token decodes nothing, so any TPOT is kept. Needs a state.
        """
        due_s, prefill_tokens, tpot_s, blocks, context = self._line(request)
        return Demand("", due_s, prefill_tokens, tpot_s, blocks, context_tokens=context)

    def _line(self, request: RoutedRequest) -> tuple[float, int, float, int, int]:
        """Of `demand`: deadline, prefill tokens, TPOT, blocks, context tokens. It is worked out for
        each replica that is asked."""
        state = self.state
        assert state is not None
        prompt, capped = request.prompt_tokens, request.max_tokens
        most = state.max_model_len - prompt
        if most < 1:
            most = 1
        if capped is not None and capped < most:
            most = capped
        points = state.lengths.get(request.slo_class, ())
        declared = request.expected_output_tokens
        cached = request.cached_tokens.get(self.name, 0) if request.cached_tokens else 0
        if cached >= prompt:
            cached = prompt - 1
        tokens = prompt - cached if cached > 0 else prompt
        held = hold_of(points, prompt, most, declared)
        blocks = 0
        for size in state.block_sizes:
            blocks -= -held // size
        model = state.model
        return (
            request.deadline_s - self._empty_step_s,
            round(work_tokens(model, tokens, cached)) or 1,
            request.tpot_s if most > 1 else INFINITY,
            blocks if blocks < state.total_blocks else state.total_blocks,
            prompt + length_of(points, most, declared) // 2,
        )

    def judge(self, request: RoutedRequest, now_s: float) -> Verdict:
        """Whether the replica could promise a request its objectives if it came now.

        A replica that has long been idle is to say so itself, so its shadow says yes.
        """
        state = self.state
        if state is None:
            return Verdict(False, "unknown", 1.0)
        # On the replica's clock, on which what is committed does not move.
        start_s = max(state.start_s, now_s - self._offset_s)
        if request.deadline_s - self._offset_s <= start_s:
            return Verdict(False, "expired", state.finish_interval_s)
        admission = self._admission or self._prepare()
        due_s, tokens, tpot_s, blocks, context = self._line(request)
        verdict = admission.judge_line(
            start_s, due_s - self._offset_s, tokens, tpot_s, blocks, context
        )
        # Only the replica itself can find out how fast it is now; see ``idle_probe``.
        idle = not (self._sent or state.running or state.waiting)
        stale = idle and now_s - self._taken_s >= STALE_S
        return Verdict(True) if stale and verdict.reason in ("prefill", "decode") else verdict

    def work_s(self, request: RoutedRequest) -> float:
        """Seconds of the whole replica that a request takes: of its time, or of its KV memory if
        that is more. Half of the memory for four seconds counts as two."""
        state = self.state
        if state is None:
            return 0.0
        demand, model = self.demand(request), state.model
        slope_s = self.token_s
        output = 2 * max(demand.context_tokens - request.prompt_tokens, 0) + 1
        read = 1.0 + model.kv_s * demand.context_tokens / slope_s
        compute_s = slope_s * (demand.prefill_tokens + output * read)
        held = demand.blocks / max(state.total_blocks, 1)
        # However loose the TPOT is, a token takes no longer than a step of as many such requests as
        # memory holds.
        together = min(1.0 / held, state.max_step_tokens) if held else 1.0
        full_s = model.predict_s(together, together * demand.context_tokens)
        token_s = min(request.tpot_s, full_s)
        return max(compute_s, held * (slope_s * demand.prefill_tokens + output * token_s))

    def _prepare(self) -> IncrementalAdmission:
        """Prepare admission beside what is promised there, by the replica's account and by what was
        sent since, on the replica's clock.

        This happens when the first request is judged after a change: states come more often than
        most replicas are asked.
        """
        state = self.state
        assert state is not None
        committed, decoding = list(state.committed), dict(state.decoding)
        context, blocks, seats = state.decoding_context, state.free_blocks, state.seats
        for ticket, sent in self._unlisted.items():
            demand = sent.demand
            if demand is None or sent.known:
                continue
            blocks, seats = blocks - demand.blocks, seats - 1
            if demand.prefill_tokens:
                due_s = demand.deadline_s - self._offset_s
                committed.append(replace(demand, deadline_s=due_s, request_id=f"sent {ticket}"))
            else:
                decoding[demand.tpot_s] = decoding.get(demand.tpot_s, 0) + 1
                context += sent.request.prompt_tokens
        self._admission = IncrementalAdmission(
            committed,
            decoding,
            state.model,
            Capacity(
                blocks=blocks,
                seats=seats,
                max_step_tokens=state.max_step_tokens,
                token_share=state.token_share,
                finish_interval_s=state.finish_interval_s,
            ),
            decoding_context=context,
        )
        return self._admission
