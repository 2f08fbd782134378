# SPDX-License-Identifier: Apache-2.0
"""Each patch fits the installed vLLM, does what it says, and comes off without a trace."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from patience import patience

pytest.importorskip("vllm")

import live_server
from live_server import SMALL, LiveServer, ask_openai, command

from vllm_slo import tiny

pytestmark = pytest.mark.skipif(shutil.which("patch") is None, reason="there is no patch here")

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "docker/apply_patches.py"
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
HEADINGS = ["Subject", "vLLM", "Reason", "Without this patch", "Upstream", "Delete when"]
ONE = PATCHES[0]


def package() -> Path:
    """The folder of the installed vLLM."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def touched(patch: Path) -> list[str]:
    """The files that a patch changes, relative to site-packages."""
    return re.findall(r"^--- a/(\S+)$", patch.read_text(), re.MULTILINE)


def twin(site: Path) -> Path:
    """A vLLM that can be imported and changed: links, but for copies of what patches touch."""
    changed = {Path(name) for patch in PATCHES for name in touched(patch)}
    folders = {parent for name in changed for parent in name.parents}
    for folder in sorted(folders - {Path()}):
        (site / folder).mkdir(parents=True)
        for entry in (package().parent / folder).iterdir():
            here = folder / entry.name
            if entry.name == "__pycache__" or here in folders:
                continue
            if here in changed:
                (site / here).write_bytes(entry.read_bytes())
            else:
                (site / here).symlink_to(entry)
    return site


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return twin(tmp_path / "site")


def run(site: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, folder, "--root", site, *flags],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


def contents(site: Path) -> dict[Path, bytes]:
    """The files that could have changed, by path."""
    files = (path for path in site.rglob("*") if path.is_file() and not path.is_symlink())
    return {path: path.read_bytes() for path in files if path.suffix != ".pyc"}


def test_they_are_numbered_and_say_why() -> None:
    assert [patch.name[:4] for patch in PATCHES] == [f"{n + 1:04}" for n in range(len(PATCHES))]
    for patch in PATCHES:
        head = patch.read_text().partition("\n--- a/")[0]
        assert re.findall(r"^([A-Z][^:\n]*|vLLM): ", head, re.MULTILINE) == HEADINGS, patch.name


def test_all_are_applied_and_taken_back(site: Path) -> None:
    before = contents(site)
    assert {path.relative_to(site) for path in before} == {
        Path(name) for patch in PATCHES for name in touched(patch)
    }
    for word in ("applied", "was applied already"):
        done = run(site, ROOT / "patches")
        assert done.stdout.splitlines() == [f"{patch.name}: {word}" for patch in PATCHES]
        assert (done.returncode, done.stderr) == (0, "")
    changed = contents(site)
    assert changed.keys() == before.keys()
    assert all(changed[path] != before[path] for path in before)
    for word in ("reversed", "was reversed already"):
        done = run(site, ROOT / "patches", "--reverse")
        assert done.stdout.splitlines() == [f"{patch.name}: {word}" for patch in reversed(PATCHES)]
        assert (done.returncode, done.stderr) == (0, "")
        assert contents(site) == before


def test_what_does_not_fit_is_refused_and_what_was_done_is_undone(
    site: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / ONE.name).write_text(ONE.read_text())
    text = re.sub(r"^ (\s+)chunk\.", r" \1chunky.", ONE.read_text(), flags=re.MULTILINE)
    (folder / "0002-misfit.patch").write_text(text)
    before = contents(site)
    done = run(site, folder)
    assert done.returncode == 1
    assert "apply_patches: error: 0002-misfit.patch does not fit" in done.stderr
    assert contents(site) == before


def test_what_does_not_compile_is_refused(site: Path, tmp_path: Path) -> None:
    text = ONE.read_text().replace("+                    if ", "+                    iff ")
    (tmp_path / ONE.name).write_text(text)
    before = contents(site)
    done = run(site, tmp_path)
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr
    assert contents(site) == before


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("vLLM: 0.32.0", "vLLM: 0.31.0", "made for vLLM 0.31.0, installed is 0.32.0"),
        ("vLLM: ", "For vLLM ", "its header has no line 'vLLM: VERSION'"),
    ],
)
def test_patches_for_another_vllm_are_refused(
    site: Path, tmp_path: Path, old: str, new: str, said: str
) -> None:
    (tmp_path / ONE.name).write_text(ONE.read_text().replace(old, new))
    before = contents(site)
    done = run(site, tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert contents(site) == before


def test_no_patch_is_fine_and_no_folder_is_not(site: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert run(site, tmp_path / "none").returncode == 0
    done = run(site, tmp_path / "nowhere")
    assert done.returncode == 1
    assert "no such folder" in done.stderr


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of a patched vLLM."""
    folder = tmp_path_factory.mktemp("patched")
    site = twin(folder / "site")
    assert run(site, ROOT / "patches").returncode == 0
    model = str(tiny.path("target"))
    arguments = [command("vllm"), "serve", model, "--scheduler-cls", "vllm_slo.Scheduler", *SMALL]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        where = "import vllm; print(vllm.__file__)"
        asked = [sys.executable, "-c", where]
        said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        assert said.splitlines()[-1] == str(site / "vllm/__init__.py")
        with live_server.running(arguments, model, folder) as live:
            yield live


@pytest.mark.engine
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_stream_that_ends_at_a_stop_string_has_its_report(patched: LiveServer, api: str) -> None:
    objective = {"slo": {"ttft_ms": 60_000, "tpot_ms": 10_000}}
    whole = ask_openai(patched, api, True, objective)
    assert [report["promised"] for report in whole.reports] == [True]
    assert whole.stop_reasons == [None]
    stop = whole.text.strip()[1:3]
    answer = ask_openai(patched, api, True, {**objective, "stop": stop})
    assert answer.stop_reasons == [stop]
    assert answer.service_tiers == ["default"]
    (report,) = answer.reports
    assert report["promised"] and report["attained"]
    assert report["ttft_ms"] > 0
    plain = ask_openai(patched, api, True, {"stop": stop})
    assert (plain.text, plain.reports) == (answer.text, [])
