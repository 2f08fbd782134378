# SPDX-License-Identifier: Apache-2.0
"""One replica: the process with the tiny model, and what ends with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hermetic import ROOT_VARIABLE
from patience import patience

pytest.importorskip("vllm")
pytest.importorskip("httpx")
pytest.importorskip("openai")

import httpx
import psutil
from live_server import SMALL, UNIPROC, environment

from vllm_slo import tiny
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_stream import StateDecoder, StateLine
from vllm_slo.engine.serving import lifeline
from vllm_slo.router import replica
from vllm_slo.wire.front_protocol import DRAIN_PATH, STATE_PATH, TRY_NEXT

# --- the lifeline --------------------------------------------------------------------------------

WATCHER = """
import os, sys, time
from vllm_slo.engine.serving import lifeline
lifeline.watch()
print("watching", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("before", [False, True], ids=["while it runs", "before it watches"])
def test_who_watches_ends_with_who_holds(tmp_path: Path, before: bool) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    holder_code = (
        "import pathlib, sys, time; from vllm_slo.engine.serving import lifeline;"
        f"lifeline.hold(pathlib.Path({str(folder)!r})); print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", holder_code], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    if before:
        holder.kill()
        holder.wait()
    env = {**os.environ, lifeline.VARIABLE: str(folder / "lifeline")}
    watcher = subprocess.Popen([sys.executable, "-c", WATCHER], stdout=subprocess.PIPE, env=env)
    assert watcher.stdout is not None
    if not before:
        assert watcher.stdout.readline() == b"watching\n"
        time.sleep(0.3)
        assert watcher.poll() is None
        holder.kill()
        holder.wait()
    assert watcher.wait(patience(10)) == 1
    assert not folder.exists()
    holder.stdout.close()
    watcher.stdout.close()


def test_without_a_lifeline_nothing_is_watched() -> None:
    lifeline.watch()
    assert not any(t.name.startswith("_await_end") for t in threading.enumerate())


# --- the process ---------------------------------------------------------------------------------

CONFIG = "classes:\n  chat: {ttft_ms: 60000, tpot_ms: 10000}\nservice_tiers:\n  priority: chat\n"
LONG = {"max_tokens": 900, "ignore_eos": True}
HANG_S = patience(60.0)


@dataclass
class Live:
    """A replica in a process group of its own; ``said`` is its one line."""

    process: subprocess.Popen[bytes]
    log: Path
    said: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.said["url"]

    def headers(self, **front: Any) -> dict[str, str]:
        more = {f"x-vllm-slo-{name.replace('_', '-')}": str(v) for name, v in front.items()}
        return {"x-vllm-slo-token": self.said["token"], **more}

    def body(self, **asked: Any) -> dict[str, Any]:
        return {"model": "tiny", "prompt": "def read(path):\n", "temperature": 0} | asked

    def ask(self, body: dict[str, Any], **front: Any) -> Any:
        where = f"{self.url}/v1/completions"
        return httpx.post(
            where, json=self.body(**body), headers=self.headers(**front), timeout=HANG_S
        )

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, headers=self.headers(), timeout=HANG_S)

    @contextmanager
    def stream(self, body: dict[str, Any], **front: Any) -> Iterator[Any]:
        where, asked = f"{self.url}/v1/completions", self.body(stream=True, **body)
        with httpx.stream(
            "POST", where, json=asked, headers=self.headers(**front), timeout=HANG_S
        ) as answer:
            yield answer

    def alive(self) -> list[str]:
        """Processes of this replica's group that have not ended."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                here = os.getpgid(process.pid) == self.process.pid
                if here and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())[:60]}")
        return found

    def engine(self) -> int | None:
        """Process id of the engine core, once there is one."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                words = child.cmdline()
                if words and "EngineCore" in words[0]:
                    return int(child.pid)
        return None

    def await_end(self, seconds: float) -> None:
        """Nothing of it is left after so long."""
        within(seconds, lambda: not self.alive(), self.alive)


def within(seconds: float, condition: Callable[[], Any], told: Callable[[], Any]) -> Any:
    end = time.monotonic() + patience(seconds)
    while time.monotonic() < end:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {told()}")


