# SPDX-License-Identifier: Apache-2.0
"""What came out of AdaServe's workload, summed up, compared and shown (see ``adaserve.py``)."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from adaserve_systems import CHUNK, KV_GB, MAX_SEQS, Kitchen
from adaserve_workload import CATEGORIES, Point, Request

from vllm_slo.bench import style, traces
from vllm_slo.core.attainment import RequestRecord, summarise, summarise_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOLERANCE: Final = 0.02
"""Smallest difference that counts as worse."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """One run, or the medians of several. Shares, tokens/s, seconds.

    Attributes:
        violations: share of the requests that did not attain.
        by_category: the same per category.
        goodput, throughput: tokens/s of attaining requests, of all.
        ttft_s: mean.
        accepted: draft tokens accepted per request and step, over all steps that decode (fig. 12).
        tokens_per_step: scheduled, draft tokens included.
        step_s: median.
        draft_share: of the time of all steps, spent drafting.
        choosing_share: the same, spent choosing trees in the scheduler.
        unfinished: share of requests.
        others: of the machine's time, taken by other processes.
        slower: than usual, the machine: its time for a fixed piece of work, before or after.
    """

    violations: float
    by_category: dict[str, float]
    goodput: float
    throughput: float
    ttft_s: float
    accepted: float
    tokens_per_step: float
    step_s: float
    draft_share: float
    choosing_share: float
    unfinished: float
    others: float
    slower: float

    def line(self) -> str:
        """In short."""
        return (
            f"violations {self.violations:.1%}, goodput {self.goodput:.1f}/s, throughput "
            f"{self.throughput:.1f}/s, TTFT {self.ttft_s:.2f} s, accepted {self.accepted:.2f}, "
            f"step {1e3 * self.step_s:.1f} ms of {self.tokens_per_step:.1f} tokens, "
            f"drafting {self.draft_share:.0%}, choosing {self.choosing_share:.1%}, "
            f"unfinished {self.unfinished:.0%}, others {self.others:.0%}, machine "
            f"{self.slower:.2f}x"
        )


def records_of(requests: Sequence[Request], run: Mapping[str, Any]) -> list[RequestRecord]:
    """The record of each request."""
    records = []
    for one in requests:
        seen = run["requests"][one.request_id]
        records.append(
            RequestRecord(
                one.request_id, one.category, one.arrival_s, tuple(seen["times_s"]), None,
                one.tpot_slo_s, "served", seen["finished"], one.prompt_tokens,
            )
        )  # fmt: skip
    return records


def numbers_of(requests: Sequence[Request], run: Mapping[str, Any]) -> Numbers:
    """The numbers of one run (section 6.1, "Metrics"); an unfinished request did not attain."""
    records = records_of(requests, run)
    ends = [record.token_times_s[-1] for record in records if record.token_times_s]
    lasted_s = max(max(ends, default=0.0) - records[0].arrival_s, 1e-9)
    total = summarise_class("total", records, lasted_s)
    ttfts = [record.ttft_s for record in records if record.ttft_s is not None]
    steps = run["steps"]
    decodes = sum(step["decodes"] for step in steps)
    took_s = sum(step["took_s"] for step in steps)
    return Numbers(
        1.0 - (total.attainment_by_mean or 0.0),
        {
            name: 1.0 - (one.attainment_by_mean or 0.0)
            for name, one in sorted(summarise(records, lasted_s).items())
        },
        total.goodput_tokens_per_s_by_mean,
        total.throughput_tokens_per_s,
        sum(ttfts) / len(ttfts) if ttfts else math.inf,
        sum(step["given"] for step in steps) / decodes - 1.0 if decodes else 0.0,
        sum(step["tokens"] for step in steps) / max(len(steps), 1),
        median(step["took_s"] for step in steps) if steps else 0.0,
        sum(step["draft_s"] for step in steps) / took_s if took_s else 0.0,
        sum(step["choosing_s"] for step in steps) / took_s if took_s else 0.0,
        1.0 - total.finished / len(records),
        run["others"],
        run["slower"],
    )


def middle(runs: Sequence[Numbers]) -> Numbers:
    """The median of each number."""
    every = [asdict(one) for one in runs]
    plain = {key: median(d[key] for d in every) for key in every[0] if key != "by_category"}
    names = sorted({name for one in runs for name in one.by_category})
    by_category = {
        name: median(one.by_category[name] for one in runs if name in one.by_category)
        for name in names
    }
    return Numbers(by_category=by_category, **plain)


@dataclass(frozen=True, slots=True)
class Versus:
    """Ours at one point against the best of the others in each respect.

    Attributes:
        fewest, violations: the best baseline and its share; ``ours_violations``: ours.
        most, goodput: the best baseline and its tokens/s; ``ours_goodput``: ours.
    """

    point: Point
    fewest: str
    violations: float
    ours_violations: float
    most: str
    goodput: float
    ours_goodput: float

    @property
    def fewer(self) -> float:
        """How many times fewer violations; 1 if neither has any, infinite if only ours has none."""
        if self.ours_violations == 0:
            return 1.0 if self.violations == 0 else math.inf
        return self.violations / self.ours_violations

    @property
    def more(self) -> float:
        """How many times as much goodput."""
        if self.goodput == 0:
            return 1.0 if self.ours_goodput == 0 else math.inf
        return self.ours_goodput / self.goodput

    @property
    def worse(self) -> bool:
        """Whether ours is worse in either respect, by more than the tolerance."""
        return self.ours_violations > self.violations + TOLERANCE or self.more < 1.0 - TOLERANCE


def against(
    found: Mapping[tuple[Point, str], Sequence[Numbers]], baselines: Iterable[str], ours: str
) -> list[Versus]:
    """Ours against the best baseline at every point that has both."""
    names = list(baselines)
    result = []
    for point in dict.fromkeys(point for point, _ in found):
        others = {name: middle(found[point, name]) for name in names if (point, name) in found}
        if not others or (point, ours) not in found:
            continue
        mine = middle(found[point, ours])
        fewest = min(others, key=lambda name: others[name].violations)
        most = max(others, key=lambda name: others[name].goodput)
        result.append(
            Versus(point, fewest, others[fewest].violations, mine.violations, most,
                   others[most].goodput, mine.goodput)
        )  # fmt: skip
    return result


# --- showing it -----------------------------------------------------------------------------------

AXES: Final = {"rate": "requests/s", "urgent": "share of category 1", "scale": "SLO scale"}


def axis_of(points: Sequence[Point]) -> str:
    """The field of a point that the sweep changes."""
    for name in ("urgent", "scale"):
        if len({getattr(point, name) for point in points}) > 1:
            return name
    return "rate"


def shown(point: Point) -> str:
    """In words."""
    urgent = "" if point.urgent is None else f", {point.urgent:.0%} urgent"
    return f"{point.rate:g}/s, scale {point.scale:g}{urgent}"


def times(ratio: float) -> str:
    """A ratio as a cell."""
    return "all" if math.isinf(ratio) else f"{ratio:.2f}x"


def headline(versus: Sequence[Versus], axis: str) -> list[list[str]]:
    """Head and lines: the best baseline against ours."""
    head = [AXES[axis], "fewest violations of the others", "ours", "times fewer",
            "most goodput of the others, tokens/s", "ours", "times as much"]  # fmt: skip
    lines = [
        [f"{getattr(one.point, axis):g}", f"{one.violations:.1%} ({one.fewest})",
         f"{one.ours_violations:.1%}", times(one.fewer), f"{one.goodput:.1f} ({one.most})",
         f"{one.ours_goodput:.1f}", times(one.more)]
        for one in versus
    ]  # fmt: skip
    return [head, *lines]


def verdict(versus: Sequence[Versus], axis: str) -> str:
    """The best point of the sweep, and the points at which ours is worse."""
    if not versus:
        return ""
    fewer = max(versus, key=lambda one: one.fewer)
    more = max(versus, key=lambda one: one.more)
    worse = [f"{getattr(one.point, axis):g}" for one in versus if one.worse]
    said = "avoids all violations" if math.isinf(fewer.fewer) else f"{fewer.fewer:.2f}x fewer"
    return (
        f"Against the best of the others at each point, in each respect: {said} at "
        f"{getattr(fewer.point, axis):g} {AXES[axis]}, {times(more.more)} the goodput at "
        f"{getattr(more.point, axis):g}; worse (by over {TOLERANCE:.0%}) at: "
        f"{', '.join(worse) or 'none'}."
    )


def main_table(found: Mapping[tuple[Point, str], Sequence[Numbers]], axis: str) -> list[list[str]]:
    """Head and lines: every system at every point, medians, with the range of the windows."""
    names = sorted({name for runs in found.values() for one in runs for name in one.by_category})
    lines = [
        [AXES[axis], "system", "violations", *names, "goodput, tokens/s", "throughput, tokens/s",
         "mean TTFT, s", "accepted", "tokens a step", "step, ms", "drafting", "choosing trees",
         "runs"]
    ]  # fmt: skip

    def with_range(runs: Sequence[Numbers], name: str, form: str) -> str:
        values = [getattr(one, name) for one in runs]
        low, high = (format(value, form) for value in (min(values), max(values)))
        return f"{median(values):{form}}" + (f" ({low} to {high})" if len(values) > 1 else "")

    for (point, system), runs in found.items():
        m = middle(runs)
        lines.append(
            [f"{getattr(point, axis):g}", system, with_range(runs, "violations", ".1%"),
             *(f"{m.by_category[name]:.0%}" if name in m.by_category else "-" for name in names),
             with_range(runs, "goodput", ".1f"), f"{m.throughput:.1f}", f"{m.ttft_s:.2f}",
             f"{m.accepted:.2f}", f"{m.tokens_per_step:.1f}", f"{1e3 * m.step_s:.1f}",
             f"{m.draft_share:.1%}", f"{m.choosing_share:.1%}", str(len(runs))]
        )  # fmt: skip
    return lines


LOOKS: Final[Mapping[str, Mapping[str, Any]]] = {
    "stock": {"color": "#7a7a7a", "marker": "o"},
    "priority": {"color": "#7a7a7a", "linestyle": "--", "marker": "o"},
    "sarathi": {"color": "#7a7a7a", "linestyle": ":", "marker": "o"},
    "chain-1": {"color": "#9ecae1", "marker": "s"},
    "chain-2": {"color": "#56b4e9", "marker": "s"},
    "chain-3": {"color": "#0072b2", "marker": "s"},
    "chain-4": {"color": "#08306b", "marker": "s"},
    "dynamic": {"color": "#009e73", "marker": "^"},
    "ours": {"color": "#d55e00", "marker": "D", "linewidth": 2.6, "zorder": 5},
}
"""Okabe and Ito's colours; one hue for each kind of system."""
OTHER_COLOURS: Final = ("#cc79a7", "#e69f00", "#f0e442", "#000000")


