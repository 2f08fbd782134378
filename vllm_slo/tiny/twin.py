# SPDX-License-Identifier: Apache-2.0
"""A model with the same outputs as a small one, at a chosen cost.

``python -m vllm_slo.tiny.twin target OUT --parameters 300e6`` writes a twin of the shipped target
with 300 million parameters. It gives the target's answers in the time and memory of a model of
that size.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_slo import tiny
from vllm_slo.errors import VllmSLOError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NOISE = 0.02  # Standard deviation of the weights that no output depends on.


class TwinError(VllmSLOError, ValueError):
    """The twin cannot be written; the message says what to change."""


def write_costlier_twin(
    source: Path | str,
    out: Path | str,
    *,
    parameters: float | None = None,
    extra_layers: int = 0,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    dtype: str = "bfloat16",
) -> Path:
    """Write into ``out`` a Llama that computes the same as the one in ``source``; returns ``out``.

    Give either ``parameters``, about how many the twin has, or some of the sizes; other sizes are
    the source's. All matrices are dense and of full size, so time and memory are those of any
    model of these sizes. Outputs differ only by the order of summation: no weight of the source is
    scaled, so nothing is lost in bfloat16 either. The algebra:

    * Deeper: in an added layer o_proj and down_proj are zero, so it adds nothing to the residual
      stream.
    * Wider residual stream, hidden_size = m * h: the stream holds m copies of the source's, as
      the rows of embed_tokens, o_proj and down_proj that feed it are repeated m times.  Its mean
      square is then the source's, so RMSNorm needs another scale for neither its weight nor its
      epsilon.  The norm weights of copies 2..m are zero, so that every matrix behind a norm, the
      output head too, sees the source's h values and then zeros.  This is why hidden_size must
      be a multiple of the source's.
    * Wider MLP: the columns of down_proj behind added units are zero.
    * More heads, of unchanged head_dim (rotary frequencies and the scale of attention depend on
      it): key-value head c of the source stays at c, its query heads come first in the twin's
      group c, and the columns of o_proj behind added query heads are zero.

    Weights that meet only zeros are noise, the same on every call.

    Raises TwinError (a ValueError), which names the argument, if a size is too small for the
    source, if the source is not a Llama without biases in one model.safetensors, or if ``out`` is
    the source.
    """
    source, out = Path(source), Path(out)
    config = _read_config(source)
    if out.resolve() == source.resolve():
        raise TwinError(f"out is the source, {source}: give another folder")
    if dtype not in DTYPES:
        raise TwinError(f"dtype {dtype!r} is unknown: give one of {', '.join(DTYPES)}")
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
    }
    given = {name: value for name, value in sizes.items() if value is not None}
    if extra_layers:
        given["num_hidden_layers"] = config["num_hidden_layers"] + extra_layers
    if parameters is not None:
        if given:
            raise TwinError("give parameters or sizes, not both: parameters chooses every size")
        given = sizes_for(config, parameters)
    twin = {**config, **given, "dtype": dtype, "torch_dtype": dtype}
    _check(config, twin)

    weights = _widen(load_file(source / "model.safetensors"), config, twin, DTYPES[dtype])
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".model", ".txt"):
            shutil.copyfile(file, out / file.name)
    (out / "config.json").write_text(json.dumps(twin, indent=2) + "\n")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def sizes_for(config: dict[str, Any], parameters: float) -> dict[str, int]:
    """Sizes of a twin with about so many parameters, in the source's proportions.

    The width grows as the cube root of the parameters and the depth gives the rest, as in common
    models. Raises TwinError if that is fewer than the source has.
    """
    h, layers = config["hidden_size"], config["num_hidden_layers"]
    fits = []
    for m in range(1, max(1, round((4 * parameters) ** (1 / 3) / h)) + 1):
        sizes = {
            "hidden_size": m * h,
            "intermediate_size": m * config["intermediate_size"],
            "num_attention_heads": m * config["num_attention_heads"],
            "num_key_value_heads": m * config["num_key_value_heads"],
        }
        none = count_parameters({**config, **sizes, "num_hidden_layers": 0})
        one = count_parameters({**config, **sizes, "num_hidden_layers": 1})
        depth = round((parameters - none) / (one - none))
        if depth >= layers:
            fits.append({**sizes, "num_hidden_layers": depth})
    if not fits:
        raise TwinError(
            f"parameters={parameters:,.0f} is less than the source's "
            f"{count_parameters(config):,}: give more"
        )
    return fits[-1]


def count_parameters(config: dict[str, Any]) -> int:
    """How many parameters a Llama of these sizes has, tied embeddings counted once."""
    h, i, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    layer = 2 * h * q + 2 * h * kv + 3 * h * i + 2 * h
    embeddings = (1 if config["tie_word_embeddings"] else 2) * config["vocab_size"] * h
    return config["num_hidden_layers"] * layer + embeddings + h


def _read_config(source: Path) -> dict[str, Any]:
    """The source's config.json with head_dim and the like stated; TwinError if unsuitable."""
    for name in ("config.json", "model.safetensors"):
        if not (source / name).is_file():
            raise TwinError(f"source {source} has no {name}: give the folder of a saved model")
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    if config.get("architectures") != ["LlamaForCausalLM"]:
        raise TwinError(f"source is {config.get('architectures')}: give a LlamaForCausalLM")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise TwinError("source has biases: give a Llama without")
    config.setdefault("tie_word_embeddings", False)
    config["num_key_value_heads"] = (
        config.get("num_key_value_heads") or config["num_attention_heads"]
    )
    config["head_dim"] = (
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    )
    return config


