# SPDX-License-Identifier: Apache-2.0
"""TTFT, TPOT, attainment and goodput: defined here once and used everywhere.

* **TTFT** is counted from the request's arrival at the server, so it includes queueing.
* **Worst-window TPOT** is SLOs-Serve's measure (section 6, "SLOs": "we measure the TPOT every 10
  tokens"): the mean gap between tokens over each run of ten tokens after the first; the worst run
  counts. A tail shorter than ten joins the last full run.
* **Mean TPOT** is ``(last - first) / (n - 1)``: AdaServe's measure (section 6.1, "Metrics") and
  that of ``vllm bench serve --goodput``.
* A request **attains** when it finished and kept every objective it had. A declined or failed
  request that had an objective did not attain; one served best effort did if it met them anyway.
* **Goodput** counts only attaining requests. A request without objectives cannot attain, so it adds
  to throughput and never to goodput.

All times are seconds on one clock; a chunk that carries several tokens gives each of them its time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, get_args

import numpy as np

DEFAULT_WINDOW_TOKENS: Final = 10
"""Tokens per TPOT window (SLOs-Serve, section 6)."""

Outcome = Literal["served", "admitted", "best_effort", "declined", "failed"]
"""What became of a request: ``served`` where the server does not tell admitted from best effort."""

TPOTMeasure = Literal["worst_window", "mean"]


class WindowTPOT:
    """Worst-window TPOT, one token at a time: O(1) per token, constant memory.

    After any prefix of tokens, ``worst_s`` equals ``worst_window_tpot_s`` of that prefix exactly.

    Attributes:
        open_start_s: start of the window that the next token falls into: the time of the last token
            before it; 0 before any token.
        open_tokens: tokens that this window already holds.
    """

    __slots__ = (
        "_closed_worst_s",
        "_end_s",
        "_gaps",
        "_last_s",
        "_start_s",
        "_tokens",
        "_window",
        "open_start_s",
        "open_tokens",
    )

    def __init__(self, window: int = DEFAULT_WINDOW_TOKENS) -> None:
        """``window``: inter-token gaps per window, at least 1."""
        if window < 1:
            raise ValueError(f"window must be at least 1 token, got {window}")
        self._window = window
        self._tokens = 0
        self._gaps = 0  # gaps in the open window, below 2 * window
        self._start_s = 0.0  # start of the open window
        self._end_s = 0.0  # where the open window would be cut if a full tail follows it
        self._last_s = 0.0
        self._closed_worst_s = 0.0
        self.open_start_s = 0.0
        self.open_tokens = 0

    def add(self, time_s: float, count: int = 1) -> None:
        """Record ``count`` tokens that arrived together at ``time_s`` (never before the last)."""
        if self._tokens and not time_s >= self._last_s:
            raise ValueError(f"token times must not decrease: {time_s} after {self._last_s}")
        if not self._tokens:
            self._tokens, count = 1, count - 1
            self._start_s = self.open_start_s = time_s
        self._last_s = time_s
        self._tokens += count
        room = self._window - self.open_tokens
        while count >= room:
            self._gaps += room
            count -= room
            room = self._window
            self._close(time_s)
        self._gaps += count
        self.open_tokens += count

    def _close(self, time_s: float) -> None:
        """A window is full."""
        if self._gaps == 2 * self._window:
            closed_s = (self._end_s - self._start_s) / self._window
            self._closed_worst_s = max(self._closed_worst_s, closed_s)
            self._start_s, self._gaps = self._end_s, self._window
        self._end_s = self.open_start_s = time_s
        self.open_tokens = 0

    def successor(self) -> WindowTPOT:
        """A measure of the tokens to come, including the gap before the first of them."""
        following = WindowTPOT(self._window)
        if self._tokens:
            following.add(self._last_s)
        return following

    @property
    def tokens(self) -> int:
        """Tokens recorded so far."""
        return self._tokens

    @property
    def open_window(self) -> tuple[float, int]:
        """`open_start_s` and `open_tokens`."""
        return self.open_start_s, self.open_tokens

    @property
    def worst_full_s(self) -> float | None:
        """Worst window that holds all its tokens, in seconds per token; None before there is one.

        It never falls. ``worst_s`` can be lower: there a tail joins the last full window.
        """
        if self._gaps < self._window:
            return None
        return max(self._closed_worst_s, (self._end_s - self._start_s) / self._window)

    @property
    def worst_s(self) -> float | None:
        """Worst window so far in seconds per token; None before the second token."""
        if self._gaps == 0:
            return None
        return max(self._closed_worst_s, (self._last_s - self._start_s) / self._gaps)


def worst_window_tpot_s(
    token_times_s: Sequence[float], window: int = DEFAULT_WINDOW_TOKENS
) -> float | None:
    """Worst mean gap in seconds over windows of ``window`` gaps; None for fewer than two tokens.

    The tail merges into the last full window; fewer than ``window`` gaps make one window.
    Source: SLOs-Serve, section 6, "SLOs".
    """
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    gaps = len(token_times_s) - 1
    if gaps < 1:
        return None
    cuts = [i * window for i in range(max(1, gaps // window))] + [gaps]
    return max((token_times_s[b] - token_times_s[a]) / (b - a) for a, b in pairwise(cuts))


def mean_tpot_s(token_times_s: Sequence[float]) -> float | None:
    """Mean gap between tokens in seconds; None for fewer than two tokens (AdaServe, 6.1)."""
    if len(token_times_s) < 2:
        return None
    return (token_times_s[-1] - token_times_s[0]) / (len(token_times_s) - 1)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What one request asked for and when its tokens came (seconds on one clock).

    ``token_times_s`` has one entry per output token, never decreasing and never before
    ``arrival_s``. ``finished`` means that the whole answer was delivered.
    Raises ValueError for times out of order or an unknown outcome.
    """

    request_id: str
    slo_class: str
    arrival_s: float
    token_times_s: tuple[float, ...]
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    outcome: Outcome
    finished: bool
    num_prompt_tokens: int
    e2e_slo_s: float | None = None

    def __post_init__(self) -> None:
        if self.outcome not in get_args(Outcome):
            raise ValueError(f"outcome {self.outcome!r} is not one of {get_args(Outcome)}")
        if not math.isfinite(self.arrival_s):
            raise ValueError(f"arrival_s must be finite, got {self.arrival_s}")
        previous_s = self.arrival_s
        for time_s in self.token_times_s:
            if not previous_s <= time_s < math.inf:
                raise ValueError(f"token time {time_s} is before {previous_s} or not finite")
            previous_s = time_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token, queueing included; None without a token."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def e2e_s(self) -> float | None:
        """Seconds from arrival to the last token, queueing included; None without a token."""
        return self.token_times_s[-1] - self.arrival_s if self.token_times_s else None

    @property
    def has_objective(self) -> bool:
        """Whether it asked for a TTFT, a TPOT, or a time to the last token."""
        return not (self.ttft_slo_s is self.tpot_slo_s is self.e2e_slo_s is None)


