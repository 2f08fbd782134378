# SPDX-License-Identifier: Apache-2.0
"""The draft models of an engine: loaded beside the served one, caught up, put to work in chains."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_slo.core.arrays import Floats, Ints, Parents
from vllm_slo.core.speculation.model_chain import Plan
from vllm_slo.engine.compat.runner import RunnerBatch, kv_buffer, registered_layers
from vllm_slo.engine.speculation import messages
from vllm_slo.engine.speculation.messages import DraftingReport, DraftTrees
from vllm_slo.engine.worker.proposers.beam import BeamSearch
from vllm_slo.engine.worker.proposers.chain import Ahead, ChainSearch, DraftKVState, Member
from vllm_slo.engine.worker.proposers.lm import DraftCoverage, DraftModel
from vllm_slo.engine.worker.proposers.warm_up import draft_in_every_way
from vllm_slo.engine.worker.transfer import to_device
from vllm_slo.errors import ConfigError

logger = init_logger(__name__)


GREEDY_TEMPERATURE = 0.5
"""A greedy request's draft logits are divided by it. The target takes its likeliest token, so a
guess is right more often than the draft's probability says. Without the division the beams would
drop paths of best guesses for less likely ones; with it the draft's probabilities are close to the
acceptance rates. The calibration corrects the rest."""


class TreeProposer:
    """Drafts candidate trees with small models; named by ``--speculative-config``.

    Args:
        vllm_config: of the engine; the draft models' names are in its ``additional_config``.

    Attributes:
        models: place in the pool -> draft model; models that failed are not in it.
        report: on drafting since it was last taken.

    Raises:
        ConfigError: some of the flags that trees need are missing.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = messages.speculation_of(vllm_config)
        assert config is not None  # checked before the model is loaded
        self.vllm_config = vllm_config
        self.config = config
        self.models: dict[int, DraftModel] = {}
        self.coverage: dict[int, DraftCoverage] = {}
        self.report = DraftingReport()
        self._dropped: dict[int, str] = {}
        self._roots: tuple[list[str], dict[int, Tensor]] = [], {}
        self._working = 0

    # Life of the models.

    def load_model(self, _target: Any) -> None:
        """Load the draft models beside the target. One that cannot be loaded is left out."""
        device = torch.device(current_platform.device_type)
        for place, name in enumerate(self.config.pool):
            failure: Exception | None = None
            try:
                draft = DraftModel(self.vllm_config, name, device, f"draft{place}")
                draft.load()
                self.models[place] = draft
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - mostly out of memory: the others serve
                failure = error
            failure = _of_any_rank(failure)
            if failure is not None:
                self.drop(place, failure)
        sizes = [draft.parameters for draft in self.models.values()]
        if sizes != sorted(sizes):
            logger.warning(
                "vllm-slo: speculation.draft_model: the models are not listed by size (%s "
                "parameters); list the smallest first, for chains go from first to last",
                ", ".join(map(str, sizes)),
            )

    @property
    def layer_names(self) -> set[str]:
        """Attention layers of all drafts."""
        return {name for model in self.models.values() for name in model.layer_names}

    def bind(self, batch: RunnerBatch) -> None:
        """Take the runner's batch and KV cache, once they are there."""
        self.batch = batch
        self.block_size = batch.block_size
        self.blocks_per_row = messages.scratch_blocks_per_row(self.config, self.block_size)
        num_blocks = batch.num_blocks
        self.scratch = num_blocks - messages.scratch_blocks(self.config, self.block_size)
        trusted = self.vllm_config.kv_transfer_config is None
        for place, model in self.models.items():
            model.bind(batch.attention_groups)
            self.coverage[place] = DraftCoverage(num_blocks, self.block_size, trust_hits=trusted)

    def profile(self) -> None:
        """Take the memory that drafting takes at most, while vLLM measures what the engine needs.

        The draft's largest pass reads as many tokens as a step, its largest search has
        ``draft_tokens`` rows and keeps the keys and values of all its passes.
        """
        config, layers = self.config, registered_layers(self.vllm_config)
        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        rows = min(config.draft_tokens * (config.max_depth + 1), tokens)
        for model in self.models.values():
            logits = model.profile(tokens, rows)
            own = [layers[name] for name in model.layer_names]
            kept = kv_buffer(own, config.draft_tokens * config.max_depth, logits)
            (logits.float() / GREEDY_TEMPERATURE).log_softmax(dim=-1).topk(config.max_width)
            del logits, kept

    def warm_up(self) -> None:
        """Draft once in every way, before the first request: nothing is compiled later, and a model
        that cannot draft ends the start."""
        rows = np.arange(self.config.draft_tokens * self.blocks_per_row)
        draft_in_every_way(
            self.models,
            self.config,
            self.scratch + rows.reshape(-1, self.blocks_per_row),
            self.block_size,
            self.batch.max_requests,
        )

    def begin_step(self, output: SchedulerOutput) -> None:
        """Follow what the scheduler allocated and freed."""
        for coverage in self.coverage.values():
            coverage.begin_step(output)

    def drop(self, place: int, error: Exception) -> None:
        """Go on without a model, for good."""
        self.models.pop(place, None)
        reason = f"{type(error).__name__}: {error}"
        self._dropped[place] = reason
        left = f"{len(self.models)} other draft models" if self.models else "no speculation"
        logger.error(
            "vllm-slo: the draft model %s failed (%s); serving with %s",
            *(self.config.pool[place], reason, left),
            exc_info=error,
        )

    def close(self) -> None:
        """Nothing to close: the runner releases the models."""

    def take_report(self) -> DraftingReport:
        """The report on drafting since the last call."""
        report, self.report = self.report, DraftingReport()
        report.dropped, self._dropped = self._dropped, {}
        return report

    # One step.

    def propose(self, output: SchedulerOutput, sampled: list[list[int]]) -> DraftTrees:
        """Candidate trees for the requests that have got tokens in a step.

        A model that fails is dropped, and nothing is drafted in this step. Of several workers
        (tensor parallelism) each is needed in every pass, so there a failure ends the engine.

        Args:
            output: the step.
            sampled: new tokens of each request, by row.
        """
        step = messages.of(output)
        plan = step.plan
        if not plan.depth or not all(place in self.models for place in plan.chain):
            return DraftTrees.none()
        began_s = time.perf_counter()
        names = self.batch.request_ids
        drafted_for = [i for i, name in enumerate(names) if name not in step.silent]
        self._working = plan.chain[0]
        try:
            return self._draft(plan, self._ends(drafted_for, output, sampled), sampled)
        except Exception as error:
            if get_tp_group().world_size > 1:
                raise  # the other ranks wait for this one, in the middle of a pass
            self.drop(self._working, error)
            return DraftTrees.none()
        finally:
            self.report.seconds += time.perf_counter() - began_s

    def _ends(
        self, rows: Sequence[int], output: SchedulerOutput, sampled: list[list[int]]
    ) -> dict[int, int]:
        """Row -> committed tokens of its request."""
        lengths = self.batch.num_tokens
        return {
            i: int(lengths[i]) if sampled[i] else self.batch.computed_after(output, i) for i in rows
        }

    def _draft(self, plan: Plan, ends: Mapping[int, int], sampled: list[list[int]]) -> DraftTrees:
        asking = {i for i in ends if sampled[i]}
        spans = [self._lacking(place, plan, ends, asking) for place in plan.chain]
        alone = len(plan.chain) == 1 and plan.width > 1
        most = self.config.draft_tokens // (plan.width if alone else 1)
        ready = [
            i
            for i in spans[0]
            if i in asking and all(span.get(i, (0, 0))[1] == ends[i] for span in spans)
        ][: max(most, 1)]
        order = [*ready, *(i for i in ends if i not in set(ready))]
        if not order:
            return DraftTrees.none()
        ahead = self._ahead(order, len(ready), ends, plan.depth)
        search = ChainSearch(
            [Member(place, self.models[place]) for place in plan.chain],
            [self._kv_state(span, order, len(ready), ends) for span in spans],
            ahead,
            self._temperatures(np.asarray(ready, dtype=np.int64)),
            plan,
            self.report,
            self._at_work,
        )
        if alone and ready:
            trees = self._beams(plan, search, ahead)
        else:
            search.run()
            trees = search.trees()
        self._account(search, order, len(ready))
        names = [self.batch.request_ids[i] for i in ready]
        self._compare(plan, names, search.roots)
        return DraftTrees(
            names, [], *trees, width=plan.width, model=plan.chain[-1], depth=plan.depth
        )

    def _at_work(self, place: int) -> None:
        self._working = place

    def _lacking(
        self, place: int, plan: Plan, ends: Mapping[int, int], asking: set[int]
    ) -> dict[int, tuple[int, int]]:
        """Row -> (start, stop) of tokens that a model has not computed, as many as one pass holds.

        Requests that are drafted for come first, then those with the fewest such tokens.
        """
        coverage, table = self.coverage[place], self.batch.block_table
        starts = {}
        for i, end in ends.items():
            name = self.batch.request_ids[i]
            coverage.confirm(name, self.batch.token_ids[i, : end - 1], table[i])
            starts[i] = coverage.tokens(name)
        budget = self.vllm_config.scheduler_config.max_num_batched_tokens
        if place != plan.chain[0]:
            budget -= len(asking) * plan.window  # its first pass looks at guesses, too
        spans = {}
        for i in sorted(ends, key=lambda i: (i not in asking, ends[i] - starts[i])):
            start = starts[i]
            longest = min(
                self.models[place].max_len, self.batch.allocated_tokens(i), start + budget
            )
            stop = min(ends[i], longest)
            if stop > start:
                spans[i] = start, stop
                budget -= stop - start
        return spans

    def _ahead(
        self, order: Sequence[int], ready: int, ends: Mapping[int, int], depth: int
    ) -> Ahead:
        """The requests in ``order``, of which the first ``ready`` are drafted for."""
        rows = np.arange(ready * self.blocks_per_row).reshape(ready, self.blocks_per_row)
        return Ahead(
            self.batch.token_ids,
            np.asarray(order, dtype=np.int64),
            np.asarray([ends[i] for i in order], dtype=np.int64),
            self.batch.block_table,
            np.asarray([self.batch.allocated_tokens(i) for i in order]) // self.block_size,
            self.scratch + rows,
            depth,
            self.block_size,
        )

    def _kv_state(
        self,
        spans: Mapping[int, tuple[int, int]],
        order: Sequence[int],
        ready: int,
        ends: Mapping[int, int],
    ) -> DraftKVState:
        """What a model has computed before its first pass."""
        computed = [min(spans[i][0], ends[i] - 1) for i in order[:ready]]
        others = [(row, *spans[i]) for row, i in enumerate(order) if row >= ready and i in spans]
        return DraftKVState(np.asarray(computed, dtype=np.int64), others)

    def _beams(
        self, plan: Plan, search: ChainSearch, ahead: Ahead
    ) -> tuple[list[int], Ints, Parents, Floats]:
        """Trees of a model that works alone: a beam search from its roots."""
        member, n = search.chain[0], len(search.counts)
        roots = search.read()
        began_s = time.perf_counter()
        beams = BeamSearch(
            member.model,
            ahead.ends[:n],
            self.batch.block_table[ahead.places[:n]],
            search.temperatures,
            scratch=self.scratch,
            block_size=self.block_size,
            blocks_per_row=self.blocks_per_row,
        )
        trees = beams.run(roots, plan.depth, plan.width)
        flat = (
            trees.tokens.flatten().cpu().numpy(),
            trees.parents.flatten().int().cpu().numpy(),
            trees.probabilities.flatten().double().cpu().numpy(),
        )
        passes = plan.depth - 1
        if passes:
            each_s = (time.perf_counter() - began_s) / passes
            self.report.passes += [(member.place, n * plan.width, each_s)] * passes
        return [plan.depth * plan.width] * n, *flat

    def _temperatures(self, index: Ints) -> Tensor:
        """The divisor of each request's logits, [n, 1]; of greedy ones `GREEDY_TEMPERATURE`."""
        given = self.batch.sampling.temperature
        if given is None:
            return torch.full((len(index), 1), GREEDY_TEMPERATURE, device=self.batch.device)
        own = given[to_device(index, given.device)].unsqueeze(1)
        return torch.where(own < 1e-5, torch.full_like(own, GREEDY_TEMPERATURE), own)

    def _account(self, search: ChainSearch, order: Sequence[int], ready: int) -> None:
        """Note what each model has computed in this step, and its guesses behind that."""
        table, names = self.batch.block_table, self.batch.request_ids
        ends, guesses = search.ahead.ends.tolist(), search.ahead.guesses
        for member, kv_states in zip(search.chain, search.kv_states, strict=True):
            coverage = self.coverage[member.place]
            for row, _, stop in kv_states.caught_up.tolist():
                coverage.advance(names[order[row]], stop, table[order[row]])
            for row, computed in enumerate(kv_states.computed.tolist()):
                name, end = names[order[row]], ends[row]
                if min(computed, end) > coverage.tokens(name):
                    coverage.advance(name, min(computed, end), table[order[row]])
                own = min(computed, self.batch.allocated_tokens(order[row]))
                if own > end:
                    coverage.guess(name, guesses[row, : own - end])

    # How similar models are.

    def _compare(self, plan: Plan, names: list[str], roots: dict[int, Tensor]) -> None:
        """Compare the next-token distributions of the models of a chain; that of the target comes
        with the next step."""
        self._roots = names, roots
        for drafter, verifier in zip(plan.chain[:-1], plan.chain[1:], strict=True):
            if drafter in roots and verifier in roots:
                score = similarity(roots[drafter], roots[verifier])
                self.report.similarities.append((drafter, verifier, score))

    def compare_with_target(self, logits: Tensor, rows: Mapping[str, int]) -> None:
        """Compare the next-token distributions of the models that drafted last with the target's.

        Args:
            logits: the target's, [rows, vocabulary].
            rows: request id -> the row of its root.
        """
        (names, roots), self._roots = self._roots, ([], {})
        for place, drafted in roots.items():
            pairs = [
                (i, rows[name]) for i, name in enumerate(names[: len(drafted)]) if name in rows
            ]
            if pairs:
                own, theirs = map(list, zip(*pairs, strict=True))
                score = similarity(drafted[own], logits[theirs].float().softmax(dim=-1))
                self.report.similarities.append((place, len(self.config.pool), score))


def _of_any_rank(failure: Exception | None) -> Exception | None:
    """The failure of this worker, or else that of another one, so that all decide alike."""
    group = get_tp_group()
    if group.world_size == 1:
        return failure
    reasons: list[str | None] = [None] * group.world_size
    own = None if failure is None else f"{type(failure).__name__}: {failure}"
    torch.distributed.all_gather_object(reasons, own, group=group.cpu_group)
    failed = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
    return failure or (RuntimeError("; ".join(failed)) if failed else None)


def similarity(p: Tensor, q: Tensor) -> float:
    """1 - total variation distance, averaged (SpecRouter, equations 5 and 6).

    Args:
        p, q: distributions, [rows, vocabulary].
    """
    return 1.0 - 0.5 * float((p - q).abs().sum(dim=-1).mean())
