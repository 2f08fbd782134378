# SPDX-License-Identifier: Apache-2.0
"""The verifier's end of the link to its draft servers.

One step of GoodSpeed's loop (section III-A): `DraftLink.exchange` sends every draft server the
accepted tokens and its grants, all at once, and takes the answers that come before the deadline. An
answer that comes late, or does not match its ask, is dropped and counted, and its session goes on
without drafts. A draft server that is disconnected, suspended or ignored
(`core.speculation.drafter_health`) is not asked.

The format is `vllm_slo.wire.draft_messages`, the sockets are `vllm_slo.wire.draft_socket`. The only
thread is the one that checks the keys of new connections; the link does nothing between calls.
"""

from __future__ import annotations

import errno
import logging
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

import zmq
from zmq.auth.thread import ThreadAuthenticator

from vllm_slo.core.clock import Clock, SystemClock
from vllm_slo.core.speculation.draft_sessions import DraftAsk, DraftTokens, SentPrefixes
from vllm_slo.core.speculation.drafter_health import Attendance, Conduct
from vllm_slo.engine.speculation.draft_peer import SPARE_MESSAGES, DraftPeer, misfit
from vllm_slo.engine.speculation.servers_report import DrafterView, Fault
from vllm_slo.errors import ConfigError
from vllm_slo.wire.draft_messages import (
    MAX_GRANT,
    MAX_SESSIONS,
    WIRE,
    Ask,
    Draft,
    Drafted,
    FromVerifier,
    Hello,
    Ping,
    Refused,
    Welcome,
    WireError,
    WireVersionError,
    encode,
    from_drafter,
)
from vllm_slo.wire.draft_socket import (
    ZAP_DOMAIN,
    check_address,
    derive_keys,
    single_addresses,
    verifier_socket,
)

logger = logging.getLogger("vllm_slo.draft_link")

READ_AT_ONCE: Final = 256
"""Messages that are read before the time is looked at again."""


@dataclass(frozen=True, slots=True)
class DrafterTimes:
    """One drafter's share of an exchange.

    Attributes:
        wait_s: from the end of sending until its answer was there, or the deadline.
        draft_s: that it says it spent drafting; None: no answer in time.
    """

    wait_s: float
    draft_s: float | None


@dataclass(frozen=True, slots=True)
class Exchange:
    """The outcome of one round.

    Attributes:
        answers: the drafts, by session; sessions without a usable one are absent.
        times: of every drafter that was asked.
        late: drafters whose answer was not there in time.
        skipped: drafters that were not asked: unknown, disconnected, suspended or ignored, or
            without an ask that they can take.
        send_s: spent on sending.
        receive_s: spent on waiting for answers.
    """

    answers: dict[str, DraftTokens]
    times: dict[str, DrafterTimes]
    late: tuple[str, ...]
    skipped: tuple[str, ...]
    send_s: float
    receive_s: float


@dataclass(frozen=True, slots=True)
class _Admitted:
    """Tells ``zmq.auth`` which public key is admitted."""

    public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return secrets.compare_digest(key, self.public)


