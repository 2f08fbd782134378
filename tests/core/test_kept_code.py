# SPDX-License-Identifier: Apache-2.0
"""Where compiled code is kept, and what happens where nothing can be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from patience import patience

from vllm_slo.core import kept_code

CHILD = """
import json, sys
from pathlib import Path
from vllm_slo.core import kept_code
from vllm_slo.core.jit import compile_package

kept_code.BESIDE = Path(sys.argv[1])
writable = kept_code._writable
kept_code._writable = lambda path: str(path) not in sys.argv[2:] and writable(path)
from numba.core import event
seen = []

class Listener(event.Listener):
    def on_start(self, event):
        seen.append(str(event.data["dispatcher"]))
    def on_end(self, event):
        pass

event.register("numba:compile", Listener())
done = compile_package("vllm_slo.core.batching")
print(json.dumps([str(done.folder), done.functions, len(seen), done.complaint()]))
"""
"""Compiles a few functions. Arguments: the folder that counts as beside the package, and those
that count as not to be written (root can write everywhere)."""


def start(
    beside: Path, unwritable: Sequence[Path] = (), **environment: str
) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(beside), *map(str, unwritable)],
        stdout=subprocess.PIPE,
        text=True,
        env={**clean, "NUMBA_CPU_NAME": "generic", **environment},  # as in the images
    )


def told(child: subprocess.Popen[str]) -> list[Any]:
    """The folder, the functions, how many numba compiled, and the complaint."""
    printed, _ = child.communicate(timeout=patience(120))
    assert child.returncode == 0
    found: list[Any] = json.loads(printed)
    return found


@pytest.mark.slow
def test_processes_that_start_at_once_compile_once_and_a_shipped_cache_saves_that(
    tmp_path: Path,
) -> None:
    shipped, cache = tmp_path / "shipped", tmp_path / "cache"
    first, *others = map(told, [start(shipped) for _ in range(3)])
    assert all(other[:2] == [str(shipped), first[1]] for other in (first, *others))
    compiled = sorted(child[2] for child in (first, *others))
    assert compiled[0] == compiled[1] == 0 < first[1] < compiled[2]
    # An image: somebody else runs it, who cannot write beside the package.
    image = told(start(shipped, [shipped], XDG_CACHE_HOME=str(cache)))
    assert image[:3] == [str(cache / "vllm-slo" / "compiled"), first[1], 0]
    nowhere = told(start(shipped, [shipped], HOME="/proc"))
    assert nowhere[:2] == ["None", first[1]] and nowhere[2] == compiled[2]
    assert f"none of {shipped}, /proc/.cache/vllm-slo/compiled can be written" in nowhere[3]
    assert "Set NUMBA_CACHE_DIR to a folder that can be written." in nowhere[3]


def test_the_folders_in_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    xdg = tmp_path / "xdg" / "vllm-slo" / "compiled"
    assert kept_code.candidates() == [tmp_path / "named", kept_code.BESIDE, xdg]
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = tmp_path / ".cache" / "vllm-slo" / "compiled"
    assert kept_code.candidates() == [kept_code.BESIDE, at_home]
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # nobody knows this user's home
    monkeypatch.delenv("HOME")
    assert kept_code.candidates() == [kept_code.BESIDE]


def test_numba_keeps_other_code_where_it_did(tmp_path: Path) -> None:
    from numba.core import config

    before = config.CACHE_DIR
    with kept_code.numba_keeps_in(tmp_path):
        assert str(tmp_path) == config.CACHE_DIR
    assert before == config.CACHE_DIR
