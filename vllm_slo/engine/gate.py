# SPDX-License-Identifier: Apache-2.0
"""The one door to the engine: every request of an API server passes here, whatever its route.

vLLM's routes, its batch runner, Ray Serve LLM and programs that embed the engine all call
``AsyncLLM.generate``. No plugin point of vLLM stands there, so `install` wraps that method:

- On the way in, the SLO of the HTTP request in whose context the call is made becomes keys of
  ``SamplingParams.extra_args``; no client's internal keys pass.
- On the way out, a request that the scheduler did not serve becomes an error instead of an empty
  answer, and a report goes to the HTTP request it belongs to.

A request that asks for nothing passes as it is. With another scheduler nothing is changed.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Final, Protocol

import wrapt
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_slo.config.class_names import SCHEDULER_NAMES
from vllm_slo.engine.compat.classes import is_derived
from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.access import check_internal
from vllm_slo.slo.keys import is_slo_key
from vllm_slo.slo.verdicts import REPORT_KEY, Declined, Invalid, Verdict, unpack, unpack_report

__all__ = ["CALLER", "Caller", "RequestDeclinedError", "install"]

CANCEL_S: Final = 5.0
"""How long a call waits to be cancelled once its client has been answered, before it raises."""


class RequestDeclinedError(GracefulHTTPError):
    """The request cannot be promised its objectives, and asked to be refused then.

    Attributes:
        declined: when to try again, and the reason.
    """

    def __init__(self, declined: Declined) -> None:
        super().__init__(declined.text, HTTPStatus.TOO_MANY_REQUESTS)
        self.declined = declined


class Caller(Protocol):
    """The HTTP request in whose context the engine is called."""

    def admit(self, extra_args: Mapping[str, Any] | None, n: int) -> Mapping[str, Any] | None:
        """Keys to send with a request of the engine for ``n`` choices, instead of the SLO's among
        `extra_args`; None: it passes as it is.

        Raises:
            InvalidSLOError: the request is to be refused.
        """

    def begin(self) -> int:
        """A request of the engine begins; its number, from 0."""

    def admit_pooling(self) -> None:
        """The engine is asked for something that takes no objectives.

        Raises:
            InvalidSLOError: the request has some.
        """

    def has_output(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """There is output, maybe with reports by choice, counted over all prompts."""

    async def settle(self, verdict: Verdict | InvalidSLOError) -> bool:
        """The engine does not serve the request. Whether the client has its answer now."""


CALLER: Final[ContextVar[Caller | None]] = ContextVar("vllm_slo_caller", default=None)


def install(module: Any) -> None:
    """Wrap ``AsyncLLM`` of vLLM's module ``vllm.v1.engine.async_llm``, once."""
    for name, wrapper in (("generate", _generate), ("encode", _encode)):
        if not isinstance(vars(module.AsyncLLM).get(name), wrapt.FunctionWrapper):
            wrapt.wrap_function_wrapper(module, f"AsyncLLM.{name}", wrapper)


def _generate(
    generate: Callable[..., AsyncGenerator[RequestOutput, None]],
    engine: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> AsyncGenerator[RequestOutput, None]:
    """In place of ``AsyncLLM.generate``."""
    if not _is_ours(engine):
        return generate(*args, **kwargs)
    caller = CALLER.get()
    named = dict(zip(("prompt", "sampling_params", "request_id"), args, strict=False)) | kwargs
    try:
        changed = _admitted(named["sampling_params"], caller)
    except InvalidSLOError as error:
        return _refusal(caller, error)
    if changed is None:
        return generate(*args, **kwargs)
    outputs = generate(**{**named, "sampling_params": changed})
    return _watched(outputs, caller, 0 if caller is None else changed.n * caller.begin())


def _is_ours(engine: Any) -> bool:
    """Whether the engine runs our scheduler, or one derived from it."""
    return is_derived(engine.vllm_config.scheduler_config.scheduler_cls, SCHEDULER_NAMES)


def _admitted(params: SamplingParams, caller: Caller | None) -> SamplingParams | None:
    """The parameters to send; None: those given, and the output is nobody's business.

    Raises:
        InvalidSLOError: the request is to be refused.
    """
    if caller is None:
        check_internal(params.extra_args, None)
        return params
    flat = caller.admit(params.extra_args, params.n)
    if flat is None:
        return None
    others = {key: v for key, v in (params.extra_args or {}).items() if not is_slo_key(key)}
    changed = copy.copy(params)
    changed.extra_args = {**others, **flat}
    return changed


async def _watched(
    outputs: AsyncGenerator[RequestOutput, None], caller: Caller | None, first_choice: int
) -> AsyncGenerator[RequestOutput, None]:
    """`outputs`, until one of them says that the request is not served.

    Args:
        outputs: vLLM's.
        caller: who gets the reports; None: they stay in the outputs.
        first_choice: number of the first choice of this prompt among those of all prompts.

    Raises:
        RequestDeclinedError, VLLMValidationError: it is not.
    """
    try:
        async for output in outputs:
            verdict = _verdict_in(output)
            if verdict is not None:
                await _settle(caller, verdict)
            if caller is not None:
                caller.has_output(_take_reports(output, first_choice))
            yield output
    finally:
        await outputs.aclose()


def _verdict_in(output: RequestOutput) -> Verdict | None:
    for choice in output.outputs:
        if choice.finish_reason == "abort" and (said := unpack(choice.stop_reason)) is not None:
            return said
    return None


def _take_reports(output: RequestOutput, first_choice: int) -> dict[int, Mapping[str, Any]]:
    """Remove the reports from an output; by choice."""
    reports: dict[int, Mapping[str, Any]] = {}
    if (carrier := output.kv_transfer_params) and REPORT_KEY in carrier:
        reports = {first_choice + one.index: carrier[REPORT_KEY] for one in output.outputs}
        output.kv_transfer_params = {k: v for k, v in carrier.items() if k != REPORT_KEY} or None
    for one in output.outputs:
        own, one.stop_reason = unpack_report(one.stop_reason)
        if own is not None:
            reports[first_choice + one.index] = own
    return reports


async def _settle(caller: Caller | None, verdict: Verdict | InvalidSLOError) -> None:
    """Answer the client if that is possible, and end the call as if the client had left; else leave
    the answer to the route, which knows the shape of its own errors.

    Raises:
        RequestDeclinedError, VLLMValidationError: always, unless it is cancelled before.
    """
    if caller is not None and await caller.settle(verdict):
        await asyncio.sleep(CANCEL_S)
    if isinstance(verdict, Declined):
        raise RequestDeclinedError(verdict)
    text = verdict.text if isinstance(verdict, Invalid) else str(verdict)
    raise VLLMValidationError(text)


async def _refusal(
    caller: Caller | None, error: InvalidSLOError
) -> AsyncGenerator[RequestOutput, None]:
    """The output of a request that is refused before the engine sees it."""
    await _settle(caller, error)
    yield  # never reached; it makes this a generator


def _encode(
    encode: Callable[..., AsyncGenerator[Any, None]],
    engine: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> AsyncGenerator[Any, None]:
    """In place of ``AsyncLLM.encode``: pooling takes no objectives."""
    caller = CALLER.get()
    if caller is not None and _is_ours(engine):
        try:
            caller.admit_pooling()
        except InvalidSLOError as error:
            return _refusal(caller, error)
    return encode(*args, **kwargs)
