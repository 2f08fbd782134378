# SPDX-License-Identifier: Apache-2.0
"""Measures step times on an engine in this process."""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_slo.core.step_time.model import BatchShape, Sample
from vllm_slo.errors import ProfileError

Progress = Callable[[int, int], None]
MARGIN = 64
"""Tokens a request may generate while it is measured."""
DECODE_STEPS = 5


@dataclass(frozen=True, slots=True)
class Scenario:
    """A sequence of steps that share one costly preparation.

    As many requests as the first of ``batches`` (descending) are given ``decode_context`` tokens.
    For each batch size the surplus is dropped, the rest decodes for some steps, and then, beside
    them, a prompt of which ``chunk_context`` tokens are cached grows by each of ``chunks``, a
    step each.  Batch size 0 with chunks is plain prefill.
    """

    batches: tuple[int, ...]
    decode_context: int = 0
    chunks: tuple[int, ...] = ()
    chunk_context: int = 0

    @property
    def cost(self) -> int:
        climbed = self.chunk_context + sum(self.chunks)
        return self.batches[0] * self.decode_context + len(self.batches) * climbed


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the engine: requests, tokens per step, tokens per request, KV tokens."""

    requests: int
    step_tokens: int
    request_tokens: int
    kv_tokens: int

    def allow(self, scenario: Scenario) -> bool:
        """Whether it runs without preemption and without a request ending early."""
        climbed = scenario.chunk_context + sum(scenario.chunks)
        held = scenario.batches[0] * (scenario.decode_context + MARGIN) + climbed
        return (
            scenario.batches[0] + bool(scenario.chunks) <= self.requests
            and scenario.batches[0] + max(scenario.chunks, default=0) <= self.step_tokens
            and max(scenario.decode_context, climbed) + MARGIN <= self.request_tokens
            and held <= 0.8 * self.kv_tokens
        )


def limits_of(llm: Any) -> Limits:
    """The limits of an ``LLM`` whose engine core lives in this process."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    config = llm.llm_engine.vllm_config
    return Limits(
        requests=config.scheduler_config.max_num_seqs,
        step_tokens=scheduler.max_num_scheduled_tokens,
        request_tokens=config.model_config.max_model_len,
        kv_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
    )


