# SPDX-License-Identifier: Apache-2.0
"""The verifier's end of the link to draft servers, over real sockets, with drafters of every kind:
whatever one of them does, the others' drafts come, and nobody waits longer than the deadline."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from echo_drafter import (
    TOKEN,
    VOCAB,
    EchoDrafter,
    HeldDrafter,
    RawDrafter,
    drafting,
    echo,
    hello,
)
from patience import patience
from support_folder import SUPPORT

from vllm_slo.core.speculation import drafter_health
from vllm_slo.core.speculation.draft_sessions import DraftAsk, DraftTokens
from vllm_slo.core.speculation.drafter_health import FAULTS, IGNORED_S, MISSES
from vllm_slo.engine.speculation import draft_peer
from vllm_slo.engine.speculation.draft_link import DraftLink, Exchange
from vllm_slo.engine.speculation.draft_peer import SPARE_MESSAGES
from vllm_slo.engine.speculation.servers_report import DrafterView, Fault
from vllm_slo.errors import ConfigError
from vllm_slo.router import verifier_link
from vllm_slo.router.verifier_link import VerifierLink
from vllm_slo.wire.draft_messages import (
    MAX_ANSWER_BYTES,
    Answer,
    Draft,
    Ping,
    Pong,
    Refused,
    Welcome,
    encode,
)
from vllm_slo.wire.draft_socket import (
    TOKEN_VARIABLE,
    KeyPair,
    LinkKeys,
    derive_keys,
    drafter_socket,
)

SOON_S = patience(10.0)
"""What should come at once has come by then."""
LONG_S = 6.0 * SOON_S
"""Who waits for so long waits in vain."""
SHORT_S = patience(0.5)
"""Deadlines within which a drafter that is there answers, and one that is not is waited for."""


def new_link(address: str = "tcp://127.0.0.1:*", **changed: Any) -> DraftLink:
    return DraftLink(address, changed.pop("token", TOKEN), **{"vocab_size": VOCAB, **changed})


@pytest.fixture
def link() -> Iterator[DraftLink]:
    with new_link() as opened:
        yield opened


def view(link: DraftLink, name: str) -> DrafterView | None:
    return next((found for found in link.drafters if found.name == name), None)


def until(link: DraftLink, true: Callable[[], Any]) -> None:
    """Poll until it is true; fails where it never is."""
    end = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < end, f"{link.drafters} {link.faults}"
        link.poll()
        time.sleep(0.005)


def until_gone(link: DraftLink, name: str, asks: dict[str, dict[str, DraftAsk]]) -> None:
    """Until it is known that its connection is over; what is sent to it tells."""

    def gone() -> bool:
        link.exchange(asks, deadline_s=0.01)
        found = view(link, name)
        assert found is not None
        return not found.up

    until(link, gone)


def until_ready(link: DraftLink, *names: str) -> None:
    until(link, lambda: all((found := view(link, n)) and found.ready for n in names))


def ask(
    link: DraftLink,
    name: str,
    prefix: Sequence[int] = (1, 2, 3),
    *,
    session: str = "s",
    grant: int = 3,
    deadline_s: float = SOON_S,
) -> Exchange:
    """One session of one drafter."""
    return link.exchange({name: {session: DraftAsk(prefix, grant)}}, deadline_s=deadline_s)


@contextmanager
def raw(link: DraftLink, name: str = "raw", **said: Any) -> Iterator[RawDrafter]:
    """A drafter that has been welcomed and does nothing by itself."""
    drafter = RawDrafter(link.address)
    try:
        drafter.say(hello(name, **said))
        until_ready(link, name)
        assert isinstance(drafter.hear(), Welcome)
        yield drafter
    finally:
        drafter.close()


@contextmanager
def aside(work: Callable[[], Any]) -> Iterator[None]:
    """Work in a thread while the test's own thread waits in an exchange."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        yield
        running.result(SOON_S)


def heard(drafter: RawDrafter) -> Draft:
    """The round that it is asked for."""
    draft = drafter.hear()
    assert isinstance(draft, Draft)
    return draft


# --- drafts --------------------------------------------------------------------------------------


def test_drafts_of_several_drafters_come_together(link: DraftLink) -> None:
    with drafting(link.address, "a"), drafting(link.address, "b"):
        until_ready(link, "a", "b")
        done = link.exchange(
            {
                "a": {"r1": DraftAsk([1, 2], 4), "r2": DraftAsk(np.array([3], dtype=np.int32), 1)},
                "b": {"r3": DraftAsk([4, 5, 6], 2, 0.7)},
            },
            deadline_s=SOON_S,
        )
    assert done.answers == {
        "r1": DraftTokens(echo([1, 2], 4), [0.5] * 4),
        "r2": DraftTokens(echo([3], 1), [0.5]),
        "r3": DraftTokens(echo([4, 5, 6], 2), [0.5] * 2),
    }
    assert (done.late, done.skipped) == ((), ())
    assert set(done.times) == {"a", "b"}
    for times in done.times.values():
        assert times.draft_s is not None and 0.0 < times.draft_s <= times.wait_s + done.send_s
        assert times.wait_s <= done.receive_s < SOON_S
    assert not link.faults


