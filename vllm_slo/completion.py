# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo completion SHELL``: the script with which a shell completes commands and options.

The script holds all names, so that a shell starts nothing to complete one. The options of ``vllm
serve`` itself are not in it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

import shtab

from vllm_slo.arguments import OK, Parser, one_of

SHELLS: Final = ("bash", "zsh", "fish", "tcsh")
FOLDER: Final = "DIR"
FILES: Final = ("FILE", "NAME|FILE")
"""Metavars of arguments that name a folder, or a file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The argument of ``vllm-slo completion``."""
    parser.add_argument(
        "shell", metavar="SHELL", type=one_of(SHELLS), help=f"one of {', '.join(SHELLS)}"
    )


def run(args: argparse.Namespace, parser: Parser) -> int:
    """Print the script for ``parser``, which is that of the whole command."""
    for action in parser.every_action():
        completed: Any = action  # shtab reads an attribute that argparse does not know
        if action.metavar == FOLDER:
            completed.complete = shtab.DIRECTORY
        elif action.metavar in FILES or action.type is Path:
            completed.complete = shtab.FILE
    sys.stdout.write(shtab.complete(parser, args.shell) + "\n")
    return OK
