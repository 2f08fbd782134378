# SPDX-License-Identifier: Apache-2.0
"""What follows ``vllm serve`` when our scheduler serves; the same for one server and for many."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm_slo import tiny

__all__ = ["MIDDLEWARE", "SCHEDULER", "TINY", "serve_arguments"]

SCHEDULER: Final = "vllm_slo.Scheduler"
MIDDLEWARE: Final = "vllm_slo.engine.http.SLOMiddleware"
TINY: Final = "tiny"
"""Name of the built-in model, wherever a model is named."""


def serve_arguments(model: str, rest: Sequence[str], additional: Mapping[str, Any]) -> list[str]:
    """The model and every flag of ours, then the user's own.

    Args:
        model: name or folder; ``tiny`` is the built-in one.
        rest: flags of ``vllm serve``.
        additional: vLLM's ``additional_config``; empty: none.
    """
    names = []
    if model == TINY:
        model = str(tiny.path("target"))
        given = (flag.partition("=")[0].replace("_", "-") for flag in rest)
        names = [] if "--served-model-name" in given else ["--served-model-name", TINY]
    return [
        *(model, *names, "--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE),
        *(["--additional-config", json.dumps(additional)] if additional else []),
        *rest,
    ]
