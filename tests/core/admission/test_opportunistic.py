# SPDX-License-Identifier: Apache-2.0
"""Who may begin without a promise."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from depth import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm_slo.core.admission.opportunistic import (
    PACES,
    Pace,
    Sustainable,
    has_headroom,
    most_in_time,
)
from vllm_slo.core.admission.program import PLAIN, Speculated

BASE_S, TOKEN_S = 0.020, 0.001
SPREAD = 0.1


def plain(tpot_s: float) -> tuple[float, Speculated]:
    """Steps of 20 ms and 1 ms for each token."""
    return max((tpot_s - BASE_S) / TOKEN_S, 0.0), PLAIN


def with_trees(tpot_s: float) -> tuple[float, Speculated]:
    """The same where three tokens in give two out."""
    return max((2.0 * tpot_s - BASE_S) / TOKEN_S, 0.0) / 3.0, Speculated(2.0, 3.0)


def fits(count: int, tpot_s: float, sustainable: Sustainable, prompt: float = 0.0) -> bool:
    """Whether the last of ``count`` alike finds room."""
    running = [Pace(tpot_s, prompt)] * (count - 1)
    return has_headroom(running, Pace(tpot_s, prompt), sustainable, SPREAD)


@dataclass
class Engine:
    """Steps of one length; each request is in as many as it needs, and when its answer has ended
    another one's prompt is computed."""

    step_s: float
    tokens: int = 0
    steps: int = 0
    owed: list[float] = field(default_factory=list)

    def run(self, paces: list[Pace], yields: Speculated, steps: int) -> float:
        """Tokens of a step, on average."""
        self.owed = [0.0] * len(paces)
        had, prompts = [0.0] * len(paces), [0.0] * len(paces)
        for _ in range(steps):
            for i, pace in enumerate(paces):
                self.owed[i] += self.step_s / pace.tpot_s
                if self.owed[i] >= yields.tokens_out:
                    self.owed[i] -= yields.tokens_out
                    had[i] += yields.tokens_out
                    self.tokens += int(yields.tokens_in)
                while prompts[i] + 1 <= had[i] * pace.prompt:
                    prompts[i] += 1
                    self.tokens += 1
        return self.tokens / steps


def test_whoever_finds_the_engine_empty_begins() -> None:
    assert has_headroom([], Pace(1e-6, 1e6), plain, SPREAD)


def test_so_many_as_keep_their_tpot_with_good_odds() -> None:
    """Steps of 50 ms keep a TPOT of 50 ms for 30 requests, if they never vary. If windows vary by a
    tenth, half of them are kept: 15. Steps of 45 ms hold 25 requests and are 1.11 deviations
    shorter, so 87% of the windows are kept: 21.7. Steps of 42.5 ms give 22.5 x 96% = 21.6, and
    steps of 40 ms 20 x 99% = 19.9."""
    assert plain(0.050) == (pytest.approx(30.0), PLAIN)
    requests, _ = most_in_time(0.050, plain, SPREAD)
    assert requests == pytest.approx(25.0)
    assert fits(25, 0.050, plain)
    assert not fits(26, 0.050, plain)


def test_steadier_steps_let_more_requests_begin() -> None:
    found = [most_in_time(0.050, plain, spread)[0] for spread in (0.0, 0.05, 0.1, 0.15)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


@given(st.floats(0.025, 0.2), st.floats(0.01, 0.4), st.sampled_from(PACES))
def test_no_other_number_of_requests_keeps_more(tpot_s: float, spread: float, other: float) -> None:
    """Windows that are drawn at random are the oracle: how many requests keep theirs. The draws
    are off by 2% at most."""
    draws = np.random.default_rng(0).normal(0.0, 1.0, 20_000)

    def kept(requests: float) -> float:
        step_s = BASE_S + TOKEN_S * requests
        return requests * float(np.mean(step_s * (1.0 + spread * draws) <= tpot_s))

    best, _ = most_in_time(tpot_s, plain, spread)
    assert kept(best) >= 0.98 * kept(plain(other * tpot_s)[0]) - 1e-6


def test_prompts_take_their_share_of_the_steps() -> None:
    """An answer of 100 tokens after a prompt of 100: each request is worth two, so half of 25."""
    assert fits(12, 0.050, plain, prompt=1.0)
    assert not fits(13, 0.050, plain, prompt=1.0)


def test_one_with_a_tighter_tpot_makes_everybodys_steps_shorter() -> None:
    running = [Pace(0.1, 0.0)] * 20
    assert has_headroom(running, Pace(0.1, 0.0), plain, SPREAD)
    assert not has_headroom(running, Pace(0.022, 0.0), plain, SPREAD)


def test_trees_make_room() -> None:
    assert not fits(3, 0.022, plain)
    assert fits(3, 0.022, with_trees)


asked = st.builds(Pace, st.floats(0.021, 0.5), st.sampled_from([0.0, 0.25, 1.0, 4.0]))


@settings(max_examples=examples(60))
@given(st.lists(asked, min_size=1, max_size=24), asked)
def test_what_is_let_in_fits_the_steps(running: list[Pace], one: Pace) -> None:
    """Plain decoding, step by step, is the oracle."""
    assume(has_headroom(running, one, plain, SPREAD))
    paces = [*running, one]
    step_s = min(pace.tpot_s for pace in paces)
    tokens = Engine(step_s).run(paces, PLAIN, 4000)
    assert BASE_S + TOKEN_S * tokens <= step_s * (1.0 + 1e-9)


@settings(max_examples=examples(60))
@given(st.lists(asked, min_size=1, max_size=24), asked)
def test_what_is_let_in_fits_with_trees(running: list[Pace], one: Pace) -> None:
    """The same where all ask for one TPOT, that is, for a whole tree in every step."""
    paces = [Pace(min(pace.tpot_s for pace in [*running, one]), pace.prompt) for pace in running]
    assume(has_headroom(paces[1:], paces[0], with_trees, SPREAD) and len(paces) > 1)
    step_s = 2.0 * paces[0].tpot_s
    tokens = Engine(step_s).run(paces, with_trees(step_s)[1], 4000)
    assert BASE_S + TOKEN_S * tokens <= step_s * (1.0 + 1e-9)


@settings(max_examples=examples(200))
@given(st.lists(asked, min_size=1, max_size=24), asked, asked)
def test_company_never_makes_room(running: list[Pace], one: Pace, more: Pace) -> None:
    tightest_s = min(pace.tpot_s for pace in [*running, one])
    assume(more.tpot_s >= tightest_s)
    if has_headroom([*running, more], one, plain, SPREAD):
        assert has_headroom(running, one, plain, SPREAD)
