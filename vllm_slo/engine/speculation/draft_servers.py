# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of draft servers: which drafts for whom, and how much (GoodSpeed).

The clients of the gradient scheduler (`core.speculation.proportional_fairness`) are the draft
servers. Each request that decodes belongs to one of them and stays there as long as it is ready. In
each step the draft tokens that promises need are granted first, the rest so that the sum of the
logarithms of the clients' goodputs grows fastest; a client counts as often as it has requests, so
that a request counts alike wherever it is drafted for.

Under exact match a draft x is accepted with p(x), the served model's probability; whether the
drafts that were looked at were accepted is a sample of that, and is what a_i is learnt from. Drafts
that came and were not verified, as others were likelier, count as what they were likely to be: else
nothing would be learnt of a drafter that is not worth it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_slo.config.speculation import SpeculationConfig
from vllm_slo.core.arrays import Bools, Floats, Ints, Parents
from vllm_slo.core.batching.decodes import limit_of
from vllm_slo.core.speculation.calibration import DraftCalibration
from vllm_slo.core.speculation.candidate_trees import tpot_needs
from vllm_slo.core.speculation.chain_forecast import DraftLoad
from vllm_slo.core.speculation.draft_rounds import Crowd, DraftTimes, plan_round
from vllm_slo.core.speculation.model_chain import Plan
from vllm_slo.core.speculation.proportional_fairness import GradientScheduler
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY, DecodeView
from vllm_slo.engine.compat.scheduler_state import SchedulerState
from vllm_slo.engine.scheduling import request_views
from vllm_slo.engine.scheduling.decode_model import TokenYields
from vllm_slo.engine.scheduling.request_tracker import RequestTracker
from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.engine.scheduling.step_clock import StepClock
from vllm_slo.engine.speculation.draft_models import Candidate
from vllm_slo.engine.speculation.messages import NO_DRAFT, DraftingReport, DraftTrees, Grant
from vllm_slo.engine.speculation.servers_report import ServersReport
from vllm_slo.engine.speculation.tenants import Verified
from vllm_slo.engine.telemetry.speculation_metrics import SpeculationMetrics


@dataclass(slots=True)
class _Drafter:
    """One draft server, as it has shown itself.

    Attributes:
        place: its number; whose guesses a candidate's are.
        calibration: what its probabilities are worth.
        ready: whether it would be asked now.
        max_sessions: requests that it drafts for at most.
        max_model_len: tokens of a text and its draft.
    """

    place: int
    calibration: DraftCalibration
    times: DraftTimes
    ready: bool = False
    max_sessions: int = 0
    max_model_len: int = 0


