# SPDX-License-Identifier: Apache-2.0
"""Whether speculation helps on a model, from measured runs.

A run is one way to decode the answers of some requests at once. The ways take turns at the same
prompts, and a way is compared with plain decoding of the same turn. All figures are medians over
the turns. Nothing is predicted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from statistics import median
from typing import Final, NamedTuple

SHOWN: Final = 0.01
"""Least noise of a speedup that is assumed. Speedups are shown with two decimals, and no less than
the last of them is called a difference."""
UNSTEADY: Final = 0.15
"""Noise of the time of a plain token, as a share of it, from which on the machine is called busy. A
plain step does the same work in every turn. A convention: on a machine of its own, turns of the
built-in models differ by less."""


class Kind(StrEnum):
    """How a run decodes.

    ``PLAIN``: without drafts. ``CHAIN``: a fixed number of draft tokens, one behind the other.
    ``TREE``: as many, as the likeliest nodes of a tree. ``SERVED``: as the scheduler chooses.
    """

    PLAIN = "plain"
    CHAIN = "chain"
    TREE = "tree"
    SERVED = "served"


class Way(NamedTuple):
    """A way to decode; ``length`` is the number of draft tokens that each request verifies in a
    step, 0 where the kind does not fix it."""

    kind: Kind
    length: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """The steps of one way in one turn in which all requests decoded, and nothing else was done.

    Attributes:
        requests: how many decoded at once.
        turn: number of the turn; runs of one turn had the same prompts.
        way: how they were decoded.
        steps: how many, at least 1.
        tokens: that all requests got.
        verified: draft tokens that were verified.
        drafted: steps in which at least one was.
        seconds: of the steps, drafting included.
        drafting_s: of it, spent on drafting.
    """

    requests: int
    turn: int
    way: Way
    steps: int
    tokens: int
    verified: int
    drafted: int
    seconds: float
    drafting_s: float

    @property
    def token_s(self) -> float:
        """Seconds from one token of a request to its next one, on average."""
        return self.seconds * self.requests / self.tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all requests in a second."""
        return self.tokens / self.seconds

    @property
    def accepted(self) -> float:
        """Draft tokens that were accepted of a request in a step, on average."""
        return self.tokens / (self.steps * self.requests) - 1.0

    @property
    def step_s(self) -> float:
        """Seconds of a step without drafting, on average."""
        return (self.seconds - self.drafting_s) / self.steps


class Estimate(NamedTuple):
    """A median over turns; ``noise`` is half of what turns differ by.

    A quarter of the turns, rounded down, is left out at each end, so that one bad minute does not
    count as noise. Of three turns all are used, and enclose the true median 3 times in 4 (1 - 2 /
    2^3). Of seven the second to the sixth are, and enclose it 7 times in 8 (1 - 2 (1 + 7) / 2^7).
    """

    value: float
    noise: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        ordered, cut = sorted(values), len(values) // 4
        return cls(float(median(ordered)), (ordered[-1 - cut] - ordered[cut]) / 2.0)


class Effect(Enum):
    """Whether a speedup is above 1, below 1, or within the noise of 1."""

    HELPS = 1
    UNCLEAR = 0
    COSTS = -1

    @classmethod
    def of(cls, speedup: Estimate) -> Effect:
        noise = max(speedup.noise, SHOWN)
        if speedup.value - noise > 1.0:
            return cls.HELPS
        return cls.COSTS if speedup.value + noise < 1.0 else cls.UNCLEAR


@dataclass(frozen=True, slots=True)
class Gain:
    """What one way to decode with drafts is worth.

    Attributes:
        way: which one.
        speedup: tokens per second over those of plain decoding.
        token_s: seconds from one token of a request to its next one.
        accepted: draft tokens that were accepted of a request in a step.
        drafting_s: seconds of drafting in a step.
        verify_s: by how much a draft token makes the step that verifies it longer, seconds;
            None: none was verified.
        drafted: share of the steps that verified drafts.
    """

    way: Way
    speedup: Estimate
    token_s: float
    accepted: float
    drafting_s: float
    verify_s: Estimate | None
    drafted: float


