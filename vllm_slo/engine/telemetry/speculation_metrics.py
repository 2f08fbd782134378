# SPDX-License-Identifier: Apache-2.0
"""Prometheus series of draft tokens: trees, chains, draft models, draft servers, tenants."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final, Protocol

from vllm_slo.core.speculation.proportional_fairness import ClientView
from vllm_slo.engine.telemetry.exposition import SeriesFile
from vllm_slo.engine.telemetry.series import SeriesMaker

__all__ = ["DraftServersStep", "SpeculationMetrics"]

MAX_DRAFTERS: Final = 256
"""Draft servers that have series, the first to come: one that is started anew may have a new
name."""
_TREE_BUCKETS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 13, 17)


class _Drafter(Protocol):
    """A draft server: whether it is asked for drafts."""

    @property
    def name(self) -> str: ...
    @property
    def ready(self) -> bool: ...


class _Round(Protocol):
    """How long a step waited for a draft server."""

    @property
    def drafter(self) -> str: ...
    @property
    def wait_s(self) -> float: ...


class DraftServersStep(Protocol):
    """What the draft servers did in a step; see `ServersReport`."""

    @property
    def drafters(self) -> Sequence[_Drafter]: ...
    @property
    def rounds(self) -> Sequence[_Round]: ...
    @property
    def dropped(self) -> Sequence[tuple[str, str, int]]: ...
    @property
    def send_s(self) -> float: ...
    @property
    def receive_s(self) -> float: ...


class SpeculationMetrics:
    """The series of drafts. Each group of series is exposed from its first value on.

    Args:
        file: is written soon where an engine may have nothing to do for long.
    """

    def __init__(self, make: SeriesMaker, file: SeriesFile) -> None:
        self._make = make
        self._file = file

    @cached_property
    def _trees(self) -> TreeSeries:
        return TreeSeries(self._make)

    @cached_property
    def _models(self) -> DraftModelSeries:
        return DraftModelSeries(self._make)

    @cached_property
    def _lengths(self) -> DraftLengthSeries:
        return DraftLengthSeries(self._make)

    @cached_property
    def _tenants(self) -> ClientSeries:
        return ClientSeries("tenant", self._make)

    @cached_property
    def _servers(self) -> DraftServerSeries:
        return DraftServerSeries(self._make)

    def tenant(self, tenant: str, view: ClientView) -> None:
        """Note how a tenant's drafts fare."""
        self._tenants.show(tenant, view)

    def draft_servers(self, step: DraftServersStep, clients: Mapping[str, ClientView]) -> None:
        """Count what the draft servers did in a step.

        Args:
            step: as the worker reports it.
            clients: how each one's drafts fare.
        """
        self._servers.show(step, clients)

    def drafts_verified(self, drafter: str, verified: int, accepted: int) -> None:
        """Count draft tokens of a draft server that was in a report before."""
        self._servers.verified(drafter, verified, accepted)

    def speculation_on(self, on: bool) -> None:
        """Whether trees are drafted: when that begins, and when the draft has failed for good.

        Written at once: an engine may have nothing to do for long after either.
        """
        self._trees.enabled.set(on)
        self._file.write_soon()

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
            nodes_throughput: nodes chosen because there was headroom.
        """
        trees = self._trees
        for nodes in accepted:
            trees.tokens.observe(nodes + 1)
        for series, counts in (
            (trees.verified, verified_by_depth),
            (trees.accepted, accepted_by_depth),
        ):
            for depth, count in enumerate(counts, start=1):
                if count:
                    series.of(str(depth)).inc(count)
        for phase, count in (("slo", nodes_slo), ("throughput", nodes_throughput)):
            if count:
                trees.chosen.of(phase).inc(count)

    def tree_times(self, *, draft_s: float, selection_s: float) -> None:
        """Count what one step spent on trees beside verifying them; parts of ``step_seconds``."""
        self._trees.draft.inc(draft_s)
        self._trees.selection.inc(selection_s)

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
        models = self._models
        models.chains.of(chain).inc()
        for model, seconds in passes:
            models.passes.of(model).inc()
            models.pass_seconds.of(model).inc(seconds)
        for drafter, verifier, tried, accepted in edges:
            models.tried.of(drafter, verifier).inc(tried)
            models.accepted.of(drafter, verifier).inc(accepted)
        for drafter, verifier, score in similarities:
            models.similarity.of(drafter, verifier).set(score)

    def draft_model_up(self, model: str, *, up: bool) -> None:
        """Whether a draft model can be put to work: when it is loaded, and when it has failed."""
        self._models.up.of(model).set(up)
        self._file.write_soon()

    def draft_lengths(self, slo_class: str, *, tokens: float, acceptance: float) -> None:
        """Note the draft tokens that a step verified of a request of this class on average, and
        the chance that each is accepted."""
        self._lengths.tokens.of(slo_class).set(tokens)
        self._lengths.acceptance.of(slo_class).set(acceptance)


class TreeSeries:
    """The series of token trees, which an engine without a draft model does not have."""

    def __init__(self, make: SeriesMaker) -> None:
        self.tokens = make.histogram(
            "vllm_slo:tree_tokens",
            "Tokens that one tree yielded in one step: its accepted nodes and one more.",
            buckets=_TREE_BUCKETS,
        ).of()
        self.verified = make.counter(
            "vllm_slo:tree_verified_tokens", "Draft tokens verified, by depth in the tree.", "depth"
        )
        self.accepted = make.counter(
            "vllm_slo:tree_accepted_tokens", "Draft tokens accepted, by depth in the tree.", "depth"
        )
        self.chosen = make.counter(
            "vllm_slo:tree_chosen_tokens",
            "Draft tokens chosen to be verified: for an objective (slo), or because there was room "
            "(throughput).",
            "phase",
        )
        self.draft = make.counter(
            "vllm_slo:tree_draft_seconds", "Step time in which the draft model ran."
        ).of()
        self.selection = make.counter(
            "vllm_slo:tree_selection_seconds", "Step time in which draft tokens were chosen."
        ).of()
        self.enabled = make.gauge(
            "vllm_slo:speculation_enabled",
            "1 while trees are drafted, 0 once the draft model has failed.",
        ).of()


class DraftModelSeries:
    """The series of draft models, which an engine without any does not have."""

    def __init__(self, make: SeriesMaker) -> None:
        edge = "drafter", "verifier"
        self.chains = make.counter(
            "vllm_slo:draft_chain_steps",
            "Steps by the chain of draft models that worked in them.",
            "chain",
        )
        self.passes = make.counter(
            "vllm_slo:draft_passes", "Forward passes of a draft model.", "model"
        )
        self.pass_seconds = make.counter(
            "vllm_slo:draft_pass_seconds",
            "Step time in which a draft model ran; over passes: its T_i.",
            "model",
        )
        self.tried = make.counter(
            "vllm_slo:draft_tried_tokens",
            "Guesses of one model that another one of its chain looked at.",
            *edge,
        )
        self.accepted = make.counter(
            "vllm_slo:draft_accepted_tokens",
            "Guesses that the other model would have said itself.",
            *edge,
        )
        self.similarity = make.gauge(
            "vllm_slo:draft_similarity_ratio",
            "SimScore: 1 less the total variation distance of what two models would say next.",
            *edge,
        )
        self.up = make.gauge(
            "vllm_slo:draft_model_up", "1 while a draft model can be put to work.", "model"
        )


class DraftLengthSeries:
    """The series of chains of drafts by vLLM's own methods, whose lengths are chosen by class."""

    def __init__(self, make: SeriesMaker) -> None:
        self.tokens = make.gauge(
            "vllm_slo:draft_length_tokens",
            "Draft tokens verified of a request in the last step, on average.",
            "slo_class",
        )
        self.acceptance = make.gauge(
            "vllm_slo:draft_acceptance_ratio",
            "Chance that a draft is accepted, those before it being accepted.",
            "slo_class",
        )