def draw(found: Mapping[tuple[Point, str], Sequence[Numbers]], axis: str, path: Path) -> None:
    """Violations, goodput and accepted tokens along the sweep, one line per system."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = (
        ("violations", 100.0, "Requests that missed their SLO (%)\n(lower is better)"),
        ("goodput", 1.0, "Goodput, tokens/s\n(higher is better)"),
        ("accepted", 1.0, "Draft tokens accepted\nper request and step"),
    )
    with rc_context(style.PICTURE):
        figure = Figure(figsize=(13.5, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        every = figure.subplots(1, len(panels))
        for axes, (name, factor, title) in zip(every, panels, strict=True):
            _draw_panel(axes, found, axis, name, factor)
            axes.set_title(title)
            axes.set_xlabel(AXES[axis])
            axes.set_ylim(bottom=0)
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 9))
        figure.suptitle(
            "AdaServe's workload on the CPU engine", fontsize=12, fontweight="bold", x=0.01,
            ha="left",
        )  # fmt: skip
        figure.savefig(path, dpi=130)


def _draw_panel(
    axes: Axes,
    found: Mapping[tuple[Point, str], Sequence[Numbers]],
    axis: str,
    name: str,
    factor: float,
) -> None:
    others = iter(OTHER_COLOURS * 4)
    for system in dict.fromkeys(system for _, system in found):
        runs = {getattr(p, axis): found[p, s] for p, s in found if s == system}
        places = sorted(runs)
        heights = [factor * median(getattr(one, name) for one in runs[at]) for at in places]
        look: dict[str, Any] = {"linewidth": 1.5, "markersize": 4.5}
        look |= LOOKS[system] if system in LOOKS else {"color": next(others), "marker": "v"}
        axes.plot(places, heights, label=system, **look)


def describe(
    args: argparse.Namespace,
    kitchen: Kitchen,
    source: str,
    zero_s: tuple[float, float],
    requests: Sequence[Request],
    runs: Sequence[Numbers],
) -> str:
    """What was run, in words."""
    targets = {one.category: one.tpot_slo_s for one in requests}
    counts = {name: sum(one.category == name for one in requests) for name in CATEGORIES}
    mix = ", ".join(
        f"{name} (TPOT {1e3 * targets[name]:.1f} ms, {targets[name] / zero_s[0]:.2f}x zero load; "
        f"{counts[name]} requests)"
        for name in CATEGORIES
        if counts[name]
    )
    prompt = np.mean([one.prompt_tokens for one in requests])
    output = np.mean([one.output_tokens for one in requests])
    others = max(one.others for one in runs)
    slower = [one.slower for one in runs]
    drifted = sum(abs(ratio - 1.0) > args.drift for ratio in slower)
    target = f"{args.parameters / 1e6:.0f}M parameters" if args.parameters else "the target itself"
    draft = f"{args.draft_parameters / 1e6:.0f}M" if args.draft_parameters else "the draft itself"
    return f"""
