# SPDX-License-Identifier: Apache-2.0
"""A trace's requests through each system: which of them count, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from vllm_slo.sim.cluster import simulate
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.jobs import Job
from vllm_slo.sim.systems import System
from vllm_slo.sim.traffic import Traffic
from vllm_slo.sim.whatif.numbers import Column, Kind, Numbers, compare
from vllm_slo.sim.whatif.outcomes import Asked, Measured, Outcome, as_served, as_simulated
from vllm_slo.sim.whatif.report import Trace
from vllm_slo.sim.workers import Processes, Progress, run_tasks
from vllm_slo.traces.files import format_name
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.selection import Recording

SERVED: Final = "served"
"""Stands for the recording where a name of a system is expected."""
Span = tuple[float, float, bool | None]


@dataclass(frozen=True, slots=True)
class Served:
    """What a system made of the requests: by their number in the recording, and all spans."""

    outcomes: dict[int, Outcome]
    spans: tuple[Span, ...]


def serve(
    jobs: Sequence[Job],
    system: System,
    hardware: Hardware,
    conditions: Conditions,
    measured: Measured,
) -> Served:
    """Simulate all jobs with one system; a task for ``workers.run_tasks``."""
    outcomes: dict[int, Outcome] = {}
    spans = []
    for result in simulate(jobs, system, hardware, conditions).results:
        for part in result.by_request():
            details = part.job.rounds[0].details
            assert details is not None
            outcomes[details.row] = as_simulated(part, measured)
            for got in part.rounds:
                end_s = got.token_times_s[-1] if got.token_times_s else got.sent_s
                spans.append((got.sent_s, end_s, got.promised))
    return Served(outcomes, tuple(spans))


class Comparison:
    """One trace on one machine.

    Attributes:
        asked: the requests that count, by arrival.
        trace: what was read, without the words of its selection.

    Raises:
        SimulationError: no request counts, or all arrive at one time.
    """

    def __init__(
        self, traffic: Traffic, hardware: Hardware, conditions: Conditions, warmup: float
    ) -> None:
        """``warmup``: first share of the requests that is not counted."""
        requests = traffic.recording.requests
        self._hardware, self._conditions = hardware, conditions
        self._recording = traffic.recording
        self._order = list(traffic.classes.config.classes)
        self._jobs = traffic.jobs(hardware)
        first = int(warmup * len(requests) + 1e-9)
        self._measured = Measured(requests[first].at_s, requests[-1].at_s)
        if not self._measured.length_s > 0:
            raise SimulationError(
                "trace: all requests that count arrive at the same time; select more of it"
            )
        details = {
            asked.details.row: asked.details
            for job in self._jobs
            for asked in job.rounds
            if asked.details is not None
        }
        self._rows = [
            row for row in range(first, len(requests)) if not _left_by_client(requests[row])
        ]
        self.asked = [
            Asked(requests[row], details[row].application, details[row].slo) for row in self._rows
        ]
        if not self.asked:
            raise SimulationError("trace: the clients of all requests left; none counts")
        self.trace = Trace(
            traffic.recording.source,
            traffic.recording.format,
            "",
            len(requests),
            traffic.recording.left_out,
            traffic.recording.estimated,
            traffic.clipped(hardware),
            len(requests) - first - len(self._rows),
            first,
            _why_unrecorded(traffic.recording, self.asked),
            traffic.recording.format != format_name("vllm-slo"),
        )

    def run(
        self,
        systems: Sequence[System],
        processes: Processes = None,
        progress: Progress | None = None,
    ) -> Numbers:
        """Simulate each system and compare it with the recording and the others.

        Raises:
            SimulationError: a request does not fit the engine.
        """
        tasks = [
            (self._jobs, system, self._hardware, self._conditions, self._measured)
            for system in systems
        ]
        columns = [] if self.trace.unrecorded else [self._served()]
        results = run_tasks(serve, tasks, processes, progress)
        for (title, kind), system, result in zip(_titles(systems), systems, results, strict=True):
            outcomes = tuple(result.outcomes[row] for row in self._rows)
            columns.append(Column(system.name, title, kind, outcomes, result.spans))
        return compare(self.asked, columns, self._measured, self._order)

    def _served(self) -> Column:
        """The recording as one of the systems.

        A server that promised nothing in the whole recording is taken for one that never does.
        """
        promises = any(
            request.served is not None and request.served.promise in ("in_time", "late")
            for request in self._recording.requests
        )
        spans = tuple(
            (
                request.at_s,
                request.at_s + request.served.e2e_s,
                request.served.promise == "in_time" if promises else None,
            )
            for request in self._recording.requests
            if request.served is not None and request.served.e2e_s is not None
        )
        outcomes = [as_served(each, self._measured) for each in self.asked]
        if not promises:
            outcomes = [replace(outcome, promised=None) for outcome in outcomes]
        return Column(SERVED, "As served", "served", tuple(outcomes), spans)


def _left_by_client(request: TraceRequest) -> bool:
    return request.served is not None and request.served.end == "aborted"


def _why_unrecorded(recording: Recording, asked: Sequence[Asked]) -> str | None:
    """Why there is nothing to say of what was served; None: there is."""
    served = [each.request.served for each in asked if each.request.served is not None]
    if not served:
        return (
            f"There is no column of what was served: a file of this format ({recording.format}) "
            "does not say what became of its requests."
        )
    if all(one.end == "completed" and one.ttft_s is one.e2e_s is None for one in served):
        return "There is no column of what was served: the file has no times of its answers."
    return None


def _titles(systems: Sequence[System]) -> list[tuple[str, Kind]]:
    """What each system is called, and its part in the comparison."""
    stock = [system.name for system in systems if system.stock]
    ours = [system.name for system in systems if system.policy == "slo"]
    made: list[tuple[str, Kind]] = []
    for system in systems:
        kind: Kind = "other"
        if system.name in (stock[:1] + ours[:1]):
            kind = "stock" if system.stock else "ours"
        title = f"vLLM {system.name}" if system.stock else system.name
        made.append(("Stock vLLM" if stock == [system.name] else title, kind))
    return made