class ClientSeries:
    """The series of GoodSpeed's clients.

    Args:
        kind: of client, the label: ``tenant`` or ``drafter``.
    """

    def __init__(self, kind: str, make: SeriesMaker) -> None:
        name = f"vllm_slo:{kind}"
        self._acceptance = make.gauge(
            f"{name}_acceptance_ratio", "Smoothed chance that a draft is accepted.", kind
        )
        self._granted = make.gauge(
            f"{name}_granted_tokens", "Draft tokens granted in the last round.", kind
        )
        self._goodput = make.gauge(
            f"{name}_goodput_tokens", "Smoothed output tokens of a round.", kind
        )
        self._utility = make.gauge(
            f"{name}_utility", "Logarithm of the smoothed goodput, weighted.", kind
        )

    def show(self, client: str, view: ClientView) -> None:
        """Note how a client's drafts fare."""
        self._acceptance.of(client).set(view.acceptance)
        self._granted.of(client).set(view.granted)
        self._goodput.of(client).set(view.goodput)
        self._utility.of(client).set(view.utility)

    def gone(self, client: str) -> None:
        """A client is gone: it is granted nothing, and what its drafts were like is not known."""
        self._granted.of(client).set(0)
        for gauge in (self._acceptance, self._goodput, self._utility):
            gauge.of(client).set(math.nan)


