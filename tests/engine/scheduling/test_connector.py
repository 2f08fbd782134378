# SPDX-License-Identifier: Apache-2.0
"""Prompts whose KV a connector loads are priced by what is left to compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.v1.request import RequestStatus

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import VirtualEngine

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
TIGHT = SLO(ttft_ms=200)
"""A prompt of 2000 tokens takes 0.8 s."""


def engine(folder: Path, asked: list[str] | None = None, **answer: Any) -> VirtualEngine:
    """With a connector that has the KV of every prompt, but for its last token."""
    one = VirtualEngine(
        Scheduler,
        folder,
        ROOFLINE.predict_shape_s,
        believed=ROOFLINE,
        kv_transfer_config=KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both"),
    )
    connector = one.scheduler.connector
    matched = connector.get_num_new_matched_tokens

    def ask(request: Any, computed: int) -> tuple[int | None, bool]:
        if asked is not None:
            asked.append(request.request_id)
        tokens, _ = matched(request, computed)
        return (answer.get("tokens", tokens), answer.get("later", False))

    connector.get_num_new_matched_tokens = ask
    return one


def test_a_prompt_that_is_loaded_is_promised(config_folder: Path) -> None:
    one = engine(config_folder)
    one.add("remote", 2000, 5, TIGHT)
    one.run()
    report = one.outcomes["remote"].report
    assert report is not None
    assert (report["promised"], report["attained"]) == (True, True)


def test_without_a_hit_it_is_not(config_folder: Path) -> None:
    one = engine(config_folder, tokens=0)
    one.add("remote", 2000, 5, TIGHT)
    one.run()
    report = one.outcomes["remote"].report
    assert report is not None
    assert (report["late"], report["reason"]) == (True, "prefill")


def test_a_connector_is_asked_once_for_a_plan(config_folder: Path) -> None:
    """However often the request is planned: the connector may have to ask others."""
    asked: list[str] = []
    one = engine(config_folder, asked)
    one.add("remote", 2000, 5, TIGHT)
    for _ in range(5):
        one.scheduler.promise_now("remote")
    assert asked == ["remote"]


def test_a_load_that_begins_stalls_no_step(config_folder: Path) -> None:
    """The step in which it begins computes nothing, and that is as planned."""
    one = engine(config_folder, later=True)
    request = one.add("remote", 2000, 5, TIGHT)
    output = one.scheduler.schedule()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert not output.num_scheduled_tokens
    assert not one.scheduler._controller._stalled
