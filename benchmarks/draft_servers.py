# SPDX-License-Identifier: Apache-2.0
"""GoodSpeed on the real CPU engine: four draft servers, where the time goes, and one that dies.

A twin of the built-in target verifies, four ``vllm-slo draft-server`` processes draft, all on the
same cores. As in the paper each draft server has a collection of prompts of its own, and here a
temperature; it drafts for two requests at a time. *Fixed-S*, *Random-S* and *GoodSpeed, C* grant
the same budget C in every step, verify all of it, and wait until it is there. *GoodSpeed* is what
``vllm-slo serve --draft-servers`` does: C and the wait are chosen at every step. Time is split as
in the paper's figure 3: until drafts are there (receive), sending, and the rest of a step (verify).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import adaserve_engine
import numpy as np
from adaserve_systems import in_own_process, say, twin
from common import RESULTS, markdown, write_result

from vllm_slo import tiny
from vllm_slo.bench import traces
from vllm_slo.bench.style import INK, PICTURE
from vllm_slo.config import profiles
from vllm_slo.wire.draft_socket import TOKEN_VARIABLE
from vllm_slo.wire.ports import free_port


class Client(NamedTuple):
    """A draft server's requests."""

    collection: str
    temperature: float


CLIENTS: Final = {
    "d0": Client("HumanEval", 0.0),
    "d1": Client("GSM8K", 0.0),
    "d2": Client("Spec-Bench", 0.5),
    "d3": Client("HumanEval", 1.0),
}
EACH: Final = 2
"""Requests of a client at a time."""
PROMPT, ANSWER = 48, 128
DEPTH: Final = 6
"""Most draft tokens of a request in a step."""
PLAIN, SHIPPED, OURS, FIXED, RANDOM = "plain", "GoodSpeed", "GoodSpeed, C", "Fixed-S", "Random-S"
MODES: Final = (PLAIN, SHIPPED, OURS, FIXED, RANDOM)
VICTIM: Final = "d1"
DEADLINE_MS: Final = 200.0
START_S: Final = 180.0
PHASES: Final = ("all four", "one killed", "it starts anew", "all four again")


class Step(NamedTuple):
    """One step in which every request decodes.

    Attributes:
        at_s: when it began.
        took_s, receive_s, send_s: of it.
        drafted: tokens verified beside the requests' own.
        given: tokens that came of it.
        by_client: tokens by draft server.
        asked: draft servers that were asked for drafts.
        ready: draft servers that are ready for more.
        longest_s: for which one of them was waited for.
    """

    at_s: float
    took_s: float
    receive_s: float
    send_s: float
    drafted: int
    given: int
    by_client: dict[str, int]
    asked: int
    ready: int
    longest_s: float

    @property
    def verify_s(self) -> float:
        """The rest of the step."""
        return self.took_s - self.receive_s - self.send_s


# --- in an engine's own process -------------------------------------------------------------------


