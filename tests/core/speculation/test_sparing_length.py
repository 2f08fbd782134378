# SPDX-License-Identifier: Apache-2.0
"""The draft length that takes least time from prompts, against answers that are played out."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_slo.core.speculation.sparing_length import sparing_length

LONGEST = 6
TOKEN_S = 8e-5


def played_s(acceptance: float, length: int, reading_s: float, pass_s: float, seed: int) -> float:
    """Seconds of a token in an answer of which so many tokens are verified in each step."""
    rng, tokens, spent_s = np.random.default_rng(seed), 0, 0.0
    while tokens < 20_000:
        accepted = 0
        while accepted < length - 1 and rng.random() < acceptance:
            accepted += 1
        tokens += accepted + 1
        spent_s += length * TOKEN_S + reading_s + max(length - 1, 1) * pass_s
    return spent_s / tokens


@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.9])
@pytest.mark.parametrize("reading_s", [0.0, 5e-5, 3e-4, 2e-3])
@pytest.mark.parametrize("pass_s", [0.0, 1e-4, 1e-3])
def test_no_other_length_takes_less_time(
    acceptance: float, reading_s: float, pass_s: float
) -> None:
    """The first pass is made in every step of the engine, whatever is drafted."""
    found = sparing_length(acceptance, LONGEST, token_s=TOKEN_S, reading_s=reading_s, pass_s=pass_s)
    beside = [
        played_s(acceptance, length, reading_s, pass_s, seed=length) - pass_s / gives
        for length in range(1, LONGEST + 1)
        for gives in [(1 - acceptance**length) / (1 - acceptance)]
    ]
    assert beside[found - 1] < 1.02 * min(beside)


def test_a_draft_pays_where_the_context_is_long() -> None:
    """A step with one draft takes (2k + r) / (1 + a) a token, and k + r without."""
    k, a = TOKEN_S, 0.7
    even = k * (1 - a) / a
    lengths = [
        sparing_length(a, LONGEST, token_s=k, reading_s=share * even, pass_s=1.0)
        for share in (0.0, 0.95, 1.05, 20.0)
    ]
    assert lengths == [1, 1, 2, 2]


def test_drafts_that_are_never_accepted_are_not_verified() -> None:
    assert sparing_length(0.0, LONGEST, token_s=TOKEN_S, reading_s=1.0, pass_s=0.0) == 1
    assert sparing_length(1.0, LONGEST, token_s=TOKEN_S, reading_s=1.0, pass_s=0.0) == LONGEST
