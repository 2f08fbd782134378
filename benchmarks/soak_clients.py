# SPDX-License-Identifier: Apache-2.0
"""The clients of ``benchmarks/soak.py``: most behave, and the others do what clients do."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import aiohttp
from soak_report import Outcome, Seen

KINDS: Final[Mapping[str, float]] = {
    "stream": 30,
    "whole": 14,
    "chat": 8,
    "choices": 8,
    "session": 6,
    "staller": 8,
    "leaver": 10,
    "canceller": 6,
    "garbage": 10,
}
"""Kind of client -> how often. ``session``: three requests in a row, each of another class, on one
connection. ``staller``: reads slowly. ``leaver``: disconnects in the middle of an answer.
``canceller``: before its first token."""

LONGEST_S: Final = 240.0
"""Time after which a request that has not ended is lost."""
STALL_S: Final = 3.0
PROMPT: Final = (16, 320)
OUTPUT: Final = (8, 96)
SHARED: Final = 64
"""Tokens with which a third of the prompts begin."""
VOCABULARY: Final = (10, 500)
REQUESTS_EACH: Final = {"session": 3}


@dataclass(frozen=True, slots=True)
class Objectives:
    """Of each class, milliseconds: class -> (TTFT, TPOT); see ``soak.Calibration``."""

    of: Mapping[str, tuple[float, float]]

    def body(self, name: str | None) -> dict[str, Any] | None:
        """The ``slo`` field of a request of a class; None: of none."""
        if name is None:
            return None
        ttft_ms, tpot_ms = self.of.get(name, (None, None))
        slo: dict[str, Any] = {"class": name}
        if ttft_ms is not None:
            slo |= {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms}
        return slo


CLASSES: Final = ("chat", "code", "strict", "strict", "strict", "bulk", None)
"""As often as they are named. ``strict`` ones would rather be declined than wait."""


@dataclass(slots=True)
class Answer:
    """An answer while it is read."""

    error: str = ""
    status: int = 0
    first_s: float | None = None
    events: int = 0
    ended_choices: int = 0
    reports: list[dict[str, Any]] = field(default_factory=list)

    def take(self, part: Mapping[str, Any]) -> None:
        """Add a whole response, or one event of a stream."""
        self.events += 1
        if part.get("error"):
            self.error = str(part["error"])[:200]
        if part.get("slo"):
            self.reports.append(part["slo"])
        for choice in part.get("choices", ()):
            self.ended_choices += bool(choice.get("finish_reason"))

    def outcome(self, choices: int) -> Outcome:
        """The outcome of the request, if its client did not leave."""
        if self.status == 429:
            return "declined"
        if 400 <= self.status < 500:
            return "refused"
        whole = self.status == 200 and not self.error
        return "finished" if whole and self.ended_choices == choices else "errored"


class Clients:
    """Sends requests of every kind, and notes what became of them.

    Args:
        url: of the server, without a path.
        model: as requests name it.
        seed: of everything they do.
        patience_s: until their first token; then they leave. Without it a queue would grow as long
            as the load is above capacity.
    """

    def __init__(self, url: str, model: str, seed: int, patience_s: float) -> None:
        self.url = url
        self.model = model
        self.patience_s = patience_s
        self.objectives = Objectives({})
        self.seen: list[Seen] = []
        self.errors: list[str] = []
        self.sent = 0
        self._rng = random.Random(seed)
        self._shared = [self._rng.randrange(*VOCABULARY) for _ in range(SHARED)]

    def forget(self) -> None:
        """Reset all counts."""
        self.seen.clear()
        self.errors.clear()
        self.sent = 0

    # What they ask for.

    def prompt(self) -> list[int]:
        """Token ids; some prompts begin alike."""
        ids = [self._rng.randrange(*VOCABULARY) for _ in range(self._rng.randint(*PROMPT))]
        return self._shared + ids if self._rng.random() < 1 / 3 else ids

    def body(self, slo_class: str | None, **more: Any) -> dict[str, Any]:
        """The body of a completion with a fixed length."""
        tokens = self._rng.randint(*OUTPUT)
        asked = {
            "model": self.model,
            "prompt": self.prompt(),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0.7,
            "stream": True,
            **more,
        }
        slo = self.objectives.body(slo_class)
        return asked if slo is None else {**asked, "slo": slo}

    # What they do.

    async def one(self, kind: str) -> None:
        """One client of a kind, from its request to its end."""
        # A connection of its own each: who leaves, closes it.
        connector = aiohttp.TCPConnector(limit=1, force_close=kind != "session")
        timeout = aiohttp.ClientTimeout(total=None, connect=LONGEST_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            if kind == "garbage":
                await self._send_garbage(session)
                return
            classes = [self._rng.choice(CLASSES) for _ in range(REQUESTS_EACH.get(kind, 1))]
            for slo_class in classes:
                await self._ask(session, kind, slo_class)

    async def _ask(self, session: aiohttp.ClientSession, kind: str, slo_class: str | None) -> None:
        choices = self._rng.choice((2, 3)) if kind == "choices" else 1
        if choices > 1 and slo_class == "strict":
            slo_class = "chat"  # of several choices some might be declined beside others that run
        body = self.body(slo_class, n=choices)
        path = "/v1/completions"
        if kind == "chat":
            path, body = "/v1/chat/completions", self._as_chat(body)
        if kind == "whole":
            body["stream"] = False
        if kind == "staller":
            body["logprobs"] = 5  # answers that no socket's buffer holds
        seen = Seen(kind, "lost", choices, slo_class is not None, slo_class == "strict")
        self.sent += 1
        answer, begun_s = Answer(), time.monotonic()
        try:
            async with asyncio.timeout(LONGEST_S):
                left = await self._read(session, kind, path, body, answer)
        except TimeoutError:
            self.seen.append(seen)
            return
        except (aiohttp.ClientError, OSError) as error:
            self.errors.append(f"{kind}: {type(error).__name__}: {error}"[:200])
            self.seen.append(replace(seen, outcome="errored"))
            return
        outcome = "left" if left else answer.outcome(choices)
        if outcome in ("errored", "refused"):
            self.errors.append(f"{kind}: {answer.status} {answer.error}"[:200])
        promised = [r for r in answer.reports if r["promised"] and outcome == "finished"]
        self.seen.append(
            replace(
                seen,
                outcome=outcome,
                promised=len(promised),
                attained=sum(report["attained"] is True for report in promised),
                ttft_s=answer.first_s and answer.first_s - begun_s,
            )
        )

    @staticmethod
    def _as_chat(body: dict[str, Any]) -> dict[str, Any]:
        words = " ".join(str(token) for token in body.pop("prompt")[:40])
        return {**body, "messages": [{"role": "user", "content": words}]}

    async def _read(
        self,
        session: aiohttp.ClientSession,
        kind: str,
        path: str,
        body: dict[str, Any],
        answer: Answer,
    ) -> bool:
        """Send and read like this kind of client; whether it left."""
        patience_s = self._rng.uniform(0.0, 0.2) if kind == "canceller" else self.patience_s
        most = {"canceller": 0, "leaver": self._rng.randint(1, 12)}.get(kind)
        try:
            async with (
                asyncio.timeout(patience_s) as patience,
                session.post(self.url + path, json=body) as response,
            ):
                answer.status = response.status
                async for part in _parts(response):
                    patience.reschedule(None)
                    answer.first_s = answer.first_s or time.monotonic()
                    if most is not None and answer.events >= most:
                        return True
                    answer.take(part)
                    if kind == "staller":
                        await asyncio.sleep(self._rng.choice((0.0, 0.0, 0.05, STALL_S)))
        except TimeoutError:
            return True
        return False

    # What is no request.

    async def _send_garbage(self, session: aiohttp.ClientSession) -> None:
        self.sent += 1
        name, headers, content = self._garbage()
        outcome: Outcome = "lost"
        try:
            async with asyncio.timeout(LONGEST_S):
                if name == "half":
                    await self._send_half()
                    outcome = "left"
                else:
                    method, path = GARBAGE[name]
                    async with session.request(
                        method, self.url + path, data=content, headers=headers
                    ) as response:
                        await response.read()
                        outcome = "refused" if 400 <= response.status < 500 else "errored"
                        if response.status < 400:
                            outcome = "finished"
        except TimeoutError:
            pass
        except (aiohttp.ClientError, OSError):
            outcome = "refused"  # the connection was closed on it
        if outcome not in ("refused", "left"):
            self.errors.append(f"garbage: {name}: {outcome}")
        self.seen.append(Seen("garbage", outcome, 0))

    def _garbage(self) -> tuple[str, dict[str, str], bytes]:
        """(name, headers, content) of a request that a server must refuse."""
        name = self._rng.choice([*GARBAGE, "half"])
        body, headers = self.body("chat"), {"content-type": "application/json"}
        if name == "field":
            body["slo"] = self._rng.choice(BAD_SLOS)
        elif name == "header":
            headers["x-slo-ttft-ms"] = "9" * self._rng.choice((400, 6_000))
        content = json.dumps(body).encode()
        if name == "cut":
            content = content[: self._rng.randrange(1, len(content))]
        elif name == "deep":
            content = b'{"slo": ' + b"[" * 50_000
        elif name == "bytes":
            content = self._rng.randbytes(2_000)
        elif name == "type":
            headers["content-type"] = self._rng.choice(("text/plain", "application/xml", "x"))
        elif name == "huge":
            headers |= {f"x-{i}": "y" * 4_000 for i in range(64)}
            content = b"{}"
        return name, headers, content

    async def _send_half(self) -> None:
        """Send the beginning of a request and close the connection."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 5000\r\n\r\n".encode() + b'{"model": "')
        await writer.drain()
        await asyncio.sleep(self._rng.uniform(0.0, STALL_S))
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


GARBAGE: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(
        ("cut", "deep", "bytes", "type", "huge", "field", "header"), ("POST", "/v1/completions")
    ),
    "route": ("POST", "/v1/nowhere"),
    "method": ("PUT", "/v1/chat/completions"),
}
"""What is wrong -> (method, path)."""
BAD_SLOS: Final[Sequence[Any]] = (
    {"ttft_ms": -1},
    {"tpot_ms": "fast"},
    {"ttft_ms": 10**400},
    {"class": "nobody"},
    {"speed": 3},
    {"tier": "gold"},
    [1],
    "chat",
)


async def _parts(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Events of a stream, or the one whole response.

    Raises:
        aiohttp.ClientError: the stream ended too early.
    """
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        yield json.loads(await response.read())
        return
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        if data and data is not line:
            yield json.loads(data)
    raise aiohttp.ClientPayloadError("the stream ended before [DONE]")
