# SPDX-License-Identifier: Apache-2.0
"""The report of ``vllm-slo whatif``: numbers, where they come from, and their JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.report import hardware_dict
from vllm_slo.sim.whatif.numbers import Cell, ClassRow, Numbers

SCHEMA: Final = "vllm-slo-whatif/1"

DEFINITIONS: Final = {
    "attained": "completed and kept every objective; of requests that have an objective",
    "ttft": "seconds from arrival to the first token, queueing included",
    "tpot": "seconds per token in the worst window of ten tokens of a request (SLOs-Serve, section "
    "6); in the recording the mean where it has no more",
    "e2e": "seconds from arrival to the last token",
    "interval": "95% interval, from the differences between stretches of the trace",
    "tokens_per_s": "answer tokens that came within the measured part, per second of it",
    "batch": "requests without an objective",
}


@dataclass(frozen=True, slots=True)
class Trace:
    """What was read.

    Attributes:
        name, format: of the file.
        selection: the part of it in words; empty: all of it.
        requests: selected and usable, warm-up included.
        left_out: rows that could not be used.
        estimated: requests that ended before their first token, so that the lengths of their
            answers are those of others of their class.
        clipped: requests that are cut to the context of the hardware.
        aborted: requests whose client left; they are simulated and do not count.
        warmup: requests at the beginning that are simulated and do not count.
        unrecorded: why there is no column of the recorded outcome; None: there is one.
        mean_tpot: whether a recorded TPOT is the mean of a request, not its worst window.
    """

    name: str
    format: str
    selection: str
    requests: int
    left_out: int
    estimated: int
    clipped: int
    aborted: int
    warmup: int
    unrecorded: str | None
    mean_tpot: bool


@dataclass(frozen=True, slots=True)
class Setup:
    """What was simulated: file names of the configuration and the rules, and the machine.

    Attributes:
        window_tokens: over which TPOT is judged.
        staged: classes whose answers have stages.
    """

    slo_config: str | None
    rules: str | None
    window_tokens: int
    staged: tuple[str, ...]
    hardware: Hardware
    replicas: int
    routing: str
    bias: float
    noise: float
    seed: int


@dataclass(frozen=True, slots=True)
class Origin:
    """How the report was made. ``created``: ISO 8601, UTC."""

    command: str
    created: str
    versions: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Report:
    """All that the page, the table and the JSON file say."""

    numbers: Numbers
    trace: Trace
    setup: Setup
    origin: Origin

    def to_dict(self) -> dict[str, Any]:
        """JSON form. Times in seconds, objectives in ms, rates per second."""
        numbers = self.numbers
        return {
            "schema": SCHEMA,
            "definitions": DEFINITIONS,
            **asdict(self.origin),
            "trace": asdict(self.trace),
            "setup": asdict(self.setup) | {"hardware": hardware_dict(self.setup.hardware)},
            "measured": asdict(numbers.measured),
            "systems": [
                {"system": column.system, "title": column.title, "kind": column.kind}
                for column in numbers.columns
            ],
            "all": self._row(numbers.all),
            "classes": [self._row(row) for row in numbers.classes],
            "batch": (
                dict(zip(self._systems(), map(asdict, numbers.batch), strict=True))
                if numbers.batch
                else None
            ),
        }

    def _systems(self) -> list[str]:
        return [column.system for column in self.numbers.columns]

    def _row(self, row: ClassRow) -> dict[str, Any]:
        return {
            "class": row.name,
            "objectives": asdict(row.objectives),
            "requests": row.requests,
            "requests_per_s": row.requests_per_s,
            "prompt_tokens": row.prompt_tokens,
            "output_tokens": row.output_tokens,
            "systems": {
                system: _cell(cell) for system, cell in zip(self._systems(), row.cells, strict=True)
            },
            "gains": [asdict(gain) for gain in row.gains],
        }


def _cell(cell: Cell) -> dict[str, Any]:
    data = asdict(cell)
    if cell.attained is not None:
        data["attained"]["share"] = cell.attained.share
    return data
