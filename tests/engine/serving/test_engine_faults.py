# SPDX-License-Identifier: Apache-2.0
"""What happens to a running engine: slow steps, steps that raise, clocks that are off, a disk that
cannot be written, and death under load."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import call_tables
import pytest
from depth import DEPTH
from support_folder import SUPPORT

pytest.importorskip("vllm")
pytest.importorskip("httpx")
pytest.importorskip("psutil")

import httpx
import live_server
import psutil
from live_server import (
    SMALL,
    UNIPROC,
    LiveServer,
    ask_openai,
    command,
    environment,
    request_body,
)
from patience import patience

pytestmark = pytest.mark.engine

EASY = {"slo": {"ttft_ms": 60000, "tpot_ms": 10000}}
LONG = {"max_tokens": 900, "ignore_eos": True}
PROMPT_S = patience(10.0)


# --- in the engine's own process -----------------------------------------------------------------


def engine_of(script: str, *arguments: str, most_s: float = 280) -> Any:
    """What a script with an engine of its own saw."""
    done = subprocess.run(
        [sys.executable, str(SUPPORT / script), *arguments],
        capture_output=True,
        text=True,
        timeout=patience(most_s),
        check=False,
        env=environment() | UNIPROC,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def said() -> Any:
    return engine_of("faulty_engine.py")


@pytest.mark.timeout(patience(1400 if DEPTH > 1 else 400))
def test_calls_of_ours_fail_on_a_real_engine() -> None:
    """The same answers, no request lost, no block, and no promise broken silently.

    By default what a worker does with trees that a kernel takes as masks, and a few of the calls
    that virtual engines try. In deep tests all calls, also with rows of a causal kernel, and
    without trees."""
    verifying: set[str] = set()
    for kind in ("--masks", "--trees", "--plain") if DEPTH > 1 else ("--masks",):
        tried = engine_of("injected_engine.py", kind, most_s=1200)
        assert tried["wrong"] == {}
        verifying |= set(tried["places"]) & set(call_tables.VERIFYING)
    rows = set() if DEPTH > 1 else {"worker.tree_attention.plan:plan_rows"}
    assert verifying == set(call_tables.VERIFYING) - rows


def texts(answers: Any) -> list[str]:
    return [text for text, _ in answers]


def test_a_slow_step_breaks_promises_that_are_counted(said: Any) -> None:
    slow = said["slow_step"]
    assert texts(slow["answers"]) == texts(said["plain"])
    for _, report in slow["answers"]:
        assert (report["promised"], report["attained"]) == (True, False)
        assert report["ttft_ms"] >= 2000
    assert slow["broken"] == 4


def test_promises_adapt_to_a_slow_phase(said: Any) -> None:
    before, after = said["slow_phase"]
    assert before == [True] * 4
    assert after == [False] * 4


@pytest.mark.parametrize(("clock", "promised"), [("ahead", False), ("behind", True)])
def test_an_epoch_clock_that_is_an_hour_off(said: Any, clock: str, promised: bool) -> None:
    assert texts(said[clock]) == texts(said["plain"])
    for _, report in said[clock]:
        assert (report["promised"] and not report["late"]) is promised
        assert report["reason"] == (None if promised else "expired")
        assert report["attained"] is promised


def test_a_step_that_raises_ends_its_call_and_not_the_engine(said: Any) -> None:
    failed = said["failing_step"]
    assert failed["error"] == "the device is gone (a test says so)"
    assert failed["seconds"] < PROMPT_S
    # Of the step that failed the next one's output tells that it never ended.
    assert {**failed["left"], "steps": 0} == dict.fromkeys(failed["left"], 0), failed["left"]
    assert texts(failed["after"]) == texts(said["plain"])


def test_an_engine_keeps_nothing_of_what_happened(said: Any) -> None:
    assert set(said["left"].values()) == {0}, said["left"]


# --- in a server ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("server")
    arguments = [command("vllm-slo"), "serve", "tiny", *SMALL]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        with live_server.running(arguments, "tiny", folder) as live:
            yield live


def metrics_folder(server: LiveServer) -> Path:
    (folder,) = server.log.parent.glob("vllm-slo-*")
    return folder


def test_metrics_that_cannot_be_written_cost_no_service_and_come_back(server: LiveServer) -> None:
    finished = "vllm_slo:requests_finished_total"
    assert ask_openai(server, "completions", False, EASY).reports
    server.await_total(1, finished)
    (written,) = metrics_folder(server).glob("*.prom")
    in_the_way = written.with_suffix(".tmp")
    in_the_way.mkdir()
    assert ask_openai(server, "completions", True, EASY).reports
    time.sleep(2.0)  # metrics are written within a second
    assert server.total(finished) == 1
    in_the_way.rmdir()
    assert ask_openai(server, "completions", False, EASY).reports
    server.await_total(3, finished)


async def volley(server: LiveServer, engine: Any) -> tuple[list[Any], float]:
    """Streams and whole answers, more than there are seats, and the engine is killed under them:
    what each client got, and the seconds until the last one had it."""
    url = f"{server.url}/v1/completions"
    begun = asyncio.Event()

    async def one(client: httpx.AsyncClient, number: int) -> tuple[int, str]:
        stream = number % 3 != 0
        body = request_body(server, "completions", {**LONG, "stream": stream, **EASY})
        try:
            async with client.stream("POST", url, json=body) as answer:
                text = ""
                async for line in answer.aiter_lines():
                    text += line
                    begun.set()
                return answer.status_code, text
        except httpx.HTTPError as error:
            return 0, type(error).__name__

    async with httpx.AsyncClient(
        timeout=patience(60), limits=httpx.Limits(max_connections=64)
    ) as client:
        asked = [asyncio.create_task(one(client, number)) for number in range(24)]
        await asyncio.wait_for(begun.wait(), patience(60))
        engine.kill()
        killed_s = time.monotonic()
        return await asyncio.gather(*asked), time.monotonic() - killed_s


def test_an_engine_that_is_killed_under_load(server: LiveServer) -> None:
    """The last test of this server."""
    root = psutil.Process(server.process.pid)
    family = [root, *root.children(recursive=True)]
    (engine,) = [one for one in family if "EngineCore" in one.name()]
    answers, took_s = asyncio.run(volley(server, engine))
    assert took_s < PROMPT_S
    for status, text in answers:
        # An answer that had begun ends with an error, or breaks off.
        assert status in (0, 500, 503) or (status == 200 and '"error"' in text), (status, text)
    server.process.wait(PROMPT_S)
    _, left = psutil.wait_procs(family, timeout=PROMPT_S)
    assert not left
    assert list(server.log.parent.glob("vllm-slo-*")) == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", timeout=patience(5))
