# SPDX-License-Identifier: Apache-2.0
"""GoodSpeed's gradient scheduler against fixed and random draft lengths.

Rounds are simulated: how likely a draft token is to be accepted is drawn from a beta distribution
around its client's acceptance, and all systems see the same draws. The paper's numbers of clients
and budgets (table I); acceptances are chosen, the paper gives none. *static*: they stay. *moving*:
each client's text changes its domain about every 150 rounds, to any of the setting's acceptances,
and drifts by 0.08 up and down in between.
"""

from __future__ import annotations

import argparse
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from common import RESULTS, markdown, write_result
from proportional_fairness_worlds import (
    CONTEXT,
    ROUNDS,
    SPREAD,
    SURE,
    SYSTEMS,
    Floats,
    Run,
    Setting,
    Verifying,
    every_run,
    fixed,
    good_speed,
    make_world,
    optimal_utility,
    random,
)
from routing_decision import timed

from vllm_slo.bench import style
from vllm_slo.core.speculation.proportional_fairness import (
    BETA,
    ETA,
    GradientScheduler,
    grant_tokens,
    jain_index,
    verify_budget,
)
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.sim.hardware import load_hardware

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HORIZONS: Final = (50, 100, 200, 400, 600)
DRAWN: Final = (25, 50, 75, 100, 150, 200, 300, 400, 500, 600)
"""Horizons at which the optimum of a moving world is computed for the picture."""
PAST: Final = 100
REACH_MS, REACH_LESS = 0.3, 0.05
PAYING: Final = "GoodSpeed, C that pays"
FOUR, EIGHT = (0.85, 0.7, 0.55, 0.4), (0.9, 0.8, 0.75, 0.65, 0.6, 0.5, 0.4, 0.3)
LOOKS: Final[Mapping[str, Mapping[str, Any]]] = {
    "GoodSpeed": {"color": "#0072b2", "linewidth": 2.4, "zorder": 5},
    "Fixed-S": {"color": "#d55e00", "linewidth": 1.6},
    "Random-S": {"color": "#7a7a7a", "linewidth": 1.6},
}
SETTINGS: Final = (Setting(FOUR, 24), Setting(FOUR, 28), Setting(EIGHT, 16), Setting(EIGHT, 20))

# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One setting in one kind of world: the runs of every system, and the optimum by horizon."""

    setting: Setting
    moving: bool
    runs: Mapping[str, Sequence[Run]]
    optimum: Mapping[int, float]

    @property
    def name(self) -> str:
        return f"{self.setting.name}, {'moving' if self.moving else 'static'}"

    def utility(self, system: str, horizon: int) -> Floats:
        """(seeds,) sum of the logs of the running averages."""
        return np.array([np.log(run.average(horizon)).sum() for run in self.runs[system]])

    def ahead(self) -> str:
        """Whether GoodSpeed beats both others at every horizon past `PAST`, on average and how
        often."""
        curves = {system: running_utility(runs) for system, runs in self.runs.items()}
        ours, others = curves["GoodSpeed"], [curves["Fixed-S"], curves["Random-S"]]
        past = slice(PAST, None)
        mean = all((ours.mean(0) > other.mean(0))[past].all() for other in others)
        each = np.all([(ours > other)[:, past].all(axis=1) for other in others], axis=0)
        return f"{'yes' if mean else '**no**'}; {each.sum()} of {each.size} runs"


def running_utility(runs: Sequence[Run]) -> Floats:
    """(seeds, T) utility of the running average."""
    tokens = np.array([run.tokens for run in runs])
    average = tokens.cumsum(axis=1) / np.arange(1, tokens.shape[1] + 1)[:, None]
    utility: Floats = np.log(average).sum(axis=2)
    return utility


def compare(setting: Setting, moving: bool, seeds: int) -> Comparison:
    """Run every system, and solve for the optimum of every world."""
    runs = every_run(setting, moving, seeds)
    worlds = [make_world(setting, seed, moving).acceptances for seed in range(seeds)]
    if not moving:
        worlds = worlds[:1]
    optimum = {
        horizon: float(np.mean([optimal_utility(a[:horizon], setting.budget) for a in worlds]))
        for horizon in sorted({*HORIZONS, *DRAWN})
    }
    return Comparison(setting, moving, runs, optimum)


