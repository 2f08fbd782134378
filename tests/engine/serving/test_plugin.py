# SPDX-License-Identifier: Apache-2.0
"""The general plugin: what it checks and what it adds to a server's command line."""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from vllm_slo.config.class_names import MIDDLEWARE, SCHEDULER, SCHEDULER_NAMES
from vllm_slo.config.command_line import Flags
from vllm_slo.engine.compat import version as vllm_version
from vllm_slo.engine.serving import plugin
from vllm_slo.engine.serving.front_check import check_single
from vllm_slo.engine.telemetry.exposition import FOLDER_VARIABLE, FolderCollector
from vllm_slo.errors import ConfigError
from vllm_slo.wire.front_protocol import TOKEN_VARIABLE

SERVE = ["/usr/bin/vllm", "serve", "some-model"]
OURS = ["--scheduler-cls", SCHEDULER]


# --- the log -------------------------------------------------------------------------------------


@contextmanager
def a_log_of_vllm(*root: logging.Handler) -> Iterator[list[str]]:
    """What vLLM's handler writes; the root logger has these handlers and no others."""
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_slo")
    level = theirs.level
    with pytest.MonkeyPatch.context() as patch:
        for logger, handlers in ((logging.getLogger(), [*root]), (theirs, []), (ours, [])):
            patch.setattr(logger, "handlers", handlers)
        patch.setattr(ours, "parent", logging.getLogger())
        logging.getLogger("vllm_slo.draft_link").info("too early")
        plugin.share_log()
        theirs.handlers.append(handler)  # vLLM sets its log up once it knows its flags
        theirs.setLevel(logging.INFO)
        yield written
    theirs.setLevel(level)


def test_what_is_logged_here_is_written_where_vllm_writes() -> None:
    with a_log_of_vllm() as written:
        plugin.share_log()  # vLLM calls plugins again
        logging.getLogger("vllm_slo.draft_link").info("draft server a is there")
        logging.getLogger("vllm_slo.draft_link").debug("too much")
        assert written == ["draft server a is there"]


def test_a_log_that_somebody_has_set_up_is_used() -> None:
    with a_log_of_vllm(logging.NullHandler()) as written:
        logging.getLogger("vllm_slo.draft_link").warning("draft server a is gone")
        assert written == []


