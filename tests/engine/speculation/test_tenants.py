# SPDX-License-Identifier: Apache-2.0
"""Drafts divided among tenants (GoodSpeed), with vLLM's own drafts and with trees, virtual time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from virtual_trees import TreeEngine

from vllm_slo import SLO, tiny
from vllm_slo.core.speculation.proportional_fairness import ClientView, jain_index
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.speculation import candidates, tenants, trees
from vllm_slo.engine.speculation.tenants import NOBODY, TenantShares, Verified
from vllm_slo.sim.harness import EngineShape, VirtualEngine

STEEP = StepTimeModel(((0.0, 0.0, 0.016), (0.0012, 0.0, 0.004)), max_tokens=2048)
"""Ten tokens for the price of one, then each costs."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
CLASSES = {"good": {"tier": "best_effort"}, "bad": {"tier": "best_effort"}}


def shares_of(by_request: dict[str, str | None]) -> tuple[TenantShares, dict[str, ClientView]]:
    """Shares of an engine that is nothing but its requests, and what is shown of tenants."""
    shown: dict[str, ClientView] = {}
    tracked = {n: SimpleNamespace(slo=SimpleNamespace(tenant=t)) for n, t in by_request.items()}
    metrics = SimpleNamespace(tenant=shown.__setitem__)
    return TenantShares(cast(Any, tracked), cast(Any, metrics)), shown


def test_who_got_less_goes_first() -> None:
    shares, _ = shares_of({"a1": "a", "a2": "a", "b": "b"})
    for _ in range(200):
        shares.observe([Verified("a1", 4, 3), Verified("a2", 4, 3), Verified("b", 4, 3)])
    weights = shares.weights(["a1", "a2", "b"])
    assert weights[0] == weights[1] == pytest.approx(weights[2] / 2, rel=0.05)
    assert weights.mean() == pytest.approx(1.0)
    assert shares.divide(["a1", "a2", "b"], 5, [0, 0, 0], [4, 4, 4]) == [1, 1, 3]


def test_whose_drafts_are_never_accepted_does_not() -> None:
    shares, _ = shares_of({"a": "a", "b": "b"})
    for _ in range(200):
        shares.observe([Verified("a", 4, 4), Verified("b", 4, 0)])
    assert shares.divide(["a", "b"], 6, [0, 0], [6, 6]) == [6, 0]


def test_requests_that_name_no_tenant_are_one() -> None:
    shares, shown = shares_of({"a": None, "b": "b"})
    for _ in range(tenants.SHOWN_EVERY):
        shares.observe([Verified("a", 2, 1), Verified("untracked", 2, 1), Verified("b", 2, 1)])
    assert set(shown) == {NOBODY, "b"}
    assert shown[NOBODY].goodput > shown["b"].goodput


def test_tenants_without_end_are_neither_kept_nor_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MOST_TENANTS", 8)
    monkeypatch.setattr(tenants, "MOST_SHOWN", 3)
    monkeypatch.setattr(tenants, "SHOWN_EVERY", 1)
    shares, shown = shares_of({f"r{n}": f"t{n}" for n in range(50)})
    for n in range(50):
        shares.observe([Verified(f"r{n}", 1, 1)])
    assert list(shown) == ["t0", "t1", "t2"]
    assert set(shares._gradient.views()) == {f"t{n}" for n in range(42, 50)}


def test_a_step_may_have_more_tenants_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "MOST_TENANTS", 2)
    names = [f"r{n}" for n in range(5)]
    shares, _ = shares_of({name: f"tenant of {name}" for name in names})
    assert len(shares.weights(names)) == 5
    assert shares.divide(names, 5, [0] * 5, [1] * 5) == [1] * 5
    shares.observe([Verified(name, 1, 1) for name in names])
    shares.weights(names[:1])
    assert len(shares._gradient.views()) == 2


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 5)), max_size=12),
    st.integers(0, 30),
)
def test_objectives_come_first_and_no_token_more(
    crowd: list[tuple[str, int, int]], spare: int
) -> None:
    names = [f"r{n}" for n in range(len(crowd))]
    shares, _ = shares_of({name: who for name, (who, _, _) in zip(names, crowd, strict=True)})
    most = [least + more for _, least, more in crowd]
    budget = sum(least for _, least, _ in crowd) + spare
    grants = shares.divide(names, budget, [least for _, least, _ in crowd], most)
    assert sum(grants) == min(budget, sum(most))
    for grant, (_, least, _), cap in zip(grants, crowd, most, strict=True):
        assert least <= grant <= cap


# In an engine.