def utility_table(found: Sequence[Comparison]) -> str:
    """Utility by horizon, and whether GoodSpeed is ahead."""
    rows = []
    for one in found:
        for system in SYSTEMS:
            utilities = [one.utility(system, horizon).mean() for horizon in HORIZONS]
            hoped = np.mean([np.log(run.hoped()).sum() for run in one.runs[system]])
            shares = [f"{value / one.optimum[ROUNDS]:.1%}" for value in (utilities[-1], hoped)]
            verdict = one.ahead() if system == "GoodSpeed" else ""
            cells = [f"{utility:.3f}" for utility in utilities]
            rows.append([one.name, system, *cells, *shares, verdict])
        cells = [f"{one.optimum[horizon]:.3f}" for horizon in HORIZONS]
        rows.append([one.name, "*optimum*", *cells, "", "", ""])
    head = ["world", "system", *map(str, HORIZONS), f"of the optimum at {ROUNDS}", "without luck"]
    return markdown([*head, f"ahead at every horizon past {PAST}"], rows)


def goodput_table(found: Sequence[Comparison]) -> str:
    """Tokens per round of all clients, and Jain's index, by horizon."""
    rows = []
    for one in found:
        for system in SYSTEMS:
            averages = [[run.average(h) for run in one.runs[system]] for h in HORIZONS]
            cells = [
                f"{np.mean([x.sum() for x in each]):.2f} ({np.mean([*map(jain_index, each)]):.3f})"
                for each in averages
            ]
            rows.append([one.name, system, *cells])
    return markdown(["world", "system", *map(str, HORIZONS)], rows)


class Timing(NamedTuple):
    """What verifying takes in one case by one system; means over rounds and runs.

    ``utility``: sum of the logs of the clients' tokens per second of verifying.
    """

    case: str
    system: str
    drafts: float
    round_s: float
    tokens: float
    utility: float

    @property
    def token_s(self) -> float:
        """Seconds of verifying for each token that comes out."""
        return self.round_s / self.tokens

    def row(self, base: Timing) -> list[str]:
        """Cells; ``base`` is what it is compared with."""
        return [
            self.case, self.system, f"{self.drafts:.1f}", f"{1e3 * self.round_s:.2f}",
            less(self.round_s, base.round_s), f"{self.tokens:.1f}", f"{1e3 * self.token_s:.3f}",
            less(self.token_s, base.token_s), f"{self.utility:.1f}",
        ]  # fmt: skip


def less(value: float, base: float) -> str:
    """The relative difference of a value, signed."""
    return f"{value / base - 1.0:+.1%}".replace("-0.0%", "+0.0%")


def timing(case: str, system: str, model: StepTimeModel, runs: Sequence[Run]) -> Timing:
    """Sum up runs of one system."""
    round_s = float(np.mean([Verifying(model).seconds(run.granted).mean() for run in runs]))
    averages = np.array([run.average(ROUNDS) for run in runs])
    return Timing(
        case,
        system,
        float(np.mean([run.granted.sum(axis=1).mean() for run in runs])),
        round_s,
        float(averages.sum(axis=1).mean()),
        float(np.log(averages / round_s).sum(axis=1).mean()),
    )


def verify_timings(
    hardware: str, model: StepTimeModel, setting: Setting, seeds: int
) -> list[Timing]:
    """What verifying takes by system, Fixed-S first."""
    kinds = {
        "GoodSpeed": Verifying(model),
        "GoodSpeed, price": Verifying(model, price=True),
        PAYING: Verifying(model, budget=True),
    }
    runs: dict[str, list[Run]] = {}
    for seed in range(seeds):
        world = make_world(setting, seed, False)
        found = {
            "Fixed-S": fixed(world, setting.budget),
            "Random-S": random(world, setting.budget, seed),
            **{name: good_speed(world, setting.budget, kind) for name, kind in kinds.items()},
        }
        paying = round(found[PAYING].granted.sum(axis=1).mean())
        found["Fixed-S, that C"] = fixed(world, paying)
        for name, run in found.items():
            runs.setdefault(name, []).append(run)
    case = f"{hardware}, {setting.name}"
    return [timing(case, name, model, each) for name, each in runs.items()]


def verify_table(cases: Sequence[Sequence[Timing]]) -> str:
    """Verify time where tokens ride along for free, and where they do not."""
    head = ["step times", "system", "drafts a round", "verify, ms a round", "against Fixed-S",
            "tokens a round", "verify, ms a token", "against Fixed-S",
            "utility of tokens/s"]  # fmt: skip
    return markdown(head, [one.row(case[0]) for case in cases for one in case])


