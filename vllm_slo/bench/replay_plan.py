# SPDX-License-Identifier: Apache-2.0
"""From recorded requests to the requests of a replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.planned import PlannedRequest, Workload
from vllm_slo.traces.classes import TrafficClasses
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.selection import Recording


@dataclass(frozen=True, slots=True)
class Replay:
    """What is sent.

    Attributes:
        rows: the recorded request of each request of the workload.
        too_long: requests that are not sent, as they do not fit the context.
    """

    workload: Workload
    rows: tuple[TraceRequest, ...]
    too_long: int

    def recorded(self, warmup: int) -> list[tuple[str, TraceRequest]]:
        """(class, recorded request) of all requests but the first ``warmup``."""
        pairs = zip(self.workload.requests, self.rows, strict=True)
        return [(request.slo_class, row) for request, row in pairs][warmup:]


def at_rate(recording: Recording, rate: float) -> Recording:
    """The recording with its times changed to this mean rate in requests/s.

    Raises:
        BenchError: all requests came at the same time.
    """
    span_s = recording.requests[-1].at_s
    if span_s <= 0:
        raise BenchError("--rate", "the requests of the trace came all at once; leave it out")
    speed = rate * span_s / (len(recording.requests) - 1)
    requests = tuple(structs.replace(r, at_s=r.at_s / speed) for r in recording.requests)
    return replace(recording, requests=requests, speed=recording.speed * speed)


def planned_replay(
    recording: Recording,
    classes: TrafficClasses,
    *,
    length_scale: float = 1.0,
    max_context: int | None = None,
    seed: int = 0,
) -> Replay:
    """The requests of a recording, with their classes and objectives.

    Args:
        length_scale: factor on all token counts.
        max_context: most tokens of a prompt and its answer; None: no bound.

    Raises:
        BenchError: no request fits the context.
        TraceError: recorded objectives are out of range.
    """
    requests: list[PlannedRequest] = []
    rows: list[TraceRequest] = []
    last_round: dict[str, TraceRequest] = {}
    for index, row in enumerate(recording.requests):
        prompt = max(1, round(row.prompt_tokens * length_scale))
        output = max(1, round(row.output_tokens * length_scale))
        if max_context is not None and prompt + output > max_context:
            continue
        name, session = classes.class_of(row, index), _session(row)
        before = last_round.get(session)
        request = PlannedRequest(
            request_id=f"{name or 'request'}-{index}",
            at_s=row.at_s,
            slo_class=name,
            prompt_tokens=prompt,
            output_tokens=output,
            ttft_slo_s=None,
            tpot_slo_s=None,
            hash_ids=row.hash_ids,
            block_tokens=row.block_tokens * length_scale,
            session=session,
            think_s=(before and recording.think_s(before, row)) or 0.0,
        )
        requests.append(request.asking(classes.slo_of(row, index)))
        rows.append(row)
        if session:
            last_round[session] = row
    if not requests:
        raise BenchError(
            "--length-scale", f"no request fits {max_context} tokens; give a factor below 1"
        )
    too_long = len(recording.requests) - len(requests)
    workload = Workload(
        "replay",
        seed,
        _duration_s([request.at_s for request in requests]),
        f"{recording.source}, {recording.format}",
        tuple(requests),
        recording.left_out + too_long,
    )
    return Replay(workload, tuple(rows), too_long)


def _session(row: TraceRequest) -> str:
    """A name for the session of a row, which two tenants never share; empty: it has none."""
    return "" if row.session is None else f"{row.tenant or ''}/{row.session}"


def _duration_s(times_s: Sequence[float]) -> float:
    """With the gap after the last request, so that the mean rate is exact."""
    span_s = times_s[-1] - times_s[0]
    return span_s * len(times_s) / (len(times_s) - 1) if span_s > 0 else 1.0