class DraftServers:
    """The draft server processes."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._running = {name: self._start(name) for name in CLIENTS}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm_slo.cli", "draft-server", "--model", "tiny"),
                *("--name", name, "--connect", self._address, "--dtype", "bfloat16"),
                *("--enforce-eager", "--max-model-len", "512", "--max-sessions", str(EACH)),
            ],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": "1",
            },
            stdout=subprocess.DEVNULL,
        )

    def kill(self, name: str) -> None:
        """Kill a draft server with SIGKILL, as the kernel does when memory runs out."""
        self._running[name].send_signal(signal.SIGKILL)
        self._running[name].wait()

    def restart(self, name: str) -> None:
        """Start another process with the same name."""
        self._running[name] = self._start(name)

    def close(self) -> None:
        """End all draft servers."""
        for process in self._running.values():
            process.kill()
            process.wait()


class Grants:
    """How many tokens each request drafts: as shipped, or the same budget in every step."""

    def __init__(self, scheduler: Any, budget: int) -> None:
        from vllm_slo.core.speculation import candidate_trees
        from vllm_slo.core.speculation.model_chain import Plan

        self.drafting = scheduler.parts.speculation.drafting
        self.parts = scheduler.parts
        self._budget, self._plan = budget, Plan
        self._grove: Any = candidate_trees
        self._paying = self._grove.worthwhile_nodes
        self._shipped = self.drafting.decide, self.drafting.grants
        self._rng = np.random.default_rng(0)

    def use(self, mode: str) -> None:
        """Use a mode from now on."""
        decide, grants = self._shipped
        paying: Callable[..., int] = self._paying
        if mode == PLAIN:
            decide = self._never
        elif mode != SHIPPED:
            decide, paying = self._always, lambda chances, *_: len(chances)
        if mode in (FIXED, RANDOM):
            grants = self._equally if mode == FIXED else self._at_random
        self.drafting.decide, self.drafting.grants = decide, grants
        self._grove.worthwhile_nodes = paying

    def _never(self, _load: Any) -> None:
        self.drafting.nothing()

    def _always(self, _load: Any) -> None:
        drafting, wait_s = self.drafting, DEADLINE_MS * 1e-3
        requests = drafting._at_home(self.parts.speculation.drafting._state.running)
        for name, count in Counter(drafting._homes.values()).items():
            drafting.clients.add(name, float(count))
        drafting._budget, drafting._least = self._budget, {}
        drafting.plan = self._plan(depth=DEPTH, drafting_s=wait_s, requests=len(requests))
        self.parts.clock.drafting(0.0, 0.0)

    def _equally(self, requests: Sequence[Any]) -> Any:
        return self._divided(requests, lambda count: np.full(count, self._budget // count))

    def _at_random(self, requests: Sequence[Any]) -> Any:
        """All vectors whose sum is at most C are equally likely."""

        def drawn(count: int) -> Any:
            bars = self._rng.choice(self._budget + count, count, replace=False)
            return np.diff(np.sort(bars), prepend=-1) - 1

        return self._divided(requests, drawn)

    def _divided(self, requests: Sequence[Any], divide: Callable[[int], Any]) -> Any:
        from vllm_slo.engine.speculation.messages import Grant

        drafting = self.drafting
        found = drafting._at_home(requests) if drafting.plan.depth else []
        if not found:
            return {}
        most = drafting._most(found, DEPTH)
        grants = {
            request.request_id: Grant(drafting._homes[request.request_id], int(tokens))
            for request, tokens in zip(found, np.minimum(divide(len(found)), most), strict=True)
            if tokens
        }
        drafting._asked = {name: grant.drafter for name, grant in grants.items()}
        return grants


class Bench:
    """The engine, its draft servers, and a record of each step."""

    def __init__(self, ask: dict[str, Any]) -> None:
        from tokenizers import Tokenizer

        from vllm_slo import LLM

        os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)
        address = f"tcp://127.0.0.1:{free_port()}"
        speculation = {"max_depth": DEPTH, "draft_deadline_ms": DEADLINE_MS}
        llm = LLM(draft_servers=address, slo_config={"speculation": speculation}, **ask["engine"])
        self.engine: Any = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.grants = Grants(self.scheduler, ask["budget"])
        self.servers = DraftServers(address)
        self.steps: list[Step] = []
        self._tokenizer = Tokenizer.from_file(str(tiny.path("target") / "tokenizer.json"))
        self._texts = {name: texts(client) for name, client in CLIENTS.items()}
        self._clients: dict[str, str] = {}
        self._count = itertools.count()
        self._reports: list[Any] = []
        self._drafted = 0
        self.ended = self.failed = 0
        self._watch()

    def _watch(self) -> None:
        metrics = self.scheduler.parts.metrics.speculation
        schedule = self.scheduler.schedule
        showing = metrics.draft_servers

        def show(report: Any, clients: Any) -> None:
            self._reports.append(report)
            showing(report, clients)

        def noting(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._drafted = sum(map(len, output.scheduled_spec_decode_tokens.values()))
            return output

        metrics.draft_servers, self.scheduler.schedule = show, noting

    def prompts(self) -> dict[str, list[list[int]]]:
        """The next prompts of every client."""
        return {
            name: [self._tokenizer.encode(next(of)).ids[:PROMPT] for _ in range(EACH)]
            for name, of in self._texts.items()
        }

    def add(self, client: str, prompt: list[int], tokens: int = ANSWER) -> None:
        """Send a request of a client."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=CLIENTS[client].temperature, max_tokens=tokens, ignore_eos=True,
            detokenize=False, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        name = f"r{next(self._count)}"
        self._clients[name] = client
        known = set(self.scheduler.requests)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        (inside,) = set(self.scheduler.requests) - known  # vLLM gives it a longer name
        self.grants.drafting._homes[inside] = client

    def step(self) -> list[str]:
        """Make a step; the clients whose requests ended."""
        decoding = [r.num_output_tokens > 0 for r in self.scheduler.running]
        whole = len(decoding) == EACH * len(CLIENTS) and all(decoding)
        begun_s = time.monotonic()
        outputs = self.engine.step()
        took_s = time.monotonic() - begun_s
        given = Counter[str]()
        for output in outputs:
            given[self._clients[output.request_id]] += len(output.outputs[0].token_ids)
        report = self._reports.pop() if self._reports else None
        self._reports.clear()
        if whole:
            rounds = report.rounds if report else ()
            self.steps.append(
                Step(
                    begun_s, took_s, report.receive_s if report else 0.0,
                    report.send_s if report else 0.0, self._drafted, given.total(), dict(given),
                    len(rounds), sum(d.ready for d in self.grants.drafting._drafters.values()),
                    max((done.wait_s for done in rounds), default=0.0),
                )
            )  # fmt: skip
        done = [output for output in outputs if output.finished]
        self.ended += len(done)
        self.failed += sum(output.outputs[0].finish_reason != "length" for output in done)
        return [self._clients[output.request_id] for output in done]

    def serve(self, mode: str, prompts: dict[str, list[list[int]]]) -> list[Step]:
        """Serve requests to their end; the steps in which all of them decode."""
        self.grants.use(mode)
        self.engine.reset_prefix_cache()
        self.steps.clear()
        for client, texts_ in prompts.items():
            for prompt in texts_:
                self.add(client, prompt)
        while self.engine.has_unfinished_requests():
            self.step()
        return self.steps[2:]

    def await_drafters(self, names: set[str]) -> None:
        """Serve until these are ready; an idle engine does no steps and accepts no drafter."""
        end_s = time.monotonic() + START_S
        while names != {n for n, d in self.grants.drafting._drafters.items() if d.ready}:
            if time.monotonic() > end_s:
                raise SystemExit(f"draft servers are not ready within {START_S:.0f} s")
            self.add("d0", [1, 2, 3], 4)
            while self.engine.has_unfinished_requests():
                self.step()
            time.sleep(0.1)

    def death(self, seconds: float) -> dict[str, Any]:
        """Serve without end while a draft server is killed and started anew.

        Returns:
            steps, and when each of `PHASES` began.
        """
        self.grants.use(SHIPPED)
        self.steps.clear()
        self.ended = self.failed = 0
        waiting = [(client, prompt) for client, own in self.prompts().items() for prompt in own]
        began_s: list[float] = []
        acts = {"one killed": self.servers.kill, "it starts anew": self.servers.restart}
        for phase in PHASES:
            began_s.append(time.monotonic())
            if phase in acts:
                acts[phase](VICTIM)
            while not self._over(phase, time.monotonic() - began_s[-1], seconds):
                for client, prompt in waiting:
                    self.add(client, prompt)
                waiting = [(client, self.prompts()[client][0]) for client in self.step()]
        began_s.append(time.monotonic())
        return {
            "steps": [step._asdict() for step in self.steps],
            "began_s": began_s,
            "ended": self.ended,
            "failed": self.failed,
        }

    def _over(self, phase: str, lasted_s: float, seconds: float) -> bool:
        if lasted_s > START_S:
            raise SystemExit(f"{phase}: not over within {START_S:.0f} s")
        victim = self.grants.drafting._drafters.get(VICTIM)
        back = victim is not None and victim.ready
        return back if phase == "it starts anew" else lasted_s > seconds


