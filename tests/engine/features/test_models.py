# SPDX-License-Identifier: Apache-2.0
"""Models of all kinds on real engines: without objectives, with them, and with trees."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from features import Results, row, run_group

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Group = dict[str, Results]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    folder: Path = tmp_path_factory.mktemp("models")
    return run_group("models", folder)


@row("LoRA", "works", "works", "works")
def test_lora(group: Group) -> None:
    one = group["lora"]
    one.check_plain()
    one.check_promised()
    one.check_trees()
    with_adapter, without = one.stock["texts"]["plain"][3], one.stock["texts"]["plain"][1]
    assert with_adapter["tokens"] != without["tokens"]


@row("Images", "works", "works", "refused")
def test_multimodal(group: Group) -> None:
    one = group["multimodal"]
    one.check_plain()
    one.check_promised()
    assert "the served model is a multimodal model" in one.refusal()
    first, second, none, _ = one.stock["texts"]["plain"]
    assert first["tokens"] != second["tokens"] != none["tokens"]


@row("Hybrid models", "works", "works", "refused")
def test_hybrid(group: Group) -> None:
    one = group["hybrid"]
    one.check_plain()
    one.check_promised()
    assert "the served model has state-space layers" in one.refusal()


@row("State-space models", "works", "works", "refused")
def test_state_space(group: Group) -> None:
    one = group["state_space"]
    one.check_plain()
    one.check_promised()
    assert "the served model has state-space layers" in one.refusal()


@row("Encoder-decoder models", "works", "as stock", "refused")
def test_encoder_decoder(group: Group) -> None:
    """vLLM turns chunked prefill off for them."""
    one = group["encoder_decoder"]
    one.check_plain()
    one.check_served("no_chunked_prefill")
    assert "the served model is an encoder-decoder model" in one.refusal()


@row("Sliding windows", "works", "works", "refused")
def test_sliding_windows(group: Group) -> None:
    one = group["sliding"]
    one.check_plain()
    one.check_promised()
    assert "the served model has sliding-window layers" in one.refusal()


@row("Pooling", "works", "refused", "refused")
def test_pooling(group: Group) -> None:
    """The objective of a pooling request is refused over HTTP: see tests/engine/http."""
    one = group["pooling"]
    one.check_plain()
    assert "the served model is a pooling model" in one.refusal()
