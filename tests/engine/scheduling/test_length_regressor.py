# SPDX-License-Identifier: Apache-2.0
"""The regressor of output lengths on streams whose law is known, beside the class's median."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pytest
from depth import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import patience
from scipy.stats import spearmanr

from vllm_slo.core.lengths.forecast import LengthForecaster, LengthQuery, QuantileForecaster
from vllm_slo.core.lengths.output_length import OutputLengthPredictor
from vllm_slo.engine.scheduling.length_regressor import (
    FIRST_TOKENS,
    LAST_TOKENS,
    RATE,
    WIDTH,
    LengthRegressor,
    features_of,
)
from vllm_slo.errors import ConfigError

MIN_SAMPLES = 64
TEMPLATES = ((20, 5_000), (150, 6_000), (900, 7_000))
"""(median length, first token) of what templates of prompts lead to."""

Stream = list[tuple[LengthQuery, int]]


class Played(NamedTuple):
    """What was predicted of a stream, each request before it was observed, and what came."""

    predicted: np.ndarray
    actual: np.ndarray
    sources: list[str]

    def since(self, start: int) -> Played:
        return Played(self.predicted[start:], self.actual[start:], self.sources[start:])

    @property
    def relative(self) -> float:
        return float(np.mean(np.abs(self.predicted - self.actual) / self.actual))

    @property
    def logarithmic(self) -> float:
        return float(np.mean(np.abs(np.log(self.predicted / self.actual))))

    def share(self, source: str) -> float:
        return self.sources.count(source) / len(self.sources)


def median() -> QuantileForecaster:
    return QuantileForecaster(OutputLengthPredictor())


def play(forecaster: LengthForecaster, stream: Iterable[tuple[LengthQuery, int]]) -> Played:
    predicted, actual = [], []
    sources: list[str] = []
    for query, tokens in stream:
        prediction = forecaster.predict(query)
        predicted.append(prediction.tokens)
        sources.append(prediction.source)
        actual.append(tokens)
        forecaster.observe(query, tokens)
    return Played(np.array(predicted), np.array(actual), sources)


def around(rng: np.random.Generator, tokens: float, spread: float = 0.3) -> int:
    return max(round(tokens * np.exp(rng.normal(0.0, spread))), 1)


def templated(seed: int, count: int, turned: int = 0, slo_class: str = "chat") -> Stream:
    """Prompts that begin with one of three templates, which their lengths depend on."""
    rng = np.random.default_rng(seed)
    stream = []
    for _ in range(count):
        kind = int(rng.integers(3))
        first = TEMPLATES[kind][1]
        prompt = [*range(first, first + 8), *rng.integers(0, 4_000, 100).tolist()]
        tokens = around(rng, TEMPLATES[(kind + turned) % 3][0])
        stream.append((LengthQuery(slo_class, len(prompt), 4_096, None, prompt), tokens))
    return stream


def noise(seed: int, count: int, slo_class: str = "chat") -> Stream:
    """Lengths that nothing about the prompt says anything about."""
    rng = np.random.default_rng(seed)
    stream = []
    for _ in range(count):
        prompt = rng.integers(0, 500, int(rng.integers(20, 500))).tolist()
        query = LengthQuery(slo_class, len(prompt), 4_096, None, prompt)
        stream.append((query, min(around(rng, 90, 1.0), 4_096)))
    return stream


def test_it_learns_which_prompts_lead_to_long_answers() -> None:
    stream = templated(0, 1_200)
    learnt = play(LengthRegressor(median()), stream).since(400)
    usual = play(median(), stream).since(400)
    assert learnt.relative < 0.4 < 2.0 < usual.relative
    assert spearmanr(learnt.predicted, learnt.actual)[0] > 0.85
    assert learnt.share("learnt") == 1.0


def test_it_learns_from_the_length_of_prompts_alone() -> None:
    """Three times the square root of the prompt."""
    rng = np.random.default_rng(1)
    prompts = np.exp(rng.uniform(3, 9, 1_200)).round().astype(int).tolist()
    stream = [(LengthQuery("chat", n, 4_096), around(rng, 3 * np.sqrt(n), 0.2)) for n in prompts]
    learnt = play(LengthRegressor(median()), stream).since(400)
    usual = play(median(), stream).since(400)
    assert learnt.relative < 0.25
    assert learnt.relative < usual.relative / 2
    assert spearmanr(learnt.predicted, learnt.actual)[0] > 0.9


def test_an_answer_that_was_cut_off_is_not_taken_for_a_short_one() -> None:
    """Half the requests are cut off at 16 tokens; the others are predicted as if there were none
    of these."""
    stream = []
    for number, (query, tokens) in enumerate(templated(15, 1_200)):
        cap = 4_096 if number % 2 else 16
        asked = LengthQuery("chat", query.prompt_tokens, cap, None, query.prompt_token_ids)
        stream.append((asked, min(tokens, cap)))
    learnt = play(LengthRegressor(median()), stream).since(401)
    assert learnt.predicted[1::2].max() <= 16
    assert np.mean(np.abs(np.log(learnt.predicted / learnt.actual))[::2]) < 0.45


def test_where_there_is_nothing_to_learn_the_median_answers() -> None:
    stream = noise(2, 2_000)
    learnt, usual = play(LengthRegressor(median()), stream), play(median(), stream)
    assert learnt.logarithmic < 1.02 * usual.logarithmic
    assert learnt.since(200).share("quantile") > 0.8


def test_each_class_is_judged_by_itself() -> None:
    pairs = zip(templated(3, 800, slo_class="chat"), noise(4, 800, slo_class="code"), strict=True)
    stream = [one for pair in pairs for one in pair]
    learnt = play(LengthRegressor(median()), stream)
    late = learnt.since(800)
    chat, code = late.sources[::2], late.sources[1::2]
    assert chat.count("learnt") == len(chat)
    assert code.count("quantile") > 0.7 * len(code)


def test_it_follows_when_templates_change_what_they_lead_to() -> None:
    stream = [*templated(5, 800), *templated(6, 1_600, turned=1)]
    learnt, usual = play(LengthRegressor(median()), stream), play(median(), stream)
    just_after, later = learnt.since(820), learnt.since(1_800)
    assert "quantile" in just_after.sources[:400], "the median stands in for it meanwhile"
    assert later.relative < usual.since(1_800).relative / 3
    assert later.share("learnt") == 1.0


def test_until_enough_have_finished_it_says_what_the_median_says() -> None:
    stream = templated(7, MIN_SAMPLES + 60)
    learnt, usual = play(LengthRegressor(median(), MIN_SAMPLES), stream), play(median(), stream)
    assert learnt.sources[: MIN_SAMPLES + 1] == usual.sources[: MIN_SAMPLES + 1]
    assert (learnt.predicted == usual.predicted)[: MIN_SAMPLES + 1].all()
    assert "learnt" in learnt.sources[MIN_SAMPLES + 1 :]


def test_a_class_that_nothing_is_known_of_stays_with_its_cap(trained: LengthRegressor) -> None:
    stranger = templated(9, 1, slo_class="code")[0][0]
    assert trained.predict(stranger) == (4_096, "cap")


def test_a_burst_of_another_class_drowns_nothing(trained: LengthRegressor) -> None:
    regressor = LengthRegressor(median())
    play(regressor, templated(10, 600))
    play(regressor, noise(16, 1_000, slo_class="code"))
    for query, _ in templated(17, 20):
        assert regressor.predict(query) == trained.predict(query)


@pytest.fixture(scope="module")
def trained() -> LengthRegressor:
    regressor = LengthRegressor(median())
    play(regressor, templated(10, 600))
    return regressor


def test_a_request_that_outgrew_its_guess_is_one_of_its_class(trained: LengthRegressor) -> None:
    usual = median()
    play(usual, templated(10, 600))
    short = next(query for query, tokens in templated(11, 50) if tokens < 40)
    guess = trained.predict(short)
    assert guess.source == "learnt" and guess.tokens < 60
    assert trained.predict(short, guess.tokens - 1) == guess
    for generated in (guess.tokens, 300, 5_000):
        assert trained.predict(short, generated) == usual.predict(short, generated)
    assert trained.predict(short, guess.tokens).tokens > guess.tokens


def test_a_declared_length_wins_until_it_is_outgrown(trained: LengthRegressor) -> None:
    prompt = templated(12, 1)[0][0].prompt_token_ids
    query = LengthQuery("chat", len(prompt), 4_096, 5, prompt)
    assert trained.predict(query) == (5, "declared")
    assert trained.predict(query, 5).source == "learnt"
    assert trained.predict(LengthQuery("chat", 100, 3, 5, prompt)) == (3, "declared")


def test_declared_lengths_are_learnt_from_and_not_competed_with() -> None:
    """Three of four requests say rightly how long they become: no guess is closer than that."""
    stream = []
    for number, (query, tokens) in enumerate(templated(18, 800)):
        declared = tokens if number % 4 else None
        ids = query.prompt_token_ids
        stream.append((LengthQuery("chat", len(ids), 4_096, declared, ids), tokens))
    late = play(LengthRegressor(median()), stream).since(400)
    assert set(late.sources[::4]) == {"learnt"}
    assert set(late.sources[1::4]) == {"declared"}


token_ids = st.lists(st.integers(-1, 1 << 31), max_size=150)


@given(
    token_ids,
    st.integers(0, 1 << 24),
    st.integers(1, 1 << 24),
    st.one_of(st.none(), st.integers(1, 5_000)),
    st.integers(0, 5_000),
)
def test_a_guess_is_possible(
    trained: LengthRegressor,
    ids: list[int],
    prompt: int,
    cap: int,
    declared: int | None,
    generated: int,
) -> None:
    """More than what is there already, and within the cap."""
    generated = min(generated, cap - 1)
    got = trained.predict(LengthQuery("chat", prompt, cap, declared, ids), generated)
    assert generated + 1 <= got.tokens <= cap
    assert (got.source == "declared") == (declared is not None and declared > generated)


@given(
    st.lists(
        st.tuples(token_ids, st.integers(0, 1 << 24), st.integers(0, 1 << 24)),
        min_size=20,
        max_size=40,
    )
)
@settings(max_examples=examples(40))
def test_whatever_comes_guesses_stay_possible(seen: list[tuple[list[int], int, int]]) -> None:
    """Lengths of anything between nothing and millions, the cap among them; learnt at once."""
    regressor = LengthRegressor(median(), min_samples=1)
    for ids, prompt, tokens in seen:
        query = LengthQuery("chat", prompt, max(tokens, 1), None, ids)
        assert 1 <= regressor.predict(query).tokens <= query.max_tokens
        regressor.observe(query, tokens)


def test_the_same_requests_lead_to_the_same_guesses() -> None:
    one, other = (play(LengthRegressor(median()), templated(13, 300)) for _ in range(2))
    assert (one.predicted == other.predicted).all()
    assert one.share("learnt") > 0.5


def test_a_request_is_looked_at_once_and_forgotten_with_its_query(
    trained: LengthRegressor,
) -> None:
    query, _ = templated(14, 1)[0]
    first = trained.predict(query)
    query.prompt_token_ids.reverse()  # type: ignore[attr-defined]
    assert trained.predict(query) == first
    gone = weakref.ref(query)
    del query
    gc.collect()
    assert gone() is None


# --- what it looks at -----------------------------------------------------------------------------


def row_of(query: LengthQuery) -> np.ndarray:
    row, features = np.zeros(WIDTH), features_of(query)
    np.add.at(row, features.places, features.values)
    return row


def prompted(ids: list[int], prompt: int = 300) -> np.ndarray:
    return row_of(LengthQuery("chat", prompt, 100, None, ids))


def test_both_ends_of_a_prompt_are_looked_at_and_nothing_between() -> None:
    ids = list(range(1_000, 1_300))
    row = prompted(ids)
    for place in (0, FIRST_TOKENS - 1, len(ids) - LAST_TOKENS, len(ids) - 1):
        assert (prompted([*ids[:place], 9_999, *ids[place + 1 :]]) != row).any()
    for place in (FIRST_TOKENS, len(ids) - LAST_TOKENS - 1):
        assert (prompted([*ids[:place], 9_999, *ids[place + 1 :]]) == row).all()


def test_both_lengths_are_looked_at() -> None:
    row = prompted([1])
    assert (prompted([1], prompt=301) != row).any()
    assert (row_of(LengthQuery("chat", 300, 101, None, [1])) != row).any()


@given(token_ids, st.integers(0, 1 << 24), st.integers(1, 1 << 24))
def test_no_step_of_the_descent_overshoots(ids: list[int], prompt: int, cap: int) -> None:
    row = row_of(LengthQuery("chat", prompt, cap, None, ids))
    assert np.isfinite(row).all()
    assert RATE * float(row @ row) < 1.0


# --- scikit-learn ---------------------------------------------------------------------------------


def test_without_scikit_learn_the_fix_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"^best_effort\.output_length: .*'vllm-slo\[lengths\]'"):
        LengthRegressor(median())


def said_by_python(code: str, **environment: str) -> str:
    """Standard output of a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience(60),
        env=os.environ | environment,
    )
    return done.stdout.strip()


