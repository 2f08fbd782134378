# SPDX-License-Identifier: Apache-2.0
"""How long one engine step takes: a roofline model.

The model is SLOs-Serve's (section 3.1.1), extended by two attention terms::

    T = max_l (k1_l * tokens + k2_l * spec_steps + b_l)  +  kv_s * context_tokens  +  pair_s * pairs

with l = 2: one line for "the weights are read once whatever the batch" (nearly flat), one for
compute.  ``kv_s`` prices the reading of the KV cache, ``pair_s`` the query-key products of
attention, which a prefill chunk at a long context is full of.  All times are seconds.

`core.step_time.fit` fits it to measured steps, `core.step_time.estimator` corrects it by live ones.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_slo.core.step_time.budget import Lines, tokens_within
from vllm_slo.errors import ProfileError

Term = tuple[float, float, float]
Sample = tuple["BatchShape", float]

DEFAULT_MAX_TOKENS = 65_536
_NAMES = (
    "terms[0].k1", "terms[0].k2", "terms[0].b",
    "terms[1].k1", "terms[1].k2", "terms[1].b", "kv_s", "pair_s",
)  # fmt: skip
_FIX = "measure again with 'vllm-slo profile MODEL'"


def chunk_pairs(tokens: int, context_tokens: int) -> int:
    """Query-key pairs of one request: ``tokens`` new ones after ``context_tokens`` cached ones.

    Each new token attends to the cached ones, to its predecessors in the chunk and to itself.
    """
    return tokens * context_tokens + tokens * (tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What one step runs, as far as its duration is concerned.

    Attributes:
        tokens: scheduled tokens of all requests.
        spec_steps: sequential steps of the draft model (SLOs-Serve's #SpecStep).
        context_tokens: KV tokens attended to before this step, summed over the requests.
        pairs: query-key pairs, the sum of `chunk_pairs` over the requests; 0: not known, not
            priced.
    """

    tokens: int
    spec_steps: int = 0
    context_tokens: int = 0
    requests: int = 1
    pairs: int = 0

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]], spec_steps: int = 0) -> "BatchShape":
        """The shape of a batch given as (scheduled tokens, context tokens) per request."""
        tokens = context = pairs = requests = 0
        for n, c in chunks:
            tokens += n
            context += c
            pairs += chunk_pairs(n, c)
            requests += 1
        return cls(tokens, spec_steps, context, requests, pairs)


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Batch shape -> seconds; see the module's equation. Monotone in every argument.

    Attributes:
        terms: two triples (k1, k2, b): seconds per token, seconds per draft step, seconds.
        kv_s: seconds per context token.
        max_tokens: the most `time_to_tokens` answers.
        pair_s: seconds per query-key pair.

    Raises:
        ProfileError: a coefficient is negative, not finite or not a number.
    """

    terms: tuple[Term, Term]
    kv_s: float = 0.0
    max_tokens: int = DEFAULT_MAX_TOKENS
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.terms) != 2 or any(len(term) != 3 for term in self.terms):
            raise ProfileError(f"step-time model: terms must be two triples (k1, k2, b); {_FIX}")
        values = (*self.terms[0], *self.terms[1], self.kv_s, self.pair_s)
        for index, value in enumerate(values):
            if type(value) is not float or not 0.0 <= value < math.inf:
                _check_coefficient(_NAMES[index], value)
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ProfileError(f"step-time model: max_tokens must be a positive integer; {_FIX}")

    @classmethod
    def prior(cls) -> "StepTimeModel":
        """A start for a server without a profile: a 0.3B bf16 model on two CPU cores.

        It is slow on purpose: a faster engine promises too little for its first steps, never too
        much. ``StepTimeEstimator`` replaces it once live steps show the real shape.
        """
        return cls(((0.0, 0.0, 0.040), (0.0006, 0.0, 0.030)), 2e-6, pair_s=1e-7)

    def predict_s(
        self, tokens: float, context_tokens: float = 0, spec_steps: float = 0, pairs: float = 0
    ) -> float:
        """Seconds one step takes. Arguments as in :class:`BatchShape`, all >= 0."""
        (k1, k2, b), (m1, m2, d) = self.terms
        low = k1 * tokens + k2 * spec_steps + b
        high = m1 * tokens + m2 * spec_steps + d
        attention = self.kv_s * context_tokens + self.pair_s * pairs
        return max(low, high) + attention

    def filled(self) -> "StepTimeModel":
        """What tokens cost in steps that prompts fill: the time that each adds to a long step. No
        token is free, as in a short step while the weights are read. The fixed time of a step is
        left out: drafts do not change how many of these steps there are."""
        tokens_s, passes_s, _ = max(self.terms)
        steep = tokens_s, passes_s, 0.0
        return replace(self, terms=(steep, steep))

    def predict_shape_s(self, shape: BatchShape) -> float:
        return self.predict_s(shape.tokens, shape.context_tokens, shape.spec_steps, shape.pairs)

    def lines(self) -> Lines:
        """The model without attention."""
        (k1, k2, b), (m1, m2, d) = self.terms
        return Lines(float(k1), float(k2), float(b), float(m1), float(m2), float(d))

    def time_to_tokens(self, time_s: float, context_tokens: float = 0) -> int:
        """Largest n <= max_tokens whose step fits into ``time_s``; 0 if not even one does.

        The paper's time2bs, without query-key pairs. Exact in floating point: n tokens fit, and
        n + 1 do not.
        """
        left_s = time_s - self.kv_s * context_tokens
        guess = tokens_within(self.lines(), left_s, float(self.max_tokens), 0.0)
        n = int(guess) if guess >= 1.0 else 0

        def fits(n: int) -> bool:
            return self.predict_s(n, context_tokens) <= time_s

        if fits(n) and (n >= self.max_tokens or not fits(n + 1)):
            return n
        return _largest(fits, self.max_tokens)

    def chunk_to_fit(
        self,
        time_s: float,
        chunk_context: float,
        tokens: float = 0,
        context_tokens: float = 0,
        spec_steps: float = 0,
        pairs: float = 0,
    ) -> int:
        """Largest chunk of one request that still fits into a step of ``time_s``.

        The chunk follows ``chunk_context`` cached tokens of its request; the other arguments are
        the batch it joins. Exact: its n tokens add ``chunk_pairs(n, chunk_context)`` pairs.
        """
        context = context_tokens + chunk_context
        most = max(int(self.max_tokens - tokens), 0)

        def fits(n: int) -> bool:
            more = n * chunk_context + n * (n + 1) // 2
            return self.predict_s(tokens + n, context, spec_steps, pairs + more) <= time_s

        left = time_s - self.kv_s * context - self.pair_s * pairs
        guess = float(most)
        for k1, k2, b in self.terms:
            free = left - k1 * tokens - k2 * spec_steps - b
            # The positive root of pair_s/2 n^2 + linear n = free, safe at pair_s = 0.
            linear = k1 + self.pair_s * (chunk_context + 0.5)
            root = linear + math.sqrt(max(linear * linear + 2.0 * self.pair_s * free, 0.0))
            if root * guess > 2.0 * free:
                guess = 2.0 * free / root if root else 0.0
        n = int(guess) if guess >= 1.0 else 0
        if n and fits(n) and (n == most or not fits(n + 1)):
            return n
        return _largest(fits, most)

    def scaled(self, factor: float) -> "StepTimeModel":
        """The same model, every time multiplied by ``factor`` (> 0)."""
        (k1, k2, b), (m1, m2, d) = self.terms
        return StepTimeModel(
            ((k1 * factor, k2 * factor, b * factor), (m1 * factor, m2 * factor, d * factor)),
            self.kv_s * factor,
            self.max_tokens,
            self.pair_s * factor,
        )

    def besides(self, fixed_s: float, token_s: float = 0.0) -> "StepTimeModel":
        """The same engine with other work in every step: so many seconds, and more per token."""
        (k1, k2, b), (m1, m2, d) = self.terms
        return StepTimeModel(
            ((k1 + token_s, k2, b + fixed_s), (m1 + token_s, m2, d + fixed_s)),
            self.kv_s,
            self.max_tokens,
            self.pair_s,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` gives the equal model back."""
        return {
            "terms": [list(term) for term in self.terms],
            "kv_s": self.kv_s,
            "pair_s": self.pair_s,
            "max_tokens": self.max_tokens,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "StepTimeModel":
        """Inverse of `to_dict`. Raises ProfileError for anything else."""
        try:
            low, high = (tuple(term) for term in data["terms"])
            return cls((low, high), data["kv_s"], data["max_tokens"], data.get("pair_s", 0.0))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProfileError(f"step-time model: {error!r} while reading it; {_FIX}") from error


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Largest n in 0..most for which ``fits`` holds (it holds up to some n); 0 if none.

    Used where nothing fits, and where rounding misled a closed form.
    """
    if most < 1 or not fits(1):
        return 0
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _check_coefficient(name: str, value: Any) -> None:
    bad = isinstance(value, bool) or not isinstance(value, int | float)
    if bad or not math.isfinite(value) or value < 0:
        raise ProfileError(
            f"step-time model: {name} must be a finite number >= 0, not {str(value)[:80]}; {_FIX}"
        )
