# SPDX-License-Identifier: Apache-2.0
"""The classes of ``bench``: its own, those of a file, or those of the server's configuration."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.planned import PlannedRequest, Workload
from vllm_slo.bench.workload import DEFAULT_CLASSES, ClassSpec, class_from_mapping, class_sequence
from vllm_slo.traces.classes import TrafficClasses
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.rules import Rules


def parse_classes(text: str) -> tuple[ClassSpec, ...]:
    """``name[=share],...`` of the default classes, or a YAML/JSON file: name -> class."""
    if Path(text).suffix in (".yaml", ".yml", ".json"):
        return _classes_from_file(Path(text))
    known = {c.name: c for c in DEFAULT_CLASSES}
    shares = parse_shares(text, list(known), " (or give a file)")
    return tuple(
        known[name] if share is None else replace(known[name], share=share)
        for name, share in shares
    )


def parse_shares(text: str, known: Sequence[str], hint: str = "") -> list[tuple[str, float | None]]:
    """``name[=share],...`` of ``known`` names; None: no share is given."""
    chosen: list[tuple[str, float | None]] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, share = item.partition("=")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            fix = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise BenchError("--classes", f"unknown class {name!r}; {fix}{hint}")
        chosen.append((name, _share(name, share)))
    if not chosen:
        raise BenchError("--classes", f"name at least one class of {', '.join(known)}")
    return chosen


def _share(name: str, text: str) -> float | None:
    try:
        share = float(text) if text else None
    except ValueError:
        raise BenchError("--classes", f"{name}: share {text!r} is not a number") from None
    if share is not None and not 0 < share < float("inf"):
        raise BenchError("--classes", f"{name}: share must be above 0, got {text}")
    return share


def _classes_from_file(path: Path) -> tuple[ClassSpec, ...]:
    import yaml

    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError("--classes", f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BenchError("--classes", f"{path} is not YAML: {error}") from error
    if not isinstance(data, dict) or not data:
        raise BenchError("--classes", f"{path} must map at least one class name to its fields")
    for name, fields in data.items():
        if not isinstance(fields, dict):
            raise BenchError("--classes", f"{path}: class {name!r} must be a mapping")
    return tuple(class_from_mapping(str(name), fields) for name, fields in data.items())


def configured(workload: Workload, classes: TrafficClasses, shares: str | None) -> Workload:
    """The same requests with classes of a server's configuration, and their objectives.

    Rules decide by a request's lengths and by its class in the workload (``recorded_class``). What
    no rule matches has the default class, if there is one.
    Without rules the classes are drawn by ``shares``, ``name[=share],...``; None: as many requests
    of each.

    Raises:
        BenchError: there are no classes, or the shares are wrong.
    """
    known = sorted(classes.config.classes)
    if not known:
        raise BenchError("--slo-config", "the file has no classes")
    if classes.rules is None:
        drawn = parse_shares(shares, known) if shares is not None else [(n, None) for n in known]
        rows = _drawn(workload, drawn)
    elif shares is None:
        rows = _ruled(workload, classes.rules)
    else:
        raise BenchError("--classes", "leave it out; --rules give the classes")
    named = TrafficClasses(classes.config)
    requests = []
    for index, (request, row) in enumerate(zip(workload.requests, rows, strict=True)):
        of_class = replace(request, slo_class=named.class_of(row, index))
        requests.append(of_class.asking(named.slo_of(row, index)))
    return replace(workload, requests=tuple(requests))


def _row(request: PlannedRequest, slo_class: str) -> TraceRequest:
    return TraceRequest(request.at_s, request.prompt_tokens, request.output_tokens, slo_class)


def _ruled(workload: Workload, rules: Rules) -> list[TraceRequest]:
    """The workload's requests with the classes of rules; empty where none matches."""
    rows = [_row(request, request.slo_class) for request in workload.requests]
    names = [rules.class_of(row, index) or "" for index, row in enumerate(rows)]
    return [_row(request, name) for request, name in zip(workload.requests, names, strict=True)]


def _drawn(workload: Workload, shares: Sequence[tuple[str, float | None]]) -> list[TraceRequest]:
    """The workload's requests with classes in random order; shares are exact."""
    some = DEFAULT_CLASSES[0]
    specs = [replace(some, name=name, share=share or 1.0) for name, share in shares]
    rng = np.random.default_rng([workload.seed, 30])
    sequence = class_sequence(specs, len(workload.requests), rng)
    return [
        _row(request, spec.name) for request, spec in zip(workload.requests, sequence, strict=True)
    ]