def texts(client: Client) -> Iterator[str]:
    """Prompts of a client's collection, again and again."""
    found = traces.public_prompts(client.collection)
    if not found:
        raise SystemExit("the public prompts are not at hand; see the README's section on data")
    return itertools.cycle(found[::2] if client.temperature else found[1::2])


def measure(ask: dict[str, Any]) -> dict[str, Any]:
    """All turns, then the run in which a draft server is killed."""
    bench = Bench(ask)
    try:
        bench.await_drafters(set(CLIENTS))
        for mode in (SHIPPED, OURS):  # first steps are slow, acceptances are to be learnt
            bench.serve(mode, bench.prompts())
        disturbance = adaserve_engine.Disturbance()
        found: dict[str, Any] = {"turns": []}
        for turn in range(ask["turns"]):
            prompts = bench.prompts()
            for mode in MODES if turn % 2 == 0 else MODES[::-1]:
                steps = bench.serve(mode, prompts)
                found["turns"].append({"mode": mode, "steps": [step._asdict() for step in steps]})
            print(f"turn {turn + 1}: done", file=sys.stderr, flush=True)
        found["others"] = disturbance.share()
        found["death"] = bench.death(ask["seconds"])
    finally:
        bench.servers.close()
    return found


# --- the whole ------------------------------------------------------------------------------------


