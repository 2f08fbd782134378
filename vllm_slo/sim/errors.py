# SPDX-License-Identifier: Apache-2.0
"""The one error of the simulator: bad input, or a simulation that cannot go on."""

from __future__ import annotations

from vllm_slo.errors import VllmSLOError


class SimulationError(VllmSLOError, ValueError):
    """Bad input to the simulator; one line that names the field (or file and line) and the fix."""
