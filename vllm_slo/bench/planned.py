# SPDX-License-Identifier: Apache-2.0
"""The requests of a run: which are sent, when, and what they ask for. A seed makes them again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

import numpy as np

from vllm_slo.bench.errors import BenchError
from vllm_slo.slo.fields import PUBLIC_OF
from vllm_slo.slo.model import SLO

FIRST_TOKEN_ID: Final = 16
"""Lowest prompt id; the ids below are usually special tokens (padding, end of text)."""

Send = Literal["objectives", "class", "none"]
"""What a request's ``slo`` field holds: its objectives, its class's name, or nothing."""

_OF_SESSIONS: Final = ("session_e2e_ms", "session_rounds", "session_last")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to send ``at_s`` after the start. Objectives are seconds; None means none.

    Attributes:
        hash_ids: one for each ``block_tokens`` of the beginning of its prompt. Requests with the
            same leading ids have the same beginning.
        session: name of the job whose rounds this and other requests are, in order; empty: none.
            A prompt without hash ids continues those of its session's earlier rounds.
        think_s: time between the end of the previous round's answer and this request, at least.
        slo: all that it asks for, of which the objectives here are a part; None: the objectives.
    """

    request_id: str
    at_s: float
    slo_class: str
    prompt_tokens: int
    output_tokens: int
    ttft_slo_s: float | None
    tpot_slo_s: float | None
    value: float = 1.0
    hash_ids: tuple[int, ...] = ()
    block_tokens: float = 512
    session: str = ""
    think_s: float = 0.0
    e2e_slo_s: float | None = None
    slo: SLO | None = None

    def asking(self, slo: SLO | None) -> PlannedRequest:
        """The same request with this SLO; None: it asks for nothing.

        A client cannot tell the stages of an answer apart: the loosest of their TPOTs counts.
        """
        if slo is None:
            return replace(self, slo=None, ttft_slo_s=None, tpot_slo_s=None, e2e_slo_s=None)
        tpots = [stage.tpot_ms for stage in slo.answer_stages]
        known = [tpot for tpot in tpots if tpot is not None]
        return replace(
            self,
            ttft_slo_s=_seconds(slo.ttft_ms),
            tpot_slo_s=_seconds(max(known)) if len(known) == len(tpots) else None,
            e2e_slo_s=_seconds(slo.e2e_ms),
            value=slo.value,
            slo=slo,
        )

    def scaled(self, factor: float) -> PlannedRequest:
        """The same request with all of its objectives times ``factor``."""
        if self.slo is not None:
            return self.asking(_scaled(self.slo, factor))
        return replace(
            self,
            ttft_slo_s=_times(self.ttft_slo_s, factor),
            tpot_slo_s=_times(self.tpot_slo_s, factor),
            e2e_slo_s=_times(self.e2e_slo_s, factor),
        )

    @property
    def has_objective(self) -> bool:
        """Whether a client can see if it was kept."""
        return not (self.ttft_slo_s is self.tpot_slo_s is self.e2e_slo_s is None)

    def slo_body(self, send: Send = "objectives", session_id: str = "") -> dict[str, Any] | None:
        """The ``slo`` field of the request's body (milliseconds); None: it has none."""
        if send == "none":
            return None
        body: dict[str, Any] = {}
        if send == "class":
            named = self.slo_class if self.slo is None else self.slo.slo_class
            body = {"class": named} if named else {}
        elif self.slo is not None:
            body = _body(self.slo, in_session=bool(session_id))
        elif self.has_objective:
            asked = {
                "ttft_ms": _milliseconds(self.ttft_slo_s),
                "tpot_ms": _milliseconds(self.tpot_slo_s),
                "e2e_ms": _milliseconds(self.e2e_slo_s),
                "value": None if self.value == 1.0 else self.value,
            }
            body = {name: given for name, given in asked.items() if given is not None}
        if session_id:
            body["session_id"] = session_id
        return body or None


def _body(slo: SLO, *, in_session: bool) -> dict[str, Any]:
    """An SLO as JSON, without its class and session id."""
    body: dict[str, Any] = {}
    for spec in fields(slo):
        given = getattr(slo, spec.name)
        if given == spec.default or spec.name in ("slo_class", "session_id"):
            continue
        if spec.name in _OF_SESSIONS and not in_session:
            continue
        if spec.name == "stages":
            given = [{k: v for k, v in stage._asdict().items() if v is not None} for stage in given]
        body[PUBLIC_OF[spec.name]] = given
    return body


