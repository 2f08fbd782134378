# SPDX-License-Identifier: Apache-2.0
"""Prompts of text with a wanted number of tokens, for the APIs that take no token ids.

A prompt is an opening and words after it, all of the same number of tokens. The tokens of the
opening, of the chat template around it, and of a word are asked of the server: of vLLM's
``/tokenize``, which makes lengths exact if the tokenizer never merges words, as those in use do
not. Of other servers two short requests are sent, and their usage gives the mean.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vllm_slo.bench.answers import AnswerStream, Api, open_answer
from vllm_slo.bench.endpoint import ServerInfo, ServerTarget, api_root, import_openai
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.planned import PlannedRequest, Workload

if TYPE_CHECKING:
    import openai

OPENING: Final = "Text:"
WORDS: Final = (
    *("the", "of", "and", "to", "in", "a", "is", "it", "for", "on", "as", "with", "be", "by"),
    *("at", "from", "or", "an", "this", "that", "not", "are", "but", "all", "if", "can", "one"),
    *("no", "so", "we", "he", "has", "was", "will", "then", "more", "other", "only", "time"),
    *("new", "use", "any", "out", "up", "set", "first", "name", "data", "line", "file", "value"),
)
"""Common words, of one token each in most vocabularies."""
_REPEATS: Final = 4
_FEWEST_WORDS: Final = 8
"""With fewer different words prompts would begin alike by chance."""
_SAMPLE_WORDS: Final = 256
_PROBE_TOKENS: Final = 16
"""Answer of a request that is sent to count its prompt; OpenAI's Responses takes no fewer."""

_Count = Callable[[str], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Makes prompts.

    Attributes:
        words: of `tokens_per_word` each, with the space before it.
        overhead_tokens: of an empty prompt: the chat template and the opening.
    """

    words: tuple[str, ...]
    tokens_per_word: float
    overhead_tokens: int

    @classmethod
    async def of_server(
        cls, client: openai.AsyncOpenAI, target: ServerTarget, info: ServerInfo, api: Api
    ) -> TextPrompts:
        """Ask a server for the tokens of texts.

        Raises:
            BenchError: it does not say how many tokens a prompt has.
        """

        async def tokenize(text: str) -> int:
            body = {"model": info.model, "messages": [{"role": "user", "content": text}]}
            url = f"{api_root(target.base_url)}/tokenize"
            answer: Any = await client.post(url, body=body, cast_to=object)
            return int(answer["count"])

        async def send(text: str) -> int:
            stream = AnswerStream()
            answer = await open_answer(
                client, api, text, model=info.model, max_tokens=_PROBE_TOKENS,
                temperature=0.0, extra_body={},
            )  # fmt: skip
            async with answer:
                async for event in answer:
                    stream.take(event, 0.0)
            if stream.prompt_tokens is None:
                raise BenchError("--api", f"{target.base_url} does not count the prompt's tokens")
            return stream.prompt_tokens

        sdk = import_openai()
        try:
            return await cls.measured(tokenize, await _of_one_length(tokenize))
        except (sdk.APIError, KeyError, TypeError, ValueError):
            pass  # there is no such route, or it is another one
        try:
            return await cls.measured(send, WORDS)
        except sdk.APIError as error:
            text = target.credentials.hide(str(error))[:300]
            raise BenchError("--base-url", f"a first request failed: {text}") from error

    @classmethod
    async def measured(cls, count: _Count, words: Sequence[str]) -> TextPrompts:
        """Measure the overhead and the tokens of a word. ``count``: the tokens of a prompt."""
        overhead = await count(OPENING)
        rng = np.random.default_rng(0)
        sample = [words[i] for i in rng.integers(0, len(words), _SAMPLE_WORDS)]
        tokens = await count(_joined(sample)) - overhead
        return cls(tuple(words), max(1, tokens) / _SAMPLE_WORDS, overhead)

    def prompt(self, workload: Workload, request: PlannedRequest) -> str:
        """The prompt of a request.

        It has as few words as there can be if the request has fewer tokens than the overhead.
        Prompts with the same leading hash ids begin with the same words.
        """
        wanted = max(0, request.prompt_tokens - self.overhead_tokens)
        chosen: list[str] = []
        done = 0
        for name, tokens in workload.parts(request, wanted):
            done += tokens
            count = round(done / self.tokens_per_word) - len(chosen)
            rng = np.random.default_rng([workload.seed, *name.encode()])
            chosen += [self.words[i] for i in rng.integers(0, len(self.words), count)]
        return _joined(chosen)


def _joined(words: Sequence[str]) -> str:
    return " ".join([OPENING, *words])


async def _of_one_length(count: _Count) -> Sequence[str]:
    """The words with the fewest tokens each, enough of them; all if there are not enough."""
    empty, *counts = await asyncio.gather(
        count(OPENING), *(count(_joined([word] * _REPEATS)) for word in WORDS)
    )
    by_tokens: dict[int, list[str]] = defaultdict(list)
    for word, tokens in zip(WORDS, counts, strict=True):
        by_tokens[tokens - empty].append(word)
    enough = [tokens for tokens, words in by_tokens.items() if len(words) >= _FEWEST_WORDS]
    return by_tokens[min(enough)] if enough else WORDS
