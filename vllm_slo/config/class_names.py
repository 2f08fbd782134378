# SPDX-License-Identifier: Apache-2.0
"""Dotted names of the classes that vLLM loads by name. The first of several is the one to write."""

from __future__ import annotations

from typing import Final

SCHEDULER: Final = "vllm_slo.Scheduler"
SCHEDULER_NAMES: Final = (SCHEDULER, "vllm_slo.engine.scheduler.Scheduler")
MIDDLEWARE: Final = "vllm_slo.engine.http.SLOMiddleware"
TREE_WORKER: Final = "vllm_slo.engine.worker.TreeWorker"
TREE_WORKER_NAMES: Final = (
    TREE_WORKER,
    "vllm_slo.engine.worker.CPUTreeWorker",
    "vllm_slo.engine.worker.cpu.CPUTreeWorker",
    "vllm_slo.engine.worker.CUDATreeWorker",
    "vllm_slo.engine.worker.cuda.CUDATreeWorker",
)
TREE_PROPOSER: Final = "vllm_slo.engine.proposers.TreeProposer"
REMOTE_PROPOSER: Final = "vllm_slo.engine.proposers.RemoteProposer"
