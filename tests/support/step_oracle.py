# SPDX-License-Identifier: Apache-2.0
"""Whether some schedule keeps every objective of a few requests, found by trying schedules.

The search makes the steps that an engine could make, one after the other, until every answer has
ended. It knows nothing of budgets, rates or tiers, so it shows what admission loses by those. All
times are whole units, so a comparison is exact. Lengths of answers are known.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

NEVER = 1 << 40
"""Units: a deadline that no schedule reaches, for requests without a TTFT or a TPOT."""
MOST_STATES = 10_000
"""States of one search, beyond which it gives up: one search then takes about a second."""


@dataclass(frozen=True)
class Engine:
    """What a step costs and holds.

    A step of n tokens takes ``max(flat, fixed + n)`` units, like `StepTimeModel`.

    Attributes:
        flat: units of a step that is bound by reading the weights.
        fixed: units of a step that computes, besides one for each token.
        most: tokens of one step at most.
        blocks: KV blocks.
        block_size: tokens of a block.
        seats: requests that may have begun and not ended.
    """

    flat: int
    fixed: int
    most: int
    blocks: int = NEVER
    block_size: int = 1
    seats: int = NEVER

    def step(self, tokens: int) -> int:
        """Units that a step takes."""
        return max(self.flat, self.fixed + tokens)

    @property
    def constrained(self) -> bool:
        """Whether memory or seats may be too few."""
        return self.blocks < NEVER or self.seats < NEVER


@dataclass(frozen=True)
class Job:
    """A request as it stands now. Times are units from now.

    Attributes:
        prompt: tokens of its prompt.
        left: those still to compute; 0 once the first token is out.
        emitted: tokens of its answer that are out.
        length: tokens of its answer.
        tpot: units per token; `NEVER` without an objective.
        window: tokens of a TPOT window.
        due: before the first token, its deadline; then the last instant for the end of the open
            window.
    """

    prompt: int
    left: int
    emitted: int
    length: int
    tpot: int
    window: int
    due: int

    def cuts(self) -> list[int]:
        """Tokens that end a window, counted from 1, as `core.attainment` cuts an answer: the first
        token, then every ``window``-th; a tail joins the last window."""
        gaps = self.length - 1
        windows = max(1, gaps // self.window)
        return [1 + self.window * i for i in range(windows)] + ([self.length] if gaps else [])


def begun_job(
    prompt: int, length: int, tpot: int, window: int, token_times: Sequence[int], now: int
) -> Job:
    """A request whose tokens so far came at these times (at least one, and not all)."""
    emitted = len(token_times)
    job = Job(prompt, 0, emitted, length, tpot, window, 0)
    cuts = job.cuts()
    following = bisect_left(cuts, emitted + 1)
    size = cuts[following] - cuts[following - 1]
    due = token_times[cuts[following - 1] - 1] + size * tpot - now
    return Job(prompt, 0, emitted, length, tpot, window, min(due, NEVER))


State = tuple[tuple[int, ...], tuple[int, ...], int]
"""Prompt tokens left and answer tokens emitted of each request, and the open prompt or -1."""

MEMORY: type[dict[State, list[tuple[int, ...]]]] = dict
"""What a search remembers failed states in."""


class StepOracle:
    """Searches the schedules of one engine.

    Args:
        engine: what a step costs and holds.
        every_fill: try every way to spread the tokens of a step over prompts. Otherwise prompts are
            computed one after the other, all but their last token. That loses no schedule where
            memory and seats suffice: the tokens of prompts can be exchanged so that those of the
            prompt that ends first come first, and no step changes its length.
        most_states: see `MOST_STATES`.
    """

    def __init__(
        self, engine: Engine, *, every_fill: bool | None = None, most_states: int = MOST_STATES
    ) -> None:
        self.engine = engine
        self.every_fill = engine.constrained if every_fill is None else every_fill
        self.most_states = most_states
        self._least = cache(self._least_uncached)

    def _least_uncached(self, tokens: int, steps: int) -> int:
        """Units that so many tokens take in at least so many steps, at best."""
        steps = max(steps, -(-tokens // self.engine.most))
        if not steps:
            return 0
        # A step's time is convex in its tokens, so steps of like size take least; and more steps
        # than are needed never take less.
        small, larger = divmod(tokens, steps)
        return larger * self.engine.step(small + 1) + (steps - larger) * self.engine.step(small)

    def feasible(self, jobs: Sequence[Job]) -> bool | None:
        """Whether some schedule keeps every objective of all; None: not found out."""
        search = _Search(self, jobs)
        found = search.run()
        return None if not found and search.given_up else found

    def best_sets(self, forced: Sequence[Job], offered: Sequence[Job]) -> list[tuple[int, ...]]:
        """The sets of ``offered`` requests, as ascending positions, that can be served beside
        ``forced`` ones, none a subset of another.

        Raises:
            TimeoutError: a search gave up.
        """
        found: list[tuple[int, ...]] = []
        members = range(len(offered))
        subsets = [tuple(i for i in members if bits >> i & 1) for bits in range(1 << len(members))]
        for subset in sorted(subsets, key=len, reverse=True):
            if any(set(subset) <= set(larger) for larger in found):
                continue
            kept = self.feasible([*forced, *(offered[i] for i in subset)])
            if kept is None:
                raise TimeoutError("the search gave up")
            if kept:
                found.append(subset)
        return found


class _Search:
    """One search: depth first, with memory of what has failed."""

    def __init__(self, oracle: StepOracle, jobs: Sequence[Job]) -> None:
        self.engine, self.oracle = oracle.engine, oracle
        self.jobs = tuple(jobs)
        self.cuts = [job.cuts() for job in jobs]
        self.times = [oracle.engine.step(n) for n in range(oracle.engine.most + 1)]
        self.failed = MEMORY()
        self.states = 0
        self.given_up = False

    def run(self) -> bool:
        left = tuple(job.left for job in self.jobs)
        emitted = tuple(job.emitted for job in self.jobs)
        return self._search((left, emitted, -1), tuple(job.due for job in self.jobs))

    def _search(self, state: State, slack: tuple[int, ...]) -> bool:
        """``slack``: units until the next instant at which each request must have got further."""
        left, emitted, _ = state
        if all(count == job.length for count, job in zip(emitted, self.jobs, strict=True)):
            return True
        if self.given_up or self._hopeless(left, emitted, slack):
            return False
        # A state with no more slack than one that has failed fails: the other could have idled.
        failed = self.failed.setdefault(state, [])
        if any(all(a <= b for a, b in zip(slack, other, strict=True)) for other in failed):
            return False
        self.states += 1
        if self.states > self.oracle.most_states:
            self.given_up = True
            return False
        for after, units, served in self._steps(left, emitted, state[2]):
            rest = self._slack_after(after, emitted, slack, units, served)
            if rest is not None and self._search(after, rest):
                return True
        if not self.given_up:
            failed[:] = [
                other
                for other in failed
                if not all(a <= b for a, b in zip(other, slack, strict=True))
            ]
            failed.append(slack)
        return False

    def _slack_after(
        self,
        after: State,
        emitted: tuple[int, ...],
        slack: tuple[int, ...],
        units: int,
        served: tuple[bool, ...],
    ) -> tuple[int, ...] | None:
        """The slack of each request when a step has ended; None where an objective is missed.

        ``served``: whether a request got a token of its answer.
        """
        rest = []
        for i, job in enumerate(self.jobs):
            count = after[1][i]
            remaining = NEVER if slack[i] == NEVER else slack[i] - units
            if emitted[i] == job.length:
                rest.append(0)
                continue
            if served[i]:
                place = bisect_left(self.cuts[i], count)
                if self.cuts[i][place] == count:  # a window ends here, and the next begins
                    if remaining < 0:
                        return None
                    if count == job.length:
                        rest.append(0)
                        continue
                    size = self.cuts[i][place + 1] - count
                    remaining = min(size * job.tpot, NEVER)
            if remaining <= 0:
                return None
            rest.append(min(remaining, NEVER))
        return tuple(rest)

    def _steps(
        self, left: tuple[int, ...], emitted: tuple[int, ...], opened: int
    ) -> Iterator[tuple[State, int, tuple[bool, ...]]]:
        """Every step that may be of use: what is left after it, its units, and the requests that
        get a token of their answer. Steps that serve more come first."""
        engine, jobs = self.engine, self.jobs
        members = range(len(jobs))
        decoding = [i for i in members if not left[i] and emitted[i] < jobs[i].length]
        found = []
        for fill, now_open in self._fills(left, opened):
            prompt_tokens = sum(fill)
            for chosen in product((1, 0), repeat=len(decoding)):
                tokens = prompt_tokens + sum(chosen)
                if not 0 < tokens <= engine.most:
                    continue
                after_left = tuple(left[i] - fill[i] for i in members)
                free = tokens < engine.most and self.times[tokens + 1] == self.times[tokens]
                if free and not self.oracle.every_fill and any(n > 1 for n in after_left):
                    continue  # one token more of a prompt costs nothing
                count = list(emitted)
                served = [False] * len(jobs)
                for i, takes in zip(decoding, chosen, strict=True):
                    count[i] += takes
                    served[i] = bool(takes)
                for i in members:
                    if fill[i] and not after_left[i]:
                        count[i] += 1
                        served[i] = True
                after = after_left, tuple(count), now_open
                if engine.constrained and not self._fits(after, emitted):
                    continue
                found.append((after, self.times[tokens], tuple(served)))
        found.sort(key=lambda step: (-sum(step[2]), -step[1]))
        yield from found

    def _fills(self, left: tuple[int, ...], opened: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Ways to spread tokens over prompts, with the prompt that is then open."""
        most = self.engine.most
        if self.oracle.every_fill:
            for fill in product(*(range(min(n, most) + 1) for n in left)):
                if sum(fill) <= most:
                    yield fill, -1
            return
        # All but the last token of one prompt are computed before the next one is begun.
        for ending in product(*((0, 1) if n else (0,) for n in left)):
            given = [n if ends else 0 for n, ends in zip(left, ending, strict=True)]
            if opened < 0 or ending[opened]:
                yield from self._opening(given, left)
            elif not any(ends and n > 1 for n, ends in zip(left, ending, strict=True)):
                wanted = left[opened] - 1
                for tokens in range(min(wanted, most - sum(given)) + 1):
                    given[opened] = tokens
                    if tokens < wanted:
                        yield tuple(given), opened
                    else:
                        yield from self._opening(given, left)
                given[opened] = 0

    def _opening(
        self, fill: list[int], left: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], int]]:
        """``fill``, and the same with further prompts all but whole, and one of them in part."""
        untouched = [i for i, n in enumerate(left) if n > 1 and not fill[i]]
        for whole in product((0, 1), repeat=len(untouched)):
            given = list(fill)
            for i, takes in zip(untouched, whole, strict=True):
                given[i] = takes * (left[i] - 1)
            room = self.engine.most - sum(given)
            if room < 0:
                continue
            yield tuple(given), -1
            for i, takes in zip(untouched, whole, strict=True):
                for tokens in range(1, 0 if takes else min(left[i] - 2, room) + 1):
                    part = list(given)
                    part[i] = tokens
                    yield tuple(part), i

    def _fits(self, after: State, emitted_before: tuple[int, ...]) -> bool:
        """Whether memory and seats suffice for a step that leaves requests like this. Those that
        end in it hold theirs until it has ended."""
        left, emitted, _ = after
        blocks = seats = 0
        for i, job in enumerate(self.jobs):
            if emitted_before[i] == job.length:
                continue
            computed = job.prompt - left[i] + max(emitted[i] - 1, 0)
            if computed:
                seats += 1
                blocks += math.ceil(computed / self.engine.block_size)
        return blocks <= self.engine.blocks and seats <= self.engine.seats

    def _hopeless(
        self, left: tuple[int, ...], emitted: tuple[int, ...], slack: tuple[int, ...]
    ) -> bool:
        """Whether not even the steps that take least can compute in time what is due."""
        due: list[tuple[int, int, int, int]] = []
        for i, job in enumerate(self.jobs):
            at, count = slack[i], emitted[i]
            if count == job.length:
                continue
            for cut in self.cuts[i]:
                if cut <= count:
                    continue
                if at >= NEVER:
                    break
                prompt = left[i] if not emitted[i] else 0
                answer = cut - emitted[i] - (1 if prompt else 0)
                due.append((at, i, prompt + answer, cut - emitted[i]))
                place = bisect_left(self.cuts[i], cut)
                if place + 1 < len(self.cuts[i]):
                    at += (self.cuts[i][place + 1] - cut) * job.tpot
        due.sort()
        tokens = [0] * len(self.jobs)
        total = steps = 0
        for at, i, needed, rounds in due:
            total += needed - tokens[i]
            tokens[i] = needed
            steps = max(steps, rounds)
            if self.oracle._least(total, steps) > at:
                return True
        return False
