# SPDX-License-Identifier: Apache-2.0
"""The gate before the engine, as programs that embed the engine and HTTP requests meet it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import wrapt
from http_app import (
    DECLINED,
    DECLINING,
    REPORT,
    Call,
    Engine,
    Script,
    choice,
    ending,
    output,
    reported,
    saying,
)
from patience import patience
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from vllm_slo.engine import gate
from vllm_slo.engine.compat.api_server import balanced_engines
from vllm_slo.engine.gate import CALLER, RequestDeclinedError
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.errors import ForbiddenSLOError, InvalidSLOError
from vllm_slo.slo.access import SEAL_VARIABLE, Seal
from vllm_slo.slo.keys import INTERNAL_KEYS
from vllm_slo.slo.verdicts import Declined, Invalid, Quoted, Verdict, pack_report

pytestmark = pytest.mark.versions


class Client:
    """An HTTP request that notes what the gate tells it.

    Args:
        keys: what it wants sent; an error: it is to be refused.
        answers: whether it answers its client itself.
    """

    def __init__(self, keys: Any = None, *, answers: bool = False) -> None:
        self.keys = keys
        self.answers = answers
        self.asked: list[tuple[Any, int]] = []
        self.reports: list[dict[int, Any]] = []
        self.settled: list[Any] = []
        self.numbers = itertools.count()

    def admit(self, extra_args: Mapping[str, Any] | None, n: int) -> Mapping[str, Any] | None:
        self.asked.append((extra_args, n))
        if isinstance(self.keys, InvalidSLOError):
            raise self.keys
        return self.keys  # type: ignore[no-any-return]

    def begin(self) -> int:
        return next(self.numbers)

    def admit_pooling(self) -> None:
        if isinstance(self.keys, InvalidSLOError):
            raise self.keys

    def has_output(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        self.reports.append(dict(reports))

    async def settle(self, verdict: Verdict | InvalidSLOError) -> bool:
        self.settled.append(verdict)
        return self.answers


@pytest.fixture
def calling() -> Iterator[Callable[[Client], Client]]:
    """Make the calls of a test those of a client."""
    tokens = []

    def become(client: Client) -> Client:
        tokens.append(CALLER.set(client))
        return client

    yield become
    for token in reversed(tokens):
        CALLER.reset(token)


def ask(
    engine: Engine, params: SamplingParams | None = None, **options: Any
) -> list[RequestOutput]:
    """All outputs of one request."""

    async def run() -> list[RequestOutput]:
        return [
            one async for one in engine.generate("x", params or SamplingParams(), "r", **options)
        ]

    return asyncio.run(asyncio.wait_for(run(), patience(20)))


WRONG = InvalidSLOError("ttft_ms", "-1 is out of range", "give more")

# --- who is watched ------------------------------------------------------------------------------


def scheduler_of_another() -> type:
    return type("Another", (), {})


class Derived(Scheduler):
    """Somebody's scheduler, made from ours."""


@pytest.mark.parametrize(
    ("scheduler", "ours"),
    [
        ("vllm_slo.Scheduler", True),
        ("vllm_slo.engine.scheduler.Scheduler", True),
        (Scheduler, True),
        (Derived, True),
        (None, False),
        ("vllm.v1.core.sched.async_scheduler.AsyncScheduler", False),
        ("types.SimpleNamespace", False),
        (scheduler_of_another(), False),
    ],
)
def test_only_our_scheduler_is_watched(calling: Any, scheduler: Any, ours: bool) -> None:
    calling(Client({"slo_ttft_ms": 5.0}))
    params = SamplingParams(extra_args={"slo_ticket": 5})
    said = output(choice("", "abort", DECLINED), carried=reported())
    engine = Engine(saying_as_they_are(said), scheduler)
    if ours:
        with pytest.raises(RequestDeclinedError):
            ask(engine, params)
        assert engine.calls[0].extra == {"slo_ttft_ms": 5.0}
    else:
        assert ask(engine, params) == [said]
        assert engine.calls[0].params is params
        assert said.kv_transfer_params == reported()