def test_drafters_follow_a_text_as_it_grows_and_is_rolled_back(link: DraftLink) -> None:
    text = list(range(50))
    with drafting(link.address, "a") as drafter:
        until_ready(link, "a")
        versions = [text[:20], text[:24], text[:22], [*text[:10], 7, 7, 7], text]
        for version in versions:
            done = ask(link, "a", version)
            assert done.answers["s"].tokens == echo(version, 3)
        assert drafter.prefixes == versions


def test_a_session_that_moves_or_ends_starts_anew(link: DraftLink) -> None:
    with drafting(link.address, "a"), drafting(link.address, "b"):
        until_ready(link, "a", "b")
        for name in ("a", "b", "a"):
            assert ask(link, name, [1, 2, 3]).answers["s"].tokens == echo([1, 2, 3], 3)
        assert [drafter.sessions for drafter in link.drafters] == [1, 1]
        link.exchange({}, ["s"], deadline_s=SOON_S)
        assert [drafter.sessions for drafter in link.drafters] == [0, 0]
        assert ask(link, "b", [1, 2]).answers["s"].tokens == echo([1, 2], 3)


def test_the_end_of_a_session_is_told(link: DraftLink) -> None:
    with raw(link) as drafter:
        with aside(lambda: answer_well(drafter)):
            ask(link, "raw")
        link.exchange({}, ["s"], deadline_s=SOON_S)
        told = drafter.hear()
        assert isinstance(told, Draft) and (told.asks, told.ended) == ([], [0])
        link.exchange({}, ["s"], deadline_s=SOON_S)
        assert drafter.hears_nothing(), "once"


def test_what_a_drafter_cannot_take_is_left_out(
    link: DraftLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    with drafting(link.address, "a", max_sessions=2, max_model_len=10) as drafter:
        until_ready(link, "a")
        assert len(ask(link, "a", [1] * 8, grant=5).answers["s"].tokens) == 2
        assert ask(link, "a", [1] * 10).skipped == ("a",)
        asks = {name: DraftAsk([1, 2], 1) for name in "xyz"}
        assert set(link.exchange({"a": asks}, deadline_s=SOON_S).answers) == {"x", "y"}
        assert set(link.exchange({"a": {"z": asks["z"]}}, deadline_s=SOON_S).answers) == {"z"}
        assert link.drafters[0].sessions == 2
        nothing = {"x": DraftAsk([], 4), "y": DraftAsk([1], 0)}
        assert link.exchange({"a": nothing}, deadline_s=SOON_S).skipped == ("a",)
        monkeypatch.setattr(draft_peer, "MAX_ASKED_TOKENS", 5)
        long = {name: DraftAsk([9, 9, 9, 9], 1) for name in ("p", "q")}
        first = link.exchange({"a": long}, deadline_s=SOON_S)
        second = link.exchange({"a": long}, deadline_s=SOON_S)
        assert (set(first.answers), set(second.answers)) == ({"p"}, {"p", "q"})
        assert all(len(prefix) <= 8 for prefix in drafter.prefixes)
    assert not link.faults


def test_a_new_session_takes_no_place_that_is_needed_in_its_round(link: DraftLink) -> None:
    with raw(link, max_sessions=2) as drafter:
        seen = []
        for asked in ("c", "b", "ac"):
            asks = {name: DraftAsk([1, 2, 3], 1) for name in asked}
            with aside(lambda: seen.append(answer_well(drafter))):
                assert set(link.exchange({"raw": asks}, deadline_s=SOON_S).answers) == set(asked)
        assert [(each.session, each.keep) for each in seen[-1].asks] == [(0, 3), (2, 0)]
        assert seen[-1].ended == [1]


def test_grants_are_bounded_by_the_verifier() -> None:
    with new_link(max_grant=2) as link, drafting(link.address, "a"):
        until_ready(link, "a")
        assert len(ask(link, "a", grant=50).answers["s"].tokens) == 2


def test_an_empty_draft_is_as_good_as_none(link: DraftLink) -> None:
    def have_nothing() -> None:
        draft = heard(drafter)
        drafter.say(drafter.drafted(draft, answer_to(draft, tokens=[], probabilities=[])))

    with raw(link) as drafter, aside(have_nothing):
        done = ask(link, "raw")
    assert (done.answers, done.late) == ({}, ())
    assert not link.faults


def test_a_session_that_the_drafter_lost_comes_back(link: DraftLink) -> None:
    with raw(link) as drafter:
        numbers = []

        def lose() -> None:
            draft = heard(drafter)
            numbers.append((draft.asks[0].session, draft.asks[0].keep))
            drafter.say(drafter.drafted(draft, lost=[draft.asks[0].session]))

        for _ in range(2):
            with aside(lose):
                assert ask(link, "raw").answers == {}
        assert numbers == [(0, 0), (1, 0)]
    assert not link.faults


def test_a_drafter_says_what_it_lost_and_drafts_the_rest(link: DraftLink) -> None:
    with drafting(link.address, "a"):
        until_ready(link, "a")
        link._peers["a"].sent.change("ghost", [1, 2, 3], 99)  # as if it had been sent
        asks = {"a": {"ghost": DraftAsk([1, 2, 3, 4], 2), "s": DraftAsk([5], 2)}}
        assert set(link.exchange(asks, deadline_s=SOON_S).answers) == {"s"}
        done = link.exchange(asks, deadline_s=SOON_S)
        assert done.answers["ghost"].tokens == echo([1, 2, 3, 4], 2)
    assert not link.faults


# --- who is taken in -----------------------------------------------------------------------------


def test_without_the_token_nobody_is_heard(
    link: DraftLink, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        drafting(link.address, "stranger", token="another secret of that length"),
        drafting(link.address, "friend"),
    ):
        until_ready(link, "friend")
        until(link, lambda: "has another token" in caplog.text)
        assert view(link, "stranger") is None
        assert ask(link, "friend").answers
    assert not link.faults


def test_knowing_the_verifiers_public_key_is_not_enough(link: DraftLink) -> None:
    """Its own key has to be that of drafters, too."""
    public, secret = zmq.curve_keypair()
    keys = LinkKeys(derive_keys(TOKEN).verifier, KeyPair(public, secret))
    with zmq.Context() as context:
        stranger = drafter_socket(context, keys, link.address)
        watched = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        stranger.connect(link.address)
        assert watched.poll(round(SOON_S * 1e3)), "it is told"
        stranger.disable_monitor()
        watched.close()
        stranger.close(0)


def test_without_encryption_nobody_is_heard(link: DraftLink) -> None:
    with zmq.Context() as context:
        stranger = context.socket(zmq.DEALER)
        watched = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        stranger.connect(link.address)
        with suppress(zmq.Again):  # refused before it could send
            stranger.send(encode(hello("stranger")), zmq.NOBLOCK)
        assert watched.poll(round(SOON_S * 1e3)), "it is told"
        with drafting(link.address, "friend"):
            until_ready(link, "friend")
            assert ask(link, "friend").answers
        assert view(link, "stranger") is None
        stranger.disable_monitor()
        watched.close()
        stranger.close(0)


PACKED = msgspec.msgpack.decode(encode(hello("raw")))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"vocab_size": VOCAB + 1, "vocabulary": ""}, "a vocabulary of 1001 tokens"),
        ({"vocabulary": "another"}, "its vocabulary is not the verifier's"),
        ({"wire": 2}, "wire version 2 is not the verifier's, 1"),
        ({"wire": 0, "vocab_size": None}, "wire version 0 is not the verifier's, 1"),
    ],
)
def test_who_does_not_fit_is_refused_and_told_why(said: dict[str, Any], reason: str) -> None:
    with new_link(vocabulary="ours") as link, drafting(link.address, "a", vocabulary="ours"):
        until_ready(link, "a")
        drafter = RawDrafter(link.address)
        drafter.send(msgspec.msgpack.encode({**PACKED, "vocabulary": "ours", **said}))
        until(link, lambda: link.faults[Fault.REFUSED_HELLO])
        refused = drafter.hear()
        assert isinstance(refused, Refused) and reason in refused.reason
        assert [found.name for found in link.drafters] == ["a"]
        assert ask(link, "a").answers
        drafter.close()


