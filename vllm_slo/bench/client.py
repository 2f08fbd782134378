# SPDX-License-Identifier: Apache-2.0
"""Streaming client for any OpenAI endpoint: completions, chat completions or responses.

Each streamed event gets the time at which it came. Needs the ``bench`` extra.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm_slo.bench.answers import AnswerStream, Api, Prompt, open_answer, vllm_extras
from vllm_slo.bench.endpoint import ServerInfo, ServerTarget, import_openai, with_client
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.pacing import closed_loop, open_loop
from vllm_slo.bench.planned import PlannedRequest, Send, Workload
from vllm_slo.bench.texts import TextPrompts
from vllm_slo.core.attainment import Outcome, RequestRecord, measure

if TYPE_CHECKING:
    import openai


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options of the client.

    Attributes:
        vocab_size: prompt ids are below it.
        drain_s: time after the last arrival until unfinished requests are cut off. In closed loop
            the time without the end of any answer after which all are.
        ready_requests: short requests, sent before the workload so that the server is ready.
        warmup: share of the workload's requests, the first by arrival, that is sent and not
            counted.
        seed: of the prompts of probes.
        send: what the ``slo`` field holds.
        concurrency: closed loop: so many requests are open at once; None: each request is sent at
            its time (open loop).
    """

    vocab_size: int = 512
    temperature: float = 0.0
    drain_s: float = 300.0
    ready_requests: int = 4
    warmup: float = 0.0
    seed: int = 0
    api: Api = "completions"
    send: Send = "objectives"
    concurrency: int | None = None


@dataclass(slots=True)
class Tally:
    """Live counts of one run, for a progress bar.

    ``asked``, ``kept``: ended requests with an objective, and those that kept it, by class.
    """

    planned: int
    sent: int = 0
    finished: int = 0
    declined: int = 0
    failed: int = 0
    tokens: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        return self.finished + self.declined + self.failed

    def count(self, record: RequestRecord) -> None:
        """Add a request that has ended."""
        if record.outcome == "declined":
            self.declined += 1
        elif record.outcome == "failed":
            self.failed += 1
        else:
            self.finished += 1
        attained = measure(record).attained
        if attained is not None:
            self.asked[record.slo_class] += 1
            self.kept[record.slo_class] += attained


@dataclass(frozen=True, slots=True)
class SentRequest:
    """One request as the client saw it. Times are seconds from the start of the run.

    Attributes:
        lag_s: how much later than planned it was sent.
        tokens_estimated: whether the total was spread over the events, because the server did not
            say how many tokens each event has.
        tokens_missing: the server's total less the received tokens; if it is not 0, do not trust
            the times.
        late: whether it got a late promise.
        prompt_tokens_counted: by the server; None: it did not say.
    """

    record: RequestRecord
    lag_s: float
    tokens_estimated: bool = False
    tokens_missing: int = 0
    status: int | None = None
    error: str | None = None
    late: bool = False
    prompt_tokens_counted: int | None = None


@dataclass(frozen=True, slots=True)
class ServerRun:
    """All requests of one workload on one server.

    Attributes:
        elapsed_s: from the start to the last answer.
        requests: in order of the workload.
        warmup: the first so many requests are not counted.
    """

    target: ServerTarget
    info: ServerInfo
    elapsed_s: float
    requests: tuple[SentRequest, ...]
    warmup: int = 0

    @property
    def counted(self) -> tuple[SentRequest, ...]:
        return self.requests[self.warmup :]

    @property
    def records(self) -> list[RequestRecord]:
        """The records that count, as ``core.attainment`` takes them."""
        return [r.record for r in self.counted]

    @property
    def counted_s(self) -> float:
        """Seconds from the first arrival that counts to the last answer."""
        if not self.warmup:
            return self.elapsed_s
        return self.elapsed_s - min(r.arrival_s for r in self.records)


