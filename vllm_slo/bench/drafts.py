# SPDX-License-Identifier: Apache-2.0
"""What a server says of its speculation, by vLLM's own series on ``/metrics``."""

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
        drafts: trees or chains verified: one for each request in each step that had one.
        draft_tokens: their tokens, the last token of the answer so far not counted.
        accepted_tokens: how many of them became part of an answer; beside these each draft yields
            the one token that a step without a draft yields.
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
        """JSON form, with the mean that ``__str__`` tells."""
        mean = self.accepted_tokens / self.drafts if self.drafts else None
        return {**asdict(self), "accepted_per_step": mean}


def read_draft_counts(url: str) -> DraftCounts | None:
    """The counts of the server at ``url``; None where it does not speculate or cannot be asked."""
    try:
        with opener(url).open(f"{url}/metrics", timeout=10) as page:
            text = page.read().decode()
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in _SERIES:  # one of each for every engine
                    found[_SERIES[sample.name]] += int(sample.value)
    except (OSError, ValueError):
        return None
    return DraftCounts(**found) if found.keys() == set(_SERIES.values()) else None