def saying_as_they_are(*outputs: RequestOutput) -> Script:
    """As ``saying``, but the very objects."""

    async def script(call: Call) -> AsyncIterator[RequestOutput]:
        for one in outputs:
            yield one

    return script


def test_install_wraps_once() -> None:
    module = SimpleNamespace(AsyncLLM=type("AsyncLLM", (Engine,), dict(vars(Engine))))
    inner = module.AsyncLLM
    inner.generate = Engine.generate.__wrapped__  # type: ignore[attr-defined]
    inner.encode = Engine.encode.__wrapped__  # type: ignore[attr-defined]
    for _ in range(3):
        gate.install(module)
    for name in ("generate", "encode"):
        wrapped = vars(inner)[name]
        assert isinstance(wrapped, wrapt.FunctionWrapper)
        assert not isinstance(wrapped.__wrapped__, wrapt.FunctionWrapper)


def test_what_a_client_has_no_wish_for_passes_as_it_is(calling: Any) -> None:
    client = calling(Client(None))
    params = SamplingParams(n=3, extra_args={"a": 1})
    said = output(choice("a", "stop"), carried=reported())
    engine = Engine(saying_as_they_are(said))
    assert ask(engine, params, priority=4) == [said]
    assert engine.calls[0].params is params
    assert engine.calls[0].options == {"priority": 4}
    assert said.kv_transfer_params == reported()
    assert client.asked == [({"a": 1}, 3)]
    assert (client.reports, client.settled) == ([], [])


def test_the_keys_of_the_client_replace_those_of_the_request(calling: Any) -> None:
    calling(Client({"slo_ttft_ms": 5.0, "slo_seal": "s"}))
    params = SamplingParams(extra_args={"a": 1, "slo_ticket": 9, "prefill_ddl": 3})
    engine = Engine(ending("a"))
    ask(engine, params, priority=4)
    assert engine.calls[0].extra == {"a": 1, "slo_ttft_ms": 5.0, "slo_seal": "s"}
    assert engine.calls[0].options == {"priority": 4}
    # Nobody's object was changed.
    assert params.extra_args == {"a": 1, "slo_ticket": 9, "prefill_ddl": 3}


def test_however_the_arguments_are_given(calling: Any) -> None:
    calling(Client({"slo_ttft_ms": 5.0}))
    engine, params = Engine(ending("a")), SamplingParams()

    async def run() -> None:
        for given in (
            engine.generate("x", params, "r"),
            engine.generate("x", params, request_id="r"),
            engine.generate(prompt="x", sampling_params=params, request_id="r"),
        ):
            assert [one async for one in given]

    asyncio.run(run())
    assert [(c.prompt, c.request_id, c.extra) for c in engine.calls] == [
        ("x", "r", {"slo_ttft_ms": 5.0})
    ] * 3


# --- servers with several engines ----------------------------------------------------------------


def ranks_of(keys: Mapping[str, Any], ranks: int = 4, **options: Any) -> list[Any]:
    """The engines to which three requests with the same keys are sent; None: any."""
    engine = Engine(ending("a"), ranks=ranks)
    for _ in range(3):
        ask(engine, SamplingParams(extra_args=dict(keys)), **options)
    return [call.options.get("data_parallel_rank") for call in engine.calls]


def test_the_rounds_of_a_session_go_to_one_engine() -> None:
    seen = []
    for number in range(40):
        (rank, *others) = ranks_of({"slo_session_id": f"job-{number}", "slo_ttft_ms": 5.0})
        assert others == [rank] * 2
        seen.append(rank)
    assert set(seen) == {0, 1, 2, 3}
    tenants = {ranks_of({"slo_session_id": "job", "slo_tenant": f"t{n}"})[0] for n in range(40)}
    assert tenants == {0, 1, 2, 3}