def smoothing_table(seeds: int) -> str:
    """How much of the optimum is reached by eta and beta."""
    setting, steps = SETTINGS[-1], (0.02, 0.05, 0.1, 0.2)
    kinds = [
        [make_world(setting, seed, moving, spread) for seed in range(seeds)]
        for spread, moving in itertools.product((SPREAD, SURE), (False, True))
    ]
    best = [
        np.mean([optimal_utility(world.acceptances, setting.budget) for world in worlds])
        for worlds in kinds
    ]

    def reached(eta: float, beta: float) -> str:
        shares = []
        for worlds, optimum in zip(kinds, best, strict=True):
            runs = [good_speed(world, setting.budget, eta=eta, beta=beta) for world in worlds]
            shares.append(running_utility(runs)[:, -1].mean() / optimum)
        return " / ".join(f"{100 * share:.1f}" for share in shares)

    rows = [[f"eta = {eta:g}", *(reached(eta, beta) for beta in steps)] for eta in steps]
    return markdown([setting.name, *(f"beta = {beta:g}" for beta in steps)], rows)


def speed_table(repeats: int) -> str:
    """The time of one decision."""
    rng, count, budget = np.random.default_rng(0), 256, 1024
    weights, chances = rng.uniform(0.2, 1.0, count), rng.uniform(0.3, 0.95, count)
    scheduler, names = GradientScheduler(), [f"client {n}" for n in range(count)]
    for name in names:
        scheduler.add(name)
    model = load_hardware("h100-llama-8b").step_time
    rows = [
        ["grant_tokens", *timed(lambda: grant_tokens(weights, chances, budget), repeats),
         f"{REACH_MS:g}"],
        ["verify_budget", *timed(lambda: verify_budget(weights, chances, model, budget), repeats),
         ""],
        ["GradientScheduler.grants", *timed(lambda: scheduler.grants(names, budget), repeats), ""],
    ]  # fmt: skip
    return markdown([f"{count} clients, C = {budget:,}", "median ms", "p99 ms", "reach"], rows)


# --- pictures -------------------------------------------------------------------------------------


def moving_mean(values: Floats, size: int = 10) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the last ``size`` values at each place, fewer at first."""
    windows = [values[max(0, end - size) : end] for end in range(1, len(values) + 1)]
    return np.array([w.mean() for w in windows]), np.array([w.std() for w in windows])


def panels(count: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    """A figure with panels, two side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(count // 2, 2).ravel().tolist()


def title(figure: Figure, text: str, axes: Axes) -> None:
    """A title, and one legend below the panels."""
    figure.suptitle(text, fontsize=12, fontweight="bold", x=0.01, ha="left")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))


def draw_estimates(found: Sequence[Comparison], path: Path) -> None:
    """Estimated and measured goodput of all clients over time (the paper's figure 2)."""
    from matplotlib import rc_context

    with rc_context(style.PICTURE):
        figure, every = panels(len(found), 3.8)
        for axes, one in zip(every, found, strict=True):
            run = one.runs["GoodSpeed"][0]
            lines = (("measured", run.tokens, "#d55e00"), ("estimated", run.estimated, "#0072b2"))
            for label, values, colour in lines:
                mean, spread = moving_mean(np.asarray(values).sum(axis=1))
                axes.plot(mean, label=label, color=colour, linewidth=1.5)
                axes.fill_between(
                    np.arange(ROUNDS), mean - spread, mean + spread,
                    color=colour, alpha=0.18, linewidth=0,
                )  # fmt: skip
            axes.set_title(one.name)
            axes.set_xlabel("round")
            axes.set_xlim(0, ROUNDS)
            axes.set_ylim(bottom=0)
            axes.set_ylabel("tokens per round")
        text = "Goodput of all clients, estimated and measured\n(means of 10 rounds, ± 1 sd)"
        title(figure, text, every[0])
        figure.savefig(path, dpi=120)


def draw_utility(found: Sequence[Comparison], path: Path) -> None:
    """Utility of the running average, three systems and the optimum (the paper's figure 4)."""
    from matplotlib import rc_context

    with rc_context(style.PICTURE):
        figure, every = panels(len(found), 6.6)
        for axes, one in zip(every, found, strict=True):
            lowest = math.inf
            for system, runs in one.runs.items():
                mean = running_utility(runs).mean(axis=0)
                axes.plot(np.arange(1, ROUNDS + 1), mean, label=system, **LOOKS[system])
                lowest = min(lowest, float(mean[PAST:].min()))
            best = [one.optimum[horizon] for horizon in DRAWN]
            axes.plot(DRAWN, best, label="optimum", color=style.INK, linestyle="--", linewidth=1.2)
            axes.set_ylim(lowest - 0.5 * (max(best) - lowest), max(best) + 0.15)
            axes.set_xlim(0, ROUNDS)
            axes.set_title(one.name)
            axes.set_xlabel("round")
            axes.set_ylabel("utility of the average")
        title(figure, "Sum of the logs of the clients' average goodputs\n(higher is better)",
              every[0])  # fmt: skip
        figure.savefig(path, dpi=110)


