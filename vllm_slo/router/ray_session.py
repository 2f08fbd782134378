# SPDX-License-Identifier: Apache-2.0
"""A command's connection to a Ray cluster, and the signals that end it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, Final

from vllm_slo.errors import ConfigError

CONNECT_S: Final = 10.0
OBJECT_STORE_BYTES: Final = 128 * 1024**2
"""Size of Ray's object store: only small messages pass through Ray."""


def import_ray(flag: str, *modules: str) -> None:
    """Import Ray and other modules that the command needs.

    Raises:
        ConfigError: a module is missing; the message names the flag that needs it and the fix.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray leaves CUDA_VISIBLE_DEVICES and the like as they are in an actor without GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        for module in ("ray", *modules):
            import_module(module)
    except ImportError as error:
        raise ConfigError(f"{flag} needs Ray ({error}): pip install 'vllm-slo[ray]'") from None


def require(address: str) -> None:
    """Refuse a cluster that cannot be reached, because Ray itself tries for minutes.

    Raises:
        ConfigError: nothing listens there.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # "auto", or an address that Ray refuses itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--ray-address {address}: {error}") from None


@contextmanager
def cluster(address: str | None, cpus: int) -> Iterator[None]:
    """A connection to a cluster, or to a new local one that ends with this process.

    Args:
        address: as for ``ray.init``; None: a new local cluster.
        cpus: least CPU resource of a local cluster.

    Raises:
        ConfigError: Ray refuses.
    """
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        quiet |= {
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "num_cpus": max(cores, cpus),
        }
    try:
        ray.init(address=address or "local", **quiet)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        where = f"--ray-address {address}" if address else "Ray"
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from None
    _install_handler()  # because Ray has installed its own
    try:
        yield
    finally:
        ray.shutdown()


def shut_down() -> None:
    """End this process's connection to Ray, and a local cluster with it, if there is one."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


_signals = 0
_hurried = False


def signals() -> int:
    """Signals that came in `interruptible`; at least 2 after the block if any came."""
    return _signals


def hurried() -> bool:
    """Whether a second signal came."""
    return _hurried


def _install_handler() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _on_signal)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _signals, _hurried
    _signals += 1
    _hurried = _signals > 1
    if _signals > 2:
        os._exit(128 + number)
    raise KeyboardInterrupt  # the one exception that a wait inside Ray lets through


@contextmanager
def interruptible() -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the block, the second its cleanup, the third the process."""
    global _signals, _hurried
    _signals, _hurried = 0, False
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _install_handler()
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        if _signals:
            _signals = 2  # this process is about to end, so the next signal ends it at once
        else:
            for number, handler in before.items():
                signal.signal(number, handler)


def say(text: str) -> None:
    """Print one line for the user on stderr."""
    print(f"vllm-slo: {text}", file=sys.stderr, flush=True)  # noqa: T201
