# SPDX-License-Identifier: Apache-2.0
"""Each call of the link to draft servers into a policy fails: the step goes on without drafts, and
the draft servers come back by themselves. Real sockets, without a model."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import call_tables
import pytest
from core_calls import CoreCall, core_calls, wired
from fault_injection import Call, Fault, counted

pytest.importorskip("vllm")
pytest.importorskip("zmq")

from echo_drafter import RawDrafter, drafting, echo, hello
from patience import patience
from test_remote_proposer import Batch, chains, proposer_for
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_slo.core.speculation.drafter_health import MISSES, SHORTEST_REST_S
from vllm_slo.engine.compat.runner import RunnerBatch
from vllm_slo.engine.speculation import messages
from vllm_slo.engine.speculation.messages import Grant, StepTrees
from vllm_slo.engine.worker.proposers import RemoteProposer
from vllm_slo.router import draft_server
from vllm_slo.wire.draft_messages import Answer, Draft, Pong, from_verifier

pytestmark = pytest.mark.slow

ALWAYS = float("inf")
SOON_S = patience(10.0)
TEXT = [1, 2, 3]
NUMBERS = itertools.count()
"""Of draft servers: one that has left may be taken for a new one of its name."""


@pytest.fixture(scope="module")
def calls() -> Iterator[list[CoreCall]]:
    """All calls of the link into the policies that are made while it is open."""
    found = [
        call
        for call in core_calls()
        if call.place.startswith(call_tables.LINK) and call.place not in call_tables.AT_START
    ]
    with wired(found):
        yield found


class Link:
    """A worker that draft servers draft for.

    Attributes:
        failed: faults that it has reported.
    """

    def __init__(self, proposer: RemoteProposer) -> None:
        self.proposer = proposer
        self.failed = 0
        proposer.load_model(None)
        assert proposer._link is not None
        self.address = proposer._link.address

    def step(
        self, grants: Mapping[str, str] | None = None, *, ended: str = "", deadline_s: float = 0.02
    ) -> tuple[dict[str, list[int]], Any]:
        """What draft servers drafted for the requests in a step, and how they are."""
        grants = grants or {}
        self.proposer.batch = RunnerBatch(
            SimpleNamespace(input_batch=Batch(dict.fromkeys(grants, TEXT)))
        )
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {ended} - {""}
        wanted = {name: Grant(drafter, 2) for name, drafter in grants.items()}
        messages.attach(output, StepTrees(grants=wanted, deadline_s=deadline_s))
        found = chains(self.proposer.propose(output, [[1] for _ in grants]))
        report = self.proposer.take_report()
        self.failed += len(report.failed)
        assert set(report.failed) <= {"speculation", "clock", "worker"}
        return found, report.servers

    def greets(self, name: str, within_s: float = SOON_S) -> bool:
        """Whether a draft server is welcomed."""
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            servers = self.step()[1]
            if servers is not None and any(d.name == name and d.ready for d in servers.drafters):
                return True
            time.sleep(0.005)
        return False

    def drafts(self) -> None:
        """The draft server that is there is as useful as ever."""
        assert self.greets("echo")
        assert self.step({"r": "echo"}, deadline_s=SOON_S)[0] == {"r": echo(TEXT, 2)}


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    monkeypatch.setattr(draft_server, "LOOK_S", 0.005)
    found = Link(proposer_for("tcp://127.0.0.1:*", monkeypatch))
    with drafting(found.address, "echo"):
        yield found
    found.proposer.close()


def play(link: Link, patient_s: float = SOON_S) -> None:
    """A draft server that answers, and one that is late, says nonsense and leaves."""
    late = f"raw{next(NUMBERS)}"
    link.greets("echo", patient_s)
    link.step({"r": "echo"}, deadline_s=patient_s)
    link.step(ended="r")
    raw = RawDrafter(link.address)
    try:
        raw.say(hello(late))
        link.greets(late, min(patient_s, 0.5))  # a fault may have cost its hello
        raw.send(b"nonsense")
        for number in range(MISSES):
            link.step({f"s{number}": late}, ended=f"s{number - 1}")
        while raw._socket.poll(0):
            message = from_verifier(raw._socket.recv())
            if isinstance(message, Draft) and message.asks:
                answer = Answer(
                    session=message.asks[0].session, at=3, tokens=[1], probabilities=[0.5]
                )
                raw.say(raw.drafted(message, answer))
        raw.say(Pong())
        time.sleep(2 * SHORTEST_REST_S)
        for _ in range(3):
            link.step()
            time.sleep(0.01)
    finally:
        raw.close()
    time.sleep(0.05)
    link.step({"t": late}, ended="s2")


def test_each_call_of_the_link_is_made(link: Link, calls: list[CoreCall]) -> None:
    made = Counter[Call]()
    with counted(made, calls):
        play(link)
    assert [str(call) for call in calls if call not in made] == []


def test_each_call_of_the_link_fails_once(link: Link, calls: list[CoreCall]) -> None:
    wrong: dict[str, str] = {}
    for call in calls:
        before = link.failed
        try:
            with Fault(call).injected() as fault:
                play(link)
            assert fault.raised == link.failed - before == 1
            link.drafts()
        except Exception as error:  # noqa: BLE001 (all are reported at the end)
            wrong[str(call)] = f"{type(error).__name__}: {error}"[:300]
    assert not wrong, "\n".join(f"{call}: {what}" for call, what in wrong.items())


def test_each_call_of_the_link_fails_always(link: Link, calls: list[CoreCall]) -> None:
    for call in calls:
        before = link.failed
        with Fault(call, times=ALWAYS).injected() as fault:
            play(link, patient_s=0.05)
        assert fault.raised == link.failed - before, call
    link.drafts()
