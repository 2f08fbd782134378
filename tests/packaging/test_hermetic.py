# SPDX-License-Identifier: Apache-2.0
"""The suite needs nothing that only some machines have: seen in sessions of pytest of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import depth
import pytest
from hermetic import DATA_VARIABLE, ROOT_VARIABLE
from patience import VARIABLE, measure, patience

TESTS = Path(__file__).parents[1]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small repository with this suite's conftest, in a folder of its own."""
    folder = tmp_path / "some where" / "clone"
    (folder / "tests" / "support").mkdir(parents=True)
    shutil.copy(TESTS / "conftest.py", folder / "tests")
    for name in ("depth.py", "hermetic.py", "model_config.py", "patience.py"):
        shutil.copy(TESTS / "support" / name, folder / "tests" / "support")
    (folder / "pytest.ini").write_text(
        "[pytest]\npythonpath = tests/support\ntimeout = 60\nsession_timeout = 60\n"
        "markers = real_data\n    alone\n"
    )
    return folder


def run(
    repository: Path, test: str, *options: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """A session with one file of tests, started by a user with these variables."""
    (repository / "tests" / "test_it.py").write_text(test)
    ours = (ROOT_VARIABLE, VARIABLE, depth.VARIABLE)
    outside = {k: v for k, v in os.environ.items() if k not in ours}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *options, "tests"],
        cwd=repository,
        env={**outside, **environ},
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )


OPENS = """
from pathlib import Path
import pytest

def data():
    try:
        return Path({path!r}).read_text()
    except OSError:
        return None

@pytest.fixture
def early():
    return data()

def test_in_a_fixture(early): pass
def test_in_a_test(): data()
def test_of_the_repository(tmp_path):
    assert Path(__file__).read_text()
    (tmp_path / "made").write_text("made")
@pytest.mark.real_data
def test_of_real_data(): assert data() == "1, 2"
"""


AT_IMPORT = """
try:
    open({path!r}).close()
except OSError:
    pass

def test(): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("there", [True, False], ids=["there", "missing"])
def test_a_test_that_opens_a_file_outside_the_repository_fails(
    repository: Path, there: bool
) -> None:
    """Whether the file exists or not: a test that can do without it is told, too."""
    path = repository.parent / "shared" / "data.csv"
    if there:
        path.parent.mkdir()
        path.write_text("1, 2")
    done = run(repository, OPENS.format(path=str(path)))
    assert "2 failed, 1 passed, 1 deselected" in done.stdout, done.stdout + done.stderr
    assert f"opened files outside the repository: {path}" in done.stdout
    done = run(repository, AT_IMPORT.format(path=str(path)))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    done = run(repository, AT_IMPORT.format(path=str(repository / "pytest.ini")))
    assert "1 passed" in done.stdout


def test_real_data_are_read_where_the_user_names_them(repository: Path) -> None:
    path = repository.parent / "shared" / "data.csv"
    path.parent.mkdir()
    path.write_text("1, 2")
    done = run(repository, OPENS.format(path=str(path)), **{DATA_VARIABLE: str(path.parent)})
    assert "4 passed" in done.stdout, done.stdout + done.stderr


LOGS = """
import logging
import pytest

PACKAGE, LOGGER = logging.getLogger("vllm_slo"), logging.getLogger("vllm_slo.it")

@pytest.mark.parametrize("change", [
    lambda: logging.disable(logging.WARNING),
    lambda: logging.getLogger().setLevel(logging.ERROR),
    lambda: PACKAGE.setLevel(logging.ERROR),
    lambda: setattr(PACKAGE, "parent", logging.Logger("another")),
    lambda: setattr(PACKAGE, "propagate", False),
    lambda: setattr(LOGGER, "disabled", True),
    lambda: LOGGER._cache.update({logging.WARNING: False}),
    lambda: None,
])
def test_logs(change, caplog):
    LOGGER.warning("heard")
    assert "heard" in caplog.text
    change()
