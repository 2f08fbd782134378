# SPDX-License-Identifier: Apache-2.0
"""How well output lengths are predicted at arrival: the class's median, and the regressor.

Requests come in the order of the trace, `max_tokens` 4,096 each. Every one is predicted when it
arrives and learnt from when 50 more have arrived, as if so many were in flight. Those that came
before anything was known of their class do not count: both say `max_tokens` of them. Errors are
|predicted - actual| / actual, mean and median; rho is Spearman's rank correlation of predicted and
actual lengths, which serving the shortest first lives on ("-": all were the same). "learnt" is the
share of requests that the regressor itself answered for: for the others it was the worse guess of
late, or there was none yet, and it says what the median says.

- Azure: real requests, of which only the lengths of prompt and answer are known.
- AdaServe: its own workloads, with prompts. Every answer in them is 256 tokens long.
- Answers: prompts of public collections, each as long as the answer that comes with it. All are of
  one class, in random order (seed 0).
- Noise: answers whose length nothing tells (log-normal).
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import markdown, write_result
from numpy.typing import NDArray
from scipy.stats import spearmanr
from tokenizers import Tokenizer

import vllm_slo.tiny
from vllm_slo.bench.traces import data_folder, read_recording, standin_azure
from vllm_slo.core.lengths.forecast import LengthForecaster, LengthQuery, QuantileForecaster
from vllm_slo.core.lengths.output_length import OutputLengthPredictor
from vllm_slo.engine.scheduling.length_regressor import BATCH, LengthRegressor
from vllm_slo.traces.request import TraceRequest

MAX_TOKENS = 4_096
IN_FLIGHT = 50
NOTE = """\
What it says: where the length of a prompt tells of its answer (Azure conv), the regressor's median
error is less than half, and its order far better; where nothing does (Azure code, noise), it is
told apart and the median answers, at hardly any loss. AdaServe's workloads show nothing, as all
answers are equally long. That an answer is as long as the one that comes with a prompt is an
assumption; tokens are those of the built-in model. Over both Azure traces the median orders the two
classes right, and little within them.

Times are CPU time of the thread, as other programs ran beside it. Half of a lesson is what
scikit-learn checks before it computes.
"""


class Request(NamedTuple):
    """One request of a stream, and how many tokens its answer took."""

    query: LengthQuery
    tokens: int


class Played(NamedTuple):
    """Predictions of a stream and their sources, (N,) each."""

    tokens: NDArray[np.int64]
    sources: NDArray[np.str_]


def _row(row: TraceRequest) -> Request:
    return Request(LengthQuery(row.slo_class, row.prompt_tokens, MAX_TOKENS), row.output_tokens)


def azure(folder: Path | None) -> Iterator[tuple[str, list[Request]]]:
    """Each trace, and both together; stand-ins without the files."""
    both: list[TraceRequest] = []
    for kind, slo_class in (("conv", "chat"), ("code", "code")):
        path = folder / f"azure_llm_2023_{kind}.csv" if folder else None
        if path is not None and path.is_file():
            name, rows = f"Azure {kind}", read_recording(path, slo_class).rows
        else:
            name = f"Azure {kind}, synthetic stand-in"
            rows = standin_azure("conv" if kind == "conv" else "code", seed=0)
        yield name, [_row(row) for row in rows]
        both += rows
    yield "Azure, both", [_row(row) for row in sorted(both, key=lambda row: row.at_s)]


def adaserve(
    folder: Path, encode: Callable[[str], list[int]]
) -> Iterator[tuple[str, list[Request]]]:
    """AdaServe's workloads with their prompts."""
    for path in sorted((folder / "adaserve").glob("emission_*.json")):
        prompts = sorted(json.loads(path.read_text()), key=lambda item: item["emission_time_ms"])
        stream = []
        for row, item in zip(read_recording(path).rows, prompts, strict=True):
            ids = encode(item["prompt"])
            query = LengthQuery(row.slo_class, len(ids), MAX_TOKENS, None, ids)
            stream.append(Request(query, row.output_tokens))
        yield f"AdaServe {path.stem.removeprefix('emission_')}", stream


def _lines(path: Path) -> list[Any]:
    """The records of a collection; empty without its file."""
    if not path.is_file():
        return []
    found = path.read_bytes()
    text = (gzip.decompress(found) if path.suffix == ".gz" else found).decode()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _first(answer: Any) -> str:
    """The first of several answers."""
    return answer if isinstance(answer, str) else _first(answer[0])


