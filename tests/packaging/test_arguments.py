# SPDX-License-Identifier: Apache-2.0
"""Types and options that the commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_slo import arguments
from vllm_slo.arguments import HelpFormatter, Parser, Renamed, listed, number, one_of, share, whole


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (number(), "-1.5", -1.5),
        (number(0.0, 2.0), "2", 2.0),
        (whole(), "0", 0),
        (whole(1, 5), "5", 5),
        (share(), "0.9", 0.9),
        (share(), "90%", 0.9),
        (share(above_zero=False), "0%", 0.0),
        (listed(whole()), "1, 2,,1", (1, 2)),
        (one_of(("poisson", "square")), "square", "square"),
        (arguments.port, "65535", 65535),
    ],
)
def test_a_value_is_read(kind: Callable[[str], Any], text: str, value: object) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (number(), "fast", "'fast' is not a number"),
        (number(), "nan", "must be finite, got nan"),
        (number(), "inf", "must be finite, got inf"),
        (number(0.0, above=True), "0", "must be above 0, got 0"),
        (number(0.0, 1.0), "2", "must be at least 0 and at most 1, got 2"),
        (whole(), "1.5", "'1.5' is not a whole number"),
        (whole(1), "0", "must be at least 1, got 0"),
        (whole(1, 5), "6", "must be at least 1 and at most 5, got 6"),
        (share(), "0", "must be above 0 and at most 1, got 0"),
        (share(), "101%", "must be above 0 and at most 1, got 1.01"),
        (share(), "x%", "'x' is not a number"),
        (listed(whole()), " , ", "name at least one"),
        (listed(whole()), "1,x", "'x' is not a whole number"),
        (one_of(("poisson", "square")), "poison", "'poison' is unknown; did you mean poisson?"),
        (one_of(("poisson", "square")), "x", "'x' is unknown; use poisson, square"),
        (arguments.port, "65536", "must be at least 0 and at most 65535, got 65536"),
    ],
)
def test_a_value_that_is_none_is_named(kind: Callable[[str], Any], text: str, said: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        kind(text)
    assert str(refused.value) == said


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="vllm-slo it")
    parser.add_argument("--most-seats", "--most_seats", type=whole(1))
    for words, said in (
        (["--most_seats", "0"], "argument --most-seats: must be at least 1, got 0"),
        (["--most-seats"], "argument --most-seats: expected one argument"),
    ):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(words)
        line = f"vllm-slo: error: {said}; see 'vllm-slo it --help'\n"
        assert capsys.readouterr().err == line
    parser.refuse_unknown([])
    with pytest.raises(SystemExit, match="2"):
        parser.refuse_unknown(["--most=3", "x"])
    assert "arguments: --most=3 x; did you mean --most-seats?" in capsys.readouterr().err


def test_the_old_name_of_an_option_works_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", action=Renamed, new="--json", type=Path, dest="json")
    assert parser.parse_args(["--json", "a"]).json == Path("a")
    assert capsys.readouterr().err == ""
    assert parser.parse_args(["--out", "a"]).json == Path("a")
    said = capsys.readouterr().err
    assert said.startswith("vllm-slo: note: --out is now called --json; ")
    assert said.count("\n") == 1
    assert "--out" not in parser.format_help()
    with pytest.raises(SystemExit, match="2"):
        parser.refuse_unknown(["--ou"])
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "model"), [(["m"], "m"), (["--model", "m"], "m"), (["--quick", "m"], "m")]
)
def test_a_model_is_named_once(words: list[str], model: str) -> None:
    parser = Parser()
    arguments.add_model(parser, "name or folder")
    parser.add_argument("--quick", action="store_true")
    assert parser.parse_args(words).model == model
    for wrong in ([], ["a", "--model", "b"]):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(wrong)


def test_help_is_the_same_in_each_version_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    parser = Parser(
        prog="it", description="One.\n\nTwo, " + "long " * 12, epilog="example:\n\n  it"
    )
    parser.add_argument("-n", "--seed", "--se_ed", metavar="N", help="of all")
    commands = parser.add_subparsers(metavar="COMMAND")
    assert commands.add_parser("a-long-name", help="text").formatter_class is HelpFormatter
    assert parser.format_help() == (
        "usage: it [-h] [-n N] COMMAND ...\n"
        "\n"
        "One.\n"
        "\n"
        "Two, long long long long long long long long long long\n"
        "long long\n"
        "\n"
        "positional arguments:\n"
        "  COMMAND\n"
        "    a-long-name  text\n"
        "\n"
        "options:\n"
        "  -h, --help     show this help message and exit\n"
        "  -n, --seed N   of all\n"
        "\n"
        "example:\n"
        "\n"
        "  it\n"
    )
