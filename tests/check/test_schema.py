# SPDX-License-Identifier: Apache-2.0
"""The published schemas: they take what the readers take, and refuse it in the same place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import docs_blocks
import pytest
import yaml
from jsonschema import Draft202012Validator

from vllm_slo import cli
from vllm_slo.check.schema import SCHEMAS, schema_of
from vllm_slo.config.model import SLOConfig
from vllm_slo.config.sections import ClassConfig, StageConfig
from vllm_slo.errors import ConfigError
from vllm_slo.slo import fields
from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.rules import Rules

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [b for b in docs_blocks.blocks() if b.language == "yaml" and b.marker is None]


def as_json(text: str) -> Any:
    """YAML as an editor checks it: its keys are text."""
    return json.loads(json.dumps(yaml.safe_load(text)))


def mistakes(kind: str, text: str) -> list[str]:
    """The places that a schema refuses, the deepest of each mistake; an unknown key is its own."""
    places = []
    for mistake in Draft202012Validator(schema_of(kind)).iter_errors(as_json(text)):
        error = mistake
        while error.context:
            error = max(error.context, key=lambda inner: len(inner.absolute_path))
        place = [str(part) for part in error.absolute_path]
        if error.validator == "additionalProperties":
            place += [key for key in error.instance if key not in error.schema["properties"]]
        places.append(".".join(place))
    return places


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_schema_is_one(kind: str) -> None:
    schema = schema_of(kind)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_configurations_of_the_pages(block: docs_blocks.Block) -> None:
    assert mistakes("configuration", block.text) == []


def test_the_configuration_of_the_examples() -> None:
    assert mistakes("configuration", (ROOT / "examples" / "slo.yaml").read_text()) == []
    assert len(BLOCKS) > 5


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("ageing: 1", "ageing"),
        ("ageing_s: 0", "ageing_s"),
        ("ageing_s: soon", "ageing_s"),
        ("decline_status: 200", "decline_status"),
        ("max_planned_new: 1.5", "max_planned_new"),
        ("classes: [chat]", "classes"),
        ("classes: {chat: {ttft: 500}}", "classes.chat.ttft"),
        ("classes: {chat: {ttft_ms: -1}}", "classes.chat.ttft_ms"),
        ("classes: {chat: {tpot_ms: fast}}", "classes.chat.tpot_ms"),
        ("classes: {chat: {tier: gold}}", "classes.chat.tier"),
        ("classes: {chat: {value: 0}}", "classes.chat.value"),
        ("classes: {chat: {max_waiting: 0}}", "classes.chat.max_waiting"),
        ("classes: {chat: {stages: [{tpot: 1}]}}", "classes.chat.stages.0.tpot"),
        ("service_tiers: {flex: 1}", "service_tiers.flex"),
        ("routing: {policy: random}", "routing.policy"),
        ("routing: {hops: 1}", "routing.hops"),
        ("speculation: {max_depth: 17}", "speculation.max_depth"),
        ("access: {keys: {a: {sha256: abc}}}", "access.keys.a.sha256"),
        ("quotas: {default: {burst_tokens: 1}}", "quotas.default.promised_tokens_per_s"),
    ],
)
def test_a_broken_configuration_is_refused_in_the_same_place(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SLOConfig._from_yaml(text, "slo.yaml")
    assert str(refused.value).startswith(f"slo.yaml:1: {place}: ")
    (found,) = mistakes("configuration", text)
    assert found == place or (found == place.rpartition(".")[0] and "burst" in text)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("rules: []", "rules"),
        ("rules: [{class: a, klass: b}]", "rules.0.klass"),
        ("rules: [{class: 'a b'}]", "rules.0.class"),
        ("rules: [{class: a, share: 2}]", "rules.0.share"),
        ("rules: [{class: a, prompt_tokens: many}]", "rules.0.prompt_tokens"),
    ],
)
def test_broken_rules_are_refused_in_the_same_place(text: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    with pytest.raises(TraceError) as refused:
        Rules.load(file)
    assert f": {place}: " in str(refused.value)
    assert place in mistakes("rules", text)


@pytest.mark.parametrize("tokens", ["5", "0-2000", "'500-'", "-500", "'-500'", "' 1 - 2 '"])
def test_ranges_of_rules(tokens: str, tmp_path: Path) -> None:
    text = f"rules: [{{class: a, prompt_tokens: {tokens}}}]\ndefault: b\n"
    (tmp_path / "rules.yaml").write_text(text)
    Rules.load(tmp_path / "rules.yaml")
    assert mistakes("rules", text) == []


def test_the_ranges_of_classes_are_those_of_an_slo() -> None:
    """Each bound that the schema has is one: a value just beyond it is refused by an SLO."""
    defs = schema_of("configuration")["$defs"]
    for model, kind in (("ClassConfig", ClassConfig), ("StageConfig", StageConfig)):
        for name, field in defs[model]["properties"].items():
            for choice in field.get("anyOf", [field]):
                if choice.get("type") not in ("number", "integer"):
                    continue
                assert name in kind.model_fields
                for value in (choice["minimum"], choice["maximum"]):
                    fields.validate(name, value)
                for value in (choice["minimum"] * 0.5, choice["maximum"] * 2):
                    with pytest.raises(ValueError, match=name):
                        fields.validate(name, value)


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--print-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema_of("configuration")
    assert cli.main(["check", "--print-schema", "rules"]) == 0
    assert json.loads(capsys.readouterr().out) == schema_of("rules")
