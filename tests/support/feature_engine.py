# SPDX-License-Identifier: Apache-2.0
"""Real engines that use vLLM's own features, one after the other in a process of their own.

``python feature_engine.py GROUP`` starts every engine of ``GROUPS[GROUP]`` in up to three modes: as
stock vLLM, with our scheduler, and with trees. In its working folder it makes the models, and
writes what each request got to ``GROUP.json``, or why an engine did not start.
"""

from __future__ import annotations

import copy
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# The workers of one engine share the cores.
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import numpy as np
import vllm
from feature_models import PIXELS, folder_of
from PIL import Image
from tree_engine import SPECULATION, grow_all
from vllm import ModelRegistry, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

from vllm_slo import LLM, SLO
from vllm_slo.engine.serving.llm import report_of

gc.freeze()  # what was imported stays

Answer = dict[str, Any]
SLOs = list[SLO | None]

TOKENS = 12
BLOCK = 32
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,  # the longest prompt comes in chunks
    "block_size": BLOCK,
    "num_gpu_blocks_override": 160,
    "disable_log_stats": True,
    "seed": 0,
}
MODES = ("stock", "ours", "trees")
TREES: dict[str, Any] = {"slo_config": {"speculation": SPECULATION}}
SERVED_PROMPT = "def read(path):\n"
LENGTHS = (100, 3, 40, 70)
"""Tokens of the prompts."""
EASY = SLO(ttft_ms=600_000, tpot_ms=100_000)
IMPOSSIBLE = SLO(ttft_ms=0.001)
STEPS_OF_A_PART = 8
ASKING: SLOs = [EASY, IMPOSSIBLE, None, EASY]
PLAIN: SLOs = [None] * len(ASKING)
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}


# --- what is asked -------------------------------------------------------------------------------


def params(slo: SLO | None, **more: Any) -> SamplingParams:
    extra = None if slo is None else slo.to_extra_args()
    return SamplingParams(**{**GREEDY, **more}, extra_args=extra)


def prompts() -> list[Any]:
    rng = np.random.default_rng(0)
    return [{"prompt_token_ids": rng.integers(5, 2000, n).tolist()} for n in LENGTHS]


def answer(output: Any) -> Answer:
    return {
        "tokens": [list(one.token_ids) for one in output.outputs],
        "text": output.outputs[0].text,
        "report": report_of(output),
        "cached": output.num_cached_tokens,
    }


def generate(llm: vllm.LLM, slos: SLOs, what: list[Any] | None = None, **more: Any) -> list[Answer]:
    """Greedy answers to four prompts; ``more`` are further arguments of ``generate``."""
    asked = [params(slo) for slo in slos]
    return [answer(o) for o in llm.generate(what or prompts(), asked, use_tqdm=False, **more)]


def a_text(llm: vllm.LLM, slos: SLOs) -> list[Answer]:
    """What ``test_several_engines.py`` asks a server."""
    asked = SamplingParams(temperature=0, max_tokens=24)
    return [answer(one) for one in llm.generate(SERVED_PROMPT, asked, use_tqdm=False)]


def with_adapter(llm: vllm.LLM, slos: SLOs) -> list[Answer]:
    """Every other request has the adapter."""
    lora = LoRARequest("adapter", 1, folder_of("adapter"))
    return generate(llm, slos, lora_request=[lora, None, lora, lora])


def with_images(llm: vllm.LLM, slos: SLOs) -> list[Answer]:
    """Two images, and texts without one."""
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 255, (PIXELS, PIXELS, 3), dtype=np.uint8) for _ in range(2)]
    one, two = ({"image": Image.fromarray(each)} for each in pixels)
    look = {"prompt": "Look here"}
    shown = [{**look, "multi_modal_data": one}, {**look, "multi_modal_data": two}]
    return generate(llm, slos, [*shown, look, {**shown[0], "prompt": "Read " * 50}])


def with_sounds(llm: vllm.LLM, slos: SLOs) -> list[Answer]:
    """Four tones, each heard by the encoder."""
    times = np.arange(16_000, dtype=np.float32)
    sounds = [(np.sin(times * pitch), 16_000) for pitch in (0.03, 0.05, 0.08, 0.2)]
    return generate(
        llm,
        slos,
        [
            {
                "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": sound}},
                "decoder_prompt": {"prompt_token_ids": [3, 4, 5]},
            }
            for sound in sounds
        ],
    )


def with_priorities(llm: vllm.LLM, slos: SLOs) -> list[Answer]:
    return generate(llm, slos, priority=[3, 0, 2, 1])


def with_prompt_logprobs(llm: vllm.LLM, slos: SLOs) -> list[Answer]:
    asked = [params(slo, prompt_logprobs=1, logprobs=1) for slo in slos]
    outputs = llm.generate(prompts(), asked, use_tqdm=False)
    return [
        {
            **answer(output),
            "logprobs": _logprobs(output.prompt_logprobs, output.outputs[0].logprobs),
        }
        for output in outputs
    ]


def _logprobs(*lists: Any) -> list[float]:
    """The likeliest token's of each place."""
    return [max(v.logprob for v in place.values()) for one in lists for place in one if place]


def with_a_grammar(llm: vllm.LLM, slos: SLOs) -> list[Answer]:
    grammar = StructuredOutputsParams(regex=r"[^es]{8,40}")
    asked = [params(slo, structured_outputs=grammar, ignore_eos=False) for slo in slos]
    return [answer(output) for output in llm.generate(prompts(), asked, use_tqdm=False)]


def with_beams(llm: vllm.LLM, slos: SLOs) -> list[Answer]:
    """vLLM's own search; it takes no objectives."""
    beams = llm.beam_search(prompts()[:2], BeamSearchParams(beam_width=2, max_tokens=4))
    return [{"tokens": [list(one.tokens) for one in b.sequences], "report": None} for b in beams]


def embed(llm: vllm.LLM, slos: SLOs) -> list[Answer]:
    return [
        {"tokens": [], "vector": list(output.outputs.embedding), "report": None}
        for output in llm.embed(prompts(), use_tqdm=False)
    ]


def with_a_pause(llm: vllm.LLM, slos: SLOs) -> list[Answer]:
    """Scheduling stops while two requests decode and two have just arrived."""
    engine, asked = llm.llm_engine, list(zip(prompts(), slos, strict=True))
    ended: dict[str, Any] = {}

    def add(places: range) -> None:
        for place in places:
            prompt, slo = asked[place]
            engine.add_request(f"r{place}", prompt, params(slo))

    def step() -> None:
        ended.update((o.request_id, o) for o in engine.step() if o.finished)

    add(range(2))
    for _ in range(4):
        step()
    llm.sleep(level=0, mode="keep")
    add(range(2, 4))
    for _ in range(3):
        step()
    assert not ended
    llm.wake_up(tags=["scheduling"])
    while engine.has_unfinished_requests():
        step()
    return [answer(ended[f"r{place}"]) for place in range(4)]


def in_parts(llm: vllm.LLM, slos: SLOs) -> list[Answer]:
    """Prompts that arrive in two parts, handed to the engine's core as ``AsyncLLM`` does."""
    return [
        _two_parts(llm.llm_engine, f"s{place}", prompt["prompt_token_ids"], slo)
        for place, (prompt, slo) in enumerate(zip(prompts(), slos, strict=True))
    ]


def _two_parts(engine: Any, name: str, ids: list[int], slo: SLO | None) -> Answer:
    half, last = len(ids) // 2, [0]  # the last part only closes the stream
    got: Answer = {"tokens": [[], []], "report": None, "stop": None}
    for place, part in enumerate((ids[:half], ids[half:], last)):
        prompt = {"prompt_token_ids": part}
        request = engine.input_processor.process_inputs(
            name,
            prompt,
            params(slo, max_tokens=4),
            supported_tasks=("generate",),
            resumable=part is not last,
        )
        request.external_req_id = name
        engine.output_processor.add_request(request, None, None, 0)
        engine.engine_core.add_request(copy.deepcopy(request))  # else both ends share one list
        for _ in range(STEPS_OF_A_PART):
            for output in engine.step():
                got["tokens"][place] = list(output.outputs[0].token_ids)
                got["report"] = report_of(output)
                got["stop"] = output.outputs[0].stop_reason
        if got["stop"]:
            break
    return got


