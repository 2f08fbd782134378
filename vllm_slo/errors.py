# SPDX-License-Identifier: Apache-2.0
"""The exceptions that vllm-slo raises; every one of them derives from `VllmSLOError`."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "ForbiddenSLOError",
    "IncompatibleVLLMError",
    "InvalidSLOError",
    "ProfileError",
    "VllmSLOError",
]


class VllmSLOError(Exception):
    """Root of every error raised by vllm-slo."""


class InvalidSLOError(VllmSLOError, ValueError):
    """A request holds an SLO that is not valid.

    `str(error)` is one line, ``<field>: <problem>; <fix>``. The text is the same for every carrier
    (Python, body, `vllm_xargs`, header, `service_tier`).

    Attributes:
        field: name of the offending field, for example ``ttft_ms``.
        problem: what is wrong, with the offending value cut to 80 characters.
        fix: what to send instead.
    """

    def __init__(self, field: str, problem: str, fix: str) -> None:
        super().__init__(field, problem, fix)
        self.field = field
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.fix}"


class ForbiddenSLOError(InvalidSLOError):
    """A request asks for a valid SLO that its API key may not have; 403 over HTTP."""


class ConfigError(VllmSLOError, ValueError):
    """The operator's configuration cannot be used; the text names the file, line and key."""


class ProfileError(VllmSLOError):
    """A step-time profile is broken or belongs to another model, device or vLLM version."""


class IncompatibleVLLMError(VllmSLOError, ImportError):
    """The installed vLLM lacks a seam that vllm-slo needs."""
