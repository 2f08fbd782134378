# SPDX-License-Identifier: Apache-2.0
"""Two tiny language models that ship with the package, for tests and demonstrations.

``target`` is a small Llama trained on CPython's own library sources; ``draft`` is a shallower
one distilled from it, with the same vocabulary.  Both load in transformers and in vLLM from the
folder that :func:`path` gives.  Importing this module loads neither torch nor vLLM.
"""

from pathlib import Path

from vllm_slo.errors import VllmSLOError

NAMES = ("target", "draft")


class UnknownModelError(VllmSLOError, ValueError):
    """The name asked for is not one of :data:`NAMES`."""


def path(name: str) -> Path:
    """The folder of the shipped model ``name``: "target" or "draft".

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