class Sender:
    """Sends requests to one server and turns their streams into records, on one clock."""

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        target: ServerTarget,
        info: ServerInfo,
        options: ClientOptions,
    ) -> None:
        self._client = client
        self._target = target
        self._info = info
        self._options = options
        self._openai = import_openai()
        # A second run with the same seed must not find its prompts in the server's cache, nor its
        # sessions among the server's.
        self._salt = uuid.uuid4().hex
        self._sessions: dict[str, str] = {}
        self.start_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self.start_s

    def _session_id(self, session: str) -> str:
        if not session:
            return ""
        return self._sessions.setdefault(session, f"{self._salt[:12]}-{len(self._sessions)}")

    def _extra_body(self, request: PlannedRequest) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self._info.is_vllm:
            extra = vllm_extras(self._options.api, request.output_tokens, self._salt)
        if self._target.send_slo:
            slo = request.slo_body(self._options.send, self._session_id(request.session))
            extra |= {} if slo is None else {"slo": slo}
        return extra

    async def send(
        self,
        request: PlannedRequest,
        prompt: Prompt,
        due_s: float,
        tally: Tally,
        notify: Callable[[], None],
    ) -> SentRequest:
        """Send a request now and read its answer to the end; errors of the server do not raise.

        ``due_s``: when it was to be sent.
        """
        arrival_s = self.now_s()
        tally.sent += 1
        stream, status, error = AnswerStream(), None, None
        try:
            await self._read(request, prompt, stream, tally)
        except self._openai.APIStatusError as refusal:
            status, error = refusal.status_code, self._short(refusal)
        except asyncio.CancelledError:  # only the end of a run cancels
            error = "cut off: still unfinished when the drain time ended"
        except Exception as failure:  # noqa: BLE001 - errors of HTTP libraries have no common base
            error = self._short(failure)
        if error is None and stream.finish_reason not in ("stop", "length"):
            error = f"the stream ended before the answer did ({stream.finish_reason or 'cut'})"
        times_s, estimated = stream.token_times()
        record = _record(request, arrival_s, times_s, _outcome(status, error, stream), error)
        tally.count(record)
        notify()
        missing = 0 if stream.total_tokens is None else stream.total_tokens - len(times_s)
        sent = SentRequest(record, arrival_s - due_s, estimated, missing, status, error)
        return replace(sent, late=bool(stream.late), prompt_tokens_counted=stream.prompt_tokens)

    def unsent(self, request: PlannedRequest, tally: Tally) -> SentRequest:
        """What became of a request whose turn did not come before the end of the run."""
        error = "not sent: its turn had not come when the drain time ended"
        record = _record(request, self.now_s(), (), "failed", error)
        tally.count(record)
        return SentRequest(record, 0.0, error=error)

    def _short(self, error: BaseException) -> str:
        """The text of an error for the report, without keys that a server may have repeated."""
        text = str(error) or type(error).__name__
        return self._target.credentials.hide(text)[:300]

    async def _read(
        self, request: PlannedRequest, prompt: Prompt, stream: AnswerStream, tally: Tally
    ) -> None:
        answer = await open_answer(
            self._client,
            self._options.api,
            prompt,
            model=self._info.model,
            max_tokens=request.output_tokens,
            temperature=self._options.temperature,
            extra_body=self._extra_body(request),
        )
        async with answer:
            async for event in answer:
                tally.tokens += stream.take(event, self.now_s())


def _record(
    request: PlannedRequest,
    arrival_s: float,
    times_s: tuple[float, ...],
    outcome: Outcome,
    error: str | None,
) -> RequestRecord:
    return RequestRecord(
        request_id=request.request_id,
        slo_class=request.slo_class,
        arrival_s=arrival_s,
        token_times_s=times_s,
        ttft_slo_s=request.ttft_slo_s,
        tpot_slo_s=request.tpot_slo_s,
        outcome=outcome,
        finished=error is None,
        num_prompt_tokens=request.prompt_tokens,
        e2e_slo_s=request.e2e_slo_s,
    )


def _outcome(status: int | None, error: str | None, stream: AnswerStream) -> Outcome:
    if status == 429:
        return "declined"
    if error is not None:
        return "failed"
    if stream.promised is not None:
        return "admitted" if stream.promised else "best_effort"
    return "best_effort" if stream.service_tier == "flex" else "served"


