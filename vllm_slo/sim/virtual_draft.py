# SPDX-License-Identifier: Apache-2.0
"""A draft model of known skill in virtual time, as the worker's tree proposer would run it.

Its best guess is right with the request's probability, each other guess with `SIBLING` of the rest.
It knows these probabilities, and tells the scheduler of them as a worker would. While it rests it
reads nothing; when it drafts again, its first pass reads what it has missed.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_slo.config.speculation import SpeculationConfig
from vllm_slo.core.speculation.model_chain import Plan
from vllm_slo.engine.speculation import messages
from vllm_slo.sim.jobs import STOP_TOKEN

SIBLING: Final = 0.15
"""Share of the probability that the best guess leaves which each other guess has. Assumed."""
WRONG: Final = 2000
"""A token that no answer has."""


class Beams(NamedTuple):
    """The nodes of a tree, layer by layer, the likeliest paths of each.

    Attributes:
        parents: -1 for the root.
        chances: of each node given its path.
        children: (parent, rank among the guesses after it) -> node; rank 0 is the best guess.
        below: of each rank, the probability that the guess of this rank or a better one is right.
    """

    parents: list[int]
    chances: list[float]
    children: dict[tuple[int, int], int]
    below: list[float]


@functools.cache
def beams(best: float, depth: int, width: int) -> Beams:
    """A beam search where the guesses after every node have the same probabilities.

    Args:
        best: probability of the best guess.
    """
    guesses = [best, *[SIBLING * (1.0 - best)] * (width - 1)]
    tree = Beams([], [], {}, list(itertools.accumulate(guesses)))
    layer = [(1.0, -1)]
    for _ in range(depth):
        grown = [
            (path * chance, chance, node, rank)
            for path, node in layer
            for rank, chance in enumerate(guesses)
        ]
        grown.sort(key=lambda row: -row[0])
        layer = []
        for path, chance, parent, rank in grown[:width]:
            node = len(tree.parents)
            layer.append((path, node))
            tree.children[parent, rank] = node
            tree.parents.append(parent)
            tree.chances.append(chance)
    return tree


class DraftModel(NamedTuple):
    """What a draft model costs.

    Attributes:
        pass_s: seconds of a pass.
        token_s: seconds that each token of a pass adds.
        rows: most beams of a pass (`SpeculationConfig.draft_tokens`).
    """

    pass_s: float
    token_s: float
    rows: int


class VirtualDraft:
    """Drafts for the requests of one engine.

    Args:
        pass_tokens: most tokens of a pass.
        token_at: (request id, number of an output token) -> the token.
        seed: of which guesses are right.

    Attributes:
        report: the passes after the last step, and what they took.
    """

    def __init__(
        self,
        model: DraftModel,
        pass_tokens: int,
        token_at: Callable[[str, int], int],
        seed: int,
    ) -> None:
        self._model = model
        self._pass_tokens = pass_tokens
        self._token_at = token_at
        self._random = np.random.default_rng(seed)
        self._read: dict[str, int] = {}
        self._ready: list[str] = []
        self._plan = messages.NO_DRAFT
        self.report = messages.DraftingReport()

    def work(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> float:
        """Make the passes after a step; the seconds that they take.

        Args:
            output: the step, scheduled.
            requests: the live requests by id.
        """
        step = messages.of(output)
        self._plan, self._ready, self.report = step.plan, [], messages.DraftingReport()
        self._read = {name: read for name, read in self._read.items() if name in requests}
        for name, scheduled in output.num_scheduled_tokens.items():
            # What was in the prefix cache was read, too.
            self._read.setdefault(name, requests[name].num_computed_tokens - scheduled)
        if step.plan.depth:
            tokens = self._catch_up(output, requests, step)
            rows = [len(self._ready) * step.plan.width] * (step.plan.depth - 1)
            for count in (tokens, *rows) if tokens else ():
                seconds = self._model.pass_s + self._model.token_s * count
                self.report.passes.append((step.plan.chain[0], count, seconds))
        self.report.seconds = sum(seconds for *_, seconds in self.report.passes)
        return self.report.seconds

    def tell(self, done: ModelRunnerOutput) -> None:
        """Tell the scheduler, with the output of a step, what the passes after it were like."""
        messages.note_drafting(done, self.report)

    def given(self, output: SchedulerOutput, name: str, made: int) -> list[int]:
        """What a step gives a request that has ``made`` output tokens."""
        tokens = output.scheduled_spec_decode_tokens.get(name, ())
        parents = messages.of(output).parents.get(name, ())
        return verified(name, tokens, parents, made, self._token_at)

    def _catch_up(
        self,
        output: SchedulerOutput,
        requests: Mapping[str, Request],
        step: messages.StepTrees,
    ) -> int:
        """Read what is lacking of the requests of a step, those that are drafted for first; the
        tokens of the pass."""
        drafts, lacking = output.scheduled_spec_decode_tokens, dict[str, int]()
        for name in output.num_scheduled_tokens:
            if name in step.silent:
                continue
            end = requests[name].num_computed_tokens - len(drafts.get(name, ()))
            self._read[name] = min(self._read[name], end)
            lacking[name] = end - self._read[name]
        asking = [name for name in lacking if not requests[name].is_prefill_chunk]
        most = max(self._model.rows // step.plan.width, 1)
        left = self._pass_tokens
        order = sorted(lacking, key=lambda name: (requests[name].is_prefill_chunk, lacking[name]))
        for name in order:
            count = min(lacking[name], left)
            self._read[name] += count
            left -= count
            lacking[name] -= count
        self._ready = [name for name in asking if not lacking[name]][:most]
        return self._pass_tokens - left

    def trees(self, made: Mapping[str, int], best: Mapping[str, float]) -> messages.DraftTrees:
        """The candidates that were drafted after the last step.

        Args:
            made: output tokens of the live requests.
            best: probability that the best guess is right, by request.
        """
        names = [name for name in self._ready if name in made]
        if not names:
            return messages.DraftTrees.none()
        plan = self._plan
        tokens, parents, probabilities = [], [], []
        for name in names:
            tree = beams(best[name], plan.depth, plan.width)
            tokens += self._tokens(name, tree, made[name], plan)
            parents += tree.parents
            probabilities += tree.chances
        return messages.DraftTrees(
            names,
            [],
            [plan.depth * plan.width] * len(names),
            np.asarray(tokens, dtype=np.int64),
            np.asarray(parents, dtype=np.int32),
            np.asarray(probabilities),
            plan.width,
            plan.chain[-1],
            plan.depth,
        )

    def _tokens(self, name: str, tree: Beams, made: int, plan: Plan) -> list[int]:
        """Tokens of a tree whose guesses are right by chance."""
        tokens = [WRONG] * len(tree.parents)
        node = -1
        for place, drawn in enumerate(self._random.random(plan.depth)):
            rank = bisect.bisect_right(tree.below, drawn)
            child = tree.children.get((node, rank))
            if child is None:
                break
            tokens[child] = self._token_at(name, made + place)
            node = child
        return tokens


def blocks_of_trees(config: SpeculationConfig, block_size: int) -> int:
    """KV blocks in which a worker verifies trees; no request has them."""
    return messages.scratch_blocks(config, block_size)


def verified(
    name: str,
    tokens: Sequence[int],
    parents: Sequence[int],
    made: int,
    token_at: Callable[[str, int], int],
) -> list[int]:
    """What a step gives a request that has ``made`` output tokens: the tokens of its tree along the
    path that is right, and one more."""
    given, at = list[int](), -1
    while True:
        token = token_at(name, made + len(given))
        given.append(token)
        if token == STOP_TOKEN:
            return given
        right = (n for n, above in enumerate(parents) if above == at and tokens[n] == token)
        node = next(right, None)
        if node is None:
            return given
        at = node
