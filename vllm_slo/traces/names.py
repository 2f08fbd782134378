# SPDX-License-Identifier: Apache-2.0
"""Names that stand for the names of tenants and sessions in a recording."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, Literal

_DIGITS: Final = 12


def hashed_name(salt: bytes, kind: Literal["tenant", "session"], name: str) -> str:
    """Equal names of a kind get equal ones under one salt, and other names others.

    ``salt``: a secret of 16 to 64 bytes. Without it nobody can try out names.
    """
    hashed = blake2b(
        name.encode(errors="surrogatepass"),
        key=salt,
        digest_size=_DIGITS // 2,
        person=kind.encode(),
    )
    return hashed.hexdigest()
