# SPDX-License-Identifier: Apache-2.0
"""Examples of the Python entry do what they say, each in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from live_server import environment

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TOLD = r"^(\d+) trees, (\d+) of (\d+) draft tokens accepted: (\S+) tokens a tree instead of 1$"


def test_speculation_tells_what_was_accepted() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "speculation.py")],
        capture_output=True,
        text=True,
        timeout=280,
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