class DraftLink:
    """The verifier's end. Not for use by several threads.

    Args:
        address: to bind, ``tcp://HOST:PORT`` or ``ipc://PATH``; port ``*``: any free one; a range
            of ports, ``FIRST-LAST``: the first that is free. So several verifiers of one machine
            may have the same address, and draft servers connect to all of its ports.
        token: the cluster's secret.
        vocab_size: tokens of the verifier's vocabulary; drafted ids are below it.
        vocabulary: its `vocabulary_digest`, "" where not known.
        max_grant: tokens of one session; more is cut.
        max_drafters: draft servers that are welcomed.
        clock: for deadlines; None: the machine's.

    Raises:
        ConfigError: the address or the token cannot be used, or ZMQ lacks CURVE.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        vocab_size: int,
        vocabulary: str = "",
        max_grant: int = MAX_GRANT,
        max_drafters: int = 64,
        clock: Clock | None = None,
    ) -> None:
        check_address(address, "draft servers' address")
        self._keys = derive_keys(token)
        self._wanted_address = address
        self._vocab_size, self._vocabulary = vocab_size, vocabulary
        self._max_grant = min(max_grant, MAX_GRANT)
        self._max_drafters = max_drafters
        self._clock = clock or SystemClock()
        self._peers: dict[str, DraftPeer] = {}
        self._names: dict[bytes, str] = {}
        self._faults: dict[str, Counter[Fault]] = {}
        self._round = 0
        self._answers: dict[str, DraftTokens] = {}
        self._answered: dict[str, tuple[float, float]] = {}  # drafter -> (when, draft_s)
        self._waits = False
        self._heard: bytes | None = None  # whose message is being processed

    # --- opening and closing ---------------------------------------------------------------------

    def bind(self) -> None:
        """Open the socket; drafters may connect from now on.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            ZAP_DOMAIN, _Admitted(self._keys.drafter.public)
        )
        self._socket = verifier_socket(self._context, self._keys, self._wanted_address)
        reason = ""
        for address in single_addresses(self._wanted_address):
            try:
                self._socket.bind(address)
            except zmq.ZMQError as error:
                reason = error.strerror or str(error)
            else:
                return
        self.close()
        raise ConfigError(
            f"draft servers' address {self._wanted_address}: cannot listen there ({reason}); "
            "choose another host or port"
        )

    def close(self) -> None:
        """Close the socket; drafters look for a verifier again."""
        self._socket.close()
        self._authenticator.stop()
        self._context.term()

    def __enter__(self) -> Self:
        self.bind()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where drafters connect, with the port that was found free."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    # --- views -----------------------------------------------------------------------------------

    @property
    def drafters(self) -> list[DrafterView]:
        """Every drafter that was welcomed, by name."""
        now_s = self._clock.monotonic_s()
        return [
            self._peers[name].view(now_s, self._faults.get(name, {}))
            for name in sorted(self._peers)
        ]

    @property
    def faults(self) -> Counter[Fault]:
        """What was dropped, and how often, of all drafters and of unknown senders."""
        return sum(self._faults.values(), Counter[Fault]())

    # --- a round ---------------------------------------------------------------------------------

    def poll(self) -> None:
        """Read the messages that have arrived: hellos, late answers, pongs. Does not wait."""
        for peer in self._peers.values():
            peer.allowance = SPARE_MESSAGES + len(peer.owed)
        self._read()
        now_s = self._clock.monotonic_s()
        for peer in self._peers.values():
            if peer.up and peer.attendance.rested(now_s):
                self._send(peer.identity, Ping())

    def begin_anew(self) -> None:
        """Forget all drafters, after a fault: each one says hello again, and has nothing. So what
        it holds is known, whatever was sent before."""
        identities = set(self._names)
        if self._heard is not None:
            identities.add(self._heard)
        self._peers.clear()
        self._names.clear()
        self._heard, self._waits = None, False
        unknown = Draft(epoch=secrets.randbits(62), round=0, deadline_s=0.0, asks=[], ended=[])
        for identity in identities:
            self._send(identity, unknown)

    def exchange(
        self,
        asks: Mapping[str, Mapping[str, DraftAsk]],
        ended: Iterable[str] = (),
        *,
        deadline_s: float,
    ) -> Exchange:
        """Ask drafters for drafts and wait until all have answered, or for ``deadline_s``.

        What a drafter cannot take is left out: grants beyond ``max_grant`` or beyond its
        ``max_model_len``, sessions beyond its ``max_sessions``, and prompts that do not fit into
        one message beside others, which come with the next round.

        Args:
            asks: by drafter, by session; one session is asked of one drafter.
            ended: sessions that are over; those of an earlier call need not be named again.
            deadline_s: seconds from now.
        """
        begun_s = self._clock.monotonic_s()
        end_s = begun_s + deadline_s
        self.poll()
        self._round += 1
        self._answers, self._answered = {}, {}
        for session in ended:
            for peer in self._peers.values():
                peer.sent.end(session)
        asked, late, skipped = self._ask_all(asks, end_s)
        self._tell_ended()
        sent_s = self._clock.monotonic_s()
        self._waits = True
        self._await(asked, end_s)
        self._waits = False
        done_s = self._clock.monotonic_s()
        late += [name for name in asked if name not in self._answered]
        for name in late:
            self._miss(name, done_s)
        times = {}
        for name in asked:
            at_s, draft_s = self._answered.get(name, (done_s, None))
            times[name] = DrafterTimes(at_s - sent_s, draft_s)
        return Exchange(
            self._answers, times, tuple(late), tuple(skipped), sent_s - begun_s, done_s - sent_s
        )

    # --- sending ---------------------------------------------------------------------------------

    def _ask_all(
        self, asks: Mapping[str, Mapping[str, DraftAsk]], end_s: float
    ) -> tuple[list[str], list[str], list[str]]:
        """(drafters that were asked, that could not be sent to, that were not asked)."""
        asked: list[str] = []
        late: list[str] = []
        skipped: list[str] = []
        for name, wanted in asks.items():
            peer = self._peers.get(name)
            if (
                peer is None
                or not peer.is_ready(self._clock.monotonic_s())
                or not (fitting := peer.asks(wanted, self._max_grant))
            ):
                skipped.append(name)
            else:
                (asked if self._ask(peer, fitting, end_s) else late).append(name)
        return asked, late, skipped

    def _ask(self, peer: DraftPeer, asks: list[Ask], end_s: float) -> bool:
        """Send one drafter its round; False if it cannot be sent to."""
        now_s = self._clock.monotonic_s()
        left_s = max(end_s - now_s - peer.attendance.link_s, 0.0)
        if not self._send_draft(peer, left_s, asks):
            return False
        peer.owe(self._round, now_s, end_s)
        return True

    def _tell_ended(self) -> None:
        """Send the ended sessions to the drafters that got no ask. They do not answer that."""
        for peer in self._peers.values():
            if peer.sent.ended and peer.up and not peer.attendance.suspended:
                self._send_draft(peer, 0.0, [])

    def _send_draft(self, peer: DraftPeer, deadline_s: float, asks: list[Ask]) -> bool:
        ended = peer.sent.take_ended(MAX_SESSIONS)
        sent = self._send(
            peer.identity,
            Draft(
                epoch=peer.epoch, round=self._round, deadline_s=deadline_s, asks=asks, ended=ended
            ),
        )
        if not sent:
            peer.sent.unsent(ended)
        return sent

    def _send(self, identity: bytes, message: FromVerifier) -> bool:
        """Whether it could be sent now. A drafter without a connection is marked as down."""
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                self._down(identity)
            elif error.errno != errno.EAGAIN:
                raise
            return False
        return True

    def _down(self, identity: bytes) -> None:
        name = self._names.pop(identity, None)
        if name is not None:
            self._peers[name].up = False
            self._peers[name].owed.clear()
            logger.warning("draft server %s has disconnected", name)

    # --- receiving -------------------------------------------------------------------------------

    def _await(self, names: Sequence[str], end_s: float) -> None:
        """Read until none of these drafters owes an answer to this round, or until ``end_s``."""
        while any(name in self._peers and self._round in self._peers[name].owed for name in names):
            left_s = end_s - self._clock.monotonic_s()
            if left_s <= 0.0 or not self._socket.poll(math.ceil(left_s * 1e3)):
                return
            self._read()

    def _read(self) -> None:
        """Read the messages that have arrived, at most `READ_AT_ONCE` of them."""
        for _ in range(READ_AT_ONCE):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard = identity
            self._take(identity, frames)
            self._heard = None

    def _take(self, identity: bytes, frames: list[bytes]) -> None:
        peer = self._peers.get(self._names.get(identity, ""))
        now_s = self._clock.monotonic_s()
        if peer is not None:
            if peer.conduct.ignored(now_s):
                return
            peer.allowance -= 1
            if peer.allowance < 0:
                self._blame(peer, Fault.FLOOD)
                return
        try:
            message = from_drafter(frames[0] if len(frames) == 1 else b"")
        except WireVersionError as error:
            reason = (
                f"wire version {error.wire} is not the verifier's, {WIRE}; update the older one"
            )
            self._refuse(identity, "of another version", reason)
        except WireError:
            self._blame(peer, Fault.MALFORMED)
        else:
            if isinstance(message, Hello):
                self._greet(identity, message)
            elif peer is None:
                self._blame(None, Fault.UNKNOWN_SENDER)
            elif isinstance(message, Drafted):
                self._take_answers(peer, message, now_s)
            else:
                peer.attendance.lives()
                peer.attendance.rested(now_s)

    def _blame(self, peer: DraftPeer | None, fault: Fault) -> None:
        """Count a fault. A drafter with too many of them is ignored, and not waited for."""
        name = peer.hello.name if peer is not None else ""
        self._count(name, fault)
        if peer is not None and peer.conduct.bad(self._clock.monotonic_s()):
            peer.owed.clear()
            logger.warning("draft server %s is ignored for a while: %s", name, fault)

    def _miss(self, name: str, now_s: float) -> None:
        peer = self._peers.get(name)
        self._count(name if peer else "", Fault.LATE)
        if peer is not None:
            peer.attendance.missed(now_s)
            if peer.attendance.suspended:
                logger.warning("draft server %s is suspended: it is too slow, or stopped", name)

    def _count(self, name: str, fault: Fault) -> None:
        self._faults.setdefault(name, Counter())[fault] += 1

    # --- hellos ----------------------------------------------------------------------------------

    def _greet(self, identity: bytes, hello: Hello) -> None:
        """Welcome a drafter, or refuse it. It replaces an earlier one of the same name."""
        earlier = self._peers.get(hello.name)
        reason = misfit(hello, self._vocab_size, self._vocabulary)
        if self._names.get(identity, hello.name) != hello.name:
            reason = "it has another name already; connect anew"
        if reason is None and earlier is None and not self._make_room():
            reason = f"the verifier has {self._max_drafters} draft servers already"
        if reason is not None:
            self._refuse(identity, hello.name, reason)
            return
        if earlier is not None:
            if earlier.up and earlier.identity != identity:
                replaced = Refused(reason=f"another draft server is {hello.name} now")
                self._send(earlier.identity, replaced)
            self._names.pop(earlier.identity, None)
        peer = DraftPeer(
            identity,
            epoch=secrets.randbits(62),
            hello=hello,
            sent=SentPrefixes(hello.max_sessions),
            attendance=Attendance(),
            conduct=earlier.conduct if earlier else Conduct(),
            allowance=earlier.allowance if earlier else SPARE_MESSAGES,
        )
        self._peers[hello.name], self._names[identity] = peer, hello.name
        if self._send(identity, Welcome(epoch=peer.epoch)):
            logger.info("draft server %s has connected, with %s", hello.name, hello.model)

    def _make_room(self) -> bool:
        """Whether another drafter can be welcomed, maybe in place of one that has disconnected.

        A lost connection may show only when something is sent over it.
        """
        if len(self._peers) < self._max_drafters:
            return True
        for peer in self._peers.values():
            if peer.up:
                self._send(peer.identity, Ping())
        down = next((name for name, peer in self._peers.items() if not peer.up), None)
        if down is None:
            return False
        del self._peers[down]
        self._faults.setdefault("", Counter()).update(self._faults.pop(down, {}))
        return True

    def _refuse(self, identity: bytes, who: str, reason: str) -> None:
        self._count("", Fault.REFUSED_HELLO)
        logger.warning("draft server %s is refused: %s", who, reason)
        self._send(identity, Refused(reason=reason))

    # --- answers ---------------------------------------------------------------------------------

    def _take_answers(self, peer: DraftPeer, drafted: Drafted, now_s: float) -> None:
        owed = peer.owed.get(drafted.round) if drafted.epoch == peer.epoch else None
        if owed is None:
            self._blame(peer, Fault.REPLAYED)
            return
        peer.owed = {n: times for n, times in peer.owed.items() if n > drafted.round}
        sent_s, end_s = owed
        took_s = now_s - sent_s
        # A comparison with NaN is false, so NaN counts as no time.
        draft_s = min(drafted.draft_s, took_s) if drafted.draft_s > 0.0 else 0.0
        peer.sent.lost(drafted.lost)
        if drafted.round != self._round or not self._waits:
            self._count(peer.hello.name, Fault.STALE_ROUND)
            peer.attendance.overdue(took_s - draft_s, end_s - sent_s)
            peer.attendance.lives()
            peer.attendance.rested(now_s)
            return
        peer.attendance.travelled(took_s - draft_s)
        peer.attendance.answered()
        self._answered[peer.hello.name] = now_s, draft_s
        faults: list[Fault] = []
        for answer in drafted.answers:
            draft = peer.accept(answer, self._vocab_size)
            if isinstance(draft, Fault):
                faults.append(draft)
            elif answer.tokens:
                session, tokens = draft
                self._answers[session] = tokens
        for fault in faults:
            self._blame(peer, fault)
        if not faults:
            peer.conduct.good()
