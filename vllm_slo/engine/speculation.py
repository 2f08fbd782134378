# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of trees: candidates come in, selected trees go out with the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_slo.config import SpeculationConfig
from vllm_slo.core import token_tree
from vllm_slo.core.draft_calibration import DraftCalibration
from vllm_slo.core.tree_selection import TreeControl, depth_and_width, select_trees
from vllm_slo.engine import tree_grammar, trees, views
from vllm_slo.engine.trees import DraftTrees, StepTrees

if TYPE_CHECKING:
    from vllm_slo.engine.scheduler import Scheduler

logger = init_logger(__name__)


@dataclass(slots=True)
class Candidate:
    """What the draft guesses of one request.

    Attributes:
        at: tokens of the request when it was drafted; of another length, it is out of date.
        tokens, parents: the nodes.
        probabilities: the draft's, of each node given its path.
    """

    at: int
    tokens: list[int]
    parents: list[int]
    probabilities: list[float]


class Speculation:
    """Plants the trees of each step.

    Args:
        scheduler: whose requests and blocks it reads; of requests it sets ``spec_token_ids``.
        config: how deep and wide.
    """

    def __init__(self, scheduler: Scheduler, config: SpeculationConfig) -> None:
        self.scheduler = scheduler
        self.config = config
        self.calibration = DraftCalibration(config.max_depth)
        self.failed = False
        self._candidates: dict[str, Candidate] = {}
        self._planted: dict[str, Candidate] = {}

    # Before a step.

    def plant(self) -> None:
        """Give every running request the tree that the next step is to verify."""
        self._planted.clear()
        grown: list[Request] = []
        for request in self.scheduler.running:
            request.spec_token_ids = []
            if self._may_grow(request):
                grown.append(request)
        if not grown or self._barred():
            return
        limits = self._node_limits(grown)
        found = [self._candidates[request.request_id] for request in grown]
        offsets = np.cumsum([0, *(len(c.tokens) for c in found)])
        parents = np.concatenate([np.asarray(c.parents, dtype=np.int32) for c in found])
        said = np.concatenate([np.asarray(c.probabilities) for c in found])
        chances = self.calibration.path_probabilities(offsets, parents, said)
        chosen = select_trees(
            offsets,
            chances,
            parents,
            np.full(len(grown), -np.inf),
            np.full(len(grown), self.config.max_depth),
            budget=len(grown) * (self.config.max_nodes + 1),
            most=limits,
        )
        rows = self.config.draft_tokens
        for place, request in enumerate(grown):
            part = slice(offsets[place], offsets[place + 1])
            rows -= self._plant_one(request, found[place], chances[part], chosen[part], rows)

    def _may_grow(self, request: Request) -> bool:
        candidate = self._candidates.get(request.request_id)
        return (
            candidate is not None
            and candidate.at == request.num_tokens
            and views.is_decoding(request)
        )

    def _barred(self) -> bool:
        """Whether a request is running beside which no tree can be sampled."""
        return any(
            request.sampling_params is not None
            and request.sampling_params.thinking_token_budget is not None
            for request in self.scheduler.running
        )

    def _node_limits(self, requests: list[Request]) -> list[int]:
        """Most nodes of each request for which there is memory, without anybody's preemption.

        A root needs its own slot and, once accepted, one for the draft; nodes follow. Roots come
        first: a new block goes to a tree only if every running request could have one.
        """
        scheduler = self.scheduler
        size = scheduler.block_size
        spare = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        spare -= len(scheduler.running)
        limits = []
        for request in requests:
            blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
            free = len(blocks) * size - request.num_tokens - scheduler.num_lookahead_tokens
            most = min(self.config.max_nodes, scheduler.max_model_len - request.num_tokens - 1)
            if most > free:
                extra = -(-(most - free) // size)
                if extra <= spare:
                    spare -= extra
                else:
                    most = max(free, 0)
            limits.append(max(most, 0))
        return limits

    def _plant_one(
        self,
        request: Request,
        candidate: Candidate,
        chances: NDArray[np.float64],
        chosen: NDArray[np.int8],
        rows: int,
    ) -> int:
        """Plant the chosen nodes, as many as ``rows`` extra paths allow; how many they take."""
        kept = [int(node) for node in np.flatnonzero(chosen)]
        left = request.max_tokens - request.num_output_tokens
        if kept and request.use_structured_output:
            kept = self._allowed(request, candidate, kept)
        if not kept:
            return 0
        tokens, parents = token_tree.reorder(candidate.tokens, candidate.parents, kept)
        said = [candidate.probabilities[node] for node in kept]
        order = token_tree.linearise(parents, [float(chances[node]) for node in kept])
        depths = token_tree.depths(parents)
        order = [node for node in order if depths[node] < left]
        while order:
            planted, above = token_tree.reorder(tokens, parents, order)
            taken = len(token_tree.path_rows(above)) - 1
            if taken <= rows:
                break
            order.pop()
        else:
            return 0
        request.spec_token_ids = planted
        self._planted[request.request_id] = Candidate(
            candidate.at, planted, above, [said[node] for node in order]
        )
        return taken

    def _allowed(self, request: Request, candidate: Candidate, kept: list[int]) -> list[int]:
        manager = self.scheduler.structured_output_manager
        if not tree_grammar.constrains_now(manager, request):
            return []
        tokens, parents = token_tree.reorder(candidate.tokens, candidate.parents, kept)
        allowed = tree_grammar.allowed(request, tokens, parents)
        return [node for place, node in enumerate(kept) if place in allowed]

    # With a step.

    def send(self, output: SchedulerOutput) -> None:
        """Attach to a step what the worker must know; the step may have cut trees short."""
        parents: dict[str, Sequence[int]] = {
            name: self._planted[name].parents[: len(tokens)]
            for name, tokens in output.scheduled_spec_decode_tokens.items()
        }
        for name in output.num_scheduled_tokens:
            self._candidates.pop(name, None)
        depth, width = (0, 1) if self.failed else self._shape(len(self.scheduler.running))
        trees.attach(output, StepTrees(parents, depth, width))

    def _shape(self, active: int) -> tuple[int, int]:
        config = self.config
        control = TreeControl(
            verifier_tokens=self.scheduler.max_num_scheduled_tokens,
            speculator_tokens=config.draft_tokens,
            max_depth=config.max_depth,
            min_depth=config.min_depth,
            max_width=config.max_width,
        )
        return depth_and_width(active, control)

    def grammar_output(self, output: SchedulerOutput) -> GrammarOutput | None:
        """The bit masks of a step: one row for each node of a structured request's tree."""
        scheduler = self.scheduler
        names = [
            name
            for name in output.num_scheduled_tokens
            if (request := scheduler.requests.get(name))
            and request.use_structured_output
            and not request.is_prefill_chunk
        ]
        if not output.has_structured_output_requests or not names:
            return None
        sent = trees.of(output).parents
        tokens = output.scheduled_spec_decode_tokens
        masks = [
            tree_grammar.masks(
                scheduler.structured_output_manager,
                scheduler.requests[name],
                tokens.get(name, ()),
                sent.get(name, ()),
            )
            for name in names
        ]
        return GrammarOutput(names, np.concatenate(masks), [len(tokens.get(n, ())) for n in names])

    # After a step.

    def observe(self, output: SchedulerOutput, done: ModelRunnerOutput) -> None:
        """Learn from what was accepted of the step's trees."""
        depths: list[int] = []
        said: list[float] = []
        hits: list[bool] = []
        for name, parents in trees.of(output).parents.items():
            index = done.req_id_to_index.get(name)
            planted = self._planted.get(name)
            if index is None or planted is None or not done.sampled_token_ids[index]:
                continue
            given = done.sampled_token_ids[index]
            due = {-1: (1, given[0])}  # visited node -> (depth, token) of what follows it
            for node, parent in enumerate(parents):
                if parent not in due:
                    continue
                depth, token = due[parent]
                hit = planted.tokens[node] == token
                depths.append(depth)
                said.append(planted.probabilities[node])
                hits.append(hit)
                if hit and depth < len(given):
                    due[node] = depth + 1, given[depth]
        if depths:
            self.calibration.observe(np.asarray(depths), np.asarray(said), np.asarray(hits))

    def offer(self, drafts: DraftTrees) -> None:
        """Take the candidates that the worker drafted after the last step."""
        if drafts.failure is not None and not self.failed:
            self.failed = True
            logger.error("vllm-slo: speculation is off: %s", drafts.failure)
        for name, tokens, parents, said in zip(
            drafts.req_ids,
            drafts.draft_token_ids,
            drafts.parents,
            drafts.probabilities,
            strict=True,
        ):
            request = self.scheduler.requests.get(name)
            if request is not None and not request.is_finished():
                self._candidates[name] = Candidate(request.num_tokens, tokens, parents, said)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._candidates.pop(request_id, None)
