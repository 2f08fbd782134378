# SPDX-License-Identifier: Apache-2.0
"""One workload on vLLM's real CPU engine and in the simulator, side by side.

The engine is vLLM's engine core with the built-in model as a costlier twin, in a process of its own
on one core. A loop adds each request when its arrival time has come and steps the engine; there is
no server, no tokenizer and no network, in the simulator neither. Step times are profiled first, on
the same engine with the same settings; the simulator knows that profile and the engine's limits,
and nothing of the live runs but, where a row says so, how their step times scattered.

Answers end where the workload says, by a stop token that the schedulers cannot foresee.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vllm_slo.bench.demo_load import CLASSES as DEMO_CLASSES
from vllm_slo.bench.demo_load import twin
from vllm_slo.bench.workload import SyntheticOptions, synthetic
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.config import profiles
from vllm_slo.core.step_time.model import BatchShape, Sample, StepTimeModel
from vllm_slo.sim.cluster import simulate, slo_of
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.hardware import Hardware, load_hardware
from vllm_slo.sim.jobs import Job, JobResult, Round, RoundResult, Stage
from vllm_slo.sim.measure import JobMeasure, measure_job
from vllm_slo.sim.systems import OURS, System, system
from vllm_slo.sim.text import STOP_TOKEN, own_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CONTEXT: Final = 1024
"""Prompt and answer of one request, tokens."""
MAX_MODEL_LEN: Final = 2048
"""The profile's chunks reach half of it (a live step may hold several prompts)."""
MAX_SEQS: Final = 64
STEP_TOKENS: Final = 2048
BLOCK_SIZE: Final = 32
KV_TOKENS: Final = 32_768
ENGINE: Final[Mapping[str, Any]] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": MAX_SEQS,
    "max_num_batched_tokens": STEP_TOKENS,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": KV_TOKENS // BLOCK_SIZE + 1,  # one of them is vLLM's null block
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,  # vLLM demands that share of the memory to be free
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
}
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",  # one core, as the engine of a server on two cores gets
}
SYSTEMS: Final = {
    "stock vLLM": system("fcfs", STEP_TOKENS),
    "vllm-slo": replace(OURS, token_budget=STEP_TOKENS),
}
CLASSES: Final = tuple(spec for spec in DEMO_CLASSES if spec.ttft_slowdown is not None)
QUANTILES: Final = (50, 90, 99)
SEEDS: Final = 10
"""Simulations per row with noise; their requests are pooled."""
WARMUP: Final = ((16, 12), (64, 12), (300, 12), (900, 12), (16, 540))
"""(prompt, answer) tokens. An engine's first steps are slow, and ours remembers the last 512."""


# --- the workload ---------------------------------------------------------------------------------


def hardware_of(profile: Path) -> Hardware:
    """The engine of the live runs, as the simulator knows it."""
    return load_hardware(
        profile,
        kv_tokens=KV_TOKENS,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_MODEL_LEN,
        frontend_s=0.0,
    )


def make_jobs(hardware: Hardware, load: float, duration_s: float, seed: int) -> list[Job]:
    """The demo's classes with an objective, Poisson; objectives relative to zero load.

    ``load``: offered tokens over what the engine could process if it did nothing but prefill.
    """
    lengths = (64, 128, 256, 512, 960)
    zero = ZeroLoad(
        tuple((n, hardware.zero_load_ttft_s(n)) for n in lengths), hardware.zero_load_tpot_s()
    )
    token_s = (zero.ttft_s(lengths[-1]) - zero.ttft_s(128)) / (lengths[-1] - 128)
    shares = sum(spec.share for spec in CLASSES)
    tokens = sum(s.share / shares * (s.prompt.mean + s.output.mean) for s in CLASSES)
    rate = load / (token_s * tokens * MAX_CONTEXT / 2048)
    options = SyntheticOptions(rate, duration_s, seed, CLASSES, max_context=MAX_CONTEXT)
    return [
        Job(
            one.request_id,
            one.slo_class,
            one.at_s,
            (
                Round(
                    one.prompt_tokens,
                    (Stage(one.output_tokens, one.tpot_slo_s or 0.0),),
                    one.ttft_slo_s or 0.0,
                ),
            ),
        )
        for one in synthetic(options, zero).requests
    ]


