# SPDX-License-Identifier: Apache-2.0
"""All that serving calls is compiled when the scheduler, or the front, starts, not later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hermetic import python_path
from patience import patience
from support_folder import SUPPORT

pytest.importorskip("vllm")

import vllm_slo

pytestmark = pytest.mark.slow

SCRIPT = SUPPORT / "compile_check.py"
PACKAGE = Path(vllm_slo.__file__).parents[1]


def told(how: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), how],
        capture_output=True,
        text=True,
        timeout=patience(300),
        check=False,
        env={**os.environ, "PYTHONPATH": python_path(PACKAGE)},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    said: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize(
    "drafts",
    [
        pytest.param("chains", marks=pytest.mark.deep),
        "trees",
        pytest.param("model chains", marks=pytest.mark.deep),
        "draft servers",
    ],
)
def test_an_engine_with_drafts_compiles_every_function_at_its_start(drafts: str) -> None:
    said = told(drafts)
    assert len(said["all"]) > 70
    assert said["at_start"] == said["all"]
    assert said["events"] == said["later"] == []


@pytest.mark.parametrize("how", ["plain", "front"])
def test_an_engine_without_drafts_and_a_front_compile_what_they_call(how: str) -> None:
    said = told(how)
    assert 10 < len(said["at_start"]) < len(said["all"])
    assert said["events"] == said["later"] == []