Workload: {args.windows} windows of {args.requests} consecutive requests of {source}; at every point
the same ones to every system, systems taking turns; medians. In the first window: {mix}; on
average {prompt:.0f} prompt and {output:.0f} answer tokens (the trace's times
{args.prompt_scale:g} and {args.output_scale:g}), temperature {args.temperature:g}.
A lone request takes {1e3 * zero_s[0]:.1f} ms a token on stock vLLM ({1e3 * zero_s[1]:.1f} ms when
measured again at the end); AdaServe's machine {1e3 * traces.ADASERVE_ZERO_LOAD_TPOT_S:.1f} ms.
Engine: target {target}, draft {draft}; eager bfloat16, at most {MAX_SEQS} requests, 2,048 tokens a
step unless the name says otherwise, {KV_GB} GB of KV cache, synchronous stepping (in one process
there is nothing for asynchronous scheduling to overlap with). sarathi: at most {CHUNK} tokens a
step. Other processes took at most {others:.0%} of the machine during a run. Before and after each
run a fixed matrix product took {min(slower):.2f} to {max(slower):.2f} times as long as when zero
load was measured; {drifted} of {len(runs)} runs are kept though it was off by over
{args.drift:.0%}, after {args.retries} more tries. chain-K: a draft model, K tokens ahead. dynamic:
K by batch size, as
{json.dumps([list(row) for row in kitchen.dynamic])} (first, last batch size, K).
Configuration of ours: `{json.dumps(kitchen.slo_config)}`.
""".strip()


NOTE: Final = """
*accepted*: draft tokens accepted per request and step that decodes. *times fewer*: "all" where only
ours has no violations. Numbers in brackets: the range over the windows, which are other requests
each time. Adaptive verification (`enable_adaptive_verification`) is not among the systems: vLLM
0.32 refuses it on CPU ("Model Runner V1 does not support: adaptive draft verification"; the other
runner needs Triton).
"""
