# SPDX-License-Identifier: Apache-2.0
"""Prometheus series of the scheduler, on vLLM's own ``/metrics``.

The scheduler lives in the engine's process, ``/metrics`` in the API server's. Each scheduler keeps
its series in a registry of its own and writes them, in Prometheus's text format, to a file in a
folder both know; ``FolderCollector`` in the API server reads the files when it is scraped. (With
several API servers vLLM turns on Prometheus's multiprocess mode, which shares the values itself.)
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from vllm_slo.core.lengths.forecast import ForecastError
from vllm_slo.core.sessions.stages import StageResult
from vllm_slo.core.speculation.proportional_fairness import ClientView
from vllm_slo.engine.speculation.servers_report import ServersReport

FOLDER_VARIABLE = "VLLMSLO_METRICS_DIR"
"""Environment variable that names the folder; child processes inherit it. (vLLM warns of variables
beginning with "VLLM_" that it does not know.)"""

PUBLISH_INTERVAL_S = 1.0
SETTLE_S = 0.2
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT_BUCKETS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
_RATIO_BUCKETS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)
_ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_TREE_BUCKETS = (1, 2, 3, 4, 5, 6, 8, 10, 13, 17)


def _kept(attained: bool | None) -> str:
    """The label ``attained``."""
    return "none" if attained is None else str(attained).lower()


class SchedulerMetrics:
    """The series of one scheduler. Labels are class names from the configuration, nothing wider.

    Those of token trees, and of the order of best effort, are there once something was said of
    them.

    Args:
        engine: index of the engine among data-parallel ones, the ``engine`` label.
    """

    def __init__(self, engine: int = 0) -> None:
        self.registry = CollectorRegistry()
        self._path = _metrics_file(engine)
        self._next_s = 0.0
        self._writing = threading.Lock()
        self._write_is_due = False
        self._folder_was_made = False
        self._engine = str(engine)
        self._trees: _TreeSeries | None = None
        self._drafts: _DraftSeries | None = None
        self._lengths: _LengthSeries | None = None
        self._order: _OrderSeries | None = None
        self._tenants: _ClientSeries | None = None
        self._servers: _ServerSeries | None = None
        self._promised: _Children[Counter] | None = None
        self._admissions = Counter(
            "vllm_slo:admissions",
            "Requests by admission outcome (promised, late, best_effort, best_effort_asked, "
            "declined) and the resource, or quota, that stood in the way.",
            ["engine", "slo_class", "outcome", "reason"],
            registry=self.registry,
        )
        self._quotes = Counter(
            "vllm_slo:quotes",
            "Quotes given, by whether the request would have been promised, and what stood in the "
            "way.",
            ["engine", "slo_class", "promised", "reason"],
            registry=self.registry,
        )
        self._finished = Counter(
            "vllm_slo:requests_finished",
            "Requests that ended by themselves, by whether they were promised and attained.",
            ["engine", "slo_class", "promised", "attained"],
            registry=self.registry,
        )
        self._broken = Counter(
            "vllm_slo:promises_broken",
            "Promises that could not be kept, by objective.",
            ["engine", "slo_class", "objective"],
            registry=self.registry,
        )
        self._tokens = Counter(
            "vllm_slo:generation_tokens",
            "Output tokens of finished requests.",
            ["engine", "slo_class", "attained"],
            registry=self.registry,
        )
        self._ttft = Histogram(
            "vllm_slo:ttft_seconds",
            "Time to first token since arrival at the server, by class.",
            ["engine", "slo_class"],
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self._tpot = Histogram(
            "vllm_slo:worst_window_tpot_seconds",
            "Time per output token over the worst window of 10 tokens, by class.",
            ["engine", "slo_class"],
            buckets=_TPOT_BUCKETS,
            registry=self.registry,
        )
        self._stages = Counter(
            "vllm_slo:stages_finished",
            "Stages of requests that ended by themselves, of requests with more than one stage, by "
            "number and whether they attained.",
            ["engine", "slo_class", "stage", "attained"],
            registry=self.registry,
        )
        self._sessions = Counter(
            "vllm_slo:sessions_finished",
            "Sessions that ended, by whether every round and the whole attained.",
            ["engine", "slo_class", "attained"],
            registry=self.registry,
        )
        self._step_ratio = Histogram(
            "vllm_slo:step_time_ratio",
            "Measured step time over predicted step time.",
            ["engine"],
            buckets=_RATIO_BUCKETS,
            registry=self.registry,
        ).labels(self._engine)
        self._predicted = Counter(
            "vllm_slo:step_predicted_seconds",
            "Predicted step time.",
            ["engine"],
            registry=self.registry,
        ).labels(self._engine)
        self._actual = Counter(
            "vllm_slo:step_seconds", "Measured step time.", ["engine"], registry=self.registry
        ).labels(self._engine)
        self._gauges = {
            name: Gauge(
                f"vllm_slo:{name}",
                text,
                ["engine"],
                multiprocess_mode="mostrecent",
                registry=self.registry,
            )
            for name, text in {
                "promised_requests": "Live requests whose objectives are promised.",
                "best_effort_requests": "Live requests with an SLO and no promise.",
                "best_effort_age_seconds": "Age of the oldest request with an SLO and no promise.",
                "step_time_margin_ratio": "Margin that promises keep on predicted step times.",
                "step_time_bias_ratio": "Correction learnt from live steps.",
                "sessions": "Sessions that have not ended.",
                "warm_prefix_blocks": "KV blocks of sessions that are evicted after all others.",
            }.items()
        }

    def admission(self, slo_class: str, outcome: str, reason: str = "") -> None:
        """Count what became of a request that asked for a promise."""
        self._admissions.labels(self._engine, slo_class, outcome, reason).inc()

    def quoted(self, slo_class: str, promised: bool, reason: str | None) -> None:
        """Count an answer to what a request would be promised."""
        said = str(promised).lower()
        self._quotes.labels(self._engine, slo_class, said, reason or "").inc()

    def broken(self, slo_class: str, objective: str) -> None:
        """Count a promise that could not be kept."""
        self._broken.labels(self._engine, slo_class, objective).inc()

    def finished(
        self,
        slo_class: str,
        attained: bool | None,
        *,
        promised: bool,
        tokens: int,
        ttft_s: float | None,
        tpot_s: float | None,
    ) -> None:
        """Count a request that ended by itself."""
        kept = _kept(attained)
        self._finished.labels(self._engine, slo_class, str(promised).lower(), kept).inc()
        self._tokens.labels(self._engine, slo_class, kept).inc(tokens)
        if ttft_s is not None:
            self._ttft.labels(self._engine, slo_class).observe(ttft_s)
        if tpot_s is not None:
            self._tpot.labels(self._engine, slo_class).observe(tpot_s)

    def stages(self, slo_class: str, results: Iterable[StageResult]) -> None:
        """Count the stages of a request that ended by itself; those without an objective, or that
        did not begin, not."""
        for number, one in enumerate(results, start=1):
            if one.attained is not None:
                kept = _kept(one.attained)
                self._stages.labels(self._engine, slo_class, str(number), kept).inc()

    def session(self, slo_class: str, attained: bool | None) -> None:
        """Count a session that ended."""
        self._sessions.labels(self._engine, slo_class, _kept(attained)).inc()

    def step(self, predicted_s: float, actual_s: float) -> None:
        """Compare one step's time with its prediction."""
        if predicted_s > 0 and actual_s > 0:
            self._step_ratio.observe(actual_s / predicted_s)
            self._predicted.inc(predicted_s)
            self._actual.inc(actual_s)

    def tenant(self, tenant: str, view: ClientView) -> None:
        """Note how a tenant's drafts fare."""
        if self._tenants is None:
            self._tenants = _ClientSeries("tenant", self._engine, self.registry)
        self._tenants.show(tenant, view)

    def promised_tokens(self, tenant: str, tokens: float) -> None:
        """Count what a promise that is over has cost its tenant."""
        if self._promised is None:
            series = Counter(
                "vllm_slo:tenant_promised_tokens",
                "Tokens of promises that are over, as they count against quotas: what a tight TPOT "
                "makes of a step makes its tokens dearer.",
                ["engine", "tenant"],
                registry=self.registry,
            )
            self._promised = _Children(series, self._engine)
        self._promised.of(tenant).inc(tokens)

    def draft_servers(self, report: ServersReport, clients: Mapping[str, ClientView]) -> None:
        """Count what the draft servers did in a step.

        Args:
            report: of the worker.
            clients: how each one's drafts fare.
        """
        if self._servers is None:
            self._servers = _ServerSeries(self._engine, self.registry)
        self._servers.show(report, clients)

    def drafts_verified(self, drafter: str, verified: int, accepted: int) -> None:
        """Count draft tokens of a draft server that was in a report before."""
        assert self._servers is not None
        self._servers.verified(drafter, verified, accepted)

    def foretold_length(self, source: str, error: ForecastError) -> None:
        """Compare the output length foretold for a request at first with what it was."""
        series = self._order_series()
        series.lengths.of(source).observe(error.ratio)
        series.length_errors.of(source).observe(error.relative)

    def foreseen_service(self, foreseen_s: float, taken_s: float) -> None:
        """Compare what a request was foreseen to take, once that was known, with what it took."""
        series = self._order_series()
        series.service.observe(foreseen_s / taken_s)
        series.service_error.observe(abs(foreseen_s - taken_s) / taken_s)

    def speculation_on(self, on: bool) -> None:
        """Whether trees are drafted: when that begins, and when the draft has failed for good.

        Written at once: an engine may have nothing to do for long after either.
        """
        self._tree_series().enabled.set(on)
        self.publish_soon()

    def tree_step(
        self,
        *,
        accepted: Sequence[int],
        verified_by_depth: Sequence[int],
        accepted_by_depth: Sequence[int],
        nodes_slo: int,
        nodes_throughput: int,
    ) -> None:
        """Count a step that verified trees.

        Args:
            accepted: accepted nodes of each tree.
            verified_by_depth: verified nodes of all trees; depth 1 at index 0.
            accepted_by_depth: likewise, accepted ones.
            nodes_slo: nodes chosen because an objective needed them.
            nodes_throughput: nodes chosen because there was room.
        """
        series = self._tree_series()
        for nodes in accepted:
            series.tokens.observe(nodes + 1)
        for known, counts in (
            (series.verified, verified_by_depth),
            (series.accepted, accepted_by_depth),
        ):
            for place, count in enumerate(counts):
                if count:
                    known.of(str(place + 1)).inc(count)
        for phase, count in (("slo", nodes_slo), ("throughput", nodes_throughput)):
            if count:
                series.chosen.of(phase).inc(count)

    def tree_times(self, *, draft_s: float, selection_s: float) -> None:
        """Count what one step spent on trees beside verifying them; parts of ``step_seconds``."""
        series = self._tree_series()
        series.draft.inc(draft_s)
        series.selection.inc(selection_s)

    def drafting(
        self,
        chain: str,
        passes: Iterable[tuple[str, float]],
        edges: Iterable[tuple[str, str, int, int]],
        similarities: Iterable[tuple[str, str, float]],
    ) -> None:
        """Count how one step drafted.

        Args:
            chain: the models at work, joined by ``>``.
            passes: (model, seconds) of each of their forward passes.
            edges: (drafter, verifier, guesses looked at, guesses accepted).
            similarities: (model, other model, SimScore), smoothed.
        """
        series = self._draft_series()
        series.chains.of(chain).inc()
        for model, seconds in passes:
            series.passes.of(model).inc()
            series.pass_seconds.of(model).inc(seconds)
        for drafter, verifier, tried, accepted in edges:
            series.tried.of(drafter, verifier).inc(tried)
            series.accepted.of(drafter, verifier).inc(accepted)
        for one, other, score in similarities:
            series.similarity.of(one, other).set(score)

    def draft_model_up(self, model: str, *, up: bool) -> None:
        """Whether a draft model can be put to work: when it is loaded, and when it has failed."""
        self._draft_series().up.of(model).set(up)
        self.publish_soon()

    def draft_lengths(self, slo_class: str, *, tokens: float, acceptance: float) -> None:
        """Note how many drafts a step verified of a request of this class on average, and how
        likely each is accepted."""
        if self._lengths is None:
            self._lengths = _LengthSeries(self._engine, self.registry)
        self._lengths.tokens.of(slo_class).set(tokens)
        self._lengths.acceptance.of(slo_class).set(acceptance)

    def _order_series(self) -> _OrderSeries:
        if self._order is None:
            self._order = _OrderSeries(self._engine, self.registry)
        return self._order

    def _draft_series(self) -> _DraftSeries:
        if self._drafts is None:
            self._drafts = _DraftSeries(self._engine, self.registry)
        return self._drafts

    def _tree_series(self) -> _TreeSeries:
        if self._trees is None:
            self._trees = _TreeSeries(self._engine, self.registry)
        return self._trees

    def due(self, now_s: float) -> bool:
        """Whether the file should be written again."""
        return now_s >= self._next_s

    def publish(self, now_s: float, **gauges: float) -> None:
        """Set the gauges and write the file."""
        self._next_s = now_s + PUBLISH_INTERVAL_S
        self._set(gauges)
        self._write()

    def publish_soon(self, **gauges: float) -> None:
        """Set the gauges and write the file a little later, in a thread of its own.

        For the last request of all: no step may follow whose end would publish, and its client is
        not to wait for the disk.
        """
        self._set(gauges)
        if self._path is None or self._write_is_due:
            return
        self._write_is_due = True
        timer = threading.Timer(SETTLE_S, self._write_now)
        timer.daemon = True
        timer.start()

    def _set(self, gauges: dict[str, float]) -> None:
        for name, value in gauges.items():
            self._gauges[name].labels(self._engine).set(value)

    def _write_now(self) -> None:
        self._write_is_due = False  # first, so that what changes from here on is written again
        self._write()

    def _write(self) -> None:
        """Write the file, atomically; a full disk costs metrics, not service, and only until it has
        room again."""
        with self._writing:
            if self._path is None:
                return
            try:
                if not self._folder_was_made:  # its owner removes it when the server ends
                    self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._folder_was_made = True
                draft = self._path.with_suffix(".tmp")
                draft.write_bytes(generate_latest(self.registry))
                draft.replace(self._path)
            except OSError:
                if not self._path.parent.is_dir():
                    self._path = None


