# SPDX-License-Identifier: Apache-2.0
"""Which of the live requests are promised their objectives. It rules; it promises and ends
nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from vllm_slo.config.model import SLOConfig
from vllm_slo.core.admission import program
from vllm_slo.core.admission.idle_probe import SLOW, IdleProbe, whom_to_probe
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY, AdmissionPlan, Demand, PrefillView
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling.quotas import REASON, Quotas
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.ruling import Ruling
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.workload import CommittedLoad, Workload

MOVE_GAIN = 0.1
"""A promise gives way only to requests that are worth more than 1 + this many times as much. The
value is a choice: above 0, so that equals do not take turns, and below 1, so that one long prompt
gives way to two short ones."""
MIN_REPLAN_S = 0.02
"""Seconds between two rulings where nothing arrived: what changes in less is hardly a step."""


class AdmissionController:
    """Asks SLOs-Serve's program for the requests of one engine.

    Args:
        quotas: how much each tenant may be promised; None: as much as there is.
        config: how often to rule, and over how many.
        obstacle: why nothing can be promised on this engine, or None; see `obstacles`.
    """

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        workload: Workload,
        clock: StepClock,
        quotas: Quotas | None,
        config: SLOConfig,
        *,
        obstacle: str | None,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._workload = workload
        self._clock = clock
        self._quotas = quotas
        self._replan_s = config.replan_interval_s
        self._max_new = config.max_planned_new
        self._obstacle = obstacle
        self._idle_probe = IdleProbe(config.ageing_s)
        self._last_s = -INFINITY

    # When, and over whom.

    @property
    def is_due(self) -> bool:
        """Whether something arrived, ended, or has waited for a ruling long enough."""
        since_s = self._clock.now_s - self._last_s
        if self._tracker.arrived:
            return True
        if since_s < MIN_REPLAN_S or not self._tracker.unpromised:
            return False
        return self._tracker.ended > 0 or since_s >= self._replan_s

    def asking(self, start_s: float, *others: SLORequest) -> list[SLORequest]:
        """The requests that the program is to consider in a step that begins at ``start_s``."""
        unpromised = (*self._tracker.without_promise(), *others)
        asking = [t for t in unpromised if t.wants_promise(start_s)]
        if self._quotas is not None:
            asking = [t for t in asking if t.request.request_id not in self._quotas.over]
        asking.sort(key=lambda t: (t.planned, t.deadline_s))
        return asking[: self._max_new]

    # The rulings.

    def rulings(self, start_s: float) -> Iterator[Ruling]:
        """What is decided now, in turn: each ruling is to be carried out before the next is asked
        for.

        Args:
            start_s: when the next step begins.
        """
        self._tracker.planned()
        self._last_s = self._clock.now_s
        model = self._clock.promise_model
        yield self._without_hope(start_s)
        if self._obstacle is not None:
            return
        self._tighten_end_to_end()
        if self._quotas is not None:
            unpromised = self._tracker.without_promise()
            wanting = [t for t in unpromised if t.wants_promise(start_s)]
            waits = self._quotas.charge(wanting, self._clock.now_s, model)
            yield Ruling(refused=dict.fromkeys(waits, REASON), retry_after_s=waits)
        asking = self.asking(start_s)
        if asking:
            yield self._by_program(asking, start_s, model)

    def _without_hope(self, start_s: float) -> Ruling:
        """New requests for which nothing can be planned: their deadline has passed already, or
        there are no plans at all."""
        reason = self._obstacle or "expired"
        hopeless = {
            t.request.request_id: reason
            for t in self._tracker.without_promise()
            if not t.planned
            and t.slo.effective_tier == "guaranteed"
            and not (self._obstacle is None and t.wants_promise(start_s))
        }
        later_s = dict.fromkeys(hopeless, self._tracker.finish_interval_s)
        return Ruling(refused=hopeless, retry_after_s=later_s)

    def _tighten_end_to_end(self) -> None:
        """Answers with an end-to-end objective that began without a promise may have lost time."""
        for tracked in self._tracker.without_promise():
            if tracked.end_s < INFINITY and tracked.decodes:
                length = self._workload.predicted_length(tracked).tokens
                tracked.keep_end(max(length - tracked.request.num_output_tokens, 1))

    def _by_program(
        self, asking: Sequence[SLORequest], start_s: float, model: StepTimeModel
    ) -> Ruling:
        plan, demands = self.best_plan(asking, start_s, model)
        if plan.refused and (movable := self._movable(len(asking))):
            plan, demands = self._moving_plan(asking, movable, start_s, model)
            moved = {name: plan.refused[name] for name in movable if name in plan.refused}
        else:
            movable, moved = {}, {}
        admitted = tuple(name for name in plan.admitted if name not in movable)
        refused = {name: reason for name, reason in plan.refused.items() if name not in movable}
        if admitted:
            self._idle_probe.promised()
        elif probe := self.probe(plan, asking, start_s):
            self._clock.doubt()
            self._idle_probe.probed()
            admitted = (probe,)
            refused = {name: reason for name, reason in refused.items() if name != probe}
        due_s = {demand.request_id: demand.deadline_s for demand in demands}
        return Ruling({name: due_s[name] for name in admitted}, refused, plan.retry_after_s, moved)

    def _movable(self, asking: int) -> dict[str, SLORequest]:
        """Promises that may still be given to others: those that no client was told of and of which
        nothing is computed, but for late ones. A request that is to be declined keeps its promise,
        unless a front sent it: a front that is answered 429 asks the next replica. As many as the
        program considers beside those that ask, the latest deadlines first."""
        found = [
            t
            for t in self._tracker.promised_before_first_token()
            if t.deadline_s < INFINITY
            and t.late is None
            and t.request.num_computed_tokens == 0
            and (t.ticket or t.slo.on_unattainable != "decline")
        ]
        found.sort(key=lambda t: t.deadline_s, reverse=True)
        return {t.request.request_id: t for t in found[: self._max_new - asking]}

    def _moving_plan(
        self,
        asking: Sequence[SLORequest],
        movable: Mapping[str, SLORequest],
        start_s: float,
        model: StepTimeModel,
    ) -> tuple[AdmissionPlan, list[Demand]]:
        """`best_plan`, in which some promises count as requests that ask. A promise counts for a
        little more than it did, see `MOVE_GAIN`."""
        load = self._workload.committed(start_s, model)
        pending = [d for d in load.pending if d.request_id not in movable]
        blocks = load.blocks - sum(d.blocks for d in load.pending if d.request_id in movable)
        kept = load._replace(pending=pending, blocks=blocks)
        worth = dict.fromkeys(movable, 1.0 + MOVE_GAIN)
        return self.best_plan([*asking, *movable.values()], start_s, model, kept, worth)

    def best_plan(
        self,
        asking: Sequence[SLORequest],
        start_s: float,
        model: StepTimeModel,
        committed: CommittedLoad | None = None,
        worth: Mapping[str, float] = MappingProxyType({}),
    ) -> tuple[AdmissionPlan, list[Demand]]:
        """The program's plan by the best way to decode, and what each request asks of the engine.
        Nothing is promised by it.

        Args:
            asking: as `asking` found them.
            start_s: when the next step begins.
            model: step times to promise by.
            committed: what is promised, where that is known already.
            worth: request id -> how many times its value it counts for, where that is not 1.
        """
        demands = [self._workload.demand(t, start_s, model) for t in asking]
        if self._quotas is not None:
            demands = self._quotas.normalised(asking, demands)
        if worth:
            demands = [replace(d, value=d.value * worth.get(d.request_id, 1.0)) for d in demands]
        load = committed or self._workload.committed(start_s, model)
        capacity = self._workload.capacity(load.requests, load.blocks)
        tightest_s = min((t.reserved_tpot_s for t in asking), default=INFINITY)
        plans = [
            program.plan_admission(
                start_s,
                demands,
                load.pending,
                load.decoding,
                believed,
                capacity,
                decoding_context=load.context,
                speculated=speculated,
            )
            for believed, speculated in self._workload.ways_to_decode(tightest_s)
        ]
        values = {demand.request_id: demand.value for demand in demands}
        return max(plans, key=lambda plan: sum(values[name] for name in plan.admitted)), demands

    def probe(
        self, plan: AdmissionPlan, asking: Sequence[SLORequest], start_s: float
    ) -> str | None:
        """The request that is promised its objectives to find out how fast steps are now; None in
        most cases. See `core.admission.idle_probe`."""
        fastest, idle_s = self._clock.fastest_model, self._clock.idle_s(self._clock.now_s)
        if fastest is None or plan.admitted or not self._idle_probe.is_due(idle_s):
            return None
        if self._state.running or self._tracker.promised:
            return None
        slow = [t for t in asking if plan.refused.get(t.request.request_id) in SLOW]
        refused = [self._workload.demand(t, start_s, fastest) for t in slow]
        return whom_to_probe(refused, fastest, self._workload.capacity(0, 0), start_s)

    def may_start(self, starting: PrefillView, start_s: float, model: StepTimeModel) -> bool:
        """Whether a prefill may end before its deadline; see `program.can_start_early`."""
        if starting.tpot_s == INFINITY:
            return True
        load = self._workload.committed(start_s, model)
        pending = [d for d in load.pending if d.request_id != starting.request_id]
        share = 1.0 - self._workload.reserved_share()
        capacity = program.Capacity(0.0, 1, self._workload.max_step_tokens, share)
        return any(
            program.can_start_early(
                start_s,
                starting.tpot_s,
                pending,
                load.decoding,
                believed,
                capacity,
                decoding_context=load.context,
                speculated=speculated,
            )
            for believed, speculated in self._workload.ways_to_decode()
        )
