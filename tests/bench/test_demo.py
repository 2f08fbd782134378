# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo demo``: its servers, the model and load that it chooses, what it says at the end."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from patience import patience
from rich.console import Console

from vllm_slo import cli
from vllm_slo.bench import demo, demo_load, demo_servers
from vllm_slo.bench.client import SentRequest, ServerRun, Tally
from vllm_slo.bench.command import kept_so_far
from vllm_slo.bench.demo_load import (
    ATTAINMENT,
    BATCH_AT_S,
    LOAD,
    LONGEST_S,
    ONLINE,
    REQUESTS,
    SHORTEST_S,
    SIZES,
    TOGETHER,
    Model,
    StepTimes,
    choose_load,
    choose_model,
    find_carried,
    rate_at,
    twin,
)
from vllm_slo.bench.demo_servers import Candidate, candidates
from vllm_slo.bench.disturbance import Disturbance, DisturbanceWatch, unlike
from vllm_slo.bench.drafts import DraftCounts
from vllm_slo.bench.endpoint import ServerInfo, ServerTarget
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.planned import Workload
from vllm_slo.bench.report import BenchReport, batch_tokens_per_s, render
from vllm_slo.bench.workload import DEFAULT_CLASSES
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.core.attainment import RequestRecord
from vllm_slo.sim.stock_load import find_speedup

# --- demo: arithmetic and verdict ----------------------------------------------------------------

ZERO = ZeroLoad(((64, 0.05), (512, 0.3), (960, 0.6)), 0.02, "lone")


def test_the_rate_offers_the_tokens_the_machine_can_process() -> None:
    token_s = (ZERO.ttft_s(960) - ZERO.ttft_s(128)) / 832
    scale = demo_servers.MAX_CONTEXT / 2048
    tokens = sum(c.share * (c.prompt.mean + c.output.mean) for c in DEFAULT_CLASSES) * scale
    assert rate_at(1.0, ZERO) * tokens * token_s == pytest.approx(1.0)
    assert rate_at(0.5, ZERO) == pytest.approx(rate_at(1.0, ZERO) / 2)


@pytest.mark.parametrize("long_s", [0.05, 0.0500001, 0.02])
def test_a_machine_on_which_length_costs_nothing_gets_a_sane_rate(long_s: float) -> None:
    """There its steps bound it: 64 requests decode in one."""
    zero = ZeroLoad(((64, 0.05), (960, long_s)), 0.01, "fast")
    assert 0 < rate_at(0.8, zero) < 100


def run_of(name: str, records: list[RequestRecord]) -> ServerRun:
    return ServerRun(
        ServerTarget(name, "http://127.0.0.1:1"),
        ServerInfo("tiny", None, None),
        10.0,
        tuple(SentRequest(record, 0.0) for record in records),
    )


def record(name: str, ttft_s: float, *, objective: bool = True, finished: bool = True) -> Any:
    return RequestRecord(
        name, "chat", 0.0, (ttft_s,), 1.0 if objective else None, None, "served", finished, 5
    )


def test_the_verdict_is_one_line_for_each_server() -> None:
    good = run_of("ours", [record("a", 0.5), record("b", 0.9), record("c", 2.0)])
    bad = run_of("stock", [record("a", 0.5), record("b", 9.0, finished=False)])
    plain = run_of("plain", [record("a", 0.5, objective=False)])
    report = BenchReport(Workload("w", 0, 1.0, "test", ()), ZERO, (good, bad, plain), "test")
    batch, done = f"batch work {1 / 0.5:.0f} tokens/s", "all finished after 10.0 s"
    assert demo.verdict(report).splitlines() == [
        "ours: 67% of objectives kept, goodput 0.20 requests/s, all finished after 10.0 s",
        "stock: 50% of objectives kept, goodput 0.10 requests/s, NOT all finished after 10.0 s",
        f"plain: 0% of objectives kept, goodput 0.00 requests/s, {batch}, {done}",
    ]
    assert demo.finished(good)
    assert not demo.finished(bad)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (DraftCounts(40, 300, 90), "2.25 of 7.5 draft tokens accepted per step of a request"),
        (DraftCounts(0, 0, 0), "nothing was drafted"),
    ],
)
def test_the_verdict_tells_what_was_accepted(counts: DraftCounts, said: str) -> None:
    runs = tuple(run_of(name, [record("a", 0.5)]) for name in ("vllm-slo", "with trees"))
    workload = Workload("w", 0, 1.0, "test", ())
    report = BenchReport(workload, ZERO, runs, "test", drafts={"with trees": counts})
    kept = "100% of objectives kept, goodput 0.10 requests/s"
    assert demo.verdict(report).splitlines() == [
        f"vllm-slo: {kept}, all finished after 10.0 s",
        f"with trees: {kept}, all finished after 10.0 s",
        f"with trees: {said}",
    ]
    first, second = report.to_dict()["servers"]
    assert "speculation" not in first
    mean = counts.accepted_tokens / counts.drafts if counts.drafts else None
    assert second["speculation"]["accepted_per_step"] == mean
    assert second["speculation"]["drafts"] == counts.drafts