class Watcher:
    """Reads the state stream in a thread."""

    def __init__(self, live: Live) -> None:
        self.lines: list[StateLine] = []
        self.ended = threading.Event()
        self._live = live
        threading.Thread(target=self._read, daemon=True).start()
        within(10, lambda: self.lines, lambda: "no line")

    def _read(self) -> None:
        where = self._live.url + STATE_PATH
        with (
            suppress(httpx.HTTPError),
            httpx.stream("GET", where, headers=self._live.headers(), timeout=HANG_S) as answer,
        ):
            assert answer.headers["content-type"] == "application/x-ndjson"
            decoder = StateDecoder()
            for line in answer.iter_lines():
                self.lines.append(decoder.read(line))
        self.ended.set()

    def states(self) -> list[ReplicaState]:
        return [line.state for line in self.lines if line.state is not None]

    def now(self) -> ReplicaState:
        return self.states()[-1]


@contextmanager
def starting(folder: Path, *, uniproc: bool = True) -> Iterator[Live]:
    (folder / "slo.yaml").write_text(CONFIG)
    log = folder / "replica.log"
    host = SMALL.index("--host")
    small = [*SMALL[:host], *SMALL[host + 2 :]]
    arguments = [sys.executable, "-m", "vllm_slo.router.replica", "--private-host", "127.0.0.1"]
    arguments += ["--", str(tiny.path("target")), *small, "--served-model-name", "tiny"]
    arguments += ["--scheduler-cls", "vllm_slo.Scheduler"]
    arguments += ["--middleware", "vllm_slo.engine.http.SLOMiddleware"]
    arguments += ["--additional-config", '{"slo_config": "slo.yaml"}']
    # Folders and sockets of the replica are looked for at the end.
    env = environment() | {"TMPDIR": str(folder)} | (UNIPROC if uniproc else {})
    with log.open("wb") as err:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            cwd=folder,
            env=env,
            process_group=0,
        )
    assert process.stdin is not None and process.stdout is not None
    live = Live(process, log)
    try:
        yield live
    except BaseException:
        sys.stdout.write(log.read_text(errors="replace")[-8000:])  # pytest shows it on failure
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
        process.stdout.close()


