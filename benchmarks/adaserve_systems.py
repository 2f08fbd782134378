# SPDX-License-Identifier: Apache-2.0
"""Ways of serving to be compared, and their engines, each in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from adaserve_engine import ABLATIONS, ANSWER, ENVIRONMENT

from vllm_slo import tiny
from vllm_slo.config.class_names import SCHEDULER, TREE_PROPOSER, TREE_WORKER

CHILD: Final = Path(__file__).with_name("adaserve_engine.py")
MAX_MODEL_LEN: Final = 2048
MAX_SEQS: Final = 64
KV_GB: Final = 1
ENGINE: Final[Mapping[str, Any]] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": MAX_SEQS,
    "max_num_batched_tokens": 2048,
    "block_size": 32,
    "skip_tokenizer_init": True,
    "disable_log_stats": True,
    "async_scheduling": False,
    "gpu_memory_utilization": 0.1,  # vLLM demands that share of the memory to be free
    "seed": 0,
}
DYNAMIC: Final = ((1, 4, 4), (5, 16, 3), (17, 32, 2), (33, MAX_SEQS, 1))
"""vLLM's ``num_speculative_tokens_per_batch_size``: (first, last batch size, draft tokens). About
as many as keep a step below twice a lone token's time on a machine that verifies 16 for free."""
CHUNK: Final = 128
"""Tokens of a step of "sarathi": vLLM with Sarathi-Serve's small chunks."""
MAX_NODES: Final = 24


def say(text: str) -> None:
    """Progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of the target and of its draft."""

    target: Path
    draft: Path


@dataclass(frozen=True, slots=True)
class System:
    """One system: arguments of vLLM's engine, and fields of its requests."""

    name: str
    engine: Mapping[str, Any]
    send_slo: bool = False
    by_priority: bool = False
    without: str = ""

    @property
    def ours(self) -> bool:
        """Whether the system is vllm-slo or a variant of it."""
        return self.send_slo


def _speculation(base: str, models: Models, dynamic: Sequence[Sequence[int]]) -> dict[str, Any]:
    """``speculative_config`` of vLLM's own methods."""
    draft = {"method": "draft_model", "model": str(models.draft)}
    kind, _, number = base.partition("-")
    if base == "dynamic":
        most = max(tokens for _, _, tokens in dynamic)
        schedule = {"num_speculative_tokens_per_batch_size": [list(row) for row in dynamic]}
        return draft | {"num_speculative_tokens": most} | schedule
    if base == "adaptive":
        return draft | {"num_speculative_tokens": 4, "enable_adaptive_verification": True}
    if kind == "chain" and number.isdecimal() and int(number):
        return draft | {"num_speculative_tokens": int(number)}
    if kind == "ngram" and number.isdecimal() and int(number):
        lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        return {"method": "ngram", "num_speculative_tokens": int(number)} | lookup
    raise SystemExit(
        f"system {base!r} is unknown: stock, chain-K, dynamic, adaptive, ngram-K, ours, "
        "ours-no-trees, ours-chain-K, each of ours with -without-PART (slo, throughput, "
        "adaptation, calibration, waiting; for ours-chain-K waiting, lengths), all with +priority "
        "or +chunk-N; sarathi; priority; or a --variant"
    )


