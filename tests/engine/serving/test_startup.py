# SPDX-License-Identifier: Apache-2.0
"""What a server refuses to start with: one clear line, a non-zero exit, no model loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from patience import patience

pytest.importorskip("vllm")

from live_server import SMALL, command, environment
from prometheus_client import REGISTRY, CollectorRegistry
from vllm import EngineArgs

from vllm_slo import tiny
from vllm_slo.config import profiles
from vllm_slo.config.command_line import Flags
from vllm_slo.config.profiles import ProfileReport
from vllm_slo.core.step_time.fit import FitReport
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.compat import version as vllm_version
from vllm_slo.engine.compat.probe import Seam
from vllm_slo.engine.scheduling.step_time_profile import profile_key
from vllm_slo.engine.serving import plugin
from vllm_slo.engine.telemetry.exposition import FOLDER_VARIABLE
from vllm_slo.errors import ConfigError

SCHEDULER = ["--scheduler-cls", "vllm_slo.Scheduler"]


def start(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=False,
        cwd=folder,
        env=environment(),
    )


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of ours in what a command wrote."""
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("vllm-slo: error: ")]
    assert len(lines) == 1, done.stderr
    assert done.stderr.rstrip().endswith(lines[0])
    return lines[0].removeprefix("vllm-slo: error: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("classes: [", "slo.yaml:1: broken YAML"),
        ("classes:\n  chat: {ttft_msec: 5}\n", "slo.yaml:2: classes.chat.ttft_msec: unknown key"),
        (None, "cannot read the file 'slo.yaml'"),
        ("profile: nope.json\n", "cannot read the step-time profile nope.json"),
    ],
)
def test_our_command_refuses(tmp_path: Path, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / "slo.yaml").write_text(text)
    arguments = [command("vllm-slo"), "serve", "tiny", "--slo-config", "slo.yaml"]
    assert expected in complaint(start(arguments, tmp_path))


