# SPDX-License-Identifier: Apache-2.0
"""The promised requests that decode, field by field instead of request by request: a step of
hundreds of them is planned by a few compiled calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from vllm_slo.core.arrays import Bools, Floats, Ints
from vllm_slo.core.jit import jit
from vllm_slo.core.step_time.model import chunk_pairs
from vllm_slo.core.types import INFINITY, DecodeView

EPS_S = 1e-9
"""Seconds below which two times are the same."""


class Decodes(NamedTuple):
    """Rows of `DecodeView`, (n,) of each field; see there.

    Attributes:
        request_ids: ids.
        due_s, window_end_s, window_left, tpot_s: as in `DecodeView`.
        tokens, context_tokens, spare_s: as in `DecodeView`.
    """

    request_ids: Sequence[str]
    due_s: Floats
    window_end_s: Floats
    window_left: Floats
    tpot_s: Floats
    tokens: Ints
    context_tokens: Ints
    spare_s: Floats

    @classmethod
    def of(cls, views: Sequence[DecodeView]) -> Decodes:
        """The rows of these views."""
        if not views:
            return NONE
        ids, *floats, tokens, context, _, spare_s = zip(*views, strict=True)
        due_s, end_s, left, tpot_s = (np.array(column, dtype=np.float64) for column in floats)
        counts = np.array(tokens, dtype=np.int64), np.array(context, dtype=np.int64)
        return cls(ids, due_s, end_s, left, tpot_s, *counts, np.array(spare_s, dtype=np.float64))

    @classmethod
    def in_windows(
        cls,
        request_ids: Sequence[str],
        start_s: float,
        windows: tuple[Floats, Floats],
        begun: Bools,
        expected: Floats,
        tpot_s: Floats,
        window: int,
        counts: tuple[Ints, Ints],
        spare_s: Floats,
    ) -> Decodes:
        """Requests before a step that begins at ``start_s``.

        ``expected`` tokens of a request come out of that step: then the last of them is what is due
        at its end, and as many fewer steps are left of its window. The next window begins when this
        one has ended, so no token counts beyond it. Tokens still in flight come out at ``start_s``;
        if they end a window, that is where the next one begins.

        Args:
            request_ids: n ids.
            start_s: when the step begins.
            windows: (n,) starts of the open windows, and (n,) tokens in them, those in flight
                included.
            begun: (n,) whether the first token is out.
            expected: (n,) tokens of the step.
            tpot_s: (n,) objectives to work towards; infinite without one.
            window: tokens of a TPOT window.
            counts: (n,) tokens to verify, and (n,) tokens of context.
            spare_s: (n,) as in `DecodeView`.
        """
        columns = _due(start_s, *windows, begun, expected, tpot_s, window)
        return cls(request_ids, *columns, tpot_s, *counts, spare_s)

    @property
    def number(self) -> int:
        """How many requests these are."""
        return len(self.request_ids)

    def load(self) -> tuple[int, int, int]:
        """(tokens, context tokens, query-key pairs) of one decode step of each."""
        return _load(self.tokens, self.context_tokens)

    def load_before(self, time_s: float) -> tuple[int, int, int]:
        """`load` of those whose next token is due before a time."""
        return _load_before(self.tokens, self.context_tokens, self.due_s, time_s)

    def parted(self, time_s: float) -> tuple[Part, Part]:
        """Those whose next token is due before a time, and the others."""
        early, all_of_them = self.load_before(time_s), self.load()
        late = [whole - part for whole, part in zip(all_of_them, early, strict=True)]
        mask = self.due_s < time_s
        return Part(self, mask, *early), Part(self, ~mask, *late)

    def where(self, mask: Bools) -> Decodes:
        """Those that a (n,) mask marks."""
        ids = list(compress(self.request_ids, mask.tolist()))
        if len(ids) == self.number:
            return self
        return Decodes(
            ids,
            self.due_s[mask],
            self.window_end_s[mask],
            self.window_left[mask],
            self.tpot_s[mask],
            self.tokens[mask],
            self.context_tokens[mask],
            self.spare_s[mask],
        )

    def limit_s(self, start_s: float, shortest_s: float, all_s: float) -> float:
        """Longest step that keeps the TPOT of each; infinite where there are none.

        See `limit_of`. A step that leaves out the decodes that can wait is shorter. It is not made
        for a request that can spare a step of all: drafts keep its TPOT in later steps.

        Args:
            start_s: when the step begins.
            shortest_s: the shortest step there is, without the decodes that can wait.
            all_s: a step of all decodes.
        """
        if not self.number:
            return INFINITY
        fields = self.due_s, self.window_end_s, self.window_left, self.tpot_s
        return float(_tightest(start_s, *fields, self.spare_s, shortest_s, all_s))

    def by_due(self) -> list[tuple[str, int, int]]:
        """(id, tokens, context tokens) of each, by due time."""
        rows = zip(
            self.due_s.tolist(),
            self.request_ids,
            self.tokens.tolist(),
            self.context_tokens.tolist(),
            strict=True,
        )
        return [row[1:] for row in sorted(rows)]


class Part(NamedTuple):
    """A part of the requests of a step.

    Attributes:
        rows: all requests.
        mask: (n,) whether a row belongs to the part.
        tokens, context_tokens, pairs: `Decodes.load` of the part.
    """

    rows: Decodes
    mask: Bools
    tokens: int
    context_tokens: int
    pairs: int

    def grants(self) -> Iterable[tuple[str, int]]:
        """(id, tokens) of each."""
        grants = zip(self.rows.request_ids, self.rows.tokens.tolist(), strict=True)
        return compress(grants, self.mask.tolist())

    def by_due(self) -> list[tuple[str, int, int]]:
        """(id, tokens, context tokens) of each, by due time."""
        return self.rows.where(self.mask).by_due()


_FLOATS, _INTS = np.empty(0), np.empty(0, dtype=np.int64)
NONE = Decodes((), _FLOATS, _FLOATS, _FLOATS, _FLOATS, _INTS, _INTS, _FLOATS)
"""No request."""


def limit_of(start_s: float, decode: DecodeView, shortest_s: float) -> float:
    """Longest step, beginning at ``start_s``, that keeps a decoding request's TPOT.

    On schedule this is its TPOT. Ahead of schedule, all the slack may go into one step. Behind
    schedule, the lateness is spread evenly over the tokens left in its window. If not even steps of
    ``shortest_s`` can save the window, it is given up: the request goes on at its TPOT, and no step
    is shortened for it.
    """
    fields = decode.due_s, decode.window_end_s, float(decode.window_left), decode.tpot_s
    return float(_limit(start_s, *fields, shortest_s))


@jit
def _limit(
    start_s: float, due_s: float, end_s: float, left: float, tpot_s: float, shortest_s: float
) -> float:
    limit = max(due_s - start_s, (end_s - start_s) / left)
    if limit >= shortest_s - EPS_S:
        return limit
    return max(tpot_s, shortest_s)


@jit
def _tightest(
    start_s: float,
    due_s: Floats,
    end_s: Floats,
    left: Floats,
    tpot_s: Floats,
    spare_s: Floats,
    shortest_s: float,
    all_s: float,
) -> float:
    tightest = np.inf
    for i in range(len(due_s)):
        least_s = all_s if all_s <= spare_s[i] else shortest_s
        limit = _limit(start_s, due_s[i], end_s[i], left[i], tpot_s[i], least_s)
        tightest = min(tightest, limit)
    return tightest


_pairs = jit(chunk_pairs)


@jit
def _load(tokens: Ints, context: Ints) -> tuple[int, int, int]:
    total = read = pairs = 0
    for i in range(len(tokens)):
        total += tokens[i]
        read += context[i]
        pairs += _pairs(tokens[i], context[i])
    return total, read, pairs


@jit
def _load_before(tokens: Ints, context: Ints, due_s: Floats, time_s: float) -> tuple[int, int, int]:
    total = read = pairs = 0
    for i in range(len(tokens)):
        if due_s[i] < time_s:
            total += tokens[i]
            read += context[i]
            pairs += _pairs(tokens[i], context[i])
    return total, read, pairs


@jit
def due_in_window(
    start_s: float,
    window_s: float,
    place: float,
    begun: bool,
    expected: float,
    tpot_s: float,
    window: int,
) -> tuple[float, float, float]:
    """(due_s, window_end_s, window_left) of one request; see `Decodes.in_windows`."""
    if tpot_s == np.inf:
        return np.inf, np.inf, 1.0
    at_s, held = window_s, place
    if not begun:
        at_s, held = start_s, max(held - 1.0, 0.0)
    elif held >= window:
        at_s, held = start_s, held % window
    due_s = at_s + min(held + expected, float(window)) * tpot_s
    return due_s, at_s + window * tpot_s, max((window - held) / expected, 1.0)


@jit
def _due(
    start_s: float,
    window_s: Floats,
    place: Floats,
    begun: Bools,
    expected: Floats,
    tpot_s: Floats,
    window: int,
) -> tuple[Floats, Floats, Floats]:
    count = len(place)
    due_s, end_s, left = np.empty(count), np.empty(count), np.empty(count)
    for i in range(count):
        due_s[i], end_s[i], left[i] = due_in_window(
            start_s, window_s[i], place[i], begun[i], expected[i], tpot_s[i], window
        )
    return due_s, end_s, left
