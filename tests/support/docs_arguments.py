# SPDX-License-Identifier: Apache-2.0
"""Parses command lines as ``vllm-slo`` and ``vllm serve`` do, and starts nothing.

In: a JSON list of lists of words on stdin. Out: a JSON list with an error, or null, for each.
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

from vllm_slo import cli
from vllm_slo.engine.serving import cpu_alias, serve
from vllm_slo.errors import VllmSLOError
from vllm_slo.router import draft_beside
from vllm_slo.router import serve as replicas


def ours(command: str, words: list[str]) -> None:
    """What ``vllm-slo COMMAND`` does before it begins.

    Raises:
        SystemExit, VllmSLOError: it refuses.
    """
    args, rest = cli.parse([command, *words])
    if command == "serve" and (args.draft_servers or "").isdecimal():
        ours(*_split(draft_beside.fleet_command(args, rest)))  # it would start them
    if command == "serve" and replicas.asked_for(args):
        vllms([args.model, *replicas.app_args(args, rest).get("vllm_args", [])])
    elif command == "serve":
        vllms(serve.command_line(args, rest)[2:])


def _split(words: list[str]) -> tuple[str, list[str]]:
    return words[0], words[1:]


def vllms(words: list[str]) -> None:
    """Parse the arguments of ``vllm serve``.

    Raises:
        SystemExit: it refuses.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *words])
    ServeSubcommand().validate(args)


def complaint(words: list[str]) -> str | None:
    """Why a command line is refused, if it is."""
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(said):
            if words[:2] == ["vllm", "serve"]:
                vllms(words[2:])
            else:
                ours(words[1], words[2:])
    except (SystemExit, ValueError, VllmSLOError) as error:
        return f"{error} {said.getvalue()[-600:]}"
    return None


if __name__ == "__main__":
    lines = json.load(sys.stdin)
    cpu_alias.register()
    sys.stdout.write("\n" + json.dumps([complaint(words) for words in lines]))