def test_padding_of_a_known_vocabulary_does_no_harm() -> None:
    with (
        new_link(vocabulary="ours") as link,
        drafting(link.address, "a", vocabulary="ours", vocab_size=VOCAB + 24),
    ):
        until_ready(link, "a")
        assert not link.faults


def test_a_refused_drafter_says_so_and_asks_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verifier_link, "RETRY_S", 0.05)
    with new_link(max_drafters=1) as link, ExitStack() as first:
        first.enter_context(drafting(link.address, "a"))
        until_ready(link, "a")
        with drafting(link.address, "b"):
            until(link, lambda: link.faults[Fault.REFUSED_HELLO] > 1)
            assert "refuses: the verifier has 1 draft servers already" in caplog.text
            first.close()
            until_ready(link, "b")
            assert [found.name for found in link.drafters] == ["b"], "who is gone makes room"


def test_the_later_of_one_name_takes_the_place(link: DraftLink) -> None:
    with raw(link, "a") as first, drafting(link.address, "a"):
        until(link, lambda: view(link, "a") and not first.hears_nothing(0.0))
        refused = first.hear()
        assert isinstance(refused, Refused) and "another draft server is a now" in refused.reason
        first.say(Pong())
        until(link, lambda: link.faults[Fault.UNKNOWN_SENDER])
        assert ask(link, "a").answers


def test_a_connection_keeps_its_name(link: DraftLink) -> None:
    with raw(link, "a") as drafter:
        drafter.say(hello("b"))
        until(link, lambda: link.faults[Fault.REFUSED_HELLO])
        assert isinstance(drafter.hear(), Refused)
        assert [found.name for found in link.drafters] == ["a"]


def test_a_hello_again_empties_what_is_held(link: DraftLink) -> None:
    with raw(link) as drafter:
        keeps = []
        for _ in range(2):
            with aside(lambda: keeps.append(answer_well(drafter).asks[0].keep)):
                ask(link, "raw")
        drafter.say(hello("raw"))
        until(link, lambda: not link.drafters[0].sessions)
        assert isinstance(drafter.hear(), Welcome)
        with aside(lambda: keeps.append(answer_well(drafter).asks[0].keep)):
            assert ask(link, "raw").answers
        assert keeps == [0, 3, 0]


