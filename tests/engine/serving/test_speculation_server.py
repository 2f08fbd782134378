# SPDX-License-Identifier: Apache-2.0
"""A live server with trees of two draft models, and the openai client."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from patience import patience

pytest.importorskip("vllm")

from live_server import SMALL, LiveServer, ask_openai, command, environment, running

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = "import os\n\n\ndef read(path):\n    with open(path) as"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("speculation")
    config = folder / "slo.yaml"
    # A pass of so small a draft takes as long as a step of the target: by itself it rarely pays.
    config.write_text(
        "speculation: {min_depth: 4}\n"
        "classes: {chat: {ttft_ms: 60000, tpot_ms: 10000}}\n"
        "service_tiers: {priority: chat}\n"
    )
    arguments = [
        *(command("vllm-slo"), "serve", "tiny", "--draft-model", "tiny"),
        *("--draft-model", "tiny-middle", "--slo-config", str(config), *SMALL),
    ]
    # What trees tell the worker is sent from process to process.
    with running(arguments, "tiny", folder, uniproc=False) as live:
        yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def streamed(client: openai.OpenAI, **options: object) -> list[str]:
    """The pieces of text as they come."""
    chunks = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=48, temperature=0, stream=True, **options
    )
    return [chunk.choices[0].text for chunk in chunks if chunk.choices]


def test_an_answer_streams_in_steps_of_several_tokens(
    server: LiveServer, client: openai.OpenAI
) -> None:
    pieces = [piece for piece in streamed(client, extra_body={"ignore_eos": True}) if piece]
    assert len(pieces) < 40, "48 tokens in fewer steps"
    whole = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=48, temperature=0, extra_body={"ignore_eos": True}
    )
    assert "".join(pieces) == whole.choices[0].text
    assert whole.usage is not None and whole.usage.completion_tokens == 48
    assert server.settled_total("vllm_slo:tree_tokens_count") > 10
    assert server.total("vllm_slo:tree_accepted_tokens_total") > 10
    assert server.total("vllm_slo:speculation_enabled") == 1
    accepted = server.total("vllm:spec_decode_num_accepted_tokens_total")
    assert server.total("vllm_slo:tree_accepted_tokens_total") == accepted


def test_the_draft_models_are_on_the_metrics_page(server: LiveServer) -> None:
    assert server.total("vllm_slo:draft_model_up", model="draft") == 1
    assert server.total("vllm_slo:draft_model_up", model="middle") == 1
    assert server.total("vllm_slo:draft_chain_steps_total") > 10
    assert server.total("vllm_slo:draft_passes_total", model="draft") > 0
    assert server.total("vllm_slo:draft_pass_seconds_total") > 0.0
    assert 0.0 < server.total("vllm_slo:draft_similarity_ratio", verifier="target") < 2.0


def test_a_tier_names_a_class(server: LiveServer) -> None:
    answer = ask_openai(server, "chat", True, {"service_tier": "priority"})
    assert (answer.status, answer.service_tiers) == (200, ["priority"])
    assert [report["promised"] for report in answer.reports] == [True]
    server.await_total(1, "vllm_slo:requests_finished_total", slo_class="chat")


def test_objectives_and_reports_are_as_without_trees(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "def main"}],
        max_tokens=24,
        extra_body={"slo": {"ttft_ms": 60000, "tpot_ms": 10000}, "ignore_eos": True},
    )
    report = answer.model_extra["slo"]
    assert report["promised"] is True
    assert report["attained"] is True


def test_structured_output_keeps_its_form(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=40,
        temperature=0.8,
        extra_body={"structured_outputs": {"regex": "[a-z]{4}-[0-9]{3}"}},
    )
    text = answer.choices[0].text
    assert len(text) == 8 and text[4] == "-" and text[5:].isdigit()


def test_a_client_that_leaves_disturbs_nobody(server: LiveServer, client: openai.OpenAI) -> None:
    leaving = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(leaving))
    leaving.close()
    assert "".join(streamed(client))
    server.await_total(0, "vllm:num_requests_running")


def test_a_draft_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    done = subprocess.run(
        [command("vllm-slo"), "serve", "tiny", "--draft-model", missing],
        capture_output=True,
        text=True,
        timeout=patience(120),
        env=environment(),
        check=False,
    )
    assert done.returncode != 0
    assert f"speculation.draft_model: there is no folder '{missing}'" in done.stderr
    assert "Traceback" not in done.stderr
