# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo serve --draft-servers N``: the flags that its draft servers get, and a real start."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from live_server import environment
from patience import patience
from prometheus_client.parser import text_string_to_metric_families

from vllm_slo import cli, tiny
from vllm_slo.errors import ConfigError
from vllm_slo.router import draft_beside
from vllm_slo.router import serve as router_serve
from vllm_slo.wire.draft_socket import TOKEN_VARIABLE, connected_addresses

pytest.importorskip("ray")

from live_replicas import running

TOKEN = "a token of the tests' own"
DRAFTED = ["--draft-model", "tiny", "--draft-servers", "2"]


def parsed(*words: str, model: str = "tiny") -> tuple[argparse.Namespace, list[str]]:
    """A command line of ``vllm-slo serve``."""
    return cli.parse(["serve", model, *words])


def fleet(*words: str) -> tuple[argparse.Namespace, list[str]]:
    """The draft servers' command as they read it: their own flags, and the engine's."""
    command = draft_beside.fleet_command(*parsed(*DRAFTED, *words))
    assert command[0] == "draft-server"
    return cli.parse(command)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


# --- which flags ---------------------------------------------------------------------------------


def test_flags_of_any_model_hold_for_drafts_too() -> None:
    """However they are spelled; those of the served model alone do not."""
    args, rest = fleet(
        *("--dtype", "float32", "--max_model_len=512", "--seed", "3", "--enforce-eager"),
        *("--trust-remote-code", "--load-form", "dummy", "--download-dir", "/models"),
        *("--no-enforce-eager", "--model-loader-extra-config", '{"a": 1}'),
        *("--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.5", "--port", "8001"),
        *("--host", "127.0.0.1", "--served-model-name", "a", "b", "--quantization", "fp8"),
        *("--tokenizer", str(tiny.path("target")), "--block-size", "16", "--max-num-seqs", "9"),
        *("--kv-cache-dtype", "auto", "--api-key", "secret", "--middleware", "some.Middleware"),
    )
    assert (args.model, args.count) == ("tiny", 2)
    assert rest == [
        *("--dtype", "float32", "--max-model-len", "512", "--seed", "3", "--enforce-eager"),
        *("--trust-remote-code", "--load-format", "dummy", "--download-dir", "/models"),
        *("--no-enforce-eager", "--model-loader-extra-config", '{"a": 1}'),
    ]


def test_flags_of_a_configuration_file_count(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("dtype: bfloat16\nmax-model-len: 512\nenforce-eager: true\nport: 8001\n")
    _, rest = fleet("--dtype", "float32", "--config", str(file))
    assert rest[-2:] == ["--dtype", "float32"], "the command line comes last, so it wins"
    assert set(rest[:-2]) == {"--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager"}


@pytest.mark.engine
def test_the_engine_of_a_draft_server_takes_them() -> None:
    from vllm_slo.engine.speculation.draft_engine import engine_arguments

    own = "--draft-args=--max-sessions 9 --cpus-per-server 2 --dtype bfloat16 --block-size 64"
    args, rest = fleet("--dtype", "float32", "--max-model-len", "512", "--enforce-eager", own)
    assert (args.max_sessions, args.cpus_per_server) == (9, 2.0)
    engine = engine_arguments(args.model, rest, max_sessions=args.max_sessions)
    assert (engine.max_model_len, engine.enforce_eager) == (512, True)
    assert (engine.dtype, engine.block_size) == ("bfloat16", 64), "flags of their own come last"


def test_the_secret_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args, _ = fleet()
    assert args.token_file is None
    assert os.environ[TOKEN_VARIABLE] == TOKEN
    monkeypatch.delenv(TOKEN_VARIABLE)
    command = draft_beside.fleet_command(*parsed(*DRAFTED))
    made_up = os.environ[TOKEN_VARIABLE]
    assert len(made_up) > 32
    assert made_up not in " ".join(command)
    file = tmp_path / "token"
    args, _ = fleet("--draft-token-file", str(file))
    assert args.token_file == str(file)


@pytest.mark.parametrize(
    ("flags", "replicas", "ports"),
    [
        ([], 1, 1),
        (["--replicas", "1"], 1, 2),
        (["--replicas", "2"], 2, 3),
        (["--min-replicas", "1", "--max-replicas", "3"], 3, 4),
    ],
)
def test_draft_servers_connect_to_every_replica(
    flags: list[str], replicas: int, ports: int
) -> None:
    args, rest = parsed(*DRAFTED, *flags)
    command = draft_beside.fleet_command(args, rest)
    assert args.draft_model is None
    assert command[command.index("--connect") + 1] == args.draft_servers
    assert len(connected_addresses([args.draft_servers], "--connect")) == ports
    if flags:  # the replicas may listen there
        assert router_serve.AppArgs.checked(router_serve.app_args(args, rest)).most == replicas


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--draft-servers", "2"], "--draft-servers 2: name the one model that drafts"),
        (
            ["--draft-servers", "2", "--draft-model", "tiny", "--draft-model", "tiny-middle"],
            "--draft-servers 2: name the one model",
        ),
        (["--draft-servers", "0", "--draft-model", "tiny"], "--draft-servers 0: choose 1 to 1024"),
        (
            [*DRAFTED, "--ray-address", "10.0.0.1:6379"],
            "--draft-servers 2: starts draft servers on",
        ),
        ([*DRAFTED, "--replicas", "64"], "--draft-servers 2: draft for at most 63 replicas"),
        ([*DRAFTED, "--draft-args=--connect tcp://h:1"], "--draft-args: --connect: they draft for"),
        ([*DRAFTED, "--draft-args=--token_file=/a"], "--draft-args: --token-file: use --draft-tok"),
        ([*DRAFTED, "--draft-args='"], "--draft-args: No closing quotation"),
        (["--draft-args=--seed 1"], "--draft-args: is for draft servers started here; give --dra"),
    ],
)
def test_a_mistake_is_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "tiny", *flags]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"vllm-slo: error: {said}")
    assert told.count("\n") == 1