def split(steps: Sequence[Step]) -> list[str]:
    """Mean milliseconds of a step and its parts: step, receive, verify, send."""
    parts = (
        [s.took_s for s in steps],
        [s.receive_s for s in steps],
        [s.verify_s for s in steps],
        [s.send_s for s in steps],
    )
    return [f"{1e3 * fmean(part):.{1 if n < 3 else 2}f}" for n, part in enumerate(parts)]


def utility(steps: Sequence[Step]) -> float:
    """Sum of the logs of the clients' tokens per second."""
    took_s = sum(step.took_s for step in steps)
    tokens: Counter[str] = Counter()
    for step in steps:
        tokens.update(step.by_client)
    return sum(math.log(tokens[name] / took_s) for name in CLIENTS)


def verify_ms(steps: Sequence[Step]) -> float:
    """Milliseconds of verification for each token that came."""
    return 1e3 * sum(step.verify_s for step in steps) / sum(step.given for step in steps)


def mode_table(steps: dict[str, list[Step]]) -> str:
    """The parts of a step's time, and its tokens."""
    rows = []
    for mode, own in steps.items():
        took_s, given = sum(s.took_s for s in own), sum(s.given for s in own)
        by_client = Counter[str]()
        for step in own:
            by_client.update(step.by_client)
        goodputs = " / ".join(f"{by_client[name] / took_s:.0f}" for name in CLIENTS)
        cells = [f"{fmean(s.drafted for s in own):.1f}", f"{given / len(own):.1f}"]
        rates = [f"{given / took_s:.0f}", goodputs, f"{utility(own):.2f}"]
        rows.append([mode, len(own), *split(own), *cells, *rates, f"{verify_ms(own):.2f}"])
    head = ["system", "steps", "step, ms", "receive", "verify", "send", "drafts", "tokens"]
    return markdown([*head, "tokens/s", "by client", "utility", "verify, ms a token"], rows)


def death_table(steps: Sequence[Step], began_s: Sequence[float]) -> str:
    """The phases of the run in which a draft server dies."""
    rows = []
    for name, since_s, until_s in zip(PHASES, began_s, began_s[1:], strict=False):
        own = [step for step in steps if since_s <= step.at_s < until_s]
        took_s = sum(step.took_s for step in own)
        rows.append(
            [
                *(name, len(own), f"{until_s - since_s:.0f}", *split(own)),
                f"{1e3 * max(step.longest_s for step in own):.0f}",
                f"{fmean(step.asked for step in own):.1f}",
                f"{sum(step.given for step in own) / len(own):.1f}",
                f"{sum(step.given for step in own) / took_s:.0f}",
            ]
        )
    head = ["phase", "steps", "s", "step, ms", "receive", "verify", "send", "longest wait"]
    return markdown([*head, "asked", "tokens", "tokens/s"], rows)


