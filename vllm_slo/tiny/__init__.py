# SPDX-License-Identifier: Apache-2.0
"""Three tiny language models that ship with the package, for tests and demonstrations.

``target`` is a small Llama trained on CPython's own library sources; ``middle`` and ``draft`` are
shallower ones distilled from it, with the same vocabulary.  All load in transformers and in vLLM
from the folder that :func:`path` gives.  Importing this module loads neither torch nor vLLM.
"""

from pathlib import Path

from vllm_slo.errors import VllmSLOError

NAMES = ("target", "middle", "draft")  # From the largest to the smallest.


class UnknownModelError(VllmSLOError, ValueError):
    """The name asked for is not one of :data:`NAMES`."""


def path(name: str) -> Path:
    """The folder of the shipped model ``name``: "target", "middle" or "draft".

    Raises UnknownModelError for any other name, and FileNotFoundError where the installation
    lacks the weights.
    """
    if name not in NAMES:
        raise UnknownModelError(f"no tiny model {name!r}: name one of {', '.join(NAMES)}")
    folder = Path(__file__).resolve().parent / name
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"{folder} holds no weights: reinstall the package, or write them with "
            f"'python -m vllm_slo.tiny.train --out {folder.parent}'"
        )
    return folder
