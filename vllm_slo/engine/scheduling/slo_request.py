# SPDX-License-Identifier: Apache-2.0
"""One live request that carries an SLO: what it asked for, what it was promised, how it does."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.v1.request import Request

from vllm_slo.core.admission.late import LatePromise
from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.core.sessions.rounds import Session, pace_of_rest
from vllm_slo.core.sessions.stages import StagedTPOT, StageResult
from vllm_slo.core.types import INFINITY
from vllm_slo.engine.scheduling.request_facts import (
    group_of,
    is_decoding,
    tokens_to_next_sample,
    yields_one_token,
)
from vllm_slo.slo.model import SLO
from vllm_slo.slo.verdicts import PLANNING_FAILED

UNCLASSED = "custom"
"""Metric label of a request whose objectives name no class."""
UNLABELLED = "none"
"""Metric label of a request that carries no SLO."""
BEGIN_S = 1.0
"""Seconds in which a promised request without a TTFT begins, more or less."""
BEGIN_SHARE = 0.1
"""The same of a long prompt: the share of the engine's time that its prefill gets."""


class SharedPrefix(NamedTuple):
    """The beginning of a request whose KV blocks other requests hold, too.

    Attributes:
        blocks: numbers of these blocks, in order, of the first kind of full attention.
        tokens: in these blocks.
    """

    blocks: tuple[int, ...]
    tokens: int


