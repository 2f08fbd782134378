# SPDX-License-Identifier: Apache-2.0
"""The flags by which a command is told of replicas that run already."""

from __future__ import annotations

import argparse
import os

from vllm_slo.router.replica_list import Source, source_of
from vllm_slo.wire.draft_socket import read_token
from vllm_slo.wire.front_protocol import TOKEN_VARIABLE, token_in


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    replicas = parser.add_argument_group("replicas")
    replicas.add_argument(
        "--replica",
        action="append",
        default=[],
        metavar="URL",
        help="http://IP:PORT of a server that runs with vllm-slo; give it several times",
    )
    replicas.add_argument(
        "--replicas-from",
        metavar="SOURCE",
        help="instead: a file with a YAML list of replicas, or DNS:name:port, one replica at each "
        "address of the name; both are read again when they change",
    )
    replicas.add_argument(
        "--token-file",
        metavar="FILE",
        help="holds the token that the replicas have in their environment as "
        f"{TOKEN_VARIABLE}; default: that variable here",
    )


def source_of_arguments(args: argparse.Namespace) -> Source:
    """The replicas that the flags name.

    Raises:
        ConfigError: there are none, or a flag cannot be used.
    """
    from_file = args.token_file is not None
    token = read_token(args.token_file) if from_file else token_in(os.environ)
    return source_of(args.replica, args.replicas_from, token)
