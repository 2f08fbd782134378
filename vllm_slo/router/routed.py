# SPDX-License-Identifier: Apache-2.0
"""A request that was read, as routing sees it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from vllm_slo.core.routing.virtual_replica import RoutedRequest
from vllm_slo.router.body_reader import Asked
from vllm_slo.router.prompts import PrefixIndex, Prompt, TokenRatio


def routed_request(
    asked: Asked, replicas: Iterable[tuple[str, PrefixIndex]], ratio: TokenRatio, arrival_s: float
) -> RoutedRequest:
    """A request as routing sees it.

    Args:
        replicas: the names of those that may get it, and the prompts that each has computed.
        arrival_s: on the clock of routing.
    """
    prompt, slo, most = asked.prompt, asked.slo, asked.max_tokens
    tokens, cached = ratio.tokens(prompt), _cached_tokens(replicas, prompt, ratio)
    if slo is None:
        return RoutedRequest(tokens, most, cached_tokens=cached)
    return RoutedRequest(
        tokens,
        most,
        math.inf if slo.ttft_ms is None else arrival_s + slo.ttft_ms / 1000,
        math.inf if slo.tightest_tpot_ms is None else slo.tightest_tpot_ms / 1000,
        slo.effective_tier == "guaranteed" and slo.has_objective,
        slo.on_unattainable == "decline",
        slo.slo_class or "custom",
        slo.expected_output_tokens,
        cached,
    )


def _cached_tokens(
    replicas: Iterable[tuple[str, PrefixIndex]], prompt: Prompt, ratio: TokenRatio
) -> dict[str, int]:
    """Replica -> prompt tokens that its prefix cache probably holds; without zeros."""
    if not prompt.chunks:
        return {}
    each = ratio.chunk_tokens(prompt)
    matched = ((name, prefixes.matched(prompt.chunks)) for name, prefixes in replicas)
    return {name: int(count * each) for name, count in matched if count}
