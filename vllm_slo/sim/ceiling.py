# SPDX-License-Identifier: Apache-2.0
"""An upper bound on attainment and capacity that no schedule can exceed.

The bound is a linear program. It may keep a share ``x`` in [0, 1] of each counted job and drops the
others and the jobs of the warm-up at no cost. The program is a relaxation: every real run of the
jobs is one of its solutions. This is what it leaves out:

- It knows all arrivals, answers and tool times beforehand.
- Steps are divisible. Time is cut into bins, and a step that spans several bins counts in each by
  its share. A bin of D seconds with n steps, t tokens, r KV tokens read and p query-key pairs keeps
  ``n * b + k * t + kv_s * r + pair_s * p <= D`` for both lines (k, b) of the step-time model.
- Memory of M tokens limits what one step reads for answers and computes, ``r + t <= M * n``, and
  not what lies there between two steps. So requests may take turns in memory at no cost.
- Work of all kept jobs is added up, first prompts, later prompts and answers apart: what is done by
  the end of a bin is at least what is due by then, and at most what can have begun before. So work
  of one job that is done ahead may stand for work of another job that is due.
- A step gives a job at most one token. Only the sum over a job's life is kept: between its arrival
  and the latest time of its last token there are at least ``x`` times as many steps as tokens.
- Due times are rounded up to bins, and begins are rounded down. Prefixes of later rounds are
  cached. Scheduling takes no time. See ``ceiling_work`` for the least work and its times.

Speculation is outside: a draft gives a job more than one token in a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.sim.ceiling_work import Floats, JobWork, Work, least_step_time, works_of
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.demand import start_rate
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job
from vllm_slo.sim.measure import DEFAULT_WARMUP, counted, judged
from vllm_slo.sim.questions import Question
from vllm_slo.sim.search import DEFAULT_PRECISION, Threshold, find_threshold
from vllm_slo.sim.setting import Case
from vllm_slo.sim.statistics import Capacity
from vllm_slo.sim.workers import Processes, Progress, run_tasks

LONGEST_BIN_S: Final = 1.0
"""Longest bin. It is about as long as ten tokens at 100 ms, the window of a loose TPOT."""
SHORTEST_BIN_S: Final = 0.02
"""Shortest bin: about one step. Times of prompts that are closer share a bin's end."""
MOST_BINS: Final = 1000
"""A long window has at most about so many bins, which keeps a program within seconds. Twice as many
lower the bound by 0.1% (1,500 jobs of coder, Poisson)."""
_SLACK: Final = 1e-5
"""Jobs by which a solver's result may be below the true optimum; HiGHS keeps rows within 1e-7."""

_METHODS: Final = ("highs-ds", "highs-ipm")
"""HiGHS's dual simplex, and its interior point method where that ends without an optimum."""
_UNIT_TOKENS: Final = 1000.0
"""Tokens of a unit of work in the program: keeps its numbers, seconds among them, near 1."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The bound for one window.

    Attributes:
        jobs: most counted jobs that can attain, in fractions of a job.
        counted: jobs that count.
    """

    jobs: float
    counted: int

    @property
    def most(self) -> int:
        """Most counted jobs that can attain."""
        return min(self.counted, math.floor(self.jobs + _SLACK))

    @property
    def share(self) -> float:
        """Highest attainment."""
        return self.most / self.counted


def ceiling(
    jobs: Sequence[Job],
    hardware: Hardware,
    *,
    engines: int = 1,
    warmup: float = DEFAULT_WARMUP,
) -> Ceiling:
    """The most counted jobs that any schedule without speculation lets attain.

    Args:
        jobs: of one window.
        engines: that share the jobs; each is one ``hardware``. Moving KV between them is free.
        warmup: share of the jobs that does not count.

    Raises:
        SimulationError: no job counts, or SciPy is missing.
    """
    works = [work for _, work in _works(jobs, warmup, hardware)]
    if not works:
        raise SimulationError("jobs: none are left to measure after the warm-up; use more")
    return Ceiling(_most([works], [math.inf], hardware, engines), len(works))


