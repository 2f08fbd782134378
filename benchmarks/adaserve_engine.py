# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own, serving workloads in real time (see ``adaserve.py``).

``python adaserve_engine.py`` reads asks, a line of JSON each, and answers each with a line that
begins with ``ANSWER``; the first ask says what engine it is. vLLM on CPU cannot start a second
engine where numba is loaded, so each engine has its process; it stays, and sleeps while others are
asked. ``python adaserve_engine.py ASK.json`` measures an engine's step times and ends. There is no
server, no tokenizer and no network: a loop adds each request when its time has come, however far
behind the engine is, and steps the engine.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypedDict

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
WARM_UP: Final = ((16, 24),) * 8 + ((300, 24),) * 2 + ((900, 8),)
"""(prompt, answer) tokens of requests that come at once, several times: an engine's first steps are
slow, and a scheduler that learns step times and what a draft is worth has seen some."""
TURNS: Final = 8
ANSWER: Final = "answer: "
TOKEN_IDS: Final = 2_000
"""Below it, every token is an ordinary one of the built-in models."""


class Asked(TypedDict):
    """One request. Seconds from the begin of the run; ``tpot_slo_s`` per token."""

    request_id: str
    category: str
    arrival_s: float
    prompt: list[int]
    output_tokens: int
    tpot_slo_s: float


class Ask(TypedDict):
    """A run.

    Attributes:
        engine: arguments of ``vllm.EngineArgs``.
        requests: by rising arrival.
        send_slo: whether requests carry their objective.
        by_priority: whether requests have vLLM's priority, the tighter objective first.
        without: a part of ours to leave out, of ``ABLATIONS``; empty: none.
        alone: each request is sent when the one before has ended, whatever its arrival.
        temperature: of the sampler.
        limit_s: the run is broken off then; what has not ended by then never ends.
    """

    engine: dict[str, Any]
    requests: list[Asked]
    send_slo: bool
    by_priority: bool
    without: str
    alone: bool
    temperature: float
    limit_s: float


class Given(TypedDict):
    """The times of one request's tokens, seconds from the start of the run."""

    times_s: list[float]
    finished: bool


class Step(TypedDict):
    """One step.

    Attributes:
        begun_s, took_s: seconds from the begin of the run, and how long.
        tokens: scheduled, draft tokens included.
        requests: scheduled.
        draft_tokens: scheduled.
        decodes: requests that had an answer token already and got at least one more.
        given: tokens that these got.
        draft_s: seconds that drafting took.
        choosing_s: seconds in which the scheduler chose trees, all of it.
    """

    begun_s: float
    took_s: float
    tokens: int
    requests: int
    draft_tokens: int
    decodes: int
    given: int
    draft_s: float
    choosing_s: float


