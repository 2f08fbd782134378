# SPDX-License-Identifier: Apache-2.0
"""The answers of ``vllm-slo plan`` as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm_slo.sim.demand import Resource
from vllm_slo.sim.fluid import Fluid
from vllm_slo.sim.questions import Question
from vllm_slo.sim.replicas_needed import Plan
from vllm_slo.sim.report import conditions_dict, hardware_dict, machine, percent, table, versions
from vllm_slo.sim.setting import Setting

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA: Final = "vllm-slo-plan/2"

DEFINITIONS: Final = {
    "replicas": "fewest found with which every window keeps the attainment; null: more than "
    "max_replicas",
    "replicas_on_average": "fewest found with which all windows together keep it",
    "attainment_half_width": "of the 95% interval of the attainment over windows (Student's t)",
    "fluid": "bounds that no schedule without drafts can undercut; without_objectives: the work "
    "alone, nothing is due; replicas: with the objectives, in every window",
    "dollars": "US dollars; per million tokens of answers, and of prompts and answers together",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What ``plan`` found for one traffic.

    Attributes:
        rate: jobs/s of all replicas; None: as recorded.
        fluid: None: SciPy is ``missing``.
        plans: one per system; none if only the bounds were asked for.
    """

    setting: Setting
    rate: float | None
    question: Question
    max_replicas: int
    fluid: Fluid | None
    missing: str
    plans: tuple[Plan, ...]

    @property
    def found(self) -> bool:
        """Whether the replicas that are allowed are enough."""
        if self.plans:
            return all(plan.enough is not None for plan in self.plans)
        least = self.fluid.replicas if self.fluid else None
        return least is not None and least <= self.max_replicas

    @property
    def title(self) -> str:
        setting = self.setting
        rate = setting.own_rate if self.rate is None else self.rate
        pace = " as recorded" if self.rate is None else ""
        return f"{setting.scenario}, {rate:.4g} {setting.unit}s/s{pace} on {setting.hardware.name}"


def counted(replicas: int) -> str:
    """A number of replicas in words."""
    return f"{replicas} replica" if replicas == 1 else f"{replicas} replicas"


def fluid_text(fluid: Fluid, question: Question, most: int) -> str:
    """The bounds in words."""
    free = fluid.without_objectives
    text = f"without objectives at least {counted(free)} ({fluid.busy:.2f} are busy on average)"
    least = fluid.replicas
    needed = f"more than {most}" if least is None or least > most else f"at least {counted(least)}"
    return f"{text}; to keep {question.percent} without drafts {needed}"


def verdict(plan: Plan) -> str:
    """How many replicas are needed, in words."""
    asked, name = plan.question.percent, plan.system.name
    enough, average = plan.enough, plan.on_average
    if enough is None:
        text = f"{counted(plan.max_replicas)} of {name} cannot keep {asked} in every window"
        if average is not None:
            text += f"; {average} keep it over all windows together"
        return f"{text}; no more were allowed, raise --max-replicas"
    gpus = plan.gpus(enough)
    text = f"{counted(enough)} of {name} ({gpus} {'GPU' if gpus == 1 else 'GPUs'}) "
    text += f"{'keeps' if enough == 1 else 'keep'} {asked} in every window"
    if average is not None and average < enough:
        text += f"; {average} {'keeps' if average == 1 else 'keep'} it over all windows together"
    return text


def why(plan: Plan) -> str:
    """What binds with one replica fewer, in words."""
    if plan.short is None or plan.binding is None:
        return "one replica is enough, so nothing binds"
    shares, what = plan.shares[plan.short], plan.binding
    used = shares["memory"] if what == "memory" else shares["prefill"] + shares["decode"]
    name = "memory (KV cache)" if what == "memory" else f"{what} time"
    if used >= 1:
        return f"what binds with {counted(plan.short)}: {name}, {used:.0%} of it is needed"
    return (
        f"what binds with {counted(plan.short)}: {name} is closest to its limit, at {used:.0%} "
        "on average; bursts and deadlines need the rest"
    )


def differences(plan: Plan) -> str:
    """What one more replica buys, and what one fewer loses."""
    if plan.enough is None:
        return ""
    parts = []
    here = plan.points[plan.enough].summary.attainment
    for other, word in ((plan.enough + 1, "more"), (plan.enough - 1, "fewer")):
        if other not in plan.points:
            continue
        points = 100 * (plan.points[other].summary.attainment - here)
        before, after = plan.cost(plan.enough), plan.cost(other)
        text = f"one replica {word}: {points:+.1f} points of attainment"
        if before.dollars_per_hour is not None and after.dollars_per_hour is not None:
            text += f", {after.dollars_per_hour - before.dollars_per_hour:+.2f} $ per hour"
        parts.append(text)
    return "; ".join(parts)