def may_keep(
    jobs: Sequence[Job],
    hardware: Hardware,
    question: Question,
    *,
    engines: int = 1,
    warmup: float = DEFAULT_WARMUP,
    even: bool = False,
) -> bool:
    """Whether the bound allows the attainment that is asked for; arguments as ``ceiling``.

    ``even``: the same share of every counted job is to be kept. That bounds schedules which choose
    without regard to a job's work, and no others.
    """
    works = _works(jobs, warmup, hardware)
    names = {name for name, _ in works} if question.every else {""}
    parts = [[work for owner, work in works if name in ("", owner)] for name in sorted(names)]
    needed = [math.ceil(question.target * len(part) - 1e-9) for part in parts]
    return _most(parts, needed, hardware, engines, even) + _SLACK >= sum(needed)


def find_ceilings(
    cases: Sequence[Case],
    questions: Sequence[Question],
    seeds: Sequence[int],
    *,
    precision: float = DEFAULT_PRECISION,
    processes: Processes = None,
    progress: Progress | None = None,
    even: bool = False,
) -> list[tuple[Capacity, ...]]:
    """The bounds on what ``capacity.find_capacities`` finds, from the same windows and rates.

    ``even`` as in ``may_keep``. A case's system matters only by its number of engines. Steps that
    are slow or noisy on purpose (``Conditions``) are taken at their mean time, so there the bound
    holds on average.

    Raises:
        SimulationError: a system speculates.
    """
    starts: dict[str, float] = {}
    tasks: list[tuple[Any, ...]] = []
    for case in cases:
        if case.system.speculates:
            raise SimulationError(f"ceiling: {case.system.name}: no bound holds with speculation")
        key = repr(replace(case.setting, conditions=Conditions()))
        if key not in starts:
            starts[key] = start_rate(case.setting)
        tasks += [
            (case, seed, question, starts[key], precision, even)
            for question in questions
            for seed in seeds
        ]
    found = iter(run_tasks(search_ceiling, tasks, processes, progress))
    return [
        tuple(Capacity.of(question, [next(found) for _ in seeds]) for question in questions)
        for _ in cases
    ]


def search_ceiling(
    case: Case, seed: int, question: Question, start: float, precision: float, even: bool = False
) -> Threshold:
    """The highest rate of one window at which ``may_keep`` holds."""
    hardware = case.setting.hardware
    hardware = replace(hardware, step_time=hardware.step_time.scaled(case.setting.conditions.bias))

    def keeps(rate: float) -> bool:
        return may_keep(
            case.window(rate, seed),
            hardware,
            question,
            engines=case.engines,
            warmup=case.setting.warmup,
            even=even,
        )

    return find_threshold(keeps, start, precision=precision)


# --- the program ----------------------------------------------------------------------------------


def bin_ends(works: Sequence[JobWork]) -> Floats:
    """Ends of the bins, rising; the first bin begins at the first number.

    Ends lie where prompts can begin and where they are due, because those are the narrow times.
    """
    first = np.array([w.starts_s for w in works])
    due = np.concatenate([w.first_prompts.latest_s for w in works])
    last = max((w.ends_s for w in works if math.isfinite(w.ends_s)), default=0.0)
    times = np.concatenate([first, due[np.isfinite(due)], [last]])
    shortest_s = max(SHORTEST_BIN_S, (float(times.max()) - float(times.min())) / MOST_BINS)
    ends: list[float] = []
    for time_s in np.sort(times).tolist():
        if ends and time_s - ends[-1] < shortest_s:
            continue
        if ends:
            pieces = math.ceil((time_s - ends[-1]) / LONGEST_BIN_S)
            ends += np.linspace(ends[-1], time_s, pieces + 1)[1:-1].tolist()
        ends.append(time_s)
    if ends[-1] < last:
        ends.append(last)
    return np.array(ends)


