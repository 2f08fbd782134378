# SPDX-License-Identifier: Apache-2.0
"""KV tokens to set aside for many requests of a class at once: `OutputLengthPredictor`'s
``expected_hold``, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.jit import jit

Ints = NDArray[np.int64]


@jit
def hold(
    ranked: Ints,
    class_longest: int,
    parts: int,
    prompt: int,
    cap: int,
    declared: int,
    done: int,
) -> int:
    """`holds_of` one request."""
    now = prompt + done + 1
    if declared > done:
        return max(prompt + min(declared, cap), now)
    longer = np.searchsorted(ranked, done, side="right")
    survivors = len(ranked) - longer
    longest, most = min(cap, class_longest), 0
    for part in range(parts if survivors > 0 else 0):
        passed = part * survivors // parts
        length = min(ranked[longer + passed], longest)
        most = max(most, (prompt + length) * (survivors - passed) // survivors)
        if length == longest:  # fewer and fewer are there from here on
            break
    return max(most, now)


@jit
def holds_of(ranked: Ints, class_longest: int, parts: int, requests: Ints) -> Ints:
    """KV tokens to set aside for each of n requests of a class.

    Args:
        ranked: lengths of the class in ascending order; empty where it is not believed.
        class_longest: the longest answer of the class that was seen.
        parts: points of the survival curve to look at.
        requests: (4, n) tokens of the prompt, most tokens of the answer, its declared length
            (0: none), tokens so far.

    Returns:
        (n,) tokens, as `OutputLengthPredictor.expected_hold` gives them.
    """
    holds = np.empty(requests.shape[1], dtype=np.int64)
    for i in range(len(holds)):
        prompt, cap, declared, done = requests[0, i], requests[1, i], requests[2, i], requests[3, i]
        holds[i] = hold(ranked, class_longest, parts, prompt, cap, declared, done)
    return holds
