# SPDX-License-Identifier: Apache-2.0
"""The KV blocks that requests are expected to hold. What they share counts once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.v1.request import Request

from vllm_slo.core.lengths.output_length import OutputLengthPredictor
from vllm_slo.engine.scheduling.kv_blocks import KVBlocks
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.slo_request import UNLABELLED, SharedPrefix, SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock


class ExpectedMemory:
    """What requests are expected to hold, by the lengths of answers and by what they share."""

    def __init__(
        self,
        tracker: RequestTracker,
        blocks: KVBlocks,
        clock: StepClock,
        lengths: OutputLengthPredictor,
    ) -> None:
        self._tracker = tracker
        self._blocks = blocks
        self._clock = clock
        self._lengths = lengths
        self._set_aside: dict[int, bool] = {}
        self._set_aside_of = -1

    def of_request(self, tracked: SLORequest) -> int:
        """KV blocks to set aside for a request, beside those that are set aside for others."""
        request, prefix = tracked.request, self.shared_prefix(tracked)
        if not (tracked.promised or prefix is None or self._is_set_aside(prefix)):
            prefix = None
        tokens = self._lengths.expected_hold(
            tracked.slo_class,
            _own_prompt(request, prefix),
            request.max_tokens,
            tracked.slo.expected_output_tokens,
            request.num_output_tokens,
        )
        return self._blocks.needed(tokens)

    def shared_prefix(self, tracked: SLORequest) -> SharedPrefix | None:
        """What a request shares with others, or is to share once it starts."""
        started = tracked.request.num_computed_tokens > 0
        return self._blocks.shared_prefix(tracked.request) if started else tracked.shared_prefix

    def _is_set_aside(self, prefix: SharedPrefix) -> bool:
        """Whether a promised request holds the blocks of a prefix, or is to; found out once a step
        for each."""
        if self._set_aside_of != self._clock.ticks:
            self._set_aside_of = self._clock.ticks
            self._set_aside.clear()
        last = prefix.blocks[-1]
        if last not in self._set_aside:
            self._set_aside[last] = any(
                self._blocks.is_held_by(t.request, prefix)
                if t.request.num_computed_tokens
                else t.shared_prefix is not None and last in t.shared_prefix.blocks
                for t in self._tracker.live.values()
                if t.promised
            )
        return self._set_aside[last]

    def of_decodes(
        self, decodes: Sequence[SLORequest], prefixes: Sequence[SharedPrefix | None]
    ) -> tuple[int, int]:
        """KV blocks to set aside for requests that decode beside what they share, and the sum of
        their squares."""
        by_class: defaultdict[str, list[SLORequest]] = defaultdict(list)
        prompts: defaultdict[str, list[int]] = defaultdict(list)
        for tracked, prefix in zip(decodes, prefixes, strict=True):
            by_class[tracked.slo_class].append(tracked)
            prompts[tracked.slo_class].append(_own_prompt(tracked.request, prefix))
        blocks = squares = 0
        for name, members in by_class.items():
            columns = (
                prompts[name],
                [t.request.max_tokens for t in members],
                [t.slo.expected_output_tokens or 0 for t in members],
                [t.recorded for t in members],
            )
            holds = self._holds(name, columns)
            blocks += int(holds.sum())
            squares += int((holds * holds).sum())
        return blocks, squares

    def holds(
        self, requests: Iterable[Request], beside: Iterable[SharedPrefix | None] = ()
    ) -> dict[str, int]:
        """KV blocks that requests are expected to hold at most, whether they carry an SLO or not;
        at least what they need to go on. What several of them share counts for the first, and not
        at all if it is ``beside`` them."""
        counted = {number for prefix in beside if prefix is not None for number in prefix.blocks}
        by_label: defaultdict[str, list[tuple[str, int, int, int, int, int]]] = defaultdict(list)
        for request in requests:
            tracked = self._tracker.get(request.request_id)
            label, declared = UNLABELLED, 0
            if tracked is not None:
                label, declared = tracked.slo_class, tracked.slo.expected_output_tokens or 0
            prefix = self._blocks.shared_prefix(request)
            if prefix is not None and prefix.blocks[-1] not in counted:
                counted.update(prefix.blocks)
                prefix = None
            shared = self._blocks.filled(prefix.tokens) if prefix else 0
            by_label[label].append(
                (
                    request.request_id,
                    self._blocks.needed(request.num_tokens) - shared,
                    _own_prompt(request, prefix),
                    request.max_tokens,
                    declared,
                    request.num_output_tokens,
                )
            )
        holds: dict[str, int] = {}
        for label, rows in by_label.items():
            names, least, *columns = zip(*rows, strict=True)
            most = np.maximum(self._holds(label, columns), least).tolist()
            holds.update(zip(names, most, strict=True))
        return holds

    def _holds(self, label: str, columns: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """(n,) KV blocks that requests of a label are expected to hold at most; ``columns`` as in
        `OutputLengthPredictor.expected_holds`."""
        tokens = self._lengths.expected_holds(label, np.array(columns, dtype=np.int64))
        return self._blocks.needed_by_each(tokens)


def _own_prompt(request: Request, shared: SharedPrefix | None) -> int:
    """Tokens of a prompt beside what it shares."""
    return max(request.num_prompt_tokens - (shared.tokens if shared else 0), 0)
