# SPDX-License-Identifier: Apache-2.0
"""The choice of the fastest chain of draft models: SpecRouter, section 4.2 and algorithm 1.

See `chain_forecast` for what a chain is, and how its time per token is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from vllm_slo.core.arrays import Floats
from vllm_slo.core.speculation.chain_forecast import ChainForecasts, DraftLoad, Forecast
from vllm_slo.core.speculation.chain_learning import Chain, Predictability, Probes
from vllm_slo.core.step_time.model import StepTimeModel

MAX_MODELS = 4
"""Most models of a pool. Each further one doubles the number of chains."""


class Plan(NamedTuple):
    """What to draft after a step, and what is expected of it.

    Attributes:
        chain: places in the pool; empty: nothing is drafted.
        depth: of the trees; 0: nothing is drafted.
        width: of the trees.
        window: tokens that the first of several models guesses in a round.
        drafting_s: seconds of drafting, including those for tokens that models have not read yet.
        step_s: seconds of the step that verifies, drafting included, if all requests have trees.
        tokens: that the step is expected to yield of each request.
        requests: how many have trees.
    """

    chain: Chain = ()
    depth: int = 0
    width: int = 1
    window: int = 1
    drafting_s: float = 0.0
    step_s: float = 0.0
    tokens: float = 1.0
    requests: int = 0


class ModelChains:
    """Chooses the chain of each step, and the depth and width of its trees, from measured times of
    passes and measured acceptance.

    A chain replaces the current one as soon as staying has lost as much time as changing costs: the
    models of another chain first have to read the tokens that they missed. This is the rule of ski
    rental (Karlin et al., "Competitive snoopy caching", 1988). Other chains are measured now and
    then, in probes that an account pays for; see `Probes`. Nothing is random, and no clock is read.

    Args:
        pool: names of the draft models, the cheapest and least capable first.
        max_depth, max_width: of the largest tree.
        path_tokens: what another path of a tree costs the target besides its nodes, in tokens.
        most_beams: most beams of one pass of a model.

    Attributes:
        shapes: what the trees of each model are typically like.
        times: T_i of each model.
        edges: alpha(i, j).

    Raises ValueError if the pool is empty or too large. The first call of a method compiles it
    where numba's cache is empty, which takes some seconds.
    """

    TRY_EVERY = 32
    """Steps after which the trees are as wide as they may be, once: chances of siblings that are
    never drafted are not learnt, and count as 0. A convention, not measured. Deeper trees need no
    trial, as the depths below go on by the last ratio: measured, less than 0.3%."""

    def __init__(
        self,
        pool: Sequence[str],
        max_depth: int,
        max_width: int,
        path_tokens: float = 0.0,
        most_beams: int = 1 << 30,
    ) -> None:
        if not 1 <= len(pool) <= MAX_MODELS:
            raise ValueError(f"pool: {len(pool)} models; 1 to {MAX_MODELS} can be chained")
        self.pool = tuple(pool)
        self.forecasts = ChainForecasts(len(pool), max_depth, max_width, path_tokens, most_beams)
        self.shapes, self.times = self.forecasts.shapes, self.forecasts.times
        self.edges = self.forecasts.edges
        self._chains = self.forecasts.chains
        self._max_depth = max_depth
        self._predictability = Predictability()
        self._probes = Probes(self._chains)
        self._lacking = [0.0] * len(pool)  # tokens that each model has not read
        self._current = 0
        self._lost_s = [0.0] * len(self._chains)  # by not having changed to each chain
        self._time_s = [0.0] * len(self._chains)
        self._all_known = False
        self._tries = 0
        self._context = 0
        self._now_s = math.inf

    # Which models are available.

    def drop(self, model: int) -> None:
        """A model has failed or left: no chain with it is chosen."""
        self.forecasts.drop(model)
        if not self.forecasts.is_open[self._current]:
            self._current = 0

    @property
    def likely(self) -> Chain:
        """The current chain, or if that is plain decoding the fastest one that drafts; empty if no
        model is available."""
        is_open = self.forecasts.is_open
        drafting = [c for c in range(1, len(self._chains)) if is_open[c]]
        c = self._current or min(drafting, key=self._time_s.__getitem__, default=0)
        return self._chains[c]

    # Learning.

    def observe_step(self, plan: Plan, tokens: float) -> None:
        """Learn from a step without prompts in which all requests had trees.

        Args:
            plan: with which they were drafted; with an empty chain nothing is learnt.
            tokens: mean number that a request got.
        """
        if plan.chain and 0.0 < tokens < math.inf:
            self._predictability.observe(tokens, plan.tokens, plan.requests)

    def drafting_s(self, chain: Chain, requests: int, width: int) -> Floats:
        """As `ChainForecasts.drafting_s`."""
        return self.forecasts.drafting_s(chain, requests, width)

    # The decision.

    def choose(self, load: DraftLoad, model: StepTimeModel, now_s: float) -> Plan:
        """Choose what to draft after this step.

        Args:
            load: the requests.
            model: expected step times without drafting.
            now_s: seconds of a monotonic clock.
        """
        passed_s, self._now_s = max(now_s - self._now_s, 0.0), now_s
        if load.begun:
            self._predictability.renew(min(load.begun / load.active, 1.0))
        if not load.active or not load.deepest or True not in self.forecasts.available:
            self._note(0, load)
            return Plan(width=load.widths[0], requests=load.active)
        forecast = self.forecasts.forecast(load, model, self._predictability.odds)
        depth, width = self._decide(forecast, load, model)
        # A request that is behind needs its drafts in every step.
        probed = self._probes.next(
            passed_s,
            [math.inf, *forecast.time_s[1:]] if load.behind else forecast.time_s,
            self._current,
            self._unknown(),
            lambda c, steps: self._probe_s(c, steps, forecast, load),
        )
        if probed is None:
            c, (depth, width) = self._current, self._tried(depth, width, load)
        else:
            c, (depth, width) = probed, map(int, forecast.trees[probed][:2])
        plan = self._plan(c, depth, width, forecast, load, model)
        self._note(c, load)
        return plan

    def _unknown(self) -> list[int]:
        """Chains of one model each whose passes were hardly measured."""
        if not self._all_known:
            unknown = [1 + m for m, times in enumerate(self.times) if not times.is_known]
            self._all_known = not unknown
            return unknown
        return []

    def _decide(self, forecast: Forecast, load: DraftLoad, model: StepTimeModel) -> tuple[int, int]:
        """Choose the current chain, and the depth and width of its trees.

        If some requests are behind, it is the chain with which they get their tokens soonest, where
        only they have trees. The trees are as large as is best for these requests, or for all.
        """
        fastest = self._worth_it(forecast, load)
        depth, width, *_ = forecast.trees[fastest]
        if 0 < load.behind < load.active:
            hurried = self.forecasts.with_trees(load.behind, forecast.drafting, load, model)
            other = _fastest(hurried)
            if other:
                fastest, (depth, width, *_) = other, hurried.trees[other]
                if forecast.time_s[other] < forecast.time_s[0]:
                    depth = max(depth, forecast.trees[other][0])
                    width = max(width, forecast.trees[other][1])
        if fastest != self._current:
            self._lost_s = [0.0] * len(self._chains)
        self._current, self._time_s = fastest, forecast.time_s
        return int(depth), int(width)

    def _worth_it(self, forecast: Forecast, load: DraftLoad) -> int:
        """The chain to which a change is worth its price now, or else the current one."""
        time_s, current, best = forecast.time_s, self._current, _fastest(forecast)
        if time_s[current] == math.inf:  # it cannot be chosen any more
            return best
        tokens = forecast.trees[current][2]
        for c, lost_s in enumerate(self._lost_s):
            self._lost_s[c] = max(lost_s + (time_s[current] - time_s[c]) * tokens, 0.0)
        return best if self._lost_s[best] > self._lacking_s(best, load) else current

    def _lacking_s(self, c: int, load: DraftLoad) -> float:
        """Seconds that a chain's models need for the tokens that they have not read yet."""
        took_s = 0.0
        for place in self._chains[c]:
            if self._lacking[place]:
                times = self.times[place]
                took_s += times.pass_s(load.active + self._lacking[place])
                took_s -= times.pass_s(load.active)
        return took_s

    def _tried(self, depth: int, width: int, load: DraftLoad) -> tuple[int, int]:
        """The depth and width of this step's trees: now and then wider than the best."""
        self._tries += 1
        if depth and self._tries % self.TRY_EVERY == 0:
            return depth, load.widths[-1]
        return depth, width

    def _probe_s(self, c: int, steps: int, forecast: Forecast, load: DraftLoad) -> float:
        """Seconds that ``steps`` steps with a chain are expected to lose."""
        _, _, tokens, step_s, *_ = forecast.trees[c]
        lost_s = max(step_s - tokens * forecast.time_s[self._current], 0.0)
        return steps * lost_s + self._lacking_s(c, load)

    def _plan(
        self,
        c: int,
        depth: int,
        width: int,
        forecast: Forecast,
        load: DraftLoad,
        model: StepTimeModel,
    ) -> Plan:
        """The plan of a chain with trees of a depth and a width."""
        if not c:
            plain_s = forecast.trees[0][3]
            return Plan(width=load.widths[0], step_s=plain_s, requests=load.active)
        best_depth, best_width, tokens, step_s, drafting_s, window = forecast.trees[c]
        if (depth, width) != (best_depth, best_width):
            drafting = forecast.drafting
            tokens, step_s = self.forecasts.of_trees(c, depth, width, drafting, load, model)
            w = load.widths.index(width)
            drafting_s = float(drafting.drafting_s[c - 1, w, depth - 1])
            window = drafting.windows[c - 1, depth - 1]
        lacking_s = self._lacking_s(c, load)
        return Plan(
            self._chains[c],
            depth,
            width,
            int(window),
            drafting_s + lacking_s,
            step_s + lacking_s,
            tokens,
            load.active,
        )

    def _note(self, c: int, load: DraftLoad) -> None:
        """Note which chain a step measures, and count the tokens that models do not read in it."""
        self._probes.note(c, load.active)
        read, chain, lacking = max(load.context - self._context, load.active), self._chains[c], []
        for place, before in enumerate(self._lacking):
            more = 0.0 if place in chain else min(before + read, float(load.context))
            lacking.append(more)
        self._lacking, self._context = lacking, load.context


def _fastest(forecast: Forecast) -> int:
    """The chain of least predicted time per token."""
    return min(range(len(forecast.time_s)), key=forecast.time_s.__getitem__)
