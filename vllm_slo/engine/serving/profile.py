# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo profile MODEL``: measure a model's step times and fit the step-time model to them.

With ``--draft-model D`` it also measures what drafts are worth (`profile_speculation`).
vLLM is imported when something is measured, not when this module is.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from vllm_slo.arguments import Renamed, add_model, share, standard_output, whole
from vllm_slo.config import profiles
from vllm_slo.config.profiles import ProfileReport
from vllm_slo.core.step_time.fit import fit
from vllm_slo.engine.serving import profile_speculation as speculation
from vllm_slo.engine.serving.profile_measurement import Progress, in_process_llm, measure
from vllm_slo.errors import ConfigError, ProfileError

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
        model: name or folder; ``tiny`` is the built-in one.
        time_limit_s: for the measuring itself; None: 25 s if quick, else 300 s.
        on_progress: is told the scenarios done and their number.
        engine_args: arguments of ``vllm.LLM``, those with which the server will run.
    """
    if time_limit_s is None:
        time_limit_s = 25.0 if quick else 300.0
    from vllm_slo.engine.scheduling.step_time_profile import profile_key
    from vllm_slo.engine.telemetry.recording import RecordingScheduler

    name, memory = speculation.resolved(model, engine_args)
    arguments = {
        "skip_tokenizer_init": True,
        **memory,
        **engine_args,
        "scheduler_cls": RecordingScheduler,
        "async_scheduling": False,
        "enable_prefix_caching": False,
    }
    with in_process_llm(name, arguments) as llm:
        samples = measure(llm, quick=quick, time_limit_s=time_limit_s, on_progress=on_progress)
        key = profile_key(llm.llm_engine.vllm_config)
    return ProfileReport(key, fit(samples), tuple(samples))


_ENGINE_FLAGS: dict[str, dict[str, Any]] = {
    "--dtype": {},
    "--tensor-parallel-size": {"type": whole(1)},
    "--pipeline-parallel-size": {"type": whole(1)},
    "--block-size": {"type": whole(1)},
    "--kv-cache-dtype": {},
    "--quantization": {},
    "--max-model-len": {"type": whole(1)},
    "--max-num-seqs": {"type": whole(1)},
    "--max-num-batched-tokens": {"type": whole(1)},
    "--gpu-memory-utilization": {"type": share()},
    "--load-format": {},
    "--enforce-eager": {"action": "store_true"},
    "--trust-remote-code": {"action": "store_true"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``vllm-slo profile``."""
    add_model(parser, "name or folder of the model; 'tiny' is the built-in one")
    parser.add_argument("--quick", action="store_true", help="coarser: a minute, with drafts two")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the profile here, not into the cache folder; - prints only it",
    )
    parser.add_argument("--out", action=Renamed, new="--json", type=Path, dest="json")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="PNG of measured against predicted times"
    )
    drafts = parser.add_argument_group("speculation", "does it help on this model?")
    drafts.add_argument(
        "--draft-model",
        "--draft_model",
        action="append",
        metavar="NAME",
        help="name or folder of a draft model, whose drafts are measured, too; 'tiny' is the "
        "built-in one",
    )
    drafts.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='with --draft-model: texts to measure with, one a line, or {"prompt": "..."} in each '
        "line of a .jsonl file; without it, Python code",
    )
    engine = parser.add_argument_group("engine", "as for 'vllm serve': give what you serve with")
    for flag, options in _ENGINE_FLAGS.items():
        metavar = {"metavar": "N" if "type" in options else "NAME"}
        shown = options if "action" in options else metavar | options
        engine.add_argument(flag, default=argparse.SUPPRESS, **shown)


