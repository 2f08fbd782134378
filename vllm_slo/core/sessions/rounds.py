# SPDX-License-Identifier: Apache-2.0
"""Jobs of several rounds, such as tool loops: what one round may take for the job to be in time.

Source: SLOs-Serve, table 1 ("LLM with tools": tight on every prompt, a fast loop). A job may have
an end-to-end objective. The time that is left of it is divided anew when a round begins. So rounds
that ended early, or tools that were quick, leave more for the next rounds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from vllm_slo.core.types import INFINITY

Key: TypeAlias = tuple[str | None, str]
"""(tenant, session id)."""
MOST_SESSIONS: Final = 4_096
"""Sessions that are remembered: a limit of memory. Beyond it, the one that was quiet the longest is
closed."""
TYPICAL_OF: Final = 64
"""Jobs, and tool calls, from which the medians of a class are taken. The value is a choice: enough
for a median, and few enough to follow a change."""
TOOLS_SHARE: Final = 0.9
"""Of the time that is left of a job, what tools are expected to take at most. The value is a
choice: however slow tools were, a round keeps some time, since they may be quicker than usual."""
TIGHT: Final = 3.0
"""TTFT of a round, in multiples of a lone request's (SLOs-Serve, table 3), where none was asked."""
SHORTEST_S: Final = 1e-6
"""Seconds per token, fewer than any engine takes: the pace of an answer that is late already."""


class RoundPace(NamedTuple):
    """What a round may take. Seconds, above 0; infinite where its job does not say.

    Attributes:
        ttft_s: to its first token.
        tpot_s: for each token after that.
    """

    ttft_s: float
    tpot_s: float


UNPACED: Final = RoundPace(INFINITY, INFINITY)


@dataclass(slots=True)
class Session:
    """One job.

    Attributes:
        slo_class: of its latest round.
        started_s: arrival of its first round.
        deadline_s: end of the last token of its last round; infinite without an objective.
        rounds: begun so far; requests that overlap are of one round.
        live: its requests that have not ended.
        expected: rounds that it is to have; None: as its class.
        ended_s: when its latest request ended.
        kept: whether every objective so far was kept.
        has_objective: whether any of its rounds had one.
    """

    key: Key
    slo_class: str
    started_s: float
    deadline_s: float = INFINITY
    rounds: int = 0
    live: int = 0
    expected: int | None = None
    ended_s: float = 0.0
    kept: bool = True
    has_objective: bool = False

    @property
    def attained(self) -> bool | None:
        """Whether it kept everything so far; None without an objective."""
        return self.kept if self.has_objective else None


class _Typical:
    """Rounds of a job and seconds between two of them, of the last jobs of a class."""

    def __init__(self) -> None:
        self.rounds: deque[int] = deque(maxlen=TYPICAL_OF)
        self.tools_s: deque[float] = deque(maxlen=TYPICAL_OF)


