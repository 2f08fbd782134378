# SPDX-License-Identifier: Apache-2.0
"""The model and the load of ``vllm-slo demo``, chosen for this machine.

The model is a costlier twin of the built-in one: it gives the same answers in the time of a larger
model, so that steps take as long as usual and not a few milliseconds of Python. Its size follows
from the machine's speed of multiplying matrices. The load follows from how much stock vLLM can
serve: its scheduler runs in virtual time, with the step times that were just measured.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vllm_slo import tiny
from vllm_slo.bench.client import ClientOptions
from vllm_slo.bench.demo_servers import KV_BYTES, MAX_CONTEXT, MAX_SEQS, STEP_TOKENS
from vllm_slo.bench.endpoint import ServerTarget
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.planned import PlannedRequest, Workload
from vllm_slo.bench.probes import measure_step, measure_zero_load
from vllm_slo.bench.workload import (
    DEFAULT_CLASSES,
    ClassSpec,
    WorkloadOptions,
    planned,
    synthetic,
)
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.config import profiles
from vllm_slo.config.serve_args import runs_on_cpu

if TYPE_CHECKING:
    from rich.console import Console

VOCABULARY: Final = 2048
CLASSES: Final = tuple(
    replace(spec, tpot_multiple={"chat": 6.0, "code": 3.0, "summary": 6.0}.get(spec.name))
    for spec in DEFAULT_CLASSES
)
"""The bench's classes with TPOT objectives of three and six lone steps."""
ONLINE: Final = tuple(spec for spec in CLASSES if spec.ttft_slowdown is not None)
(BATCH,) = (spec for spec in CLASSES if spec.ttft_slowdown is None)

TOKEN_S: Final = 1e-3
"""Wanted time of a prompt token, seconds; then steps of about 15 ms serve two requests/s."""
SIZES: Final = tuple(round(12.5e6 * 2 ** (i / 2)) for i in range(11))
"""Parameters of the twins, 12.5 to 400 million; only a few sizes, because each is kept on disk."""
GPU_SIZE: Final = 400e6
"""Parameters on a GPU, where the size does not follow from the CPU's speed."""
LENGTH_SCALE: Final = 0.3
"""Factor on the bench's lengths: prompts of 100 to 300 tokens, with a TTFT of tens of steps."""
LOAD: Final = 1.3
"""Load as a multiple of what stock vLLM can serve."""
ATTAINMENT: Final = 0.9
"""Share of objectives that must be kept at a load that can be served."""
REQUESTS: Final = 105
"""Least number of requests with an objective."""
SHORTEST_S: Final = 45.0
LONGEST_S: Final = 75.0
BATCH_SHARE: Final = 0.15
"""Tokens of the backlog without objectives, as a share of what the machine can process."""
BATCH_AT_S: Final = 2.0
TOGETHER: Final = 16
"""Requests that decode together to measure the cost of one more."""
WINDOWS: Final = 4
WINDOW_S: Final = 100.0
"""Windows that stock vLLM serves in virtual time: how many, and seconds of each."""


# --- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """A twin of the built-in model, and the server's options for it."""

    folder: Path
    options: tuple[str, ...] = ()


def choose_model(parameters: float | None, console: Console) -> Model:
    """A twin with a size for this machine, or with ``parameters``.

    A CPU without bfloat16 instructions serves it in float32, which is faster there.
    """
    if not runs_on_cpu():
        return Model(twin(GPU_SIZE if parameters is None else parameters, console))
    console.print("measuring this machine ...")
    speed = _child("vllm_slo.tiny.speed", "--parameters")
    if parameters is None:
        wanted = speed["flops_per_s"] * TOKEN_S / 2  # a parameter takes a product and a sum
        parameters = min(SIZES, key=lambda size: abs(math.log(size / wanted)))
    console.print(f"{speed['flops_per_s'] / 1e9:.0f} GFLOP/s in {speed['dtype']}")
    return Model(twin(parameters, console), (f"--dtype={speed['dtype']}",))


