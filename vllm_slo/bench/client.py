# SPDX-License-Identifier: Apache-2.0
"""Open-loop streaming client for any OpenAI completions endpoint.

Every request is sent at its planned time, however many answers are still open. Prompts are token
ids, so lengths are exact. Each streamed chunk gets the time at which it came. Needs the ``bench``
extra.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_slo.bench.endpoint import ServerInfo, ServerTarget, import_openai, with_client
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.workload import PlannedRequest, Workload
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.core.attainment import Outcome, RequestRecord, mean_tpot_s, measure

if TYPE_CHECKING:
    import openai


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options of the client.

    Attributes:
        vocab_size: prompt ids are below it.
        drain_s: time after the last arrival until unfinished requests are cut off.
        warmup_requests: sent first and not counted.
        seed: of the prompts of probes.
    """

    vocab_size: int = 512
    temperature: float = 0.0
    drain_s: float = 300.0
    warmup_requests: int = 4
    seed: int = 0


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


@dataclass(frozen=True, slots=True)
class SentRequest:
    """One request as the client saw it. Times are seconds from the start of the run.

    Attributes:
        lag_s: how much later than planned it was sent.
        tokens_estimated: whether the total was spread over the chunks, because the server did not
            say how many tokens each chunk has.
        tokens_missing: the server's total less the received tokens; if it is not 0, do not trust
            the times.
    """

    record: RequestRecord
    lag_s: float
    tokens_estimated: bool = False
    tokens_missing: int = 0
    status: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ServerRun:
    """All requests of one workload on one server. ``elapsed_s``: start to the last answer."""

    target: ServerTarget
    info: ServerInfo
    elapsed_s: float
    requests: tuple[SentRequest, ...]

    @property
    def records(self) -> list[RequestRecord]:
        """The records, as ``core.attainment`` takes them."""
        return [r.record for r in self.requests]


@dataclass(slots=True)
class _Stream:
    """Chunks of one answer: arrival time, and number of tokens if the server gives it."""

    chunks: list[tuple[float, int | None]] = field(default_factory=list)
    total_tokens: int | None = None
    finish_reason: str | None = None
    service_tier: str | None = None
    promised: bool | None = None

    def take(self, chunk: Any, now_s: float) -> int:
        """Record one server-sent event; returns the number of tokens that it surely has."""
        usage = getattr(chunk, "usage", None)
        if usage is not None:
            self.total_tokens = usage.completion_tokens
        self.service_tier = getattr(chunk, "service_tier", None) or self.service_tier
        report = getattr(chunk, "slo", None)
        if isinstance(report, Mapping) and isinstance(report.get("promised"), bool):
            self.promised = report["promised"] and not report.get("late")
        known = 0
        for choice in chunk.choices or ():
            ids = getattr(choice, "token_ids", None)
            if ids:
                self.chunks.append((now_s, len(ids)))
                known += len(ids)
            elif ids is None and choice.text:
                self.chunks.append((now_s, None))
            self.finish_reason = choice.finish_reason or self.finish_reason
        return known

    def token_times(self) -> tuple[tuple[float, ...], bool]:
        """(time of each token, whether the split over chunks is an estimate)."""
        counts = [1 if n is None else n for _, n in self.chunks]
        estimated = any(n is None for _, n in self.chunks)
        if estimated and self.total_tokens is not None:
            counts = _spread(self.total_tokens, len(self.chunks))
        times = (t for (t, _), n in zip(self.chunks, counts, strict=True) for _ in range(n))
        return tuple(times), estimated


def _spread(total: int, parts: int) -> list[int]:
    """``total`` over ``parts`` as evenly as possible; the first parts get the remainder."""
    base, extra = divmod(total, parts)
    return [base + (i < extra) for i in range(parts)]


