# SPDX-License-Identifier: Apache-2.0
"""The training text of the tiny models: the library sources of the running Python."""

import hashlib
import sysconfig
from pathlib import Path, PurePath

# Not library text: tests, installed packages, and the tables of character encodings.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings"}
HELD_OUT_ONE_IN = 16


def is_held_out(relative: PurePath) -> bool:
    """Whether the file at this path under the standard library is not used for training.

    The rule hashes the path, not the content, so a module is on the same side of the split in
    every version of Python.
    """

    digest = hashlib.sha256(relative.as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def files(*, held_out: bool) -> list[Path]:
    """The standard library's .py files of one side of the split, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = sorted(f.relative_to(root) for f in root.rglob("*.py"))
    return [
        root / f
        for f in relative
        if not SKIPPED.intersection(f.parts) and is_held_out(f) == held_out
    ]


def documents(*, held_out: bool) -> list[str]:
    """The texts of :func:`files` that are valid UTF-8 and not empty."""
    texts = []
    for file in files(held_out=held_out):
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return [text for text in texts if text.strip()]
