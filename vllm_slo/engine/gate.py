# SPDX-License-Identifier: Apache-2.0
"""The gate to the engine: every request of an API server passes here, whatever its route.

vLLM's routes, its batch runner, Ray Serve LLM and programs that embed the engine all call
``AsyncLLM.generate``. vLLM has no plugin point there, so `install` wraps that method:

- On the way in, the SLO of the HTTP request in whose context the call is made becomes keys of
  ``SamplingParams.extra_args``. Internal keys from clients are refused.
- Where the server has several engines (``--data-parallel-size``), requests that belong together go
  to one of them, since each engine knows its own requests only.
- On the way out, a request that the scheduler did not serve becomes an error instead of an empty
  answer, and a report goes to the HTTP request it belongs to.

A request without an SLO passes unchanged. With another scheduler every request does.
"""

from __future__ import annotations

import asyncio
import copy
import json
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Final, Protocol

import wrapt
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_slo.config.class_names import SCHEDULER_NAMES
from vllm_slo.engine.compat.api_server import balanced_engines
from vllm_slo.engine.compat.classes import is_derived
from vllm_slo.engine.telemetry.faults import Held
from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.access import check_internal
from vllm_slo.slo.keys import GROUP_KEY, SESSION_KEY, TENANT_KEY, is_slo_key
from vllm_slo.slo.verdicts import REPORT_KEY, Declined, Invalid, Verdict, unpack, unpack_report

__all__ = ["CALLER", "Caller", "RequestDeclinedError", "install"]

_REPORTS: Final = Held("The answer goes on without its report.")
CANCEL_S: Final = 5.0
"""Seconds that a call whose client has its answer waits to be cancelled, before it raises."""


class RequestDeclinedError(GracefulHTTPError):
    """The objectives cannot be promised, and the request asked to be refused then.

    Attributes:
        declined: when to retry, and the reason.
    """

    def __init__(self, declined: Declined) -> None:
        super().__init__(declined.text, HTTPStatus.TOO_MANY_REQUESTS)
        self.declined = declined


class Caller(Protocol):
    """The HTTP request in whose context the engine is called."""

    def admit(self, extra_args: Mapping[str, Any] | None, n: int) -> Mapping[str, Any] | None:
        """The keys for a request to the engine, which replace the SLO's keys in `extra_args`.

        Args:
            extra_args: as the route made them.
            n: choices of the request.

        Returns:
            None if the request passes unchanged.

        Raises:
            InvalidSLOError: the request is to be refused.
        """

    def begin(self) -> int:
        """Note that a request to the engine begins; returns its number, from 0."""

    def admit_pooling(self) -> None:
        """Check a pooling request, which cannot have objectives.

        Raises:
            InvalidSLOError: the HTTP request has some.
        """

    def has_output(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        """Note that there is output, maybe with reports by choice, counted over all prompts."""

    async def settle(self, verdict: Verdict | InvalidSLOError) -> bool:
        """Answer a request that the engine does not serve. Whether its client has an answer now."""


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
    named["sampling_params"] = changed
    if named.get("data_parallel_rank") is None:  # the client may have named one in a header
        engines = balanced_engines(engine.vllm_config)
        if (rank := common_engine(changed.extra_args or {}, engines)) is not None:
            named["data_parallel_rank"] = rank
    outputs = generate(**named)
    return _watched(outputs, caller, 0 if caller is None else changed.n * caller.begin())


def common_engine(extra_args: Mapping[str, Any], engines: int) -> int | None:
    """The engine that serves all rounds of a request's session, or all choices of its group.

    It follows from their name alone, so every API server finds the same one.

    Args:
        extra_args: the request's keys.
        engines: how many the server has.

    Returns:
        Number of the engine; None: vLLM's balancer chooses.
    """
    if engines < 2:
        return None
    if (session := extra_args.get(SESSION_KEY)) is not None:
        name = json.dumps([extra_args.get(TENANT_KEY), session])
    elif (group := extra_args.get(GROUP_KEY)) is not None:
        name = str(group)
    else:
        return None
    return zlib.crc32(name.encode()) % engines


def _is_ours(engine: Any) -> bool:
    """Whether the engine runs our scheduler, or one derived from it."""
    return is_derived(engine.vllm_config.scheduler_config.scheduler_cls, SCHEDULER_NAMES)


def _admitted(params: SamplingParams, caller: Caller | None) -> SamplingParams | None:
    """The parameters to send; None: those given, and the output is not watched.

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
    """`outputs`, up to one that carries a verdict.

    Args:
        outputs: vLLM's.
        caller: gets the reports; None: they stay in the outputs.
        first_choice: number of the first choice of this prompt among those of all prompts.

    Raises:
        RequestDeclinedError, VLLMValidationError: the request is not served.
    """
    try:
        async for output in outputs:
            verdict = _verdict_in(output)
            if verdict is not None:
                await _settle(caller, verdict)
            if caller is not None:
                with _REPORTS:
                    caller.has_output(_take_reports(output, first_choice))
            yield output
    finally:
        await outputs.aclose()


def _verdict_in(output: RequestOutput) -> Verdict | None:
    for choice in output.outputs:
        verdict = unpack(choice.stop_reason) if choice.finish_reason == "abort" else None
        if verdict is not None:
            return verdict
    return None


def _take_reports(output: RequestOutput, first_choice: int) -> dict[int, Mapping[str, Any]]:
    """Remove the reports from an output. Returns choice -> report."""
    reports: dict[int, Mapping[str, Any]] = {}
    if (carrier := output.kv_transfer_params) and REPORT_KEY in carrier:
        report = carrier[REPORT_KEY]
        reports = {first_choice + choice.index: report for choice in output.outputs}
        output.kv_transfer_params = {k: v for k, v in carrier.items() if k != REPORT_KEY} or None
    for choice in output.outputs:
        own, choice.stop_reason = unpack_report(choice.stop_reason)
        if own is not None:
            reports[first_choice + choice.index] = own
    return reports


async def _settle(caller: Caller | None, verdict: Verdict | InvalidSLOError) -> None:
    """End a call that is not served.

    Where the client can be answered, it is, and the call ends as if the client had left. Otherwise
    the route answers, in the shape of its own errors.

    Raises:
        RequestDeclinedError, VLLMValidationError: always, unless the call is cancelled before.
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
    """In place of ``AsyncLLM.encode``: pooling has no objectives."""
    caller = CALLER.get()
    if caller is not None and _is_ours(engine):
        try:
            caller.admit_pooling()
        except InvalidSLOError as error:
            return _refusal(caller, error)
    return encode(*args, **kwargs)
