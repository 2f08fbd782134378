# SPDX-License-Identifier: Apache-2.0
"""Objectives over HTTP: ``--middleware vllm_slo.engine.http.SLOMiddleware``."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Load the middleware on first use; AttributeError for any other name."""
    if name != "SLOMiddleware":
        raise AttributeError(f"module 'vllm_slo.engine.http' has no attribute {name!r}")
    from vllm_slo.engine.http.middleware import SLOMiddleware

    return SLOMiddleware