def test_the_choices_that_are_declined_together_go_to_one_engine(calling: Any) -> None:
    seen = []
    for number in range(40):
        calling(Client({"slo_ttft_ms": 5.0, "slo_group": f"group-{number}"}))
        (rank, *others) = ranks_of({})
        assert others == [rank] * 2
        seen.append(rank)
    assert set(seen) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("keys", "ranks", "options", "rank"),
    [
        ({"slo_ttft_ms": 5.0}, 4, {}, None),
        ({}, 4, {}, None),
        ({"slo_session_id": "job"}, 1, {}, None),
        ({"slo_session_id": "job"}, 4, {"data_parallel_rank": 0}, 0),
        ({"slo_session_id": "job"}, 4, {"data_parallel_rank": 3}, 3),
    ],
    ids=["no name", "no objective", "one engine", "asked for 0", "asked for 3"],
)
def test_other_requests_go_where_they_would(
    keys: Mapping[str, Any], ranks: int, options: Mapping[str, Any], rank: int | None
) -> None:
    assert ranks_of(keys, ranks, **options) == [rank] * 3


def test_a_server_of_one_rank_among_several_has_one_engine() -> None:
    parallel = {"data_parallel_size": 4, "data_parallel_size_local": 1, "local_engines_only": True}
    assert balanced_engines(SimpleNamespace(parallel_config=SimpleNamespace(**parallel))) == 1


# --- internal keys -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", INTERNAL_KEYS)
def test_programs_write_no_internal_keys(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEAL_VARIABLE, "secret")
    engine = Engine(ending("a"))
    for extra in ({key: 1}, Seal("secret").sealed({key: 1, "slo_ttft_ms": 5.0})):
        with pytest.raises(VLLMValidationError, match=r"^slo_\w+: is not a field of an SLO"):
            ask(engine, SamplingParams(extra_args=extra))
    assert engine.calls == []


def test_programs_may_ask_for_objectives() -> None:
    params = SamplingParams(extra_args={"slo_ttft_ms": 5, "a": 1})
    said = output(choice("a", "stop"), carried=reported())
    engine = Engine(saying_as_they_are(said))
    assert ask(engine, params) == [said]
    assert engine.calls[0].params is params
    # The report is theirs.
    assert said.kv_transfer_params == reported()


# --- reports -------------------------------------------------------------------------------------


def numbered(value: int) -> dict[str, Any]:
    return {**REPORT, "ttft_ms": float(value)}


def test_reports_are_taken_out_of_the_outputs(calling: Any) -> None:
    client = calling(Client({"slo_ttft_ms": 5.0}))
    outputs = ask(
        Engine(
            saying(
                output(choice("a")),
                output(choice("b"), carried={"peer": 1}),
                output(choice("c"), carried=reported(numbered(1), peer=1)),
                output(choice("d", "stop", "END"), carried=reported(numbered(2))),
            )
        )
    )
    assert [one.kv_transfer_params for one in outputs] == [None, {"peer": 1}, {"peer": 1}, None]
    assert [one.outputs[0].text for one in outputs] == list("abcd")
    assert outputs[-1].outputs[0].stop_reason == "END"
    assert client.reports == [{}, {}, {0: numbered(1)}, {0: numbered(2)}]


def test_choices_of_all_prompts_are_numbered(calling: Any) -> None:
    client = calling(Client({"slo_each": 1}))

    async def script(call: Call) -> AsyncIterator[RequestOutput]:
        for index in (1, 0):
            stop = pack_report(numbered(10 * len(call.prompt) + index), index or None)
            yield output(choice("a", "stop", stop, index))

    engine, params = Engine(script), SamplingParams(n=2)

    async def run() -> list[RequestOutput]:
        asked = [engine.generate("x" * long, params, f"r{long}") for long in (1, 2, 3)]
        # Whatever the order in which they are listened to.
        return [one for given in reversed(asked) async for one in given]

    outputs = asyncio.run(run())
    assert [one.outputs[0].stop_reason for one in outputs] == [1, None] * 3
    seen = {index: report["ttft_ms"] for one in client.reports for index, report in one.items()}
    assert seen == {0: 10.0, 1: 11.0, 2: 20.0, 3: 21.0, 4: 30.0, 5: 31.0}


