# SPDX-License-Identifier: Apache-2.0
"""Imported first by a Python process: gives vLLM on CPU what ranks of a model with experts need.

Each step the ranks exchange their tokens. vLLM 0.32 has that for GPUs only: on CPU a model with
experts starts with ``--data-parallel-size 2``, and ends at its first request.
"""

from __future__ import annotations

from typing import Any

import wrapt


@wrapt.when_imported("vllm.distributed.device_communicators.cpu_communicator")
def add(module: Any) -> None:
    """Add the two exchanges to the communicator of CPUs."""
    import torch

    def all_gatherv(self: Any, input_: Any, dim: int, sizes: list[int] | None) -> Any:
        """All ranks' rows, (sum of ``sizes``, ...), or a list of such."""
        assert dim == 0 and sizes is not None
        if isinstance(input_, list):
            return [all_gatherv(self, one, dim, sizes) for one in input_]
        parts = [input_.new_empty((size, *input_.shape[1:])) for size in sizes]
        parts[self.rank_in_group].copy_(input_)
        for rank, part in zip(self.ranks, parts, strict=True):
            torch.distributed.broadcast(part, src=rank, group=self.cpu_group)
        return torch.cat(parts)

    def reduce_scatterv(
        self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None
    ) -> Any:
        """This rank's rows of the sum over all ranks, (size, ...)."""
        assert dim == 0 and sizes is not None
        total = input_.clone()
        torch.distributed.all_reduce(total, group=self.cpu_group)
        return total.split(sizes)[self.rank_in_group].contiguous()

    module.CpuCommunicator.all_gatherv = all_gatherv
    module.CpuCommunicator.reduce_scatterv = reduce_scatterv
