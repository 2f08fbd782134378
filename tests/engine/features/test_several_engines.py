# SPDX-License-Identifier: Apache-2.0
"""One server of two engines and two API servers, with trees, as ``vllm-slo serve`` starts it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from features import row, run_group
from live_server import SMALL, Answer, LiveServer, ask_openai, command, running

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EASY = {"slo": {"ttft_ms": 600_000, "tpot_ms": 100_000}}
IMPOSSIBLE = {"slo": {"ttft_ms": 0.001}}
REQUESTS = 12
TWO = ["--data-parallel-size", "2", "--api-server-count", "2"]
DRAFTS = ["--draft-model", "tiny"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("server")
    config = folder / "slo.yaml"
    config.write_text("speculation: {min_depth: 3}\n")
    arguments = [command("vllm-slo"), "serve", "tiny", *DRAFTS, *TWO, "--slo-config", str(config)]
    with running([*arguments, *SMALL], "tiny", folder) as live:
        yield live


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What stock vLLM answers to the prompt, in one process."""
    group = run_group("server", tmp_path_factory.mktemp("stock"))
    return str(group["built_in"].stock["texts"]["plain"][0]["text"])


def answers(server: LiveServer, asked: list[dict[str, Any]]) -> list[Answer]:
    """One request each, all at once, so that both engines have some."""
    with ThreadPoolExecutor(len(asked)) as clients:
        return list(
            clients.map(
                lambda extra: ask_openai(server, "completions", False, {"max_tokens": 24, **extra}),
                asked,
            )
        )


@row("`--data-parallel-size 2`", "works", "works", "works")
def test_data_parallel(stock: str, server: LiveServer) -> None:
    plain = answers(server, [{}] * REQUESTS)
    assert all(answer.status == 200 and not answer.reports for answer in plain)
    assert {answer.text for answer in plain} == {stock}
    asking = answers(server, [EASY, IMPOSSIBLE] * (REQUESTS // 2))
    assert {answer.text for answer in asking} == {stock}
    attained = [answer.reports[-1]["attained"] for answer in asking]
    assert attained == [True, False] * (REQUESTS // 2)
    for engine in ("0", "1"):
        assert server.settled_total("vllm_slo:tree_tokens_count", engine=engine) > 0


@row("`--api-server-count 2`", "works", "works", "works")
def test_two_api_servers(server: LiveServer) -> None:
    """Each of them reads objectives, and hands a mistake back."""
    wrong = answers(server, [{"slo": {"ttft": 5}}] * REQUESTS)
    assert {answer.status for answer in wrong} == {400}
    assert all(answer.error and "ttft" in str(answer.error["message"]) for answer in wrong)
    log = server.log.read_text(errors="replace")
    assert {f"ApiServer_{number} " in log for number in (0, 1)} == {True}
