# SPDX-License-Identifier: Apache-2.0
"""What a file is, by its content, and whether it is valid, by the code that reads it elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from vllm_slo.check.advice import Advice, advice_on, advice_on_rules
from vllm_slo.config import profiles
from vllm_slo.config.model import SLOConfig
from vllm_slo.config.yaml_nodes import line_of, parse
from vllm_slo.errors import ConfigError, VllmSLOError
from vllm_slo.router.replica_list import MAX_FILE_BYTES, specs_of_file
from vllm_slo.sim.hardware import PROFILE_KEYS, load_hardware
from vllm_slo.traces import files as traces
from vllm_slo.traces.rules import Rules
from vllm_slo.traces.summary import Summary

Kind = Literal[
    "configuration", "hardware profile", "list of replicas", "rules", "step-time profile", "trace"
]

_YAML: Final = (".yaml", ".yml")
_PROFILE_KEYS: Final = frozenset({"format", "key", "model", "fit", "samples"})
"""Keys of a measured step-time profile."""
_SMALL: Final = 1 << 18
"""Characters up to which a file without a suffix of YAML may be YAML; to parse it takes seconds."""
_PLACEHOLDER: Final = "x" * 32
"""Stands for the token that a list of replicas may get from elsewhere."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one file.

    Attributes:
        kind: what it is; None: it cannot be read.
        told: what a reader wants to know of a valid file, in a line.
        error: what is wrong, with file, line and key; None: it is valid.
        facts: the same as ``told``, by name; JSON.
        warnings: (line or None, text) of what is surely not meant.
    """

    path: Path
    kind: Kind | None
    told: str = ""
    error: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[tuple[int | None, str], ...] = ()


@dataclass(frozen=True, slots=True)
class _Valid:
    """What is told of a valid file."""

    told: str
    facts: Mapping[str, Any]
    warnings: tuple[tuple[int | None, str], ...] = ()


_Check = Callable[[Path], _Valid]


def check_files(paths: Sequence[Path]) -> list[Finding]:
    """The results for files, in order.

    Rules may name only the classes of the configuration, if exactly one is among the files.
    """
    findings = [_check_file(path, _CHECKS) for path in paths]
    configs = [one for one in findings if one.kind == "configuration" and one.error is None]
    if len(configs) != 1:
        return findings
    classes = configs[0].facts["classes"]
    checks: dict[Kind, _Check] = {**_CHECKS, "rules": partial(_rules, classes=classes)}
    return [
        _check_file(finding.path, checks) if finding.kind == "rules" else finding
        for finding in findings
    ]


def _check_file(path: Path, checks: Mapping[Kind, _Check]) -> Finding:
    kind: Kind = "trace"
    if not path.is_dir():  # a folder holds recordings
        try:
            with path.open("rb") as file:
                head = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            return Finding(path, None, error=f"cannot read {path}: {error.strerror}")
        kind = kind_of(head, path.suffix.lower())
    try:
        valid = checks[kind](path)
    except VllmSLOError as error:
        text = str(error)
        return Finding(path, kind, error=text if str(path) in text else f"{path}: {text}")
    return Finding(path, kind, valid.told, None, valid.facts, valid.warnings)


# --- kinds ---------------------------------------------------------------------------------------


def kind_of(head: bytes, suffix: str) -> Kind:
    """What a file is. A mapping of unknown keys is taken for a configuration with mistakes.

    Args:
        head: its first ``MAX_FILE_BYTES`` bytes and one more, if it has as many.
        suffix: of its name, in lower case.
    """
    is_yaml = suffix in _YAML
    try:
        text = head.decode()
    except ValueError:
        return "configuration" if is_yaml else "trace"  # its reader says what is wrong
    if len(head) > MAX_FILE_BYTES and not is_yaml:
        return "trace"  # no other file is as large
    try:
        data = json.loads(text) if text.lstrip()[:1] in ("{", "[") else None
    except (ValueError, RecursionError):
        data = None
    if data is None and (is_yaml or (len(text) <= _SMALL and not _is_table(text))):
        try:
            data = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            data = None
    if isinstance(data, dict):
        return _kind_of_mapping(data, is_yaml)
    if isinstance(data, list) and all(_is_replica(entry) for entry in data):
        return "list of replicas"
    return "configuration" if is_yaml else "trace"


def _kind_of_mapping(data: Mapping[Any, Any], is_yaml: bool) -> Kind:
    keys = {str(key) for key in data}
    if len(keys & _PROFILE_KEYS) >= 3:
        return "step-time profile"
    kinds: dict[Kind, int] = {
        "configuration": len(keys & SLOConfig.model_fields.keys()),
        "hardware profile": len(keys & set(PROFILE_KEYS)),
        "rules": len(keys & Rules.model_fields.keys()),
    }
    likeliest = max(kinds, key=lambda kind: kinds[kind])
    return likeliest if is_yaml or 2 * kinds[likeliest] > len(keys) else "trace"


def _is_replica(entry: Any) -> bool:
    return isinstance(entry, str) or (isinstance(entry, Mapping) and "url" in entry)


def _is_table(text: str) -> bool:
    """Whether the first line is a row of a table, or JSON of a file of JSON lines."""
    first = text.lstrip().partition("\n")[0]
    return "," in first or first[:1] in ("{", "[")


# --- one function for each kind ------------------------------------------------------------------


def _configuration(path: Path) -> _Valid:
    config = SLOConfig.load(path)
    node, _ = parse(path.read_text(encoding="utf-8"), path, ConfigError)
    names = list(config.classes)
    told = _count(len(names), "class", "classes")
    told += f" ({', '.join(names)})" if names else ""
    told += f", default class {config.default_class}" if config.default_class else ""
    facts = {"classes": names, "default_class": config.default_class}
    return _Valid(told, facts, _with_lines(node, advice_on(config)))


def _rules(path: Path, classes: Sequence[str] | None = None) -> _Valid:
    rules = Rules.load(path, classes)
    node, _ = parse(path.read_text(encoding="utf-8"), path, ConfigError)
    named = dict.fromkeys(rule.name for rule in rules.rules)
    told = f"{_count(len(rules.rules), 'rule', 'rules')} for {', '.join(named)}"
    told += f", default {rules.default}" if rules.default else ""
    facts = {"rules": len(rules.rules), "classes": list(named), "default": rules.default}
    return _Valid(told, facts, _with_lines(node, advice_on_rules(rules)))


def _with_lines(
    node: yaml.Node | None, advice: Sequence[Advice]
) -> tuple[tuple[int | None, str], ...]:
    return tuple(
        (line_of(node, place), f"{'.'.join(map(str, place))}: {text}") for place, text in advice
    )


def _hardware(path: Path) -> _Valid:
    hardware = load_hardware(path)
    told = (
        f"{hardware.name}, {_count(hardware.gpus, 'GPU', 'GPUs')} for each replica, "
        f"{hardware.kv_tokens:,} KV tokens"
    )
    draft = None if hardware.draft is None else hardware.draft.name
    facts = {
        "name": hardware.name,
        "gpus": hardware.gpus,
        "kv_tokens": hardware.kv_tokens,
        "draft": draft,
    }
    return _Valid(told + ("" if draft is None else f", with {draft} as draft"), facts)


def _step_times(path: Path) -> _Valid:
    report = profiles.load(path)
    key, fit = report.key, report.fit
    told = f"{key.model} on {key.device}, {key.dtype}, vLLM {key.vllm_version}"
    facts = {"model": key.model, "device": key.device, "vllm": key.vllm_version, "r2": fit.r2}
    return _Valid(f"{told}, R\u00b2 {fit.r2:.3f}", facts)


def _replicas(path: Path) -> _Valid:
    specs = specs_of_file(path.read_text(encoding="utf-8"), _PLACEHOLDER, path)
    names = [spec.name for spec in specs]
    return _Valid(_count(len(names), "replica", "replicas"), {"replicas": names})


def _trace(path: Path) -> _Valid:
    form = traces.detect(path)
    summary = Summary()
    for request in traces.read(path, form):
        summary.add(request)
    if not summary.whole.requests:
        warning = (None, "there is no request in it")
        return _Valid(traces.format_name(form), {"format": form, "requests": 0}, (warning,))
    facts = {"format": form, **summary.to_dict()}
    told = (
        f"{traces.format_name(form)}, {summary.text().splitlines()[0]}, half of them with up to "
        f"{facts['prompt_tokens']['p50']} prompt and {facts['output_tokens']['p50']} output tokens"
    )
    return _Valid(told, facts)


_CHECKS: Final[Mapping[Kind, _Check]] = {
    "configuration": _configuration,
    "hardware profile": _hardware,
    "list of replicas": _replicas,
    "rules": _rules,
    "step-time profile": _step_times,
    "trace": _trace,
}


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
