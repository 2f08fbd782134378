# SPDX-License-Identifier: Apache-2.0
"""Drafting for made-up requests before the server is ready, so that nothing is compiled later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from vllm_slo.config.speculation import SpeculationConfig
from vllm_slo.core.arrays import Ints
from vllm_slo.core.speculation.model_chain import Plan
from vllm_slo.engine.speculation.messages import DraftingReport
from vllm_slo.engine.worker.proposers.beam import BeamSearch
from vllm_slo.engine.worker.proposers.chain import Ahead, ChainSearch, DraftKVState, Member
from vllm_slo.engine.worker.proposers.lm import DraftModel

TOKENS = 2
"""Committed tokens of a made-up request: more than one, so that the first pass reads several."""


def draft_in_every_way(
    models: Mapping[int, DraftModel],
    config: SpeculationConfig,
    scratch: Ints,
    block_size: int,
    most_requests: int,
) -> None:
    """Draft a beam and a chain with each model, and a chain of all, for one request and for many.

    Args:
        models: place in the pool -> draft model.
        scratch: scratch blocks of each row; all keys and values go there, [rows, blocks].
        block_size: tokens per block.
        most_requests: requests of a step at most.
    """
    depth, width = min(config.max_depth, 2), config.max_width
    pool = [Member(place, model) for place, model in sorted(models.items())]
    for requests in _counts(min(len(scratch), most_requests)):
        chains = [[member] for member in pool] + ([pool] if len(pool) > 1 else [])
        for chain in chains:
            plan = Plan(tuple(member.place for member in chain), depth, width)
            _search(chain, plan, scratch[:requests], block_size).run()
    for requests in _counts(min(len(scratch) // width, most_requests)):
        for member in pool:
            search = _search(
                [member], Plan((member.place,), depth, width), scratch[:requests], block_size
            )
            BeamSearch(
                member.model,
                search.ahead.ends,
                np.zeros((requests, 1), dtype=np.int32),
                search.temperatures,
                scratch=int(scratch[0, 0]),
                block_size=block_size,
                blocks_per_row=scratch.shape[1],
            ).run(search.read(), depth, width)


def _counts(most: int) -> Iterator[int]:
    """One request, and as many as there can be: kernels may be others for many rows."""
    yield 1
    if most > 1:
        yield most


def _search(chain: list[Member], plan: Plan, scratch: Ints, block_size: int) -> ChainSearch:
    """A search over requests that own no block, so that scratch blocks hold all they have."""
    n = len(scratch)
    ahead = Ahead(
        np.zeros((n, TOKENS), dtype=np.int32),
        np.arange(n),
        np.full(n, TOKENS),
        np.zeros((n, 1), dtype=np.int32),
        np.zeros(n, dtype=np.int64),
        scratch,
        plan.depth,
        block_size,
    )
    return ChainSearch(
        chain,
        [DraftKVState(np.zeros(n, dtype=np.int64), []) for _ in chain],
        ahead,
        torch.ones(n, 1, device=chain[0].model.device),
        plan,
        DraftingReport(),
        lambda _: None,
    )
