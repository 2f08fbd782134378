# SPDX-License-Identifier: Apache-2.0
"""Salted hashes that show which prompts begin alike; no more."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

__all__ = ["PromptHashes"]

_ID_BITS: Final = 53
"""Whole numbers up to so many bits are exact in every reader of JSON."""
_DIGEST_BYTES: Final = 8


class PromptHashes:
    """Hashes under one salt.

    Args:
        salt: a secret of 16 bytes. Without it nobody can tell whether a guessed prompt is the right
            one.
        block_tokens: tokens of a block.
    """

    def __init__(self, salt: bytes, block_tokens: int) -> None:
        self._salt = salt
        self._block_tokens = block_tokens

    def of_prompt(
        self,
        token_ids: Sequence[int],
        inputs: Sequence[tuple[int, str]] = (),
        apart: Sequence[str] = (),
    ) -> tuple[int, ...]:
        """One id for each whole block of a prompt. It stands for the prompt up to the block's end,
        so two prompts have the same id where, and only where, they are the same up to there.

        Args:
            token_ids: the prompt.
            inputs: (place of its first token, what it is) of each image and the like, by place.
            apart: what makes equal tokens different ones, such as the name of an adapter.
        """
        size = self._block_tokens
        hashed = blake2b(key=self._salt, digest_size=_DIGEST_BYTES, person=b"prompt")
        for text in apart:
            hashed.update(_framed(text))
        ids = []
        later = iter((*inputs, (len(token_ids), "")))
        place, identity = next(later)
        for end in range(size, len(token_ids) + 1, size):
            hashed.update(array("i", token_ids[end - size : end]))
            while place < end:
                hashed.update(_framed(identity))
                place, identity = next(later)
            digest = hashed.copy().digest()
            ids.append(int.from_bytes(digest, "big") >> (8 * _DIGEST_BYTES - _ID_BITS))
        return tuple(ids)


def _framed(text: str) -> bytes:
    """A text with its length, so that two texts in a row are never taken for two others."""
    data = text.encode(errors="surrogatepass")
    return len(data).to_bytes(8, "big") + data
