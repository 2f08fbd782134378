# SPDX-License-Identifier: Apache-2.0
"""LAPS-SD against the other orders of best effort, on the real CPU engine.

A twin of the built-in target serves prompts of HumanEval, Spec-Bench and GSM8K; the built-in draft
drafts by vLLM's own method, always 4 tokens a round. Lengths and orders are those of
``least_perceived_service.py``, answers a fifth as long. How many drafts are accepted is up to the
text, and to the temperature: two in three are greedy, the third has 1. A predicted length is a
quarter off. All orders serve the same requests, by turns in one engine. Prefix caching is on, as by
default, and empty before each turn: who gave up a place finds much of its KV again. "bound" is
shortest remaining time first, with the times that requests took in order of arrival, switching
being free.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import adaserve_engine
import numpy as np
from adaserve_systems import ENGINE, in_own_process, say, twin
from common import markdown, write_result
from least_perceived_service import (
    DRAFTS,
    LABELS,
    MIXES,
    OPTIONS,
    ORDERS,
    Job,
    bound_s,
    draw_latency,
    jobs_of,
)

from vllm_slo import tiny
from vllm_slo.bench import traces
from vllm_slo.config import profiles
from vllm_slo.config.class_names import SCHEDULER

SCALE: Final = 0.2
"""Of answers."""
LEAST: Final = 4
"""Tokens of an answer."""
TEXTS: Final = {"chat": "Spec-Bench", "code": "HumanEval", "thinking": "GSM8K"}
TEMPERATURES: Final = (0.0, 0.0, 1.0)
STABLE: Final = ((3, 0.2), (5, 0.05), (10, 0.02))
"""(gamma, delta)."""
TRIED: Final = tuple(order for order in ORDERS if order != "preemptive")
OURS: Final = TRIED[3:]
LIMIT_S: Final = 900.0


def shortened(job: Job, *, known: bool = False) -> Job:
    """The same request with a shorter answer, predicted as well as before, or exactly."""
    answer = max(int(SCALE * job.answer), LEAST)
    predicted = answer if known else max(round(answer * job.predicted / job.answer), 1)
    return replace(job, answer=answer, predicted=predicted)


# --- in an engine's own process -------------------------------------------------------------------


def asked_name(request_id: str) -> str:
    """The name under which a request was sent; vLLM adds to it."""
    return request_id.partition("-")[0]


class Server(adaserve_engine.Server):
    """An engine whose requests are best effort, whose order can be changed, and all of whose drafts
    are verified.

    Attributes:
        service_s: of each request, seconds of the steps that it was in.
        foreseen_s: of each request whose rate settled, what it was to take altogether.
        switches: places taken.
    """

    def __init__(self, ask: Any) -> None:
        super().__init__(ask)
        self.service_s: dict[str, float] = defaultdict(float)
        self.foreseen_s: dict[str, float] = {}
        self.switches = 0
        self._names: list[str] = []
        steps: Any = self.steps
        schedule, end = steps.scheduler.schedule, steps.end

        def noting(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._names = [asked_name(name) for name in output.num_scheduled_tokens]
            self.switches += len(output.preempted_req_ids or ())
            return output

        def ending(begun_s: float, took_s: float) -> None:
            for name in self._names:
                self.service_s[name] += took_s
            end(begun_s, took_s)

        steps.scheduler.schedule, steps.end = noting, ending
        lengths = steps.scheduler.parts.speculation

        def all_of_them(decoding: Sequence[Any]) -> list[int]:
            lengths._draft_ahead(DRAFTS)
            return [DRAFTS + 1] * len(decoding)

        lengths._choose_lengths = all_of_them

    def params(self, one: Any) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from vllm_slo import SLO

        slo = SLO(tier="best_effort", expected_output_tokens=one["predicted"])
        return SamplingParams(
            temperature=one["temperature"],
            max_tokens=one["output_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=slo.to_extra_args(),
        )

    def use(self, order: str, **options: Any) -> None:
        """Serve in this order from now on."""
        from vllm_slo.config.sections import BestEffortConfig
        from vllm_slo.engine.compat.scheduler_state import SchedulerState
        from vllm_slo.engine.scheduling.best_effort import BestEffort

        chosen: Any = {**OPTIONS[order], **options}
        parts = self.steps.scheduler.parts
        config = parts.config.model_copy(update={"best_effort": BestEffortConfig(**chosen)})
        best_effort = None
        if order != "fcfs":
            best_effort = BestEffort(
                *(SchedulerState(self.steps.scheduler), parts.tracker, parts.blocks, parts.clock),
                *(parts.guard, parts.workload.lengths, parts.metrics, config),
            )
        parts.planner._best_effort = parts.controller._best_effort = best_effort
        parts.recovery._best_effort = best_effort
        if best_effort is not None:
            self._follow(best_effort)

    def _follow(self, best_effort: Any) -> None:
        ending = best_effort.on_end

        def on_end(request: Any, *, by_itself: bool) -> None:
            known = best_effort._known.get(request.request_id)
            if known is not None and known.foreseen_s is not None:
                self.foreseen_s[asked_name(request.request_id)] = known.foreseen_s
            ending(request, by_itself=by_itself)

        best_effort.on_end = on_end


class Bench:
    """Serves the same requests in one order after another."""

    def __init__(self, ask: dict[str, Any]) -> None:
        from tokenizers import Tokenizer

        self.server = Server(ask["run"])
        tokenizer = Tokenizer.from_file(str(tiny.path("target") / "tokenizer.json"))
        self._texts = {
            mix: [tokenizer.encode(text).ids for text in traces.public_prompts(name)]
            for mix, name in TEXTS.items()
        }
        if not all(self._texts.values()):
            raise SystemExit("the public prompts are not at hand; see the README's section on data")

    def asked(self, mix: str, jobs: Sequence[Job], seed: int) -> list[dict[str, Any]]:
        """Requests of the lengths of these, with prompts of the mix's collection."""
        rng = np.random.default_rng([seed, 2])
        found = []
        for place, job in enumerate(jobs):
            texts = itertools.cycle(rng.permutation(len(self._texts[mix])).tolist())
            prompt: list[int] = []
            while len(prompt) < job.prompt:
                prompt += self._texts[mix][next(texts)]
            found.append(
                {
                    "request_id": f"r{place}", "arrival_s": job.arrival_s,
                    "prompt": prompt[: job.prompt], "output_tokens": job.answer,
                    "predicted": job.predicted, "temperature": float(rng.choice(TEMPERATURES)),
                }
            )  # fmt: skip
        return found

    def serve(self, asked: Sequence[Any], order: str, **options: Any) -> dict[str, Any]:
        """Serve and return latencies and service by request, and the predictions."""
        server = self.server
        server.use(order, **options)
        server.engine.reset_prefix_cache()
        server.steps.rows.clear()
        server.service_s.clear()
        server.foreseen_s.clear()
        server.switches = 0
        disturbance = adaserve_engine.Disturbance()
        seen = server.serve(asked, LIMIT_S)
        if not all(one["finished"] for one in seen.values()):
            raise SystemExit(f"{order}: not all requests ended within {LIMIT_S:.0f} s")
        rows = [row for row in server.steps.rows if row["decodes"] == row["requests"] == 1]
        return {
            "order": order,
            "latency_s": [
                seen[one["request_id"]]["times_s"][-1] - one["arrival_s"] for one in asked
            ],
            "service_s": [server.service_s[one["request_id"]] for one in asked],
            "foreseen_s": [server.foreseen_s.get(one["request_id"]) for one in asked],
            "switches": server.switches,
            "others": disturbance.share(),
            "drafts": fmean(row["draft_tokens"] for row in rows) if rows else 0.0,
            "tokens": fmean(row["given"] for row in rows) if rows else 0.0,
        }


