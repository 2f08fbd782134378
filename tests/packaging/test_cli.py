# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-slo``: its help, and ``serve``'s command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from vllm_slo import __version__, cli, completion, tiny
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
        (["simulat"], "'simulat' is not a command; did you mean simulate?"),
        (["demo", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["demo", "--load", "heavy"], "argument --load: 'heavy' is not a number"),
    ],
)
def test_a_wrong_command_line_is_status_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"vllm-slo: error: {said}")
    assert line.count("\n") == 1


def test_without_a_command_the_help_is_printed_and_the_status_is_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 2
    assert "exit status:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (ZeroDivisionError("of ours"), 70)]
)
def test_a_status_of_its_own_for_what_is_no_answer(
    error: BaseException,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(completion, "run", fail)
    assert cli.main(["completion", "bash"]) == status
    traceback = capsys.readouterr().err
    assert ("ZeroDivisionError: of ours" in traceback) == (status == 70)
    assert ("Traceback" in traceback) == (status == 70)


@pytest.mark.parametrize("words", [["--help"], ["completion", "bash"], ["check", "--print-schema"]])
def test_a_reader_that_leaves_early_ends_it_quietly(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "vllm_slo.cli", *words],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_text_with_which_the_plugin_ends_the_process_is_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise SystemExit("vllm-slo: error: no such profile")

    monkeypatch.setattr(completion, "run", refuse)
    assert cli.main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == "vllm-slo: error: no such profile\n"


def test_another_broken_pipe_is_a_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BrokenPipeError("a socket")

    monkeypatch.setattr(completion, "run", fail)
    assert cli.main(["completion", "bash"]) == 70
    assert "BrokenPipeError: a socket" in capsys.readouterr().err


def test_the_list_of_commands_loads_none_of_them() -> None:
    """Help and completion of the first word are as fast as Python itself."""
    program = "import sys; from vllm_slo import cli; cli.parsers(()); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"numpy", "pydantic", "rich", "shtab", "torch", "vllm", "yaml"}
    assert "argparse" in loaded


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
    return serve.command_line(*cli.parse(["serve", *argv]))


def value_of(command: list[str], flag: str) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


def test_serve_is_vllm_serve_with_our_flags() -> None:
    command = command_line("some-model", "--port", "8001", "--max-num-seqs=4")
    assert command[:3] == ["vllm", "serve", "some-model"]
    assert value_of(command, "--scheduler-cls") == "vllm_slo.Scheduler"
    assert value_of(command, "--middleware") == "vllm_slo.engine.http.SLOMiddleware"
    assert command[-3:] == ["--port", "8001", "--max-num-seqs=4"]
    assert command_line("--model", "some-model", "--port", "8001", "--max-num-seqs=4") == command
    assert command_line("--max-num-seqs=4", "some-model", "--port", "8001")[2] == "some-model"
    assert "--additional-config" not in command
    assert "--served-model-name" not in command


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "8000", "tiny"],
        ["--enforce-eager", "tiny"],
        ["--max-num-seqs=4", "--port", "8000", "tiny"],
        ["--slo-config", "slo.yaml", "--seed", "-1", "tiny"],
        ["--port", "8000"],
    ],
)
def test_the_value_of_a_flag_is_not_the_model(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="name the model first: vllm-slo serve MODEL"):
        cli.parse(["serve", *words])


def test_the_model_can_stand_in_vllms_file(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: some-model\nport: 8001\n")
    args, rest = cli.parse(["serve", "--slo-config", "s.yaml", "--config", str(file)])
    assert (args.model, rest) == ("some-model", ["--config", str(file)])
    assert cli.parse(["serve", "other", "--config", str(file)])[0].model == "other"


def test_two_names_of_the_model_must_agree() -> None:
    assert cli.parse(["serve", "m", "--model", "m"])[0].model == "m"
    with pytest.raises(ConfigError, match="two models are named: m and --model n"):
        cli.parse(["serve", "m", "--model", "n"])


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