def replace_attribute(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute; AttributeError if it does not exist."""
    getattr(owner, name)
    setattr(owner, name, value)


def _without_slo() -> None:
    """No node is chosen because an objective needs it."""
    from vllm_slo.core.speculation.candidate_trees import CandidateTrees

    require = CandidateTrees.require

    def changed(self: Any, place: int, needs: Any, *, promised: bool) -> None:
        require(self, place, needs._replace(owed=float("-inf")), promised=promised)

    replace_attribute(CandidateTrees, "require", changed)


def _without_throughput() -> None:
    """No node is chosen to fill a step."""
    from vllm_slo.core.speculation import candidate_trees

    replace_attribute(candidate_trees, "worthwhile_nodes", lambda *_: 0)


def _without_adaptation() -> None:
    """Every tree has the same depth and width, whatever the load."""
    from vllm_slo.core.speculation.model_chain import ModelChains, Plan
    from vllm_slo.engine.speculation import next_drafts

    replace_attribute(next_drafts, "depth_and_width", lambda *_, **__: FIXED)
    replace_attribute(ModelChains, "choose", lambda *_: Plan((0,), *FIXED))


def _without_calibration() -> None:
    """The draft's probabilities are not calibrated."""
    from vllm_slo.core.speculation.calibration import DraftCalibration

    replace_attribute(DraftCalibration, "observe", lambda *_: None)


def _without_waiting() -> None:
    """Requests begin when they arrive, promised or not."""
    from vllm_slo.engine.scheduling.opportunistic import OpportunisticStarts

    replace_attribute(OpportunisticStarts, "had_better_wait", lambda *_: False)


def _without_lengths() -> None:
    """Every request verifies all drafts of its chain."""
    from vllm_slo.engine.speculation.chain_lengths import ChainLengths

    choose = ChainLengths.choose

    def all_of_them(self: Any, *args: Any, **kwargs: Any) -> list[int]:
        return [self._longest] * len(choose(self, *args, **kwargs))

    replace_attribute(ChainLengths, "choose", all_of_them)


FIXED: Final = (4, 2)
ABLATIONS: Final = {
    "slo": _without_slo,
    "throughput": _without_throughput,
    "adaptation": _without_adaptation,
    "calibration": _without_calibration,
    "waiting": _without_waiting,
    "lengths": _without_lengths,
}


class Steps:
    """Records the steps of an engine, by wrapping two methods of its scheduler."""

    def __init__(self, engine: Any) -> None:
        core = engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.rows: list[Step] = []
        self._step = self._blank()
        self._schedule, self.scheduler.schedule = self.scheduler.schedule, self.schedule
        self._update = self.scheduler.update_from_output
        self.scheduler.update_from_output = self.update
        runner = core.model_executor.driver_worker.worker.model_runner
        self.runner = type(runner).__module__ + "." + type(runner).__name__
        self._draft = getattr(runner, "propose_draft_token_ids", None)
        if self._draft is not None:
            runner.propose_draft_token_ids = self.draft
        parts = getattr(self.scheduler, "parts", None)
        if parts is not None:
            self._tree_times = parts.metrics.speculation.tree_times
            parts.metrics.speculation.tree_times = self.tree_times

    @staticmethod
    def _blank() -> Step:
        return Step(
            begun_s=0.0, took_s=0.0, tokens=0, requests=0, draft_tokens=0, decodes=0, given=0,
            draft_s=0.0, choosing_s=0.0,
        )  # fmt: skip

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """As the scheduler's."""
        output = self._schedule(*args, **kwargs)
        self._step["tokens"] += output.total_num_scheduled_tokens
        self._step["requests"] += len(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens.values()
        self._step["draft_tokens"] += sum(map(len, drafts))
        return output

    def update(self, output: Any, done: Any) -> Any:
        """As the scheduler's ``update_from_output``."""
        for name in output.num_scheduled_tokens:
            request = self.scheduler.requests.get(name)
            given = len(done.sampled_token_ids[done.req_id_to_index[name]])
            if given and request is not None and request.num_output_tokens:
                self._step["decodes"] += 1
                self._step["given"] += given
        return self._update(output, done)

    def draft(self, *args: Any, **kwargs: Any) -> Any:
        """As the runner's ``propose_draft_token_ids``."""
        begun_s = time.perf_counter()
        result = self._draft(*args, **kwargs)  # type: ignore[misc]
        self._step["draft_s"] += time.perf_counter() - begun_s
        return result

    def tree_times(self, *, draft_s: float, selection_s: float) -> None:
        """As the metrics'."""
        self._step["choosing_s"] += selection_s
        self._tree_times(draft_s=draft_s, selection_s=selection_s)

    def end(self, begun_s: float, took_s: float) -> None:
        """Close the row of a step."""
        self._step["begun_s"], self._step["took_s"] = begun_s, took_s
        if self._step["tokens"]:
            self.rows.append(self._step)
        self._step = self._blank()


class Server:
    """An in-process engine, driven in real time."""

    def __init__(self, ask: Ask) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.ask = ask
        self.engine = LLMEngine.from_engine_args(EngineArgs(**ask["engine"]))
        if ask["without"]:  # now: the parts load numba, with which vLLM on CPU would not start
            ABLATIONS[ask["without"]]()
        self.steps = Steps(self.engine)

    def params(self, one: Asked) -> Any:
        """Sampling parameters of a request, with its objective."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from vllm_slo import SLO

        slo = SLO(tpot_ms=1e3 * one["tpot_slo_s"])
        return SamplingParams(
            temperature=self.ask["temperature"],
            max_tokens=one["output_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args=slo.to_extra_args() if self.ask["send_slo"] else None,
        )

    def add(self, one: Asked, params: Any, arrived_epoch_s: float) -> None:
        """Send a request with its planned arrival time, even if the current step delayed it."""
        priority = round(1e3 * one["tpot_slo_s"]) if self.ask["by_priority"] else 0
        self.engine.add_request(
            one["request_id"],
            {"prompt_token_ids": one["prompt"]},
            params,
            arrival_time=arrived_epoch_s,
            priority=priority,
        )

    def serve(self, requests: Sequence[Asked], limit_s: float) -> dict[str, Given]:
        """Send each request at its time; returns the results by name."""
        seen = {one["request_id"]: Given(times_s=[], finished=False) for one in requests}
        left = deque((one, self.params(one)) for one in requests)
        begun_s, epoch_s = time.monotonic(), time.time()
        while left or self.engine.has_unfinished_requests():
            now_s = time.monotonic() - begun_s
            if now_s > limit_s:
                self.engine.abort_request(list(seen))
                break
            while left and left[0][0]["arrival_s"] <= now_s:
                one, params = left.popleft()
                self.add(one, params, epoch_s + one["arrival_s"])
            if not self.engine.has_unfinished_requests():
                time.sleep(max(0.0, min(left[0][0]["arrival_s"], limit_s) - now_s) + 1e-4)
                continue
            step_s = time.monotonic() - begun_s
            outputs = self.engine.step()
            now_s = time.monotonic() - begun_s
            self.steps.end(step_s, now_s - step_s)
            for output in outputs:
                note(seen[output.request_id], output, now_s)
        return seen

    def warm_up(self, turns: int = TURNS) -> None:
        """Serve requests with the objectives of the run to their end, and drop their steps."""
        words = random.Random(0)
        objectives = sorted({one["tpot_slo_s"] for one in self.ask["requests"]})
        room = int(self.ask["engine"]["max_model_len"])
        for turn in range(turns):
            burst = [
                Asked(
                    request_id=f"warm-{turn}-{n}", category="", arrival_s=0.0,
                    prompt=words.choices(range(1, TOKEN_IDS), k=min(prompt, room - answer)),
                    output_tokens=answer, tpot_slo_s=objectives[n % len(objectives)],
                )
                for n, (prompt, answer) in enumerate(WARM_UP)
            ]  # fmt: skip
            self.serve(burst, self.ask["limit_s"])
        self.steps.rows.clear()
        gc.collect()
        gc.freeze()  # as vLLM does once its engine has started

    def run(self, ask: Ask) -> dict[str, Given]:
        """Serve a workload with an empty prefix cache.

        Raises:
            RuntimeError: planning failed in a step, so what was measured is not ours.
        """
        self.ask = ask
        self.engine.reset_prefix_cache()
        self.steps.rows.clear()
        if not ask["alone"]:
            seen = self.serve(ask["requests"], ask["limit_s"])
        else:
            seen = {}
            for one in ask["requests"]:
                seen.update(self.serve([{**one, "arrival_s": 0.0}], ask["limit_s"]))
        parts = getattr(self.steps.scheduler, "parts", None)
        if parts is not None and parts.containment.failures:
            raise RuntimeError(f"planning failed {parts.containment.failures} times")
        return seen


def machine_busy_s() -> float:
    """CPU seconds that all processes of the machine, and whoever takes its cores from it, had."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, first[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class Disturbance:
    """The share of the machine that others take from its construction on."""

    def __init__(self) -> None:
        self._wall_s = time.monotonic()
        self._others_s = machine_busy_s() - self._own_s()

    @staticmethod
    def _own_s() -> float:
        user, system, *_ = os.times()
        return user + system

    def share(self) -> float:
        """Share of all cores' time that others took."""
        others_s = machine_busy_s() - self._own_s() - self._others_s
        lasted_s = max(time.monotonic() - self._wall_s, 1e-9)
        return max(0.0, others_s / lasted_s / (os.cpu_count() or 1))


def note(seen: Given, output: Any, now_s: float) -> None:
    """Record an output of the engine at its request; tokens of a step get the time of its end."""
    for one in output.outputs:
        seen["times_s"] += [now_s] * len(one.token_ids)
        seen["finished"] = seen["finished"] or one.finish_reason == "length"


def answer(server: Server, ask: Ask) -> dict[str, Any]:
    """Serve a workload.

    Returns requests and steps as described above; ``others``: the share of the machine's time that
    other processes took during the run.
    """
    import torch

    disturbance = Disturbance()
    seen = server.run(ask)
    others = disturbance.share()
    cache = server.engine.vllm_config.cache_config
    return {
        "requests": seen,
        "steps": server.steps.rows,
        "threads": torch.get_num_threads(),
        "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "runner": server.steps.runner,
        "others": others,
    }


def profile(ask: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the engine's step times; ``ask``: ``engine``, ``profile`` (a path), ``limit_s``."""
    from vllm_slo.config import profiles
    from vllm_slo.engine.serving.profile import profile as measure

    own = ("model", "async_scheduling")
    engine = {key: value for key, value in ask["engine"].items() if key not in own}
    report = measure(
        ask["engine"]["model"], quick=True, time_limit_s=float(ask["limit_s"]), **engine
    )
    profiles.save(report, Path(ask["profile"]))
    return {"r2": report.fit.r2, "shapes": report.fit.n}


def main() -> None:
    """Read one input file and answer it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if len(sys.argv) > 1:
        found = profile(json.loads(Path(sys.argv[1]).read_text()))
        sys.stdout.write(f"\n{ANSWER}{json.dumps(found)}\n")
        return
    server: Server | None = None
    for line in sys.stdin:
        ask = json.loads(line)
        if server is None:
            server = Server(ask)
            server.warm_up()
        sys.stdout.write(f"\n{ANSWER}{json.dumps(answer(server, ask))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