class _Rows:
    """Rows of one kind, which grow block by block; a block is a matrix and its right-hand side."""

    def __init__(self) -> None:
        self._rows: list[Ints] = []
        self._columns: list[Ints] = []
        self._values: list[Floats] = []
        self._limits: list[Floats] = []
        self.count = 0

    def new(self, limits: Floats) -> Ints:
        """New rows with these right-hand sides."""
        self._limits.append(limits)
        self.count += len(limits)
        return np.arange(self.count - len(limits), self.count)

    def put(self, rows: Ints, columns: Ints, values: Floats | float) -> None:
        """Add ``values`` at these places."""
        self._rows.append(rows)
        self._columns.append(columns)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=float), rows.shape))

    def matrix(self, width: int) -> tuple[Any, Floats]:
        """The sparse matrix and the right-hand sides."""
        from scipy.sparse import csr_matrix

        places = (np.concatenate(self._rows), np.concatenate(self._columns))
        shape = (self.count, width)
        return csr_matrix((np.concatenate(self._values), places), shape), np.concatenate(
            self._limits
        )


class _Program:
    """A linear program that grows by columns and rows. Every column is at least 0."""

    def __init__(self) -> None:
        self.equal, self.at_most = _Rows(), _Rows()
        self._highs: list[Floats] = []
        self._gains: list[Floats] = []
        self._count = 0

    def columns(self, count: int, high: Floats | float = math.inf, gain: float = 0.0) -> Ints:
        """New columns between 0 and ``high``, each worth ``gain``."""
        self._highs.append(np.broadcast_to(np.asarray(high, dtype=float), count))
        self._gains.append(np.full(count, gain))
        self._count += count
        return np.arange(self._count - count, self._count)

    def highest(self) -> float:
        """The highest gain.

        Raises:
            SimulationError: SciPy is missing, or the solver fails.
        """
        try:
            from scipy.optimize import linprog
        except ImportError as error:
            raise SimulationError(
                "ceiling: the bound needs SciPy: pip install 'vllm-slo[bench]'"
            ) from error
        upper, upper_limits = self.at_most.matrix(self._count)
        equal, equal_limits = self.equal.matrix(self._count)
        highs = np.concatenate(self._highs)
        bounds = np.column_stack([np.zeros(len(highs)), highs])
        for method in _METHODS:
            found = linprog(
                -np.concatenate(self._gains),
                A_ub=upper,
                b_ub=upper_limits,
                A_eq=equal,
                b_eq=equal_limits,
                bounds=bounds,
                method=method,
            )
            if found.status == 0:
                return -float(found.fun)
        raise SimulationError(f"ceiling: the solver failed: {found.message}")


def _works(jobs: Sequence[Job], warmup: float, hardware: Hardware) -> list[tuple[str, JobWork]]:
    """Application and work of everything that counts (``measure.judged``)."""
    least = least_step_time(hardware.step_time)
    works = [
        (part, work)
        for job in counted(jobs, warmup)
        for part, work in zip(job.by_request(), works_of(job, hardware, least), strict=True)
    ]
    asking = {part.job_id for part in judged([part for part, _ in works])}
    return [(part.application, work) for part, work in works if part.job_id in asking]


def _most(
    parts: Sequence[Sequence[JobWork]],
    needed: Sequence[float],
    hardware: Hardware,
    engines: int,
    even: bool = False,
) -> float:
    """Most jobs, where no part counts for more than it needs."""
    least = least_step_time(hardware.step_time)
    every = [(part, work) for part, members in enumerate(parts) for work in members]
    owners = np.array([part for part, work in every if work.possible], dtype=np.int64)
    works = [work for _, work in every if work.possible]
    if not works:
        return 0.0
    program = _Program()
    if even:
        kept = np.repeat(program.columns(1, 1.0), len(works))
    else:
        kept = program.columns(len(works), 1.0)
    gains = program.columns(len(parts), np.asarray(needed, dtype=float), 1.0)
    rows = program.at_most.new(np.zeros(len(parts)))
    program.at_most.put(rows, gains, 1.0)
    program.at_most.put(rows[np.array(owners)], kept, -1.0)
    _add_engine(program, works, kept, hardware, least, engines)
    return program.highest()


