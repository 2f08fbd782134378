# SPDX-License-Identifier: Apache-2.0
"""The shipped dashboard and rules, and what their expressions ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

__all__ = ["DASHBOARD", "PROMETHEUS", "expressions", "recorded", "rules", "selectors"]

DOCKER = Path(__file__).resolve().parents[2] / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "vllm-slo.json"
PROMETHEUS = DOCKER / "prometheus"

_SELECTOR = re.compile(r"(?<![\w:\"$])([a-zA-Z_:][\w:]*)(\{[^}]*\})?")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"[^\"]*\"")
_GROUPING = re.compile(r"\b(by|on|without|ignoring)\s*\(([^)]*)\)")


def expressions(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(title of its panel, expression) of each query."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def rules() -> list[dict[str, Any]]:
    """Recording and alerting rules."""
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def recorded() -> dict[str, set[str]]:
    """Series that rules make, with their labels: what stands before the first colon."""
    names = (rule["record"] for rule in rules() if "record" in rule)
    return {name: {name.partition(":")[0]} for name in names}


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """(series, labels) of each selector: those in its braces, and those that anything of the
    expression is grouped by."""
    grouped = {
        label.strip()
        for _, labels in _GROUPING.findall(expression)
        for label in labels.split(",")
        if label.strip()
    }
    for name, braces in _SELECTOR.findall(re.sub(r'(?<==)"[^"]*"|(?<=~)"[^"]*"', '""', expression)):
        if ":" in name or name == "up":
            yield name, set(_LABEL.findall(braces)) | grouped
