# SPDX-License-Identifier: Apache-2.0
"""Two deployments with `SLORequestRouter` in a local Ray, and where their requests went.

``python serve_driver.py PORT EXAMPLES SECONDS`` prints one line of JSON last. ``told`` has two
replicas without engines, which tell states that are made up: one that can promise and has work to
do, and an idle one that has no seats for promises. ``engines`` are those of
``examples/ray_serve.py``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from vllm_slo import SLO
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_stream import StateEncoder
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.wire.serve_stats import ServeStats

ROUTER = "vllm_slo.router.serve_router.SLORequestRouter"
IN_A_ROW = 12
OBJECTIVES = {"ttft_ms": 60_000, "tpot_ms": 5_000}
EASY = SLO(ttft_ms=60_000, tpot_ms=5_000)
PREFIX = "def read(path):\n    return open(path)\n" * 20
ASKED = 9
"""Requests of the same beginning: one more than a replica of the example runs at once."""

MODEL = StepTimeModel(((0.001, 0.0, 0.0), (0.0001, 0.0, 0.0)), max_tokens=1000)
FULL = ReplicaState(
    MODEL,
    free_blocks=1_000,
    total_blocks=1_000,
    block_sizes=(16,),
    seats=0,
    max_step_tokens=512,
    max_model_len=4_096,
)
STATES = {"open": replace(FULL, seats=100, backlog_tokens=9_999), "full": FULL}


@serve.deployment(
    num_replicas=2,
    ray_actor_options={"num_cpus": 0.1},
    max_ongoing_requests=100,
    request_router_config=RequestRouterConfig(
        request_router_class=ROUTER,
        request_router_kwargs={"slo_config": {"classes": {"chat": {"ttft_ms": 60_000}}}},
        request_routing_stats_period_s=0.1,
    ),
)
class Told:
    """Says which replica it is."""

    def __init__(self) -> None:
        self.name = ("open", "full")[serve.get_replica_context().rank.rank]
        self.taken_s = time.time()

    def record_routing_stats(self) -> dict[str, Any]:
        line = StateEncoder().line(STATES[self.name]).decode()
        return {**ServeStats(time.time(), self.taken_s, line).to_stats(), "another": 1}

    def answer(self, *args: Any, **kwargs: Any) -> str:
        return self.name

    def __call__(self, request: Any) -> str:
        return self.name


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Caller:
    """Calls `Told` several times at once, within one request."""

    async def answer(self) -> str:
        handle = serve.get_deployment_handle("Told", "told")
        calls = [handle.answer.remote("hi", slo=EASY) for _ in range(3)]
        return " ".join(sorted({await call for call in calls}))


def settled(call: Callable[[], str], expected: str, within_s: float) -> bool:
    """Whether so many calls in a row come to reach the expected replica."""
    end, row = time.monotonic() + within_s, 0
    while row < IN_A_ROW and time.monotonic() < end:
        row = row + 1 if call() == expected else 0
    return row == IN_A_ROW


def told(port: int, within_s: float) -> dict[str, bool]:
    """Way in which a request says what it asks for -> whether it went where it belongs."""
    import httpx

    deployment: Any = Told  # which Serve has made of the class
    handle = serve.run(deployment.bind(), name="told", route_prefix="/")
    params = SimpleNamespace(max_tokens=20, extra_args=EASY.to_extra_args())
    body = {"messages": [{"role": "user", "content": "hi"}], "slo": OBJECTIVES}
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "slo": (("hi",), {"slo": EASY}),
        "mapping": ((), {"prompt_token_ids": [1, 2, 3], "slo": OBJECTIVES}),
        "class": (("hi",), {"slo": {"class": "chat"}}),
        "sampling_params": (("hi", params), {}),
        "body": ((body,), {}),
        "none": (("hi",), {}),
        "mistake": (("hi",), {"slo": {"ttft_ms": -1}}),
        "nothing": ((), {}),
    }

    def http(**headers: str) -> str:
        url = f"http://127.0.0.1:{port}/"
        return httpx.post(url, content=b"x" * 100, headers=headers, timeout=within_s).text

    found = {}
    for name, (args, kwargs) in calls.items():
        expected = "full" if name in ("none", "mistake", "nothing") else "open"
        found[name] = settled(
            lambda args=args, kwargs=kwargs: handle.answer.remote(*args, **kwargs).result(),  # type: ignore[misc]
            expected,
            within_s,
        )
    found["http"] = settled(lambda: http(**{"x-slo-ttft-ms": "60000"}), "open", within_s)
    found["http_none"] = settled(http, "full", within_s)
    caller: Any = Caller
    several = serve.run(caller.bind(), name="caller", route_prefix=None)
    found["several_in_one"] = settled(
        lambda: several.answer.remote().result(timeout_s=within_s), "open", within_s
    )
    serve.delete("caller")
    serve.delete("told")
    return found


def engines(examples: str, within_s: float) -> dict[str, Any]:
    """Where requests with the same beginning went, and what they were promised."""
    sys.path.insert(0, examples)
    ray_serve = import_module("ray_serve")
    ray_serve.main()
    chat = serve.get_app_handle("default")

    def ask(tokens: int, **kwargs: Any) -> Any:
        return chat.generate.remote(PREFIX, max_tokens=tokens, **kwargs)

    first = ask(1).result()["replica"]
    calls = [ask(300, slo=EASY) for _ in range(ASKED)]
    answers = [call.result(timeout_s=within_s) for call in calls]
    return {
        "first": first,
        "replicas": [answer["replica"] for answer in answers],
        "promised": [answer["slo"]["promised"] for answer in answers],
    }


def main() -> None:
    port, examples, within_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=8)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    found = {"told": told(port, within_s), "engines": engines(examples, within_s)}
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