# --- bad answers ---------------------------------------------------------------------------------


def answer_to(draft: Draft, place: int = 0, **changed: Any) -> Answer:
    """A good answer to one ask of a first round, unless told otherwise."""
    wanted = draft.asks[place]
    fields = {
        "session": wanted.session,
        "at": wanted.keep + len(wanted.tokens),
        "tokens": list(range(wanted.grant)),
        "probabilities": [0.5] * wanted.grant,
    }
    return Answer(**{**fields, **changed})


def answer_well(drafter: RawDrafter) -> Draft:
    draft = heard(drafter)
    drafter.say(drafter.drafted(draft, *(answer_to(draft, n) for n in range(len(draft.asks)))))
    return draft


BAD_ANSWERS: dict[str, tuple[dict[str, Any], Fault]] = {
    "another session": ({"session": 17}, Fault.WRONG_SESSION),
    "a negative session": ({"session": -1}, Fault.WRONG_SESSION),
    "after another prefix": ({"at": 2}, Fault.WRONG_SESSION),
    "more than granted": (
        {"tokens": [1, 2, 3, 4], "probabilities": [0.5] * 4},
        Fault.TOO_MANY_TOKENS,
    ),
    "beyond the vocabulary": ({"tokens": [1, 2, VOCAB]}, Fault.OUT_OF_RANGE),
    "a negative id": ({"tokens": [-1, 2, 3]}, Fault.OUT_OF_RANGE),
    "a huge id": ({"tokens": [1, 2, 2**63]}, Fault.OUT_OF_RANGE),
    "NaN": ({"probabilities": [0.5, float("nan"), 0.5]}, Fault.BAD_PROBABILITY),
    "infinite": ({"probabilities": [0.5, float("inf"), 0.5]}, Fault.BAD_PROBABILITY),
    "negative": ({"probabilities": [0.5, -0.1, 0.5]}, Fault.BAD_PROBABILITY),
    "above one": ({"probabilities": [0.5, 1.1, 0.5]}, Fault.BAD_PROBABILITY),
    "too few probabilities": ({"probabilities": [0.5]}, Fault.BAD_PROBABILITY),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BAD_ANSWERS)
def test_a_bad_answer_is_dropped_and_counted_and_no_other(link: DraftLink, what: str) -> None:
    changed, fault = BAD_ANSWERS[what]

    def spoil_the_first() -> None:
        draft = heard(drafter)
        drafter.say(drafter.drafted(draft, answer_to(draft, **changed), answer_to(draft, 1)))

    with raw(link) as drafter, drafting(link.address, "good"):
        until_ready(link, "good")
        with aside(spoil_the_first):
            done = link.exchange(
                {
                    "raw": {"bad": DraftAsk([1, 2, 3], 3), "fine": DraftAsk([1, 2, 3], 3)},
                    "good": {"other": DraftAsk([4], 2)},
                },
                deadline_s=SOON_S,
            )
        assert set(done.answers) == {"fine", "other"}
        assert done.answers["fine"].tokens == [0, 1, 2]
        assert link.faults == {fault: 1}
        assert view(link, "raw").faults == {fault: 1}  # type: ignore[union-attr]
        assert done.late == ()


def test_a_second_draft_of_a_session_is_dropped(link: DraftLink) -> None:
    def answer_twice() -> None:
        draft = heard(drafter)
        drafter.say(drafter.drafted(draft, answer_to(draft), answer_to(draft, tokens=[9, 9, 9])))

    with raw(link) as drafter, aside(answer_twice):
        assert ask(link, "raw").answers["s"].tokens == [0, 1, 2]
    assert link.faults == {Fault.WRONG_SESSION: 1}


@pytest.mark.parametrize("draft_s", [float("nan"), float("inf"), -5.0, 1e300])
def test_what_a_drafter_says_of_its_time_is_not_believed(link: DraftLink, draft_s: float) -> None:
    def lie() -> None:
        draft = heard(drafter)
        drafter.say(drafter.drafted(draft, answer_to(draft), draft_s=draft_s))

    with raw(link) as drafter:
        with aside(lie):
            done = ask(link, "raw")
        assert done.answers
        said_s = done.times["raw"].draft_s
        assert said_s is not None and 0.0 <= said_s < SOON_S
        assert 0.0 <= link.drafters[0].link_s < SOON_S


def replays(drafter: RawDrafter) -> Iterator[bytes]:
    """Answers a round, and then gives answers that nobody waits for."""
    draft = answer_well(drafter)
    good = drafter.drafted(draft, answer_to(draft))
    other = msgspec.structs.replace
    yield encode(good)  # given already
    yield encode(other(good, round=draft.round + 5))  # never asked for
    yield encode(other(good, round=draft.round + 1, epoch=drafter.epoch + 1))


