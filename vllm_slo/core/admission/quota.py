# SPDX-License-Identifier: Apache-2.0
"""Quotas of promised tokens: what one tenant may be promised, whatever it asks for.

Admission maximises the value of what is promised, and values and objectives are the clients' own
words. Three rules keep one tenant's words from costing another its promises:

- **Tokens are limited.** A promise is paid for, in tokens, out of a bucket of its tenant's. Who
  cannot pay gets no promise now; it is served from what is left over, so no work waits for a quota.
- **A token is priced by what it costs.** A prompt token costs one. An output token costs what it
  takes of the engine: a step that keeps its TPOT holds fewer tokens for the time than a full step,
  so each takes a larger share of it (`token_weight`). Tightening an objective buys no more engine
  time than the quota does. One such request makes everybody's steps as short, though: how tight a
  TPOT may be at all is for access control to say.
- **Values compare within a tenant only.** What a request says above the value of its class ranks it
  among the requests of its tenant, and lifts it above nobody else's (`relative_values`). To ask for
  more lowers one's own other requests, so nothing is gained by it. (Scaled to a mean of 1 instead,
  a request would weigh the more the more worthless ones are sent beside it.)
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
        """Tokens in it; below 0: debt. A clock that goes back adds nothing."""
        if now_s > self._at_s:
            if self._at_s > -math.inf:
                self._level = min(self._level + (now_s - self._at_s) * self.rate, self.burst)
            self._at_s = now_s
        return self._level

    def take(self, tokens: float, now_s: float) -> bool:
        """Take ``tokens`` if they are there; whether they were."""
        if self.level(now_s) < tokens:
            return False
        self._level -= tokens
        return True

    def draw(self, tokens: float, now_s: float) -> bool:
        """Take ``tokens`` on credit; False, and no credit left, if that does not suffice."""
        left = self.level(now_s) - tokens
        self._level = max(left, -self.burst)
        return left >= -self.burst

    def give_back(self, tokens: float, now_s: float) -> None:
        """Return what was taken and not used."""
        self._level = min(self.level(now_s) + tokens, self.burst)

    def wait_s(self, tokens: float, now_s: float, beside: float = 0.0) -> float:
        """Seconds until so many are there beside those that others are about to take; infinite
        where they never will be."""
        if tokens > self.burst:
            return math.inf
        return max(tokens + beside - self.level(now_s), 0.0) / self.rate


def token_weight(model: StepTimeModel, tpot_s: float, max_step_tokens: int) -> float:
    """What an output token with this TPOT costs, in tokens of a full step; at least 1.

    In the time of a step that keeps it, full steps would process ``tpot_s * peak`` tokens; the step
    itself holds the paper's time2bs of them, which share that cost. The fixed part of a step's time
    is what makes short steps dear; reading KV is left out.
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

    Args:
        owners: tenant of each request.
        values: what each says it is worth, above 0.
        usual: what the operator says that requests of its class are worth, above 0.

    A request that claims r times the usual is taken down to it, and with it, by the same r, all
    requests of its tenant.
    """
    claims: dict[Hashable, float] = {}
    for owner, value, of_class in zip(owners, values, usual, strict=True):
        claims[owner] = max(claims.get(owner, 1.0), value / of_class)
    return [value / claims[owner] for owner, value in zip(owners, values, strict=True)]
