# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo check FILE...``: one line for each file, and more for what is wrong with it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vllm_slo.arguments import ERROR, NO, OK, USAGE, add_json, one_of, put_json, standard_output
from vllm_slo.check.files import Finding, check_files
from vllm_slo.check.schema import SCHEMAS, schema_of
from vllm_slo.errors import ConfigError

_TO_PRINT: Final = "configuration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``vllm-slo check``."""
    parser.add_argument(
        "files",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="configuration, rules (checked against the configuration that is named with them), "
        "trace, step-time profile, hardware profile or list of replicas",
    )
    add_json(parser)
    parser.add_argument(
        "--print-schema",
        nargs="?",
        const=_TO_PRINT,
        type=one_of(tuple(SCHEMAS)),
        metavar="KIND",
        help="print the JSON schema of a kind of file, for editors, and check nothing: "
        f"{', '.join(SCHEMAS)} (default: {_TO_PRINT})",
    )


def run(args: argparse.Namespace) -> int:
    """Check the files; 0 if all are valid, 1 if one is not, 2 if one cannot be read.

    Raises:
        ConfigError: no file is named, or the result cannot be written.
    """
    if args.print_schema is not None:
        sys.stdout.write(json.dumps(schema_of(args.print_schema), indent=2) + "\n")
        return OK
    if not args.files:
        raise ConfigError("name at least one FILE; see 'vllm-slo check --help'")
    findings = check_files(args.files)
    if not standard_output(args.json):
        for finding in findings:
            _print(finding)
    if args.json is not None:
        _write_json(findings, args.json)
    if any(finding.kind is None for finding in findings):
        return USAGE
    return OK if all(finding.error is None for finding in findings) else NO


def _print(finding: Finding) -> None:
    if finding.kind is None:
        sys.stderr.write(f"{ERROR}{finding.error}\n")
        return
    lines = [finding.error or f"{finding.path}: {finding.kind}, {finding.told}"]
    for line, text in finding.warnings:
        where = finding.path if line is None else f"{finding.path}:{line}"
        lines.append(f"{where}: warning: {text}")
    sys.stdout.write("\n".join(lines) + "\n")


def _write_json(findings: Sequence[Finding], path: Path) -> None:
    result = [
        {
            "file": str(finding.path),
            "kind": finding.kind,
            "valid": finding.error is None,
            "error": finding.error,
            "warnings": [{"line": line, "text": text} for line, text in finding.warnings],
            "facts": finding.facts,
        }
        for finding in findings
    ]
    put_json(result, path, lambda text: ConfigError(f"--json: {text}"))
