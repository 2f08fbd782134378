# SPDX-License-Identifier: Apache-2.0
"""Reads the body field ``slo`` where there is no HTTP middleware.

``vllm run-batch``, Ray Serve LLM and other programs parse bodies with vLLM's own request classes,
which keep fields that they do not know. `install` wraps the step from such a request to sampling
parameters: the field becomes ``slo_*`` keys of ``extra_args``, which the scheduler checks. Behind
the middleware the field is left to the middleware.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import wrapt
from vllm.exceptions import VLLMValidationError

from vllm_slo.engine.compat.api_server import REQUEST_CLASSES
from vllm_slo.engine.gate import CALLER


def install(module: Any) -> None:
    """Wrap the request class of one of the modules in `REQUEST_CLASSES`, once."""
    cls = getattr(module, REQUEST_CLASSES[module.__name__])
    for name, wrapper in (
        ("to_sampling_params", _to_sampling_params),
        ("to_beam_search_params", _to_beam_search_params),
    ):
        method = getattr(cls, name, None)
        if method is not None and not isinstance(vars(cls).get(name), wrapt.FunctionWrapper):
            wrapt.wrap_function_wrapper(module, f"{cls.__name__}.{name}", wrapper)


def _to_sampling_params(
    wrapped: Callable[..., Any], request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    params = wrapped(*args, **kwargs)
    slo = _slo_of(request)
    if slo is not None:
        flat, extra = _flat(slo), params.extra_args or {}
        if other := next((key for key in flat if key in extra and extra[key] != flat[key]), None):
            raise VLLMValidationError(f"{other}: slo and vllm_xargs disagree; send one value")
        params.extra_args = {**flat, **extra}
    return params


def _to_beam_search_params(
    wrapped: Callable[..., Any], request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if _slo_of(request) is not None:
        raise VLLMValidationError("slo: a beam search takes no objectives", parameter="slo")
    return wrapped(*args, **kwargs)


def _slo_of(request: Any) -> Any:
    """The field ``slo``; None where there is none, or the middleware has read it."""
    extra = request.model_extra
    return extra.get("slo") if extra and CALLER.get() is None else None


def _flat(slo: Any) -> dict[str, Any]:
    """The field as flat keys. If it is not an object, the scheduler refuses the key it becomes."""
    if not isinstance(slo, Mapping):
        return {"slo_slo": slo}
    return {f"slo_{key}": value for key, value in slo.items() if value is not None}