# --- engines -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """One engine and what it is asked.

    Args:
        model: see ``feature_models``.
        options: of ``vllm.LLM``.
        asks: name -> what is asked; in each mode once without objectives and once with.
        modes: the ways in which the engine is started.
    """

    model: str = "dense"
    options: Mapping[str, Any] = field(default_factory=dict)
    asks: Mapping[str, Callable[[vllm.LLM, SLOs], list[Answer]]] = field(
        default_factory=lambda: {"texts": generate}
    )
    modes: tuple[str, ...] = MODES


def connector(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


NO_BLOCK_SIZE = {"block_size": None, "max_num_batched_tokens": 256}
PROCESSES = {"distributed_executor_backend": "mp"}
GROUPS: dict[str, dict[str, Engine]] = {
    "models": {
        "lora": Engine(
            options={"enable_lora": True, "max_lora_rank": 8, "max_num_batched_tokens": 256},
            asks={"texts": with_adapter},
        ),
        "multimodal": Engine("vision_language", asks={"texts": with_images}),
        "hybrid": Engine("hybrid", NO_BLOCK_SIZE),
        "state_space": Engine("state_space", NO_BLOCK_SIZE),
        "encoder_decoder": Engine(
            "encoder_decoder", {"max_num_batched_tokens": 2048}, asks={"texts": with_sounds}
        ),
        "sliding": Engine("sliding"),
        "pooling": Engine(options={"runner": "pooling"}, asks={"texts": embed}),
    },
    "requests": {
        "requests": Engine(
            asks={
                "texts": generate,
                "prompt_logprobs": with_prompt_logprobs,
                "grammar": with_a_grammar,
                "beams": with_beams,
                "pause": with_a_pause,
                "parts": in_parts,
            }
        ),
        "priority": Engine(
            options={"scheduling_policy": "priority"}, asks={"texts": with_priorities}
        ),
        "no_prefix_caching": Engine(options={"enable_prefix_caching": False}),
        "no_async": Engine(options={"async_scheduling": False}),
        "fp8": Engine(options={"kv_cache_dtype": "fp8"}),
        "few_blocks": Engine(options={"num_gpu_blocks_override": 64}, modes=("trees",)),
        "connector": Engine(
            options={
                "kv_transfer_config": connector("ExampleConnector"),
                # vLLM's example stores no prompts that come in chunks.
                "max_num_batched_tokens": 512,
            },
            asks={"texts": generate, "again": generate},
        ),
    },
    "server": {"built_in": Engine("built_in", modes=("stock",), asks={"texts": a_text})},
    "processes": {
        "one": Engine(modes=("stock",)),
        "tensor": Engine(options={"tensor_parallel_size": 2, **PROCESSES}, modes=("ours", "trees")),
        "pipeline": Engine(
            options={
                **PROCESSES,
                "pipeline_parallel_size": 2,
                # vLLM on CPU makes what goes from stage to stage when it compiles.
                "enforce_eager": False,
                "compilation_config": {"mode": 3, "backend": "eager"},
            },
            modes=("ours", "trees"),
        ),
    },
}


OWN_DRAFT = ("sliding", "vision_language")
"""Models that draft for themselves: what is refused is to be the served model."""


def start(engine: Engine, mode: str) -> vllm.LLM:
    options = {**ENGINE, **engine.options}
    options = {name: value for name, value in options.items() if value is not None}
    if transfer := options.get("kv_transfer_config"):
        stored = str(Path(f"kv {mode}").resolve())
        more = {**transfer["kv_connector_extra_config"], "shared_storage_path": stored}
        options["kv_transfer_config"] = {**transfer, "kv_connector_extra_config": more}
    model = folder_of(engine.model)
    if mode == "stock":
        return vllm.LLM(model, **options)
    if mode == "ours":
        return LLM(model, **options)
    draft = model if engine.model in OWN_DRAFT else folder_of("dense")
    return LLM(model, draft_model=draft, **TREES, **options)


@contextmanager
def counted_nodes(llm: vllm.LLM) -> Iterator[dict[str, int]]:
    """How many tree nodes are verified meanwhile."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
    update, seen = scheduler.update_from_output, {"nodes": 0}

    def counting(output: Any, done: Any) -> Any:
        trees = getattr(output, "vllm_slo_trees", None)
        seen["nodes"] += sum(map(len, trees.parents.values())) if trees else 0
        return update(output, done)

    scheduler.update_from_output = counting
    try:
        yield seen
    finally:
        scheduler.update_from_output = update


def ask(llm: vllm.LLM, engine: Engine, mode: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, asked in engine.asks.items():
        with counted_nodes(llm) as seen:
            found[name] = {"plain": asked(llm, PLAIN)}
            if mode != "stock":
                llm.reset_prefix_cache()
                found[name]["asking"] = asked(llm, ASKING)
            llm.reset_prefix_cache()
            found[name] |= seen
    return found


def run(engine: Engine, mode: str) -> dict[str, Any]:
    """What the requests of one engine got, or why it does not start."""
    try:
        llm = start(engine, mode)
    except Exception as error:  # noqa: BLE001 - the test compares it
        return {"refused": f"{type(error).__name__}: {error}"}
    try:
        return ask(llm, engine, mode)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        # vLLM on CPU replaces its kernels when an engine starts, and fails at a second time where
        # numba is loaded. They are replaced by now.
        current_platform.register_triton_kernel_overrides = lambda: None


def register_models() -> None:
    """Let vLLM look at these models in this process, and not in a further one for each."""
    for name in ARCHITECTURES:
        lazy = ModelRegistry.models[name]
        model = getattr(importlib.import_module(lazy.module_name), lazy.class_name)
        ModelRegistry.register_model(name, model)


ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Mamba2ForCausalLM",
    "Blip2ForConditionalGeneration",
    "WhisperForConditionalGeneration",
)


def main(group: str) -> None:
    register_models()
    grow_all()
    found: dict[str, Any] = {name: {} for name in GROUPS[group]}
    for mode in MODES:  # trees last: their attention stays in the process
        for name, engine in GROUPS[group].items():
            if mode in engine.modes:
                found[name][mode] = run(engine, mode)
    Path(f"{group}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
