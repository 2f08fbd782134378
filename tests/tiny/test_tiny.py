# SPDX-License-Identifier: Apache-2.0
"""The shipped models: their files, their agreement, and their costlier twins."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_slo import tiny
from vllm_slo.tiny import text, train
from vllm_slo.tiny.model import Llama
from vllm_slo.tiny.twin import TwinError, count_parameters, write_costlier_twin


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    """Held-out text: token ids [windows, 256], the head of one long file after another."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.path("target"))
    documents = sorted(text.documents(held_out=True), key=len)[-12:]
    heads = [tokenizer(document[:6000])["input_ids"] for document in documents]
    rows = [head[i : i + 256] for head in heads for i in range(0, len(head) - 255, 256)]
    assert len(rows) >= 16
    return torch.tensor(rows)


def report() -> dict[str, Any]:
    """What was measured when the shipped models were trained."""
    return json.loads((tiny.path("target").parent / "report.json").read_text())


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """What transformers computes in float32 for ids [windows, length]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids).logits


def test_path_names_three_models_and_refuses_others() -> None:
    folders = [tiny.path(name) for name in ("target", "middle", "draft")]
    assert len(set(folders)) == 3 and all(folder.is_dir() for folder in folders)
    with pytest.raises(ValueError, match="target, middle, draft"):
        tiny.path("../target")


def test_import_is_light() -> None:
    code = (
        "import sys; from vllm_slo import tiny; tiny.path('draft');"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_models_together_are_small() -> None:
    sizes = [sum(f.stat().st_size for f in tiny.path(name).iterdir()) for name in tiny.NAMES]
    assert sum(sizes) <= 20_000_000
    assert sizes == sorted(sizes, reverse=True)
    assert [report()[name]["bytes"] for name in tiny.NAMES] == sizes


@pytest.mark.parametrize("name", tiny.NAMES)
def test_transformers_computes_what_was_trained(name: str, ids: torch.Tensor) -> None:
    folder = tiny.path(name)
    with torch.no_grad():
        ours = Llama.load(folder)(ids[:2])
    torch.testing.assert_close(logits(folder, ids[:2]), ours, atol=1e-3, rtol=1e-3)
    config = json.loads((folder / "config.json").read_text())
    assert report()[name]["parameters"] == count_parameters(config)


def test_tokenizers_are_one() -> None:
    target, *others = (AutoTokenizer.from_pretrained(tiny.path(name)) for name in tiny.NAMES)
    for other in others:
        assert other.get_vocab() == target.get_vocab()
    assert target.eos_token_id == 0
    sample = "def f(x):\n    return x  # \u00e9\u4e16\U0001f600\n"
    assert target.decode(target.encode(sample)) == sample
    chat = [{"role": "user", "content": "sort a list"}]
    prompt = target.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "# user: sort a list\n# assistant:\n"


@pytest.mark.slow
def test_smaller_models_follow_larger_ones_on_held_out_text(ids: torch.Tensor) -> None:
    """The text is the running Python's library: another version's, or a distribution's, is another
    text, with some hundredths more or less."""
    saved = {name: Llama.load(tiny.path(name)) for name in tiny.NAMES}
    pairs = {"middle_with_target": 0.60, "draft_with_target": 0.56, "draft_with_middle": 0.60}
    assert report()["agreement"].keys() == pairs.keys()
    shares = {}
    for pair, least in pairs.items():
        draft, target = pair.split("_with_")
        share = train.agreement(saved[target], saved[draft], ids)
        assert share["tokens"] >= 4000
        assert share["top1"] >= least
        assert share["top4"] >= share["top1"] + 0.10
        said = report()["agreement"][pair]["on_held_out_text"]
        assert share["top1"] == pytest.approx(said["top1"], abs=0.06)  # On other windows.
        shares[pair] = share["top1"]
    assert shares["middle_with_target"] >= shares["draft_with_target"] + 0.02


@pytest.mark.slow
def test_middle_follows_what_the_target_writes_better_than_the_draft(ids: torch.Tensor) -> None:
    target, middle, draft = (Llama.load(tiny.path(name)) for name in tiny.NAMES)
    rows = ids[::4, : train.PROMPT + 1]
    better, worse = (
        train.compare(target, model, rows)["on_greedy_continuations"] for model in (middle, draft)
    )
    assert better["tokens"] == train.CONTINUED * len(rows)
    assert better["top1"] >= max(0.75, worse["top1"] + 0.03)


def test_distilled_models_start_as_layers_of_the_target() -> None:
    target = Llama.load(tiny.path("target"))
    for name, sources in train.DISTILLED.items():
        assert (sources[0], sources[-1]) == (0, target.shape.layers - 1)
        started = train.start_distilled(target, sources)
        assert started.shape == Llama.load(tiny.path(name)).shape
        ours = [layer.state_dict() for layer in started.model["layers"]]
        theirs = [target.model["layers"][source].state_dict() for source in sources]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ("amx_bf16", torch.bfloat16),
        ("avx512_bf16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("avx2", torch.float32),
    ],
)
def test_training_uses_bfloat16_where_the_cpu_has_it(
    capability: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("avx2", "avx512_bf16", "amx_bf16")
    has = {**dict.fromkeys(names, False), capability: True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    assert train.matmul_dtype() is dtype


@pytest.fixture
def one_step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Training in which every phase is one small step."""
    sizes = {"WINDOW": 24, "PROMPT": 8, "STEP_TOKENS": 96, "MEASURED": 2, "CONTINUED": 8}
    for name, value in sizes.items():
        monkeypatch.setattr(train, name, value)
    few = text.documents(held_out=True)[:4]
    monkeypatch.setattr(text, "documents", lambda *, held_out: few)
    monkeypatch.setattr(torch, "compile", lambda **_: lambda function: function)
    return partial(train.train, minutes=1e-6)


