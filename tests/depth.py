# SPDX-License-Identifier: Apache-2.0
"""How long the tests go on that draw their cases: ten times as long in `make test-deep`."""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "VLLMSLO_TEST_DEPTH"
DEPTH: Final = int(os.environ.get(VARIABLE, "1"))


def examples(count: int) -> int:
    """How many cases a test draws, from how many it draws in `make test`."""
    return count * DEPTH