def pairs_of(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Collection -> (prompt, its reference answer)."""
    return {
        "GSM8K": [(one["question"], one["answer"]) for one in _lines(folder / "gsm8k_test.jsonl")],
        "HumanEval": [
            (one["prompt"], one["canonical_solution"])
            for one in _lines(folder / "HumanEval.jsonl.gz")
        ],
        "Spec-Bench": [
            (one["turns"][0], _first(one["reference"]))
            for one in _lines(folder / "spec_bench.jsonl")
            if one.get("reference")
        ],
    }


def answers(
    folder: Path, encode: Callable[[str], list[int]]
) -> Iterator[tuple[str, list[Request]]]:
    """Public prompts with the lengths of their reference answers: one collection, and all."""
    pairs = pairs_of(folder)
    everything = [pair for collection in pairs.values() for pair in collection]
    for name, chosen in (
        ("Answers, GSM8K", pairs["GSM8K"]),
        ("Answers, GSM8K, HumanEval and Spec-Bench", everything),
    ):
        stream: list[Request] = []
        for place in np.random.default_rng(0).permutation(len(chosen)):
            prompt, answer = chosen[place]
            ids = encode(prompt)
            query = LengthQuery("any", len(ids), MAX_TOKENS, None, ids)
            stream.append(Request(query, max(len(encode(answer)), 1)))
        if stream:
            yield name, stream


def noise(count: int) -> list[Request]:
    """Random prompts and answers that have nothing to do with each other."""
    rng = np.random.default_rng(0)
    stream = []
    for _ in range(count):
        ids = rng.integers(0, 32_000, int(rng.integers(20, 2_000))).tolist()
        tokens = round(min(max(np.exp(rng.normal(5.0, 1.0)), 1), MAX_TOKENS))
        stream.append(Request(LengthQuery("any", len(ids), MAX_TOKENS, None, ids), tokens))
    return stream


def forecasters() -> tuple[QuantileForecaster, LengthRegressor]:
    """Both forecasters, untrained."""
    return (
        QuantileForecaster(OutputLengthPredictor()),
        LengthRegressor(QuantileForecaster(OutputLengthPredictor())),
    )


def play(forecaster: LengthForecaster, stream: list[Request]) -> Played:
    """Predict each request at its arrival; observe it ``IN_FLIGHT`` arrivals later."""
    running: deque[Request] = deque()
    said = []
    for request in stream:
        said.append(forecaster.predict(request.query))
        running.append(request)
        if len(running) > IN_FLIGHT:
            ended = running.popleft()
            forecaster.observe(ended.query, ended.tokens)
    return Played(np.array([one.tokens for one in said]), np.array([one.source for one in said]))


def score(predicted: NDArray[np.int64], actual: NDArray[np.int64]) -> list[str]:
    """Mean and median relative error, rank correlation."""
    errors = np.abs(predicted - actual) / actual
    ranked = len(set(predicted)) > 1 and len(set(actual)) > 1
    rho = f"{spearmanr(predicted, actual)[0]:.2f}" if ranked else "-"
    return [f"{errors.mean():.2f}", f"{np.median(errors):.2f}", rho]


def compare(name: str, stream: list[Request]) -> list[str]:
    """A row of the table: both forecasters on one stream."""
    usual, learnt = (play(forecaster, stream) for forecaster in forecasters())
    actual = np.array([one.tokens for one in stream])
    counted = usual.sources != "cap"
    return [
        name,
        f"{counted.sum():,}",
        *score(usual.tokens[counted], actual[counted]),
        *score(learnt.tokens[counted], actual[counted]),
        f"{(learnt.sources[counted] == 'learnt').mean():.0%}",
    ]


def costs() -> list[list[str]]:
    """Microseconds of CPU of each call; prompts of up to 2,000 tokens whose lengths tell."""
    _, regressor = forecasters()
    took: dict[str, list[float]] = {
        "predict, at arrival": [],
        "predict, again": [],
        "observe": [],
        f"observe with a lesson (every {BATCH}th)": [],
    }
    arrival, again, observe, lesson = took.values()

    def timed(times: list[float], work: Callable[..., object], *given: object) -> None:
        begun = time.thread_time()
        work(*given)
        times.append(time.thread_time() - begun)

    for number, (query, _) in enumerate(noise(4_000), 1):
        tokens = query.prompt_tokens // 4
        timed(arrival, regressor.predict, query)
        timed(again, regressor.predict, query, 10)
        taught = observe if number % BATCH else lesson
        timed(taught, regressor.observe, query, tokens)
    return [
        [name, *(f"{np.percentile(times, p) * 1e6:.0f}" for p in (50, 99))]
        for name, times in took.items()
    ]


def main() -> None:
    """Measure and write the result."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    folder = data_folder()
    streams = dict(azure(folder))
    if folder is not None:
        tokenizer = Path(vllm_slo.tiny.__file__).parent / "target" / "tokenizer.json"
        text = Tokenizer.from_file(str(tokenizer))
        streams |= dict(adaserve(folder, lambda prompt: text.encode(prompt).ids))
        streams |= dict(answers(folder, lambda prompt: text.encode(prompt).ids))
    streams["Noise"] = noise(4_000)
    scores = ("mean error", "median error", "rho")
    columns = [f"{who}: {what}" for who in ("median", "regressor") for what in scores]
    rows = [compare(name, stream) for name, stream in streams.items()]
    table = markdown(["trace", "requests", *columns, "learnt"], rows)
    prices = markdown(["call of the regressor", "median µs", "p99 µs"], costs())
    write_result("length_prediction", __doc__, f"{table}\n\n{prices}", note=NOTE)


if __name__ == "__main__":
    main()
