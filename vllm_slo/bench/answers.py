# SPDX-License-Identifier: Apache-2.0
"""Streamed answers of OpenAI's three APIs: how they are asked for, and how they are read.

Each streamed event gets the time at which it came, and the number of tokens that it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import openai

Api = Literal["completions", "chat", "responses"]
Prompt = str | Sequence[int]
"""A text, or token ids, which only completions take."""


def vllm_extras(api: Api, output_tokens: int, cache_salt: str) -> dict[str, Any]:
    """Fields of vLLM's for an answer of exactly so many tokens, and for exact token counts.

    ``cache_salt`` keeps prompts apart from those of other runs in the prefix cache.
    """
    extras: dict[str, Any] = {"ignore_eos": True, "cache_salt": cache_salt}
    if api != "responses":  # which has neither
        extras |= {"min_tokens": output_tokens, "return_token_ids": True}
    return extras


async def open_answer(
    client: openai.AsyncOpenAI,
    api: Api,
    prompt: Prompt,
    *,
    model: str,
    max_tokens: int,
    temperature: float,
    extra_body: Mapping[str, Any],
) -> Any:
    """Send a request; returns its stream of events, an async context manager.

    Raises what the openai client raises.
    """
    text: Any = prompt
    asked: Any = {
        "model": model,
        "temperature": temperature,
        "stream": True,
        "extra_body": dict(extra_body),
    }
    if api == "responses":
        return await client.responses.create(
            input=text, max_output_tokens=max_tokens, store=False, **asked
        )
    asked |= {"max_tokens": max_tokens, "stream_options": {"include_usage": True}}
    if api == "chat":
        messages: Any = [{"role": "user", "content": text}]
        return await client.chat.completions.create(messages=messages, **asked)
    prompts = prompt if isinstance(prompt, str) else [list(prompt)]
    return await client.completions.create(prompt=prompts, **asked)


@dataclass(slots=True)
class AnswerStream:
    """What the events of one answer have said so far.

    Attributes:
        chunks: (time, tokens; None: the server does not say) of each event with a part of the
            answer.
        total_tokens, prompt_tokens: as the server counts them.
        promised, late: of the server's report; None: it has none.
    """

    chunks: list[tuple[float, int | None]] = field(default_factory=list)
    total_tokens: int | None = None
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    service_tier: str | None = None
    promised: bool | None = None
    late: bool | None = None

    def take(self, event: Any, now_s: float) -> int:
        """Record one server-sent event; returns the number of tokens that it surely has."""
        if hasattr(event, "choices"):
            return self._take_chunk(event, now_s)
        kind = getattr(event, "type", "")
        if kind.endswith("_text.delta") and event.delta:  # of the answer, or of its reasoning
            self.chunks.append((now_s, None))
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            self._conclude(event.response)
            self.finish_reason = "error" if kind == "response.failed" else "stop"
        return 0

    def _take_chunk(self, chunk: Any, now_s: float) -> int:
        """Record a chunk of a completion or a chat."""
        self._conclude(chunk)
        known = 0
        for choice in chunk.choices or ():
            ids = getattr(choice, "token_ids", None)
            if ids:
                self.chunks.append((now_s, len(ids)))
                known += len(ids)
            elif ids is None and _text_of(choice):
                self.chunks.append((now_s, None))
            self.finish_reason = choice.finish_reason or self.finish_reason
        return known

    def _conclude(self, told: Any) -> None:
        """Record token counts, tier and report, where ``told`` has them."""
        usage = getattr(told, "usage", None)
        if usage is not None:
            # The second name is that of Responses.
            self.total_tokens = _first(usage, "completion_tokens", "output_tokens")
            self.prompt_tokens = _first(usage, "prompt_tokens", "input_tokens")
        self.service_tier = getattr(told, "service_tier", None) or self.service_tier
        report = getattr(told, "slo", None)
        if isinstance(report, Mapping) and isinstance(report.get("promised"), bool):
            self.late = bool(report.get("late"))
            self.promised = report["promised"] and not self.late

    def token_times(self) -> tuple[tuple[float, ...], bool]:
        """(time of each token, whether the split over events is an estimate)."""
        counts = [1 if n is None else n for _, n in self.chunks]
        estimated = any(n is None for _, n in self.chunks)
        if estimated and self.total_tokens is not None:
            # As many events as tokens: each has one.
            estimated = self.total_tokens != len(self.chunks)
            counts = _spread(self.total_tokens, len(self.chunks))
        times = (t for (t, _), n in zip(self.chunks, counts, strict=True) for _ in range(n))
        return tuple(times), estimated


def _first(usage: Any, *names: str) -> int | None:
    """The first of these fields that is there."""
    found = (getattr(usage, name, None) for name in names)
    return next((count for count in found if count is not None), None)


def _text_of(choice: Any) -> str:
    """The text of a chunk's choice: a completion's, or a chat's answer or reasoning."""
    delta = getattr(choice, "delta", None)
    if delta is None:
        return getattr(choice, "text", None) or ""
    reasoning = getattr(delta, "reasoning", None) or getattr(delta, "reasoning_content", None)
    return getattr(delta, "content", None) or reasoning or ""


def _spread(total: int, parts: int) -> list[int]:
    """``total`` over ``parts`` as evenly as possible; the first parts get the remainder."""
    base, extra = divmod(total, parts)
    return [base + (i < extra) for i in range(parts)]
