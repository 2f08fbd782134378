# SPDX-License-Identifier: Apache-2.0
"""What a trace holds, in numbers: a stream of requests in, constant memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from vllm_slo.traces.request import TraceRequest

_MOST_CLASSES: Final = 100
"""Classes that are told apart; further ones are counted together."""
OTHERS: Final = "(others)"


@dataclass(slots=True)
class Part:
    """Some requests: how many, their lengths, and their ends where those were recorded."""

    requests: int = 0
    prompt_tokens: Counter[int] = field(default_factory=Counter)
    output_tokens: Counter[int] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    with_objective: int = 0

    def add(self, request: TraceRequest) -> None:
        self.requests += 1
        self.prompt_tokens[request.prompt_tokens] += 1
        self.output_tokens[request.output_tokens] += 1
        if request.served is not None:
            self.ends[request.served.end] += 1
        asked = (request.ttft_ms, request.tpot_ms, request.e2e_ms)
        self.with_objective += any(value is not None for value in asked)

    def to_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "with_objective": self.with_objective,
            "prompt_tokens": _figures(self.prompt_tokens),
            "output_tokens": _figures(self.output_tokens),
            "ends": dict(sorted(self.ends.items())),
        }


@dataclass(slots=True)
class Summary:
    """All requests and those of each class.

    Attributes:
        first_s, last_s: the earliest and the latest arrival.
    """

    whole: Part = field(default_factory=Part)
    classes: dict[str, Part] = field(default_factory=dict)
    first_s: float = math.inf
    last_s: float = -math.inf

    def add(self, request: TraceRequest) -> None:
        self.first_s = min(self.first_s, request.at_s)
        self.last_s = max(self.last_s, request.at_s)
        self.whole.add(request)
        name = request.slo_class
        if name not in self.classes and len(self.classes) >= _MOST_CLASSES:
            name = OTHERS
        self.classes.setdefault(name, Part()).add(request)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return max(0.0, self.last_s - self.first_s)

    @property
    def rate(self) -> float | None:
        """Requests per second; None: all arrive at one time."""
        return (self.whole.requests - 1) / self.span_s if self.span_s else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON; seconds, requests per second, tokens."""
        return {
            "span_s": round(self.span_s, 3),
            "requests_per_s": self.rate and round(self.rate, 4),
            **self.whole.to_dict(),
            "classes": {name: part.to_dict() for name, part in sorted(self.classes.items())},
        }

    def text(self) -> str:
        """A few lines for people."""
        rate = "" if self.rate is None else f", {self.rate:.3g} requests/s"
        lines = [f"{self.whole.requests} requests in {_span(self.span_s)}{rate}"]
        parts = {"all": self.whole}
        if any(self.classes):
            parts |= {name or "(no class)": part for name, part in sorted(self.classes.items())}
        wide = max(map(len, parts))
        for name, part in parts.items():
            prompt, output = _figures(part.prompt_tokens), _figures(part.output_tokens)
            lines.append(
                f"  {name:<{wide}}  {part.requests:>8} requests  "
                f"prompt p50 {prompt['p50']}, p99 {prompt['p99']}  "
                f"output p50 {output['p50']}, p99 {output['p99']} tokens"
            )
        return "\n".join(lines)


def _figures(counts: Mapping[int, int]) -> dict[str, int]:
    """Percentiles (nearest rank) and the sum of counted values."""
    total, values = sum(counts.values()), sorted(counts)
    found = {}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        rank, seen = math.ceil(share * total), 0
        for value in values:
            seen += counts[value]
            if seen >= rank:
                found[name] = value
                break
    return {**found, "sum": sum(value * count for value, count in counts.items())}


def _span(seconds: float) -> str:
    for unit, length_s in (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.1f} seconds"