def twin(parameters: float, console: Console) -> Path:
    """The built-in target with ``parameters`` parameters, written once into the cache folder."""
    folder = profiles.cache_dir() / "models" / f"tiny-{parameters / 1e6:.0f}m"
    if not (folder / "model.safetensors").is_file():
        console.print(
            f"writing a twin of the built-in model with {parameters / 1e6:.0f}M parameters"
        )
        command = [sys.executable, "-m", "vllm_slo.tiny.twin", str(tiny.path("target"))]
        done = subprocess.run(
            [*command, str(folder), "--parameters", str(parameters)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BenchError("--parameters", _last_line(done))
    return folder


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    text = done.stderr.strip() or f"exit status {done.returncode}"
    return text.splitlines()[-1]


def _child(module: str, option: str, question: str = "") -> Any:
    """The JSON that a module prints in another process; BenchError names ``option``."""
    done = subprocess.run(
        [sys.executable, "-m", module], input=question, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchError(option, _last_line(done))
    return json.loads(done.stdout.splitlines()[-1])


# --- the machine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a server's steps, as its client sees them.

    Attributes:
        lone_s: a step that decodes one request.
        together_s: a step that decodes ``TOGETHER`` requests.
        zero: latency of a lone request.
    """

    lone_s: float
    together_s: float
    zero: ZeroLoad

    @property
    def prompt_token_s(self) -> float:
        """Seconds of one more prompt token."""
        points = self.zero.ttft_points
        (few, soon_s), (many, late_s) = points[0], points[-1]
        return max((late_s - soon_s) / max(1, many - few), 1e-7)

    def question(self) -> dict[str, Any]:
        """The machine, in the form of `vllm_slo.sim.stock_load`."""
        tokens, first_s = self.zero.ttft_points[0]
        decode_s = max(0.0, (self.together_s - self.lone_s) / (TOGETHER - 1))
        decode = (decode_s, 0.0, max(self.lone_s - decode_s, 0.0))
        step_s = decode[2] + decode_s * tokens
        frontend_s = min(max(0.0, first_s - step_s), self.lone_s)
        prompt_s = self.prompt_token_s
        prompt = (prompt_s, 0.0, max(0.0, first_s - frontend_s - prompt_s * tokens))
        return {"step_time": [decode, prompt], "frontend_s": frontend_s}


def measure_steps(target: ServerTarget, client: ClientOptions) -> StepTimes:
    """Measure an idle server, in about ten seconds."""
    zero = measure_zero_load(target, _longest(LENGTH_SCALE), client, repeats=3)
    return StepTimes(zero.tpot_s, measure_step(target, TOGETHER, client, repeats=2), zero)


def _longest(length_scale: float) -> int:
    """Most tokens of a prompt and its answer: twice the mean of the longest class."""
    return min(
        MAX_CONTEXT,
        round(2 * length_scale * max(spec.prompt.mean + spec.output.mean for spec in ONLINE)),
    )


# --- the load ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DemoLoad:
    """The requests to every server, and how their rate was found.

    Attributes:
        carried: requests with an objective per second that stock vLLM can serve.
        load: rate of arrivals as a multiple of ``carried``.
    """

    workload: Workload
    carried: float
    load: float

    def __str__(self) -> str:
        backlog = sum(request.slo_class == BATCH.name for request in self.workload.requests)
        asking = len(self.workload.requests) - backlog
        rate = asking / self.workload.duration_s
        return (
            f"stock vLLM can serve {self.carried:.2f} requests/s here ({ATTAINMENT:.0%} of "
            f"objectives kept, found in virtual time)\n"
            f"sending {asking} requests with objectives, {rate:.2f}/s ({self.load:g} times as "
            f"many), and a backlog of {backlog} without"
        )


def choose_load(
    steps: StepTimes, seed: int, load: float = LOAD, duration_s: float | None = None
) -> DemoLoad:
    """A load of ``load`` times what stock vLLM can serve, and a backlog of batch work.

    It lasts until ``REQUESTS`` are sent, within bounds; if they would take longer, prompts and
    answers are shorter.

    Raises:
        BenchError: an option is out of range.
    """
    scale = LENGTH_SCALE
    carried = find_carried(steps, scale)
    sent = load * carried * (duration_s or LONGEST_S)
    if sent < REQUESTS and duration_s is None:
        scale *= sent / REQUESTS
        carried = find_carried(steps, scale)
    rate = load * carried
    lasts_s = duration_s or min(max(REQUESTS / rate, SHORTEST_S), LONGEST_S)
    online = synthetic(_options(rate, lasts_s, seed, scale), steps.zero)
    requests = sorted(
        [*online.requests, *backlog(steps, lasts_s, seed, scale)], key=lambda r: r.at_s
    )
    return DemoLoad(replace(online, name="demo", requests=tuple(requests)), carried, load)


def _options(rate: float, duration_s: float, seed: int, scale: float) -> WorkloadOptions:
    return WorkloadOptions(
        rate=rate,
        duration_s=duration_s,
        seed=seed,
        classes=ONLINE,
        max_context=_longest(scale),
        length_scale=scale,
    )


def backlog(steps: StepTimes, duration_s: float, seed: int, scale: float) -> list[PlannedRequest]:
    """Batch work that is sent at once, for a share of what the machine can process."""
    tokens = BATCH_SHARE * duration_s / steps.prompt_token_s
    count = max(1, round(tokens / scale / (BATCH.prompt.mean + BATCH.output.mean)))
    rng = np.random.default_rng([seed, 3])
    prompts, outputs = (what.sample(rng, count, scale) for what in (BATCH.prompt, BATCH.output))
    return [
        planned(f"{BATCH.name}-{i}", BATCH_AT_S, BATCH, lengths, _longest(scale), steps.zero)
        for i, lengths in enumerate(zip(prompts, outputs, strict=True))
    ]


def find_carried(steps: StepTimes, scale: float) -> float:
    """Requests with an objective per second at which stock vLLM attains ``ATTAINMENT``."""
    tokens = _mean_tokens(ONLINE) * scale
    guess = 0.3 / (steps.prompt_token_s * tokens)
    windows = [
        synthetic(_options(guess, WINDOW_S, 1000 + seed, scale), steps.zero).requests
        for seed in range(WINDOWS)
    ]
    question: Mapping[str, Any] = {
        **steps.question(),
        "kv_tokens": KV_BYTES >> 14,  # more than enough, because memory is not tested
        "max_num_seqs": MAX_SEQS,
        "max_model_len": MAX_CONTEXT,
        "step_tokens": STEP_TOKENS,
        "attainment": ATTAINMENT,
        "windows": [
            [
                {
                    "at_s": request.at_s,
                    "prompt_tokens": request.prompt_tokens,
                    "output_tokens": request.output_tokens,
                    "ttft_s": request.ttft_slo_s,
                    "tpot_s": request.tpot_slo_s,
                }
                for request in window
            ]
            for window in windows
        ],
    }
    speedup = _child("vllm_slo.sim.stock_load", "--load", json.dumps(question))["speedup"]
    return float(speedup) * guess


def _mean_tokens(classes: Sequence[ClassSpec]) -> float:
    """Mean tokens of prompt and answer, at the bench's lengths."""
    shares = sum(spec.share for spec in classes)
    return sum(spec.share * (spec.prompt.mean + spec.output.mean) for spec in classes) / shares


def rate_at(load: float, zero: ZeroLoad) -> float:
    """Requests/s of all classes that offer ``load`` times the tokens this machine can process.

    Lengths are half of the bench's. A token costs what one more prompt token adds to a lone
    request's TTFT. On a fast device that may be nothing; then a request costs its share of the
    steps in which it decodes.
    """
    low, high = MAX_CONTEXT // 8, MAX_CONTEXT - 64
    token_s = (zero.ttft_s(high) - zero.ttft_s(low)) / (high - low)
    scale = MAX_CONTEXT / 2048
    output = sum(spec.share * spec.output.mean * scale for spec in DEFAULT_CLASSES)
    tokens = _mean_tokens(DEFAULT_CLASSES) * scale
    return load / max(token_s * tokens, output * zero.tpot_s / MAX_SEQS)
