# SPDX-License-Identifier: Apache-2.0
"""Requests that begin without a promise: as many as typical steps keep their TPOT for together.

A request that asks for a TPOT and no TTFT loses nothing by waiting. If it begins beside too many
others, it loses its TPOT, and so do they.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Final, NamedTuple, TypeAlias

from vllm_slo.core.admission.program import Speculated, tokens_of_step

Sustainable: TypeAlias = Callable[[float], tuple[float, Speculated]]
"""A TPOT -> how many requests typical steps keep it for, and what decoding is then like."""

PACES: Final = tuple(1.0 - 0.05 * step for step in range(12))
"""Step times to choose from, as shares of the tightest TPOT."""
LEAST_SPREAD: Final = 1e-3
"""Smallest spread that is taken into account."""


class Pace(NamedTuple):
    """What a running request asks of the steps.

    Attributes:
        tpot_s: seconds per token.
        prompt: tokens of its prompt for each token of its answer. When it ends, another like it may
            begin, so over time a prompt is computed for each answer.
    """

    tpot_s: float
    prompt: float


def most_in_time(
    tpot_s: float, sustainable: Sustainable, spread: float
) -> tuple[float, Speculated]:
    """How many requests are to decode together, so that most of them are expected to keep a TPOT.

    If typical steps take a share s of the TPOT, windows are kept with probability
    P(s (1 + spread Z) <= 1), where Z is normally distributed. The shorter the steps, the surer are
    the windows, but the fewer requests fit into the steps. The number of requests times the
    probability is greatest at some share.

    Args:
        tpot_s: the objective.
        sustainable: how many requests typical steps keep a TPOT for.
        spread: standard deviation of the tokens that come in time, as a share of the typical ones.

    Returns:
        The requests, and what decoding is like then.
    """
    unit = NormalDist()

    def kept(share: float) -> float:
        deviations = (1.0 / share - 1.0) / max(spread, LEAST_SPREAD)
        return sustainable(share * tpot_s)[0] * unit.cdf(deviations)

    return sustainable(max(PACES, key=kept) * tpot_s)


def has_headroom(
    running: Sequence[Pace], newcomer: Pace, sustainable: Sustainable, spread: float
) -> bool:
    """Whether a request may begin beside those that run; always where none runs.

    Args:
        running, newcomer: what they ask of the steps.
        sustainable, spread: as `most_in_time` takes them.
    """
    if not running:
        return True
    paces = [*running, newcomer]
    tightest_s = min(pace.tpot_s for pace in paces)
    requests, speculated = most_in_time(tightest_s, sustainable, spread)
    step_s = tightest_s * speculated.tokens_out
    asked = 0.0
    for pace in paces:
        tokens = step_s / pace.tpot_s
        asked += tokens_of_step(tokens, speculated) + tokens * pace.prompt
    return asked <= requests * speculated.tokens_in
