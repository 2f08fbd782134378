# SPDX-License-Identifier: Apache-2.0
"""AdaServe's speculation phase (section 4.3, step 1): a beam search of the draft over all requests.

One pass computes what was committed since the draft last ran and yields the first layer of every
tree; each further pass extends all beams of all requests by a token. A beam's path lies in scratch
blocks of its own, so nothing that is guessed touches the blocks of a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_slo.engine import trees
from vllm_slo.engine.proposers.lm import DraftCoverage, DraftModel, common_metadata
from vllm_slo.engine.tree_attention.path_rows import BeamRows
from vllm_slo.engine.tree_attention.plan import scratch_blocks_per_row

if TYPE_CHECKING:
    from vllm_slo.engine.model_runner import TreeRunner

Ints = NDArray[np.int64]

GREEDY_TEMPERATURE = 0.5
"""What a greedy request's draft logits are divided by. The target takes its likeliest token, not
one drawn by its probability, so a guess is right more often than the draft's probability says:
taken as they are, the beams would drop paths of best guesses for less likely ones. With this the
draft's probabilities are close to what is accepted, whatever the calibration makes of the rest."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidate trees of some requests, width nodes for each token ahead, layer by layer.

    Attributes:
        tokens: token ids, [requests, depth, width].
        parents: node within the request, -1 for the root, [requests, depth, width].
        probabilities: of each node given its path, by the draft, [requests, depth, width].
    """

    tokens: Tensor
    parents: Tensor
    probabilities: Tensor


class BeamSearch:
    """The passes of one drafting step over ``n`` requests.

    Args:
        draft: the model.
        context: committed tokens of each request, all of them in the draft's KV cache, [n].
        tables: blocks of each request, [n, columns].
        temperatures: what the draft's logits are divided by, [n, 1].
        scratch: first scratch block.
        block_size: tokens per block.
        blocks_per_row: scratch blocks of one beam.
    """

    def __init__(
        self,
        draft: DraftModel,
        context: Ints,
        tables: Ints,
        temperatures: Tensor,
        *,
        scratch: int,
        block_size: int,
        blocks_per_row: int,
    ) -> None:
        self.draft = draft
        self.context = context
        self.tables = tables
        self.temperatures = temperatures
        self.scratch = scratch
        self.block_size = block_size
        self.blocks_per_row = blocks_per_row

    def run(self, logits: Tensor, depth: int, width: int) -> Candidates:
        """Search from the logits at the roots, [n, vocabulary]."""
        n = len(logits)
        logp = self._log_softmax(logits, 1)
        best, tokens = logp.topk(width, dim=-1)
        layers = [(tokens, torch.full_like(tokens, -1), best.exp())]
        self._begin(n, width)
        total = best
        paths = torch.arange(width, device=tokens.device).repeat(n, 1).unsqueeze(-1)
        for level in range(1, depth):
            logp = self._log_softmax(self._extend(tokens, paths, level), width)
            best, found = logp.topk(width, dim=-1)
            sums = (total.view(n, width, 1) + best.view(n, width, width)).view(n, -1)
            total, chosen = sums.topk(width, dim=-1)
            parent = chosen // width
            tokens = found.view(n, -1).gather(1, chosen)
            layers.append(
                (
                    tokens,
                    parent + (level - 1) * width,
                    best.view(n, -1).gather(1, chosen).exp(),
                )
            )
            grown = paths.gather(1, parent.unsqueeze(-1).expand(-1, -1, level))
            own = torch.arange(width, device=tokens.device).repeat(n, 1).unsqueeze(-1)
            paths = torch.cat((grown, own), dim=-1)
        stacked = [torch.stack(part, dim=1) for part in zip(*layers, strict=True)]
        return Candidates(*stacked)

    def _log_softmax(self, logits: Tensor, rows: int) -> Tensor:
        temperatures = self.temperatures.repeat_interleave(rows, dim=0)
        return (logits.float() / temperatures).log_softmax(dim=-1)

    def _begin(self, n: int, width: int) -> None:
        """Lay out the rows: one per beam, on scratch blocks that stay."""
        device = self.draft.device
        rows = n * width
        column, offset = np.divmod(self.context, self.block_size)
        owner = np.repeat(np.arange(n), width)
        blocks = self.scratch + np.arange(rows * self.blocks_per_row).reshape(rows, -1)
        columns = int(column.max()) + self.blocks_per_row
        table = np.zeros((rows, columns), dtype=np.int32)
        table[:, : self.tables.shape[1]] = self.tables[owner, :columns]
        places = column[owner, None] + np.arange(self.blocks_per_row)
        np.put_along_axis(table, places, blocks.astype(np.int32), axis=1)
        copies = [
            [int(self.tables[i, column[i]]), int(blocks[i * width, 0]), width]
            for i in np.flatnonzero(offset)
        ]
        self._owner = owner
        self._table = torch.from_numpy(table).to(device, non_blocking=True)
        self._first_slot = torch.from_numpy(blocks[:, 0] * self.block_size + offset[owner])
        self._first_slot = self._first_slot.to(device, non_blocking=True)
        self._rows = BeamRows(copies, self.blocks_per_row)

    def _extend(self, tokens: Tensor, paths: Tensor, level: int) -> Tensor:
        """Logits after each beam's last token, [n * width, vocabulary]; paths: [n, width, level].

        A row's scratch blocks are consecutive, so a path's slots are.
        """
        n, width, _ = paths.shape
        device = tokens.device
        steps = torch.arange(level, device=device)
        beam = torch.arange(n, device=device).view(n, 1, 1) * width + paths
        rows = self._rows
        rows.sources = (steps * (n * width) + beam).view(-1)
        rows.slots = (self._first_slot.view(n, width, 1) + steps).view(-1)
        lengths = self.context[self._owner] + level
        positions = torch.from_numpy(np.minimum(lengths - 1, self.draft.max_len - 1)).to(device)
        common = common_metadata(
            np.arange(n * width + 1),
            lengths,
            self._table,
            rows.slots[level - 1 :: level],
            positions,
        )
        hidden = self.draft.forward(tokens.view(-1).int(), positions, common, rows=rows)
        return self.draft.logits(hidden[: n * width])


class TreeProposer:
    """Drafts candidate trees with a small model; named by ``--speculative-config``.

    Args:
        vllm_config: of the engine; the draft model's name is in its ``additional_config``.

    Raises:
        ConfigError: the engine was told only a part of what trees need.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = trees.speculation_of(vllm_config)
        assert config is not None and config.draft_model is not None  # it would have been refused
        self.vllm_config = vllm_config
        self.config = config
        self._name = config.draft_model

    def load_model(self, _target: Any) -> None:
        """Load the draft beside the target."""
        device = torch.device(current_platform.device_type)
        self.draft = DraftModel(self.vllm_config, self._name, device)
        self.draft.load()

    def bind(self, runner: TreeRunner) -> None:
        """Take the runner's KV cache, once it is there."""
        self.runner = runner
        self.block_size = runner.block_size_of_trees()
        self.blocks_per_row = scratch_blocks_per_row(self.block_size, self.config.max_depth)
        self.draft.bind([group for groups in runner.attn_groups for group in groups])
        num_blocks = runner.kv_cache_config.num_blocks
        self.scratch = num_blocks - trees.scratch_blocks(self.config, self.block_size)
        self.coverage = DraftCoverage(
            num_blocks, self.block_size, trust_hits=self.vllm_config.kv_transfer_config is None
        )

    def propose(self, output: SchedulerOutput, sampled: list[list[int]]) -> trees.DraftTrees:
        """Candidate trees for the requests of a step that have just got tokens.

        Args:
            output: the step.
            sampled: tokens that each request of the batch has got, by place.
        """
        wanted = trees.of(output)
        names = self.runner.input_batch.req_ids
        lengths = self.runner.input_batch.num_tokens_no_spec
        if wanted.depth == 0:
            return trees.DraftTrees.none()
        speaking = [i for i, name in enumerate(names) if name not in wanted.silent]
        ends = {
            i: int(lengths[i]) if sampled[i] else self.runner.computed_after(output, i)
            for i in speaking
        }
        ready, roots = self._catch_up(ends, {i for i in speaking if sampled[i]})
        ready = ready[: max(self.config.draft_tokens // wanted.width, 1)]
        if not ready:
            return trees.DraftTrees.none()
        index = np.asarray(ready)
        table = self.runner.block_table_of_trees()
        search = BeamSearch(
            self.draft,
            np.asarray([ends[i] for i in ready]),
            table[index],
            self._temperatures(index),
            scratch=self.scratch,
            block_size=self.block_size,
            blocks_per_row=self.blocks_per_row,
        )
        found = search.run(roots[: len(ready)], wanted.depth, wanted.width)
        return trees.DraftTrees(
            [names[i] for i in ready],
            [],
            found.tokens.flatten(1).cpu().numpy(),
            found.parents.flatten(1).int().cpu().numpy(),
            found.probabilities.flatten(1).double().cpu().numpy(),
        )

    def _temperatures(self, index: Ints) -> Tensor:
        """What each request's logits are divided by; greedy ones: ``GREEDY_TEMPERATURE``."""
        given = self.runner.input_batch.sampling_metadata.temperature
        if given is None:
            return torch.full((len(index), 1), GREEDY_TEMPERATURE, device=self.draft.device)
        found = given[torch.from_numpy(index).to(given.device)].unsqueeze(1)
        return torch.where(found < 1e-5, torch.full_like(found, GREEDY_TEMPERATURE), found)

    def _catch_up(self, ends: dict[int, int], asking: set[int]) -> tuple[list[int], Tensor]:
        """Compute what the draft lacks of each request, shortest first, as far as one pass goes.

        Returns:
            The requests among ``asking`` that are complete, and the logits at their roots.
        """
        names = self.runner.input_batch.req_ids
        budget = self.vllm_config.scheduler_config.max_num_batched_tokens
        lacking = {i: (self.coverage.tokens(names[i]), end) for i, end in ends.items()}
        spans: list[tuple[int, int, int]] = []
        for i in sorted(lacking, key=lambda i: (i not in asking, lacking[i][1] - lacking[i][0])):
            start, end = lacking[i]
            end = min(end, start + budget, self.draft.max_len, self.runner.slots_of(i))
            if end > start:
                spans.append((i, start, end))
                budget -= end - start
        ready = [i for i, _, end in spans if i in asking and end == ends[i]]
        if not spans:
            return [], torch.empty(0)
        hidden = self._prefill(spans)
        last = np.cumsum([end - start for _, start, end in spans]) - 1
        complete = set(ready)
        roots = [int(last[place]) for place, (i, _, _) in enumerate(spans) if i in complete]
        if not roots:
            return [], torch.empty(0)
        return ready, self.draft.logits(hidden[torch.tensor(roots, device=hidden.device)])

    def _prefill(self, spans: list[tuple[int, int, int]]) -> Tensor:
        """One causal pass over (place, start, end) of committed tokens."""
        batch, device = self.runner.input_batch, self.draft.device
        table = self.runner.block_table_of_trees()
        index = np.asarray([i for i, _, _ in spans])
        lengths = np.asarray([end - start for _, start, end in spans])
        positions = np.concatenate([np.arange(start, end) for _, start, end in spans])
        rows = np.repeat(index, lengths)
        tokens = torch.from_numpy(batch.token_ids_cpu[rows, positions]).to(device)
        slots = table[rows, positions // self.block_size] * self.block_size
        slots = torch.from_numpy(slots + positions % self.block_size).to(device)
        on_device = torch.from_numpy(positions).to(device)
        ends = np.asarray([end for _, _, end in spans])
        columns = -(-int(ends.max()) // self.block_size)
        blocks = torch.from_numpy(table[index, :columns].astype(np.int32)).to(device)
        common = common_metadata(np.cumsum([0, *lengths]), ends, blocks, slots, on_device)
        hidden = self.draft.forward(tokens, on_device, common)
        for i, _, end in spans:
            self.coverage.advance(batch.req_ids[i], end, table[i])
        return hidden
