# SPDX-License-Identifier: Apache-2.0
"""A live server that records what clients sent and saw; all of it is there once it has ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")
pytest.importorskip("httpx")

import httpx
from live_server import SMALL, LiveServer, ask_openai, command, request_body, running
from patience import patience

from vllm_slo.traces.files import detect, read
from vllm_slo.traces.request import TraceRequest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CONFIG = """\
classes:
  chat: {ttft_ms: 60000, tpot_ms: 10000}
recording: {block_tokens: 16}
"""
PROMPT = "def the_secret_of(server):\n    # what nobody else is to read\n" * 4
BEGINNING = {"prompt": PROMPT, "max_tokens": 12}


def ends(requests: list[TraceRequest]) -> list[str | None]:
    return [request.served and request.served.end for request in requests]


def leave_early(server: LiveServer) -> None:
    """A client that reads two tokens and leaves."""
    body = request_body(server, "completions", {"max_tokens": 900, "ignore_eos": True})
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=patience(60)) as stream:
        read = stream.iter_lines()
        for _ in range(4):
            next(read)


def test_requests_are_in_the_file_when_the_server_has_ended(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text(CONFIG)
    arguments = [command("vllm-slo"), "serve", "tiny", "--slo-config", "slo.yaml"]
    arguments += ["--record", "requests.jsonl", "--shutdown-timeout", "30", *SMALL]
    began_s = time.time()
    with running(arguments, "tiny", tmp_path, uniproc=False) as server:
        asked = {"slo": {"class": "chat", "tenant": "acme", "session_id": "job-17"}}
        answers = [ask_openai(server, "completions", False, {**BEGINNING, **asked})]
        answers += [ask_openai(server, "completions", True, BEGINNING) for _ in range(2)]
        answers += [ask_openai(server, "chat", False, {})]
        declined = {"slo": {"ttft_ms": 0.001, "on_unattainable": "decline"}}
        answers += [ask_openai(server, "completions", False, declined)]
        answers += [ask_openai(server, "completions", False, {"slo": {"ttft": 1}})]
        assert [answer.status for answer in answers] == [200, 200, 200, 200, 429, 400]
        leave_early(server)
        server.await_total(6, "vllm_slo:recorded_requests_total")
        answers += [ask_openai(server, "completions", False, {"max_tokens": 3})]
        assert server.total("vllm_slo:recording_dropped_total") == 0
        took_s = time.time() - began_s

    path = tmp_path / "requests.jsonl"
    assert detect(path) == "vllm-slo"
    requests = list(read(path))
    assert ends(requests) == [*["completed"] * 4, "declined", "aborted", "completed"]
    first, *others = requests[:3]
    assert {request.model for request in requests} == {"tiny"}
    assert (first.slo_class, first.ttft_ms, first.tpot_ms) == ("chat", 60000, 10000)
    assert all(request.slo_class == "" and request.ttft_ms is None for request in others)
    assert len({request.hash_ids for request in (first, *others)}) == 1
    assert len(first.hash_ids) == first.prompt_tokens // 16 > 3
    assert (first.output_tokens, requests[-1].output_tokens) == (12, 3)
    assert first.served is not None
    (report,) = answers[0].reports
    assert first.served.promise == "in_time" and first.served.attained is report["attained"]
    assert first.served.ttft_s == pytest.approx(report["ttft_ms"] / 1e3)
    assert first.served.tpot_s == pytest.approx(report["tpot_ms"] / 1e3)
    for request in (*others, requests[3], requests[-1]):
        assert request.served is not None
        assert request.served.ttft_s is not None and request.served.e2e_s is not None
        assert 0 < request.served.ttft_s < request.served.e2e_s < took_s
        assert request.served.tpot_s is not None and request.served.tpot_s > 0
    span_s = max(r.at_s for r in requests) - min(r.at_s for r in requests)
    assert 0 < span_s < took_s
    text = path.read_text()
    assert not any(word in text for word in ("secret", "acme", "job-17", "nobody"))
