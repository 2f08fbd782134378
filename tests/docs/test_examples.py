# SPDX-License-Identifier: Apache-2.0
"""Examples of the Python entry do what they say, each in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from patience import patience

pytest.importorskip("vllm")

from live_server import environment

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TOLD = r"^(\d+) trees, (\d+) of (\d+) draft tokens accepted: (\S+) tokens a tree instead of 1$"
ROW = (
    r"^(no drafts|two draft servers|server 0 killed|server 0 is back) +(\d+) +([\d.]+) +"
    r"((?:down, )?\d+) +((?:down, )?\d+) +(\d+) +(.+)$"
)
PHASES = ["no drafts", "two draft servers", "server 0 killed", "server 0 is back"]
ASKED = 8
"""Requests of a phase; a step without drafts yields a token of each."""
ROUND = 3 * ASKED
"""Draft tokens of a step at most."""


class Row(NamedTuple):
    """A line of the table of draft_servers.py."""

    phase: str
    per_second: int
    per_step: float
    servers: tuple[str, str]
    failed: int
    same: str


def rows_of(told: str) -> list[Row]:
    """The table, in the order in which it was printed."""
    return [
        Row(one[1], int(one[2]), float(one[3]), (one[4], one[5]), int(one[6]), one[7])
        for one in re.finditer(ROW, told, re.MULTILINE)
    ]


def drafts_well(server: str) -> bool:
    """Whether a draft server is there, and drafts of more than one round were accepted."""
    return server.isdecimal() and int(server) > ROUND


def test_speculation_tells_what_was_accepted() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "speculation.py")],
        capture_output=True,
        text=True,
        timeout=patience(280),
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "def main(args):" in done.stdout
    assert "class Reader:" in done.stdout
    found = re.search(TOLD, done.stdout, re.MULTILINE)
    assert found, done.stdout[-2000:]
    trees, accepted, guessed = (int(number) for number in found.groups()[:3])
    assert 0 < accepted < guessed
    # Two answers of 40 tokens; the first token of each comes before any tree.
    assert trees + accepted <= 2 * 40 - 2
    assert float(found[4]) == pytest.approx(1 + accepted / trees, abs=0.005)


def draft_servers(folder: Path) -> Path:
    """A copy of draft_servers.py that is as patient as this machine is slow."""
    text = (EXAMPLES / "draft_servers.py").read_text(encoding="utf-8")
    for before, limit in (("PATIENCE_S, BEGAN_S = 256, ", 600), ("draft_deadline_ms: ", 200)):
        assert text.count(f"{before}{limit}") == 1
        text = text.replace(f"{before}{limit}", f"{before}{patience(limit):.0f}")
    copy = folder / "draft_servers.py"
    copy.write_text(text, encoding="utf-8")
    return copy


def run_draft_servers(script_path: Path) -> tuple[int, str, str]:
    """Status, output and errors of draft_servers.py; it is asked to end if it takes too long."""
    with subprocess.Popen(
        [sys.executable, str(script_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as script:
        try:
            told, complaints = script.communicate(timeout=patience(480))
        except BaseException:  # of pytest-timeout, too: it stops what it has started
            script.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                script.wait(patience(90))
            script.kill()
            raise
        return script.returncode, told, complaints


@pytest.mark.deep
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_draft_server_dies_and_comes_back_and_no_request_fails(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    status, told, complaints = run_draft_servers(draft_servers(tmp_path))
    assert status == 0, told + complaints[-4000:]
    rows = rows_of(told)
    assert [row.phase for row in rows] == PHASES, told
    assert not any(row.failed for row in rows), told
    assert [row.same for row in rows] == ["-", *[f"{ASKED} of {ASKED}"] * 3], told
    plain, both, alone, back = rows

    assert plain.servers == ("0", "0")
    assert plain.per_step <= ASKED
    for row in (both, back):
        assert all(map(drafts_well, row.servers)), told

    killed = re.search(r"killed (\S+), process (\d+), in the middle of the answers$", told, re.M)
    again = re.search(r"(\S+) is back as process (\d+)$", told, re.M)
    assert killed and again and killed[1] == again[1]
    assert killed[2] != again[2]
    assert not any(psutil.pid_exists(int(found[2])) for found in (killed, again))
    dead, left = map(
        int, re.findall(r"(\d+) of \S+", told[told.index("accepted after that:") :])[:2]
    )
    assert drafts_well(alone.servers[1]) and 0 < left < int(alone.servers[1]), told
    if alone.servers[0].startswith("down, "):  # else it was there again before the answers ended
        assert dead <= ROUND, told  # what came before its death may be verified after that
