# SPDX-License-Identifier: Apache-2.0
"""What is still compiled after a scheduler, or a front, has started.

Argument: how the engine drafts, one of `ENGINES`, or ``front``. Writes a line of JSON: the compiled
functions of the policies ("all"), those that were compiled at the start, those compiled "later",
and what else numba compiled afterwards ("events").
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from random import Random
from typing import Any

from vllm_slo import SLO, tiny
from vllm_slo.core.jit import JITTED, compile_package
from vllm_slo.core.routing.policy import route
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_stream import StateDecoder, StateEncoder
from vllm_slo.core.routing.virtual_replica import RoutedRequest, VirtualReplica
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.router.decision_service import ADMISSION
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.slo.verdicts import unpack_quote

from virtual_drafters import Drafter, RemoteEngine  # isort: skip
from virtual_trees import TreeEngine  # isort: skip

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
SMALL = EngineShape(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512)
PAGED = replace(SMALL, block_size=32, num_blocks=200)
QUOTAS = {
    "tenants": {"poor": {"promised_tokens_per_s": 100, "burst_tokens": 300}},
    "default": {"promised_tokens_per_s": 1e6, "burst_tokens": 1e7},
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def compiled() -> set[str]:
    """The functions of ``vllm_slo.core`` that are compiled by now."""
    return {name_of(call) for call in JITTED if call.compiled.cache_info().currsize}


def name_of(call: Any) -> str:
    return f"{call.__module__}.{call.__name__}"


class Watch:
    """Notes what numba compiles from now on, whoever asks for it."""

    def __init__(self) -> None:
        from numba.core import event

        self.seen: list[str] = []
        listener = type("Listener", (event.Listener,), {"on_start": self.note, "on_end": self.end})
        event.register("numba:compile", listener())

    def note(self, event: Any) -> None:
        self.seen.append(str(event.data["dispatcher"]))

    def end(self, event: Any) -> None:
        """Nothing to do."""


def plain() -> VirtualEngine:
    return virtual(best_effort={"order": "laps_sd"})


def chains() -> VirtualEngine:
    return virtual(NGRAM, best_effort={"order": "las"}, speculation={"share": "tenants"})


def virtual(drafts: dict[str, Any] | None = None, **config: Any) -> VirtualEngine:
    return VirtualEngine(
        Scheduler,
        tiny.path("target"),
        ROOFLINE.predict_shape_s,
        SMALL,
        believed=ROOFLINE,
        slo_config={"quotas": QUOTAS, **config},
        speculative_config=drafts,
    )


def trees() -> VirtualEngine:
    return TreeEngine(ROOFLINE, shape=PAGED, slo_config={"best_effort": {"order": "lp_sjf"}})


def model_chains() -> VirtualEngine:
    pool: dict[str, Any] = {"honest": (0.8, 0.5), "pass_s": (0.004, 0.001)}
    shared = {"share": "tenants"}
    return TreeEngine(
        ROOFLINE, agree={(0, 1): 0.6, (1, 0): 0.6}, shape=PAGED, speculation=shared, **pool
    )


def servers() -> VirtualEngine:
    drafters = {"good": Drafter(), "bad": Drafter(honest=0.2)}
    return RemoteEngine(ROOFLINE, drafters, shape=PAGED, slo_config={"quotas": QUOTAS})


ENGINES = {
    "plain": plain,
    "chains": chains,
    "trees": trees,
    "model chains": model_chains,
    "draft servers": servers,
}

STAGES: Any = [{"until": "</think>", "tpot_ms": 40}, {"tpot_ms": 200}]
SLOS = (
    SLO(ttft_ms=5000, tpot_ms=100),
    SLO(ttft_ms=5000, tpot_ms=0.01),  # decode
    SLO(ttft_ms=5000, tpot_ms=21),
    SLO(ttft_ms=30, tpot_ms=100),  # prefill
    SLO(ttft_ms=700),
    SLO(tpot_ms=45),
    SLO(ttft_ms=5000, tpot_ms=100, expected_output_tokens=400),  # memory, seats
    SLO(ttft_ms=5000, tpot_ms=60, value=2),
    SLO(ttft_ms=5000, stages=STAGES),
    SLO(ttft_ms=5000, tpot_ms=100, session_id="job", session_e2e_ms=60_000, tenant="a"),
    SLO(ttft_ms=5000, tpot_ms=100, tenant="poor"),
    SLO(tier="best_effort", tenant="b", expected_output_tokens=60),
    None,
)


def use(engine: VirtualEngine) -> None:
    """Have requests promised and refused for every reason, beside others in every state."""
    rng, asked = Random(3), []
    for number in range(60):
        slo = SLOS[number % len(SLOS)]
        ends = [rng.randint(1, 30)] if slo is not None and slo.stages else []
        tokens = rng.randint(1, 60)
        engine.add(f"r{number}", rng.randint(1, 300), tokens, slo, acceptance=0.6, stage_ends=ends)
        asked.append(f"q{number}")
        engine.add(asked[-1], rng.randint(1, 300), 50, slo, quote=True, stage_ends=ends)
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
    state = StateDecoder().read(StateEncoder().line(engine.scheduler.state())).state
    assert state is not None
    now_s, double = engine.clock.now_s, VirtualReplica("")
    double.update(state, now_s)
    ttft_s = math.inf if slo.ttft_ms is None else slo.ttft_ms / 1e3
    tpot_s = math.inf if slo.tpot_ms is None else slo.tpot_ms / 1e3
    asked = RoutedRequest(64, 16, now_s + ttft_s, tpot_s, wants_promise=True)
    for ticket in range(3):
        said = route(asked, [double], now_s, rng=Random(0))
        double.sent(ticket + 1, asked, now_s, promised=said.promised)


def front() -> None:
    """Route by two replicas that are busy, as a front does that has just started."""
    replicas = [VirtualReplica("a"), VirtualReplica("b")]
    for number, replica in enumerate(replicas):
        demand = Demand("r", 1.0 + number, 100, 0.1, 4)
        state = ReplicaState(
            ROOFLINE,
            committed=(demand,),
            decoding={0.1: 3},
            free_blocks=100.0,
            total_blocks=100,
            block_sizes=(16,),
            seats=8,
            max_step_tokens=512,
            max_model_len=1024,
        )
        replica.update(state, 0.0)
    for ttft_s in (1e-6, 0.5, 10.0, math.inf):
        asked = RoutedRequest(64, 16, ttft_s, 0.1, wants_promise=True)
        said = route(asked, replicas, 0.0, rng=Random(0))
        replicas[0].sent(1, asked, 0.0, promised=said.promised)


def main(how: str) -> None:
    if how == "front":
        compile_package(ADMISSION)
        watch, at_start = Watch(), compiled()
        front()
    else:
        engine = ENGINES[how]()
        watch, at_start = Watch(), compiled()
        use(engine)
    said = {
        "all": sorted(map(name_of, JITTED)),
        "at_start": sorted(at_start),
        "later": sorted(compiled() - at_start),
        "events": watch.seen,
    }
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
