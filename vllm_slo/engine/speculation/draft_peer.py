# SPDX-License-Identifier: Apache-2.0
"""The verifier's record of one draft server: what it holds, what it owes, how it behaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from vllm_slo.core.speculation.draft_sessions import DraftAsk, DraftTokens, SentPrefixes
from vllm_slo.core.speculation.drafter_health import Attendance, Conduct
from vllm_slo.engine.speculation.servers_report import DrafterView, Fault
from vllm_slo.wire.draft_messages import MAX_ASKED_TOKENS, Answer, Ask, Hello

SPARE_MESSAGES: Final = 16
"""Messages that a drafter may send between two calls beyond the answers it owes."""
MAX_OWED: Final = 64
"""Unanswered rounds of a drafter that are remembered, the newest."""


@dataclass(slots=True)
class _Asked:
    """One session of the round that is waited for.

    Attributes:
        session: its name here.
        prefix_len: tokens of its prefix.
        grant: tokens that may be drafted.
    """

    session: str
    prefix_len: int
    grant: int


@dataclass(slots=True)
class DraftPeer:
    """A draft server that was welcomed.

    Attributes:
        identity: of its connection.
        epoch: of this connection, a random number.
        hello: how it introduced itself.
        sent: the prefixes that it holds.
        attendance: whether it keeps deadlines.
        conduct: whether its messages are usable.
        up: whether it is connected, as far as is known.
        owed: round -> (sent at, until), of rounds without an answer, monotonic seconds.
        allowance: messages that it may send until the next round.
    """

    identity: bytes
    epoch: int
    hello: Hello
    sent: SentPrefixes
    attendance: Attendance
    conduct: Conduct
    up: bool = True
    owed: dict[int, tuple[float, float]] = field(default_factory=dict)
    allowance: int = SPARE_MESSAGES
    _asked: dict[int, _Asked] = field(default_factory=dict)

    def is_ready(self, now_s: float) -> bool:
        """Whether the next round asks it."""
        return self.up and not self.attendance.suspended and not self.conduct.ignored(now_s)

    def view(self, now_s: float, faults: Mapping[Fault, int]) -> DrafterView:
        """The record as it is reported."""
        return DrafterView(
            name=self.hello.name,
            model=self.hello.model,
            max_model_len=self.hello.max_model_len,
            max_sessions=self.hello.max_sessions,
            sessions=len(self.sent) if self.up else 0,
            up=self.up,
            suspended=self.attendance.suspended,
            ignored=self.conduct.ignored(now_s),
            link_s=self.attendance.link_s,
            faults=dict(faults),
        )

    def asks(self, wanted: Mapping[str, DraftAsk], max_grant: int) -> list[Ask]:
        """The asks of a round that fit into one message; sessions that it holds come first.

        Args:
            wanted: by session.
            max_grant: tokens of one session; more is cut.
        """
        self._asked, tokens_left = {}, MAX_ASKED_TOKENS
        asks: list[Ask] = []
        for session in sorted(wanted, key=lambda name: name not in self.sent):
            ask = wanted[session]
            prefix_len = len(ask.prefix)
            grant = min(ask.grant, max_grant, self.hello.max_model_len - prefix_len)
            if grant <= 0 or prefix_len == 0 or len(asks) == self.hello.max_sessions:
                continue
            change = self.sent.change(session, ask.prefix, tokens_left)
            if change is None:
                continue
            tokens_left -= len(change.tokens)
            self._asked[change.number] = _Asked(session, prefix_len, grant)
            asks.append(
                Ask(
                    session=change.number,
                    keep=change.keep,
                    tokens=change.tokens,
                    grant=grant,
                    temperature=ask.temperature,
                )
            )
        return asks

    def owe(self, number: int, sent_s: float, until_s: float) -> None:
        """Note that it owes an answer to a round."""
        self.owed[number] = sent_s, until_s
        if len(self.owed) > MAX_OWED:
            del self.owed[min(self.owed)]

    def accept(self, answer: Answer, vocab_size: int) -> tuple[str, DraftTokens] | Fault:
        """A session's draft, or what is wrong with it.

        Args:
            answer: to an ask of the round that is waited for.
            vocab_size: tokens of the verifier's vocabulary.
        """
        asked = self._asked.pop(answer.session, None)
        if asked is None or answer.at != asked.prefix_len:
            return Fault.WRONG_SESSION
        if len(answer.tokens) > asked.grant:
            return Fault.TOO_MANY_TOKENS
        if not all(0 <= token < vocab_size for token in answer.tokens):
            return Fault.OUT_OF_RANGE
        if len(answer.probabilities) != len(answer.tokens) or not all(
            0.0 <= probability <= 1.0 for probability in answer.probabilities
        ):
            return Fault.BAD_PROBABILITY
        return asked.session, DraftTokens(answer.tokens, answer.probabilities)


def misfit(hello: Hello, vocab_size: int, vocabulary: str) -> str | None:
    """Why the tokens of a draft server would not be the verifier's; None: they are.

    Models of one family may differ in size by padding, which no tokenizer ever yields. With equal
    ids that does no harm.

    Args:
        hello: of the draft server.
        vocab_size: of the verifier.
        vocabulary: the verifier's `vocabulary_digest`; "" where it is not known.
    """
    if hello.vocabulary and vocabulary:
        if hello.vocabulary != vocabulary:
            return "its vocabulary is not the verifier's; use a draft model of the same family"
        return None
    if hello.vocab_size != vocab_size:
        return (
            f"it has a vocabulary of {hello.vocab_size} tokens, the verifier one of "
            f"{vocab_size}; use a draft model of the same family"
        )
    return None