class DraftServers:
    """Follows the draft servers of one engine; see `engine.speculation.draft_models.Drafts`.

    Args:
        yields: tokens that the next step is expected to yield.
        max_step_tokens: tokens of one step at most.

    Attributes:
        clients: the gradient scheduler's state of each.
        plan: what is drafted after the step that is being planned.
    """

    out = False

    def __init__(
        self,
        state: SchedulerState,
        tracker: RequestTracker,
        clock: StepClock,
        yields: TokenYields,
        metrics: SpeculationMetrics,
        config: SpeculationConfig,
        max_step_tokens: int,
    ) -> None:
        self._state = state
        self._tracker = tracker
        self._clock = clock
        self._yields = yields
        self._metrics = metrics
        self._max_step_tokens = max_step_tokens
        self.config = config
        self.clients = GradientScheduler()
        self.plan = NO_DRAFT
        self._drafters: dict[str, _Drafter] = {}
        self._places = itertools.count()
        self._homes: dict[str, str] = {}  # request -> drafter
        self._asked: dict[str, str] = {}  # request -> drafter that was asked in the last step
        self._authors: dict[str, str] = {}  # request -> drafter of its candidate
        self._likely: dict[str, list[float]] = {}  # drafter -> chances of its first tokens
        self._budget = 0
        self._least: dict[str, int] = {}
        one = np.ones(1)
        crowd = Crowd(one, one / 2.0, one[:, None] * 1e-6, np.ones(1, dtype=np.int64), one, 1.0)
        plan_round(crowd, StepTimeModel.prior(), room=1)  # compiles it now

    # What is to be drafted.

    def nothing(self) -> None:
        self.plan = NO_DRAFT
        self._clock.drafting(0.0, 0.0)

    def decide(self, load: DraftLoad, model: StepTimeModel) -> None:
        requests = self._at_home(self._state.running)
        if not requests or not load.deepest:
            self.nothing()
            return
        found = plan_round(
            self._crowd(requests, load),
            model,
            room=max(self._max_step_tokens - load.active, 0),
            context_tokens=load.context,
            shallowest=load.min_depth,
        )
        names = [request.request_id for request in requests]
        self._budget = found.budget
        self._least = dict(zip(names, found.least.tolist(), strict=True))
        depth = int(found.most.max())
        self.plan = Plan(depth=depth, drafting_s=found.wait_s, requests=len(requests))
        self._clock.drafting(found.wait_s, 0.0)

    def grants(self, requests: Sequence[Request]) -> dict[str, Grant]:
        found = self._at_home(requests) if self.plan.depth else []
        if not found:
            return {}
        homes = [self._homes[request.request_id] for request in found]
        granted = self.clients.grants(
            homes,
            min(self._budget, self._max_step_tokens - len(requests)),
            least=[self._least.get(request.request_id, 0) for request in found],
            most=self._within(found, self.plan),
        )
        grants = {
            request.request_id: Grant(home, tokens)
            for request, home, tokens in zip(found, homes, granted.tolist(), strict=True)
            if tokens
        }
        self._asked = {name: grant.drafter for name, grant in grants.items()}
        return grants

    def deadline_s(self, output: SchedulerOutput) -> float:
        """As `Drafts.deadline_s`: what leaves time to keep the step's promises, but no less than
        drafts are expected to take."""
        context = sum(request.num_computed_tokens for request in self._state.running)
        tokens = output.total_num_scheduled_tokens
        verifying_s = self._clock.verifying_model.predict_s(tokens, context)
        start_s = self._clock.start_s
        limits_s = (
            limit_of(start_s, self._view(tracked, start_s), 0.0)
            for tracked in self._tracker
            if tracked.promised and tracked.decodes
        )
        left_s = max(min(limits_s, default=INFINITY) - verifying_s, self.plan.drafting_s)
        return min(self.config.draft_deadline_ms * 1e-3, left_s)

    def _crowd(self, requests: Sequence[Request], load: DraftLoad) -> Crowd:
        """Those who decode, or soon will."""
        homes = [self._homes[request.request_id] for request in requests]
        for name, count in Counter(homes).items():
            self.clients.add(name, float(count))
        return Crowd(
            self.clients.gradient(homes),
            self.clients.acceptances(homes),
            np.stack([self._drafters[home].times.ahead_s(load.deepest) for home in homes]),
            self._most(requests, load.deepest),
            np.asarray([self._pace_s(request) for request in requests]),
            self._clock.verifying_model.predict_s(load.active, load.context),
        )

    def _within(self, requests: Sequence[Request], plan: Plan) -> Ints:
        """Draft tokens of each that could be of use and are there in time."""
        in_time = [
            self._home_of(request).times.within(plan.drafting_s, plan.depth) for request in requests
        ]
        return np.minimum(self._most(requests, plan.depth), in_time)

    def _most(self, requests: Sequence[Request], deepest: int) -> Ints:
        """Draft tokens of each that could be of use."""
        longest = self._state.max_model_len
        found = []
        for request in requests:
            lacked = request.max_tokens - request.num_output_tokens - 2  # this step's, the next's
            room = min(longest, self._home_of(request).max_model_len) - request.num_tokens - 1
            found.append(max(min(deepest, self.config.max_nodes, lacked, room), 0))
        return np.asarray(found, dtype=np.int64)

    def _pace_s(self, request: Request) -> float:
        """Seconds per token that a promise asks of a request that decodes."""
        tracked = self._tracker.get(request.request_id)
        if tracked is None or not (tracked.promised and tracked.decodes):
            return INFINITY
        if tracked.tpot_s == INFINITY:
            return INFINITY
        start_s = self._clock.start_s
        left = max(request.max_tokens - request.num_output_tokens, 1)
        return tpot_needs(self._view(tracked, start_s), start_s, left).pace_s

    def _view(self, tracked: SLORequest, start_s: float) -> DecodeView:
        """A decoding request before a step, what the step is expected to yield of it counted."""
        expected = self._yields.next_step.get(tracked.request.request_id, 1.0)
        return request_views.decode_view(tracked, start_s, self._clock.strength, expected)

    # Who drafts for whom.

    def _at_home(self, requests: Iterable[Request]) -> list[Request]:
        """The requests that have a drafter which is ready, after those that lack one got one."""
        sessions = Counter(self._homes.values())
        found = []
        for request in requests:
            name = request.request_id
            home = self._homes.get(name)
            if home is None or not self._takes(home, request):
                home = self._emptiest(request, sessions)
                if home is None:
                    self._homes.pop(name, None)
                    continue
                self._homes[name] = home
                sessions[home] += 1
            found.append(request)
        return found

    def _home_of(self, request: Request) -> _Drafter:
        return self._drafters[self._homes[request.request_id]]

    def _takes(self, name: str, request: Request) -> bool:
        """Whether a drafter is ready and its texts can be as long."""
        drafter = self._drafters.get(name)
        return (
            drafter is not None and drafter.ready and request.num_tokens + 1 < drafter.max_model_len
        )

    def _emptiest(self, request: Request, sessions: Counter[str]) -> str | None:
        """The drafter that has most room left, of its own size; None: nobody has any."""
        loads = {
            name: sessions[name] / drafter.max_sessions
            for name, drafter in self._drafters.items()
            if self._takes(name, request)
        }
        found = min(loads, key=loads.__getitem__, default=None)
        return found if found is not None and loads[found] < 1.0 else None

    def author(self, _drafts: DraftTrees, request_id: str) -> int:
        """The draft server that was asked for them; -1 where it is not known any more."""
        name = self._authors[request_id] = self._asked[request_id]
        return self._drafters[name].place if name in self._drafters else -1

    def forget(self, request_id: str) -> None:
        self._homes.pop(request_id, None)
        self._authors.pop(request_id, None)

    # What drafts are worth, and what they take.

    @property
    def typical(self) -> Floats:
        ready = [name for name, drafter in self._drafters.items() if drafter.ready]
        depths = np.arange(1.0, self.config.max_depth + 1.0)[:, None]
        if not ready:
            return np.zeros_like(depths)
        found: Floats = (self.clients.acceptances(ready) ** depths).mean(axis=1, keepdims=True)
        return found

    def ahead_s(self, _requests: int) -> Floats:
        """As `Drafts.ahead_s`: until the slowest draft server that is ready is done; infinite
        without one."""
        depth = self.config.max_depth
        times = [d.times.ahead_s(depth) for d in self._drafters.values() if d.ready]
        found: Floats = np.max(times, axis=0) if times else np.full(depth, INFINITY)
        return found

    def chances(
        self, found: Sequence[Candidate], offsets: Ints, parents: Parents, said: Floats
    ) -> tuple[Floats, Bools]:
        paths, best = np.empty(len(said)), np.empty(len(said), dtype=np.bool_)
        self._likely = {}
        start = 0
        for place, group in itertools.groupby(found, key=lambda candidate: candidate.model):
            own = offsets[start : (start := start + len(list(group))) + 1]
            nodes = slice(int(own[0]), int(own[-1]))
            name = next((n for n, d in self._drafters.items() if d.place == place), "")
            paths[nodes], best[nodes] = self._calibration(name).path_probabilities(
                own - own[0], parents[nodes], said[nodes]
            )
            self._likely[name] = paths[own[:-1]].tolist()
        return paths, best

    def _calibration(self, name: str) -> DraftCalibration:
        known = self._drafters.get(name)
        return DraftCalibration(self.config.max_depth) if known is None else known.calibration

    def accepted(self, models: Ints, depths: Ints, said: Floats, hit: Bools, best: Bools) -> None:
        for name, drafter in self._drafters.items():
            of = models == drafter.place
            if of.any():
                self._calibration(name).observe(depths[of], said[of], hit[of], best[of])

    def observe(self, verified: Iterable[Verified]) -> None:
        metrics, ratios = self._metrics, dict[str, list[float]]()
        tokens: Counter[str] = Counter()
        looked_at: Counter[str] = Counter()
        taken: Counter[str] = Counter()
        drafted = Counter({client: len(chances) for client, chances in self._likely.items()})
        for name, offered, accepted in verified:
            client = self._authors.get(name) if offered else self._homes.get(name)
            if client is not None and client in self._drafters:
                hits = ratios.setdefault(client, [])
                hits += [1.0] * accepted + [0.0] * (accepted < offered)
                tokens[client] += accepted + 1
                looked_at[client] += offered
                taken[client] += accepted
                drafted[client] -= offered > 0
        for client, hits in ratios.items():
            passed_over = sorted(self._likely.get(client, ()))[: max(drafted[client], 0)]
            self.clients.observe(client, [*hits, *passed_over], tokens[client])
            if looked_at[client]:
                metrics.drafts_verified(client, looked_at[client], taken[client])
        self._likely = {}

    def learn(
        self,
        _plan: Plan,
        report: DraftingReport,
        _given: Sequence[tuple[int, int]],
        *,
        verified: int,
        quiet: bool,
    ) -> None:
        if report.servers is None:
            return
        self._meet(report.servers)
        asked = {done.drafter for done in report.servers.rounds}
        for done in report.servers.rounds:
            if done.drafter in self._drafters:
                times = self._drafters[done.drafter].times
                times.observe(done.wait_s, done.draft_s, done.tokens)
        for name, drafter in self._drafters.items():
            if name not in asked:
                drafter.times.rest()
        self._metrics.draft_servers(report.servers, self.clients.views())

    def _meet(self, report: ServersReport) -> None:
        """Who is there now; who is known to the worker no more is forgotten."""
        for view in report.drafters:
            if view.name not in self._drafters:
                calibration = DraftCalibration(self.config.max_depth)
                self.clients.add(view.name)
                self._drafters[view.name] = _Drafter(next(self._places), calibration, DraftTimes())
            known = self._drafters[view.name]
            known.ready = view.ready
            known.max_sessions, known.max_model_len = view.max_sessions, view.max_model_len
        for name in self._drafters.keys() - {view.name for view in report.drafters}:
            del self._drafters[name]
            self.clients.forget(name)
