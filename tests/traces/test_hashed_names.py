# SPDX-License-Identifier: Apache-2.0
"""Hashes that stand for names in a recording."""

from __future__ import annotations

from vllm_slo.traces.names import hashed_name

SALT = bytes(range(16))


def test_a_name_stays_the_same_and_says_what_it_names() -> None:
    name = hashed_name(SALT, "tenant", "acme")
    assert name == hashed_name(SALT, "tenant", "acme")
    assert len(name) == 12
    others = hashed_name(SALT, "tenant", "acme2"), hashed_name(SALT, "session", "acme")
    assert name not in (*others, hashed_name(bytes(16), "tenant", "acme"))


def test_a_name_may_have_any_character() -> None:
    assert len({hashed_name(SALT, "tenant", name) for name in ("", "\u00e4", "\ud800", "a b")}) == 4
