# SPDX-License-Identifier: Apache-2.0
"""Engines of several workers, against stock vLLM with one worker and the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from features import Results, row, run_group

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.deep, pytest.mark.timeout(600)]

Group = dict[str, Results]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    folder: Path = tmp_path_factory.mktemp("processes")
    return run_group("processes", folder)


@row("`--tensor-parallel-size 2`", "works", "works", "works")
def test_tensor_parallel(group: Group) -> None:
    one = group["tensor"]
    one.check_plain()
    one.check_promised()
    one.check_trees()


@row("`--pipeline-parallel-size 2`", "works", "as stock", "refused")
def test_pipeline_parallel(group: Group) -> None:
    """With a draft model the workers end, after a line in the log. The line itself is also tested
    without an engine: ``test_draft_check.py``."""
    one = group["pipeline"]
    one.check_plain()
    one.check_served("pipeline_parallel")
    assert "refused" in one.modes["trees"]
    line = "vllm-slo: error: --pipeline-parallel-size: does not work with a draft model; remove one"
    assert line in one.log