def measure(ask: dict[str, Any]) -> dict[str, Any]:
    """All measurements of one engine."""
    bench = Bench(ask)
    for mix in TEXTS:  # the first steps are slow, and step times are to be learnt
        bench.serve(
            bench.asked(mix, [shortened(j) for j in jobs_of(MIXES[mix], 6, 99)], 99), "fcfs"
        )
    found: dict[str, Any] = {"runs": [], "stable": []}
    turns = itertools.count()
    for mix, count, seed in itertools.product(TEXTS, ask["counts"], range(ask["seeds"])):
        jobs = [shortened(job) for job in jobs_of(MIXES[mix], count, seed)]
        asked, turn = bench.asked(mix, jobs, seed), next(turns)
        for place in range(len(TRIED)):
            order = TRIED[(place + turn) % len(TRIED)]
            run = bench.serve(asked, order)
            told = {"mix": mix, "count": count, "seed": seed, "jobs": [asdict(job) for job in jobs]}
            found["runs"].append(told | run)
            shown = f"{fmean(run['latency_s']):.2f} s, {run['tokens']:.2f} tokens a round"
            print(f"{mix}, {count}, {order}: {shown}", file=sys.stderr, flush=True)
    for mix, (rounds, change) in itertools.product(TEXTS, STABLE if ask["stable"] else ()):
        jobs = [shortened(j, known=True) for j in jobs_of(MIXES[mix], ask["stable"], 0)]
        options = {"stable_rounds": rounds, "stable_change": change}
        run = bench.serve(bench.asked(mix, jobs, 0), "laps_sd", **options)
        found["stable"].append({"mix": mix, **options, **run})
    return found


