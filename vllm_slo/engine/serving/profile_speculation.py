# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo profile MODEL --draft-model D``: when speculation helps on a model, and when not.

The engine is measured in a process of its own (`speculation_measurement`). It is set up as
``vllm-slo serve MODEL --draft-model D`` sets it up.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vllm_slo import tiny
from vllm_slo.config.model import SLOConfig
from vllm_slo.config.serve_args import TINY, tiny_arguments, tree_arguments, with_draft
from vllm_slo.config.speculation import DRAFT_KEY
from vllm_slo.core.speculation.benefit import (
    SHOWN,
    Benefit,
    Estimate,
    Kind,
    Run,
    Way,
    benefits,
)
from vllm_slo.engine.serving.benefit_words import verdict
from vllm_slo.engine.serving.profile_measurement import Progress
from vllm_slo.engine.serving.profile_prompts import built_in_prompts, read_prompts
from vllm_slo.errors import ConfigError, ProfileError

_SPECULATIVE: Final = ("worker_cls", "speculative_config")
"""Arguments of the engine that only speculation needs."""
QUICK_TURNS, TURNS = 3, 7
QUICK_LIMIT_S, LIMIT_S = 45.0, 180.0


@dataclass(frozen=True, slots=True)
class DraftedEngine:
    """An engine with a draft model.

    Attributes:
        model: name or folder of the served model.
        arguments: of ``vllm.LLM``.
        draft: as the user named it.
    """

    model: str
    arguments: Mapping[str, Any]
    draft: str

    @classmethod
    def of(cls, model: str, drafts: Sequence[str], engine_args: Mapping[str, Any]) -> DraftedEngine:
        """As ``vllm-slo serve`` sets it up.

        Raises:
            ConfigError: several draft models are given, or the one that is cannot be used.
        """
        if len(drafts) != 1:
            raise ConfigError(
                f"--draft-model: {len(drafts)} are given; 'vllm-slo profile' measures one at a time"
            )
        additional = {DRAFT_KEY: drafts[0]}
        speculation = SLOConfig.from_additional_config(additional).speculation
        name, memory = resolved(model, engine_args)
        arguments = {
            **memory,
            **engine_args,
            **tree_arguments(speculation, set(engine_args)),
            "additional_config": with_draft(additional, speculation, name),
        }
        return cls(name, arguments, drafts[0])

    def without_drafts(self) -> dict[str, Any]:
        """The arguments of the same engine without speculation."""
        left_out = (*_SPECULATIVE, "additional_config")
        return {name: value for name, value in self.arguments.items() if name not in left_out}


