# SPDX-License-Identifier: Apache-2.0
"""The operator's YAML: defaults, one clear line per mistake, and a fuzz."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from depth import examples
from hermetic import NOWHERE
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_slo.config.model import SLOConfig
from vllm_slo.config.sections import BestEffortConfig, ClassConfig, RoutingConfig
from vllm_slo.config.speculation import SpeculationConfig
from vllm_slo.errors import ConfigError
from vllm_slo.slo.model import SLO

GOOD = """\
classes:
  chat: {ttft_ms: 500, tpot_ms: 50, value: 2}
  batch:
    tier: best_effort
default_class: batch
service_tiers: {priority: chat, flex: null}
margin_quantile: 0.9
ageing_s: 5
"""


def load(tmp_path: Path, text: str) -> SLOConfig:
    path = tmp_path / "slo.yaml"
    path.write_text(text, encoding="utf-8")
    return SLOConfig.load(path)


def test_good_file(tmp_path: Path) -> None:
    config = load(tmp_path, GOOD)
    assert config.slo_classes() == {
        "chat": SLO(ttft_ms=500, tpot_ms=50, value=2, slo_class="chat"),
        "batch": SLO(tier="best_effort", slo_class="batch"),
    }
    assert (config.default_class, config.ageing_s) == ("batch", 5.0)
    with pytest.raises(ValidationError):
        config.ageing_s = 3.0  # type: ignore[misc]  # the point of the test: it is frozen


def test_defaults(tmp_path: Path) -> None:
    assert SLOConfig.load(None) == SLOConfig() == load(tmp_path, "") == load(tmp_path, "{}")
    assert SLOConfig.from_additional_config(None) == SLOConfig()
    assert SLOConfig.from_additional_config({"other": 1, "slo_config": None}) == SLOConfig()
    assert SLOConfig().margin_quantile == 0.95


def test_every_field_is_documented() -> None:
    for model in (BestEffortConfig, ClassConfig, RoutingConfig, SpeculationConfig, SLOConfig):
        assert all(len(spec.description or "") > 60 for spec in model.model_fields.values())


def test_from_additional_config(tmp_path: Path) -> None:
    expected = load(tmp_path, GOOD)
    path = str(tmp_path / "slo.yaml")
    assert SLOConfig.from_additional_config({"slo_config": path}) == expected
    assert SLOConfig.from_additional_config({"slo_config": yaml.safe_load(GOOD)}) == expected
    for bad in (5, ["x"], True):
        with pytest.raises(ConfigError, match=r"^slo_config: expected keys"):
            SLOConfig.from_additional_config({"slo_config": bad})
    with pytest.raises(ConfigError, match=r"^slo_config: clases: unknown key; did you mean"):
        SLOConfig.from_additional_config({"slo_config": {"clases": {}}})


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("clases: {}", 1, "clases: unknown key; did you mean 'classes'?"),
        ("classes:\n  chat:\n    ttft: 3", 3, "did you mean 'ttft_ms'?"),
        ("routing:\n  max_hop: 3", 2, "routing.max_hop: unknown key; did you mean 'max_hops'?"),
        ("routing:\n  max_hops: 0", 2, "routing.max_hops: Input should be greater"),
        ("routing:\n  policy: luck", 2, "routing.policy: Input should be 'slo', 'round_robin'"),
        ("routing:\n  dead_after_s: 1.0", 1, "dead_after_s (1) is below stale_after_s (2)"),
        ("xyzzy: 3", 1, "known: classes, default_class"),
        ("classes:\n  chat:\n    ttft_ms: -3", 3, "classes.chat.ttft_ms: -3.0 is out of range"),
        ("classes:\n  chat:\n    ttft_ms: '5'", 3, "classes.chat.ttft_ms"),
        ("classes:\n  chat: {tier: guaranteed}", 2, "no objective"),
        ("classes:\n  chat: {tier: gold}", 2, "classes.chat.tier"),
        ("classes:\n  a b: {}", 2, "'a b' is not a name"),
        ("classes: {x: 3}", 1, "classes.x"),
        ("classes:\n  a: {}\n  a: {}", 3, "a: duplicate key"),
        ("ageing_s: 1\nageing_s: 2", 2, "duplicate key"),
        ("# c\nmargin_quantile: 2", 2, "margin_quantile: Input should be less than"),
        ("margin_quantile: .nan", 1, "margin_quantile"),
        ("ageing_s: .inf", 1, "ageing_s"),
        ("max_planned_new: true", 1, "max_planned_new"),
        ("tpot_window_tokens: 1.5", 1, "tpot_window_tokens"),
        ("\ndefault_class: x", 2, "default_class: class 'x' is not configured"),
        ("service_tiers: {priority: x}", 1, "service_tiers.priority: class 'x'"),
        ("service_tiers:\n  auto: x", 1, "'auto' cannot be mapped"),
        ("1: 2", 1, "Keys should be strings"),
        ("a: [1\nb: 2", 2, "broken YAML"),
        ("!!python/object:os.system x", 1, "broken YAML"),
        ("? [a]\n: b", 1, "broken YAML"),
        ("a: 'x\n", 2, "broken YAML"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, line: int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'slo.yaml'}:{line}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a", "5", "&a [*a]", "x: " + "[" * 3000, "classes: &a {x: *a}"])
def test_odd_documents(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"slo\.yaml"):
        load(tmp_path, text)


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        SLOConfig.load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="directory"):
        SLOConfig.load(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xff\xfe\x00x: \xe9")
    with pytest.raises(ConfigError, match="UTF-8"):
        SLOConfig.load(tmp_path / "latin")
    with pytest.raises(ConfigError):
        SLOConfig.load("nul\0byte")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
keys = st.sampled_from(
    [*SLOConfig.model_fields, *ClassConfig.model_fields, *RoutingConfig.model_fields, "chat"]
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | scalars, inner, max_size=3),
    max_leaves=8,
)


def mistake(read: Callable[[], SLOConfig]) -> str:
    """Text of the ConfigError that `read` raises; empty when it succeeds."""
    try:
        read().slo_classes()
    except ConfigError as error:
        return str(error)
    return ""


@given(st.dictionaries(keys, values, max_size=4) | values)
@example("/")
@settings(max_examples=examples(400))
def test_fuzz_only_config_error_comes_out(data: Any) -> None:
    if isinstance(data, str):  # it is a path, and some of them exist
        data = f"{NOWHERE}/file {data.replace('/', '')}"
    text = mistake(lambda: SLOConfig.from_additional_config({"slo_config": data}))
    assert not text or text.startswith(("slo_config:", "cannot read"))


@given(st.text(max_size=60))
@settings(max_examples=examples(300))
def test_fuzz_yaml_text(source: str) -> None:
    text = mistake(lambda: SLOConfig._from_yaml(source, "slo.yaml"))
    assert not text or text.startswith("slo.yaml")
