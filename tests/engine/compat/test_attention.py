# SPDX-License-Identifier: Apache-2.0
"""AMX is asked for where the CPU has it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm_slo.engine.compat.attention import enable_amx


@pytest.mark.parametrize("supported", [False, True])
def test_amx_is_asked_for_only_where_it_is(
    monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    cpu = pytest.importorskip("torch").cpu
    asked: list[bool] = []
    monkeypatch.setattr(cpu, "_is_amx_tile_supported", lambda: supported)
    monkeypatch.setattr(cpu, "_init_amx", lambda: asked.append(True))
    enable_amx()
    assert bool(asked) is supported


WITHOUT_FLAGS = """
import sys
from vllm_slo.engine.serving import plugin
plugin.register()
print("torch" in sys.modules)
import vllm.v1.worker.worker_base
print("vllm_slo.engine.compat.attention" in sys.modules)
import vllm.v1.worker.cpu_worker
print("vllm_slo.engine.compat.attention" in sys.modules)
"""


def test_only_processes_with_a_cpu_worker_ask() -> None:
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FLAGS],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "False", "True"]


def test_amx_on_this_machine() -> None:
    pytest.importorskip("torch")
    enable_amx()
    enable_amx()
