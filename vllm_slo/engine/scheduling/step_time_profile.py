# SPDX-License-Identifier: Apache-2.0
"""Which stored step-time profile belongs to an engine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

from vllm import __version__
from vllm.platforms import current_platform

from vllm_slo.config import profiles
from vllm_slo.config.profiles import ProfileKey
from vllm_slo.core.step_time.model import StepTimeModel

__all__ = ["find_profile", "profile_key"]


def profile_key(vllm_config: Any) -> ProfileKey:
    """The set-up of a running engine's ``VllmConfig`` (after the KV cache was sized)."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    if model.quantization:
        dtype += f"-{model.quantization}"
    if vllm_config.cache_config.cache_dtype != "auto":
        dtype += f"-kv.{vllm_config.cache_config.cache_dtype}"
    return ProfileKey(
        device=device_name(),
        model=Path(model.model).name,
        model_hash=_config_hash(model.hf_config),
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        dtype=dtype,
        vllm_version=__version__,
        block_size=vllm_config.cache_config.block_size or 0,
    )


def find_profile(vllm_config: Any, explicit_path: str | Path | None = None) -> StepTimeModel | None:
    """The measured step-time model of this engine, or None where there is none in the cache.

    Raises ProfileError if ``explicit_path`` is of another set-up, or a file is broken.
    """
    return profiles.find(profile_key(vllm_config), explicit_path)


def device_name() -> str:
    """Name of the accelerator; for CPUs the model's name and the machine's core count."""
    if current_platform.is_cpu():
        return f"{_cpu_name()} x{os.cpu_count()}"
    return str(current_platform.get_device_name())


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine() or "cpu")


def _config_hash(hf_config: Any) -> str:
    """Fingerprint of config.json: layers and sizes, not where it lies or who wrote it."""
    volatile = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}
    values = {k: v for k, v in hf_config.to_dict().items() if k not in volatile}
    text = json.dumps(values, sort_keys=True, default=lambda value: type(value).__name__)
    return hashlib.sha256(text.encode()).hexdigest()
