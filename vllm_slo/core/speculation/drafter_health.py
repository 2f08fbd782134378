# SPDX-License-Identifier: Apache-2.0
"""Whether a draft server is asked at all: one that misses deadlines or sends nonsense is not.

A verifier waits for every drafter it asked, up to a deadline, in every step. So a drafter that
missed `MISSES` deadlines in a row is suspended: nobody waits for it. It rests for a time that
doubles from one suspension to the next, until it has answered in time again; then it is readmitted
if it has shown any sign of life, and is otherwise asked for one now and then, and readmitted as
soon as it gives it. A drafter that is back after a pause is thus found at once, and one that is
slow for ever costs one deadline per rest.

Time is what the caller says it is, in seconds of one clock.
"""

from __future__ import annotations

from typing import Final

MISSES: Final = 3
"""Deadlines missed in a row for which a drafter is suspended."""
SHORTEST_REST_S: Final = 0.1
LONGEST_REST_S: Final = 5.0
FORGETS: Final = 0.2
"""How fast a slow link is forgotten: the share of each faster answer in `Attendance.link_s`."""
FAULTS: Final = 8
"""Bad messages since the last good one for which a drafter is ignored."""
IGNORED_S: Final = 30.0


class Attendance:
    """How one drafter keeps deadlines.

    Attributes:
        link_s: seconds that an answer takes beyond drafting, rather too many than too few.
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
        """Whether it is not to be asked."""
        return self._rests_until_s is not None

    def missed(self, now_s: float) -> None:
        """Its answer did not come in time."""
        self._missed += 1
        if self._missed >= MISSES and not self.suspended:
            self._alive = self._called = False
            self._rest(now_s)

    def answered(self) -> None:
        """It answered in time."""
        self._missed = 0
        self._rest_s = SHORTEST_REST_S
        self._rests_until_s = None

    def lives(self) -> None:
        """It sent something, if too late."""
        self._alive = True

    def travelled(self, seconds: float) -> None:
        """An answer took so long, less the time spent drafting."""
        self.link_s = max(seconds, self.link_s + FORGETS * (seconds - self.link_s))

    def overdue(self, seconds: float, deadline_s: float) -> None:
        """As `travelled`, of an answer that came after its deadline and was found at some time
        later: it is believed by and by."""
        self.travelled(min(seconds, max(2.0 * self.link_s, deadline_s / 4.0)))

    def rested(self, now_s: float) -> bool:
        """Readmit it if it may come back; True where it should be asked for a sign of life now.

        After a rest one more missed deadline suspends it again.
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
    """How one drafter behaves; who keeps sending what nobody can use is ignored for a while."""

    def __init__(self) -> None:
        self._faults = 0
        self._ignored_until_s = 0.0

    def ignored(self, now_s: float) -> bool:
        """Whether nothing that it sends is read, and it is not asked."""
        return now_s < self._ignored_until_s

    def good(self) -> None:
        """It answered as it should."""
        self._faults = 0

    def bad(self, now_s: float) -> bool:
        """It sent what it should not have; True if it is ignored from now on."""
        self._faults += 1
        if self._faults < FAULTS:
            return False
        self._faults = 0
        self._ignored_until_s = now_s + IGNORED_S
        return True
