# SPDX-License-Identifier: Apache-2.0
"""How many random cases a test draws: ten times as many in `make test-deep`."""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "VLLMSLO_TEST_DEPTH"
DEPTH: Final = int(os.environ.get(VARIABLE, "1"))


def examples(count: int) -> int:
    """The number of cases to draw, where `make test` draws ``count``."""
    return count * DEPTH
