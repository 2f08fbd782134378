# SPDX-License-Identifier: Apache-2.0
"""What is decided of the promises of some requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_slo.core.admission.late import LatePromise


@dataclass(frozen=True, slots=True)
class Ruling:
    """What is decided of some requests, by request id.

    Attributes:
        admitted: when its prefill is to end; its objectives are promised.
        refused: what stood in the way.
        retry_after_s: for each that is refused or sent away, when it might be promised.
        moved: promised requests, and what stands in their way, now that others have their place.
        late: what is promised instead of the objectives that it asked for.
        turns: requests whose late promises are kept like any other from now on.
        sent_away: requests that are not served, and why: they asked not to wait for so long.
    """

    admitted: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    retry_after_s: dict[str, float] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    late: dict[str, LatePromise] = field(default_factory=dict)
    turns: tuple[str, ...] = ()
    sent_away: dict[str, str] = field(default_factory=dict)
