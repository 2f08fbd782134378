# SPDX-License-Identifier: Apache-2.0
"""The error of the simulator."""

from __future__ import annotations

from vllm_slo.errors import VllmSLOError


class SimulationError(VllmSLOError, ValueError):
    """Bad input, or a worker that died; one line names the field (or file and line) and the fix."""
