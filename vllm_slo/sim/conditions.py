# SPDX-License-Identifier: Apache-2.0
"""Conditions of a simulation beyond jobs, system and hardware."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.clock import Clock
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.core.types import RoutingPolicy
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import Hardware

Overhead = Literal["modelled", "measured", "none"]


@dataclass(frozen=True, slots=True)
class Slowness:
    """An engine that is slower than the hardware says.

    Attributes:
        factor: on the time of every step, above 0.
        after_s: seconds that its steps take before it becomes slow, unknown to its scheduler. 0: it
            always was, and its scheduler has its own step-time model.

    Raises:
        SimulationError: a field is out of range.
    """

    factor: float
    after_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.factor < math.inf:
            raise SimulationError(f"slowness: must be a positive factor, not {self.factor}")
        if not 0.0 <= self.after_s < math.inf:
            raise SimulationError(f"slowness: after_s: must be seconds >= 0, not {self.after_s}")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Replicas, routing, and how the true step times differ from the believed ones.

    Attributes:
        replicas: engines (or groups of them) that share the load.
        bias: true step time over the believed one.
        noise: relative standard deviation of a step's true time (lognormal, mean 1).
        slowness: number of an engine -> how it is slower than the others.
        seed: of the noise, and of which drafts are accepted.
        exact: vLLM's whole scheduler object instead of the light scheduler.
        system_tokens: tokens with which every job's first prompt begins, the same for all jobs.
        fronts: which route in turn; each sees of the others' requests what a replica's state says.
        state_interval_s: shortest time between two states that a busy replica tells the fronts.
        hops: replicas asked for a promise before a request becomes best effort.
        routing: which replica a request goes to, as ``core.routing.policy`` names it.
        acceptance: application -> probability that a drafted token is accepted.
        config: the operator's configuration, as the schedulers of the engines read it; None: the
            defaults. Classes come with the requests; grants of API keys do not count.
        overhead: scheduling time added to each step. ``modelled``: as measured on the real objects;
            nothing if the hardware's step times include it. ``measured``: the time it takes in this
            process; needs ``exact`` and is not repeatable. ``none``: no time.

    Raises:
        SimulationError: a field is out of range.
    """

    replicas: int = 1
    bias: float = 1.0
    noise: float = 0.0
    slowness: Mapping[int, Slowness] = field(default_factory=dict)
    seed: int = 0
    exact: bool = False
    system_tokens: int = 0
    fronts: int = 1
    state_interval_s: float = 0.02
    hops: int = 1 << 30
    routing: RoutingPolicy = "slo"
    acceptance: Mapping[str, float] = field(default_factory=dict)
    overhead: Overhead = "modelled"
    config: SLOConfig | None = None

    def __post_init__(self) -> None:
        lowest = {"replicas": 1, "fronts": 1, "hops": 1, "seed": 0, "system_tokens": 0}
        for name, low in lowest.items():
            value = getattr(self, name)
            if value < low:
                raise SimulationError(f"{name}: must be at least {low}, not {value}")
        if not 0.0 <= self.state_interval_s < math.inf:
            raise SimulationError(
                f"state_interval_s: must be seconds >= 0, not {self.state_interval_s}"
            )
        if not 0.0 < self.bias < math.inf:
            raise SimulationError(f"bias: must be a positive factor, not {self.bias}")
        if not 0.0 <= self.noise <= 1.0:
            raise SimulationError(f"noise: must be between 0 and 1, not {self.noise}")
        if self.routing not in get_args(RoutingPolicy):
            raise SimulationError(
                f"routing: must be one of {', '.join(get_args(RoutingPolicy))}, "
                f"not {self.routing!r}"
            )
        if self.overhead not in get_args(Overhead):
            raise SimulationError(
                f"overhead: must be one of {', '.join(get_args(Overhead))}, not {self.overhead!r}"
            )
        if self.overhead == "measured" and not self.exact:
            raise SimulationError("overhead: measured also needs exact")
        for name, share in self.acceptance.items():
            if not 0.0 <= share <= 1.0:
                raise SimulationError(
                    f"acceptance of {name!r}: must be between 0 and 1, not {share}"
                )

    def believed(self, hardware: Hardware, engine: int) -> StepTimeModel:
        """The step times that the scheduler of ``engine`` starts with."""
        slowness = self.slowness.get(engine)
        if slowness is None or slowness.after_s > 0.0:
            return hardware.step_time
        return hardware.step_time.scaled(slowness.factor)

    def true_step_time(
        self, hardware: Hardware, engine: int, clock: Clock
    ) -> Callable[[BatchShape], float]:
        """The true time of a step of ``engine`` that begins now; policies see the model without
        bias and noise.

        ``clock``: the engine's, for a machine whose speed changes with time.
        """
        predict = self.believed(hardware, engine).predict_shape_s
        if self.noise == 0.0:

            def taken(shape: BatchShape) -> float:
                return self.bias * predict(shape)

        else:
            rng = np.random.default_rng([self.seed, engine])
            sigma = math.sqrt(math.log1p(self.noise**2))

            def taken(shape: BatchShape) -> float:
                return self.bias * predict(shape) * math.exp(rng.normal(-0.5 * sigma**2, sigma))

        slowness = self.slowness.get(engine)
        return taken if slowness is None or not slowness.after_s else _later(taken, slowness)

    def is_known(self, engine: int) -> bool:
        """Whether the step times that ``engine`` starts with are the true ones.

        The time to schedule a step comes on top where it is modelled, and is learnt online like any
        other error: promises of the first steps may break by that.
        """
        slowness = self.slowness.get(engine)
        exact = self.bias == 1.0 and self.noise == 0.0
        return exact and (slowness is None or slowness.after_s == 0.0)

    @property
    def margin(self) -> float:
        """Safety factor of a baseline that predicts step times; vllm-slo learns its own."""
        return self.bias * (1.0 + self.noise)


def _later(
    taken: Callable[[BatchShape], float], slowness: Slowness
) -> Callable[[BatchShape], float]:
    """Step times that are longer when the steps so far have taken ``after_s``."""
    spent_s = 0.0

    def slowing(shape: BatchShape) -> float:
        nonlocal spent_s
        step_s = taken(shape) * (slowness.factor if spent_s >= slowness.after_s else 1.0)
        spent_s += step_s
        return step_s

    return slowing
