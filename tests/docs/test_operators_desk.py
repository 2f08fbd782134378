# SPDX-License-Identifier: Apache-2.0
"""The page on one's own traffic, executed: served, recorded, compared, planned, replayed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from depth import DEPTH
from docs_blocks import ROOT, blocks_of, commands_of
from hermetic import python_path
from patience import patience

from vllm_slo.traces.own_format import SCHEMA
from vllm_slo.traces.selection import load

PAGE = ROOT / "docs" / "howto" / "operators-desk.md"
TRAFFIC_S = 300 if DEPTH > 1 else 20
"""Seconds of traffic; the page has the first."""
SMALL_PROFILE = ["--enforce-eager", "--max-model-len", "1024", "--gpu-memory-utilization", "0.2"]


def written() -> list[list[str]]:
    """The words of the page's commands, in its order, without ``vllm-slo``."""
    blocks = [block for block in blocks_of(PAGE) if block.marked("desk")]
    lines = [command.words for block in blocks for command in commands_of(block)]
    assert all(words[0] == "vllm-slo" for words in lines)
    return [words[1:] for words in lines]


def run(words: list[str], folder: Path, statuses: tuple[int, ...] = (0,)) -> str:
    """Output of a command of vllm-slo."""
    from live_server import environment

    done = subprocess.run(
        [sys.executable, "-m", "vllm_slo.cli", *words],
        capture_output=True,
        text=True,
        timeout=patience(TRAFFIC_S + 240),
        check=False,
        cwd=folder,
        env={**environment(), "PYTHONPATH": python_path(ROOT), "COLUMNS": "140"},
    )
    assert done.returncode in statuses, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder in which every command of the page ran, and what each printed by its name."""
    pytest.importorskip("vllm")
    live_server = pytest.importorskip("live_server")
    folder = tmp_path_factory.mktemp("desk")
    for block in blocks_of(PAGE):
        if block.marker and block.marker[0] == "file":
            (folder / block.marker[1]).write_text(block.text, encoding="utf-8")
    printed: dict[str, str] = {}
    with ExitStack() as servers:
        for words in written():
            match words:
                case ["serve", *rest]:
                    servers.close()  # the page says to stop the one before
                    port = rest.index("--port")
                    command = [live_server.command("vllm-slo"), "serve", *rest[:port]]
                    command += [*rest[port + 2 :], *live_server.SMALL]
                    live = servers.enter_context(live_server.running(command, "tiny", folder))
                case ["profile", *rest]:
                    printed["profile"] = run(["profile", *rest, *SMALL_PROFILE], folder)
                case [name, *rest]:
                    line = [re.sub(r"http://localhost:\d+", live.url, one) for one in rest] if (
                        name in ("bench", "replay")
                    ) else rest  # fmt: skip
                    line = [str(TRAFFIC_S) if one == "300" else one for one in line]
                    # A busy machine may keep too little: then the answer is no.
                    statuses = (0, 1) if name in ("plan", "replay") else (0,)
                    printed[name] = printed.get(name, "") + run([name, *line], folder, statuses)
                    if name == "bench":
                        time.sleep(patience(2))  # the last lines are written after the answers
    return folder, printed


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(patience(1800))
def test_the_page_does_what_it_says(desk: tuple[Path, dict[str, str]]) -> None:
    folder, printed = desk
    assert "slo.yaml: " in printed["check"] and "rules.yaml: " in printed["check"]

    recording = load(folder / "requests.jsonl")
    sent = round(2 * TRAFFIC_S)
    assert len(recording.requests) >= sent
    classes = [request.slo_class for request in recording.requests]
    assert {"chat", "report"} <= set(classes)
    assert all(request.served is not None for request in recording.requests)
    header = json.loads((folder / "requests.jsonl").read_text().splitlines()[0])
    assert header["schema"] == SCHEMA

    for name in ("whatif.html", "faster.html"):
        page = (folder / name).read_text(encoding="utf-8")
        assert "chat" in page and "report" in page and "<svg" in page
    assert "replica" in printed["plan"] and "$" in printed["plan"]
    assert "chat" in printed["replay"] and "report" in printed["replay"]


@pytest.mark.engine
@pytest.mark.slow
def test_the_recording_holds_no_text(desk: tuple[Path, dict[str, str]]) -> None:
    folder, _ = desk
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    known = {
        *("timestamp", "input_length", "output_length", "hash_ids", "class", "tenant", "model"),
        *("session", "priority", "ttft_ms", "tpot_ms", "e2e_ms", "end", "promise"),
        *("served_ttft_ms", "served_tpot_ms", "served_e2e_ms", "late_kept", "attained"),
    }
    assert lines
    assert {key for line in lines for key in json.loads(line)} <= known
    assert (folder / "requests.jsonl").stat().st_size < 2000 * (len(lines) + 1)