class DraftServerSeries:
    """The series of draft servers, which an engine without any does not have.

    The parts of a step are those of the paper's figure 3: receiving, sending, and as the rest of
    ``step_seconds`` verifying.
    """

    def __init__(self, make: SeriesMaker) -> None:
        self._clients = ClientSeries("drafter", make)
        self._up = make.gauge(
            "vllm_slo:drafter_up",
            "1 while a draft server is asked for drafts; 0 while it is gone or suspended.",
            "drafter",
        )
        self._dropped = make.counter(
            "vllm_slo:drafter_dropped",
            "What of a draft server's was dropped, by reason; without a name: of who was not let "
            "in.",
            *("drafter", "reason"),
        )
        self._verified = make.counter(
            "vllm_slo:drafter_verified_tokens",
            "Draft tokens of a draft server that were verified.",
            "drafter",
        )
        self._accepted = make.counter(
            "vllm_slo:drafter_accepted_tokens",
            "Draft tokens of a draft server that were accepted.",
            "drafter",
        )
        self._wait = make.counter(
            "vllm_slo:drafter_wait_seconds",
            "Step time in which a draft server was waited for.",
            "drafter",
        )
        self._receive = make.counter(
            "vllm_slo:draft_receive_seconds", "Step time in which drafts were waited for."
        ).of()
        self._send = make.counter(
            "vllm_slo:draft_send_seconds", "Step time in which draft servers were sent to."
        ).of()
        self._shown = [""]
        self._with_view: set[str] = set()

    def show(self, step: DraftServersStep, clients: Mapping[str, ClientView]) -> None:
        """Count a step."""
        self._receive.inc(step.receive_s)
        self._send.inc(step.send_s)
        ready = {drafter.name: drafter.ready for drafter in step.drafters}
        fresh = [name for name in ready if name not in self._shown]
        self._shown += fresh[: MAX_DRAFTERS + 1 - len(self._shown)]
        for name in self._shown:
            if name:
                self._up.of(name).set(ready.get(name, False))
            if name in clients:
                self._clients.show(name, clients[name])
                self._with_view.add(name)
            elif name in self._with_view:
                self._clients.gone(name)
                self._with_view.remove(name)
        for name, reason, count in step.dropped:
            if name in self._shown:
                self._dropped.of(name, reason).inc(count)
        for done in step.rounds:
            if done.drafter in self._shown:
                self._wait.of(done.drafter).inc(done.wait_s)

    def verified(self, drafter: str, verified: int, accepted: int) -> None:
        """Count draft tokens of a draft server."""
        if drafter in self._shown:
            self._verified.of(drafter).inc(verified)
            self._accepted.of(drafter).inc(accepted)
