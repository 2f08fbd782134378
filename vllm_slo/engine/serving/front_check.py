# SPDX-License-Identifier: Apache-2.0
"""Whether a server, by its flags, can be one replica of a front.

A replica's state is that of one engine, and one process of the API server hands it on. vLLM's own
balancer (``--data-parallel-size`` in one server) has several of both.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from vllm_slo.config.command_line import Flags
from vllm_slo.errors import ConfigError
from vllm_slo.wire.front_protocol import TOKEN_VARIABLE

_SIZE: Final = "--data-parallel-size"
_SIZE_HERE: Final = "--data-parallel-size-local"
_API_SERVERS: Final = "--api-server-count"
_OWN_RANK: Final = ("--data-parallel-rank", "--data-parallel-external-lb")
_SOME_RANKS: Final = ("--data-parallel-start-rank", "--data-parallel-hybrid-lb")
_ONE_EACH: Final = (
    f"start one server per engine, each with its own --port, and name each as a --replica of the "
    f"front (a model with experts: {_SIZE} N --data-parallel-rank R); or unset {TOKEN_VARIABLE}"
)


def check_single(flags: Flags) -> None:
    """Refuse a server that has several engines, or several API servers.

    Raises:
        ConfigError: it has; says which flag makes it so.
    """
    engines, flag = _number(flags, _SIZE), _SIZE
    if any(flags.mentions(name) for name in _OWN_RANK):
        engines = 1
    elif any(flags.mentions(name) for name in _SOME_RANKS):
        engines, flag = _number(flags, _SIZE_HERE), _SIZE_HERE
    if engines > 1:
        raise ConfigError(
            f"{flag} {engines}: a server behind a front has one engine, and {TOKEN_VARIABLE} is "
            f"set; {_ONE_EACH}"
        )
    if (servers := _number(flags, _API_SERVERS)) > 1:
        raise ConfigError(
            f"{_API_SERVERS} {servers}: a server behind a front has one API server, and "
            f"{TOKEN_VARIABLE} is set; remove the flag, or unset {TOKEN_VARIABLE}"
        )


def _number(flags: Flags, flag: str) -> int:
    """The value of a flag; 1 without it, and where vLLM is to refuse it."""
    with suppress(ValueError):
        return int(flags.last(flag) or 1)
    return 1
