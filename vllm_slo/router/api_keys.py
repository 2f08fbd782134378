# SPDX-License-Identifier: Apache-2.0
"""The API keys that a front accepts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

API_KEY_ENV: Final = "VLLM_API_KEY"


def api_keys_in(environment: Mapping[str, str], variable: str) -> list[str]:
    """API keys in a variable; vLLM's variable holds one, any other may hold several."""
    value = environment.get(variable, "")
    keys = [value] if variable == API_KEY_ENV else value.split(",")
    return [key for key in keys if key]


def api_key_digest(key: str) -> str:
    """The digest of an API key; the front does not get the key itself."""
    return hashlib.sha256(key.encode()).hexdigest()
