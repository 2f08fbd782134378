# SPDX-License-Identifier: Apache-2.0
"""Merges the data of several servers' live pages; the front shows its replicas this way."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_slo.live.history import ADDED, COARSE, FINE, STEP_S

LAG_MS = round(2 * STEP_S * 1e3)
"""Least age of a sample that is shown: a younger one may be missing from another server, and a page
does not ask for the same time again."""
RECENT: Final = 32
"""Samples that a page can be behind; a page that is further behind gets all samples again."""


def merged(
    answers: Sequence[dict[str, Any]],
    *,
    coarse: bool,
    places: dict[tuple[str, ...], int] | None = None,
) -> dict[str, Any]:
    """One answer from the answers of at least one server to the same question.

    Counters are summed; gauges are merged as `History` does for the engines of one server. If a
    server does not know the sample that the page named, the page must drop its samples, and the
    caller must then ask the other servers for everything.

    Args:
        coarse: whether samples are of a minute.
        places: of the series; new series are added. None: there are none yet.
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
    """One server: its last answer without the samples, and all its samples by time."""

    answer: dict[str, Any]
    samples: dict[int, list[Any]]


class _Written:
    """Answers to pages, already written as JSON; only the samples are chosen per page.

    Args:
        head: the answer without samples.
        samples: time -> sample, oldest first.
        anew_ms: pages whose newest sample is not later than this must drop their samples.
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
        # The minute that the page has last may have grown.
        first = key if grid_ms > 1 else key + 1
        later = [text for time, text in self._recent.items() if time >= first]
        return self._joined(later, reset=False)

    def _joined(self, samples: Collection[bytes], *, reset: bool) -> bytes:
        end = b',"reset":%b,"samples":[%b]}'
        return self._head + end % (_json(reset), b",".join(samples))


class MergedHistory:
    """The merged samples of several servers, kept up to date.

    Each server is asked only for new samples, and only these are summed and written as JSON.
    Everything is summed again when a server joins, leaves or resets. `take` may run in a thread
    beside `answer`, but not twice at the same time.

    ``coarse``: whether samples are of a minute.
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
        """The time to name in the next question to a server; 0 for an unknown server."""
        samples = self._servers[server].samples if server in self._servers else {}
        return samples[max(samples)][0] if samples else 0

    def take(self, answers: Mapping[str, dict[str, Any]], listed: Collection[str]) -> None:
        """Merge new answers.

        Args:
            answers: by server, at least one, each to a question that named its `known_ms`.
            listed: all servers; samples of other servers are dropped.
        """
        removed = self._servers.keys() - set(listed)
        for name in removed:
            del self._servers[name]
        for name, answer in answers.items():
            self._keep(name, answer)
        if removed or any(answer["reset"] for answer in answers.values()):
            self._samples.clear()
            self._changed = {key for server in self._servers.values() for key in server.samples}
        shown_ms, anew_ms = self._newest_ms, self._written.anew_ms
        oldest = self._add_up(answers)
        if removed or oldest < shown_ms // self._grid_ms + (not self._coarse):
            anew_ms = shown_ms  # the samples of pages are no longer right
        latest = [self._servers[name].answer for name in answers]
        head = merged(latest, coarse=self._coarse, places=self._places)
        del head["samples"], head["reset"]
        self._written = _Written(head, self._samples, anew_ms)

    def answer(self, since_ms: int) -> bytes:
        """JSON for a page whose newest sample has that time; 0: it has none."""
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
        """Sum the changed samples, by the clock of a server that has just answered.

        Returns the time of the oldest, in steps of the grid.
        """
        order = sorted(self._servers, key=lambda name: name not in answered)
        parts, oldest = [], math.inf
        for server in map(self._servers.__getitem__, order):
            changed = [server.samples[key] for key in self._changed & server.samples.keys()]
            parts.append({**server.answer, "samples": changed})
        for sample in merged(parts, coarse=self._coarse, places=self._places)["samples"]:
            key = sample[0] // self._grid_ms
            self._samples[key] = _json(sample)
            oldest = min(oldest, key)
            self._changed.discard(key)
            self._newest_ms = max(self._newest_ms, sample[0])
        self._samples = dict(sorted(self._samples.items())[-self._most :])
        kept = self._servers.values()
        self._changed = {key for key in self._changed if any(key in each.samples for each in kept)}
        return oldest


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