NOTE: Final = """
Utility is the sum of the logs of the clients' average tokens per round from the first round on, by
horizon, the mean of {seeds} runs. *optimum*: the most that it can be on average, by a linear
program that knows the acceptances beforehand; where they move, those of rounds to come as well.
With luck a run ends above it. *without luck*: the grants of all {rounds} rounds valued by what they
yield on average. *ahead*: on average, and in how many runs.

![Utility of the running average](proportional_fairness.png)

## Goodput of all clients, tokens per round (Jain's index)

{goodput}

Proportional fairness is not equality: who accepts more gets more drafts, so Jain's index of
tokens is below that of equal draft lengths while both the utility and the goodput are above.

![Estimated and measured goodput](proportional_fairness_estimates.png)

The estimate is the sum of X_i. It starts at one token for each client, so that new ones are served
at once, and follows with a weight of beta = {beta:g} for the newest round.

## Verify time

{verify}

Means of {timed} runs; static. *H100*: the built-in profile `h100-llama-8b`, a roofline, in which
about 150 tokens ride along for free. *CPU*: `StepTimeModel.prior()`, a model of 0.3B on two cores,
about 17. Each client has {context} tokens of context. *price*: a token below `node_floor` is not
verified. *C that pays*: `verify_budget` in each round, at most C. *Fixed-S, that C*: equal lengths,
as many drafts in all.

The reach is 5% below Fixed-S. The paper has it, but does not say whether by round or by token.
{verdict}

What makes the difference: whoever may verify C tokens does so, and a step takes as long whoever
they belong to, so rounds get shorter only where fewer tokens are verified. That is the doing of the
step-time model, not of the division: equal lengths of as many drafts are as short. Of the tokens
that are verified more are accepted, as they go to whom they are likely to help.

## Smoothing: % of the optimal utility after {rounds} rounds

{smoothing}

Static / moving, where each draft is accepted with a probability; then the same under greedy
sampling, where it is accepted or not. The defaults are eta = {eta:g} and beta = {beta:g}.

## Speed

{speed}
"""


def verdict(cases: Sequence[Sequence[Timing]]) -> str:
    """How often verifying takes as much less than with Fixed-S as it should, at the same C."""
    pairs = [(case[0], one) for case in cases for one in case if one.system == "GoodSpeed"]
    by_round = [ours.round_s / base.round_s for base, ours in pairs]
    by_token = [ours.token_s / base.token_s for base, ours in pairs]
    said = [
        f"by {unit} it is reached in {sum(r <= 1.0 - REACH_LESS for r in found)} of {len(found)} "
        f"cases ({less(min(found), 1.0)} to {less(max(found), 1.0)})"
        for unit, found in (("round", by_round), ("token that comes out", by_token))
    ]
    return textwrap.fill(f"With the same C, **{said[0]}**; {said[1]}.", 100)


def main() -> None:
    """Measure, draw and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2_000)
    args = parser.parse_args()
    speed, few = speed_table(args.repeats), min(args.seeds, 4)
    found = [
        compare(setting, moving, args.seeds)
        for setting, moving in itertools.product(SETTINGS, (False, True))
    ]
    draw_utility([*found[2:4], *found[6:8]], RESULTS / "proportional_fairness.png")
    draw_estimates(found[6:8], RESULTS / "proportional_fairness_estimates.png")
    h100, cpu, many = load_hardware("h100-llama-8b").step_time, StepTimeModel.prior(), EIGHT * 32
    cases = [
        verify_timings("H100", h100, Setting(EIGHT, 20), few),
        verify_timings("CPU", cpu, Setting(FOUR, 28), few),
        verify_timings("CPU", cpu, Setting(EIGHT, 20), few),
        verify_timings("H100", h100, Setting(many[:64], 256), few),
        verify_timings("H100", h100, Setting(many, 1024), few),
    ]
    note = NOTE.format(
        seeds=args.seeds,
        goodput=goodput_table(found),
        verify=verify_table(cases),
        verdict=verdict(cases),
        smoothing=smoothing_table(few),
        speed=speed,
        timed=few,
        context=CONTEXT,
        rounds=ROUNDS,
        eta=ETA,
        beta=BETA,
    )
    write_result("proportional_fairness", __doc__, utility_table(found), note=note)


if __name__ == "__main__":
    main()
