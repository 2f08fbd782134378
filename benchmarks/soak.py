# SPDX-License-Identifier: Apache-2.0
"""Half an hour at 150% of capacity, with clients that stall, leave, cancel and send garbage.

A real ``vllm-slo serve`` with a twin of the built-in model, so that capacity is finite. Calibration
finds capacity (answers per second, closed loop) and from what it saw the objectives of the classes;
then requests arrive at 1.5 times that rate (Poisson, open loop), whatever has been answered. Who
has no token after ``--patience`` seconds leaves. Afterwards the server idles. Judged: nothing leaks
(KV blocks, memory, threads, files), each request is accounted for by its client and by the server,
promises are kept, the server is well and says what it said before. Calibration and clients share
the machine with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
from common import markdown, write_result
from prometheus_client.parser import text_string_to_metric_families
from soak_clients import KINDS, LONGEST_S, Clients, Objectives
from soak_report import (
    OUTCOMES,
    Check,
    Counters,
    Process,
    Sample,
    check_leaks,
    check_promises,
    check_requests,
    check_rows,
    check_service,
    outcome_rows,
    sample_rows,
)

from vllm_slo import tiny
from vllm_slo.tiny.twin import write_costlier_twin
from vllm_slo.wire.ports import free_port

START_S: Final = 300.0
STOP_S: Final = 60.0
SETTLE_S: Final = 15.0
SEATS: Final = 16
MODEL: Final = "soak"
ROLES: Final = ("api", "engine")
CONFIG: Final = """\
classes:
  chat: {ttft_ms: 60000, tpot_ms: 10000}
  code: {ttft_ms: 60000, tpot_ms: 10000, value: 2}
  strict: {ttft_ms: 60000, tpot_ms: 10000, on_unattainable: decline}
  bulk: {tier: best_effort}
ageing_s: 10
"""
FACTORS: Final = {"chat": (12.0, 1.5), "code": (24.0, 3.0), "strict": (8.0, 1.3)}
"""Class -> TTFT over that of a request alone, TPOT over that of a full engine."""
FLAGS: Final = (
    *("--max-model-len", "1024", "--max-num-seqs", str(SEATS), "--served-model-name", MODEL),
    *("--enforce-eager", "--gpu-memory-utilization", "0.3", "--host", "127.0.0.1"),
    *("--uvicorn-log-level", "warning", "--block-size", "32"),
)
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
GREEDY: Final = {"model": MODEL, "prompt": "def read(path):\n", "max_tokens": 24, "temperature": 0}


def say(text: str) -> None:
    """Progress, with the time of day."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


class Server:
    """A server in processes of its own.

    Args:
        url: of it, without a path.
        process: the API server.
        scratch: its folder for temporary files.
        log: what it writes.
    """

    def __init__(
        self, url: str, process: subprocess.Popen[bytes], scratch: Path, log: Path
    ) -> None:
        self.url = url
        self.process = process
        self.log = log
        self.scratch = scratch
        self._known: dict[str, psutil.Process] = {}

    def find_processes(self) -> None:
        """Look for the API server and the engine."""
        root = psutil.Process(self.process.pid)
        engine = next(p for p in root.children(recursive=True) if "EngineCore" in p.name())
        self._known = dict(zip(ROLES, (root, engine), strict=True))

    def is_healthy(self) -> bool:
        """Whether ``/health`` answers 200."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def greedy(self) -> str:
        """The answer to one question."""
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(GREEDY).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def metrics(self) -> list[Any]:
        """Samples of a scrape."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return [s for family in text_string_to_metric_families(text) for s in family.samples]

    def sample(self, begun_s: float, *, loaded: bool) -> Sample:
        """The current sample."""
        found = {}
        for role, process in self._known.items():
            with suppress(psutil.Error), process.oneshot():
                rss_mib = process.memory_info().rss / 2**20
                found[role] = Process(rss_mib, process.num_threads(), process.num_fds())
        healthy = self.is_healthy()
        samples = self.metrics() if healthy else []
        files = [path for path in self.scratch.rglob("*") if path.is_file()]
        return Sample(
            time.monotonic() - begun_s,
            loaded,
            found,
            total(samples, "vllm:kv_cache_usage_perc"),
            total(samples, "vllm:num_requests_running"),
            total(samples, "vllm:num_requests_waiting"),
            len(files),
            sum(size_of(path) for path in files) / 2**20,
            len(shared_files()),
            healthy,
        )

    def counters(self) -> Counters:
        """The server's counters so far."""
        found = self.metrics()
        ended, outcomes = "vllm_slo:requests_finished_total", "vllm_slo:admissions_total"
        return Counters(
            sum(total(found, "vllm:request_success_total", finished_reason=reason)
                for reason in ("stop", "length")),
            total(found, ended),
            total(found, ended, promised="true"),
            total(found, ended, promised="true", attained="true"),
            total(found, outcomes, outcome="declined"),
            total(found, outcomes, outcome="promised")
            + total(found, outcomes, outcome="promised_later")
            - total(found, outcomes, outcome="moved"),
            total(found, "vllm_slo:promises_broken_total"),
        )  # fmt: skip

    def tracebacks(self) -> list[str]:
        """Tracebacks in the log, each with lines before and after it."""
        text = self.log.read_text(errors="replace")
        found = [match.start() for match in re.finditer(r"Traceback \(most recent", text)]
        return [text[max(at - 300, 0) : at + 6_000] for at in found]

    def stop(self) -> bool:
        """Stop the server; whether it ended on SIGTERM and left nothing."""
        if self.process.poll() is not None:
            return False
        family = [*psutil.Process(self.process.pid).children(recursive=True)]
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            say("it does not end: killed")
        _, left = psutil.wait_procs(family, timeout=10)
        ended = self.process.poll() is not None and not left
        for process in left:
            process.kill()
        self.process.kill()
        self.process.wait()
        if left:
            say(f"left: {[process.name() for process in left]}")
        if files := [str(p) for p in self.scratch.glob("vllm-slo*")]:
            say(f"left: {files}")
        return ended and not files