def read_jobs(path: Path) -> list[Job]:
    """Jobs as ``json.dumps([asdict(job) ...])`` wrote them."""

    def one_round(data: dict[str, Any]) -> Round:
        return Round(**{**data, "stages": tuple(Stage(**stage) for stage in data["stages"])})

    return [
        Job(**{**data, "rounds": tuple(one_round(one) for one in data["rounds"])})
        for data in json.loads(path.read_text())
    ]


# --- the real engine, in a process of its own -----------------------------------------------------


class Recorder:
    """Over a scheduler class: ends answers at their length, notes shape and time of each step.

    Times as in ``vllm_slo.engine.telemetry.recording``, so that they compare with a profile's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lengths: dict[str, int] = {}
        self.steps: list[Sample] = []
        self._began_s = 0.0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As the scheduler's; the step's time begins here."""
        self._began_s = time.perf_counter()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As the scheduler's; the step's time ends here."""
        from vllm_slo.engine.telemetry.recording import shape_of

        outputs = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        took_s = time.perf_counter() - self._began_s
        if scheduler_output.total_num_scheduled_tokens:
            self.steps.append((shape_of(scheduler_output), took_s))
        return outputs

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> Any:
        """As the scheduler's, with the stop token where the workload ends the answer."""
        if new_token_ids:
            last = request.num_output_tokens + 1 >= self.lengths[request.request_id]
            new_token_ids = [STOP_TOKEN if last else STOP_TOKEN + 1]
        return super()._update_request_with_output(  # type: ignore[misc]
            request, new_token_ids, is_stale
        )


def measure_profile(model: str, out: Path, time_limit_s: float) -> None:
    """Profile the step times of the engine.

    The coarser grid leaves more of the time to batches of decodes with contexts.
    """
    from vllm_slo.engine.serving.profile import profile

    profiles.save(profile(model, quick=True, time_limit_s=time_limit_s, **ENGINE), out)


def start_engine(model: str, ours: bool, profile: Path) -> Any:
    """vLLM's engine in this process."""
    from vllm import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler as Stock
    from vllm.v1.engine.llm_engine import LLMEngine

    base: Any = Stock
    config: dict[str, Any] = {}
    if ours:
        from vllm_slo.engine.scheduler import Scheduler as Ours

        base = Ours
        classes: dict[str, Any] = {spec.name: {} for spec in CLASSES}
        config = {"slo_config": {"profile": str(profile), "classes": classes}}
    recorded: Any = type("Recorded", (Recorder, base), {})
    arguments = EngineArgs(
        model,
        scheduler_cls=recorded,
        async_scheduling=False,
        additional_config=config,
        **ENGINE,
    )
    return LLMEngine.from_engine_args(arguments)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request on its way: its engine form, and how many tokens its answer has."""

    request: Any
    output_tokens: int


def prepare(
    engine: Any, name: str, prompt: list[int], output_tokens: int, extra: dict[str, Any] | None
) -> Prepared:
    """Everything about a request that can be done before it arrives."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=MAX_MODEL_LEN - len(prompt),
        stop_token_ids=[STOP_TOKEN],
        ignore_eos=True,
        detokenize=False,
        extra_args=extra,
    )
    request = engine.input_processor.process_inputs(
        name, {"prompt_token_ids": prompt}, params, engine.get_supported_tasks()
    )
    return Prepared(request, output_tokens)


