# SPDX-License-Identifier: Apache-2.0
"""Simulated hardware: step times, memory and limits of one replica.

A profile is a built-in one (``profiles_data/*.yaml``: roofline numbers from data sheets, each with
its source), a YAML file with the same keys, or a JSON file that ``vllm-slo profile`` measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from vllm_slo.config import profiles
from vllm_slo.config.yaml_nodes import line_of, near, parse
from vllm_slo.core.step_time.model import DEFAULT_MAX_TOKENS, StepTimeModel, chunk_pairs
from vllm_slo.errors import ProfileError
from vllm_slo.sim.errors import SimulationError

CHUNK_TOKENS: Final = 8192
"""Tokens of one step of a lone long prompt: vLLM 0.32's default for a server on an H100."""
FRONTEND_S: Final = 0.010
"""Assumed seconds a request spends in HTTP, tokenising and IPC before the engine sees it."""
MEASURED_KV_TOKENS: Final = 65_536
"""KV-cache size assumed for a measured JSON profile, which holds step times only."""

_DATA: Final = Path(__file__).parent / "profiles_data"
_POSITIVE: Final = ("gpus", "kv_tokens", "block_size", "max_num_seqs", "max_model_len")


@dataclass(frozen=True, slots=True)
class Draft:
    """The time and memory that a draft model takes from its target.

    The time of one of its sequential steps is the step-time model's second coefficient.

    Attributes:
        token_s: seconds per token that the target computes, because the draft computes it, too.
        kv_share: share of the target's KV tokens that still fit, in (0, 1].

    Raises:
        SimulationError: a number is out of range.
    """

    name: str
    token_s: float = 0.0
    kv_share: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.token_s < math.inf:
            raise SimulationError(
                f"draft {self.name}: token_s: must be finite seconds >= 0, not {self.token_s}"
            )
        if not 0.0 < self.kv_share <= 1.0:
            raise SimulationError(
                f"draft {self.name}: kv_share: must be above 0 and at most 1, not {self.kv_share}"
            )


@dataclass(frozen=True, slots=True)
class Hardware:
    """One replica.

    Attributes:
        gpus: GPUs per replica (tensor parallel); rates are reported per GPU.
        step_time: batch shape -> seconds.
        kv_tokens: KV-cache size, tokens.
        max_num_seqs: most requests in one step.
        max_model_len: most tokens of one request, prompt and answer.
        frontend_s: seconds before the engine sees a request; part of every TTFT.
        sources: field -> where its number comes from.
        scheduled: whether the step times include scheduling, as measured ones do.
        draft: the draft model for speculation; None: there is none.
        price_per_gpu_hour: US dollars; None: not known.

    Raises:
        SimulationError: a field is out of range; the message names it.
    """

    name: str
    gpus: int
    step_time: StepTimeModel
    kv_tokens: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_model_len: int = 32_768
    frontend_s: float = 0.0
    sources: dict[str, str] = field(default_factory=dict, hash=False)
    scheduled: bool = False
    draft: Draft | None = None
    price_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise SimulationError(f"hardware: name: must be a text, not {self.name!r}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SimulationError(
                    f"hardware {self.name}: {name}: must be a whole number of at least 1, "
                    f"not {str(value)[:80]}"
                )
        seconds = self.frontend_s
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not number or not 0 <= seconds < math.inf:
            raise SimulationError(
                f"hardware {self.name}: frontend_s: must be finite seconds >= 0, "
                f"not {str(seconds)[:80]}"
            )
        price = self.price_per_gpu_hour
        if price is not None and not 0.0 < price < math.inf:
            raise SimulationError(
                f"hardware {self.name}: price_per_gpu_hour: must be US dollars above 0, not {price}"
            )
        if self.kv_tokens < self.block_size:
            raise SimulationError(
                f"hardware {self.name}: kv_tokens: {self.kv_tokens} is less than one block of "
                f"{self.block_size}"
            )

    def zero_load_ttft_s(self, new_tokens: int, context_tokens: int = 0) -> float:
        """Seconds a lone request waits for its first token: ``frontend_s`` and its prefill.

        Args:
            new_tokens: prompt tokens to compute, at least 1; chunks of ``CHUNK_TOKENS``.
            context_tokens: tokens before them whose KV is cached.

        Raises:
            SimulationError: a number of tokens is out of range.
        """
        if new_tokens < 1 or context_tokens < 0:
            raise SimulationError(
                f"zero-load TTFT: needs at least one new token after a context >= 0, got "
                f"{new_tokens} after {context_tokens}"
            )
        total_s, end = self.frontend_s, context_tokens + new_tokens
        for start in range(context_tokens, end, CHUNK_TOKENS):
            chunk = min(CHUNK_TOKENS, end - start)
            total_s += self.step_time.predict_s(chunk, start, 0, chunk_pairs(chunk, start))
        return total_s

    def zero_load_tpot_s(self) -> float:
        """Seconds per decoded token of a lone request with a short context."""
        return self.step_time.predict_s(1)

    def with_draft_step(self, step_s: float) -> Hardware:
        """The same hardware with a draft (its own, if it has one) whose step takes ``step_s``."""
        (k1, _, b), (m1, _, d) = self.step_time.terms
        model = replace(self.step_time, terms=((k1, step_s, b), (m1, step_s, d)))
        given = {**self.sources, "draft.step_s": "given by the caller"}
        draft = self.draft or Draft("a draft")
        return replace(self, step_time=model, draft=draft, sources=given)

    def speculating(self, *, rests: bool = False) -> Hardware:
        """The same hardware with the time and memory that its draft leaves to the target.

        Args:
            rests: the draft reads tokens when it drafts, and not with every step.

        Raises:
            SimulationError: there is no draft.
        """
        if self.draft is None:
            raise SimulationError(
                f"hardware {self.name}: it has no draft to speculate with; give the time of a "
                "draft step with --draft-step-ms, or choose other hardware"
            )
        return replace(
            self,
            step_time=self.step_time.besides(0.0, 0.0 if rests else self.draft.token_s),
            kv_tokens=int(self.kv_tokens * self.draft.kv_share),
        )


