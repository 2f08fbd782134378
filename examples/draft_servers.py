# SPDX-License-Identifier: Apache-2.0
"""What draft servers bring, and that the death of one costs some speed and no answer.

Run ``python examples/draft_servers.py``; it needs ``pip install 'vllm-slo[cpu,ray,bench]'`` and
takes two to four minutes. It starts ``vllm-slo serve tiny`` with two draft servers, asks the same
prompts in four phases, kills a draft server in the third, waits until it is back, and stops all of
it. Exit status 1: a request failed, or an answer is not what it is without drafts.

What counts is tokens per step: of models this small a draft takes as long as what it saves.
"""

import asyncio
import operator
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

NAMES = "read", "write", "open", "close", "parse", "send", "find", "main"
PROMPTS = [f"def {name}(self, " for name in NAMES]
TOKENS, PATIENCE_S, BEGAN_S = 256, 600, time.monotonic()
# By itself so small a model drafts little; on busy processors its drafts take their time.
CONFIG = "speculation: {min_depth: 3, max_depth: 3, draft_deadline_ms: 200}\n"
COMMAND = [
    *(str(Path(sys.executable).with_name("vllm-slo")), "serve", "tiny", "--host", "127.0.0.1"),
    *("--draft-model", "tiny", "--draft-servers", "2", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "1024", "--max-num-seqs", "16", "--gpu-memory-utilization", "0.2"),
]
SHARED = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # by three engines
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **SHARED}
NO_DRAFTS, DRAFTS = {"speculation": "off"}, {"tier": "best_effort"}

Metrics = Counter[tuple[str, str]]
"""Sums of series, by name and the draft server that they are of, if any."""
Answers = Sequence[str | BaseException]

ACCEPTED = "vllm_slo:drafter_accepted_tokens_total"
SERVED = "vllm:generation_tokens_total", ""
STEPS = "vllm:iteration_tokens_total_count", ""
ENDED, COUNTED = ("vllm:request_success_total", ""), ("vllm_slo:requests_finished_total", "")
LINE = "{:<18}{:>10}{:>10}{:>11}{:>11}{:>8}{:>14}"
HEADER = "phase", "tokens/s", "per step", "server 0", "server 1", "failed", "same answers"


def say(text: str) -> None:
    """Tell what happens between the rows of the table."""
    print(f"# {time.monotonic() - BEGAN_S:3.0f} s: {text}", flush=True)


class Server:
    """A server with two draft servers beside it; all their files are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        config, self.log = folder / "slo.yaml", folder / "server.log"
        config.write_text(CONFIG)
        words, env = [*COMMAND, "--port", str(port), "--slo-config", str(config)], os.environ.copy()
        env.update(ENVIRONMENT, TMPDIR=str(folder))
        with self.log.open("wb") as log:  # in a group of its own: Ctrl-C is for this script
            self.process = psutil.Popen(words, stdout=log, stderr=log, env=env, process_group=0)
        self.url = f"http://127.0.0.1:{port}"
        self.client = AsyncOpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0)
        self.pieces = 0  # of answers, that have come

    def stop(self) -> None:
        """End the server, which ends its draft servers and Ray; kill what is left of them."""
        family = [self.process]
        with suppress(psutil.NoSuchProcess):
            family += self.process.children(recursive=True)
            self.process.terminate()
        for left in psutil.wait_procs(family, timeout=60)[1]:
            left.kill()

    def healthy(self) -> bool:
        """Whether it serves."""
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health").is_success
        return False

    def drafters(self) -> dict[str, int]:
        """The draft servers, and the process that each is or was last, as the log says."""
        told = re.findall(r"draft server (\S+): process (\d+)", self.log.read_text(errors="ignore"))
        return {name: int(pid) for name, pid in sorted(told, key=operator.itemgetter(0))}

    def metrics(self) -> Metrics:
        """The page of metrics."""
        sums: Metrics = Counter()
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                sums[sample.name, sample.labels.get("drafter", "")] += sample.value
        return sums

    def up(self) -> int:
        """How many draft servers are asked for drafts."""
        found = self.metrics()
        return sum(found["vllm_slo:drafter_up", name] for name in self.drafters())

    async def answer(self, prompt: str, slo: dict[str, str], tokens: int = TOKENS) -> str:
        """An answer, streamed."""
        text, body = "", {"slo": slo, "ignore_eos": True, "temperature": 0}
        async for chunk in await self.client.completions.create(
            model="tiny", prompt=prompt, max_tokens=tokens, stream=True, extra_body=body
        ):
            text += chunk.choices[0].text
            self.pieces += 1
        return text

    async def until(self, holds: Callable[[], bool], *, serving: bool = False) -> None:
        """Wait; ``serving`` asks for a little meanwhile: who comes or goes is noticed in steps, and
        an idle engine makes none."""
        while not holds():
            if self.process.poll() is not None:
                raise RuntimeError("the server ended")
            if serving:
                await self.answer("def", NO_DRAFTS, tokens=4)
            await asyncio.sleep(0.2)

    async def settled(self) -> Metrics:
        """The page once the scheduler's series, which come later, are of all that has ended."""
        await self.until(lambda: (page := self.metrics())[COUNTED] >= page[ENDED])
        return self.metrics()


