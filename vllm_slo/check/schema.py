# SPDX-License-Identifier: Apache-2.0
"""JSON schemas of files that people write, for their editors; made from the models that read them.

A schema cannot say everything that the reader checks: a class that is named but not configured is
an error of the reader alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from vllm_slo.config.model import SLOConfig
from vllm_slo.slo import fields as slo
from vllm_slo.traces.rules import Rules

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "ttft_ms": (slo.SHORTEST_MS, slo.MAX_TTFT_MS),
    "tpot_ms": (slo.SHORTEST_MS, slo.MAX_TPOT_MS),
    "e2e_ms": (slo.SHORTEST_MS, slo.MAX_TTFT_MS),
    "thinking_tpot_ms": (slo.SHORTEST_MS, slo.MAX_TPOT_MS),
    "session_e2e_ms": (slo.SHORTEST_MS, slo.MAX_TTFT_MS),
    "session_rounds": (1, slo.MAX_SESSION_ROUNDS),
    "value": (slo.MIN_VALUE, slo.MAX_VALUE),
    "max_wait_ms": (slo.SHORTEST_MS, slo.MAX_TTFT_MS),
    "max_waiting": (1, slo.MAX_WAITING),
    "expected_output_tokens": (1, slo.MAX_OUTPUT_TOKENS),
}
"""Field of a class or stage -> its range, which an SLO checks and not the model of the file."""


def schema_of(kind: str) -> dict[str, Any]:
    """The schema of a kind of file, one of ``SCHEMAS``."""
    return SCHEMAS[kind]()


def _configuration() -> dict[str, Any]:
    schema = SLOConfig.model_json_schema()
    for model in ("ClassConfig", "StageConfig"):
        for name, field in schema["$defs"][model]["properties"].items():
            _bound(field, _RANGES.get(name))
    return _finished(schema, "Configuration of vllm-slo")


def _rules() -> dict[str, Any]:
    return _finished(Rules.model_json_schema(), "Rules that give recorded requests their classes")


def _bound(field: dict[str, Any], between: tuple[float, float] | None) -> None:
    if between is not None:
        for choice in field.get("anyOf", [field]):
            if choice.get("type") in ("number", "integer"):
                choice["minimum"], choice["maximum"] = between


def _finished(schema: dict[str, Any], title: str) -> dict[str, Any]:
    """The schema with its dialect and its title; generated titles, which repeat names, are gone."""
    _drop_titles(schema)
    return {"$schema": DIALECT, "title": title, **schema}


def _drop_titles(node: Any) -> None:
    if isinstance(node, list):
        for item in node:
            _drop_titles(item)
    elif isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        for value in node.values():
            _drop_titles(value)


SCHEMAS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    "configuration": _configuration,
    "rules": _rules,
}
"""Kind of file -> what makes its schema."""
