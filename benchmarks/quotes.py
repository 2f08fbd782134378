# SPDX-License-Identifier: Apache-2.0
"""Whether quotes come true, and what one costs.

A real server (`vllm-slo serve`, the built-in model as a costlier twin on one core) that is offered
more than it can process: Poisson arrivals of four classes, which leave where they are not promised.
Beside them come requests that draw prompt, TTFT and TPOT from tight and loose ones; each first asks
`POST /v1/slo/quote`, and is sent at once whatever the answer. A "no" is then served best effort.

Then the same arrivals once more, and every request that was told "no" is promised all the same, as
if admission had taken it (`forced_promises.py`). Such a "no" is right if the request then misses
its objectives, or if a promise that admission did give is missed while it may run, which is until
its objectives have passed. How often such a promise is missed beside a "no" that is not forced in,
the first part tells. Last, one such request at a time, nobody else being forced.

What a quote costs the engine: vLLM's scheduler, loaded, without a model.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import asyncio
import contextlib
import gc
import itertools
import math
import random
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import numpy as np
from common import markdown, write_result
from rich.console import Console

from vllm_slo.bench import demo_load, demo_servers
from vllm_slo.bench.client import ClientOptions
from vllm_slo.bench.endpoint import ServerTarget
from vllm_slo.bench.planned import Workload
from vllm_slo.bench.probes import measure_zero_load
from vllm_slo.bench.workload import WorkloadOptions, synthetic
from vllm_slo.bench.zero_load import ZeroLoad

FORCED: Final = "forced"
PARAMETERS: Final = 30e6
PROMPTS: Final = (32, 128, 512)
TTFTS: Final = (3.0, 8.0, 25.0)
"""Multiples of the TTFT of a lone request with that prompt."""
TPOTS: Final = (2.5, 4.0, 8.0)
"""Multiples of a lone request's TPOT."""
ANSWER: Final = 24
WARM_UP_S: Final = 20.0
ASK_AGAIN_S: Final = 0.1
PATIENCE_S: Final = 15.0
"""Time to wait for the last requests of a part."""
CLASSES: Final = "classes: {chat: {}, code: {}, summary: {}, batch: {}}\n"


@dataclass(frozen=True)
class Load:
    """How much there is. Loads are offered tokens over what the machine can process, see
    `demo_load.rate_at`.

    Attributes:
        asked: requests that ask before they are sent.
        asking: load of these.
        background: load of the others.
        again: how many of those asked come once more, to be forced in.
        alone_s: for forcing in one at a time.
    """

    asked: int = 500
    asking: float = 0.6
    background: float = 0.9
    again: int = 500
    alone_s: float = 40.0

    def rate(self, zero: ZeroLoad) -> float:
        """Requests per second that ask for a quote."""
        low, high = PROMPTS[0], PROMPTS[-1]
        token_s = (zero.ttft_s(high) - zero.ttft_s(low)) / (high - low)
        mean = sum(PROMPTS) / len(PROMPTS) + ANSWER
        return float(np.clip(self.asking / (token_s * mean), 2.5, 12.0))


class Server(demo_servers.Candidate):
    """The server, with the scheduler that can be made to promise."""

    def arguments(self, out: Path) -> list[str]:
        """Further arguments; the configuration is written into ``out``."""
        path = out / "classes.yaml"
        path.write_text(CLASSES)
        return [f"--slo-config={path}", "--scheduler-cls=forced_promises.ForcedPromises"]


@dataclass(slots=True)
class Served:
    """A request that was sent at ``start_s`` (monotonic) and answered at ``end_s``.

    Attributes:
        until_s: by when it ends if its objectives are kept.
        report: the server's; None while there is none.
    """

    start_s: float
    until_s: float
    forced: bool
    end_s: float = math.inf
    report: dict[str, Any] | None = None

    @property
    def promised(self) -> bool:
        """Whether the request was promised."""
        return bool(self.report and self.report["promised"])

    @property
    def attained(self) -> bool:
        """Whether the request kept its objectives; without an answer it did not."""
        return bool(self.report and self.report["attained"])


class Answered(NamedTuple):
    """A quote, how long it took to come, and the request that was sent on it."""

    quote: dict[str, Any]
    took_s: float
    served: Served


@dataclass(frozen=True)
class Part:
    """What was asked, and everything that was served meanwhile."""

    answered: list[Answered]
    served: list[Served]
    asked_again: int

    def told(self, promised: bool) -> list[Answered]:
        """Requests whose quote was this answer."""
        return [one for one in self.answered if one.quote["promised"] is promised]

    @property
    def given(self) -> list[Served]:
        """Promises that admission gave."""
        return [one for one in self.served if one.promised and not one.forced]

    def others_missed(self, one: Served) -> bool:
        """Whether a promise that admission gave was missed while ``one`` may have run."""
        return any(
            other is not one
            and not other.attained
            and other.start_s < one.until_s
            and other.end_s > one.start_s
            for other in self.given
        )


