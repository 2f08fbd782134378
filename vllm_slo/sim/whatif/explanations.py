# SPDX-License-Identifier: Apache-2.0
"""The sentences of a what-if report that explain it: how to read it, what is assumed, and where
its numbers come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_slo.sim.report import percent
from vllm_slo.sim.whatif.report import Report
from vllm_slo.sim.whatif.words import count, stretch

VALIDATED: Final = (
    "Checked against the real engine on a CPU under seven conditions (sim_validation.md). With the "
    "step times of the same runs, 10 of 13 comparisons were within 3 points of attainment, 10% of "
    "the medians and 25% of the p99; the largest error of attainment was -8.9 points. With a "
    "profile from before and after the runs, 3 of 13 were, and the largest error was +18.1 points: "
    "the speed of that machine changed meanwhile. Trust differences and order more than absolute "
    "numbers, and p99 least."
)
"""What ``benchmarks/results/sim_validation.md`` says."""


def reading(report: Report) -> Iterator[str]:
    """How to read the page."""
    trace, served = report.trace, report.numbers.columns[0].kind == "served"
    window = report.setup.window_tokens
    yield (
        "A request keeps its objectives if it is answered to its end, its first token comes "
        f"within its TTFT, every window of {count(window, 'token')} keeps its TPOT, and the whole "
        "answer comes within its end-to-end time. TTFT and end-to-end time count from arrival, "
        "queueing included."
    )
    yield (
        "p50, p95 and p99 are the times within which 50, 95 and 99 of 100 requests stay. TPOT is "
        "that of the worst window of each request. Requests that got no token have no times. "
        "So a system that declines can look faster than it is: read times beside shares."
    )
    yield (
        "An interval says how far a share would move on other traffic of the same kind. It comes "
        "from the differences between 20 stretches of the trace. Differences between systems are "
        "compared on the same requests, so they are surer than the intervals of two bars suggest. "
        "An interval says nothing about errors of the simulator."
    )
    yield (
        "With a promise in time vllm-slo says that a request will keep its objectives. To a "
        "request that cannot keep them it may promise a later time instead. Stock vLLM promises "
        "nothing."
    )
    yield (
        "Tokens a second are the answer tokens that came while requests arrived "
        f"({stretch(report.numbers.measured.length_s)}). What a system has put off until later is "
        "missing in it."
    )
    if served:
        yield (
            "As served: the recorded times, judged by the objectives of this configuration. Where "
            "the recording had the same objectives, its own verdict counts."
        )
        if trace.mean_tpot:
            yield (
                f"The recording ({trace.format}) has the mean TPOT of each request, not that of "
                "its worst window. So it is judged more kindly than the simulated systems."
            )
    yield from _counted(report)


def _counted(report: Report) -> Iterator[str]:
    """Which requests count."""
    trace, cells = report.trace, report.numbers.all.cells
    if trace.warmup:
        yield (
            f"The first {count(trace.warmup, 'request')} are simulated and do not count in any "
            "column, because the simulated systems begin empty."
        )
    if trace.aborted:
        yield (
            f"{count(trace.aborted, 'request')} whose client left are simulated and do not count "
            "in any column."
        )
    if report.numbers.columns[0].kind == "served":
        if cells[0].declined or cells[0].failed:
            yield (
                f"As served, {count(cells[0].declined, 'request')} were declined and "
                f"{cells[0].failed:,} failed; they did not keep their objectives. The simulated "
                "systems are sent them all the same."
            )
        if (attained := cells[0].attained) is not None and attained.unjudged:
            yield (
                f"As served, {count(attained.unjudged, 'request')} cannot be judged, because their "
                "times were not recorded. They count only in the other columns."
            )
    if trace.estimated:
        yield (
            f"{count(trace.estimated, 'request')} ended before their first token. Simulated, their "
            "answers are as long as those of other requests of their class, drawn at random."
        )
    if trace.clipped:
        yield (
            f"{count(trace.clipped, 'request')} are longer than the context of the hardware; they "
            "are cut to it."
        )
    if trace.left_out:
        yield f"{count(trace.left_out, 'row')} of the trace without tokens are left out."


def assumptions(report: Report) -> Iterator[str]:
    """What the simulator takes for granted, and its known errors."""
    setup = report.setup
    yield (
        "The schedulers are the real ones: vLLM's own, and vllm-slo's on top of it. Only time is "
        f"simulated: each step takes what the profile {setup.hardware.name} says."
    )
    for column in report.numbers.columns:
        if column.kind == "stock":
            yield (
                f"Stock vLLM is simulated as {column.system}: its policy, and the most tokens of "
                "a step. --systems compares others."
            )
    yield (
        "Requests come at their recorded times, whatever happens to those before them, with their "
        "recorded lengths. The schedulers do not know the length of an answer. The next request of "
        "a session also waits for the answer before it."
    )
    yield (
        "Prompts share their beginnings where the trace has hashes of their blocks; without "
        "hashes, no prefix is shared between sessions."
    )
    if setup.staged:
        yield (
            f"Answers with stages ({', '.join(setup.staged)}) are judged by their tightest TPOT, "
            "because a trace does not say where stages end."
        )
    if setup.bias == 1.0 and setup.noise == 0.0:
        yield (
            "Step times are exactly as predicted. On a real engine they vary, which costs kept "
            "promises; --bias 1.05 --noise 0.1 asks what that would do."
        )
    else:
        yield (
            f"Steps take {setup.bias:g} times what the schedulers predict, with a standard "
            f"deviation of {percent(setup.noise)}%."
        )
    yield VALIDATED
    yield "The documentation's page Limits (docs/limits.md) says where vllm-slo does not help."


def origin(report: Report) -> Iterator[tuple[str, str]]:
    """Terms and what they are: the trace, the configuration, the hardware, the command."""
    trace, setup, made = report.trace, report.setup, report.origin
    yield "trace", f"{trace.name} ({trace.format})"
    yield "part of it", trace.selection or "all"
    yield "configuration", setup.slo_config or "none: the objectives that were recorded"
    if setup.rules is not None:
        yield "rules for classes", setup.rules
    gpus = setup.replicas * setup.hardware.gpus
    yield (
        "hardware",
        f"{setup.hardware.name}, {count(setup.replicas, 'replica')}, {count(gpus, 'GPU')}",
    )
    if setup.replicas > 1:
        yield "routing", setup.routing
    yield "systems", ", ".join(column.system for column in report.numbers.columns)
    yield "seed", str(setup.seed)
    yield "command", made.command
    yield "date", made.created
    yield "versions", ", ".join(f"{k} {v}" for k, v in made.versions.items() if v is not None)
