# SPDX-License-Identifier: Apache-2.0
"""The data of several servers' live pages as that of one: the front shows its replicas so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_slo.live.history import ADDED, STEP_S

__all__ = ["merged"]

LAG_MS = round(2 * STEP_S * 1e3)
"""Samples younger than this are held back: another server may not have taken its own yet, and a
page does not ask for a time that it has been told of."""


def merged(answers: Sequence[dict[str, Any]], *, coarse: bool) -> dict[str, Any]:
    """One answer out of those of several servers to the same question, at least one.

    Counters are added up, and gauges as `History` does it for the engines of one server. If one
    of the servers does not know the sample that the page named, the page is to forget all; whoever
    asks has then to ask the others for everything, too.
    """
    first = answers[0]
    places: dict[tuple[str, ...], int] = {}
    samples: dict[int, list[Any]] = {}
    for answer in answers:
        mine = [places.setdefault(tuple(series), len(places)) for series in answer["series"]]
        for time_ms, span_s, counts, gauges in answer["samples"]:
            if not coarse and time_ms > first["now"] - LAG_MS:
                continue
            key = time_ms // 60_000 if coarse else time_ms
            whole = samples.setdefault(key, [time_ms, span_s, {}, {}])
            whole[0], whole[1] = max(whole[0], time_ms), max(whole[1], span_s)
            for place, count in counts.items():
                at = mine[int(place)]
                whole[2][at] = whole[2].get(at, 0.0) + count
            for place, value in gauges.items():
                at = mine[int(place)]
                added = answer["series"][int(place)][0].endswith(ADDED)
                known = whole[3].get(at)
                whole[3][at] = (
                    value if known is None else known + value if added else max(known, value)
                )
    silent = [s for answer in answers if (s := answer["about"]["silent_s"]) is not None]
    return {
        **first,
        "about": {**first["about"], "silent_s": min(silent, default=None)},
        "series": [list(series) for series in places],
        "samples": [samples[key] for key in sorted(samples)],
        "reset": any(answer["reset"] for answer in answers),
    }
