# SPDX-License-Identifier: Apache-2.0
"""Parts of ``check_cuda.py``: attention over token trees against a reference, and its time."""

from __future__ import annotations

import os
from typing import Final

from check_cuda_runner import CheckError, Found

POINTS: Final = ((1, 2048, 16), (16, 2048, 16), (64, 2048, 16), (16, 8192, 64))
"""(requests, context, tokens of a tree) that are timed."""
COLUMNS: Final = (
    "requests",
    "context",
    "tokens",
    "tree_us",
    "chain_us",
    "best",
    "ratio",
    "tb_per_s",
)


def kernels(cpu: bool) -> Found:
    """The results of the kernel for several head sizes, groups and types."""
    if cpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is imported
    try:
        import tree_attention_cuda as attention
    except ImportError as error:
        raise CheckError(f"the kernel cannot be imported: {error}") from error
    shapes = attention.CHECKED_ON_CPU if cpu else attention.CHECKED
    try:
        worst = attention.check(shapes)
    except SystemExit as error:
        raise CheckError(str(error)) from error
    return Found(
        f"{len(shapes)} shapes, {worst:.0%} of the allowed distance at worst"
        + (" (in Triton's interpreter)" if cpu else ""),
        {"shapes": len(shapes), "worst": worst},
    )


def kernel_times(cpu: bool) -> Found:
    """Trees against causal chains of as many tokens, by vLLM's own attention."""
    if cpu:
        return Found("no GPU", status="skipped")
    import tree_attention_cuda as attention

    if not {"vLLM flash", "vLLM Triton"} & attention.baselines().keys():
        raise CheckError("vLLM's own attention does not run here; the log says why")
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in attention.compare(list(POINTS))]
    ratios = [float(row["ratio"]) for row in rows]
    return Found(
        f"a tree takes {min(ratios):.2f} to {max(ratios):.2f} times as long as the fastest chain",
        {"rows": rows},
    )
