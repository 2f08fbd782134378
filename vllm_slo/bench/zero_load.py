# SPDX-License-Identifier: Apache-2.0
"""The latency of a lone request on a machine, the unit of portable objectives."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_slo.bench.errors import BenchError


@dataclass(frozen=True, slots=True)
class ZeroLoad:
    """Latency without queueing.

    Attributes:
        ttft_points: (prompt tokens, seconds) by rising prompt length, at least one.
        tpot_s: mean gap between tokens of a lone request.

    Raises:
        BenchError: values are empty, unordered or not positive.
    """

    ttft_points: tuple[tuple[int, float], ...]
    tpot_s: float
    server: str = ""

    def __post_init__(self) -> None:
        lengths = [n for n, _ in self.ttft_points]
        seconds = [s for _, s in self.ttft_points]
        if not lengths or lengths != sorted(set(lengths)) or lengths[0] < 1:
            raise BenchError("--zero-load", f"prompt lengths must rise from 1 on, got {lengths}")
        if not all(0 < s < math.inf for s in [*seconds, self.tpot_s]):
            raise BenchError("--zero-load", "latencies must be positive seconds")

    def ttft_s(self, prompt_tokens: int) -> float:
        """Seconds to the first token, linear between points and at least the shortest prompt's.

        Above the longest measured prompt the last slope continues.
        """
        points = self.ttft_points
        if prompt_tokens <= points[0][0] or len(points) == 1:
            return points[0][1]
        upper = next((i for i, p in enumerate(points) if p[0] >= prompt_tokens), len(points) - 1)
        (n0, s0), (n1, s1) = points[upper - 1], points[upper]
        estimate = s0 + (s1 - s0) * (prompt_tokens - n0) / (n1 - n0)
        return max(estimate, points[0][1])

    def to_dict(self) -> dict[str, Any]:
        return {
            "ttft_points": [list(p) for p in self.ttft_points],
            "tpot_s": self.tpot_s,
            "server": self.server,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ZeroLoad:
        """Inverse of ``to_dict``; BenchError if the shape is wrong."""
        try:
            points = tuple((int(n), float(s)) for n, s in data["ttft_points"])
            return cls(points, float(data["tpot_s"]), str(data.get("server", "")))
        except (KeyError, TypeError, ValueError) as error:
            raise BenchError(
                "--zero-load", f'needs "ttft_points": [[tokens, s], ...] and "tpot_s": s ({error})'
            ) from error


def load_zero_load(path: Path) -> ZeroLoad:
    """Read a zero load from a JSON file of its own, or from a bench report."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError("--zero-load", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise BenchError("--zero-load", f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BenchError("--zero-load", f"{path} must hold a JSON object")
    inner = data.get("zero_load", data)
    return ZeroLoad.from_dict(inner if isinstance(inner, dict) else {})