def test_scikit_learn_is_imported_when_it_is_needed() -> None:
    module = "vllm_slo.engine.scheduling.length_regressor"
    assert said_by_python(f"import sys, {module}; print('sklearn' in sys.modules)") == "False"


@pytest.mark.slow
def test_no_other_thread_works_for_it() -> None:
    """What the process computes, this thread does."""
    code = """
import time
from vllm_slo.core.lengths.forecast import LengthQuery, QuantileForecaster
from vllm_slo.core.lengths.output_length import OutputLengthPredictor
from vllm_slo.engine.scheduling.length_regressor import LengthRegressor
regressor = LengthRegressor(QuantileForecaster(OutputLengthPredictor()))
time.sleep(1.0)  # threads that libraries have started go to sleep
own_s = time.thread_time()
others_s = time.process_time() - own_s
for n in range(800):
    query = LengthQuery("chat", n, 9, None, range(n))  # nearly all are cut off
    regressor.predict(query)
    regressor.observe(query, n % 110)
print(time.thread_time() - own_s, time.process_time() - time.thread_time() - others_s)
"""
    own_s, others_s = map(
        float, said_by_python(code, OPENBLAS_NUM_THREADS="2", OMP_NUM_THREADS="2").split()
    )
    assert others_s < 0.1 * own_s