def _add_engine(
    program: _Program,
    works: Sequence[JobWork],
    kept: Ints,
    hardware: Hardware,
    least: StepTimeModel,
    engines: int,
) -> None:
    """What the engine can do in each bin, and what the kept jobs need."""
    ends_s = bin_ends(works)
    bins = len(ends_s) - 1
    steps = program.columns(bins)
    prompts: list[tuple[Ints, Ints]] = []
    attention: list[tuple[Ints, Ints]] = []
    for kind in ("first_prompts", "later_prompts"):
        owned = _Owned.of(works, kept, kind)
        prompts.append(_add_work(program, ends_s, owned, owned.work.tokens / _UNIT_TOKENS))
        attention.append(_add_work(program, ends_s, owned, owned.work.attention_s))
    owned = _Owned.of(works, kept, "answers")
    answers = _add_work(program, ends_s, owned, owned.work.tokens / _UNIT_TOKENS)
    context = _add_work(program, ends_s, owned, owned.work.context / _UNIT_TOKENS)

    def add_rows(limits: Floats, step: float, prompt: float, answer: float, read: float) -> Ints:
        """A row per bin: one step, and each token of a kind, adds so much."""
        row = program.at_most.new(limits)
        program.at_most.put(row, steps, step)
        for done, value in (*((p, prompt) for p in prompts), (answers, answer), (context, read)):
            program.at_most.put(row[done[0]], done[1], value * _UNIT_TOKENS)
        return row

    for token_s, _, base_s in least.terms:
        row = add_rows(
            engines * np.diff(ends_s),
            base_s,
            token_s,
            token_s + least.pair_s,
            least.kv_s + least.pair_s,
        )
        for done in attention:
            program.at_most.put(row[done[0]], done[1], 1.0)
    memory = hardware.kv_tokens // hardware.block_size * hardware.block_size
    add_rows(np.zeros(bins), -1.0, 1.0 / memory, 1.0 / memory, 1.0 / memory)
    add_rows(np.zeros(bins), -1.0, 0.0, 1.0 / hardware.max_num_seqs, 0.0)
    _add_steps(program, ends_s, works, kept, steps)


@dataclass(frozen=True, slots=True)
class _Owned:
    """Pieces of work and the column of the job that each belongs to."""

    work: Work
    columns: Ints

    @classmethod
    def of(cls, works: Sequence[JobWork], kept: Ints, kind: str) -> _Owned:
        parts: list[Work] = [getattr(work, kind) for work in works]
        return cls(Work.joined(parts), np.repeat(kept, [len(part.tokens) for part in parts]))


def _add_work(
    program: _Program, ends_s: Floats, owned: _Owned, amounts: Floats
) -> tuple[Ints, Ints]:
    """Bins, and a column for each of what is done in it, between what is due and what has begun."""
    work, rows = owned.work, program.equal
    due = np.searchsorted(ends_s, work.latest_s, "left")
    begun = np.searchsorted(ends_s, work.earliest_s, "right")
    limited = (due < len(ends_s)) & (amounts > 0)  # the rest may be done after the last bin
    if not limited.any():
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    low, high = max(1, int(begun[limited].min())), int(due[limited].max())
    bins = high - low + 1
    done, surplus, ahead = (program.columns(bins) for _ in range(3))
    for state, sign, places in ((surplus, 1.0, due), (ahead, -1.0, begun)):
        row = rows.new(np.zeros(bins))
        rows.put(row, state, 1.0)
        rows.put(row[1:], state[:-1], -1.0)
        rows.put(row, done, -sign)
        at = np.clip(places[limited], low, high) - low
        rows.put(row[at], owned.columns[limited], sign * amounts[limited])
    return np.arange(low - 1, high), done


def _add_steps(
    program: _Program, ends_s: Floats, works: Sequence[JobWork], kept: Ints, steps: Ints
) -> None:
    """A kept job takes part in so many steps during its life."""
    total = program.columns(len(ends_s))
    row = program.equal.new(np.zeros(len(steps)))
    program.equal.put(row, total[1:], 1.0)
    program.equal.put(row, total[:-1], -1.0)
    program.equal.put(row, steps, -1.0)
    begin = np.searchsorted(ends_s, [w.starts_s for w in works], "right") - 1
    end = np.searchsorted(ends_s, [w.ends_s for w in works], "left")
    limited = end < len(ends_s)
    row = program.at_most.new(np.zeros(int(limited.sum())))
    program.at_most.put(row, total[end[limited]], -1.0)
    program.at_most.put(row, total[np.maximum(begin[limited], 0)], 1.0)
    program.at_most.put(row, kept[limited], np.array([float(w.steps) for w in works])[limited])
