# SPDX-License-Identifier: Apache-2.0
"""A step with many trees asks the device for as much as a step with one: nothing goes tree by
tree."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from torch.utils._python_dispatch import TorchDispatchMode

from vllm_slo.engine.telemetry.faults import Reported
from vllm_slo.engine.worker.model_runner import TreeRunner
from vllm_slo.engine.worker.tree_attention.path_rows import VerifyRows
from vllm_slo.engine.worker.tree_attention.plan import TreeSlot, plan_rows

PARENTS = (-1, 0, 0, -1, 3)  # a leading chain of two, and two paths beside it
BLOCK, PER_ROW, CONTEXT = 16, 2, 21
NODES = len(PARENTS)


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(call)] += 1
        return call(*args, **kwargs or {})


def runner(trees: int, layers: int = 3) -> Any:
    """Of the runner, what verifying and compaction need."""
    table = np.arange(trees * 3, dtype=np.int32).reshape(trees, 3)
    cache = {
        f"layer{i}": SimpleNamespace(
            kv_cache=torch.zeros(trees * 8, 2, BLOCK, 8),
            impl=SimpleNamespace(do_kv_cache_update=lambda *_: None),
        )
        for i in range(layers)
    }
    made = TreeRunner.__new__(TreeRunner)
    made._batch = SimpleNamespace(  # type: ignore[assignment]
        block_size=BLOCK, block_table=table, positions=torch.zeros(trees * (NODES + 1)).long()
    )
    made.device = torch.device("cpu")
    made._layers = cache
    made._faults = Reported("")
    made._slots = [TreeSlot(i, i * (NODES + 1), CONTEXT, PARENTS) for i in range(trees)]
    return made


def rows_of(made: Any) -> VerifyRows:
    trees = len(made._slots)
    plan = plan_rows(
        made._slots,
        np.arange(trees + 1) * (NODES + 1),
        np.full(trees, CONTEXT + NODES + 1),
        made._batch.block_table,
        BLOCK,
        np.arange(trees * 3, trees * 8),
        PER_ROW,
    )
    assert plan is not None
    return VerifyRows(plan, made.device)


def work(trees: int, part: str) -> Counter[str]:
    made = runner(trees)
    key = torch.zeros(trees * (NODES + 1), 2, 4)
    accepted = [[3, 4] for _ in range(trees)]
    with Operations() as operations:
        if part == "positions":
            made._place_nodes()
        elif part == "rows":
            made._verify = rows_of(made)
            for name, layer in made._layers.items():
                named = SimpleNamespace(layer_name=name)
                made._verify.write(layer.impl, named, key, key, layer.kv_cache)
            made._compact(accepted)
        else:
            made._verify = made._mask_rows(made._loose_tokens())
            for name, layer in made._layers.items():
                named = SimpleNamespace(layer_name=name)
                made._verify.write(layer.impl, named, key, key, layer.kv_cache)
            made._compact(accepted)
    return operations.seen


@pytest.mark.parametrize("part", ["positions", "rows", "masks"])
def test_eight_trees_take_the_operations_of_one(part: str) -> None:
    one = work(1, part)
    assert sum(one.values()) > 0
    assert work(8, part) == one


def test_nodes_get_the_positions_of_their_depths() -> None:
    made = runner(2)
    made._place_nodes()
    expected = [0, *(CONTEXT + depth for depth in (1, 2, 2, 1, 2))] * 2
    assert made._batch.positions.tolist() == expected
