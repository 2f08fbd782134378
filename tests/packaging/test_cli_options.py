# SPDX-License-Identifier: Apache-2.0
"""An option that several commands have means the same in each."""

from __future__ import annotations

import argparse
from typing import Final

from vllm_slo import cli

VALUES: Final = {
    "--api-key": "KEY",
    "--base-url": "URL",
    "--duration": "SECONDS",
    "--hardware": "NAME|FILE",
    "--json": "FILE",
    "--min-attainment": "SHARE",
    "--model": "NAME",
    "--out": "DIR",
    "--port": "N",
    "--rules": "FILE",
    "--seed": "N",
    "--slo-config": "FILE",
    "--token-file": "FILE",
    "--trace": "FILE",
    "--warmup": "SHARE",
}
"""Option -> what its value is, as help shows it. Some commands take several values."""
SEVERAL: Final = ("", ",...", "[=name]")
EXCEPTIONS: Final = {("record", "--out"): "FILE"}  # its result is one file


def options() -> list[tuple[str, str, argparse.Action]]:
    """(command, option, its argument), without old names."""
    return [
        (command, name, action)
        for command, parser in cli.parsers().items()
        if command
        for action in parser.every_action()
        for name in action.option_strings
        if action.help != argparse.SUPPRESS
    ]


def test_the_value_of_an_option_is_the_same_thing_in_every_command() -> None:
    seen = set()
    for command, name, action in options():
        wanted = EXCEPTIONS.get((command, name), VALUES.get(name))
        if wanted is not None and action.metavar is not None:
            assert action.metavar in {wanted + more for more in SEVERAL}, (command, name)
            seen.add(name)
    assert len(seen) > 8


def test_an_option_with_underscores_has_a_name_with_dashes() -> None:
    for command, name, action in options():
        assert "_" not in name or name.replace("_", "-") in action.option_strings, (command, name)


def test_an_exception_is_one() -> None:
    found = {(command, name): action.metavar for command, name, action in options()}
    for place, metavar in EXCEPTIONS.items():
        assert found[place] == metavar != VALUES[place[1]]