# --- the whole ------------------------------------------------------------------------------------


def ask_of(args: argparse.Namespace, places: int, counts: Sequence[int]) -> dict[str, Any]:
    """The input of the engine's process, with so many places."""
    engine = {
        **ENGINE,
        "model": str(twin("target", args.parameters, args.models)),
        "dtype": args.dtype,
        "max_num_seqs": places,
        "enable_prefix_caching": True,
        "scheduler_cls": SCHEDULER,
        "speculative_config": {
            "method": "draft_model", "model": str(tiny.path("draft")),
            "num_speculative_tokens": DRAFTS,
        },
        "additional_config": {
            "slo_config": {"ageing_s": 3600.0, "best_effort": {"order": "laps_sd"}}
        },
    }  # fmt: skip
    stable = args.stable if places == 1 else 0
    run = {"engine": engine, "without": "", "by_priority": False}
    return {"run": run, "counts": counts, "seeds": args.seeds, "stable": stable}


def latencies(runs: Sequence[dict[str, Any]], mix: str, count: int) -> dict[str, list[float]]:
    """Mean latency of each order by seed, and the bound's where one is served at a time."""
    own = [run for run in runs if run["mix"] == mix and run["count"] == count]
    means = {o: [fmean(run["latency_s"]) for run in own if run["order"] == o] for o in TRIED}
    means["bound"] = [
        bound_s(
            (job["arrival_s"], took_s)
            for job, took_s in zip(run["jobs"], run["service_s"], strict=True)
        )
        for run in own
        if run["order"] == "fcfs"
    ]
    return means


def latency_table(runs: Sequence[dict[str, Any]], places: int) -> str:
    """A row for each mix and number of requests."""
    shown = [*TRIED, "bound"] if places == 1 else [*TRIED]
    rows = []
    for mix, count in sorted({(run["mix"], run["count"]) for run in runs}):
        means = latencies(runs, mix, count)
        best = [min(pair) for pair in zip(means["lp_sjf"], means["las"], strict=True)]
        ratios = [
            median(one / other for one, other in zip(means[name], best, strict=True))
            for name in (*OURS, *shown[len(TRIED) :])
        ]
        own = [run for run in runs if run["mix"] == mix and run["count"] == count]
        taken = [fmean(r["switches"] for r in own if r["order"] == o) for o in OURS]
        rows.append(
            [
                *(mix, count),
                *(f"{fmean(means[name]):.2f}" for name in shown),
                *(f"{ratio:.2f}" for ratio in ratios),
                " / ".join(f"{each:.0f}" for each in taken),
                *([round_of(own)] if places == 1 else []),
            ]
        )
    head = ["mix", "requests", *(LABELS[name] for name in shown)]
    head += [f"{LABELS[name]} / best" for name in (*OURS, *shown[len(TRIED) :])]
    last = ["drafts : tokens of a round"] if places == 1 else []
    return markdown([*head, "places taken by these", *last], rows)


