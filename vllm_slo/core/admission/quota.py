# SPDX-License-Identifier: Apache-2.0
"""Quotas of promised tokens: what one tenant may be promised, whatever it asks for.

Admission maximises the value of what is promised, and clients choose values and objectives
themselves. Three rules keep one tenant from taking the promises of another:

- **Tokens are limited.** A promise is paid for in tokens from a bucket of its tenant. If the bucket
  is too low, the request gets no promise now. It is served as best effort, so no work waits for a
  quota.
- **A token is priced by what it costs.** A prompt token costs one. An output token costs what it
  takes of the engine: a step that keeps its TPOT holds fewer tokens per second than a full step, so
  each takes a larger share of the engine (`token_weight`). So a tighter objective buys no more
  engine time than the quota allows. But one such request makes all steps short. Access control
  limits how tight a TPOT may be.
- **Values compare within a tenant only.** If a request claims more than its class is worth, it
  ranks higher among the requests of its tenant, and no higher than those of others
  (`relative_values`). Claiming more lowers the tenant's other requests, so it gains nothing.
  (Values scaled to a mean of 1 would not do: a request would weigh more if its tenant also sent
  worthless ones.)
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from vllm_slo.core.step_time.model import StepTimeModel


class TokenBucket:
    """A quota: fills with ``rate`` tokens a second up to ``burst``, full at first.

    Invariant: -burst <= level <= burst. Over any t seconds at most rate * t + burst tokens are
    taken beyond those given back, and `draw` may add another burst of debt.

    Args:
        rate: tokens a second, above 0.
        burst: tokens, above 0.
    """

    def __init__(self, rate: float, burst: float) -> None:
        if not (0.0 < rate < math.inf and 0.0 < burst < math.inf):
            raise ValueError(f"rate {rate} and burst {burst} must be above 0 and finite")
        self.rate = rate
        self.burst = burst
        self._level = burst
        self._at_s = -math.inf

    def level(self, now_s: float) -> float:
        """Tokens in the bucket; below 0: debt. A clock that goes back adds nothing."""
        if now_s > self._at_s:
            if self._at_s > -math.inf:
                self._level = min(self._level + (now_s - self._at_s) * self.rate, self.burst)
            self._at_s = now_s
        return self._level

    def take(self, tokens: float, now_s: float) -> bool:
        """Take ``tokens`` if the bucket has them; whether it had."""
        if self.level(now_s) < tokens:
            return False
        self._level -= tokens
        return True

    def draw(self, tokens: float, now_s: float) -> bool:
        """Take ``tokens`` on credit. If the credit is too small, it is used up, and the result is
        False."""
        left = self.level(now_s) - tokens
        self._level = max(left, -self.burst)
        return left >= -self.burst

    def give_back(self, tokens: float, now_s: float) -> None:
        """Return tokens that were taken and not used."""
        self._level = min(self.level(now_s) + tokens, self.burst)

    def wait_s(self, tokens: float, now_s: float, beside: float = 0.0) -> float:
        """Seconds until the bucket has ``tokens``, and those that others are about to take
        (``beside``); infinite if it never will."""
        if tokens > self.burst:
            return math.inf
        return max(tokens + beside - self.level(now_s), 0.0) / self.rate


def token_weight(model: StepTimeModel, tpot_s: float, max_step_tokens: int) -> float:
    """What an output token with this TPOT costs, in tokens of a full step; at least 1.

    In the time of a step that keeps the TPOT, full steps would process ``tpot_s * peak`` tokens.
    The step itself holds the paper's time2bs of them, which share that cost. Short steps are dear
    because of the fixed part of a step's time. Reading KV is left out.
    """
    most = max(min(model.max_tokens, max_step_tokens), 1)
    full_s = model.predict_s(most)
    if tpot_s >= full_s:
        return 1.0
    step_s = max(tpot_s, model.predict_s(1))
    fitting = max(model.time_to_tokens(step_s), 1)
    return max(step_s * most / full_s / fitting, 1.0)


def relative_values(
    owners: Sequence[Hashable], values: Sequence[float], usual: Sequence[float]
) -> list[float]:
    """Values that compare between tenants; none is above what is usual for its request.

    If a tenant's largest claim is r times the usual, all its values are divided by r.

    Args:
        owners: tenant of each request.
        values: what each is worth to its client, above 0.
        usual: what the operator has set for requests of its class, above 0.
    """
    claims: dict[Hashable, float] = {}
    for owner, value, of_class in zip(owners, values, usual, strict=True):
        claims[owner] = max(claims.get(owner, 1.0), value / of_class)
    return [value / claims[owner] for owner, value in zip(owners, values, strict=True)]