def built_in() -> list[str]:
    """Names of the built-in profiles, in alphabetical order."""
    return sorted(path.stem for path in _DATA.glob("*.yaml"))


def load_hardware(name_or_path: str | Path, **options: Any) -> Hardware:
    """A built-in profile, a YAML file with the same keys, or a measured JSON profile.

    Args:
        name_or_path: one of ``built_in()``, or a path that ends in .yaml, .yml or .json.
        options: ``name``, ``gpus``, ``kv_tokens``, ``block_size``, ``max_num_seqs``,
            ``max_model_len``, ``frontend_s``, ``price_per_gpu_hour`` replace the profile's values;
            None keeps a value. A
            JSON profile has only step times, block size and parallelism. Its defaults for the rest:
            ``kv_tokens`` 65,536, ``max_num_seqs`` 256, ``max_model_len`` 32,768 (at most the KV
            cache), ``frontend_s`` 0.010.

    Raises:
        SimulationError: no such profile, an unreadable file, an unknown key or option, a bad
            value; one line that names the file, the line and the key.
    """
    chosen = {key: value for key, value in options.items() if value is not None}
    known = [f.name for f in fields(Hardware) if f.name not in ("step_time", "sources", "draft")]
    for key in chosen:
        if key not in known:
            raise SimulationError(f"hardware: unknown option {key!r}; {near(key, known)}")
    path = _find(name_or_path)
    if path.suffix == ".json":
        return _measured(path, chosen)
    hardware = _from_yaml(path)
    if chosen:
        given = {**hardware.sources, **dict.fromkeys(chosen, "given by the caller")}
        hardware = replace(hardware, **chosen, sources=given)
    return _checked(hardware, str(path))