_Series = TypeVar("_Series", Counter, Gauge, Histogram)


class _Children(Generic[_Series]):
    """Members of one series by its further labels; looking one up costs more than counting."""

    def __init__(self, series: _Series, engine: str) -> None:
        self._series: _Series = series
        self._engine = engine
        self._known: dict[tuple[str, ...], _Series] = {}

    def of(self, *labels: str) -> _Series:
        """The member with these labels."""
        found = self._known.get(labels)
        if found is None:
            found = self._known[labels] = self._series.labels(self._engine, *labels)
        return found


class _DraftSeries:
    """The series of draft models, which an engine without any does not have."""

    def __init__(self, engine: str, registry: CollectorRegistry) -> None:
        def counters(name: str, text: str, *labels: str) -> _Children[Counter]:
            name = f"vllm_slo:draft_{name}"
            return _Children(Counter(name, text, ["engine", *labels], registry=registry), engine)

        def gauges(name: str, text: str, *labels: str) -> _Children[Gauge]:
            series = Gauge(
                f"vllm_slo:draft_{name}",
                text,
                ["engine", *labels],
                multiprocess_mode="mostrecent",
                registry=registry,
            )
            return _Children(series, engine)

        edge = "drafter", "verifier"
        self.chains = counters(
            "chain_steps", "Steps by the chain of draft models that worked in them.", "chain"
        )
        self.passes = counters("passes", "Forward passes of a draft model.", "model")
        self.pass_seconds = counters(
            "pass_seconds", "Step time in which a draft model ran; over passes: its T_i.", "model"
        )
        self.tried = counters(
            "tried_tokens", "Guesses of one model that another one of its chain looked at.", *edge
        )
        self.accepted = counters(
            "accepted_tokens", "Guesses that the other model would have said itself.", *edge
        )
        self.similarity = gauges(
            "similarity_ratio",
            "SimScore: 1 less the total variation distance of what two models would say next.",
            *edge,
        )
        self.up = gauges("model_up", "1 while a draft model can be put to work.", "model")


class _LengthSeries:
    """The series of chains of drafts by vLLM's own methods, whose lengths are chosen by class."""

    def __init__(self, engine: str, registry: CollectorRegistry) -> None:
        def gauges(name: str, text: str) -> _Children[Gauge]:
            series = Gauge(
                f"vllm_slo:draft_{name}",
                text,
                ["engine", "slo_class"],
                multiprocess_mode="mostrecent",
                registry=registry,
            )
            return _Children(series, engine)

        self.tokens = gauges(
            "length_tokens", "Draft tokens verified of a request in the last step, on average."
        )
        self.acceptance = gauges(
            "acceptance_ratio", "Chance that a draft is accepted, those before it being accepted."
        )


class _ClientSeries:
    """The series of GoodSpeed's clients.

    Args:
        kind: of client, the label.
    """

    def __init__(self, kind: str, engine: str, registry: CollectorRegistry) -> None:
        def gauges(name: str, text: str) -> _Children[Gauge]:
            series = Gauge(
                f"vllm_slo:{kind}_{name}",
                text,
                ["engine", kind],
                multiprocess_mode="mostrecent",
                registry=registry,
            )
            return _Children(series, engine)

        self.acceptance = gauges("acceptance_ratio", "Smoothed chance that a draft is accepted.")
        self.granted = gauges("granted_tokens", "Draft tokens granted in the last round.")
        self.goodput = gauges("goodput_tokens", "Smoothed output tokens of a round.")
        self.utility = gauges("utility", "Logarithm of the smoothed goodput, weighted.")

    def show(self, client: str, view: ClientView) -> None:
        """Note how one is doing."""
        self.acceptance.of(client).set(view.acceptance)
        self.granted.of(client).set(view.granted)
        self.goodput.of(client).set(view.goodput)
        self.utility.of(client).set(view.utility)


