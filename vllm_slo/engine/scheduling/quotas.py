# SPDX-License-Identifier: Apache-2.0
"""Promised tokens by tenant: what each request's promise costs, and who pays
(`core.admission.quota`).

Which tenants have a bucket of their own the configuration says: those with a quota, and those that
a key speaks for. All others share one, so nobody gains by making up names.

The price of an answer is foretold from what its class did, or its ``max_tokens``; a declared length
can only raise it. A request that ends by itself gets back what it did not use, and one whose client
left does not: else promises could be held for nothing. What an answer needs beyond its price is
drawn as it goes, on credit of at most a burst; then its promise ends.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vllm.v1.request import Request

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.admission.quota import TokenBucket, relative_values, token_weight
from vllm_slo.core.lengths.output_length import OutputLengthPredictor
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics
from vllm_slo.slo.model import SLO

REASON: Final = "quota"
"""Why a request beyond its tenant's quota got no promise, or lost it."""
OTHERS: Final = "(others)"
"""Metric label of the tenants that share a bucket; no tenant can have this name."""
MAX_WAIT_S: Final = 86_400.0


@dataclass(slots=True)
class _Price:
    """What a promise costs, and what for: prompt tokens, and output tokens of a weight.

    Attributes:
        computed: tokens that had been computed before.
        generated: output tokens that had come before.
    """

    bucket: str
    prompt: float
    output: float
    weight: float
    computed: int
    generated: int

    @property
    def tokens(self) -> float:
        return self.prompt + self.output * self.weight


