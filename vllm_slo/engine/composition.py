# SPDX-License-Identifier: Apache-2.0
"""Builds the parts of one scheduler, each from just what it needs."""

from __future__ import annotations

from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_manager import KVCacheManager

from vllm_slo.config.model import SLOConfig
from vllm_slo.config.speculation import SpeculationConfig
from vllm_slo.core.batching.recent_objectives import RecentObjectives
from vllm_slo.core.clock import Clock
from vllm_slo.core.jit import compile_package
from vllm_slo.core.lengths.output_length import OutputLengthPredictor
from vllm_slo.core.ordering.starvation_guard import StarvationGuard
from vllm_slo.core.step_time.estimator import StepTimeEstimator, horizon_of
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling.admission import AdmissionController
from vllm_slo.engine.scheduling.best_effort import BestEffort
from vllm_slo.engine.scheduling.choice_groups import ChoiceGroups
from vllm_slo.engine.scheduling.containment import Containment
from vllm_slo.engine.scheduling.controller import Controller
from vllm_slo.engine.scheduling.endings import Endings
from vllm_slo.engine.scheduling.expected_memory import ExpectedMemory
from vllm_slo.engine.scheduling.intake import Intake
from vllm_slo.engine.scheduling.kv_blocks import KVBlocks
from vllm_slo.engine.scheduling.late_promises import LatePromises
from vllm_slo.engine.scheduling.obstacles import obstacle_of, warn_of
from vllm_slo.engine.scheduling.opportunistic import OpportunisticStarts
from vllm_slo.engine.scheduling.outcomes import Outcomes
from vllm_slo.engine.scheduling.promises import Promises
from vllm_slo.engine.scheduling.quotas import Quotas
from vllm_slo.engine.scheduling.quotes import Quotes
from vllm_slo.engine.scheduling.recovery import Recovery
from vllm_slo.engine.scheduling.replica_reports import ReplicaReports
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.responsive_steps import ResponsiveSteps
from vllm_slo.engine.scheduling.sessions import SessionRounds
from vllm_slo.engine.scheduling.stage_marks import AnswerMarks, StageMarks
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.scheduling.step_planner import StepPlanner
from vllm_slo.engine.scheduling.step_time_profile import find_profile
from vllm_slo.engine.scheduling.warm_prefixes import WarmPrefixes
from vllm_slo.engine.scheduling.workload import Workload
from vllm_slo.engine.speculation.chains import Chains, trims
from vllm_slo.engine.speculation.no_speculation import NoSpeculation, Speculation
from vllm_slo.engine.speculation.tenants import TenantShares
from vllm_slo.engine.speculation.trees import Trees
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics
from vllm_slo.engine.telemetry.request_recorder import RequestRecorder
from vllm_slo.engine.telemetry.tracing import RequestSpans
from vllm_slo.slo.access import Seal

logger = init_logger(__name__)

WITHOUT_DRAFTS = tuple(
    f"vllm_slo.core.{folder}" for folder in ("admission", "batching", "lengths", "step_time")
)
"""The policies of which an engine without drafts calls compiled functions."""


class Parts(NamedTuple):
    """The parts of one scheduler, for those who look into it; see `assemble`."""

    config: SLOConfig
    clock: StepClock
    tracker: RequestTracker
    blocks: KVBlocks
    workload: Workload
    guard: StarvationGuard
    marks: StageMarks
    speculation: Speculation
    starts: OpportunisticStarts
    admission: AdmissionController
    planner: StepPlanner
    quotas: Quotas | None
    quotes: Quotes
    best_effort: BestEffort | None
    sessions: SessionRounds
    outcomes: Outcomes
    recorder: RequestRecorder | None
    reports: ReplicaReports
    metrics: SchedulerMetrics
    endings: Endings
    promises: Promises
    recovery: Recovery
    containment: Containment
    controller: Controller


