# SPDX-License-Identifier: Apache-2.0
"""What vLLM's V2 model runner keeps of requests, and what it takes for granted in a step's message.

A small model of ``vllm/v1/worker/gpu/model_runner.py``: ``finish_requests``, ``add_requests`` and
``update_requests``, in this order, and of what the kernels behind them read and write.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class Slot:
    """A request on the device.

    Attributes:
        total: its tokens, those included that were sampled here and are not yet told.
        computed: tokens whose keys and values are there.
        blocks: that hold them.
    """

    total: int
    computed: int
    blocks: list[int]


class Place(NamedTuple):
    """Where a block stands: which of a request's blocks it is."""

    name: str
    index: int


class V2Requests:
    """Follows the messages of a scheduler, and fails where the runner would fail or compute
    something else.

    Args:
        slots: requests that the runner has room for.
        block_size: tokens per block.

    Attributes:
        seen: how often what happened.
        sampled: tokens of each request so far; a resumed one must bring all of them.
    """

    def __init__(self, slots: int, block_size: int) -> None:
        self.slots: dict[str, Slot] = {}
        self.seen: Counter[str] = Counter()
        self.sampled: Counter[str] = Counter()
        self._room = slots
        self._block_size = block_size

    def step(self, output: SchedulerOutput) -> None:
        preempted = output.preempted_req_ids or set()
        self.seen["preempted"] += len(preempted)
        for name in output.finished_req_ids | preempted:
            self.slots.pop(name, None)
        self._add(output)
        self._update(output)
        assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
        written: dict[int, Place] = {}
        for name, tokens in output.num_scheduled_tokens.items():
            places = self._compute(name, tokens, output)
            assert written.keys().isdisjoint(places), "a shared block"
            written |= places
        self._check_held(written)

    def _check_held(self, written: dict[int, Place]) -> None:
        """Others may hold a block that is written now only as a whole block of their own prefix.

        vLLM lets a request find the prefix of one that is computed in the same step: each layer
        writes keys and values before it reads them."""
        for name, slot in self.slots.items():
            assert len(set(slot.blocks)) == len(slot.blocks), "a block twice"
            for index, block in enumerate(slot.blocks):
                place = written.get(block)
                if place is not None and place.name != name:
                    end = (index + 1) * self._block_size
                    assert place.index == index, "a shared block"
                    assert end <= self.slots[place.name].computed, "a shared block"
                    assert end <= slot.computed, "a shared block"

    def _add(self, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.slots, "no part of a session: it is new, or it is resumed"
            assert len(self.slots) < self._room, "No free indices"
            assert new.prefill_token_ids is not None
            assert new.prompt_len <= len(new.prefill_token_ids)
            total = new.prompt_len + self.sampled[new.req_id]
            assert len(new.prefill_token_ids) == total, "a token on its way would be drawn again"
            assert new.num_computed_tokens < total
            self.seen["resumed" if self.sampled[new.req_id] else "new"] += 1
            self.slots[new.req_id] = Slot(total, new.num_computed_tokens, [*new.block_ids[0]])

    def _update(self, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        assert not cached.resumed_req_ids, "they are sent as new ones"
        added = {new.req_id for new in output.scheduled_new_reqs}
        assert added.isdisjoint(cached.req_ids)
        assert added.union(cached.req_ids) == output.num_scheduled_tokens.keys()
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            slot = self.slots[name]
            assert computed == slot.computed
            slot.blocks += blocks[0] if blocks else []

    def _compute(self, name: str, tokens: int, output: SchedulerOutput) -> dict[int, Place]:
        """Run a request; returns the blocks that are written, and where each stands in it."""
        slot = self.slots[name]
        assert not output.scheduled_spec_decode_tokens.get(name)
        first, end = slot.computed, slot.computed + tokens
        assert first < end <= slot.total, "tokens that nobody has drawn"
        assert end <= len(slot.blocks) * self._block_size, "no block to write to"
        slot.computed = end
        if end == slot.total:
            slot.total += 1
            self.sampled[name] += 1
            self.seen["decoded"] += tokens == 1
        else:
            self.seen["chunks"] += 1
        places = range(first // self._block_size, (end - 1) // self._block_size + 1)
        return {slot.blocks[index]: Place(name, index) for index in places}
