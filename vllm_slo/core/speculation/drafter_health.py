# SPDX-License-Identifier: Apache-2.0
"""Whether a draft server is asked for drafts, after missed deadlines and bad messages.

A verifier waits in every step for each drafter that it asked, up to a deadline. So a drafter that
missed `MISSES` deadlines in a row is suspended: it is not asked, and no step waits for it. After a
rest it is readmitted if it has sent anything meanwhile. If not, it is sent a probe after each rest,
and is readmitted as soon as it answers that. A rest is twice as long as the one before, until the
drafter answers in time again. So a drafter that comes back is found at once, and one that stays
slow costs one deadline a rest.

Times are passed in, in seconds of one clock.
"""

from __future__ import annotations

from typing import Final

MISSES: Final = 3
"""Deadlines missed in a row after which a drafter is suspended."""
SHORTEST_REST_S: Final = 0.1
"""Seconds of the first rest of a suspended drafter."""
LONGEST_REST_S: Final = 5.0
"""Seconds at which rests no longer double."""
FORGETS: Final = 0.2
"""Weight of a faster answer in `Attendance.link_s`; a slower one replaces it at once."""
FAULTS: Final = 8
"""Bad messages since the last good one after which a drafter is ignored."""
IGNORED_S: Final = 30.0
"""Seconds for which it is ignored."""


class Attendance:
    """How one drafter keeps deadlines, and whether it is suspended.

    Attributes:
        link_s: seconds of an answer that are not spent on drafting; estimated on the high side.
    """

    def __init__(self) -> None:
        self.link_s = 0.0
        self._missed = 0
        self._rest_s = SHORTEST_REST_S
        self._rests_until_s: float | None = None
        self._alive = False
        self._called = False

    @property
    def suspended(self) -> bool:
        """Whether the drafter is not to be asked for drafts."""
        return self._rests_until_s is not None

    def missed(self, now_s: float) -> None:
        """The drafter's answer did not come in time."""
        self._missed += 1
        if self._missed >= MISSES and not self.suspended:
            self._alive = self._called = False
            self._rest(now_s)

    def answered(self) -> None:
        """The drafter answered in time."""
        self._missed = 0
        self._rest_s = SHORTEST_REST_S
        self._rests_until_s = None

    def lives(self) -> None:
        """The drafter sent something, though too late."""
        self._alive = True

    def travelled(self, seconds: float) -> None:
        """An answer took ``seconds`` besides drafting."""
        self.link_s = max(seconds, self.link_s + FORGETS * (seconds - self.link_s))

    def overdue(self, seconds: float, deadline_s: float) -> None:
        """As `travelled`, of an answer that came after its deadline. It may have been read long
        after it came, so `link_s` at most doubles, or rises to a quarter of ``deadline_s``."""
        self.travelled(min(seconds, max(2.0 * self.link_s, deadline_s / 4.0)))

    def rested(self, now_s: float) -> bool:
        """Readmit the drafter if it may come back; True if it is to be sent a probe now.

        After it was readmitted, one more missed deadline suspends it again.
        """
        if self._rests_until_s is None:
            return False
        over = now_s >= self._rests_until_s
        if self._alive and (over or self._called):
            self._missed = MISSES - 1
            self._rests_until_s = None
        elif over:
            self._called = True
            self._rest(now_s)
            return True
        return False

    def _rest(self, now_s: float) -> None:
        self._rests_until_s = now_s + self._rest_s
        self._rest_s = min(2.0 * self._rest_s, LONGEST_REST_S)


class Conduct:
    """Counts the bad messages of one drafter; after `FAULTS` of them it is ignored for a while."""

    def __init__(self) -> None:
        self._faults = 0
        self._ignored_until_s = 0.0

    def ignored(self, now_s: float) -> bool:
        """Whether the drafter is not asked, and its messages are not read."""
        return now_s < self._ignored_until_s

    def good(self) -> None:
        """The drafter sent a valid answer."""
        self._faults = 0

    def bad(self, now_s: float) -> bool:
        """The drafter sent an invalid message; True if it is ignored from now on."""
        self._faults += 1
        if self._faults < FAULTS:
            return False
        self._faults = 0
        self._ignored_until_s = now_s + IGNORED_S
        return True