def test_a_draft_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny.path("draft"), other, ignore=shutil.ignore_patterns("*.safetensors"))
    config = other / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 2048', '"vocab_size": 1024'))
    args, rest = parsed("--draft-servers", "1", "--draft-model", str(other))
    with pytest.raises(ConfigError, match="has a vocabulary of 1024 tokens, the served model of"):
        draft_beside.fleet_command(args, rest)
    args, rest = parsed("--draft-servers", "1", "--draft-model", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="there is no folder"):
        draft_beside.fleet_command(args, rest)


# --- a real start --------------------------------------------------------------------------------

SERVER = """
import argparse, sys, time
from vllm_slo.router import draft_beside
args = argparse.Namespace(
    model="tiny", draft_model=["tiny"], draft_servers="1", draft_token_file=None, replicas=None,
    max_replicas=None, ray_address=None, draft_args=sys.argv[1])
draft_beside.start(args, ["--dtype", "float32", "--enforce-eager"])
time.sleep(600)
"""
"""Starts its draft servers, and is a server that never ends by itself."""


def start(own: str) -> subprocess.CompletedProcess[str]:
    words: Sequence[str] = (sys.executable, "-c", SERVER, own)
    return subprocess.run(
        words,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(240.0),
    )


@pytest.mark.engine
@pytest.mark.slow
def test_a_flag_that_draft_servers_cannot_use_ends_the_server() -> None:
    """One that is no flag, and then one that only the engine finds out about."""
    done = start("--no-such-flag 3")
    assert done.returncode == 2, done.stderr
    assert "vllm-slo: error: --no-such-flag: neither a flag of 'vllm-slo draft-ser" in done.stderr
    assert done.stderr.endswith("vllm-slo: stopping, because its draft servers cannot run\n")


@pytest.mark.deep
@pytest.mark.engine
@pytest.mark.slow
def test_a_value_that_the_engine_cannot_use_ends_the_server() -> None:
    done = start("--max-num-batched-tokens=-1")
    assert done.returncode == 2, done.stderr
    said = "error: --model tiny: cannot be loaded: max_num_batched_tokens: Input should be greater"
    assert said in done.stderr


@pytest.mark.deep
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_replicas_share_a_draft_server(tmp_path: Path) -> None:
    """Both have drafts of it accepted, and answer as they do without drafts."""
    config = tmp_path / "slo.yaml"
    deadline_ms = patience(400.0)
    config.write_text(
        f"speculation: {{min_depth: 3, max_depth: 3, draft_deadline_ms: {deadline_ms}}}"
    )
    flags = ["--replicas", "2", "--draft-model", "tiny", "--draft-servers", "1"]
    flags += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    with running(*flags, "--slo-config", str(config), within_s=patience(300.0)) as live:

        def answers(slo: dict[str, str]) -> list[str]:
            def one(place: int) -> str:
                body = {"model": "tiny", "prompt": f"def read_{place}(self, ", "max_tokens": 48}
                body |= {"temperature": 0, "ignore_eos": True, "slo": slo}
                asked = httpx.post(f"{live.url}/v1/completions", json=body, timeout=patience(60.0))
                return str(asked.json()["choices"][0]["text"])

            with ThreadPoolExecutor(max_workers=8) as threads:
                return list(threads.map(one, range(8)))

        def accepted() -> list[float]:
            pages = [
                httpx.get(f"{live.url}/metrics/replicas/{name}", timeout=patience(10.0)).text
                for name in live.ready()
            ]
            return [
                sum(
                    sample.value
                    for family in text_string_to_metric_families(page)
                    for sample in family.samples
                    if sample.name == "vllm_slo:drafter_accepted_tokens_total"
                )
                for page in pages
            ]

        plain = answers({"speculation": "off"})
        end_s = time.monotonic() + patience(120.0)
        while len(found := accepted()) < 2 or min(found) < 20:
            assert time.monotonic() < end_s, found
            assert answers({"tier": "best_effort"}) == plain