def assemble(
    state: SchedulerState,
    manager: KVCacheManager,
    clock: Clock,
    max_step_tokens: int,
    trees: SpeculationConfig | None,
    *,
    step_time: StepTimeEstimator | None = None,
    marks: StageMarks | None = None,
    seal: Seal | None = None,
    contains_faults: bool = True,
) -> Parts:
    """Build the parts of a scheduler.

    Args:
        trees: how token trees are drafted and verified; None: they are not.
        step_time: what is known of step times; None: a profile of this engine, or the prior.
        marks: where stages end; None: as the answers say.
        seal: proves who wrote the internal keys; None: that of the environment.
        contains_faults: see `Containment`.

    Raises:
        ConfigError, ProfileError: the configuration cannot be used.
    """
    vllm_config = state.vllm_config
    _compile_policies(drafts=trees is not None or trims(vllm_config))
    config = SLOConfig.from_additional_config(vllm_config.additional_config)
    obstacle = obstacle_of(vllm_config)
    warn_of(obstacle)
    can_promise = obstacle is None
    steps = _step_clock(state, clock, config, step_time)
    marks = marks or AnswerMarks(state.structured_output)
    intake = Intake(config, marks, seal, steps)
    lengths = OutputLengthPredictor(config.output_length_quantile)
    metrics = SchedulerMetrics(vllm_config.parallel_config.data_parallel_index)
    containment = Containment(clock, metrics, contains=contains_faults)
    tracker, blocks = RequestTracker(steps.now_s), KVBlocks(manager, state.connector)
    responsive = ResponsiveSteps(state, steps, RecentObjectives(), max_step_tokens)
    ordered = config.best_effort.order != "fcfs" and can_promise
    share = config.best_effort_token_share
    guard = StarvationGuard(config.ageing_s, share, keep_starved=not ordered)
    tenants = (
        TenantShares(tracker, metrics.speculation)
        if config.speculation.share == "tenants"
        else None
    )
    speculation: Speculation
    if trees is not None:
        speculation = Trees(
            *(state, tracker, blocks, steps, responsive),
            *(metrics.speculation, tenants, config, max_step_tokens),
        )
    elif trims(vllm_config) and can_promise:
        speculation = Chains(
            *(state, tracker, steps, responsive, metrics.speculation, tenants, config),
            max_step_tokens,
        )
    else:
        speculation = NoSpeculation(steps, state.num_spec_tokens)
    memory = ExpectedMemory(tracker, blocks, steps, lengths)
    workload = Workload(
        *(state, tracker, blocks, memory, steps, lengths, speculation, guard),
        max_step_tokens=max_step_tokens,
        chunk_tokens=vllm_config.scheduler_config.long_prefill_token_threshold,
        can_promise=can_promise,
    )
    quotas = (
        Quotas(state.requests, lengths, metrics, config, intake.classes, max_step_tokens)
        if config.quotas.on
        else None
    )
    best_effort = (
        BestEffort(state, tracker, blocks, steps, guard, lengths, metrics, config)
        if ordered
        else None
    )
    admission = AdmissionController(
        *(state, tracker, workload, steps, quotas, config), obstacle=obstacle
    )
    late = LatePromises(tracker, workload, steps, quotas, can_promise=can_promise)
    starts = OpportunisticStarts(state, tracker, workload, steps, speculation, guard)
    warm = WarmPrefixes(blocks.pool, int(config.sessions.kv_share * blocks.total))
    planner = StepPlanner(
        *(state, tracker, workload, warm, admission, starts, steps, guard, responsive),
        *(best_effort, config, speculation.draft_padding),
    )
    quotes = Quotes(
        *(state, tracker, workload, admission, steps, quotas, metrics, config),
        obstacle=obstacle,
    )
    sessions = SessionRounds(tracker, workload, blocks, steps, warm, metrics, config.sessions)
    spans = RequestSpans.from_config(vllm_config.observability_config)
    recorder = _recorder(vllm_config, config, clock, metrics)
    outcomes = Outcomes(tracker, sessions, steps, metrics, spans, recorder)
    reports = ReplicaReports(state, tracker, workload, quotes, steps, containment)
    endings, groups = Endings(state), ChoiceGroups()
    promises = Promises(tracker, steps, quotes, quotas, guard, groups, metrics, endings)
    recovery = Recovery(
        *(state, intake, tracker, promises, quotes, quotas, best_effort, sessions, guard, groups),
        *(recorder, endings),
    )
    controller = Controller(
        *(state, tracker, steps, intake, marks, workload, admission, late, planner, quotes, quotas),
        *(best_effort, sessions, guard, groups, promises, recovery, responsive, outcomes, recorder),
        *(reports, metrics, endings, containment),
        tpot_window=config.tpot_window_tokens,
        can_promise=can_promise,
    )
    return Parts(
        *(config, steps, tracker, blocks, workload, guard, marks, speculation, starts),
        *(admission, planner, quotas, quotes, best_effort, sessions, outcomes, recorder, reports),
        *(metrics, endings, promises, recovery, containment, controller),
    )


def _compile_policies(*, drafts: bool) -> None:
    """Compile all that steps, quotes and reports call, before the engine says that it is ready."""
    done = compile_package(*(("vllm_slo.core",) if drafts else WITHOUT_DRAFTS))
    logger.info("%d functions are compiled, in %.1f s.", done.functions, done.seconds)
    if done.folder is None:
        logger.warning(done.complaint())


def _recorder(
    vllm_config: VllmConfig, config: SLOConfig, clock: Clock, metrics: SchedulerMetrics
) -> RequestRecorder | None:
    if config.recording.path is None:
        return None
    series, window = metrics.recording(), config.tpot_window_tokens
    return RequestRecorder.of_engine(config.recording, vllm_config, clock, series, window)


def _step_clock(
    state: SchedulerState, clock: Clock, config: SLOConfig, step_time: StepTimeEstimator | None
) -> StepClock:
    estimator = step_time or StepTimeEstimator(
        find_profile(state.vllm_config, config.profile),
        horizon=horizon_of(config.tpot_window_tokens),
    )
    return StepClock(clock, estimator, config.margin_quantile, config.tpot_window_tokens)