def test_answers_that_nobody_waits_for_are_dropped(link: DraftLink) -> None:
    """A recorded answer, sent again while the next round is waited for, is not taken for its."""

    def first_replays_then_answer() -> None:
        for message in replays(drafter):
            drafter.send(message)
        draft = heard(drafter)
        late = drafter.drafted(draft, answer_to(draft, tokens=[9, 9, 9]), epoch=drafter.epoch + 1)
        drafter.say(late)
        drafter.say(drafter.drafted(draft, answer_to(draft)))

    with raw(link) as drafter, aside(first_replays_then_answer):
        assert ask(link, "raw").answers["s"].tokens == [0, 1, 2]
        until(link, lambda: link.faults[Fault.REPLAYED] == 3)
        assert ask(link, "raw").answers["s"].tokens == [0, 1, 2]
    assert link.faults == {Fault.REPLAYED: 4}


def test_a_recorded_connection_is_worth_nothing_on_another(link: DraftLink) -> None:
    """Its messages name another epoch, and the bytes below them other keys."""
    with raw(link) as drafter:
        recorded: list[bytes] = []
        with aside(lambda: recorded.extend(replays(drafter))):
            ask(link, "raw")
        again = RawDrafter(link.address)
        again.say(hello("raw"))
        until(link, lambda: not again.hears_nothing(0.0))
        again.hear()
        for message in recorded:
            again.send(message)
        until(link, lambda: link.faults[Fault.REPLAYED] == len(recorded) == 3)
        again.close()


def test_nothing_is_heard_before_a_hello(link: DraftLink) -> None:
    drafter = RawDrafter(link.address)
    drafter.say(Pong())
    drafter.send(b"\x00")
    until(link, lambda: link.faults == {Fault.UNKNOWN_SENDER: 1, Fault.MALFORMED: 1})
    assert link.drafters == []
    drafter.close()


def test_a_message_too_large_ends_the_connection(link: DraftLink) -> None:
    """Nobody holds it in memory until it is whole."""
    with raw(link) as drafter:
        drafter.send(b"\xc1" * (MAX_ANSWER_BYTES - 100))  # encryption takes some
        until(link, lambda: link.faults == {Fault.MALFORMED: 1})
        drafter.send(b"\xc1" * (MAX_ANSWER_BYTES + 1))
        until_gone(link, "raw", {"raw": {"s": DraftAsk([1], 1)}})
        assert link.faults[Fault.MALFORMED] == 1


@pytest.mark.parametrize(
    "frames", [(b"",), (b"\xc1" * 50,), (b"a", b"b"), (secrets.token_bytes(999),)]
)
def test_who_keeps_sending_nonsense_is_ignored(link: DraftLink, frames: tuple[bytes, ...]) -> None:
    with raw(link) as drafter, drafting(link.address, "good"):
        until_ready(link, "good")
        for _ in range(FAULTS):
            drafter.send(*frames)
        until(link, lambda: view(link, "raw").ignored)  # type: ignore[union-attr]
        assert link.faults == {Fault.MALFORMED: FAULTS}
        asks = {name: {name: DraftAsk([1], 1)} for name in ("raw", "good")}
        done = link.exchange(asks, deadline_s=SOON_S)
        assert (set(done.answers), done.skipped) == ({"good"}, ("raw",))
        drafter.send(*frames)
        link.poll()
        assert link.faults == {Fault.MALFORMED: FAULTS}, "not even read"


def test_a_good_answer_makes_up_for_nonsense(link: DraftLink) -> None:
    with raw(link) as drafter:
        for _ in range(2):
            for _ in range(FAULTS - 1):
                drafter.send(b"nonsense")
            with aside(lambda: answer_well(drafter)):
                assert ask(link, "raw").answers
            link.exchange({}, ["s"], deadline_s=0.0)
            drafter.hear()
        assert link.faults == {Fault.MALFORMED: 2 * (FAULTS - 1)}


def test_nonsense_while_it_is_waited_for_ends_the_wait(link: DraftLink) -> None:
    def send_nonsense() -> None:
        drafter.hear()
        for _ in range(FAULTS):
            drafter.send(b"nonsense")

    with raw(link) as drafter, aside(send_nonsense):
        done = ask(link, "raw", deadline_s=LONG_S)
        assert done.late == ("raw",)
        assert done.receive_s < SOON_S


def test_who_was_ignored_is_asked_again_after_a_while() -> None:
    class LaterClock:
        ahead_s = 0.0

        def monotonic_s(self) -> float:
            return time.monotonic() + self.ahead_s

        epoch_s = monotonic_s

    clock = LaterClock()
    with new_link(clock=clock) as link, raw(link) as drafter:
        for _ in range(FAULTS):
            drafter.send(b"nonsense")
        until(link, lambda: link.drafters[0].ignored)
        clock.ahead_s = IGNORED_S
        with aside(lambda: answer_well(drafter)):
            assert ask(link, "raw").answers


def test_a_flood_is_dropped_and_delays_nobody(link: DraftLink) -> None:
    """Valid messages, far more than anybody asked for, while others draft."""
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            with suppress(zmq.Again):
                drafter._socket.send(encode(Pong()), zmq.NOBLOCK)

    with raw(link) as drafter, drafting(link.address, "good"):
        until_ready(link, "good")
        with aside(flood):
            try:
                until(link, lambda: view(link, "raw").ignored)  # type: ignore[union-attr]
                for size in range(1, 20):
                    done = ask(link, "good", [1] * size, deadline_s=SOON_S)
                    assert done.answers["s"].tokens == echo([1] * size, 3)
            finally:
                stop.set()
    assert link.faults == {Fault.FLOOD: FAULTS}