@contextmanager
def running(folder: Path, *, uniproc: bool = True) -> Iterator[Live]:
    with starting(folder, uniproc=uniproc) as live:
        assert live.process.stdout is not None
        line = live.process.stdout.readline()
        live.said.update(json.loads(line))
        yield live


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("vllm-slo-*")]


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder in which the path of a socket, named by 36 characters, has room: 107 at most."""
    with tempfile.TemporaryDirectory(prefix="r-", dir=os.environ[ROOT_VARIABLE]) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with (
        tempfile.TemporaryDirectory(prefix="r-", dir=os.environ[ROOT_VARIABLE]) as folder,
        running(Path(folder)) as one,
    ):
        yield one


@pytest.fixture
def watcher(live: Live) -> Watcher:
    watching = Watcher(live)
    within(10, watching.states, lambda: "no state")
    within(10, lambda: watching.now().running == 0, watching.now)
    return watching


MINE = {"": frozenset({5})}
EASY = {"slo": {"ttft_ms": 60000, "tpot_ms": 10000}}
HOPELESS = {"slo": {"ttft_ms": 0.001}}


@pytest.mark.engine
def test_every_path_demands_the_token(live: Live) -> None:
    for path in ("/health", "/v1/models", "/metrics", "/docs", STATE_PATH, "/nowhere"):
        assert httpx.get(live.url + path, timeout=HANG_S).status_code == 401
    body = live.body(max_tokens=1)
    refused = httpx.post(f"{live.url}/v1/completions", json=body, timeout=HANG_S)
    assert refused.status_code == 401
    assert live.get("/health").status_code == 200
    assert [model["id"] for model in live.get("/v1/models").json()["data"]] == ["tiny"]


@pytest.mark.engine
def test_an_idle_replica_has_a_heartbeat(watcher: Watcher) -> None:
    before = len(watcher.lines)
    within(10, lambda: len(watcher.lines) >= before + 4, lambda: watcher.lines)
    line = watcher.lines[-1]
    assert (line.draining, line.dead) == (False, False)
    assert line.age_s >= 0.2
    idle = watcher.now()
    assert idle.free_blocks == idle.total_blocks > 0
    assert (idle.seats, idle.max_model_len) == (16, 1024)


@pytest.mark.engine
def test_a_promise_is_seen_with_its_ticket_and_gone_afterwards(
    live: Live, watcher: Watcher
) -> None:
    with live.stream({**EASY, **LONG}, age_ms=1, ticket=5) as answer:
        text = answer.read().decode()
    assert answer.status_code == 200
    assert '"promised":true' in text
    within(5, lambda: watcher.now().running == 0, watcher.now)
    mine = [state for state in watcher.states() if state.tickets == MINE]
    assert any(state.decoding == {10.0: 1} for state in mine)
    assert all(state.running + state.waiting == 1 and state.seen == {"": 5} for state in mine)
    assert min(state.free_blocks for state in mine) < watcher.now().free_blocks
    assert (watcher.now().tickets, watcher.now().seen) == ({}, {"": 5})
    assert len(mine) > 1, "more than once while it ran"


@pytest.mark.engine
def test_time_at_the_front_counts(live: Live) -> None:
    """Once, and that of a request which has been at none is shorter than it."""
    asked = {**EASY, "max_tokens": 4}
    aged = live.ask(asked, age_ms=20_000, ticket=6).json()
    fresh = live.ask(asked).json()
    assert fresh["slo"]["ttft_ms"] < 20_000 <= aged["slo"]["ttft_ms"] < 2 * 20_000
    assert aged["slo"]["attained"] is True
    ddl = {"vllm_xargs": {"prefill_ddl": time.time() + 1000, "slo_tpot": 10}, "max_tokens": 4}
    assert live.ask(ddl, age_ms=5000, ticket=7).json()["slo"]["promised"] is True


@pytest.mark.engine
def test_a_hop_is_refused_what_cannot_be_promised(live: Live) -> None:
    asked = {**HOPELESS, "max_tokens": 4}
    several = {"n": 2, "temperature": 1}
    for more in ({}, {"stream": True}, several, {**several, "stream": True}):
        answer = live.ask({**asked, **more}, age_ms=1, ticket=8, unattainable="decline")
        assert answer.status_code == TRY_NEXT, answer.text
        assert answer.headers["x-vllm-slo-declined"] == answer.headers["retry-after-ms"]
        assert answer.json()["error"]["type"] == "slo_unattainable"
        assert int(answer.headers["retry-after-ms"]) > 0
        assert int(answer.headers["retry-after"]) > 0
        assert answer.headers["x-slo-reason"] == "expired"
    best_effort = live.ask({**asked, "service_tier": "auto"}, age_ms=1, ticket=9).json()
    assert (best_effort["slo"]["late"], best_effort["service_tier"]) == (True, "flex")
    assert best_effort["slo"]["reason"] == "expired"


@pytest.mark.engine
def test_a_hop_that_can_be_kept_is_an_ordinary_answer(live: Live) -> None:
    plain = live.ask({"max_tokens": 24}).json()
    assert "slo" not in plain
    behind = live.ask({"max_tokens": 24}, age_ms=3, ticket=11, unattainable="decline").json()
    same = ("id", "created")
    assert {k: v for k, v in plain.items() if k not in same} == {
        k: v for k, v in behind.items() if k not in same
    }
    kept = live.ask({**EASY, "max_tokens": 24}, age_ms=3, ticket=12, unattainable="decline").json()
    assert kept["choices"] == plain["choices"]
    assert (kept["slo"]["promised"], kept["service_tier"]) == (True, None)
    prio = live.ask(
        {"service_tier": "priority", "max_tokens": 24}, ticket=13, unattainable="decline"
    ).json()
    assert (prio["choices"], prio["service_tier"]) == (plain["choices"], "priority")


@pytest.mark.engine
def test_clients_cannot_speak_for_the_front(live: Live) -> None:
    for key in ("slo_age_ms", "slo_ticket"):
        answer = live.ask({"max_tokens": 4, "vllm_xargs": {key: 5}}, age_ms=1, ticket=14)
        assert answer.status_code == 400
    assert live.ask({"max_tokens": 4}, ticket="x").status_code == 400


@pytest.mark.engine
def test_a_client_that_leaves_frees_its_request(live: Live, watcher: Watcher) -> None:
    with live.stream({**EASY, **LONG}, age_ms=1, ticket="a:15") as answer:
        lines = answer.iter_lines()  # the connection closes where nobody holds them
        assert next(lines).startswith("data: ")
        within(5, lambda: watcher.now().tickets == {"a": {15}}, watcher.now)
    within(5, lambda: watcher.now().running == 0, watcher.now)
    assert watcher.now().tickets == {}


@pytest.mark.engine
def test_metrics_of_both_kinds_are_there(live: Live) -> None:
    def text() -> str:
        return str(live.get("/metrics").text)

    within(10, lambda: "vllm_slo:requests_finished_total" in text(), text)
    assert "vllm:num_requests_running" in text()


@pytest.mark.engine
def test_an_engine_that_is_killed_ends_its_replica(live: Live, watcher: Watcher) -> None:
    """The last test of this replica."""
    whole: list[Any] = []
    waiting = threading.Thread(target=lambda: whole.append(live.ask(LONG)))
    with live.stream({**EASY, **LONG}, age_ms=1, ticket=16) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        waiting.start()
        within(5, lambda: watcher.now().running == 2, watcher.now)
        engine = live.engine()
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        rest = "\n".join(lines)
    assert '"error"' in rest
    waiting.join(patience(5))
    assert whole[0].status_code == 500
    assert "error" in whole[0].json()
    live.process.wait(patience(10))
    assert watcher.ended.wait(patience(5))
    assert any(line.dead for line in watcher.lines)
    live.await_end(10)
    assert leftovers(live.log.parent) == []


@pytest.fixture
def draining(short: Path) -> Iterator[Live]:
    with running(short) as one:
        yield one


@pytest.mark.engine
@pytest.mark.slow
def test_a_drain_lets_what_runs_end(draining: Live) -> None:
    watcher = Watcher(draining)
    with draining.stream({**EASY, **LONG}, age_ms=1, ticket=1) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        where = f"{draining.url}{DRAIN_PATH}?seconds={patience(30):.0f}"
        told: list[Any] = []
        drain = threading.Thread(
            target=lambda: told.append(
                httpx.post(where, headers=draining.headers(), timeout=HANG_S).json()
            )
        )
        drain.start()
        within(10, lambda: any(line.draining for line in watcher.lines), lambda: watcher.lines)
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert '"promised":true' in "".join(rest)
    drain.join(patience(20))
    assert told == [{"running": 0}]
    draining.process.terminate()
    assert draining.process.wait(patience(20)) == 0
    assert not any(line.dead for line in watcher.lines)
    draining.await_end(10)
    assert leftovers(draining.log.parent) == []
    # vLLM's API server sometimes logs that its engine has ended before it.
    lines = draining.log.read_text().splitlines()
    assert [line for line in lines if 'File "' in line and "/vllm_slo/" in line] == []


@pytest.mark.engine
@pytest.mark.slow
def test_a_killed_replica_leaves_nothing(short: Path) -> None:
    with running(short, uniproc=False) as live:
        with suppress(httpx.HTTPError), live.stream({**EASY, **LONG}, ticket=1) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(live.process.pid, signal.SIGKILL)
            list(lines)
        live.process.wait(patience(10))
        live.await_end(10)
        assert leftovers(short) == []


@pytest.mark.engine
@pytest.mark.parametrize(
    "how", [pytest.param("its parent dies", marks=pytest.mark.deep), "it is killed"]
)
def test_a_replica_that_starts_leaves_nothing_either(short: Path, how: str) -> None:
    with starting(short, uniproc=False) as live:
        within(120, live.engine, live.alive)
        time.sleep(0.5)  # vLLM's plugins come much later
        if how == "it is killed":
            live.process.kill()
        else:
            assert live.process.stdin is not None
            live.process.stdin.close()
        assert live.process.wait(patience(5)) == (-signal.SIGKILL if how == "it is killed" else 1)
        live.await_end(5)
        assert live.process.stdout is not None and live.process.stdout.read() == b""
        assert leftovers(short) == []


def test_its_import_is_light() -> None:
    """Processes that vLLM starts import it first, and vLLM must come before numba there."""
    code = (
        "import sys, vllm_slo.router.replica;"
        "print([m for m in ('torch', 'vllm', 'numba', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--", "model"], "--private-host"), (["--private-host", "h"], "a model is missing after --")],
)
def test_what_it_is_started_with_is_checked(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        replica.main(arguments)
    assert said in capsys.readouterr().err
