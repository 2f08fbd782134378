# SPDX-License-Identifier: Apache-2.0
"""The prefixes that draft servers hold: what each end of a connection remembers of them.

A verifier sends each drafter the difference to the prefix that it sent before (`SentPrefixes`); the
drafter applies it (`HeldPrefixes`). Messages of one connection arrive in order or not at all, so
what was sent is what is held. A new connection begins with nothing sent and nothing held.
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
    """A request for a draft of one session.

    Attributes:
        prefix: all tokens committed so far, prompt included. An array of int32 costs least.
        grant: most tokens to draft.
        temperature: to sample them with; 0: greedily.
    """

    prefix: Sequence[int] | Ids
    grant: int
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """A draft.

    Attributes:
        tokens: in order.
        probabilities: with which each was sampled; greedily, the draft model's of the token.
    """

    tokens: Sequence[int]
    probabilities: Sequence[float]


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """How a drafter's copy of a prefix becomes the verifier's: ``held[:keep] + tokens``.

    Attributes:
        number: of the session, for this drafter.
        keep: how many of the held tokens stay.
        tokens: that follow them.
    """

    number: int
    keep: int
    tokens: list[int]


class SentPrefixes:
    """The prefixes that were sent to one drafter since it connected.

    A session gets a number that is never used again. Where the drafter can hold no further session,
    the one that was used longest ago is ended.

    Args:
        max_sessions: most that the drafter holds.
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
        """The change after which the drafter holds ``prefix``; it is noted as sent.

        A caller asks for at most ``max_sessions`` changes between two calls of `take_ended`.

        Args:
            session: a name chosen by the caller.
            prefix: all its tokens.
            most: tokens that may be sent.

        Returns:
            None, and nothing is noted, if the change needs more than ``most`` tokens.
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
        """Note that the session is over, or no longer this drafter's; an unknown one is ignored."""
        if session in self._sent:
            self._ended.append(self._sent.pop(session)[0])

    @property
    def ended(self) -> bool:
        """Whether sessions have ended that the drafter has not been told of."""
        return bool(self._ended)

    def take_ended(self, most: int) -> list[int]:
        """At most ``most`` numbers of ended sessions, the earliest first; noted as told."""
        told, self._ended = self._ended[:most], self._ended[most:]
        return told

    def lost(self, numbers: Iterable[int]) -> None:
        """Note that the drafter does not hold these sessions; each is sent whole when next used."""
        gone = set(numbers)
        for session in [name for name, (number, _) in self._sent.items() if number in gone]:
            del self._sent[session]

    def unsent(self, told: Iterable[int]) -> None:
        """Note that the last message was not sent. All sessions end, as what is held is unknown.

        Args:
            told: the numbers that `take_ended` had returned for it.
        """
        self._ended = [*told, *self._ended]
        for session in list(self._sent):
            self.end(session)


def _common(one: Ids, other: Ids) -> int:
    """How many tokens both have in common from their beginning."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    first = int(differs.argmax()) if shorter else 0
    return first if shorter and differs[first] else shorter


class HeldPrefixes:
    """The prefixes that a drafter holds for the verifier it is connected to.

    Args:
        max_sessions: most that it holds.
    """

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._held: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def change(self, number: int, keep: int, tokens: Sequence[int]) -> bool:
        """Apply a `PrefixChange`. False if that is impossible, and then the session is lost.

        That is so if more tokens are to stay than are held, or if no further session fits.
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
        """Forget these sessions; unknown ones are ignored."""
        for number in numbers:
            self._held.pop(number, None)

    def prefix(self, number: int) -> list[int]:
        """A copy of the session's tokens.

        Raises:
            KeyError: the session is not held.
        """
        return self._held[number].copy()

    def clear(self) -> None:
        """Forget all sessions: the verifier is another one, or has begun a new epoch."""
        self._held.clear()
