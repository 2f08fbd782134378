# SPDX-License-Identifier: Apache-2.0
"""Recorded workloads: the Azure 2023 traces (SLOs-Serve, figure 8) and AdaServe's own workload.

The Azure files are in github.com/Azure/AzurePublicDataset (CC-BY 4.0), AdaServe's in its artifact
(Apache-2.0, ``emission_*.json``). They are looked for in `data_folder`. Without them a seeded
stand-in with the same statistics is made; ``Workload.source`` says so. ``vllm_slo.traces``
reads files of these and other formats.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np

from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.planned import PlannedRequest, Workload
from vllm_slo.bench.workload import (
    Lengths,
    WorkloadOptions,
    planned,
    positive,
    scaled_lengths,
)
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.files import Format, detect, format_name, read
from vllm_slo.traces.request import TraceRequest

ADASERVE_ZERO_LOAD_TPOT_S: Final = 0.040 / 1.2
"""Zero-load step of AdaServe's machines, seconds: 1.2 times it "aligns with" 40 ms (6.1)."""

AzureKind = Literal["code", "conv"]
_AZURE_CLASS: Final[Mapping[str, str]] = {"code": "code", "conv": "chat"}
_WITHOUT_OBJECTIVES: Final[tuple[Format, ...]] = ("azure", "burstgpt", "mooncake")
_ADASERVE_CLASS: Final[Mapping[float, str]] = {-50.0: "chatbot", -150.0: "summarization"}


@dataclass(frozen=True, slots=True)
class Recording:
    """Rows in order of time.

    Attributes:
        source: what they were read or made from.
        left_out: rows of the file without prompt or output tokens, such as BurstGPT's failures.
    """

    source: str
    format: Format
    rows: list[TraceRequest]
    left_out: int = 0


DATA_VARIABLE: Final = "VLLM_SLO_DATA"


def data_folder() -> Path | None:
    """The folder of recorded traces and prompts; None if there is none.

    The variable ``VLLM_SLO_DATA`` names it; an empty value means none. If it is not set, it is
    ``../shared/data`` beside the repository.
    """
    named = os.environ.get(DATA_VARIABLE)
    beside = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = beside if named is None else Path(named)
    return folder if named != "" and folder.is_dir() else None


PROMPTS: Final[Mapping[str, tuple[str, str]]] = {
    "HumanEval": ("HumanEval.jsonl.gz", "prompt"),
    "GSM8K": ("gsm8k_test.jsonl", "question"),
    "Spec-Bench": ("spec_bench.jsonl", "turns"),
}
"""Public collections of prompts: file, and field of each of its lines."""


def public_prompts(collection: str) -> list[str]:
    """Prompts of one of `PROMPTS`, the first turns of conversations; empty without its file."""
    name, field = PROMPTS[collection]
    path = data_file(name)
    if path is None:
        return []
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    prompts = [json.loads(line)[field] for line in text.splitlines() if line.strip()]
    return [prompt if isinstance(prompt, str) else prompt[0] for prompt in prompts]


def data_file(name: str) -> Path | None:
    """A file of `data_folder`; None if it is not there."""
    folder = data_folder()
    path = folder / name if folder else None
    return path if path is not None and path.is_file() else None


def read_recording(path: Path, slo_class: str | None = None) -> Recording:
    """The usable requests of a file, by time.

    ``slo_class`` is the class of every row of a file without objectives. None: the file is
    AdaServe's, whose objectives give the class.

    Raises:
        TraceError: the file cannot be read or is of another format; names format, line and field.
    """
    form = detect(path)
    wanted: tuple[Format, ...] = ("adaserve",) if slo_class is None else _WITHOUT_OBJECTIVES
    if form not in wanted:
        names = ", ".join(map(format_name, wanted))
        raise TraceError(f"{path} looks like {format_name(form)}; this workload takes {names}")
    rows, left_out = [], 0
    for row in read(path, form):
        if row.prompt_tokens and row.output_tokens:
            name = adaserve_class(row.slo_ratio or 0.0) if slo_class is None else slo_class
            rows.append(msgspec.structs.replace(row, slo_class=name))
        else:
            left_out += 1
    if not rows:
        more = " with prompt and output tokens" if left_out else ""
        raise TraceError(f"{path} has no rows{more}")
    return Recording(path.name, form, sorted(rows, key=lambda r: r.at_s), left_out)


def left_out_line(source: str, count: int) -> str:
    """A note on rows that were left out."""
    rows = "1 row" if count == 1 else f"{count} rows"
    return (
        f"{source}: {rows} with 0 prompt or output tokens {'is' if count == 1 else 'are'} left out"
    )


