# SPDX-License-Identifier: Apache-2.0
"""Made-up tokens of prompts and answers."""

from __future__ import annotations

import hashlib

STOP_TOKEN = 2
_FILLER = 5


def own_text(name: str, length: int) -> list[int]:
    """Token ids of a prompt with a unique beginning, so that no block of it is cached."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())
    head = [3 + number // 997**place % 997 for place in range(6)]
    return [*head, *[_FILLER] * (length - len(head))][:length]


def answer_token(place: int, length: int) -> int:
    """Token ``place`` (from 0) of an answer of ``length`` tokens; the last one ends it."""
    return STOP_TOKEN if place + 1 >= length else 3 + place % 1000


def answer_text(length: int) -> list[int]:
    """A whole answer."""
    return [answer_token(place, length) for place in range(length)]
