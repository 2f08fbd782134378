# SPDX-License-Identifier: Apache-2.0
"""Train the shipped models: ``python -m vllm_slo.tiny.train --out DIR [--minutes M]``.

A target learns CPython's library sources (see :mod:`vllm_slo.tiny.text`); shallower models,
started from the target's embeddings and some of its layers, then learn to predict the target,
both on that text and on text that the target writes.  Each phase takes a share of the time given,
so a faster machine sees more text; the seed fixes everything else.  ``--only middle`` distils that
model alone from the target that DIR holds, and ``--resume`` goes on from the one that is there.
"""

import argparse
import datetime
import itertools
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional

from vllm_slo.tiny import NAMES, text
from vllm_slo.tiny.model import Llama, Shape, generate

EOS = "<|endoftext|>"  # Token 0: it begins and ends every document.
VOCABULARY = 2048
TARGET = Shape(
    vocab=VOCABULARY, hidden=256, intermediate=704, layers=6, heads=4, kv_heads=2, head_dim=64
)
# The models that learn from the target, and which of its layers theirs start as: one for each.
DISTILLED = {"middle": (0, 4, 5), "draft": (0, 5)}
SHARES = {"target": 0.36, "writing": 0.05, "middle": 0.33, "draft": 0.26}  # Of the time given.

STEP_TOKENS = 4096  # Per optimizer step: 8 windows of 512, or one of 4096 near the end.
WINDOW = 512
LONG_FROM = 0.90  # The part of a phase from which windows are as long as the context.
PROMPT = 64  # Tokens of a document that the target is given to continue.
TEMPERATURES = (0.0, 0.0, 0.6, 1.0)  # Half of what the target writes is greedy.
WRITTEN = 0.4  # The part of a distilled model's short windows that the target wrote.
MEASURED = 40  # Held-out windows that the report rests on.
CONTINUED = 128  # Tokens that a model then adds to the first PROMPT of each.
HARD = 0.3  # Weight of the target's greedy token beside the divergence.

CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


