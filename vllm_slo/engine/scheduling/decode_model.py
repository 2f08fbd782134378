# SPDX-License-Identifier: Apache-2.0
"""What decoding is like: plain, with chains of drafts, or with trees. Admission and planning ask
one `DecodeModel` and do not know which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from vllm_slo.core.admission.program import PLAIN, Speculated
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduling.step_clock import StepClock

WayToDecode: TypeAlias = tuple[StepTimeModel, Speculated]
"""(step times, what a step yields): what a promise may count on."""


@dataclass(slots=True)
class TokenYields:
    """Tokens that steps are expected to yield, of the requests that have drafts in them.

    Attributes:
        next_step: request id -> tokens of the step that is being planned.
        in_flight: request id -> tokens of the steps on their way.
        spare_s: request id -> seconds of the longest step that its window can spare; see
            `DecodeView`.
    """

    next_step: dict[str, float] = field(default_factory=dict)
    in_flight: dict[str, float] = field(default_factory=dict)
    spare_s: dict[str, float] = field(default_factory=dict)


class DecodeModel(Protocol):
    """How requests decode on this engine.

    Attributes:
        yields: what drafts are expected to yield.
        speculates: whether there may ever be drafts; else `speculative` is always None.
    """

    yields: TokenYields
    speculates: bool

    def plain(self) -> StepTimeModel:
        """Times of steps without drafts, for promises to count on."""

    def speculative(self, tpot_s: float, /) -> WayToDecode | None:
        """Decoding with drafts that keeps a TPOT, for promises to count on; None: there is none."""

    def sustainable(self, tpot_s: float, /) -> tuple[float, Speculated]:
        """How many requests typical steps keep a TPOT for, and what a step yields then."""

    def spread(self) -> float:
        """Standard deviation of the tokens that come in time, of a request in a TPOT window, as a
        share of those that typical steps yield."""


class PlainDecoding:
    """Decoding without drafts: each step yields one token of a request."""

    speculates = False

    def __init__(self, clock: StepClock) -> None:
        self.yields = TokenYields()
        self._clock = clock

    def plain(self) -> StepTimeModel:
        return self._clock.plain_promise_model

    def speculative(self, _tpot_s: float, /) -> WayToDecode | None:
        return None

    def sustainable(self, tpot_s: float, /) -> tuple[float, Speculated]:
        return self._clock.verifying_model.time_to_tokens(tpot_s), PLAIN

    def spread(self) -> float:
        return self._clock.spread
