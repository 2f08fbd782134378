# SPDX-License-Identifier: Apache-2.0
"""A request as a data plane has it, and as routing sees it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from vllm_slo.core.routing.virtual_replica import RoutedRequest
from vllm_slo.router.body_reader import BodyReader
from vllm_slo.router.cluster import Cluster
from vllm_slo.router.prompts import Prompt, TokenRatio
from vllm_slo.router.routed import routed_request
from vllm_slo.slo.body import is_json_type
from vllm_slo.slo.carriers import QUOTE_ROUTE, ROUTES, Policy, slo_headers
from vllm_slo.wire.api_errors import is_anthropic
from vllm_slo.wire.front_protocol import OWN_PREFIX

_GENERATION: Final = tuple(sorted(ROUTES))
_PROMPT_TOKENS: Final = re.compile(rb'"(?:prompt|input)_tokens": ?(\d{1,9})')


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the data plane has it.

    Attributes:
        path: without the query, as sent. A gateway may remove a prefix of it later.
        headers: pairs of name and value; names in lower case.
        body: the whole body, or its beginning.
        arrival_s: on the monotonic clock.
        total_bytes: length of the whole body if ``body`` is only its beginning, or the best
            estimate of it; None: ``body`` is whole.
    """

    method: str
    path: str
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    arrival_s: float
    total_bytes: int | None = None

    @property
    def is_generation(self) -> bool:
        return self.method == "POST" and self.path.endswith(_GENERATION)

    @property
    def is_quote(self) -> bool:
        return self.method == "POST" and self.path.endswith(QUOTE_ROUTE)

    @property
    def needs_body(self) -> bool:
        """Whether the decision depends on the body."""
        return self.is_generation or self.is_quote

    @property
    def content_type(self) -> str:
        values = (value for name, value in self.headers if name == b"content-type")
        return next(values, b"").decode("latin-1")

    @property
    def own_headers(self) -> set[str]:
        """Names of its headers that only a front may send."""
        names = (name.decode("latin-1").lower() for name, _ in self.headers)
        return {name for name in names if name.startswith(OWN_PREFIX)}


def prompt_tokens_in(tail: bytes) -> int | None:
    """The prompt's token count in the end of an answer; None if it has none."""
    count = _PROMPT_TOKENS.search(tail, max(tail.rfind(b'"usage"'), 0))
    return None if count is None else int(count[1])


class RequestReader:
    """Reads requests, with what earlier answers taught about the length of prompts.

    ``epoch``: returns epoch seconds, for ``prefill_ddl``.
    """

    def __init__(
        self, cluster: Cluster, policy: Policy, epoch: Callable[[], float] = time.time
    ) -> None:
        self.ratio = TokenRatio()
        self._cluster = cluster
        self._bodies = BodyReader(policy)
        self._epoch = epoch

    def close(self) -> None:
        """End the process that reads large bodies."""
        self._bodies.close()

    async def read(self, request: Request) -> tuple[RoutedRequest, Prompt, str]:
        """A request as routing sees it, its prompt, and its result without a promise.

        Raises:
            InvalidSLOError: a carrier has a mistake, or two carriers disagree.
            UnreadError: the body could not be read now.
        """
        asked = None
        if is_json_type(request.content_type):
            headers, now_s = slo_headers(request.headers), self._epoch()
            asked = await self._bodies.read(request.body, headers, now_s, request.total_bytes)
        if asked is None:
            return RoutedRequest(1), Prompt(), "no_slo"
        label = "no_slo" if asked.slo is None else "best_effort"
        ready = ((each.name, each.prefixes) for each in self._cluster.ready())
        routed = routed_request(asked, ready, self.ratio, request.arrival_s)
        return routed, asked.prompt, label

    def learn(self, request: Request, prompt: Prompt | None, prompt_tokens: int | None) -> None:
        """Learn from the prompt's token count in an answer. Anthropic's count leaves out cached
        tokens, so it is not used."""
        if prompt_tokens is not None and prompt is not None and not is_anthropic(request.path):
            self.ratio.learn(prompt, prompt_tokens)
