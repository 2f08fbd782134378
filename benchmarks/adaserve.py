# SPDX-License-Identifier: Apache-2.0
"""AdaServe's own workloads on the real CPU engine: token trees by SLO against vLLM's own ways.

As figures 8 to 12 of AdaServe: a window of its trace, stretched to a rate, with its own prompts and
its three categories of requests. The engine serves the costlier twin of the built-in target; it
runs in a process of its own, and a loop adds each request when its arrival time has come. A request
attains if its mean time per token, (last - first) / (n - 1), is within its objective; goodput is
the tokens of attaining requests over the time from the first arrival to the last token.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from adaserve_report import (
    NOTE,
    Numbers,
    against,
    axis_of,
    describe,
    draw,
    headline,
    main_table,
    numbers_of,
    shown,
    verdict,
)
from adaserve_systems import (
    DYNAMIC,
    Engines,
    Kitchen,
    Models,
    System,
    describe_ask,
    merged,
    profiled,
    say,
    twin,
)
from adaserve_workload import Lengths, Point, Request, Row, load_trace, tokenised, workload
from quiet import Limits, Machine

from vllm_slo.config import profiles

SYSTEMS: Final = (
    *("stock", "priority", "sarathi", "chain-1", "chain-2", "chain-3", "chain-4", "dynamic"),
    "ours",
)
RATES: Final = (1.0, 2.0, 3.0, 4.0, 5.0)
LONE: Final = (64, 5)
"""Tokens of each request, and requests, that measure the zero-load latency."""


def ask_of(
    system: System, requests: Sequence[Request], args: argparse.Namespace, *, alone: bool = False
) -> dict[str, Any]:
    """One run."""
    return {
        "engine": dict(system.engine),
        "requests": tokenised(requests),
        "send_slo": system.send_slo,
        "by_priority": system.by_priority,
        "without": system.without,
        "alone": alone,
        "temperature": args.temperature,
        "limit_s": requests[-1].arrival_s + args.patience,
    }


def zero_load_s(
    kitchen: Kitchen,
    pool: Sequence[Row],
    args: argparse.Namespace,
    lengths: Lengths,
    engines: Engines,
    machine: Machine,
) -> float:
    """Seconds per token of a lone request on stock vLLM: median over some of the trace's."""
    tokens, count = LONE
    point = Point(1.0, None, 1.0)
    lone = workload(pool, count, point, args.seed, lengths, 1.0)
    lone = [replace(one, output_tokens=tokens) for one in lone]
    ask = ask_of(kitchen.system("stock"), lone, args, alone=True)
    result = machine.undisturbed(lambda: engines.ask(ask))
    times = [one["times_s"] for one in result["requests"].values()]
    return float(median((t[-1] - t[0]) / (len(t) - 1) for t in times))


def kept(path: Path, asked: str) -> dict[str, Any] | None:
    """An earlier run with the same input, if there is one."""
    if not path.is_file():
        return None
    data: dict[str, Any] = json.loads(path.read_text())
    if data["asked"] != asked:
        raise SystemExit(f"{path} holds another run: give another --work")
    return data


def order_of(systems: Sequence[System], turn: int) -> list[System]:
    """The systems in a changing order, so that none always comes first or after the same one."""
    start = turn % len(systems)
    rotated = [*systems[start:], *systems[:start]]
    return rotated if turn // len(systems) % 2 == 0 else rotated[::-1]


def go_live(
    kitchen: Kitchen,
    pool: Sequence[Row],
    points: Sequence[Point],
    args: argparse.Namespace,
    lengths: Lengths,
    zero_s: float,
    work: Path,
    engines: Engines,
    machine: Machine,
) -> tuple[dict[tuple[Point, str], list[Numbers]], dict[str, str]]:
    """Every system at every point, ``--windows`` times; and the reasons of failed systems."""
    systems = [kitchen.system(name) for name in args.systems]
    found: dict[tuple[Point, str], list[Numbers]] = {}
    failed: dict[str, str] = {}
    turn = 0
    for repetition in range(args.windows):
        for place, point in enumerate(points):
            requests = workload(pool, args.requests, point, args.seed + repetition, lengths, zero_s)
            for system in order_of(systems, turn):
                if system.name in failed:
                    continue
                ask = ask_of(system, requests, args)
                out = work / f"{repetition}-{place}-{system.name}.json"
                run = kept(out, describe_ask(ask))
                if run is None:
                    say(f"window {repetition + 1}, {shown(point)}: {system.name}")
                    try:
                        run = machine.undisturbed(partial(engines.ask, ask))
                    except RuntimeError as error:
                        failed[system.name] = str(error)
                        say(f"{system.name} failed: {error}")
                        continue
                    run["asked"] = describe_ask(ask)
                    out.write_text(json.dumps(run))
                numbers = numbers_of(requests, run)
                say(f"  {numbers.line()}")
                found.setdefault((point, system.name), []).append(numbers)
            turn += 1
    in_order = [(point, name) for point in points for name in args.systems]
    return {key: found[key] for key in in_order if key in found}, failed


