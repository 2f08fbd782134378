# SPDX-License-Identifier: Apache-2.0
"""Where a stage of an answer ends: at a text, or where the reasoning parser says thinking does; and
whether a text has ended the answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final, Protocol

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.carriers import check_thinking
from vllm_slo.slo.model import SLO

OVERRUN: Final = 64
"""Most tokens that are sampled after a stop string before vLLM's API server has the engine stop."""
THINKING: Final = {"thinking": True, "enable_thinking": True, "reasoning_effort": "high"}
"""What a chat template is told, under the names that parsers know, so that the model thinks."""


class StageMarks(Protocol):
    """Finds the ends of stages; a simulation knows them beforehand."""

    def check(self, slo: SLO) -> None:
        """Raises InvalidSLOError where the ends of these stages cannot be found here."""

    def first_stage(self, request: Request, slo: SLO) -> int:
        """The stage with which the answer to a prompt begins."""

    def end_of(self, request: Request, slo: SLO, stage: int, tokens: int, new: int) -> int | None:
        """Which of the ``new`` last tokens of an answer ends the stage, counted from 1; None: the
        stage goes on. ``tokens`` of the stage came before them."""

    def has_stopped(self, request: Request) -> bool:
        """Whether the answer has come to one of its stop strings. vLLM's API server looks for these
        and aborts such a request, as it does when a client leaves."""


class AnswerMarks:
    """Reads the answers, with the tokenizer that vLLM keeps in the engine for structured output.

    Some parsers find thinking only if they are told, like the chat template, that the model thinks.
    vLLM tells the engine so only for requests with structured output. All other requests that have
    an objective for thinking are taken to think. If the prompt has ended the thinking already, the
    parser finds that out.
    """

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._tokenizer: Any = getattr(manager, "tokenizer", None)
        self._reasoner_cls = manager.reasoner_cls

    @cached_property
    def _thinker(self) -> Any:
        """One parser for many requests. Only methods are called that do not change it: those that
        find where thinking ends. Reading a stream of text would change it."""
        assert self._reasoner_cls is not None
        return self._reasoner_cls(tokenizer=self._tokenizer, chat_template_kwargs=dict(THINKING))

    def _reasoner(self, request: Request) -> Any:
        """The parser that reads this request's answer."""
        structured = request.structured_output_request
        if structured is None or not structured.reasoning_parser_kwargs:
            return self._thinker
        if structured.reasoner is None:  # as vLLM does, and it uses this one
            assert self._reasoner_cls is not None
            told = structured.reasoning_parser_kwargs
            structured.reasoner = self._reasoner_cls(tokenizer=self._tokenizer, **told)
        return structured.reasoner

    def check(self, slo: SLO) -> None:
        check_thinking(slo, told=self._reasoner_cls is not None)
        if slo.thinking_tpot_ms is not None:
            self._check_parser()
        if slo.stages is not None and len(slo.stages) > 1 and self._tokenizer is None:
            raise InvalidSLOError(
                "stages", "the server has no tokenizer to read answers", "give one tpot_ms"
            )

    def _check_parser(self) -> None:
        try:
            _ = self._thinker
        except Exception as error:
            raise InvalidSLOError(
                "thinking_tpot_ms",
                f"the server's reasoning parser does not fit its model: {error!r:.200}",
                "start it with another one, or give stages with the text that ends thinking",
            ) from error

    def first_stage(self, request: Request, slo: SLO) -> int:
        if slo.thinking_tpot_ms is None:
            return 0
        return int(self._reasoner(request).is_reasoning_end(request.prompt_token_ids or []))

    def end_of(self, request: Request, slo: SLO, stage: int, tokens: int, new: int) -> int | None:
        until = slo.answer_stages[stage].until
        if until is not None:
            return self._end_of_text(request.output_token_ids, until, tokens, new)
        ids, reasoner = request.all_token_ids, self._reasoner(request)
        for number in range(1, new + 1):
            end = len(ids) - new + number
            seen = ids if number == new else ids[:end]
            if reasoner.is_reasoning_end_streaming(seen, ids[len(ids) - new : end]):
                return number
        return None

    def has_stopped(self, request: Request) -> bool:
        params = request.sampling_params
        if self._tokenizer is None or params is None or not params.stop:
            return False
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        # Every token has at least a byte.
        last = max(len(stop.encode(errors="surrogatepass")) for stop in stops) + OVERRUN
        text = self._text(list(request.output_token_ids)[-last:])
        return any(stop in text for stop in stops)

    def _end_of_text(self, ids: Sequence[int], until: str, tokens: int, new: int) -> int | None:
        # Every token has at least a byte, so no more of them can hold the beginning of the text.
        before = min(len(until.encode()) - 1, tokens)
        tail = list(ids[len(ids) - new - before :])
        if until not in self._text(tail):
            return None
        return next(n for n in range(1, new + 1) if until in self._text(tail[: before + n]))

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))