class _Session:
    """Sends requests to one server and turns their streams into records, on one clock."""

    def __init__(
        self, client: openai.AsyncOpenAI, target: ServerTarget, model: str, options: ClientOptions
    ) -> None:
        self._client = client
        self._target = target
        self._model = model
        self._options = options
        self._openai = import_openai()
        # A second run with the same seed must not find its prompts in the server's cache.
        self._cache_salt = uuid.uuid4().hex
        self.start_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self.start_s

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        extra: dict[str, Any] = {
            "ignore_eos": True,
            "min_tokens": request.output_tokens,
            "return_token_ids": True,
            "cache_salt": self._cache_salt,
        }
        slo = request.slo_body() if self._target.send_slo else None
        if slo is not None:
            extra["slo"] = slo
        return extra

    async def send(
        self, request: PlannedRequest, prompt: list[int], tally: Tally, notify: Callable[[], None]
    ) -> SentRequest:
        """Send a request now and read its answer to the end; errors of the server do not raise."""
        arrival_s = self.now_s()
        tally.sent += 1
        stream, status, error = _Stream(), None, None
        try:
            await self._read(request, prompt, stream, tally)
        except self._openai.APIStatusError as refusal:
            status, error = refusal.status_code, self._short(refusal)
        except asyncio.CancelledError:  # only ``_drain`` cancels
            error = "cut off: still unfinished when the drain time ended"
        except Exception as failure:  # noqa: BLE001 - errors of HTTP libraries have no common base
            error = self._short(failure)
        if error is None and stream.finish_reason not in ("stop", "length"):
            error = f"the stream ended before the answer did ({stream.finish_reason or 'cut'})"
        outcome = _outcome(status, error, stream)
        times_s, estimated = stream.token_times()
        record = RequestRecord(
            request_id=request.request_id,
            slo_class=request.slo_class,
            arrival_s=arrival_s,
            token_times_s=times_s,
            ttft_slo_s=request.ttft_slo_s,
            tpot_slo_s=request.tpot_slo_s,
            outcome=outcome,
            finished=error is None,
            num_prompt_tokens=len(prompt),
        )
        _count(tally, record)
        notify()
        missing = 0 if stream.total_tokens is None else stream.total_tokens - len(times_s)
        return SentRequest(record, arrival_s - request.at_s, estimated, missing, status, error)

    def _short(self, error: BaseException) -> str:
        """The text of an error for the report, without keys that a server may have repeated."""
        text = str(error) or type(error).__name__
        return self._target.credentials.hide(text)[:300]

    async def _read(
        self, request: PlannedRequest, prompt: list[int], stream: _Stream, tally: Tally
    ) -> None:
        answer = await self._client.completions.create(
            model=self._model,
            prompt=[prompt],
            max_tokens=request.output_tokens,
            temperature=self._options.temperature,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=self._body(request),
        )
        async with answer:
            async for chunk in answer:
                tally.tokens += stream.take(chunk, self.now_s())


def _outcome(status: int | None, error: str | None, stream: _Stream) -> Outcome:
    if status == 429:
        return "declined"
    if error is not None:
        return "failed"
    if stream.promised is not None:
        return "admitted" if stream.promised else "best_effort"
    return "best_effort" if stream.service_tier == "flex" else "served"


def _count(tally: Tally, record: RequestRecord) -> None:
    if record.outcome == "declined":
        tally.declined += 1
    elif record.outcome == "failed":
        tally.failed += 1
    else:
        tally.finished += 1
    attained = measure(record).attained
    if attained is not None:
        tally.asked[record.slo_class] += 1
        tally.kept[record.slo_class] += attained


def probe_requests(lengths: Sequence[tuple[int, int]], prefix: str) -> list[PlannedRequest]:
    """Requests without objectives for (prompt, output) lengths: warm-up and zero-load probes."""
    return [
        PlannedRequest(f"{prefix}-{i}", 0.0, "probe", prompt, output, None, None)
        for i, (prompt, output) in enumerate(lengths)
    ]


async def _send_probes(
    session: _Session, requests: Sequence[PlannedRequest], options: ClientOptions, together: bool
) -> list[SentRequest]:
    """Send probes all at once or one after the other; BenchError if one fails."""
    source = Workload("probe", options.seed, 1.0, "probe", tuple(requests))
    tally = Tally(len(requests))
    pending = [
        session.send(r, source.prompt_ids(r, options.vocab_size), tally, lambda: None)
        for r in requests
    ]
    results = list(await asyncio.gather(*pending)) if together else [await p for p in pending]
    broken = next((r for r in results if r.error), None)
    if broken is not None:
        raise BenchError("--base-url", f"a warm-up request failed: {broken.error}")
    return results


