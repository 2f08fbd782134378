# SPDX-License-Identifier: Apache-2.0
"""The style of tables and pictures, and what results say of their machine.

rich and matplotlib (extra ``bench``) are loaded when they are needed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.table import Table


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


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Versions of Python and of ``packages``; None for packages that are not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions
