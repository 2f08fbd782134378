# SPDX-License-Identifier: Apache-2.0
"""What requests may ask of vLLM, and how it serves them, on real engines: without objectives, with
them, and with trees."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from features import Results, row, run_group

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Group = dict[str, Results]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Group:
    folder: Path = tmp_path_factory.mktemp("requests")
    return run_group("requests", folder)


@row("Texts", "works", "works", "works")
def test_texts(group: Group) -> None:
    one = group["requests"]
    one.check_plain()
    one.check_promised()
    one.check_trees()


@row("`prompt_logprobs`", "works", "works", "works")
def test_prompt_logprobs(group: Group) -> None:
    one = group["requests"]
    one.check_plain()
    one.check_promised(ask="prompt_logprobs")
    one.check_trees("prompt_logprobs")
    assert len(one.stock["prompt_logprobs"]["plain"][0]["logprobs"]) > 100


@row("Structured output", "works", "works", "works")
def test_structured_output(group: Group) -> None:
    one = group["requests"]
    one.check_plain()
    one.check_promised(ask="grammar")
    one.check_trees("grammar")
    texts = [answer["text"] for answer in one.stock["grammar"]["plain"]]
    assert not any("e" in text or "s" in text for text in texts)


@row("Beam search", "works", "refused", "works")
def test_beam_search(group: Group) -> None:
    """Over HTTP an objective is refused: see tests/engine/http."""
    one = group["requests"]
    one.check_plain()
    one.check_plain("trees")
    assert len(one.stock["beams"]["plain"][0]["tokens"]) == 2


@row("A pause", "works", "works", "works")
def test_pause(group: Group) -> None:
    """A promise from before the pause is withdrawn, and made anew when it can still be kept."""
    one = group["requests"]
    one.check_plain()
    one.check_promised(ask="pause")
    one.check_trees("pause")
    assert one.modes["ours"]["pause"]["asking"][0]["report"]["reason"] == "paused"


@row("Streaming input", "works", "refused", "works")
def test_streaming_input(group: Group) -> None:
    one = group["requests"]
    one.check_plain()
    one.check_plain("trees")
    assert one.modes["trees"]["parts"]["nodes"] > 10
    for mode in ("ours", "trees"):
        asked, _, without, _ = one.modes[mode]["parts"]["asking"]
        assert asked["stop"].startswith("slo_invalid:slo: the prompt comes in parts")
        assert without["tokens"] == one.stock["parts"]["plain"][2]["tokens"]


@row("`--scheduling-policy priority`", "works", "works", "works")
def test_priority_policy(group: Group) -> None:
    one = group["priority"]
    one.check_plain()
    one.check_promised()
    one.check_trees()


@row("`--no-enable-prefix-caching`", "works", "works", "works")
def test_no_prefix_caching(group: Group) -> None:
    one = group["no_prefix_caching"]
    one.check_plain()
    one.check_promised()
    one.check_trees()


@row("`--no-async-scheduling`", "works", "works", "works")
def test_no_async_scheduling(group: Group) -> None:
    one = group["no_async"]
    one.check_plain()
    one.check_promised()
    one.check_trees()


@row("`--kv-cache-dtype fp8`", "works", "works", "refused")
def test_quantised_kv_cache(group: Group) -> None:
    """On CPUs vLLM needs AVX-512 or AMX for it. Without them stock vLLM refuses, and so do we."""
    one = group["fp8"]
    assert one.refusal().startswith("ConfigError: --kv-cache-dtype fp8: ")
    if "refused" in one.stock:
        assert "AVX-512" in one.stock["refused"]
        assert one.modes["ours"] == one.stock
        return
    one.check_plain()
    one.check_promised()
    plain = group["requests"].stock["texts"]["plain"]
    assert [a["tokens"] for a in one.stock["texts"]["plain"]] != [a["tokens"] for a in plain]


@row("KV connectors", "works", "works", "works")
def test_kv_connector(group: Group) -> None:
    """The second time vLLM's example loads the prompts' blocks from a folder."""
    one = group["connector"]
    one.check_plain()
    one.check_promised()
    one.check_trees()
    for mode in ("ours", "trees"):
        loaded = [answer["cached"] for answer in one.modes[mode]["again"]["asking"]]
        assert loaded == [96, 0, 32, 64]


def test_too_few_blocks_are_refused(group: Group) -> None:
    """Before drafts are tried on blocks that are not there."""
    assert group["few_blocks"].refusal() == (
        "ConfigError: speculation.draft_tokens: 32 paths need 64 KV blocks of 64, and a request of "
        "max_model_len 256 tokens does not fit into the rest; lower one of them or give the KV "
        "cache more memory"
    )
