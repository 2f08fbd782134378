# SPDX-License-Identifier: Apache-2.0
"""Recorded workloads: the Azure 2023 traces (SLOs-Serve, figure 8) and AdaServe's own workload.

The Azure files are in github.com/Azure/AzurePublicDataset (CC-BY 4.0), AdaServe's in its artifact
(Apache-2.0, ``emission_*.json``). `data_folder` says where they are looked for. Where they are not,
a seeded stand-in with the same statistics is made and named as such in ``Workload.source``.
``trace_files.py`` reads the files, and those of other formats.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.trace_files import BLOCK_TOKENS, Format, detect, format_name, read
from vllm_slo.bench.workload import (
    DEFAULT_CLASSES,
    ClassSpec,
    Lengths,
    PlannedRequest,
    Workload,
    planned,
    positive,
    scaled_lengths,
)
from vllm_slo.bench.zero_load import ZeroLoad

ADASERVE_ZERO_LOAD_TPOT_S: Final = 0.040 / 1.2
"""Zero-load step of AdaServe's machines: 1.2 times it "aligns with" 40 ms per token (6.1)."""

AzureKind = Literal["code", "conv"]
_AZURE_CLASS: Final[Mapping[str, str]] = {"code": "code", "conv": "chat"}
_WITHOUT_OBJECTIVES: Final[tuple[Format, ...]] = ("azure", "burstgpt", "mooncake")
_ADASERVE_CLASS: Final[Mapping[float, str]] = {-50.0: "chatbot", -150.0: "summarization"}


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request. ``slo_ratio`` is AdaServe's, None elsewhere; ``hash_ids`` Mooncake's:
    see `RecordedRequest`."""

    at_s: float
    slo_class: str
    prompt_tokens: int
    output_tokens: int
    slo_ratio: float | None = None
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """Rows in order of time. ``source``: what they were read or made from.

    ``left_out``: rows of the file that had no prompt or no output token, such as BurstGPT's
    failures: there is nothing to send or to wait for.
    """

    source: str
    format: Format
    rows: list[TraceRow]
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """How a trace becomes a workload.

    ``rate``: requests/s; None keeps the trace's own (AdaServe: rescaled to this machine).
    ``fit``: ``rescale`` stretches time, ``thin`` drops rows and keeps the time between bursts.
    ``file``: read this one. ``length_scale``: factor on all token counts; None = the 99th
    percentile of the trace just fits ``max_context``. What still does not fit is clipped.
    """

    duration_s: float
    rate: float | None = None
    seed: int = 0
    max_context: int = 2048
    length_scale: float | None = None
    file: Path | None = None
    fit: Literal["rescale", "thin"] = "rescale"
    classes: Sequence[ClassSpec] = DEFAULT_CLASSES


DATA_VARIABLE: Final = "VLLM_SLO_DATA"


def data_folder() -> Path | None:
    """The folder of recorded traces and prompts; None where there is none.

    ``$VLLM_SLO_DATA`` names it; set but empty, it says that there is none. Where the variable is
    not set, ``../shared/data`` beside the repository is taken.
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
    """Prompts of one of `PROMPTS`, of a conversation its first turn; none where it is not at
    hand."""
    name, field = PROMPTS[collection]
    path = _find(name)
    if path is None:
        return []
    found = path.read_bytes()
    text = (gzip.decompress(found) if path.suffix == ".gz" else found).decode()
    said = [json.loads(line)[field] for line in text.splitlines() if line.strip()]
    return [one if isinstance(one, str) else one[0] for one in said]


def _find(name: str) -> Path | None:
    folder = data_folder()
    path = folder / name if folder else None
    return path if path is not None and path.is_file() else None


