# SPDX-License-Identifier: Apache-2.0
"""The engine of ``benchmarks/draft_servers.py``, its draft servers, and a record of its steps.

It runs in a process of its own, which is given what to measure as a file after ``--ask``.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import adaserve_engine
import numpy as np

from vllm_slo import tiny
from vllm_slo.bench import traces
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


if __name__ == "__main__":
    print("\n" + json.dumps(measure(json.loads(Path(sys.argv[-1]).read_text()))))
