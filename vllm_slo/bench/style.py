# SPDX-License-Identifier: Apache-2.0
"""The style of tables and pictures, and what results say of their machine.

rich and matplotlib (extra ``bench``) are loaded when they are needed.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.table import Table

STANDARD_OUTPUT: Final = Path("-")
"""The value of ``--json`` for which only the JSON is printed."""

INK: Final = "#1b1f24"
PAPER: Final = "#ffffff"
MUTED: Final = "#6e7781"

PICTURE: Final[Any] = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d8dee4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
"""For ``matplotlib.rc_context``. The background is opaque, so pictures look the same on dark pages.
"""


def table(title: str) -> Table:
    """An empty rich table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )


def milliseconds(seconds: float | None) -> str:
    """A time as the text of a cell; "-" for None."""
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.01 else f"{seconds * 1e3:.1f}"


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def write_json(data: Mapping[str, Any], path: Path, error: Callable[[str], Exception]) -> None:
    """Write ``data``; raises ``error`` if that fails."""
    text = json.dumps(data, indent=1, allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as failure:
        raise error(f"cannot write {path}: {failure.strerror}") from failure


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Versions of Python and of ``packages``; None for packages that are not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
