# SPDX-License-Identifier: Apache-2.0
"""AdaServe's own workloads on the real CPU engine: token trees by SLO against vLLM's own ways.

As figures 8 to 12 of AdaServe: a window of its trace, stretched to a rate, with its own prompts and
its three categories of requests. The engine serves the costlier twin of the built-in target; it
runs in a process of its own, and a loop adds each request when its arrival time has come. A request
attains if its mean time per token, (last - first) / (n - 1), is within its objective; goodput is
the tokens of attaining requests over the time from the first arrival to the last token.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np
from adaserve_engine import ABLATIONS, ANSWER, ENVIRONMENT
from quiet import Limits, Machine

from vllm_slo import house_style, profiles, tiny
from vllm_slo.bench import traces
from vllm_slo.core.attainment import RequestRecord, summarise, summarise_class
from vllm_slo.serve_args import SCHEDULER, TREE_PROPOSER, TREE_WORKER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHILD: Final = Path(__file__).with_name("adaserve_engine.py")
CATEGORIES: Final = ("copilot", "chatbot", "summarization")
"""AdaServe's categories 1 to 3."""
CHARACTERS_PER_TOKEN: Final = 4
"""Of the models whose tokens AdaServe counted; one of its files gives lengths in characters."""
MAX_MODEL_LEN: Final = 2048
MAX_SEQS: Final = 64
KV_GB: Final = 1
ENGINE: Final[Mapping[str, Any]] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": MAX_SEQS,
    "max_num_batched_tokens": 2048,
    "block_size": 32,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "async_scheduling": False,
    "gpu_memory_utilization": 0.1,  # vLLM demands that share of the memory to be free
    "seed": 0,
}
DYNAMIC: Final = ((1, 4, 4), (5, 16, 3), (17, 32, 2), (33, MAX_SEQS, 1))
"""vLLM's ``num_speculative_tokens_per_batch_size``: (first, last batch size, draft tokens). About
as many as keep a step below twice a lone token's time on a machine that verifies 16 for free."""
CHUNK: Final = 128
"""Tokens of a step of "sarathi": vLLM with Sarathi-Serve's small chunks."""
MAX_NODES: Final = 24
SYSTEMS: Final = (
    *("stock", "priority", "sarathi", "chain-1", "chain-2", "chain-3", "chain-4", "dynamic"),
    "ours",
)
RATES: Final = (1.0, 2.0, 3.0, 4.0, 5.0)
LONE: Final = (64, 5)
"""Tokens of each request, and requests, that measure the zero-load latency."""
TOLERANCE: Final = 0.02
"""By less, one system is not said to be worse than another."""


def say(text: str) -> None:
    """Progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


# --- the workload ---------------------------------------------------------------------------------


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
    """How lengths are made to fit this machine.

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
    """AdaServe's ``emission_*.json``, by time."""
    rows = traces.read_adaserve(path)
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
    """The same arrivals with categories drawn anew, and then requests of them (section 6.1)."""
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
    """The requests of one window at one point: of one seed the same at every rate and scale."""
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


# --- the systems ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of the target and of its draft."""

    target: Path
    draft: Path


@dataclass(frozen=True, slots=True)
class System:
    """One way of serving: arguments of vLLM's engine, and what requests tell it."""

    name: str
    engine: Mapping[str, Any]
    send_slo: bool = False
    by_priority: bool = False
    without: str = ""

    @property
    def ours(self) -> bool:
        """Whether it is what the others are compared with, or a variant of it."""
        return self.send_slo


def _speculation(base: str, models: Models, dynamic: Sequence[Sequence[int]]) -> dict[str, Any]:
    """``speculative_config`` of vLLM's own ways."""
    draft = {"method": "draft_model", "model": str(models.draft)}
    kind, _, number = base.partition("-")
    if base == "dynamic":
        most = max(tokens for _, _, tokens in dynamic)
        schedule = {"num_speculative_tokens_per_batch_size": [list(row) for row in dynamic]}
        return draft | {"num_speculative_tokens": most} | schedule
    if base == "adaptive":
        return draft | {"num_speculative_tokens": 4, "enable_adaptive_verification": True}
    if kind == "chain" and number.isdecimal() and int(number):
        return draft | {"num_speculative_tokens": int(number)}
    if kind == "ngram" and number.isdecimal() and int(number):
        lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        return {"method": "ngram", "num_speculative_tokens": int(number)} | lookup
    raise SystemExit(
        f"system {base!r} is unknown: stock, chain-K, dynamic, adaptive, ngram-K, ours, "
        "ours-no-trees, ours-without-PART (slo, throughput, adaptation, calibration, waiting), "
        "each with +priority or +chunk-N; sarathi; priority; or a --variant"
    )


