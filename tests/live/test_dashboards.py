# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard, the Prometheus configuration and the alerts: that they ask for what there
is, that Grafana and Prometheus take them, and when the alerts fire."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest
import yaml
from browser import program
from dashboards import DASHBOARD, DOCKER, PROMETHEUS, expressions, recorded, rules, selectors
from patience import patience
from support_folder import SUPPORT

pytest.importorskip("vllm")

from series import EVERY, vllm_series

TARGET_LABELS = {"job", "instance"}  # Prometheus's own
KNOWN = {
    **{name: labels | TARGET_LABELS for name, labels in (EVERY | vllm_series()).items()},
    **recorded(),
    "up": TARGET_LABELS,
}
DASHBOARD_JSON: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
ASKED = [
    *expressions(DASHBOARD_JSON),
    *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()),
]


def strangers(expression: str) -> list[str]:
    """What an expression asks for that no server has."""
    found = []
    # Where several series are added up over one grouping, each must have its labels.
    for name, labels in selectors(expression):
        if name not in KNOWN:
            found.append(name)
        elif missing := labels - KNOWN[name]:
            found.append(f"{name}: {sorted(missing)}")
    return found


@pytest.mark.parametrize(("title", "expression"), ASKED)
def test_every_series_and_label_exists(title: str, expression: str) -> None:
    assert list(selectors(expression)), "no series was found in it"
    assert strangers(expression) == []


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("rate(vllm_slo:admissions[5m])", ["vllm_slo:admissions"]),
        ('vllm_slo:drafter_up{tenant="a"}', ["vllm_slo:drafter_up: ['tenant']"]),
        ("sum by (slo_class) (vllm_slo:drafter_up)", ["vllm_slo:drafter_up: ['slo_class']"]),
        ("slo_class:vllm_slo_missed:ratio_rate2h > 1", ["slo_class:vllm_slo_missed:ratio_rate2h"]),
        ('vllm_slo:admissions_total{reason!="", outcome="x:y"}', []),
    ],
)
def test_what_does_not_exist_is_found(expression: str, wrong: list[str]) -> None:
    assert strangers(expression) == wrong


def test_variables_of_the_dashboard_ask_for_what_exists() -> None:
    variables = DASHBOARD_JSON["templating"]["list"]
    queries = [one["query"]["query"] for one in variables if one["type"] == "query"]
    assert queries
    for query in queries:
        name, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label in KNOWN[name]
    used = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(DASHBOARD_JSON["panels"])))
    assert used == {one["name"] for one in variables}


def test_legends_name_labels_that_are_left() -> None:
    for panel in DASHBOARD_JSON["panels"]:
        for target in panel.get("targets", ()):
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            sums = re.search(r"\b(sum|max|avg)\b", target["expr"])
            grouped = set(re.findall(r"\w+", ",".join(re.findall(r"by \(([^)]*)", target["expr"]))))
            assert not sums or labels <= grouped, panel["title"]
            assert all(labels <= KNOWN[name] for name, _ in selectors(target["expr"]))


def test_panels_do_not_lie_upon_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD_JSON["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD_JSON["panels"]]
    assert len(set(ids)) == len(ids)


def test_grafanas_schema_knows_every_field() -> None:
    """Read into Grafana's own types (its foundation SDK) and written again, nothing is lost."""
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    def lost(before: Any, after: Any, path: str = "") -> list[str]:
        if isinstance(before, dict):
            return [
                line
                for key in before
                for line in (
                    lost(before[key], after[key], f"{path}.{key}")
                    if key in after
                    else [f"{path}.{key}"]
                )
            ]
        if isinstance(before, list):
            pairs = zip(before, after, strict=True)
            return [line for i, pair in enumerate(pairs) for line in lost(*pair, f"{path}[{i}]")]
        return [] if before == after else [path]

    plugins.register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD_JSON)))
    assert lost(DASHBOARD_JSON, read) == []
    broken = json.loads(json.dumps(DASHBOARD_JSON))
    broken["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    broken["panels"][1]["targets"][0]["expression"] = "up"
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(broken)))
    assert lost(broken, read) == [
        ".panels[1].targets[0].expression",
        ".panels[1].fieldConfig.defaults.units",
    ]


def test_grafana_is_told_of_the_data_source_and_of_the_dashboard() -> None:
    folder = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus" and source["isDefault"]
    (variable,) = (v for v in DASHBOARD_JSON["templating"]["list"] if v["type"] == "datasource")
    assert variable["query"] == source["type"]
    assert variable["current"]["value"] == source["uid"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "vllm-slo.yml").read_text())["providers"]
    assert provider["type"] == "file"


# --- Prometheus ----------------------------------------------------------------------------------


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [program("promtool"), *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_configuration() -> None:
    said = promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    assert f"{len(rules())} rules found" in said


@pytest.mark.slow
def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", str(SUPPORT / "alerts_test.yml"))


def test_every_alert_is_seen_to_fire() -> None:
    cases = yaml.safe_load((SUPPORT / "alerts_test.yml").read_text())["tests"]
    fired, silent = set(), set()
    for case in cases:
        for check in case.get("alert_rule_test", ()):
            (fired if check.get("exp_alerts") else silent).add(check["alertname"])
    assert fired == silent == {rule["alert"] for rule in rules() if "alert" in rule}


def test_alerts_say_what_is_the_matter() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert rule["annotations"]["summary"]
