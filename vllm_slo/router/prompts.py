# SPDX-License-Identifier: Apache-2.0
"""How long is a prompt, and which replica has seen its beginning: estimates without a tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["PrefixIndex", "Prompt", "TokenRatio", "read_max_tokens", "read_prompt"]

CHUNK_BYTES: Final = 256
CHUNK_IDS: Final = 64
MAX_CHUNKS: Final = 256
"""A prompt is compared over its first 64 KiB; what comes after is taken for new."""
LEAST_CHUNKS: Final = 2
INDEX_SIZE: Final = 16_384
MESSAGE_TOKENS: Final = 4
"""What a chat template adds to a message."""
MEDIA_TOKENS: Final = 1_024
"""An image or a sound, whatever its size: a tokenizer's word would be needed for better."""
COMPLETION_TOKENS: Final = 16
"""OpenAI's (and vLLM's) default of `max_tokens` for completions."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as read from a request.

    Attributes:
        size: bytes of its text.
        tokens: tokens beyond the text: token ids, templates, media.
        chunks: chained hashes of its beginning; equal hashes mean an equal beginning up to there.
        is_ids: whether a chunk is `CHUNK_IDS` token ids, and not `CHUNK_BYTES` of text.
        is_plain: whether text and template are all of it, so that a token count teaches something.
    """

    size: int = 0
    tokens: int = 0
    chunks: tuple[int, ...] = ()
    is_ids: bool = False
    is_plain: bool = True


class TokenRatio:
    """Bytes of text per token, learnt from the counts in answers.

    Estimates are on the long side, by the mean deviation of what was seen: a prompt that is longer
    than believed breaks a promise, one that is shorter leaves a moment unused.
    """

    SHARE: Final = 0.05
    LEAST_BYTES: Final = 64
    BOUNDS: Final = (0.5, 16.0)

    def __init__(self, bytes_per_token: float = 3.5) -> None:
        self._mean = bytes_per_token
        self._deviation = 0.0
        self._seen = 1

    @property
    def bytes_per_token(self) -> float:
        """What estimates are made with."""
        return max(self._mean - self._deviation, self.BOUNDS[0])

    def tokens(self, prompt: Prompt) -> int:
        """Estimated length of a prompt, at least 1."""
        return max(prompt.tokens + math.ceil(prompt.size / self.bytes_per_token), 1)

    def chunk_tokens(self, prompt: Prompt) -> float:
        """Tokens that one chunk of a prompt stands for, on the short side."""
        return CHUNK_IDS if prompt.is_ids else CHUNK_BYTES / (self._mean + self._deviation)

    def learn(self, prompt: Prompt, prompt_tokens: int) -> None:
        """A prompt turned out to have so many tokens."""
        text_tokens = prompt_tokens - prompt.tokens
        if not prompt.is_plain or prompt.size < self.LEAST_BYTES or text_tokens <= 0:
            return
        low, high = self.BOUNDS
        sample = min(max(prompt.size / text_tokens, low), high)
        self._seen += 1
        share = max(self.SHARE, 1.0 / self._seen)
        self._deviation += share * (abs(sample - self._mean) - self._deviation)
        self._mean += share * (sample - self._mean)


class PrefixIndex:
    """The beginnings of prompts that one replica has worked on, the latest `INDEX_SIZE` chunks."""

    def __init__(self, size: int = INDEX_SIZE) -> None:
        self._size = size
        self._chunks: dict[int, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, chunks: tuple[int, ...]) -> None:
        """A prompt was worked on. The end of a prompt is forgotten before its beginning."""
        known = self._chunks
        for chunk in reversed(chunks):
            known.pop(chunk, None)
            known[chunk] = None
        while len(known) > self._size:
            del known[next(iter(known))]

    def matched(self, chunks: tuple[int, ...]) -> int:
        """Leading chunks that are known; 0 when they are too few to mean anything."""
        known, count = self._chunks, 0
        for chunk in chunks:
            if chunk not in known:
                break
            count += 1
        return count if count >= LEAST_CHUNKS else 0

    def clear(self) -> None:
        """The replica's cache is gone."""
        self._chunks.clear()