@dataclass
class Client:
    """Sends requests and keeps their results."""

    session: aiohttp.ClientSession
    url: str
    zero: ZeroLoad
    rng: random.Random
    served: list[Served] = field(default_factory=list)
    asked_again: int = 0

    def body(self, prompt: int, answer: int, slo: dict[str, Any] | None) -> dict[str, Any]:
        """A completion of exactly ``answer`` tokens."""
        ids = [self.rng.randrange(300, demo_load.VOCABULARY) for _ in range(prompt)]
        body = {"model": "tiny", "prompt": ids, "max_tokens": answer, "ignore_eos": True}
        return {**body, "temperature": 0, **({"slo": slo} if slo else {})}

    def draws(self, rng: random.Random) -> Iterable[dict[str, Any]]:
        """An endless series of bodies of requests that ask."""
        while True:
            prompt = rng.choice(PROMPTS)
            slo = {
                "ttft_ms": 1e3 * rng.choice(TTFTS) * self.zero.ttft_s(prompt),
                "tpot_ms": 1e3 * rng.choice(TPOTS) * self.zero.tpot_s,
            }
            yield self.body(prompt, ANSWER, slo)

    async def quote(self, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """What it would be promised, and seconds until that was known; a server that is asked by
        too many at once is asked again."""
        begun_s = time.monotonic()
        while True:
            status, said = await self._post("/v1/slo/quote", body)
            if status == 200:
                return said, time.monotonic() - begun_s
            self.asked_again += 1
            await asyncio.sleep(ASK_AGAIN_S)

    def begin(self, body: dict[str, Any], *, forced: bool = False) -> Served:
        """Record that a request is sent now."""
        slo, now_s = body.get("slo") or {}, time.monotonic()
        allowed_ms = slo.get("ttft_ms", 0.0) + slo.get("tpot_ms", 0.0) * body["max_tokens"]
        one = Served(now_s, now_s + allowed_ms / 1e3, forced)
        self.served.append(one)
        return one

    async def send(self, body: dict[str, Any], one: Served) -> None:
        """Send a request to be served."""
        if one.forced:
            body = {**body, "slo": {**body["slo"], "tenant": FORCED}}
        status, answer = await self._post("/v1/completions", body)
        one.end_s = time.monotonic()
        one.report = answer.get("slo") if status == 200 else None

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with self.session.post(f"{self.url}{path}", json=body) as answer:
            said: dict[str, Any] = await answer.json()
            if answer.status not in (200, 429):
                raise SystemExit(f"{path}: {answer.status}: {said}")
            return answer.status, said

    async def replay(self, workload: Workload) -> None:
        """Send a workload at its times; who is not promised its objectives leaves."""
        begun_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for one in workload.requests:
                await asyncio.sleep(max(begun_s + one.at_s - time.monotonic(), 0.0))
                slo = one.slo_body()
                if slo is not None:
                    slo |= {"class": one.slo_class, "on_unattainable": "decline"}
                body = self.body(one.prompt_tokens, one.output_tokens, slo)
                group.create_task(self.send(body, self.begin(body)))

    async def ask_and_send(self, count: int, rate: float, *, force: bool) -> list[Answered]:
        """Poisson arrivals of so many requests that ask first; ``force``: a "no" is promised."""
        rng, answered = random.Random(23), list[Answered]()

        async def one(body: dict[str, Any]) -> None:
            quote, took_s = await self.quote(body)
            sent = self.begin(body, forced=force and not quote["promised"])
            answered.append(Answered(quote, took_s, sent))
            await self.send(body, sent)

        tasks = []
        for body in itertools.islice(self.draws(rng), count):
            await asyncio.sleep(rng.expovariate(rate))
            tasks.append(asyncio.create_task(one(body)))
        await _patiently(tasks)
        return answered

    async def force_alone(self, limit_s: float) -> list[Answered]:
        """Ask until the answer is "no", force that request's promise, and repeat."""
        rng, answered, until_s = random.Random(29), list[Answered](), time.monotonic() + limit_s
        for body in self.draws(rng):
            if time.monotonic() > until_s:
                break
            quote, took_s = await self.quote(body)
            if quote["promised"]:
                continue
            one = self.begin(body, forced=True)
            answered.append(Answered(quote, took_s, one))
            allowed_s = one.until_s - time.monotonic() + 1.0
            with contextlib.suppress(TimeoutError):  # its promise is broken, and it waits
                await asyncio.wait_for(self.send(body, one), allowed_s)
            await asyncio.sleep(max(0.2, one.until_s - time.monotonic()))
        return answered


async def _patiently(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait for them, but not for ever: what has no answer then has missed its objectives."""
    done, late = await asyncio.wait(tasks, timeout=PATIENCE_S)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in done:
        task.result()


class Measured(NamedTuple):
    """All measurements of the server."""

    zero: ZeroLoad
    rates: tuple[float, float]
    sent: Part
    forced: Part
    alone: Part


def measure(load: Load) -> Measured:
    """Start the server and run the three parts."""
    console = Console(stderr=True)
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        model = demo_load.twin(PARAMETERS, console)
        with demo_servers.server(
            Server("server", demo_servers.OURS), model, Path(folder), console
        ) as url:
            options = ClientOptions(vocab_size=demo_load.VOCABULARY, ready_requests=8)
            zero = measure_zero_load(ServerTarget("server", url), demo_servers.MAX_CONTEXT, options)
            with demo_servers.own_core():
                return asyncio.run(_measure(url, load, zero, console))


async def _measure(url: str, load: Load, zero: ZeroLoad, console: Console) -> Measured:
    rate, others = load.rate(zero), demo_load.rate_at(load.background, zero)
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def part(
            what: str, seed: int, asking: Callable[[Client], Coroutine[Any, Any, list[Answered]]]
        ) -> Part:
            console.print(what)
            gc.collect()
            client = Client(session, url, zero, random.Random(seed))
            options = WorkloadOptions(
                rate=others,
                duration_s=600.0,
                seed=seed,
                classes=demo_load.CLASSES,
                max_context=demo_servers.MAX_CONTEXT,
            )
            background = asyncio.create_task(client.replay(synthetic(options, zero)))
            answered = await asking(client)
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
            return Part(answered, client.served, client.asked_again)

        warm = int(WARM_UP_S * rate)
        await part("warming up", 1, lambda one: one.ask_and_send(warm, rate, force=False))
        return Measured(
            zero,
            (rate, others),
            await part("as told", 2, lambda one: one.ask_and_send(load.asked, rate, force=False)),
            await part("forced in", 2, lambda one: one.ask_and_send(load.again, rate, force=True)),
            await part("one at a time", 3, lambda one: one.force_alone(load.alone_s)),
        )


# --- the engine's own cost ------------------------------------------------------------------------


def loaded(running: int, rng: random.Random) -> Any:
    """A virtual engine with ``running`` promises that decode and 16 requests that wait for one in
    vain. What it costs is the engine's thread alone: steps have no model."""
    from vllm_slo import SLO, tiny
    from vllm_slo.core.step_time.model import StepTimeModel
    from vllm_slo.engine.scheduler import Scheduler
    from vllm_slo.sim.harness import EngineShape, VirtualEngine

    model = StepTimeModel(((0.0, 0.0, 0.015), (3e-5, 0.0, 0.008)), kv_s=1e-9, max_tokens=8192)
    engine = VirtualEngine(
        Scheduler,
        tiny.path("target"),
        model.predict_shape_s,
        EngineShape(200_000, 16, running + 64, 8192, 4096),
        believed=model,
    )
    tiers = [SLO(ttft_ms=ms, tpot_ms=tpot) for ms, tpot in ((2e3, 30), (4e3, 50), (8e3, 100))]
    parts = engine.scheduler.parts
    for length in range(20, 3500, 50):
        parts.workload.lengths.observe("custom", length)
    for i in range(running):
        engine.add(f"r{i}", 64, 3500, tiers[i % len(tiers)], max_tokens=3500)
    while sum(one.promised and one.decodes for one in parts.tracker.live.values()) < running:
        engine.step()
    for i in range(16):
        engine.add(f"w{i}", rng.randint(50, 3000), 50, SLO(ttft_ms=5e4, tpot_ms=14.5))
    engine.step()
    gc.collect()
    gc.freeze()
    return engine


def ask(engine: Any, name: str, rng: random.Random) -> None:
    """Add a quote of drawn objectives."""
    from vllm_slo import SLO

    slo = SLO(ttft_ms=rng.choice((60, 300, 2000)), tpot_ms=rng.choice((14.9, 16, 25, 60, 200)))
    engine.add(name, rng.randint(20, 2000), 100, slo, quote=True)


def cost(running: int, quotes: int) -> list[float]:
    """Milliseconds of the engine's thread for each of so many quotes, one at a time."""
    rng = random.Random(3)
    engine = loaded(running, rng)
    parts, took_ms = engine.scheduler.parts, []
    for i in range(quotes):
        ask(engine, f"q{i}", rng)
        start_s = parts.clock.next_start_s(parts.clock.tick())
        begun_s = time.thread_time()
        ((request, _),) = parts.quotes.take(start_s)
        took_ms.append((time.thread_time() - begun_s) * 1e3)
        engine.abort(request.request_id)
    return took_ms


# --- tables ---------------------------------------------------------------------------------------


def percent(part: float, whole: float) -> str:
    """A share with its numbers."""
    return f"{part / whole:.1%} ({part:g} of {whole:g})" if whole else "-"


def outcomes(part: Part, answered: Sequence[Answered]) -> tuple[int, int]:
    """How many missed their objectives, and how many kept them while another promise was missed."""
    itself = [one for one in answered if not one.served.attained]
    kept = [one for one in answered if one.served.attained]
    return len(itself), sum(part.others_missed(one.served) for one in kept)


def agreement_table(found: Measured) -> str:
    """Quotes compared with the results of the requests sent after them."""
    yes, no = found.sent.told(True), found.sent.told(False)
    promised = sum(one.served.promised for one in yes)
    attained = sum(one.served.attained for one in yes)
    beside = sum(found.sent.others_missed(one.served) for one in no)
    rows = [
        ['"yes": promised when sent', percent(promised, len(yes)), ""],
        ['"yes": attained', percent(attained, len(yes)), ">= 95%"],
        ['"no", served best effort: missed', percent(outcomes(found.sent, no)[0], len(no)), ""],
        ["... a promise was missed beside it", percent(beside, len(no)), ""],
    ]
    for name, part, reach in (
        ('all "no" forced in', found.forced, ">= 90%"),
        ("one at a time", found.alone, ""),
    ):
        ones = part.told(False)
        itself, others = outcomes(part, ones)
        rows += [
            [f"{name}: right", percent(itself + others, len(ones)), reach],
            ["... missed its own objectives", percent(itself, len(ones)), ""],
            ["... kept them, a promise beside it was missed", percent(others, len(ones)), ""],
        ]
    for name, part in (("as told", found.sent), ('all "no" forced in', found.forced)):
        missed = sum(not one.attained for one in part.given)
        rows.append([f"promises of admission missed, {name}", percent(missed, len(part.given)), ""])
    return markdown(["", "share", "asked for"], rows)


def reasons_table(found: Measured) -> str:
    """The number of "no" by reason."""
    rows = []
    sent, forced = found.sent.told(False), found.forced.told(False)
    for reason in sorted({one.quote["reason"] for one in (*sent, *forced)}):
        served = [one for one in sent if one.quote["reason"] == reason]
        pushed = [one for one in forced if one.quote["reason"] == reason]
        missed, _ = outcomes(found.sent, served)
        right = sum(outcomes(found.forced, pushed))
        rows.append([reason, percent(missed, len(served)), percent(right, len(pushed))])
    return markdown(['"no" because of', "best effort: missed", "all forced in: right"], rows)


def cost_table(found: Measured, quotes: int) -> str:
    """The cost of a quote, for the client and for the engine."""
    rows = []
    for running in (64, 256):
        p50, p99 = np.percentile(cost(running, quotes), (50, 99))
        what = f"engine: {running} promises run, 16 requests wait"
        rows.append([what, f"{p50:.2f}", f"{p99:.2f}", "<= 2"])
    p50, p99 = np.percentile([one.took_s * 1e3 for one in found.sent.answered], (50, 99))
    rows.append(["client: from request to answer", f"{p50:.1f}", f"{p99:.1f}", ""])
    again = sum(part.asked_again for part in (found.sent, found.forced, found.alone))
    rows.append(["asked again, since 8 were asking: times", str(again), "", ""])
    return markdown(["one quote", "median ms", "p99 ms", "asked for"], rows)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shows that it runs; writes nothing")
    parser.add_argument("--note", default="", help="of the circumstances, for the result page")
    args = parser.parse_args()
    load = Load(60, again=60, alone_s=10.0) if args.quick else Load()
    found = measure(load)
    tables = [agreement_table(found), reasons_table(found), cost_table(found, 500)]
    zero = found.zero
    text = (
        f"A lone request: TTFT {zero.ttft_s(PROMPTS[0]) * 1e3:.0f} to "
        f"{zero.ttft_s(PROMPTS[-1]) * 1e3:.0f} ms, TPOT {zero.tpot_s * 1e3:.1f} ms "
        f"({PARAMETERS / 1e6:.0f}M parameters). Objectives asked about: TTFTs of "
        f"{', '.join(f'{n:g}' for n in TTFTS)} and TPOTs of {', '.join(f'{n:g}' for n in TPOTS)} "
        f"times that, prompts of {', '.join(map(str, PROMPTS))} tokens, answers of {ANSWER}. "
        f"{found.rates[0]:.1f} such requests a second beside {found.rates[1]:.1f} of the demo's "
        "classes. The server learns its step times during the warm-up. The engine's cost is time "
        f"of its thread. {args.note}"
    ).strip()
    if args.quick:
        print("\n\n".join([*tables, text]))
        return
    write_result("quotes", __doc__, "\n\n".join(tables), note=text)


if __name__ == "__main__":
    main()
