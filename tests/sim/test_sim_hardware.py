# SPDX-License-Identifier: Apache-2.0
"""Hardware profiles: their arithmetic, the files they come from, one clear line per mistake."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.config import profiles
from vllm_slo.core.step_time.fit import FitReport
from vllm_slo.core.step_time.model import BatchShape, StepTimeModel
from vllm_slo.errors import VllmSLOError
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.hardware import Draft, Hardware, built_in, load_hardware

MODEL = StepTimeModel(((0.0, 0.0, 0.01), (1e-4, 0.0, 0.002)), 1e-7, pair_s=1e-9)

GOOD = """\
name: box
gpus: 2
step_time:
  terms:
    - [0.0, 0.0, 0.01]
    - [1.0e-4, 0, 0.002]
  kv_s: 1.0e-7
  pair_s: 1.0e-9
kv_tokens: 50000
max_model_len: 4096
frontend_s: 0.01
sources:
  step_time.kv_s: a guess
"""


def load(tmp_path: Path, text: str, **options: Any) -> Hardware:
    path = tmp_path / "box.yaml"
    path.write_text(text, encoding="utf-8")
    return load_hardware(path, **options)


def profile(tmp_path: Path) -> Path:
    key = profiles.ProfileKey("cpu-2", "tiny", "abc", 2, 1, "bfloat16", "0.32.0", 32)
    fit = FitReport(MODEL, 1.0, 0.0, 0.0, 1)
    return profiles.save(
        profiles.ProfileReport(key, fit, ((BatchShape(1), 0.01),)), tmp_path / "mine.json"
    )


# --- built-in profiles ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpus", "parameters", "bandwidth", "flops", "layers", "hidden", "kv_bytes", "reserve"),
    [
        ("h100-llama-8b", 1, 8.03e9, 3.35e12, 989e12, 32, 4096, 131_072, 3e9),
        ("a100-opt-13b", 2, 12.85e9, 1.555e12, 312e12, 40, 5120, 819_200, 2e9),
        ("a100-qwen-1.5b", 1, 1.78e9, 1.555e12, 312e12, 28, 1536, 28_672, 2e9),
        ("a100-toolllama-7b", 1, 6.74e9, 1.555e12, 312e12, 32, 4096, 524_288, 2e9),
    ],
)
def test_built_in_numbers_follow_from_the_data_sheets(
    name: str,
    gpus: int,
    parameters: float,
    bandwidth: float,
    flops: float,
    layers: int,
    hidden: int,
    kv_bytes: int,
    reserve: float,
) -> None:
    hardware = load_hardware(name)
    all_reduce_s = 2 * layers * 30e-6 if gpus > 1 else 0.0
    read_s = 2 * parameters / (gpus * bandwidth * 0.8)
    flat_s = max(read_s, 0.005) if name == "a100-qwen-1.5b" else read_s
    rate = gpus * flops * 0.5
    expected = [0.0, flat_s + all_reduce_s, 2 * parameters / rate, 1e-3 + all_reduce_s]
    model = hardware.step_time
    found = [value for k1, _, b in model.terms for value in (k1, b)]
    assert found == pytest.approx(expected, rel=1e-4)
    assert model.kv_s == pytest.approx(kv_bytes / (gpus * bandwidth * 0.8), rel=1e-4)
    assert model.pair_s == pytest.approx(4 * layers * hidden / rate, rel=1e-4)
    memory = {"h100": 80e9, "a100": 40e9}[name[:4]]
    left = gpus * (memory * 0.9 - reserve) - 2 * parameters
    assert hardware.kv_tokens == int(left / kv_bytes) // 16 * 16
    assert hardware.gpus == gpus
    assert hardware.frontend_s == 0.010
    assert hardware.max_num_seqs == (1024 if name[:4] == "h100" else 256)


@pytest.mark.parametrize(
    ("name", "parameters", "computed", "bandwidth", "flops", "kv_bytes", "target_kv", "copies"),
    [
        ("a100-opt-13b", 125e6, 125e6, 1.555e12, 312e12, 12 * 768 * 4, 819_200, 2),
        ("a100-toolllama-7b", 68e6, 68e6, 1.555e12, 312e12, 2 * 768 * 4, 524_288, 1),
        ("h100-llama-8b", 425e6, 294e6, 3.35e12, 989e12, 8 * 128 * 4, 131_072, 1),
    ],
)
def test_a_draft_follows_from_the_data_sheets(
    name: str,
    parameters: float,
    computed: float,
    bandwidth: float,
    flops: float,
    kv_bytes: int,
    target_kv: int,
    copies: int,
) -> None:
    hardware = load_hardware(name)
    assert hardware.draft is not None
    read = 2 * parameters + kv_bytes * hardware.kv_tokens / 2
    step_s = read / (bandwidth * 0.8) + 0.5e-3
    assert [k2 for _, k2, _ in hardware.step_time.terms] == pytest.approx([step_s] * 2, rel=1e-3)
    assert hardware.draft.token_s == pytest.approx(2 * computed / (flops * 0.5), rel=1e-3)
    room = hardware.kv_tokens * target_kv - copies * 2 * parameters
    share = room / (target_kv + copies * kv_bytes) / hardware.kv_tokens
    assert hardware.draft.kv_share == pytest.approx(share, abs=2e-4)


def test_a_draft_takes_time_and_memory_from_the_target(tmp_path: Path) -> None:
    text = GOOD + "draft:\n  name: small\n  token_s: 2.0e-5\n  kv_share: 0.5\n"
    hardware = load(tmp_path, text.replace("0, 0.002", "0.001, 0.002"))
    left = hardware.speculating()
    assert left.kv_tokens == 25_000
    plain, beside = hardware.step_time, left.step_time
    assert beside.predict_s(10, 5, 0, 3) == pytest.approx(plain.predict_s(10, 5, 0, 3) + 2e-4)
    given = hardware.with_draft_step(0.004)
    assert given.draft == hardware.draft
    assert [k2 for _, k2, _ in given.step_time.terms] == [0.004, 0.004]
    none = load(tmp_path, GOOD)
    with pytest.raises(SimulationError, match="hardware box: it has no draft"):
        none.speculating()
    free = none.with_draft_step(0.0).speculating()
    assert (free.step_time, free.kv_tokens) == (none.step_time, none.kv_tokens)


def test_every_built_in_number_names_its_source() -> None:
    assert built_in() == sorted(built_in())
    assert {"h100-llama-8b", "a100-opt-13b", "a100-qwen-1.5b"} <= set(built_in())
    for name in built_in():
        hardware = load_hardware(name)
        assert hardware.name == name
        numbers = {"gpus", "kv_tokens", "block_size", "max_num_seqs", "max_model_len", "frontend_s"}
        numbers |= {f"step_time.{part}" for part in ("terms.0", "terms.1", "kv_s", "pair_s")}
        if hardware.draft is not None:
            numbers |= {"step_time.draft", "draft.token_s", "draft.kv_share"}
        assert set(hardware.sources) == numbers
        assert hardware.kv_tokens % hardware.block_size == 0
        assert hash(hardware) == hash(load_hardware(name))


def test_half_of_the_peak_gives_the_papers_batch_of_512() -> None:
    """SLOs-Serve 6.1: the largest batch within 50 ms is 512 tokens (OPT-7B on one A100)."""
    step_s = 2 * 6.7e9 * 512 / (312e12 * 0.5)
    assert 0.040 < step_s < 0.050
    tokens = load_hardware("a100-opt-13b").step_time.time_to_tokens(0.050)
    assert 512 <= tokens < 640


# --- zero load ------------------------------------------------------------------------------------


def test_zero_load_ttft_is_the_front_end_and_one_step() -> None:
    hardware = Hardware("h", 1, MODEL, 100_000, frontend_s=0.5)
    pairs = 100 * 50 + 100 * 101 // 2
    assert hardware.zero_load_ttft_s(100, 50) == pytest.approx(
        0.5 + MODEL.predict_s(100, 50, 0, pairs)
    )
    assert hardware.zero_load_tpot_s() == MODEL.predict_s(1)


def test_zero_load_ttft_of_a_long_prompt_is_chunked() -> None:
    hardware = Hardware("h", 1, MODEL, 100_000)
    shapes = [(8192, 0), (8192, 8192), (3616, 16384)]
    expected = sum(MODEL.predict_shape_s(BatchShape.of([shape])) for shape in shapes)
    assert hardware.zero_load_ttft_s(20_000) == pytest.approx(expected)


@given(st.integers(1, 40_000), st.integers(0, 40_000), st.integers(1, 5_000))
def test_zero_load_ttft_grows_with_prompt_and_context(new: int, context: int, more: int) -> None:
    hardware = load_hardware("h100-llama-8b")
    here_s = hardware.zero_load_ttft_s(new, context)
    assert 0.010 < here_s <= hardware.zero_load_ttft_s(new, context + more)
    assert here_s <= hardware.zero_load_ttft_s(new + more, context)


@pytest.mark.parametrize(("new", "context"), [(0, 0), (-1, 0), (1, -1)])
def test_zero_load_ttft_needs_a_prompt(new: int, context: int) -> None:
    with pytest.raises(SimulationError, match="at least one new token"):
        load_hardware("h100-llama-8b").zero_load_ttft_s(new, context)


# --- files ----------------------------------------------------------------------------------------


def test_a_yaml_file_loads(tmp_path: Path) -> None:
    hardware = load(tmp_path, GOOD)
    assert hardware == Hardware(
        "box", 2, MODEL, 50_000, 16, 256, 4096, 0.01, {"step_time.kv_s": "a guess"}
    )


def test_a_file_may_hold_a_price_and_no_built_in_one_does(tmp_path: Path) -> None:
    text = GOOD.replace("frontend_s: 0.01", "price_per_gpu_hour: 2.5")
    assert load(tmp_path, text).price_per_gpu_hour == 2.5
    assert {load_hardware(name).price_per_gpu_hour for name in built_in()} == {None}


def test_options_replace_the_files_values(tmp_path: Path) -> None:
    hardware = load(tmp_path, GOOD, kv_tokens=8000, max_num_seqs=None, name="mine")
    assert (hardware.name, hardware.kv_tokens, hardware.max_num_seqs) == ("mine", 8000, 256)
    assert hardware.sources["kv_tokens"] == "given by the caller"
    assert load_hardware("h100-llama-8b", max_num_seqs=8).max_num_seqs == 8


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpus: 2", "gpu: 2", r"box\.yaml:2: gpu: unknown key; did you mean 'gpus'\?"),
        ("  kv_s:", "  kvs:", r"box\.yaml:7: step_time\.kvs: unknown key; did you mean 'kv_s'\?"),
        ("0.002]", "-0.002]", r"box\.yaml:6: step_time\.terms\.1\.2: .*greater than or equal to 0"),
        ("kv_s: 1.0e-7", "kv_s: -1.0e-7", r"box\.yaml:7: step_time\.kv_s: "),
        ("kv_s: 1.0e-7", "kv_s: .nan", r"box\.yaml:7: step_time\.kv_s: "),
        ("pair_s: 1.0e-9", "pair_s: .inf", r"box\.yaml:8: step_time\.pair_s: .*finite"),
        ("kv_s: 1.0e-7", "kv_s: 1e-7", r"box\.yaml:7: step_time\.kv_s: .*with a point"),
        ("kv_s: 1.0e-7", "kv_s: true", r"box\.yaml:7: step_time\.kv_s: "),
        ("0.002]", "0.002, 1.0]", r"box\.yaml:6: step_time\.terms\.1: .*at most 3"),
        ("    - [0.0, 0.0, 0.01]\n", "", r"box\.yaml:4: step_time\.terms: .*at least 2"),
        ("kv_tokens: 50000", "kv_tokens: 0", r"box\.yaml:9: kv_tokens: .*greater than or equal"),
        ("kv_tokens: 50000", "kv_tokens: 5.5", r"box\.yaml:9: kv_tokens: .*valid integer"),
        ("kv_tokens: 50000\n", "", r"box\.yaml: kv_tokens: Field required"),
        (
            "kv_tokens: 50000",
            "kv_tokens: 4000",
            r"kv_tokens: 4000 is too small for .*max_model_len",
        ),
        ("frontend_s: 0.01", "frontend_s: -1.0", r"box\.yaml:11: frontend_s: "),
        ("frontend_s: 0.01", "gpus: 3", r"box\.yaml:11: gpus: duplicate key"),
        ("frontend_s: 0.01", "price_per_gpu_hour: 0", r"box\.yaml:11: price_per_gpu_hour: "),
        ("frontend_s: 0.01", "price_per_gpu_hour: 2 $", r"box\.yaml:11: price_per_gpu_hour: "),
        ("step_time.kv_s: a", "kv_token: a", r"box\.yaml:13: sources\.kv_token: no such field"),
        ("gpus: 2", "gpus: [", r"box\.yaml:\d+: broken YAML"),
        (GOOD, "just text", r"box\.yaml: expected keys .*got str"),
        (GOOD, "", r"box\.yaml: expected keys .*got nothing"),
        ("sources:", "draft: {}\nsources:", r"box\.yaml:12: draft\.name: Field required"),
        (
            "sources:",
            "draft: {name: d, kv_share: 1.5}\nsources:",
            r"box\.yaml:12: draft\.kv_share: Input should be less than or equal to 1",
        ),
        (
            "sources:",
            "draft: {name: d, kv_shares: 1.0}\nsources:",
            r"box\.yaml:12: draft\.kv_shares: unknown key; did you mean 'kv_share'\?",
        ),
    ],
)
def test_a_bad_file_is_named_with_line_and_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GOOD
    with pytest.raises(SimulationError, match=message) as caught:
        load(tmp_path, GOOD.replace(old, new, 1))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, VllmSLOError)


def test_unreadable_and_unknown_profiles(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match="did you mean 'h100-llama-8b'"):
        load_hardware("h100-llama-8B")
    with pytest.raises(SimulationError, match=r"known: a100-opt-13b, .*or name a \.yaml"):
        load_hardware("zzz")
    with pytest.raises(SimulationError, match="No such file"):
        load_hardware(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SimulationError, match="not UTF-8"):
        load_hardware(tmp_path / "binary.yaml")
    with pytest.raises(SimulationError, match="unknown option 'kv_token'; did you mean"):
        load_hardware("h100-llama-8b", kv_token=3)


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(
    st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=4),
    st.sampled_from(["gpus", "kv_tokens", "step_time", "frontend_s", "sources", "name", "draft"]),
)
def test_any_value_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, value: Any, key: str
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "box.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(GOOD) | {key: value}), encoding="utf-8")
    message = ""
    try:
        load_hardware(path)
    except SimulationError as error:
        message = str(error)
    assert not message or key in message or "broken YAML" in message


def test_a_measured_profile_loads_with_stated_defaults(tmp_path: Path) -> None:
    hardware = load_hardware(profile(tmp_path))
    assert hardware.step_time == MODEL
    assert (hardware.name, hardware.gpus, hardware.block_size) == ("mine", 2, 32)
    assert (hardware.kv_tokens, hardware.max_num_seqs) == (65_536, 256)
    assert (hardware.max_model_len, hardware.frontend_s) == (32_768, 0.010)
    assert hardware.sources["step_time"].startswith("measured: mine.json, cpu-2")
    assert hardware.sources["kv_tokens"].startswith("assumed")
    small = load_hardware(profile(tmp_path), kv_tokens=3200, frontend_s=0.0)
    assert (small.kv_tokens, small.max_model_len, small.frontend_s) == (3200, 3200, 0.0)


def test_a_broken_measured_profile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(SimulationError, match=re.escape(str(path))):
        load_hardware(path)
    with pytest.raises(SimulationError, match="kv_tokens: must be a whole number"):
        load_hardware(profile(tmp_path), kv_tokens="many")


@pytest.mark.parametrize(
    ("field", "value"),
    [("token_s", -1.0), ("token_s", math.nan), ("kv_share", 0.0), ("kv_share", math.nan)],
)
def test_a_bad_field_of_a_draft_is_named(field: str, value: float) -> None:
    with pytest.raises(SimulationError, match=f"draft small: {field}: "):
        Draft("small", **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpus", 0),
        ("kv_tokens", -1),
        ("kv_tokens", 2.5),
        ("kv_tokens", 8),
        ("block_size", True),
        ("max_num_seqs", 0),
        ("max_model_len", math.nan),
        ("frontend_s", math.nan),
        ("frontend_s", math.inf),
        ("frontend_s", -0.1),
        ("price_per_gpu_hour", 0.0),
        ("price_per_gpu_hour", math.inf),
        ("name", ""),
    ],
)
def test_a_bad_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(SimulationError, match=f"hardware.*: {field}: "):
        replace(Hardware("h", 1, MODEL, 50_000), **{field: value})
