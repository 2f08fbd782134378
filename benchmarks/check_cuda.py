# SPDX-License-Identifier: Apache-2.0
"""What somebody with one GPU runs to see whether vllm-slo works on it: ``make check-cuda``.

    python benchmarks/check_cuda.py               all parts, on the GPU; under ten minutes
    python benchmarks/check_cuda.py --cpu         the same with small sizes, without a GPU
    python benchmarks/check_cuda.py --only demo   some parts: the names are those of the table

Each part has a process and a time limit of its own, so no part stops another. The table says pass
or fail with the reason. ``check-cuda.json`` has what was measured, and the folder ``check-cuda``
has what each part printed. The exit status is 1 if a part fails.
"""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from check_cuda_runner import Found, Part, report_found, run_all

Check: TypeAlias = Callable[[bool], Found]
"""Takes whether there is no GPU; raises CheckError with the reason if something is wrong."""


class Step(NamedTuple):
    """Where the code of a part is.

    Attributes:
        module: has the function ``function``, which takes ``arguments`` before whether to use CPU.
        limit_s: seconds that it may take with a GPU.
    """

    module: str
    function: str
    limit_s: float
    arguments: tuple[str, ...] = ()


STEPS: Final = {
    "environment": Step("check_cuda_environment", "environment", 120.0),
    "import": Step("check_cuda_environment", "imports", 180.0),
    "kernels": Step("check_cuda_kernels", "kernels", 240.0),
    "kernel times": Step("check_cuda_kernels", "kernel_times", 180.0),
    "serve stock": Step("check_cuda_serve", "serve", 300.0, ("stock",)),
    "serve vllm-slo": Step("check_cuda_serve", "serve", 300.0, ("vllm-slo",)),
    "serve trees": Step("check_cuda_serve", "serve", 300.0, ("trees",)),
    "lossless": Step("check_cuda_lossless", "lossless", 400.0),
    "overhead": Step("check_cuda_commands", "overhead", 240.0),
    "profile": Step("check_cuda_commands", "profile", 240.0),
    "demo": Step("check_cuda_commands", "demo", 500.0),
}
SLOWER: Final = 2.5
"""Times the limits where CPUs compute, which may be few and slow."""


def missing_gpu() -> str | None:
    """Why nothing can be checked on a GPU here; None: there is one."""
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} finds no CUDA GPU (see what nvidia-smi says)"


def check_of(name: str) -> Check:
    """The function of a part."""
    step = STEPS[name]
    return partial(getattr(import_module(step.module), step.function), *step.arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, or one of them in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="small sizes, without a GPU")
    parser.add_argument("--only", action="append", choices=STEPS, help="this part; repeatable")
    parser.add_argument("--out", type=Path, default=Path("check-cuda.json"), help="the results")
    parser.add_argument("--part", choices=STEPS, help=argparse.SUPPRESS)  # what each process runs
    args = parser.parse_args(argv)
    if args.part is not None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends its servers, too
        return report_found(partial(check_of(args.part), args.cpu))
    missing = None if args.cpu else missing_gpu()
    if missing is not None:
        print(f"check-cuda: {missing}. Without a GPU: make check-cuda ARGS=--cpu", file=sys.stderr)
        return 2
    options = ["--cpu"] if args.cpu else []
    patience = SLOWER if args.cpu else 1.0
    parts = [
        Part(name, (sys.executable, __file__, "--part", name, *options), step.limit_s * patience)
        for name, step in STEPS.items()
        if args.only is None or name in args.only
    ]
    return run_all(parts, args.out, cpu=args.cpu)


if __name__ == "__main__":
    sys.exit(main())
