# SPDX-License-Identifier: Apache-2.0
"""What ``simulate`` and ``plan`` share: options, and the settings that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from vllm_slo import arguments
from vllm_slo.arguments import listed, one_of, share, whole
from vllm_slo.core.types import RoutingPolicy
from vllm_slo.sim.arrivals import ARRIVALS
from vllm_slo.sim.conditions import Conditions, Overhead
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import built_in, load_hardware
from vllm_slo.sim.measure import DEFAULT_WARMUP, counted
from vllm_slo.sim.scenarios import SCENARIOS, applications_of
from vllm_slo.sim.setting import Setting
from vllm_slo.sim.systems import DRAFTS, System, parse_system
from vllm_slo.sim.traffic import Traffic
from vllm_slo.traces.classes import TrafficClasses, add_class_arguments, classes_of
from vllm_slo.traces.selection import Selection, add_selection_arguments, load, selection_of

DEFAULT_WINDOWS = 3
DEFAULT_ACCEPTANCE = 0.7
ALL = "all"


def system(text: str) -> System:
    """A type for argparse: a system by its name."""
    try:
        return parse_system(text)
    except SimulationError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("systems: ")) from None


def acceptances(text: str) -> dict[str, float]:
    """A type for argparse: shares by application; the empty name stands for all others."""
    shares = {}
    for part in text.split(","):
        name, _, value = part.rpartition("=")
        shares[name.strip()] = share(above_zero=False)(value)
    return shares


class _OldTraceFile(arguments.Renamed):
    """``--trace-file``: only the times of the trace count, as they did."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        super().__call__(parser, namespace, values, option_string)
        namespace.lengths = "table"


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that ``simulate`` and ``plan`` share; ``settings_of`` reads them."""
    _add_traffic(parser)
    _add_engines(parser)
    add = parser.add_argument_group("windows").add_argument
    add("--jobs", type=whole(1), default=500, metavar="N",
        help="jobs per window and engine, of a trace requests (default: 500)")  # fmt: skip
    add("--windows", type=whole(1), metavar="N",
        help=f"windows, each with its own seed (default: {DEFAULT_WINDOWS}). Without --rate: "
        "stretches of the trace of equal duration (default: 1)")  # fmt: skip
    add("--warmup", type=share(above_zero=False), default=DEFAULT_WARMUP, metavar="SHARE",
        help="first share of a window's jobs, which is simulated and not counted "
        f"(default: {DEFAULT_WARMUP})")  # fmt: skip
    add("--seed", type=whole(0), default=0, metavar="N",
        help="seed of the first window (default: 0)")  # fmt: skip
    add("--processes", type=whole(1), metavar="N",
        help="simulations at the same time (default: one per core)")  # fmt: skip


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("traffic").add_argument
    add("--scenario", type=listed(one_of([*SCENARIOS, ALL])), metavar="NAME,...",
        help=f"{ALL}, or one or more of {', '.join(SCENARIOS)} (default without a trace: "
        "chatbot)")  # fmt: skip
    add("--trace", type=Path, metavar="FILE",
        help="recorded requests, in any format that 'vllm-slo replay' reads; without --rate they "
        "arrive at their own times")  # fmt: skip
    add("--trace-file", type=Path, action=_OldTraceFile, dest="trace",
        new="--trace FILE --lengths table")  # fmt: skip
    add("--lengths", type=one_of(("trace", "table")), default="trace", metavar="SOURCE",
        help="trace: prompts and answers are as long as recorded; table: as in the scenario, with "
        "the times of the trace (default: trace)")  # fmt: skip
    add("--arrivals", type=one_of(ARRIVALS), metavar="KIND",
        help=f"one of {', '.join(ARRIVALS)} (default: the scenario's own)")  # fmt: skip
    add("--fit", type=one_of(("rescale", "thin")), default="rescale", metavar="HOW",
        help="how a trace is fitted to --rate: rescale its times, or thin its rows "
        "(default: rescale)")  # fmt: skip
    add("--system-tokens", type=whole(0), default=0, metavar="N",
        help="tokens with which every job's first prompt begins, the same for all jobs without "
        "hash ids (default: 0)")  # fmt: skip
    add_selection_arguments(parser)
    add_class_arguments(parser)


def _add_engines(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engines").add_argument
    add("--hardware", default="h100-llama-8b", metavar="NAME|FILE",
        help=f"one of {', '.join(built_in())}, a YAML file, or a JSON profile of 'vllm-slo "
        "profile' (default: h100-llama-8b)")  # fmt: skip
    add("--kv-tokens", type=whole(1), metavar="N",
        help="KV-cache size of one engine, tokens (default: the hardware's)")  # fmt: skip
    add("--max-num-seqs", type=whole(1), metavar="N",
        help="most requests in one step (default: the hardware's)")  # fmt: skip
    add("--routing", type=one_of(get_args(RoutingPolicy)), metavar="POLICY",
        help=f"how a replica is chosen: {', '.join(get_args(RoutingPolicy))} (default: that of "
        "--slo-config, or slo, which asks one replica after the other for a promise)")  # fmt: skip
    add("--bias", type=arguments.number(0, above=True), default=1.0, metavar="FACTOR",
        help="true step time divided by the one the scheduler believes (default: 1.0)")  # fmt: skip
    add("--noise", type=arguments.number(0, 1), default=0.0, metavar="SHARE",
        help="relative standard deviation of a step's time (default: 0.0)")  # fmt: skip
    add("--acceptance", type=acceptances, default={"": DEFAULT_ACCEPTANCE},
        metavar="A|APPLICATION=A,...",
        help="for systems that speculate: probability that the next drafted token is accepted, "
        "for all applications or for each (default: 0.7, an assumption)")  # fmt: skip
    add("--draft-step-ms", type=arguments.number(0, 60_000), metavar="MS",
        help="time of one step of the draft model (default: the hardware's)")  # fmt: skip
    add("--overhead", type=one_of(get_args(Overhead)), default="modelled", metavar="KIND",
        help="scheduling time added to each step: modelled (as measured on the real objects), "
        "measured (in this run; implies --exact, not repeatable) or none "
        "(default: modelled)")  # fmt: skip
    add("--exact", action="store_true",
        help="vLLM's whole scheduler object instead of the light scheduler: the same steps, "
        "but slower")  # fmt: skip


SYSTEMS_HELP = (
    "vllm-slo, fcfs-N, priority-N, prefill-first-N, shed-edf-N (N: tokens per step), "
    "latency-budget-N (N: ms per step), disaggregated-P:D-N; the first three with -specK for "
    f"at most K drafts, such as vllm-slo-spec (K = {DRAFTS}) or fcfs-2048-spec3; "
    "vllm-slo-trees: with a draft model, as 'vllm-slo serve --draft-model' runs it"
)


def spread(given: Mapping[str, float], applications: Sequence[str]) -> dict[str, float]:
    """The acceptance of each application; SimulationError if one that is named is unknown."""
    for name in given:
        if name and name not in applications:
            raise SimulationError(
                f"--acceptance: unknown application {name!r}; known: {', '.join(applications)}"
            )
    usual = given.get("", DEFAULT_ACCEPTANCE)
    return {name: given.get(name, usual) for name in applications}


def settings_of(
    args: argparse.Namespace,
    *,
    own_pace: bool,
    windows_of: Callable[[Traffic, Setting], tuple[Traffic, ...]] | None = None,
) -> list[Setting]:
    """One setting per scenario, or one for a trace; makes jobs of each once, so that mistakes show.

    Args:
        own_pace: a trace keeps its own times.
        windows_of: chooses the windows of such a trace; None: parts of equal duration.
    """
    hardware = load_hardware(
        args.hardware, kv_tokens=args.kv_tokens, max_num_seqs=args.max_num_seqs
    )
    if args.draft_step_ms is not None:
        hardware = hardware.with_draft_step(args.draft_step_ms / 1e3)
    classes = classes_of(args)
    configured = args.slo_config is not None
    conditions = Conditions(
        bias=args.bias,
        noise=args.noise,
        system_tokens=args.system_tokens,
        exact=args.exact or args.overhead == "measured",
        routing=args.routing or classes.config.routing.policy,
        hops=classes.config.routing.max_hops if configured else Conditions().hops,
        overhead=args.overhead,
        config=classes.config if configured else None,
    )
    setting = Setting(
        scenario="",
        hardware=hardware,
        conditions=conditions,
        jobs=args.jobs,
        warmup=args.warmup,
        arrivals=args.arrivals,
        fit=args.fit,
        lengths="trace" if args.trace is not None and args.lengths == "trace" else "table",
    )
    traffic = _traffic(args, classes)
    settings = [
        _with_acceptance(each, args.acceptance)
        for each in _scenarios(args, setting, traffic, classes if configured else None)
    ]
    if traffic is not None and own_pace:
        choose = windows_of or (lambda whole, _: tuple(whole.parts(args.windows or 1)))
        settings = [replace(each, traffic=choose(traffic, each)) for each in settings]
    for each in settings:
        _check(each, own_pace)
    return settings


def _traffic(args: argparse.Namespace, classes: TrafficClasses) -> Traffic | None:
    if args.trace is not None:
        return Traffic(load(args.trace, selection_of(args)), classes)
    if selection_of(args) != Selection():
        raise SimulationError("--from, --to, --rows, --thin and --speed choose a part of --trace")
    if args.rules is not None and args.slo_config is None:
        raise SimulationError("--rules: without --trace they need --slo-config FILE")
    return None


def _scenarios(
    args: argparse.Namespace,
    setting: Setting,
    traffic: Traffic | None,
    classes: TrafficClasses | None,
) -> list[Setting]:
    if traffic is not None and args.arrivals is not None:
        raise SimulationError("--arrivals: the requests of --trace arrive at their own times")
    if traffic is not None and setting.lengths == "trace":
        if args.scenario is not None:
            raise SimulationError(
                "--scenario: with --trace the lengths are recorded; leave it out, or add "
                "--lengths table"
            )
        return [replace(setting, scenario=traffic.recording.source, traffic=(traffic,))]
    names = args.scenario or ("chatbot",)
    if ALL in names:
        names = tuple(name for name, scenario in SCENARIOS.items() if not scenario.trace)
    whole = () if traffic is None else (traffic,)
    return [replace(setting, scenario=name, traffic=whole, classes=classes) for name in names]


def _with_acceptance(setting: Setting, given: Mapping[str, float]) -> Setting:
    if setting.recorded:
        known = setting.traffic[0].applications
    elif setting.classes is not None:
        jobs = setting.sample(setting.jobs)
        known = sorted({job.application_of(asked) for job in jobs for asked in job.rounds})
    else:
        known = applications_of(setting.scenario)
    return replace(setting, conditions=replace(setting.conditions, acceptance=spread(given, known)))


def _check(setting: Setting, own_pace: bool) -> None:
    jobs = setting.make(None, 0, 0) if own_pace else setting.sample(setting.jobs)
    if setting.warmup >= 1 or not counted(jobs, setting.warmup):
        raise SimulationError("--jobs: none are left after the warm-up; use more")
    if not any(job.has_objective for job in jobs):
        raise SimulationError(
            f"{setting.scenario}: no request has an objective; give classes with --slo-config "
            "and, where the recorded classes have other names, --rules"
        )


def check_drafts(systems: Sequence[System], settings: Sequence[Setting]) -> None:
    """Raise SimulationError if a system speculates and its hardware has no draft."""
    if any(system.speculates for system in systems):
        for setting in settings:
            setting.hardware.speculating()


def seeds_of(args: argparse.Namespace, setting: Setting, *, own_pace: bool) -> tuple[int, ...]:
    """Seeds of the windows; at a trace's own pace the numbers of its stretches."""
    if own_pace:
        return tuple(range(len(setting.traffic)))
    return tuple(range(args.seed, args.seed + (args.windows or DEFAULT_WINDOWS)))