class _ServerSeries:
    """The series of draft servers, which an engine without any does not have.

    The parts of a step are those of the paper's figure 3: receiving, sending, and as the rest of
    ``step_seconds`` verifying.
    """

    MOST_SHOWN = 256
    """Drafters that are shown, the first to come: one that is started anew may have a new name."""

    def __init__(self, engine: str, registry: CollectorRegistry) -> None:
        def counters(name: str, text: str, *labels: str) -> _Children[Counter]:
            name = f"vllm_slo:{name}"
            return _Children(Counter(name, text, ["engine", *labels], registry=registry), engine)

        self._clients = _ClientSeries("drafter", engine, registry)
        up = Gauge(
            "vllm_slo:drafter_up",
            "1 while a draft server is asked for drafts; 0 while it is gone or suspended.",
            ["engine", "drafter"],
            multiprocess_mode="mostrecent",
            registry=registry,
        )
        self._up = _Children(up, engine)
        self._dropped = counters(
            "drafter_dropped",
            "What of a draft server's was dropped, by reason; without a name: of who was not let "
            "in.",
            *("drafter", "reason"),
        )
        self._verified = counters(
            "drafter_verified_tokens",
            "Draft tokens of a draft server that were verified.",
            "drafter",
        )
        self._accepted = counters(
            "drafter_accepted_tokens",
            "Draft tokens of a draft server that were accepted.",
            "drafter",
        )
        self._wait = counters(
            "drafter_wait_seconds", "Step time in which a draft server was waited for.", "drafter"
        )
        self._receive = counters(
            "draft_receive_seconds", "Step time in which drafts were waited for."
        ).of()
        self._send = counters(
            "draft_send_seconds", "Step time in which draft servers were sent to."
        ).of()
        self._shown = [""]

    def show(self, report: ServersReport, clients: Mapping[str, ClientView]) -> None:
        """Count a step."""
        self._receive.inc(report.receive_s)
        self._send.inc(report.send_s)
        ready = {drafter.name: drafter.ready for drafter in report.drafters}
        fresh = [name for name in ready if name not in self._shown]
        self._shown += fresh[: self.MOST_SHOWN + 1 - len(self._shown)]
        for name in self._shown:
            if name:
                self._up.of(name).set(ready.get(name, False))
            if name in clients:
                self._clients.show(name, clients[name])
        for name, reason, count in report.dropped:
            if name in self._shown:
                self._dropped.of(name, reason).inc(count)
        for done in report.rounds:
            if done.drafter in self._shown:
                self._wait.of(done.drafter).inc(done.wait_s)

    def verified(self, drafter: str, verified: int, accepted: int) -> None:
        """Count drafts of one."""
        if drafter in self._shown:
            self._verified.of(drafter).inc(verified)
            self._accepted.of(drafter).inc(accepted)