def read_recording(path: Path, slo_class: str | None = None) -> Recording:
    """The usable requests of a file, by time.

    ``slo_class`` is given to every row, of a file of any format but AdaServe's; None: it is
    AdaServe's, whose objectives tell the class.

    Raises:
        BenchError: the file cannot be read or is of another format; names format, line and field.
    """
    form = detect(path)
    wanted: tuple[Format, ...] = ("adaserve",) if slo_class is None else _WITHOUT_OBJECTIVES
    if form not in wanted:
        names = ", ".join(map(format_name, wanted))
        raise BenchError(
            "--workload-file", f"{path} looks like {format_name(form)}; this workload takes {names}"
        )
    rows, left_out = [], 0
    for one in read(path, form):
        if one.prompt_tokens and one.output_tokens:
            name = _adaserve_class(one.slo_ratio or 0.0) if slo_class is None else slo_class
            lengths = one.prompt_tokens, one.output_tokens
            rows.append(TraceRow(one.at_s, name, *lengths, one.slo_ratio, one.hash_ids))
        else:
            left_out += 1
    if not rows:
        more = " with prompt and output tokens" if left_out else ""
        raise BenchError("--workload-file", f"{path} has no rows{more}")
    return Recording(path.name, form, sorted(rows, key=lambda r: r.at_s), left_out)


def left_out_line(source: str, count: int) -> str:
    """What to say of rows that were left out."""
    rows = "1 row" if count == 1 else f"{count} rows"
    return (
        f"{source}: {rows} with 0 prompt or output tokens {'is' if count == 1 else 'are'} left out"
    )


def _adaserve_class(ratio: float) -> str:
    return "copilot" if ratio > 0 else _ADASERVE_CLASS.get(ratio, f"tpot-{-ratio:g}ms")


def read_azure(path: Path, slo_class: str) -> list[TraceRow]:
    """The rows of `read_recording` for a trace without objectives."""
    return read_recording(path, slo_class).rows


def read_adaserve(path: Path) -> list[TraceRow]:
    """The rows of `read_recording` for AdaServe's ``{emission_time_ms, ..., slo_ratio}``."""
    return read_recording(path).rows


def standin_azure(kind: AzureKind, seed: int) -> list[TraceRow]:
    """An hour like the real trace: same rate, lengths and burstiness (mean and spread)."""
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
        TraceRow(float(t), _AZURE_CLASS[kind], min(p, 14050), min(o, 1899))
        for t, p, o in zip(times, prompts, outputs, strict=True)
    ]


def standin_adaserve(seed: int) -> list[TraceRow]:
    """Six minutes like ``emission_fluctuating``: each class peaks at a time of its own."""
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
            TraceRow(float(t), name, n, 256, ratio) for t, n in zip(times, lengths, strict=True)
        ]
    return sorted(rows, key=lambda r: r.at_s)


def _needed(options: TraceOptions, rate: float, available: int) -> int:
    count = max(1, round(rate * options.duration_s))
    if count > available:
        raise BenchError(
            "--duration",
            f"{rate:g} requests/s for {options.duration_s:g} s are {count} requests; "
            f"the trace has {available}",
        )
    return count


def _fit_time(
    rows: Sequence[TraceRow], count: int, options: TraceOptions, rng: np.random.Generator
) -> list[tuple[float, TraceRow]]:
    """``count`` rows of a seeded stretch of the trace, with times in [0, duration)."""
    span_s = max(rows[-1].at_s - rows[0].at_s, 1e-9)
    if options.fit == "thin" and count / options.duration_s < len(rows) / span_s:
        return _thinned(rows, options.duration_s, count, rng)
    first = int(rng.integers(0, len(rows) - count + 1))
    chosen = rows[first : first + count]
    # The gap after the last row belongs to the stretch, so that its rate is exact.
    stretch_s = (chosen[-1].at_s - chosen[0].at_s) * count / max(1, count - 1)
    factor = options.duration_s / stretch_s if stretch_s > 0 else 0.0
    return [((r.at_s - chosen[0].at_s) * factor, r) for r in chosen]


def _thinned(
    rows: Sequence[TraceRow], duration_s: float, count: int, rng: np.random.Generator
) -> list[tuple[float, TraceRow]]:
    """``count`` rows at random from a stretch of real time that has as many."""
    times = np.array([r.at_s for r in rows])
    latest_s = max(times[0], times[-1] - duration_s)
    starts = times[times <= latest_s]
    sizes = np.searchsorted(times, starts + duration_s) - np.arange(len(starts))
    fitting = np.flatnonzero(sizes >= count)
    if not len(fitting):
        raise BenchError(
            "--rate", f"no {duration_s:g} s of the trace have {count} requests; use rescaling"
        )
    first = int(rng.choice(fitting))
    kept = np.sort(rng.choice(int(sizes[first]), count, replace=False))
    return [(float(times[first + i] - times[first]), rows[first + i]) for i in kept]


