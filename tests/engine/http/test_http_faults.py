# SPDX-License-Identifier: Apache-2.0
"""A fault in the API server's part of vllm-slo ends no stream: an answer goes out without its
report, and a request is served without objectives, unless access is checked."""

from __future__ import annotations

from typing import Any

import pytest
from fault_injection import InjectedError

pytest.importorskip("vllm")

from http_app import CHAT, COMPLETIONS, OTHER, Server, choice, output, reported, saying

from vllm_slo.engine import gate
from vllm_slo.engine.http import exchange, models, response

SLO = {"slo": {"ttft_ms": 500}}


def failing(*_: Any, **__: Any) -> Any:
    raise InjectedError("a test says so")


@pytest.mark.parametrize("path", [COMPLETIONS, OTHER])
def test_a_request_that_cannot_be_read_is_served(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "read_request", failing)
    server = Server()
    answer = server.post(path, json={"prompt": "x", **SLO})
    assert answer.status_code == 200
    assert "slo" not in answer.json()
    assert len(server.engine.calls) == 1


def test_a_request_that_cannot_be_read_is_refused_where_access_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange.Exchange, "_must_be_read", lambda _: True)
    monkeypatch.setattr(exchange, "read_request", failing)
    server = Server()
    answer = server.post(COMPLETIONS, json={"prompt": "x", **SLO})
    assert answer.status_code == 500
    assert "could not read the SLO" in answer.json()["error"]["message"]
    assert not server.engine.calls
    assert server.post(OTHER, json={"prompt": "x", **SLO}).status_code == 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("home", "name"),
    [(response, "rewrite_json"), (response, "rewrite_event"), (gate, "_take_reports")],
)
def test_an_answer_whose_report_cannot_be_told_goes_out(
    path: str, stream: bool, home: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "x", "stream": stream, **SLO}
    whole = Server(saying(output(choice("a", "stop"), carried=reported()))).post(path, json=body)
    monkeypatch.setattr(home, name, failing)
    answer = Server(saying(output(choice("a", "stop"), carried=reported()))).post(path, json=body)
    assert answer.status_code == 200
    assert answer.text[:10] == whole.text[:10]
    assert "finish_reason" in answer.text


def test_models_are_listed_without_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_shown", failing)
    listed = Server().run(lambda client: client.get("/v1/models"))
    assert listed.json()["data"] == [{"id": "m"}]
