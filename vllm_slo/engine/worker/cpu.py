# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker and runner with trees. Imported only where CPU is the platform."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_slo.engine.worker.model_runner import TreeRunner
from vllm_slo.engine.worker.setup import refuse_what_fails, register_backends


class CPUTreeRunner(TreeRunner, CPUModelRunner):
    """vLLM's CPU runner with trees."""


class CPUTreeWorker(CPUWorker):
    """vLLM's CPU worker with trees."""

    def init_device(self) -> None:
        refuse_what_fails(self.vllm_config, CPUTreeWorker, TreeRunner)
        super().init_device()
        register_backends()
        self.model_runner = CPUTreeRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's, after drafts and trees: behind it vLLM takes whatever is compiled for late."""
        self.model_runner.warm_up()
        return super().compile_or_warm_up_model()
