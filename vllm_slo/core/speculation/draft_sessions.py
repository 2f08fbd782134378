# SPDX-License-Identifier: Apache-2.0
"""What draft servers hold of the texts they draft for: both ends' books, without the link.

A verifier sends each drafter the difference to what it was sent before (`SentPrefixes`), the
drafter applies it (`HeldPrefixes`). As messages of one connection arrive in order or not at all,
what was sent is what is held; a new connection begins with empty books.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DraftAsk:
    """What to draft for one session.

    Attributes:
        prefix: all tokens committed so far, prompt included. An array of int32 costs least.
        grant: tokens to draft at most.
        temperature: to draw them with; 0: greedy.
    """

    prefix: Sequence[int] | Ids
    grant: int
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """A draft.

    Attributes:
        tokens: in order.
        probabilities: that each was drawn with; of a greedy one, the draft model's.
    """

    tokens: Sequence[int]
    probabilities: Sequence[float]


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """How one drafter's copy of a session becomes the verifier's: ``held[:keep] + tokens``.

    Attributes:
        number: the session's, for this drafter.
        keep: tokens that stay.
        tokens: that follow them.
    """

    number: int
    keep: int
    tokens: list[int]


class SentPrefixes:
    """What one drafter was sent since it connected.

    Sessions get numbers that are never used again. Of more sessions than the drafter holds, those
    that were asked for longest ago are ended.

    Args:
        max_sessions: that the drafter holds.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._sent: dict[str, tuple[int, Ids]] = {}  # the longest unused first
        self._ended: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, session: str) -> bool:
        return session in self._sent

    def change(self, session: str, prefix: Sequence[int] | Ids, most: int) -> PrefixChange | None:
        """What to send so that the drafter holds this prefix; counts as sent.

        A caller asks for at most ``max_sessions`` of them between two calls of `take_ended`.

        Args:
            session: a name of the caller's.
            prefix: all its tokens.
            most: tokens that may be sent.

        Returns:
            None, and nothing counts as sent, if it takes more.
        """
        wanted = np.array(prefix, dtype=np.int32)
        number, held = self._sent.get(session, (-1, wanted[:0]))
        keep = _common(held, wanted)
        if len(wanted) - keep > most:
            return None
        if number < 0:
            number, self._next = self._next, self._next + 1
            if len(self._sent) >= self._max_sessions:
                self.end(next(iter(self._sent)))
        self._sent.pop(session, None)
        self._sent[session] = number, wanted
        return PrefixChange(number, keep, wanted[keep:].tolist())

    def end(self, session: str) -> None:
        """The session is over, or no longer this drafter's; nothing where it never was."""
        if session in self._sent:
            self._ended.append(self._sent.pop(session)[0])

    @property
    def ended(self) -> bool:
        """Whether there is something to tell the drafter of."""
        return bool(self._ended)

    def take_ended(self, most: int) -> list[int]:
        """Numbers to tell the drafter of, the earliest first; they count as told."""
        told, self._ended = self._ended[:most], self._ended[most:]
        return told

    def lost(self, numbers: Iterable[int]) -> None:
        """The drafter does not hold these; each session starts anew when it is asked for."""
        gone = set(numbers)
        for session in [name for name, (number, _) in self._sent.items() if number in gone]:
            del self._sent[session]

    def unsent(self, told: Iterable[int]) -> None:
        """The last message was not sent: all sessions start anew, as what is held is not known.

        Args:
            told: what `take_ended` had given for it.
        """
        self._ended = [*told, *self._ended]
        for session in list(self._sent):
            self.end(session)


def _common(one: Ids, other: Ids) -> int:
    """Tokens that both begin with."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    first = int(differs.argmax()) if shorter else 0
    return first if shorter and differs[first] else shorter


class HeldPrefixes:
    """What a drafter holds for the verifier it is connected to.

    Args:
        max_sessions: more are not held.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._held: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def change(self, number: int, keep: int, tokens: Sequence[int]) -> bool:
        """Apply a `PrefixChange`; False if it cannot be: the session is lost.

        It is where more is to stay than there is, and where there is no room for another one.
        """
        held = self._held.get(number)
        if held is None:
            if keep or len(self._held) >= self._max_sessions:
                return False
            held = self._held[number] = []
        if keep > len(held):
            del self._held[number]
            return False
        held[keep:] = tokens
        return True

    def end(self, numbers: Iterable[int]) -> None:
        """Let these sessions go; unknown ones do not matter."""
        for number in numbers:
            self._held.pop(number, None)

    def prefix(self, number: int) -> list[int]:
        """A copy of the session's tokens.

        Raises:
            KeyError: it is not held.
        """
        return self._held[number].copy()

    def clear(self) -> None:
        """Hold nothing: another verifier, or another epoch."""
        self._held.clear()
