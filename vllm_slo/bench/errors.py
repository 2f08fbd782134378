# SPDX-License-Identifier: Apache-2.0
"""The error of the bench."""

from __future__ import annotations

from vllm_slo.errors import VllmSLOError


class BenchError(VllmSLOError):
    """Bad input, or a server that cannot be used; ``option`` is the option at fault."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option