def adaserve_class(ratio: float) -> str:
    """The class of a request of AdaServe's workload, by its ``slo_ratio``."""
    return "copilot" if ratio > 0 else _ADASERVE_CLASS.get(ratio, f"tpot-{-ratio:g}ms")


def standin_azure(kind: AzureKind, seed: int) -> list[TraceRequest]:
    """An hour with the real trace's rate, lengths and bursts (mean and spread)."""
    rng = np.random.default_rng([seed, 10 if kind == "code" else 11])
    if kind == "code":  # long silences between dense bursts
        count, prompt, output, burst = 8819, Lengths(2048, 1974), Lengths(28, 60, 6), 70
    else:  # nearly Poisson
        count, prompt, output, burst = 19366, Lengths(1155, 1109), Lengths(211, 163, 7), 4
    bursts = max(1, count // burst)
    spread_s = 3.0 if kind == "code" else 1.0
    starts = rng.uniform(0, 3500, bursts)
    times = np.sort(rng.choice(starts, count) + rng.exponential(spread_s, count))
    prompts = prompt.sample(rng, count)
    outputs = output.sample(rng, count)
    return [
        TraceRequest(float(t), min(p, 14050), min(o, 1899), _AZURE_CLASS[kind])
        for t, p, o in zip(times, prompts, outputs, strict=True)
    ]


def standin_adaserve(seed: int) -> list[TraceRequest]:
    """Six minutes like ``emission_fluctuating``: each class has its peak at another time."""
    rng = np.random.default_rng([seed, 12])
    shapes = (
        ("copilot", 1.2, 495, (195.0, 45.0), Lengths(440, 237)),
        ("chatbot", -50.0, 486, (95.0, 50.0), Lengths(88, 81)),
        ("summarization", -150.0, 464, (265.0, 55.0), Lengths(3878, 1800, 1, 9204)),
    )
    rows = []
    for name, ratio, count, (peak_s, width_s), prompt in shapes:
        times = np.clip(rng.normal(peak_s, width_s, count), 0, 360)
        lengths = prompt.sample(rng, count)
        rows += [
            TraceRequest(float(t), n, 256, name, slo_ratio=ratio)
            for t, n in zip(times, lengths, strict=True)
        ]
    return sorted(rows, key=lambda r: r.at_s)


def _needed(options: WorkloadOptions, rate: float, available: int) -> int:
    count = max(1, round(rate * options.duration_s))
    if count > available:
        raise BenchError(
            "--duration",
            f"{rate:g} requests/s for {options.duration_s:g} s are {count} requests; "
            f"the trace has {available}",
        )
    return count


def _fit_time(
    rows: Sequence[TraceRequest], count: int, options: WorkloadOptions, rng: np.random.Generator
) -> list[tuple[float, TraceRequest]]:
    """``count`` rows of a seeded stretch of the trace, with times in [0, duration)."""
    first = int(rng.integers(0, len(rows) - count + 1))
    chosen = rows[first : first + count]
    # The stretch includes the gap after its last row, so that its rate is exact.
    stretch_s = (chosen[-1].at_s - chosen[0].at_s) * count / max(1, count - 1)
    factor = options.duration_s / stretch_s if stretch_s > 0 else 0.0
    return [((r.at_s - chosen[0].at_s) * factor, r) for r in chosen]


def _recording(kind: AzureKind, options: WorkloadOptions) -> Recording:
    path = options.trace or data_file(f"azure_llm_2023_{kind}.csv")
    if path is None:
        source = f"synthetic stand-in for azure_llm_2023_{kind}.csv"
        return Recording(source, "azure", standin_azure(kind, options.seed))
    return read_recording(path, _AZURE_CLASS[kind])


def azure(kinds: Sequence[AzureKind], options: WorkloadOptions, zero_load: ZeroLoad) -> Workload:
    """A stretch of the Azure traces; ``code`` rows become class ``code``, ``conv`` rows ``chat``.

    ``options.trace`` may have any format without objectives, such as BurstGPT's or
    Mooncake's. Two kinds divide ``rate`` by the shares of their classes. Each has its own stretch:
    the code trace is silent for minutes, so a common stretch would often have rows of one kind.
    """
    positive("--duration", options.duration_s)
    specs = {c.name: c for c in options.classes}
    missing = [_AZURE_CLASS[k] for k in kinds if _AZURE_CLASS[k] not in specs]
    if missing:
        raise BenchError("--classes", f"this trace needs a class named {missing[0]!r}")
    total_share = sum(specs[_AZURE_CLASS[k]].share for k in kinds)
    rng = np.random.default_rng([options.seed, 20])
    timed: list[tuple[float, TraceRequest]] = []
    everything: list[TraceRequest] = []
    recordings = [_recording(kind, options) for kind in kinds]
    for kind, recording in zip(kinds, recordings, strict=True):
        rows = recording.rows
        native = len(rows) / max(rows[-1].at_s - rows[0].at_s, 1e-9)
        part = specs[_AZURE_CLASS[kind]].share / total_share
        rate = native if options.rate is None else positive("--rate", options.rate) * part
        timed += _fit_time(rows, _needed(options, rate, len(rows)), options, rng)
        everything += rows
    timed.sort(key=lambda pair: pair[0])
    factor = _length_factor(everything, options)
    lengths = _scaled([r for _, r in timed], options, factor)
    requests = []
    for i, ((at_s, row), pair) in enumerate(zip(timed, lengths, strict=True)):
        name, spec = f"{row.slo_class}-{i}", specs[row.slo_class]
        request = planned(name, at_s, spec, pair, options.max_context, zero_load)
        block_tokens = row.block_tokens * factor
        requests.append(replace(request, hash_ids=row.hash_ids, block_tokens=block_tokens))
    return Workload(
        "-".join([recordings[0].format, *kinds]),
        options.seed,
        options.duration_s,
        ", ".join(recording.source for recording in recordings),
        tuple(requests),
        sum(recording.left_out for recording in recordings),
    )


def _length_factor(rows: Sequence[TraceRequest], options: WorkloadOptions) -> float:
    """The factor on all token counts of a trace; it does not depend on the chosen rows.

    Prompts and answers have the same factor, which keeps the trace's ratio of prefill to decode.
    """
    if options.length_scale is not None:
        return positive("--length-scale", options.length_scale)
    long = float(np.percentile([r.prompt_tokens + r.output_tokens for r in rows], 99))
    return min(1.0, options.max_context / long)


def _scaled(
    chosen: Sequence[TraceRequest], options: WorkloadOptions, factor: float
) -> list[tuple[int, int]]:
    pairs = [(r.prompt_tokens, r.output_tokens) for r in chosen]
    return scaled_lengths(pairs, options.max_context, factor)


def adaserve(options: WorkloadOptions, zero_load: ZeroLoad) -> Workload:
    """AdaServe's workload, its time rescaled to this machine's zero-load decode step.

    A positive ``slo_ratio`` is a TPOT in multiples of the zero-load step; a negative one is an
    absolute TPOT in ms, rescaled like the arrivals. There is no TTFT objective. With ``rate``, rows
    are drawn from the whole trace and compressed into ``duration_s``, which keeps its shape (each
    class has its peak in turn). Without ``rate`` it is the first ``duration_s`` of the trace.
    """
    positive("--duration", options.duration_s)
    path = options.trace or data_file("adaserve/emission_fluctuating.json")
    source = "synthetic stand-in for adaserve/emission_fluctuating.json"
    recording = Recording(source, "adaserve", standin_adaserve(options.seed))
    if path:
        recording = read_recording(path)
    rows = recording.rows
    slower = zero_load.tpot_s / ADASERVE_ZERO_LOAD_TPOT_S
    timed = _adaserve_times(rows, options, slower)
    lengths = _scaled([r for _, r in timed], options, _length_factor(rows, options))
    requests = []
    for i, ((at_s, row), (prompt, output)) in enumerate(zip(timed, lengths, strict=True)):
        ratio = row.slo_ratio or 0.0
        tpot_s = ratio * zero_load.tpot_s if ratio > 0 else -ratio / 1e3 * slower
        requests.append(
            PlannedRequest(
                f"{row.slo_class}-{i}", at_s, row.slo_class, prompt, output, None, tpot_s
            )
        )
    return Workload(
        "adaserve",
        options.seed,
        options.duration_s,
        recording.source,
        tuple(requests),
        recording.left_out,
    )


def _adaserve_times(
    rows: Sequence[TraceRequest], options: WorkloadOptions, slower: float
) -> list[tuple[float, TraceRequest]]:
    first_s = rows[0].at_s
    if options.rate is None:
        timed = [((r.at_s - first_s) * slower, r) for r in rows]
        return [(at_s, r) for at_s, r in timed if at_s < options.duration_s]
    count = _needed(options, positive("--rate", options.rate), len(rows))
    rng = np.random.default_rng([options.seed, 21])
    kept = np.sort(rng.choice(len(rows), count, replace=False))
    span_s = max(rows[-1].at_s - first_s, 1e-9) * (1 + 1e-9)
    return [((rows[i].at_s - first_s) / span_s * options.duration_s, rows[i]) for i in kept]
