# SPDX-License-Identifier: Apache-2.0
"""The messages of a step, as vLLM's V2 model runner reads them: CUDA's default without drafts."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from depth import examples
from v2_runner import V2Requests

from vllm_slo import SLO, tiny
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import AsyncScheduler, EngineShape, VirtualEngine

TRUTH = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
TIGHT = EngineShape(num_blocks=90, max_num_seqs=6, max_num_batched_tokens=160, max_model_len=512)
SLOS = (
    SLO(ttft_ms=400, tpot_ms=60),
    None,
    SLO(ttft_ms=3000, tpot_ms=30),
    None,
    SLO(tpot_ms=100),
    None,
    SLO(ttft_ms=150),
)


def serve(scheduler: type[AsyncScheduler], seed: int, overlap: bool) -> V2Requests:
    """Requests of every kind where seats and memory are short; the runner follows all messages."""
    engine = VirtualEngine(
        scheduler,
        tiny.path("target"),
        TRUTH.predict_shape_s,
        TIGHT,
        believed=TRUTH if scheduler is Scheduler else None,
        overlap=overlap,
        seed=seed,
    )
    assert engine.scheduler.use_v2_model_runner
    runner, rng = V2Requests(TIGHT.max_num_seqs, TIGHT.block_size), Random(seed)
    schedule = engine.scheduler.schedule

    def followed(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        runner.step(output)
        return output

    engine.scheduler.schedule = followed  # type: ignore[method-assign]
    for number in range(60):
        shared = [7] * rng.choice([0, 0, 48])
        prompt = shared + [rng.randint(10, 900) for _ in range(rng.randint(1, 250))]
        slo = SLOS[rng.randrange(len(SLOS))] if scheduler is Scheduler else None
        engine.add(f"r{number}", prompt, rng.randint(1, 180), slo)
        for _ in range(rng.randint(0, 12)):
            engine.step()
        if number % 17 == 16:
            engine.abort(f"r{number - 2}")
    engine.run()
    engine.scheduler.schedule()  # the last ones are told to be finished
    assert not runner.slots
    for name, outcome in engine.outcomes.items():
        if outcome.finish_reason in ("length", "stop"):
            assert len(outcome.token_ids) <= engine.lengths[name]
    return runner


@pytest.fixture(autouse=True)
def v2(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks for Triton, which the runner itself needs and its scheduler does not."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)


@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlap"])
@pytest.mark.parametrize("seed", range(examples(3)))
def test_every_message_is_what_the_runner_expects(seed: int, overlap: bool) -> None:
    seen = serve(Scheduler, seed, overlap).seen
    assert min(seen["preempted"], seen["resumed"], seen["chunks"], seen["decoded"]) > 0


def test_the_runner_accepts_what_vllm_itself_sends() -> None:
    seen = serve(AsyncScheduler, 0, overlap=True).seen
    assert min(seen["preempted"], seen["resumed"], seen["chunks"], seen["decoded"]) > 0


def test_a_preemption_that_is_not_told_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner would keep its place."""
    preempt = Scheduler._preempt_request

    def silent(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        preempt(self, request, *args, **kwargs)
        self.reset_preempted_req_ids.discard(request.request_id)

    monkeypatch.setattr(Scheduler, "_preempt_request", silent)
    with pytest.raises(AssertionError, match=r"is resumed|No free indices|a shared block"):
        serve(Scheduler, 0, overlap=True)