@dataclass(frozen=True, slots=True)
class Attainment:
    """One request measured: seconds, and whether it kept what it asked for.

    ``attained`` uses the worst window, ``attained_by_mean`` the mean TPOT; both are None where the
    request had no objective, and False where it has one but did not finish.
    """

    ttft_s: float | None
    worst_tpot_s: float | None
    mean_tpot_s: float | None
    attained: bool | None
    attained_by_mean: bool | None


def _kept(objective_s: float | None, measured_s: float | None) -> bool:
    # A measure that does not exist (TPOT of a one-token answer) cannot have been missed.
    return objective_s is None or measured_s is None or objective_s >= measured_s


def measure(record: RequestRecord, window: int = DEFAULT_WINDOW_TOKENS) -> Attainment:
    """Measure one request. Equality with an objective keeps it, as in ``vllm bench serve``."""
    ttft_s = record.ttft_s
    worst_s = worst_window_tpot_s(record.token_times_s, window)
    mean_s = mean_tpot_s(record.token_times_s)
    if not record.has_objective:
        return Attainment(ttft_s, worst_s, mean_s, None, None)
    in_time = record.finished and ttft_s is not None and _kept(record.ttft_slo_s, ttft_s)
    in_time = in_time and _kept(record.e2e_slo_s, record.e2e_s)
    return Attainment(
        ttft_s,
        worst_s,
        mean_s,
        in_time and _kept(record.tpot_slo_s, worst_s),
        in_time and _kept(record.tpot_slo_s, mean_s),
    )