class Process:
    """What ``register`` does to its process, caught before it happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.collectors: list[object] = []
        self.at_exit: list[tuple[Any, ...]] = []
        self._monkeypatch = monkeypatch
        monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
        monkeypatch.setattr(prometheus_client.REGISTRY, "register", self.collectors.append)
        monkeypatch.setattr(atexit, "register", lambda *call, **_: self.at_exit.append(call))
        monkeypatch.setattr(vllm_version, "version", lambda _: "0.32.0")

    def register(self, *argv: str) -> list[str]:
        """Runs it under this command line; returns what became of that."""
        self._monkeypatch.setattr(sys, "argv", list(argv))
        try:
            plugin.register()
            return sys.argv
        finally:
            self._monkeypatch.setenv(FOLDER_VARIABLE, os.environ.get(FOLDER_VARIABLE, ""))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


# --- whose command line is it --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([*SERVE, *OURS], True),
        ([*SERVE, f"--scheduler-cls={SCHEDULER}"], True),
        ([*SERVE, "--scheduler_cls", "vllm_slo.engine.scheduler.Scheduler"], True),
        (["/lib/vllm/entrypoints/openai/api_server.py", "--model", "m", *OURS], True),
        (SERVE, False),
        ([*SERVE, "--scheduler-cls", "other.Scheduler"], False),
        (["/usr/bin/vllm", "bench", "serve", "--model", "m", *OURS], False),
        (["/usr/bin/vllm", "run-batch", *OURS], False),
        (["/usr/bin/vllm"], False),
        (["train.py", *OURS], False),
        (["-c"], False),
        ([""], False),
    ],
)
def test_only_a_server_with_our_scheduler_is_ours(
    process: Process, argv: list[str], expected: bool
) -> None:
    assert process.register(*argv) == [*argv, *(["--middleware", MIDDLEWARE] if expected else [])]
    assert bool(process.collectors) is expected


def test_what_the_config_file_says_counts_as_said(process: Process, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"scheduler-cls: {SCHEDULER}\nport: 8001\nmiddleware: [a.B]\n"
        "additional-config: {slo_config: {margin_quantile: 9}}\n"
    )
    for given in (["--config", str(file)], [f"--config={file}"]):
        with pytest.raises(SystemExit, match="margin_quantile"):
            process.register(*SERVE, *given)
        argv = [*SERVE, *given, "--additional-config", "{}"]  # the command line wins
        assert process.register(*argv) == [*argv, "--middleware", MIDDLEWARE]


def test_a_value_that_json_does_not_know_is_left_to_vllm(process: Process, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"scheduler-cls: {SCHEDULER}\nhf-overrides: {{since: 2026-01-01}}\n")
    argv = [*SERVE, "--config", str(file)]
    assert process.register(*argv) == [*argv, "--middleware", MIDDLEWARE]


def test_a_config_file_of_another_program_is_not_read(process: Process, tmp_path: Path) -> None:
    argv = ["train.py", "--config", str(tmp_path / "train.yaml")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("was read"))
        assert process.register(*argv) == argv


@pytest.mark.parametrize("content", ["", "[1, 2]", "just text", "a: [", "\x00"])
def test_a_file_without_flags_changes_nothing(
    process: Process, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    argv = [*SERVE, "--config", str(file)]
    assert process.register(*argv) == argv


@pytest.mark.parametrize("tail", [["--config"], ["--config", "no/such/file"], ["--config="], []])
def test_a_file_that_is_not_there_is_left_to_vllm(process: Process, tail: list[str]) -> None:
    assert process.register(*SERVE, *tail) == [*SERVE, *tail]


BAD, GOOD = '{"slo_config": 7}', '{"slo_config": {}}'


@pytest.mark.parametrize(
    ("tail", "is_refused"),
    [
        (["--additional-config", BAD], True),
        ([f"--additional-config={BAD}"], True),
        (["--additional_config", BAD], True),
        (["--additional-con", BAD], True),
        (["--additional-config", GOOD, "--additional-config", BAD], True),
        (["--additional-config", BAD, "--additional-config", GOOD], False),
        (["--additional-config", "{broken"], False),
        (["--additional-config"], False),
        ([], False),
    ],
)
def test_additional_config_is_found_as_vllm_finds_it(
    process: Process, tail: list[str], is_refused: bool
) -> None:
    with pytest.raises(SystemExit, match="slo_config") if is_refused else nullcontext():
        process.register(*SERVE, *OURS, *tail)


# --- registration --------------------------------------------------------------------------------


def test_a_server_gets_the_middleware_and_the_metrics(process: Process) -> None:
    argv = [*SERVE, *OURS]
    assert process.register(*argv) == [*argv, "--middleware", MIDDLEWARE]
    assert [type(one) for one in process.collectors] == [FolderCollector]
    assert os.environ[FOLDER_VARIABLE]


def test_registering_again_adds_no_second_middleware(process: Process) -> None:
    argv = process.register(*SERVE, *OURS)
    assert process.register(*argv) == argv
    assert argv.count(MIDDLEWARE) == 1


def test_a_middleware_named_in_the_config_file_is_not_added_again(
    process: Process, tmp_path: Path
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(f"scheduler-cls: {SCHEDULER}\nmiddleware: [{MIDDLEWARE}]\n")
    argv = [*SERVE, "--config", str(file)]
    assert process.register(*argv) == argv


def test_another_command_is_left_alone(process: Process) -> None:
    for argv in (SERVE, ["/usr/bin/vllm", "bench", "serve", *OURS], ["script.py"]):
        assert process.register(*argv) == argv
    assert process.collectors == []


def test_a_child_process_does_nothing(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert process.register(*SERVE, *OURS) == [*SERVE, *OURS]
    assert process.collectors == []
    assert process.at_exit == []
    assert not os.environ.get(FOLDER_VARIABLE)


def test_only_the_process_that_made_the_folder_removes_it(process: Process, tmp_path: Path) -> None:
    process.register(*SERVE, *OURS)
    ((leave, _, owner),) = process.at_exit
    assert owner == os.getpid()
    folder = tmp_path / "series"
    folder.mkdir()
    leave(folder, owner + 1)  # as in a forked child, which inherits the exit functions
    assert folder.exists()
    leave(folder, owner)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"slo_config": "no/such/file.yaml"}, "no/such/file.yaml"),
        ({"slo_config": {"classess": {}}}, "did you mean 'classes'?"),
        ({"slo_config": {"profile": "no/such/profile.json"}}, "no/such/profile.json"),
        ({"slo_config": 7}, "slo_config"),
    ],
)
def test_a_configuration_that_cannot_be_used_ends_the_server_in_one_line(
    process: Process, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        process.register(*SERVE, *OURS, "--additional-config", json.dumps(config))
    message = str(caught.value.code)
    assert message.startswith("vllm-slo: error: ")
    assert said in message
    assert "\n" not in message
    assert process.collectors == []


def test_another_vllm_ends_the_server_in_one_line(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_version, "version", lambda _: "0.34.0")
    with pytest.raises(SystemExit, match=r"vllm-slo: error: .* found 0\.34\.0"):
        process.register(*SERVE, *OURS)
    assert process.register(*SERVE) == SERVE  # it is not ours: nobody asked


# --- behind a front ------------------------------------------------------------------------------


def test_a_token_that_cannot_be_sent_ends_the_server_in_one_line(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "two words")
    with pytest.raises(SystemExit, match=f"^vllm-slo: error: {TOKEN_VARIABLE}: the token: use"):
        process.register(*SERVE, *OURS)
    monkeypatch.setenv(TOKEN_VARIABLE, " ")
    assert process.register(*SERVE, *OURS) == [*SERVE, *OURS, "--middleware", MIDDLEWARE]


def test_several_engines_behind_a_front_end_the_server_in_one_line(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [*SERVE, *OURS, "-dp", "2"]
    assert process.register(*argv) == [*argv, "--middleware", MIDDLEWARE]
    process.collectors.clear()
    monkeypatch.setenv(TOKEN_VARIABLE, "shared-secret")
    with pytest.raises(SystemExit) as caught:
        process.register(*argv)
    message = str(caught.value.code)
    assert message.startswith("vllm-slo: error: --data-parallel-size 2: ")
    for fix in ("--replica", "--data-parallel-rank", f"unset {TOKEN_VARIABLE}"):
        assert fix in message
    assert "\n" not in message
    assert process.collectors == []


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("-dp 2", "--data-parallel-size 2"),
        ("--data_parallel_size=4 --api-server-count 1", "--data-parallel-size 4"),
        ("-dp 2 --data-parallel-size-local 1", "--data-parallel-size 2"),
        ("-dp 4 --headless -dpl 2", "--data-parallel-size 4"),
        ("-dp 4 -dpl 2 --data-parallel-hybrid-lb", "--data-parallel-size-local 2"),
        ("-dp 4 -dpl 2 -dpr 2", "--data-parallel-size-local 2"),
        ("--api-server-count 2", "--api-server-count 2"),
        ("-asc 3", "--api-server-count 3"),
        ("-dp 2 -dpn 0 --api-server-count 2", "--api-server-count 2"),
    ],
)
def test_what_cannot_be_one_replica_is_refused(words: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: a server behind a front has one"):
        check_single(Flags(["serve", "m", *words.split()]))


@pytest.mark.parametrize(
    "words",
    [
        "",
        "-dp 1 --api-server-count 1",
        "-dp 2 --data-parallel-rank 1",
        "-dp 2 -dpn 0 --api-server-count=1",
        "-dp 2 --data-parallel-external-lb --nnodes 2 --node-rank 1",
        "-dp 4 -dpl 1 --data-parallel-hybrid-lb",
        "-dp 4 -dpl 1 --data-parallel-start-rank 2",
        "-tp 2",
        "-dp two",  # vLLM says what is wrong with it
    ],
)
def test_one_engine_with_one_api_server_can_be_a_replica(words: str) -> None:
    check_single(Flags(["serve", "m", *words.split()]))


# --- AMX -----------------------------------------------------------------------------------------


def test_the_middleware_and_the_scheduler_are_where_their_names_say() -> None:
    pytest.importorskip("vllm")
    for name in (MIDDLEWARE, *SCHEDULER_NAMES):
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute)