def prepare(args: argparse.Namespace, models: Models, work: Path, machine: Machine) -> Kitchen:
    """The parts of the systems; profiles the engine first, if asked to."""
    slo_config: dict[str, Any] = {}
    if not args.quick:
        # AdaServe judges the mean over the whole answer.
        slo_config["tpot_window_tokens"] = max(2, round(args.output_scale * 256))
    variants = dict(one.partition("=")[::2] for one in args.variant)
    kitchen = Kitchen(
        models,
        slo_config,
        {name: json.loads(text) for name, text in variants.items()},
        json.loads(args.dynamic) if args.dynamic else DYNAMIC,
        json.loads(args.engine) if args.engine else None,
    )
    if args.profile_s and any(kitchen.system(name).ours for name in args.systems):
        engine = dict(kitchen.system("stock").engine)
        path = work.resolve() / f"profile-{describe_ask(engine)}.json"
        if not path.is_file():
            machine.wait()
            say("profiling the engine")
            ask = {"engine": engine, "profile": str(path), "limit_s": args.profile_s}
            profiled(ask, work)
        slo_config["profile"] = str(path)
    given = json.loads(args.slo_config) if args.slo_config else {}
    return replace(kitchen, slo_config=merged(slo_config, given))


def points_of(args: argparse.Namespace) -> list[Point]:
    """The sweep; SystemExit if it has two directions."""
    urgents: list[float | None] = args.urgent or [None]
    several = [one for one in (args.rates, urgents, args.slo_scale) if len(one) > 1]
    if len(several) > 1:
        raise SystemExit("give several of only one: --rates, --urgent, --slo-scale")
    return [Point(r, u, s) for r in args.rates for u in urgents for s in args.slo_scale]


def measured_zero_load(
    kitchen: Kitchen,
    pool: Sequence[Row],
    args: argparse.Namespace,
    lengths: Lengths,
    work: Path,
    engines: Engines,
    machine: Machine,
) -> float:
    """Zero load, measured once per engine and ``--work`` folder to keep objectives the same."""
    path = work / f"zero_load-{describe_ask(kitchen.system('stock').engine)}.json"
    if not path.is_file():
        say("measuring the zero-load latency")
        machine.usual_s = machine.probe_s()
        found_s = zero_load_s(kitchen, pool, args, lengths, engines, machine)
        path.write_text(json.dumps({"zero_load_s": found_s, "probe_s": machine.usual_s}))
    found = json.loads(path.read_text())
    machine.usual_s = float(found["probe_s"])
    say(f"zero load: {1e3 * found['zero_load_s']:.1f} ms a token")
    return float(found["zero_load_s"])


def reason(said: str) -> str:
    """The line of a failed process's output that most likely says why."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"Error\b|\berror\b", line)]
    return (errors or lines or ["?"])[-1].partition(" [type=")[0]


def report(
    args: argparse.Namespace,
    found: Mapping[tuple[Point, str], Sequence[Numbers]],
    failed: Mapping[str, str],
    kitchen: Kitchen,
    text: str,
) -> None:
    """Write the result, or with ``--quick`` only show it."""
    from common import RESULTS, markdown, write_result

    axis = axis_of([point for point, _ in found])
    systems = {name: kitchen.system(name) for name in args.systems}
    baselines = [name for name, system in systems.items() if not system.ours]
    parts = []
    for name in (name for name, system in systems.items() if system.ours):
        versus = against(found, baselines, name)
        head, *lines = headline(versus, axis)
        parts += [f"{name}: {verdict(versus, axis)}", markdown(head, lines)] if versus else []
    head, *lines = main_table(found, axis)
    parts.append(markdown(head, lines))
    parts += [f"{name} did not run: {reason(why)}" for name, why in failed.items()]
    if args.quick or args.dry:
        print("\n\n".join([text, *parts]))
        if args.work:
            draw(found, axis, args.work / "adaserve.png")
        return
    name = args.name or ("adaserve" if axis == "rate" else f"adaserve_{axis}")
    picture = ""
    if len({point for point, _ in found}) > 1:
        draw(found, axis, RESULTS / f"{name}.png")
        picture = f"![Violations, goodput and accepted tokens along the sweep]({name}.png)\n"
    write_result(name, f"{__doc__.strip()}\n\n{text}", "\n\n".join(parts), note=picture + NOTE)


def main() -> None:
    """Measure zero load, sweep, compare, write."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an engine under way ends, too
    args = parse_args()
    points = points_of(args)
    pool, source = load_trace(args.trace, args.seed)
    lengths = Lengths(args.prompt_scale, args.output_scale, args.most_prompt)
    with tempfile.TemporaryDirectory() as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        models = Models(
            twin("target", args.parameters, args.models),
            twin("draft", args.draft_parameters, args.models),
        )
        machine = Machine(Limits(args.disturbance, args.drift, args.wait, args.retries), say)
        kitchen = prepare(args, models, work, machine)
        with closing(Engines()) as engines:
            zero_s = measured_zero_load(kitchen, pool, args, lengths, work, engines, machine)
            found, failed = go_live(
                kitchen, pool, points, args, lengths, zero_s, work, engines, machine
            )
            if not found:
                raise SystemExit("nothing ran")
            again_s = zero_s
            if not args.quick:
                again_s = zero_load_s(kitchen, pool, args, lengths, engines, machine)
        first = workload(pool, args.requests, points[0], args.seed, lengths, zero_s)
        every = [one for runs in found.values() for one in runs]
        text = describe(args, kitchen, source, (zero_s, again_s), first, every)
        report(args, found, failed, kitchen, text)
    say("done")