@pytest.mark.parametrize("flag", ["load", "duration", "parameters", "replicas"])
@pytest.mark.parametrize("number", ["0", "-1"])
def test_an_impossible_demo_is_refused_before_a_server_starts(
    flag: str, number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", f"--{flag}", number, "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert said.err.startswith(f"vllm-slo: error: argument --{flag}: must be ")
    assert said.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [["--speculate"], ["--load", "1.5"]])
def test_what_compares_single_servers_is_refused_with_replicas(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", *option, "--replicas", "2", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"vllm-slo: error: {option[0]}: is for single servers")
    assert said.out == ""
    assert not (tmp_path / "out").exists()


def test_what_is_compared_differs_in_the_draft_alone(tmp_path: Path) -> None:
    stock, ours, trees = candidates(1, speculate=True)
    assert candidates(1) == (stock, ours)
    assert (ours.command, ours.send_slo, ours.arguments(tmp_path)) == (demo_servers.OURS, True, [])
    assert (trees.command, trees.send_slo) == (demo_servers.OURS, True)
    assert trees.arguments(tmp_path) == ["--draft-model=tiny"]
    assert len(trees.name) <= len(stock.name)  # the table is as wide as a terminal


def test_a_machine_that_slows_down_harms_no_server_of_ours_more_than_the_other() -> None:
    compared = candidates(1, speculate=True)
    stock, ours, trees = compared
    assert [demo.in_turn(compared, seed) for seed in (0, 1)] == [
        [stock, ours, trees],
        [stock, trees, ours],
    ]
    assert demo.in_turn(candidates(1), 1) == [stock, ours]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["--replicas", "2", "--duration", "9"], "--duration 9.0 --seed 0 --replicas 2"),
        (["--speculate", "--load", "2"], "--load 2.0 --seed 0 --replicas 1 --speculate"),
    ],
)
def test_a_report_tells_the_command_that_repeats_it(asked: list[str], expected: str) -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    args = parser.parse_args(asked)
    said = demo.command_line(args)
    assert said == f"vllm-slo demo {expected}"
    assert parser.parse_args(said.split()[2:]) == args


# --- demo: servers -------------------------------------------------------------------------------

HEALTHY = """
import http.server, pathlib, signal, socket, subprocess, sys
child = '''
import pathlib, signal, socket, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
listener = socket.create_server(("127.0.0.1", 0))
part = pathlib.Path(sys.argv[1] + ".part")
part.write_text(str(listener.getsockname()[1]))
part.rename(sys.argv[1])
time.sleep(60)
'''
marker = pathlib.Path(sys.argv[1]) / "child-port"
subprocess.Popen([sys.executable, "-c", child, str(marker)])
port = int(next(word for word in sys.argv if word.startswith("--port="))[7:])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path == "/health" and marker.exists()
        self.send_response(200 if ready else 503)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def quiet() -> Console:
    return Console(file=io.StringIO())


def assert_soon_silent(port: int) -> None:
    """Who is killed listens for a moment longer."""
    deadline_s = time.monotonic() + patience(10)
    while listens(port) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not listens(port)


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


TOLD_TO_END = """
import argparse, pathlib, sys, time
from vllm_slo.bench import demo, demo_servers
fake, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def held(args, console):
    with demo_servers.server(
        demo_servers.Candidate("a fake", ("-c", fake)), folder, folder, console
    ):
        print("up", flush=True)
        time.sleep(60)
