# SPDX-License-Identifier: Apache-2.0
"""What became of requests: the events of replicas, brought to the decisions.

A replica names a request by its ticket, the data plane by its exchange. An exchange may have
several tickets in turn, one for each replica that it was sent to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final

from vllm_slo.router.decisions import Decisions
from vllm_slo.router.upstream import Upstream

logger = logging.getLogger("vllm_slo.front")

NEWS_S: Final = 0.05
"""How long a request that is asked for again waits to hear whether its replica refused it. The
replica tells that before it answers, on another connection. Several times the way between two
machines of one network."""
AGAIN_S: Final = 2.0
"""How long a request that ended without an answer may be asked for again. HAProxy asks at once."""
ARRIVAL_S: Final = 10.0
"""After so long a request that its replica has not seen was lost on its way: longer than HAProxy
tries to connect."""


@dataclass(slots=True)
class _Sent:
    """One try of one request.

    Attributes:
        is_last: whether it cannot be asked for again.
        came: whether the replica has seen it.
        stands: whether its answer has begun, or a refusal went to the client.
        refusal: (seconds until a promise may be possible, reason), once the replica refused it.
        news: set when the replica has said what became of it.
    """

    exchange: str
    upstream: Upstream
    sent_s: float
    is_last: bool
    came: bool = False
    stands: bool = False
    refusal: tuple[float, str] | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Exchanges:
    """Follows every try of every request; an `upstream.Observer`.

    Args:
        decisions: told what became of each request.
        cut: called with a replica that counts as dead, to end what the data plane has there.
    """

    def __init__(self, decisions: Decisions, cut: Callable[[Upstream], None]) -> None:
        self._decisions = decisions
        self._cut = cut
        self._by_ticket: dict[str, _Sent] = {}
        self._ticket_of: dict[str, str] = {}

    def sent(self, exchange: str, ticket: str, upstream: Upstream, *, is_last: bool) -> None:
        """Note a try."""
        self._forget(exchange)
        self._by_ticket[ticket] = _Sent(exchange, upstream, time.monotonic(), is_last)
        self._ticket_of[exchange] = ticket

    async def refusal(self, exchange: str) -> tuple[float, str] | None:
        """How the last try was refused; None: it failed, or nothing is known of it."""
        sent = self._by_ticket.get(self._ticket_of.get(exchange, ""))
        if sent is None:
            return None
        if sent.upstream.ready:
            try:
                async with asyncio.timeout(NEWS_S):
                    await sent.news.wait()
            except TimeoutError:
                logger.debug("no news of a request that is asked for again")
        return sent.refusal

    def sweep(self, now_s: float) -> None:
        """End requests that were lost on their way, or with their replica."""
        for sent in list(self._by_ticket.values()):
            lost = not sent.came and now_s - sent.sent_s > ARRIVAL_S
            if lost or (now_s - sent.sent_s > AGAIN_S and _is_gone(sent.upstream, now_s)):
                self._end(sent.exchange)

    # --- what replicas tell ----------------------------------------------------------------------

    def connected(self, upstream: Upstream, live: Collection[str]) -> None:
        """A state stream has begun: what is not live there has ended while nobody listened."""
        here, now_s = set(live), time.monotonic()
        for ticket, sent in list(self._by_ticket.items()):
            if sent.upstream is not upstream:
                continue
            if ticket in here:
                sent.came = True
            elif sent.came or now_s - sent.sent_s > AGAIN_S:
                self._ended(sent)

    def told(self, upstream: Upstream, event: str, ticket: str, *more: Any) -> None:
        """An event of a request; those of other fronts' requests are ignored."""
        sent = self._by_ticket.get(ticket)
        if sent is None or sent.upstream is not upstream:
            return
        sent.came = True
        if event == "began":
            sent.stands = True
            self._decisions.began(sent.exchange)
        elif event == "declined":
            sent.stands = True
            self._decisions.declined(sent.exchange)
        elif event == "refused":
            sent.refusal = (float(more[0]) / 1000, str(more[1]))
            sent.news.set()
        elif event == "ended":
            self._ended(sent, int(more[0]), client_left=bool(more[1]))

    def lost(self, upstream: Upstream) -> None:
        """A replica counts as dead: the data plane is to try others."""
        self._cut(upstream)

    def _ended(self, sent: _Sent, prompt_tokens: int = 0, *, client_left: bool = False) -> None:
        """A try has ended; if its answer does not stand, it may be asked for again."""
        sent.news.set()
        if sent.stands or sent.is_last or client_left:
            self._end(sent.exchange, prompt_tokens, client_left=client_left)
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(AGAIN_S, self._end_unless_sent_again, sent)

    def _end_unless_sent_again(self, sent: _Sent) -> None:
        if self._by_ticket.get(self._ticket_of.get(sent.exchange, "")) is sent:
            self._end(sent.exchange)

    def _end(self, exchange: str, prompt_tokens: int = 0, *, client_left: bool = False) -> None:
        self._forget(exchange)
        self._decisions.ended(exchange, prompt_tokens or None, client_left=client_left)

    def _forget(self, exchange: str) -> None:
        ticket = self._ticket_of.pop(exchange, None)
        if ticket is not None:
            self._by_ticket.pop(ticket, None)

    def gave_up(self, exchange: str) -> None:
        """The decisions have refused a request; nothing more will be heard of it."""
        self._forget(exchange)


def _is_gone(upstream: Upstream, now_s: float) -> bool:
    """Whether a replica has been silent for so long that it tells no more of its requests."""
    age_s = upstream.age_s(now_s)
    return not upstream.is_heard and (age_s is None or age_s > AGAIN_S)
