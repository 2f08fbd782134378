# SPDX-License-Identifier: Apache-2.0
"""What numba still compiles after a scheduler has started; run with a cache that is empty.

Argument: how the engine drafts (``plain``, ``chains`` or ``trees``). Writes a line of JSON:
{"warm": how many compiled functions there are after the start, "late": those compiled after it}.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from vllm_slo import SLO, tiny
from vllm_slo.core.routing.policy import route
from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.slo.verdicts import unpack_quote

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
SMALL = EngineShape(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def signatures() -> dict[str, list[str]]:
    """Function of ``vllm_slo.core`` -> the argument types for which it is compiled.

    Those that compiled code calls are counted, too: they are dispatchers of their own.
    """
    from numba.core.registry import CPUDispatcher

    found: dict[str, list[str]] = {}
    for module in [m for name, m in sys.modules.items() if name.startswith("vllm_slo.core")]:
        for value in vars(module).values():
            for one in _dispatchers(value):
                if isinstance(one, CPUDispatcher):
                    name = f"{one.py_func.__module__}.{one.py_func.__name__}"
                    found[name] = sorted(map(str, one.nopython_signatures))
    return found


def _dispatchers(value: Any) -> Iterator[Any]:
    """A global itself, or what ``core.jit`` has made of it so far."""
    yield value
    compiled = getattr(value, "compiled", None)
    if compiled is not None and compiled.cache_info().currsize:
        yield compiled()


def plain() -> VirtualEngine:
    return VirtualEngine(
        Scheduler, tiny.path("target"), ROOFLINE.predict_shape_s, SMALL, believed=ROOFLINE
    )


def chains() -> VirtualEngine:
    return VirtualEngine(
        Scheduler,
        tiny.path("target"),
        ROOFLINE.predict_shape_s,
        SMALL,
        believed=ROOFLINE,
        speculative_config=NGRAM,
    )


def trees() -> VirtualEngine:
    from virtual_trees import TreeEngine

    return TreeEngine(ROOFLINE, shape=replace(SMALL, block_size=32, num_blocks=200))


SLOS = (
    SLO(ttft_ms=5000, tpot_ms=100),
    SLO(ttft_ms=5000, tpot_ms=0.01),  # decode
    SLO(ttft_ms=5000, tpot_ms=21),
    SLO(ttft_ms=30, tpot_ms=100),  # prefill
    SLO(ttft_ms=700),
    SLO(tpot_ms=45),
    SLO(ttft_ms=5000, tpot_ms=100, expected_output_tokens=400),  # memory, seats
    SLO(ttft_ms=5000, tpot_ms=60, value=2),
    None,
)


def use(engine: VirtualEngine) -> None:
    """Have requests promised and refused for every reason, beside others in every state."""
    rng, asked = Random(3), []
    for number in range(60):
        slo = SLOS[number % len(SLOS)]
        engine.add(f"r{number}", rng.randint(1, 300), rng.randint(1, 60), slo, acceptance=0.6)
        asked.append(f"q{number}")
        engine.add(asked[-1], rng.randint(1, 300), 50, slo, quote=True)
        for _ in range(rng.randint(1, 4)):
            engine.step()
        send(engine, slo or SLO())
    engine.run()
    quotes = [unpack_quote(engine.outcomes[name].stop_reason) for name in asked]
    reasons = {quote["reason"] for quote in quotes}
    assert reasons >= {None, "prefill", "decode"}, reasons
    assert reasons & {"memory", "seats"}, reasons


def send(engine: VirtualEngine, slo: SLO) -> None:
    """Route a request by what the engine says of itself, as a front does."""
    state = type(engine.scheduler.state()).from_json(engine.scheduler.state().to_json())
    now_s, double = engine.clock.now_s, VirtualReplica("")
    double.update(state, now_s)
    ttft_s = math.inf if slo.ttft_ms is None else slo.ttft_ms / 1e3
    tpot_s = math.inf if slo.tpot_ms is None else slo.tpot_ms / 1e3
    asked = RoutedRequest(64, 16, now_s + ttft_s, tpot_s, wants_promise=True)
    for ticket in range(3):
        said = route(asked, [double], now_s, rng=Random(0))
        double.sent(ticket + 1, asked, now_s, promised=said.promised)


def main(how: str) -> None:
    engine = {"plain": plain, "chains": chains, "trees": trees}[how]()
    before = signatures()
    use(engine)
    late = {
        name: [one for one in kinds if one not in before.get(name, [])]
        for name, kinds in signatures().items()
    }
    warm = sum(map(len, before.values()))
    sys.stdout.write(
        json.dumps({"warm": warm, "late": {name: new for name, new in late.items() if new}}) + "\n"
    )


if __name__ == "__main__":
    main(sys.argv[1])
