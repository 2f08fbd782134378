# SPDX-License-Identifier: Apache-2.0
"""The scenarios of the simulator: SLOs-Serve's six (tables 1 to 4) and AdaServe's.

Lengths have the mean, standard deviation and 99th percentile of table 4. Objectives are those of
table 3: TTFT as a slowdown against a lone request on the same hardware, TPOT in seconds. Table 1
says which objectives of an application are tight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from vllm_slo.config.yaml_nodes import near
from vllm_slo.sim.arrivals import read_trace
from vllm_slo.sim.errors import SimulationError

TIGHT_TTFT: Final = 3.0
LOOSE_TTFT: Final = 5.0
"""TTFT objectives, in multiples of a lone request's TTFT (SLOs-Serve, table 3)."""
TIGHT_TPOT_S: Final = 0.050
LOOSE_TPOT_S: Final = 0.100
"""TPOT objectives, seconds (SLOs-Serve, table 3)."""
TOOL_WAIT_S: Final = 1.0
"""Mean seconds that a tool works between two rounds (exponential); assumed, not in the paper."""
_TAIL_SHARE: Final = 0.02
"""Share of a ``tailed`` column's draws in its tail; half of them are above the 99th percentile."""
_TAIL_SPREAD: Final = 0.10
"""Relative standard deviation of that tail. A choice: table 4 gives no more than three numbers."""


