# SPDX-License-Identifier: Apache-2.0
"""AdaServe's workload in virtual time: real engine, real models, steps of a known length.

The workload and the systems are those of ``adaserve.py``, on the built-in models themselves. What a
step takes is not measured but computed: a fixed time, a time for each token, for each further path
of a tree and for each pass of the draft, and the scheduler's own time. It drifts and jitters alike
for every system. So one change of a policy can be told from another on a machine that is another
one some minutes later. It says nothing about what steps cost: for that there is ``adaserve.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from typing import Any, Final

import adaserve_engine as engine
from adaserve_report import Numbers, numbers_of
from adaserve_systems import Kitchen, Models, in_own_process, say
from adaserve_workload import Lengths, Point, load_trace, tokenised, workload

from vllm_slo import tiny
from vllm_slo.sim.statistics import mean_interval

SYSTEMS: Final = (
    *("ours", "chain-2", "chain-3", "chain-4", "dynamic"),
    *("ours-chain-3-without-lengths", "ours-chain-3"),
)
RATES: Final = (1.5, 3.0, 4.5, 6.0, 9.0)
TRACE: Final = "rps3.6"
REQUESTS: Final = 200
"""Of a window. In short windows the time after the last arrival, while answers end, counts for
much: with 60 requests a system that lets some wait looks worse at 3 and 4.5 requests/s than it is.
"""
BEGAN_S: Final = 1e6
"""The first reading of the clock."""
UNDISTURBED: Final = {"others": 0.0, "slower": 1.0}
"""Nobody disturbs a virtual machine."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step takes. The times are fitted to the chains of ``results/adaserve.md``, on
    two Intel cores.

    Attributes:
        step_s: of any step.
        token_s: of each token.
        path_tokens: of each path of a tree beyond the first, in tokens.
        draft_s: of drafting at all.
        pass_s: of each pass of the draft.
        draft_token_s: of each token of a pass.
        ours_s: of vllm-slo's scheduler and runner, beyond vLLM's.
        drift: by how much the machine is faster and slower, by turns.
        jitter: deviation of the logarithm of a single step's time.
        pauses: share of the steps that take `PAUSE` times as long.
    """

    step_s: float = 44.5e-3
    token_s: float = 0.65e-3
    path_tokens: float = 1.0
    draft_s: float = 0.9e-3
    pass_s: float = 1.5e-3
    draft_token_s: float = 0.02e-3
    ours_s: float = 2e-3
    drift: float = 0.1
    jitter: float = 0.04
    pauses: float = 0.02

    @property
    def zero_load_s(self) -> float:
        """Seconds per token of a lone request without drafts."""
        return self.step_s + self.token_s

    def describe(self) -> str:
        """In words."""
        return (
            f"A step takes {1e3 * self.step_s:g} ms, and {1e3 * self.token_s:g} ms for each token. "
            f"Another path of a tree counts as {self.path_tokens:g} token(s). Drafting takes "
            f"{1e3 * self.draft_s:g} ms, {1e3 * self.pass_s:g} ms for each pass and "
            f"{1e3 * self.draft_token_s:g} ms for each of its tokens; ours takes "
            f"{1e3 * self.ours_s:g} ms more. All of it drifts by {self.drift:.0%} and jitters by "
            f"{self.jitter:.0%}, and {self.pauses:.0%} of the steps take {PAUSE:g} times as long."
        )

    def drafting_s(self, passes: Sequence[int]) -> float:
        """Seconds of passes over so many tokens each."""
        if not passes:
            return 0.0
        each_s = self.draft_s + self.pass_s * len(passes)
        return each_s + self.draft_token_s * sum(passes)


PAUSE: Final = 1.7
PERIODS_S: Final = ((7.3, 1.0), (2.9, 0.7))
"""(seconds, weight) of the waves by which a machine drifts."""


class VirtualTime:
    """The clock of an engine, moved by its steps."""

    def __init__(self, cost: Cost) -> None:
        self.now_s = self.run_began_s = BEGAN_S
        self._cost = cost
        self._random = random.Random(5)

    def take(self, seconds: float) -> None:
        """Let a step pass that takes so long on the undisturbed machine."""
        cost, at_s = self._cost, self.now_s - self.run_began_s
        waves = sum(w * math.sin(2 * math.pi * at_s / period) for period, w in PERIODS_S)
        seconds *= self._random.lognormvariate(0.0, cost.jitter) * (1.0 + cost.drift * waves)
        self.now_s += seconds * (PAUSE if self._random.random() < cost.pauses else 1.0)

    def install(self) -> None:
        """Make it the clock of vllm-slo."""
        from vllm_slo.core.clock import SystemClock

        for reading in ("monotonic_s", "epoch_s"):
            engine.replace_attribute(SystemClock, reading, lambda _: self.now_s)


class VirtualSteps(engine.Steps):
    """Steps that take what they cost."""

    def __init__(self, llm: Any, time: VirtualTime, cost: Cost, *, ours: bool) -> None:
        super().__init__(llm)
        self._time, self._cost, self._ours = time, cost, ours
        self._paths = 0
        self._drafted_s = 0.0
        runner = llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._drafts = int(getattr(runner, "num_spec_tokens", 0) or 0)
        self._drafter = getattr(runner, "drafter", None)
        self._has_trees = hasattr(self._drafter, "take_report")
        if self._drafter is not None and self._has_trees:
            self._report, self._drafter.take_report = self._drafter.take_report, self.report

    def report(self) -> Any:
        """As the proposer's ``take_report``, with the times that its passes cost."""
        report = self._report()
        tokens = [count for _, count, _ in report.passes]
        self._drafted_s = report.seconds = self._cost.drafting_s(tokens)
        each_s = report.seconds / max(len(tokens), 1)
        report.passes = [(place, count, each_s) for place, count, _ in report.passes]
        return report

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As the scheduler's."""
        from vllm_slo.engine.speculation import messages

        output = super().schedule(*args, **kwargs)
        trees = messages.of(output).parents.values() if self._has_trees else ()
        self._paths = sum(len(set(range(len(tree))) - set(tree)) - 1 for tree in trees if tree)
        return output

    def update(self, output: Any, done: Any) -> Any:
        """As the scheduler's ``update_from_output``, once the step's time has passed."""
        tokens = output.total_num_scheduled_tokens
        if tokens:
            drafted_s = self._drafted_s if self._has_trees else self._chain_s(output)
            own_s = self._cost.ours_s if self._ours else 0.0
            verified = tokens + self._cost.path_tokens * self._paths
            self._time.take(self._cost.step_s + self._cost.token_s * verified + drafted_s + own_s)
            self._step["draft_s"] += drafted_s
            self._drafted_s = 0.0
        return super().update(output, done)

    def _chain_s(self, output: Any) -> float:
        """Seconds in which vLLM's own draft model drafts after a step."""
        passes = self._drafts and output.num_spec_tokens_to_schedule
        later = [len(output.num_scheduled_tokens)] * max(passes - 1, 0)
        first = [output.total_num_scheduled_tokens] if passes else []
        return self._cost.drafting_s([*first, *later])

    def draft(self, *args: Any, **kwargs: Any) -> Any:
        """As the runner's; its time is virtual."""
        assert self._draft is not None
        return self._draft(*args, **kwargs)


class VirtualServer(engine.Server):
    """An engine that is driven in virtual time."""

    def __init__(self, ask: engine.Ask, time: VirtualTime, cost: Cost) -> None:
        time.install()
        super().__init__(ask)
        self._time = time
        self.steps = VirtualSteps(self.engine, time, cost, ours=ask["send_slo"])

    def serve(self, requests: Sequence[engine.Asked], limit_s: float) -> dict[str, engine.Given]:
        """As ``Server.serve``."""
        time = self._time
        seen = {one["request_id"]: engine.Given(times_s=[], finished=False) for one in requests}
        left = deque((one, self.params(one)) for one in requests)
        begun_s = time.run_began_s = time.now_s
        while left or self.engine.has_unfinished_requests():
            now_s = time.now_s - begun_s
            if now_s > limit_s:
                self.engine.abort_request(list(seen))
                break
            while left and left[0][0]["arrival_s"] <= now_s:
                one, params = left.popleft()
                self.add(one, params, begun_s + one["arrival_s"])
            if not self.engine.has_unfinished_requests():
                time.now_s = begun_s + left[0][0]["arrival_s"] + 1e-6
                continue
            outputs = self.engine.step()
            time.now_s = max(time.now_s, begun_s + now_s + 1e-6)
            took_s = time.now_s - begun_s - now_s
            self.steps.end(now_s, took_s)
            for output in outputs:
                engine.note(seen[output.request_id], output, now_s + took_s)
        return seen


def distort(power: float) -> None:
    """Let the draft say its probabilities raised to a power; below 1 it is overconfident."""
    from vllm_slo.engine.speculation.candidates import Candidates

    receive = Candidates.receive

    def changed(self: Any, drafts: Any) -> bool:
        if hasattr(drafts, "probabilities"):
            drafts.probabilities = drafts.probabilities**power
        return receive(self, drafts)

    engine.replace_attribute(Candidates, "receive", changed)


def served(ask: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The numbers of each workload of an ask, in a process of its own."""
    for name, value in engine.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(ask["core"])
    os.sched_setaffinity(0, {ask["core"]})
    cost = Cost(**ask["cost"])
    pool, _ = load_trace(ask["trace"], 0)
    lengths = Lengths(*ask["lengths"])
    server, found = None, []
    for seed in ask["seeds"]:
        for rate in ask["rates"]:
            point = Point(rate, ask["urgent"], ask["scale"])
            requests = workload(pool, ask["requests"], point, seed, lengths, cost.zero_load_s)
            run = {**ask["run"], "requests": tokenised(requests), "limit_s": ask["limit_s"]}
            if server is None:
                server = VirtualServer(run, VirtualTime(cost), cost)  # type: ignore[arg-type]
                server.warm_up()
                if ask["power"] != 1.0:
                    distort(ask["power"])
            seen = server.run(run)  # type: ignore[arg-type]
            numbers = numbers_of(
                requests, {"requests": seen, "steps": server.steps.rows, **UNDISTURBED}
            )
            found.append({"seed": seed, "rate": rate, **asdict(numbers)})
    return found


def table(found: Mapping[str, Sequence[Mapping[str, Any]]], rates: Sequence[float]) -> list[Any]:
    """Means over the windows, with the 95% intervals of what counts, and goodput against the first
    system's in the same windows."""
    head = [
        *("requests/s", "system", "violations", "goodput, tokens/s", "over the first"),
        *("throughput, tokens/s", "mean TTFT, s", "accepted", "tokens a step", "step, ms"),
        "drafting",
    ]
    rows: list[list[str]] = []
    for rate in rates:
        first = _goodputs(next(iter(found.values())), rate)
        for name, runs in found.items():
            at = [run for run in runs if run["rate"] == rate]
            mean = {key: fmean(run[key] for run in at) for key in _SHOWN}
            over = [math.log(x / y) for x, y in zip(_goodputs(runs, rate), first, strict=True)]
            rows.append([
                f"{rate:g}", name,
                _interval([100 * run["violations"] for run in at], 1, "%"),
                _interval([run["goodput"] for run in at], 0, ""), _ratio(over),
                f"{mean['throughput']:.1f}", f"{mean['ttft_s']:.2f}", f"{mean['accepted']:.2f}",
                f"{mean['tokens_per_step']:.0f}", f"{1e3 * mean['step_s']:.0f}",
                f"{mean['draft_share']:.1%}",
            ])  # fmt: skip
    return [head, *rows]


def _goodputs(runs: Sequence[Mapping[str, Any]], rate: float) -> list[float]:
    return [run["goodput"] for run in runs if run["rate"] == rate]


def _interval(values: Sequence[float], digits: int, unit: str) -> str:
    """The mean and its 95% interval."""
    mean, half = mean_interval(values)
    spread = "" if half is None else f" \u00b1 {half:.{digits}f}"
    return f"{mean:.{digits}f}{spread}{unit}"


def _ratio(logarithms: Sequence[float]) -> str:
    """The geometric mean of ratios and its 95% interval."""
    mean, half = mean_interval(logarithms)
    if half is None:
        return f"{math.exp(mean):.2f}x"
    return f"{math.exp(mean):.2f}x ({math.exp(mean - half):.2f}-{math.exp(mean + half):.2f})"


_SHOWN: Final = tuple(
    name
    for name in Numbers.__dataclass_fields__
    if name not in ("by_category", "unfinished", "others", "slower", "choosing_share")
)


def main() -> None:
    """Serve every window at every rate by every system."""
    args = parse_args()
    if args.ask:
        print("\n" + json.dumps(served(json.loads(args.ask.read_text()))))
        return
    models = Models(tiny.path("target"), tiny.path("draft"))
    variants = {k: json.loads(v) for k, _, v in (one.partition("=") for one in args.variant)}
    kitchen = Kitchen(models, {"tpot_window_tokens": 128}, variants)
    asks = {}
    for name in (*args.systems, *variants):
        system = kitchen.system(name)
        run = {
            "engine": dict(system.engine), "send_slo": system.send_slo,
            "by_priority": system.by_priority, "without": system.without, "alone": False,
            "temperature": 0.0,
        }  # fmt: skip
        asks[name] = {
            "run": run, "cost": asdict(Cost()), "trace": TRACE, "lengths": [0.25, 0.5, 1024],
            "seeds": args.seeds, "rates": args.rates, "requests": args.requests, "limit_s": 900.0,
            "urgent": args.urgent, "scale": args.scale, "power": args.power,
        }  # fmt: skip
    cores: SimpleQueue[int] = SimpleQueue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)

    def run_one(ask: Mapping[str, Any]) -> Any:
        core = cores.get()
        try:
            return in_own_process(__file__, {**ask, "core": core})
        finally:
            cores.put(core)

    with ThreadPoolExecutor(cores.qsize()) as pool:
        runs = {name: pool.submit(run_one, ask) for name, ask in asks.items()}
        found = {}
        for name, served_runs in runs.items():
            found[name] = served_runs.result()
            say(f"{name} is done")
    from common import markdown, write_result

    head, *rows = table(found, args.rates)
    text = (
        f"{len(args.seeds)} windows of {args.requests} requests of {load_trace(TRACE, 0)[1]} "
        f"(seeds {', '.join(map(str, args.seeds))}), means. The tightest TPOT is {args.scale:g} "
        f"times what a lone request takes for a token. {Cost().describe()}"
    )
    if args.urgent is not None:
        text += f" {args.urgent:.0%} of the requests have that TPOT."
    if args.power != 1.0:
        text += f" The draft's probabilities are raised to the power {args.power:g}."
    if args.dry:
        print(markdown(head, rows))
        return
    write_result(args.name, f"{(__doc__ or '').strip()}\n\n{text}", markdown(head, rows))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--systems", type=lambda text: text.split(","), default=list(SYSTEMS),
        help="the first one is what the others' goodput is compared with")  # fmt: skip
    add("--rates", type=lambda text: [float(one) for one in text.split(",")], default=list(RATES))
    add("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[*range(6)])
    add("--requests", type=int, default=REQUESTS, help="of a window")
    add("--urgent", type=float,
        help="share of the tightest category (figure 10); default: as in the trace")  # fmt: skip
    add("--scale", type=float, default=1.2,
        help="the tightest TPOT over the zero-load latency (figure 11)")  # fmt: skip
    add("--power", type=float, default=1.0,
        help="the draft's probabilities get this power; below 1: overconfidence")  # fmt: skip
    add("--variant", action="append", default=[], metavar="NAME=JSON",
        help="a further system: ours with this on top of its configuration")  # fmt: skip
    add("--name", default="adaserve_virtual", help="of the result")
    add("--dry", action="store_true", help="only show the result, write none")
    add("--ask", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
