# SPDX-License-Identifier: Apache-2.0
"""How deep and wide candidate trees are: AdaServe, section 5.2, equations 8 and 9."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeControl:
    """Constants of equations 8 and 9. AdaServe finds them by grid search on the hardware.

    Attributes:
        verifier_tokens: B1, tokens that the target verifies in a step.
        speculator_tokens: B2, tokens that the draft model processes in one of its steps.
        max_depth: D_max.
        min_depth: D_min.
        max_width: W_max.
        c1: requests added to the active ones in equation 8, which makes trees shallower.
        c2: nodes added to the width in equation 9.

    Raises ValueError naming the field that is out of range.
    """

    verifier_tokens: int
    speculator_tokens: int
    max_depth: int = 8
    min_depth: int = 1
    max_width: int = 8
    c1: int = 0
    c2: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_depth <= self.max_depth:
            raise ValueError(f"min_depth: must lie in 0..{self.max_depth}, not {self.min_depth}")
        for name in ("verifier_tokens", "speculator_tokens", "max_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.c1 < 0:
            raise ValueError(f"c1: must not be negative, not {self.c1}")


def depth_and_width(active: int, control: TreeControl) -> tuple[int, int]:
    """(d, w) of the candidate trees of ``active`` requests; 0 counts as 1 (equations 8 and 9)."""
    n = max(active, 1)
    depth = control.verifier_tokens // (n + control.c1) - 1
    width = control.speculator_tokens // n + control.c2
    return (
        max(min(depth, control.max_depth), control.min_depth),
        max(min(width, control.max_width), 1),
    )
