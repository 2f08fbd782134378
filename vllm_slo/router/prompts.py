# SPDX-License-Identifier: Apache-2.0
"""Estimates without a tokenizer: the length of a prompt, and how much of it a replica caches."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

CHUNK_BYTES: Final = 256
CHUNK_IDS: Final = 64
MAX_CHUNKS: Final = 256
"""Only the first 64 KiB of a prompt are compared; the rest counts as new."""
LEAST_CHUNKS: Final = 2
INDEX_SIZE: Final = 16_384
MESSAGE_TOKENS: Final = 4
"""Tokens that a chat template adds to a message."""
MEDIA_TOKENS: Final = 1_024
"""Tokens of an image or a sound of any size; a better estimate would need the tokenizer."""
COMPLETION_TOKENS: Final = 16
"""OpenAI's (and vLLM's) default of `max_tokens` for completions."""
MOST_TOKENS: Final = 2**31
"""Longest answer: JSON has integers that are too large for a float."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as read from a request.

    Attributes:
        size: bytes of its text.
        tokens: tokens beyond the text: token ids, templates, media.
        chunks: chained hashes of its beginning; equal hashes mean an equal beginning up to there,
            in every process.
        is_ids: whether a chunk is `CHUNK_IDS` token ids instead of `CHUNK_BYTES` of text.
        is_plain: whether it is only text and template, so that its token count can be learnt from.
    """

    size: int = 0
    tokens: int = 0
    chunks: tuple[bytes, ...] = ()
    is_ids: bool = False
    is_plain: bool = True


class TokenRatio:
    """Bytes of text per token, learnt from the counts in answers.

    Estimates of lengths are high by the mean deviation: a prompt longer than estimated breaks a
    promise, a shorter one only leaves time unused.
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
        return max(self._mean - self._deviation, self.BOUNDS[0])

    def tokens(self, prompt: Prompt) -> int:
        """Estimated length of a prompt, at least 1."""
        return max(prompt.tokens + math.ceil(prompt.size / self.bytes_per_token), 1)

    def chunk_tokens(self, prompt: Prompt) -> float:
        """Tokens of one chunk of a prompt; the estimate is low."""
        return CHUNK_IDS if prompt.is_ids else CHUNK_BYTES / (self._mean + self._deviation)

    def learn(self, prompt: Prompt, prompt_tokens: int) -> None:
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
    """The beginnings of prompts that one replica has computed: the latest `INDEX_SIZE` chunks."""

    def __init__(self, size: int = INDEX_SIZE) -> None:
        self._size = size
        self._chunks: dict[bytes, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, chunks: tuple[bytes, ...]) -> None:
        """Add a computed prompt. The end of a prompt is dropped before its beginning."""
        known = self._chunks
        for chunk in reversed(chunks):
            known.pop(chunk, None)
            known[chunk] = None
        while len(known) > self._size:
            del known[next(iter(known))]

    def matched(self, chunks: tuple[bytes, ...]) -> int:
        """Leading chunks that are known; 0 if there are fewer than `LEAST_CHUNKS`."""
        known, count = self._chunks, 0
        for chunk in chunks:
            if chunk not in known:
                break
            count += 1
        return count if count >= LEAST_CHUNKS else 0

    def clear(self) -> None:
        """Drop everything, because the replica's cache is lost."""
        self._chunks.clear()


def read_max_tokens(request: Mapping[str, Any]) -> int | None:
    """Most tokens of an answer; None if only the model's length limits it."""
    fallback = COMPLETION_TOKENS if "prompt" in request and "max_tokens" not in request else None
    for key in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        given = request.get(key)
        if isinstance(given, int) and not isinstance(given, bool) and given > 0:
            return min(given, MOST_TOKENS)
    return fallback


def read_prompt(request: Mapping[str, Any]) -> Prompt:
    """The prompt of a generation request of any API; unknown parts count 0.

    Raises:
        RecursionError: the request is nested too deeply.
    """
    seed = _bytes_of(json.dumps([request.get("model"), request.get("cache_salt")]))
    if "messages" in request or "input" in request:
        return _of_messages(request, seed)
    given = request.get("prompt")
    if isinstance(given, str):
        data = _bytes_of(given)
        return Prompt(size=len(data), chunks=_chunks(data, CHUNK_BYTES, seed))
    if not isinstance(given, list) or not given:
        return Prompt()
    if isinstance(given[0], int):
        return Prompt(tokens=len(given), chunks=_chunks_of_ids(given, seed), is_ids=True)
    tokens = sum(len(part) for part in given if isinstance(part, list))
    texts = [_bytes_of(part) for part in given if isinstance(part, str)]
    chunks = _chunks(texts[0], CHUNK_BYTES, seed) if texts else ()
    return Prompt(sum(map(len, texts)), tokens, chunks)


def _of_messages(request: Mapping[str, Any], seed: bytes) -> Prompt:
    texts: list[str] = []
    tokens, media = MESSAGE_TOKENS, 0
    if tools := request.get("tools"):
        texts.append(json.dumps(tools))
    for key in ("instructions", "system"):  # of Responses, and of Anthropic's Messages
        media += _add_content(request.get(key), texts)
    given = request.get("messages", request.get("input"))
    for message in _messages(given):
        tokens += MESSAGE_TOKENS
        if not isinstance(message, dict):
            continue
        texts.append(str(message.get("role")))
        media += _add_content(message.get("content"), texts)
        if calls := message.get("tool_calls"):
            texts.append(json.dumps(calls))
    data = _bytes_of("\0".join(texts))
    tokens += media * MEDIA_TOKENS
    plain = not (media or tools)
    return Prompt(len(data), tokens, _chunks(data, CHUNK_BYTES, seed), is_plain=plain)


def _messages(given: Any) -> list[Any]:
    """All messages in order; those of a batch are from several conversations."""
    if isinstance(given, str):
        return [{"content": given}]
    if not isinstance(given, list):
        return []
    listed = (item if isinstance(item, list) else [item] for item in given)
    return [message for conversation in listed for message in conversation]


def _add_content(content: Any, texts: list[str]) -> int:
    """Add the text of a message or of its part to ``texts``; returns how many parts are media."""
    if isinstance(content, str):
        texts.append(content)
        return 0
    if isinstance(content, list):
        return sum(_add_content(part, texts) for part in content)
    if not isinstance(content, dict):
        return 0
    for key in ("text", "thinking", "content"):  # the last is a tool's result
        if isinstance(inner := content.get(key), str | list):
            return _add_content(inner, texts)
    written = json.dumps(content)
    if content.get("type") == "tool_use":
        texts.append(written)
        return 0
    texts.append(blake2b(written.encode(), digest_size=8).hexdigest())
    return 1


def _bytes_of(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _chunks(data: bytes, size: int, seed: bytes) -> tuple[bytes, ...]:
    """Hashes of the first ``size`` bytes, of the first 2 * ``size`` bytes, and so on."""
    digest = blake2b(seed, digest_size=8)
    chain = []
    for at in range(size, min(len(data), MAX_CHUNKS * size) + 1, size):
        digest.update(data[at - size : at])
        chain.append(digest.digest())
    return tuple(chain)


def _chunks_of_ids(ids: list[Any], seed: bytes) -> tuple[bytes, ...]:
    try:
        packed = array("q", ids[: MAX_CHUNKS * CHUNK_IDS])
    except (TypeError, OverflowError):  # not all are token ids: the replica answers with an error
        return ()
    return _chunks(packed.tobytes(), CHUNK_IDS * packed.itemsize, seed)
