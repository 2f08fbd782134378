# SPDX-License-Identifier: Apache-2.0
"""The help of every command, and what it says to the usual mistakes, as files in ``snapshots/``.

    VLLMSLO_TEST_SNAPSHOTS=write make test PYTEST_ARGS=tests/packaging/test_cli_snapshots.py

writes the files anew, removes those that nothing stands for, and fails once if anything changed.
The changes are then read like any other change of the code. A new command needs no line here for
its help; its mistakes go into ``MISTAKES``.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Final

import pytest

from vllm_slo import cli
from vllm_slo.arguments import NO, OK, USAGE
from vllm_slo.engine.serving import serve

FOLDER: Final = Path(__file__).with_name("snapshots")
WRITES: Final = os.environ.get("VLLMSLO_TEST_SNAPSHOTS") == "write"
ITSELF: Final = "vllm-slo"
"""Stands for the command without a command."""

NOBODY: Final = "http://127.0.0.1:9"
"""Where nobody listens."""

MISTAKES: Final = {
    ITSELF: (
        "",
        "simulat",
        "nonsense",
        "--verbose",
    ),
    "serve": (
        "serve",
        "serve --port 8000 tiny",
        "serve --port 8000",
        "serve tiny --model another",
        "serve tiny --replicas none",
        "serve tiny --replicas 0",
        "serve tiny --gpus-per-replica -1",
        "serve tiny --slo-config nowhere.yaml",
        "serve tiny --slo-config unknown_key.yaml",
        "serve tiny --additional-config {",
        "serve tiny --draft-servers 2",
        "serve tiny --draft-args=--seed=1",
    ),
    "demo": (
        "demo --load heavy",
        "demo --load 0",
        "demo --seed -1",
        "demo --replicas 0",
        "demo --replicas 2 --speculate",
        "demo --lod 2",
        "demo --out notes.txt/folder",
    ),
    "bench": (
        "bench",
        "bench --base-url localhost:8000",
        f"bench --base-url {NOBODY}",
        f"bench --base-url {NOBODY} --rate 0",
        f"bench --base-url {NOBODY} --rate fast",
        f"bench --base-url {NOBODY} --workload azur",
        f"bench --base-url {NOBODY} --warmup 4",
        f"bench --base-url {NOBODY} --classes chta",
        f"bench --base-url {NOBODY} --slo-config nowhere.yaml",
        f"bench --base-url {NOBODY} --rules rules.yaml",
        f"bench --base-url {NOBODY} --trace trace.csv",
        f"bench --base-url {NOBODY} --min-attainment 0",
        f"bench --base-url {NOBODY} --every-class",
        f"bench --base-url {NOBODY} --no-slo mine",
        f"bench --base-url {NOBODY} --header x-tenant",
        f"bench --base-url {NOBODY} --out-json report.json --workload-file trace.csv",
    ),
    "replay": (
        "replay",
        "replay trace.csv",
        f"replay nowhere.csv --base-url {NOBODY}",
        f"replay broken.csv --base-url {NOBODY}",
        f"replay trace.csv --base-url {NOBODY}",
        f"replay trace.csv --base-url {NOBODY} --api message",
        f"replay trace.csv --base-url {NOBODY} --rate 2 --speed 2",
        f"replay trace.csv --base-url {NOBODY} --rate 2 --concurrency 4",
        f"replay trace.csv --base-url {NOBODY} --concurrency 0",
        f"replay trace.csv --base-url {NOBODY} --from 9 --to 3",
        f"replay trace.csv --base-url {NOBODY} --slo-config unknown_key.yaml",
        f"replay trace.csv --base-url {NOBODY} --min-attainment 101%",
    ),
    "profile": (
        "profile",
        "profile tiny --model another",
        "profile tiny --block-size 0",
        "profile tiny --gpu-memory-utilization 90",
        "profile tiny --prompts notes.txt",
        "profile tiny --batch 3",
    ),
    "simulate": (
        "simulate",
        "simulate --hardware nowhere.yaml --rate 1",
        "simulate --rate fast",
        "simulate --rate 1 --find-capacity",
        "simulate --rate 1 --systems magic",
        "simulate --rate 1 --scenario chattbot",
        "simulate --rate 1 --acceptance coder=0.5",
        "simulate --trace nowhere.csv",
        "simulate --rate 1 --speed 2",
        "simulate --rate 1 --rules rules.yaml",
    ),
    "front": (
        "front",
        "front --port high",
        "front --port 70000",
        "front --replica localhost --token-file token",
        "front --replica http://10.0.0.1:8000",
        "front --replica http://10.0.0.1:8000 --token-file nowhere",
        "front --replica http://10.0.0.1:8000 --token-file token --slo-config nowhere.yaml",
    ),
    "endpoint-picker": (
        "endpoint-picker",
        "endpoint-picker --health-port -1",
        "endpoint-picker --fallbacks -1",
        "endpoint-picker --fallbacks one",
        "endpoint-picker --tls-cert cert.pem",
        "endpoint-picker --replicas-from DNS:name --token-file token",
    ),
    "draft-server": (
        "draft-server",
        "draft-server --model tiny",
        "draft-server --model tiny --connect nowhere",
        "draft-server --model tiny --connect tcp://127.0.0.1:1 --max-sessions 0",
        "draft-server --model tiny --connect tcp://127.0.0.1:1 --name 'a b'",
        "draft-server --model tiny --connect tcp://127.0.0.1:1 --count 0",
        "draft-server --model tiny --connect tcp://127.0.0.1:1",
        "draft-server --model tiny --connect tcp://127.0.0.1:1 --token-file nowhere",
    ),
    "quote": (
        "quote",
        f"quote --base-url {NOBODY} --prompt hello --ttft-ms soon",
        f"quote --base-url {NOBODY} --prompt hello --ttft-ms 0",
        f"quote --base-url {NOBODY} --prompt hello --max-tokens 0",
        f"quote --base-url {NOBODY} --prompt @nowhere.txt --ttft-ms 500",
        f"quote --base-url {NOBODY} --prompt hello --ttft-ms 500",
    ),
    "whatif": (
        "whatif",
        "whatif trace.csv",
        "whatif trace.csv --hardware abacus",
        "whatif trace.csv --hardware h100-llama-8b --slo-config unknown_key.yaml",
        "whatif trace.csv --hardware h100-llama-8b --rules slo.yaml",
        "whatif trace.csv --hardware h100-llama-8b --systems magic",
        "whatif trace.csv --hardware h100-llama-8b --from 2024-05-11",
        "whatif trace.csv --hardware h100-llama-8b --html notes.txt/page.html",
        "whatif trace.csv --hardware h100-llama-8b --json notes.txt/result.json",
        "whatif broken.csv --hardware h100-llama-8b",
    ),
    "record": (
        "record",
        "record trace.csv",
        "record nowhere.csv --out out.jsonl",
        "record broken.csv --out out.jsonl",
        "record notes.txt --out out.jsonl",
        "record slo.yaml --out out.jsonl",
        "record trace.csv --out trace.csv",
        "record trace.csv --out nowhere/out.jsonl",
        "record trace.csv --out out.jsonl --from noon",
        "record trace.csv --out out.jsonl --from 60 --to 30",
        "record trace.csv --out out.jsonl --from 3600",
        "record trace.csv --out out.jsonl --rows 0",
        "record trace.csv --out out.jsonl --thin 200%",
        "record trace.csv --out out.jsonl --speed 0",
        "record trace.csv --out out.jsonl --json notes.txt/result.json",
        "record trace.csv --out out.jsonl",
    ),
    "plan": (
        "plan",
        "plan --rate 0",
        "plan --rate 1 --max-replicas 0",
        "plan --rate 1 --gpu-price free",
        "plan --rate 1 --min-attainment 2",
        "plan --rate 1 --systems vllm-slo-trees --hardware a100-qwen-1.5b",
        "plan --trace nowhere.csv",
        "plan --trace trace.csv",
        "plan --trace trace.csv --scenario coder",
    ),
    "check": (
        "check",
        "check slo.yaml trace.csv replicas.yaml",
        "check nowhere.yaml",
        "check unknown_key.yaml",
        "check bad_value.yaml",
        "check not_yaml.yaml",
        "check doubtful.yaml",
        "check rules.yaml",
        "check slo.yaml rules.yaml",
        "check broken.csv",
        "check notes.txt",
        "check slo.yaml broken.csv nowhere.yaml",
        "check slo.yaml --json notes.txt/result.json",
        "check --print-schema slo.yaml",
    ),
    "completion": ("completion", "completion ksh"),
}
"""Command -> command lines without ``vllm-slo`` that end before anything is started. Most are
mistakes; an exit status of 0 or 1 is an answer."""

FILES: Final = {
    "slo.yaml": "classes: {chat: {ttft_ms: 500}, batch: {tier: best_effort}}\n"
    "default_class: batch\n",
    "unknown_key.yaml": "classes:\n  chat: {ttft: 500}\n",
    "bad_value.yaml": "classes:\n  chat:\n    tpot_ms: -1\n",
    "not_yaml.yaml": "classes:\n  chat: {ttft_ms: 500\n",
    "doubtful.yaml": "classes: {chat: {tpot_ms: 20}, code: {tpot_ms: 50}, idle: {value: 2}}\n"
    "default_class: chat\nservice_tiers: {flex: code}\n",
    "rules.yaml": "rules: [{class: chat}, {class: bulk, share: 0.5}]\n",
    "trace.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00,100,20\n2024-05-10 00:00:30,300,40\n",
    "broken.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,many,20\n",
    "replicas.yaml": "- http://10.0.0.1:8000\n- {url: 'http://10.0.0.2:8000', name: b}\n",
    "notes.txt": "",
    "token": "a-secret-of-sixteen",
}
"""Files of the folder in which the command lines are run."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("VLLMSLO_DRAFT_TOKEN", "VLLMSLO_FRONT_TOKEN", "OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(serve, "check_vllm", lambda: None)
    return tmp_path


