# SPDX-License-Identifier: Apache-2.0
"""One draft model for the replicas of one machine, tried with the built-in models.

``vllm-slo serve tiny --replicas R --draft-model tiny --draft-servers N``: every draft server drafts
for every replica, in turns. The same 16 prompts are answered without drafts and with drafts,
alternately, and the answers are compared. All replicas and draft servers share the same cores, and
every step drafts three tokens for each request, which vllm-slo would not do of its own accord
there. So acceptance, tokens per step and waits say whether sharing works, and the speed does not
say what it is worth on accelerators.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeAlias

import httpx
import psutil
from common import markdown, write_result
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from vllm_slo.wire.ports import free_port

PROMPTS: Final = [
    text
    for name in ("read", "write", "open", "close", "parse", "send", "find", "main")
    for text in (f"def {name}(self, ", f"class {name.title()}:\n")
]
CONFIG: Final = "speculation: {min_depth: 3, max_depth: 3, draft_deadline_ms: 400}\n"
FLAGS: Final = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16"),
]
ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
NO_DRAFTS, DRAFTS = {"speculation": "off"}, {"tier": "best_effort"}
START_S: Final = 600.0
SETTLED_S: Final = 3.0
"""Metrics are written a second after what they count."""

Sums: TypeAlias = defaultdict[str, float]
"""Sums of series, by name."""


@dataclass
class Turns:
    """All turns of one kind.

    Attributes:
        took_s: of each.
        counts: series by replica, their growth in all turns.
        differing: answers that are not what they were first without drafts.
    """

    took_s: list[float] = field(default_factory=list)
    counts: dict[str, Sums] = field(default_factory=dict)
    differing: int = 0

    def of(self, series: str) -> list[float]:
        """The growth of a series, by replica."""
        return [self.counts[name][series] for name in sorted(self.counts)]


class Deployment:
    """Replicas with draft servers beside them."""

    def __init__(self, folder: Path, replicas: int, servers: int) -> None:
        self.servers, port = servers, free_port()
        config = folder / "slo.yaml"
        config.write_text(CONFIG)
        command = [
            *(sys.executable, "-m", "vllm_slo.cli", "serve", "tiny", "--replicas", str(replicas)),
            *("--draft-model", "tiny", "--draft-servers", str(servers), *FLAGS),
            *("--slo-config", str(config), "--host", "127.0.0.1", "--port", str(port)),
        ]
        with (folder / "log").open("wb") as log:
            self.process = psutil.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT}, process_group=0
            )
        self.url, self._replicas = f"http://127.0.0.1:{port}", replicas
        self._api = AsyncOpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0, timeout=600)

    async def answers(self, slo: dict[str, str], tokens: int) -> list[str]:
        """One answer to each prompt, all at once."""

        async def one(prompt: str) -> str:
            body: dict[str, Any] = {"slo": slo, "ignore_eos": True, "temperature": 0}
            made = await self._api.completions.create(
                model="tiny", prompt=prompt, max_tokens=tokens, extra_body=body
            )
            return made.choices[0].text

        return list(await asyncio.gather(*map(one, PROMPTS)))

    def counts(self) -> dict[str, Sums]:
        """The sums of all series, by replica."""
        found = {}
        for replica in httpx.get(f"{self.url}/replicas").json():
            page = httpx.get(f"{self.url}/metrics/replicas/{replica['name']}")
            sums = found[replica["name"]] = Sums(float)
            for family in text_string_to_metric_families(page.text):
                for sample in family.samples:
                    sums[sample.name] += sample.value
                    if sample.labels.get("reason") == "late":
                        sums[f"{sample.name} late"] += sample.value
        return found

    async def ready(self) -> None:
        """Wait until every replica asks every draft server."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            if self.process.poll() is not None:
                raise SystemExit("the server ended")
            with suppress(httpx.HTTPError):
                if len(httpx.get(f"{self.url}/replicas").json()) == self._replicas:
                    await self.answers(DRAFTS, 8)
                    up = [counts["vllm_slo:drafter_up"] for counts in self.counts().values()]
                    if up == [self.servers] * self._replicas:
                        return
            await asyncio.sleep(1.0)
        raise SystemExit("the draft servers did not connect")

    def draft_memory(self) -> float:
        """MiB that the draft servers hold for themselves."""
        family = self.process.children(recursive=True)
        own = [one for one in family if {"draft-server", "--name"} <= {*one.cmdline()}]
        return float(sum(one.memory_full_info().uss for one in own) / 2**20)

    def stop(self) -> None:
        """End all of it."""
        family = [self.process, *self.process.children(recursive=True)]
        self.process.terminate()
        for left in psutil.wait_procs(family, timeout=60)[1]:
            with suppress(psutil.NoSuchProcess):
                left.kill()