def _find(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if text in built_in():
        return _DATA / f"{text}.yaml"
    path = Path(text).expanduser()
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        return path
    raise SimulationError(
        f"hardware: no profile is called {text[:80]!r}; {near(text, built_in())}; "
        "or name a .yaml or .json file"
    )


def _checked(hardware: Hardware, origin: str) -> Hardware:
    if hardware.kv_tokens < hardware.max_model_len:
        raise SimulationError(
            f"{origin}: kv_tokens: {hardware.kv_tokens} is too small for a request of "
            f"max_model_len {hardware.max_model_len} (vLLM would not start); lower max_model_len"
        )
    return hardware


def _measured(path: Path, options: dict[str, Any]) -> Hardware:
    try:
        report = profiles.load(path)
    except ProfileError as error:
        raise SimulationError(str(error)) from error
    key = report.key
    kv_tokens = options.get("kv_tokens", MEASURED_KV_TOKENS)
    measured = f"measured: {path.name}, {key.device}, vLLM {key.vllm_version}"
    sources = {"step_time": measured, "block_size": measured, "gpus": measured}
    defaults = {
        "name": path.stem,
        "gpus": key.tensor_parallel * key.pipeline_parallel,
        "kv_tokens": kv_tokens,
        "block_size": key.block_size,
        "max_num_seqs": 256,
        "max_model_len": min(32_768, kv_tokens) if isinstance(kv_tokens, int) else 32_768,
        "frontend_s": FRONTEND_S,
    }
    for name in defaults:
        sources.setdefault(name, "assumed: not in the profile")
    sources |= dict.fromkeys(options, "given by the caller")
    hardware = Hardware(
        step_time=report.model, scheduled=True, sources=sources, **(defaults | options)
    )
    return _checked(hardware, str(path))


def _number(value: Any) -> Any:
    """Refuse numbers that YAML reads as text, such as 5e-6, with a message that says so."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return value
        raise ValueError(f"YAML reads {value} as text; write it with a point, as in 5.0e-6")
    return value


_Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
_Whole = Annotated[int, Field(ge=1)]
_Line = Annotated[list[_Seconds], Field(min_length=3, max_length=3)]


class _Keys(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _StepTime(_Keys):
    """The keys of ``step_time``; see ``core.step_time.model`` for the equation. Seconds."""

    terms: Annotated[list[_Line], Field(min_length=2, max_length=2)]
    kv_s: _Seconds = 0.0
    pair_s: _Seconds = 0.0
    max_tokens: _Whole = DEFAULT_MAX_TOKENS


class _Draft(_Keys):
    """The keys of ``draft``; ``Draft`` describes them."""

    name: Annotated[str, Field(min_length=1)]
    token_s: _Seconds = 0.0
    kv_share: Annotated[float, BeforeValidator(_number), Field(gt=0, le=1)] = 1.0


class _Profile(_Keys):
    """The keys of a profile file; ``Hardware`` describes them."""

    name: Annotated[str, Field(min_length=1)]
    gpus: _Whole
    step_time: _StepTime
    kv_tokens: _Whole
    block_size: _Whole = 16
    max_num_seqs: _Whole = 256
    max_model_len: _Whole = 32_768
    frontend_s: _Seconds = 0.0
    draft: _Draft | None = None
    price_per_gpu_hour: Annotated[float, BeforeValidator(_number), Field(gt=0)] | None = None
    sources: dict[str, str] = Field(default_factory=dict)


PROFILE_KEYS: Final = tuple(_Profile.model_fields)
"""The keys of a profile file."""


def _from_yaml(path: Path) -> Hardware:
    node, data = _parse(path)
    if not isinstance(data, dict):
        got = "nothing" if data is None else type(data).__name__
        raise SimulationError(f"{path}: expected keys such as 'kv_tokens:', got {got}")
    try:
        profile = _Profile.model_validate(data)
    except ValidationError as error:
        raise SimulationError(_describe(error, path, node)) from error
    for key in profile.sources:
        if key.split(".")[0] not in _Profile.model_fields:
            line = line_of(node, ("sources", key))
            raise SimulationError(
                f"{path}:{line}: sources.{key}: no such field; {near(key, _Profile.model_fields)}"
            )
    step = profile.step_time
    low, high = ((line[0], line[1], line[2]) for line in step.terms)
    values = {name: getattr(profile, name) for name in _Profile.model_fields}
    values["step_time"] = StepTimeModel((low, high), step.kv_s, step.max_tokens, step.pair_s)
    values["draft"] = None if profile.draft is None else Draft(**dict(profile.draft))
    try:
        return Hardware(**values)
    except SimulationError as error:
        raise SimulationError(f"{path}: {error}") from error


def _parse(path: Path) -> tuple[yaml.Node | None, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise SimulationError(f"hardware: cannot read {str(path)!r}: {reason}") from error
    return parse(text, path, SimulationError)


def _describe(error: ValidationError, path: Path, node: yaml.Node | None) -> str:
    """One line about one mistake: an unknown key if there is one, else the first mistake."""
    mistakes = error.errors(include_url=False)
    unknown = [mistake for mistake in mistakes if mistake["type"] == "extra_forbidden"]
    first = (unknown or mistakes)[0]
    loc = tuple(first["loc"])
    key = ".".join(str(part) for part in loc)
    if first["type"] == "extra_forbidden":
        parts: dict[str, type[BaseModel]] = {"step_time": _StepTime, "draft": _Draft}
        model = parts.get(str(loc[0]), _Profile)
        message = f"{key}: unknown key; {near(str(loc[-1]), model.model_fields)}"
    elif first["type"] == "value_error":
        message = f"{key}: {first['ctx']['error']}"
    else:
        message = f"{key}: {first['msg']}"
    line = line_of(node, loc)
    return f"{path}:{line}: {message}" if line else f"{path}: {message}"
