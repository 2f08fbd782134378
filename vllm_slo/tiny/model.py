# SPDX-License-Identifier: Apache-2.0
"""A compact Llama in plain PyTorch, whose parameters bear transformers' names."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama with tied embeddings."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int = 4096
    theta: float = 10_000.0
    eps: float = 1e-5

    def config(self, eos: int) -> dict[str, Any]:
        """The content of config.json for LlamaForCausalLM."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions,
            "rope_theta": self.theta,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": eos,
            "eos_token_id": eos,
            "pad_token_id": eos,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }

    @classmethod
    def of(cls, folder: Path) -> "Shape":
        """The shape that a folder's config.json states."""
        c = json.loads((folder / "config.json").read_text())
        return cls(
            vocab=c["vocab_size"],
            hidden=c["hidden_size"],
            intermediate=c["intermediate_size"],
            layers=c["num_hidden_layers"],
            heads=c["num_attention_heads"],
            kv_heads=c["num_key_value_heads"],
            head_dim=c["head_dim"],
            positions=c["max_position_embeddings"],
            theta=c["rope_theta"],
            eps=c["rms_norm_eps"],
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x [batch, heads, length, head_dim], cos and sin [length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Cache:
    """Every layer's keys and values so far, in memory allocated once."""

    def __init__(self, s: Shape, batch: int, positions: int, dtype: torch.dtype) -> None:
        size = (s.layers, 2, batch, s.kv_heads, positions, s.head_dim)
        self.memory = torch.empty(size, dtype=dtype)
        self.length = 0  # Positions filled in every layer; the model moves it on.

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v [batch, kv_heads, new, head_dim]; returns all so far of that layer."""
        end = self.length + k.shape[2]
        keys, values = self.memory[layer, :, :, :, :end]
        keys[:, :, self.length :], values[:, :, self.length :] = k, v
        return keys, values


class Attention(nn.Module):
    """Grouped-query causal self-attention."""

    def __init__(self, s: Shape, index: int) -> None:
        super().__init__()
        self.shape, self.index = s, index
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        """x [batch, length, hidden] to the same shape."""
        s, (batch, length, _) = self.shape, x.shape
        q, k, v = (
            p(x).view(batch, length, -1, s.head_dim).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        past = cache.length if cache else 0
        if cache:
            k, v = cache.extend(self.index, k, v)
        if past:
            # One new token sees every key, so the heads of a group can stand in for a length.
            assert length == 1
            y = functional.scaled_dot_product_attention(
                q.view(batch, s.kv_heads, -1, s.head_dim), k, v
            )
            y = y.view(batch, s.heads, 1, s.head_dim)
        else:
            k, v = (t.repeat_interleave(s.heads // s.kv_heads, dim=1) for t in (k, v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.intermediate, bias=False)
        self.down_proj = nn.Linear(s.intermediate, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, length, hidden] to the same shape."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, s: Shape, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(s, index)
        self.mlp = MLP(s)
        self.input_layernorm = nn.RMSNorm(s.hidden, eps=s.eps)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden, eps=s.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None) -> Tensor:
        """x [batch, length, hidden] to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A causal language model: token ids [batch, length] to logits [batch, length, vocab]."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(s.vocab, s.hidden),
                "layers": nn.ModuleList(Layer(s, i) for i in range(s.layers)),
                "norm": nn.RMSNorm(s.hidden, eps=s.eps),
            }
        )
        frequencies = s.theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angles = torch.outer(torch.arange(s.positions).float(), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        for name, p in self.named_parameters():
            if p.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * s.layers) if deep else 0.02)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits for ids; with a cache that is not empty, ids is one token of each sequence."""
        start = cache.length if cache else 0
        x = self.model["embed_tokens"](ids)
        cos, sin = (t[start : start + ids.shape[1]].to(x.dtype) for t in (self.cos, self.sin))
        for layer in self.model["layers"]:
            x = layer(x, cos, sin, cache)
        if cache:
            cache.length += ids.shape[1]
        return functional.linear(self.model["norm"](x), self.model["embed_tokens"].weight)

    def save(self, folder: Path, eos: int) -> None:
        """Write model.safetensors (bfloat16) and config.json into the folder."""
        weights = {k: v.detach().bfloat16().contiguous() for k, v in self.state_dict().items()}
        (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
        (folder / "config.json").write_text(json.dumps(self.shape.config(eos), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> "Llama":
        """The model that a folder holds, its weights cast to ``dtype``."""
        model = cls(Shape.of(folder))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.to(dtype).eval()


@torch.no_grad()
def generate(model: Llama, prompts: Tensor, count: int, temperature: Tensor) -> Tensor:
    """Continue prompts [batch, length] by ``count`` tokens; returns all [batch, length + count].

    temperature [batch]: 0 is greedy.
    """
    batch, length = prompts.shape
    dtype = model.model["embed_tokens"].weight.dtype
    cache = Cache(model.shape, batch, length + count, dtype)
    ids, step = prompts, prompts
    for _ in range(count):
        logits = model(step, cache)[:, -1].float()
        greedy = logits.argmax(-1)
        heated = (logits / temperature.clamp(min=1e-3)[:, None]).softmax(-1)
        sampled = torch.multinomial(heated, 1)[:, 0]
        step = torch.where(temperature > 0, sampled, greedy)[:, None]
        ids = torch.cat((ids, step), dim=1)
    return ids
