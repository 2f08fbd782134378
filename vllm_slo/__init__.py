# SPDX-License-Identifier: Apache-2.0
"""Requests with different latency objectives, served on one vLLM engine.

The public names are loaded on first use: ``import vllm_slo`` loads neither torch nor vLLM, and
``LLM`` and ``Scheduler`` alone do so when they are asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_slo import errors, tiny
    from vllm_slo.config.model import SLOConfig
    from vllm_slo.engine.scheduler import Scheduler
    from vllm_slo.engine.serving.llm import LLM
    from vllm_slo.slo.model import SLO

__version__ = "0.1.0"

__all__ = ["LLM", "SLO", "SLOConfig", "Scheduler", "__version__", "errors", "tiny"]

_HOME_OF = {
    "LLM": "vllm_slo.engine.serving.llm",
    "SLO": "vllm_slo.slo.model",
    "SLOConfig": "vllm_slo.config.model",
    "Scheduler": "vllm_slo.engine.scheduler",
}
_SUBMODULES = frozenset({"errors", "tiny"})


def __getattr__(name: str) -> Any:
    """Load the public name ``name`` from its home.

    Raises:
        AttributeError: there is no such name.
        errors.IncompatibleVLLMError: the installed vLLM lacks a name that is imported.
    """
    if name in _SUBMODULES:
        return import_module(f"vllm_slo.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'vllm_slo' has no attribute {name!r}")
    from vllm_slo.engine.compat.probe import imports

    with imports():
        value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not, and the module's own."""
    return sorted({*globals(), *__all__})
