# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA worker with trees. Imported only where CUDA is the platform."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from vllm_slo.engine.worker.model_runner import TreeRunner
from vllm_slo.engine.worker.setup import refuse_what_fails, register_backends


class CUDATreeWorker(GPUWorker):
    """vLLM's CUDA worker with trees."""

    model_runner: Any

    def init_device(self) -> None:
        refuse_what_fails(self.vllm_config, CUDATreeWorker, TreeRunner)
        register_backends()
        super().init_device()
        if not isinstance(self.model_runner, TreeRunner):  # vLLM 0.31 has made one of its own
            del self.model_runner  # its buffers are free before ours are made
            self.model_runner = self._make_model_runner()

    def _make_model_runner(self) -> TreeRunner:
        return TreeRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's, after drafts and trees: behind it vLLM takes whatever is compiled for late."""
        self.model_runner.warm_up()
        return super().compile_or_warm_up_model()
