# SPDX-License-Identifier: Apache-2.0
"""What the tests of features compare is seen to differ. No engine is started."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from features import Results

REPORTS: list[Any] = [
    {"promised": True, "late": False, "reason": None, "attained": True},
    {"promised": True, "late": True, "reason": "expired", "attained": False},
    None,
    {"promised": True, "late": False, "reason": None, "attained": True},
]
PLAIN = [{"tokens": [[n, n + 1]], "report": None, "vector": [0.5]} for n in range(4)]
ASKING = [{**one, "report": report} for one, report in zip(PLAIN, REPORTS, strict=True)]
MODE = {"texts": {"plain": PLAIN, "asking": ASKING, "nodes": 99}}


def results() -> Results:
    modes: Any = copy.deepcopy(
        {"ours": MODE, "trees": MODE, "no": {"refused": "ConfigError: x: y"}}
    )
    return Results({"texts": {"plain": PLAIN}}, modes, "vllm-slo: error: x: y")


def check(one: Results) -> None:
    one.check_plain()
    one.check_promised()
    one.check_trees()
    assert one.refusal("no") == "ConfigError: x: y"


def test_equal_answers_pass() -> None:
    check(results())


@pytest.mark.parametrize(
    ("mode", "phase", "name", "value"),
    [
        ("ours", "plain", "tokens", [[7]]),
        ("ours", "asking", "tokens", [[7]]),
        ("trees", "plain", "tokens", [[7]]),
        ("ours", "plain", "vector", [0.6]),
        ("ours", "plain", "report", REPORTS[0]),
        ("ours", "asking", "report", None),
        ("ours", "asking", "report", {**REPORTS[0], "attained": False}),
        ("trees", "asking", "report", REPORTS[1]),
    ],
)
def test_a_difference_is_found(mode: str, phase: str, name: str, value: Any) -> None:
    one: Any = results()
    one.modes[mode]["texts"][phase][0][name] = value
    with pytest.raises(AssertionError):
        check(one)


def test_a_step_without_trees_is_found() -> None:
    one: Any = results()
    one.modes["trees"]["texts"]["nodes"] = 0
    with pytest.raises(AssertionError):
        check(one)


def test_a_refusal_of_several_lines_or_outside_the_log_is_found() -> None:
    for line in ("ConfigError: x: y\nmore", "ConfigError: z"):
        one: Any = results()
        one.modes["no"]["refused"] = line
        with pytest.raises(AssertionError):
            check(one)
