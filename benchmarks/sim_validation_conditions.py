# SPDX-License-Identifier: Apache-2.0
"""The conditions under which ``sim_validation.py`` compares engine and simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from sim_validation_engine import BLOCK_SIZE, MAX_CONTEXT, MAX_MODEL_LEN, MAX_SEQS, STEP_TOKENS

from vllm_slo import tiny
from vllm_slo.bench.demo_load import CLASSES as DEMO_CLASSES
from vllm_slo.bench.workload import WorkloadOptions, synthetic
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.config.serve_args import tree_arguments
from vllm_slo.config.speculation import SpeculationConfig
from vllm_slo.sim.cluster import slo_of
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job, RequestDetails, Round, Stage
from vllm_slo.sim.systems import OURS, TREES, System, speculating, system

CLASSES: Final = tuple(spec for spec in DEMO_CLASSES if spec.ttft_slowdown is not None)
PLENTY: Final = 32_768
"""KV tokens that hold all requests."""
DRAFTS: Final = 3
STOCK: Final = system("fcfs", STEP_TOKENS)
SLO: Final = replace(OURS, token_budget=STEP_TOKENS)
TREES_SYSTEM: Final = replace(TREES, token_budget=STEP_TOKENS)
DRAFT: Final = str(tiny.path("draft"))


@dataclass(frozen=True, slots=True)
class Workload:
    """What arrives.

    Attributes:
        load: offered tokens over what the engine could process if it did nothing but prefill.
        duration_s: of the arrivals of one run.
        length_scale: on prompts and answers of the demo's classes.
        prefixes: number of shared texts, one of which begins each prompt; popularity falls with
            1 / rank. 0: none.
        prefix_tokens: of each such text, at most; the shortest has half of them.
        rounds: most rounds of a job; at least one fewer, and one.
        think_s: mean time between two rounds, exponential.
        slack: on the objectives of the demo's classes.
    """

    load: float
    duration_s: float = 42.0
    length_scale: float = 1.0
    prefixes: int = 0
    prefix_tokens: int = 0
    rounds: int = 1
    think_s: float = 0.0
    slack: float = 1.0


@dataclass(frozen=True, slots=True)
class Served:
    """One way of serving: the engine's arguments, and the system that simulates it.

    Attributes:
        arguments: of ``vllm.EngineArgs``.
        slo_config: beyond classes and profile; None: vLLM's own scheduler.
    """

    name: str
    system: System
    arguments: Mapping[str, Any] = field(default_factory=dict)
    slo_config: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition.

    Attributes:
        words: what is special about it.
        text: whether prompts are Python code, so that drafts are accepted as they would be.
        seeds: of the arrivals of each live run; a seed that comes again repeats a run.
    """

    name: str
    words: str
    workload: Workload
    systems: tuple[Served, ...]
    kv_tokens: int = PLENTY
    max_model_len: int = MAX_MODEL_LEN
    replicas: int = 1
    text: bool = False
    seeds: tuple[int, ...] = (0, 1)


_CHAIN: Final = {
    "speculative_config": {
        "method": "draft_model", "model": DRAFT, "num_speculative_tokens": DRAFTS,
    }
}  # fmt: skip
_TREES: Final = tree_arguments(SpeculationConfig(draft_model=DRAFT), ())
PLAIN: Final = (Served("stock vLLM", STOCK), Served("vllm-slo", SLO, slo_config={}))
CONDITIONS: Final = (
    Condition(
        "plain", "the KV cache holds all requests, prompts share nothing",
        Workload(0.47),
        PLAIN, seeds=(0, 1, 0),
    ),
    Condition(
        "memory pressure", "a KV cache so small that requests wait for memory and are preempted",
        Workload(0.4, length_scale=0.8), PLAIN, kv_tokens=1_536, max_model_len=MAX_CONTEXT,
    ),
    Condition(
        "prefix sharing", "prompts begin with one of six texts of 192 to 384 tokens",
        Workload(0.31, prefixes=6, prefix_tokens=384, length_scale=0.8), PLAIN,
    ),
    Condition(
        "sessions", "jobs of two to four rounds with a mean of 2 s to think between them",
        Workload(0.11, duration_s=60.0, rounds=4, think_s=2.0, length_scale=0.6), PLAIN,
    ),
    Condition(
        "drafts", f"vLLM's own draft model drafts {DRAFTS} tokens, prompts are Python code",
        Workload(0.32),
        (
            Served("stock vLLM", speculating(STOCK, DRAFTS), _CHAIN),
            Served("vllm-slo", speculating(SLO, DRAFTS), _CHAIN, {}),
        ),
        text=True,
    ),
    Condition(
        "trees", "vllm-slo drafts token trees with the built-in draft, prompts are Python code",
        Workload(0.28),
        (Served("vllm-slo", TREES_SYSTEM, _TREES, {"draft_model": DRAFT}),),
        text=True,
    ),
    Condition(
        "two replicas", "two engines, one core each, behind one front", Workload(1.03), PLAIN,
        replicas=2,
    ),
)  # fmt: skip