def run(args: argparse.Namespace) -> int:
    """Measure, store, show; returns the exit status.

    Raises:
        VllmSLOError: an option or the model cannot be used, or the measurement is of no use.
    """
    from rich.console import Console
    from rich.progress import Progress as Bar

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its log would tear the progress bar
    console = Console(stderr=standard_output(args.json))
    names = [flag.removeprefix("--").replace("-", "_") for flag in _ENGINE_FLAGS]
    engine_args = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if args.prompts is not None and args.draft_model is None:
        raise ConfigError("--prompts: they are for measuring drafts; name a --draft-model, too")
    drafted, engine = None, None
    with Bar(console=console, transient=True) as bar:
        if args.draft_model is not None:
            engine = speculation.DraftedEngine.of(args.model, args.draft_model, engine_args)
            engine_args = engine.without_drafts()
            # First: this process lends its cores and its memory to no engine yet.
            drafted = speculation.profile_speculation(
                engine,
                prompts=args.prompts,
                quick=args.quick,
                on_progress=_shown(bar, f"measuring drafts of {engine.draft}"),
            )
        report = profile(
            args.model,
            quick=args.quick,
            on_progress=_shown(bar, f"measuring {args.model}"),
            **engine_args,
        )
    console.print(table(report))
    if drafted is not None and engine is not None:
        _print_drafted(console, drafted, f"{args.model} with drafts of {engine.draft}")
    if args.json is None and report.fit.r2 < WORST_R2:
        raise ProfileError(
            f"R\u00b2 is {report.fit.r2:.2f}: something else kept this machine busy, so "
            "nothing was stored; measure on a quiet machine, or keep this one with --json"
        )
    if standard_output(args.json):
        sys.stdout.write(profiles.text_of(report) + "\n")
    else:
        console.print(f"profile: {profiles.save(report, args.json)}", soft_wrap=True)
    if args.plot is not None:
        console.print(f"picture: {draw(report, args.plot)}", soft_wrap=True)
    return 0


def _shown(bar: Any, text: str) -> Progress:
    """What shows progress as a line of a ``rich`` progress bar."""
    task = bar.add_task(text, total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)


def _print_drafted(console: Any, report: speculation.SpeculationReport, title: str) -> None:
    console.print(speculation.table(report, title))
    for sentence in speculation.sentences(report):
        console.print(f"- {sentence}", markup=False, highlight=False)


def draw(report: ProfileReport, path: Path) -> Path:
    """Draw measured against predicted step times as a PNG.

    Raises:
        ProfileError: matplotlib is missing.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
        ticker = importlib.import_module("matplotlib.ticker")
    except ImportError as error:
        raise ProfileError(
            "drawing needs matplotlib: pip install 'vllm-slo[bench]', or leave --plot out"
        ) from error
    figure = figures.Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot()
    kinds = {
        "decode": lambda s: s.tokens == s.requests,
        "prefill": lambda s: s.requests == 1 < s.tokens,
        "mixed": lambda s: 1 < s.requests < s.tokens,
    }
    for name, belongs in kinds.items():
        points = [(report.model.predict_shape_s(s), t) for s, t in report.samples if belongs(s)]
        if points:
            predicted, measured = zip(*points, strict=True)
            axes.scatter(
                [1e3 * x for x in predicted], [1e3 * y for y in measured], s=14, label=name
            )
    times = [1e3 * t for _, t in report.samples]
    axes.plot([min(times), max(times)], [min(times), max(times)], color="grey", linewidth=1)
    axes.set(
        xscale="log", yscale="log", xlabel="predicted (ms)", ylabel="measured (ms)",
        title=f"{report.key.model}: step time, R\u00b2 = {report.fit.r2:.4f}",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


def table(report: ProfileReport) -> Any:
    """The fit as a ``rich`` table, beside fits without the terms for attention."""
    from rich.table import Table

    low, high = report.model.terms
    shown = Table(title=f"{report.key.model} on {report.key.device}, {report.fit.n} shapes")
    for heading in ("terms", "R\u00b2", "worst residual", "worst ratio"):
        shown.add_column(heading, justify="left" if heading == "terms" else "right")
    fits = {
        "tokens, context, pairs": report.fit,
        "tokens, context": fit(report.samples, pair_term=False),
        "tokens only": fit(report.samples, kv_term=False, pair_term=False),
    }
    for name, result in fits.items():
        shown.add_row(
            name, f"{result.r2:.4f}", f"{1e3 * result.worst_residual_s:.2f} ms",
            f"{100 * result.worst_residual_ratio:.1f} %",
        )  # fmt: skip
    shown.caption = (
        f"step = max({1e3 * low[2]:.3f} ms + {1e6 * low[0]:.2f} us/token, "
        f"{1e3 * high[2]:.3f} ms + {1e6 * high[0]:.2f} us/token)\n"
        f"+ {1e9 * report.model.kv_s:.2f} ns/context token + "
        f"{1e9 * report.model.pair_s:.4f} ns/query-key pair"
    )
    return shown