def read_max_tokens(request: Mapping[str, Any]) -> int | None:
    """The most tokens that an answer may have; None when the model's length bounds it."""
    fallback = COMPLETION_TOKENS if "prompt" in request and "max_tokens" not in request else None
    for key in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        given = request.get(key)
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            return given
    return fallback


def read_prompt(request: Mapping[str, Any]) -> Prompt:
    """The prompt of a completion, chat or Responses request; what is not understood counts 0.

    Raises:
        RecursionError: the request is nested too deeply.
    """
    seed = hash((str(request.get("model")), str(request.get("cache_salt"))))
    if "messages" in request or "input" in request:
        return _of_messages(request, seed)
    given = request.get("prompt")
    if isinstance(given, str):
        data = given.encode(errors="surrogatepass")
        return Prompt(size=len(data), chunks=_chunks_of_text(data, seed))
    if not isinstance(given, list) or not given:
        return Prompt()
    if isinstance(given[0], int):
        return Prompt(tokens=len(given), chunks=_chunks_of_ids(given, seed), is_ids=True)
    tokens = sum(len(one) for one in given if isinstance(one, list))
    texts = [one.encode(errors="surrogatepass") for one in given if isinstance(one, str)]
    chunks = _chunks_of_text(texts[0], seed) if texts else ()
    return Prompt(sum(map(len, texts)), tokens, chunks)


def _of_messages(request: Mapping[str, Any], seed: int) -> Prompt:
    texts: list[str] = []
    tokens, plain = MESSAGE_TOKENS, True
    if tools := request.get("tools"):
        texts.append(json.dumps(tools))
        plain = False
    if isinstance(instructions := request.get("instructions"), str):
        texts.append(instructions)
    messages = request.get("messages", request.get("input"))
    if isinstance(messages, str):
        messages = [{"content": messages}]
    for message in messages if isinstance(messages, list) else ():
        tokens += MESSAGE_TOKENS
        if not isinstance(message, dict):
            continue
        texts.append(str(message.get("role")))
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            media = sum(_add_part(part, texts) for part in content)
            tokens += media * MEDIA_TOKENS
            plain = plain and not media
        if calls := message.get("tool_calls"):
            texts.append(json.dumps(calls))
    data = "\0".join(texts).encode(errors="surrogatepass")
    return Prompt(len(data), tokens, _chunks_of_text(data, seed), is_plain=plain)


def _add_part(part: Any, texts: list[str]) -> int:
    """Add the text of a content part to ``texts``; 1 if the part is media, 0 otherwise."""
    text = part.get("text") if isinstance(part, dict) else part
    if isinstance(text, str):
        texts.append(text)
        return 0
    texts.append(f"{_mark(part):x}")
    return 1


def _mark(value: Any) -> int:
    """A hash of parsed JSON, without writing it out: media are large."""
    if isinstance(value, dict):
        return hash(tuple((key, _mark(one)) for key, one in value.items()))
    if isinstance(value, list):
        return hash(tuple(map(_mark, value)))
    return hash(value)


def _chained(pieces: Iterable[object], seed: int) -> tuple[int, ...]:
    chain = []
    for piece in pieces:
        seed = hash((seed, piece))
        chain.append(seed)
    return tuple(chain)


def _chunks_of_text(data: bytes, seed: int) -> tuple[int, ...]:
    whole = min(len(data) // CHUNK_BYTES, MAX_CHUNKS) * CHUNK_BYTES
    return _chained((data[at : at + CHUNK_BYTES] for at in range(0, whole, CHUNK_BYTES)), seed)


def _chunks_of_ids(ids: list[Any], seed: int) -> tuple[int, ...]:
    whole = min(len(ids) // CHUNK_IDS, MAX_CHUNKS) * CHUNK_IDS
    try:
        return _chained(
            (tuple(ids[at : at + CHUNK_IDS]) for at in range(0, whole, CHUNK_IDS)), seed
        )
    except TypeError:  # not all of them are ids: the replica has its own answer to that
        return ()