def round_of(runs: Sequence[dict[str, Any]]) -> str:
    """Drafts and tokens of a round."""
    return " : ".join(f"{fmean(run[key] for run in runs):.1f}" for key in ("drafts", "tokens"))


def stable_table(runs: Sequence[dict[str, Any]]) -> str:
    """The error of predicted execution times."""
    rows = []
    for run in runs:
        pairs = [
            (foreseen_s, took_s)
            for foreseen_s, took_s in zip(run["foreseen_s"], run["service_s"], strict=True)
            if foreseen_s is not None
        ]
        off = [abs(foreseen_s / took_s - 1.0) for foreseen_s, took_s in pairs]
        cells = ["", "", ""]
        if pairs:
            total = sum(f for f, _ in pairs) / sum(t for _, t in pairs) - 1.0
            cells = [
                f"{100 * fmean(off):.1f}%",
                f"{100 * median(off):.1f}%",
                f"{100 * total:+.1f}%",
            ]
        rows.append(
            [
                *(run["mix"], run["stable_rounds"], run["stable_change"]),
                f"{len(pairs)} of {len(run['latency_s'])}",
                *cells,
                f"{fmean(run['latency_s']):.2f}",
            ]
        )
    head = ["mix", "gamma", "delta", "foreseen", "mean error", "median error", "of the sum"]
    return markdown([*head, "mean latency, s"], rows)


def main() -> None:
    """The engines' turns, then tables and picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="shows that it runs; writes nothing")
    add("--seeds", type=int, default=1)
    add("--counts", type=lambda t: [int(n) for n in t.split(",")], default=[10, 30])
    add("--places", type=int, default=4, help="of the second engine; 0: there is none")
    add("--stable", type=int, default=20, help="requests by which foresight is judged")
    add("--parameters", type=float, default=100e6, help="of the target's twin; 0: itself")
    add("--dtype", default="bfloat16")
    add("--models", type=Path, default=profiles.cache_dir() / "models")
    add("--ask", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        sys.stdout.write("\n" + json.dumps(measure(json.loads(args.ask.read_text()))) + "\n")
        return
    if args.quick:
        args.parameters, args.counts, args.stable, args.places = 0.0, [4], 6, 2
    say("one request at a time")
    one = in_own_process(__file__, ask_of(args, 1, args.counts))
    tables = [
        "One request at a time (the paper's batch of one), all within a second:",
        latency_table(one["runs"], 1),
    ]
    if args.places:
        say(f"{args.places} at a time")
        many = in_own_process(__file__, ask_of(args, args.places, args.counts[-1:]))
        tables += [f"{args.places} places:", latency_table(many["runs"], args.places)]
    tables += [
        "Execution times foreseen when the rate was believed, one at a time, lengths known:",
        stable_table(one["stable"]),
    ]
    if args.quick:
        print("\n\n".join(tables))
        return
    runs = one["runs"]
    lines: dict[str, dict[str, list[float]]] = {
        mix: {
            name: [fmean(latencies(runs, mix, count)[name]) for count in args.counts]
            for name in (*TRIED, "bound")
        }
        for mix in TEXTS
    }
    title = "Mean latency by number of requests, one at a time, on the CPU engine"
    draw_latency(lines, args.counts, title, "least_perceived_service_engine")
    others = max(run["others"] for run in runs)
    tables.append("![Mean latency by number of requests](least_perceived_service_engine.png)")
    note = f"Other processes took at most {others:.0%} of the machine during a turn."
    write_result("least_perceived_service_engine", __doc__ or "", "\n\n".join(tables), note=note)


if __name__ == "__main__":
    main()