@pytest.mark.parametrize("aggregate", [True, False])
def test_outputs_that_vllm_has_merged(calling: Any, aggregate: bool) -> None:
    """Of choices that end at once, or before somebody listens."""
    client = calling(Client({"slo_each": 1}))
    merged = output(choice("a", index=0))
    for index in (1, 0):
        stop = pack_report(numbered(index), "END" if index else None)
        last = output(choice("b", "stop", stop, index), carried=reported(numbered(index)))
        merged.add(last, aggregate=aggregate)
        merged.kv_transfer_params = last.kv_transfer_params
    (told,) = ask(Engine(saying_as_they_are(merged)), SamplingParams(n=2))
    assert client.reports == [{0: numbered(0), 1: numbered(1)}]
    stops = {one.index: one.stop_reason for one in told.outputs if one.finish_reason}
    assert stops == {0: None, 1: "END"}
    assert told.kv_transfer_params is None


def test_a_choice_that_is_declined_among_merged_outputs_is_found(calling: Any) -> None:
    client = calling(Client({"slo_each": 1}))
    both = output(choice(index=0), choice("", "abort", DECLINED, 1))
    with pytest.raises(RequestDeclinedError):
        ask(Engine(saying(both)), SamplingParams(n=2))
    assert client.settled == [Declined(1500, "prefill")]


# --- what is not served --------------------------------------------------------------------------


def test_a_program_is_told_of_a_decline_by_an_error() -> None:
    engine = Engine(DECLINING)
    with pytest.raises(GracefulHTTPError, match=r"\(prefill\); retry after 1500 ms") as caught:
        ask(engine)
    assert isinstance(caught.value, RequestDeclinedError)
    assert caught.value.declined == Declined(1500, "prefill")
    assert caught.value.http_status == 429
    assert engine.calls[0].closed


def test_a_program_is_told_what_is_wrong_by_an_error() -> None:
    script = ending("", Invalid("ttft_ms: is odd").pack(), finish="abort")
    with pytest.raises(VLLMValidationError, match=r"^ttft_ms: is odd$"):
        ask(Engine(script))


@pytest.mark.parametrize("stop", [DECLINED, 'slo_quote:{"promised":true}', "slo_invalid:x"])
def test_only_what_was_aborted_has_a_verdict(stop: str) -> None:
    (said,) = ask(Engine(ending("a", stop)))
    assert said.outputs[0].stop_reason == stop
    (left,) = ask(Engine(ending("a", "slo_other:5", finish="abort")))
    assert left.outputs[0].finish_reason == "abort"


@pytest.mark.parametrize(
    ("stop", "verdict", "error"),
    [
        (DECLINED, Declined(1500, "prefill"), RequestDeclinedError),
        ("slo_invalid:x: y", Invalid("x: y"), VLLMValidationError),
        ('slo_quote:{"promised":true}', Quoted({"promised": True}), VLLMValidationError),
    ],
)
def test_a_client_settles_or_its_route_gets_an_error(
    calling: Any, stop: str, verdict: Verdict, error: type[Exception]
) -> None:
    client = calling(Client({"slo_ttft_ms": 5.0}))
    engine = Engine(ending("", stop, finish="abort"))
    with pytest.raises(error):
        ask(engine)
    assert client.settled == [verdict]
    assert client.reports == []
    assert engine.calls[0].closed


@pytest.mark.parametrize(
    "wrong", [WRONG, ForbiddenSLOError("tier", "is not yours", "ask for less")]
)
def test_what_a_client_may_not_have_never_reaches_the_engine(
    calling: Any, wrong: InvalidSLOError
) -> None:
    client = calling(Client(wrong))
    engine = Engine(ending("a"))
    with pytest.raises(VLLMValidationError, match=str(wrong)):
        ask(engine)
    assert client.settled == [wrong]
    assert engine.calls == []


