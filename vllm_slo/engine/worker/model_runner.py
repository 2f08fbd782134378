# SPDX-License-Identifier: Apache-2.0
"""vLLM's model runner with token trees: verify, sample at every node, walk, compact, draft.

A tree's tokens are scheduled and laid out as vLLM lays out a chain of draft tokens: root and nodes
in consecutive slots. Two things differ: a token's position (the root's plus its depth) and the
tokens that it sees (its ancestors). vLLM's sampler samples once at every node, and the walk goes to
the child that equals the sampled token. So the output has the model's own distribution, whatever
the sampling parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput, SamplerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_slo.core.speculation import token_tree
from vllm_slo.engine.compat.runner import (
    RunnerBatch,
    attention_metadata,
    kv_buffer,
    profile_sampler,
    registered_layers,
)
from vllm_slo.engine.speculation import messages
from vllm_slo.engine.speculation.draft_check import refuse
from vllm_slo.engine.telemetry.faults import Reported
from vllm_slo.engine.worker import tree_sampling
from vllm_slo.engine.worker.proposers import RemoteProposer, TreeProposer
from vllm_slo.engine.worker.transfer import to_device
from vllm_slo.engine.worker.tree_attention.layer_check import check_backends
from vllm_slo.engine.worker.tree_attention.path_rows import (
    MASKS,
    ROWS,
    MaskRows,
    VerifyRows,
    copy_blocks,
)
from vllm_slo.engine.worker.tree_attention.plan import (
    MaskPlan,
    RowPlan,
    TreeSlot,
    node_positions,
    plan_masks,
    plan_rows,
)
from vllm_slo.errors import ConfigError

_Plan = TypeVar("_Plan")


class TreeRunner(GPUModelRunner):
    """Adds trees to the runner of a platform, by cooperative inheritance."""

    drafter: TreeProposer | RemoteProposer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batch = RunnerBatch(self)
        self._layers: dict[str, Any] = {}  # the served model's attention layers
        self._slots: list[TreeSlot] = []
        self._verify: VerifyRows | MaskRows | None = None
        self._kept: dict[int, int] = {}
        self._drafts: messages.DraftTrees | None = None
        self._faults = Reported(
            "The trees of the step are left out: each request gets one token.",
            among_ranks=get_tp_group().world_size > 1,
        )
        self._unplanned = False  # whether the step's trees could not be laid out

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        check_backends(self._batch.attention_groups)
        self.drafter.bind(self._batch)
        served = self._served_layers()
        self._layers = {name: served[name] for name in self._batch.layer_names if name in served}

    def _served_layers(self) -> dict[str, Any]:
        """The layers that vLLM has registered, without those of drafts."""
        layers, drafts = registered_layers(self.vllm_config), self.drafter.layer_names
        return {name: layer for name, layer in layers.items() if name not in drafts}

    @torch.inference_mode()  # as steps run: what is compiled depends on it
    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, and with the memory that the largest step with trees takes: sampling at every
        node, the keys and values that compaction moves, and drafting beside both."""
        super().profile_run(*args, **kwargs)
        nodes = messages.most_nodes(self.drafter.config, self.max_num_reqs)
        logits = profile_sampler(self, min(self.max_num_reqs + nodes, self.max_num_tokens))
        kept = kv_buffer(list(self._served_layers().values()), nodes, logits)
        self.drafter.profile()
        self._sync_device()
        del logits, kept

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Draft, and verify trees, in every way that is compiled by itself. The KV cache is there,
        and no request is.

        Raises:
            ConfigError: the KV cache has too few blocks for that; also in the log.
        """
        try:
            messages.without_scratch(self.kv_cache_config, self.drafter.config, self.max_model_len)
        except ConfigError as error:
            refuse(error)
        self.drafter.warm_up()
        shapes = {}
        for layer in self._layers.values():
            shapes[layer.num_heads, layer.num_kv_heads, layer.head_size] = layer
        for layer in shapes.values():
            if hasattr(layer.impl, "warm_up_trees"):
                layer.impl.warm_up_trees(layer.kv_cache, self._batch.device_block_table)
        self._sync_device()

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: NDArray[np.int32]
    ) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self.drafter.begin_step(scheduler_output)
        self._slots = self._find_slots(messages.of(scheduler_output))
        self._unplanned = False
        if self._slots:
            self._place_nodes()
        return prepared

    def _planned(self, plan: Callable[[], _Plan]) -> _Plan | None:
        """What a policy plans for the step's trees. If it fails, no node of them is accepted, and
        so none needs to be right. All ranks plan the same step, and fail alike (`Reported`)."""
        with self._faults:
            return plan()
        self._unplanned = True
        return None

    def _place_nodes(self) -> None:
        """Give all tree nodes the positions of their depths."""
        found = self._planned(lambda: node_positions(self._slots))
        if found is None:
            return
        places, positions = to_device(found, self.device).unbind()
        self._batch.positions.index_copy_(0, places, positions)

    def _find_slots(self, step: messages.StepTrees) -> list[TreeSlot]:
        starts, computed = self._batch.query_start, self._batch.num_computed_tokens
        slots = []
        for name, parents in step.parents.items():
            index = self._batch.index_of[name]
            first = int(starts[index + 1]) - len(parents) - 1
            context = int(computed[index]) + first - int(starts[index])
            slots.append(TreeSlot(index, first, context, parents))
        return slots

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        self._verify = None
        if self._slots and not self._unplanned:
            groups = self._batch.attention_groups
            masked = all(getattr(group.backend, "takes_masks", False) for group in groups)
            (self._attach_masks if masked else self._attach_rows)(metadata, common)
        return metadata, common

    def maybe_get_kv_connector_output(
        self, *args: Any, **kwargs: Any
    ) -> AbstractContextManager[Any]:
        """As vLLM's, but a connector loads what was sent: the served model's KV. Drafts compute
        theirs anew."""
        if has_kv_transfer_group():
            get_forward_context().no_compile_layers = self._served_layers()
        return super().maybe_get_kv_connector_output(*args, **kwargs)

    def _attach_masks(self, metadata: dict[str, Any], common: CommonAttentionMetadata) -> None:
        """Attach masks of the tokens that each tree node sees, for a backend that takes masks."""
        plan = self._planned(
            lambda: plan_masks(self._slots, common.num_actual_tokens, common.num_reqs)
        )
        loose = None if plan is None else self._planned(self._loose_tokens)
        if plan is None or loose is None:
            return
        masks = TreeMasks(plan, self.device)
        self._verify = self._mask_rows(loose)
        for group in self._batch.attention_groups:
            for name in group.layer_names:
                setattr(metadata[name], ROWS, self._verify)
                setattr(metadata[name], MASKS, masks)

    def _attach_rows(self, metadata: dict[str, Any], common: CommonAttentionMetadata) -> None:
        """Lay the batch out as rows for a backend with a causal kernel only."""
        plan = self._planned(
            lambda: plan_rows(
                self._slots,
                self._batch.query_start[: common.num_reqs + 1],
                self._batch.sequence_lengths[: common.num_reqs],
                self._batch.block_table,
                self._batch.block_size,
                np.arange(self.drafter.scratch, self._batch.num_blocks),
                self.drafter.blocks_per_row,
            )
        )
        if plan is None:
            return
        self._verify = VerifyRows(plan, self.device)
        rows = _as_rows(common, plan, self.device)
        for group in self._batch.attention_groups:
            built = attention_metadata(group, rows)
            setattr(built, ROWS, self._verify)
            metadata.update(dict.fromkeys(group.layer_names, built))

    def _mask_rows(self, loose: list[int]) -> MaskRows:
        self._kept = {token: row for row, token in enumerate(loose)}
        return MaskRows(to_device(np.asarray(loose, dtype=np.int64), self.device))

    def _loose_tokens(self) -> list[int]:
        """Tokens that compaction may move: the nodes beyond each tree's leading chain."""
        return [
            slot.first + 1 + node
            for slot in self._slots
            for node in range(token_tree.leading_chain(slot.parents), len(slot.parents))
        ]

    def _sample(self, logits: Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        if logits is not None:
            self.drafter.compare_with_target(logits, self._root_rows())
        if logits is None or spec_decode_metadata is None:
            return super()._sample(logits, spec_decode_metadata)
        self._batch.complete_outputs()
        parents: list[Any] = [()] * len(self._batch.request_ids)
        tokens: list[Any] = [()] * len(self._batch.request_ids)
        for slot in self._slots:
            parents[slot.index] = slot.parents
            tokens[slot.index] = self._batch.draft_tokens(slot.index)
        sampling = self._batch.sampling
        if self._unplanned:
            return tree_sampling.sample_roots(self.sampler, logits, sampling, parents)[0]
        output, accepted = tree_sampling.sample(
            self.sampler, logits, sampling, tokens, parents, self._faults
        )
        if self._verify is not None:
            self._compact(accepted)
        return output

    def _root_rows(self) -> dict[str, int]:
        """Request id -> the row of its root among the step's logits."""
        nodes = {slot.index: len(slot.parents) for slot in self._slots}
        names = self._batch.request_ids
        sizes = [1 + nodes.get(i, 0) for i in range(len(names))]
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        return dict(zip(names, starts, strict=True))

    def _compact(self, accepted: list[list[int]]) -> None:
        """Move the accepted nodes' KV to the slots in which a plain decode would have put it."""
        if isinstance(self._verify, MaskRows):
            self._move_tokens(self._verify, accepted)
        elif self._verify is not None:
            self._take_over_paths(self._verify, accepted)

    def _take_over_paths(self, rows: VerifyRows, accepted: list[list[int]]) -> None:
        """Copy the scratch blocks of each accepted path to the request's own blocks."""
        size, table = self._batch.block_size, self._batch.block_table
        contexts = {slot.index: slot.context for slot in self._slots}
        sources: list[int] = []
        targets: list[int] = []
        for index, block in _accepted_paths(rows, accepted):
            column, offset = divmod(contexts[index], size)
            count = -(-(offset + 1 + len(accepted[index])) // size)
            sources.extend(range(block, block + count))
            targets.extend(table[index, column : column + count].tolist())
        if sources:
            copies = to_device(np.asarray((sources, targets), dtype=np.int64), self.device)
            for layer in self._layers.values():
                copy_blocks(layer.kv_cache, copies)

    def _move_tokens(self, rows: MaskRows, accepted: list[list[int]]) -> None:
        """Write the accepted nodes' keys and values once more, to the slots of their positions."""
        size, table = self._batch.block_size, self._batch.block_table
        kept, slots = [], []
        for slot in self._slots:
            for depth, node in enumerate(accepted[slot.index], start=1):
                if node + 1 == depth:
                    continue
                position = slot.context + depth
                kept.append(self._kept[slot.first + 1 + node])
                slots.append(int(table[slot.index, position // size]) * size + position % size)
        if not kept:
            return
        moves = to_device(np.asarray((kept, slots), dtype=np.int64), self.device)
        sources, targets = moves.unbind()
        for name, (key, value) in rows.kept.items():
            layer = self._layers[name]
            layer.impl.do_kv_cache_update(
                layer, key[sources], value[sources], layer.kv_cache, targets
            )

    # Drafting.

    def _input_fits_in_drafter(self, *_: Any) -> bool:
        """True: the proposer limits each request's positions by itself."""
        return True

    def propose_draft_token_ids(
        self, scheduler_output: SchedulerOutput, sampled_token_ids: Any, *_: Any
    ) -> list[list[int]]:
        self._drafts = self.drafter.propose(scheduler_output, sampled_token_ids)
        return [[] for _ in self._batch.request_ids]

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        done = super().sample_tokens(grammar_output)
        # vLLM builds attention metadata for dummy batches, too, between steps.
        self._slots, self._verify = [], None
        if isinstance(done, ModelRunnerOutput):
            report = self.drafter.take_report()
            report.failed += self._faults.take()
            messages.note_drafting(done, report)
        return done

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafts, self._drafts = self._drafts, None
        return drafts

    def shutdown(self) -> None:
        self.drafter.close()
        super().shutdown()


def _accepted_paths(rows: VerifyRows, accepted: list[list[int]]) -> Iterator[tuple[int, int]]:
    """(request, first scratch block) of each accepted path that leaves its tree's leading chain."""
    done: set[int] = set()
    for index, path, block in rows.paths:
        nodes = accepted[index]
        leaves = nodes and nodes[-1] + 1 != len(nodes)
        if leaves and index not in done and tuple(nodes) == path[: len(nodes)]:
            done.add(index)
            yield index, block


class TreeMasks:
    """A ``MaskPlan`` on the device; see ``tree_attention.cuda.TreePlan``."""

    def __init__(self, plan: MaskPlan, device: torch.device) -> None:
        self.ancestors = to_device(plan.ancestors, device)
        self.is_tree = to_device(plan.is_tree, device)
        self.max_tree = plan.max_tree


def _as_rows(
    common: CommonAttentionMetadata, plan: RowPlan, device: torch.device
) -> CommonAttentionMetadata:
    """The batch of ``common`` with one row for each path."""
    starts, lengths = plan.query_start.astype(np.int32), plan.seq_lens.astype(np.int32)
    owner = to_device(plan.owner, device)
    table = common.block_table_tensor[owner]
    columns = int(plan.table[:, 1].max()) + 1
    if columns > table.shape[1]:
        table = torch.nn.functional.pad(table, (0, columns - table.shape[1]))
    row, column, block = to_device(plan.table, device).unbind(1)
    table[row, column] = block.to(table.dtype)
    prefilling = common.is_prefilling
    return replace(
        common,
        query_start_loc=to_device(starts, device),
        query_start_loc_cpu=torch.from_numpy(starts),
        seq_lens=to_device(lengths, device),
        seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
        num_reqs=len(plan.owner),
        max_query_len=int(np.diff(plan.query_start).max()),
        max_seq_len=int(plan.seq_lens.max()),
        block_table_tensor=table,
        is_prefilling=None if prefilling is None else prefilling[torch.from_numpy(plan.owner)],
        positions=None,
    )
