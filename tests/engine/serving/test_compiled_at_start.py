# SPDX-License-Identifier: Apache-2.0
"""Where numba's cache is empty, everything is compiled when the scheduler starts, not later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patience
from support_folder import SUPPORT

pytest.importorskip("vllm")

import vllm_slo

pytestmark = pytest.mark.slow

SCRIPT = SUPPORT / "compile_check.py"
PACKAGE = Path(vllm_slo.__file__).parents[1]


@pytest.mark.parametrize("drafts", ["plain", "chains", "trees"])
def test_no_step_quote_or_route_waits_for_the_compiler(drafts: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), drafts],
        capture_output=True,
        text=True,
        timeout=patience(300),
        check=False,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(PACKAGE)},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    said = json.loads(run.stdout.splitlines()[-1])
    assert said["warm"] > 8  # the count does count
    assert said["late"] == {}
