# SPDX-License-Identifier: Apache-2.0
"""The error of traces."""

from __future__ import annotations

from vllm_slo.errors import VllmSLOError


class TraceError(VllmSLOError, ValueError):
    """A trace or a file of rules cannot be used; one line names the file, line, field and fix."""