def probe_requests(lengths: Sequence[tuple[int, int]], prefix: str) -> list[PlannedRequest]:
    """Requests without class or objectives for (prompt, output) lengths: zero-load and others."""
    return [
        PlannedRequest(f"{prefix}-{i}", 0.0, "", prompt, output, None, None)
        for i, (prompt, output) in enumerate(lengths)
    ]


async def send_probes(
    sender: Sender, requests: Sequence[PlannedRequest], prompts: Sequence[Prompt], together: bool
) -> list[SentRequest]:
    """Send probes all at once or one after the other; BenchError if one fails."""
    tally = Tally(len(requests))
    pending = [
        sender.send(request, prompt, 0.0, tally, lambda: None)
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    results = list(await asyncio.gather(*pending)) if together else [await p for p in pending]
    broken = next((r for r in results if r.error), None)
    if broken is not None:
        raise BenchError("--base-url", f"a first request failed: {broken.error}")
    return results


def _ready_lengths(workload: Workload, count: int) -> list[tuple[int, int]]:
    """Lengths over the range of the workload's, with the longest prompt and short answers."""
    by_length = sorted(workload.requests, key=lambda r: -r.prompt_tokens)
    step = max(1, len(by_length) // max(1, count))
    return [(r.prompt_tokens, min(8, r.output_tokens)) for r in by_length[::step][:count]]


def run_server(
    target: ServerTarget,
    workload: Workload,
    options: ClientOptions | None = None,
    on_progress: Callable[[Tally], None] | None = None,
) -> ServerRun:
    """Send the workload to one server, after a few requests that make it ready.

    Errors of single requests are in the result.

    Args:
        workload: at least one request.
        on_progress: called with the tally after every event.

    Raises:
        BenchError: the server cannot be used, or the workload does not fit it.
    """
    options = options or ClientOptions()
    if not workload.requests:
        raise BenchError("--rate", "the workload has no requests; raise --rate or --duration")
    warmup = int(options.warmup * len(workload.requests) + 1e-9)
    if warmup >= len(workload.requests):
        raise BenchError("--warmup", "no request is left to count; give a smaller share")

    async def work(client: openai.AsyncOpenAI, info: ServerInfo) -> ServerRun:
        _check_context(workload, info)
        texts = None
        if options.api != "completions":
            texts = await TextPrompts.of_server(client, target, info, options.api)

        def prompts_of(source: Workload) -> list[Prompt]:
            if texts is not None:
                return [texts.prompt(source, request) for request in source.requests]
            # A request in an array takes a tenth of the memory of one in a list.
            return [array("I", source.prompt_ids(r, options.vocab_size)) for r in source.requests]

        sender = Sender(client, target, info, options)
        first = probe_requests(_ready_lengths(workload, options.ready_requests), "ready")
        probes = Workload("ready", options.seed, 1.0, "probe", tuple(first))
        ids = [request.request_id for request in workload.requests]
        prompts = dict(zip(ids, prompts_of(workload), strict=True))
        await send_probes(sender, first, prompts_of(probes), together=True)
        tally = Tally(len(workload.requests))

        def notify() -> None:
            if on_progress is not None:
                on_progress(tally)

        async def send(request: PlannedRequest, due_s: float) -> SentRequest:
            return await sender.send(request, prompts[request.request_id], due_s, tally, notify)

        sender.start_s = time.perf_counter()
        if options.concurrency is None:
            results = await open_loop(workload.requests, send, sender.now_s, options.drain_s)
        else:
            results = await closed_loop(
                workload.requests, send, sender.now_s, options.drain_s, options.concurrency
            )
        requests = tuple(
            sender.unsent(request, tally) if result is None else result
            for request, result in zip(workload.requests, results, strict=True)
        )
        return ServerRun(target, info, sender.now_s(), requests, warmup)

    return asyncio.run(with_client(target, work))


def _check_context(workload: Workload, info: ServerInfo) -> None:
    longest = max(r.prompt_tokens + r.output_tokens for r in workload.requests)
    if info.max_model_len is not None and longest > info.max_model_len:
        raise BenchError(
            "--max-context",
            f"the workload has a request of {longest} tokens; {info.model} takes at most "
            f"{info.max_model_len}",
        )
