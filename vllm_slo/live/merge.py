# SPDX-License-Identifier: Apache-2.0
"""The data of several servers' live pages as that of one: the front shows its replicas so."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_slo.live.history import ADDED, COARSE, FINE, STEP_S

__all__ = ["MergedHistory", "merged"]

LAG_MS = round(2 * STEP_S * 1e3)
"""Samples younger than this are held back: another server may not have taken its own yet, and a
page does not ask for a time that it has been told of."""
RECENT: Final = 32
"""A page whose newest sample is older than so many gets all of them again."""


def merged(
    answers: Sequence[dict[str, Any]],
    *,
    coarse: bool,
    places: dict[tuple[str, ...], int] | None = None,
) -> dict[str, Any]:
    """One answer out of those of several servers to the same question, at least one.

    Counters are added up, and gauges as `History` does it for the engines of one server. If one
    of the servers does not know the sample that the page named, the page is to forget all; whoever
    asks has then to ask the others for everything, too.

    Args:
        places: where the series stand; new ones are added. None: there are none yet.
    """
    first = answers[0]
    places = {} if places is None else places
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


@dataclass(frozen=True, slots=True)
class _Server:
    """One server: its last answer but for the samples, and all its samples by their time."""

    told: dict[str, Any]
    samples: dict[int, list[Any]]


class _Written:
    """Answers to pages, as JSON but for the choice of samples.

    Args:
        head: what they say beside the samples.
        samples: time -> sample, oldest first.
        anew_ms: pages whose newest sample is no younger than this are to forget all.
    """

    def __init__(self, head: dict[str, Any], samples: dict[int, bytes], anew_ms: int) -> None:
        self.anew_ms = anew_ms
        self._head = _json(head)[:-1]
        self._recent = dict(list(samples.items())[-RECENT:])
        self._everything = self._joined(samples.values(), reset=True)

    def answer(self, since_ms: int, grid_ms: int) -> bytes:
        key = since_ms // grid_ms
        if since_ms <= self.anew_ms or key not in self._recent:
            return self._everything
        # The minute that the page named may have grown.
        first = key if grid_ms > 1 else key + 1
        later = [text for time, text in self._recent.items() if time >= first]
        return self._joined(later, reset=False)

    def _joined(self, samples: Collection[bytes], *, reset: bool) -> bytes:
        end = b',"reset":%b,"samples":[%b]}'
        return self._head + end % (_json(reset), b",".join(samples))


class MergedHistory:
    """The samples of several servers as those of one, from one look to the next.

    Each server is asked only for what is new there, and only that is added up and written as JSON;
    all of it is anew when a server joins, leaves or forgets. `take` may run in a thread beside
    `answer`, but not twice at a time.

    Args:
        coarse: whether the samples are those of a minute.
    """

    def __init__(self, *, coarse: bool) -> None:
        self._coarse = coarse
        self._grid_ms = 60_000 if coarse else 1
        self._most = COARSE if coarse else FINE
        self._servers: dict[str, _Server] = {}
        self._places: dict[tuple[str, ...], int] = {}
        self._changed: set[int] = set()
        self._samples: dict[int, bytes] = {}
        self._newest_ms = 0
        self._written = _Written({}, {}, 0)

    def known_ms(self, server: str) -> int:
        """The time that the next question to a server has to name; 0: nothing is known of it."""
        samples = self._servers[server].samples if server in self._servers else {}
        return samples[max(samples)][0] if samples else 0

    def take(self, answers: Mapping[str, dict[str, Any]], listed: Collection[str]) -> None:
        """Take in what is new.

        Args:
            answers: by server, at least one, each to a question that named its `known_ms`.
            listed: all servers there are; what others said is forgotten.
        """
        gone = self._servers.keys() - set(listed)
        for name in gone:
            del self._servers[name]
        for name, answer in answers.items():
            self._keep(name, answer)
        if gone or any(answer["reset"] for answer in answers.values()):
            self._samples.clear()
            self._changed = {key for one in self._servers.values() for key in one.samples}
        shown_ms, anew_ms = self._newest_ms, self._written.anew_ms
        oldest = self._add_up(answers)
        if gone or oldest < shown_ms // self._grid_ms + (not self._coarse):
            anew_ms = shown_ms  # what pages have is not so any more
        told = [self._servers[name].told for name in answers]
        head = merged(told, coarse=self._coarse, places=self._places)
        del head["samples"], head["reset"]
        self._written = _Written(head, self._samples, anew_ms)

    def answer(self, since_ms: int) -> bytes:
        """JSON for a page whose newest sample is of that time; 0: it has none."""
        return self._written.answer(since_ms, self._grid_ms)

    def _keep(self, name: str, answer: dict[str, Any]) -> None:
        known = self._servers.get(name)
        samples = {} if known is None or answer["reset"] else known.samples
        for sample in answer["samples"]:
            key = sample[0] // self._grid_ms
            samples[key] = sample
            self._changed.add(key)
        while len(samples) > self._most:
            del samples[next(iter(samples))]
        self._servers[name] = _Server({**answer, "samples": []}, samples)

    def _add_up(self, answered: Collection[str]) -> float:
        """Add up the samples that changed, by the clock of a server that has just answered; the
        time of the oldest, on the grid."""
        order = sorted(self._servers, key=lambda name: name not in answered)
        parts, oldest = [], math.inf
        for one in map(self._servers.__getitem__, order):
            changed = [one.samples[key] for key in self._changed & one.samples.keys()]
            parts.append({**one.told, "samples": changed})
        for sample in merged(parts, coarse=self._coarse, places=self._places)["samples"]:
            key = sample[0] // self._grid_ms
            self._samples[key] = _json(sample)
            oldest = min(oldest, key)
            self._changed.discard(key)
            self._newest_ms = max(self._newest_ms, sample[0])
        self._samples = dict(sorted(self._samples.items())[-self._most :])
        kept = self._servers.values()
        self._changed = {key for key in self._changed if any(key in one.samples for one in kept)}
        return oldest


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
