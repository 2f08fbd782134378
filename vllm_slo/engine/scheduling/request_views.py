# SPDX-License-Identifier: Apache-2.0
"""vLLM's requests as the policies see them: the one boundary for foreign request types.

Everything that reads a ``vllm.v1.request.Request`` for a policy does it here.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request, RequestStatus

from vllm_slo.core.lengths.output_length import LengthPrediction
from vllm_slo.core.sessions.end_to_end import pace_of_rest
from vllm_slo.core.sessions.rounds import Session
from vllm_slo.core.sessions.stages import StagedTPOT, StageResult
from vllm_slo.core.types import INFINITY, BestEffortView, DecodeView, Demand, PrefillView
from vllm_slo.slo.keys import AGE_KEY, EACH_KEY, EXEMPT_KEY, GROUP_KEY, QUOTE_KEY, TICKET_KEY
from vllm_slo.slo.model import SLO

UNCLASSED = "custom"
"""Metric label of a request whose objectives name no class."""

NO_CHUNKED_PREFILL = "no_chunked_prefill"
"""Reason why an engine that cannot cut prompts promises nothing."""

_MAX_AGE_S = 86_400.0

BEGIN_S = 1.0
"""In which a promised request without a TTFT begins, more or less."""
BEGIN_SHARE = 0.1
"""The same of a long prompt: the share of the engine's time that its prefill gets."""


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
        promised: whether its objectives are guaranteed now.
        was_promised: whether they ever were.
        opportunistic: whether it could begin without, as there was room by typical step times.
        planned: whether a dynamic program has ruled on it yet.
        reason: what stood in the way of a promise when it was first ruled on, or None.
        first_token_s: when its first token came out, or None.
        last_token_s: when its newest token came out; before, its arrival.
        end_s: when its last token is due; infinite without an end-to-end objective.
        cached_tokens: prompt tokens found in the prefix cache when last asked; they count until
            it starts.
        ticket: mark by which a front knows the request; 0: there is none.
        session: the job of which it is a round, or None.
        group: name of the HTTP request of which it is one choice of several, or None.
    """

    __slots__ = (
        "_asked_deadline_s",
        "_pace_s",
        "arrival_s",
        "asked_tpot_s",
        "begin_by_s",
        "cached_tokens",
        "deadline_s",
        "end_s",
        "first_token_s",
        "group",
        "last_token_s",
        "opportunistic",
        "planned",
        "promised",
        "reason",
        "request",
        "reserved_tpot_s",
        "session",
        "slo",
        "slo_class",
        "ticket",
        "tpot",
        "tpot_s",
        "was_promised",
        "window",
    )

    def __init__(
        self, request: Request, slo: SLO, arrival_s: float, window: int, ticket: int = 0
    ) -> None:
        self.request = request
        self.ticket = ticket
        self.group = group_of(request)
        self.slo = slo
        self.slo_class = slo.slo_class or UNCLASSED
        self.arrival_s = arrival_s
        self.deadline_s = INFINITY if slo.ttft_ms is None else arrival_s + slo.ttft_ms / 1e3
        self.begin_by_s = self._asked_deadline_s = self.deadline_s
        self.end_s = INFINITY if slo.e2e_ms is None else arrival_s + slo.e2e_ms / 1e3
        self.session: Session | None = None
        self._pace_s = INFINITY
        asked = (stage.tpot_ms for stage in slo.answer_stages)
        self.tpot = StagedTPOT([INFINITY if ms is None else ms / 1e3 for ms in asked], window)
        self._set_tpot()
        self.promised = False
        self.was_promised = False
        self.opportunistic = False
        self.planned = False
        self.reason: str | None = None
        self.cached_tokens = 0
        self.first_token_s: float | None = None
        self.last_token_s = arrival_s
        self.window = window

    def on_tokens(self, count: int, now_s: float) -> None:
        """Record that ``count`` tokens came out at ``now_s``."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.last_token_s = now_s
        self.tpot.add(now_s, count)

    def note_beginning(self) -> bool:
        """Its first token has just come: from here on it is judged by the TTFT that it asked for
        itself. Returns whether that token was promised earlier."""
        assert self.first_token_s is not None
        late = self.promised and self.first_token_s > self.deadline_s
        self.deadline_s = self._asked_deadline_s
        return late

    def next_stage(self) -> None:
        """The last token was the last of its stage."""
        self.tpot.next_stage()
        self._set_tpot()

    def _set_tpot(self) -> None:
        self.tpot_s = min(self.tpot.tpot_s, self._pace_s)
        self.asked_tpot_s = self.reserved_tpot_s = min(self.tpot.tightest_s, self._pace_s)
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
        self.was_promised = True

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
        """Whether an objective has already been missed for good."""
        if self.first_token_s is not None and self.first_token_s > self._asked_deadline_s:
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
        report: dict[str, Any] = {
            "tier": "guaranteed" if self.was_promised else "best_effort",
            "promised": self.was_promised,
            "reason": self.reason,
            "ttft_ms": None if first is None else round((first - self.arrival_s) * 1e3, 3),
            "tpot_ms": None if worst_s is None else round(worst_s * 1e3, 3),
            "attained": attained,
        }
        if self.slo.e2e_ms is not None:
            ended_ms = round((self.last_token_s - self.arrival_s) * 1e3, 3)
            report["e2e_ms"] = None if first is None else ended_ms
        if self.tpot.stages > 1:
            report["stages"] = [_stage_report(one) for one in self.tpot.results()]
        return report


