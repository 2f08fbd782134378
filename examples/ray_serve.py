# SPDX-License-Identifier: Apache-2.0
"""A Ray Serve deployment that starts its own engines, routed by objectives.

Run ``python examples/ray_serve.py``; it needs ``pip install 'vllm-slo[cpu,ray]'`` or, with GPUs,
``'vllm-slo[cuda,ray]'`` and ``ray_actor_options={"num_gpus": 1}``.
"""

import os
import uuid

from ray import serve
from ray.serve.config import RequestRouterConfig

from vllm_slo import SLO, tiny
from vllm_slo.engine.serving.serve_replica import ServeReplicaState

# Two engines on one machine without GPUs.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@serve.deployment(
    num_replicas=2,
    max_ongoing_requests=256,  # above what an engine runs at once: its scheduler is to queue them
    request_router_config=RequestRouterConfig(
        request_router_class="vllm_slo.router.serve_router.SLORequestRouter",
        request_routing_stats_period_s=0.1,
    ),
)
class Chat:
    """One engine with the scheduler that makes promises."""

    def __init__(self, model: str, **engine: object) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._state = ServeReplicaState()  # before the engine, which finds it in the environment
        args = AsyncEngineArgs(model=model, scheduler_cls="vllm_slo.Scheduler", **engine)
        self._engine = AsyncLLM.from_engine_args(args)

    def record_routing_stats(self) -> dict:
        """What Serve asks for, and sends to the router."""
        return self._state.stats()

    async def check_health(self) -> None:
        """Serve replaces the replica when its engine is dead."""
        await self._engine.check_health()

    async def generate(self, prompt: str, max_tokens: int = 16, slo: SLO | None = None) -> dict:
        """Answer; the router reads these arguments, too."""
        from vllm import SamplingParams

        from vllm_slo.engine.serving.llm import report_of

        extra = None if slo is None else slo.to_extra_args()
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        async for output in self._engine.generate(prompt, params, uuid.uuid4().hex):
            last = output
        replica = serve.get_replica_context().replica_id.unique_id
        return {"replica": replica, "text": last.outputs[0].text, "slo": report_of(last)}


def main() -> None:
    """Start two replicas of the built-in model, and ask them."""
    model = str(tiny.path("target"))
    engine = {"enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 8}
    app = Chat.bind(model, **engine, kv_cache_memory_bytes=1 << 28)
    chat = serve.run(app, route_prefix=None)
    calls = [chat.generate.remote("def main(args):\n    ", slo=SLO(ttft_ms=2000, tpot_ms=100))]
    calls += [chat.generate.remote(f"class Reader{n}:\n    ") for n in range(3)]
    for call in calls:
        answer = call.result()
        print(answer["replica"], answer["slo"], repr(answer["text"]))


if __name__ == "__main__":
    main()
    serve.shutdown()
