# SPDX-License-Identifier: Apache-2.0
"""Draft models under tensor parallelism: what fails on one worker fails on all, or ends the engine.

A worker that went on without a draft alone would leave the others waiting in its next pass.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_slo.core.speculation.model_chain import Plan
from vllm_slo.engine.speculation import messages
from vllm_slo.engine.speculation.messages import DraftingReport, StepTrees
from vllm_slo.engine.worker.proposers import TreeProposer, pool


def agreed(rank: int, store: str) -> list[str | None]:
    """What a rank says of three loads: of no failure, of its own, and of the other's."""
    import torch

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    group = SimpleNamespace(world_size=2, cpu_group=None)
    pool.get_tp_group = lambda: group
    failures: list[Exception | None] = [None, ValueError("bad weights") if rank else None]
    found = [pool._of_any_rank(failure) for failure in failures]
    torch.distributed.destroy_process_group()
    return [None if failure is None else str(failure) for failure in found]


@pytest.mark.slow
def test_a_model_that_one_worker_cannot_load_is_left_out_by_all(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as ranks:
        said = [ranks.submit(agreed, rank, str(tmp_path / "store")) for rank in (0, 1)]
        assert [one.result() for one in said] == [
            [None, "rank 1: ValueError: bad weights"],
            [None, "bad weights"],
        ]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pass_that_fails_ends_an_engine_of_several_workers(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(pool, "get_tp_group", lambda: SimpleNamespace(world_size=workers))

    def fail(*_: Any) -> None:
        raise MemoryError("out of memory")

    proposer: Any = TreeProposer.__new__(TreeProposer)
    proposer.config = SimpleNamespace(pool=("draft",))
    proposer.models, proposer._dropped = {0: object()}, {}
    proposer.report, proposer.batch = DraftingReport(), SimpleNamespace(request_ids=[])
    monkeypatch.setattr(proposer, "_ends", fail)
    output: Any = SimpleNamespace()
    messages.attach(output, StepTrees(plan=Plan((0,), 1)))
    if workers > 1:
        with pytest.raises(MemoryError):
            proposer.propose(output, [])
    else:
        assert proposer.propose(output, []).req_ids == []
        assert proposer.models == {}
