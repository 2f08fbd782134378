# SPDX-License-Identifier: Apache-2.0
"""Tiers of requests that decode at one pace, for the choice of draft lengths.

Source: SLOs-Serve, section 3.2.3: requests of one TPOT verify equally many tokens a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MAX_TIERS = 5
"""Most tiers of a step. Planning enumerates the lengths of each as the binding one."""


class Tier(NamedTuple):
    """Requests that decode at one pace.

    Attributes:
        requests: how many, at least 1.
        tpot_s: seconds per token that each must keep, above 0; infinite where none is asked for.
        acceptance: chance that a draft is accepted if those before it are; in [0, 1].
    """

    requests: int
    tpot_s: float
    acceptance: float


def gather_tiers(paces: Sequence[tuple[float, float]]) -> tuple[list[Tier], list[int]]:
    """Group requests into at most ``MAX_TIERS`` tiers.

    Neighbours that differ least are merged. The merged tier keeps the tighter TPOT, so no request
    is planned more loosely than it asked, and the mean acceptance.

    Args:
        paces: (working TPOT in seconds, acceptance) of each request.

    Returns:
        The tiers by ascending TPOT, and the index of each request's tier.
    """
    groups: dict[tuple[float, float], int] = {}
    for pace in paces:
        groups[pace] = groups.get(pace, 0) + 1
    tiers = [Tier(groups[pace], *pace) for pace in sorted(groups)]
    places = list(range(len(tiers)))
    while len(tiers) > MAX_TIERS:
        at = min(range(len(tiers) - 1), key=lambda i: _difference(tiers[i], tiers[i + 1]))
        tiers[at : at + 2] = [_merged(tiers[at], tiers[at + 1])]
        places = [place - (place > at) for place in places]
    place_of = dict(zip(sorted(groups), places, strict=True))
    return tiers, [place_of[pace] for pace in paces]


def _difference(tight: Tier, loose: Tier) -> float:
    """Of two tiers, the second no tighter: that of their acceptances, and of the logarithms of
    their TPOTs."""
    apart = abs(tight.acceptance - loose.acceptance)
    return apart if tight.tpot_s == loose.tpot_s else apart + math.log(loose.tpot_s / tight.tpot_s)


def _merged(tight: Tier, loose: Tier) -> Tier:
    requests = tight.requests + loose.requests
    accepted = tight.requests * tight.acceptance + loose.requests * loose.acceptance
    return Tier(requests, tight.tpot_s, accepted / requests)