def _scaled(slo: SLO, factor: float) -> SLO:
    times = ("ttft_ms", "tpot_ms", "e2e_ms", "thinking_tpot_ms", "session_e2e_ms", "max_wait_ms")
    changed: dict[str, Any] = {name: _times(getattr(slo, name), factor) for name in times}
    if slo.stages is not None:
        changed["stages"] = tuple(s._replace(tpot_ms=_times(s.tpot_ms, factor)) for s in slo.stages)
    return replace(slo, **changed)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of ``at_s``.

    Attributes:
        source: what they were made from.
        rows_left_out: rows of the source that are not sent, such as those without prompt or output
            tokens.
    """

    name: str
    seed: int
    duration_s: float
    source: str
    requests: tuple[PlannedRequest, ...]
    rows_left_out: int = 0

    @property
    def rate(self) -> float:
        """Requests per second over the duration."""
        return len(self.requests) / self.duration_s

    def prompt_ids(self, request: PlannedRequest, vocab_size: int) -> list[int]:
        """Token ids of the prompt.

        They depend only on the seed, the request's id, its hash ids, its session and
        ``vocab_size``. Only prompts with the same leading hash ids, or rounds of a session without
        hash ids, share a prefix, so without them a prefix cache makes no difference.
        """
        low = min(FIRST_TOKEN_ID, vocab_size - 1)

        def drawn(name: str, count: int) -> list[int]:
            rng = np.random.default_rng([self.seed, *name.encode()])
            return [int(i) for i in rng.integers(low, vocab_size, count)]

        ids: list[int] = []
        for name, count in self.parts(request):
            ids += drawn(name, count)
        return ids

    @staticmethod
    def parts(request: PlannedRequest, prompt_tokens: int | None = None) -> list[tuple[str, int]]:
        """(name, tokens) of the stretches of a prompt; those of the same name begin alike.

        ``prompt_tokens``: of the prompt; None: the request's.
        """
        left = request.prompt_tokens if prompt_tokens is None else prompt_tokens
        done, parts = 0, []
        for place, hash_id in enumerate(request.hash_ids, 1):
            # The end of a block is rounded, not its length, so that errors do not add up.
            tokens = min(round(place * request.block_tokens) - done, left)
            if tokens > 0:
                parts.append((f"block/{hash_id}", tokens))
            done, left = done + tokens, left - tokens
        if left:
            continues = request.session and not request.hash_ids
            name = f"session/{request.session}" if continues else request.request_id
            parts.append((name, left))
        return parts

    def with_slo_scale(self, scale: float) -> Workload:
        """Every objective times ``scale`` (AdaServe, figure 11).

        Raises:
            BenchError: this is no scale.
            InvalidSLOError: an objective would be out of range.
        """
        if not 0 < scale < math.inf:
            raise BenchError("--slo-scale", f"must be above 0, got {scale}")
        if scale == 1:
            return self
        return replace(self, requests=tuple(r.scaled(scale) for r in self.requests))

    def describe(self) -> dict[str, Any]:
        """JSON form without the requests: sizes and the objectives' ranges (seconds)."""
        counts = Counter(r.slo_class for r in self.requests)
        return {
            "name": self.name,
            "source": self.source,
            "seed": self.seed,
            "duration_s": self.duration_s,
            "requests": len(self.requests),
            "rows_left_out": self.rows_left_out,
            "rate_per_s": self.rate,
            "classes": {name: self._describe_class(name) for name in counts},
        }

    def _describe_class(self, name: str) -> Mapping[str, Any]:
        members = [r for r in self.requests if r.slo_class == name]
        return {
            "requests": len(members),
            "prompt_tokens_mean": float(np.mean([r.prompt_tokens for r in members])),
            "output_tokens_mean": float(np.mean([r.output_tokens for r in members])),
            "ttft_slo_s": _range([r.ttft_slo_s for r in members]),
            "tpot_slo_s": _range([r.tpot_slo_s for r in members]),
            "e2e_slo_s": _range([r.e2e_slo_s for r in members]),
        }


def _range(values: list[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None
