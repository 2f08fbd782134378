# SPDX-License-Identifier: Apache-2.0
"""Step-time profiles on disk: one JSON file per engine set-up, in the user's cache folder."""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

from vllm_slo.core.step_time.fit import FitReport
from vllm_slo.core.step_time.model import BatchShape, Sample, StepTimeModel
from vllm_slo.errors import ProfileError

FORMAT = 1
_AGAIN = "measure this set-up with 'vllm-slo profile MODEL'"


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a step time depends on.  Two set-ups with equal keys share a profile.

    device: name and, for CPUs, core count.  model: last part of the model's name or folder, for
    people.  model_hash: fingerprint of the model's config.json.  dtype: of the weights, with
    quantization and KV-cache dtype where they differ from the default.  block_size: tokens.
    """

    device: str
    model: str
    model_hash: str
    tensor_parallel: int
    pipeline_parallel: int
    dtype: str
    vllm_version: str
    block_size: int

    def slug(self) -> str:
        """The name of this key's file, without suffix: letters, digits, ``._-``."""
        parts = (
            self.device, self.model, self.model_hash[:12],
            f"tp{self.tensor_parallel}", f"pp{self.pipeline_parallel}",
            self.dtype, f"vllm{self.vllm_version}", f"block{self.block_size}",
        )  # fmt: skip
        return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", part)[:60].strip("-.") for part in parts)


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """A measured profile: whose it is, the fit, and the medians it was fitted to."""

    key: ProfileKey
    fit: FitReport
    samples: tuple[Sample, ...]

    @property
    def model(self) -> StepTimeModel:
        return self.fit.model


def cache_dir() -> Path:
    """$VLLM_SLO_CACHE, else $XDG_CACHE_HOME/vllm-slo, else ~/.cache/vllm-slo."""
    if own := os.environ.get("VLLM_SLO_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "vllm-slo"


def default_path(key: ProfileKey) -> Path:
    """Where the profile of this set-up is kept."""
    return cache_dir() / "profiles" / f"{key.slug()}.json"


def text_of(report: ProfileReport) -> str:
    """A profile as the text of its file, JSON."""
    fit = report.fit
    data = {
        "format": FORMAT,
        "key": asdict(report.key),
        "model": fit.model.to_dict(),
        "fit": {name: getattr(fit, name) for name in (*_FIT_NUMBERS, "n")},
        "samples": [[*astuple(shape), seconds] for shape, seconds in report.samples],
    }
    return json.dumps(data, indent=1)


def save(report: ProfileReport, path: Path | None = None) -> Path:
    """Write a profile (by default to :func:`default_path`), whole or not at all.

    Raises ProfileError where the folder cannot be written.
    """
    path = default_path(report.key) if path is None else path
    text = text_of(report)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError as error:
        raise ProfileError(
            f"cannot write the profile {path}: {error}; choose another place with --json, "
            "or another cache folder with VLLM_SLO_CACHE"
        ) from error
    return path


def load(path: str | Path) -> ProfileReport:
    """Read a profile.  Raises ProfileError, naming the file, where it is missing or broken."""
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        text = f"cannot read the step-time profile {path}: {error}; {_AGAIN}"
        raise ProfileError(text) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProfileError(f"{path} is not a step-time profile of format {FORMAT}; {_AGAIN}")
    try:
        samples = tuple((BatchShape(*map(int, row[:5])), float(row[5])) for row in data["samples"])
        numbers = {name: float(data["fit"][name]) for name in _FIT_NUMBERS}
        model = StepTimeModel.from_dict(data["model"])
        if not model.predict_s(1):
            raise ValueError("by its model a step of one token takes no time")
        fit = FitReport(model, **numbers, n=int(data["fit"]["n"]))
        return ProfileReport(_read_key(data["key"]), fit, samples)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ProfileError) as error:
        raise ProfileError(f"the step-time profile {path} is broken: {error}; {_AGAIN}") from error


def find(key: ProfileKey, explicit_path: str | Path | None = None) -> StepTimeModel | None:
    """The step-time model of this set-up; None where nothing was measured yet.

    A profile named explicitly must be of this very set-up: ProfileError names the first field
    that differs and what to do.  A broken file is a ProfileError too, in the cache as well.
    """
    if explicit_path is None:
        path = default_path(key)
        if not path.is_file():
            return None
    else:
        path = Path(explicit_path).expanduser()
    report = load(path)
    _check_same_setup(path, key, report.key)
    return report.model


_FIT_NUMBERS = ("r2", "worst_residual_s", "worst_residual_ratio")


def _read_key(data: Mapping[str, Any]) -> ProfileKey:
    for field in fields(ProfileKey):
        if type(data[field.name]) is not field.type:
            raise ValueError(f"key.{field.name} is not {field.type}")
    return ProfileKey(**data)


def _check_same_setup(path: Path, wanted: ProfileKey, found: ProfileKey) -> None:
    """``model`` is a name for people, so only the other fields have to agree."""
    for field in fields(ProfileKey):
        have, want = getattr(found, field.name), getattr(wanted, field.name)
        if field.name != "model" and have != want:
            name = "model" if field.name == "model_hash" else field.name
            if name == "model":
                have, want = f"{found.model} ({have[:12]})", f"{wanted.model} ({want[:12]})"
            raise ProfileError(
                f"the step-time profile {path} is of another {name}: {have}, not {want}; "
                f"{_AGAIN}, or leave the profile out and the server learns while it runs"
            )