Ints = NDArray[np.int64]
Family = Literal["beta", "lognormal", "tailed"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """One column of table 4: a distribution of token counts, whole numbers of at least 1.

    ``family`` is the distribution that meets all three numbers. It depends on how far the 99th
    percentile is above the mean. ``beta`` on [1, ``most``]: less than about 2.3 deviations, as in
    columns cut off by a context limit. ``lognormal``: up to about 3.7 deviations. ``tailed``: more;
    2% of the draws come from a narrow log-normal around the 99th percentile, the others from a
    log-normal that restores mean and deviation.
    """

    mean: float
    std: float
    p99: float
    family: Family = "lognormal"
    most: float = math.inf

    def sample(self, rng: np.random.Generator, count: int) -> Ints:
        if self.family == "beta":
            raw = self._beta(rng, count)
        elif self.family == "lognormal":
            raw = _lognormal(rng, count, self.mean, self.std)
        else:
            raw = self._tailed(rng, count)
        return np.maximum(np.rint(raw), 1.0).astype(np.int64)

    def _beta(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        width = self.most - 1
        place = (self.mean - 1) / width
        weight = place * (1 - place) / (self.std / width) ** 2 - 1
        return 1 + width * rng.beta(place * weight, (1 - place) * weight, count)

    def _tailed(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        tail_square = self.p99**2 * (1 + _TAIL_SPREAD**2)
        mean = (self.mean - _TAIL_SHARE * self.p99) / (1 - _TAIL_SHARE)
        square = self.std**2 + self.mean**2 - _TAIL_SHARE * tail_square
        std = math.sqrt(square / (1 - _TAIL_SHARE) - mean**2)
        body = _lognormal(rng, count, mean, std)
        tail = _lognormal(rng, count, self.p99, self.p99 * _TAIL_SPREAD)
        return np.where(rng.random(count) < _TAIL_SHARE, tail, body)


def _lognormal(
    rng: np.random.Generator, count: int, mean: float, std: float
) -> NDArray[np.float64]:
    variance = math.log1p((std / mean) ** 2)
    return rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)


@dataclass(frozen=True, slots=True)
class Loop:
    """A tool loop: 1 + binomial(``trials``) rounds, ``rounds`` on average.

    All rounds but the last have the objective ``tpot_s``. Between two rounds a tool works
    ``wait_s`` on average (exponential).
    """

    rounds: float
    trials: int
    tpot_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class Application:
    """One SLO class.

    Attributes:
        arrivals: default arrivals (SLOs-Serve, table 2).
        prompt: tokens of each round's prompt.
        stages: (tokens, TPOT in seconds) of each stage of the (last) answer.
        ttft_slowdown: TTFT objective of every round, in multiples of a lone request's TTFT.
        loop: rounds of a tool loop; None for one request.
    """

    name: str
    arrivals: str
    prompt: Lengths
    stages: tuple[tuple[Lengths, float], ...]
    ttft_slowdown: float
    loop: Loop | None = None

    @property
    def mean_tokens(self) -> float:
        rounds = self.loop.rounds if self.loop else 1.0
        return rounds * (self.prompt.mean + sum(lengths.mean for lengths, _ in self.stages))


@dataclass(frozen=True, slots=True)
class Scenario:
    """Applications in equal shares, or a recording.

    ``trace`` names a recording with its own lengths and objectives; then there are no applications.
    """

    name: str
    applications: tuple[Application, ...] = ()
    trace: str | None = None

    @property
    def arrivals(self) -> tuple[str, ...]:
        """Default arrivals; several if its applications differ."""
        if self.trace:
            return (self.trace,)
        return tuple(dict.fromkeys(a.arrivals for a in self.applications))


_CHATBOT: Final = Application(
    "chatbot",
    "azure-conv",
    Lengths(763, 424, 1591, "beta", 1648),
    ((Lengths(266, 160, 619, "beta", 669), LOOSE_TPOT_S),),
    LOOSE_TTFT,
)
_CODER: Final = Application(
    "coder",
    "azure-code",
    Lengths(847, 617, 2010, "beta", 2036),
    ((Lengths(26, 47, 232, "tailed"), TIGHT_TPOT_S),),
    LOOSE_TTFT,
)
_SUMMARIZER: Final = Application(
    "summarizer",
    "azure-conv",
    Lengths(1333, 444, 1946, "beta", 1957),
    ((Lengths(202, 234, 1508, "tailed"), LOOSE_TPOT_S),),
    TIGHT_TTFT,
)
# Table 4's row is one prefill-decode pair; a job has 2.7 +- 1.1 of them.

_TOOLLLM: Final = Application(
    "toolllm",
    "azure-code",
    Lengths(690, 356, 2131, "tailed"),
    ((Lengths(116, 66, 363), LOOSE_TPOT_S),),
    TIGHT_TTFT,
    Loop(2.7, 6, TIGHT_TPOT_S, TOOL_WAIT_S),
)
_REASONING: Final = Application(
    "reasoning",
    "azure-conv",
    Lengths(127, 83, 421),
    (
        (Lengths(4693, 1442, 7297, "beta", 7665), TIGHT_TPOT_S),
        (Lengths(803, 280, 1650), LOOSE_TPOT_S),
    ),
    TIGHT_TTFT,
)

SCENARIOS: Final[Mapping[str, Scenario]] = MappingProxyType(
    {
        scenario.name: scenario
        for scenario in (
            Scenario("chatbot", (_CHATBOT,)),
            Scenario("coder", (_CODER,)),
            Scenario("summarizer", (_SUMMARIZER,)),
            # Table 2 gives no arrivals for it, so each application keeps its own.
            Scenario("mixed", (_CHATBOT, _CODER, _SUMMARIZER)),
            Scenario("toolllm", (_TOOLLLM,)),
            Scenario("reasoning", (_REASONING,)),
            Scenario("adaserve", trace="adaserve"),
        )
    }
)


def applications_of(scenario: str) -> list[str]:
    """Names of the applications of a scenario, in alphabetical order.

    Raises:
        SimulationError: the scenario is unknown, or its trace cannot be read.
    """
    spec = scenario_of(scenario)
    if spec.trace is None:
        return sorted(application.name for application in spec.applications)
    return sorted({row.slo_class for row in read_trace(spec.trace).rows})


def scenario_of(name: str) -> Scenario:
    """The scenario of that name; SimulationError if it is unknown."""
    if name in SCENARIOS:
        return SCENARIOS[name]
    hint = near(str(name), SCENARIOS)
    raise SimulationError(f"scenario: {str(name)[:80]!r} is unknown; {hint}")
