# SPDX-License-Identifier: Apache-2.0
"""The calls into the policies that no virtual engine makes while it serves, by the function that
has them in it, and where they are tried instead."""

from __future__ import annotations

AT_START = (
    "composition:_compile_policies",
    "composition:_step_clock",
    "composition:assemble",
    "scheduler:",
    "scheduler:Scheduler.__init__",
    "scheduling.admission:AdmissionController.__init__",
    "scheduling.best_effort:BestEffort.__init__",
    "scheduling.late_promises:LatePromises.__init__",
    "scheduling.quotas:Quotas.__init__",
    "scheduling.quotes:Quotes.__init__",
    "scheduling.replica_reports:ReplicaReports.__init__",
    "scheduling.sessions:SessionRounds.__init__",
    "scheduling.step_clock:StepClock.__init__",
    "speculation.chain_costs:ChainCosts.__init__",
    "speculation.chain_lengths:ChainLengths.__init__",
    "speculation.draft_link:DraftLink.__init__",
    "speculation.draft_models:DraftModels.__init__",
    "speculation.draft_servers:DraftServers.__init__",
    "speculation.messages:",
    "speculation.tenants:TenantShares.__init__",
    "speculation.tree_limits:TreeLimits.__init__",
    "speculation.verifying_time:VerifyingTime.__init__",
    "telemetry.request_recorder:RequestRecorder.of_engine",
    "telemetry.state:StatePublisher.__init__",
    "worker.proposers.warm_up:draft_in_every_way",
)
"""An engine does not start if one of these fails; it has no streams yet."""

ELSEWHERE = (
    "speculation.draft_engine:DraftEngine.__init__",
    "speculation.draft_engine:DraftEngine.draft",
    "speculation.trees:Trees._measured",
)
"""In a process of another command: a draft server, without which an engine goes on, and a
measurement, which ends."""

PROFILE = (
    *("serving.benefit_words:", "serving.draft_recording:", "serving.profile"),
    "serving.speculation_measurement:",
)
"""Modules of ``vllm-slo profile``, which ends if one of these calls fails."""

FRONT = ("http.front_access:", "http.state_feed:")
"""Modules that serve a front, in the API server's process: ``http/test_front_access.py``. If one of
these calls fails, a state stream ends, which the front opens again, or one request."""

LINK = ("speculation.draft_link:", "speculation.draft_peer:", "worker.proposers.remote:")
"""Modules of the link to draft servers: ``worker/test_link_faults.py``, over real sockets."""

VERIFYING = (
    "worker.model_runner:TreeRunner._loose_tokens",
    "worker.tree_attention.plan:node_positions",
    "worker.tree_attention.plan:plan_masks",
    "worker.tree_attention.plan:plan_rows",
    "worker.tree_sampling:_Rows.__init__",
    "worker.tree_sampling:sample",
)
"""What a worker does with trees: ``serving/test_engine_faults.py``, in real engines."""