def _group(config: dict[str, Any]) -> int:
    """Query heads for each key-value head."""
    return int(config["num_attention_heads"] // config["num_key_value_heads"])


def _check(config: dict[str, Any], twin: dict[str, Any]) -> None:
    """Raise TwinError, which names the argument, if the twin is too small for the source."""
    if twin["num_hidden_layers"] < config["num_hidden_layers"]:
        raise TwinError("extra_layers is negative: a twin can only be deeper, give 0 or more")
    for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        if twin[name] < config[name]:
            raise TwinError(
                f"{name}={twin[name]} is less than the source's: give {config[name]} or more"
            )
    h = config["hidden_size"]
    if twin["hidden_size"] < h or twin["hidden_size"] % h:
        raise TwinError(
            f"hidden_size={twin['hidden_size']} is not a multiple of the source's {h}: "
            f"give {max(1, round(twin['hidden_size'] / h)) * h}"
        )
    kv = twin["num_key_value_heads"]
    group = _group(config)
    if twin["num_attention_heads"] % kv or twin["num_attention_heads"] // kv < group:
        raise TwinError(
            f"num_attention_heads={twin['num_attention_heads']} with num_key_value_heads={kv}: "
            f"give a multiple of {kv} that is {kv * group} or more, as each key-value head of "
            f"the source serves {group} query heads"
        )
    if twin["hidden_size"] % twin["num_attention_heads"]:
        raise TwinError(  # transformers refuses such a config.json.
            f"num_attention_heads={twin['num_attention_heads']} does not divide "
            f"hidden_size={twin['hidden_size']}: give one that does"
        )


def _widen(
    weights: dict[str, Tensor], config: dict[str, Any], twin: dict[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The twin's weights by name; write_costlier_twin explains them."""

    h, hidden = config["hidden_size"], twin["hidden_size"]
    copies, d = hidden // h, config["head_dim"]
    kv, group = config["num_key_value_heads"], _group(config)
    # Where the twin's query rows hold the source's: the first heads of each of the first groups.
    queries = torch.arange(twin["num_attention_heads"] * d).view(-1, _group(twin), d)
    queries = queries[:kv, :group].flatten()
    shapes = {
        "q_proj": (twin["num_attention_heads"] * d, hidden),
        "k_proj": (twin["num_key_value_heads"] * d, hidden),
        "v_proj": (twin["num_key_value_heads"] * d, hidden),
        "o_proj": (hidden, twin["num_attention_heads"] * d),
        "gate_proj": (twin["intermediate_size"], hidden),
        "up_proj": (twin["intermediate_size"], hidden),
        "down_proj": (hidden, twin["intermediate_size"]),
        "lm_head": (config["vocab_size"], hidden),
    }
    random = torch.Generator().manual_seed(0)

    def noise(kind: str) -> Tensor:
        return torch.empty(shapes[kind], dtype=dtype).normal_(std=NOISE, generator=random)

    def widened(kind: str, old: Tensor) -> Tensor:
        if kind == "embed_tokens":
            return old.repeat(1, copies)
        if kind in ("o_proj", "down_proj"):
            new = torch.zeros(shapes[kind], dtype=dtype)
            new[:, queries if kind == "o_proj" else slice(old.shape[1])] = old.repeat(copies, 1)
        elif kind in shapes:
            new = noise(kind)
            new[queries if kind == "q_proj" else slice(len(old)), :h] = old
        else:  # A norm.
            new = torch.zeros(hidden, dtype=dtype)
            new[:h] = old
        return new

    def added(kind: str) -> Tensor:
        if kind in ("o_proj", "down_proj"):
            return torch.zeros(shapes[kind], dtype=dtype)
        return noise(kind) if kind in shapes else torch.ones(hidden, dtype=dtype)

    kinds = {name: name.removesuffix(".weight").rpartition(".")[2] for name in weights}
    result = {name: widened(kinds[name], old.to(dtype)) for name, old in weights.items()}
    first = "model.layers.0."
    for layer in range(config["num_hidden_layers"], twin["num_hidden_layers"]):
        for name in (n for n in weights if n.startswith(first)):
            result[name.replace(first, f"model.layers.{layer}.")] = added(kinds[name])
    return result


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", help=f"{' or '.join(tiny.NAMES)}, or a model's folder")
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--parameters", type=float, help="about how many; or give sizes:")
    parser.add_argument("--extra-layers", type=int, default=0)
    for size in ("hidden-size", "intermediate-size", "num-attention-heads", "num-key-value-heads"):
        parser.add_argument(f"--{size}", type=int)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    options = vars(parser.parse_args())
    source, out = options.pop("source"), options.pop("out")
    try:
        folder = tiny.path(source) if source in tiny.NAMES else Path(source)
        write_costlier_twin(folder, out, **options)
    except (TwinError, FileNotFoundError) as error:
        parser.error(str(error))
    config = json.loads((out / "config.json").read_text())
    sys.stdout.write(f"{out}: {count_parameters(config):,} parameters\n")


if __name__ == "__main__":
    main()