class Quotas:
    """The quotas of one engine.

    Args:
        config: with quotas.
        classes: the configured classes, whose values are what their requests are usually worth.
        max_step_tokens: tokens of one step at most.

    Attributes:
        over: seconds to wait of each request that was beyond its quota at the last `charge`.
    """

    def __init__(
        self,
        requests: Mapping[str, Request],
        lengths: OutputLengthPredictor,
        metrics: SchedulerMetrics,
        config: SLOConfig,
        classes: Mapping[str, SLO],
        max_step_tokens: int,
    ) -> None:
        self._requests = requests
        self._lengths = lengths
        self._metrics = metrics
        self._classes = classes
        self._max_step_tokens = max_step_tokens
        quotas, access = config.quotas, config.access
        own = dict(quotas.tenants)
        if quotas.default is not None:
            named = () if access is None else access.tenants
            own = {**dict.fromkeys([*named, OTHERS], quotas.default), **own}
        self._buckets = {
            name: TokenBucket(quota.promised_tokens_per_s, quota.burst_tokens)
            for name, quota in own.items()
        }
        self.over: dict[str, float] = {}
        self._offered: dict[str, _Price] = {}
        self._paid: dict[str, _Price] = {}

    def charge(
        self, asking: Sequence[SLORequest], now_s: float, model: StepTimeModel
    ) -> dict[str, float]:
        """Who may ask for a promise now; of those who share a bucket the most valuable first, then
        who is new, then who came first.

        Args:
            asking: requests without a promise.
            model: step times by which promises are made.

        Returns:
            Id -> seconds to wait, of those whose promises their tenants cannot pay: `over`.
        """
        self._offered, self.over = {}, {}
        left = {name: bucket.level(now_s) for name, bucket in self._buckets.items()}
        weights: dict[float, float] = {}
        worths = zip(self._worths(asking), asking, strict=True)
        ranked = sorted(worths, key=lambda one: (-one[0], one[1].planned, one[1].arrival_s))
        for _, tracked in ranked:
            bucket = self._bucket_of(tracked.slo.tenant)
            if bucket not in left:
                continue
            tpot_s = tracked.reserved_tpot_s
            if tpot_s not in weights:
                weights[tpot_s] = token_weight(model, tpot_s, self._max_step_tokens)
            price = self._price(tracked, bucket, weights[tpot_s])
            request_id = tracked.request.request_id
            if price.tokens <= left[bucket]:
                left[bucket] -= price.tokens
                self._offered[request_id] = price
            else:
                offered = self._buckets[bucket].level(now_s) - left[bucket]
                self.over[request_id] = self._wait_s(price, now_s, offered)
        return self.over

    def wait_s(self, tracked: SLORequest, now_s: float, model: StepTimeModel) -> float:
        """Seconds until its tenant could pay a request's promise; 0: now. Changes nothing."""
        bucket = self._bucket_of(tracked.slo.tenant)
        if bucket not in self._buckets:
            return 0.0
        most = self._max_step_tokens
        weight = token_weight(model, tracked.reserved_tpot_s, most)
        return self._wait_s(self._price(tracked, bucket, weight), now_s)

    def _wait_s(self, price: _Price, now_s: float, beside: float = 0.0) -> float:
        return min(self._buckets[price.bucket].wait_s(price.tokens, now_s, beside), MAX_WAIT_S)

    def normalised(self, asking: Sequence[SLORequest], demands: Iterable[Demand]) -> list[Demand]:
        """The demands of those who ask, with values that compare between tenants."""
        worths = self._worths(asking)
        return [replace(d, value=value) for d, value in zip(demands, worths, strict=True)]

    def _worths(self, asking: Sequence[SLORequest]) -> list[float]:
        """What each is worth beside those of other tenants, those who name none being one."""
        classes = self._classes
        usual = [classes[t.slo_class].value if t.slo_class in classes else 1.0 for t in asking]
        tenants = [t.slo.tenant for t in asking]
        return relative_values(tenants, [t.slo.value for t in asking], usual)

    def promised(self, tracked: SLORequest, now_s: float) -> None:
        """A request that was offered gets its promise, and its tenant pays."""
        price = self._offered.pop(tracked.request.request_id, None)
        if price is None:
            return
        # The prefix cache has been asked since.
        price.prompt = min(price.prompt, float(tracked.remaining_tokens))
        self._buckets[price.bucket].take(price.tokens, now_s)
        self._paid[tracked.request.request_id] = price

    def overdrawn(self, now_s: float) -> list[str]:
        """Let answers that have outgrown their price pay on; those that cannot."""
        out = []
        for request_id, price in self._paid.items():
            excess = self._requests[request_id].num_output_tokens - price.generated - price.output
            if excess > 0:
                price.output += excess
                if not self._buckets[price.bucket].draw(excess * price.weight, now_s):
                    out.append(request_id)
        return out

    def ended(self, tracked: SLORequest, now_s: float, *, refunded: bool) -> None:
        """A promise is over; with ``refunded`` what it did not use is given back."""
        price = self._paid.pop(tracked.request.request_id, None)
        if price is None:
            return
        bucket, request, paid = self._buckets[price.bucket], tracked.request, price.tokens
        computed = request.num_computed_tokens - price.computed
        if not price.computed:
            computed -= tracked.cached_tokens
        prompt = min(max(computed, 0), price.prompt)
        used = prompt + (request.num_output_tokens - price.generated) * price.weight
        if used > paid:
            bucket.draw(used - paid, now_s)
        elif refunded:
            bucket.give_back(paid - used, now_s)
        self._metrics.promised_tokens(price.bucket, used if refunded else max(used, paid))

    def retain(self, live: Container[str]) -> None:
        """Forget the requests that are not live; nothing is given back for them."""
        for books in (self._offered, self._paid, self.over):
            for name in [name for name in books if name not in live]:
                del books[name]

    def _bucket_of(self, tenant: str | None) -> str:
        return tenant if tenant is not None and tenant in self._buckets else OTHERS

    def _price(self, tracked: SLORequest, bucket: str, weight: float) -> _Price:
        request, slo = tracked.request, tracked.slo
        generated = request.num_output_tokens
        lengths, most = self._lengths, request.max_tokens
        foretold = lengths.predict(tracked.slo_class, most, None, generated).tokens
        declared = min(slo.expected_output_tokens or 0, most)
        prompt = 0.0 if tracked.decodes else float(tracked.remaining_tokens)
        output = float(max(foretold, declared) - generated)
        return _Price(bucket, prompt, output, weight, request.num_computed_tokens, generated)