def numbers_list(text: str) -> list[float]:
    """``1,2,3``."""
    return [float(one) for one in text.split(",")]


def parse_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="shows that it runs, about a minute; writes nothing")
    add("--name", help="of the result; default: adaserve, or adaserve_AXIS")
    add("--dry", action="store_true", help="only show the result, write none")
    add("--systems", type=lambda text: text.split(","), default=list(SYSTEMS),
        help="stock, priority, sarathi, chain-K, dynamic, ngram-K, ours, ours-no-trees, "
        "ours-chain-K: ours with vLLM's chains; ours-without-slo (-throughput, -adaptation, "
        "-calibration, -waiting); ours-chain-K-without-lengths; "
        "+priority and +chunk-N change vLLM's own (chain-2+priority)")  # fmt: skip
    add("--rates", type=numbers_list, default=list(RATES), help="requests/s")
    add("--urgent", type=numbers_list, help="shares of category 1 (figure 10); default: trace's")
    add("--slo-scale", type=numbers_list, default=[1.2], help="category 1's objective (figure 11)")
    add("--trace", default="rps3.6", help="NAME of AdaServe's emission_NAME.json")
    add("--requests", type=int, default=72, help="of a window")
    add("--windows", type=int, default=3, help="of the trace; each system serves each")
    add("--prompt-scale", type=float, default=0.25, help="prompt tokens for one of the trace's")
    add("--output-scale", type=float, default=0.5, help="answer tokens for one of the trace's")
    add("--most-prompt", type=int, default=1024, help="no prompt is longer, tokens")
    add("--temperature", type=float, default=0.0)
    add("--parameters", type=float, default=300e6, help="of the target's twin; 0: itself")
    add("--draft-parameters", type=float, default=0.0, help="of the draft's twin; 0: itself")
    add("--models", type=Path, default=profiles.cache_dir() / "models", help="folder of the twins")
    add("--profile-s", type=float, default=0.0,
        help="of profiling step times for ours; 0: it learns them while it serves")  # fmt: skip
    add("--slo-config", help="JSON: configuration of ours, on top of what is measured")
    add("--variant", action="append", default=[], metavar="NAME=JSON",
        help="a further system: ours with this on top of its configuration")  # fmt: skip
    add("--dynamic", help="JSON: num_speculative_tokens_per_batch_size of the system dynamic")
    add("--engine", help="JSON: further vLLM engine arguments of every system")
    add("--patience", type=float, default=120.0, help="seconds after the last arrival")
    add("--disturbance", type=float, default=0.05, help="share of the machine others may take")
    add("--drift", type=float, default=0.08,
        help="by how much the machine may be faster or slower than at zero load")  # fmt: skip
    add("--wait", type=float, default=180.0, help="seconds to wait for that, before each run")
    add("--retries", type=int, default=2, help="of a run that was disturbed; the best counts")
    add("--seed", type=int, default=0)
    add("--work", type=Path, help="keep raw data here; runs found are not redone")
    args = parser.parse_args(given)
    args.systems += [one.partition("=")[0] for one in args.variant]
    if args.quick:
        args.parameters, args.profile_s, args.windows, args.requests = 0.0, 0.0, 1, 12
        args.prompt_scale, args.output_scale, args.rates = 0.1, 0.125, [6.0]
        args.wait, args.retries = 0.0, 0
        if args.systems == list(SYSTEMS):
            args.systems = ["stock", "ours"]
    return args


if __name__ == "__main__":
    main()