class Sessions:
    """The jobs of one engine.

    ``idle_s``: seconds without a request after which a session counts as ended.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._live: OrderedDict[Key, Session] = OrderedDict()  # by when something happened last
        self._typical: dict[str, _Typical] = {}

    def __len__(self) -> int:
        return len(self._live)

    def begin(
        self,
        key: Key,
        slo_class: str,
        now_s: float,
        *,
        e2e_s: float = INFINITY,
        expected: int | None = None,
        has_objective: bool = False,
    ) -> Session:
        """Note that a request of a session has come.

        Args:
            slo_class: its class, of which the typical number of rounds is learnt.
            e2e_s: the job's end-to-end objective, seconds from its first arrival.
            expected: rounds that it is to have altogether, if the client knows.
            has_objective: whether the request has one, the job's included.
        """
        session = self._live.get(key)
        if session is None:
            session = self._live[key] = Session(key, slo_class, now_s)
        elif not session.live:
            self._of(slo_class).tools_s.append(max(now_s - session.ended_s, 0.0))
        self._live.move_to_end(key)
        session.slo_class = slo_class
        session.rounds += not session.live
        session.live += 1
        session.deadline_s = min(session.deadline_s, session.started_s + e2e_s)
        session.expected = expected or session.expected
        session.has_objective |= has_objective
        return session

    def pace(
        self,
        session: Session,
        now_s: float,
        lone_ttft_s: float,
        tokens: float | None,
        *,
        last: bool,
    ) -> RoundPace:
        """What the round that has just begun may take, so that the whole job is in time.

        Args:
            lone_ttft_s: what its prompt takes an engine without other work.
            tokens: how long its answer will be; None: that is not known.
        """
        left_s = session.deadline_s - now_s
        if left_s == INFINITY or left_s <= 0.0:
            return UNPACED
        more = 0 if last else self._more_rounds(session)
        tools_s = min(more * self._tool_s(session.slo_class), TOOLS_SHARE * left_s)
        budget_s = (left_s - tools_s) / (1 + more)
        ttft_s = min(TIGHT * lone_ttft_s, budget_s / 2)
        if tokens is None or tokens <= 1.0:
            return RoundPace(budget_s if tokens is not None else ttft_s, INFINITY)
        return RoundPace(ttft_s, (budget_s - ttft_s) / (tokens - 1.0))

    def _more_rounds(self, session: Session) -> int:
        """Rounds that are to follow the one that has begun; one, if that is not known."""
        if session.expected is not None:
            return max(session.expected - session.rounds, 0)
        ended = self._of(session.slo_class).rounds
        longer = sorted(rounds for rounds in ended if rounds >= session.rounds)
        return longer[len(longer) // 2] - session.rounds if longer else 1

    def _tool_s(self, slo_class: str) -> float:
        tools_s = sorted(self._of(slo_class).tools_s)
        return tools_s[len(tools_s) // 2] if tools_s else 0.0

    def end(self, key: Key, now_s: float, *, attained: bool | None, last: bool) -> Session | None:
        """Note that a request of a session has ended; returns the session if that has ended, too.

        Args:
            attained: whether the request kept its objectives; None without any, or if it was
                aborted.
            last: whether no other round follows.
        """
        session = self._live[key]
        session.live -= 1
        session.ended_s = now_s
        session.kept &= attained is not False and now_s <= session.deadline_s
        self._live.move_to_end(key)
        if last and not session.live:
            return self._close(key)
        return None

    def recount(self, live: Iterable[Session]) -> None:
        """Count the live requests of each session anew: ``live`` has the session of each."""
        for session in self._live.values():
            session.live = 0
        for session in live:
            session.live += 1

    def take_quiet(self, now_s: float) -> list[Session]:
        """Close the sessions that have been quiet for too long, and if there are too many sessions
        those that have been quiet the longest."""
        closed = []
        for key, session in list(self._live.items()):
            quiet = now_s - session.ended_s > self._idle_s
            if not quiet and len(self._live) <= MOST_SESSIONS:
                break
            if not session.live:
                closed.append(self._close(key))
        return closed

    def _close(self, key: Key) -> Session:
        session = self._live.pop(key)
        self._of(session.slo_class).rounds.append(session.rounds)
        return session

    def _of(self, slo_class: str) -> _Typical:
        return self._typical.setdefault(slo_class, _Typical())


def end_to_end_pace(
    budget_s: float, lone_prefill_s: float, lone_token_s: float, tokens: float
) -> RoundPace:
    """Divide a time for a whole answer between its prompt and its tokens.

    Both get the same multiple of what they take on an engine without other work.

    Args:
        budget_s: from arrival to the last token, seconds, above 0.
        lone_prefill_s: to the first token on an engine without other work, seconds, above 0.
        lone_token_s: for each further token there, seconds, above 0.
        tokens: how long the answer will be, at least 1.
    """
    further = max(tokens - 1.0, 0.0)
    if further == 0.0:
        return RoundPace(budget_s, INFINITY)
    stretch = budget_s / (lone_prefill_s + further * lone_token_s)
    return RoundPace(stretch * lone_prefill_s, stretch * lone_token_s)


def pace_of_rest(
    end_s: float, last_token_s: float, window_s: float, in_window: int, left: int
) -> float:
    """The time per token, in seconds, that ends an answer in time once it has begun; at least
    `SHORTEST_S`.

    A TPOT holds for its window as a whole. Tokens that came fast would let the rest of the window
    be slower, so the pace is also taken from the start of the window.

    Args:
        end_s: when the whole answer is to have come.
        last_token_s: when its last token came.
        window_s: when the open window of its TPOT began.
        in_window: tokens in that window so far.
        left: tokens to come, at least 1.
    """
    by_last = (end_s - last_token_s) / left
    by_window = (end_s - window_s) / (in_window + left)
    return max(min(by_last, by_window), SHORTEST_S)
