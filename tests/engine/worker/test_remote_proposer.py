# SPDX-License-Identifier: Apache-2.0
"""The worker's side of draft servers: real sockets and drafters without a model; of the runner only
its batch of requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from patience import patience

pytest.importorskip("vllm")

from echo_drafter import TOKEN, VOCAB, HeldDrafter, RawDrafter, drafting, echo, hello
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_slo.config.model import SLOConfig
from vllm_slo.config.speculation import SERVERS_KEY
from vllm_slo.engine.compat.runner import RunnerBatch
from vllm_slo.engine.speculation import messages
from vllm_slo.engine.speculation.messages import DraftTrees, Grant, StepTrees
from vllm_slo.engine.speculation.servers_report import ServersReport
from vllm_slo.engine.worker.proposers import RemoteProposer, remote
from vllm_slo.errors import ConfigError
from vllm_slo.wire.draft_messages import Answer, Draft
from vllm_slo.wire.draft_socket import TOKEN_VARIABLE

SOON_S = patience(10.0)


class Batch:
    """What the proposer reads of a runner."""

    def __init__(self, texts: Mapping[str, list[int]]) -> None:
        self.req_id_to_index = {name: index for index, name in enumerate(texts)}
        self.token_ids_cpu = np.zeros((len(texts), 64), dtype=np.int32)
        self.num_tokens_no_spec = np.array([len(text) for text in texts.values()])
        for index, text in enumerate(texts.values()):
            self.token_ids_cpu[index, : len(text)] = text


class Worker:
    """A proposer that listens, and steps for it."""

    def __init__(self, proposer: RemoteProposer) -> None:
        self.proposer = proposer
        proposer.load_model(None)
        assert proposer._link
        self.address = proposer._link.address

    def step(
        self,
        texts: Mapping[str, list[int]],
        grants: Mapping[str, tuple[str, int]] | None = None,
        *,
        ended: set[str] | None = None,
        silent: tuple[str, ...] = (),
        deadline_s: float = SOON_S,
    ) -> tuple[dict[str, list[int]], ServersReport]:
        """What was drafted in a step in which all but the ``silent`` got a token."""
        self.proposer.batch = RunnerBatch(SimpleNamespace(input_batch=Batch(texts)))
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = ended or set()
        wanted = {name: Grant(*grant) for name, grant in (grants or {}).items()}
        messages.attach(output, StepTrees(grants=wanted, deadline_s=deadline_s))
        found = self.proposer.propose(output, [[] if n in silent else [1] for n in texts])
        report = self.proposer.take_report()
        assert report.servers
        assert report.seconds >= report.servers.send_s + report.servers.receive_s
        return chains(found), report.servers

    def until_ready(self, *names: str) -> None:
        end = time.monotonic() + SOON_S
        while {d.name for d in self.step({})[1].drafters if d.ready} != set(names):
            assert time.monotonic() < end
            time.sleep(0.01)


def chains(found: DraftTrees) -> dict[str, list[int]]:
    """Tokens by request, where all are chains."""
    result, end = {}, 0
    for name, count in zip(found.req_ids, found.counts, strict=True):
        own = slice(end, end := end + count)
        assert found.parents[own].tolist() == [*range(-1, count - 1)]
        result[name] = found.tokens[own].tolist()
    assert found.width == 1
    assert len(found.tokens) == len(found.probabilities) == end
    return result


def proposer_for(address: str, monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> RemoteProposer:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr(remote, "get_tp_group", lambda: SimpleNamespace(rank_in_group=rank))
    monkeypatch.setattr(remote, "token_ids", lambda *_: {})
    config = SLOConfig.from_additional_config({SERVERS_KEY: address}).speculation
    monkeypatch.setattr(messages, "speculation_of", lambda _: config)
    model = SimpleNamespace(get_vocab_size=lambda: VOCAB, tokenizer="none")
    engine: Any = SimpleNamespace(model_config=model)
    return RemoteProposer(engine)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    found = Worker(proposer_for("tcp://127.0.0.1:*", monkeypatch))
    yield found
    found.proposer.close()


def test_each_request_gets_what_it_was_granted_from_whom(worker: Worker) -> None:
    texts = {"r": [5, 6, 7], "s": [8], "t": [9, 9], "u": [1]}
    with drafting(worker.address, "a") as a, drafting(worker.address, "b") as b:
        worker.until_ready("a", "b")
        grants = {"r": ("a", 3), "s": ("b", 1), "t": ("a", 5)}
        found, report = worker.step(texts, grants)
        assert found == {name: echo(texts[name], n) for name, (_, n) in grants.items()}
        assert a.prefixes == [texts["r"], texts["t"]]
        assert b.prefixes == [texts["s"]]
        assert {r.drafter: r.tokens for r in report.rounds} == {"a": 5, "b": 1}
        assert all(r.draft_s is not None and 0.0 <= r.wait_s < SOON_S for r in report.rounds)
        assert {d.name: d.sessions for d in report.drafters} == {"a": 2, "b": 1}


def test_sessions_go_on_and_end_with_their_requests(worker: Worker) -> None:
    with drafting(worker.address, "a"):
        worker.until_ready("a")
        worker.step({"r": [5, 6], "s": [7]}, {"r": ("a", 2), "s": ("a", 2)})
        found, _ = worker.step({"r": [5, 6, 1, 2]}, {"r": ("a", 4)}, ended={"s"})
        assert found == {"r": echo([5, 6, 1, 2], 4)}
        _, report = worker.step({"r": [5, 6, 1, 2]})
        assert [d.sessions for d in report.drafters] == [1]
        assert not report.dropped


def test_who_got_no_token_or_left_is_not_asked_for(worker: Worker) -> None:
    with drafting(worker.address, "a") as a:
        worker.until_ready("a")
        grants = {"r": ("a", 2), "s": ("a", 2), "gone": ("a", 2)}
        found, _ = worker.step({"r": [5], "s": [6]}, grants, silent=("s",))
        assert found == {"r": echo([5], 2)}
        assert a.prefixes == [[5]]


def test_who_is_late_costs_a_deadline_and_is_said_to_be(worker: Worker) -> None:
    slow = HeldDrafter()
    with drafting(worker.address, "slow", drafter=slow), drafting(worker.address, "fast"):
        worker.until_ready("fast", "slow")
        found, report = worker.step(
            {"r": [5], "s": [6]}, {"r": ("slow", 3), "s": ("fast", 2)}, deadline_s=patience(0.5)
        )
        assert found == {"s": echo([6], 2)}
        rounds = {r.drafter: (r.draft_s, r.tokens) for r in report.rounds}
        assert rounds["slow"] == (None, 3)
        assert ("slow", "late", 1) in report.dropped
        assert worker.step({})[1].dropped == ()
        slow.may.set()


def test_what_was_dropped_is_told_once_by_name(worker: Worker) -> None:
    """Of a drafter that is let in, and of one that is not."""
    bad = RawDrafter(worker.address)
    other = RawDrafter(worker.address)
    try:
        bad.say(hello("bad"))
        worker.until_ready("bad")
        bad.hear()
        other.say(hello("other", vocab_size=VOCAB + 1))
        told: Counter[tuple[str, str]] = Counter()
        end = time.monotonic() + SOON_S
        while ("", "refused_hello") not in told:
            told.update({(n, why): count for n, why, count in worker.step({})[1].dropped})
            assert time.monotonic() < end
        _, report = worker.step({"r": [5]}, {"r": ("bad", 2)}, deadline_s=0.05)
        told.update({(n, why): count for n, why, count in report.dropped})
        draft = bad.hear()
        assert isinstance(draft, Draft)
        answer = Answer(session=draft.asks[0].session, at=1, tokens=[1], probabilities=[0.5])
        bad.say(bad.drafted(draft, answer))
        while ("bad", "stale_round") not in told:
            told.update({(n, why): count for n, why, count in worker.step({})[1].dropped})
            assert time.monotonic() < end
        expected = {("", "refused_hello"): 1, ("bad", "late"): 1, ("bad", "stale_round"): 1}
        assert told == expected
    finally:
        bad.close()
        other.close()


def test_other_workers_of_the_engine_do_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = proposer_for("tcp://127.0.0.1:*", monkeypatch, rank=1)
    proposer.load_model(None)
    found = proposer.propose(SchedulerOutput.make_empty(), [])
    assert (found.req_ids, found.counts) == ([], [])
    assert proposer.take_report().servers is None
    proposer.close()


def test_an_address_in_use_is_one_line(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot listen there"):
        proposer_for(worker.address, monkeypatch).load_model(None)