def test_who_has_been_answered_is_waited_for_and_then_told(
    calling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calling(Client({"slo_ttft_ms": 5.0}, answers=True))
    monkeypatch.setattr(gate, "CANCEL_S", 0.01)
    with pytest.raises(RequestDeclinedError):
        ask(Engine(DECLINING))


def test_a_route_that_is_cancelled_meanwhile_hears_nothing_more(calling: Any) -> None:
    calling(Client({"slo_ttft_ms": 5.0}, answers=True))
    engine = Engine(DECLINING)

    async def run() -> None:
        async def route() -> None:
            async for _ in engine.generate("x", SamplingParams(), "r"):
                raise AssertionError

        task = asyncio.create_task(route())
        while not engine.calls:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.calls[0].closed

    asyncio.run(asyncio.wait_for(run(), patience(20)))


async def endless(call: Call) -> AsyncIterator[RequestOutput]:
    yield output(choice("a"))
    await asyncio.Event().wait()


@pytest.mark.parametrize("client", [None, Client(None), Client({"slo_ttft_ms": 5.0})])
def test_who_stops_listening_ends_the_request(calling: Any, client: Client | None) -> None:
    if client is not None:
        calling(client)
    engine = Engine(endless)

    async def run() -> None:
        outputs: Any = engine.generate("x", SamplingParams(), "closed")
        async with aclosing(outputs):
            async for _ in outputs:
                break
        assert engine.calls[0].closed

        async def listen() -> None:
            async for _ in engine.generate("x", SamplingParams(), "cancelled"):
                pass

        task = asyncio.create_task(listen())
        while len(engine.calls) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.calls[1].closed

    asyncio.run(asyncio.wait_for(run(), patience(20)))


def test_errors_of_the_engine_pass() -> None:
    async def broken(call: Call) -> AsyncIterator[RequestOutput]:
        yield output(choice("a"))
        raise RuntimeError("engine died")

    engine = Engine(broken)
    with pytest.raises(RuntimeError, match="engine died"):
        ask(engine)
    assert engine.calls[0].closed


def test_calls_of_other_contexts_are_nobodys() -> None:
    """A task has the client in whose context it was made, whoever is served meanwhile."""
    engine, mine, other = Engine(ending("a")), Client({"slo_ttft_ms": 1.0}), Client(None)

    async def run() -> None:
        CALLER.set(mine)
        task = asyncio.create_task(consume())
        CALLER.set(other)
        await task

    async def consume() -> None:
        async for _ in engine.generate("x", SamplingParams(), "r"):
            pass

    asyncio.run(run())
    assert (len(mine.asked), len(other.asked)) == (1, 0)


# --- pooling -------------------------------------------------------------------------------------


def pool(engine: Engine, params: PoolingParams) -> list[Any]:
    async def run() -> list[Any]:
        return [one async for one in engine.encode("x", params, "r")]

    return asyncio.run(run())


def test_pooling_with_objectives_is_refused(calling: Any) -> None:
    client = calling(Client(WRONG))
    engine = Engine(ending("a"))
    with pytest.raises(VLLMValidationError, match="ttft_ms: -1"):
        pool(engine, PoolingParams())
    assert (client.settled, engine.calls) == ([WRONG], [])


@pytest.mark.parametrize(
    ("client", "scheduler"),
    [(None, "vllm_slo.Scheduler"), (Client(None), "vllm_slo.Scheduler"), (Client(WRONG), None)],
)
def test_other_pooling_is_untouched(calling: Any, client: Client | None, scheduler: Any) -> None:
    if client is not None:
        calling(client)
    engine, params = Engine(ending("a"), scheduler), PoolingParams()
    assert len(pool(engine, params)) == 1
    assert engine.calls[0].params is params