demo.demo = held
demo.run(argparse.Namespace())
"""


def test_a_demo_that_is_told_to_end_takes_its_server_along(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TOLD_TO_END, HEALTHY, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "up" not in (line := process.stdout.readline()):
            assert line
        port = int((tmp_path / "child-port").read_text())
        assert listens(port)
        process.terminate()
        assert process.wait(patience(30)) == 143
    assert_soon_silent(port)


def test_a_server_is_stopped_with_all_its_children(tmp_path: Path) -> None:
    """The child ignores the gentle signal and outlives the server for a moment."""
    console = quiet()
    with demo_servers.server(
        Candidate("a fake", ("-c", HEALTHY), True), tmp_path, tmp_path, console
    ) as url:
        with urllib.request.urlopen(f"{url}/health", timeout=patience(10)) as answer:
            assert answer.status == 200
        child = int((tmp_path / "child-port").read_text())
        assert listens(child)
        own = int(url.rpartition(":")[2])
    assert not listens(own)
    assert_soon_silent(child)
    assert (tmp_path / "a-fake.log").is_file()


@pytest.mark.parametrize("code", ["", "import time; time.sleep(0.7); "])
def test_a_server_that_dies_shows_the_end_of_its_log(tmp_path: Path, code: str) -> None:
    lines = "import sys; [print('line', i) for i in range(40)]; sys.exit('boom: no memory')"
    dead = Candidate("dead", ("-c", code + lines), False)
    with (
        pytest.raises(BenchError, match="did not start") as caught,
        demo_servers.server(dead, tmp_path, tmp_path, quiet()),
    ):
        pytest.fail("it never answered")
    text = str(caught.value)
    assert "boom: no memory" in text
    assert "line 39" in text
    assert "line 5\n" not in text  # the end only
    assert str(tmp_path / "dead.log") in text


def test_a_server_that_never_answers_is_given_up_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_servers, "START_TIMEOUT_S", 0.3)
    stopped: list[int] = []
    stop = demo_servers._stop
    monkeypatch.setattr(demo_servers, "_stop", lambda p: (stop(p), stopped.append(p.returncode)))
    slow = Candidate("slow", ("-c", "import time; time.sleep(60)"), False)
    with (
        pytest.raises(BenchError, match="did not start"),
        demo_servers.server(slow, tmp_path, tmp_path, quiet()),
    ):
        pytest.fail("it never answered")
    assert len(stopped) == 1
    assert stopped[0] < 0


def test_servers_start_side_by_side_and_all_end_when_one_does_not_start(tmp_path: Path) -> None:
    both = [Candidate(name, ("-c", HEALTHY), True) for name in ("one", "two")]
    folders = [tmp_path / one.name for one in both]
    for folder in folders:
        folder.mkdir()
    with demo_servers.servers(both, folders[0], tmp_path, quiet()) as urls:
        assert len(set(urls)) == 2
        assert all(listens(int(url.rpartition(":")[2])) for url in urls)
    assert not any(listens(int(url.rpartition(":")[2])) for url in urls)
    both[1] = Candidate("two", ("-c", "import sys; sys.exit('boom')"), True)
    with (
        pytest.raises(BenchError, match="did not start") as caught,
        demo_servers.servers(both, folders[1], tmp_path, quiet()),
    ):
        pytest.fail("one never answered")
    assert "two.log" in str(caught.value)
    if (marker := folders[1] / "child-port").exists():
        assert_soon_silent(int(marker.read_text()))


def test_a_failing_body_stops_the_server_too(tmp_path: Path) -> None:
    fake = Candidate("fake", ("-c", HEALTHY), True)
    ports: list[int] = []

    def fail(url: str) -> None:
        ports.append(int(url.rpartition(":")[2]))
        assert listens(ports[0])
        raise ZeroDivisionError

    with (
        pytest.raises(ZeroDivisionError),
        demo_servers.server(fake, tmp_path, tmp_path, quiet()) as url,
    ):
        fail(url)
    assert not listens(ports[0])


def arguments(out: Path) -> list[str]:
    return ["demo", "--out", str(out)]


def test_a_demo_whose_server_fails_is_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = Candidate("dead", ("-c", "import sys; sys.exit('boom')"), False)
    monkeypatch.setattr(demo_servers, "CANDIDATES", (dead,))
    monkeypatch.setattr(demo, "choose_model", lambda *_: Model(tmp_path))
    assert cli.main(arguments(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm-slo: error: ")
    assert error.rstrip().endswith("boom")
    assert "Traceback" not in error


def test_a_demo_that_cannot_write_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(arguments(tmp_path / "file" / "out")) == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm-slo: error: --out: cannot write")
    assert "Traceback" not in error


@pytest.mark.parametrize("stderr", ["", "a warning\nValueError: too small\n"])
def test_a_twin_that_cannot_be_made_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str
) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(demo_load.profiles, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(demo_load.subprocess, "run", fail)
    with pytest.raises(BenchError) as caught:
        twin(1.0, quiet())
    assert str(caught.value).startswith("--parameters: ")
    assert ("too small" in str(caught.value)) is bool(stderr)


# --- demo: what suits a machine -------------------------------------------------------------------


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the machine is said to do; models are not written."""
    found: dict[str, Any] = {"dtype": "bfloat16", "flops_per_s": 200e9}
    monkeypatch.setattr(demo_load, "_child", lambda *_: found)
    monkeypatch.setattr(demo_load, "twin", lambda parameters, _: Path(f"{parameters:.0f}"))
    monkeypatch.setattr(demo_load, "runs_on_cpu", lambda: True)
    return found


