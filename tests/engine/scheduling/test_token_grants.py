# SPDX-License-Identifier: Apache-2.0
"""Whatever vLLM decides by the tokens of a request in a step, it decides by those granted: where a
chunk of a prompt ends for the state of Mamba layers, and which images are encoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.sim.harness import EngineShape, VirtualEngine

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
CHAT = SLO(ttft_ms=5000, tpot_ms=40)
"""75 tokens fill a step of such a TPOT."""
PROMPT = SLO(ttft_ms=3000)


class Hybrid(Scheduler):
    """Of a model that has Mamba layers beside attention; their state is cached block by block."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **options: Any
    ) -> None:
        size = options["block_size"]
        vllm_config.cache_config.mamba_cache_mode = "align"
        mamba = MambaSpec(
            block_size=size,
            shapes=((1, 32),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align",
        )
        kv_cache_config.kv_cache_groups.append(KVCacheGroupSpec(["mamba"], mamba))
        super().__init__(vllm_config, kv_cache_config, **options)
        assert self.need_mamba_block_aligned_split


class Seeing(Scheduler):
    """Of a model that has an encoder of images."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.max_num_encoder_input_tokens = 4096
        self.encoder_cache_manager = EncoderCacheManager(cache_size=4096)


def engine(cls: type[Scheduler], folder: Path, size: int = 16, **options: Any) -> VirtualEngine:
    shape = EngineShape(num_blocks=4000, block_size=size)
    return VirtualEngine(cls, folder, ROOFLINE.predict_shape_s, shape, believed=ROOFLINE, **options)


def chunks(output: SchedulerOutput, requests: list[Request]) -> list[tuple[int, int]]:
    """(first token, end) of the chunks that end no prompt."""
    tokens = output.num_scheduled_tokens
    return [
        (request.num_computed_tokens - tokens[request.request_id], request.num_computed_tokens)
        for request in requests
        if request.request_id in tokens and request.num_computed_tokens < request.num_prompt_tokens
    ]


# --- Mamba ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 128])
def test_chunks_end_where_the_state_is_cached(config_folder: Path, size: int) -> None:
    """Each block's state is cached as that after its last token: no chunk runs past the end of a
    block that it began, or found begun. A block of 128 tokens does not fit into one step."""
    one = engine(Hybrid, config_folder, size)
    one.add("chat", 20, 300, CHAT)
    for _ in range(3):
        one.step()
    requests = [one.add(f"long{number}", 700, 5, PROMPT) for number in range(3)]
    seen = 0
    for _ in range(1000):
        if not one.busy:
            break
        output = one.step()
        for start, end in chunks(output, requests):
            seen += 1
            assert end % size == 0 or end // size == start // size, (start, end)
    assert seen > 10
    assert {str(outcome.finish_reason) for outcome in one.outcomes.values()} == {"stop"}


def test_a_promise_is_kept_beside_large_blocks(config_folder: Path) -> None:
    """A prompt advances within a block where a step has no time for all of it."""
    one = engine(Hybrid, config_folder, 512)
    one.add("chat", 20, 300, CHAT)
    for _ in range(3):
        one.step()
    one.add("long", 1500, 5, PROMPT)
    one.run()
    for name in ("chat", "long"):
        report = one.outcomes[name].report
        assert report is not None
        assert (report["promised"], report["attained"]) == (True, True), name


# --- images --------------------------------------------------------------------------------------


def with_images(request: Request, *offsets: int, length: int = 100) -> Request:
    request.mm_features = [
        MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier=f"{request.request_id}-{offset}",
            mm_position=PlaceholderRange(offset=offset, length=length),
        )
        for offset in offsets
    ]
    return request


def test_only_images_of_granted_tokens_are_encoded(config_folder: Path) -> None:
    """The one that may wait is looked at first, when the step has tokens for those behind it."""
    one = engine(Seeing, config_folder)
    one.add("chat", 20, 300, CHAT)
    for _ in range(3):
        one.step()
    places = [10 + 15 * number for number in range(40)]
    waits = with_images(one.add("waits", 700, 5, SLO(ttft_ms=60_000)), *places, length=10)
    one.step()
    for number in range(6):
        one.add(f"urgent{number}", 120, 5, SLO(ttft_ms=400 * (number + 1)))
    encoded: list[int] = []
    while waits.num_computed_tokens < 700:
        output = one.step()
        for number in output.scheduled_encoder_inputs.get("waits", ()):
            encoded.append(number)
            assert places[number] < waits.num_computed_tokens, number
    one.run()
    assert encoded == list(range(encoded[0], 40))
    assert {str(outcome.finish_reason) for outcome in one.outcomes.values()} == {"stop"}


@pytest.mark.parametrize("start", [0, 10])
def test_images_that_may_not_be_divided_are_not(config_folder: Path, start: int) -> None:
    """Of models whose images attend to all of their tokens. They take more than a step's share."""
    one = engine(Seeing, config_folder, disable_chunked_mm_input=True)
    one.add("chat", 20, 300, CHAT)
    for _ in range(3):
        one.step()
    places = [start + 110 * number for number in range(6)]
    request = with_images(one.add("sees", 700, 5, PROMPT), *places, length=100)
    while request.num_computed_tokens < 700:
        one.step()
        end = request.num_computed_tokens
        assert not any(place < end < place + 100 for place in places), end
    one.run()
    assert {str(outcome.finish_reason) for outcome in one.outcomes.values()} == {"stop"}


def test_a_step_that_encodes_teaches_nothing(config_folder: Path) -> None:
    """Its time is not that of its tokens."""
    one = engine(Seeing, config_folder)
    learnt: list[float] = []
    observe = one.scheduler.parts.clock.estimator.observe
    one.scheduler.parts.clock.estimator.observe = (  # type: ignore[method-assign]
        lambda shape, took_s: (learnt.append(took_s), observe(shape, took_s))[1]
    )
    with_images(one.add("sees", 300, 5, SLO(ttft_ms=5000)), 10)
    one.step()
    assert not learnt
    one.step()
    assert len(learnt) == 1