def _recording(kind: AzureKind, options: TraceOptions) -> Recording:
    path = options.file or _find(f"azure_llm_2023_{kind}.csv")
    if path is None:
        source = f"synthetic stand-in for azure_llm_2023_{kind}.csv"
        return Recording(source, "azure", standin_azure(kind, options.seed))
    return read_recording(path, _AZURE_CLASS[kind])


def azure(kinds: Sequence[AzureKind], options: TraceOptions, zero_load: ZeroLoad) -> Workload:
    """A stretch of the Azure traces; ``code`` rows become class ``code``, ``conv`` rows ``chat``.

    ``options.file`` may be of any format without objectives: BurstGPT's, Mooncake's.
    Two kinds share ``rate`` as their classes' shares say, each from a stretch of its own: the code
    trace is silent for minutes, so one stretch of both would often hold only one of them.
    """
    positive("--duration", options.duration_s)
    specs = {c.name: c for c in options.classes}
    missing = [_AZURE_CLASS[k] for k in kinds if _AZURE_CLASS[k] not in specs]
    if missing:
        raise BenchError("--classes", f"this trace needs a class named {missing[0]!r}")
    total_share = sum(specs[_AZURE_CLASS[k]].share for k in kinds)
    rng = np.random.default_rng([options.seed, 20])
    timed: list[tuple[float, TraceRow]] = []
    everything: list[TraceRow] = []
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
        one = planned(name, at_s, spec, pair, options.max_context, zero_load)
        requests.append(replace(one, hash_ids=row.hash_ids, block_tokens=BLOCK_TOKENS * factor))
    return Workload(
        "-".join([recordings[0].format, *kinds]),
        options.seed,
        options.duration_s,
        ", ".join(one.source for one in recordings),
        tuple(requests),
        sum(one.left_out for one in recordings),
    )


def _length_factor(rows: Sequence[TraceRow], options: TraceOptions) -> float:
    """The factor on all token counts of a trace, whichever of its rows are chosen.

    One factor for prompts and answers keeps the trace's ratio of prefill to decode work.
    """
    if options.length_scale is not None:
        return positive("--length-scale", options.length_scale)
    long = float(np.percentile([r.prompt_tokens + r.output_tokens for r in rows], 99))
    return min(1.0, options.max_context / long)


def _scaled(
    chosen: Sequence[TraceRow], options: TraceOptions, factor: float
) -> list[tuple[int, int]]:
    pairs = [(r.prompt_tokens, r.output_tokens) for r in chosen]
    return scaled_lengths(pairs, options.max_context, factor)


def adaserve(options: TraceOptions, zero_load: ZeroLoad) -> Workload:
    """AdaServe's workload, its time rescaled to this machine's zero-load decode step.

    A positive ``slo_ratio`` is a TPOT in multiples of the zero-load step; a negative one is an
    absolute TPOT in ms, rescaled like the arrivals. It has no TTFT objective. With ``rate``, rows
    are drawn from the whole trace and squeezed into ``duration_s``, so that its shape (each class
    peaking in turn) survives; without it the first ``duration_s`` are taken as they are.
    """
    positive("--duration", options.duration_s)
    path = options.file or _find("adaserve/emission_fluctuating.json")
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
    rows: Sequence[TraceRow], options: TraceOptions, slower: float
) -> list[tuple[float, TraceRow]]:
    first_s = rows[0].at_s
    if options.rate is None:
        timed = [((r.at_s - first_s) * slower, r) for r in rows]
        return [(at_s, r) for at_s, r in timed if at_s < options.duration_s]
    count = _needed(options, positive("--rate", options.rate), len(rows))
    rng = np.random.default_rng([options.seed, 21])
    kept = np.sort(rng.choice(len(rows), count, replace=False))
    span_s = max(rows[-1].at_s - first_s, 1e-9) * (1 + 1e-9)
    return [((rows[i].at_s - first_s) / span_s * options.duration_s, rows[i]) for i in kept]
