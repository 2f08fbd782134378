# SPDX-License-Identifier: Apache-2.0
"""What a vLLM request says of itself: the one boundary for vLLM's request type."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from vllm.v1.request import Request, RequestStatus

from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.slo.keys import AGE_KEY, EACH_KEY, EXEMPT_KEY, GROUP_KEY, QUOTE_KEY, TICKET_KEY

_MAX_AGE_S = 86_400.0


def age_s(request: Request, epoch_s: float) -> float:
    """Seconds since the request arrived at the server, safe against clocks that jumped."""
    return min(max(epoch_s - request.arrival_time, 0.0), _MAX_AGE_S)


def age_before_s(request: Request) -> float:
    """Seconds for which a front had the request before it came here."""
    age_ms = _internal(request, AGE_KEY)
    known = isinstance(age_ms, int | float) and age_ms > 0.0
    return min(age_ms, _MAX_AGE_S * 1e3) / 1e3 if known else 0.0


def ticket(request: Request) -> Ticket | None:
    """The mark by which a front knows the request, or None."""
    mark = _internal(request, TICKET_KEY)
    with suppress(ValueError):
        return Ticket.parse(mark) if isinstance(mark, str) else None
    return None


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


def awaits_output(request: Request) -> bool:
    """Whether a preempted request has a token on its way; vLLM resumes it once that has come."""
    return request.num_stale_output_tokens > 0 and not request.drop_stale_output


def whole_inputs(request: Request, computed: int, granted: int, most: int) -> int:
    """``granted`` tokens that follow ``computed`` ones, changed so that they divide no image: they
    end before one that they do not begin with, else after it, with at most ``most`` tokens."""
    end = computed + granted
    for feature in request.mm_features:
        start, length = feature.mm_position.offset, feature.mm_position.length
        if start < end < start + length:
            if start > computed:
                return start - computed
            whole = start + length - computed
            return whole if whole <= most else 0
    return granted


def longest_input(request: Request) -> int:
    """Tokens of the longest image of a prompt; 0 without one."""
    return max((feature.mm_position.length for feature in request.mm_features), default=0)


def holds_kv(request: Request) -> bool:
    """Whether a waiting request has blocks: a session that goes on, a load that has arrived."""
    return request.num_computed_tokens > 0


def lora_id(request: Request) -> int:
    """Number of the request's LoRA; 0: the model itself."""
    return request.lora_request.lora_int_id if request.lora_request else 0