class Engine(VirtualEngine):
    """The virtual engine with drafts; counts those that each step verified of a request."""

    def __init__(self, share: str) -> None:
        super().__init__(
            Scheduler,
            tiny.path("target"),
            STEEP.predict_shape_s,
            EngineShape(max_model_len=2048, max_num_seqs=32),
            believed=STEEP,
            slo_config={"classes": CLASSES, "speculation": {"share": share}},
            speculative_config=NGRAM,
        )
        self.drafts: dict[str, list[int]] = defaultdict(list)

    def ask(self, names: Sequence[str], acceptance: float) -> None:
        for name in names:
            kind = "good" if acceptance > 0.5 else "bad"
            slo = SLO(slo_class=kind, tier="best_effort", tenant=name[0])
            self.add(name, 20, 400, slo, acceptance=acceptance)

    def serve(self, steps: int) -> None:
        for _ in range(steps):
            output = self.step()
            for name in output.num_scheduled_tokens:
                self.drafts[name].append(len(output.scheduled_spec_decode_tokens.get(name, ())))

    def goodput(self, tenant: str) -> float:
        """Tokens of a tenant per second."""
        made = [o for name, o in self.outcomes.items() if name.startswith(tenant)]
        return sum(len(outcome.token_ids) for outcome in made) / self.clock.now_s


def both(share: str) -> Engine:
    engine = Engine(share)
    engine.ask(["a1", "a2", "a3", "a4", "a5", "a6"], 0.8)
    engine.ask(["b1"], 0.4)
    engine.serve(120)
    return engine


def test_a_small_tenant_of_worse_drafts_gets_its_share() -> None:
    plain, fair = both("throughput"), both("tenants")
    assert fair.goodput("b") > 1.15 * plain.goodput("b")
    assert fair.goodput("a") > 0.8 * plain.goodput("a")
    index = {
        engine: jain_index([engine.goodput("a"), engine.goodput("b")]) for engine in (plain, fair)
    }
    assert index[fair] > index[plain]
    verified = [sum(map(sum, engine.drafts.values())) for engine in (plain, fair)]
    assert verified[1] <= 1.1 * verified[0]


def test_metrics_say_how_tenants_fare() -> None:
    registry = both("tenants").scheduler.parts.metrics.registry
    said = {
        (name, tenant): registry.get_sample_value(
            f"vllm_slo:tenant_{name}", {"engine": "0", "tenant": tenant}
        )
        for name in ("acceptance_ratio", "granted_tokens", "goodput_tokens", "utility")
        for tenant in "ab"
    }
    assert said["acceptance_ratio", "a"] == pytest.approx(0.8, abs=0.1)
    assert said["acceptance_ratio", "b"] == pytest.approx(0.4, abs=0.2)
    goodput = said["goodput_tokens", "a"]
    assert goodput and goodput > 6.0
    assert all(value is not None for value in said.values())


@pytest.mark.parametrize("share", ["throughput", "tenants"])
def test_promises_are_kept_whoever_shares_the_rest(share: str) -> None:
    """A plain step of all takes longer than the TPOT: only drafts keep it."""
    engine = Engine(share)
    engine.ask(["a1", "a2", "a3", "a4"], 0.3)
    engine.serve(10)
    engine.add("p", 20, 150, SLO(tpot_ms=14.0, tenant="p"), acceptance=0.9)
    engine.run()
    report = engine.outcomes["p"].report
    assert report and report["attained"]
    for name, outcome in engine.outcomes.items():
        assert len(outcome.token_ids) == engine.lengths[name]


def nodes(share: str) -> dict[str, float]:
    """Mean nodes of a tree, by tenant; one has eight requests, the other one."""
    config: dict[str, Any] = {"share": share, "min_depth": 3}
    engine = TreeEngine(STEEP, speculation=config, honest=0.8)
    for name, tenant in [*((f"a{n}", "a") for n in range(8)), ("b0", "b")]:
        engine.add(name, 16, 150, SLO(tier="best_effort", tenant=tenant))
    engine.run()
    sizes = defaultdict(list)
    for _, step in engine.seen_trees:
        if len(step.parents) == 9:
            for name, parents in step.parents.items():
                sizes[name[0]].append(len(parents))
    return {tenant: sum(found) / len(found) for tenant, found in sizes.items()}


def test_trees_of_a_tenant_that_got_little_are_larger() -> None:
    plain, fair = nodes("throughput"), nodes("tenants")
    assert plain["b"] == pytest.approx(plain["a"], rel=0.25)
    assert fair["b"] > 1.5 * fair["a"]


def test_a_tenants_weight_changes_what_nodes_are_worth_and_not_their_chances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trees, "PATH_TOKENS", 0.0)  # as on a GPU
    made: list[candidates.CandidateTrees] = []

    class Seen(candidates.CandidateTrees):
        def __init__(self, *columns: Any) -> None:
            super().__init__(*columns)
            made.append(self)

    monkeypatch.setattr(candidates, "CandidateTrees", Seen)
    nodes("tenants")
    assert max(one.worths.max() for one in made) > 1.0
    assert max(one.chances.max() for one in made) <= 1.0
