# SPDX-License-Identifier: Apache-2.0
"""The worker's report to the scheduler on draft servers, sent with each step. Needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Fault(StrEnum):
    """Why something that a draft server sent, or owed, was dropped."""

    LATE = "late"
    """A deadline passed without its answer, or it could not be sent to."""
    STALE_ROUND = "stale_round"
    """An answer that came after its deadline; like ``LATE`` it is not held against the drafter."""
    REPLAYED = "replayed"
    """An answer that is not expected: of another epoch, never asked for, or given already."""
    WRONG_SESSION = "wrong_session"
    """A draft for a session that was not asked for, a second one, or one after another prefix."""
    OUT_OF_RANGE = "out_of_range"
    """Token ids beyond the verifier's vocabulary."""
    TOO_MANY_TOKENS = "too_many_tokens"
    """More tokens than granted."""
    BAD_PROBABILITY = "bad_probability"
    """A number that is not a probability, or not one for each token."""
    MALFORMED = "malformed"
    """Bytes that are not a message of the wire format."""
    UNKNOWN_SENDER = "unknown_sender"
    """A message before a hello, or after another took the name."""
    FLOOD = "flood"
    """More messages than were asked for."""
    REFUSED_HELLO = "refused_hello"
    """A hello of another vocabulary or wire version, or with too many drafters already."""


@dataclass(frozen=True, slots=True)
class DrafterView:
    """A draft server that has introduced itself.

    Attributes:
        name, model, max_model_len, max_sessions: as in its hello.
        sessions: sessions that it holds.
        up: whether it is connected, as far as is known.
        suspended: whether it missed too many deadlines.
        ignored: whether it sent too many unusable messages.
        link_s: seconds that its answers take beyond drafting.
        faults: what was dropped of it since the link was made, and how often.
    """

    name: str
    model: str
    max_model_len: int
    max_sessions: int
    sessions: int
    up: bool
    suspended: bool
    ignored: bool
    link_s: float
    faults: Mapping[Fault, int]

    @property
    def ready(self) -> bool:
        """Whether the next round asks it."""
        return self.up and not self.suspended and not self.ignored


class DrafterRound(NamedTuple):
    """What one draft server did in a step.

    Attributes:
        drafter: its name.
        wait_s: from the end of asking until its answer, or the deadline.
        draft_s: the part of that spent drafting; None: its answer was late.
        tokens: of its longest draft; without an answer, of the longest that was asked for.
    """

    drafter: str
    wait_s: float
    draft_s: float | None
    tokens: int


@dataclass(frozen=True, slots=True)
class ServersReport:
    """What the draft servers of an engine did in a step.

    Attributes:
        drafters: all that were welcomed.
        rounds: of those that were asked.
        dropped: (drafter, reason, times) since the last report; the drafter of a sender that was
            never welcomed is "".
        send_s, receive_s: spent on sending to them, and on waiting for them.
    """

    drafters: tuple[DrafterView, ...]
    rounds: tuple[DrafterRound, ...] = ()
    dropped: tuple[tuple[str, str, int], ...] = ()
    send_s: float = 0.0
    receive_s: float = 0.0