@dataclass(slots=True)
class Replay:
    """The engine core and the scheduler within it, driven in real time."""

    core: Any
    scheduler: Any

    @classmethod
    def of(cls, engine: Any) -> Replay:
        """Drive the engine core of an in-process ``LLMEngine``."""
        client = engine.engine_core
        return cls(client, client.engine_core.scheduler)

    def add(self, one: Prepared, arrived_epoch_s: float) -> None:
        """Send a request; it arrived then, however long the step in progress took."""
        one.request.arrival_time = arrived_epoch_s
        self.scheduler.lengths[one.request.request_id] = one.output_tokens
        self.core.add_request(one.request)

    def warm_up(self, requests: Sequence[Prepared]) -> None:
        """Run requests without objectives to their end, and forget their steps."""
        for one in requests:
            self.add(one, time.time())
        while self.scheduler.has_requests():
            self.core.get_output()
        self.scheduler.steps.clear()
        gc.collect()
        gc.freeze()  # as vLLM does once its engine has started

    def run(self, requests: Sequence[tuple[float, Prepared]]) -> dict[str, dict[str, Any]]:
        """Send each request at its time (seconds, rising); what became of it, by name."""
        seen: dict[str, dict[str, Any]] = {
            one.request.request_id: {"times_s": [], "finished": False, "promised": None}
            for _, one in requests
        }
        left = deque(requests)
        begun_s, epoch_s = time.monotonic() + 0.1, time.time() + 0.1
        while left or self.scheduler.has_requests():
            now_s = time.monotonic() - begun_s
            while left and left[0][0] <= now_s:
                arrival_s, one = left.popleft()
                self.add(one, epoch_s + arrival_s)
            if not self.scheduler.has_requests():
                time.sleep(max(left[0][0] - now_s, 0.0))
                continue
            outputs = self.core.get_output().outputs
            now_s = time.monotonic() - begun_s
            for output in outputs:
                note(seen[output.request_id], output, now_s)
        return seen


def note(seen: dict[str, Any], output: Any, now_s: float) -> None:
    """Put what an engine core put out down to its request."""
    seen["times_s"] += [now_s] * len(output.new_token_ids)
    if output.finish_reason is not None:
        seen["finished"] = str(output.finish_reason) == "stop"
        report = (output.kv_transfer_params or {}).get("vllm_slo")
        seen["promised"] = report and report["promised"]


def replay(model: str, jobs: Sequence[Job], ours: bool, profile: Path, out: Path) -> None:
    """Serve the jobs in real time; writes ``out`` (JSON)."""
    engine = start_engine(model, ours, profile)
    one = Replay.of(engine)
    one.warm_up(
        [
            prepare(engine, f"warm-{n}", own_text(f"warm-{n}", prompt), answer, None)
            for n, (prompt, answer) in enumerate(WARMUP)
        ]
    )
    requests = []
    for number, job in enumerate(jobs):
        (asked,) = job.rounds
        # The simulator's prompts, so that both find the same in their prefix caches: nothing.
        prompt = own_text(f"{number}.0", asked.prompt_tokens)
        extra = slo_of(job, 0).to_extra_args()
        requests.append(
            (job.arrival_s, prepare(engine, job.job_id, prompt, asked.output_tokens, extra))
        )
    seen = one.run(requests)
    cache = engine.vllm_config.cache_config
    steps = [[*asdict(shape).values(), took_s] for shape, took_s in one.scheduler.steps]
    data = {
        "kv_tokens": (cache.num_gpu_blocks - 1) * cache.block_size,
        "requests": seen,
        "steps": steps,
    }
    out.write_text(json.dumps(data))
    engine.engine_core.shutdown()


