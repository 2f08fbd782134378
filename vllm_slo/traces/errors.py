# SPDX-License-Identifier: Apache-2.0
"""The errors of traces."""

from __future__ import annotations

from vllm_slo.errors import VllmSLOError


class TraceError(VllmSLOError, ValueError):
    """A trace or a file of rules cannot be used; one line names the file, line, field and fix."""


class RecordError(ValueError):
    """A mistake and its place in a file, without the file's name: ``line 2, field a: ...``."""


class FieldError(ValueError):
    """A mistake in one record, without its place: ``field a: ...``."""
