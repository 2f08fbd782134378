# SPDX-License-Identifier: Apache-2.0
"""Routing by objectives for Ray Serve deployments that start their own engines.

Serve pickles this module by value, so that it holds no more than the class.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from vllm_slo.config.model import CONFIG_KEY, SLOConfig
from vllm_slo.core.jit import compile_package
from vllm_slo.errors import ConfigError
from vllm_slo.router.body_reader import Asked
from vllm_slo.router.serve_calls import read_call, read_http_call
from vllm_slo.router.serve_shadows import Call, ServeShadows, random_pair


class SLORequestRouter(RequestRouter):
    """Sends each request to a replica that can promise its objectives.

    It chooses as the front does (`core.routing.policy.route`), by what replicas told last in
    ``record_routing_stats`` (`engine.serving.serve_replica`) and by what this process has sent
    since. `router.serve_calls` says where objectives and prompts are looked for. Nobody is
    refused: if no replica can promise, the request goes where the queue is shortest, and the
    scheduler there serves or declines it as it asked. Without a state that is younger than
    ``routing.stale_after_s`` it takes the shorter queue of two replicas at random.
    """

    def initialize_state(self, slo_config: Any = None, **unknown: Any) -> None:
        """Serve calls this with ``request_router_kwargs``.

        With a mistake in them it logs an error and routes as without states: for a router that
        raises here, Serve lets all requests wait.

        Args:
            slo_config: the configuration that the engines have, as a mapping or the path of a YAML
                file. Its classes are used to read objectives, and of ``routing`` the fields
                ``policy``, ``max_hops`` and ``stale_after_s``; the others are the front's.
            unknown: a mistake.
        """
        self._rng = Random()
        self._logger = logging.getLogger("vllm_slo.serve")
        self._complained = False
        self._is_usable = True
        try:
            if unknown:
                raise ConfigError(f"{', '.join(unknown)}: unknown key; known: {CONFIG_KEY}")
            config = SLOConfig.from_additional_config({CONFIG_KEY: slo_config})
        except ConfigError as error:
            self._logger.error("request_router_kwargs: %s; objectives do not count", error)
            self._is_usable, config = False, SLOConfig()
        self._policy = config.http_policy()
        self._shadows = ServeShadows(config.routing, self._rng)
        # Compiled code is loaded beside the requests that come meanwhile: it takes a second or
        # more, and this process may be Serve's proxy.
        self._compiling = threading.Thread(
            target=compile_package, args=("vllm_slo.core.admission",), daemon=True
        )
        self._compiling.start()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        # Those that take more requests, as far as known; if there are none, Serve asks and waits.
        able = self.select_available_replicas(candidate_replicas) or candidate_replicas
        by_name = {replica.replica_id.unique_id: replica for replica in able}
        ranks = random_pair(list(by_name), self._rng)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            try:
                ranks = self._ranks(by_name, pending_request) or ranks
            except Exception:  # a request is never lost to a mistake here
                if not self._complained:
                    self._complained = True
                    self._logger.exception("a request is routed without its objectives")
        return [[by_name[name] for name in rank] for rank in ranks]

    def _ranks(
        self, by_name: Mapping[str, RunningReplica], pending: PendingRequest
    ) -> list[list[str]] | None:
        """Names of replicas in groups, best first; None: objectives do not count, or not yet."""
        if not self._is_usable or self._compiling.is_alive():
            return None
        for name, replica in by_name.items():
            self._shadows.hear(name, replica.routing_stats)
        asked, arrival_s = self._asked(pending), pending.created_at
        return self._shadows.ranks(_call(pending), asked, arrival_s, list(by_name), time.time())

    def _asked(self, pending: PendingRequest) -> Asked:
        if pending.metadata.is_http_request and len(pending.args) == 1:
            return read_http_call(pending.args[0], self._policy, pending.created_at)
        return read_call(pending.args, pending.kwargs, self._policy, pending.created_at)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._shadows.keep([replica.replica_id.unique_id for replica in replicas])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._shadows.keep([each.unique_id for each in self.curr_replicas])

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._shadows.accepted(_call(pending_request), replica_id.unique_id, time.time())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._shadows.completed(internal_request_id, replica_id.unique_id)

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: Any = None
    ) -> PendingRequest | None:
        """The request for which a replica was chosen.

        Serve's own look-up knows one request of each id. If a deployment calls another several
        times at once within one request, all but one of the calls would wait for ever.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                return pending
        return None


def _call(pending: PendingRequest) -> Call:
    return pending.metadata.internal_request_id, id(pending.metadata)
