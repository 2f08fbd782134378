# SPDX-License-Identifier: Apache-2.0
"""Measure a model's step times on the real engine and fit the step-time model to them.

``vllm-slo profile MODEL`` ends here.  vLLM is imported when something is measured, not when
this module is.
"""

import argparse
import hashlib
import importlib
import itertools
import json
import math
import os
import platform
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_slo.config import profiles
from vllm_slo.config.profiles import ProfileKey, ProfileReport
from vllm_slo.core.step_time.fit import fit
from vllm_slo.core.step_time.model import BatchShape, Sample, StepTimeModel
from vllm_slo.errors import ProfileError, VllmSLOError

Progress = Callable[[int, int], None]

# --- whose profile ------------------------------------------------------------------------------


def profile_key(vllm_config: Any) -> ProfileKey:
    """The set-up of a running engine's ``VllmConfig`` (after the KV cache was sized)."""
    from vllm import __version__

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    if model.quantization:
        dtype += f"-{model.quantization}"
    if vllm_config.cache_config.cache_dtype != "auto":
        dtype += f"-kv.{vllm_config.cache_config.cache_dtype}"
    return ProfileKey(
        device=device_name(),
        model=Path(model.model).name,
        model_hash=_config_hash(model.hf_config),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        dtype=dtype,
        vllm_version=__version__,
        block_size=vllm_config.cache_config.block_size or 0,
    )


def find_profile(vllm_config: Any, explicit_path: str | Path | None = None) -> StepTimeModel | None:
    """The measured step-time model of this engine, or None where there is none in the cache.

    Raises ProfileError if ``explicit_path`` is of another set-up, or a file is broken.
    """
    return profiles.find(profile_key(vllm_config), explicit_path)


def device_name() -> str:
    """Name of the accelerator; for CPUs the model's name and the machine's core count."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return f"{_cpu_name()} x{os.cpu_count()}"
    return str(current_platform.get_device_name())


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine() or "cpu")


def _config_hash(hf_config: Any) -> str:
    """Fingerprint of config.json: layers and sizes, not where it lies or who wrote it."""
    volatile = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}
    values = {k: v for k, v in hf_config.to_dict().items() if k not in volatile}
    text = json.dumps(values, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()


# --- what to run --------------------------------------------------------------------------------


MARGIN = 64
"""Tokens a request may generate while it is measured."""
DECODE_STEPS = 5
WORST_R2 = 0.5
"""A worse fit does not enter the cache: a server that learns from nothing does better."""


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
        """Tokens to compute."""
        climbed = self.chunk_context + sum(self.chunks)
        return self.batches[0] * self.decode_context + len(self.batches) * climbed


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can hold: requests, tokens per step, tokens per request, KV tokens."""

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


def scenarios(limits: Limits, *, fill_tokens: int, quick: bool = False) -> list[Scenario]:
    """The grid: prefill chunks, decode batches and both at once, at short to long contexts.

    fill_tokens: the most that one scenario may spend on preparing its decodes.  Cheapest first,
    so that a run that is cut short still covers all kinds.
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


# --- running it ---------------------------------------------------------------------------------


class _Driver:
    """Runs scenarios on an in-process engine; the scheduler notes shapes and times."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        config = self.engine.vllm_config
        self.limits = Limits(
            requests=config.scheduler_config.max_num_seqs,
            step_tokens=self.scheduler.max_num_scheduled_tokens,
            request_tokens=config.model_config.max_model_len,
            kv_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        )
        self._vocabulary = config.model_config.get_vocab_size()
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
        """Prefill speed, from a few steps that also warm the engine up and are forgotten."""
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


def profile(
    model: str,
    *,
    quick: bool = False,
    time_limit_s: float | None = None,
    on_progress: Progress | None = None,
    **engine_args: Any,
) -> ProfileReport:
    """Load ``model`` into an engine in this process, measure it, fit, and unload it.

    engine_args: anything ``vllm.LLM`` takes; give the ones the server will run with.  Prefix
    caching and asynchronous scheduling are off while measuring (see RecordingScheduler).
    time_limit_s: of the measuring itself, 25 s if quick, else 300 s.
    """
    if time_limit_s is None:
        time_limit_s = 25.0 if quick else 300.0
    with _in_process_llm(model, engine_args) as llm:
        samples = measure(llm, quick=quick, time_limit_s=time_limit_s, on_progress=on_progress)
        key = profile_key(llm.llm_engine.vllm_config)
    return ProfileReport(key, fit(samples), tuple(samples))


@contextmanager
def _in_process_llm(model: str, engine_args: dict[str, Any]) -> Iterator[Any]:
    """An ``LLM`` whose engine core, and with it the scheduler, lives in this process."""
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    llm = None
    try:
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        from vllm_slo.engine.telemetry.recording import RecordingScheduler

        llm = LLM(
            model,
            **{"skip_tokenizer_init": True, "disable_log_stats": True, **engine_args},
            scheduler_cls=RecordingScheduler,
            async_scheduling=False,
            enable_prefix_caching=False,
        )
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


# --- showing it ---------------------------------------------------------------------------------


