# SPDX-License-Identifier: Apache-2.0
"""Three tiny language models that ship with the package, for tests and demonstrations.

``target`` is a small Llama trained on CPython's library sources. ``middle`` and ``draft`` have
fewer layers and are distilled from it, with the same vocabulary. All load in transformers and in
vLLM from the folder that :func:`path` gives. Importing this module loads neither torch nor vLLM.
"""

from pathlib import Path

from vllm_slo.errors import VllmSLOError

NAMES = ("target", "middle", "draft")  # From the largest to the smallest.


class UnknownModelError(VllmSLOError, ValueError):
    """The name is not one of :data:`NAMES`."""


def path(name: str) -> Path:
    """The folder of the shipped model ``name``: "target", "middle" or "draft".

    Raises UnknownModelError for any other name, and FileNotFoundError if the weights are not
    installed.
    """
    if name not in NAMES:
        raise UnknownModelError(f"no tiny model {name!r}: use one of {', '.join(NAMES)}")
    folder = Path(__file__).resolve().parent / name
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder} has no weights: reinstall the package, or train them with "
            f"'python -m vllm_slo.tiny.train --out {folder.parent}'"
        )
    return folder
