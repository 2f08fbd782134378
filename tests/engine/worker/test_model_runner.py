# SPDX-License-Identifier: Apache-2.0
"""What the runner with trees keeps from one step to the next: nothing of a step's trees."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_slo.engine.worker.model_runner import TreeRunner
from vllm_slo.engine.worker.tree_attention.plan import TreeSlot


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