def attained(
    record: RequestRecord,
    *,
    tpot: TPOTMeasure = "worst_window",
    window: int = DEFAULT_WINDOW_TOKENS,
) -> bool | None:
    """Whether the request kept its objectives; None when it had none."""
    result = measure(record, window)
    return result.attained if tpot == "worst_window" else result.attained_by_mean


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One SLO class over a run. Times in seconds, rates per second of the run's duration.

    ``attainment`` and ``attainment_by_mean`` are shares of ``with_objective`` (worst-window and
    mean TPOT; None where no request had an objective). Percentiles cover every request that has
    the measure: TTFT needs one token, TPOT two; None where no request does.
    """

    slo_class: str
    n: int
    finished: int
    declined: int
    failed: int
    admitted: int
    best_effort: int
    with_objective: int
    attainment: float | None
    attainment_by_mean: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    mean_tpot_p50_s: float | None
    mean_tpot_p99_s: float | None
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    goodput_requests_per_s_by_mean: float
    goodput_tokens_per_s_by_mean: float
    throughput_tokens_per_s: float


def _percentile(values: Sequence[float], q: float) -> float | None:
    return float(np.percentile(values, q)) if values else None


def _share(flags: Sequence[bool | None]) -> float | None:
    return sum(1 for f in flags if f) / len(flags) if flags else None


def summarise_class(
    slo_class: str,
    records: Sequence[RequestRecord],
    duration_s: float,
    window: int = DEFAULT_WINDOW_TOKENS,
) -> ClassSummary:
    """Summarise ``records`` under one name, whatever their classes are."""
    if not (0 < duration_s < math.inf):
        raise ValueError(f"duration_s must be positive and finite, got {duration_s}")
    results = [measure(r, window) for r in records]
    pairs = list(zip(records, results, strict=True))
    tokens_good = sum(len(r.token_times_s) for r, m in pairs if m.attained)
    tokens_good_by_mean = sum(len(r.token_times_s) for r, m in pairs if m.attained_by_mean)
    asked = [m for r, m in pairs if r.has_objective]
    ttfts = [m.ttft_s for m in results if m.ttft_s is not None]
    worsts = [m.worst_tpot_s for m in results if m.worst_tpot_s is not None]
    means = [m.mean_tpot_s for m in results if m.mean_tpot_s is not None]
    return ClassSummary(
        slo_class=slo_class,
        n=len(records),
        finished=sum(r.finished for r in records),
        declined=sum(r.outcome == "declined" for r in records),
        failed=sum(r.outcome == "failed" for r in records),
        admitted=sum(r.outcome == "admitted" for r in records),
        best_effort=sum(r.outcome == "best_effort" for r in records),
        with_objective=len(asked),
        attainment=_share([m.attained for m in asked]),
        attainment_by_mean=_share([m.attained_by_mean for m in asked]),
        ttft_p50_s=_percentile(ttfts, 50),
        ttft_p99_s=_percentile(ttfts, 99),
        tpot_p50_s=_percentile(worsts, 50),
        tpot_p99_s=_percentile(worsts, 99),
        mean_tpot_p50_s=_percentile(means, 50),
        mean_tpot_p99_s=_percentile(means, 99),
        goodput_requests_per_s=sum(bool(m.attained) for m in results) / duration_s,
        goodput_tokens_per_s=tokens_good / duration_s,
        goodput_requests_per_s_by_mean=sum(bool(m.attained_by_mean) for m in results) / duration_s,
        goodput_tokens_per_s_by_mean=tokens_good_by_mean / duration_s,
        throughput_tokens_per_s=sum(len(r.token_times_s) for r in records) / duration_s,
    )


def summarise(
    records: Iterable[RequestRecord], duration_s: float, window: int = DEFAULT_WINDOW_TOKENS
) -> dict[str, ClassSummary]:
    """Summary per SLO class, in order of first appearance. ``duration_s``: the run's length."""
    by_class: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_class.setdefault(record.slo_class, []).append(record)
    return {
        name: summarise_class(name, members, duration_s, window)
        for name, members in by_class.items()
    }
