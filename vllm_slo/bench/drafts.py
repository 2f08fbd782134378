# SPDX-License-Identifier: Apache-2.0
"""Counts of a server's speculation, from vLLM's series on ``/metrics``."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from vllm_slo.bench.endpoint import opener

_SERIES: Final = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
}


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Sums since the server started.

    Attributes:
        drafts: trees or chains verified, one for each request in each step with a draft.
        draft_tokens: their tokens, without the last token of the answer.
        accepted_tokens: draft tokens that became part of an answer. Each draft also yields the one
            token of a step without a draft.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int

    def __str__(self) -> str:
        if not self.drafts:
            return "nothing was drafted"
        accepted, guessed = self.accepted_tokens / self.drafts, self.draft_tokens / self.drafts
        return f"{accepted:.2f} of {guessed:.1f} draft tokens accepted per step of a request"

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the mean of ``__str__``."""
        mean = self.accepted_tokens / self.drafts if self.drafts else None
        return {**asdict(self), "accepted_per_step": mean}


def read_draft_counts(url: str) -> DraftCounts | None:
    """The counts of the server at ``url``; None if it does not speculate or does not answer."""
    try:
        with opener(url).open(f"{url}/metrics", timeout=10) as page:
            text = page.read().decode()
        counts: Counter[str] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in _SERIES:  # each engine has its own sample
                    counts[_SERIES[sample.name]] += int(sample.value)
    except (OSError, ValueError):
        return None
    return DraftCounts(**counts) if counts.keys() == set(_SERIES.values()) else None
