# SPDX-License-Identifier: Apache-2.0
"""Measures what drafts are worth, on an engine in this process.

``python -m vllm_slo.engine.serving.speculation_measurement`` reads a `Task` as JSON and writes
lines of JSON: progress, and at the end the runs or an error. It has a process of its own, so that
its memory is free again when it ends.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypedDict

from vllm_slo.core.speculation.benefit import MIN_TURNS, Kind, Run, Way
from vllm_slo.engine.serving.profile_measurement import Limits, Progress, in_process_llm, limits_of
from vllm_slo.errors import ProfileError, VllmSLOError

BATCHES: Final = (1, 4, 16, 64)
"""Requests at once. More than 64 are not measured: the draft's passes hold 64 tokens."""
LENGTHS: Final = (1, 2, 4, 7)
"""Draft tokens of a chain, as far as ``speculation.max_depth`` allows; else that many."""
TREE_NODES: Final = 4
"""Nodes of a tree, for each request: as many as the chain has that it is compared with."""
PROMPT: Final = 128
"""Most tokens of a prompt."""
ANSWER: Final = 48
"""Tokens of an answer, on average over the requests of a run."""
SHORTEST: Final = 2 * ANSWER
"""Least ``max_model_len`` with which something can be measured."""
HELD_SHARE: Final = 0.8
"""Share of the KV cache that requests may hold: none is to be preempted."""
SETTLING: Final = 64
"""Steps with which the scheduler learns what drafts are worth before it is measured."""
SETTLING_SHARE: Final = 0.1
"""Most of the time that goes into it: once for the first steps of the engine, and once for all
numbers of requests together."""
DEARER: Final = 2.0
"""How much longer a turn is assumed to take with four times the requests, before it is measured.
Steps that are bound by memory take as long, those that are bound by arithmetic four times."""


class Task(TypedDict):
    """What is to be measured.

    Attributes:
        model: name or folder.
        engine: arguments of ``vllm.LLM``, those of speculation among them.
        prompts: texts.
        turns: how often each way is measured, if there is time for it.
        time_limit_s: for measuring, the start of the engine left out.
    """

    model: str
    engine: dict[str, Any]
    prompts: list[str]
    turns: int
    time_limit_s: float


def lengths_of(max_depth: int) -> list[int]:
    """Lengths of the chains that are measured."""
    return sorted({min(length, max_depth) for length in LENGTHS})


def batches_within(limits: Limits, deepest: int) -> list[int]:
    """Numbers of requests at once for which an engine has room, with chains of ``deepest`` tokens.

    Raises:
        ProfileError: there is none.
    """
    if limits.request_tokens < SHORTEST:
        raise ProfileError(
            f"max_model_len: {limits.request_tokens} tokens are too few to measure drafts with; "
            f"set it to {SHORTEST} or more"
        )
    held = min(PROMPT + 2 * ANSWER + deepest, limits.request_tokens)
    most = min(
        limits.requests,
        limits.step_tokens // (1 + deepest),
        int(HELD_SHARE * limits.kv_tokens) // held,
    )
    if not most:
        raise ProfileError(
            f"this engine is too small to measure drafts: {limits}; raise max_num_seqs, "
            "max_num_batched_tokens or the KV cache"
        )
    return sorted({min(batch, most) for batch in BATCHES})


