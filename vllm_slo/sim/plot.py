# SPDX-License-Identifier: Apache-2.0
"""Pictures of simulations: attainment by rate, load over time, capacity by replicas.

After SLOs-Serve's figures 9, 11 and 13. Needs matplotlib (extra ``bench``). The colours are Okabe
and Ito's, and every system also has its own marker. The background is white, so that pictures look
the same on dark and light pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_slo.bench.style import INK, PICTURE
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.report import Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS: Final = "#0072b2"
_OTHERS: Final = (
    "#d55e00",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#7a7a7a",
    "#56b4e9",
    "#a6761d",
    "#1b1f24",
)
_MARKERS: Final = ("s", "^", "D", "v", "P", "X", "<", "*")
_SHADED: Final = 4
"""Most systems in one panel whose range over windows is drawn."""
_TAIL: Final = 0.03
"""Share of the peak load below which the end of a window is left out."""


def _looks(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line width by label; vllm-slo's differ most, the others keep an order."""
    looks: dict[str, dict[str, Any]] = {}
    others = [label for label in labels if label != "vllm-slo"]
    for place, label in enumerate(others):
        looks[label] = {
            "color": _OTHERS[place % len(_OTHERS)],
            "marker": _MARKERS[place % len(_MARKERS)],
            "linewidth": 1.6,
            "markersize": 5,
        }
    ours = {"color": _OURS, "marker": "o", "linewidth": 2.6, "markersize": 6, "zorder": 5}
    return looks | {"vllm-slo": ours}


def _family(row: Row) -> str:
    """The label without the tuned setting, which may differ between scenarios."""
    return row.label.split(" [", 1)[0]


def _panels(count: int, width: float = 4.6) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(count, 3)
    lines = -(-count // columns)
    size = (max(7.0, width * columns), 3.4 * lines + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False)
    axes = [axis for line in grid for axis in line]
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes[:count]


def _finish(figure: Figure, axes: Sequence[Axes], title: str) -> None:
    """Add a title, and below the panels one legend of all that they show."""
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    # The longest label decides how many labels fit into a row.
    widest = max((len(label) for label in handles), default=1)
    columns = max(1, int(figure.get_figwidth() / (0.085 * widest + 0.55)))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=min(len(handles), columns),
    )


def _draw_curves(axes: Axes, group: Sequence[Row], looks: dict[str, Any], target: float) -> None:
    for row in group:
        rates = [point.rate for point in row.points]
        shares = [100 * point.summary.attainment for point in row.points]
        look = looks[_family(row)]
        axes.plot(rates, shares, label=_family(row), **look)
        if len(row.points[0].attainments) > 1 and len(group) <= _SHADED:
            low = [100 * min(point.attainments) for point in row.points]
            high = [100 * max(point.attainments) for point in row.points]
            axes.fill_between(rates, low, high, color=look["color"], alpha=0.13, linewidth=0)
    axes.axhline(100 * target, color=INK, linewidth=1.1, linestyle="--")
    axes.set_ylim(0, 104)
    axes.set_xlim(left=0)
    axes.set_yticks([0, 20, 40, 60, 80, 100])
    axes.annotate(
        f"{100 * target:.4g}%", (1.0, 100 * target), (3, 0), xycoords=("axes fraction", "data"),
        textcoords="offset points", va="center", ha="left", fontsize=9, color=INK,
    )  # fmt: skip
    axes.set_title(_name(group[0]))
    axes.set_xlabel("rate (jobs/s per GPU)")
    axes.set_ylabel("jobs that kept their SLO (%)")


def _name(row: Row) -> str:
    replicas = f", {row.replicas} replicas" if row.replicas > 1 else ""
    return f"{row.setting.scenario}{replicas}"


def draw_attainment(report: Report, target: float) -> Figure | None:
    """Attainment by rate, one panel per scenario (figure 9); None for fewer than two rates."""
    curves = [[row for row in group if len(row.points) > 1] for group in report.groups()]
    groups = [group for group in curves if group]
    if not groups:
        return None
    figure, axes = _panels(len(groups))
    looks = _looks(list(dict.fromkeys(_family(row) for group in groups for row in group)))
    for panel, group in zip(axes, groups, strict=True):
        _draw_curves(panel, group, looks, target)
    hardware = ", ".join(dict.fromkeys(g[0].setting.hardware.name for g in groups))
    shaded = len(report.seeds) > 1 and any(len(group) <= _SHADED for group in groups)
    shade = "; shaded: lowest to highest window" if shaded else ""
    _finish(figure, axes, f"SLO attainment by rate on {hardware}\n(further right is better{shade})")
    return figure


