# SPDX-License-Identifier: Apache-2.0
"""The draft length at which a request's tokens take the least time from the prompts beside it.

Beside prompts a step lasts as long as it may, so each token that is verified takes the place of a
token of a prompt. A request also has its KV read in each step in which it takes part. If a draft is
accepted, the request takes part in fewer steps. For a long context that spares more than the draft
costs.
"""

from __future__ import annotations

from vllm_slo.core.speculation.acceptance import expected_tokens


def sparing_length(
    acceptance: float, longest: int, *, token_s: float, reading_s: float, pass_s: float
) -> int:
    """Tokens to verify of a request, at least 1, so that each that comes out takes least time.

    Args:
        acceptance: chance that a draft is accepted if those before it are, in [0, 1].
        longest: most tokens, at least 1.
        token_s: seconds that verifying a token takes.
        reading_s: seconds that reading the request's KV takes in a step.
        pass_s: seconds of a pass of the draft, divided by the requests that share it. The first
            pass is made in any case, and costs nothing here.
    """

    def seconds(length: int) -> float:
        spent_s = length * token_s + reading_s + max(length - 2, 0) * pass_s
        return spent_s / expected_tokens(acceptance, length)

    return min(range(1, longest + 1), key=seconds)
