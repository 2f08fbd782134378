# SPDX-License-Identifier: Apache-2.0
"""What vLLM's command line does to a process before it serves."""

from __future__ import annotations


def set_up_process() -> None:
    """Set environment variables as vLLM's command line does, such as how processes are started."""
    try:
        from vllm.entrypoints.common.startup import cli_env_setup
    except ImportError:  # before vLLM 0.33
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    cli_env_setup()
