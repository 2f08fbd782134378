# SPDX-License-Identifier: Apache-2.0
"""Best effort may have to stand back, but no engine sits idle while somebody waits."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import test_light_scheduler as light

from vllm_slo.sim.cluster import Simulation
from vllm_slo.sim.conditions import Conditions


@pytest.mark.parametrize("scenario", light.SETTINGS)
def test_nobody_waits_for_an_idle_engine(scenario: str) -> None:
    worst = 0
    for seed in range(6):
        jobs, hardware = light.trace(scenario, seed), light.small(light.SETTINGS[scenario])
        simulation = Simulation(jobs, light.system_of("slo", seed), hardware, Conditions(), None)
        engine = simulation.replicas[0].engine
        step, idle = engine.step, 0

        def watched(engine: Any = engine, step: Any = step) -> Any:
            nonlocal idle, worst
            output = step()
            waits = engine.scheduler.waiting and not engine.scheduler.running
            idle = idle + 1 if waits and not output.num_scheduled_tokens else 0
            worst = max(worst, idle)
            return output

        engine.step = watched
        simulation.run()
    assert worst <= 5, f"{worst} empty steps with nothing running and requests waiting"
