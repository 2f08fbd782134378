# SPDX-License-Identifier: Apache-2.0
"""Makes Prometheus series that all have the label ``engine``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["RATIO_BUCKETS", "Members", "SeriesMaker"]

RATIO_BUCKETS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)

_Series = TypeVar("_Series", Counter, Gauge, Histogram)


class Members(Generic[_Series]):
    """The members of one series by its further labels.

    They are remembered: looking one up in ``prometheus_client`` costs more than counting.
    """

    def __init__(self, series: _Series, engine: str) -> None:
        self._series: _Series = series
        self._engine = engine
        self._members: dict[tuple[str, ...], _Series] = {}

    def of(self, *labels: str) -> _Series:
        """The member with these labels."""
        member = self._members.get(labels)
        if member is None:
            member = self._members[labels] = self._series.labels(self._engine, *labels)
        return member


class SeriesMaker:
    """Makes the series of one engine, each once: one that is asked for again is the same."""

    def __init__(self, registry: CollectorRegistry, engine: str) -> None:
        self._registry = registry
        self._engine = engine
        self._made: dict[str, Members[Any]] = {}

    def counter(self, name: str, text: str, *labels: str) -> Members[Counter]:
        """A counter; ``text`` is its help."""
        return self._once(Counter, name, text, labels)

    def gauge(self, name: str, text: str, *labels: str) -> Members[Gauge]:
        """A gauge; where several processes have it, the newest value counts."""
        return self._once(Gauge, name, text, labels, multiprocess_mode="mostrecent")

    def histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float]
    ) -> Members[Histogram]:
        """A histogram with these upper bounds."""
        return self._once(Histogram, name, text, labels, buckets=buckets)

    def _once(
        self, kind: type[_Series], name: str, text: str, labels: Sequence[str], **options: Any
    ) -> Members[_Series]:
        if name not in self._made:
            series = kind(name, text, ["engine", *labels], registry=self._registry, **options)
            self._made[name] = Members(series, self._engine)
        return self._made[name]
