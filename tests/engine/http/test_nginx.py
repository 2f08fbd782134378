# SPDX-License-Identifier: Apache-2.0
"""A real nginx with the configuration of examples/nginx.conf, before the middleware."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from browser import program
from http_app import (
    CHAT,
    COMPLETIONS,
    DECLINING,
    REPORT,
    Call,
    Server,
    choice,
    events_of,
    output,
    reported,
    saying,
)
from patience import patience

from vllm_slo.slo.body import MAX_BODY_BYTES
from vllm_slo.wire.ports import free_port

pytestmark = pytest.mark.slow

EXAMPLE = (Path(__file__).resolve().parents[3] / "examples/nginx.conf").read_text()
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
"""Kinds of temporary files for which nginx makes folders when it starts."""
ASKING = {"prompt": "x", "slo": {"ttft_ms": 500}}
Talk = Callable[[httpx.AsyncClient], Awaitable[None]]


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[int]:
    """Serve an app on a port of its own."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            assert not serving.done()
            await asyncio.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await serving


@contextmanager
def nginx(folder: Path, upstream: int, changes: Mapping[str, str]) -> Iterator[str]:
    """The URL of an nginx with the example's configuration.

    ``changes``: of that configuration, besides its addresses.
    """
    port = free_port()
    addresses = {
        "server 127.0.0.1:8000;": f"server 127.0.0.1:{upstream};",
        "listen 8080;": f"listen 127.0.0.1:{port};",
    }
    replaced = EXAMPLE
    for before, after in {**addresses, **changes}.items():
        assert replaced.count(before) == 1
        replaced = replaced.replace(before, after)
    (folder / "vllm-slo.conf").write_text(replaced)
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in TEMPORARY)
    (folder / "nginx.conf").write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}include {folder}/vllm-slo.conf;\n}}\n"
    )
    log = folder / "log"
    command = [program("nginx"), "-e", str(log), "-p", str(folder), "-c", f"{folder}/nginx.conf"]
    with log.open("ab") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            yield f"http://127.0.0.1:{port}"
            assert process.poll() is None, log.read_text()
        finally:
            process.terminate()


def behind_nginx(server: Server, folder: Path, talk: Talk, **changes: str) -> None:
    """Let a client talk to the server through nginx.

    ``changes``: directive of the example -> another value.
    """
    lines = re.findall(r"(\w+) (\w+);", EXAMPLE)
    replaced = {f"{k} {v};": f"{k} {changes[k]};" for k, v in lines if k in changes}
    assert len(replaced) == len(changes)
    program("nginx")

    async def run() -> None:
        async with listening(server.app) as port:
            with nginx(folder, port, replaced) as url:
                limit = httpx.Timeout(patience(20.0))
                async with (
                    asyncio.timeout(patience(40.0)),
                    httpx.AsyncClient(base_url=url, timeout=limit, trust_env=False) as client,
                ):
                    await answers(client)
                    await talk(client)

    asyncio.run(run())


async def answers(client: httpx.AsyncClient) -> None:
    """Wait until nginx listens."""
    while True:
        try:
            assert (await client.get("/v1/models")).status_code == 200
        except httpx.ConnectError:
            await asyncio.sleep(0.05)
        else:
            return


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("body", [{}, ASKING])
def test_tokens_come_when_they_are_made(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    """The engine makes its second token only after the client has the first."""
    has_first = asyncio.Event()

    async def script(call: Call) -> AsyncIterator[Any]:
        yield output(choice("one"))
        await has_first.wait()
        yield output(choice("two", "stop"), carried=reported())

    async def talk(client: httpx.AsyncClient) -> None:
        asked = {**body, "stream": True}
        async with client.stream("POST", path, json=asked) as answer:
            text = ""
            async for part in answer.aiter_text():
                text += part
                if "one" in text:
                    has_first.set()
        reports = [event["slo"] for event in events_of(text) if "slo" in event]
        assert "two" in text
        assert reports == ([REPORT] if body else [])

    behind_nginx(Server(script), tmp_path, talk)


def test_headers_and_large_bodies_arrive(tmp_path: Path) -> None:
    server = Server(saying(output(choice("a", "stop"), carried=reported())))

    async def talk(client: httpx.AsyncClient) -> None:
        headers = {"x-llm-d-slo-ttft-ms": "700", "x-slo-tpot-ms": "70"}
        body = {"prompt": "x" * (MAX_BODY_BYTES - 1000)}
        answer = await client.post(COMPLETIONS, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["slo"] == REPORT
        extra = server.engine.calls[-1].extra
        assert (extra["slo_ttft_ms"], extra["slo_tpot_ms"]) == (700, 70)

    behind_nginx(server, tmp_path, talk)


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_pass_as_they_are(tmp_path: Path, stream: bool) -> None:
    asked = {"prompt": "x", "stream": stream}
    declining = {"ttft_ms": 1, "on_unattainable": "decline"}

    async def talk(client: httpx.AsyncClient) -> None:
        answer = await client.post(COMPLETIONS, json={**asked, "slo": declining})
        assert answer.status_code == 429
        told = [answer.headers[n] for n in ("retry-after", "retry-after-ms", "x-slo-reason")]
        assert told == ["2", "1500", "prefill"]
        assert answer.json()["error"]["type"] == "slo_unattainable"
        answer = await client.post(COMPLETIONS, json={**asked, "slo": {"ttft_ms": -1}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ttft_ms")

    behind_nginx(Server(DECLINING), tmp_path, talk)


def test_a_stream_that_breaks_off_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    async def script(call: Call) -> AsyncIterator[Any]:
        yield output(choice("one"))
        raise RuntimeError("the server is gone")

    async def talk(client: httpx.AsyncClient) -> None:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(COMPLETIONS, content=json.dumps({**ASKING, "stream": True}))

    behind_nginx(Server(script), tmp_path, talk)


def test_a_client_that_leaves_ends_its_request(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def script(call: Call) -> AsyncIterator[Any]:
        try:
            while True:
                yield output(choice("one"))
                await asyncio.sleep(0.01)
        finally:
            closed.set()

    async def talk(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", COMPLETIONS, json={**ASKING, "stream": True}) as answer:
            async for _ in answer.aiter_bytes():
                break
        await closed.wait()

    behind_nginx(Server(script), tmp_path, talk)


def test_without_the_limits_of_the_example_requests_fail(tmp_path: Path) -> None:
    """So they are needed: the defaults are shorter than a wait that is usual under load."""

    async def script(call: Call) -> AsyncIterator[Any]:
        await asyncio.sleep(patience(3.0))
        yield output(choice("one", "stop"))

    async def talk(client: httpx.AsyncClient) -> None:
        answer = await client.post(COMPLETIONS, json=ASKING)
        assert (answer.status_code, answer.headers["content-type"]) == (504, "text/html")
        answer = await client.post(COMPLETIONS, json={"prompt": "x" * 1024 * 1024})
        assert (answer.status_code, answer.headers["content-type"]) == (413, "text/html")

    behind_nginx(Server(script), tmp_path, talk, proxy_read_timeout="1s", client_max_body_size="1m")
