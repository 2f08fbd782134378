# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-slo``: its help, and ``serve``'s command line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from vllm_slo import __version__, cli, tiny
from vllm_slo.engine.serving import cpu_alias, serve
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