def test_as_many_messages_as_are_due_are_no_flood(
    link: DraftLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two calls, however long they are under way."""

    def read_all() -> None:
        for _ in range(count):
            assert link._socket.poll(round(SOON_S * 1e3))
            identity, *frames = link._socket.recv_multipart()
            link._take(identity, frames)

    with raw(link) as drafter:
        monkeypatch.setattr(link, "_read", read_all)
        for count in (SPARE_MESSAGES, SPARE_MESSAGES + 1):
            assert not link.faults
            for _ in range(count):
                drafter.say(Pong())
            link.poll()
        assert link.faults == {Fault.FLOOD: 1}


# --- deadlines -----------------------------------------------------------------------------------


def test_nobody_waits_longer_than_the_deadline(link: DraftLink) -> None:
    """And what comes later is not taken for the answer to another round."""
    slow = HeldDrafter()
    with drafting(link.address, "slow", drafter=slow), drafting(link.address, "good"):
        until_ready(link, "slow", "good")
        asks = {"slow": {"s": DraftAsk([1], 2)}, "good": {"g": DraftAsk([2], 2)}}
        done = link.exchange(asks, deadline_s=SHORT_S)
        assert set(done.answers) == {"g"}
        assert done.late == ("slow",)
        assert done.times["slow"].draft_s is None
        assert done.times["slow"].wait_s == done.receive_s >= done.times["good"].wait_s
        slow.may.set()
        until(link, lambda: link.faults[Fault.STALE_ROUND])
        assert link.faults == {Fault.LATE: 1, Fault.STALE_ROUND: 1}


def test_a_late_answer_is_not_taken_for_the_next(link: DraftLink) -> None:
    with raw(link) as drafter:
        assert ask(link, "raw", [1], deadline_s=0.05).late == ("raw",)
        old = heard(drafter)

        def answer_both() -> None:
            new = drafter.hear()
            assert isinstance(new, Draft) and new.round > old.round
            assert new.asks[0].keep == 1, "the first round was not lost, only late"
            drafter.say(drafter.drafted(old, answer_to(old, tokens=[9, 9, 9])))
            drafter.say(drafter.drafted(new, answer_to(new)))

        with aside(answer_both):
            assert ask(link, "raw", [1, 2]).answers["s"].tokens == [0, 1, 2]
    assert link.faults == {Fault.LATE: 1, Fault.STALE_ROUND: 1}


class UntilInterrupted(EchoDrafter):
    """Drafts in its first round until it is interrupted; ``begun`` is set when that has come."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def draft(
        self, asks: Sequence[DraftAsk], deadline_s: float, interrupted: Callable[[], bool]
    ) -> list[DraftTokens]:
        end_s = time.monotonic() + SOON_S / 2
        while not self.prefixes and not interrupted() and time.monotonic() < end_s:
            self.begun.set()
            time.sleep(0.01)
        return super().draft(asks, deadline_s, interrupted)


def test_a_newer_round_takes_the_place_of_an_older(link: DraftLink) -> None:
    """The drafter is told in the middle of the older, whose tokens it keeps and does not answer."""
    drafter = UntilInterrupted()
    with drafting(link.address, "a", drafter=drafter):
        until_ready(link, "a")
        ask(link, "a", [1, 2], deadline_s=0.05)
        assert drafter.begun.wait(SOON_S)
        assert ask(link, "a", [1, 2, 3]).answers["s"].tokens == echo([1, 2, 3], 3)
        assert drafter.interruptions == [True, False]
    assert link.faults == {Fault.LATE: 1}


def test_with_a_late_answer_earlier_ones_are_not_waited_for(link: DraftLink) -> None:
    with raw(link) as drafter:
        rounds = []
        for _ in range(2):
            ask(link, "raw", deadline_s=0.01)
            rounds.append(drafter.hear())
        for late in reversed(rounds):
            assert isinstance(late, Draft)
            drafter.say(drafter.drafted(late))
        until(link, lambda: link.faults[Fault.REPLAYED])
    assert link.faults == {Fault.LATE: 2, Fault.STALE_ROUND: 1, Fault.REPLAYED: 1}


def test_a_slow_drafter_is_suspended_and_found_again(link: DraftLink) -> None:
    drafter = HeldDrafter()
    with drafting(link.address, "a", drafter=drafter):
        until_ready(link, "a")
        for _ in range(MISSES):
            assert ask(link, "a", deadline_s=0.02).late == ("a",)
        assert view(link, "a").suspended  # type: ignore[union-attr]
        done = ask(link, "a", deadline_s=LONG_S)
        assert (done.skipped, done.times) == (("a",), {})
        assert done.receive_s < SOON_S, "nobody waits for it"
        drafter.may.set()
        until_ready(link, "a")
        assert ask(link, "a", [1, 2, 3, 4]).answers["s"].tokens == echo([1, 2, 3, 4], 3)


