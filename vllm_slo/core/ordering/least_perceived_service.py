# SPDX-License-Identifier: Apache-2.0
"""Best effort ordered so that requests wait little on average: LAPS-SD (algorithm 1, equation 6).

What a request will still take depends on the length of its answer and on how many of its drafts are
accepted, which is known only after some rounds. Until then it is *imperceptible*: it is queued by
attained service, and served first come first served within a queue. Once its acceptance rate has
settled it is *perceptible*: it is queued by what it will still take, and served the shortest first,
ahead of the imperceptible ones in its queue.

The paper schedules one request at a time. Here a batch has many *places*:

* A request's service is its own work: what the draft and verify passes of its tokens would take if
  it were alone in the batch. So thresholds mean the same under any load, and in a batch of one this
  is the paper's processing time.
* A perceptible request is queued by its *remaining* work. If it does not hold its KV, this includes
  computing the KV again.
* All requests that hold a place run in every step. Free places are given first. Then a waiting
  request takes the place of one in a lower queue; a perceptible one also that of an imperceptible
  one in its own queue. Between two perceptible ones it takes the place only if it is shorter by
  more than the switch costs. A perceptible request keeps a place that it was left, or given, since
  it became so.
  The paper does not preempt it because moving its KV takes long; where arrivals never cease,
  ``preempt_known`` (its place can be taken as well, at that cost) waits less.
* Taking a place drops KV, which costs a prefill. A request keeps its place until its rounds since
  it began took as long as that prefill would. So at most half of the time goes into doing work
  again, and every request that has a place gets ahead.
* A request that has waited for longer than ``ageing_s``, times its own size in units of the first
  queue's, goes first, and keeps its place for as long as its queue takes. So no request starves,
  and a long one does not age before short ones only because it is long.

With gamma = 0 (``stable_rounds``) no request is imperceptible once the engine has seen rounds: its
rate is taken to be the typical one, and follows its own drafts from its first round on. This goes
beyond the paper. Where lengths are predicted and all requests come at once to a batch of one, what
is learnt in the first rounds of each request costs more than it saves.

Two policies to compare with: `las` (least attained service: the same queues and nothing
perceptible) and `lp_sjf` (shortest predicted length first, no place is ever taken).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_slo.core.types import BestEffortOrder


def execution_s(
    tokens: float, drafts: float, acceptance: float, draft_s: float, verify_s: float
) -> float:
    """Seconds that ``tokens`` tokens take (equation 6).

    Args:
        tokens: of the answer, L.
        drafts: of a round, n.
        acceptance: share of them that is accepted, A.
        draft_s: seconds of the small model for each draft, T_SSM.
        verify_s: seconds of the served model for a round, T_LLM.
    """
    return tokens * (drafts * draft_s + verify_s) / (drafts * acceptance + 1.0)


@dataclass(frozen=True, slots=True)
class ServiceQueues:
    """The thresholds of the queues (section 4.2): S_j = ratio^(j-1) S_1, the last has none.

    Attributes:
        count: queues, K.
        first_s: seconds of service that the first one takes, S_1.
        ratio: M.
    """

    count: int = 4
    first_s: float = 0.25
    ratio: float = 4.0

    def level(self, service_s: float) -> int:
        """The queue, from 0, of so much service."""
        upper_s, level = self.first_s, 0
        while service_s > upper_s and level < self.count - 1:
            upper_s *= self.ratio
            level += 1
        return level


class TypicalRounds:
    """What the first rounds of requests are like: means over the newest.

    Attributes:
        round_s: seconds of a round; 0: there was none yet.
        drafted, accepted: drafts of a round that are verified, and accepted.
    """

    MEMORY = 512
    """Rounds that a mean is over, more or less. The value is a choice: 64 requests of eight."""

    def __init__(self) -> None:
        self._count = 0
        self.round_s = self.drafted = self.accepted = 0.0

    def observe(self, seconds: float, drafted: int, accepted: int) -> None:
        self._count = min(self._count + 1, self.MEMORY)
        self.round_s += (seconds - self.round_s) / self._count
        self.drafted += (drafted - self.drafted) / self._count
        self.accepted += (accepted - self.accepted) / self._count


class Perception:
    """What is known of one request's work.

    Args:
        rounds: gamma, rounds in which the acceptance rate must have stood still. 0: it is taken to
            be the typical one until the request's own rounds say otherwise.
        change: delta, by which it may have moved in them.

    Attributes:
        attained_s: service since it arrived.
        progress_s: service in rounds since it last got a place.
        settled: whether it has a place that is not taken from it any more.
    """

    PRIOR = 2.0
    """Rounds of its own that count as much as what is typical."""
    SHOWS = 3.0
    """Rounds for which a request keeps a place, where gamma is 0: more than `PRIOR`, so its own
    rounds then count for more than the typical ones."""
    SHOWN = 8
    """First rounds of a request that are taken for typical, so that long requests count no more
    than others. Also the newest rounds that show how long one takes, where gamma is 0."""

    __slots__ = (
        "_accepted",
        "_change",
        "_count",
        "_drafted",
        "_rates",
        "_rounds",
        "_settled_rate",
        "_typical",
        "attained_s",
        "progress_s",
        "settled",
    )

    def __init__(self, rounds: int, change: float, typical: TypicalRounds) -> None:
        self._change = change
        self._typical = typical
        self._rates: deque[float] = deque(maxlen=rounds)
        self._rounds: deque[tuple[float, int]] = deque(maxlen=rounds or self.SHOWN)
        self._count = self._drafted = self._accepted = 0
        self._settled_rate: float | None = None
        self.attained_s = self.progress_s = 0.0
        self.settled = False

    @property
    def acceptance(self) -> float | None:
        """Predicted rate A, of drafts that are verified; None: it is not known yet."""
        typical = self._typical
        if self._rates.maxlen or not typical.round_s:
            return self._settled_rate
        drafted = self._drafted + self.PRIOR * typical.drafted
        return (self._accepted + self.PRIOR * typical.accepted) / drafted if drafted else 0.0

    def place(self) -> None:
        """Note that it got a place, and begins with nothing computed."""
        self.progress_s = 0.0
        self.settled = self.acceptance is not None

    def read(self, seconds: float) -> None:
        """Take in the time that a part of its prompt took."""
        self.attained_s += seconds

    def round(self, seconds: float, drafted: int, accepted: int) -> None:
        """Take in a round of so many seconds, its drafting included (section 4.3).

        The rate is that of all tokens so far, so it settles. A round without drafts tells nothing
        of it, unless there never were any drafts.
        """
        if self._count < self.SHOWN:
            self._typical.observe(seconds, drafted, accepted)
        self._count += 1
        self.attained_s += seconds
        self.progress_s += seconds
        self._rounds.append((seconds, drafted))
        self._drafted += drafted
        self._accepted += accepted
        if drafted or not self._drafted:
            self._rates.append(self._accepted / max(self._drafted, 1))
        full = bool(self._rates) and len(self._rates) == self._rates.maxlen
        stands = full and max(self._rates) - min(self._rates) < self._change
        if stands or self._settled_rate is not None:
            self._settled_rate = sum(self._rates) / len(self._rates)

    @property
    def shows_s(self) -> float:
        """Seconds of rounds that show how a request differs from a typical one."""
        return 0.0 if self._rates.maxlen else self.SHOWS * self._typical.round_s

    def remaining_s(self, tokens: float) -> float | None:
        """Seconds that so many more tokens will take; None: it is imperceptible."""
        acceptance = self.acceptance
        if acceptance is None:
            return None
        prior = 0.0 if self._rates.maxlen else self.PRIOR
        rounds = len(self._rounds) + prior
        seconds = sum(seconds for seconds, _ in self._rounds) + prior * self._typical.round_s
        drafted = sum(drafted for _, drafted in self._rounds) + prior * self._typical.drafted
        return execution_s(tokens, drafted / rounds, acceptance, 0.0, seconds / rounds)


class ServiceView(NamedTuple):
    """A request without a promise, for its place in the order.

    Attributes:
        arrival: by which first come is first served.
        waited_s: seconds since it last had service, or arrived.
        length: predicted tokens of its whole answer.
        attained_s: service since it arrived.
        remaining_s: what it will still take, KV to compute again included; None: imperceptible.
        placed: whether it holds a place.
        settled: whether that is not taken from it any more.
        progress_s: service in rounds since it last got a place.
        kept_s: progress before which it keeps its place: what computing its KV again costs, a turn
            if it came by its age, and what it takes to show what it is like.
        blocks: KV blocks that it holds, or needs to begin.
    """

    request_id: str
    arrival: float
    waited_s: float = 0.0
    length: float = 0.0
    attained_s: float = 0.0
    remaining_s: float | None = None
    placed: bool = False
    settled: bool = False
    progress_s: float = 0.0
    kept_s: float = 0.0
    blocks: int = 0


@dataclass(frozen=True, slots=True)
class ServiceOrder:
    """Which requests of best effort go first, and which give up a place.

    Attributes:
        policy: see the module; `fcfs` keeps what arrived first in front.
        ageing_s: seconds of waiting after which a small request goes first.
        preempt_known: whether places of perceptible requests can be taken at any time.
    """

    policy: BestEffortOrder
    queues: ServiceQueues = ServiceQueues()
    ageing_s: float = 30.0
    preempt_known: bool = False

    def rank(self, views: Iterable[ServiceView]) -> list[ServiceView]:
        return sorted(views, key=self._key)

    def _key(self, view: ServiceView) -> tuple[bool, float, bool, float, float, str]:
        first, name = view.arrival, view.request_id
        if self.is_aged(view):
            return False, 0.0, False, 0.0, first, name
        if self.policy == "lp_sjf":
            return True, 0.0, False, view.length, first, name
        if self.policy == "fcfs":
            return True, 0.0, False, 0.0, first, name
        remaining_s = None if self.policy == "las" else view.remaining_s
        return True, float(self.level(view)), remaining_s is None, remaining_s or 0.0, first, name

    def level(self, view: ServiceView) -> int:
        """The queue that a request is in, from 0."""
        return self.queues.level(self._service_s(view))

    def turn_s(self, view: ServiceView) -> float:
        """Seconds of rounds for which a request keeps a place that it gets now."""
        if not self.is_aged(view):
            return 0.0
        return self.queues.first_s * self.queues.ratio ** self.level(view)

    def _service_s(self, view: ServiceView) -> float:
        """Service that a request is queued by: what remains if that is known, else the attained."""
        if self.policy == "laps_sd" and view.remaining_s is not None:
            return view.remaining_s
        return view.attained_s

    def is_aged(self, view: ServiceView) -> bool:
        """Whether a request has waited long, for its size."""
        if view.placed:
            return False
        size = max(self._service_s(view) / self.queues.first_s, 1.0)
        return view.waited_s > self.ageing_s * size

    def give_way(
        self, ranked: Sequence[ServiceView], places: int, free_blocks: int
    ) -> tuple[str, ...]:
        """Requests whose places others are to have.

        Args:
            ranked: all requests, the most urgent first.
            places: free ones.

        Returns:
            Their ids. No place is taken for a request that could not begin even so.
        """
        chosen: list[str] = []
        victims = [view for view in reversed(ranked) if self._may_give_way(view)]
        for view in ranked:
            if view.placed:
                continue
            taken: list[ServiceView] = []
            while places < 1 or free_blocks < view.blocks:
                victim = victims[len(taken)] if len(taken) < len(victims) else None
                if victim is None or not self._goes_before(view, victim):
                    return tuple(chosen)
                taken.append(victim)
                places += 1
                free_blocks += victim.blocks
            del victims[: len(taken)]
            chosen += [victim.request_id for victim in taken]
            places -= 1
            free_blocks -= view.blocks
        return tuple(chosen)

    def _may_give_way(self, view: ServiceView) -> bool:
        """Whether a request's place may be taken at all."""
        if self.policy not in ("laps_sd", "las") or not view.placed:
            return False
        fixed = view.settled and self.policy == "laps_sd" and not self.preempt_known
        return not fixed and view.progress_s >= view.kept_s

    def _goes_before(self, view: ServiceView, placed: ServiceView) -> bool:
        """Whether a request is so much more urgent that it may have another's place."""
        if self.is_aged(view):
            return True
        mine, theirs = self.level(view), self.level(placed)
        if self.policy == "las" or view.remaining_s is None:
            return mine < theirs
        if placed.remaining_s is None:
            return mine <= theirs
        return view.remaining_s + placed.kept_s < placed.remaining_s