def resolved(model: str, engine_args: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A name or folder that vLLM can load, and arguments of the engine that this model needs."""
    if model != TINY:
        return model, {}
    return str(tiny.path("target")), tiny_arguments(set(engine_args))


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """What was found.

    Attributes:
        found: by numbers of requests at once, ascending, not empty.
        left_out: numbers for which there was no time.
        own_prompts: whether the texts were the user's.
        runs: from which it was found.
    """

    found: tuple[Benefit, ...]
    left_out: tuple[int, ...]
    own_prompts: bool
    runs: tuple[Run, ...]


def profile_speculation(
    engine: DraftedEngine,
    *,
    prompts: Path | None = None,
    quick: bool = False,
    time_limit_s: float | None = None,
    on_progress: Progress | None = None,
) -> SpeculationReport:
    """Measure what drafts are worth on an engine.

    Args:
        prompts: a file, see `read_prompts`; None: built-in texts.
        time_limit_s: for measuring, the engine's start left out; None: 45 s if quick, else 180 s.
        on_progress: is told the turns done and their number.

    Raises:
        ConfigError: the prompts cannot be used.
        ProfileError: the engine cannot be measured.
    """
    texts = built_in_prompts() if prompts is None else read_prompts(prompts)
    limit_s = (QUICK_LIMIT_S if quick else LIMIT_S) if time_limit_s is None else time_limit_s
    task = {
        "model": engine.model,
        "engine": dict(engine.arguments),
        "prompts": texts,
        "turns": QUICK_TURNS if quick else TURNS,
        "time_limit_s": limit_s,
    }
    batches, runs = _measured(task, on_progress)
    found = benefits(runs)
    if not found:
        raise ProfileError(
            f"drafts could not be measured within {limit_s:.0f} s, each way twice; leave --quick "
            "out, or measure on a quiet machine"
        )
    left_out = sorted(set(batches) - {one.requests for one in found})
    own_prompts = prompts is not None
    return SpeculationReport(tuple(found), tuple(left_out), own_prompts, tuple(runs))


def _measured(task: Mapping[str, Any], on_progress: Progress | None) -> tuple[list[int], list[Run]]:
    """What the measuring process answers, as `speculation_measurement.measure` returns it.

    Raises:
        ProfileError: it failed.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_slo.engine.serving.speculation_measurement"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        with process:
            try:
                found = _converse(process, task, on_progress)
            except BaseException:
                process.kill()
                raise
        if found is None or process.returncode:
            log.seek(0)
            lines = [line.strip() for line in log if line.strip()]
            last = lines[-1] if lines else f"exit status {process.returncode}"
            raise ProfileError(f"the engine with the draft model failed: {last}")
    return found


def _converse(
    process: subprocess.Popen[str], task: Mapping[str, Any], on_progress: Progress | None
) -> tuple[list[int], list[Run]] | None:
    """Send the task and read the answers; None: there was none."""
    assert process.stdin is not None
    assert process.stdout is not None
    found = None
    with contextlib.suppress(BrokenPipeError):  # it ended early; its log says why
        process.stdin.write(json.dumps(task))
        process.stdin.close()
    for line in process.stdout:
        answer = json.loads(line)
        if "error" in answer:
            raise ProfileError(answer["error"])
        if "runs" in answer:
            found = answer["batches"], [_run_of(row) for row in answer["runs"]]
        elif on_progress is not None:
            on_progress(answer["done"], answer["total"])
    return found


def _run_of(row: Mapping[str, Any]) -> Run:
    kind, length = row["way"]
    return Run(**{**row, "way": Way(Kind(kind), length)})


# --- shown ---------------------------------------------------------------------------------------


def table(report: SpeculationReport, title: str) -> Any:
    """The figures as a ``rich`` table."""
    from rich.box import SIMPLE
    from rich.table import Table

    shown = Table(title=title, box=SIMPLE, pad_edge=False, collapse_padding=True)
    for heading in (
        "requests", "no drafts\nms/token", "tokens/s", "best\nchain", "its\nspeedup",
        "accepted\nper step", "tree's\nspeedup", "as\nserved", "draft token\ncosts, ms",
        "drafting\nms/step",
    ):  # fmt: skip
        shown.add_column(heading, justify="right")
    for one in report.found:
        best = one.best_chain
        shown.add_row(
            str(one.requests), f"{1e3 * one.plain_s.value:.2f}", f"{one.plain_tokens_per_s:.0f}",
            str(best.way.length), _speedup(best.speedup), f"{best.accepted:.2f}",
            _speedup(one.trees[0].speedup) if one.trees else "-",
            _speedup(one.served.speedup) if one.served else "-",
            _ms(best.verify_s) if best.verify_s else "-", f"{1e3 * best.drafting_s:.2f}",
        )  # fmt: skip
    shown.caption = (
        f"Medians over {_turns(report.found)} turns of steps in which all requests decode; "
        "\u00b1 is half of what they differ by."
    )
    return shown


def sentences(report: SpeculationReport) -> list[str]:
    """What the figures say."""
    said = verdict(report.found)
    if not report.own_prompts:
        said.append(
            "These texts are Python code. With --prompts FILE your own are measured; drafts are "
            "accepted more often the easier a text is to guess."
        )
    if report.left_out:
        counts = ", ".join(map(str, report.left_out))
        said.append(f"Left out for lack of time: {counts} requests at once.")
    return said


def _turns(found: Sequence[Benefit]) -> str:
    counts = {one.turns for one in found}
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _ms(seconds: Estimate) -> str:
    return f"{1e3 * seconds.value:.2f} \u00b1 {1e3 * seconds.noise:.2f}"


def _speedup(speedup: Estimate) -> str:
    return f"{speedup.value:.2f} \u00b1 {max(speedup.noise, SHOWN):.2f}"
