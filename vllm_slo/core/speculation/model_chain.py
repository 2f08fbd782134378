# SPDX-License-Identifier: Apache-2.0
"""Which chain of draft models is fastest now: SpecRouter's choice (section 4.2, Algorithm 1).

A pool of models, the cheapest first, and the served one, the target. A chain is an ascending tuple
of places in the pool; the empty one is plain decoding. What a chain proposes is how its last model
would go on: alone it drafts a tree, behind others it verifies what they guess. So chains that end
in the same model propose the same tokens, and differ in what these cost.

Equation 7 is then: seconds of drafting and of the target's pass, over the tokens that come out of
it. It is worked out for every chain, depth, width and window before each step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_slo.core.speculation.chain_costs import (
    OCTAVES,
    Edges,
    Floats,
    Ints,
    PassTimes,
    drafting_times,
    lifted,
    look_ahead,
)
from vllm_slo.core.speculation.chain_learning import Bias, Chain, Mood, Probes, Surprise
from vllm_slo.core.speculation.draft_shape import DraftShape
from vllm_slo.core.speculation.tree_budget import Verifying, fastest_shapes
from vllm_slo.core.step_time.model import StepTimeModel

MAX_MODELS = 4
"""Of a pool: each model more doubles the chains."""
LONGEST = 4.0
"""A step is taken for at most so many times what was predicted of it."""


class DraftLoad(NamedTuple):
    """What is to be drafted for.

    Attributes:
        active: requests that decode.
        context: KV tokens that they read.
        deepest: tokens ahead at most.
        widths: candidates for each token to choose from, ascending.
        behind: how many of them need more tokens than others to keep an objective.
        min_depth: tokens ahead at least, where there is a model to guess them.
        begun: how many of them are drafted for for the first time.
    """

    active: int
    context: int
    deepest: int
    widths: tuple[int, ...] = (1,)
    behind: int = 0
    min_depth: int = 0
    begun: int = 0


class Plan(NamedTuple):
    """What is to be drafted after a step, and what is expected of it.

    Attributes:
        chain: places in the pool; empty: nothing is drafted.
        depth: tokens ahead; 0: none.
        width: candidates for each of them.
        window: tokens that the first of several models guesses in a round.
        drafting_s: seconds of drafting, what models lack of the requests included.
        step_s: seconds of the step that verifies, drafting included, if all requests have trees.
        tokens: that each of them gets of it.
        requests: how many they are.
        fastest_s: seconds per token that the fastest chain takes, if this measures another one at
            the expense of the account for it; else 0.
    """

    chain: Chain = ()
    depth: int = 0
    width: int = 1
    window: int = 1
    drafting_s: float = 0.0
    step_s: float = 0.0
    tokens: float = 1.0
    requests: int = 0
    fastest_s: float = 0.0

    def lost_s(self, took_s: float, tokens: float) -> float:
        """Seconds that the step took longer than the fastest chain does for as many tokens, where
        that is charged."""
        return took_s - tokens * self.fastest_s if self.fastest_s else 0.0


class _Ahead(NamedTuple):
    """What drafting is predicted to take.

    Attributes:
        of: the load that it is for: requests, widths and depth.
        widths: of these, (w,).
        drafting_s, windows: see `drafting_times`; the first is of the first chain that drafts.
    """

    of: tuple[int, tuple[int, ...], int]
    widths: Ints
    drafting_s: Floats
    windows: Ints


class _Outlook(NamedTuple):
    """What each chain is predicted to do at its best; lists by chain.

    Attributes:
        time_s: T_eff, corrected by how predictions turned out; infinite where it cannot be chosen.
        shapes: [depth, width, tokens, seconds of the step].
        ahead: what drafting takes.
    """

    time_s: list[float]
    shapes: list[list[float]]
    ahead: _Ahead


class ModelChains:
    """Chooses the chain, and how it drafts, from what passes take and what was accepted.

    A chain replaces the one at work where it is predicted to be faster by a margin and soon makes
    up for what its models have to catch up on. What is not at work is measured anew from time to
    time, at the expense of an account that a share of the time goes to; see `Probes`. Nothing is
    drawn by chance, and no clock is read.

    Args:
        pool: names of the draft models, the cheapest and least capable first.
        max_depth, max_width: the largest tree there is.
        path_tokens: what another path of a tree costs the target besides its nodes, in tokens.
        most_beams: of one pass of a model.

    Attributes:
        shapes: what the proposals of each model have been like.
        times: T_i of each model.
        edges: alpha(i, j).

    Raises ValueError if the pool is empty or too large. The first call of a method compiles it
    where numba's cache is empty, which takes some seconds.
    """

    MARGIN = 0.03
    """A chain replaces another if it is faster by more than this share."""
    PAYBACK = 32
    """Steps within which it has to make up for what its models lack."""
    PROBE_DEPTH = 3
    """Tokens ahead at least where a chain is measured, to tell what its proposals are like."""
    TRY_EVERY = 32
    """Steps after which the chain at work drafts deeper once, or wider."""
    TREES = 32.0
    """Trees after which an old one counts for 1/e in what is typical: a text that repeats itself
    may be guessed far ahead, and the next sentence not."""
    HALF_LIFE = 64
    """Steps after which what was seen counts half, if nothing more is seen: how alike models are
    tells the rest."""
    AGE_EVERY = 16
    OUT_OF_DATE = 0.1
    """What edges count for when texts turn out to be of another kind."""
    FRESH_SHARE = 1 / 16
    """Of each step in the mean of the tokens that a request gets."""
    USE_SHARE = 0.05
    RECOVERY = 0.004
    """Of the use, in each step that drafts nothing."""

    def __init__(
        self,
        pool: Sequence[str],
        max_depth: int,
        max_width: int,
        path_tokens: float = 0.0,
        most_beams: int = 1 << 30,
    ) -> None:
        models = len(pool)
        if not 1 <= models <= MAX_MODELS:
            raise ValueError(f"pool: {models} models; 1 to {MAX_MODELS} can be chained")
        self.pool = tuple(pool)
        self._known = np.zeros((models, 3, OCTAVES))
        self.shapes = [DraftShape(max_depth, max_width, memory=self.TREES) for _ in pool]
        self.times = [PassTimes(known=known) for known in self._known]
        self.edges = Edges(models)
        self._max_depth = max_depth
        self._path_tokens = path_tokens
        self._most_beams = most_beams
        self._chains: list[Chain] = [
            chain
            for length in range(models + 1)
            for chain in itertools.combinations(range(models), length)
        ]
        self._index = {chain: c for c, chain in enumerate(self._chains)}
        drafting = self._chains[1:]
        self._places = np.array([[*c, *[-1] * (models - len(c))] for c in drafting], dtype=np.int64)
        self._owner = np.array([chain[-1] for chain in drafting], dtype=np.int64)
        self._typical = np.zeros((models, max_depth, max_width))
        self._there = [True] * models
        self._open = [True] * len(self._chains)
        self._bias = Bias(len(self._chains))
        self._mood = Mood()
        self._surprise = Surprise()
        self._probes = Probes(self._chains)
        self._lacking = [0.0] * models
        self._ahead: _Ahead | None = None
        # By the chain at work and turn: the ways to draft that are looked at anew.
        self._turns = [
            [np.array(sorted({way, current} - {-1})) for way in range(len(drafting))]
            for current in range(-1, len(drafting))
        ]
        self._proposing: set[int] = set()
        self._current = 0
        self._likely = 1
        self._steps = 0
        self._tries = 0
        self._use = 1.0
        self._fresh = 1.0
        self._context = 0
        self._step_s = 0.0
        self._now_s = -math.inf

    # Who is there.

    def drop(self, model: int) -> None:
        """A model has failed or left: no chain has it any more."""
        self._there[model] = False
        self._reopen()

    def restore(self, model: int) -> None:
        """A model is there again; it is measured anew."""
        self._there[model] = True
        self._probes.renew(model)
        self._reopen()

    def _reopen(self) -> None:
        self._ahead = None
        self._open = [all(self._there[model] for model in chain) for chain in self._chains]
        if not self._open[self._current]:
            self._current = 0
        if not self._open[self._likely]:
            self._likely = next((c for c, is_open in enumerate(self._open) if c and is_open), 0)

    @property
    def chain(self) -> Chain:
        """The chain at work, measuring others aside."""
        return self._chains[self._current]

    @property
    def likely(self) -> Chain:
        """The chain at work, or where nothing is drafted the one that would be; empty: no model is
        there."""
        return self._chains[self._current or self._likely]

    def label(self, chain: Chain) -> str:
        """The models of a chain by name."""
        return " > ".join(self.pool[model] for model in chain)

    # What was seen.

    def used(self, share: float) -> None:
        """Tell what share of the nodes that would have paid a step had room for: objectives may
        leave less, and what is not verified is drafted in vain."""
        self._use += self.USE_SHARE * (min(share, 1.0) - self._use)

    def observe_step(self, plan: Plan, took_s: float, tokens: float) -> None:
        """Take in how a step turned out.

        One with prompts in it, or with trees for some requests only, tells nothing: leave it out.

        Args:
            plan: with which its trees were drafted, or nothing was.
            took_s: seconds of verification and of drafting with the plan.
            tokens: of each request, on average.
        """
        if not (0.0 < took_s < math.inf and 0.0 < tokens < math.inf and plan.step_s > 0.0):
            return
        c, yielded = self._index[plan.chain], tokens / plan.tokens
        off = yielded / self._bias.yielded(c) - 1.0
        if plan.chain:
            self._mood.observe(tokens, plan.tokens, plan.requests)
        if plan.chain and self._surprise.observe(off, plan.requests):
            self._doubt()
        self._bias.observe(c, took_s / plan.step_s, yielded, plan.requests)
        self._fresh += self.FRESH_SHARE * (tokens - self._fresh)
        # By chance a step may yield so much that measuring cost nothing: that counts, too.
        charged_s = max(plan.lost_s(plan.step_s, plan.tokens), 0.0)
        self._probes.account_s += charged_s - plan.lost_s(took_s, tokens)

    def _doubt(self) -> None:
        """Texts are of another kind than before: what was seen hardly counts any more."""
        self._ahead = None
        for shape in self.shapes:
            shape.doubt()
        self.edges.age(self.OUT_OF_DATE)
        self._probes.doubt()

    def drafting_s(self, chain: Chain, requests: int, width: int) -> Floats:
        """(max_depth,) seconds until trees of a chain that drafts are 1, 2, .. deep; infinite where
        it is not for such."""
        c = self._index[chain] - 1
        times_s, _ = drafting_times(
            self._places[c : c + 1],
            self.edges.alphas(),
            self._known,
            max(requests, 1),
            self._fresh,
            self._most_beams,
            np.array([width]),
            self._max_depth,
        )
        result: Floats = times_s[0, 0]
        return result

    # The decision.

    def choose(self, load: DraftLoad, model: StepTimeModel, now_s: float) -> Plan:
        """What to draft after this step.

        Args:
            load: for whom.
            model: expected step times without drafting.
            now_s: monotonic.
        """
        self._pass_time(now_s)
        if load.begun:
            self._mood.renew(min(load.begun / load.active, 1.0))
        if not load.active or not load.deepest or not any(self._there):
            plan = Plan(width=load.widths[0], requests=load.active)
        else:
            everybody = self._outlook(load, model)
            depth, width = self._decide(everybody, load, model)
            c, is_charged = self._probes.next(
                everybody.time_s,
                self._current,
                load.active,
                lambda c, steps: self._probe_s(c, steps, everybody, load),
            )
            if c:
                plan = self._probe_plan(c, is_charged, everybody, load, model)
            else:
                depth, width = self._tried(depth, width, load)
                plan = self._plan(self._current, depth, width, everybody, load, model)
        self._note(plan, load)
        return plan

    def _pass_time(self, now_s: float) -> None:
        """A step has passed, and what was seen ages."""
        passed_s = min(max(now_s - self._now_s, 0.0), LONGEST * self._step_s)
        self._probes.pass_time(passed_s, self._step_s)
        self._now_s = now_s
        self._steps += 1
        if self._steps % self.AGE_EVERY == 0:
            kept = 0.5 ** (self.AGE_EVERY / self.HALF_LIFE)
            for place in {*range(len(self.shapes))} - self._proposing:
                self.shapes[place].age(kept)
            self._proposing.clear()
            self.edges.age(kept)
            self._bias.age(kept)

    def _outlook(self, load: DraftLoad, model: StepTimeModel) -> _Outlook:
        """What the chains are predicted to do where all requests have trees."""
        alphas = self.edges.alphas()
        for place, shape in enumerate(self.shapes):
            if shape.is_guess:
                shape.assume(float(alphas[place, -1]))
            self._typical[place] = lifted(shape.typical, self._mood.odds)
        return self._rated(self._look_ahead(load, alphas), load.active, load, model)

    def _look_ahead(self, load: DraftLoad, alphas: Floats) -> _Ahead:
        """What drafting takes: of the chain at work and another one as predicted now, of the rest
        as predicted in the last steps with the same load."""
        ahead, of = self._ahead, (load.active, load.widths, load.deepest)
        known = self._places, alphas, self._known, load.active, self._fresh, self._most_beams
        if ahead is None or ahead.of != of:
            widths, deepest = np.array(load.widths), min(load.deepest, self._max_depth)
            ahead = _Ahead(of, widths, *drafting_times(*known, widths, deepest))
            self._ahead = ahead
        else:
            ways = self._turns[self._current][self._steps % len(self._places)]
            look_ahead(ways, *known, ahead.widths, ahead.drafting_s, ahead.windows)
        return ahead

    def _rated(self, ahead: _Ahead, behind: int, load: DraftLoad, model: StepTimeModel) -> _Outlook:
        """The outlook where only so many requests have trees."""
        least = min(load.min_depth, ahead.drafting_s.shape[2])
        step = self._verifying(behind, load, model)
        shapes: list[list[float]] = fastest_shapes(
            self._typical,
            self._owner,
            ahead.widths,
            ahead.drafting_s,
            least,
            step,
            model.lines(),
        ).tolist()
        plain_s = model.predict_s(load.active, load.context)
        shapes.insert(0, [0.0, load.widths[0], 1.0, plain_s])
        time_s = [
            shape[3] / shape[2] * factor if is_open and shape[2] else math.inf
            for shape, is_open, factor in zip(shapes, self._open, self._bias.factors, strict=True)
        ]
        if least:
            time_s[0] = math.inf
        return _Outlook(time_s, shapes, ahead)

    def _verifying(self, behind: int, load: DraftLoad, model: StepTimeModel) -> Verifying:
        reading_s = model.kv_s * load.context
        return Verifying(load.active, behind, reading_s, self._use, self._path_tokens)

    def _decide(
        self, everybody: _Outlook, load: DraftLoad, model: StepTimeModel
    ) -> tuple[int, int]:
        """Choose the chain at work; the depth and width that it is to draft with.

        Where some are behind it is the chain with which they get their tokens soonest, if only they
        have trees; the trees are as large as either they or all together are served best by.
        """
        found = self._fastest(everybody, load)
        depth, width, *_ = everybody.shapes[found]
        if 0 < load.behind < load.active:
            hurried = self._rated(everybody.ahead, load.behind, load, model)
            other = self._fastest(hurried, load)
            if other:
                found, (depth, width, *_) = other, hurried.shapes[other]
                if everybody.time_s[other] < everybody.time_s[0]:
                    depth = max(depth, everybody.shapes[other][0])
                    width = max(width, everybody.shapes[other][1])
        self._current = found
        self._likely = found or min(range(1, len(self._chains)), key=everybody.time_s.__getitem__)
        return int(depth), int(width)

    def _fastest(self, outlook: _Outlook, load: DraftLoad) -> int:
        """The fastest chain, the one at work being preferred."""
        best, found = outlook.time_s[self._current], self._current
        for c, time_s in enumerate(outlook.time_s):
            if c != self._current and time_s < best:
                steps = self.PAYBACK * outlook.shapes[c][2]
                with_switch_s = time_s * (1.0 + self.MARGIN) + self._lacking_s(c, load) / steps
                if with_switch_s < best:
                    best, found = with_switch_s, c
        return found

    def _lacking_s(self, c: int, load: DraftLoad) -> float:
        """Seconds that a chain's models need for what they have not read of the requests."""
        took_s = 0.0
        for place in self._chains[c]:
            if self._lacking[place]:
                times = self.times[place]
                took_s += times.pass_s(load.active + self._lacking[place])
                took_s -= times.pass_s(load.active)
        return took_s

    def _tried(self, depth: int, width: int, load: DraftLoad) -> tuple[int, int]:
        """At times a deeper or a wider tree than the best."""
        self._tries += 1
        if depth and self._tries % self.TRY_EVERY == 0:
            return min(depth + 1, load.deepest, self._max_depth), width
        if depth and self._tries % self.TRY_EVERY == self.TRY_EVERY // 2:
            return depth, load.widths[-1]
        return depth, width

    def _probe_s(self, c: int, steps: int, outlook: _Outlook, load: DraftLoad) -> float:
        """Seconds that so many steps with a chain are expected to lose."""
        _, _, tokens, step_s = outlook.shapes[c]
        lost_s = max(step_s - tokens * outlook.time_s[self._current], 0.0)
        return steps * lost_s + self._lacking_s(c, load)

    def _probe_plan(
        self, c: int, is_charged: bool, outlook: _Outlook, load: DraftLoad, model: StepTimeModel
    ) -> Plan:
        """A step that measures a chain."""
        depth, width, *_ = outlook.shapes[c]
        depth = max(int(depth), min(self.PROBE_DEPTH, outlook.ahead.drafting_s.shape[2]))
        plan = self._plan(c, depth, int(width), outlook, load, model)
        return plan._replace(fastest_s=outlook.time_s[self._current] if is_charged else 0.0)

    def _plan(
        self,
        c: int,
        depth: int,
        width: int,
        outlook: _Outlook,
        load: DraftLoad,
        model: StepTimeModel,
    ) -> Plan:
        """A chain with a depth and a width, and what is expected of it."""
        if not c:
            plain_s = outlook.shapes[0][3]
            return Plan(width=load.widths[0], step_s=plain_s, requests=load.active)
        w = load.widths.index(width)
        known_depth, known_width, tokens, step_s = outlook.shapes[c]
        if (depth, width) != (known_depth, known_width):
            _, _, tokens, step_s = fastest_shapes(
                self._typical,
                self._owner[c - 1 : c],
                np.array([width]),
                outlook.ahead.drafting_s[c - 1 : c, w : w + 1, :depth],
                depth,
                self._verifying(load.active, load, model),
                model.lines(),
            )[0].tolist()
        lacking_s = self._lacking_s(c, load)
        return Plan(
            self._chains[c],
            depth,
            width,
            int(outlook.ahead.windows[c - 1, depth - 1]),
            float(outlook.ahead.drafting_s[c - 1, w, depth - 1]) + lacking_s,
            step_s + lacking_s,
            tokens,
            load.active,
        )

    def _note(self, plan: Plan, load: DraftLoad) -> None:
        """Remember what a plan measures, what it costs the account and who falls behind by it."""
        self._probes.account_s -= max(plan.lost_s(plan.step_s, plan.tokens), 0.0)
        if plan.chain:
            self._proposing.add(plan.chain[-1])
            self._probes.note(self._index[plan.chain])
        elif load.active:
            self._mood.pass_step()
            self._use = min(self._use + self.RECOVERY, 1.0)
        read = max(load.context - self._context, load.active)
        for place, lacking in enumerate(self._lacking):
            there = place in plan.chain
            self._lacking[place] = 0.0 if there else min(lacking + read, float(load.context))
        self._context = load.context
        self._step_s = plan.step_s or self._step_s