@pytest.mark.parametrize(
    ("flops_per_s", "parameters"),
    [(200e9, 100e6), (100e9, 50e6), (60e9, 35e6), (1e6, SIZES[0]), (1e15, SIZES[-1])],
)
def test_a_prompt_token_takes_about_a_millisecond_on_any_cpu(
    speed: dict[str, Any], flops_per_s: float, parameters: float
) -> None:
    speed["flops_per_s"] = flops_per_s
    folder = choose_model(None, quiet()).folder
    assert float(folder.name) == pytest.approx(parameters, rel=0.02)
    assert choose_model(7e6, quiet()).folder == Path("7000000"), "a size that is given is kept"


def test_a_cpu_serves_in_the_numbers_in_which_it_is_fast(speed: dict[str, Any]) -> None:
    assert choose_model(None, quiet()).options == ("--dtype=bfloat16",)
    speed["dtype"] = "float32"
    assert choose_model(None, quiet()).options == ("--dtype=float32",)


def test_a_gpu_is_not_measured_by_its_cpu(
    monkeypatch: pytest.MonkeyPatch, speed: dict[str, Any]
) -> None:
    monkeypatch.setattr(demo_load, "runs_on_cpu", lambda: False)
    assert choose_model(None, quiet()) == Model(Path(f"{demo_load.GPU_SIZE:.0f}"))


@pytest.mark.slow
def test_the_speed_of_this_machine_is_measured() -> None:
    """In a process of its own, as torch need not be loaded here."""
    found = demo_load._child("vllm_slo.tiny.speed", "--parameters")
    assert found["dtype"] in ("bfloat16", "float32")
    assert found["flops_per_s"] > 0
    with pytest.raises(BenchError, match=r"--load: .*JSONDecodeError"):
        demo_load._child("vllm_slo.sim.stock_load", "--load", "no question")


STEPS = StepTimes(0.015, 0.020, ZeroLoad(((16, 0.034), (64, 0.082), (600, 0.618)), 0.015, "lone"))


