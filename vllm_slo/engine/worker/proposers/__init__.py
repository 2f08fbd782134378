# SPDX-License-Identifier: Apache-2.0
"""Proposers: they draft tokens."""

from vllm_slo.engine.worker.proposers.pool import TreeProposer
from vllm_slo.engine.worker.proposers.remote import RemoteProposer

__all__ = ["RemoteProposer", "TreeProposer"]
