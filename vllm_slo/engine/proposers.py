# SPDX-License-Identifier: Apache-2.0
"""The proposers under the names that ``--speculative-config`` has.

They live in `vllm_slo.engine.worker.proposers`.
"""

from vllm_slo.engine.worker.proposers import RemoteProposer, TreeProposer

__all__ = ["RemoteProposer", "TreeProposer"]
