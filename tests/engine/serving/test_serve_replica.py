# SPDX-License-Identifier: Apache-2.0
"""What a replica of a Serve deployment tells of the engine that it starts."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import patience

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_stream import StateDecoder
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.serving.serve_replica import ServeReplicaState
from vllm_slo.engine.telemetry.state import SOCKET_VARIABLE, StatePublisher
from vllm_slo.wire.serve_stats import ServeStats

STATE = ReplicaState(StepTimeModel(((0.0, 0.0, 0.0), (0.1, 0.0, 0.0)), max_tokens=9), running=1)


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[ServeReplicaState]:
    monkeypatch.setenv(SOCKET_VARIABLE, "")  # restored at the end
    made = ServeReplicaState()
    yield made
    made.close()


def told(replica: ServeReplicaState) -> ServeStats:
    stats = ServeStats.from_stats({**replica.stats(), "another": 1})
    assert stats is not None
    return stats


def test_the_newest_state_of_the_scheduler_is_told(replica: ServeReplicaState) -> None:
    before_s = time.time()
    assert told(replica).line is None
    publisher = StatePublisher.from_environment()
    assert publisher is not None
    for running in range(200):  # more than a socket that nobody reads holds
        publisher.publish(ReplicaState(STATE.model, running=running))
        time.sleep(0.0005)
    end = time.monotonic() + patience(5.0)
    state: Any = None
    while time.monotonic() < end and (state is None or state.running != 199):
        stats = told(replica)
        assert stats.line is not None
        state = StateDecoder().read(stats.line).state
    assert state.running == 199
    assert before_s - 0.01 <= stats.taken_s <= stats.asked_s <= time.time()
    time.sleep(0.05)
    again = told(replica)
    assert again.asked_s > stats.asked_s  # it is alive, and has nothing newer
    assert (again.line, again.taken_s) == (stats.line, pytest.approx(stats.taken_s, abs=1e-3))
    publisher.close()


def test_nothing_is_left_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, "")
    made: ServeReplicaState | None = ServeReplicaState()
    path = Path(os.environ[SOCKET_VARIABLE])
    assert path.exists() and path.parent.stat().st_mode & 0o777 == 0o700
    made = None
    gc.collect()
    assert made is None and not path.parent.exists()
    end = time.monotonic() + patience(5.0)
    while "vllm-slo-state" in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    "stats", [None, {}, {"vllm_slo": None}, {"vllm_slo": [1.0, 2.0]}, {"vllm_slo": [1.0, "2", ""]}]
)
def test_other_stats_are_no_state(stats: object) -> None:
    assert ServeStats.from_stats(stats) is None
