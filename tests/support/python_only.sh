#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# An environment with the Python code of a version of vLLM that has no build for CPUs, before all
# that another environment has. Its kernels are missing, so no engine starts there.
#
#   python_only.sh VERSION BASE TARGET
#
# BASE and TARGET are folders of environments; TARGET is made anew.
set -eu
version=$1 base=$2 target=$3
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
rm -rf "$target"
"$base/bin/python" -m venv --without-pip "$target"
"$base/bin/python" -m pip download -q --no-deps --only-binary=:all: \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_31_x86_64 \
    -d "$wheels" "vllm==$version.*"
# Of what this version needs besides, the rest of vLLM imports only this.
"$base/bin/python" -m pip install -q --no-deps --target "$wheels/needed" orjson
"$base/bin/python" - "$wheels" "$base" "$target" <<'END'
"""Unpack the Python files of a wheel, name the build as vLLM's look for a platform wants it."""

import shutil
import sys
import zipfile
from pathlib import Path

wheels, base, target = map(Path, sys.argv[1:])
(wheel,) = wheels.glob("*.whl")
(site,) = target.glob("lib/python3.*/site-packages")
(others,) = base.resolve().glob("lib/python3.*/site-packages")
with zipfile.ZipFile(wheel) as archive:
    wanted = [n for n in archive.namelist() if n.endswith((".py", ".json")) or ".dist-info/" in n]
    archive.extractall(site, wanted)
(metadata,) = site.glob("vllm-*.dist-info/METADATA")
lines = metadata.read_text().splitlines(keepends=True)
of_version = next(i for i, line in enumerate(lines) if line.startswith("Version: "))
version = lines[of_version].split()[1].partition("+")[0]
lines[of_version] = f"Version: {version}+cpu\n"
metadata.write_text("".join(lines))
shutil.copytree(wheels / "needed", site, dirs_exist_ok=True)
(site / "others.pth").write_text(f"{others}\n{Path.cwd()}\n")
print(f"vLLM {version}, its Python code alone")
END
