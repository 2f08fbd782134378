# SPDX-License-Identifier: Apache-2.0
"""The draft models of an engine: loaded beside the served one, caught up, put to work in chains."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_slo.core.speculation.model_chain import Plan
from vllm_slo.engine.compat.runner import RunnerBatch
from vllm_slo.engine.speculation import messages
from vllm_slo.engine.speculation.messages import DraftingReport, DraftTrees
from vllm_slo.engine.speculation.scratch_blocks import scratch_blocks_per_row
from vllm_slo.engine.worker.proposers.beam import BeamSearch
from vllm_slo.engine.worker.proposers.chain import Ahead, ChainSearch, DraftKVState, Member
from vllm_slo.engine.worker.proposers.lm import DraftCoverage, DraftModel

logger = init_logger(__name__)

Ints = NDArray[np.int64]

GREEDY_TEMPERATURE = 0.5
"""What a greedy request's draft logits are divided by. The target takes its likeliest token, not
one drawn by its probability, so a guess is right more often than the draft's probability says:
taken as they are, the beams would drop paths of best guesses for less likely ones. With this the
draft's probabilities are close to what is accepted, whatever the calibration makes of the rest."""


class TreeProposer:
    """Drafts candidate trees with small models; named by ``--speculative-config``.

    Args:
        vllm_config: of the engine; the draft models' names are in its ``additional_config``.

    Attributes:
        models: the pool, by place; those that failed are not in it.
        report: what drafting was like since it was last taken.

    Raises:
        ConfigError: the engine was told only a part of what trees need.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = messages.speculation_of(vllm_config)
        assert config is not None  # it would have been refused
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
        """Load the drafts beside the target. One that cannot be loaded is left out."""
        device = torch.device(current_platform.device_type)
        for place, name in enumerate(self.config.pool):
            try:
                draft = DraftModel(self.vllm_config, name, device, f"draft{place}")
                draft.load()
                self.models[place] = draft
            except Exception as error:  # noqa: BLE001 - out of memory, most of all: the others serve
                self.drop(place, error)
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
        self.blocks_per_row = scratch_blocks_per_row(self.block_size, self.config.max_depth)
        num_blocks = batch.num_blocks
        self.scratch = num_blocks - messages.scratch_blocks(self.config, self.block_size)
        trusted = self.vllm_config.kv_transfer_config is None
        for place, model in self.models.items():
            model.bind(batch.attention_groups)
            self.coverage[place] = DraftCoverage(num_blocks, self.block_size, trust_hits=trusted)

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
        """Nothing is open; the models are the runner's to release."""

    def take_report(self) -> DraftingReport:
        """What drafting was like since this was last asked."""
        report, self.report = self.report, DraftingReport()
        report.dropped, self._dropped = self._dropped, {}
        return report

    # One step.

    def propose(self, output: SchedulerOutput, sampled: list[list[int]]) -> DraftTrees:
        """Candidate trees for the requests of a step that have just got tokens.

        A model that fails is dropped, and nothing is drafted in this step.

        Args:
            output: the step.
            sampled: tokens that each request of the batch has got, by place.
        """
        wanted = messages.of(output)
        plan = wanted.plan
        if not plan.depth or not all(place in self.models for place in plan.chain):
            return DraftTrees.none()
        began_s = time.perf_counter()
        names = self.batch.request_ids
        speaking = [i for i, name in enumerate(names) if name not in wanted.silent]
        self._working = plan.chain[0]
        try:
            return self._draft(plan, self._ends(speaking, output, sampled), sampled)
        except Exception as error:  # noqa: BLE001 - serving goes on without it
            self.drop(self._working, error)
            return DraftTrees.none()
        finally:
            self.report.seconds += time.perf_counter() - began_s

    def _ends(
        self, speaking: Sequence[int], output: SchedulerOutput, sampled: list[list[int]]
    ) -> dict[int, int]:
        """Committed tokens of each request, by its place in the batch."""
        lengths = self.batch.num_tokens
        return {
            i: int(lengths[i]) if sampled[i] else self.batch.computed_after(output, i)
            for i in speaking
        }

    def _draft(self, plan: Plan, ends: Mapping[int, int], sampled: list[list[int]]) -> DraftTrees:
        asking = {i for i in ends if sampled[i]}
        spans = [self._lacking(place, plan, ends, asking) for place in plan.chain]
        alone = len(plan.chain) == 1 and plan.width > 1
        most = self.config.draft_tokens // (plan.width if alone else 1)
        ready = [
            i
            for i in spans[0]
            if i in asking and all(found.get(i, (0, 0))[1] == ends[i] for found in spans)
        ][: max(most, 1)]
        order = [*ready, *(i for i in ends if i not in set(ready))]
        if not order:
            return DraftTrees.none()
        ahead = self._ahead(order, len(ready), ends, plan.depth)
        search = ChainSearch(
            [Member(place, self.models[place]) for place in plan.chain],
            [self._standing(found, order, len(ready), ends) for found in spans],
            ahead,
            self._temperatures(np.asarray(ready, dtype=np.int64)),
            plan,
            self.report,
            self._at_work,
        )
        if alone and ready:
            found = self._beams(plan, search, ahead)
        else:
            search.run()
            found = search.trees()
        self._account(search, order, len(ready))
        names = [self.batch.request_ids[i] for i in ready]
        self._compare(plan, names, search.roots)
        return DraftTrees(names, [], *found, width=plan.width, model=plan.chain[-1])

    def _at_work(self, place: int) -> None:
        self._working = place

    def _lacking(
        self, place: int, plan: Plan, ends: Mapping[int, int], asking: set[int]
    ) -> dict[int, tuple[int, int]]:
        """What a model lacks of each request, (start, stop), shortest first, as far as one pass
        goes; those who ask come first."""
        coverage, table = self.coverage[place], self.batch.block_table
        starts = {}
        for i, end in ends.items():
            name = self.batch.request_ids[i]
            coverage.confirm(name, self.batch.token_ids[i, : end - 1], table[i])
            starts[i] = coverage.tokens(name)
        budget = self.vllm_config.scheduler_config.max_num_batched_tokens
        if place != plan.chain[0]:
            budget -= len(asking) * plan.window  # its first pass looks at guesses, too
        found = {}
        for i in sorted(ends, key=lambda i: (i not in asking, ends[i] - starts[i])):
            start = starts[i]
            longest = min(
                self.models[place].max_len, self.batch.allocated_tokens(i), start + budget
            )
            stop = min(ends[i], longest)
            if stop > start:
                found[i] = start, stop
                budget -= stop - start
        return found

    def _ahead(
        self, order: Sequence[int], ready: int, ends: Mapping[int, int], depth: int
    ) -> Ahead:
        """The requests of the batch in ``order``; the first of them are guessed for."""
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

    def _standing(
        self,
        spans: Mapping[int, tuple[int, int]],
        order: Sequence[int],
        ready: int,
        ends: Mapping[int, int],
    ) -> DraftKVState:
        """Where a model stands before its first pass."""
        computed = [min(spans[i][0], ends[i] - 1) for i in order[:ready]]
        others = [(row, *spans[i]) for row, i in enumerate(order) if row >= ready and i in spans]
        return DraftKVState(np.asarray(computed, dtype=np.int64), others)

    def _beams(
        self, plan: Plan, search: ChainSearch, ahead: Ahead
    ) -> tuple[list[int], Ints, NDArray[np.int32], NDArray[np.float64]]:
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
        found = beams.run(roots, plan.depth, plan.width)
        flat = (
            found.tokens.flatten().cpu().numpy(),
            found.parents.flatten().int().cpu().numpy(),
            found.probabilities.flatten().double().cpu().numpy(),
        )
        passes = plan.depth - 1
        if passes:
            each_s = (time.perf_counter() - began_s) / passes
            self.report.passes += [(member.place, n * plan.width, each_s)] * passes
        return [plan.depth * plan.width] * n, *flat

    def _temperatures(self, index: Ints) -> Tensor:
        """What each request's logits are divided by; greedy ones: ``GREEDY_TEMPERATURE``."""
        given = self.batch.sampling.temperature
        if given is None:
            return torch.full((len(index), 1), GREEDY_TEMPERATURE, device=self.batch.device)
        found = given[torch.from_numpy(index).to(given.device)].unsqueeze(1)
        return torch.where(found < 1e-5, torch.full_like(found, GREEDY_TEMPERATURE), found)

    def _account(self, search: ChainSearch, order: Sequence[int], ready: int) -> None:
        """Note what each model has computed now, and what it has guessed besides."""
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

    # How alike models are.

    def _compare(self, plan: Plan, names: list[str], roots: dict[int, Tensor]) -> None:
        """Compare what the models of a chain would say next; the target's turn comes with the
        next step."""
        self._roots = names, roots
        for drafter, verifier in zip(plan.chain[:-1], plan.chain[1:], strict=True):
            if drafter in roots and verifier in roots:
                score = similarity(roots[drafter], roots[verifier])
                self.report.similarities.append((drafter, verifier, score))

    def compare_with_target(self, logits: Tensor, rows: Mapping[str, int]) -> None:
        """Compare what the models that drafted last would have said next with what the target
        says.

        Args:
            logits: the target's, [rows, vocabulary].
            rows: request -> the row of its root.
        """
        (names, roots), self._roots = self._roots, ([], {})
        for place, said in roots.items():
            known = [(i, rows[name]) for i, name in enumerate(names[: len(said)]) if name in rows]
            if known:
                mine, theirs = zip(*known, strict=True)
                score = similarity(said[list(mine)], logits[list(theirs)].float().softmax(dim=-1))
                self.report.similarities.append((place, len(self.config.pool), score))


def similarity(p: Tensor, q: Tensor) -> float:
    """1 - total variation distance, averaged (SpecRouter, equations 5 and 6).

    Args:
        p, q: distributions, [rows, vocabulary].
    """
    return 1.0 - 0.5 * float((p - q).abs().sum(dim=-1).mean())
