# SPDX-License-Identifier: Apache-2.0
"""What surrounds the tests is the same on every machine, and no test reads what only one has.

The session gets a home folder, a temporary folder, a time zone and a locale of its own, and none
of the settings that a user has for vLLM, Ray, Hugging Face and the like. A test that opens a file
outside the repository, the Python installation and the system's own folders fails.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT_VARIABLE: Final = "VLLMSLO_TEST_ROOT"
"""The session's own folder, for the processes that the first one starts."""
DATA_VARIABLE: Final = "VLLMSLO_TEST_DATA"
"""Set by the user: where the recorded traces and prompts are that tests of real data read."""
REPOSITORY: Final = Path(__file__).resolve().parents[2]
START: Final = Path(__file__).resolve().parent / "start"
"""On the path of every process: what is in ``sitecustomize.py`` is run first."""
SETTINGS: Final = (
    *("HF_", "HUGGING_FACE_", "MPL", "NUMBA_", "OMP_", "OPENAI_", "OTEL_", "PROMETHEUS_", "RAY_"),
    *("SERVE_", "TORCH", "TRANSFORMERS_", "TRITON_", "VLLM_", "XDG_"),
)
"""How the names of variables begin that a user may have set for what is tested."""
DROPPED: Final = (
    *("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "LANGUAGE"),
    *("PYTHONPATH", "PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE", "PYTHONOPTIMIZE", "PYTHONUTF8"),
    *(f"{name}_proxy" for name in ("http", "https", "ftp", "all", "no")),
)
NOWHERE: Final = "/nowhere"
"""A folder that no machine has: what a test opens to see how a missing file is told."""
SYSTEM: Final = ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/lib64", "/bin", "/run", "/var")

_opened: list[str] = []


def python_path(*folders: Path) -> str:
    """``PYTHONPATH`` of a process that finds modules in these folders."""
    return os.pathsep.join(map(str, (START, *folders)))


def prepare(environ: Any = os.environ) -> None:
    """Give this session its surroundings, once; the processes that it starts inherit them."""
    if ROOT_VARIABLE in environ:
        return
    root = Path(tempfile.mkdtemp(prefix="slo-"))
    for name in list(environ):
        if name.startswith(SETTINGS) or name in DROPPED or name.lower() in DROPPED:
            del environ[name]
    folders = {
        "HOME": "home",
        "TMPDIR": "tmp",
        "XDG_CACHE_HOME": "home/.cache",
        "XDG_CONFIG_HOME": "home/.config",
        "XDG_DATA_HOME": "home/.local/share",
    }
    for variable, folder in folders.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        environ[variable] = str(root / folder)
    environ |= {
        ROOT_VARIABLE: str(root),
        "PYTHONPATH": python_path(),
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        # Empty: there is none. `make test` is the same beside recorded data and without.
        "VLLM_SLO_DATA": environ.get(DATA_VARIABLE, ""),
    }
    tempfile.tempdir = None
    time.tzset()


def reset_logging() -> None:
    """Undo what earlier tests did to the loggers, so that pytest captures this package's messages.

    vLLM's API server, if a test builds it, leaves the root logger at the level ERROR.
    """
    logging.disable(logging.NOTSET)
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for name, logger in list(root.manager.loggerDict.items()):
        if name.partition(".")[0] == "vllm_slo" and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            logger.setLevel(logging.NOTSET)  # clears the cache of enabled levels of all loggers
    logging.getLogger("vllm_slo").parent = root


def clean_up(environ: Any = os.environ) -> None:
    """Remove the session's folder."""
    shutil.rmtree(environ[ROOT_VARIABLE], ignore_errors=True)


def allowed() -> tuple[str, ...]:
    """The folders in which a test may open files."""
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()}
    python |= {folder for folder in sys.path if Path(folder).name == "site-packages"}
    data = [os.environ[DATA_VARIABLE]] if os.environ.get(DATA_VARIABLE) else []
    folders = [REPOSITORY, os.environ[ROOT_VARIABLE], *python, *data, NOWHERE, *SYSTEM]
    return tuple(f"{os.path.realpath(one)}/" for one in folders)


def watch() -> None:
    """Note from now on what this process opens elsewhere."""
    folders = allowed()

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not f"{path}/".startswith(folders):
            _opened.append(path)

    sys.addaudithook(audit)


def opened_elsewhere() -> list[str]:
    """The files noted since the last call."""
    found = sorted(set(_opened))
    _opened.clear()
    return found
