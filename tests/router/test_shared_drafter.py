# SPDX-License-Identifier: Apache-2.0
"""One draft server of two verifiers, over real sockets: whose turn it is, and what becomes of one
verifier when the other one misbehaves or goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from echo_drafter import TOKEN, VOCAB, HeldDrafter, drafting, echo
from patience import patience

from vllm_slo.core.speculation.draft_sessions import DraftAsk
from vllm_slo.engine.speculation.draft_link import DraftLink
from vllm_slo.errors import ConfigError
from vllm_slo.wire.ports import free_ports

SOON_S = patience(10.0)
"""What should come at once has come by then."""
PREFIXES = {"first": [1, 2, 3], "second": [4, 5, 6, 7]}


def opened(stack: ExitStack, vocab_size: int = VOCAB) -> DraftLink:
    return stack.enter_context(DraftLink("tcp://127.0.0.1:*", TOKEN, vocab_size=vocab_size))


@pytest.fixture
def links() -> Iterator[dict[str, DraftLink]]:
    """Two verifiers."""
    with ExitStack() as stack:
        yield {name: opened(stack) for name in PREFIXES}


def until(holds: Callable[[], object], *polled: DraftLink) -> None:
    end_s = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end_s, [link.drafters for link in polled]
        for link in polled:
            link.poll()
        time.sleep(0.005)


def until_ready(*links: DraftLink) -> None:
    until(lambda: all(any(d.ready for d in link.drafters) for link in links), *links)


def ask(link: DraftLink, prefix: list[int], deadline_s: float = SOON_S) -> list[int]:
    """What is drafted for the one session of a verifier; both call theirs by the same name."""
    done = link.exchange({"a": {"s": DraftAsk(prefix, 3)}}, deadline_s=deadline_s)
    return list(done.answers["s"].tokens) if done.answers else []


def addresses(links: dict[str, DraftLink]) -> list[str]:
    return [link.address for link in links.values()]


def test_each_verifier_has_sessions_of_its_own(links: dict[str, DraftLink]) -> None:
    """At the same time, over many rounds, in each of which the text goes on."""

    def follow(name: str) -> bool:
        text = list(PREFIXES[name])
        for _ in range(50):
            if ask(links[name], text) != echo(text, 3):
                return False
            text += text[-2:]
        return True

    with drafting(addresses(links), "a"), ThreadPoolExecutor() as threads:
        until_ready(*links.values())
        assert list(threads.map(follow, links)) == [True, True]
    for link in links.values():
        assert not link.faults


def test_rounds_are_drafted_in_turns(links: dict[str, DraftLink]) -> None:
    """The first verifier asks again before the second one's turn came, and is not preferred."""
    first, second = links.values()
    drafter = HeldDrafter()
    with drafting(addresses(links), "a", drafter=drafter):
        until_ready(first, second)
        ask(first, [1], 0.01)
        assert drafter.begun.wait(SOON_S)
        ask(second, [2], 0.01)
        ask(first, [3], 0.01)
        drafter.may.set()
        until(lambda: len(drafter.prefixes) == 3)
    assert drafter.prefixes == [[1], [2], [3]]
    assert drafter.interruptions == [True, False, False], "only a newer round of its own ends one"


def test_the_round_of_a_verifier_that_goes_is_cut_short(links: dict[str, DraftLink]) -> None:
    first, second = links.values()
    drafter = HeldDrafter()
    with drafting(addresses(links), "a", drafter=drafter), ExitStack() as stack:
        until_ready(first, second)
        ask(first, [1], 0.01)
        assert drafter.begun.wait(SOON_S)
        first.close()
        stack.callback(first.bind)  # the fixture closes it
        time.sleep(patience(0.3))
        drafter.may.set()
        assert ask(second, [2]) == echo([2], 3)
        assert drafter.interruptions[0]
        assert ask(second, [2, 9]) == echo([2, 9], 3)
    assert not second.faults


def test_a_verifier_that_refuses_does_not_stop_the_other() -> None:
    with ExitStack() as stack:
        links = {"picky": opened(stack, VOCAB + 1), "second": opened(stack)}
        with drafting(addresses(links), "a"):
            until(lambda: links["picky"].faults["refused_hello"], *links.values())
            until_ready(links["second"])
            assert ask(links["second"], [5, 6]) == echo([5, 6], 3)
            assert not links["picky"].drafters


def test_verifiers_with_one_address_take_a_port_each() -> None:
    """And one that comes back finds the port that it left, with the draft server."""
    base = free_ports(2)
    address = f"tcp://127.0.0.1:{base}-{base + 1}"
    first, second, third = (DraftLink(address, TOKEN, vocab_size=VOCAB) for _ in range(3))
    with second, drafting([f"tcp://127.0.0.1:{base + place}" for place in range(2)], "a"):
        with first:
            assert {first.address, second.address} == {
                f"tcp://127.0.0.1:{base + place}" for place in range(2)
            }
            with pytest.raises(ConfigError, match=rf"{address}: cannot listen there \(Address "):
                third.bind()
            until_ready(first, second)
            assert ask(first, [1]) == ask(second, [1]) == echo([1], 3)
        with third:
            until_ready(third)
            assert ask(third, [8]) == echo([8], 3)
            assert ask(second, [1, 2]) == echo([1, 2], 3)
