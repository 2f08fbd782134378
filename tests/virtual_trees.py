# SPDX-License-Identifier: Apache-2.0
"""The virtual engine with a virtual draft: real scheduler objects, trees of known chances."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from vllm_slo import tiny
from vllm_slo.core.step_time import StepTimeModel
from vllm_slo.engine import trees
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.serve_args import TREE_PROPOSER, TREE_WORKER
from vllm_slo.sim.harness import EngineShape, VirtualEngine

SPECULATION = {"max_depth": 5, "max_width": 3, "max_nodes": 15, "draft_tokens": 64}


class TreeEngine(VirtualEngine):
    """A virtual engine whose draft guesses the best child right with probability ``honest``, each
    other with 15% of the rest; its own probabilities are the true ones.

    Args:
        model: true and believed step times without drafting.
        honest: chance of the best child of each node.
        pass_s: seconds of one pass of the draft.
    """

    def __init__(
        self,
        model: StepTimeModel,
        *,
        honest: float = 0.7,
        pass_s: float = 0.002,
        shape: EngineShape | None = None,
        slo_config: dict[str, Any] | None = None,
        speculation: dict[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        said = {**SPECULATION, **(speculation or {}), "draft_model": str(tiny.path("draft"))}
        super().__init__(
            Scheduler,
            tiny.path("target"),
            lambda shape: model.predict_s(shape.tokens, shape.context_tokens) + self.drafting_s(),
            shape or EngineShape(max_model_len=512, max_num_seqs=64, block_size=32),
            believed=model,
            slo_config={**(slo_config or {}), "speculation": said},
            seed=seed,
            worker_cls=TREE_WORKER,
            speculative_config={
                "method": "custom_class",
                "model": TREE_PROPOSER,
                "num_speculative_tokens": said["max_nodes"],
            },
        )
        self.honest = honest
        self.pass_s = pass_s
        self.seen_trees: list[tuple[SchedulerOutput, trees.StepTrees]] = []
        self.accepted: list[int] = []
        self._next_token = 100

    def drafting_s(self) -> float:
        """Of the step just scheduled."""
        return trees.of(self.history[-1]).depth * self.pass_s

    def step(self) -> SchedulerOutput:
        output = super().step()
        self.seen_trees.append((output, trees.of(output)))
        self.scheduler.update_draft_token_ids(self._draft(output))
        return output

    def _draft(self, output: SchedulerOutput) -> trees.DraftTrees:
        step = trees.of(output)
        if not step.depth:
            return trees.DraftTrees.none()
        names: list[str] = []
        rows = []
        for name in output.num_scheduled_tokens:
            request = self.scheduler.requests.get(name)
            if request is None or request.is_prefill_chunk or name in step.silent:
                continue
            names.append(name)
            rows.append(self._candidates(step.depth, step.width))
        if not names:
            return trees.DraftTrees.none()
        tokens, parents, said = zip(*rows, strict=True)
        return trees.DraftTrees(
            names, [], np.asarray(tokens), np.asarray(parents, dtype=np.int32), np.asarray(said)
        )

    def _candidates(self, depth: int, width: int) -> tuple[list[int], list[int], list[float]]:
        """A beam search where each node's children have the chances of the class."""
        children = [self.honest, *[0.15 * (1.0 - self.honest)] * (width - 1)]
        parents: list[int] = []
        said: list[float] = []
        beams = [(1.0, -1)]
        for _ in range(depth):
            grown = [(p * q, q, node) for p, node in beams for q in children]
            grown.sort(key=lambda row: -row[0])
            beams = []
            for path, q, node in grown[:width]:
                beams.append((path, len(parents)))
                parents.append(node)
                said.append(q)
        first = self._next_token
        self._next_token = 100 + (first + len(parents) - 100) % 1900
        tokens = [100 + (first + i - 100) % 1900 for i in range(len(parents))]
        return tokens, parents, said

    def _result(self, output: SchedulerOutput, sampling: list[str]) -> ModelRunnerOutput:
        chosen = set(sampling)
        names = list(output.num_scheduled_tokens)
        done = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[self._given(output, n) if n in chosen else [] for n in names],
        )
        trees.note_drafting(done, self.drafting_s())
        return done

    def _given(self, output: SchedulerOutput, name: str) -> list[int]:
        """What a request gets: a walk down its tree by the true chances, and one more token."""
        tokens = output.scheduled_spec_decode_tokens.get(name, [])
        parents = trees.of(output).parents.get(name, [])
        assert len(tokens) == len(parents)
        planted = self.scheduler._speculation._planted
        start = planted.starts.get(name, 0)
        given, at, passed = [], -1, False
        while not passed:
            passed, left = True, self._rng.random()
            for node, parent in enumerate(parents):
                if parent != at:
                    continue
                left -= planted.probabilities[start + node]
                if left < 0.0:
                    given.append(tokens[node])
                    at, passed = node, False
                    break
        if parents:
            self.accepted.append(len(given))
        request = self.scheduler.requests[name]
        length = self.lengths[name] - request.num_output_tokens
        given.append(99)
        if len(given) >= length:
            given = [*given[: length - 1], 2]
        return given
