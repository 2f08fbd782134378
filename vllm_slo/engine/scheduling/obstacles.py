# SPDX-License-Identifier: Apache-2.0
"""Engines on which nothing can be promised: there vLLM schedules all requests by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vllm.logger import init_logger

from vllm_slo.errors import ConfigError

logger = init_logger(__name__)

NO_CHUNKED_PREFILL: Final = "no_chunked_prefill"
PIPELINE_PARALLEL: Final = "pipeline_parallel"
PREFILL_INTERVAL: Final = "prefill_schedule_interval"
POOLING: Final = "pooling"

_WHY: Final[Mapping[str, str]] = {
    NO_CHUNKED_PREFILL: "Chunked prefill is off, so prompts cannot be cut to fit into a step. vLLM "
    "turns it off for some models, and --no-enable-chunked-prefill for all.",
    PIPELINE_PARALLEL: "With --pipeline-parallel-size above 1 a request decodes once in several "
    "steps, so the time of a step is not that of a token.",
    PREFILL_INTERVAL: "With --prefill-schedule-interval above 1 vLLM holds prompts back for some "
    "steps, whatever their deadlines.",
}


def obstacle_of(vllm_config: Any) -> str | None:
    """Why nothing can be promised on an engine, as reports and metrics say it; None: it can."""
    if vllm_config.model_config.runner_type == "pooling":
        return POOLING
    if not vllm_config.scheduler_config.enable_chunked_prefill:
        return NO_CHUNKED_PREFILL
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return PIPELINE_PARALLEL
    if vllm_config.scheduler_config.prefill_schedule_interval > 1:
        return PREFILL_INTERVAL
    return None


def is_synchronous_pipeline(vllm_config: Any) -> bool:
    """Whether workers of a pipeline are told each token by the scheduler, in a later step."""
    pipelined = vllm_config.parallel_config.pipeline_parallel_size > 1
    return pipelined and not vllm_config.scheduler_config.async_scheduling


def check_model(vllm_config: Any) -> None:
    """Refuse a model that only a scheduler of its own can serve.

    Raises:
        ConfigError: it generates by diffusion.
    """
    if vllm_config.model_config.is_diffusion:
        raise ConfigError(
            "--scheduler-cls: this model generates by diffusion, for which vLLM has a scheduler of "
            "its own; leave the flag out"
        )


def warn_of(obstacle: str | None) -> None:
    """Say once, at the start, that nothing is promised, and why. A pooling model is asked for no
    objective, so nobody needs to be told."""
    if obstacle is not None and obstacle in _WHY:
        logger.warning(
            "%s No objective can be promised here: vLLM schedules all requests by itself, and "
            "reports say %s.",
            _WHY[obstacle],
            obstacle,
        )