"""


def test_log_messages_are_captured_whatever_earlier_tests_did(repository: Path) -> None:
    done = run(repository, LOGS)
    assert "8 passed" in done.stdout, done.stdout + done.stderr


SURROUNDINGS = """
import os, tempfile, time
from pathlib import Path

def test_surroundings():
    assert Path.home() == Path(os.environ["VLLMSLO_TEST_ROOT"]) / "home"
    assert Path(os.environ["VLLMSLO_TEST_ROOT"]) in Path(tempfile.gettempdir()).parents
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "http_proxy", "HTTPS_PROXY", "OPENAI_API_KEY"):
        assert name not in os.environ
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    assert os.environ["VLLM_SLO_DATA"] == ""
    assert time.tzname[0] == "UTC"
    print("the root is", os.environ["VLLMSLO_TEST_ROOT"])
"""


def test_what_a_user_has_set_is_not_what_is_tested(repository: Path) -> None:
    done = run(
        repository,
        SURROUNDINGS + "    assert False",
        VLLM_USE_V2_MODEL_RUNNER="1",
        VLLM_SLO_DATA=str(repository),
        http_proxy="http://127.0.0.1:9",
        HTTPS_PROXY="http://127.0.0.1:9",
        OPENAI_API_KEY="sk-none",
        PYTHONDONTWRITEBYTECODE="1",
        TZ="Asia/Kolkata",
        LC_ALL="C",
    )
    assert "assert False" in done.stdout, done.stdout + done.stderr
    (root,) = {
        line.rpartition(" ")[2] for line in done.stdout.splitlines() if "the root is /" in line
    }
    assert not Path(root).exists(), "it is removed when the session ends"


@pytest.mark.slow
def test_time_outs_grow_with_the_slowness_of_the_machine(repository: Path) -> None:
    waits = "import pytest, time\n@pytest.mark.timeout(0.2)\ndef test(): time.sleep(1)\n"
    done = run(repository, waits, **{VARIABLE: "1.0"})
    assert "1 failed" in done.stdout
    assert "Timeout" in done.stdout
    done = run(repository, waits, **{VARIABLE: "8.0"})
    assert "1 passed" in done.stdout
    assert "time-outs are 8.0 times the reference machine's" in done.stdout
    assert "timeout: 480.0s" in done.stdout
    done = run(repository, waits, **{VARIABLE: "1.0", depth.VARIABLE: "10"})
    assert "1 passed" in done.stdout
    assert "timeout: 600.0s" in done.stdout
    assert measure() >= 1.0


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_time_outs_reach_the_workers(repository: Path, workers: list[str]) -> None:
    tells = "def test(pytestconfig): assert 0, pytestconfig.getvalue('timeout')\n"
    chosen = {VARIABLE: "8", depth.VARIABLE: "10"}
    done = run(repository, tells, *workers, **chosen)
    assert "AssertionError: 4800.0" in done.stdout, done.stdout + done.stderr


DRAWS = """
from hypothesis import given, strategies as st

def test():
    seen = []
    given(st.integers())(lambda drawn: seen.append(drawn))()
    print(f"drew {len(seen)}")
    assert False
"""


def test_deep_tests_draw_more(repository: Path) -> None:
    for chosen, drawn in (("1", 100), ("10", 1000)):
        done = run(repository, DRAWS, **{depth.VARIABLE: chosen})
        assert f"drew {drawn}\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_what_make_does_with_the_surroundings(tmp_path: Path) -> None:
    """It lets Python keep bytecode, and refuses an environment in a folder with a space."""

    def make(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "XDG_"))}
        return subprocess.run(
            ["make", "-f", TESTS.parent / "Makefile", *words],
            cwd=folder,
            env={**outside, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1", "SEEN": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    folder = tmp_path / "a clone"
    folder.mkdir()
    done = make(tmp_path, "--eval=show: ; @env", "show")
    assert "SEEN=1" in done.stdout, done.stderr
    assert "PYTHONDONTWRITEBYTECODE" not in done.stdout
    done = make(folder, "help")
    assert done.returncode == 2
    assert "has a space" in done.stderr and "make VENV=FOLDER" in done.stderr
