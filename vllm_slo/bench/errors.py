# SPDX-License-Identifier: Apache-2.0
"""The one error of the bench: bad input, named after the option that carried it."""

from __future__ import annotations

from vllm_slo.errors import VllmSLOError


class BenchError(VllmSLOError):
    """Bad input to the bench or a server that cannot be used. ``option`` names the culprit."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option
