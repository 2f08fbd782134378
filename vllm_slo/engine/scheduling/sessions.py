# SPDX-License-Identifier: Apache-2.0
"""Follows the sessions of an engine: paces rounds, keeps prefixes warm, tells how they did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vllm_slo.config.sections import SessionsConfig
from vllm_slo.core.admission.program import work_tokens
from vllm_slo.core.sessions.rounds import Session, Sessions
from vllm_slo.core.types import INFINITY
from vllm_slo.engine.scheduling.kv_blocks import KVBlocks
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.warm_prefixes import WarmPrefixes
from vllm_slo.engine.scheduling.workload import Workload
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics


class SessionRounds:
    """The rounds that requests with a ``session_id`` are.

    Args:
        warm: the prefixes of rounds that have ended.
        config: how long a session may be quiet.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        workload: Workload,
        blocks: KVBlocks,
        clock: StepClock,
        warm: WarmPrefixes,
        metrics: SchedulerMetrics,
        config: SessionsConfig,
    ) -> None:
        self._tracker = tracker
        self._workload = workload
        self._blocks = blocks
        self._clock = clock
        self._metrics = metrics
        self._sessions = Sessions(config.idle_s)
        self._block_size = min(blocks.sizes, default=1)
        self._warm = warm

    def gauges(self) -> dict[str, float]:
        """What is on ``/metrics``."""
        return {"sessions": len(self._sessions), "warm_prefix_blocks": self._warm.free_blocks()}

    def begin(self, tracked: SLORequest) -> None:
        """A request has come: what it may take follows from its session, if it is in one."""
        slo = tracked.slo
        if slo.session_id is None:
            return
        session = self._sessions.begin(
            (slo.tenant, slo.session_id),
            tracked.slo_class,
            tracked.arrival_s,
            e2e_s=INFINITY if slo.session_e2e_ms is None else slo.session_e2e_ms / 1e3,
            expected=slo.session_rounds,
            has_objective=slo.has_objective,
        )
        tracked.session = session
        if not session.kept:
            self._stand_back(tracked)
        if session.deadline_s < INFINITY:
            pace = self._sessions.pace(
                session,
                tracked.arrival_s,
                self._lone_ttft_s(tracked),
                self._tokens(tracked),
                last=bool(slo.session_last),
            )
            tracked.keep_pace(pace.ttft_s, pace.tpot_s)

    @staticmethod
    def _stand_back(tracked: SLORequest) -> None:
        """The round of a session that has lost an objective: the session is lost as a whole, so
        promises go to others (SLOs-Serve, section 4.1). Who wants an answer with a promise or none
        asks all the same."""
        if tracked.slo.on_unattainable == "best_effort":
            tracked.slo = replace(tracked.slo, tier="best_effort")
            tracked.reason = "session"

    def _lone_ttft_s(self, tracked: SLORequest) -> float:
        self._blocks.look_up_prefix(tracked)
        model = self._clock.expected_model
        work = work_tokens(model, tracked.remaining_tokens)
        return model.predict_s(work)

    def _tokens(self, tracked: SLORequest) -> float | None:
        length = self._workload.predicted_length(tracked)
        return None if length.source == "cap" else float(length.tokens)

    def blocks_of(self, request: Request) -> Sequence[KVCacheBlock]:
        """Blocks of a request that is about to be freed, if they are to stay warm."""
        tracked = self._tracker.get(request.request_id)
        if tracked is None or tracked.session is None or not self._blocks.caches:
            return ()
        if tracked.slo.session_last:
            return ()
        return self._blocks.blocks_of(request)

    def in_time(self, tracked: SLORequest, attained: bool | None) -> bool | None:
        """Whether a request that ends here attains: its own objectives, and its session's time."""
        session = tracked.session
        if session is None or attained is None:
            return attained
        return attained and self._clock.now_s <= session.deadline_s

    def told(self, tracked: SLORequest, attained: bool | None) -> dict[str, Any] | None:
        """The report on the session of a request that ends here and attains, or not, by
        `in_time`."""
        session = tracked.session
        if session is None:
            return None
        kept = session.kept and attained is not False
        return {
            "id": session.key[1],
            "round": session.rounds,
            "elapsed_ms": round((self._clock.now_s - session.started_s) * 1e3, 3),
            "attained": kept if session.has_objective else None,
        }

    def end(
        self,
        tracked: SLORequest,
        attained: bool | None,
        blocks: Sequence[KVCacheBlock],
        *,
        answered: bool,
    ) -> None:
        """A request has ended.

        Args:
            tracked: the request.
            attained: by `in_time`; None: it had no objective, or did not end by itself.
            blocks: as `blocks_of` told before they were freed.
            answered: whether its client may go on from it.
        """
        session = tracked.session
        if session is None:
            return
        if blocks and answered:
            self._warm.keep(session.key, blocks)
        last, now_s = bool(tracked.slo.session_last), self._clock.now_s
        if self._sessions.end(session.key, now_s, attained=attained, last=last) is not None:
            self._closed(session)

    def recount(self) -> None:
        """Count the live requests of each session anew."""
        self._sessions.recount(t.session for t in self._tracker if t.session is not None)

    def _closed(self, session: Session) -> None:
        self._warm.drop(session.key)
        self._metrics.session(session.slo_class, session.attained)

    def scheduled(self, tokens: int) -> None:
        """A step computes so many tokens; each takes its share of a block."""
        self._warm.used(tokens / self._block_size)

    def close_quiet(self, now_s: float) -> None:
        """Sessions of which nothing is heard any more have ended."""
        for session in self._sessions.take_quiet(now_s):
            self._closed(session)
