# SPDX-License-Identifier: Apache-2.0
"""Live requests as the policies see them: frozen views, made anew for each step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.request import Request, RequestStatus

from vllm_slo.core.batching.decodes import NONE as NO_DECODES
from vllm_slo.core.batching.decodes import Decodes, due_in_window
from vllm_slo.core.lengths.output_length import LengthPrediction
from vllm_slo.core.speculation.window_pace import SHORT_WINDOW
from vllm_slo.core.types import BestEffortView, DecodeView, Demand, PrefillView
from vllm_slo.engine.scheduling.decode_model import TokenYields
from vllm_slo.engine.scheduling.request_facts import is_decoding, tokens_to_next_sample
from vllm_slo.engine.scheduling.slo_request import SLORequest


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
    window_s, held = tracked.tpot.measure.open_window
    place = held + (request.num_output_placeholders if in_flight is None else in_flight)
    tpot_s, begun = tracked.tpot_s * strength, tracked.first_token_s is not None
    due = due_in_window(
        *(start_s, window_s, float(place), begun),
        *(float(expected), tpot_s, tracked.window),
    )
    tokens = max(request.num_tokens_with_spec - request.num_tokens + 1, 1)
    is_first = tracked.tpot.measure.worst_full_s is None and tracked.window <= SHORT_WINDOW
    may_end = is_first and tracked.may_end_early
    return DecodeView(
        request.request_id, *due, tpot_s, tokens, request.num_computed_tokens, may_end
    )


def decode_rows(
    tracked: Sequence[SLORequest],
    start_s: float,
    strengths: tuple[float, float],
    yields: TokenYields,
) -> Decodes:
    """`decode_view` of promised requests that decode, all at once.

    Args:
        tracked: the requests; all have the same TPOT window.
        start_s: when the step begins.
        strengths: share of each TPOT to work towards, and the share in an answer's first window.
        yields: what drafts are expected to yield.
    """
    if not tracked:
        return NO_DECODES
    requests = [t.request for t in tracked]
    names = [request.request_id for request in requests]
    measures = [t.tpot.measure for t in tracked]
    held = np.array([m.open_tokens for m in measures], dtype=np.float64)
    in_flight, next_step = yields.in_flight, yields.next_step
    if in_flight:
        held += [
            in_flight.get(name, request.num_output_placeholders)
            for name, request in zip(names, requests, strict=True)
        ]
    else:
        held += [request.num_output_placeholders for request in requests]
    expected = np.ones(len(names))
    if next_step:
        expected[:] = [next_step.get(name, 1.0) for name in names]
    tokens = np.array([1 + len(request.spec_token_ids) for request in requests], dtype=np.int64)
    context = np.array([request.num_computed_tokens for request in requests], dtype=np.int64)
    return Decodes.in_windows(
        names,
        start_s,
        (np.array([m.open_start_s for m in measures]), held),
        np.array([t.first_token_s is not None for t in tracked]),
        expected,
        np.array([t.tpot_s * strengths[t.tpot.measure.worst_full_s is None] for t in tracked]),
        tracked[0].window,
        (tokens, context),
        np.array([yields.spare_s.get(name, 0.0) for name in names]),
    )


def prefill_view(tracked: SLORequest, guard_s: float = 0.0) -> PrefillView:
    """A promised request before its next sampled token, which is to come ``guard_s`` before its
    deadline."""
    request = tracked.request
    starts = request.num_computed_tokens == 0
    deadline_s = tracked.arrival_s
    if tracked.first_token_s is None:
        deadline_s = tracked.deadline_s - guard_s
    return PrefillView(
        request.request_id,
        deadline_s,
        tracked.remaining_tokens,
        tracked.reserved_tpot_s,
        tracked.cached_tokens if starts else request.num_computed_tokens,
        starts,
    )


def best_effort_view(
    request: Request,
    since_s: float,
    needed_blocks: int = 0,
    hold_blocks: int = 0,
    *,
    asked: bool = False,
) -> BestEffortView:
    """A request without a promise that was last served at ``since_s``; the rest as in the view."""
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
        request.num_computed_tokens == 0,
        hold_blocks,
        asked,
    )


def with_cached(view: BestEffortView, tokens: int) -> BestEffortView:
    """A request that has not started, with so many of its tokens in the prefix cache."""
    left = max(view.remaining_tokens - tokens, 1)
    return view._replace(remaining_tokens=left, context_tokens=tokens)


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