@pytest.mark.slow
def test_the_commands_of_vllm_refuse(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text("clases: {}\n")
    model, additional = str(tiny.path("target")), '{"slo_config": "slo.yaml"}'
    arguments = [command("vllm"), "serve", model, *SCHEDULER, "--additional-config", additional]
    assert "slo.yaml:1: clases: unknown key" in complaint(start(arguments, tmp_path))
    (tmp_path / "vllm.yaml").write_text(
        f"model: {model}\n"
        "scheduler-cls: vllm_slo.Scheduler\n"
        "additional-config: {slo_config: {classes: {chat: {ttft_ms: -1}}}}\n"
    )
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    done = start([*module, "--config", "vllm.yaml"], tmp_path)
    assert "slo_config: classes.chat.ttft_ms" in complaint(done)


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.engine
def test_a_profile_of_another_model_stops_the_server(tmp_path: Path) -> None:
    model = str(tiny.path("target"))
    engine = EngineArgs(model, dtype="float32", max_model_len=1024, enforce_eager=True)
    key = profile_key(engine.create_engine_config())
    profiles.save(
        ProfileReport(
            replace(key, model="another", model_hash="0" * 64),
            FitReport(StepTimeModel.prior(), 1.0, 0.0, 0.0, 0),
            (),
        ),
        tmp_path / "profile.json",
    )
    (tmp_path / "slo.yaml").write_text("profile: profile.json\n")
    serve = [command("vllm-slo"), "serve", "tiny", "--slo-config", "slo.yaml", *SMALL]
    done = start(serve, tmp_path)
    assert done.returncode != 0
    line = "vllm-slo: error: the step-time profile profile.json is of another model: another ("
    assert (done.stdout + done.stderr).count(line) == 1


# --- the plugin ----------------------------------------------------------------------------------


def test_another_version_stops_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_slo.cli import main

    monkeypatch.setattr(vllm_version, "version", lambda _: "0.34.0")
    with pytest.raises(SystemExit, match=r"^vllm-slo: error: vllm-slo supports vLLM 0\.31 to"):
        plugin._check_or_exit(Flags(["vllm", "serve", "m", *SCHEDULER]))
    assert main(["serve", "tiny"]) == 2
    assert capsys.readouterr().err.startswith(
        "vllm-slo: error: vllm-slo supports vLLM 0.31 to 0.33"
    )


def test_a_vllm_that_lacks_a_name_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Seam("vllm.v1.engine.async_llm.AsyncLLM", "gone", "a test")
    monkeypatch.setattr(plugin, "SERVING", (gone,))
    line = r"^vllm-slo: error: vLLM \S+ does not fit: \S+AsyncLLM has no gone, which is needed"
    with pytest.raises(SystemExit, match=line):
        plugin._check_or_exit(Flags(["vllm", "serve", "m", *SCHEDULER]))


def registered(monkeypatch: pytest.MonkeyPatch, *argv: str) -> list[str]:
    """What the plugin adds to the command line."""
    monkeypatch.setattr(sys, "argv", list(argv))
    monkeypatch.setattr(plugin.atexit, "register", lambda *_, **__: None)
    monkeypatch.setattr(REGISTRY, "register", CollectorRegistry().register)
    monkeypatch.setenv(FOLDER_VARIABLE, "unset")
    plugin.register()
    return sys.argv[len(argv) :]


ADDED = ["--middleware", plugin.MIDDLEWARE]


@pytest.mark.parametrize(
    ("argv", "added"),
    [
        (["vllm", "serve", "m", *SCHEDULER], ADDED),
        (["/x/vllm", "serve", "m", "--scheduler_cls=vllm_slo.Scheduler"], ADDED),
        (["/x/openai/api_server.py", "--model", "m", *SCHEDULER], ADDED),
        (["vllm", "serve", "m", *SCHEDULER, *ADDED], []),
        (["vllm", "serve", "m"], []),
        (["vllm", "bench", "serve", "--model", "vllm_slo.Scheduler"], []),
        (["train.py", *SCHEDULER], []),
    ],
)
def test_the_middleware_comes_with_the_scheduler(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], added: list[str]
) -> None:
    assert registered(monkeypatch, *argv) == added
    ours = "serve" in argv[1:2] or "api_server" in argv[0]
    wanted = ours and "vllm_slo.Scheduler" in " ".join(argv)
    assert (os.environ[FOLDER_VARIABLE] != "unset") is wanted


def test_the_middleware_with_a_config_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    argv = ["vllm", "serve", "--config", str(path)]
    path.write_text("model: m\nscheduler-cls: vllm_slo.Scheduler\n")
    assert registered(monkeypatch, *argv) == ADDED
    path.write_text(f"scheduler-cls: vllm_slo.Scheduler\nmiddleware: [{plugin.MIDDLEWARE}]\n")
    assert registered(monkeypatch, *argv) == []
    path.write_text("model: m\nadditional-config: {slo_config: {clases: {}}}\n")
    assert registered(monkeypatch, *argv) == []
    with pytest.raises(SystemExit, match="clases: unknown key"):
        registered(monkeypatch, *argv, *SCHEDULER)
    for unreadable in ("a: [", "- 1", ""):
        path.write_text(unreadable)
        assert registered(monkeypatch, *argv) == []
    assert registered(monkeypatch, "vllm", "serve", "--config") == []


def test_our_command_line(tmp_path: Path) -> None:
    from vllm_slo import cli
    from vllm_slo.engine.serving import serve

    args, rest = cli.parse(["serve", "tiny", "--port", "1", "--additional-config", '{"a": 1}'])
    line = serve.command_line(args, rest)
    assert line[:3] == ["vllm", "serve", str(tiny.path("target"))]
    assert line[3:5] == ["--served-model-name", "tiny"]
    assert line[-4:] == ["--additional-config", '{"a": 1}', "--port", "1"]
    for wrong in ("{", "[]"):
        with pytest.raises(ConfigError, match="--additional-config: not "):
            serve.command_line(*cli.parse(["serve", "m", "--additional-config", wrong]))
