# SPDX-License-Identifier: Apache-2.0
"""The configuration of a front, from its command line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from vllm_slo.config.model import CONFIG_KEY, SLOConfig
from vllm_slo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """The configuration of a front.

    Attributes:
        api_keys: SHA-256 of each accepted key, lower-case hexadecimal; empty: no key is needed.
    """

    slo: SLOConfig
    api_keys: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> FrontConfig:
        """Read the argument of ``--config``.

        Raises:
            ConfigError: it cannot be used; one line with the reason.
        """
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--config is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise ConfigError('--config: expected an object such as {"slo_config": null}')
        slo = SLOConfig.from_additional_config({CONFIG_KEY: given.get("slo_config")})
        try:
            keys = tuple(bytes.fromhex(key).hex() for key in given.get("api_key_sha256") or ())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--config: {error}") from error
        if any(len(key) != 2 * hashlib.sha256().digest_size for key in keys):
            raise ConfigError("--config: an entry of api_key_sha256 is not a SHA-256")
        return cls(slo, keys)