class _OrderSeries:
    """The series of best effort in another order than that of arrival."""

    def __init__(self, engine: str, registry: CollectorRegistry) -> None:
        def ratios(
            name: str, text: str, *labels: str, buckets: Sequence[float] = _RATIO_BUCKETS
        ) -> Histogram:
            name = f"vllm_slo:{name}_ratio"
            return Histogram(name, text, ["engine", *labels], buckets=buckets, registry=registry)

        self.lengths = _Children(
            ratios("output_length", "Output tokens foretold over those that came.", "source"),
            engine,
        )
        self.length_errors = _Children(
            ratios(
                "output_length_error",
                "Distance between output tokens foretold and those that came, over the latter.",
                "source",
                buckets=_ERROR_BUCKETS,
            ),
            engine,
        )
        self.service = ratios(
            "foreseen_service", "Service that a request was foreseen to need over what it needed."
        ).labels(engine)
        self.service_error = ratios(
            "foreseen_service_error",
            "Distance between service foreseen and needed, over the latter.",
            buckets=_ERROR_BUCKETS,
        ).labels(engine)


class _TreeSeries:
    """The series of token trees, which an engine without a draft model does not have."""

    def __init__(self, engine: str, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["engine"], registry=registry).labels(engine)

        def counters(name: str, text: str, label: str) -> _Children[Counter]:
            return _Children(Counter(name, text, ["engine", label], registry=registry), engine)

        self.tokens = Histogram(
            "vllm_slo:tree_tokens",
            "Tokens that one tree yielded in one step: its accepted nodes and one more.",
            ["engine"],
            buckets=_TREE_BUCKETS,
            registry=registry,
        ).labels(engine)
        self.verified = counters(
            "vllm_slo:tree_verified_tokens", "Draft tokens verified, by depth in the tree.", "depth"
        )
        self.accepted = counters(
            "vllm_slo:tree_accepted_tokens", "Draft tokens accepted, by depth in the tree.", "depth"
        )
        self.chosen = counters(
            "vllm_slo:tree_chosen_tokens",
            "Draft tokens chosen to be verified: for an objective (slo), or because there was room "
            "(throughput).",
            "phase",
        )
        self.draft = counter(
            "vllm_slo:tree_draft_seconds", "Step time in which the draft model ran."
        )
        self.selection = counter(
            "vllm_slo:tree_selection_seconds", "Step time in which draft tokens were chosen."
        )
        self.enabled = Gauge(
            "vllm_slo:speculation_enabled",
            "1 while trees are drafted, 0 once the draft model has failed.",
            ["engine"],
            multiprocess_mode="mostrecent",
            registry=registry,
        ).labels(engine)


def _metrics_file(engine: int) -> Path | None:
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) / f"engine-{engine}-{os.getpid()}.prom" if folder else None


def choose_folder() -> Path:
    """Name a private folder for this process and its children; nothing is created yet."""
    folder = Path(tempfile.gettempdir()) / f"vllm-slo-{uuid.uuid4().hex}"
    os.environ[FOLDER_VARIABLE] = str(folder)
    return folder


def remove_folder(folder: Path) -> None:
    """Remove the folder and what the schedulers wrote."""
    shutil.rmtree(folder, ignore_errors=True)


class FolderCollector(Collector):
    """Gives a scrape whatever the schedulers have written; nothing before they have.

    A file that cannot be read is left out: vLLM's own series stand on the same page.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for path in sorted(self._folder.glob("*.prom")):
            try:
                families = list(text_string_to_metric_families(path.read_text(encoding="utf-8")))
            except (OSError, ValueError):
                continue
            for family in families:
                known = merged.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return merged.values()
