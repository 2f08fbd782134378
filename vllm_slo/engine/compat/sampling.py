# SPDX-License-Identifier: Apache-2.0
"""What sampling at tree nodes reads of vLLM's sampler (``vllm/v1/sample``)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.sampler import Sampler


def with_min_tokens_by_row(processor: Any, rows: Iterable[tuple[int, int]]) -> Any:
    """A logits processor of requests as one of sampler rows.

    Only minimum output lengths depend on the row, whose path counts as output. The other
    processors that vLLM allows beside speculation keep no state per request.

    ``rows``: (request, depth below the root) of each row.
    """
    if not isinstance(processor, MinTokensLogitsProcessor) or not processor.min_toks:
        return processor
    masked: list[tuple[int, int, bool]] = []  # row, stop token, of structured output
    for row, (index, depth) in enumerate(rows):
        if index not in processor.min_toks:
            continue
        least, output, stop_ids, is_structured = processor.min_toks[index]
        if len(output) + depth < least:
            masked.extend((row, stop_id, is_structured) for stop_id in stop_ids)
    by_row = copy.copy(processor)
    by_row.min_toks = dict.fromkeys(row for row, _, _ in masked)
    device = processor.device
    by_row.logits_slice = _slice(masked, device)
    by_row.restore_logits_slice = _slice([entry for entry in masked if entry[2]], device)
    return by_row


def _slice(
    entries: list[tuple[int, int, bool]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, token ids) as an index into logits."""
    rows = torch.tensor([row for row, _, _ in entries], dtype=torch.int32, device=device)
    tokens = torch.tensor([token for _, token, _ in entries], dtype=torch.int32, device=device)
    return rows, tokens


def draw_once(sampler: Sampler, logits: torch.Tensor, generator: torch.Generator) -> None:
    """Advance a generator as sampling one token with it does.

    Args:
        logits: of any step; only the shape counts, [rows, vocabulary].
        generator: is mutated.
    """
    sampler.topk_topp_sampler(torch.zeros_like(logits[:1]), {0: generator}, None, None)