def scenarios(limits: Limits, *, fill_tokens: int, quick: bool = False) -> list[Scenario]:
    """The grid: prefill chunks, decode batches and both at once, at short to long contexts.

    The cheapest come first, so that a run that is cut short still covers all kinds.

    ``fill_tokens``: tokens that one scenario may compute to prepare its decodes.
    """
    factor = 4 if quick else 2
    contexts = [16, *_powers(256, limits.request_tokens, factor)]
    chunks = list(_powers(16, limits.step_tokens, factor))
    made = []
    for nth, context in enumerate(contexts):
        behind = context if nth else 0
        room = limits.request_tokens - behind - MARGIN
        fitting = [n for n in chunks if 2 * n <= room]
        made.append(Scenario((0,), 0, tuple(fitting), behind))
        top = min(limits.requests - 1, max(fill_tokens // context, 1))
        batches = tuple(reversed(list(_powers(1, top, 2))))
        beside = tuple(fitting[1:4:2]) if nth in (1, 2) else ()
        while batches and not limits.allow(Scenario(batches, context, beside)):
            batches = batches[1:]
        made.append(Scenario(batches or (0,), context, beside))
    return sorted((s for s in made if s.cost and limits.allow(s)), key=lambda s: s.cost)


def _powers(first: int, last: int, factor: int) -> Iterator[int]:
    value = first
    while value <= last:
        yield value
        value *= factor


class _Driver:
    """Runs scenarios on an in-process engine, whose scheduler records shapes and times."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.limits = limits_of(llm)
        self._vocabulary = self.engine.vllm_config.model_config.get_vocab_size()
        self._random = random.Random(0)
        self._ids = map(str, itertools.count())

    def run(self, scenario: Scenario) -> None:
        """Run one scenario, from an idle engine to an idle engine."""
        decoding = [self._add(scenario.decode_context) for _ in range(scenario.batches[0])]
        while any(r.num_computed_tokens < r.num_prompt_tokens for r in self._requests()):
            self._step(self.limits.step_tokens)
        for batch in scenario.batches:
            self.engine.abort_request(decoding[batch:], internal=True)
            del decoding[batch:]
            for _ in range(DECODE_STEPS if batch else 0):
                self._step(self.limits.step_tokens)
            if scenario.chunks:
                self._climb(scenario, batch)
        self.engine.abort_request(decoding, internal=True)
        while self.engine.has_unfinished_requests():
            self._step(self.limits.step_tokens)

    def _climb(self, scenario: Scenario, beside: int) -> None:
        """Prefill one prompt chunk by chunk beside ``beside`` decoding requests."""
        prompt = self._add(scenario.chunk_context + sum(scenario.chunks) + 1)
        left = scenario.chunk_context
        while left > 0:
            part = min(left, self.limits.step_tokens - beside)
            self._step(beside + part)
            left -= part
        for chunk in scenario.chunks:
            self._step(beside + chunk)
        self.engine.abort_request([prompt], internal=True)

    def tokens_per_s(self) -> float:
        """Prefill speed, from a few steps that also warm the engine up and do not count."""
        most = min(self.limits.step_tokens, self.limits.request_tokens // 4, 1024)
        for _ in range(2):
            self.run(Scenario((2, 1), 16, (most // 4 or 1, most // 2 or 1)))
        speed = max(shape.tokens / took_s for shape, took_s in self.scheduler.steps)
        self.scheduler.steps.clear()
        return float(speed)

    def _requests(self) -> list[Any]:
        return list(self.scheduler.requests.values())

    def _step(self, token_budget: int) -> None:
        self.scheduler.max_num_scheduled_tokens = token_budget
        try:
            self.engine.step()
        finally:
            self.scheduler.max_num_scheduled_tokens = self.limits.step_tokens

    def _add(self, prompt_tokens: int) -> str:
        from vllm import SamplingParams

        last = self._vocabulary - 1
        prompt = [self._random.randint(min(16, last), last) for _ in range(prompt_tokens)]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self.limits.request_tokens - prompt_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        return str(self.engine.add_request(next(self._ids), {"prompt_token_ids": prompt}, params))


def measure(
    llm: Any, *, quick: bool = False, time_limit_s: float, on_progress: Progress | None = None
) -> list[Sample]:
    """Run the grid on an ``LLM`` whose scheduler is a RecordingScheduler: medians per shape.

    The grid is run several times over (a noisy minute hits each shape at most once) until the
    time limit.  The steps before that, run to warm up and to learn how much fits into the time
    limit, are dropped.
    """
    driver = _Driver(llm)
    rounds = 3 if quick else 5
    per_scenario_s = time_limit_s / rounds / 12
    plan = scenarios(
        driver.limits, fill_tokens=int(driver.tokens_per_s() * per_scenario_s), quick=quick
    )
    if not plan:
        raise ProfileError(
            f"this engine is too small to be measured: {driver.limits}; raise max_model_len, "
            "max_num_batched_tokens or the KV cache"
        )
    until_s = time.monotonic() + time_limit_s
    for done, scenario in enumerate(plan * rounds):
        if time.monotonic() > until_s:
            break
        driver.run(scenario)
        if on_progress is not None:
            on_progress(done + 1, len(plan) * rounds)
    return medians(driver.scheduler.steps)


def medians(steps: list[Sample]) -> list[Sample]:
    """One sample per group of nearly equal shapes: the step of median duration.

    Near: equal tokens, requests and draft steps, context within some 20%.
    """
    groups: dict[tuple[int, ...], list[Sample]] = defaultdict(list)
    for shape, took_s in steps:
        context = round(4 * math.log2(128 * shape.requests + shape.context_tokens))
        groups[shape.tokens, shape.requests, shape.spec_steps, context].append((shape, took_s))
    chosen = []
    for group in groups.values():
        middle_s = statistics.median_low(took_s for _, took_s in group)
        chosen.append(next(sample for sample in group if sample[1] == middle_s))
    return sorted(chosen, key=lambda sample: _order(sample[0]))


def _order(shape: BatchShape) -> tuple[int, int, int]:
    return shape.requests, shape.tokens, shape.context_tokens


@contextmanager
def in_process_llm(model: str, engine_args: Mapping[str, Any]) -> Iterator[Any]:
    """An ``LLM`` whose engine core, and with it the scheduler, lives in this process.

    ``engine_args``: arguments of ``vllm.LLM``, the scheduler among them.
    """
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = None
    try:
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        llm = LLM(model, **{"disable_log_stats": True, **engine_args})
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            llm = None
            cleanup_dist_env_and_memory()
        if before is None:
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before
