# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo completion``: scripts with which shells complete commands, options and files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_slo import cli
from vllm_slo.completion import SHELLS


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The script for bash."""
    assert cli.main(["completion", "bash"]) == 0
    file = tmp_path / "vllm-slo.bash"
    file.write_text(capsys.readouterr().out)
    return file


def completed(script: Path, *words: str) -> set[str]:
    """What bash offers for the last of these words."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    program = (
        f". {script}; COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; "
        "$(complete -p vllm-slo | sed 's/.*-F \\([^ ]*\\).*/\\1/'); "
        "printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=True, cwd=script.parent
    )
    return set(done.stdout.split())


def test_commands_are_completed(script: Path) -> None:
    assert completed(script, "vllm-slo", "p") == {"profile", "plan"}
    assert set(cli.COMMANDS) <= completed(script, "vllm-slo", "")


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_options_of_every_command_are_completed(script: Path, command: str) -> None:
    options = {
        name
        for action in cli.parsers((command,))[command].every_action()
        for name in action.option_strings
        if action.help != "==SUPPRESS=="
    }
    assert "--help" in options
    offered = completed(script, "vllm-slo", command, "--")
    assert {name for name in options if name.startswith("--")} <= offered
    assert "--out" not in completed(script, "vllm-slo", "profile", "--o")  # an old name


def test_files_are_completed_where_an_option_names_one(script: Path) -> None:
    (script.parent / "slo.yaml").write_text("")
    (script.parent / "folder").mkdir()
    for words in (["serve", "--slo-config", "s"], ["check", "s"]):
        assert "slo.yaml" in completed(script, "vllm-slo", *words)
    assert completed(script, "vllm-slo", "demo", "--out", "") == {"folder"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "endpoint-picker" in text and "draft-servers" in text
