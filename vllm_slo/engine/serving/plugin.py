# SPDX-License-Identifier: Apache-2.0
"""Entry point of vLLM's ``vllm.general_plugins`` group: runs in every vLLM process.

In the first process of a server it prepares what ``vllm serve MODEL --scheduler-cls
vllm_slo.Scheduler`` leaves unsaid: the check of vLLM's version and of the configuration, the HTTP
middleware that reads the SLO carriers, and the metrics on ``/metrics``. Without that flag it does
nothing of this.
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
import yaml

from vllm_slo.config.class_names import MIDDLEWARE, SCHEDULER_NAMES
from vllm_slo.engine.compat.api_server import REQUEST_CLASSES
from vllm_slo.engine.compat.cpu import enable_amx
from vllm_slo.engine.compat.version import check_vllm
from vllm_slo.engine.serving import lifeline
from vllm_slo.errors import VllmSLOError


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once."""
    enable_amx()
    share_log()
    wrap_engine()
    if multiprocessing.parent_process() is not None:
        lifeline.watch()
        return
    said = with_config_file(sys.argv)
    if _asks_for_us(said):
        _check_or_exit(said)
        from prometheus_client import REGISTRY

        from vllm_slo.engine.telemetry import exposition

        folder = exposition.choose_folder()
        atexit.register(_leave, folder, os.getpid())
        REGISTRY.register(exposition.FolderCollector(folder))
        if not any(MIDDLEWARE in argument for argument in said):
            sys.argv = [*sys.argv, "--middleware", MIDDLEWARE]


def wrap_engine() -> None:
    """Put the gate before the engine of API servers, and read bodies where no middleware does, as
    soon as vLLM imports what is wrapped: processes without an API server never do."""
    wrapt.register_post_import_hook("vllm_slo.engine.gate:install", "vllm.v1.engine.async_llm")
    for module in REQUEST_CLASSES:
        wrapt.register_post_import_hook("vllm_slo.engine.http.body_slo:install", module)


def _check_or_exit(argv: list[str]) -> None:
    """End the server before it loads anything if it could not serve, with one clear line.

    The secret of the seal is in the environment from here on, for where access is checked.
    """
    from vllm_slo.config import profiles
    from vllm_slo.config.model import SLOConfig
    from vllm_slo.slo.access import Access, Seal

    try:
        check_vllm()
        Seal.prepare()
        config = SLOConfig.from_additional_config(_additional_config(argv))
        if config.access is not None:
            Access(config.access)
        if config.profile is not None:
            profiles.load(config.profile)  # whether it is of this engine is known there alone
    except VllmSLOError as error:
        raise SystemExit(f"vllm-slo: error: {error}") from None


def _additional_config(argv: list[str]) -> object:
    """The value of ``--additional-config``; malformed JSON is left to vLLM to refuse."""
    for flag, value in zip(argv, [*argv[1:], ""], strict=True):
        name, _, inline = flag.partition("=")
        if name.replace("_", "-") == "--additional-config":
            try:
                return json.loads(inline or value)
            except ValueError:
                return None
    return None


def share_log() -> None:
    """Write what this package logs where vLLM writes its own, and as vLLM is told to, also later:
    it sets up its own logger only. Where the process has a log of its own, that one is used."""
    ours = logging.getLogger("vllm_slo")
    if not logging.getLogger().handlers:
        ours.parent = logging.getLogger("vllm")
        ours.setLevel(ours.level)  # forgets what was found to be enabled so far


def _leave(folder: Path, owner: int) -> None:
    from vllm_slo.engine.telemetry.exposition import remove_folder

    if os.getpid() == owner:
        remove_folder(folder)


def _asks_for_us(argv: list[str]) -> bool:
    """Whether this command line, its ``--config`` file included, starts a server with our class."""
    if "serve" not in argv[1:2] and Path(argv[0]).name != "api_server.py":
        return False
    text = " ".join(argv)
    return any(name in text for name in SCHEDULER_NAMES)


def with_config_file(argv: list[str]) -> list[str]:
    """The command line followed by what its ``--config`` file says, as flags.

    vLLM lets the command line win over the file; a file that it cannot read it refuses itself.
    """
    for flag, value in zip(argv, [*argv[1:], ""], strict=True):
        name, _, inline = flag.partition("=")
        if name == "--config":
            try:
                said = yaml.safe_load(Path(inline or value).read_text(encoding="utf-8"))
            except (OSError, ValueError, yaml.YAMLError):
                return argv
            items = said.items() if isinstance(said, dict) else ()
            return [*argv, *(f"--{key}={_flag_value(given)}" for key, given in items)]
    return argv


def _flag_value(given: object) -> str:
    return given if isinstance(given, str) else json.dumps(given, default=str)