def _stage_report(result: StageResult) -> dict[str, Any]:
    return {
        "tpot_ms": None if result.worst_s is None else round(result.worst_s * 1e3, 3),
        "tokens": result.tokens,
        "attained": result.attained,
    }


def age_s(request: Request, epoch_s: float) -> float:
    """Seconds since the request arrived at the server, safe against clocks that jumped."""
    return min(max(epoch_s - request.arrival_time, 0.0), _MAX_AGE_S)


def age_before_s(request: Request) -> float:
    """Seconds for which a front had the request before it came here."""
    age_ms = _internal(request, AGE_KEY)
    known = isinstance(age_ms, int | float) and age_ms > 0.0
    return min(age_ms, _MAX_AGE_S * 1e3) / 1e3 if known else 0.0


def ticket(request: Request) -> int:
    """The mark by which a front knows the request; 0: there is none."""
    mark = _internal(request, TICKET_KEY)
    return mark if isinstance(mark, int) and mark > 0 else 0


def group_of(request: Request) -> str | None:
    """Name of the HTTP request of which it is one choice of several, or None."""
    name = _internal(request, GROUP_KEY)
    return name if isinstance(name, str) else None


def wants_quote(request: Request) -> bool:
    """Whether the request only asks what it would be promised."""
    return _internal(request, QUOTE_KEY) is not None


def is_exempt(request: Request) -> bool:
    """Whether the request is a part of another one, such as a step of a beam search."""
    return _internal(request, EXEMPT_KEY) is not None


def _internal(request: Request, key: str) -> Any:
    """What the HTTP middleware said beside the SLO, or None."""
    params = request.sampling_params
    return None if params is None or not params.extra_args else params.extra_args.get(key)


def tokens_to_next_sample(request: Request) -> int:
    """Tokens that must be computed before the request samples again."""
    return request.num_tokens + request.num_output_placeholders - request.num_computed_tokens


def is_decoding(request: Request) -> bool:
    """Whether a running request's next step is a decode step."""
    return not request.is_prefill_chunk and request.num_computed_tokens > 0


def wants_report_in_stop_reason(request: Request) -> bool:
    """Whether a finished request's report is to travel in its stop reason, too.

    An aborted one has nobody to report to, or is declined and says so in its stop reason.
    """
    if _internal(request, EACH_KEY) is None:
        return False
    return request.status != RequestStatus.FINISHED_ABORTED


def may_stop(request: Request) -> bool:
    """Whether text may end it: a stop string, which vLLM's API server finds, not its engine."""
    params = request.sampling_params
    return params is not None and bool(params.stop)


def yields_one_token(request: Request) -> bool:
    """Whether the first token is the last: of a classification, of a prompt whose answer another
    engine decodes. No step decodes for it, and its length says nothing of others'."""
    return request.max_tokens <= 1


