# SPDX-License-Identifier: Apache-2.0
"""One server of two engines and two API servers, with trees, as ``vllm-slo serve`` starts it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import httpx
from features import row, run_group
from live_server import SMALL, Answer, LiveServer, ask_openai, command, request_body, running
from patience import patience

from vllm_slo.traces.files import read

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EASY = {"slo": {"ttft_ms": 600_000, "tpot_ms": 100_000}}
IMPOSSIBLE = {"slo": {"ttft_ms": 0.001}}
LONG = {
    "slo": {**EASY["slo"], "expected_output_tokens": 900},
    "max_tokens": 900,
    "ignore_eos": True,
}
RANKS = (0, 1)
REQUESTS = 12
SEATS = 4
TWO = ["--data-parallel-size", "2", "--api-server-count", "2"]
DRAFTS = ["--draft-model", "tiny"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("server")
    config = folder / "slo.yaml"
    config.write_text("speculation: {min_depth: 3}\n")
    arguments = [command("vllm-slo"), "serve", "tiny", *DRAFTS, *TWO, "--slo-config", str(config)]
    arguments += [*SMALL, "--max-num-seqs", str(SEATS), "--record", str(folder / "r.jsonl")]
    with running(arguments, "tiny", folder) as live:
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


def test_each_engine_records_into_a_file_of_its_own(server: LiveServer) -> None:
    files = [server.log.with_name(name) for name in ("r.jsonl", "r.rank-1.jsonl")]
    prompt = "# the same beginning of both prompts, longer than a block of tokens\n" * 8
    for rank in RANKS:
        body = request_body(server, "completions", {"prompt": prompt, "max_tokens": 7})
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json=body, headers=at(rank), timeout=patience(60)).is_success
    until_s = time.monotonic() + patience(20)
    while True:
        new = [[r for r in read(file) if r.output_tokens == 7] for file in files]
        if all(new):
            break
        assert time.monotonic() < until_s
        time.sleep(0.1)
    (first,), (second,) = new
    assert first.hash_ids == second.hash_ids != ()  # under one salt


def at(rank: int) -> dict[str, str]:
    """The header by which a client chooses the engine."""
    return {"X-data-parallel-rank": str(rank)}


def promises(server: LiveServer) -> list[float]:
    """How many each engine has made."""
    series = "vllm_slo:admissions_total"
    return [server.settled_total(series, engine=str(rank), outcome="promised") for rank in RANKS]


def test_each_engine_makes_its_own_promises(server: LiveServer) -> None:
    """All seats of one engine are promised for long; the other one goes on promising."""
    before = promises(server)
    soon = {"slo": {"ttft_ms": 2_000, "on_unattainable": "decline"}}
    url, long = f"{server.url}/v1/completions", request_body(server, "completions", LONG)
    with httpx.Client(timeout=patience(120)) as client, ExitStack() as opened:
        read = []  # a stream that nobody holds is closed
        for _ in range(SEATS):
            stream = client.stream("POST", url, json={**long, "stream": True}, headers=at(0))
            read.append(opened.enter_context(stream).iter_lines())
            assert "text" in next(read[-1])
        asked = request_body(server, "completions", soon)
        full, other = (client.post(url, json=asked, headers=at(rank)) for rank in RANKS)
    assert (full.status_code, other.status_code) == (429, 200)
    assert full.headers["x-slo-reason"] == "seats"
    assert other.json()["slo"]["promised"]
    after = promises(server)
    assert [b - a for a, b in zip(before, after, strict=True)] == [SEATS, 1]


def test_the_rounds_of_a_session_are_counted_by_one_engine(server: LiveServer) -> None:
    for number in range(4):
        round_of = {"slo": {**EASY["slo"], "session_id": f"job-{number}"}}
        told = [ask_openai(server, "completions", False, round_of) for _ in range(3)]
        assert [one.reports[-1]["session"]["round"] for one in told] == [1, 2, 3]


def test_choices_are_declined_together_or_not_at_all(server: LiveServer) -> None:
    for wanted, status in ((EASY, 200), (IMPOSSIBLE, 429)):
        slo = {**wanted["slo"], "on_unattainable": "decline"}
        for _ in range(4):
            answer = ask_openai(
                server, "completions", False, {"slo": slo, "n": 4, "temperature": 1}
            )
            assert answer.status == status


def test_metrics_page_and_quotes_are_of_all_engines(server: LiveServer) -> None:
    for engine in ("0", "1"):
        assert server.total("vllm_slo:step_time_ratio_count", engine=engine) > 0
        assert server.total("vllm_slo:step_predicted_seconds_total", engine=engine) > 0
    body = request_body(server, "completions", EASY)
    for rank in RANKS:
        quote = httpx.post(f"{server.url}/v1/slo/quote", json=body, headers=at(rank), timeout=60)
        assert quote.json()["promised"]
        server.await_total(1, "vllm_slo:quotes_total", engine=str(rank), promised="true")
    shown = httpx.get(f"{server.url}/slo/data", timeout=60).json()
    place = [name for name, *_ in shown["series"]].index("vllm_slo:requests_finished_total")
    counted = sum(sample[2].get(str(place), 0) for sample in shown["samples"])
    assert counted > 0
