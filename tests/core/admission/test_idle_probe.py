# SPDX-License-Identifier: Apache-2.0
"""When an idle engine promises one request to find out how fast it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.core.admission.idle_probe import LONGEST_IDLE_S, IdleProbe, whom_to_probe
from vllm_slo.core.admission.program import Capacity, plan_admission
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand

FAST = StepTimeModel(((0.0, 0.0, 0.001), (1e-3, 0.0, 0.0)), max_tokens=1000)
WHOLE = Capacity(blocks=1000, seats=16, max_step_tokens=1000)


def test_each_probe_doubles_the_wait_for_the_next_up_to_an_hour() -> None:
    probe = IdleProbe(30.0)
    assert [probe.is_due(idle_s) for idle_s in (0.0, 29.9, 30.0)] == [False, False, True]
    probe.probed()
    assert [probe.is_due(idle_s) for idle_s in (59.9, 60.0)] == [False, True]
    for _ in range(20):
        probe.probed()
    assert [probe.is_due(idle_s) for idle_s in (3599.9, LONGEST_IDLE_S)] == [False, True]


def test_a_promise_by_what_is_known_ends_the_doubt() -> None:
    probe = IdleProbe(30.0)
    probe.probed()
    probe.promised()
    assert probe.is_due(30.0)


def test_of_those_who_could_be_served_the_last_to_be_due_finds_out() -> None:
    refused = [
        Demand("hopeless", 0.05, 100, 0.1, 1),
        Demand("soon", 0.5, 100, 0.1, 1),
        Demand("late", 5.0, 100, 0.1, 1),
    ]
    assert whom_to_probe(refused, FAST, WHOLE, 0.0) == "late"
    assert whom_to_probe(refused[:2], FAST, WHOLE, 0.0) == "soon"
    assert whom_to_probe(refused[:1], FAST, WHOLE, 0.0) is None
    assert whom_to_probe([], FAST, WHOLE, 0.0) is None


DEMANDS = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(1, 2000), st.sampled_from([0.0005, 0.05, 1.0])),
    max_size=6,
).map(lambda drawn: [Demand(str(i), *one, blocks=1) for i, one in enumerate(drawn)])


@given(refused=DEMANDS)
def test_somebody_finds_out_exactly_if_one_alone_could_be_served(refused: list[Demand]) -> None:
    alone = {
        one.request_id
        for one in refused
        if plan_admission(0.0, [one], [], {}, FAST, WHOLE).admitted
    }
    found = whom_to_probe(refused, FAST, WHOLE, 0.0)
    assert found in alone if alone else found is None
