# SPDX-License-Identifier: Apache-2.0
"""A chain of models proposes what its last model would say by itself, however it is guessed.

The models here are functions of the tokens before; their KV cache is a table that remembers, slot
by slot, of which tokens it was computed, and fails where a pass would read a slot that is not so.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

import torch

from vllm_slo.core.speculation.model_chain import Plan
from vllm_slo.engine.speculation.messages import DraftingReport
from vllm_slo.engine.worker.proposers.chain import (
    UNLIKELY,
    Ahead,
    ChainSearch,
    DraftKVState,
    Member,
)

VOCABULARY = 11
BLOCK = 4
PEAK = 12.0


@dataclass
class Model:
    """A language model by hash: the next token follows from those before it.

    Attributes:
        name: of its own opinions.
        teacher: another model, whose word it takes in ``agreement`` of all places.
        peak: how sure it is.
        cache: slot -> the tokens up to and with the one in it.
        passes: tokens of each pass.
    """

    name: str
    teacher: Model | None = None
    agreement: float = 1.0
    peak: float = PEAK
    cache: dict[int, tuple[int, ...]] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)

    def next_token(self, before: tuple[int, ...]) -> int:
        dice = random.Random(f"{self.name}{before}")
        if self.teacher is not None and dice.random() < self.agreement:
            return self.teacher.next_token(before)
        return dice.randrange(VOCABULARY)

    def logits(self, before: tuple[int, ...]) -> list[float]:
        dice = random.Random(f"logits{self.name}{before}")
        found = [dice.random() for _ in range(VOCABULARY)]
        found[self.next_token(before)] += self.peak
        return found

    def greedy(self, before: tuple[int, ...], count: int) -> list[int]:
        said = list(before)
        for _ in range(count):
            said.append(self.next_token(tuple(said)))
        return said[len(before) :]


class CheckedAhead(Ahead):
    """`Ahead` with the models above in place of a forward pass."""

    def run(self, draft, rows, starts, stops, asked):  # type: ignore[no-untyped-def]
        found = []
        draft.passes.append(int((stops - starts).sum()))
        for row, start, stop, count in zip(rows, starts, stops, asked, strict=True):
            assert start < stop, "a pass over nothing"
            places = np.arange(stop)
            tokens = tuple(self._tokens(np.full(stop, row), places).tolist())
            slots = self._table[row, places // BLOCK] * BLOCK + places % BLOCK
            for place in range(start):
                assert draft.cache[slots[place]] == tokens[: place + 1], (row, place)
            for place in range(start, stop):
                draft.cache[slots[place]] = tokens[: place + 1]
            found += [draft.logits(tokens[: stop - count + 1 + i]) for i in range(count)]
        return torch.tensor(found).reshape(-1, VOCABULARY)


@dataclass(frozen=True)
class Case:
    """Some requests, a chain, a plan."""

    ends: list[int]
    lacking: list[list[int]]
    agreements: list[float]
    depth: int
    width: int
    window: int
    others: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n, models = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    ends = draw(st.lists(st.integers(1, 13), min_size=n, max_size=n))
    return Case(
        ends,
        [[draw(st.integers(1, end)) for end in ends] for _ in range(models)],
        draw(st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=models, max_size=models)),
        draw(st.integers(1, 7)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, n - 1)),
        draw(st.integers(0, 10_000)),
    )


class Bench:
    """A search over the requests of a case, ready to run."""

    def __init__(self, case: Case, peak: float = PEAK) -> None:
        self.case = case
        above: Model | None = None
        self.models: list[Model] = []
        for level in reversed(range(len(case.agreements))):
            above = Model(f"m{level}-{case.seed}", above, case.agreements[level], peak)
            self.models.insert(0, above)
        total = len(case.ends)
        self.n = total - case.others
        dice = np.random.default_rng(case.seed)
        self.committed = dice.integers(0, VOCABULARY, (total, 16)).astype(np.int32)
        owned = np.asarray([-(-end // BLOCK) for end in case.ends])
        columns = 8
        tables = np.arange(total * columns).reshape(total, columns).astype(np.int32)
        extra = 2 + -(-case.depth // BLOCK)
        scratch = total * columns + np.arange(self.n * extra).reshape(self.n, extra)
        self.ahead = CheckedAhead(
            self.committed,
            np.arange(total),
            np.asarray(case.ends),
            tables,
            owned,
            scratch,
            case.depth,
            BLOCK,
        )
        self.report = DraftingReport()
        self.worked: list[int] = []
        self.search = ChainSearch(
            [Member(place, model) for place, model in enumerate(self.models)],  # type: ignore[arg-type]
            [self._standing(level, tables) for level in range(len(self.models))],
            self.ahead,
            torch.ones(self.n, 1),
            Plan(tuple(range(len(self.models))), case.depth, case.width, case.window),
            self.report,
            self.worked.append,
        )

    def _standing(self, level: int, tables: np.ndarray) -> DraftKVState:
        """The model has computed all but the last few committed tokens of each request."""
        case, cache = self.case, self.models[level].cache
        starts = [end - lack for end, lack in zip(case.ends, case.lacking[level], strict=True)]
        for row, start in enumerate(starts):
            for place in range(start):
                slot = int(tables[row, place // BLOCK]) * BLOCK + place % BLOCK
                cache[slot] = tuple(self.committed[row, : place + 1].tolist())
        others = [(row, starts[row], case.ends[row]) for row in range(self.n, len(case.ends))]
        return DraftKVState(np.asarray(starts[: self.n], dtype=np.int64), others)

    def prefix(self, row: int) -> tuple[int, ...]:
        return tuple(self.committed[row, : self.case.ends[row]].tolist())


@given(cases())
def test_a_chain_says_what_its_last_model_says(case: Case) -> None:
    bench = Bench(case)
    bench.search.run()
    assert bench.search.counts.tolist() == [case.depth] * bench.n
    for row in range(bench.n):
        alone = bench.models[-1].greedy(bench.prefix(row), case.depth)
        assert bench.search.tokens[row, :, 0].tolist() == alone
        assert bench.ahead.guesses[row].tolist() == alone


@given(cases())
def test_what_is_noted_as_computed_was(case: Case) -> None:
    """Nobody reads a slot that holds something else: what stands is what a later step may trust."""
    bench = Bench(case)
    bench.search.run()
    for model, kv_states in zip(bench.models, bench.search.kv_states, strict=True):
        for row, computed in enumerate(kv_states.computed.tolist()):
            tokens = (*bench.prefix(row), *bench.ahead.guesses[row].tolist())
            for place in range(computed):
                block = bench.ahead._table[row, place // BLOCK]
                assert model.cache[block * BLOCK + place % BLOCK] == tokens[: place + 1]
        assert len(kv_states.caught_up) == case.others, "the others were caught up"


@given(cases())
def test_alternatives_are_the_last_models_next_best(case: Case) -> None:
    bench = Bench(case)
    bench.search.run()
    counts, tokens, parents, probabilities = bench.search.trees()
    assert counts == [case.depth * case.width] * bench.n
    nodes = iter(zip(tokens.tolist(), parents.tolist(), probabilities.tolist(), strict=True))
    for row in range(bench.n):
        path = bench.prefix(row)
        for depth in range(case.depth):
            logits = torch.tensor(bench.models[-1].logits(path)).double().softmax(-1)
            best = logits.topk(case.width)
            layer = [next(nodes) for _ in range(case.width)]
            assert [token for token, _, _ in layer] == best.indices.tolist()
            assert {parent for _, parent, _ in layer} == {(depth - 1) * case.width if depth else -1}
            assert [p for _, _, p in layer] == pytest.approx(best.values.tolist(), abs=1e-5)
            path = (*path, layer[0][0])


@given(cases())
def test_edges_count_guesses_up_to_the_first_that_was_turned_down(case: Case) -> None:
    bench = Bench(case)
    bench.search.run()
    for edge in bench.report.edges:
        assert edge.verifier == edge.drafter + 1
        assert 0 <= edge.accepted <= edge.tried
        if case.agreements[edge.drafter] == 1.0:
            assert edge.accepted == edge.tried
    assert len(bench.report.passes) == sum(len(model.passes) for model in bench.models)
    assert bench.worked == [place for place, _, _ in bench.report.passes]


def rounds(agreement: float, depth: int, window: int) -> list[list[int]]:
    """Tokens of the passes of two models over one request of which both lack a token."""
    bench = Bench(Case([6], [[1], [1]], [agreement, 1.0], depth, 1, window, 0, 3))
    bench.search.run()
    return [model.passes for model in bench.models]


def test_a_drafter_that_is_always_right_is_asked_in_full_windows() -> None:
    first, second = rounds(1.0, 6, 2)
    # Two guesses and the verifier's own token a round; it reads what is new and the guesses.
    assert second == [3, 3]
    assert first == [1, 1, 2, 1]


def test_a_drafter_that_is_always_wrong_costs_a_round_for_each_token() -> None:
    model = Model("wrong")
    assert model.next_token((1,)) == model.next_token((1,))
    first, second = rounds(0.0, 3, 2)
    assert len(second) >= 2
    assert sum(first) >= len(second) - 1


def test_nobody_goes_on_from_an_unlikely_path() -> None:
    """A flat model is sure of nothing, so its paths end early."""
    bench = Bench(Case([5, 6], [[1, 1]], [1.0], 6, 2, 1, 0, 1), peak=1.0)
    bench.search.run()
    assert 0 < bench.search.counts.max() < 6
    counts, tokens, parents, probabilities = bench.search.trees()
    assert counts == (bench.search.counts * 2).tolist()
    assert len(tokens) == len(parents) == len(probabilities) == sum(counts)
    for row, count in enumerate(bench.search.counts.tolist()):
        path = np.cumprod(bench.search.probabilities[row, :count, 0])
        assert path[-1] < UNLIKELY <= ([1.0, *path])[-2]


def test_equals_are_told_apart_as_the_chain_did() -> None:
    """Where two tokens are equally likely, the one that the chain went on with comes first."""
    bench = Bench(Case([4], [[1]], [1.0], 2, 3, 1, 0, 2), peak=0.0)
    for model in bench.models:
        model.logits = lambda _: [1.0] * VOCABULARY  # type: ignore[method-assign]
    bench.search.run()
    assert bench.search.tokens[0, :, 0].tolist() == bench.ahead.guesses[0].tolist()
    assert len({*bench.search.tokens[0, 0].tolist()}) == 3


def test_a_step_with_prompts_only_catches_up() -> None:
    case = Case([9, 4], [[5, 4], [9, 1]], [1.0, 1.0], 3, 1, 2, 2, 0)
    bench = Bench(case)
    bench.search.run()
    assert [model.passes for model in bench.models] == [[9], [10]]
    assert bench.search.trees()[0] == []