def zero_load(hardware: Hardware) -> ZeroLoad:
    """Latency of a lone request."""
    lengths = (64, 128, 256, 512, 960)
    ttfts_s = tuple((n, hardware.zero_load_ttft_s(n)) for n in lengths)
    return ZeroLoad(ttfts_s, hardware.zero_load_tpot_s())


def make_jobs(workload: Workload, hardware: Hardware, seed: int, duration_s: float) -> list[Job]:
    """The demo's classes with an objective, Poisson; objectives are relative to zero load."""
    zero = zero_load(hardware)
    token_s = (zero.ttft_s(960) - zero.ttft_s(128)) / (960 - 128)
    shares, scale = sum(spec.share for spec in CLASSES), 0.5 * workload.length_scale
    tokens = sum(s.share / shares * (s.prompt.mean + s.output.mean) for s in CLASSES)
    options = WorkloadOptions(
        rate=workload.load / (token_s * tokens * scale),
        duration_s=duration_s,
        seed=seed,
        classes=CLASSES,
        max_context=MAX_CONTEXT,
        length_scale=scale,
    )
    rng = np.random.default_rng([seed, 5])
    jobs = []
    for one in synthetic(options, zero).requests:
        ttft_s, tpot_s = one.ttft_slo_s or 0.0, workload.slack * (one.tpot_slo_s or 0.0)
        first = Round(
            one.prompt_tokens, (Stage(one.output_tokens, tpot_s),), workload.slack * ttft_s
        )
        job = Job(one.request_id, one.slo_class, one.at_s, (first,))
        if workload.prefixes:
            job = _with_prefix(job, workload, rng)
        if workload.rounds > 1:
            job = _with_rounds(job, workload, zero, rng)
        jobs.append(job)
    return jobs


def _with_prefix(job: Job, workload: Workload, rng: np.random.Generator) -> Job:
    """The job with a shared text before its prompt; its objectives are those of its own part."""
    weights = 1.0 / np.arange(1, workload.prefixes + 1)
    number = int(rng.choice(workload.prefixes, p=weights / weights.sum()))
    longest = workload.prefix_tokens * (workload.prefixes + number) // (2 * workload.prefixes)
    tokens = longest // BLOCK_SIZE * BLOCK_SIZE
    (asked,) = job.rounds
    room = MAX_CONTEXT - asked.output_tokens - tokens
    details = RequestDetails(
        slo_of(job, 0),
        row=0,
        application=job.application,
        hash_ids=tuple(MAX_CONTEXT * number + place for place in range(tokens // BLOCK_SIZE)),
        block_tokens=BLOCK_SIZE,
    )
    prompt = tokens + min(asked.prompt_tokens, room)
    return replace(job, rounds=(replace(asked, prompt_tokens=prompt, details=details),))


def _with_rounds(job: Job, workload: Workload, zero: ZeroLoad, rng: np.random.Generator) -> Job:
    """The job with further rounds: shorter prompts, the same TPOT."""
    (first,) = job.rounds
    slowdown = first.ttft_s / zero.ttft_s(first.prompt_tokens)
    rounds = [first]
    for _ in range(int(rng.integers(1, workload.rounds))):
        prompt = int(rng.integers(24, 121))
        stage = replace(first.stages[0], tokens=int(rng.integers(16, 65)))
        ttft_s = slowdown * zero.ttft_s(max(prompt, 64))
        rounds.append(Round(prompt, (stage,), ttft_s, float(rng.exponential(workload.think_s))))
    while sum(r.prompt_tokens + r.output_tokens for r in rounds) > MAX_CONTEXT and len(rounds) > 1:
        rounds.pop()
    return replace(job, rounds=tuple(rounds))


def limits() -> dict[str, Any]:
    """What the simulator is told of the engine beside its step times (`load_hardware`)."""
    return {
        "kv_tokens": PLENTY,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": MAX_SEQS,
        "max_model_len": MAX_MODEL_LEN,
        "frontend_s": 0.0,
    }
