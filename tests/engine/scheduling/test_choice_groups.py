# SPDX-License-Identifier: Apache-2.0
"""The choices of one HTTP request are declined together or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from depth import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm_slo import SLO
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.composition import Parts
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.scheduling.choice_groups import REMEMBERED, ChoiceGroups
from vllm_slo.engine.scheduling.quotas import OTHERS
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.sim.harness import EngineShape, Outcome, VirtualEngine
from vllm_slo.slo.keys import EACH_KEY, GROUP_KEY
from vllm_slo.slo.verdicts import Declined, unpack

ROOFLINE = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
EASY = SLO(ttft_ms=60_000, tpot_ms=1_000, on_unattainable="decline")
HOPELESS = SLO(ttft_ms=1, on_unattainable="decline")
BURST = 10_000
QUOTA = {"default": {"promised_tokens_per_s": 1e-6, "burst_tokens": BURST}}

Make = Callable[..., VirtualEngine]


@pytest.fixture
def engine(config_folder: Path) -> Make:
    def make(seats: int = 8, **options: Any) -> VirtualEngine:
        options.setdefault("shape", EngineShape(max_num_seqs=seats))
        return VirtualEngine(
            Scheduler, config_folder, ROOFLINE.predict_shape_s, believed=ROOFLINE, **options
        )

    return make


def add(
    one: VirtualEngine,
    name: str,
    group: str | None,
    slo: SLO = EASY,
    prompt: int = 100,
    output: int = 10,
) -> None:
    """A choice of a request, as the gate marks it."""
    marks = {} if group is None else {GROUP_KEY: group, EACH_KEY: 1}
    flat = one.seal.sealed({**slo.to_extra_args(), **marks})
    one.add(name, prompt, output, cast(SLO, SimpleNamespace(to_extra_args=lambda: flat)))


def parts_of(one: VirtualEngine) -> Parts:
    scheduler = one.scheduler
    assert isinstance(scheduler, Scheduler)
    return scheduler.parts


def counted(one: VirtualEngine, outcome: str) -> float:
    metrics = parts_of(one).metrics.registry.collect()
    samples = [s for m in metrics for s in m.samples if s.name == "vllm_slo:admissions_total"]
    return sum(s.value for s in samples if s.labels["outcome"] == outcome)


def verdict(one: VirtualEngine, name: str) -> Declined | None:
    """The answer of a declined choice; None: it was served to its end."""
    outcome = one.outcomes[name]
    said = unpack(outcome.stop_reason)
    assert (outcome.finish_reason == "abort") == isinstance(said, Declined)
    assert said is None or not outcome.token_ids
    return said if isinstance(said, Declined) else None


def check_nothing_left(one: VirtualEngine) -> None:
    parts = parts_of(one)
    assert not len(parts.tracker) and parts.tracker.unpromised == 0
    assert not parts.endings.refused and not parts.controller._groups._members
    free = one.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == one.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1


# --- what comes together -------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, "g"])
def test_where_one_of_two_could_be_promised_neither_is(engine: Make, group: str | None) -> None:
    one = engine(seats=2)
    add(one, "other", None, output=40)
    one.step()
    for name in ("a", "b"):
        add(one, name, group)
    one.run()
    if group is None:
        assert verdict(one, "a") is None
        assert verdict(one, "b") == Declined(1_000, "seats")
    else:
        assert verdict(one, "a") == verdict(one, "b") == Declined(1_000, "seats")
        assert counted(one, "promised") == 1
        assert counted(one, "declined") == 2
    assert one.outcomes["other"].report == {**one.outcomes["other"].report, "promised": True}
    assert len(one.outcomes["other"].token_ids) == 40
    check_nothing_left(one)


def test_a_group_that_can_be_promised_is_served(engine: Make) -> None:
    one = engine()
    for name in ("a", "b", "c"):
        add(one, name, "g")
    one.run()
    assert [verdict(one, name) for name in "abc"] == [None] * 3
    assert counted(one, "promised") == 3
    check_nothing_left(one)


def test_other_groups_and_requests_are_ruled_on_for_themselves(engine: Make) -> None:
    one = engine(seats=3)
    add(one, "a1", "a")
    add(one, "b1", "b", HOPELESS)
    add(one, "a2", "a")
    add(one, "b2", "b", HOPELESS)
    add(one, "alone", None)
    one.run()
    assert [verdict(one, name) is None for name in ("a1", "a2", "alone")] == [True] * 3
    assert verdict(one, "b1") == verdict(one, "b2") is not None
    check_nothing_left(one)


def test_choices_that_would_be_served_without_a_promise_have_no_need_to_agree(engine: Make) -> None:
    one = engine(seats=1)
    for name in ("a", "b"):
        add(one, name, "g", SLO(ttft_ms=60_000, tpot_ms=1_000))
    one.run()
    reports = [cast(Any, one.outcomes[name].report) for name in ("a", "b")]
    assert [report["reason"] for report in reports] == [None, "seats"]
    check_nothing_left(one)


def test_a_quota_that_pays_for_one_of_two_pays_for_neither(engine: Make) -> None:
    one = engine(slo_config={"quotas": QUOTA})
    for name in ("a", "b"):
        add(one, name, "g", prompt=3_000, output=3_000)
    one.run()
    assert verdict(one, "a") == verdict(one, "b") == Declined(86_400_000, "quota")
    quotas = parts_of(one).quotas
    assert quotas is not None
    assert quotas._buckets[OTHERS].level(one.clock.now_s) == pytest.approx(BURST)
    assert not quotas._paid
    check_nothing_left(one)


# --- what comes one after the other --------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_who_comes_after_its_group_was_declined_is_declined_too(engine: Make, steps: int) -> None:
    one = engine()
    add(one, "other", None, output=40)
    one.step()
    add(one, "a", "g", HOPELESS)
    for _ in range(steps + 1):
        one.step()
    assert one.outcomes["a"].finish_reason == "abort"
    add(one, "b", "g", EASY)
    add(one, "c", "another", EASY)
    one.run()
    assert verdict(one, "b") == verdict(one, "a") is not None
    assert verdict(one, "c") is None
    assert counted(one, "declined") == 2
    assert len(one.outcomes["other"].token_ids) == 40
    check_nothing_left(one)


def test_a_promise_without_a_token_is_taken_back_with_its_group(engine: Make) -> None:
    one = engine(seats=2, slo_config={"quotas": QUOTA})
    add(one, "other", None, output=40)
    one.step()
    add(one, "a", "g", prompt=3_500)
    one.step()
    assert parts_of(one).tracker.live["a"].promised
    assert not one.outcomes["a"].token_ids
    add(one, "b", "g")
    one.run()
    assert verdict(one, "a") == verdict(one, "b") is not None
    assert len(one.outcomes["other"].token_ids) == 40
    quotas = parts_of(one).quotas
    assert quotas is not None and not quotas._paid
    # What the scheduler takes back is given back, but for what was computed: a step of ``a``, and
    # all of ``other``.
    level = quotas._buckets[OTHERS].level(one.clock.now_s)
    assert level > BURST - 2_048 - 100 - 40 - 100
    check_nothing_left(one)


def test_promise_now_rules_on_groups_as_well(engine: Make) -> None:
    one = engine(seats=1)
    for name in ("a", "b"):
        add(one, name, "g")
    assert not one.scheduler.promise_now("a")
    one.run()
    assert verdict(one, "a") == verdict(one, "b") is not None
    check_nothing_left(one)


@pytest.mark.parametrize("tokens", [1, 40])
def test_once_a_token_is_out_the_others_are_served_without_a_promise(
    engine: Make, tokens: int
) -> None:
    """Of one that has ended by then, too."""
    one = engine(seats=2)
    add(one, "a", "g", output=tokens)
    while not one.outcomes["a"].token_ids:
        one.step()
    assert (one.outcomes["a"].finish_reason is None) == (tokens > 1)
    add(one, "b", "g", HOPELESS)
    one.run()
    assert verdict(one, "a") is verdict(one, "b") is None
    assert [len(one.outcomes[name].token_ids) for name in "ab"] == [tokens, 10]
    assert cast(Any, one.outcomes["a"].report)["promised"]
    assert cast(Any, one.outcomes["b"].report)["late"]
    assert counted(one, "declined") == 0
    check_nothing_left(one)


# --- what is remembered --------------------------------------------------------------------------


def member(group: str | None, name: str = "r") -> SLORequest:
    request = SimpleNamespace(request_id=name)
    tracked = SimpleNamespace(group=group, request=request, slo=EASY, first_token_s=None)
    return cast(SLORequest, tracked)


def test_only_so_many_declined_groups_are_remembered() -> None:
    groups, answer = ChoiceGroups(), Declined(5, "seats")
    for number in range(REMEMBERED + 1):
        groups.declined(member(f"g{number}"), answer)
    groups.declined(member(None), answer)
    assert groups.begin(member("g0")) is None
    assert groups.begin(member("g1")) == answer
    assert groups.begin(member(None)) is None


# --- any groups ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Choices of one request; ``gaps``: steps before each of them comes."""

    gaps: tuple[int, ...]
    slo: SLO
    prompt: int
    outputs: tuple[int, ...]


