# SPDX-License-Identifier: Apache-2.0
"""What a replica of a Ray Serve deployment tells its routers through Serve's routing stats.

Serve asks each replica again and again, and sends the newest answer to every process that routes.
The answer is plain text and numbers: Serve's controller, through which it goes, needs no module of
this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

KEY: Final = "vllm_slo"
"""Of Serve's routing stats; a deployment may add others."""


class ServeStats(NamedTuple):
    """One answer. Times are epoch seconds: replicas and routers may run on several machines, whose
    clocks are to agree within milliseconds, as NTP keeps them.

    Attributes:
        asked_s: when the replica was asked; it had no newer state then.
        taken_s: when the scheduler took the state.
        line: the state, a whole line of `core.routing.state_stream`; None: there is none yet.
    """

    asked_s: float
    taken_s: float
    line: str | None

    def to_stats(self) -> dict[str, Any]:
        """The entry of Serve's routing stats."""
        return {KEY: [self.asked_s, self.taken_s, self.line]}

    @classmethod
    def from_stats(cls, stats: object) -> ServeStats | None:
        """The answer in a replica's routing stats; None if they hold none that can be read."""
        entry = stats.get(KEY) if isinstance(stats, Mapping) else None
        match entry:
            case [float() as asked_s, float() as taken_s, None | str() as line]:
                return cls(asked_s, taken_s, line)
        return None