def test_a_silent_drafter_is_called_and_found_again(link: DraftLink) -> None:
    with raw(link) as drafter:
        for _ in range(MISSES):
            ask(link, "raw", deadline_s=0.01)
            drafter.hear()
        until(link, lambda: not drafter.hears_nothing(0.0))
        assert isinstance(drafter.hear(), Ping)
        assert view(link, "raw").suspended  # type: ignore[union-attr]
        drafter.say(Pong())
        until_ready(link, "raw")


def test_drafters_answer_when_they_are_called(link: DraftLink) -> None:
    with drafting(link.address, "a"):
        until_ready(link, "a")
        for _ in range(MISSES):
            link._peers["a"].attendance.missed(time.monotonic())
        assert view(link, "a").suspended  # type: ignore[union-attr]
        until_ready(link, "a")


def test_a_drafter_whose_queue_is_full_costs_no_wait(
    link: DraftLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads nothing; so that it is asked all the same, it may miss any number of deadlines."""
    monkeypatch.setattr(drafter_health, "MISSES", 10**6)
    with raw(link, max_model_len=10**6) as drafter:
        for size in range(20_000, 21_000):
            done = ask(link, "raw", [size] * size, deadline_s=0.0)
            if not done.times:
                break
        assert done.late == ("raw",)
        found = view(link, "raw")
        assert found is not None and found.up
        assert found.sessions == 0, "what it holds is not known, so all starts anew"
        drafter.hear()


class UsesAllTime(EchoDrafter):
    """Drafts for as long as it is given, so only who takes the way into account gets answers.

    Attributes:
        given_s: the time for each round.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given_s: list[float] = []

    def draft(
        self, asks: Sequence[DraftAsk], deadline_s: float, interrupted: Callable[[], bool]
    ) -> list[DraftTokens]:
        self.given_s.append(deadline_s)
        time.sleep(deadline_s)
        return super().draft(asks, deadline_s, interrupted)


class SlowWay:
    """A TCP relay to a verifier that holds everything back for a time, in both directions."""

    def __init__(self, address: str, delay_s: float) -> None:
        self._target = int(address.rpartition(":")[2])
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                inner, _ = self._listener.accept()
                outer = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [inner, outer]
                for source, sink in ((inner, outer), (outer, inner)):
                    held: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                    self._start(self._read, source, held)
                    self._start(self._write, sink, held)

    def _start(self, work: Callable[..., None], *given: object) -> None:
        self._threads.append(threading.Thread(target=work, args=given))
        self._threads[-1].start()

    def _read(self, source: socket.socket, held: SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"more"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            held.put((time.monotonic() + self._delay_s, data))

    def _write(self, sink: socket.socket, held: SimpleQueue[tuple[float, bytes]]) -> None:
        with suppress(OSError):
            while True:
                due_s, data = held.get()
                time.sleep(max(due_s - time.monotonic(), 0.0))
                if not data:
                    return
                sink.sendall(data)

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()


def test_drafters_are_given_less_time_by_what_the_way_takes(link: DraftLink) -> None:
    """50 ms each way, a deadline of 250 ms, a drafter that takes all the time it gets: it is late
    until the way is known, and on a busy machine now and then after that."""
    deadline_s, far = patience(0.25), UsesAllTime()
    with (
        closing(SlowWay(link.address, 0.05)) as way,
        drafting(way.address, "far", drafter=far),
    ):
        until_ready(link, "far")
        most_s = []
        for size in range(1, 61):
            most_s.append(max(deadline_s - view(link, "far").link_s, 0.0))  # type: ignore[union-attr]
            done = ask(link, "far", [1] * size, deadline_s=deadline_s)
            if not done.late:
                break
            until(link, lambda: view(link, "far").ready and not link._peers["far"].owed)  # type: ignore[union-attr]
        assert done.answers["s"].tokens == echo([1] * size, 3)
        assert size > 1, "at first the way is not known"
        assert all(given <= most for given, most in zip(far.given_s, most_s, strict=True))
        assert view(link, "far").link_s >= 0.1  # type: ignore[union-attr]


# --- drafters and verifiers that come and go -----------------------------------------------------


def test_a_drafter_that_restarts_gets_whole_prefixes(link: DraftLink) -> None:
    for _ in range(2):
        with drafting(link.address, "a") as drafter:
            until(link, lambda: (found := view(link, "a")) and found.ready and not found.sessions)
            for size in (5, 6):
                assert ask(link, "a", range(size)).answers["s"].tokens == echo(range(size), 3)
            assert drafter.prefixes == [list(range(5)), list(range(6))]


def test_nobody_waits_for_who_is_gone(link: DraftLink) -> None:
    with drafting(link.address, "a"):
        until_ready(link, "a")
        assert ask(link, "a").answers
    until_gone(link, "a", {"a": {"s": DraftAsk([1, 2, 3], 3)}})
    assert view(link, "a").sessions == 0  # type: ignore[union-attr]
    done = ask(link, "a", deadline_s=LONG_S)
    assert done.skipped == ("a",)
    assert done.receive_s < SOON_S


@contextmanager
def drafter_process(link: DraftLink, name: str) -> Iterator[subprocess.Popen[bytes]]:
    script = SUPPORT / "echo_drafter.py"
    process = subprocess.Popen(
        [sys.executable, str(script), link.address, name],
        env={**os.environ, TOKEN_VARIABLE: TOKEN},
    )
    try:
        until_ready(link, name)
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        assert process.wait(SOON_S) in (0, -signal.SIGKILL)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGSTOP; it stands when this returns."""
    process.send_signal(signal.SIGSTOP)
    end_s = time.monotonic() + SOON_S
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < end_s
        time.sleep(0.005)


@pytest.mark.slow
def test_a_drafter_is_stopped_and_goes_on(link: DraftLink) -> None:
    """SIGSTOP, SIGCONT: first within the time in which its connection lasts, then beyond it."""
    asks = {"a": {"s": DraftAsk([1, 2], 2)}, "good": {"g": DraftAsk([3], 2)}}
    with drafter_process(link, "a") as process, drafting(link.address, "good"):
        until_ready(link, "good")
        for lasts in (True, False):
            stop(process)
            end_s = time.monotonic() + SOON_S + LONG_S
            rounds = late = 0
            while rounds < 2 * MISSES or (not lasts and view(link, "a").up):  # type: ignore[union-attr]
                assert time.monotonic() < end_s
                done = link.exchange(asks, deadline_s=SHORT_S)
                rounds, late = rounds + 1, late + len(done.late)
                assert set(done.answers) == {"g"}
                time.sleep(0.01)
            assert late <= MISSES, "it is soon given up"
            process.send_signal(signal.SIGCONT)
            until_ready(link, "a")
            assert ask(link, "a", [1, 2, 3]).answers["s"].tokens == echo([1, 2, 3], 3)


def test_a_drafter_is_killed_in_the_middle(link: DraftLink) -> None:
    with drafter_process(link, "a") as process, drafting(link.address, "good"):
        until_ready(link, "good")
        asks = {"a": {"s": DraftAsk([1, 2], 2)}, "good": {"g": DraftAsk([3], 2)}}
        assert set(link.exchange(asks, deadline_s=SOON_S).answers) == {"s", "g"}
        stop(process)
        assert set(link.exchange(asks, deadline_s=SHORT_S).answers) == {"g"}
        process.kill()
        process.wait()
        until_gone(link, "a", asks)
        assert set(link.exchange(asks, deadline_s=SOON_S).answers) == {"g"}


def test_a_verifier_that_restarts_is_found_again(
    link: DraftLink, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm_slo.draft_server")
    address = link.address
    with drafting(address, "a") as drafter:
        until_ready(link, "a")
        ask(link, "a", [1, 2])
        link.close()
        again = new_link(address)
        with again:
            until_ready(again, "a")
            assert ask(again, "a", [1, 2, 3]).answers["s"].tokens == echo([1, 2, 3], 3)
        assert drafter.prefixes == [[1, 2], [1, 2, 3]]
    said = [record.getMessage().rpartition(f"{address} ")[2] for record in caplog.records]
    assert said[:3] == ["is connected", "has disconnected; trying to reconnect", "is connected"]


def test_drafts_for_an_earlier_verifier_are_not_sent_to_the_next(link: DraftLink) -> None:
    drafter = HeldDrafter()
    with drafting(link.address, "a", drafter=drafter):
        until_ready(link, "a")
        ask(link, "a", deadline_s=0.05)
        assert drafter.begun.wait(SOON_S)
        address = link.address
        link.close()
        again = new_link(address)
        with again:
            watched = again._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            watched.poll(3_000)  # it is connected to the next, unless that was quicker than this
            again._socket.disable_monitor()
            watched.close()
            drafter.may.set()
            until_ready(again, "a")
            assert drafter.prefixes, "it has drafted"
            assert ask(again, "a").answers
            assert not again.faults


def test_two_ends_that_disagree_begin_anew(link: DraftLink) -> None:
    """As after a fits_in_memory that got lost: the drafter says hello again."""
    with drafting(link.address, "a"):
        until_ready(link, "a")
        ask(link, "a")
        link._peers["a"].epoch += 1
        assert ask(link, "a", deadline_s=0.3).late == ("a",)
        until(link, lambda: not link.drafters[0].sessions)
        assert ask(link, "a").answers


def test_what_an_earlier_connection_left_is_no_welcome(link: DraftLink) -> None:
    """Read before the hello of the new connection is sent, it must not stand for its answer."""
    drafter = VerifierLink(link.address, TOKEN, hello("a"))
    end = time.monotonic() + SOON_S
    while drafter._hello_due_s is None and time.monotonic() < end:
        drafter.listen(0.05)
    drafter._handle(Welcome(epoch=1))
    drafter.listen(0.05)
    until_ready(link, "a")
    drafter.close()


def test_something_else_at_the_address_is_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZMQ gives up for good where it meets another protocol; a verifier there later is found."""
    monkeypatch.setattr(verifier_link, "FRUITLESS_S", 0.3)
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with drafting(address, "a"):
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20)
        time.sleep(0.5)
        listener.close()
        connection.close()
        with new_link(address) as link:
            until_ready(link, "a")


def test_an_address_in_use_is_one_line(link: DraftLink) -> None:
    other = new_link(link.address)
    with pytest.raises(ConfigError, match=r"cannot listen there .*choose another host or port"):
        other.bind()
