# SPDX-License-Identifier: Apache-2.0
"""The shipped models: their files, their agreement, and their costlier twins."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_slo import tiny
from vllm_slo.tiny import text
from vllm_slo.tiny.model import Llama
from vllm_slo.tiny.train import agreement
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


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """What transformers computes in float32 for ids [windows, length]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids).logits


def test_path_names_two_models_and_refuses_others() -> None:
    assert tiny.path("target").is_dir()
    assert tiny.path("draft").is_dir()
    with pytest.raises(ValueError, match="target, draft"):
        tiny.path("../target")


def test_import_is_light() -> None:
    code = (
        "import sys; from vllm_slo import tiny; tiny.path('draft');"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_both_models_are_small() -> None:
    files = [f for name in tiny.NAMES for f in tiny.path(name).iterdir()]
    assert sum(f.stat().st_size for f in files) <= 16_000_000


@pytest.mark.parametrize("name", tiny.NAMES)
def test_transformers_computes_what_was_trained(name: str, ids: torch.Tensor) -> None:
    folder = tiny.path(name)
    with torch.no_grad():
        ours = Llama.load(folder)(ids[:2])
    torch.testing.assert_close(logits(folder, ids[:2]), ours, atol=1e-3, rtol=1e-3)
    report = json.loads((folder.parent / "report.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    assert report[name]["parameters"] == count_parameters(config)


def test_tokenizers_are_one() -> None:
    target, draft = (AutoTokenizer.from_pretrained(tiny.path(name)) for name in tiny.NAMES)
    assert target.get_vocab() == draft.get_vocab()
    assert target.eos_token_id == 0
    sample = "def f(x):\n    return x  # \u00e9\u4e16\U0001f600\n"
    assert target.decode(target.encode(sample)) == sample
    chat = [{"role": "user", "content": "sort a list"}]
    prompt = target.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == "# user: sort a list\n# assistant:\n"


def test_draft_follows_target_on_held_out_text(ids: torch.Tensor) -> None:
    target, draft = (Llama.load(tiny.path(name)) for name in tiny.NAMES)
    share = agreement(target, draft, ids)
    assert share["tokens"] >= 4000
    assert share["top1"] >= 0.60
    assert share["top4"] >= share["top1"] + 0.10


def test_split_is_the_same_in_every_python() -> None:
    assert text.is_held_out(Path("random.py"))
    assert not text.is_held_out(Path("argparse.py"))
    held_out, trained = (set(text.files(held_out=side)) for side in (True, False))
    assert not held_out & trained
    assert 12 <= len(held_out) < len(trained) / 8


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
def test_twin_computes_the_same(sizes: dict[str, float], ids: torch.Tensor, tmp_path: Path) -> None:
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
def test_twin_refuses_what_cannot_be(
    sizes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TwinError, match=message):
        write_costlier_twin(tiny.path("target"), tmp_path / "twin", **sizes)
    assert not (tmp_path / "twin").exists()


def test_twin_refuses_its_source_and_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(TwinError, match="out is the source"):
        write_costlier_twin(tiny.path("target"), tiny.path("target"))
    with pytest.raises(TwinError, match="has no config"):
        write_costlier_twin(tmp_path, tmp_path / "twin")
