# SPDX-License-Identifier: Apache-2.0
"""The live requests that carry an SLO, and which of them are promised."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from vllm_slo.core.types import INFINITY
from vllm_slo.engine.scheduling.slo_request import SLORequest

FINISH_WEIGHT = 0.1
"""Weight of the newest gap between two promises that end, in their exponential mean."""


class RequestTracker:
    """Follows the live requests. Only this changes whether one is promised, so its indexes hold.

    Args:
        now_s: the time.

    Attributes:
        live: the requests by id, in the order in which they arrived.
        changes: how often requests came, ended, or were promised or not promised any more.
        decoding_changes: those of `changes` that were of requests with a token.
        beginnings: how many promised requests have had their first token.
        unpromised: how many of them have no promise.
        arrived: whether one has arrived since `planned` was called.
        ended: promises that have ended, or draw less, since then.
        reordered: whether promises came or went since the running list was last put in order.
        finish_interval_s: seconds between two promises that ended, the mean of the last.
    """

    def __init__(self, now_s: float) -> None:
        self.live: dict[str, SLORequest] = {}
        self.unpromised = 0
        self.changes = 0
        self.decoding_changes = 0
        self.beginnings = 0
        self.arrived = False
        self.ended = 0
        self.reordered = False
        self.finish_interval_s = 1.0
        self._last_finish_s = now_s
        self._unstarted: dict[str, SLORequest] = {}

    def __iter__(self) -> Iterator[SLORequest]:
        return iter(self.live.values())

    def __len__(self) -> int:
        return len(self.live)

    def get(self, request_id: str) -> SLORequest | None:
        """A live request that carries an SLO; None: there is none of that id."""
        return self.live.get(request_id)

    @property
    def promised(self) -> int:
        """How many are promised their objectives now."""
        return len(self.live) - self.unpromised

    @property
    def tightest_tpot_s(self) -> float:
        """The shortest promised TPOT; infinite where there is none."""
        return min((t.tpot_s for t in self.live.values() if t.promised), default=INFINITY)

    def without_promise(self) -> list[SLORequest]:
        """Those that are not promised, in the order in which they arrived."""
        if not self.unpromised:
            return []
        return [tracked for tracked in self.live.values() if not tracked.promised]

    def promised_before_first_token(self) -> Iterable[SLORequest]:
        """Those that are promised and have no token yet, by promise."""
        return self._unstarted.values()

    # What happens to them.

    def add(self, tracked: SLORequest) -> None:
        """A request has arrived."""
        self.live[tracked.request.request_id] = tracked
        self.unpromised += 1
        self.changes += 1
        self.arrived = True

    def promise(self, tracked: SLORequest, begin_by_s: float) -> None:
        """A request is promised its objectives."""
        tracked.promise(begin_by_s)
        self._note_promise(tracked)

    def begin_turn(self, tracked: SLORequest) -> None:
        """A request's late promise, or the rest of a broken one, is kept from now on."""
        tracked.begin_turn()
        self._note_promise(tracked)

    def _note_promise(self, tracked: SLORequest) -> None:
        self._count_change(tracked)
        self.unpromised -= 1
        self.reordered = True
        if tracked.first_token_s is None:
            self._unstarted[tracked.request.request_id] = tracked

    def withdraw(self, tracked: SLORequest) -> None:
        """A promise ends; the request goes on as best effort."""
        tracked.withdraw()
        self._count_change(tracked)
        self.unpromised += 1
        self.reordered = True
        self._unstarted.pop(tracked.request.request_id, None)

    def started(self, tracked: SLORequest) -> None:
        """A request has its first token."""
        if self._unstarted.pop(tracked.request.request_id, None) is not None:
            self.beginnings += 1

    def remove(self, request_id: str, now_s: float) -> SLORequest | None:
        """A request has ended; None where it carries no SLO."""
        tracked = self.live.pop(request_id, None)
        if tracked is None:
            return None
        self._unstarted.pop(request_id, None)
        self._count_change(tracked)
        if tracked.promised:
            self.ended += 1
            # The time before it arrived is no wait for its end.
            gap_s = now_s - max(self._last_finish_s, tracked.arrival_s)
            self._last_finish_s = now_s
            self.finish_interval_s += FINISH_WEIGHT * (gap_s - self.finish_interval_s)
        else:
            self.unpromised -= 1
        return tracked

    def retain(self, live: Container[str]) -> None:
        """Forget the requests that are not live."""
        for name in [name for name in self.live if name not in live]:
            self._count_change(self.live.pop(name))
        for name in [name for name in self._unstarted if name not in self.live]:
            del self._unstarted[name]
        self.unpromised = sum(not tracked.promised for tracked in self.live.values())

    def _count_change(self, tracked: SLORequest) -> None:
        self.changes += 1
        self.decoding_changes += tracked.first_token_s is not None

    # What is asked once.

    def planned(self) -> None:
        """Admission has ruled on everything that was new."""
        self.arrived = False
        self.ended = 0

    def take_reordered(self) -> bool:
        """`reordered`, which is over with it."""
        reordered, self.reordered = self.reordered, False
        return reordered
