# SPDX-License-Identifier: Apache-2.0
"""core/speculation/tree_shape.py: AdaServe's equations 8 and 9."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.speculation.tree_shape import TreeControl, depth_and_width


def test_depth_and_width_by_hand() -> None:
    control = TreeControl(64, 32, max_depth=8, min_depth=1, max_width=6, c1=2, c2=1)
    assert [depth_and_width(n, control) for n in (0, 1, 6, 8, 14, 30, 500)] == [
        (8, 6), (8, 6), (7, 6), (5, 5), (3, 3), (1, 2), (1, 1),
    ]  # fmt: skip


@given(st.integers(0, 2000), st.integers(0, 100))
def test_more_requests_never_get_deeper_or_wider_trees(active, more) -> None:
    control = TreeControl(256, 128, max_depth=10, min_depth=2, max_width=16, c1=3)
    depth, width = depth_and_width(active, control)
    deeper, wider = depth_and_width(active + more, control)
    assert 2 <= deeper <= depth <= 10
    assert 1 <= wider <= width <= 16


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_depth", 9),
        ("min_depth", -1),
        ("max_width", 0),
        ("verifier_tokens", 0),
        ("speculator_tokens", 0),
        ("c1", -1),
    ],
)
def test_constants_out_of_range_are_named(field, value) -> None:
    with pytest.raises(ValueError, match=field):
        TreeControl(**({"verifier_tokens": 64, "speculator_tokens": 64} | {field: value}))