def _ours(trees: bool, models: Models, slo_config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's engine that make it ours."""
    engine: dict[str, Any] = {
        "scheduler_cls": SCHEDULER,
        "additional_config": {"slo_config": dict(slo_config)},
    }
    if not trees:
        return engine
    nodes = dict(slo_config.get("speculation", {})).get("max_nodes", MAX_NODES)
    engine["additional_config"]["draft_model"] = str(models.draft)
    engine["worker_cls"] = TREE_WORKER
    engine["speculative_config"] = {
        "method": "custom_class",
        "model": TREE_PROPOSER,
        "num_speculative_tokens": nodes,
    }
    return engine


@dataclass(frozen=True, slots=True)
class Kitchen:
    """All that systems are made of.

    Attributes:
        slo_config: the configuration of ours.
        variants: name -> what is different there (mappings are merged): for ablations.
        engine: further arguments of every engine.
    """

    models: Models
    slo_config: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    dynamic: Sequence[Sequence[int]] = DYNAMIC
    engine: Mapping[str, Any] | None = None

    def system(self, name: str) -> System:
        """A system by its name; see the command line."""
        whole = {"priority": "stock+priority", "sarathi": f"stock+chunk-{CHUNK}"}.get(name, name)
        base, *extras = whole.split("+")
        engine = {"model": str(self.models.target), **ENGINE, **(self.engine or {})}
        without = base.removeprefix("ours-without-") if base.startswith("ours-without-") else ""
        if without and without not in ABLATIONS:
            raise SystemExit(f"system {name!r}: {without!r} is unknown: one of {list(ABLATIONS)}")
        ours = bool(without) or base in self.variants or base in ("ours", "ours-no-trees")
        if ours:
            config = merged(self.slo_config, self.variants.get(base, {}))
            engine |= _ours(base != "ours-no-trees", self.models, config)
        elif base != "stock":
            engine["speculative_config"] = _speculation(base, self.models, self.dynamic)
        for extra in extras:
            kind, _, number = extra.partition("-")
            if extra == "priority":
                engine["scheduling_policy"] = "priority"
            elif kind == "chunk" and number.isdecimal():
                engine["max_num_batched_tokens"] = int(number)
            else:
                raise SystemExit(f"system {name!r}: {extra!r} is unknown: priority or chunk-N")
        return System(name, engine, ours, "priority" in extras, without)


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``change`` in it, mapping by mapping."""
    result = dict(base)
    for key, value in change.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


# --- running it -----------------------------------------------------------------------------------


def child_environment() -> dict[str, str]:
    """Of an engine's process: vLLM binds its threads to cores itself."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return {"VLLM_CPU_KVCACHE_SPACE": str(KV_GB), **ENVIRONMENT, **environment}


def answered(lines: Iterable[str]) -> dict[str, Any] | None:
    """What an engine's process answers in its output; None: it ended without."""
    for line in lines:
        if line.startswith(ANSWER):
            result: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            return result
    return None


class Engines:
    """Engines that have started, each in its own process; they sleep while another one is asked.

    So systems can take turns within a minute, on a machine that is another one some minutes later.
    """

    def __init__(self) -> None:
        self._children: dict[str, tuple[subprocess.Popen[str], IO[str]]] = {}

    def ask(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        """Serve a workload (see ``adaserve_engine.py``); RuntimeError with what the process said
        where it fails."""
        key = describe_ask({"engine": ask["engine"], "without": ask["without"]})
        if key not in self._children:
            errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
            started = subprocess.Popen(
                [sys.executable, str(CHILD)], env=child_environment(), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
            self._children[key] = started, errors
        child, said = self._children[key]
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(dict(ask)) + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; what it said tells why
        found = answered(child.stdout)
        if found is None:
            said.seek(0)
            raise RuntimeError(f"exit status {child.wait()}\n{said.read()}")
        return found

    def close(self) -> None:
        """End them all."""
        for child, said in self._children.values():
            child.kill()
            child.communicate()  # closes its pipes
            said.close()
        self._children.clear()


def profiled(ask: Mapping[str, Any], work: Path) -> None:
    """Measure an engine's step times in its own process; RuntimeError where that fails."""
    path = work / "ask.json"
    path.write_text(json.dumps(ask))
    done = subprocess.run(
        [sys.executable, str(CHILD), str(path)],
        env=child_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if answered(done.stdout.splitlines()) is None:
        raise RuntimeError(f"exit status {done.returncode}\n{done.stdout}{done.stderr}")


def twin(name: str, parameters: float, folder: Path) -> Path:
    """A built-in model at about ``parameters`` parameters, written once; 0: itself."""
    if not parameters:
        return tiny.path(name)
    kind = "tiny" if name == "target" else "tiny-draft"  # the demo's name of the target
    out = folder / f"{kind}-{parameters / 1e6:.0f}m"
    if not (out / "model.safetensors").is_file():
        say(f"writing a twin of the {name} with {parameters / 1e6:.0f}M parameters")
        command = [sys.executable, "-m", "vllm_slo.tiny.twin", str(tiny.path(name)), str(out)]
        subprocess.run([*command, "--parameters", str(parameters)], check=True)
    return out


def ask_of(
    system: System, requests: Sequence[Request], args: argparse.Namespace, *, alone: bool = False
) -> dict[str, Any]:
    """One run."""
    return {
        "engine": dict(system.engine),
        "requests": tokenised(requests),
        "send_slo": system.send_slo,
        "by_priority": system.by_priority,
        "without": system.without,
        "alone": alone,
        "temperature": args.temperature,
        "limit_s": requests[-1].arrival_s + args.patience,
    }


def zero_load_s(
    kitchen: Kitchen,
    pool: Sequence[Row],
    args: argparse.Namespace,
    lengths: Lengths,
    engines: Engines,
    machine: Machine,
) -> float:
    """Seconds per token of a lone request on stock vLLM: median over some of the trace's."""
    tokens, count = LONE
    point = Point(1.0, None, 1.0)
    lone = workload(pool, count, point, args.seed, lengths, 1.0)
    lone = [replace(one, output_tokens=tokens) for one in lone]
    ask = ask_of(kitchen.system("stock"), lone, args, alone=True)
    result = machine.undisturbed(lambda: engines.ask(ask))
    times = [one["times_s"] for one in result["requests"].values()]
    return float(median((t[-1] - t[0]) / (len(t) - 1) for t in times))


def kept(path: Path, asked: str) -> dict[str, Any] | None:
    """A run of before, if it was asked the same."""
    if not path.is_file():
        return None
    data: dict[str, Any] = json.loads(path.read_text())
    if data["asked"] != asked:
        raise SystemExit(f"{path} holds another run: give another --work")
    return data


def order_of(systems: Sequence[System], turn: int) -> list[System]:
    """Systems in turn, so that none is always first, or always after the same one."""
    start = turn % len(systems)
    rotated = [*systems[start:], *systems[:start]]
    return rotated if turn // len(systems) % 2 == 0 else rotated[::-1]


def describe_ask(ask: Mapping[str, Any]) -> str:
    """A fingerprint."""
    return hashlib.sha256(json.dumps(ask, sort_keys=True).encode()).hexdigest()[:16]


def go_live(
    kitchen: Kitchen,
    pool: Sequence[Row],
    points: Sequence[Point],
    args: argparse.Namespace,
    lengths: Lengths,
    zero_s: float,
    work: Path,
    engines: Engines,
    machine: Machine,
) -> tuple[dict[tuple[Point, str], list[Numbers]], dict[str, str]]:
    """Every system at every point, ``--windows`` times; and why systems failed that did."""
    systems = [kitchen.system(name) for name in args.systems]
    found: dict[tuple[Point, str], list[Numbers]] = {}
    failed: dict[str, str] = {}
    turn = 0
    for repetition in range(args.windows):
        for place, point in enumerate(points):
            requests = workload(pool, args.requests, point, args.seed + repetition, lengths, zero_s)
            for system in order_of(systems, turn):
                if system.name in failed:
                    continue
                ask = ask_of(system, requests, args)
                out = work / f"{repetition}-{place}-{system.name}.json"
                run = kept(out, describe_ask(ask))
                if run is None:
                    say(f"window {repetition + 1}, {shown(point)}: {system.name}")
                    try:
                        run = machine.undisturbed(partial(engines.ask, ask))
                    except RuntimeError as error:
                        failed[system.name] = str(error)
                        say(f"{system.name} failed: {error}")
                        continue
                    run["asked"] = describe_ask(ask)
                    out.write_text(json.dumps(run))
                numbers = numbers_of(requests, run)
                say(f"  {numbers.line()}")
                found.setdefault((point, system.name), []).append(numbers)
            turn += 1
    in_order = [(point, name) for point in points for name in args.systems]
    return {key: found[key] for key in in_order if key in found}, failed


# --- what came out --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Numbers:
    """One run, or the medians of several. Shares, tokens/s, seconds.

    Attributes:
        violations: share of the requests that did not attain.
        by_category: the same per category.
        goodput, throughput: tokens/s of attaining requests, of all.
        ttft_s: mean.
        accepted: draft tokens accepted per request and step, over all steps that decode (fig. 12).
        tokens_per_step: scheduled, draft tokens included.
        step_s: median.
        draft_share: of the time of all steps, spent drafting.
        choosing_share: the same, spent choosing trees in the scheduler.
        unfinished: share of requests.
        others: of the machine's time, taken by other processes.
        slower: than usual, the machine: its time for a fixed piece of work, before or after.
    """

    violations: float
    by_category: dict[str, float]
    goodput: float
    throughput: float
    ttft_s: float
    accepted: float
    tokens_per_step: float
    step_s: float
    draft_share: float
    choosing_share: float
    unfinished: float
    others: float
    slower: float

    def line(self) -> str:
        """In short."""
        return (
            f"violations {self.violations:.1%}, goodput {self.goodput:.1f}/s, throughput "
            f"{self.throughput:.1f}/s, TTFT {self.ttft_s:.2f} s, accepted {self.accepted:.2f}, "
            f"step {1e3 * self.step_s:.1f} ms of {self.tokens_per_step:.1f} tokens, "
            f"drafting {self.draft_share:.0%}, choosing {self.choosing_share:.1%}, "
            f"unfinished {self.unfinished:.0%}, others {self.others:.0%}, machine "
            f"{self.slower:.2f}x"
        )


def records_of(requests: Sequence[Request], run: Mapping[str, Any]) -> list[RequestRecord]:
    """What became of each request."""
    records = []
    for one in requests:
        seen = run["requests"][one.request_id]
        records.append(
            RequestRecord(
                one.request_id, one.category, one.arrival_s, tuple(seen["times_s"]), None,
                one.tpot_slo_s, "served", seen["finished"], one.prompt_tokens,
            )
        )  # fmt: skip
    return records


def numbers_of(requests: Sequence[Request], run: Mapping[str, Any]) -> Numbers:
    """Sum up one run (section 6.1, "Metrics"). A request that did not finish did not attain."""
    records = records_of(requests, run)
    ends = [record.token_times_s[-1] for record in records if record.token_times_s]
    lasted_s = max(max(ends, default=0.0) - records[0].arrival_s, 1e-9)
    total = summarise_class("total", records, lasted_s)
    ttfts = [record.ttft_s for record in records if record.ttft_s is not None]
    steps = run["steps"]
    decodes = sum(step["decodes"] for step in steps)
    took_s = sum(step["took_s"] for step in steps)
    return Numbers(
        1.0 - (total.attainment_by_mean or 0.0),
        {
            name: 1.0 - (one.attainment_by_mean or 0.0)
            for name, one in sorted(summarise(records, lasted_s).items())
        },
        total.goodput_tokens_per_s_by_mean,
        total.throughput_tokens_per_s,
        sum(ttfts) / len(ttfts) if ttfts else math.inf,
        sum(step["given"] for step in steps) / decodes - 1.0 if decodes else 0.0,
        sum(step["tokens"] for step in steps) / max(len(steps), 1),
        median(step["took_s"] for step in steps) if steps else 0.0,
        sum(step["draft_s"] for step in steps) / took_s if took_s else 0.0,
        sum(step["choosing_s"] for step in steps) / took_s if took_s else 0.0,
        1.0 - total.finished / len(records),
        run["others"],
        run["slower"],
    )


def middle(runs: Sequence[Numbers]) -> Numbers:
    """Medians, each number for itself."""
    every = [asdict(one) for one in runs]
    plain = {key: median(d[key] for d in every) for key in every[0] if key != "by_category"}
    names = sorted({name for one in runs for name in one.by_category})
    by_category = {
        name: median(one.by_category[name] for one in runs if name in one.by_category)
        for name in names
    }
    return Numbers(by_category=by_category, **plain)


@dataclass(frozen=True, slots=True)
class Versus:
    """Ours at one point against the best of the others in each respect.

    Attributes:
        fewest, violations: the best baseline and its share; ``ours_violations``: ours.
        most, goodput: the best baseline and its tokens/s; ``ours_goodput``: ours.
    """

    point: Point
    fewest: str
    violations: float
    ours_violations: float
    most: str
    goodput: float
    ours_goodput: float

    @property
    def fewer(self) -> float:
        """Times fewer violations; 1 where neither has any, infinite where only ours has none."""
        if self.ours_violations == 0:
            return 1.0 if self.violations == 0 else math.inf
        return self.violations / self.ours_violations

    @property
    def more(self) -> float:
        """Times as much goodput."""
        if self.goodput == 0:
            return 1.0 if self.ours_goodput == 0 else math.inf
        return self.ours_goodput / self.goodput

    @property
    def worse(self) -> bool:
        """Whether ours is worse in either respect, by more than the tolerance."""
        return self.ours_violations > self.violations + TOLERANCE or self.more < 1.0 - TOLERANCE


def against(
    found: Mapping[tuple[Point, str], Sequence[Numbers]], baselines: Iterable[str], ours: str
) -> list[Versus]:
    """Ours against the best baseline at every point where there are both."""
    names = list(baselines)
    result = []
    for point in dict.fromkeys(point for point, _ in found):
        others = {name: middle(found[point, name]) for name in names if (point, name) in found}
        if not others or (point, ours) not in found:
            continue
        mine = middle(found[point, ours])
        fewest = min(others, key=lambda name: others[name].violations)
        most = max(others, key=lambda name: others[name].goodput)
        result.append(
            Versus(point, fewest, others[fewest].violations, mine.violations, most,
                   others[most].goodput, mine.goodput)
        )  # fmt: skip
    return result


# --- showing it -----------------------------------------------------------------------------------

AXES: Final = {"rate": "requests/s", "urgent": "share of category 1", "scale": "SLO scale"}


def axis_of(points: Sequence[Point]) -> str:
    """Which of a point's numbers the sweep changes."""
    for name in ("urgent", "scale"):
        if len({getattr(point, name) for point in points}) > 1:
            return name
    return "rate"


def shown(point: Point) -> str:
    """In words."""
    urgent = "" if point.urgent is None else f", {point.urgent:.0%} urgent"
    return f"{point.rate:g}/s, scale {point.scale:g}{urgent}"


def times(ratio: float) -> str:
    """A ratio as a cell."""
    return "all" if math.isinf(ratio) else f"{ratio:.2f}x"


def headline(versus: Sequence[Versus], axis: str) -> list[list[str]]:
    """Head and lines: the best baseline against ours."""
    head = [AXES[axis], "fewest violations of the others", "ours", "times fewer",
            "most goodput of the others, tokens/s", "ours", "times as much"]  # fmt: skip
    lines = [
        [f"{getattr(one.point, axis):g}", f"{one.violations:.1%} ({one.fewest})",
         f"{one.ours_violations:.1%}", times(one.fewer), f"{one.goodput:.1f} ({one.most})",
         f"{one.ours_goodput:.1f}", times(one.more)]
        for one in versus
    ]  # fmt: skip
    return [head, *lines]


def verdict(versus: Sequence[Versus], axis: str) -> str:
    """The best place of the sweep, and where ours is worse."""
    if not versus:
        return ""
    fewer = max(versus, key=lambda one: one.fewer)
    more = max(versus, key=lambda one: one.more)
    worse = [f"{getattr(one.point, axis):g}" for one in versus if one.worse]
    said = "avoids all violations" if math.isinf(fewer.fewer) else f"{fewer.fewer:.2f}x fewer"
    return (
        f"Against the best of the others at each point, in each respect: {said} at "
        f"{getattr(fewer.point, axis):g} {AXES[axis]}, {times(more.more)} the goodput at "
        f"{getattr(more.point, axis):g}; worse (by over {TOLERANCE:.0%}) at: "
        f"{', '.join(worse) or 'none'}."
    )


def main_table(found: Mapping[tuple[Point, str], Sequence[Numbers]], axis: str) -> list[list[str]]:
    """Head and lines: every system at every point, medians, with the range of the windows."""
    names = sorted({name for runs in found.values() for one in runs for name in one.by_category})
    lines = [
        [AXES[axis], "system", "violations", *names, "goodput, tokens/s", "throughput, tokens/s",
         "mean TTFT, s", "accepted", "tokens a step", "step, ms", "drafting", "choosing trees",
         "runs"]
    ]  # fmt: skip

    def with_range(runs: Sequence[Numbers], name: str, form: str) -> str:
        values = [getattr(one, name) for one in runs]
        low, high = (format(value, form) for value in (min(values), max(values)))
        return f"{median(values):{form}}" + (f" ({low} to {high})" if len(values) > 1 else "")

    for (point, system), runs in found.items():
        m = middle(runs)
        lines.append(
            [f"{getattr(point, axis):g}", system, with_range(runs, "violations", ".1%"),
             *(f"{m.by_category[name]:.0%}" if name in m.by_category else "-" for name in names),
             with_range(runs, "goodput", ".1f"), f"{m.throughput:.1f}", f"{m.ttft_s:.2f}",
             f"{m.accepted:.2f}", f"{m.tokens_per_step:.1f}", f"{1e3 * m.step_s:.1f}",
             f"{m.draft_share:.1%}", f"{m.choosing_share:.1%}", str(len(runs))]
        )  # fmt: skip
    return lines


LOOKS: Final[Mapping[str, Mapping[str, Any]]] = {
    "stock": {"color": "#7a7a7a", "marker": "o"},
    "priority": {"color": "#7a7a7a", "linestyle": "--", "marker": "o"},
    "sarathi": {"color": "#7a7a7a", "linestyle": ":", "marker": "o"},
    "chain-1": {"color": "#9ecae1", "marker": "s"},
    "chain-2": {"color": "#56b4e9", "marker": "s"},
    "chain-3": {"color": "#0072b2", "marker": "s"},
    "chain-4": {"color": "#08306b", "marker": "s"},
    "dynamic": {"color": "#009e73", "marker": "^"},
    "ours": {"color": "#d55e00", "marker": "D", "linewidth": 2.6, "zorder": 5},
}
"""Okabe and Ito's colours; one hue for each kind of system."""
OTHER_COLOURS: Final = ("#cc79a7", "#e69f00", "#f0e442", "#000000")


def draw(found: Mapping[tuple[Point, str], Sequence[Numbers]], axis: str, path: Path) -> None:
    """Violations, goodput and accepted tokens along the sweep, one line per system."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = (
        ("violations", 100.0, "Requests that missed their SLO (%)\n(lower is better)"),
        ("goodput", 1.0, "Goodput, tokens/s\n(higher is better)"),
        ("accepted", 1.0, "Draft tokens accepted\nper request and step"),
    )
    with rc_context(house_style.PICTURE):
        figure = Figure(figsize=(13.5, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        every = figure.subplots(1, len(panels))
        for axes, (name, factor, title) in zip(every, panels, strict=True):
            _draw_panel(axes, found, axis, name, factor)
            axes.set_title(title)
            axes.set_xlabel(AXES[axis])
            axes.set_ylim(bottom=0)
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 9))
        figure.suptitle(
            "AdaServe's workload on the CPU engine", fontsize=12, fontweight="bold", x=0.01,
            ha="left",
        )  # fmt: skip
        figure.savefig(path, dpi=130)


def _draw_panel(
    axes: Axes,
    found: Mapping[tuple[Point, str], Sequence[Numbers]],
    axis: str,
    name: str,
    factor: float,
) -> None:
    others = iter(OTHER_COLOURS * 4)
    for system in dict.fromkeys(system for _, system in found):
        runs = {getattr(p, axis): found[p, s] for p, s in found if s == system}
        places = sorted(runs)
        heights = [factor * median(getattr(one, name) for one in runs[at]) for at in places]
        look: dict[str, Any] = {"linewidth": 1.5, "markersize": 4.5}
        look |= LOOKS[system] if system in LOOKS else {"color": next(others), "marker": "v"}
        axes.plot(places, heights, label=system, **look)


def describe(
    args: argparse.Namespace,
    kitchen: Kitchen,
    source: str,
    zero_s: tuple[float, float],
    requests: Sequence[Request],
    runs: Sequence[Numbers],
) -> str:
    """What was run, in words."""
    targets = {one.category: one.tpot_slo_s for one in requests}
    counts = {name: sum(one.category == name for one in requests) for name in CATEGORIES}
    mix = ", ".join(
        f"{name} (TPOT {1e3 * targets[name]:.1f} ms, {targets[name] / zero_s[0]:.2f}x zero load; "
        f"{counts[name]} requests)"
        for name in CATEGORIES
        if counts[name]
    )
    prompt = np.mean([one.prompt_tokens for one in requests])
    output = np.mean([one.output_tokens for one in requests])
    others = max(one.others for one in runs)
    slower = [one.slower for one in runs]
    drifted = sum(abs(ratio - 1.0) > args.drift for ratio in slower)
    target = f"{args.parameters / 1e6:.0f}M parameters" if args.parameters else "the target itself"
    draft = f"{args.draft_parameters / 1e6:.0f}M" if args.draft_parameters else "the draft itself"
    return f"""
Workload: {args.windows} windows of {args.requests} consecutive requests of {source}; at every point
the same ones to every system, systems taking turns; medians. In the first window: {mix}; on
average {prompt:.0f} prompt and {output:.0f} answer tokens (the trace's times
{args.prompt_scale:g} and {args.output_scale:g}), temperature {args.temperature:g}.
A lone request takes {1e3 * zero_s[0]:.1f} ms a token on stock vLLM ({1e3 * zero_s[1]:.1f} ms when
measured again at the end); AdaServe's machine {1e3 * traces.ADASERVE_ZERO_LOAD_TPOT_S:.1f} ms.
Engine: target {target}, draft {draft}; eager bfloat16, at most {MAX_SEQS} requests, 2,048 tokens a
step unless the name says otherwise, {KV_GB} GB of KV cache, synchronous stepping (in one process
there is nothing for asynchronous scheduling to overlap with). sarathi: at most {CHUNK} tokens a
step. Other processes took at most {others:.0%} of the machine during a run. Before and after each
run a fixed matrix product took {min(slower):.2f} to {max(slower):.2f} times as long as when zero
load was measured; {drifted} of {len(runs)} runs are kept though it was off by over
{args.drift:.0%}, after {args.retries} more tries. chain-K: a draft model, K tokens ahead. dynamic:
K by batch size, as
{json.dumps([list(row) for row in kitchen.dynamic])} (first, last batch size, K).
Configuration of ours: `{json.dumps(kitchen.slo_config)}`.
""".strip()


NOTE: Final = """
*accepted*: draft tokens accepted per request and step that decodes. *times fewer*: "all" where only
ours has no violations. Numbers in brackets: the range over the windows, which are other requests
each time. Adaptive verification (`enable_adaptive_verification`) is not among the systems: vLLM
0.32 refuses it on CPU ("Model Runner V1 does not support: adaptive draft verification"; the other
runner needs Triton).
"""


# --- putting it together --------------------------------------------------------------------------


def prepare(args: argparse.Namespace, models: Models, work: Path, machine: Machine) -> Kitchen:
    """The systems' ingredients; profiles the engine first, if asked to."""
    slo_config: dict[str, Any] = {}
    if not args.quick:
        # AdaServe judges the mean over the whole answer.
        slo_config["tpot_window_tokens"] = max(2, round(args.output_scale * 256))
    variants = dict(one.partition("=")[::2] for one in args.variant)
    kitchen = Kitchen(
        models,
        slo_config,
        {name: json.loads(text) for name, text in variants.items()},
        json.loads(args.dynamic) if args.dynamic else DYNAMIC,
        json.loads(args.engine) if args.engine else None,
    )
    if args.profile_s and any(kitchen.system(name).ours for name in args.systems):
        engine = dict(kitchen.system("stock").engine)
        path = work.resolve() / f"profile-{describe_ask(engine)}.json"
        if not path.is_file():
            machine.wait()
            say("profiling the engine")
            ask = {"engine": engine, "profile": str(path), "limit_s": args.profile_s}
            profiled(ask, work)
        slo_config["profile"] = str(path)
    given = json.loads(args.slo_config) if args.slo_config else {}
    return replace(kitchen, slo_config=merged(slo_config, given))


def points_of(args: argparse.Namespace) -> list[Point]:
    """The sweep. SystemExit where it has two directions."""
    urgents: list[float | None] = args.urgent or [None]
    several = [one for one in (args.rates, urgents, args.slo_scale) if len(one) > 1]
    if len(several) > 1:
        raise SystemExit("give several of only one: --rates, --urgent, --slo-scale")
    return [Point(r, u, s) for r in args.rates for u in urgents for s in args.slo_scale]


def measured_zero_load(
    kitchen: Kitchen,
    pool: Sequence[Row],
    args: argparse.Namespace,
    lengths: Lengths,
    work: Path,
    engines: Engines,
    machine: Machine,
) -> float:
    """Measured once for an engine and a ``--work`` folder, so that objectives stay the same."""
    path = work / f"zero_load-{describe_ask(kitchen.system('stock').engine)}.json"
    if not path.is_file():
        say("measuring the zero-load latency")
        machine.usual_s = machine.probe_s()
        found_s = zero_load_s(kitchen, pool, args, lengths, engines, machine)
        path.write_text(json.dumps({"zero_load_s": found_s, "probe_s": machine.usual_s}))
    found = json.loads(path.read_text())
    machine.usual_s = float(found["probe_s"])
    say(f"zero load: {1e3 * found['zero_load_s']:.1f} ms a token")
    return float(found["zero_load_s"])


def reason(said: str) -> str:
    """The line of a failed process's output that tells most."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"Error\b|\berror\b", line)]
    return (errors or lines or ["?"])[-1].partition(" [type=")[0]


def report(
    args: argparse.Namespace,
    found: Mapping[tuple[Point, str], Sequence[Numbers]],
    failed: Mapping[str, str],
    kitchen: Kitchen,
    text: str,
) -> None:
    """Write the result, or with ``--quick`` only show it."""
    from common import RESULTS, markdown, write_result

    axis = axis_of([point for point, _ in found])
    systems = {name: kitchen.system(name) for name in args.systems}
    baselines = [name for name, system in systems.items() if not system.ours]
    parts = []
    for name in (name for name, system in systems.items() if system.ours):
        versus = against(found, baselines, name)
        head, *lines = headline(versus, axis)
        parts += [f"{name}: {verdict(versus, axis)}", markdown(head, lines)] if versus else []
    head, *lines = main_table(found, axis)
    parts.append(markdown(head, lines))
    parts += [f"{name} did not run: {reason(why)}" for name, why in failed.items()]
    if args.quick or args.dry:
        print("\n\n".join([text, *parts]))
        if args.work:
            draw(found, axis, args.work / "adaserve.png")
        return
    name = args.name or ("adaserve" if axis == "rate" else f"adaserve_{axis}")
    picture = ""
    if len({point for point, _ in found}) > 1:
        draw(found, axis, RESULTS / f"{name}.png")
        picture = f"![Violations, goodput and accepted tokens along the sweep]({name}.png)\n"
    write_result(name, f"{__doc__.strip()}\n\n{text}", "\n\n".join(parts), note=picture + NOTE)


def main() -> None:
    """Measure zero load, sweep, compare, write."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an engine under way ends, too
    args = parse_args()
    points = points_of(args)
    pool, source = load_trace(args.trace, args.seed)
    lengths = Lengths(args.prompt_scale, args.output_scale, args.most_prompt)
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        models = Models(
            twin("target", args.parameters, args.models),
            twin("draft", args.draft_parameters, args.models),
        )
        machine = Machine(Limits(args.disturbance, args.drift, args.wait, args.retries), say)
        kitchen = prepare(args, models, work, machine)
        with closing(Engines()) as engines:
            zero_s = measured_zero_load(kitchen, pool, args, lengths, work, engines, machine)
            found, failed = go_live(
                kitchen, pool, points, args, lengths, zero_s, work, engines, machine
            )
            if not found:
                raise SystemExit("nothing ran")
            again_s = zero_s
            if not args.quick:
                again_s = zero_load_s(kitchen, pool, args, lengths, engines, machine)
        first = workload(pool, args.requests, points[0], args.seed, lengths, zero_s)
        every = [one for runs in found.values() for one in runs]
        text = describe(args, kitchen, source, (zero_s, again_s), first, every)
        report(args, found, failed, kitchen, text)
    say("done")


def numbers_list(text: str) -> list[float]:
    """``1,2,3``."""
    return [float(one) for one in text.split(",")]


def parse_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="shows that it runs, about a minute; writes nothing")
    add("--name", help="of the result; default: adaserve, or adaserve_AXIS")
    add("--dry", action="store_true", help="only show the result, write none")
    add("--systems", type=lambda text: text.split(","), default=list(SYSTEMS),
        help="stock, priority, sarathi, chain-K, dynamic, ngram-K, ours, ours-no-trees, "
        "ours-without-slo (-throughput, -adaptation, -calibration, -waiting); "
        "+priority and +chunk-N change vLLM's own (chain-2+priority)")  # fmt: skip
    add("--rates", type=numbers_list, default=list(RATES), help="requests/s")
    add("--urgent", type=numbers_list, help="shares of category 1 (figure 10); default: trace's")
    add("--slo-scale", type=numbers_list, default=[1.2], help="category 1's objective (figure 11)")
    add("--trace", default="rps3.6", help="NAME of AdaServe's emission_NAME.json")
    add("--requests", type=int, default=72, help="of a window")
    add("--windows", type=int, default=3, help="of the trace; each system serves each")
    add("--prompt-scale", type=float, default=0.25, help="prompt tokens for one of the trace's")
    add("--output-scale", type=float, default=0.5, help="answer tokens for one of the trace's")
    add("--most-prompt", type=int, default=1024, help="no prompt is longer, tokens")
    add("--temperature", type=float, default=0.0)
    add("--parameters", type=float, default=300e6, help="of the target's twin; 0: itself")
    add("--draft-parameters", type=float, default=0.0, help="of the draft's twin; 0: itself")
    add("--models", type=Path, default=profiles.cache_dir() / "models", help="folder of the twins")
    add("--profile-s", type=float, default=0.0,
        help="of profiling step times for ours; 0: it learns them while it serves")  # fmt: skip
    add("--slo-config", help="JSON: configuration of ours, on top of what is measured")
    add("--variant", action="append", default=[], metavar="NAME=JSON",
        help="a further system: ours with this on top of its configuration")  # fmt: skip
    add("--dynamic", help="JSON: num_speculative_tokens_per_batch_size of the system dynamic")
    add("--engine", help="JSON: further vLLM engine arguments of every system")
    add("--patience", type=float, default=120.0, help="seconds after the last arrival")
    add("--disturbance", type=float, default=0.05, help="share of the machine others may take")
    add("--drift", type=float, default=0.08,
        help="by how much the machine may be faster or slower than at zero load")  # fmt: skip
    add("--wait", type=float, default=180.0, help="seconds to wait for that, before each run")
    add("--retries", type=int, default=2, help="of a run that was disturbed; the best counts")
    add("--seed", type=int, default=0)
    add("--work", type=Path, help="keep raw data here; runs found are not redone")
    args = parser.parse_args(given)
    args.systems += [one.partition("=")[0] for one in args.variant]
    if args.quick:
        args.parameters, args.profile_s, args.windows, args.requests = 0.0, 0.0, 1, 12
        args.prompt_scale, args.output_scale, args.rates = 0.1, 0.125, [6.0]
        args.wait, args.retries = 0.0, 0
        if args.systems == list(SYSTEMS):
            args.systems = ["stock", "ours"]
    return args


if __name__ == "__main__":
    main()