def _rows(plan: Plan) -> RenderableType:
    made = table(
        "",
        "replicas",
        (
            "GPUs",
            "kept\n%",
            "lowest\nwindow %",
            "prefill / decode / KV\n% of time, of memory",
            "GPU-hours per\nM answer tokens",
            "$ per\nhour",
            "$ per M\nanswer tokens",
            "$ per M\ntokens",
        ),
    )
    for replicas, point in sorted(plan.points.items()):
        shares, cost = plan.shares[replicas], plan.cost(replicas)
        width = "" if point.half_width is None else f" +- {100 * point.half_width:.1f}"
        kinds: tuple[Resource, ...] = ("prefill", "decode", "memory")
        made.add_row(
            str(replicas),
            str(plan.gpus(replicas)),
            percent(point.summary.attainment) + width,
            percent(min(point.attainments)),
            " / ".join(f"{100 * shares[kind]:.0f}" for kind in kinds),
            _money(cost.gpu_hours_per_mtok),
            _money(cost.dollars_per_hour),
            _money(cost.dollars_per_mtok),
            _money(cost.dollars_per_mtok_total),
        )
    return made


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def render(answer: Answer) -> RenderableType:
    """An answer as text and tables."""
    from rich.console import Group
    from rich.text import Text

    def line(text: str) -> Text:
        return Text(text, overflow="fold")

    parts: list[RenderableType] = [line(answer.title)]
    if answer.fluid is not None:
        bounds = fluid_text(answer.fluid, answer.question, answer.max_replicas)
        parts.append(line(f"  bounds: {bounds}"))
    else:
        parts.append(line(f"  no bounds: {answer.missing}"))
    for plan in answer.plans:
        parts += [line(f"  {verdict(plan)}"), _rows(plan), line(f"  {why(plan)}")]
        if changed := differences(plan):
            parts.append(line(f"  {changed}"))
    if answer.plans and answer.setting.hardware.price_per_gpu_hour is None:
        parts.append(line("  no price is known; --gpu-price USD gives one"))
    return Group(*parts)


def to_dict(answers: Sequence[Answer], command: str) -> dict[str, Any]:
    """JSON form of the answers of one command; times in seconds, rates per second in all."""
    return {
        "schema": SCHEMA,
        "definitions": DEFINITIONS,
        "command": command,
        "versions": versions(),
        "machine": machine(),
        "hardware": hardware_dict(answers[0].setting.hardware),
        "answers": [_answer_dict(answer) for answer in answers],
    }


def _answer_dict(answer: Answer) -> dict[str, Any]:
    setting, fluid = answer.setting, answer.fluid
    return {
        "scenario": None if setting.recorded else setting.scenario,
        "trace": setting.traffic[0].recording.source if setting.traffic else None,
        "rate": setting.own_rate if answer.rate is None else answer.rate,
        "own_pace": answer.rate is None,
        "attainment": answer.question.target,
        "every": answer.question.every,
        "max_replicas": answer.max_replicas,
        "conditions": conditions_dict(setting),
        "warmup": setting.warmup,
        "price_per_gpu_hour": setting.hardware.price_per_gpu_hour,
        "fluid": None
        if fluid is None
        else {
            "busy": fluid.busy,
            "without_objectives": fluid.without_objectives,
            "replicas": fluid.replicas,
        },
        "plans": [_plan_dict(plan) for plan in answer.plans],
    }


def _plan_dict(plan: Plan) -> dict[str, Any]:
    return {
        "system": plan.system.name,
        "replicas": plan.enough,
        "gpus": None if plan.enough is None else plan.gpus(plan.enough),
        "replicas_on_average": plan.on_average,
        "jobs_per_window": plan.jobs,
        "binding": plan.binding,
        "text": f"{verdict(plan)}; {why(plan)}",
        "tried": [
            {
                "replicas": replicas,
                "gpus": plan.gpus(replicas),
                "attainment": point.summary.attainment,
                "attainment_by_window": list(point.attainments),
                "attainment_half_width": point.half_width,
                "by_application": point.summary.by_application,
                "output_tokens_per_s": point.summary.output_tokens_per_s,
                "tokens_per_s": point.summary.tokens_per_s,
                "share_of_time_prefill": plan.shares[replicas]["prefill"],
                "share_of_time_decode": plan.shares[replicas]["decode"],
                "share_of_memory": plan.shares[replicas]["memory"],
                **asdict(plan.cost(replicas)),
            }
            for replicas, point in sorted(plan.points.items())
        ],
    }
