# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-slo``: its help, ``serve``'s command line, and ``demo``'s servers."""

from __future__ import annotations

import argparse
import io
import json
import socket
import subprocess
import sys
import time
import types
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vllm_slo import __version__, cli, tiny
from vllm_slo.bench import demo
from vllm_slo.bench.client import SentRequest, ServerRun
from vllm_slo.bench.demo import Candidate
from vllm_slo.bench.drafts import DraftCounts
from vllm_slo.bench.endpoint import ServerInfo, ServerTarget
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.report import BenchReport
from vllm_slo.bench.workload import DEFAULT_CLASSES, Workload
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.core.attainment import RequestRecord
from vllm_slo.engine import cpu_alias, serve
from vllm_slo.errors import ConfigError, IncompatibleVLLMError

# --- the command itself --------------------------------------------------------------------------


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, (_, line) in cli.COMMANDS.items():
        assert name in text
        assert line.split(" ")[0] in text


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: vllm-slo {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"vllm-slo {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "arguments are required: COMMAND"),
        (["simulat"], "invalid choice: 'simulat'"),
        (["serve"], "arguments are required: model"),
        (["demo", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["demo", "--load", "heavy"], "invalid float value: 'heavy'"),
    ],
)
def test_a_wrong_command_line_is_status_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        (["--slo-config", "no/such/file.yaml"], "cannot read the file 'no/such/file.yaml'"),
        (["--additional-config", "{broken"], "--additional-config: not JSON"),
        (["--additional-config", "[1]"], "--additional-config: not a JSON object"),
        (["--additional-config", '{"slo_config": {"ageing": 1}}'], "did you mean 'ageing_s'?"),
    ],
)
def test_an_error_of_ours_is_one_line_and_status_2(
    rest: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "check_vllm", lambda: None)
    assert cli.main(["serve", "some-model", *rest]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("vllm-slo: error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_another_vllm_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise IncompatibleVLLMError("found 0.33.0")

    monkeypatch.setattr(serve, "check_vllm", refuse)
    assert cli.main(["serve", "some-model"]) == 2
    assert capsys.readouterr().err == "vllm-slo: error: found 0.33.0\n"


def test_no_traceback_from_the_real_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_slo.cli", "bench", "--rate", "-1", "--url", "http://[::1]:9"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


# --- serve ---------------------------------------------------------------------------------------


def command_line(*argv: str) -> list[str]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add_arguments(parser)
    return serve.command_line(*parser.parse_known_args(argv))


def value_of(command: list[str], flag: str) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


def test_serve_is_vllm_serve_with_our_flags() -> None:
    command = command_line("some-model", "--port", "8001", "--max-num-seqs=4")
    assert command[:3] == ["vllm", "serve", "some-model"]
    assert value_of(command, "--scheduler-cls") == "vllm_slo.Scheduler"
    assert value_of(command, "--middleware") == "vllm_slo.engine.http.SLOMiddleware"
    assert command[-3:] == ["--port", "8001", "--max-num-seqs=4"]
    assert "--additional-config" not in command
    assert "--served-model-name" not in command


def test_tiny_is_a_short_name_for_the_built_in_model() -> None:
    command = command_line("tiny")
    assert command[2] == str(tiny.path("target"))
    assert value_of(command, "--served-model-name") == "tiny"
    assert value_of(command, "--kv-cache-memory-bytes") == str(1 << 30)
    for given in ("--gpu-memory-utilization", "--kv-cache-memory-bytes"):
        assert command_line("tiny", given, "0.5").count("--kv-cache-memory-bytes") == (
            given == "--kv-cache-memory-bytes"
        )
    command = command_line("tiny", "--served-model-name", "mine")
    assert value_of(command, "--served-model-name") == "mine"
    command = command_line("tiny", "--served-model-name=mine")
    assert "--served-model-name" not in command


@pytest.mark.parametrize("dash", ["-", "_"])
def test_slo_config_is_merged_into_additional_config(tmp_path: Path, dash: str) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text("classes: {chat: {ttft_ms: 500}}\n")
    other = '{"other": {"key": 1}, "slo_config": "overridden"}'
    for flags in (
        [f"--slo{dash}config", str(file), f"--additional{dash}config", other],
        [f"--additional{dash}config={other}", f"--slo{dash}config={file}"],
    ):
        command = command_line("some-model", *flags)
        merged = json.loads(value_of(command, "--additional-config"))
        assert merged == {"other": {"key": 1}, "slo_config": str(file)}
        assert not [word for word in command if word.startswith("--additional_config")]


def test_a_configuration_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text("classes: {chat: {ttft_ms: -1}}\n")
    with pytest.raises(ConfigError, match=r"slo\.yaml:1"):
        command_line("some-model", "--slo-config", str(file))


def test_serve_hands_over_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    module: Any = types.ModuleType("vllm.entrypoints.cli.main")
    module.main = lambda: seen.append(list(sys.argv))
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", module)
    monkeypatch.setattr(cpu_alias, "register", lambda: None)
    monkeypatch.setattr(serve, "check_vllm", lambda: None)
    monkeypatch.setattr(sys, "argv", ["vllm-slo", "serve", "m", "--port", "1"])
    assert cli.main() == 0
    assert seen == [command_line("m", "--port", "1")]


# --- demo: arithmetic and verdict ----------------------------------------------------------------

ZERO = ZeroLoad(((64, 0.05), (512, 0.3), (960, 0.6)), 0.02, "lone")


def test_the_rate_offers_the_tokens_the_machine_can_process() -> None:
    token_s = (ZERO.ttft_s(960) - ZERO.ttft_s(128)) / 832
    scale = demo.MAX_CONTEXT / 2048
    tokens = sum(c.share * (c.prompt.mean + c.output.mean) for c in DEFAULT_CLASSES) * scale
    assert demo.rate_at(1.0, ZERO) * tokens * token_s == pytest.approx(1.0)
    assert demo.rate_at(0.5, ZERO) == pytest.approx(demo.rate_at(1.0, ZERO) / 2)


@pytest.mark.parametrize("long_s", [0.05, 0.0500001, 0.02])
def test_a_machine_on_which_length_costs_nothing_gets_a_sane_rate(long_s: float) -> None:
    """There its steps bound it: 64 requests decode in one."""
    zero = ZeroLoad(((64, 0.05), (960, long_s)), 0.01, "fast")
    assert 0 < demo.rate_at(0.8, zero) < 100


@pytest.mark.parametrize(
    ("cpuinfo", "for_cpus", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 fma\n", True, ["--dtype=float32"]),
        ("processor : 0\nflags\t\t: fpu avx2 fma\n", False, []),
        ("processor : 0\nflags\t\t: fpu avx2 avx512f amx_bf16\n", True, []),
        ("processor : 0\nFeatures\t: fp asimd bf16\n", True, []),
        (None, True, []),
    ],
)
def test_a_cpu_that_is_slow_in_bfloat16_serves_in_float32(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cpuinfo: str | None,
    for_cpus: bool,
    expected: list[str],
) -> None:
    monkeypatch.setattr(demo, "runs_on_cpu", lambda: for_cpus)
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    assert demo.dtype_arguments(path) == expected


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
    assert demo.verdict(report).splitlines() == [
        "ours: 67% of objectives kept, goodput 0.20 requests/s, all finished",
        "stock: 50% of objectives kept, goodput 0.10 requests/s, NOT all finished",
        "plain: 0% of objectives kept, goodput 0.00 requests/s, all finished",
    ]
    assert demo.finished(good)
    assert not demo.finished(bad)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (
            DraftCounts(40, 300, 90),
            "2.25 of 7.5 draft tokens accepted per step of a request",
        ),
        (DraftCounts(0, 0, 0), "nothing was drafted"),
    ],
)
def test_the_verdict_tells_what_was_accepted(counts: DraftCounts, said: str) -> None:
    runs = tuple(run_of(name, [record("a", 0.5)]) for name in ("vllm-slo", "with trees"))
    workload = Workload("w", 0, 1.0, "test", ())
    report = BenchReport(workload, ZERO, runs, "test", drafts={"with trees": counts})
    kept = "100% of objectives kept, goodput 0.10 requests/s"
    assert demo.verdict(report).splitlines() == [
        f"vllm-slo: {kept}, all finished",
        f"with trees: {kept}, all finished",
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
    assert cli.main(["demo", f"--{flag}", number, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert f"--{flag}: {number} is out of range" in said.err
    assert said.out == ""
    assert not (tmp_path / "out").exists()


def test_speculation_and_replicas_are_two_demos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["demo", "--speculate", "--replicas", "2", "--out", str(tmp_path / "out")]
    assert cli.main(asked) == 2
    said = capsys.readouterr()
    assert said.err.startswith("vllm-slo demo: --speculate: compares single servers")
    assert said.out == ""
    assert not (tmp_path / "out").exists()


def test_what_is_compared_differs_in_the_draft_alone(tmp_path: Path) -> None:
    stock, ours, trees = demo.candidates(1, speculate=True)
    assert demo.candidates(1) == (stock, ours)
    assert (ours.command, ours.send_slo, ours.arguments(tmp_path)) == (demo.OURS, True, [])
    assert (trees.command, trees.send_slo) == (demo.OURS, True)
    assert trees.arguments(tmp_path) == ["--draft-model=tiny"]
    assert len(trees.name) <= len(stock.name)  # the table is as wide as a terminal


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (["--replicas", "2", "--load", "0.6"], "--load 0.6 --duration 45.0 --seed 0 --replicas 2"),
        (["--speculate"], "--duration 45.0 --seed 0 --replicas 1 --speculate"),
    ],
)
def test_a_report_tells_the_command_that_repeats_it(asked: list[str], expected: str) -> None:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    args = parser.parse_args(asked)
    said = demo.command_line(args)
    assert said == f"vllm-slo demo {expected}"
    assert parser.parse_args(said.split()[2:]) == args


def test_a_free_port_can_be_bound() -> None:
    port = demo._free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


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


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


TOLD_TO_END = """
import argparse, pathlib, sys, time
from vllm_slo.bench import demo
fake, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def held(args, console):
    with demo.server(demo.Candidate("a fake", ("-c", fake)), folder, folder, console):
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
        assert process.wait(30) == 143
    deadline_s = time.monotonic() + 10
    while listens(port) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not listens(port)


def test_a_server_is_stopped_with_all_its_children(tmp_path: Path) -> None:
    """The child ignores the gentle signal and outlives the server for a moment."""
    console = quiet()
    with demo.server(
        Candidate("a fake", ("-c", HEALTHY), True), tmp_path, tmp_path, console
    ) as url:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            assert answer.status == 200
        child = int((tmp_path / "child-port").read_text())
        assert listens(child)
        own = int(url.rpartition(":")[2])
    assert not listens(own)
    deadline_s = time.monotonic() + 10
    while listens(child) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not listens(child)
    assert (tmp_path / "a-fake.log").is_file()


@pytest.mark.parametrize("code", ["", "import time; time.sleep(0.7); "])
def test_a_server_that_dies_shows_the_end_of_its_log(tmp_path: Path, code: str) -> None:
    lines = "import sys; [print('line', i) for i in range(40)]; sys.exit('boom: no memory')"
    dead = Candidate("dead", ("-c", code + lines), False)
    with (
        pytest.raises(BenchError, match="did not start") as caught,
        demo.server(dead, tmp_path, tmp_path, quiet()),
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
    monkeypatch.setattr(demo, "START_TIMEOUT_S", 0.3)
    stopped: list[int] = []
    stop = demo._stop
    monkeypatch.setattr(demo, "_stop", lambda p: (stop(p), stopped.append(p.returncode)))
    slow = Candidate("slow", ("-c", "import time; time.sleep(60)"), False)
    with (
        pytest.raises(BenchError, match="did not start"),
        demo.server(slow, tmp_path, tmp_path, quiet()),
    ):
        pytest.fail("it never answered")
    assert len(stopped) == 1
    assert stopped[0] < 0


def test_a_failing_body_stops_the_server_too(tmp_path: Path) -> None:
    fake = Candidate("fake", ("-c", HEALTHY), True)
    ports: list[int] = []

    def fail(url: str) -> None:
        ports.append(int(url.rpartition(":")[2]))
        assert listens(ports[0])
        raise ZeroDivisionError

    with (
        pytest.raises(ZeroDivisionError),
        demo.server(fake, tmp_path, tmp_path, quiet()) as url,
    ):
        fail(url)
    assert not listens(ports[0])


def arguments(out: Path) -> list[str]:
    return ["demo", "--out", str(out)]


def test_a_demo_whose_server_fails_is_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = Candidate("dead", ("-c", "import sys; sys.exit('boom')"), False)
    monkeypatch.setattr(demo, "CANDIDATES", (dead,))
    monkeypatch.setattr(demo, "twin", lambda *_: tmp_path)
    assert cli.main(arguments(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm-slo demo: ")
    assert error.rstrip().endswith("boom")
    assert "Traceback" not in error


def test_a_demo_that_cannot_write_is_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(arguments(tmp_path / "file" / "out")) == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm-slo demo: --out: cannot write")
    assert "Traceback" not in error


@pytest.mark.parametrize("stderr", ["", "a warning\nValueError: too small\n"])
def test_a_twin_that_cannot_be_made_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str
) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", stderr)

    monkeypatch.setattr(demo.profiles, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(demo.subprocess, "run", fail)
    with pytest.raises(BenchError) as caught:
        demo.twin(1.0, quiet())
    assert str(caught.value).startswith("--parameters: ")
    assert ("too small" in str(caught.value)) is bool(stderr)