def matmul_dtype() -> torch.dtype:
    """bfloat16 where the CPU has instructions for it; elsewhere float32, many times as fast."""
    has = torch.cpu.get_capabilities()
    native = any(has.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16"))
    return torch.bfloat16 if native else torch.float32


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """A byte-level BPE of :data:`VOCABULARY` tokens, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer, its chat template and the generation defaults into the folder."""
    specials = {"bos_token": EOS, "eos_token": EOS, "pad_token": EOS}
    eos = tokenizer.token_to_id(EOS)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": TARGET.positions,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
            **specials,
        },
        "special_tokens_map.json": specials,
        "generation_config.json": {
            "bos_token_id": eos,
            "eos_token_id": eos,
            "pad_token_id": eos,
            "do_sample": False,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def encode(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    """All documents as one stream of token ids [tokens], an end token before and after each."""
    eos = tokenizer.token_to_id(EOS)
    stream = [eos]
    for encoding in tokenizer.encode_batch(documents):
        stream += [*encoding.ids, eos]
    return torch.tensor(stream)


def windows(stream: Tensor, count: int, length: int, random: torch.Generator) -> Tensor:
    """``count`` windows [count, length] at random places of the stream."""
    starts = torch.randint(len(stream) - length + 1, (count, 1), generator=random)
    return stream[starts + torch.arange(length)]


def fit(
    model: Llama,
    loss: Callable[[Tensor], Tensor],
    batch: Callable[[bool], Tensor],
    seconds: float,
    rate: float,
    name: str,
) -> int:
    """Minimise loss(batch(long)) over the model's weights for so many seconds; returns steps.

    The learning rate warms up over 100 steps and then falls as a cosine of the time spent.
    """
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    model.train()
    start, steps, progress = time.monotonic(), 0, 0.0
    while progress < 1.0:
        for group in optimizer.param_groups:
            warm = min(1.0, (steps + 1) / 100)
            group["lr"] = rate * warm * (0.02 + 0.49 * (1 + math.cos(math.pi * progress)))
        value = loss(batch(progress >= LONG_FROM))
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        progress = (time.monotonic() - start) / seconds
        if steps % 50 == 0:
            print(f"{name}: step {steps}, {progress:.0%}, loss {value.item():.3f}", flush=True)
    model.eval()
    return steps


def train_target(model: Llama, stream: Tensor, seconds: float, seed: int) -> int:
    """Let the model learn, in place, to predict the stream; returns the steps it took."""
    random = torch.Generator().manual_seed(seed)
    mixed = matmul_dtype() == torch.bfloat16

    @torch.compile(dynamic=False)
    def loss(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            logits = model(ids[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def batch(long: bool) -> Tensor:
        length = TARGET.positions if long else WINDOW
        return windows(stream, STEP_TOKENS // length, length + 1, random)

    return fit(model, loss, batch, seconds, 3e-3, "target")


def write_text(target: Llama, stream: Tensor, seconds: float, seed: int) -> Tensor:
    """Windows [count, WINDOW]: prompts from the stream, continued by the target."""
    random = torch.Generator().manual_seed(seed + 1)
    count, start = 128, time.monotonic()
    written: list[Tensor] = []
    temperatures = torch.tensor(TEMPERATURES).repeat(count // len(TEMPERATURES))
    while not written or time.monotonic() - start < seconds * (1 - 0.5 / len(written)):
        prompts = windows(stream, count, PROMPT, random)
        written.append(generate(target, prompts, WINDOW - PROMPT, temperatures))
        print(f"writing: {len(written) * count} texts", flush=True)
    return torch.cat(written)


def start_distilled(target: Llama, sources: tuple[int, ...]) -> Llama:
    """A model with the target's embeddings and final norm, and its layers ``sources``."""
    model = Llama(replace(target.shape, layers=len(sources)))
    for name in ("embed_tokens", "norm"):
        model.model[name].load_state_dict(target.model[name].state_dict())
    for layer, source in zip(model.model["layers"], sources, strict=True):
        layer.load_state_dict(target.model["layers"][source].state_dict())
    return model


def distil(
    model: Llama, target: Llama, stream: Tensor, written: Tensor, seconds: float, seed: int
) -> int:
    """Let the model learn, in place, what the target computes; returns the steps it took.

    The target computes in its own dtype.
    """
    random = torch.Generator().manual_seed(seed + 2)
    mixed = matmul_dtype() == torch.bfloat16

    @torch.compile(dynamic=False)
    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            goal = target(ids).flatten(0, 1).float()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            logits = model(ids)
        guess = logits.flatten(0, 1).float().log_softmax(-1)
        # The target's distribution, and in part its greedy token: cross-entropy against either
        # differs from the divergence by a constant.
        soft = -(goal.softmax(-1) * guess).sum(-1).mean()
        return soft + HARD * functional.nll_loss(guess, goal.argmax(-1))

    def batch(long: bool) -> Tensor:
        if long:
            return windows(stream, 1, target.shape.positions, random)
        count = STEP_TOKENS // WINDOW
        own = round(count * WRITTEN)
        rows = torch.randint(len(written), (own,), generator=random)
        return torch.cat((windows(stream, count - own, WINDOW, random), written[rows]))

    return fit(model, loss, batch, seconds, 2e-3, f"distilling {model.shape.layers} layers")


@torch.no_grad()
def mean_loss(model: Llama, ids: Tensor) -> float:
    """Mean loss in nats per token of windows ids [count, length], their first tokens given."""
    losses = [
        functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        for x in ids.split(1)
    ]
    return torch.stack(losses).mean().item()


@torch.no_grad()
def agreement(target: Llama, draft: Llama, ids: Tensor, skip: int = 0) -> dict[str, float]:
    """How often the draft's best token, and its best four, hold the target's greedy token.

    ids [windows, length]; the first ``skip`` positions of each window are not counted.
    """
    top1 = top4 = seen = 0
    for x in ids.split(8):
        goal = target(x)[:, skip:].argmax(-1, keepdim=True)
        hits = draft(x)[:, skip:].topk(4).indices == goal
        top1 += hits[..., 0].sum().item()
        top4 += hits.any(-1).sum().item()
        seen += goal.numel()
    return {"top1": round(top1 / seen, 4), "top4": round(top4 / seen, 4), "tokens": seen}


def compare(target: Llama, draft: Llama, ids: Tensor) -> dict[str, Any]:
    """Their agreement on text [windows, WINDOW + 1] and on the target's own continuations of it."""
    written = generate(target, ids[:, :PROMPT], CONTINUED, torch.zeros(len(ids)))
    return {
        "on_held_out_text": agreement(target, draft, ids[:, :-1]),
        # The last token's successor was never written, so it is not counted.
        "on_greedy_continuations": agreement(target, draft, written[:, :-1], skip=PROMPT - 1),
    }


def measure(out: Path, tokenizer: Tokenizer, names: Sequence[str]) -> dict[str, Any]:
    """What the saved models do, in float32, on MEASURED windows spread over the held-out text.

    Of each model named its size and loss, and how it agrees with every other in ``out``.
    """
    documents = text.documents(held_out=True)
    stream = encode(tokenizer, documents)
    bytes_per_token = sum(len(d.encode()) for d in documents) / len(stream)
    starts = torch.linspace(0, len(stream) - WINDOW - 1, MEASURED).long()
    rows = stream[starts[:, None] + torch.arange(WINDOW + 1)]
    present = (name for name in NAMES if (out / name / "model.safetensors").is_file())
    saved = {name: Llama.load(out / name) for name in present}
    report: dict[str, Any] = {
        "held_out_text": {"files": len(documents), "tokens": len(stream)},
        "bytes_per_token": round(bytes_per_token, 3),
    }
    for name in names:
        loss = mean_loss(saved[name], rows)
        report[name] = {
            "parameters": sum(p.numel() for p in saved[name].parameters()),
            "bytes": sum(f.stat().st_size for f in (out / name).iterdir()),
            "held_out_nats_per_token": round(loss, 4),
            "held_out_bits_per_byte": round(loss / math.log(2) / bytes_per_token, 4),
        }
    report["agreement"] = {
        f"{draft}_with_{target}": compare(saved[target], saved[draft], rows)
        for target, draft in itertools.combinations(saved, 2)
        if target in names or draft in names
    }
    return report


def phase_seconds(minutes: float, names: Sequence[str]) -> dict[str, float]:
    """How long each phase takes: the time given, divided by the shares of those that run."""
    shares = {p: share for p, share in SHARES.items() if p == "writing" or p in names}
    return {p: 60 * minutes * share / sum(shares.values()) for p, share in shares.items()}


def save_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model and all that transformers and vLLM load beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save(folder, tokenizer.token_to_id(EOS))
    save_tokenizer(tokenizer, folder)


def circumstances(machine: str, seed: int) -> dict[str, Any]:
    """What a training depended on beside this file."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": seed,
    }


def merged(old: dict[str, Any], new: dict[str, Any], name: str, *, resumed: bool) -> dict[str, Any]:
    """The report ``old``, with the figures that ``new`` has of one model.

    Of a resumed model, what all passes took is summed.
    """
    part = dict(new[name])
    if resumed and name in old:
        spent = ("passes", "minutes", "written_tokens", "steps")
        part |= {key: round(part[key] + old[name][key], 1) for key in spent}
    agreement = {**old.get("agreement", {}), **new["agreement"]}
    return {**old, name: part, "agreement": agreement}


def save_report(
    file: Path, report: dict[str, Any], only: str | None, resumed: bool
) -> dict[str, Any]:
    """Write the report, or the figures of one model into the report that is there."""
    if only and file.is_file():
        report = merged(json.loads(file.read_text()), report, only, resumed=resumed)
    file.write_text(json.dumps(report, indent=2) + "\n")
    return report


def train(
    out: Path,
    minutes: float,
    seed: int,
    machine: str,
    only: str | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Train all models, or the one of :data:`DISTILLED` named alone; returns the report.

    Writes the models' folders and report.json into ``out``.  A model trained alone learns from
    the target that ``out`` holds, and changes only its own figures of a report there; it starts
    from the target's layers or, to ``resume``, as ``out`` holds it.
    """
    torch.manual_seed(seed)
    names = (only,) if only else NAMES
    seconds = phase_seconds(minutes, names)
    documents = text.documents(held_out=False)
    saved = str(out / "target" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(saved) if only else train_tokenizer(documents)
    stream = encode(tokenizer, documents)
    print(f"{len(documents)} documents, {len(stream)} tokens", flush=True)

    runs: dict[str, dict[str, Any]] = {}
    if not only:
        model = Llama(TARGET)
        runs["target"] = {"steps": train_target(model, stream, seconds["target"], seed)}
        save_model(model, tokenizer, out / "target")
    target = Llama.load(out / "target", matmul_dtype())  # The others follow what is shipped.
    written = write_text(target, stream, seconds["writing"], seed)
    tokens = len(written) * (WINDOW - PROMPT)
    for name in (n for n in names if n in DISTILLED):
        model = Llama.load(out / name) if resume else start_distilled(target, DISTILLED[name])
        steps = distil(model, target, stream, written, seconds[name], seed)
        runs[name] = {"passes": 1, "steps": steps, "written_tokens": tokens}
        save_model(model, tokenizer, out / name)

    report = {
        "step_tokens": STEP_TOKENS,
        "training_text": {"files": len(documents), "tokens": len(stream)},
        **measure(out, tokenizer, names),
    }
    for name, run in runs.items():
        run |= {**circumstances(machine, seed), "minutes": round(seconds[name] / 60, 1)}
        report[name] = run | report[name]
    return save_report(out / "report.json", report, only, resume)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--only", choices=DISTILLED, help="distil it alone from the target in DIR")
    parser.add_argument("--resume", action="store_true", help="with --only: go on from DIR's model")
    parser.add_argument("--minutes", type=float, default=45.0, help="training time in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--machine", default=platform.machine(), help="noted in the report")
    args = parser.parse_args()
    if args.resume and not args.only:
        parser.error("--resume goes with --only: name the model that is to go on")
    for name in ("target", args.only) if args.resume else ("target",):
        if args.only and not (args.out / name / "model.safetensors").is_file():
            parser.error(f"--only {args.only}: {args.out} holds no {name} to start from")
    torch.set_num_threads(args.threads)
    report = train(args.out, args.minutes, args.seed, args.machine, args.only, args.resume)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
