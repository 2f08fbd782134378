# SPDX-License-Identifier: Apache-2.0
"""Candidate trees: what drafts have sent for each request, and what of it the next step may verify.

A candidate is a tree that a draft proposes after the last token of a request. It is out of date as
soon as the request has another length.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_slo.config.speculation import SpeculationConfig
from vllm_slo.core.arrays import Bools, Floats, Ints, Marks
from vllm_slo.core.speculation import token_tree
from vllm_slo.core.speculation.candidate_trees import CandidateTrees
from vllm_slo.core.speculation.tree_selection import node_worths
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_facts
from vllm_slo.engine.scheduling.kv_blocks import KVBlocks
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.speculation import grammar
from vllm_slo.engine.speculation.draft_models import Candidate, Drafts
from vllm_slo.engine.speculation.messages import DraftTrees
from vllm_slo.engine.speculation.no_speculation import wants_no_drafts
from vllm_slo.engine.speculation.tenants import TenantShares


class StepCandidates(NamedTuple):
    """The N candidate nodes of the n requests of a step, request by request.

    Attributes:
        requests: sorted by draft model.
        models: (n,) which draft model or server each request's candidate is of.
        trees: the nodes, for selection.
        tokens: (N,) token ids.
        probabilities: (N,) the draft's, of each node given its path.
        best: (N,) whether the draft gave no sibling more.
    """

    requests: list[Request]
    models: list[int]
    trees: CandidateTrees
    tokens: Ints
    probabilities: Floats
    best: Bools

    def keep_allowed(
        self, place: int, chosen: Marks, structured_output: StructuredOutputManager
    ) -> None:
        """Unmark, among the ``chosen`` (N,) nodes, those of one structured request that its grammar
        forbids: all of them while the grammar does not apply yet."""
        request, part = self.requests[place], self.trees.part(place)
        own = chosen[part]
        kept = np.flatnonzero(own).tolist()
        if not kept or not grammar.constrains_now(structured_output, request):
            own[:] = 0
            return
        tokens, parents = token_tree.reorder(
            self.tokens[part].tolist(), self.trees.parents[part].tolist(), kept
        )
        allowed = grammar.allowed(request, tokens, parents)
        own[[node for index, node in enumerate(kept) if index not in allowed]] = 0


class Candidates:
    """Keeps the newest candidate of each request.

    Args:
        tenants: weights of the requests; None: all weigh the same.
        path_tokens: what verifying another path of a tree costs besides its nodes, in tokens.
    """

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        blocks: KVBlocks,
        drafting: Drafts,
        tenants: TenantShares | None,
        config: SpeculationConfig,
        path_tokens: float,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._blocks = blocks
        self._drafting = drafting
        self._tenants = tenants
        self._max_nodes = config.max_nodes
        self._path_tokens = path_tokens
        self._candidates: dict[str, Candidate] = {}

    def receive(self, drafts: DraftTokenIds) -> bool:
        """Take what the worker drafted after the last step; False: these are not trees."""
        if not isinstance(drafts, DraftTrees):
            return False
        end = 0
        for name, count in zip(drafts.req_ids, drafts.counts, strict=True):
            own = slice(end, end := end + count)
            request = self._state.requests.get(name)
            if count and request is not None and not request.is_finished():
                self._candidates[name] = Candidate(
                    request.num_tokens,
                    self._drafting.author(drafts, name),
                    drafts.width,
                    drafts.depth,
                    drafts.tokens[own],
                    drafts.parents[own],
                    drafts.probabilities[own],
                )
        return True

    def forget(self, request_id: str) -> None:
        """The candidate of a request is verified, or the request has ended."""
        self._candidates.pop(request_id, None)

    def gather(self) -> StepCandidates | None:
        """The candidates that the next step may verify; None: there are none."""
        candidates = self._candidates
        requests = [r for r in self._state.running if self._is_usable(r)]
        if not requests:
            return None
        requests.sort(key=lambda r: candidates[r.request_id].model)
        found = [candidates[r.request_id] for r in requests]
        offsets = np.cumsum([0, *(len(c.tokens) for c in found)])
        parents = np.concatenate([c.parents for c in found])
        probabilities = np.concatenate([c.probabilities for c in found])
        chances, best = self._drafting.chances(found, offsets, parents, probabilities)
        sizes = np.diff(offsets)
        # A node is of no use if it is deeper than the number of tokens that the request lacks.
        lacked = [(r.max_tokens - r.num_output_tokens - 1) for r in requests]
        useful = np.asarray(lacked) * [c.width for c in found]
        place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
        chances[place >= np.repeat(useful, sizes)] = 0.0
        limits = np.asarray(self._node_limits(requests))
        worths = node_worths(offsets, chances, parents, best, self._path_tokens)
        if self._tenants is not None:
            weights = self._tenants.weights([request.request_id for request in requests])
            worths = worths * np.repeat(weights, sizes)
        return StepCandidates(
            requests,
            [c.model for c in found],
            CandidateTrees(offsets, parents, chances, worths, limits),
            np.concatenate([c.tokens for c in found]),
            probabilities,
            best,
        )

    def _is_usable(self, request: Request) -> bool:
        candidate = self._candidates.get(request.request_id)
        return (
            candidate is not None
            and candidate.at == request.num_tokens
            and request_facts.is_decoding(request)
            and not wants_no_drafts(self._tracker.get(request.request_id))
        )

    def _node_limits(self, requests: list[Request]) -> list[int]:
        """The most nodes of each request for which there is memory without a preemption.

        A root needs a slot of its own and, once accepted, one for the draft. Nodes come after
        these. Roots come first: a tree gets a new block only if every running request could get
        one.
        """
        state, size = self._state, self._state.block_size
        spare = self._blocks.free - len(state.running)
        limits = []
        for request in requests:
            free = self._blocks.spare_slots(request, size) - state.lookahead_tokens
            most = min(self._max_nodes, state.max_model_len - request.num_tokens - 1)
            if most > free:
                extra = -(-(most - free) // size)
                if extra <= spare:
                    spare -= extra
                else:
                    most = max(free, 0)
            limits.append(max(most, 0))
        return limits