def total(samples: Sequence[Any], series: str, **labels: str) -> float:
    """Sum over the samples of ``series`` that have these labels."""
    wanted = labels.items()
    return float(sum(s.value for s in samples if s.name == series and wanted <= s.labels.items()))


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if it has just been removed."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def shared_files() -> list[Path]:
    """Of this user in shared memory."""
    folder = Path("/dev/shm")
    with suppress(OSError):
        return [path for path in folder.iterdir() if path.stat().st_uid == os.getuid()]
    return []


@contextmanager
def serving(model: Path, flags: Sequence[str]) -> Iterator[Server]:
    """A server, healthy; stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        scratch = Path(folder) / "tmp"
        scratch.mkdir()
        config = Path(folder) / "slo.yaml"
        config.write_text(CONFIG)
        port = free_port()
        command = Path(sys.executable).with_name("vllm-slo")
        log = Path(folder) / "server.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [str(command), "serve", str(model), "--port", str(port),
                 "--slo-config", str(config), *FLAGS, *flags],
                stdout=out, stderr=subprocess.STDOUT, cwd=folder,
                env={**os.environ, **ENVIRONMENT, "TMPDIR": str(scratch)},
            )  # fmt: skip
        server = Server(f"http://127.0.0.1:{port}", process, scratch, log)
        try:
            end_s = time.monotonic() + START_S
            while not server.is_healthy():
                if process.poll() is not None or time.monotonic() > end_s:
                    sys.stderr.write(log.read_text(errors="replace")[-4000:])
                    raise SystemExit("the server did not start")
                time.sleep(0.5)
            server.find_processes()
            yield server
        finally:
            server.stop()


@dataclass(frozen=True, slots=True)
class Calibration:
    """The capacity and latency of the server.

    Attributes:
        rate: answers per second.
        ttft_s: of a request alone.
        tpot_s: of a full engine.
    """

    rate: float
    ttft_s: float
    tpot_s: float

    def objectives(self) -> Objectives:
        """Of each class."""
        return Objectives({
            name: (max(round(ttft * self.ttft_s * 1e3), 500), round(tpot * self.tpot_s * 1e3, 1))
            for name, (ttft, tpot) in FACTORS.items()
        })  # fmt: skip


async def calibrate(clients: Clients, seconds: float) -> Calibration:
    """Ask alone, then with a full engine; then all kinds of clients come once, for what the server
    makes at first."""
    import aiohttp

    ended: list[tuple[float, int]] = []
    gaps: list[float] = []

    async def ask(session: aiohttp.ClientSession) -> float:
        body = clients.body(None)
        begun_s = last_s = time.monotonic()
        first_s = 0.0
        async with session.post(f"{clients.url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    now_s = time.monotonic()
                    first_s = first_s or now_s - begun_s
                    last_s = now_s
        if body["max_tokens"] > 1:
            gaps.append((last_s - begun_s - first_s) / (body["max_tokens"] - 1))
        ended.append((last_s, body["max_tokens"]))
        return first_s

    async def keep_asking(session: aiohttp.ClientSession, until_s: float) -> None:
        while time.monotonic() < until_s:
            await ask(session)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        alone = [await ask(session) for _ in range(8)]
        begun_s = time.monotonic()
        gaps.clear()
        async with asyncio.timeout(seconds + LONGEST_S):
            await asyncio.gather(
                *(keep_asking(session, begun_s + seconds) for _ in range(SEATS + 4))
            )
            await asyncio.gather(*(clients.one(kind) for kind in KINDS for _ in range(3)))
    clients.forget()
    begun_s += 0.2 * seconds
    counted = [at_s for at_s, _ in ended if begun_s <= at_s < begun_s + 0.8 * seconds]
    return Calibration(len(counted) / (0.8 * seconds), median(alone), median(gaps))


async def load(clients: Clients, rate: float, seconds: float, rng: random.Random) -> None:
    """Send at ``rate`` requests per second for so long, and wait until all have ended."""
    per_client = sum(
        weight * (3 if kind == "session" else 1) for kind, weight in KINDS.items()
    ) / sum(KINDS.values())
    begun_s = due_s = time.monotonic()
    tasks: set[asyncio.Task[None]] = set()
    while True:
        due_s += rng.expovariate(rate / per_client)
        if due_s > begun_s + seconds:
            break
        await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
        (kind,) = rng.choices([*KINDS], [*KINDS.values()])
        task = asyncio.create_task(clients.one(kind))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    if tasks:
        await asyncio.wait(tasks, timeout=3 * LONGEST_S)
    for task in tasks:
        task.cancel()


class Watch:
    """Samples a server every few seconds during the block."""

    def __init__(self, server: Server, every_s: float) -> None:
        self.server = server
        self.every_s = every_s
        self.begun_s = time.monotonic()
        self.samples: list[Sample] = []

    async def run(self, loaded: asyncio.Event) -> None:
        """Until cancelled."""
        while True:
            sample = await asyncio.to_thread(
                self.server.sample, self.begun_s, loaded=loaded.is_set()
            )
            self.samples.append(sample)
            await asyncio.sleep(self.every_s)

    async def idle(self) -> Sample:
        """Wait until nothing runs, but not for ever, and let it settle."""
        end_s = time.monotonic() + 120
        while time.monotonic() < end_s:
            sample = await asyncio.to_thread(self.server.sample, self.begun_s, loaded=False)
            if not sample.running + sample.waiting:
                break
            await asyncio.sleep(1)
        await asyncio.sleep(SETTLE_S)
        return await asyncio.to_thread(self.server.sample, self.begun_s, loaded=False)


@dataclass(frozen=True, slots=True)
class Run:
    """The record of a run."""

    calibration: Calibration
    clients: Clients
    before: Sample
    samples: list[Sample]
    after: Sample
    counters: Counters
    same_answer: bool


async def soak(server: Server, args: argparse.Namespace) -> Run:
    """Calibrate, load, idle."""
    clients = Clients(server.url, MODEL, args.seed, args.patience)
    expected = await asyncio.to_thread(server.greedy)
    calibration = await calibrate(clients, args.calibrate)
    clients.objectives = calibration.objectives()
    say(f"capacity {calibration.rate:.2f}/s; objectives, ms: {clients.objectives.of}")
    watch = Watch(server, args.every)
    before = await watch.idle()
    counted = await asyncio.to_thread(server.counters)
    watch.begun_s = time.monotonic()
    loaded = asyncio.Event()
    loaded.set()
    watching = asyncio.create_task(watch.run(loaded))
    seconds, rate = args.minutes * 60, args.load * calibration.rate
    sending = asyncio.create_task(load(clients, rate, seconds, random.Random(args.seed)))
    await asyncio.wait([sending], timeout=seconds)
    loaded.clear()
    say(f"{clients.sent} requests sent, {len(clients.seen)} have ended; no more are sent")
    await sending
    after = await watch.idle()
    watching.cancel()
    same = await asyncio.to_thread(server.greedy) == expected
    now = asdict(await asyncio.to_thread(server.counters))
    # The one question above is the server's, too.
    now["finished"] -= 1
    done = Counters(**{name: now[name] - start for name, start in asdict(counted).items()})
    return Run(calibration, clients, before, watch.samples, after, done, same)


def judge(run: Run, warm_up_s: float, *, stopped: bool, tracebacks: Sequence[str]) -> list[Check]:
    """All checks of a run."""
    clients = run.clients
    unheard = clients.sent - len(clients.seen)
    return [
        *check_requests(clients.seen, run.counters),
        Check("requests without an outcome", str(unheard), "0", not unheard),
        Check("tracebacks in the server's log", str(len(tracebacks)), "0", not tracebacks),
        *check_promises(clients.seen, run.counters),
        *check_leaks(run.before, run.samples, run.after, warm_up_s),
        *check_service([*run.samples, run.after], same_answer=run.same_answer, stopped=stopped),
    ]


def write(run: Run, checks: Sequence[Check], args: argparse.Namespace) -> None:
    """The result file."""
    found, counters = run.calibration, run.counters
    said = [
        f"{args.minutes:g} minutes at {args.load:.0%} of {found.rate:.2f} answers per second; "
        f"{len(run.clients.seen)} requests. Alone, TTFT {found.ttft_s * 1e3:.0f} ms; full engine, "
        f"TPOT {found.tpot_s * 1e3:.0f} ms. Objectives (TTFT / TPOT, ms): "
        + ", ".join(f"{n} {a:g} / {b:g}" for n, (a, b) in run.clients.objectives.of.items())
        + ".",
        f"Promises made {counters.promises:.0f}, withdrawn {counters.broken:.0f}.",
    ]
    tables = [
        markdown(["check", "measured", "allowed", "verdict"], check_rows(checks)),
        "Requests by kind of client and outcome; TTFT is the median, seconds:",
        markdown(["client", "requests", *OUTCOMES, "TTFT"], outcome_rows(run.clients.seen)),
        "The server over time (seconds; resident memory, MiB):",
        markdown(
            ["at", *(f"{role} {what}" for what in ("MiB", "threads", "files") for role in ROLES),
             "KV", "running", "waiting", "temp files"],
            sample_rows([*run.samples, run.after], ROLES),
        ),
    ]  # fmt: skip
    if run.clients.errors:
        lines = "\n".join(f"- `{error}`" for error in run.clients.errors[:10])
        tables.append(f"What went wrong, the first of {len(run.clients.errors)}:\n\n{lines}")
    failed = [check.name for check in checks if not check.holds]
    verdict = f"fails: {', '.join(failed)}" if failed else "everything holds"
    text = f"{__doc__}\n\n{' '.join(said)}\n\n{len(checks)} checks; {verdict}."
    write_result("soak", text, "\n\n".join(tables))


def main() -> int:
    """Run, check, write; returns 1 if a check failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="under load")
    parser.add_argument("--load", type=float, default=1.5, help="of capacity")
    parser.add_argument("--parameters", type=float, default=100e6, help="of the model")
    parser.add_argument("--calibrate", type=float, default=40.0, help="seconds")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds, until a first token")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--warm-up", type=float, help="seconds that do not count; a fifth of all")
    parser.add_argument("--samples", type=Path, help="JSON file for all samples")
    parser.add_argument("--seed", type=int, default=1)
    args, flags = parser.parse_known_args()
    warm_up_s = args.minutes * 12 if args.warm_up is None else args.warm_up
    with tempfile.TemporaryDirectory(prefix="soak-model-") as folder:
        model = write_costlier_twin(
            tiny.path("target"), Path(folder) / "model", parameters=args.parameters
        )
        with serving(model, flags) as server:
            run = asyncio.run(soak(server, args))
            tracebacks = server.tracebacks()  # vLLM writes one when it stops
            stopped = server.stop()
            checks = judge(run, warm_up_s, stopped=stopped, tracebacks=tracebacks)
    sys.stderr.write("\n\n".join(tracebacks))
    if args.samples:
        args.samples.write_text(json.dumps([asdict(s) for s in [*run.samples, run.after]]))
    write(run, checks, args)
    return int(not all(check.holds for check in checks))


if __name__ == "__main__":
    sys.exit(main())
