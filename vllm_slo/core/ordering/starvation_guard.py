# SPDX-License-Identifier: Apache-2.0
"""How long best effort has gone without tokens, and what is reserved for it after too long.

SLOs-Serve's best-effort tier (section 4.1) takes what promises leave, and under load they leave
nothing for long. So after a while a share of the tokens is reserved for best effort. Spread over
all its requests, that share would end no answer: each would begin, give way to a promise, and begin
anew. So if best effort has no order of its own, the share belongs to one request until that ends:
the starved request.
"""

from __future__ import annotations

from collections.abc import Container

from vllm_slo.core.types import INFINITY


class StarvationGuard:
    """Requests without a promise, and when each last got tokens. Times are seconds of one clock.

    Args:
        ageing_s: without tokens for longer than this, a request has waited too long.
        share: of a step's tokens that is then reserved for best effort, from 0 to below 1.
        keep_starved: whether it is reserved for one request at a time; otherwise for the requests
            that best effort's order puts first.

    Attributes:
        since_s: request id -> when it last got tokens, or was first seen.
        starved: the request that goes first, and for which a place is reserved; None: there is
            none. It is always a key of ``since_s``.
    """

    def __init__(self, ageing_s: float, share: float, *, keep_starved: bool) -> None:
        self.since_s: dict[str, float] = {}
        self._ageing_s = ageing_s
        self._share = share
        self._keep_starved = keep_starved
        self.starved: str | None = None

    def seen(self, request_id: str, now_s: float) -> float:
        """When a request last got tokens; a new one waits from now on."""
        return self.since_s.setdefault(request_id, now_s)

    def served(self, request_id: str, now_s: float) -> None:
        self.since_s[request_id] = now_s

    def remove(self, request_id: str) -> None:
        """Note that a request has ended, or has been promised its objectives."""
        self.since_s.pop(request_id, None)
        if request_id == self.starved:
            self.starved = None

    def retain(self, live: Container[str]) -> None:
        """Forget the requests that are not live."""
        for name in [name for name in self.since_s if name not in live]:
            self.remove(name)
        if self.starved not in self.since_s:
            self.starved = None

    def must_begin(self, request_id: str, now_s: float) -> bool:
        """Whether a request is to begin though it may miss its TPOT.

        That is the starved one. If all began that have waited too long, the backlog of an overload
        would begin at once, and its requests would slow each other down. Where best effort has an
        order of its own, nobody is starved, and all that have waited too long begin.
        """
        since_s = self.seen(request_id, now_s)
        if self._keep_starved:
            return request_id == self.starved
        return now_s - since_s > self._ageing_s

    def choose_starved(self, now_s: float) -> None:
        """If there is no starved request, take the one that has waited longest, if too long."""
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
        """Places that promises may not take."""
        return int(self.starved is not None and self._share > 0.0)