def test_step_times_as_the_simulator_takes_them() -> None:
    """One more prompt token takes 1 ms, one more decode a third of that."""
    asked = STEPS.question()
    (decode_s, _, alone_s), (prompt_s, _, begin_s) = asked["step_time"]
    assert prompt_s == pytest.approx(0.001)
    assert alone_s + decode_s == pytest.approx(STEPS.lone_s)
    assert alone_s + TOGETHER * decode_s == pytest.approx(STEPS.together_s)
    first_s = max(alone_s + 16 * decode_s, begin_s + 16 * prompt_s) + asked["frontend_s"]
    assert first_s == pytest.approx(0.034)
    assert 0 <= asked["frontend_s"] <= STEPS.lone_s


@pytest.mark.slow
def test_what_stock_carries_is_where_it_begins_to_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time is exact: a little more than is carried misses the attainment asked for."""
    asked: list[dict[str, Any]] = []

    def here(_module: str, _option: str, question: str) -> dict[str, float]:
        asked.append(json.loads(question))
        return {"speedup": find_speedup(asked[-1])}

    monkeypatch.setattr(demo_load, "_child", here)
    carried = find_carried(STEPS, 0.3)
    per_s = len(asked[0]["windows"][0]) / demo_load.WINDOW_S
    assert 0.2 < carried < 1 / (STEPS.prompt_token_s * 100), "no more than it could ever process"
    (question,) = asked
    speedup = carried / per_s

    def faster(times: float) -> dict[str, Any]:
        windows = [
            [{**one, "at_s": one["at_s"] / (speedup * times)} for one in window]
            for window in question["windows"]
        ]
        return {**question, "windows": windows}

    assert find_speedup(faster(0.5)) > 1.5
    assert find_speedup(faster(2.0)) < 0.75
    slower = replace(
        STEPS, zero=ZeroLoad(tuple((n, 2 * s) for n, s in STEPS.zero.ttft_points), 0.03)
    )
    slower = replace(slower, lone_s=2 * STEPS.lone_s, together_s=2 * STEPS.together_s)
    assert find_carried(slower, 0.3) == pytest.approx(carried / 2, rel=0.25), "half as fast"


@pytest.mark.parametrize("carried", [0.4, 1.0, 1.6, 40.0])
def test_every_machine_is_sent_enough_requests_of_each_class(
    monkeypatch: pytest.MonkeyPatch, carried: float
) -> None:
    """Of a machine that carries few, requests are shorter; of one that carries many, there are
    more of them."""
    scales: list[float] = []

    def find(_: StepTimes, scale: float) -> float:
        scales.append(scale)
        return carried * demo_load.LENGTH_SCALE / scale

    monkeypatch.setattr(demo_load, "find_carried", find)
    chosen = choose_load(STEPS, 0)
    workload = chosen.workload
    counts = Counter(one.slo_class for one in workload.requests)
    backlog = counts.pop("batch")
    assert set(counts) == {spec.name for spec in ONLINE}
    assert counts.total() >= REQUESTS - 1
    assert SHORTEST_S <= workload.duration_s <= LONGEST_S
    assert counts.total() / workload.duration_s == pytest.approx(LOAD * chosen.carried, rel=0.02)
    assert scales[0] == demo_load.LENGTH_SCALE
    assert len(scales) == (2 if carried < 1.05 else 1)
    batch = [one for one in workload.requests if one.slo_class == "batch"]
    assert len(batch) == backlog > 0
    assert {one.at_s for one in batch} == {BATCH_AT_S}
    assert all(one.slo_body() is None for one in batch)
    steps_of_ttft = [one.ttft_slo_s / STEPS.lone_s for one in workload.requests if one.ttft_slo_s]
    assert 10 < median(steps_of_ttft) < 100
    assert [one.at_s for one in workload.requests] == sorted(one.at_s for one in workload.requests)
    assert f"stock vLLM can serve {chosen.carried:.2f} requests/s" in str(chosen)
    assert f"{ATTAINMENT:.0%}" in str(chosen)
    assert choose_load(STEPS, 0) == chosen
    assert choose_load(STEPS, 1) != chosen
    assert choose_load(STEPS, 0, 2.0, 10.0).workload.duration_s == 10.0


# --- demo: what it shows --------------------------------------------------------------------------


def test_what_was_kept_is_told_while_requests_end() -> None:
    tally = Tally(5)
    assert kept_so_far(tally) == ""
    tally.asked.update({"chat": 4, "code": 1})
    tally.kept.update({"chat": 3})
    assert kept_so_far(tally) == "60% (chat 75%, code 0%)"


def test_batch_work_is_measured_over_the_time_it_took() -> None:
    times = ((2.0, 3.0), (4.0, 7.0, 10.0))
    batch = [
        RequestRecord(f"b{n}", "batch", 2.0, ends, None, None, "served", True, 5)
        for n, ends in enumerate(times)
    ]
    run = run_of("ours", [*batch, record("a", 20.0)])
    assert batch_tokens_per_s(run) == pytest.approx(5 / 8)
    assert batch_tokens_per_s(run_of("none", [record("a", 1.0)])) is None


def burn(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        math.sqrt(2.0)


def test_the_client_and_the_servers_it_started_are_no_disturbance() -> None:
    watch = DisturbanceWatch()
    child = subprocess.Popen(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass\ninput()"],
        stdin=subprocess.PIPE,
    )
    burn(0.3)
    while child_s(child.pid) < 0.4:
        time.sleep(0.01)
    own_s = sum(
        now_s - watch._own_s.get(pid, 0.0) for pid, now_s in DisturbanceWatch._own().items()
    )
    assert own_s >= 0.6, "both are its own"
    child.communicate()
    assert watch.result(1.1).step_ratio == 1.1


def child_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_other_processes_are_a_disturbance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores were busy that long, and this process had a part of it."""
    now = {"s": 100.0, "busy": 50.0, "stolen": 3.0, "own": 20.0}
    monkeypatch.setattr("vllm_slo.bench.disturbance._machine", lambda: (now["busy"], now["stolen"]))
    monkeypatch.setattr("vllm_slo.bench.disturbance.time.monotonic", lambda: now["s"])
    monkeypatch.setattr("vllm_slo.bench.disturbance.psutil.cpu_count", lambda: 2)
    monkeypatch.setattr(DisturbanceWatch, "_own", staticmethod(lambda: {1: now["own"]}))
    watch = DisturbanceWatch()
    now |= {"s": 110.0, "busy": 65.0, "stolen": 4.0, "own": 29.0}
    found = watch.result()
    assert found.others == pytest.approx((15 - 9) / 20)
    assert found.stolen == pytest.approx(1 / 20)
    assert found.taken == pytest.approx(7 / 20)