async def kill(server: Server, name: str) -> Metrics:
    """Kill a draft server in the middle of the answers; the page of metrics once that is known."""
    pid, enough = server.drafters()[name], server.pieces + len(PROMPTS) * TOKENS // 8
    await server.until(lambda: server.pieces > enough)
    os.kill(pid, signal.SIGKILL)
    await server.until(lambda: not psutil.pid_exists(pid))
    say(f"killed {name}, process {pid}, in the middle of the answers")
    await server.until(lambda: server.up() < 2, serving=True)
    return server.metrics()


def drafted(name: str, gained: Metrics, now: Metrics) -> str:
    """How many drafts of a draft server were accepted, and whether it is down."""
    down = "" if now["vllm_slo:drafter_up", name] else "down, "
    return f"{down}{gained[ACCEPTED, name]:.0f}"


async def phase(
    server: Server, title: str, slo: dict[str, str], plain: Answers = (), victim: str = ""
) -> Answers:
    """Ask all prompts at once and print a row; the answers, or why there is none."""
    before, began_s = await server.settled(), time.monotonic()
    killing = asyncio.create_task(kill(server, victim)) if victim else None
    asked = [server.answer(prompt, slo) for prompt in PROMPTS]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    took_s = time.monotonic() - began_s
    failures = [answer for answer in answers if isinstance(answer, BaseException)]
    for failure in failures:
        say(f"a request failed: {failure!r}")
    after = await server.settled()
    if killing:
        alone = after - await killing
        left = [f"{alone[ACCEPTED, name]:.0f} of {name}" for name in server.drafters()]
        say(f"drafts accepted after that: {', '.join(left)}")
    gained = after - before
    same = sum(map(operator.eq, answers, plain))
    cells = [
        *(title, f"{gained[SERVED] / took_s:.0f}", f"{gained[SERVED] / gained[STEPS]:.1f}"),
        *(drafted(name, gained, after) for name in server.drafters()),
        *(len(failures), f"{same} of {len(plain)}" if plain else "-"),
    ]
    print(LINE.format(*cells), flush=True)
    return answers


async def play(server: Server) -> bool:
    """The four phases; whether every answer was what it is without drafts."""
    say("vllm-slo serve tiny --draft-model tiny --draft-servers 2 ...")
    await server.until(server.healthy)
    say("it serves; waiting for its draft servers")
    await server.until(lambda: server.up() == 2, serving=True)
    first, second = server.drafters()
    say(f"server 0 is {first}, server 1 is {second}: draft tokens of theirs that were accepted")
    print(LINE.format(*HEADER))
    plain = await phase(server, "no drafts", NO_DRAFTS)
    both = await phase(server, "two draft servers", DRAFTS, plain)
    one = await phase(server, "server 0 killed", DRAFTS, plain, victim=first)
    say("waiting until it is started anew")
    await server.until(lambda: server.up() == 2, serving=True)
    say(f"{first} is back as process {server.drafters()[first]}")
    back = await phase(server, "server 0 is back", DRAFTS, plain)
    return plain == both == one == back


async def show(folder: Path) -> bool:
    """Start the server, play, and stop it, whatever happens."""
    server = Server(folder)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await play(server)
    except Exception:
        print(server.log.read_text(errors="ignore")[-4000:], file=sys.stderr)
        raise
    finally:
        say("stopping the server, its draft servers and Ray")
        server.stop()
        say("stopped")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        sys.exit(0 if asyncio.run(show(Path(folder))) else 1)
    sys.exit(130)
