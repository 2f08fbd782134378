# SPDX-License-Identifier: Apache-2.0
"""What the HTTP middleware reads of vLLM's API server, by way of its ``app.state``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

REQUEST_CLASSES: Final[Mapping[str, str]] = {
    "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest",
    "vllm.entrypoints.openai.completion.protocol": "CompletionRequest",
    "vllm.entrypoints.openai.responses.protocol": "ResponsesRequest",
}
"""Module -> the class of its requests. They keep fields that they do not know, such as ``slo``."""


def vllm_config_of(app: Any) -> Any:
    """The engine's ``VllmConfig``; None where the application is not vLLM's, or not ready."""
    return getattr(getattr(app, "state", None), "vllm_config", None)


def balanced_engines(vllm_config: Any) -> int:
    """Number of engines among which vLLM's balancer in this server chooses."""
    parallel = vllm_config.parallel_config
    local: bool = parallel.local_engines_only
    count: int = parallel.data_parallel_size_local if local else parallel.data_parallel_size
    return count


def engine_is_dead(app: Any) -> bool:
    """Whether the application's engine has failed for good."""
    client = getattr(getattr(app, "state", None), "engine_client", None)
    return bool(getattr(client, "errored", False))


def server_is_stopping(app: Any) -> bool:
    """Whether the application's server ends, and waits for its connections."""
    server = getattr(getattr(app, "state", None), "server", None)
    return bool(getattr(server, "should_exit", False))


def has_reasoning_parser(vllm_config: Any) -> bool:
    """Whether the server tells the model's thinking from its answer."""
    outputs = getattr(vllm_config, "structured_outputs_config", None)
    return bool(getattr(outputs, "reasoning_parser", ""))


def fail_stored_response(app: Any, response_id: str | None) -> bool:
    """Mark a stored response that is made in the background as failed.

    Returns:
        Whether there is such a response that has not ended.
    """
    serving = getattr(getattr(app, "state", None), "openai_serving_responses", None)
    stored = getattr(serving, "response_store", {}).get(response_id)
    if stored is None or stored.status not in ("queued", "in_progress"):
        return False
    stored.status = "failed"
    return True
