# SPDX-License-Identifier: Apache-2.0
"""AdaServe's speculation phase (section 4.3, step 1): a beam search of the draft over all requests.

Each pass extends all beams of all requests by a token. A beam's path lies in scratch blocks of its
own, so guesses never touch the blocks of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_slo.core.arrays import Ints
from vllm_slo.engine.worker.proposers.lm import DraftModel, common_metadata
from vllm_slo.engine.worker.transfer import to_device
from vllm_slo.engine.worker.tree_attention.path_rows import BeamRows


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
        tables: NDArray[np.int32],
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
            best, candidates = logp.topk(width, dim=-1)
            sums = (total.view(n, width, 1) + best.view(n, width, width)).view(n, -1)
            total, chosen = sums.topk(width, dim=-1)
            parent = chosen // width
            tokens = candidates.view(n, -1).gather(1, chosen)
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
        partly = np.flatnonzero(offset[owner])
        sources = self.tables[owner[partly], column[owner[partly]]].astype(np.int64)
        self._owner = owner
        self._table = to_device(table, device)
        self._first_slot = to_device(blocks[:, 0] * self.block_size + offset[owner], device)
        self._rows = BeamRows(to_device(np.stack((sources, blocks[partly, 0])), device))

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
        positions = to_device(np.minimum(lengths - 1, self.draft.max_len - 1), device)
        common = common_metadata(
            np.arange(n * width + 1),
            lengths,
            self._table,
            rows.slots[level - 1 :: level],
            positions,
        )
        hidden = self.draft.forward(tokens.view(-1).int(), positions, common, rows=rows)
        return self.draft.logits(hidden[: n * width])