def _warmup_lengths(workload: Workload, count: int) -> list[tuple[int, int]]:
    """Lengths over the range of the workload's, with the longest prompt and short answers."""
    by_length = sorted(workload.requests, key=lambda r: -r.prompt_tokens)
    step = max(1, len(by_length) // max(1, count))
    return [(r.prompt_tokens, min(8, r.output_tokens)) for r in by_length[::step][:count]]


async def _dispatch(
    session: _Session,
    workload: Workload,
    prompts: Sequence[list[int]],
    tally: Tally,
    notify: Callable[[], None],
) -> list[asyncio.Task[SentRequest]]:
    """Start each request at its planned time."""
    tasks = []
    for request, prompt in zip(workload.requests, prompts, strict=True):
        delay_s = request.at_s - session.now_s()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        tasks.append(asyncio.create_task(session.send(request, prompt, tally, notify)))
        notify()
    return tasks


async def _drain(tasks: Sequence[asyncio.Task[SentRequest]], drain_s: float) -> list[SentRequest]:
    """Wait for the answers; cut off requests that are open after ``drain_s``."""
    _, late = await asyncio.wait(tasks, timeout=drain_s)
    for task in late:
        task.cancel()
    return list(await asyncio.gather(*tasks))


def run_server(
    target: ServerTarget,
    workload: Workload,
    options: ClientOptions | None = None,
    on_progress: Callable[[Tally], None] | None = None,
) -> ServerRun:
    """Send the workload to one server, after a warm-up that is not counted.

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

    async def work(client: openai.AsyncOpenAI, info: ServerInfo) -> ServerRun:
        _check_context(workload, info)
        prompts = [workload.prompt_ids(r, options.vocab_size) for r in workload.requests]
        session = _Session(client, target, info.model, options)
        warmup = probe_requests(_warmup_lengths(workload, options.warmup_requests), "warmup")
        await _send_probes(session, warmup, options, together=True)
        tally = Tally(len(workload.requests))
        session.start_s = time.perf_counter()
        tasks = await _dispatch(
            session, workload, prompts, tally, lambda: on_progress(tally) if on_progress else None
        )
        results = await _drain(tasks, options.drain_s)
        return ServerRun(target, info, session.now_s(), tuple(results))

    return asyncio.run(with_client(target, work))


def _check_context(workload: Workload, info: ServerInfo) -> None:
    longest = max(r.prompt_tokens + r.output_tokens for r in workload.requests)
    if info.max_model_len is not None and longest > info.max_model_len:
        raise BenchError(
            "--max-context",
            f"the workload has a request of {longest} tokens; {info.model} takes at most "
            f"{info.max_model_len}",
        )


def measure_zero_load(
    target: ServerTarget,
    max_context: int,
    options: ClientOptions | None = None,
    repeats: int = 5,
    output_tokens: int = 31,
) -> ZeroLoad:
    """Latency of a lone request, without an SLO.

    It is the median TTFT by prompt length (16, 64, ... ``max_context``), and the median TPOT over
    answers of ``output_tokens``.

    Raises:
        BenchError: it cannot be measured.
    """
    options = options or ClientOptions()
    top = max(1, max_context - max(output_tokens, 2))
    lengths = sorted({min(n, top) for n in (16, 64, 256, 1024, 4096, 16384, top)})

    async def work(client: openai.AsyncOpenAI, info: ServerInfo) -> ZeroLoad:
        session = _Session(client, target, info.model, options)
        warmup = probe_requests([(n, 2) for n in lengths], "zero-warmup")
        await _send_probes(session, warmup, options, together=False)
        first = [(n, 1) for n in lengths for _ in range(repeats)]
        probes = probe_requests(first, "zero-ttft")
        sent = await _send_probes(session, probes, options, together=False)
        ttfts = [r.record.ttft_s or 0.0 for r in sent]
        medians = [
            float(np.median(ttfts[i * repeats : (i + 1) * repeats])) for i in range(len(lengths))
        ]
        rising = np.maximum.accumulate(medians)  # a longer prompt is only faster by noise
        decodes = probe_requests([(lengths[0], output_tokens)] * repeats, "zero-tpot")
        sent = await _send_probes(session, decodes, options, together=False)
        tpots = [mean_tpot_s(r.record.token_times_s) or 0.0 for r in sent]
        points = tuple((n, float(s)) for n, s in zip(lengths, rising, strict=True))
        return ZeroLoad(points, float(np.median(tpots)), target.name)

    return asyncio.run(with_client(target, work))


def measure_step(
    target: ServerTarget,
    together: int = 1,
    options: ClientOptions | None = None,
    repeats: int = 3,
    output_tokens: int = 31,
) -> float:
    """Seconds of a step in which ``together`` requests decode: the median of their TPOTs.

    No SLO is sent.

    Raises:
        BenchError: it cannot be measured.
    """
    options = options or ClientOptions()

    async def work(client: openai.AsyncOpenAI, info: ServerInfo) -> float:
        session = _Session(client, target, info.model, options)
        tpots: list[float] = []
        for repeat in range(repeats):
            probes = probe_requests([(16, output_tokens)] * together, f"step-{repeat}")
            sent = await _send_probes(session, probes, options, together=True)
            tpots += [mean_tpot_s(r.record.token_times_s) or 0.0 for r in sent]
        return float(np.median(tpots))

    return asyncio.run(with_client(target, work))