@dataclass(frozen=True, slots=True)
class Benefit:
    """What speculation is worth with a number of requests at once.

    Attributes:
        requests: that number.
        turns: over which medians were taken.
        plain_s: seconds of a token without drafts.
        plain_tokens_per_s: of all requests, without drafts.
        chains: fixed lengths, the shortest first.
        trees: as `chains`; empty: none was measured.
        served: what the scheduler makes of it; None: not measured.
    """

    requests: int
    turns: int
    plain_s: Estimate
    plain_tokens_per_s: float
    chains: tuple[Gain, ...]
    trees: tuple[Gain, ...] = ()
    served: Gain | None = None

    @property
    def best_chain(self) -> Gain:
        """The fastest fixed length."""
        return max(self.chains, key=lambda gain: gain.speedup.value)

    @property
    def best(self) -> Gain:
        """The fastest of all fixed drafts."""
        return max((*self.chains, *self.trees), key=lambda gain: gain.speedup.value)

    @property
    def unsteadiness(self) -> float:
        """Noise of the time of a plain token, as a share of it."""
        return self.plain_s.noise / self.plain_s.value

    @property
    def is_unsteady(self) -> bool:
        """Whether the machine was too busy for a judgement."""
        return self.unsteadiness > UNSTEADY

    @property
    def effect(self) -> Effect:
        """Whether the fastest fixed drafts help; unclear on a busy machine."""
        return Effect.UNCLEAR if self.is_unsteady else Effect.of(self.best.speedup)


MIN_TURNS: Final = 2
"""Turns below which nothing is known of the noise."""


def benefits(runs: Iterable[Run]) -> list[Benefit]:
    """The benefit for each number of requests, ascending, of turns in which every way was run.

    Numbers of requests with fewer than `MIN_TURNS` such turns are left out.
    """
    turns: dict[int, dict[int, dict[Way, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        turns[run.requests][run.turn][run.way] = run
    found = []
    for requests, by_turn in sorted(turns.items()):
        ways = {way for turn in by_turn.values() for way in turn}
        whole = [turn for turn in by_turn.values() if turn.keys() == ways]
        if len(whole) >= MIN_TURNS:
            found.append(_benefit(requests, ways, whole))
    return found


def _benefit(requests: int, ways: Iterable[Way], turns: Sequence[Mapping[Way, Run]]) -> Benefit:
    plain = [turn[Way(Kind.PLAIN)] for turn in turns]
    gains = [
        _gain(way, [turn[way] for turn in turns], plain)
        for way in sorted(ways)
        if way.kind != Kind.PLAIN
    ]

    def of(kind: Kind) -> tuple[Gain, ...]:
        return tuple(gain for gain in gains if gain.way.kind == kind)

    return Benefit(
        requests,
        len(turns),
        Estimate.of([run.token_s for run in plain]),
        median(run.tokens_per_s for run in plain),
        of(Kind.CHAIN),
        of(Kind.TREE),
        next(iter(of(Kind.SERVED)), None),
    )


def _gain(way: Way, runs: Sequence[Run], plain: Sequence[Run]) -> Gain:
    pairs = list(zip(runs, plain, strict=True))
    verify = [
        (run.step_s - alone.step_s) * run.steps / run.verified
        for run, alone in pairs
        if run.verified
    ]
    return Gain(
        way,
        Estimate.of([run.tokens_per_s / alone.tokens_per_s for run, alone in pairs]),
        median(run.token_s for run in runs),
        median(run.accepted for run in runs),
        median(run.drafting_s / run.steps for run in runs),
        Estimate.of(verify) if verify else None,
        sum(run.drafted for run in runs) / sum(run.steps for run in runs),
    )
