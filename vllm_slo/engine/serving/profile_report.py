# SPDX-License-Identifier: Apache-2.0
"""Shows a measured profile: as a picture, and as a table."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from vllm_slo.config.profiles import ProfileReport
from vllm_slo.core.step_time.fit import fit
from vllm_slo.errors import ProfileError


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