async def turn(running: Deployment, slo: dict[str, str], tokens: int, into: Turns) -> list[str]:
    """Answer all prompts, and add what that was like."""
    before, begun_s = running.counts(), time.monotonic()
    found = await running.answers(slo, tokens)
    into.took_s.append(time.monotonic() - begun_s)
    await asyncio.sleep(SETTLED_S)
    for name, counts in running.counts().items():
        sums = into.counts.setdefault(name, Sums(float))
        for series, value in counts.items():
            sums[series] += value - before[name][series]
    return found


async def measure(running: Deployment, turns: int, tokens: int) -> tuple[Turns, Turns, float]:
    """Turns without drafts and with drafts, and the draft servers' memory."""
    await running.ready()
    plain, drafted = Turns(), Turns()
    expected = await running.answers(NO_DRAFTS, tokens)
    await running.answers(DRAFTS, tokens)
    for _ in range(turns):
        for slo, into in ((NO_DRAFTS, plain), (DRAFTS, drafted)):
            found = await turn(running, slo, tokens, into)
            into.differing += sum(a != b for a, b in zip(found, expected, strict=True))
    return plain, drafted, running.draft_memory()


def row(
    replicas: int, servers: int, measured: tuple[Turns, Turns, float], tokens: int
) -> list[str]:
    """A row of the table."""
    plain, drafted, memory = measured

    def ratio(over: str, under: str, turns: Turns = drafted, times: float = 1.0) -> list[float]:
        pairs = zip(turns.of(over), turns.of(under), strict=True)
        return [times * one / max(other, 1) for one, other in pairs]

    def shown(values: Sequence[float], digits: int = 0, unit: str = "") -> str:
        return " / ".join(f"{value:.{digits}f}{unit}" for value in values)

    given, steps = "vllm:generation_tokens_total", "vllm:iteration_tokens_total_count"
    verified, accepted = (f"vllm_slo:drafter_{what}_tokens_total" for what in WHAT)
    late, waited = sum(drafted.of(f"{DROPPED} late")), "vllm_slo:draft_receive_seconds_total"
    return [
        f"{replicas}",
        f"{servers}",
        f"{drafted.differing} of {len(PROMPTS) * len(drafted.took_s)}",
        shown(ratio(given, steps, plain), 1),
        shown(ratio(given, steps), 1),
        shown(ratio(accepted, verified, times=100.0), unit="%"),
        shown(ratio(waited, steps, times=1e3)),
        f"{late:.0f} of {sum(drafted.of(steps)):.0f}",
        *(f"{len(PROMPTS) * tokens / median(of.took_s):.0f}" for of in (plain, drafted)),
        f"{memory:.0f}",
    ]


WHAT: Final = "verified", "accepted"
DROPPED: Final = "vllm_slo:drafter_dropped_total"
HEAD: Final = (
    *("replicas", "draft servers", "answers that differ", "tokens a step, no drafts"),
    *("tokens a step, drafts", "accepted", "wait, ms a step", "late", "tokens/s, no drafts"),
    *("tokens/s, drafts", "draft servers' memory, MiB"),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="with drafts, and as many without")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    args = parser.parse_args(argv)
    rows = []
    for replicas, servers in ((1, 1), (2, 1), (2, 2)):
        with tempfile.TemporaryDirectory(prefix="sd-") as folder:
            running = Deployment(Path(folder), replicas, servers)
            try:
                measured = asyncio.run(measure(running, args.turns, args.tokens))
            except BaseException:
                sys.stderr.write((Path(folder) / "log").read_text(errors="replace")[-4000:])
                raise
            finally:
                running.stop()
        rows.append(row(replicas, servers, measured, args.tokens))
        sys.stderr.write(f"{rows[-1]}\n")
    note = (
        "By replica where a cell has two numbers. *accepted*: of the draft tokens that were "
        "verified. *wait*: for drafts. "
        "*late*: answers that came after the deadline, of all steps. *memory*: of the draft "
        "servers' processes, what they share with no other process."
    )
    write_result("shared_draft", str(__doc__), markdown(HEAD, rows), note=note)


if __name__ == "__main__":
    main()
