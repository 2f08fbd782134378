# SPDX-License-Identifier: Apache-2.0
"""Samples at every node of every tree with vLLM's sampler, then walks the trees.

Each node is a row of the sampler. The row has the sampling parameters of its request and, as
output so far, the request's output and the node's path. So accepted tokens have the model's own
distribution, with penalties, top-p, minimum lengths and all else. A seeded request draws at each
depth what it would draw there without a tree, so its output is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.state import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from vllm_slo.core.speculation import token_tree
from vllm_slo.engine.compat.sampling import draw_once, with_min_tokens_by_row
from vllm_slo.engine.telemetry.faults import Context
from vllm_slo.engine.worker.transfer import to_device

Nodes = Sequence[Sequence[int]]

_REJECTED = -1  # vLLM's placeholder in a row of sampled tokens.


def sample(
    sampler: Sampler,
    logits: Tensor,
    metadata: SamplingMetadata,
    tokens: Nodes,
    parents: Nodes,
    held: Context,
) -> tuple[SamplerOutput, list[list[int]]]:
    """Sample one step's tokens.

    If a policy fails, no node is accepted: what is sampled at a root is right without any.

    Args:
        sampler: vLLM's.
        logits: at each request's root and nodes, request by request, [rows, vocabulary].
        metadata: of the requests.
        tokens, parents: of the nodes of each request; empty: it has no tree.
        held: holds the faults of policies.

    Returns:
        The output with a row per request, rejected places holding -1, and each request's accepted
        nodes.
    """
    if not any(parents):
        return sampler(logits=logits, sampling_metadata=metadata), [[] for _ in parents]
    rows = None
    with held:
        rows = _Rows(tokens, parents, logits.device)
    if rows is None:
        return sample_roots(sampler, logits, metadata, parents)
    generators = _SeededDraws(sampler, metadata, rows, logits)
    output = sampler(logits=logits, sampling_metadata=rows.expand(metadata, generators.by_row))
    sampled = output.sampled_token_ids.view(-1).tolist()
    accepted: list[list[int]] = [[] for _ in parents]
    with held:
        accepted = [
            token_tree.walk(nodes, above, sampled[first : first + len(nodes) + 1]) if nodes else []
            for nodes, above, first in zip(tokens, parents, rows.first, strict=True)
        ]
    generators.settle(accepted)
    return rows.gather(output, accepted), accepted


def sample_roots(
    sampler: Sampler, logits: Tensor, metadata: SamplingMetadata, parents: Nodes
) -> tuple[SamplerOutput, list[list[int]]]:
    """As `sample`, where no node can be accepted: one token of each request."""
    ends = np.cumsum([1 + len(above) for above in parents])
    first = to_device(np.concatenate(([0], ends[:-1])).astype(np.int64), logits.device)
    return sampler(
        logits=logits[first], sampling_metadata=replace(metadata, spec_token_ids=None)
    ), [[] for _ in parents]


class _Rows:
    """Requests with trees as rows of the sampler.

    Attributes:
        first: each request's first row, its root's.
        owner: request of each row.
        depth: of each row below its root.
    """

    def __init__(self, tokens: Nodes, parents: Nodes, device: torch.device) -> None:
        self.tokens = tokens
        self.parents = parents
        self.device = device
        self.first: list[int] = []
        self.owner: list[int] = []
        self.depth: list[int] = []
        for index, above in enumerate(parents):
            self.first.append(len(self.owner))
            self.owner.extend([index] * (len(above) + 1))
            self.depth.append(0)
            self.depth.extend(token_tree.depths(above))

    def paths(self) -> list[list[int]]:
        """Draft tokens between its root and each row, the row's own included."""
        paths: list[list[int]] = []
        for nodes, above in zip(self.tokens, self.parents, strict=True):
            first = len(paths)
            paths.append([])
            for token, parent in zip(nodes, above, strict=True):
                paths.append([*paths[first + 1 + parent], token])
        return paths

    def expand(
        self, metadata: SamplingMetadata, generators: dict[int, torch.Generator]
    ) -> SamplingMetadata:
        """The metadata of the requests as that of the rows."""
        owner = to_device(np.asarray(self.owner, dtype=np.int64), self.device)

        def spread(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[owner]

        def by_row(values: dict[int, Any] | None) -> dict[int, Any]:
            given = values or {}
            return {row: given[i] for row, i in enumerate(self.owner) if i in given}

        outputs = metadata.output_token_ids
        if outputs:
            outputs = [
                [*outputs[i], *path] for i, path in zip(self.owner, self.paths(), strict=True)
            ]
        return replace(
            metadata,
            temperature=spread(metadata.temperature),
            top_p=spread(metadata.top_p),
            top_k=spread(metadata.top_k),
            generators=generators,
            prompt_token_ids=spread(metadata.prompt_token_ids),
            frequency_penalties=spread(metadata.frequency_penalties),
            presence_penalties=spread(metadata.presence_penalties),
            repetition_penalties=spread(metadata.repetition_penalties),
            output_token_ids=outputs,
            allowed_token_ids_mask=spread(metadata.allowed_token_ids_mask),
            bad_words_token_ids=by_row(metadata.bad_words_token_ids),
            logitsprocs=LogitsProcessors(
                with_min_tokens_by_row(processor, zip(self.owner, self.depth, strict=True))
                for processor in metadata.logitsprocs.all
            ),
            logprob_token_ids=by_row(metadata.logprob_token_ids) or None,
            spec_token_ids=None,
        )

    def gather(self, output: SamplerOutput, accepted: list[list[int]]) -> SamplerOutput:
        """The rows that the walks visited, in the form of a speculative step's output."""
        width = max(map(len, accepted)) + 1
        visited, kept = [], []
        for first, nodes in zip(self.first, accepted, strict=True):
            rows = [first, *(first + 1 + node for node in nodes)]
            padding = width - len(rows)
            visited.extend(rows + [first] * padding)
            kept.extend([True] * len(rows) + [False] * padding)
        index = to_device(np.asarray(visited, dtype=np.int64), self.device)
        rejected = to_device(~np.asarray(kept, dtype=np.bool_), self.device)
        tokens = output.sampled_token_ids.view(-1)[index].masked_fill(rejected, _REJECTED)
        logprobs = output.logprobs_tensors
        if logprobs is not None:
            logprobs = LogprobsTensors(
                *(part[index] if torch.is_tensor(part) and len(part) else part for part in logprobs)
            )
        return replace(
            output,
            sampled_token_ids=tokens.view(len(accepted), width),
            logprobs_tensors=logprobs,
        )


class _SeededDraws:
    """The generators of seeded requests, row by row.

    A row at depth k draws from the state after k draws. Siblings share that state, since a walk
    visits one of them. Afterwards the request's generator is in the state after as many draws as
    there are new tokens.

    Attributes:
        by_row: generator of each row of a seeded request.
    """

    def __init__(
        self, sampler: Sampler, metadata: SamplingMetadata, rows: _Rows, logits: Tensor
    ) -> None:
        self.by_row: dict[int, torch.Generator] = {}
        self._states: dict[int, list[torch.Generator]] = {}
        if metadata.all_greedy:
            return
        self._generators = metadata.generators
        for row, (index, depth) in enumerate(zip(rows.owner, rows.depth, strict=True)):
            if index not in metadata.generators:
                continue
            states = self._states.setdefault(index, [metadata.generators[index].clone_state()])
            while len(states) < depth + 2:
                later = states[-1].clone_state()
                draw_once(sampler, logits, later)
                states.append(later)
            self.by_row[row] = states[depth].clone_state()

    def settle(self, accepted: list[list[int]]) -> None:
        """Advance the requests' generators by one draw for each new token."""
        for index, states in self._states.items():
            self._generators[index].set_state(states[len(accepted[index]) + 1].get_state())
