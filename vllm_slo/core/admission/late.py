# SPDX-License-Identifier: Apache-2.0
"""Late promises: when the turn comes of a request whose own objectives cannot be promised.

Such a request is served from what promises leave. How long it waits is estimated twice, and the
longer time counts: by the load that is asked for, and by what was left to such requests of late. A
multiple of that wait is promised (`MARGIN`). For most of the time the request takes what is left,
as others without a promise do. From its turn on (`TURN`) it is kept like any promise, so that the
rest of the time is enough even if nothing is left by itself.

If more is asked for than the engine can do, and nothing was left to anybody of late, no time can be
told that would not cost others their promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from vllm_slo.core.admission.quote import shortest_s
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY

SLACKS: Final = (1.0, 2.0, 4.0)
"""How many times its TPOT may be promised to a request, the least that can be. The values are a
choice: at four times its TPOT an answer takes a quarter of the tokens."""

MEMORY_S: Final = 20.0
"""Seconds of waiting after which what was served counts for 1/e. The value is a choice: it should
span the service of several requests, and be shorter than load takes to change."""

LOAD_MEMORY_S: Final = 5.0
"""Seconds after which what was asked for counts for 1/e. The value is a choice: it should span some
ten arrivals, and show overload before many turns are told."""
FULL: Final = 0.9
"""From this share of an engine's time on, its queues have no length that can be told. The value is
a choice: at 0.9 a queue is on average ten times as long as one request's work."""
MARGIN: Final = 4.0
"""How many times the expected wait is promised. The value is a choice: with 2 others lose as much,
and the longer time is kept more surely (benchmarks/results/ablation.md)."""
TURN: Final = 0.75
"""Share of the promised wait after which a request is served like any promise. The value is a
choice: what is left should be longer than the prompt takes beside others that are due."""
LEAST: Final = 0.25
"""Share of what was served that counts at least. The value is a choice: it is what a standard
deviation leaves of two requests. A single one would otherwise be no evidence at all."""
LONGEST_S: Final = 600.0
"""A turn further away than this is not told. The value is a choice: clients that wait longer for a
first token are rare, and load changes sooner."""


class LatePromise(NamedTuple):
    """What is promised instead of the objectives that a request asked for.

    Attributes:
        turn_s: from then on it is kept like any promise.
        deadline_s: by when its first token is promised.
        slack: how many times its own TPOTs the promised ones are, at least 1.
    """

    turn_s: float
    deadline_s: float
    slack: float

    def has_come(self, now_s: float) -> bool:
        """Whether its turn has come, and it can still be kept."""
        return self.turn_s <= now_s < self.deadline_s


class AskedLoad:
    """Share of an engine's time that the requests of late ask for."""

    def __init__(self) -> None:
        self._last_s = 0.0
        self._work_s = 0.0

    def asked(self, work_s: float, now_s: float) -> None:
        """A request came that takes the engine so many seconds."""
        self._work_s = self._work_s * self._faded(now_s) + work_s
        self._last_s = now_s

    def share(self, now_s: float) -> float:
        """More than 1 in overload."""
        return self._work_s * self._faded(now_s) / LOAD_MEMORY_S

    def _faded(self, now_s: float) -> float:
        return math.exp(min(self._last_s - now_s, 0.0) / LOAD_MEMORY_S)


class TurnRate:
    """How fast requests get their first token that asked for a promise and got none.

    Attributes:
        waited_s: seconds for which some of them waited, of late.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._served = 0.0
        self._squares = 0.0

    def waited(self, seconds: float) -> None:
        """For so long some of them waited."""
        kept = math.exp(-seconds / MEMORY_S)
        self._served *= kept
        self._squares *= kept
        self.waited_s = self.waited_s * kept + seconds

    def served(self, tokens: int) -> None:
        """One of them, of so many prompt tokens, got its first token by what others left."""
        self._served += tokens
        self._squares += tokens * tokens

    def wait_s(self, tokens: float) -> float | None:
        """Seconds in which so many prompt tokens are served; None: that is not known.

        One standard deviation less counts than was served, as if requests were served in a Poisson
        process, and at least `LEAST` of it.
        """
        sure = max(self._served - math.sqrt(self._squares), LEAST * self._served)
        return tokens * self.waited_s / sure if sure > 0.0 else None


def work_s(model: StepTimeModel, step_tokens: int, prompt: int, answer: int, context: int) -> float:
    """Seconds of an engine's time that a request takes, its share of full steps.

    Args:
        step_tokens: tokens of a full step.
        prompt: tokens of its prompt that are to be computed.
        answer: tokens of its answer.
        context: KV tokens that one of these reads on average.
    """
    token_s = model.predict_s(step_tokens) / step_tokens
    return (prompt + answer) * token_s + answer * context * model.kv_s


def soonest(promised: Callable[[float, float], bool], lone_s: float) -> tuple[float | None, float]:
    """Seconds to the first token, the fewest that could be promised now, and how many times the
    TPOT beside it; None: there is no time.

    Args:
        promised: whether a time and a multiple of the TPOT could be promised.
        lone_s: seconds without other work.
    """
    for slack in SLACKS:

        def at(in_s: float, slack: float = slack) -> bool:
            return promised(in_s, slack)

        found_s = shortest_s(at, lone_s)
        if found_s is not None:
            return found_s, slack
    return None, SLACKS[0]


def expected_wait_s(
    soonest_s: float | None, load: float, rate: TurnRate, tokens: float
) -> float | None:
    """Seconds until a request is expected to be served; None: nobody knows.

    Args:
        soonest_s: seconds to its first token beside what is promised now; None: there is no time.
        load: share of the engine's time that is asked for, `AskedLoad`. Behind requests that are
            served first and take this share, a wait is 1 / (1 - load) times as long.
        rate: what was left of late.
        tokens: prompt tokens that are served before its first token, its own included.
    """
    by_rate_s = rate.wait_s(tokens)
    if soonest_s is None or load >= FULL:
        return by_rate_s
    by_load_s = soonest_s / (1.0 - load)
    if by_rate_s is not None:
        return max(by_load_s, by_rate_s)
    return by_load_s if rate.waited_s <= by_load_s else None


def late_promise(
    now_s: float, expected_s: float, slack: float, latest_s: float = INFINITY
) -> LatePromise | None:
    """What is promised to a request that is expected to wait so long; None: that is too long.

    ``latest_s``: it does not wait beyond that.
    """
    wait_s = MARGIN * expected_s
    if wait_s > min(LONGEST_S, latest_s - now_s):
        return None
    return LatePromise(now_s + TURN * wait_s, now_s + wait_s, slack)