def draw(report: ProfileReport, path: Path) -> Path:
    """Draw measured against predicted step times as a PNG.

    Raises ProfileError where matplotlib is missing.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
        ticker = importlib.import_module("matplotlib.ticker")
    except ImportError as error:
        raise ProfileError(
            "drawing needs matplotlib: pip install 'vllm-slo[bench]', or leave --plot out"
        ) from error
    figure = figures.Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot()
    kinds = {
        "decode": lambda s: s.tokens == s.requests,
        "prefill": lambda s: s.requests == 1 < s.tokens,
        "mixed": lambda s: 1 < s.requests < s.tokens,
    }
    for name, belongs in kinds.items():
        points = [(report.model.predict_shape_s(s), t) for s, t in report.samples if belongs(s)]
        if points:
            predicted, measured = zip(*points, strict=True)
            axes.scatter(
                [1e3 * x for x in predicted], [1e3 * y for y in measured], s=14, label=name
            )
    times = [1e3 * t for _, t in report.samples]
    axes.plot([min(times), max(times)], [min(times), max(times)], color="grey", linewidth=1)
    axes.set(
        xscale="log", yscale="log", xlabel="predicted (ms)", ylabel="measured (ms)",
        title=f"{report.key.model}: step time, R\u00b2 = {report.fit.r2:.4f}",
    )  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


def table(report: ProfileReport) -> Any:
    """The fit as a ``rich`` table: this model, and what leaving attention terms out would cost."""
    from rich.table import Table

    low, high = report.model.terms
    shown = Table(title=f"{report.key.model} on {report.key.device}, {report.fit.n} shapes")
    for heading in ("terms", "R\u00b2", "worst residual", "worst ratio"):
        shown.add_column(heading, justify="left" if heading == "terms" else "right")
    fits = {
        "tokens, context, pairs": report.fit,
        "tokens, context": fit(report.samples, pair_term=False),
        "tokens only": fit(report.samples, kv_term=False, pair_term=False),
    }
    for name, one in fits.items():
        shown.add_row(
            name, f"{one.r2:.4f}", f"{1e3 * one.worst_residual_s:.2f} ms",
            f"{100 * one.worst_residual_ratio:.1f} %",
        )  # fmt: skip
    shown.caption = (
        f"step = max({1e3 * low[2]:.3f} ms + {1e6 * low[0]:.2f} us/token, "
        f"{1e3 * high[2]:.3f} ms + {1e6 * high[0]:.2f} us/token)\n"
        f"+ {1e9 * report.model.kv_s:.2f} ns/context token + "
        f"{1e9 * report.model.pair_s:.4f} ns/query-key pair"
    )
    return shown


# --- command line -------------------------------------------------------------------------------

_ENGINE_FLAGS: dict[str, dict[str, Any]] = {
    "--dtype": {},
    "--tensor-parallel-size": {"type": int},
    "--pipeline-parallel-size": {"type": int},
    "--block-size": {"type": int},
    "--kv-cache-dtype": {},
    "--quantization": {},
    "--max-model-len": {"type": int},
    "--max-num-seqs": {"type": int},
    "--max-num-batched-tokens": {"type": int},
    "--gpu-memory-utilization": {"type": float},
    "--load-format": {},
    "--enforce-eager": {"action": "store_true"},
    "--trust-remote-code": {"action": "store_true"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``vllm-slo profile``."""
    parser.add_argument("model", help="model name or folder, as for 'vllm serve'")
    parser.add_argument("--quick", action="store_true", help="a coarser grid, under a minute")
    parser.add_argument("--out", type=Path, help="write here, not into the cache folder")
    parser.add_argument("--plot", type=Path, help="PNG of measured against predicted times")
    engine = parser.add_argument_group("engine", "as for 'vllm serve': give what you serve with")
    for flag, options in _ENGINE_FLAGS.items():
        engine.add_argument(flag, default=argparse.SUPPRESS, **options)


def run(args: argparse.Namespace) -> int:
    """Measure, store, show.  Returns the exit status; errors of ours become one line."""
    from rich.console import Console
    from rich.progress import Progress as Bar

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its log would tear the progress bar
    console = Console()
    names = [flag.removeprefix("--").replace("-", "_") for flag in _ENGINE_FLAGS]
    engine_args = {name: getattr(args, name) for name in names if hasattr(args, name)}
    try:
        with Bar(console=console, transient=True) as bar:
            task = bar.add_task(f"measuring {args.model}", total=None)
            report = profile(
                args.model,
                quick=args.quick,
                on_progress=lambda done, total: bar.update(task, completed=done, total=total),
                **engine_args,
            )
        console.print(table(report))
        if args.out is None and report.fit.r2 < WORST_R2:
            raise ProfileError(
                f"R\u00b2 is {report.fit.r2:.2f}: something else kept this machine busy, so "
                "nothing was stored; measure on a quiet machine, or keep this one with --out"
            )
        console.print(f"profile: {profiles.save(report, args.out)}", soft_wrap=True)
        if args.plot is not None:
            console.print(f"picture: {draw(report, args.plot)}", soft_wrap=True)
    except VllmSLOError as error:
        line = f"vllm-slo profile: {error}"
        Console(stderr=True).print(line, style="red", soft_wrap=True, markup=False)
        return 2
    return 0
