# SPDX-License-Identifier: Apache-2.0
"""The scheduler's series: written by one process, scraped in another."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from vllm_slo.engine.metrics import FOLDER_VARIABLE, FolderCollector, SchedulerMetrics

IDLE = {"promised_requests": 0.0, "best_effort_requests": 0.0}


def scraped(folder: Path) -> dict[tuple[str, str], float]:
    """(series, engine) -> value, of series without other labels."""
    return {
        (sample.name, sample.labels["engine"]): sample.value
        for family in FolderCollector(folder).collect()
        for sample in family.samples
        if set(sample.labels) == {"engine"}
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "metrics"))
    return tmp_path / "metrics"


def test_nothing_is_scraped_before_anything_is_written(folder: Path) -> None:
    SchedulerMetrics()
    assert scraped(folder) == {}


def test_engines_are_told_apart(folder: Path) -> None:
    for engine in (0, 1):
        metrics = SchedulerMetrics(engine)
        metrics.publish(0.0, promised_requests=engine + 5.0)
        assert not metrics.due(0.5)
        assert metrics.due(1.5)
    seen = scraped(folder)
    assert seen["vllm_slo:promised_requests", "0"] == 5
    assert seen["vllm_slo:promised_requests", "1"] == 6


def test_what_the_last_request_leaves_is_written_without_another_step(folder: Path) -> None:
    metrics = SchedulerMetrics()
    metrics.publish(0.0, promised_requests=1.0)
    metrics.publish_soon(**IDLE)
    metrics.publish_soon(promised_requests=0.0, best_effort_requests=2.0)
    end = time.monotonic() + 60
    while scraped(folder)["vllm_slo:promised_requests", "0"] and time.monotonic() < end:
        time.sleep(0.02)
    seen = scraped(folder)
    assert seen["vllm_slo:promised_requests", "0"] == 0
    assert seen["vllm_slo:best_effort_requests", "0"] == 2


def test_a_folder_that_cannot_be_written_costs_metrics_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "metrics"))
    metrics = SchedulerMetrics()
    metrics.publish(0.0, **IDLE)
    metrics.publish(9.0, **IDLE)
    monkeypatch.delenv(FOLDER_VARIABLE)
    SchedulerMetrics().publish(0.0, **IDLE)