class SLORequest:
    """One live request that carries an SLO, and how it is doing.

    Attributes:
        request: vLLM's own object.
        slo: what it asked for.
        slo_class: its metric label.
        arrival_s: arrival at the server on the scheduler's clock, queueing included; with a front
            ahead of it, arrival there.
        deadline_s: when its first token is due; infinite without a TTFT.
        begin_by_s: the same once it is promised; without a TTFT, when its prefill is to have ended
            for the promises that follow it.
        tpot_s: its TPOT in the stage that goes on; infinite without one.
        asked_tpot_s: the tightest TPOT from here on.
        reserved_tpot_s: the same, as far as steps have to keep it: that by which it is promised.
            Infinite for an answer of one token, which no step decodes.
        tpot: how it keeps them.
        promised: whether its objectives are guaranteed now, or its late promise is.
        broken: whether its first token missed the deadline that was promised. Once that token has
            come, the rest of the answer is guaranteed.
        was_promised: whether its objectives ever were.
        late: what it was promised instead, or None.
        opportunistic: whether it could begin without, as there was room by typical step times.
        planned: whether a dynamic program has ruled on it yet.
        reason: what stood in the way of a promise when it was first ruled on, or None.
        first_token_s: when its first token came out, or None.
        last_token_s: when its newest token came out; before, its arrival.
        recorded: tokens of its answer that have been recorded.
        end_s: when its last token is due; infinite without an end-to-end objective.
        cached_tokens: prompt tokens found in the prefix cache when last asked, or that a connector
            will load; they count until it starts.
        shared_prefix: what running requests hold of its prompt, when last asked; None: nothing. It
            counts until it starts.
        loaded_tokens: prompt tokens that it need not compute as a connector said; None: unknown.
        ticket: mark by which a front knows the request, or None.
        session: the job of which it is a round, or None.
        group: name of the HTTP request of which it is one choice of several, or None.
        disturbed: whether planning failed in a step of its life.
        may_end_early: whether its answer, or a stage of it, may end before its first TPOT window is
            full, for all that is known of such answers.
    """

    __slots__ = (
        "_asked_deadline_s",
        "_own_deadline_s",
        "_pace_s",
        "arrival_s",
        "asked_tpot_s",
        "begin_by_s",
        "broken",
        "cached_tokens",
        "deadline_s",
        "disturbed",
        "end_s",
        "first_token_s",
        "group",
        "last_token_s",
        "late",
        "loaded_tokens",
        "may_end_early",
        "opportunistic",
        "planned",
        "promised",
        "reason",
        "recorded",
        "request",
        "reserved_tpot_s",
        "session",
        "shared_prefix",
        "slo",
        "slo_class",
        "ticket",
        "tpot",
        "tpot_s",
        "was_promised",
        "window",
    )

    def __init__(
        self,
        request: Request,
        slo: SLO,
        arrival_s: float,
        window: int,
        ticket: Ticket | None = None,
    ) -> None:
        self.request = request
        self.ticket = ticket
        self.group = group_of(request)
        self.slo = slo
        self.slo_class = slo.slo_class or UNCLASSED
        self.arrival_s = arrival_s
        self.deadline_s = INFINITY if slo.ttft_ms is None else arrival_s + slo.ttft_ms / 1e3
        self.begin_by_s = self._asked_deadline_s = self._own_deadline_s = self.deadline_s
        self.end_s = INFINITY if slo.e2e_ms is None else arrival_s + slo.e2e_ms / 1e3
        self.session: Session | None = None
        self._pace_s = INFINITY
        asked = (stage.tpot_ms for stage in slo.answer_stages)
        self.tpot = StagedTPOT([INFINITY if ms is None else ms / 1e3 for ms in asked], window)
        self._set_tpot()
        self.promised = False
        self.broken = False
        self.was_promised = False
        self.late: LatePromise | None = None
        self.opportunistic = False
        self.disturbed = False
        self.may_end_early = True
        self.planned = False
        self.reason: str | None = None
        self.cached_tokens = 0
        self.shared_prefix: SharedPrefix | None = None
        self.loaded_tokens: int | None = None
        self.first_token_s: float | None = None
        self.last_token_s = arrival_s
        self.recorded = 0
        self.window = window

    def on_tokens(self, count: int, now_s: float) -> None:
        """Record that ``count`` tokens came out at ``now_s``."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        self.recorded += count
        self.tpot.add(now_s, count)

    def note_beginning(self) -> bool:
        """Its first token has just come: from here on it is judged by the TTFT that it asked for
        itself. Returns whether that token was promised earlier."""
        assert self.first_token_s is not None
        late = self.promised and self.first_token_s > self.deadline_s
        self.broken |= late and self.late is None
        self.deadline_s = self._own_deadline_s = self._asked_deadline_s
        return late

    def next_stage(self) -> None:
        """The last token was the last of its stage."""
        self.tpot.next_stage()
        self._set_tpot()

    def _set_tpot(self) -> None:
        pace_s = self._pace_s * self.tpot.slack
        self.tpot_s = min(self.tpot.tpot_s, pace_s)
        self.asked_tpot_s = self.reserved_tpot_s = min(self.tpot.tightest_s, pace_s)
        if yields_one_token(self.request):
            self.tpot_s = self.reserved_tpot_s = INFINITY

    def keep_pace(self, ttft_s: float, tpot_s: float) -> None:
        """Its session, or its end-to-end objective, needs it to be no slower than this; it is
        promised by that, too, but attains by what it asked for itself."""
        self.deadline_s = min(self.deadline_s, self.arrival_s + ttft_s)
        self.begin_by_s = self.deadline_s
        self._pace_s = min(self._pace_s, tpot_s)
        self._set_tpot()

    def keep_end(self, tokens: int) -> None:
        """Tighten its pace so that ``tokens`` more tokens end in time. Its answer has begun without
        a promise, and may have lost time."""
        window_s, in_window = self.tpot.measure.open_window
        self._pace_s = min(
            self._pace_s,
            pace_of_rest(self.end_s, self.last_token_s, window_s, in_window, tokens),
        )
        self._set_tpot()

    def due_s(self, now_s: float, prefill_s: float) -> float:
        """When its prefill, which takes ``prefill_s`` by itself, is to end in a plan made now."""
        if self.promised or self.deadline_s < INFINITY or self.asked_tpot_s == INFINITY:
            return self.begin_by_s
        if self.slo.on_unattainable == "decline":
            return INFINITY  # it would rather wait than be told to come back
        return now_s + max(BEGIN_S, prefill_s / BEGIN_SHARE)

    def promise(self, begin_by_s: float = INFINITY) -> None:
        """Its objectives are guaranteed from now on."""
        self.begin_by_s = self.deadline_s if self.deadline_s < INFINITY else begin_by_s
        self.promised = True
        self.broken = False
        self.was_promised = True
        self.late = None

    def begin_turn(self) -> None:
        """Its late promise, or the rest of a broken one, is kept like any other from now on."""
        if self.late is not None:
            self._own_deadline_s = self.deadline_s
            self.deadline_s = self.begin_by_s = self.late.deadline_s
            self.tpot.relax(self.late.slack)
            self._set_tpot()
        self.promised = True

    def withdraw(self) -> None:
        """What it was promised is not guaranteed any more."""
        if self.late is not None:
            self.deadline_s = self.begin_by_s = self._own_deadline_s
            self.tpot.relax(1.0)
            self._set_tpot()
        self.promised = False

    @property
    def late_kept(self) -> bool:
        """Whether its late promise was kept so far, given that no token is to come."""
        assert self.late is not None
        if self.first_token_s is None or self.first_token_s > self.late.deadline_s:
            return False
        return self.tpot.keeps(self.late.slack)

    @property
    def latest_start_s(self) -> float:
        """Until when it waits for its first token; infinite where that does not matter to it."""
        if self.slo.max_wait_ms is None:
            return INFINITY
        return self.arrival_s + self.slo.max_wait_ms / 1e3

    @property
    def remaining_tokens(self) -> int:
        """Tokens to compute before it samples, prefix-cache hits left out; at least 1."""
        request = self.request
        tokens = tokens_to_next_sample(request)
        return max(tokens - (0 if request.num_computed_tokens else self.cached_tokens), 1)

    @property
    def decodes(self) -> bool:
        """Whether its first token is out and its next step is a decode step."""
        return self.first_token_s is not None and is_decoding(self.request)

    @property
    def missed(self) -> bool:
        """Whether an objective, or what is promised instead, has already been missed for good."""
        due_s = self._asked_deadline_s
        if self.promised and self.late is not None:
            due_s = self.late.deadline_s
        if self.first_token_s is not None and self.first_token_s > due_s:
            return True
        if self.last_token_s > self.end_s:
            return True
        return self.tpot.missed  # an open window may still recover

    @property
    def holds_tpot(self) -> bool:
        """Whether it begins or decodes without a promise and is to keep its TPOT all the same."""
        return (
            self.opportunistic and not self.missed and (self.first_token_s is None or self.decodes)
        )

    def wants_promise(self, now_s: float) -> bool:
        """Whether a promise can still be asked for."""
        if self.promised or self.slo.effective_tier != "guaranteed":
            return False
        if self.first_token_s is None:
            return self.deadline_s > now_s
        return not self.missed

    def attained(self) -> bool | None:
        """Whether every objective was kept, given that the request has ended by itself."""
        if not self.slo.has_objective:
            return None
        if self.first_token_s is None or self.first_token_s > self._asked_deadline_s:
            return False
        if self.last_token_s > self.end_s:
            return False
        return self.tpot.attained

    def report(self, attained: bool | None) -> dict[str, Any]:
        """What the client is told when the request ends; times in milliseconds."""
        worst_s = self.tpot.worst_s
        first = self.first_token_s
        asked = self.slo.effective_tier == "guaranteed"
        suffered = attained is False or (asked and not self.was_promised)
        disturbed = PLANNING_FAILED if self.disturbed and suffered else None
        promised = self.was_promised or self.late is not None
        report: dict[str, Any] = {
            "tier": "guaranteed" if promised else "best_effort",
            "promised": promised,
            "late": self.late is not None,
            "reason": self.reason or disturbed,
            "ttft_ms": None if first is None else round((first - self.arrival_s) * 1e3, 3),
            "tpot_ms": None if worst_s is None else round(worst_s * 1e3, 3),
            "attained": attained,
        }
        if self.late is not None:
            report["late_promise"] = self._late_report(self.late, ended=attained is not None)
        if self.slo.e2e_ms is not None:
            ended_ms = round((self.last_token_s - self.arrival_s) * 1e3, 3)
            report["e2e_ms"] = None if first is None else ended_ms
        if self.tpot.stages > 1:
            report["stages"] = [_stage_report(one) for one in self.tpot.results()]
        return report

    def _late_report(self, late: LatePromise, *, ended: bool) -> dict[str, Any]:
        tpot_s = min(stage.tpot_s for stage in self.tpot.results()) * late.slack
        return {
            "ttft_ms": round((late.deadline_s - self.arrival_s) * 1e3, 3),
            "tpot_ms": None if tpot_s == INFINITY else round(tpot_s * 1e3, 3),
            "kept": self.late_kept if ended else None,
        }


def lost_report(*, promised: bool) -> dict[str, Any]:
    """The report of a request whose own could not be made."""
    return {
        "tier": "guaranteed" if promised else "best_effort",
        "promised": promised,
        "late": False,
        "reason": PLANNING_FAILED,
        "ttft_ms": None,
        "tpot_ms": None,
        "attained": None,
    }


def _stage_report(result: StageResult) -> dict[str, Any]:
    return {
        "tpot_ms": None if result.worst_s is None else round(result.worst_s * 1e3, 3),
        "tokens": result.tokens,
        "attained": result.attained,
    }
