# SPDX-License-Identifier: Apache-2.0
"""What measured drafts say about a model, in plain sentences.

They speak of the numbers of requests that were measured, and of no others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vllm_slo.core.speculation.benefit import SHOWN, Benefit, Effect, Estimate


def verdict(found: Sequence[Benefit]) -> list[str]:
    """When speculation helps and when it does not, in a few plain sentences.

    Args:
        found: as `benefits` returns it, not empty.
    """
    parts = _busy, _helps, _costs, _unclear, _served, _tpot, _accepted
    return [sentence for part in parts if (sentence := part(found))]


def _of(found: Sequence[Benefit], effect: Effect) -> list[Benefit]:
    return [one for one in found if one.effect == effect]


def _helps(found: Sequence[Benefit]) -> str:
    helps = _of(found, Effect.HELPS)
    if not helps and _of(found, Effect.UNCLEAR):
        return "No drafts were faster than none by more than the noise."
    if not helps:
        best = max(found, key=lambda one: one.best.speedup.value)
        return (
            f"Speculation does not help here: at best it is {_speedup(best.best.speedup)} with "
            f"{_requests(best.requests)}."
        )
    speeds = _speeds(helps, lambda one: one.best.speedup)
    if helps == list(found[: len(helps)]) and helps[-1].requests > 1:
        return f"Speculation helps up to {_at_once(helps[-1].requests)}: {speeds}."
    return f"Speculation helps with {_listed(helps)}: {speeds}."


def _costs(found: Sequence[Benefit]) -> str:
    costs = _of(found, Effect.COSTS)
    if not costs:
        return ""
    speeds = _speeds(costs, lambda one: one.best.speedup)
    is_end = costs == list(found[-len(costs) :])
    where = f"From {_at_once(costs[0].requests)} on" if is_end else f"With {_listed(costs)}"
    return f"{where} drafting costs more than it gives: {speeds} with the best drafts."


def _unclear(found: Sequence[Benefit]) -> str:
    unclear = [one for one in _of(found, Effect.UNCLEAR) if not one.is_unsteady]
    if not unclear:
        return ""
    speeds = ", ".join(f"{_speedup(one.best.speedup)} at {one.requests}" for one in unclear)
    return f"With {_listed(unclear)} the difference is within the noise: {speeds}."


def _served(found: Sequence[Benefit]) -> str:
    served = [(one, one.served) for one in found if one.served is not None]
    if not served:
        return ""
    speeds = ", ".join(f"{gain.speedup.value:.2f}x at {one.requests}" for one, gain in served)
    shares = ", ".join(f"{100 * gain.drafted:.0f}% at {one.requests}" for one, gain in served)
    return (
        f"The scheduler itself chooses the drafts of every step: {speeds}. Of its steps, so many "
        f"verify drafts: {shares}."
    )


def _tpot(found: Sequence[Benefit]) -> str:
    helps = _of(found, Effect.HELPS)
    if not helps:
        return ""
    one = helps[0]
    return (
        f"With {_requests(one.requests)} a token takes {1e3 * one.plain_s.value:.2f} ms without "
        f"drafts and {1e3 * one.best.token_s:.2f} ms with the best ones, on average: a TPOT "
        "between the two needs drafts."
    )


def _accepted(found: Sequence[Benefit]) -> str:
    gain = found[0].chains[-1]
    return (
        f"With {_requests(found[0].requests)}, {gain.accepted:.1f} of a chain of "
        f"{gain.way.length} draft tokens are accepted in a step. That depends on the text."
    )


def _busy(found: Sequence[Benefit]) -> str:
    busy = [one for one in found if one.is_unsteady]
    if not busy:
        return ""
    worst = max(one.unsteadiness for one in busy)
    return (
        f"Nothing can be said with {_listed(busy)}: the time of a token without drafts differs by "
        f"\u00b1 {100 * worst:.0f}% from turn to turn. Something else keeps this machine busy; "
        "measure on a quiet one."
    )


def _speeds(found: Iterable[Benefit], speedup: Callable[[Benefit], Estimate]) -> str:
    return ", ".join(f"{speedup(one).value:.2f}x at {one.requests}" for one in found)


def _speedup(speedup: Estimate) -> str:
    return f"{speedup.value:.2f}x (\u00b1 {max(speedup.noise, SHOWN):.2f})"


def _requests(count: int) -> str:
    return f"{count} request" if count == 1 else f"{count} requests"


def _at_once(count: int) -> str:
    return f"{_requests(count)}{' at once' if count > 1 else ''}"


def _listed(found: Sequence[Benefit]) -> str:
    counts = [str(one.requests) for one in found]
    if len(counts) > 1:
        counts[-2:] = [f"{counts[-2]} and {counts[-1]}"]
    return f"{', '.join(counts)} {'request' if counts == ['1'] else 'requests at once'}"