def _ours(base: str, models: Models, slo_config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that make vLLM's engine vllm-slo's: with trees, without drafts (``ours-no-trees``),
    or with vLLM's chains (``ours-chain-K``)."""
    engine: dict[str, Any] = {
        "scheduler_cls": SCHEDULER,
        "additional_config": {"slo_config": dict(slo_config)},
    }
    if base == "ours-no-trees":
        return engine
    if base.startswith("ours-chain-"):
        engine["speculative_config"] = _speculation(base.removeprefix("ours-"), models, DYNAMIC)
        return engine
    nodes = dict(slo_config.get("speculation", {})).get("max_nodes", MAX_NODES)
    engine["additional_config"]["draft_model"] = str(models.draft)
    engine["worker_cls"] = TREE_WORKER
    engine["speculative_config"] = {
        "method": "custom_class",
        "model": TREE_PROPOSER,
        "num_speculative_tokens": nodes,
    }
    return engine


@dataclass(frozen=True, slots=True)
class Kitchen:
    """All that systems are made of.

    Attributes:
        slo_config: the configuration of ours.
        variants: name -> what is different there (mappings are merged): for ablations.
        engine: further arguments of every engine.
    """

    models: Models
    slo_config: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    dynamic: Sequence[Sequence[int]] = DYNAMIC
    engine: Mapping[str, Any] | None = None

    def system(self, name: str) -> System:
        """A system by its name; see the command line."""
        whole = {"priority": "stock+priority", "sarathi": f"stock+chunk-{CHUNK}"}.get(name, name)
        base, *extras = whole.split("+")
        engine = {"model": str(self.models.target), **ENGINE, **(self.engine or {})}
        base, _, without = base.partition("-without-")
        if without and without not in ABLATIONS:
            raise SystemExit(f"system {name!r}: {without!r} is unknown: one of {list(ABLATIONS)}")
        ours = base in ("ours", "ours-no-trees", *self.variants) or base.startswith("ours-chain-")
        if ours:
            config = merged(self.slo_config, self.variants.get(base, {}))
            engine |= _ours(base, self.models, config)
        elif base != "stock":
            engine["speculative_config"] = _speculation(base, self.models, self.dynamic)
        for extra in extras:
            kind, _, number = extra.partition("-")
            if extra == "priority":
                engine["scheduling_policy"] = "priority"
            elif kind == "chunk" and number.isdecimal():
                engine["max_num_batched_tokens"] = int(number)
            else:
                raise SystemExit(f"system {name!r}: {extra!r} is unknown: priority or chunk-N")
        return System(name, engine, ours, "priority" in extras, without)


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``change`` merged into it, mapping by mapping."""
    result = dict(base)
    for key, value in change.items():
        below = result.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


# --- their engines --------------------------------------------------------------------------------


def child_environment() -> dict[str, str]:
    """The environment of an engine's process; vLLM binds its threads to cores itself."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return {"VLLM_CPU_KVCACHE_SPACE": str(KV_GB), **ENVIRONMENT, **environment}


def answered(lines: Iterable[str]) -> dict[str, Any] | None:
    """The answer in the output of an engine's process; None if it ended without one."""
    for line in lines:
        if line.startswith(ANSWER):
            result: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            return result
    return None


class Engines:
    """Engines that have started, each in its own process; they sleep while another one is asked.

    So systems can take turns within a minute, on a machine that is another one some minutes later.
    """

    def __init__(self) -> None:
        self._children: dict[str, tuple[subprocess.Popen[str], IO[str]]] = {}

    def ask(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        """Serve a workload (see ``adaserve_engine.py``); RuntimeError with what the process said
        where it fails."""
        key = describe_ask({"engine": ask["engine"], "without": ask["without"]})
        if key not in self._children:
            errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
            started = subprocess.Popen(
                [sys.executable, str(CHILD)], env=child_environment(), text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
            self._children[key] = started, errors
        child, said = self._children[key]
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(dict(ask)) + "\n")
            child.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; what it said tells why
        found = answered(child.stdout)
        if found is None:
            said.seek(0)
            raise RuntimeError(f"exit status {child.wait()}\n{said.read()}")
        return found

    def close(self) -> None:
        """End all engines."""
        for child, said in self._children.values():
            child.kill()
            child.communicate()  # closes its pipes
            said.close()
        self._children.clear()


def profiled(ask: Mapping[str, Any], work: Path) -> None:
    """Measure an engine's step times in its own process; RuntimeError if that fails."""
    path = work / "ask.json"
    path.write_text(json.dumps(ask))
    done = subprocess.run(
        [sys.executable, str(CHILD), str(path)],
        env=child_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if answered(done.stdout.splitlines()) is None:
        raise RuntimeError(f"exit status {done.returncode}\n{done.stdout}{done.stderr}")


def in_own_process(script: str, ask: Mapping[str, Any], kv_gb: int = KV_GB) -> Any:
    """What a benchmark's ``script`` prints last, as JSON, of an ``ask`` that it is given as a file
    after ``--ask``; SystemExit with what it printed where it fails."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(dict(ask), file)
        file.flush()
        done = subprocess.run(
            [sys.executable, script, "--ask", file.name],
            env={**child_environment(), "VLLM_CPU_KVCACHE_SPACE": str(kv_gb)},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stdout)
    return json.loads(done.stdout.strip().splitlines()[-1])


def twin(name: str, parameters: float, folder: Path) -> Path:
    """A twin of a built-in model with about ``parameters`` parameters; 0: the model itself."""
    if not parameters:
        return tiny.path(name)
    kind = "tiny" if name == "target" else f"tiny-{name}"  # the demo's name of the target
    out = folder / f"{kind}-{parameters / 1e6:.0f}m"
    if not (out / "model.safetensors").is_file():
        say(f"writing a twin of the {name} with {parameters / 1e6:.0f}M parameters")
        command = [sys.executable, "-m", "vllm_slo.tiny.twin", str(tiny.path(name)), str(out)]
        subprocess.run([*command, "--parameters", str(parameters)], check=True)
    return out


def describe_ask(ask: Mapping[str, Any]) -> str:
    """A fingerprint."""
    return hashlib.sha256(json.dumps(ask, sort_keys=True).encode()).hexdigest()[:16]
