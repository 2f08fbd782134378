# SPDX-License-Identifier: Apache-2.0
"""Entry point of vLLM's ``vllm.general_plugins`` group: runs in every vLLM process.

In the first process of a server that is started with ``--scheduler-cls vllm_slo.Scheduler`` it
checks the version of vLLM and the configuration, adds the HTTP middleware that reads SLOs, and
shows the metrics on ``/metrics``. Without that flag it does none of this.

In every process it connects this package's log, and prepares hooks for modules that vLLM may import
later. The hooks leave requests without an objective as they are.
"""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import os
import sys
from pathlib import Path

import wrapt

from vllm_slo.config.class_names import MIDDLEWARE, SCHEDULER_NAMES
from vllm_slo.config.command_line import Flags
from vllm_slo.engine.compat.api_server import REQUEST_CLASSES
from vllm_slo.engine.compat.probe import check, imports
from vllm_slo.engine.compat.seams import SERVING, check_scheduling
from vllm_slo.engine.compat.version import check_vllm
from vllm_slo.engine.serving import lifeline
from vllm_slo.engine.serving.front_check import check_single
from vllm_slo.engine.telemetry.state import SOCKET_VARIABLE
from vllm_slo.errors import VllmSLOError
from vllm_slo.wire.front_protocol import token_in
from vllm_slo.wire.socket_folder import make_socket_folder


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once."""
    share_log()
    wrap_engine()
    if multiprocessing.parent_process() is not None:
        lifeline.watch()
        return
    if not _is_server(sys.argv):
        return
    flags = Flags(sys.argv[1:]).with_config_file()
    if flags.last("--scheduler-cls") in SCHEDULER_NAMES:
        _check_or_exit(flags)
        from prometheus_client import REGISTRY

        from vllm_slo.engine.telemetry import exposition

        folder = exposition.choose_folder()
        atexit.register(_leave, folder, os.getpid())
        REGISTRY.register(exposition.FolderCollector(folder))
        _open_to_front()
        if MIDDLEWARE not in (flags.values("--middleware") or ()):
            sys.argv = [*sys.argv, "--middleware", MIDDLEWARE]


def wrap_engine() -> None:
    """Install the gate, and the reader of bodies without middleware, once vLLM imports what they
    wrap; ask for AMX once vLLM imports its CPU worker. Other processes never import that."""
    wrapt.register_post_import_hook(
        "vllm_slo.engine.compat.attention:enable_amx", "vllm.v1.worker.cpu_worker"
    )
    wrapt.register_post_import_hook("vllm_slo.engine.gate:install", "vllm.v1.engine.async_llm")
    for module in REQUEST_CLASSES:
        wrapt.register_post_import_hook("vllm_slo.engine.http.body_slo:install", module)


def _check_or_exit(flags: Flags) -> None:
    """End the server with one clear line, before it loads a model, if it cannot serve.

    From here on the secret of the seal is in the environment, and the salt of a recording.

    Raises:
        SystemExit: the version of vLLM or the configuration cannot be used.
    """
    from vllm_slo.config import profiles, recording
    from vllm_slo.config.model import SLOConfig
    from vllm_slo.slo.access import Access, Seal

    try:
        check_vllm()
        _probe()
        Seal.prepare()
        config = SLOConfig.from_additional_config(_additional_config(flags))
        if config.access is not None:
            Access(config.access)
        if config.profile is not None:
            profiles.load(config.profile)  # only the engine knows whether the profile is its own
        if config.recording.path is not None:
            recording.check_path(config.recording.path)
            recording.share_salt()
        if token_in(os.environ) is not None:
            check_single(flags)
    except VllmSLOError as error:
        raise SystemExit(f"vllm-slo: error: {error}") from None


def _probe() -> None:
    """Look for every name of vLLM that the scheduler and the server use.

    Raises:
        IncompatibleVLLMError: one is not as expected.
    """
    with imports():
        from vllm_slo.engine.scheduler import Scheduler
    check_scheduling(Scheduler)
    check(SERVING)


def _additional_config(flags: Flags) -> object:
    """The value of ``--additional-config``; None without one. vLLM refuses malformed JSON."""
    try:
        return json.loads(flags.last("--additional-config") or "null")
    except ValueError:
        return None


def share_log() -> None:
    """Send this package's log messages to vLLM's log, with its level, also if that changes later.

    vLLM sets up its own logger only. Where the root logger has handlers, they are used instead.
    """
    ours = logging.getLogger("vllm_slo")
    if not logging.getLogger().handlers:
        ours.parent = logging.getLogger("vllm")
        ours.setLevel(ours.level)  # clears the cache of enabled levels


def _open_to_front() -> None:
    """If a front is to be served, name the socket to which the scheduler sends its state.

    The engine's processes end with this one, because a front sends nothing to a server that died,
    and its engine would hold the memory of the next one.
    """
    if token_in(os.environ) is None:
        return
    folder = make_socket_folder("vllm-slo-")
    lifeline.hold(folder)
    os.environ[SOCKET_VARIABLE] = str(folder / "state")
    atexit.register(_leave, folder, os.getpid())


def _leave(folder: Path, owner: int) -> None:
    from vllm_slo.engine.telemetry.exposition import remove_folder

    if os.getpid() == owner:
        remove_folder(folder)


def _is_server(argv: list[str]) -> bool:
    """Whether this command line starts a server of vLLM."""
    return "serve" in argv[1:2] or Path(argv[0]).name == "api_server.py"
