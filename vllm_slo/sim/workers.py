# SPDX-License-Identifier: Apache-2.0
"""Run tasks in several processes; the results do not depend on how many there are."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from vllm_slo.bench.style import usable_cores
from vllm_slo.sim.errors import SimulationError

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with (tasks done, tasks in all)."""


def _exit_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _start_worker() -> None:
    # A parent that is killed cannot stop its workers, so they watch it.
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    # Each process has a core: more threads would only compete for it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    quiet()


def quiet() -> None:
    """Hide vLLM's log lines about a model that is never run."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)


class Workers:
    """Processes for several calls of ``run_tasks``, so that each imports vLLM once.

    ``processes``: how many; None: one per usable core; 1: run tasks in this process.
    """

    def __init__(self, processes: int | None = None) -> None:
        self.processes = processes or usable_cores()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def pool(self) -> ProcessPoolExecutor:
        """The processes; the first call starts them."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self.processes, mp_context=context, initializer=_start_worker
            )
        return self._pool


Processes = Workers | int | None


def run_tasks(
    function: Callable[..., T],
    arguments: Sequence[tuple[Any, ...]],
    processes: Processes = None,
    progress: Progress | None = None,
) -> list[T]:
    """``function(*a)`` for each of ``arguments``, in their order.

    Args:
        function: of a module's top level.
        arguments: picklable.
        processes: ``Workers``, or how many to start for this call only.

    Raises:
        SimulationError: a process died.
    """
    if not isinstance(processes, Workers):
        with Workers(processes) as workers:
            return run_tasks(function, arguments, workers, progress)
    total = len(arguments)
    show = progress or (lambda done, of: None)
    show(0, total)
    if processes.processes == 1 or total < 2:
        results = []
        for done, given in enumerate(arguments, 1):
            results.append(function(*given))
            show(done, total)
        return results
    pool = processes.pool()
    futures = [pool.submit(function, *given) for given in arguments]
    try:
        for done, finished in enumerate(as_completed(futures), 1):
            finished.result()
            show(done, total)
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise SimulationError(
            "processes: a worker died (out of memory?); use fewer --processes"
        ) from error
    finally:
        for future in futures:
            future.cancel()
