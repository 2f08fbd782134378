# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo check``: what a file is, whether it is valid, and what is surely not meant in it."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from vllm_slo import cli
from vllm_slo.check.advice import advice_on, advice_on_rules
from vllm_slo.check.files import Finding, check_files, kind_of
from vllm_slo.config import profiles
from vllm_slo.config.model import SLOConfig
from vllm_slo.core.step_time.fit import FitReport
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.sim import hardware
from vllm_slo.traces import own_format
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.rules import Rules

ROOT = Path(__file__).resolve().parents[2]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,100,20\n"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'


def found(path: Path, text: str | bytes) -> Finding:
    """The finding for a file with this content."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    (finding,) = check_files([path])
    return finding


# --- kinds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.yaml", "classes: {}\n", "configuration"),
        ("a.yml", "", "configuration"),
        ("a.yaml", "clases: {}\n", "configuration"),
        ("a.yaml", "a text", "configuration"),
        ("a.yaml", "{", "configuration"),
        ("a.yaml", b"\xff\xfe", "configuration"),
        ("slo", "ageing_s: 5\n", "configuration"),
        ("a.json", '{"classes": {"chat": {}}}', "configuration"),
        ("a.yaml", "name: h\ngpus: 1\n", "hardware profile"),
        ("a.yaml", "rules: []\n", "rules"),
        ("a.yaml", "default: chat\n", "rules"),
        ("a.yaml", "- http://10.0.0.1:80\n", "list of replicas"),
        ("a.json", '[{"url": "http://10.0.0.1:80"}]', "list of replicas"),
        ("a.yaml", "- 1\n", "configuration"),
        ("a.json", '{"format": 1, "key": {}, "model": {}}', "step-time profile"),
        ("a.json", '[{"emission_time_ms": 0}]', "trace"),
        ("a.json", '{"profile": 1, "rows": [], "more": 2}', "trace"),
        ("a.jsonl", MOONCAKE, "trace"),
        ("a.jsonl", MOONCAKE * 2, "trace"),
        ("a.csv", AZURE, "trace"),
        ("a", AZURE, "trace"),
        ("a.csv", b"\x1f\x8b\x08\x00", "trace"),
        ("notes.txt", "# nothing\nof ours", "trace"),
    ],
)
def test_a_kind_is_told_by_the_content(name: str, text: str | bytes, kind: str) -> None:
    head = text.encode() if isinstance(text, str) else text
    assert kind_of(head, Path(name).suffix) == kind


def test_a_large_file_is_a_trace_without_being_parsed() -> None:
    assert kind_of(b"- http://10.0.0.1:80\n" * (1 << 18), "") == "trace"


def test_valid_files_are_told_with_what_matters(tmp_path: Path) -> None:
    trace = found(tmp_path / "t.jsonl.gz", gzip.compress((MOONCAKE * 3).encode()))
    assert (trace.kind, trace.error, trace.warnings) == ("trace", None, ())
    assert trace.facts["requests"] == 3 and trace.facts["prompt_tokens"]["sum"] == 1800
    assert trace.told == (
        "Mooncake JSON lines, 3 requests in 0.0 seconds, half of them with up to 600 prompt and "
        "3 output tokens"
    )
    empty = found(tmp_path / "t.csv", AZURE.splitlines()[0])
    assert (empty.error, empty.warnings) == (None, ((None, "there is no request in it"),))
    example = ROOT / "examples" / "slo.yaml"
    config = found(tmp_path / "slo.yaml", example.read_text(encoding="utf-8"))
    assert config.told == "4 classes (chat, code, realtime, batch)"
    assert config.warnings == ()
    rules = found(tmp_path / "rules.yaml", "rules: [{class: a, share: 0.5}, {class: b}]\n")
    assert (rules.told, rules.warnings) == ("2 rules for a, b", ())
    listed = found(tmp_path / "r.yaml", "- http://10.0.0.1:80\n- http://10.0.0.2:80\n")
    assert (listed.told, listed.facts["replicas"][0]) == ("2 replicas", "10.0.0.1:80")


def test_what_vllm_slo_brings_is_valid() -> None:
    files = [*(Path(hardware.__file__).parent / "profiles_data").glob("*.yaml")]
    assert len(files) > 3
    for finding in check_files(files):
        assert (finding.kind, finding.error, finding.warnings) == ("hardware profile", None, ())
        assert finding.facts["name"] == finding.path.stem


def test_a_measured_profile(tmp_path: Path) -> None:
    model = StepTimeModel(((1e-5, 0.0, 0.01), (1e-5, 0.0, 0.01)), 0.0)
    key = profiles.ProfileKey("cpu", "m", "0" * 64, 1, 1, "float32", "0.32.0", 16)
    fit = FitReport(model, r2=0.99, worst_residual_s=0.0, worst_residual_ratio=0.0, n=1)
    report = profiles.ProfileReport(key, fit, ((BatchShape.of([(1, 10)]), 0.01),))
    finding = found(tmp_path / "p.json", profiles.text_of(report))
    assert (finding.kind, finding.error) == ("step-time profile", None)
    assert finding.told == "m on cpu, float32, vLLM 0.32.0, R\u00b2 0.990"
    finding = found(tmp_path / "p.json", profiles.text_of(report).replace('"r2"', '"r3"'))
    assert finding.error is not None
    assert "p.json is broken: 'r2'" in finding.error


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("a.yaml", "classes: {a: {ttft_ms: 0}}\n", "a.yaml:1: classes.a.ttft_ms: 0.0 is out of"),
        ("a.yaml", "ageing: 1\n", "a.yaml:1: ageing: unknown key; did you mean 'ageing_s'?"),
        ("a.yaml", "name: h\ngpus: 0\n", "a.yaml:2: gpus: "),
        ("a.yaml", "rules: [{class: a, klass: b}]\n", "a.yaml:1: rules.0.klass: unknown key"),
        ("a.yaml", "- http://h:80\n- ftp://h\n", "a.yaml:2: url: 'ftp://h' is no URL"),
        ("a.yaml", b"\xff\xfe", "a.yaml"),
        ("a.csv", AZURE + "2024-05-10 00:00:01,x,1\n", "line 3, field ContextTokens: 'x'"),
        ("a.csv", "", "a.csv is empty"),
        ("a.csv", b"\x1f\x8b\x08\x00", "a.csv"),
    ],
)
def test_an_error_is_that_of_the_reader(
    tmp_path: Path, name: str, text: str | bytes, error: str
) -> None:
    finding = found(tmp_path / name, text)
    assert finding.kind is not None
    assert finding.error is not None
    assert error in finding.error and "\n" not in finding.error


# --- rules and the configuration named with them -------------------------------------------------


def test_rules_are_checked_against_the_one_configuration(tmp_path: Path) -> None:
    for name in ("slo.yaml", "other.yaml"):
        (tmp_path / name).write_text("classes: {chat: {ttft_ms: 500}}\n")
    (tmp_path / "rules.yaml").write_text("rules:\n- {class: chat}\n- {class: bulk}\n")
    config, other, rules = (tmp_path / n for n in ("slo.yaml", "other.yaml", "rules.yaml"))
    assert check_files([rules])[0].error is None
    assert check_files([rules, config, other])[0].error is None
    first, second = check_files([rules, config])
    assert second.error is None
    assert first.error == f"{rules}:3: class 'bulk' is not configured; known: chat"


# --- warnings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "places"),
    [
        ({"classes": {"a": {"value": 2}}}, ["classes.a"]),
        ({"classes": {"a": {"max_waiting": 2}, "b": {"tier": "best_effort"}}}, []),
        ({"classes": {"a": {"tpot_ms": 20}, "b": {"tpot_ms": 50}}, "default_class": "a"},
         ["default_class"]),
        ({"classes": {"a": {"tpot_ms": 20}, "b": {"tpot_ms": 50}}, "default_class": "b"}, []),
        ({"classes": {"a": {"tpot_ms": 20}}, "default_class": "a"}, []),
        ({"classes": {"a": {"tpot_ms": 20}}, "service_tiers": {"flex": "a", "priority": "a"}},
         ["service_tiers.flex"]),
        ({"classes": {"a": {"tier": "best_effort"}}, "service_tiers": {"flex": "a"}}, []),
        ({"classes": {"a": {"ttft_ms": 9}, "b": {"ttft_ms": 9}},
          "access": {"keys": {"k": {"env": "K", "classes": ["b"]}}}}, ["classes.a"]),
        ({"classes": {"a": {"ttft_ms": 9}}, "access": {"keys": {"k": {"env": "K"}}},
          "quotas": {"tenants": {
              "k": {"promised_tokens_per_s": 1, "burst_tokens": 1},
              "l": {"promised_tokens_per_s": 1, "burst_tokens": 1}}}}, ["quotas.tenants.l"]),
    ],
)  # fmt: skip
def test_what_is_surely_not_meant(data: dict[str, Any], places: list[str]) -> None:
    config = SLOConfig.model_validate(data)
    assert [".".join(map(str, place)) for place, _ in advice_on(config)] == places


@pytest.mark.parametrize(
    ("rules", "default", "places"),
    [
        ([{"class": "a"}, {"class": "b"}], None, [("rules", 1)]),
        ([{"class": "a"}], "b", [("default",)]),
        ([{"class": "a", "share": 1.0}], "b", [("default",)]),
        ([{"class": "a"}], None, []),
        ([{"class": "a", "share": 0.5}, {"class": "b"}], None, []),
        ([{"class": "a", "model": "*"}, {"class": "b"}], "c", [("default",)]),
    ],
)
def test_a_rule_that_is_never_reached(
    rules: list[dict[str, Any]], default: str | None, places: list[tuple[object, ...]]
) -> None:
    given = Rules.model_validate({"rules": rules, "default": default})
    assert [place for place, _ in advice_on_rules(given)] == places


# --- the command ---------------------------------------------------------------------------------


def test_the_result_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, doubtful = (tmp_path / f"{name}.yaml" for name in ("good", "bad", "doubtful"))
    good.write_text("classes: {chat: {ttft_ms: 500}}\n")
    bad.write_text("clases: {}\n")
    doubtful.write_text("\nclasses: {a: {value: 2}}\n")
    words = ["check", str(good), str(bad), str(doubtful), str(tmp_path / "none"), "--json"]
    assert cli.main([*words, "-"]) == 2
    first, second, third, last = json.loads(capsys.readouterr().out)
    assert first == {
        "file": str(good),
        "kind": "configuration",
        "valid": True,
        "error": None,
        "warnings": [],
        "facts": {"classes": ["chat"], "default_class": None},
    }
    assert (second["valid"], third["valid"]) == (False, True)
    assert "clases: unknown key" in second["error"]
    assert third["warnings"][0]["line"] == 2
    assert (last["kind"], last["valid"]) == (None, False)
    assert cli.main([*words, str(tmp_path / "out.json")]) == 2
    assert json.loads((tmp_path / "out.json").read_text()) == [first, second, third, last]


def test_the_status_is_that_of_the_worst_file(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("")
    bad.write_text("clases: {}\n")
    assert cli.main(["check", str(good)]) == 0
    assert cli.main(["check", str(good), str(bad)]) == 1
    assert cli.main(["check", str(bad), str(tmp_path / "none")]) == 2


def test_a_folder_is_one_of_recordings(tmp_path: Path) -> None:
    nothing = check_files([tmp_path])[0].error
    assert nothing == f"{tmp_path} holds no recording (*.jsonl, *.jsonl.1, *.jsonl.zst)"
    header = own_format.header_line(datetime(2026, 1, 1, tzinfo=UTC), 64, None)
    for number in range(2):
        line = own_format.request_line(TraceRequest(number, 10, 5), 0.0)
        (tmp_path / f"requests.jsonl.{number}").write_text(header + line)
    (finding,) = check_files([tmp_path])
    assert (finding.kind, finding.error, finding.facts["requests"]) == ("trace", None, 2)
