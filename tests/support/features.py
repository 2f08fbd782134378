# SPDX-License-Identifier: Apache-2.0
"""What real engines with vLLM's own features did, and how it compares with stock vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import pytest
from patience import patience

CHILD: Final = Path(__file__).with_name("feature_engine.py")
TOLERANCE: Final = 2e-3
"""Of logarithms of probabilities, and of the numbers of an embedding."""
PROMISED: Final = [True, False, None, True]
"""Of the requests in ``feature_engine.ASKING``."""

Cell = Literal["works", "as stock", "refused", "not run"]
Test = TypeVar("Test", bound=Callable[..., None])


def row(feature: str, plain: Cell, objectives: Cell, trees: Cell) -> Callable[[Test], Test]:
    """Mark the test of a row of docs/reference/features.md, with the row's first words.

    ``tests/docs/test_features_page.py`` compares the two.
    """
    return lambda test: test


@dataclass(frozen=True, slots=True)
class Results:
    """What one engine did in each mode, as ``feature_engine.py`` writes it.

    Attributes:
        stock: what stock vLLM answered, by the name of what was asked.
        modes: the other modes.
        log: of all engines of the group.
    """

    stock: Mapping[str, Any]
    modes: Mapping[str, Mapping[str, Any]]
    log: str

    def check_plain(self, mode: str = "ours") -> None:
        """Without objectives all answers are stock vLLM's, and no request has a report."""
        for name in self.stock:
            self._check_same(mode, name, "plain")
            assert [one["report"] for one in self._answers(mode, name, "plain")] == [None] * len(
                self.stock[name]["plain"]
            )

    def check_promised(self, mode: str = "ours", ask: str = "texts") -> None:
        """With objectives the answers are the same. What can be kept is promised."""
        self._check_same(mode, ask, "asking")
        reports = [one["report"] for one in self._answers(mode, ask, "asking")]
        assert [report and report["promised"] and not report["late"] for report in reports] == (
            PROMISED
        )
        assert reports[1]["reason"] == "expired"
        assert reports[0]["attained"]
        assert reports[3]["attained"]

    def check_served(self, reason: str, mode: str = "ours") -> None:
        """With objectives the answers are the same. Nothing is promised, and reports say why."""
        self._check_same(mode, "texts", "asking")
        reports = [one["report"] for one in self._answers(mode, "texts", "asking")]
        assert [report and report["promised"] for report in reports] == [False, False, None, False]
        assert reports[0]["reason"] == reports[3]["reason"] == reason

    def check_trees(self, ask: str = "texts") -> None:
        """Trees were verified, and all answers are stock vLLM's."""
        assert self.modes["trees"][ask]["nodes"] > 20
        self.check_plain("trees")
        self.check_promised("trees", ask)

    def refusal(self, mode: str = "trees") -> str:
        """The line with which the engine refused to start."""
        refused: str = self.modes[mode]["refused"]
        assert "\n" not in refused
        assert f"vllm-slo: error: {refused.partition(': ')[2]}" in self.log
        return refused

    def _answers(self, mode: str, ask: str, phase: str) -> list[dict[str, Any]]:
        assert "refused" not in self.modes[mode], self.modes[mode]
        return list(self.modes[mode][ask][phase])

    def _check_same(self, mode: str, ask: str, phase: str) -> None:
        ours, stock = self._answers(mode, ask, phase), self.stock[ask]["plain"]
        assert [one["tokens"] for one in ours] == [one["tokens"] for one in stock]
        for a, b in zip(ours, stock, strict=True):
            for numbers in ("logprobs", "vector"):
                assert a.get(numbers, []) == pytest.approx(b.get(numbers, []), abs=TOLERANCE)


def run_group(group: str, folder: Path) -> dict[str, Results]:
    """Start all engines of a group, one after the other, in one process."""
    done = subprocess.run(
        [sys.executable, str(CHILD), group],
        capture_output=True,
        text=True,
        timeout=patience(600),
        check=False,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads((folder / f"{group}.json").read_text())
    common = found.get("one", {}).get("stock", {})
    return {
        name: Results(modes.pop("stock", common), modes, done.stdout + done.stderr)
        for name, modes in found.items()
    }