DECLINING = (
    EASY,
    HOPELESS,
    SLO(ttft_ms=300, tpot_ms=60, on_unattainable="decline"),
    SLO(tpot_ms=25, on_unattainable="decline"),
    SLO(ttft_ms=900, tpot_ms=100, on_unattainable="decline", value=9.0),
)
GROUPS = st.integers(1, 4).flatmap(
    lambda size: st.builds(
        Group,
        gaps=st.tuples(*[st.sampled_from([0, 0, 0, 1, 2, 9])] * size),
        slo=st.sampled_from(DECLINING),
        prompt=st.integers(1, 900),
        outputs=st.tuples(*[st.sampled_from([1, 2, 30])] * size),
    )
)
SHAPES = st.builds(
    EngineShape,
    num_blocks=st.sampled_from([80, 1000]),
    max_num_seqs=st.sampled_from([1, 2, 4, 32]),
    max_num_batched_tokens=st.sampled_from([64, 512, 2048]),
    max_model_len=st.just(1024),
)


@pytest.mark.slow
@given(st.lists(GROUPS, min_size=1, max_size=6), SHAPES, st.booleans(), st.booleans())
@settings(max_examples=examples(150))
@example(  # one choice ends before the other comes
    [Group((0, 9), SLO(tpot_ms=25, on_unattainable="decline"), 10, (1, 30))],
    EngineShape(1000, 16, 1, 512, 1024),
    False,
    False,
)
def test_all_of_a_group_are_declined_or_none(
    config_folder: Path, groups: list[Group], shape: EngineShape, overlap: bool, quotas: bool
) -> None:
    config = {"quotas": {"default": {"promised_tokens_per_s": 90, "burst_tokens": 1500}}}
    one = VirtualEngine(
        Scheduler,
        config_folder,
        ROOFLINE.predict_shape_s,
        believed=ROOFLINE,
        shape=shape,
        overlap=overlap,
        slo_config=config if quotas else {},
    )
    one.add("best effort", 300, 60)
    names: list[list[str]] = []
    coming: list[tuple[int, str, Group, int]] = []
    for number, group in enumerate(groups):
        turn = number
        names.append([])
        for place, gap in enumerate(group.gaps):
            turn += gap
            names[-1].append(f"g{number}-{place}")
            coming.append((turn, names[-1][-1], group, group.outputs[place]))
    coming.sort(key=lambda arrival: arrival[0])
    turn = 0
    while coming or one.busy:
        while coming and coming[0][0] <= turn:
            _, name, group, output = coming.pop(0)
            add(one, name, name.partition("-")[0], group.slo, group.prompt, output)
        if not one.scheduler.has_requests():
            one.drain()
        elif not one.step().num_scheduled_tokens:
            one.clock.advance(0.001)
        turn += 1
        assert turn < 20_000
    one.drain()
    for members in names:
        answers = {verdict(one, name) is not None for name in members}
        assert len(answers) == 1, {name: one.outcomes[name].stop_reason for name in members}
    served: list[Outcome] = [o for o in one.outcomes.values() if o.finish_reason != "abort"]
    assert all(outcome.token_ids for outcome in served)
    check_nothing_left(one)
    if parts_of(one).quotas is not None:
        assert not cast(Any, parts_of(one).quotas)._paid
