# SPDX-License-Identifier: Apache-2.0
"""How long best effort has gone without tokens, and what is kept for it after too long.

SLOs-Serve's best-effort tier (section 4.1) takes what promises leave, which under load is nothing
for long. So after a while a share of the tokens comes before promises. Spread over everybody, that
share ends nobody's answer: one begins, gives way to a promise, and begins anew. Where best effort
is served as it comes, it therefore belongs to one request until that ends, the starved.
"""

from __future__ import annotations

from vllm_slo.core.types import INFINITY


class StarvationGuard:
    """Those without a promise, and when each last got tokens. Times are seconds of one clock.

    Args:
        ageing_s: without tokens for longer than this, a request has waited too long.
        share: of a step's tokens that is kept for best effort then, from 0 to below 1.
        keep_starved: whether it is kept for one request at a time; else for whom an order puts
        first.

    Attributes:
        since_s: request id -> when it last got tokens, or was first seen.
        starved: the request that goes first, and for which a place is kept; None: there is none. It
            is one of those who wait.
    """

    def __init__(self, ageing_s: float, share: float, *, keep_starved: bool) -> None:
        self.since_s: dict[str, float] = {}
        self._ageing_s = ageing_s
        self._share = share
        self._keep_starved = keep_starved
        self.starved: str | None = None

    def seen(self, request_id: str, now_s: float) -> float:
        """When a request last got tokens; it waits from now on if it is new."""
        return self.since_s.setdefault(request_id, now_s)

    def served(self, request_id: str, now_s: float) -> None:
        """A request got tokens."""
        self.since_s[request_id] = now_s

    def remove(self, request_id: str) -> None:
        """A request has ended, or has been promised what it asked."""
        self.since_s.pop(request_id, None)
        if request_id == self.starved:
            self.starved = None

    def is_aged(self, request_id: str, now_s: float) -> bool:
        """Whether a request has waited too long, or had and has not ended."""
        return now_s - self.seen(request_id, now_s) > self._ageing_s or request_id == self.starved

    def choose_starved(self, now_s: float) -> None:
        """Where there is no starved, it is who has waited longest, if that is too long."""
        if self._keep_starved and self.starved is None:
            name = min(self.since_s, key=self.since_s.__getitem__, default=None)
            if name is not None and now_s - self.since_s[name] > self._ageing_s:
                self.starved = name

    def reserved_share(self, now_s: float) -> float:
        """Share of the tokens that best effort may claim before promises."""
        if self._keep_starved:
            return 0.0 if self.starved is None else self._share
        oldest_s = min(self.since_s.values(), default=INFINITY)
        return self._share if now_s - oldest_s > self._ageing_s else 0.0

    @property
    def reserved_seats(self) -> int:
        """Places that are not for promises."""
        return int(self.starved is not None and self._share > 0.0)