class _Driver:
    """Decodes waves of requests on an in-process engine whose scheduler records drafts."""

    def __init__(self, llm: Any, prompts: Sequence[str]) -> None:
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.limits = limits_of(llm)
        self.speculation = self.scheduler.trees.config
        self.lengths = lengths_of(self.speculation.max_depth)
        self.batches = batches_within(self.limits, self.lengths[-1])
        most = min(PROMPT, self.limits.request_tokens - ANSWER)
        tokenizer = llm.get_tokenizer()
        encoded = (tokenizer.encode(prompt)[:most] for prompt in prompts)
        self._prompts = itertools.cycle([ids for ids in encoded if ids])
        self._ids = map(str, itertools.count())

    def ways(self, batch: int) -> list[Way]:
        """The ways to decode that many requests; a tree only where the draft has room for one."""
        chains = [Way(Kind.CHAIN, length) for length in self.lengths]
        tree = Way(Kind.TREE, min(TREE_NODES, self.speculation.max_depth))
        trees = [tree] if self._width(batch) > 1 else []
        return [Way(Kind.PLAIN), *chains, *trees, Way(Kind.SERVED)]

    def _width(self, batch: int) -> int:
        return max(min(self.speculation.max_width, self.speculation.draft_tokens // batch), 1)

    def prompts(self, batch: int) -> list[list[int]]:
        """The next prompts; after the last one the first one comes again."""
        return list(itertools.islice(self._prompts, batch))

    def settle(self, batch: int, until_s: float) -> None:
        """Let the scheduler learn what drafts are worth with so many requests."""
        steps = 0
        while steps < SETTLING and time.monotonic() < until_s:
            run = self.run(Way(Kind.SERVED), -1, self.prompts(batch))
            steps += run.steps if run is not None else SETTLING

    def turn(self, batch: int, turn: int) -> list[Run]:
        """Every way once, at the same prompts."""
        prompts, ways = self.prompts(batch), self.ways(batch)
        found = [self.run(way, turn, prompts) for way in (ways[::-1] if turn % 2 else ways)]
        return [run for run in found if run is not None]

    def run(self, way: Way, turn: int, prompts: Sequence[list[int]]) -> Run | None:
        """Decode the answers to prompts that come at once; None: they never all decoded.

        The first step in which all decode is left out: the draft has read prompts before it.
        """
        batch, engine, steps = len(prompts), self.engine, self.scheduler.steps
        self.scheduler.decode(way, self._width(batch))
        names = [self._add(ids) for ids in prompts]
        rows, seconds, tokens = [], [], 0
        while tokens < ANSWER * batch and len(self.scheduler.requests) == batch:
            steps.clear()
            began_s = time.perf_counter()
            engine.step()
            took_s = time.perf_counter() - began_s
            if steps and steps[-1].decodes == batch:
                rows.append(steps[-1])
                seconds.append(took_s)
                tokens += steps[-1].tokens
        engine.abort_request(names, internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        rows, seconds = rows[1:], seconds[1:]
        if not rows:
            return None
        return Run(
            batch, turn, way, len(rows),
            tokens=sum(row.tokens for row in rows),
            verified=sum(row.verified for row in rows),
            drafted=sum(row.verified > 0 for row in rows),
            seconds=sum(seconds),
            drafting_s=sum(row.drafting_s for row in rows),
        )  # fmt: skip

    def _add(self, prompt: list[int]) -> str:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=self.limits.request_tokens - len(prompt),
            ignore_eos=True,
            detokenize=False,
        )
        return str(self.engine.add_request(next(self._ids), {"prompt_token_ids": prompt}, params))

    def check(self) -> None:
        """Refuse figures of an engine that did not draft as it should.

        Raises:
            ProfileError: the draft model failed, or planning did.
        """
        if self.scheduler.trees.drafting.out:
            raise ProfileError(
                "--draft-model: it could not be loaded, or failed; 'vllm-slo serve' logs the reason"
            )
        failures = self.scheduler.parts.containment.failures
        if failures:
            raise ProfileError(f"planning failed in {failures} steps, so this would not be true")


def measure(
    llm: Any,
    prompts: Sequence[str],
    *,
    turns: int,
    time_limit_s: float,
    on_progress: Progress | None = None,
) -> tuple[list[int], list[Run]]:
    """All ways in turns, for each number of requests, until the time limit.

    The order is turned round in every other turn. The smallest number of requests is always
    measured. A larger one is left out if there is no time for `MIN_TURNS` turns of it.

    Args:
        llm: its scheduler is a `DraftRecordingScheduler`.
        prompts: texts, not empty.

    Returns:
        The numbers of requests for which the engine has room, and the runs.

    Raises:
        ProfileError: the engine is too small, or the draft model fails.
    """
    driver = _Driver(llm, prompts)
    began_s = time.monotonic()
    pace = _Pace(driver.batches, began_s + time_limit_s)
    driver.settle(driver.batches[0], began_s + SETTLING_SHARE * time_limit_s)
    driver.check()
    runs: list[Run] = []
    for done, (turn, batch) in enumerate(itertools.product(range(turns), driver.batches)):
        if pace.has_time(turn, batch):
            if not turn:
                share = SETTLING_SHARE / len(driver.batches)
                driver.settle(batch, time.monotonic() + share * time_limit_s)
            with pace.timing(batch):
                runs += driver.turn(batch, turn)
        if on_progress is not None:
            on_progress(done + 1, turns * len(driver.batches))
    driver.check()
    return driver.batches, runs


class _Pace:
    """Decides for which turns there is time, from how long turns took."""

    def __init__(self, batches: Sequence[int], until_s: float) -> None:
        self._smallest = batches[0]
        self._until_s = until_s
        self._took_s: dict[int, float] = {}
        self._is_out = False

    @contextmanager
    def timing(self, batch: int) -> Iterator[None]:
        """Time a turn of a number of requests."""
        began_s = time.monotonic()
        yield
        self._took_s[batch] = time.monotonic() - began_s

    def has_time(self, turn: int, batch: int) -> bool:
        """Whether there is time for a turn; in the first one, for `MIN_TURNS` of it besides those
        that smaller numbers of requests still need."""
        if batch == self._smallest and turn < MIN_TURNS:
            return True
        now_s = time.monotonic()
        if turn:
            return batch in self._took_s and now_s + self._took_s[batch] <= self._until_s
        last_s = list(self._took_s.values())[-1]
        needed_s = MIN_TURNS * DEARER * last_s + (MIN_TURNS - 1) * sum(self._took_s.values())
        self._is_out = self._is_out or now_s + needed_s > self._until_s
        return not self._is_out


def _answer(task: Task, write: Callable[[dict[str, Any]], None]) -> None:
    from vllm_slo.engine.serving.draft_recording import DraftRecordingScheduler

    engine = {**task["engine"], "scheduler_cls": DraftRecordingScheduler}
    with in_process_llm(task["model"], engine) as llm:
        gc.collect()
        gc.freeze()  # what was loaded stays; collecting it would disturb steps
        batches, runs = measure(
            llm, task["prompts"], turns=task["turns"], time_limit_s=task["time_limit_s"],
            on_progress=lambda done, total: write({"done": done, "total": total}),
        )  # fmt: skip
    write({"batches": batches, "runs": [dataclasses.asdict(run) for run in runs]})


def main() -> int:
    """Measure what standard input asks for; the exit status."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)  # what others print is none of it

        def write(line: dict[str, Any]) -> None:
            lines.write(json.dumps(line) + "\n")
            lines.flush()

        try:
            _answer(json.load(sys.stdin), write)
        except VllmSLOError as error:
            write({"error": str(error)})
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