@pytest.mark.slow
def test_one_model_trains_alone_and_leaves_the_others(
    tmp_path: Path, one_step: Callable[..., dict[str, Any]]
) -> None:
    whole = one_step(tmp_path, seed=0, machine="here")
    files = {f: f.read_bytes() for f in sorted(tmp_path.rglob("*.*"))}
    alone = one_step(tmp_path, seed=7, machine="elsewhere", only="middle")
    assert whole.keys() == report().keys()
    for name in tiny.NAMES:
        assert whole[name]["steps"] == 1
        assert whole[name].keys() <= report()[name].keys()
        assert Llama.load(tmp_path / name).shape == Llama.load(tiny.path(name)).shape
    changed = {f.relative_to(tmp_path) for f, old in files.items() if f.read_bytes() != old}
    assert changed == {Path("report.json"), Path("middle/model.safetensors")}
    assert json.loads((tmp_path / "report.json").read_text()) == alone
    assert (alone["middle"]["seed"], alone["middle"]["machine"]) == (7, "elsewhere")
    for made in (whole, alone):
        del made["middle"], made["agreement"]["middle_with_target"]
        del made["agreement"]["draft_with_middle"]
    assert alone == whole


@pytest.mark.slow
def test_one_model_resumes_where_it_ended(
    tmp_path: Path, one_step: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny.path("target"), tmp_path / "target")
    first = one_step(tmp_path, seed=0, machine="here", only="draft")["draft"]
    ended = Llama.load(tmp_path / "draft").state_dict()
    monkeypatch.setattr(train, "fit", lambda *_: 2)  # It changes no weight.
    second = one_step(tmp_path, seed=1, machine="here", only="draft", resume=True)["draft"]
    torch.testing.assert_close(Llama.load(tmp_path / "draft").state_dict(), ended, rtol=0, atol=0)
    assert (first["passes"], first["steps"]) == (1, 1)
    assert (second["passes"], second["steps"], second["seed"]) == (2, 3, 1)
    assert second["written_tokens"] == 2 * first["written_tokens"]
    again = one_step(tmp_path, seed=0, machine="here", only="draft")["draft"]
    assert (again["passes"], again["steps"]) == (1, 2)
    started = train.start_distilled(Llama.load(tmp_path / "target"), train.DISTILLED["draft"])
    torch.testing.assert_close(
        Llama.load(tmp_path / "draft").state_dict(), started.state_dict(), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "middle"], "--only middle: .* holds no target"),
        (["--resume"], "--resume goes with --only"),
    ],
)
def test_one_model_needs_what_it_starts_from(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "--out", str(tmp_path), *arguments])
    with pytest.raises(SystemExit):
        train.main()
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"extra_layers": 3},
        {"hidden_size": 768},
        {"intermediate_size": 1000},
        {"num_attention_heads": 16, "num_key_value_heads": 4},
        {
            "extra_layers": 2,
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
        {"parameters": 30e6},
    ],
    ids="+".join,
)
def test_twin_computes_the_same(sizes: dict[str, Any], ids: torch.Tensor, tmp_path: Path) -> None:
    source = tiny.path("target")
    twin = write_costlier_twin(source, tmp_path, **sizes)
    config = json.loads((twin / "config.json").read_text())
    if "parameters" in sizes:
        assert count_parameters(config) == pytest.approx(sizes["parameters"], rel=0.05)
    for name, size in sizes.items():
        assert name in ("extra_layers", "parameters") or config[name] == size
    ours, theirs = logits(source, ids[:2]), logits(twin, ids[:2])
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)
    assert torch.equal(theirs.argmax(-1), ours.argmax(-1))


@pytest.mark.parametrize("name", train.DISTILLED)
def test_smaller_models_have_twins_too(name: str, ids: torch.Tensor, tmp_path: Path) -> None:
    source = tiny.path(name)
    twin = write_costlier_twin(source, tmp_path, parameters=20e6)
    ours, theirs = logits(source, ids[:2]), logits(twin, ids[:2])
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 300}, "hidden_size=300 .* multiple .* give 256"),
        ({"extra_layers": -1}, "extra_layers"),
        ({"intermediate_size": 64}, "intermediate_size=64 .* give 704 or more"),
        ({"num_attention_heads": 7}, "num_attention_heads=7 .* multiple of 2"),
        ({"num_attention_heads": 6}, "num_attention_heads=6 does not divide"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4.* 8 or more"),
        ({"parameters": 1e6}, "parameters=1,000,000 .* give more"),
        ({"parameters": 30e6, "hidden_size": 512}, "not both"),
        ({"dtype": "int4"}, "dtype 'int4'"),
    ],
)
def test_twin_refuses_what_cannot_be(sizes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TwinError, match=message):
        write_costlier_twin(tiny.path("target"), tmp_path / "twin", **sizes)
    assert not (tmp_path / "twin").exists()


def test_twin_refuses_its_source_and_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(TwinError, match="out is the source"):
        write_costlier_twin(tiny.path("target"), tiny.path("target"))
    with pytest.raises(TwinError, match="has no config"):
        write_costlier_twin(tmp_path, tmp_path / "twin")