def draw(modes: dict[str, list[Step]], steps: Sequence[Step], began_s: Sequence[float]) -> None:
    """Draw the parts of a step as in the paper's figure 3, and the kill second by second."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with mpl.rc_context(PICTURE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(11, 4.0), layout="constrained", width_ratios=(1.0, 1.35)
        )
        figure.suptitle(
            "Four draft servers on the CPU engine", x=0.01, ha="left", color=INK, fontsize=12,
            fontweight="bold",
        )  # fmt: skip
        bottom = np.zeros(len(modes))
        for part, colour in (
            ("verify_s", "#0072b2"),
            ("receive_s", "#e69f00"),
            ("send_s", "#d55e00"),
        ):
            per_token = [
                1e3 * sum(getattr(s, part) for s in own) / sum(s.given for s in own)
                for own in modes.values()
            ]
            left.bar(
                list(modes), per_token, bottom=bottom, color=colour, label=part[:-2], width=0.6
            )
            bottom += np.array(per_token)
        left.set_title("Time of a token by part")
        left.set_ylabel("ms")
        left.tick_params(axis="x", labelrotation=25)
        left.set_ylim(top=1.2 * bottom.max())
        left.legend(loc="upper left", ncols=3)
        at_s = np.array([step.at_s for step in steps]) - began_s[0]
        rate = [0.0] * int(at_s[-1] + 1)
        for second in range(len(rate)):
            own = [s for s, at in zip(steps, at_s, strict=True) if second <= at < second + 1]
            rate[second] = sum(s.given for s in own) / max(sum(s.took_s for s in own), 1e-9)
        right.plot(np.arange(len(rate)) + 0.5, rate, color="#0072b2", linewidth=2.0)
        for name, begun_s in zip(PHASES, began_s, strict=False):
            right.axvline(begun_s - began_s[0], color="#7a7a7a", linewidth=0.8, linestyle=":")
            right.annotate(
                name, (begun_s - began_s[0], 1.0), xycoords=("data", "axes fraction"),
                xytext=(3, -11), textcoords="offset points", fontsize=8.5, color=INK,
            )  # fmt: skip
        right.set_title("Tokens per second while one is killed")
        right.set_xlabel("seconds")
        right.set_ylim(bottom=0, top=1.15 * max(rate))
        figure.savefig(RESULTS / "draft_servers.png", dpi=110)
        plt.close(figure)


NOTE: Final = """
By client: tokens per second of each draft server's requests. Verifying takes GoodSpeed with the
same C {step:+.1%} of Fixed-S's time by step, and {token:+.1%} by token. In the paper receiving and
verifying dominate, and Random-S is the slowest, as here; sending is below 0.1%, here it is 1%.
Draft servers that share two cores with the verifier cost more than they bring: plain decoding is
the fastest, and what is shipped finds that out and asks for little, which costs some percent. While
a process starts anew its imports and its model take the cores from everybody: that is this
machine's doing and not the link's. Processes other than the verifier, draft servers among them,
took {others:.0%} of the machine during the turns.
"""


def main() -> None:
    """One engine's turns, then tables and picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="shows that it runs; writes nothing")
    add("--turns", type=int, default=6)
    add("--budget", type=int, default=24, help="C, draft tokens a step; the paper's is 16 to 28")
    add("--seconds", type=float, default=20.0, help="of each phase of the run with a death")
    add("--parameters", type=float, default=300e6, help="of the target's twin; 0: itself")
    add("--dtype", default="bfloat16")
    add("--models", type=Path, default=profiles.cache_dir() / "models")
    add("--ask", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        sys.stdout.write("\n" + json.dumps(measure(json.loads(args.ask.read_text()))) + "\n")
        return
    if args.quick:
        args.parameters, args.turns, args.seconds = 0.0, 1, 3.0
    engine = {
        "model": str(twin("target", args.parameters, args.models)), "dtype": args.dtype,
        "enforce_eager": True, "max_model_len": 512, "max_num_seqs": EACH * len(CLIENTS),
        "max_num_batched_tokens": 1024, "gpu_memory_utilization": 0.1, "seed": 0,
    }  # fmt: skip
    say("one engine, all systems by turns")
    ask = {"engine": engine, "turns": args.turns, "budget": args.budget, "seconds": args.seconds}
    found = in_own_process(__file__, ask)
    modes: dict[str, list[Step]] = {mode: [] for mode in MODES}
    for turn in found["turns"]:
        modes[turn["mode"]] += [Step(**step) for step in turn["steps"]]
    death = [Step(**step) for step in found["death"]["steps"]]
    began_s = found["death"]["began_s"]
    dying = [step for step in death if began_s[1] <= step.at_s][:3]
    usual_ms = 1e3 * median(step.took_s for step in death if step.at_s < began_s[1])
    told = (
        f"{found['death']['ended']} requests ended meanwhile, {found['death']['failed']} failed. "
        f"The first steps after the kill took {', '.join(f'{1e3 * s.took_s:.0f}' for s in dying)} "
        f"ms; the median step before it {usual_ms:.0f}."
    )
    tables = [
        f"Milliseconds of a step, C = {args.budget}:", mode_table(modes),
        f"Requests without end, {VICTIM} killed with SIGKILL, and later started again:",
        death_table(death, began_s),
        told,
    ]  # fmt: skip
    if args.quick:
        print("\n\n".join(tables))
        return
    draw(modes, death, began_s)
    tables.append("![Time of a token by part, and a death](draft_servers.png)")
    ours, fixed = modes[OURS], modes[FIXED]
    step = fmean(s.verify_s for s in ours) / fmean(s.verify_s for s in fixed) - 1.0
    token = (verify_ms(ours) / verify_ms(fixed)) - 1.0
    note = NOTE.format(step=step, token=token, others=found["others"])
    write_result("draft_servers", __doc__ or "", "\n\n".join(tables), note=note)


if __name__ == "__main__":
    main()