def in_own_process(*arguments: object) -> None:
    """Run this script with ``arguments``; its output goes to ours where it fails."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: failed\n{done.stdout}{done.stderr}")


# --- what came out --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Live:
    """One live run: its jobs and the steps that served them."""

    results: tuple[JobResult, ...]
    steps: tuple[Sample, ...]


def read_live(path: Path, jobs: Sequence[Job]) -> Live:
    """What ``replay`` wrote."""
    data = json.loads(path.read_text())
    if data["kv_tokens"] != KV_TOKENS:
        raise SystemExit(f"the engine had {data['kv_tokens']} KV tokens, not {KV_TOKENS}")
    results = []
    for job in jobs:
        seen = data["requests"][job.job_id]
        times_s = tuple(seen["times_s"])
        got = RoundResult(job.arrival_s, times_s, seen["finished"], seen["promised"])
        results.append(JobResult(job, (got,)))
    steps = tuple((BatchShape(*map(int, row[:5])), float(row[5])) for row in data["steps"])
    return Live(tuple(results), steps)


@dataclass(frozen=True, slots=True)
class StepError:
    """Live steps against the profile.

    Attributes:
        bias: time of all steps over the time predicted for them.
        noise: standard deviation of actual over predicted, relative to its mean.
        steps: how many.
    """

    bias: float
    noise: float
    steps: int


def step_error(steps: Sequence[Sample], model: StepTimeModel) -> StepError:
    """How far the profile's predictions of ``steps`` are off."""
    actual = np.array([took_s for _, took_s in steps])
    predicted = np.array([model.predict_shape_s(shape) for shape, _ in steps])
    ratio = actual / predicted
    return StepError(
        float(actual.sum() / predicted.sum()), float(ratio.std() / ratio.mean()), len(steps)
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: ``runs`` are the measures of each run, all over the same jobs."""

    system: str
    kind: str
    runs: tuple[tuple[JobMeasure, ...], ...]

    @property
    def measures(self) -> list[JobMeasure]:
        """Of all runs."""
        return [measure for run in self.runs for measure in run]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a row says. Shares, seconds; counts are means over the runs of the row.

    Attributes:
        attainment: share of the jobs that kept their objectives.
        by_class: the same per class.
        ttft_s, tpot_s: percentiles (``QUANTILES``); TPOT is each request's worst window.
        finished: jobs that finished.
        promised: jobs that were promised their objectives; None where nothing is promised.
        kept: those of them that kept them.
    """

    attainment: float
    by_class: dict[str, float]
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    finished: float
    promised: float | None
    kept: float | None


def numbers(row: Row) -> Numbers:
    """Sum up a row, its runs pooled."""
    every = row.measures
    names = sorted({m.application for m in every})
    promises = [m for m in every if m.promised]
    promising = any(m.promised is not None for m in every)
    runs = len(row.runs)

    def share(members: Sequence[JobMeasure]) -> float:
        return sum(m.attained for m in members) / len(members)

    def percentiles(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(float(x) for x in np.percentile(values, QUANTILES))

    return Numbers(
        share(every),
        {name: share([m for m in every if m.application == name]) for name in names},
        percentiles([t for m in every for t in m.ttfts_s]),
        percentiles([t for m in every for t in m.tpots_s]),
        sum(m.finished for m in every) / runs,
        len(promises) / runs if promising else None,
        sum(not m.broken for m in promises) / runs if promising else None,
    )


def agreement(one: Row, other: Row) -> float:
    """Share of the jobs on which two rows agree (kept or missed), over all pairs of runs."""
    pairs = [
        a.attained == b.attained
        for left in one.runs
        for right in other.runs
        for a, b in zip(left, right, strict=True)
    ]
    return sum(pairs) / len(pairs)


@dataclass(frozen=True, slots=True)
class Difference:
    """One row against another, the reference.

    Attributes:
        points: difference in attainment, percentage points.
        class_points: the same per class.
        ttft, tpot: relative differences of the percentiles.
        same: share of the jobs on which both agree.
    """

    points: float
    class_points: dict[str, float]
    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    same: float


def difference(row: Row, reference: Row) -> Difference:
    """How far ``row`` is from ``reference``."""
    ours, theirs = numbers(row), numbers(reference)

    def relative(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
        return tuple(x / y - 1.0 for x, y in zip(a, b, strict=True))

    return Difference(
        100 * (ours.attainment - theirs.attainment),
        {n: 100 * (s - theirs.by_class[n]) for n, s in ours.by_class.items()},
        relative(ours.ttft_s, theirs.ttft_s),
        relative(ours.tpot_s, theirs.tpot_s),
        agreement(row, reference),
    )


# --- showing it -----------------------------------------------------------------------------------


def _ms(seconds: Sequence[float]) -> str:
    return " / ".join(f"{1e3 * s:,.0f}" for s in seconds)


def _count(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"


def main_table(rows: Sequence[Row]) -> list[list[str]]:
    """Head and lines of the table of all rows."""
    names = sorted({m.application for row in rows for m in row.measures})
    lines = [
        ["system", "run", "attained", *names, "TTFT ms p50 / p90 / p99",
         "TPOT ms p50 / p90 / p99", "finished", "promised", "promises kept"]
    ]  # fmt: skip
    for row in rows:
        n = numbers(row)
        lines.append(
            [row.system, row.kind, f"{n.attainment:.1%}",
             *(f"{n.by_class[name]:.0%}" for name in names), _ms(n.ttft_s), _ms(n.tpot_s),
             _count(n.finished), _count(n.promised), _count(n.kept)]
        )  # fmt: skip
    return lines


def error_table(pairs: Sequence[tuple[str, str, Difference]]) -> list[list[str]]:
    """Head and lines of the table of differences: (system, what against what, difference)."""
    names = sorted({name for _, _, one in pairs for name in one.class_points})
    lines = [
        ["system", "compared", "attained, points", *(f"{name}, points" for name in names),
         "TTFT p50 / p90 / p99", "TPOT p50 / p90 / p99", "same verdict"]
    ]  # fmt: skip

    def relative(values: Sequence[float]) -> str:
        return " / ".join(f"{100 * x:+.0f}%" for x in values)

    for name, what, one in pairs:
        lines.append(
            [name, what, f"{one.points:+.1f}",
             *(f"{one.class_points[n]:+.1f}" for n in names), relative(one.ttft),
             relative(one.tpot), f"{one.same:.0%}"]
        )  # fmt: skip
    return lines


def pooled(rows: Sequence[Row], kind: str) -> Row:
    """Rows of one system as one."""
    return Row(rows[0].system, kind, tuple(run for row in rows for run in row.runs))


def compare(rows: Sequence[Row]) -> list[tuple[str, str, Difference]]:
    """Each simulated row against all real runs of its system; then real runs among themselves."""
    found = []
    for name in dict.fromkeys(row.system for row in rows):
        mine = [row for row in rows if row.system == name]
        real = [row for row in mine if row.kind.startswith("real")]
        reference = pooled(real, "real")
        found += [
            (name, f"{row.kind}, against real", difference(row, reference))
            for row in mine
            if row not in real
        ]
        found += [
            (name, f"{row.kind}, against {real[0].kind}", difference(row, real[0]))
            for row in real[1:]
        ]
    return found


INK: Final = "#1b1f24"
COLOURS: Final = {"stock vLLM": "#d55e00", "vllm-slo": "#0072b2"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """CDFs of TTFT and TPOT, real against simulated, one line of panels per system."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.system for row in rows))
    figure = Figure(figsize=(10, 3.2 * len(names) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(names), 2, squeeze=False, sharex="col", sharey=True)
    for line, name in zip(panels, names, strict=True):
        for axes, what in zip(line, ("TTFT", "TPOT"), strict=True):
            _draw_cdfs(axes, [row for row in rows if row.system == name], what)
            axes.set_title(f"{name}: {what}", loc="left", fontsize=11)
        line[0].set_ylabel("requests (%)")
        line[1].legend(loc="lower right", frameon=False, fontsize=9)
    panels[-1][0].set_xlabel("TTFT (ms, from 1 s on in s; log scale)")
    panels[-1][1].set_xlabel("TPOT, each request's worst 10 tokens (ms, log scale)")
    figure.suptitle(
        "The same requests on the real engine and in the simulator", fontsize=12, x=0.01, ha="left"
    )
    figure.savefig(path, dpi=120)


def _draw_cdfs(axes: Axes, rows: Sequence[Row], what: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    looks: list[dict[str, Any]] = [
        {"color": INK, "linewidth": 1.1, "linestyle": "-"},
        {"color": "#7a7a7a", "linewidth": 1.1, "linestyle": "-"},
    ]
    styles = iter([(0, (1, 1.2)), "-", (0, (5, 1.5))])
    real = 0
    for row in rows:
        values = [
            1e3 * t for m in row.measures for t in (m.ttfts_s if what == "TTFT" else m.tpots_s)
        ]
        if row.kind.startswith("real"):
            look = looks[real % len(looks)]
            real += 1
        else:
            style = next(styles)
            look = {
                "color": COLOURS[row.system], "linestyle": style,
                "linewidth": 2.0 if style == "-" else 1.3,
            }  # fmt: skip
        shares = 100 * np.arange(1, len(values) + 1) / len(values)
        axes.step(np.sort(values), shares, where="post", label=row.kind, **look)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda ms, _: f"{ms:g}" if ms < 1e3 else f"{ms / 1e3:g} s")
    )
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(color="#d8dee4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_ylim(0, 101)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


# --- putting it together --------------------------------------------------------------------------


def simulated(
    name: str,
    kind: str,
    one: System,
    jobs: Sequence[Job],
    hardware: Hardware,
    *,
    noise: float = 0.0,
    bias: float = 1.0,
) -> Row:
    """A row of the simulator: ``SEEDS`` runs with noise, else one."""
    seeds = SEEDS if noise else 1
    runs = []
    for seed in range(seeds):
        # The profile's step times include what vLLM's scheduler takes.
        world = Conditions(bias=bias, noise=noise, seed=seed, overhead="none")
        runs.append(tuple(map(measure_job, simulate(jobs, one, hardware, world).results)))
    return Row(name, kind, tuple(runs))


def say(text: str) -> None:
    """Progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def go_live(
    args: argparse.Namespace, work: Path
) -> tuple[Hardware, list[Job], dict[str, list[Live]]]:
    """Profile the engine, make the jobs, replay them; what lies in ``work`` is not done again."""
    from rich.console import Console

    model = twin(args.parameters, Console())
    profile = work / "profile.json"
    if not profile.is_file():
        say("profiling the engine")
        in_own_process("--measure", model, profile, args.profile_s)
    hardware = hardware_of(profile)
    jobs = make_jobs(hardware, args.load, args.duration, args.seed)
    described = json.dumps([asdict(job) for job in jobs])
    asked = work / "jobs.json"
    if asked.is_file() and asked.read_text() != described:
        raise SystemExit(f"--work {work} holds runs of another workload: give another folder")
    asked.write_text(described)
    live: dict[str, list[Live]] = {name: [] for name in SYSTEMS}
    for repetition in range(args.repetitions):
        order = list(SYSTEMS) if repetition % 2 == 0 else list(reversed(SYSTEMS))
        for name in order:
            out = work / f"{name.replace(' ', '-')}-{repetition + 1}.json"
            if not out.is_file():
                say(f"{name}, run {repetition + 1}: {len(jobs)} requests in {args.duration:g} s")
                in_own_process("--replay", model, asked, name, profile, out)
            live[name].append(read_live(out, jobs))
    return hardware, jobs, live


def rows_of(
    hardware: Hardware, jobs: Sequence[Job], live: Mapping[str, Sequence[Live]]
) -> tuple[list[Row], dict[str, list[StepError]]]:
    """Every row of the table, and how far the profile was off in each live run."""
    errors = {
        name: [step_error(run.steps, hardware.step_time) for run in runs]
        for name, runs in live.items()
    }
    rows = []
    for name, one in SYSTEMS.items():
        for number, run in enumerate(live[name], 1):
            measures = tuple(map(measure_job, run.results))
            rows.append(Row(name, f"real, run {number}", (measures,)))
        every = step_error([s for run in live[name] for s in run.steps], hardware.step_time)
        noise = min(every.noise, 1.0)
        rows += [
            simulated(name, "simulated", one, jobs, hardware),
            simulated(name, "simulated, noise", one, jobs, hardware, noise=noise),
            simulated(
                name, "simulated, noise and bias", one, jobs, hardware, noise=noise, bias=every.bias
            ),
        ]
    return rows, errors


def describe(
    hardware: Hardware,
    jobs: Sequence[Job],
    profile: profiles.ProfileReport,
    errors: Mapping[str, Sequence[StepError]],
    args: argparse.Namespace,
) -> str:
    """What was run, and how well the profile fits, in words."""
    ratios = [took_s / profile.model.predict_shape_s(shape) for shape, took_s in profile.samples]
    lone_s = hardware.zero_load_tpot_s()
    parts = ", ".join(
        f"{spec.name} (TTFT {spec.ttft_slowdown:g}x, TPOT {spec.tpot_multiple:g}x zero load; "
        f"{sum(job.application == spec.name for job in jobs)} requests)"
        for spec in CLASSES
    )
    prompt = np.mean([job.rounds[0].prompt_tokens for job in jobs])
    output = np.mean([job.rounds[0].output_tokens for job in jobs])
    live = "; ".join(
        f"{name}, run {number}: bias {one.bias:.3f}, noise {one.noise:.1%} over {one.steps:,} steps"
        for name, runs in errors.items()
        for number, one in enumerate(runs, 1)
    )
    return f"""
Workload: {len(jobs)} requests, Poisson over {args.duration:g} s ({len(jobs) / args.duration:.2f}/s,
seed {args.seed}), on average {prompt:.0f} prompt and {output:.0f} answer tokens:
{parts}.
Engine: twin of {args.parameters / 1e6:.0f}M parameters, at most {STEP_TOKENS} tokens and {MAX_SEQS}
requests a step, {KV_TOKENS:,} KV tokens, synchronous stepping. A lone step takes
{1e3 * lone_s:.1f} ms.

Profile: {profile.fit.n} shapes, R² {profile.fit.r2:.4f}; predictions are off by
{np.std(ratios):.1%} (standard deviation), at worst {profile.fit.worst_residual_ratio:.1%}. Live
steps against it (bias: time of all steps over what was predicted; noise: standard deviation of
actual over predicted, relative to its mean):
{live}.

*simulated*: the profile alone. *noise*: step times scatter as the live ones did (lognormal,
independent; {SEEDS} seeds, pooled; counts are means). *noise and bias*: they are longer by the live
bias, too, which the schedulers are not told, so that what remains is the simulator's own error.
TPOT is each request's worst window of 10 tokens.
""".strip()


NOTE: Final = """
The lines that compare real runs say how far two runs of the same requests on the same engine lie
apart: no simulator can be asked for less. *same verdict*: share of the requests that kept their
objectives in both or missed them in both. The step times of the profile hold what vLLM's own
scheduler takes, so the simulator charges none; what ours takes beyond that is left out (see
scheduler_overhead.md) but for the bias.

Not covered: memory pressure (the KV cache holds all requests), prefix caching across requests,
asynchronous scheduling, an HTTP frontend, more than one replica.
"""


def main() -> None:
    """Measure, simulate, compare, write."""
    args = parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.measure:
        model, out, limit_s = args.measure
        measure_profile(model, Path(out), float(limit_s))
        return
    if args.replay:
        model, asked, name, profile, out = args.replay
        replay(model, read_jobs(Path(asked)), name == "vllm-slo", Path(profile), Path(out))
        return
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        hardware, jobs, live = go_live(args, work)
        say("simulating")
        rows, errors = rows_of(hardware, jobs, live)
        report(
            args, rows, describe(hardware, jobs, profiles.load(work / "profile.json"), errors, args)
        )
    say("done")


def report(args: argparse.Namespace, rows: Sequence[Row], text: str) -> None:
    """Write the result, or with ``--smoke`` only show it."""
    from common import RESULTS, markdown, write_result

    table, wrong = main_table(rows), error_table(compare(rows))
    shown = "\n\n".join(
        [text, markdown(table[0], table[1:]), "Error:", markdown(wrong[0], wrong[1:])]
    )
    if args.smoke:
        print(shown)
        if args.work:
            draw(rows, args.work / "sim_validation.png")
        return
    note = f"![CDFs of TTFT and TPOT, real against simulated](sim_validation.png)\n{NOTE}"
    write_result("sim_validation", __doc__ or "", shown, note=note)
    draw(rows, RESULTS / "sim_validation.png")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=100e6, help="size of the twin")
    parser.add_argument("--load", type=float, default=0.6, help="offered tokens over capacity")
    parser.add_argument("--duration", type=float, default=50.0, help="seconds of arrivals")
    parser.add_argument("--repetitions", type=int, default=2, help="live runs of each system")
    parser.add_argument("--profile-s", type=float, default=60.0, help="seconds of profiling")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="keep raw data here; runs found are not redone")
    parser.add_argument("--smoke", action="store_true", help="seconds of each; writes no result")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--replay", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.smoke:
        args.duration, args.profile_s, args.repetitions = 8.0, 15.0, 1
    return args


if __name__ == "__main__":
    main()
