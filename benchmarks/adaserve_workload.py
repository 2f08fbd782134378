# SPDX-License-Identifier: Apache-2.0
"""AdaServe's trace as requests to an engine on this machine (see ``adaserve.py``)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from vllm_slo import tiny
from vllm_slo.bench import traces

CATEGORIES: Final = ("copilot", "chatbot", "summarization")
"""AdaServe's categories 1 to 3."""
CHARACTERS_PER_TOKEN: Final = 4
"""Of the models whose tokens AdaServe counted; one of its files gives lengths in characters."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of the trace: seconds, AdaServe's ``slo_ratio``, its text, tokens."""

    at_s: float
    category: str
    slo_ratio: float
    text: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """How the trace's lengths are fitted to this machine.

    Attributes:
        prompt: prompt tokens for one of the trace's.
        output: answer tokens for one of the trace's.
        most: no prompt is longer.
    """

    prompt: float
    output: float
    most: int


@dataclass(frozen=True, slots=True)
class Point:
    """One place of a sweep.

    Attributes:
        rate: requests/s.
        urgent: share of category 1, the rest evenly of 2 and 3 (figure 10); None: as in the trace.
        scale: category 1's objective over the zero-load latency (figure 11).
    """

    rate: float
    urgent: float | None
    scale: float


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine gets it; its prompt is still text."""

    request_id: str
    category: str
    arrival_s: float
    text: str
    prompt_tokens: int
    output_tokens: int
    tpot_slo_s: float


def read_trace(path: Path) -> list[Row]:
    """The rows of AdaServe's ``emission_*.json``, by time."""
    rows = traces.read_recording(path).rows
    data = sorted(json.loads(path.read_text()), key=lambda item: float(item["emission_time_ms"]))
    texts = [str(item["prompt"]) for item in data]
    # The file whose categories peak in turn gives lengths in characters.
    characters = all(r.prompt_tokens == max(1, len(t)) for r, t in zip(rows, texts, strict=True))
    unit = CHARACTERS_PER_TOKEN if characters else 1
    return [
        Row(r.at_s, r.slo_class, r.slo_ratio or 0.0, text, r.prompt_tokens // unit or 1,
            r.output_tokens)
        for r, text in zip(rows, texts, strict=True)
    ]  # fmt: skip


def stand_in(seed: int) -> list[Row]:
    """Where AdaServe's files are not at hand: like the one whose categories peak in turn, with the
    library sources of this Python as prompts."""
    library = sorted(Path(os.__file__).parent.glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in library]
    texts = [text for text in texts if len(text) > 10_000]
    rows = traces.standin_adaserve(seed)
    return [
        Row(r.at_s, r.slo_class, r.slo_ratio or 0.0,
            texts[i % len(texts)][200 : 200 + r.prompt_tokens],
            r.prompt_tokens // CHARACTERS_PER_TOKEN or 1, r.output_tokens)
        for i, r in enumerate(rows)
    ]  # fmt: skip


def load_trace(name: str, seed: int) -> tuple[list[Row], str]:
    """(rows, what they are) of ``emission_NAME.json``."""
    folder = traces.data_folder()
    path = folder / "adaserve" / f"emission_{name}.json" if folder else None
    if path is None or not path.is_file():
        return stand_in(seed), f"synthetic stand-in for emission_{name}.json"
    return read_trace(path), path.name


def window(rows: Sequence[Row], count: int, rng: np.random.Generator) -> list[Row]:
    """``count`` consecutive requests from a random place."""
    if count > len(rows):
        raise SystemExit(f"--requests {count}: the trace has {len(rows)}")
    first = int(rng.integers(0, len(rows) - count + 1))
    return list(rows[first : first + count])


def redrawn(
    rows: Sequence[Row], pool: Sequence[Row], urgent: float, rng: np.random.Generator
) -> list[Row]:
    """The same arrivals with new random categories, and requests of these (section 6.1)."""
    by_category = {name: [r for r in pool if r.category == name] for name in CATEGORIES}
    rest = (1.0 - urgent) / 2
    names = rng.choice(CATEGORIES, len(rows), p=[urgent, rest, rest])
    return [
        replace(by_category[name][int(rng.integers(len(by_category[name])))], at_s=row.at_s)
        for row, name in zip(rows, names, strict=True)
    ]


def arrivals_s(rows: Sequence[Row], rate: float) -> list[float]:
    """The arrivals from 0 on, stretched to ``rate`` requests/s.

    The gap after the last request belongs to the window, and is taken to be an average one.
    """
    span_s = rows[-1].at_s - rows[0].at_s
    factor = (len(rows) - 1) / rate / span_s if span_s > 0 else 0.0
    return [(row.at_s - rows[0].at_s) * factor for row in rows]


def objective_s(slo_ratio: float, scale: float, zero_load_s: float) -> float:
    """TPOT of a request on this machine, seconds.

    Category 1's is ``scale`` times the zero-load latency. The others' are absolute in the trace
    (negative, ms): they become multiples of the zero-load latency of AdaServe's machines, which
    section 6.1 gives as 40 ms over 1.2.
    """
    if slo_ratio > 0:
        return scale * zero_load_s
    return -slo_ratio / 1e3 / traces.ADASERVE_ZERO_LOAD_TPOT_S * zero_load_s


def workload(
    pool: Sequence[Row],
    count: int,
    point: Point,
    seed: int,
    lengths: Lengths,
    zero_load_s: float,
) -> list[Request]:
    """The requests of one window at one point; for one seed the same at every rate and scale."""
    rows = window(pool, count, np.random.default_rng([seed, 30]))
    if point.urgent is not None:
        rows = redrawn(rows, pool, point.urgent, np.random.default_rng([seed, 31]))
    return [
        Request(
            f"{row.category}-{n}",
            row.category,
            at_s,
            row.text,
            min(lengths.most, max(4, round(lengths.prompt * row.prompt_tokens))),
            max(2, round(lengths.output * row.output_tokens)),
            objective_s(row.slo_ratio, point.scale, zero_load_s),
        )
        for n, (row, at_s) in enumerate(zip(rows, arrivals_s(rows, point.rate), strict=True))
    ]


def tokenised(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Requests as the engine's process reads them; prompts are cut to their length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny.path("target") / "tokenizer.json"))
    asked = []
    for one in requests:
        ids = tokenizer.encode(one.text).ids[: one.prompt_tokens]
        kept = {k: v for k, v in asdict(one).items() if k not in ("text", "prompt_tokens")}
        asked.append({**kept, "prompt": ids})
    return asked