def _draw_load(axes: Axes, group: Sequence[Row], looks: dict[str, Any]) -> None:
    lines: list[tuple[Sequence[float], list[float]]] = []
    for row in group:
        load = max(row.points, key=lambda point: point.rate).load
        if load is None:
            continue
        look = {k: v for k, v in looks[_family(row)].items() if k in ("color", "linewidth")}
        engines = row.system.engines * row.replicas
        parts: list[tuple[str, Sequence[int], Any]] = [("", load.best_effort, "-")]
        if load.promises:
            dashes = (0, (4, 1.5))
            parts = [
                (", promised", load.promised, "-"),
                (", best effort", load.best_effort, dashes),
            ]
        for suffix, counts, style in parts:
            heights = [count / engines for count in counts]
            axes.plot(
                load.times_s, heights, label=_family(row) + suffix, linestyle=style, **look
            )  # fmt: skip
            lines.append((load.times_s, heights))
    rate = max(point.rate for row in group for point in row.points)
    peak = max((height for _, heights in lines for height in heights), default=1.0)
    ends = [t for times, heights in lines for t, h in zip(times, heights, strict=True)
            if h > _TAIL * peak]  # fmt: skip
    axes.set_title(f"{_name(group[0])}, {rate:.3g} jobs/s per GPU")
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1.03 * max(ends, default=1.0) or 1.0)
    axes.set_xlabel("time since the start of the window (s)")
    several = any(row.system.engines * row.replicas > 1 for row in group)
    axes.set_ylabel("requests in the system" + (", per engine" if several else ""))


def draw_load(report: Report) -> Figure | None:
    """Requests in the system over time, first window, highest rate (figure 11), or None."""
    groups = [
        [row for row in group if row.points]
        for group in report.groups()
        if any(point.load for row in group for point in row.points)
    ]
    if not groups:
        return None
    figure, axes = _panels(len(groups), 7.5 if len(groups) == 1 else 4.8)
    looks = _looks(list(dict.fromkeys(_family(row) for group in groups for row in group)))
    for panel, group in zip(axes, groups, strict=True):
        _draw_load(panel, group, looks)
    _finish(figure, axes, "Requests in the system over time (lower is better)")
    return figure


def _draw_scaling(axes: Axes, rows: Sequence[Row], looks: dict[str, Any]) -> None:
    from matplotlib.ticker import MaxNLocator

    highest = 0.0
    for label in dict.fromkeys(_family(row) for row in rows):
        members = [row for row in rows if _family(row) == label]
        measured = [(row, row.capacities[0]) for row in members if row.capacities[0].rate]
        if not measured:
            continue
        gpus = [
            row.system.engines * row.setting.hardware.gpus * row.replicas for row, _ in measured
        ]
        total = [
            (capacity.rate or 0.0) * n for (_, capacity), n in zip(measured, gpus, strict=True)
        ]
        error = [
            (capacity.half_width or 0.0) * n
            for (_, capacity), n in zip(measured, gpus, strict=True)
        ]
        axes.errorbar(gpus, total, error, label=label, capsize=3, elinewidth=1.2, **looks[label])
        end = total[0] / gpus[0] * max(gpus)
        axes.plot(
            (0, max(gpus)), (0, end), color=looks[label]["color"], linewidth=0.9, linestyle=":"
        )
        highest = max(highest, end, *total)
    axes.set_title(rows[0].setting.scenario)
    axes.set_xlim(left=0)
    # An interval from two windows may be wider than the picture; it is cut off.
    axes.set_ylim(0, 1.4 * highest or 1.0)
    if not highest:
        axes.text(0.5, 0.5, "no capacity found", transform=axes.transAxes, ha="center")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("GPUs")
    axes.set_ylabel("capacity of all GPUs (jobs/s)")


def draw_scaling(report: Report) -> Figure | None:
    """Capacity by number of GPUs, one panel per scenario (figure 13).

    It shows the systems that were measured at two sizes or more; None if there are none.
    """
    sizes: dict[tuple[str, str], set[int]] = {}
    for row in report.rows:
        if row.capacities:
            sizes.setdefault((row.setting.scenario, _family(row)), set()).add(row.replicas)
    scaled = {key for key, replicas in sizes.items() if len(replicas) > 1}
    rows = [
        row
        for row in report.rows
        if row.capacities and (row.setting.scenario, _family(row)) in scaled
    ]
    if not rows:
        return None
    scenarios = list(dict.fromkeys(row.setting.scenario for row in rows))
    figure, axes = _panels(len(scenarios))
    looks = _looks(list(dict.fromkeys(_family(row) for row in rows)))
    for panel, scenario in zip(axes, scenarios, strict=True):
        _draw_scaling(panel, [row for row in rows if row.setting.scenario == scenario], looks)
    share = rows[0].capacities[0].question.percent
    _finish(
        figure, axes, f"Capacity at {share} by number of GPUs\n(dotted: in proportion to the first)"
    )
    return figure


def write_pictures(report: Report, folder: Path, target: float) -> list[Path]:
    """Draw the pictures of a report; returns the paths of the written files.

    Args:
        folder: gets ``attainment.png``, ``load.png`` and ``capacity.png``, if there is data for it.

        target: the line in the attainment picture, a share.

    Raises:
        SimulationError: no matplotlib, or a file that cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SimulationError(
            "--out: pictures need matplotlib: pip install 'vllm-slo[bench]'"
        ) from error
    written = []
    with matplotlib.rc_context(PICTURE):
        for name, figure in (
            ("attainment", draw_attainment(report, target)),
            ("load", draw_load(report)),
            ("capacity", draw_scaling(report)),
        ):
            if figure is None:
                continue
            path = folder / f"{name}.png"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, dpi=120, format="png")
            except OSError as error:
                raise SimulationError(f"--out: cannot write {path}: {error.strerror}") from error
            written.append(path)
    return written