def is_cut_off(request: Request) -> bool:
    """Whether its cap, or that of the model, ended the answer."""
    return request.status == RequestStatus.FINISHED_LENGTH_CAPPED


def is_blocked(request: Request) -> bool:
    """Whether a waiting request waits for something other than tokens and memory."""
    return request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def holds_kv(request: Request) -> bool:
    """Whether a waiting request has blocks: a session that goes on, a load that has arrived."""
    return request.num_computed_tokens > 0


def lora_id(request: Request) -> int:
    """Number of the request's LoRA; 0: the model itself."""
    return request.lora_request.lora_int_id if request.lora_request else 0


def decode_view(
    tracked: SLORequest,
    start_s: float,
    strength: float = 1.0,
    expected: float = 1.0,
    in_flight: float | None = None,
) -> DecodeView:
    """A promised decoding request before a step that begins at ``start_s``.

    ``expected`` tokens come out of that step: then the last of them is what is due at its end, and
    as many fewer steps are left of its window. The next window begins when this one has ended, so
    no token counts beyond it.

    Tokens still in flight then come out at ``start_s``; if they end a window, that is where the
    next one begins. ``in_flight`` of them are expected; None: all for which there are placeholders.

    Its working TPOT is ``strength`` times the objective: at most 1, less where the step that ends
    a window may overrun (SLOs-Serve, section 3.2.3: an SLO is strengthened under uncertainty).
    """
    request = tracked.request
    tokens = max(request.num_tokens_with_spec - request.num_tokens + 1, 1)
    name, context = request.request_id, request.num_computed_tokens
    if tracked.tpot_s == INFINITY:
        return DecodeView(name, INFINITY, INFINITY, 1, INFINITY, tokens, context)
    tpot_s = tracked.tpot_s * strength
    window_s, held = tracked.tpot.measure.open_window
    place = held + (request.num_output_placeholders if in_flight is None else in_flight)
    if tracked.first_token_s is None:
        window_s, place = start_s, max(place - 1, 0)
    elif place >= tracked.window:
        window_s, place = start_s, place % tracked.window
    return DecodeView(
        name,
        window_s + min(place + expected, tracked.window) * tpot_s,
        window_s + tracked.window * tpot_s,
        max((tracked.window - place) / expected, 1.0),
        tpot_s,
        tokens,
        context,
    )


def prefill_view(tracked: SLORequest) -> PrefillView:
    """A promised request before its next sampled token."""
    deadline_s = tracked.deadline_s if tracked.first_token_s is None else tracked.arrival_s
    return PrefillView(
        tracked.request.request_id,
        deadline_s,
        tracked.remaining_tokens,
        tracked.reserved_tpot_s,
        tracked.request.num_computed_tokens,
    )


def best_effort_view(request: Request, since_s: float, needed_blocks: int = 0) -> BestEffortView:
    """A request without a promise that was last served at ``since_s``."""
    decoding = request.status == RequestStatus.RUNNING and is_decoding(request)
    speculated = request.num_tokens_with_spec - request.num_tokens
    tokens = 1 + speculated if decoding else tokens_to_next_sample(request)
    return BestEffortView(
        request.request_id,
        since_s,
        max(tokens, 1),
        decoding,
        request.num_computed_tokens,
        needed_blocks,
        request.num_output_tokens > 0,
    )


def demand(
    tracked: SLORequest,
    now_s: float,
    due_s: float,
    work_tokens: float,
    length: LengthPrediction,
    blocks: int,
    guard_s: float = 0.0,
) -> Demand:
    """The line of figure 5 that a request draws, from where it stands now.

    ``due_s``: when its prefill is to end; ``guard_s`` moves that forward by what steps, being
    indivisible, may overrun it.
    """
    begun = tracked.first_token_s is not None
    request = tracked.request
    return Demand(
        request.request_id,
        now_s if begun else due_s - guard_s,
        0 if tracked.decodes else max(round(work_tokens), 1),
        tracked.reserved_tpot_s,
        blocks,
        tracked.slo.value,
        request.num_prompt_tokens + length.tokens // 2,
    )
