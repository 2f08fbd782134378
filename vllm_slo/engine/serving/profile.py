# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo profile MODEL``: measure a model's step times and fit the step-time model to them.

vLLM is imported when something is measured, not when this module is.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from vllm_slo.config import profiles
from vllm_slo.config.profiles import ProfileReport
from vllm_slo.core.step_time.fit import fit
from vllm_slo.engine.serving.profile_measurement import Progress, in_process_llm, measure
from vllm_slo.engine.serving.profile_report import draw, table
from vllm_slo.errors import ProfileError, VllmSLOError

WORST_R2 = 0.5
"""Below it a profile is not stored: a server that learns its step times online does better."""


def profile(
    model: str,
    *,
    quick: bool = False,
    time_limit_s: float | None = None,
    on_progress: Progress | None = None,
    **engine_args: Any,
) -> ProfileReport:
    """Load ``model`` into an engine in this process, measure it, fit, and unload it.

    Prefix caching and asynchronous scheduling are off meanwhile (see RecordingScheduler).

    Args:
        time_limit_s: for the measuring itself; None: 25 s if quick, else 300 s.
        on_progress: is told the scenarios done and their number.
        engine_args: arguments of ``vllm.LLM``, those with which the server will run.
    """
    if time_limit_s is None:
        time_limit_s = 25.0 if quick else 300.0
    from vllm_slo.engine.scheduling.step_time_profile import profile_key

    with in_process_llm(model, engine_args) as llm:
        samples = measure(llm, quick=quick, time_limit_s=time_limit_s, on_progress=on_progress)
        key = profile_key(llm.llm_engine.vllm_config)
    return ProfileReport(key, fit(samples), tuple(samples))


_ENGINE_FLAGS: dict[str, dict[str, Any]] = {
    "--dtype": {},
    "--tensor-parallel-size": {"type": int},
    "--pipeline-parallel-size": {"type": int},
    "--block-size": {"type": int},
    "--kv-cache-dtype": {},
    "--quantization": {},
    "--max-model-len": {"type": int},
    "--max-num-seqs": {"type": int},
    "--max-num-batched-tokens": {"type": int},
    "--gpu-memory-utilization": {"type": float},
    "--load-format": {},
    "--enforce-eager": {"action": "store_true"},
    "--trust-remote-code": {"action": "store_true"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``vllm-slo profile``."""
    parser.add_argument("model", help="model name or folder, as for 'vllm serve'")
    parser.add_argument("--quick", action="store_true", help="a coarser grid, under a minute")
    parser.add_argument("--out", type=Path, help="write here, not into the cache folder")
    parser.add_argument("--plot", type=Path, help="PNG of measured against predicted times")
    engine = parser.add_argument_group("engine", "as for 'vllm serve': give what you serve with")
    for flag, options in _ENGINE_FLAGS.items():
        engine.add_argument(flag, default=argparse.SUPPRESS, **options)


def run(args: argparse.Namespace) -> int:
    """Measure, store, show.  Returns the exit status; an error of ours is printed as one line."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its log would tear the progress bar
    console = Console()
    names = [flag.removeprefix("--").replace("-", "_") for flag in _ENGINE_FLAGS]
    engine_args = {name: getattr(args, name) for name in names if hasattr(args, name)}
    try:
        with Bar(console=console, transient=True) as bar:
            task = bar.add_task(f"measuring {args.model}", total=None)
            report = profile(
                args.model,
                quick=args.quick,
                on_progress=lambda done, total: bar.update(task, completed=done, total=total),
                **engine_args,
            )
        console.print(table(report))
        if args.out is None and report.fit.r2 < WORST_R2:
            raise ProfileError(
                f"R\u00b2 is {report.fit.r2:.2f}: something else kept this machine busy, so "
                "nothing was stored; measure on a quiet machine, or keep this one with --out"
            )
        console.print(f"profile: {profiles.save(report, args.out)}", soft_wrap=True)
        if args.plot is not None:
            console.print(f"picture: {draw(report, args.plot)}", soft_wrap=True)
    except VllmSLOError as error:
        line = f"vllm-slo profile: {error}"
        Console(stderr=True).print(line, style="red", soft_wrap=True, markup=False)
        return 2
    return 0
