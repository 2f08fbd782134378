# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo serve MODEL --draft-model D --draft-servers N``: N draft servers beside the server.

They are one ``vllm-slo draft-server --count N`` that ends with this process. They get the flags of
the served model that hold for draft models too, then those of ``--draft-args``. With several
replicas each draft server drafts for all of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Final

from vllm_slo import tiny
from vllm_slo.config.command_line import SHARED_WITH_DRAFTS, Flags
from vllm_slo.config.draft_folder import check_draft_folder
from vllm_slo.config.serve_args import BUILT_IN_DRAFTS, TINY
from vllm_slo.errors import ConfigError
from vllm_slo.router import ray_session
from vllm_slo.router.child import start_until_exit
from vllm_slo.router.draft_fleet import MOST, UNUSABLE
from vllm_slo.wire.draft_socket import MOST_PORTS, TOKEN_VARIABLE
from vllm_slo.wire.ports import free_ports

ARGS_FLAG: Final = "--draft-args"
PATIENCE_S: Final = 20.0
"""Time for the draft servers to end after the server that they were started for."""
SPARE_PORTS: Final = 1
"""Ports beyond one for each replica: a replica may start before the one that it replaces has gone.
"""
_SET_HERE: Final = {
    "--model": "use --draft-model",
    "--connect": "they draft for this server",
    "--token-file": "use --draft-token-file",
    "--count": "use --draft-servers",
    "--ray-address": "they run on this machine; start others with 'vllm-slo draft-server'",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flag for draft servers that are started here."""
    parser.add_argument(
        ARGS_FLAG,
        "--draft_args",
        metavar="'FLAGS'",
        help="flags of 'vllm-slo draft-server' for the draft servers that --draft-servers N "
        f"starts, in one word: {ARGS_FLAG}='--gpu-memory-utilization 0.1 --max-sessions 128'",
    )


def start(args: argparse.Namespace, rest: Sequence[str]) -> None:
    """If ``--draft-servers`` is a number, start that many here, until this process ends.

    It puts the address to which they connect into ``args``. If they cannot run with their flags,
    they print the reason, and this process ends.

    Raises:
        ConfigError: a flag cannot be used, the draft model cannot be, or Ray is missing.
    """
    if args.draft_servers is None or not args.draft_servers.isdecimal():
        if args.draft_args is not None:
            raise ConfigError(
                f"{ARGS_FLAG}: is for draft servers started here; give --draft-servers a number"
            )
        return
    command = [sys.executable, "-m", "vllm_slo.cli", *fleet_command(args, rest)]
    fleet = start_until_exit(command, PATIENCE_S)
    threading.Thread(target=_end_with_unusable, args=(fleet,), daemon=True).start()


def fleet_command(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """The command of the draft servers; ``args`` then has their address and no draft model.

    Raises:
        ConfigError: as `start`.
    """
    count, models = int(args.draft_servers), args.draft_model or []
    if len(models) != 1:
        raise ConfigError(
            f"--draft-servers {count}: name the one model that drafts: --draft-model D"
        )
    if not 1 <= count <= MOST:
        raise ConfigError(f"--draft-servers {count}: choose 1 to {MOST}, or give an address")
    if args.ray_address is not None:
        raise ConfigError(
            f"--draft-servers {count}: starts draft servers on this machine, not in the cluster of "
            "--ray-address; start them with 'vllm-slo draft-server', and give their address here"
        )
    replicas = args.max_replicas or args.replicas
    ports = replicas + SPARE_PORTS if replicas else 1
    if ports > MOST_PORTS:
        raise ConfigError(
            f"--draft-servers {count}: draft for at most {MOST_PORTS - SPARE_PORTS} replicas"
        )
    own, given, model = _own_flags(args.draft_args), Flags(rest).with_config_file(), models[0]
    check_draft_folder(*_folders(model, args.model, given))
    ray_session.import_ray("--draft-servers")
    if args.draft_token_file is None:
        os.environ.setdefault(TOKEN_VARIABLE, secrets.token_urlsafe(32))
    first = free_ports(ports)
    address = f"tcp://127.0.0.1:{first}" + (f"-{first + ports - 1}" if ports > 1 else "")
    words = ["draft-server", "--count", str(count), "--model", model, "--connect", address]
    if args.draft_token_file is not None:
        words += ["--token-file", args.draft_token_file]
    args.draft_servers, args.draft_model = address, None
    return [*words, *given.words_of(*SHARED_WITH_DRAFTS), *own]


def _own_flags(given: str | None) -> list[str]:
    """The words of ``--draft-args``."""
    try:
        words = shlex.split(given or "")
    except ValueError as error:
        raise ConfigError(f"{ARGS_FLAG}: {error}") from None
    flags = Flags(words)
    for flag, instead in _SET_HERE.items():
        if flags.mentions(flag):
            raise ConfigError(f"{ARGS_FLAG}: {flag}: {instead}")
    return words


def _folders(draft: str, model: str, flags: Flags) -> tuple[str, str, str]:
    """Folders or names of the draft model, the served one and its tokenizer."""
    served = str(tiny.path("target")) if model == TINY else model
    built_in = draft in BUILT_IN_DRAFTS
    drafts = str(tiny.path(BUILT_IN_DRAFTS[draft])) if built_in else draft
    return drafts, served, flags.last("--tokenizer") or served


def _end_with_unusable(fleet: subprocess.Popen[bytes]) -> None:
    """End this process and what it started if the draft servers cannot run with their flags.

    That shows at their first start, while the server starts too; a later failure costs drafts
    alone. A server that starts does not always end at a signal.
    """
    if fleet.wait() == UNUSABLE:
        ray_session.say("stopping, because its draft servers cannot run")
        for child in multiprocessing.active_children():
            child.kill()
        ray_session.shut_down()
        os._exit(UNUSABLE)
