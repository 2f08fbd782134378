# SPDX-License-Identifier: Apache-2.0
"""core/speculation/calibration.py: what a draft's probabilities are worth."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.core.speculation import token_tree
from vllm_slo.core.speculation.calibration import ACCEPTED_NODE, REACHED, DraftCalibration, outcomes

GRID = np.linspace(0.01, 0.99, 99)
ODD = [0.0, 1.0, 1e-300, 1e-12, 1.0 - 1e-16, math.nan]


def see(calibration, truth, count, *, depths=(1, 4), seed=0, batch=200) -> None:
    """Let the target accept a node of draft probability q with probability ``truth(q)``."""
    rng = np.random.default_rng(seed)
    for _ in range(count // batch):
        q = rng.beta(0.7, 0.9, batch)
        depth = rng.integers(*depths, batch)
        calibration.observe(depth, q, rng.random(batch) < truth(q))


def at(calibration, depth, q=GRID):
    return calibration.conditional(np.full(len(q), depth), q)


def overconfident(q):
    return q**2


def honest(q):
    return q


DISTORTIONS = pytest.mark.parametrize("truth", [overconfident, np.sqrt, honest])


@DISTORTIONS
def test_a_known_distortion_is_recovered(truth) -> None:
    calibration = DraftCalibration(4, half_life=math.inf)
    see(calibration, truth, 40_000)
    for depth in (1, 2, 3):
        assert np.abs(at(calibration, depth) - truth(GRID)).max() < 0.05
        assert np.abs(at(calibration, depth) - truth(GRID)).mean() < 0.015


def test_depths_are_told_apart() -> None:
    calibration = DraftCalibration(3, half_life=math.inf)
    see(calibration, np.sqrt, 20_000, depths=(1, 2))
    see(calibration, overconfident, 20_000, depths=(2, 3))
    assert np.abs(at(calibration, 1) - np.sqrt(GRID)).max() < 0.05
    assert np.abs(at(calibration, 2) - overconfident(GRID)).max() < 0.05


def test_nothing_is_changed_before_there_is_data() -> None:
    q = np.concatenate([GRID, [1e-6, 1e-4, 1 - 1e-4, 1 - 1e-6]])
    for depth in (1, 5, 100):
        assert at(DraftCalibration(5), depth, q) == pytest.approx(q, rel=1e-9)


def test_a_few_observations_move_little() -> None:
    calibration = DraftCalibration(prior=8.0)
    calibration.observe([1, 1], [0.5, 0.5], [False, False])
    assert at(calibration, 1, np.array([0.5]))[0] == pytest.approx(0.5, abs=0.15)


def test_a_depth_never_seen_borrows_from_the_one_above() -> None:
    calibration = DraftCalibration(6)
    see(calibration, overconfident, 20_000, depths=(1, 3))
    for depth in (3, 6, 50):
        assert at(calibration, depth) == pytest.approx(at(calibration, 2), rel=1e-9)


def test_the_best_guess_is_told_apart_from_the_others() -> None:
    calibration = DraftCalibration(2, half_life=math.inf)
    rng = np.random.default_rng(0)
    for best, truth in ((True, np.sqrt), (False, overconfident)):
        q = rng.beta(0.7, 0.9, 20_000)
        hits = rng.random(len(q)) < truth(q)
        calibration.observe(np.ones(len(q), int), q, hits, best)
    for best, truth in ((True, np.sqrt), (False, overconfident)):
        learnt = calibration.conditional(np.ones(len(GRID), int), GRID, best)
        assert np.abs(learnt - truth(GRID)).max() < 0.06
    # Siblings of one probability: 0.5 is the best guess, 0.4 and all but the best below are not.
    q = np.array([0.4, 0.5, 0.4, 0.3])
    paths, _ = calibration.path_probabilities([0, 4], [-1, -1, 1, 1], q)
    each = calibration.conditional([1, 1, 2, 2], q, [False, True, True, False])
    assert paths == pytest.approx(each * [1, 1, each[1], each[1]])


@settings(max_examples=examples(100))
@given(st.data())
def test_each_parent_has_one_best_guess(data) -> None:
    sizes = data.draw(st.lists(st.integers(0, 12), max_size=4))
    parents = [data.draw(st.integers(-1, node - 1)) for size in sizes for node in range(size)]
    levels = st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0])
    q = data.draw(st.lists(levels, min_size=len(parents), max_size=len(parents)))
    offsets = np.cumsum([0, *sizes])
    _, found = DraftCalibration().path_probabilities(offsets, parents, q)
    for start, end in itertools.pairwise(offsets.tolist()):
        families = defaultdict(list)
        for node in range(start, end):
            families[parents[node]].append(node)
        for family in families.values():
            first = max(family, key=lambda node: (q[node], -node))
            assert [node for node in family if found[node]] == [first]


def test_what_is_long_past_is_forgotten() -> None:
    calibration = DraftCalibration(1, half_life=3_000)
    see(calibration, overconfident, 20_000, depths=(1, 2))
    see(calibration, np.sqrt, 20_000, depths=(1, 2), seed=1)
    assert np.abs(at(calibration, 1) - np.sqrt(GRID)).max() < 0.1
    stubborn = DraftCalibration(1, half_life=math.inf)
    see(stubborn, overconfident, 20_000, depths=(1, 2))
    see(stubborn, np.sqrt, 20_000, depths=(1, 2), seed=1)
    assert np.abs(at(stubborn, 1) - np.sqrt(GRID)).max() > 0.15


unit = st.one_of(st.floats(0.0, 1.0), st.sampled_from(ODD))


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(1, 5), unit, st.booleans()), max_size=120),
    st.lists(unit, min_size=1, max_size=40),
    st.integers(1, 6),
)
def test_the_map_is_a_monotone_probability(seen, asked, depth) -> None:
    calibration = DraftCalibration(4, prior=0.5)
    for _ in range(3):
        calibration.observe(
            [d for d, _, _ in seen], [q for _, q, _ in seen], [a for _, _, a in seen]
        )
    result = at(calibration, depth, np.sort(np.nan_to_num(asked, nan=0.0)))
    assert np.all((result > 0.0) & (result <= 1.0))
    assert np.all(np.diff(result) >= -1e-12)
    assert not np.isnan(at(calibration, depth, np.array(asked))).any()


def test_bins_that_fall_are_pooled_by_what_they_saw() -> None:
    calibration = DraftCalibration(1, prior=1e-9, half_life=math.inf)
    calibration.observe([1] * 30, [0.6] * 30, [True] * 27 + [False] * 3)
    calibration.observe([1] * 10, [0.9] * 10, [True] + [False] * 9)
    asked = np.array([0.6, 0.75, 0.9])
    assert at(calibration, 1, asked) == pytest.approx((27 + 1) / 40)


def test_certainty_for_ever_stays_finite() -> None:
    for outcome in (True, False):
        calibration = DraftCalibration(12, half_life=math.inf, prior=0.1)
        for _ in range(20):
            q = np.tile(np.array(ODD), 2_000)
            depth = np.repeat(np.arange(1, 13), 1_000)
            calibration.observe(depth, q, np.full(len(q), outcome))
        result = calibration.conditional(depth, q)
        assert np.all((result > 0.0) & (result <= 1.0))


def test_paths_by_hand() -> None:
    q = [0.5, 0.25, 0.5, 0.8, 0.5]
    paths, _ = DraftCalibration().path_probabilities([0, 3, 3, 5], [-1, -1, 1, -1, 0], q)
    assert paths == pytest.approx([0.5, 0.25, 0.125, 0.8, 0.4])


def test_paths_use_the_depth_of_each_node() -> None:
    calibration = DraftCalibration(3)
    see(calibration, np.sqrt, 10_000, depths=(1, 2))
    see(calibration, overconfident, 10_000, depths=(2, 3))
    q = np.array([0.5, 0.6, 0.7])
    each = calibration.conditional([1, 2, 3], q)
    paths, _ = calibration.path_probabilities([0, 3], [-1, 0, 1], q)
    assert paths == pytest.approx(np.cumprod(each))


@settings(max_examples=examples(100))
@given(st.data())
def test_no_path_is_likelier_than_its_parents(data) -> None:
    calibration = DraftCalibration(4)
    see(calibration, np.sqrt, 2_000)
    sizes = data.draw(st.lists(st.integers(0, 20), max_size=4))
    parents = [data.draw(st.integers(-1, node - 1)) for size in sizes for node in range(size)]
    q = data.draw(st.lists(unit, min_size=len(parents), max_size=len(parents)))
    offsets = np.cumsum([0, *sizes])
    paths, _ = calibration.path_probabilities(offsets, parents, q)
    for start, end in itertools.pairwise(offsets):
        own = paths[start:end]
        above = [own[p] if p >= 0 else 1.0 for p in parents[start:end]]
        assert np.all(own <= above)
        assert np.all(own >= 0.0)


def test_arrays_that_do_not_fit_are_refused() -> None:
    calibration = DraftCalibration()
    with pytest.raises(ValueError, match="q: "):
        calibration.conditional([1, 2], [0.5])
    with pytest.raises(ValueError, match="accepted"):
        calibration.observe([1], [0.5], [True, False])
    with pytest.raises(ValueError, match="best"):
        calibration.conditional([1], [0.5], [True, False])
    for offsets in ([0, 3], [1, 2], [0, 3, 2], []):
        with pytest.raises(ValueError, match="offsets"):
            calibration.path_probabilities(offsets, [-1, 0], [0.5, 0.5])
    for parents in ([-1, 1], [-2, 0]):
        with pytest.raises(ValueError, match="parent"):
            calibration.path_probabilities([0, 2], parents, [0.5, 0.5])


@settings(max_examples=examples(200))
@given(st.data())
def test_outcomes_are_those_of_the_walk(data) -> None:
    few = st.integers(0, 3)
    starts, counts, tokens, parents, answers, expected = [], [], [], [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        size, cut = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 3))
        above = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
        named, taken = [], set()
        for parent in above:  # siblings differ
            token = data.draw(few)
            token = token if (parent, token) not in taken else 10 + len(taken)
            taken.add((parent, token))
            named.append(token)
        verified = max(size - cut, 0)
        sampled = data.draw(st.lists(few, min_size=verified + 1, max_size=verified + 1))
        accepted = token_tree.walk(named[:verified], above[:verified], sampled)
        answer = [sampled[0], *(sampled[node + 1] for node in accepted)]
        answer = answer[: data.draw(st.integers(1, len(answer)))]  # the answer may end
        accepted = accepted[: len(answer)]
        depths = token_tree.depths(above[:verified])
        starts.append(len(tokens))
        counts.append(verified)
        answers.append(answer)
        for node in range(size):
            if node >= verified:
                expected.append((0, 0))
                continue
            reached = above[node] < 0 or above[node] in accepted
            reached = reached and depths[node] <= len(answer)
            fate = ACCEPTED_NODE if node in accepted else REACHED if reached else 0
            expected.append((depths[node], fate))
        tokens += named
        parents += above
    found = outcomes(
        np.array(starts),
        np.array(counts),
        np.array(tokens, dtype=np.int64),
        np.array(parents, dtype=np.int32),
        np.cumsum([0, *map(len, answers)]),
        np.array(list(itertools.chain.from_iterable(answers))),
    )
    assert list(zip(*(column.tolist() for column in found), strict=True)) == expected