def status_of(words: list[str]) -> int | str | None:
    try:
        return cli.main(words)
    except SystemExit as stop:
        return stop.code


def compare(name: str, text: str) -> None:
    """Compare a text with a snapshot, or write it."""
    path = FOLDER / f"{name}.txt"
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    if WRITES and kept != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == kept, f"{path.name}: the module's docstring says how to write it anew"


@pytest.mark.parametrize("command", [ITSELF, *cli.COMMANDS])
def test_help(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [] if command == ITSELF else [command]
    assert status_of([*words, "--help"]) == OK
    compare(f"help/{command}", capsys.readouterr().out)


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for line in MISTAKES[command]:
        status = status_of(shlex.split(line))
        said = capsys.readouterr()
        assert status in (OK, NO, USAGE), said.err
        if status == USAGE and line:
            *_, last = said.err.splitlines()
            assert last.startswith("vllm-slo: error: "), said.err
        shown = f"$ vllm-slo {line}".rstrip()
        told.append(f"{shown}\n{said.out}{said.err}[{status}]\n")
    text = "\n".join(told)
    compare(f"mistakes/{command}", re.sub(r"(?<=\(choose from )(.*)\)", unquoted, text))


def unquoted(found: re.Match[str]) -> str:
    """Choices as Python 3.12 and later list them."""
    return found[0].replace("'", "")


def test_every_command_has_its_mistakes_and_no_snapshot_is_left_over() -> None:
    assert set(MISTAKES) == {ITSELF, *cli.COMMANDS}
    wanted = {f"help/{name}.txt" for name in MISTAKES} | {f"mistakes/{n}.txt" for n in MISTAKES}
    for path in FOLDER.rglob("*.txt"):
        if WRITES and str(path.relative_to(FOLDER)) not in wanted:
            path.unlink()
    assert {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.txt")} == wanted


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_example_of_a_command_is_read(command: str, here: Path) -> None:
    program, *words = shlex.split(cli.EXAMPLES[command].partition(" >")[0])
    assert (program, words[0]) == ("vllm-slo", command)
    args, rest = cli.parse(words)
    assert args.command == command
    assert command in cli.NOTES or not rest


def test_examples_and_notes_are_of_commands() -> None:
    assert set(cli.EXAMPLES) == set(cli.COMMANDS)
    assert set(cli.NOTES) < set(cli.COMMANDS)
