# SPDX-License-Identifier: Apache-2.0
"""Estimates about prompts: how long, and where their beginning has been seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from hashlib import blake2b
from random import Random
from typing import Any

import pytest
from depth import examples
from fake_replica import state
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_slo.core.routing.policy import route
from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.errors import InvalidSLOError
from vllm_slo.router import prompts as prompts_module
from vllm_slo.router.body_reader import read
from vllm_slo.router.prompts import (
    CHUNK_BYTES,
    CHUNK_IDS,
    MAX_CHUNKS,
    MEDIA_TOKENS,
    MOST_TOKENS,
    PrefixIndex,
    Prompt,
    TokenRatio,
    read_max_tokens,
    read_prompt,
)
from vllm_slo.slo.carriers import Policy

LONG = "The quick brown fox jumps over the lazy dog. " * 100


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def test_token_ids_are_exact() -> None:
    ratio = TokenRatio()
    assert ratio.tokens(read_prompt({"prompt": [5] * 1000})) == 1000
    assert ratio.tokens(read_prompt({"prompt": [[5] * 10, [6] * 7]})) == 17


@pytest.mark.parametrize("text", ["x" * 3500, "\u00fc" * 1750])
def test_text_is_estimated_by_its_bytes(text: str) -> None:
    ratio = TokenRatio(3.5)
    assert ratio.tokens(read_prompt({"prompt": text})) == 1000
    assert ratio.tokens(read_prompt({"prompt": [text, text]})) == 2000
    assert 1000 < ratio.tokens(read_prompt(chat(text))) < 1020
    assert 1000 < ratio.tokens(read_prompt({"input": text})) < 1020
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}
    assert 1000 < ratio.tokens(read_prompt(parts)) < 1020


def test_an_empty_prompt_has_a_token() -> None:
    for request in ({}, {"prompt": ""}, {"prompt": []}, {"messages": []}, {"prompt": 5}):
        assert TokenRatio().tokens(read_prompt(request)) >= 1


def test_media_and_tools_count_and_teach_nothing() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 1_000_000}}
    seen = {"messages": [{"role": "user", "content": [image, {"text": "x"}]}]}
    prompt = read_prompt(seen)
    assert MEDIA_TOKENS < TokenRatio().tokens(prompt) < MEDIA_TOKENS + 100
    assert not prompt.is_plain
    assert not read_prompt({**chat("x"), "tools": [{"a": "b" * 1000}]}).is_plain
    ratio = TokenRatio()
    ratio.learn(Prompt(1000, 0, is_plain=False), 1000)
    assert ratio.bytes_per_token == 3.5


def test_the_ratio_is_learnt_and_estimates_stay_long() -> None:
    ratio, prompt = TokenRatio(), Prompt(1000, 8)
    for number in range(400):
        ratio.learn(prompt, 8 + (200 if number % 2 else 250))  # 5 and 4 bytes a token
    assert 3.5 < ratio.bytes_per_token < 4.4
    assert ratio.tokens(prompt) > 8 + 225
    # On the short side where it is a cache that saves.
    assert ratio.chunk_tokens(prompt) < CHUNK_BYTES / 4.5


@pytest.mark.parametrize("tokens", [0, 1, 8, 10**9])
def test_nonsense_is_bounded(tokens: int) -> None:
    ratio = TokenRatio()
    for _ in range(100):
        ratio.learn(Prompt(1000, 8), tokens)
        ratio.learn(Prompt(10), 10)
    assert 0.5 <= ratio.bytes_per_token <= 16


@pytest.mark.parametrize(
    ("request_", "most"),
    [
        ({"prompt": "x"}, 16),
        ({"prompt": "x", "max_tokens": None}, None),
        ({"prompt": "x", "max_tokens": 5}, 5),
        ({"messages": []}, None),
        ({"messages": [], "max_completion_tokens": 7, "max_tokens": 9}, 7),
        ({"messages": [], "max_tokens": 9}, 9),
        ({"input": "x", "max_output_tokens": 3}, 3),
        ({"messages": [], "max_tokens": True}, None),
        ({"messages": [], "max_tokens": -1}, None),
    ],
)
def test_the_most_tokens_of_an_answer(request_: dict[str, Any], most: int | None) -> None:
    assert read_max_tokens(request_) == most


@pytest.mark.parametrize(
    ("first", "second", "each"),
    [
        ({"prompt": LONG}, {"prompt": LONG + "more"}, CHUNK_BYTES),
        (chat(LONG), chat(LONG, "an answer", "a question"), CHUNK_BYTES),
        ({"prompt": list(range(640))}, {"prompt": list(range(700))}, CHUNK_IDS),
    ],
)
def test_a_beginning_is_recognised(
    first: dict[str, Any], second: dict[str, Any], each: int
) -> None:
    index = PrefixIndex()
    assert index.matched(read_prompt(first).chunks) == 0
    index.add(read_prompt(first).chunks)
    known = len(read_prompt(first).chunks)
    assert known == (10 if each == CHUNK_IDS else len(LONG) // CHUNK_BYTES)
    assert index.matched(read_prompt(second).chunks) == known
    for other in ({"model": "other"}, {"cache_salt": "s"}):
        assert index.matched(read_prompt({**second, **other}).chunks) == 0
    index.clear()
    assert index.matched(read_prompt(second).chunks) == 0


def test_a_difference_at_the_start_is_seen() -> None:
    index = PrefixIndex()
    index.add(read_prompt({"prompt": LONG}).chunks)
    assert index.matched(read_prompt({"prompt": "x" + LONG}).chunks) == 0
    changed = LONG[: 3 * CHUNK_BYTES] + "x" + LONG[3 * CHUNK_BYTES + 1 :]
    assert index.matched(read_prompt({"prompt": changed}).chunks) == 3


def test_one_chunk_means_nothing() -> None:
    index = PrefixIndex()
    index.add(read_prompt({"prompt": LONG}).chunks)
    assert index.matched(read_prompt({"prompt": LONG[: 2 * CHUNK_BYTES - 1]}).chunks) == 0
    assert index.matched(read_prompt({"prompt": LONG[: 2 * CHUNK_BYTES]}).chunks) == 2


def test_the_index_is_bounded_and_forgets_the_oldest() -> None:
    index = PrefixIndex(100)
    prompts = [read_prompt({"prompt": str(n) * CHUNK_BYTES * 30}).chunks for n in range(5)]
    for chunks in prompts:
        index.add(chunks)
        index.add(prompts[0])
    assert len(index) <= 100
    assert index.matched(prompts[0]) == index.matched(prompts[4]) == 30
    assert index.matched(prompts[1]) == 0
    assert 2 <= index.matched(prompts[3]) < 31
    huge = read_prompt({"prompt": LONG * 1000}).chunks
    assert len(huge) == MAX_CHUNKS


@pytest.mark.parametrize(("size", "chunks"), [(4096, 16), (5_000_000, MAX_CHUNKS)])
def test_reading_is_cheap(monkeypatch: pytest.MonkeyPatch, size: int, chunks: int) -> None:
    """Each byte is hashed once, and none beyond what is compared."""
    hashed: list[int] = []

    class Counting:
        def __init__(self, seed: bytes, **options: Any) -> None:
            hashed.append(len(seed))
            self.inner = blake2b(seed, **options)

        def update(self, data: bytes) -> None:
            hashed.append(len(data))
            self.inner.update(data)

        def digest(self) -> bytes:
            return self.inner.digest()

    monkeypatch.setattr(prompts_module, "blake2b", Counting)
    request, index = chat("x" * size), PrefixIndex()
    index.add(read_prompt(request).chunks)
    name = len("[null, null]")  # model and salt, with which the chain begins
    assert hashed == [name, *[CHUNK_BYTES] * chunks]
    assert index.matched(read_prompt(request).chunks) == chunks
    assert hashed == [name, *[CHUNK_BYTES] * chunks] * 2


def test_every_process_makes_the_same_hashes() -> None:
    """Large bodies are read in another one than small ones."""
    image = {"type": "image_url", "image_url": {"url": "data:" + "A" * 1_000}}
    requests: list[dict[str, Any]] = [
        {"prompt": LONG, "model": "m", "cache_salt": "s"},
        {"prompt": list(range(640))},
        {"messages": [{"role": "user", "content": [image, {"text": LONG}]}]},
    ]
    code = (
        "import json, sys; from vllm_slo.router.prompts import read_prompt; "
        "print([read_prompt(one).chunks for one in json.load(sys.stdin)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "17"}
    said = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert said.stdout.strip() == str([read_prompt(one).chunks for one in requests])


# --- other APIs, and anything --------------------------------------------------------------------


def test_anthropics_words_are_understood() -> None:
    ratio, text = TokenRatio(3.5), "x" * 700
    plain = read_prompt({**chat(text), "system": text})
    assert 400 < ratio.tokens(plain) < 420
    assert plain.is_plain
    blocks = {**chat(text), "system": [{"type": "text", "text": text}]}
    assert read_prompt(blocks).size == plain.size
    said: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": text, "signature": "s"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": text}},
        {"type": "tool_result", "tool_use_id": "1", "content": text},
        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": text}]},
    ]
    prompt = read_prompt({"messages": [{"role": "user", "content": said}]})
    assert prompt.is_plain
    assert 800 < ratio.tokens(prompt) < 850
    image = {"type": "image", "source": {"type": "base64", "data": "A" * 10_000}}
    shown = [{"type": "tool_result", "tool_use_id": "1", "content": [image]}]
    seen = read_prompt({"messages": [{"role": "user", "content": shown}]})
    assert MEDIA_TOKENS < ratio.tokens(seen) < MEDIA_TOKENS + 100


def test_a_batch_is_all_its_conversations() -> None:
    one, ratio = chat(LONG)["messages"], TokenRatio()
    alone, batch = read_prompt({"messages": one}), read_prompt({"messages": [one, one]})
    assert ratio.tokens(batch) == pytest.approx(2 * ratio.tokens(alone), rel=0.01)
    assert batch.chunks[: len(alone.chunks)] == alone.chunks


texts = st.text(max_size=20) | st.sampled_from(["\ud800", "user", "text", "tool_use", LONG])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
keys = texts | st.sampled_from(["role", "content", "text", "type", "thinking", "tool_calls"])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=25,
)
FIELDS = ("model", "cache_salt", "prompt", "messages", "input", "instructions", "system", "tools")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "slo", "service_tier")


@settings(max_examples=examples(100), deadline=None)
@given(request=st.dictionaries(st.sampled_from(FIELDS + LIMITS), values, max_size=6))
@example(request={"max_tokens": 10**4_000, "prompt": [10**30] * 100})
@example(request={"prompt": [True, 1.5, None, "x", [1]] * 50})
@example(request={"messages": [[[["x"]]], {"content": {"content": [{"content": "x"}]}}]})
def test_any_json_is_read(request: dict[str, Any]) -> None:
    body = json.dumps(request, allow_nan=True).encode()
    with suppress(InvalidSLOError):
        asked = read(body, {}, Policy({}, {}, None), 0.0)
        assert asked is not None
        assert TokenRatio().tokens(asked.prompt) >= 1
        assert asked.max_tokens is None or 1 <= asked.max_tokens <= MOST_TOKENS
        routed = RoutedRequest(
            TokenRatio().tokens(asked.prompt), asked.max_tokens, 10.0, 0.1, wants_promise=True
        )
        idle = VirtualReplica("")
        idle.update(state({}), 0.0)
        assert route(routed, [idle], 0.0, rng=Random(0)).target == ""