def test_a_disturbance_is_told_with_what_it_does() -> None:
    quiet_run, busy, slow = Disturbance(0.02, 0.0), Disturbance(0.3, 0.1), Disturbance(0, 0, 1.4)
    assert quiet_run.warnings() == []
    (said,) = busy.warnings()
    assert "other processes took 30% of the cores" in said
    assert "fewer objectives were kept" in said
    (said,) = slow.warnings()
    assert "1.40 times as long" in said
    assert "harder to keep" in said
    assert "easier" in Disturbance(0, 0, 0.7).warnings()[0]
    assert unlike(quiet_run, busy) and not unlike(quiet_run, slow)


def test_a_report_says_that_its_runs_cannot_be_compared() -> None:
    runs = tuple(run_of(name, [record("a", 0.5)]) for name in ("stock vLLM", "vllm-slo"))
    disturbances = {"stock vLLM": Disturbance(0.02, 0.0), "vllm-slo": Disturbance(0.3, 0.0)}
    report = BenchReport(
        Workload("w", 0, 1.0, "test", ()), ZERO, runs, "test", disturbances=disturbances
    )
    (said,) = report.comparison_warnings()
    assert "(others took 2% and 30%)" in said
    data = report.to_dict()
    assert data["warnings"] == [said]
    assert data["servers"][1]["disturbance"] == {"others": 0.3, "stolen": 0.0, "step_ratio": 1.0}
    assert data["servers"][0]["warnings"] == []
    console = Console(file=io.StringIO(), width=200)
    console.print(render(report))
    assert isinstance(console.file, io.StringIO)
    assert said in console.file.getvalue()
    assert BenchReport(report.workload, ZERO, runs, "test").comparison_warnings() == []
