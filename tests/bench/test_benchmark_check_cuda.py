# SPDX-License-Identifier: Apache-2.0
"""How ``benchmarks/check_cuda.py`` runs its parts: time limits, failures, the JSON, the status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmark_script import FOLDER, load
from patience import patience

runner = load("check_cuda_runner")

PASSES = """
import sys
sys.path.insert(0, {folder!r})
from check_cuda_runner import CheckError, Found, report_found
def check():
    {body}
sys.exit(report_found(check))
"""


def part(name: str, body: str, limit_s: float = 60.0) -> Any:
    code = PASSES.format(folder=str(FOLDER), body=body)
    return runner.Part(name, (sys.executable, "-c", code), limit_s)


GOOD = part("a good part", 'return Found("3 of 3 [kept]", {"kept": 3})')
SKIPPED = part("times", 'return Found("no GPU", status="skipped")')
WRONG = part("wrong", 'raise CheckError("the answers differ")')


def test_the_table_the_file_and_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "check-cuda.json"
    assert runner.run_all([GOOD, SKIPPED], out, cpu=True) == 0
    said = json.loads(out.read_text())
    assert (said["passed"], said["on"]) == (True, "cpu")
    assert said["versions"]["python"] and said["machine"]["cores"] >= 1
    assert [(p["part"], p["status"], p["text"], p["facts"]) for p in said["parts"]] == [
        ("a good part", "pass", "3 of 3 [kept]", {"kept": 3}),
        ("times", "skipped", "no GPU", {}),
    ]
    printed = capsys.readouterr().out
    assert "3 of 3 [kept]" in printed and "all parts pass" in printed


def test_a_part_that_fails_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    crash = part("crash", 'print("before"); raise RuntimeError("no kernel image is available")')
    silent = runner.Part("silent", (sys.executable, "-c", "import os; os._exit(0)"), 60.0)
    killed = part("killed", "import os; os.abort()")
    lies = part("lies", 'import atexit, os; atexit.register(os._exit, 3); return Found("fine")')
    out = tmp_path / "check-cuda.json"
    assert runner.run_all([WRONG, crash, silent, killed, lies, GOOD], out, cpu=False) == 1
    said = json.loads(out.read_text())
    assert (said["passed"], said["on"]) == (False, "cuda")
    statuses = [found["status"] for found in said["parts"]]
    assert statuses == ["fail"] * 5 + ["pass"]
    texts = {found["part"]: found["text"] for found in said["parts"]}
    assert texts["wrong"] == "the answers differ"
    assert texts["crash"] == ("ended with status 1: RuntimeError: no kernel image is available")
    assert texts["silent"] == "ended with status 0"
    assert texts["killed"].startswith("ended with status -6")
    assert texts["lies"].startswith("ended with status 3")
    assert "failed: wrong, crash, silent, killed, lies" in capsys.readouterr().out


def test_what_takes_too_long_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GRACE_S", 0.5)
    pids = tmp_path / "pids"
    body = f"""
    import os, signal, subprocess, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    word = [sys.executable, "-c", "import time; time.sleep(600)"]
    own = [subprocess.Popen(word, process_group=group) for group in (None, 0)]
    with open({str(pids)!r}, "w") as file:
        print(os.getpid(), *(child.pid for child in own), file=file)
    print("serving", flush=True)
    time.sleep(600)
    """.strip()
    began_s = time.monotonic()
    found = runner.run_part(part("slow", body, patience(3.0)), tmp_path)
    assert time.monotonic() - began_s < patience(60.0)
    assert found.status == "fail"
    assert found.text == f"took longer than {patience(3.0):g} s: serving"
    written = list(map(int, pids.read_text().split()))
    assert len(written) == 3
    psutil.wait_procs([psutil.Process(pid) for pid in written if psutil.pid_exists(pid)], 10)
    assert not any(map(running, written))


def running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_result_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    assert runner.run_part(GOOD, tmp_path).status == "pass"
    silent = runner.Part(GOOD.name, (sys.executable, "-c", "pass"), 60.0)
    assert runner.run_part(silent, tmp_path).status == "fail"


@pytest.mark.slow
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "check_cuda.py")],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent)},
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("check-cuda: torch ")
    assert line.endswith("Without a GPU: make check-cuda ARGS=--cpu")
    assert list(tmp_path.iterdir()) == []


def test_every_part_has_its_function() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("vllm")
    check_cuda = load("check_cuda")
    for name, step in check_cuda.STEPS.items():
        module = (FOLDER / f"{step.module}.py").read_text()
        assert f"\ndef {step.function}(" in module, name


def test_the_demo_tells_of_two_servers_that_finish_everything() -> None:
    pytest.importorskip("torch")
    commands = load("check_cuda_commands")

    def told(*servers: tuple[str, int]) -> dict[str, Any]:
        return {
            "servers": [
                {"name": name, "total": {"n": 9, "finished": finished, "attainment": 0.956}}
                for name, finished in servers
            ]
        }

    found = commands.found_in_demo(told(("stock vLLM", 9), ("vllm-slo", 9)))
    kept = "stock vLLM keeps 96%, vllm-slo keeps 96% of the objectives"
    assert found.text == f"{kept}, all requests finish"
    for wrong in (told(("vllm-slo", 9)), told(), told(("stock vLLM", 9), ("vllm-slo", 8))):
        with pytest.raises(commands.CheckError):
            commands.found_in_demo(wrong)
