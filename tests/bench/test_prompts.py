# SPDX-License-Identifier: Apache-2.0
"""Prompts of a workload: exact lengths; the same beginning where, and only where, it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_openai import TEMPLATE_TOKENS, Fake, prompt_tokens, serving
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.bench import texts
from vllm_slo.bench.answers import Api
from vllm_slo.bench.endpoint import ServerTarget, with_client
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.planned import PlannedRequest, Workload
from vllm_slo.bench.texts import OPENING, WORDS, TextPrompts

VOCABULARY = 512
ONE_EACH = TextPrompts(WORDS, 1.0, 8)

hash_ids = st.lists(st.integers(0, 3), max_size=5).map(tuple)
lengths = st.integers(1, 400)
blocks = st.sampled_from([1.0, 7.5, 16.0, 64.0])


def request(name: str, tokens: int, ids: Sequence[int] = (), block: float = 64) -> PlannedRequest:
    made = PlannedRequest(name, 0.0, "c", tokens, 4, None, None)
    return replace(made, hash_ids=tuple(ids), block_tokens=block)


def workload(*requests: PlannedRequest) -> Workload:
    return Workload("test", 7, 1.0, "test", requests)


def same_start(first: Sequence[object], second: Sequence[object]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@given(hash_ids, hash_ids, lengths, lengths, blocks)
def test_prompts_begin_alike_as_far_as_their_hash_ids(
    first: tuple[int, ...], second: tuple[int, ...], tokens: int, others: int, block: float
) -> None:
    """Of token ids, and of text, where the template's tokens come first."""
    one, other = request("one", tokens, first, block), request("other", others, second, block)
    source = workload(one, other)
    alike = round(same_start(first, second) * block)
    ids = [source.prompt_ids(each, VOCABULARY) for each in (one, other)]
    words = [ONE_EACH.prompt(source, each).split()[1:] for each in (one, other)]
    overhead = ONE_EACH.overhead_tokens
    assert [len(prompt) for prompt in ids] == [tokens, others]
    assert [len(prompt) for prompt in words] == [max(0, n - overhead) for n in (tokens, others)]
    for prompts, longest in ((ids, min(tokens, others)), (words, min(map(len, words)))):
        shared = same_start(*prompts)
        assert shared >= min(alike, longest)
        # By chance a token or two may be the same after that.
        assert shared <= alike + 8


@given(hash_ids, lengths, blocks)
def test_a_prompt_is_made_again(ids: tuple[int, ...], tokens: int, block: float) -> None:
    made = request("r", tokens, ids, block)
    assert workload(made).prompt_ids(made, 100) == workload(made, made).prompt_ids(made, 100)
    other = replace(workload(made), seed=8)
    assert tokens < 4 or other.prompt_ids(made, 100) != workload(made).prompt_ids(made, 100)


def test_rounds_without_hash_ids_continue_each_other() -> None:
    rounds = [replace(request(f"r{n}", n), session="job") for n in (50, 90)]
    other = request("r", 50)
    source = workload(*rounds, other)
    first, second = (source.prompt_ids(each, VOCABULARY) for each in rounds)
    assert second[:50] == first
    assert same_start(source.prompt_ids(other, VOCABULARY), first) < 8


def counted(fake: Fake, api: Api) -> TextPrompts:
    async def work(client: object, info: object) -> TextPrompts:
        return await TextPrompts.of_server(client, target, info, api)  # type: ignore[arg-type]

    target = ServerTarget("x", fake.url)
    return asyncio.run(with_client(target, work))


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_a_tokenizer_makes_lengths_of_text_exact(api: Api) -> None:
    with serving() as fake:
        made = counted(fake, api)
        assert not fake.bodies  # no request is sent
    assert made.tokens_per_word == 1.0
    assert made.overhead_tokens == TEMPLATE_TOKENS + 1 + (len(OPENING) > 4)
    assert set(made.words) == {word for word in WORDS if len(word) <= 4}
    for tokens in (1, 9, 10, 64, 1000):
        body = {"input": made.prompt(workload(), request("r", tokens))}
        assert prompt_tokens(body) == max(tokens, made.overhead_tokens)


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_without_a_tokenizer_two_requests_give_the_mean(api: Api) -> None:
    with serving(Fake(has_tokenizer=False, is_vllm=False, step_s=0.0)) as fake:
        made = counted(fake, api)
        assert len(fake.bodies) == 2
    assert 1.0 < made.tokens_per_word < 1.5
    body = {"input": made.prompt(workload(), request("r", 1000))}
    assert prompt_tokens(body) == pytest.approx(1000, rel=0.05)


def test_a_server_that_counts_nothing_cannot_have_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Fake(has_tokenizer=False)) as fake:
        fake.behave = {TEMPLATE_TOKENS + 2: "crash"}
        with pytest.raises(BenchError, match=r"--base-url: a first request failed: .*broken"):
            counted(fake, "chat")
        fake.behave = {TEMPLATE_TOKENS + 2: "cut"}
        with pytest.raises(BenchError, match=r"--api: .* does not count the prompt's tokens"):
            counted(fake, "chat")


def test_words_of_one_length_are_chosen() -> None:
    async def count(text: str) -> int:
        return 3 * len(text.split()) + (0 if text == OPENING else 1)

    made = asyncio.run(texts._of_one_length(count))
    assert list(made) == list(WORDS)

    async def each_another(text: str) -> int:
        return sum(hash(word) % 10_000 for word in text.split())

    assert asyncio.run(texts._of_one_length(each_another)) == WORDS
