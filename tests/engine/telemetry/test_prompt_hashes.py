# SPDX-License-Identifier: Apache-2.0
"""Hashes of prompts and names: the same where the prompts begin alike, and under one salt only."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.engine.telemetry.prompt_hashes import PromptHashes

SALT = bytes(range(16))
HASHES = PromptHashes(SALT, 4)

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(beginning=tokens, one=tokens, other=tokens)
def test_ids_are_the_same_as_far_as_prompts_are(
    beginning: list[int], one: list[int], other: list[int]
) -> None:
    first, second = beginning + one, beginning + other
    ids = HASHES.of_prompt(first), HASHES.of_prompt(second)
    assert [len(each) for each in ids] == [len(first) // 4, len(second) // 4]
    for block, pair in enumerate(zip(*ids, strict=False)):
        end = 4 * (block + 1)
        assert (pair[0] == pair[1]) == (first[:end] == second[:end])


@given(prompt=tokens)
def test_ids_are_whole_numbers_that_json_keeps(prompt: list[int]) -> None:
    assert all(0 <= hash_id < 2**53 for hash_id in HASHES.of_prompt(prompt))


def test_a_block_that_comes_again_has_another_id() -> None:
    ids = HASHES.of_prompt([7] * 12)
    assert len(set(ids)) == 3


def test_another_salt_gives_other_ids() -> None:
    other = PromptHashes(bytes(16), 4)
    assert not set(HASHES.of_prompt(range(40))) & set(other.of_prompt(range(40)))


def test_other_images_behind_the_same_tokens_are_seen() -> None:
    prompt = [1, 2, 3, 9, 9, 9, 9, 9, 4, 5, 6, 7]  # 9 stands for an image, from place 3 on
    cat, dog = ([(3, name)] for name in ("cat", "dog"))
    assert HASHES.of_prompt(prompt, cat) == HASHES.of_prompt(prompt, cat)
    assert not set(HASHES.of_prompt(prompt, cat)) & set(HASHES.of_prompt(prompt, dog))
    late = [(8, "cat")], [(8, "dog")]
    ids = [HASHES.of_prompt(prompt, images) for images in late]
    assert ids[0][:2] == ids[1][:2]  # these blocks end before the image
    assert ids[0][2] != ids[1][2]


def test_adapters_and_salts_of_the_cache_keep_prompts_apart() -> None:
    plain = HASHES.of_prompt(range(8), apart=("", ""))
    adapter = HASHES.of_prompt(range(8), apart=("adapter", ""))
    salted = HASHES.of_prompt(range(8), apart=("", "adapter"))
    assert len({*plain, *adapter, *salted}) == 6
