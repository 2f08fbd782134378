# SPDX-License-Identifier: Apache-2.0
"""What the runner with trees keeps from one step to the next: nothing of a step's trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fault_injection import InjectedError

pytest.importorskip("vllm")

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_slo.engine.telemetry.faults import Reported
from vllm_slo.engine.worker.model_runner import TreeRunner
from vllm_slo.engine.worker.tree_attention import plan
from vllm_slo.engine.worker.tree_attention.plan import TreeSlot


def test_trees_that_cannot_be_laid_out_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own metadata is right for all but the nodes, of which none is accepted then."""

    def failing(*_: Any) -> Any:
        raise InjectedError("a test says so")

    monkeypatch.setattr(plan, "path_rows", failing)
    runner: Any = TreeRunner.__new__(TreeRunner)
    runner._faults, runner._unplanned, runner._verify = Reported(""), False, None
    runner._slots = [TreeSlot(0, 0, 9, (-1, -1))]
    runner._batch = SimpleNamespace(
        query_start=np.array([0, 3]),
        sequence_lengths=np.array([12]),
        block_table=np.zeros((1, 1), dtype=np.int32),
        block_size=16,
        num_blocks=8,
    )
    runner.drafter = SimpleNamespace(scratch=4, blocks_per_row=2)
    metadata: dict[str, Any] = {"layer": "as vLLM's"}
    runner._attach_rows(metadata, SimpleNamespace(num_reqs=1))
    assert metadata == {"layer": "as vLLM's"}
    assert runner._unplanned and runner._verify is None
    assert runner._faults.take() == ["worker"]


def test_trees_end_with_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps vLLM may run dummy batches, for data parallelism among experts. They must
    not be laid out as the trees of the step before, whose keys and values are let go, too."""
    monkeypatch.setattr(GPUModelRunner, "sample_tokens", lambda *_: None)
    monkeypatch.setattr(
        GPUModelRunner, "_build_attention_metadata", lambda *_, **__: ({}, "as vLLM's")
    )
    runner: Any = TreeRunner.__new__(TreeRunner)
    runner._unplanned = False
    runner._slots, runner._verify = [TreeSlot(0, 0, 9, (-1, -1))], object()
    runner.sample_tokens(None)
    assert runner._verify is None
    assert runner._build_attention_metadata() == ({}, "as vLLM's")


@pytest.mark.parametrize("among_ranks", [False, True])
def test_a_lack_of_memory_is_not_held_by_one_of_several_ranks(among_ranks: bool) -> None:
    runner: Any = TreeRunner.__new__(TreeRunner)
    runner._faults, runner._unplanned = Reported("", among_ranks=among_ranks), False

    def fails_with(error: Exception) -> Any:
        def plan() -> None:
            raise error

        return plan

    assert runner._planned(fails_with(ValueError("of the arguments"))) is None
    assert runner._unplanned
    if among_ranks:
        with pytest.raises(MemoryError):
            runner._planned(fails_with(MemoryError()))
    else:
        assert runner._planned(fails_with(MemoryError())) is None
