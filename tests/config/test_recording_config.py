# SPDX-License-Identifier: Apache-2.0
"""The section `recording`, the flag ``--record``, and what is refused before a model is loaded."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from vllm_slo.config import recording
from vllm_slo.config.model import SLOConfig
from vllm_slo.config.recording import SALT_VARIABLE, RecordingConfig, check_path, salt_in
from vllm_slo.errors import ConfigError


def loaded(tmp_path: Path, text: str) -> SLOConfig:
    (tmp_path / "slo.yaml").write_text(text)
    return SLOConfig.load(tmp_path / "slo.yaml")


def test_nothing_is_recorded_unless_a_file_is_named() -> None:
    assert SLOConfig().recording == RecordingConfig()
    assert SLOConfig().recording.path is None
    assert RecordingConfig().tenants == "hashed"


def test_every_key_is_read(tmp_path: Path) -> None:
    text = "recording: {path: r.jsonl, max_mb: 1, files: 2, block_tokens: 16, tenants: plain}"
    assert loaded(tmp_path, text).recording == RecordingConfig(
        path="r.jsonl", max_mb=1, files=2, block_tokens=16, tenants="plain"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{max_mb: 0}", r"recording.max_mb: .*greater than or equal to 1"),
        ("{files: 0}", r"recording.files: .*greater than or equal to 1"),
        ("{block_tokens: 0}", r"recording.block_tokens: .*greater than or equal to 1"),
        ("{path: ''}", r"recording.path: .*at least 1 character"),
        ("{tenants: none}", r"recording.tenants: .*'hashed' or 'plain'"),
        ("{pat: r.jsonl}", r"recording.pat: unknown key; did you mean 'path'"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"slo.yaml:1: " + message):
        loaded(tmp_path, f"recording: {text}")


def test_additional_config_names_the_file() -> None:
    given: dict[str, Any] = {"slo_config": {"recording": {"path": "a", "files": 2}}, "record": "b"}
    assert SLOConfig.from_additional_config(given).recording == RecordingConfig(path="b", files=2)
    with pytest.raises(ConfigError, match="record: expected the path of a file, got 3"):
        SLOConfig.from_additional_config({"record": 3})
    with pytest.raises(ConfigError, match="record: expected the path of a file, got ''"):
        SLOConfig.from_additional_config({"record": ""})


# --- the file ------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    check_path(tmp_path / "r.jsonl")
    assert list(tmp_path.iterdir()) == []


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        check_path(path)
    message = str(refused.value)
    assert message.startswith(f"recording.path {str(path)!r}: ")
    return message.partition("': ")[2]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "no")
    assert refusal(tmp_path / "no" / "r") == f"there is no folder {folder!r}; make it"
    assert refusal(tmp_path) == "it is not a regular file; name another one"
    assert refusal(Path("/dev/null")) == "it is not a regular file; name another one"
    assert refusal(tmp_path / ("x" * 300)) == "File name too long; name another file"


def test_modes_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the system's answer: nothing is forbidden to root."""

    def writable(path: Path, mode: int) -> bool:
        return bool(stat.S_IMODE(path.stat().st_mode) & 0o200) or not mode & os.W_OK

    monkeypatch.setattr(recording.os, "access", writable)
    path = tmp_path / "r.jsonl"
    path.touch(0o444)
    assert refusal(path) == "it cannot be written; change its mode or owner"
    tmp_path.chmod(0o555)
    try:
        reason = f"no file can be made in {str(tmp_path)!r}; change its mode or owner"
        assert refusal(tmp_path / "other") == reason
    finally:
        tmp_path.chmod(0o755)


# --- the salt ------------------------------------------------------------------------------------


def test_a_salt_that_processes_share_is_made_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SALT_VARIABLE, raising=False)
    recording.share_salt()
    shared = salt_in(os.environ)
    recording.share_salt()
    assert salt_in(os.environ) == shared
    assert len(shared) == 16
    assert salt_in({}) != salt_in({})


@pytest.mark.parametrize("given", ["xyz", "00ff", "0" * 34])
def test_a_salt_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{SALT_VARIABLE}: not 32 hexadecimal digits; "):
        salt_in({SALT_VARIABLE: given})


# --- the flag ------------------------------------------------------------------------------------


def command_line(*argv: str) -> list[str]:
    from vllm_slo import cli
    from vllm_slo.engine.serving import serve

    return serve.command_line(*cli.parse(["serve", *argv]))


def test_the_flag_sets_it_for_one_server() -> None:
    pytest.importorskip("vllm")
    command = command_line("org/model", "--record", "r.jsonl", "--port", "1")
    said = json.loads(command[command.index("--additional-config") + 1])
    assert said == {"record": "r.jsonl"}
    assert "record" not in " ".join(command_line("org/model"))


def test_the_flag_sets_it_for_replicas_with_the_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from vllm_slo import cli
    from vllm_slo.router import serve
    from vllm_slo.router.arguments import AppArgs, embedded_config

    monkeypatch.chdir(tmp_path)
    args, rest = cli.parse(["serve", "m", "--replicas", "2", "--record", "r.jsonl"])
    said = AppArgs.checked(serve.app_args(args, rest)).additional_config()
    assert said["record"] == str(tmp_path / "r.jsonl")
    said = embedded_config({"recording": {"path": "x/r.jsonl", "files": 2}}, None)
    assert said["record"] == str(tmp_path / "x" / "r.jsonl")
    assert said["slo_config"]["recording"]["files"] == 2


def test_a_server_that_cannot_record_ends_before_it_loads_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from vllm_slo.config.command_line import Flags
    from vllm_slo.engine.serving import plugin

    monkeypatch.delenv(SALT_VARIABLE, raising=False)
    monkeypatch.setattr(plugin, "_probe", lambda: None)

    def check(path: Path) -> None:
        plugin._check_or_exit(Flags(["serve", "--additional-config", f'{{"record": "{path}"}}']))

    with pytest.raises(SystemExit, match=re.escape("vllm-slo: error: recording.path ")):
        check(tmp_path / "no" / "r.jsonl")
    assert SALT_VARIABLE not in os.environ
    check(tmp_path / "r.jsonl")
    assert SALT_VARIABLE in os.environ
