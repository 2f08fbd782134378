# SPDX-License-Identifier: Apache-2.0
"""Rules that give each recorded request a class, read from a YAML file.

    rules:
      - {class: chat, tenant: "acme*", output_tokens: "-500"}
      - {class: batch, share: 0.3}
    default: other

The first rule that matches counts. A rule matches if all of its conditions do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema

from vllm_slo.config.yaml_nodes import line_of, near, parse
from vllm_slo.slo.access_config import Section
from vllm_slo.slo.fields import NAME
from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.request import TraceRequest

_RANGE: Final = re.compile(r"(\d{0,12})\s*(-?)\s*(\d{0,12})", re.ASCII)


def _read_range(value: object) -> tuple[int, int | None]:
    """(lowest, highest; None: no bound) of ``500``, ``0-2000``, ``500-`` or ``-500``."""
    text = str(value).strip()
    match = None if isinstance(value, bool) else _RANGE.fullmatch(text)
    if match is None or text in ("", "-"):
        raise ValueError(f"{text[:80]!r} is no range of tokens; write 0-2000, 500- or -500")
    low, dash, high = match.groups()
    lowest = int(low or 0)
    highest = int(high) if high else None if dash else lowest
    if highest is not None and highest < lowest:
        raise ValueError(f"{text[:80]!r} ends before it begins")
    return lowest, highest


def _read_name(value: object) -> object:
    if isinstance(value, str) and not NAME.fullmatch(value):
        raise ValueError(
            f"{value[:80]!r} is no name of a class; use 1 to 64 of A-Z a-z 0-9 _ . : @ / -"
        )
    return value


_NAME_SCHEMA: Final = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_RANGE_SCHEMA: Final = {
    "type": ["integer", "string"],
    "pattern": r"^\s*([0-9]{1,12}\s*(-\s*[0-9]{0,12})?|-\s*[0-9]{1,12})\s*$",
}

Name = Annotated[str, BeforeValidator(_read_name), WithJsonSchema(_NAME_SCHEMA)]
Range = Annotated[
    tuple[int, int | None], BeforeValidator(_read_range), WithJsonSchema(_RANGE_SCHEMA)
]


class Rule(Section):
    """One rule: conditions, and the class of the requests that meet them all.

    Attributes:
        name: the class (key ``class``).
        model, tenant, recorded_class: patterns with ``*``, ``?`` and ``[...]``. A request without
            the name has the empty one, which ``*`` matches.
        prompt_tokens, output_tokens: (lowest, highest or None), both included.
        share: of the requests that meet the other conditions; the rest goes on to the next rule.
    """

    name: Name = Field(alias="class")
    model: str | None = None
    tenant: str | None = None
    recorded_class: str | None = None
    prompt_tokens: Range | None = None
    output_tokens: Range | None = None
    share: float | None = Field(default=None, gt=0.0, le=1.0)

    def matches(self, request: TraceRequest) -> bool:
        """Whether a request meets all conditions; ``share`` is none of them."""
        return (
            _fits(self.model, request.model)
            and _fits(self.tenant, request.tenant)
            and _fits(self.recorded_class, request.slo_class)
            and _within(self.prompt_tokens, request.prompt_tokens)
            and _within(self.output_tokens, request.output_tokens)
        )


def _fits(pattern: str | None, name: str | None) -> bool:
    return pattern is None or fnmatchcase(name or "", pattern)


def _within(bounds: tuple[int, int | None] | None, tokens: int) -> bool:
    return bounds is None or (bounds[0] <= tokens and (bounds[1] is None or tokens <= bounds[1]))


class Rules(Section):
    """The rules of a file, in order, and the class of what no rule matches."""

    rules: list[Rule] = Field(min_length=1)
    default: Name | None = None

    @classmethod
    def load(cls, path: Path, classes: Sequence[str] | None = None) -> Rules:
        """Read a file of rules. ``classes``: those that a rule may name; None: any.

        Raises:
            TraceError: the file cannot be read, or holds a mistake; one line with file and line.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise TraceError(f"cannot read {path}: {reason}") from error
        node, data = parse(text, path, TraceError)
        if not isinstance(data, dict):
            raise TraceError(f"{path}: a file of rules begins with the key rules")
        try:
            rules = cls.model_validate(data)
        except ValidationError as error:
            raise TraceError(_describe(error, path, node)) from error
        for place, rule in enumerate(rules.rules):
            _check_class(rule.name, classes, path, line_of(node, ("rules", place, "class")))
        if rules.default is not None:
            _check_class(rules.default, classes, path, line_of(node, ("default",)))
        return rules

    def class_of(self, request: TraceRequest, index: int) -> str | None:
        """The class of the request at ``index`` of the trace; None: no rule and no default.

        The index decides the shares, so a trace gets the same classes each time.
        """
        for place, rule in enumerate(self.rules):
            if rule.matches(request) and (
                rule.share is None or _fraction(place, index) < rule.share
            ):
                return rule.name
        return self.default


def _fraction(rule: int, index: int) -> float:
    """A number in [0, 1) that seems random and depends on nothing else."""
    digest = blake2b(f"{rule}/{index}".encode(), digest_size=8, person=b"vllm-slo").digest()
    return int.from_bytes(digest) / 2**64


def _check_class(name: str, classes: Sequence[str] | None, path: Path, line: int | None) -> None:
    if classes is not None and name not in classes:
        raise TraceError(f"{path}:{line}: class {name!r} is not configured; {near(name, classes)}")


def _describe(error: ValidationError, path: Path, node: yaml.Node | None) -> str:
    """One line for the first mistake that pydantic found."""
    first = error.errors(include_url=False)[0]
    loc = first["loc"]
    key = ".".join(map(str, loc))
    if first["type"] == "extra_forbidden":
        known = [f.alias or n for n, f in Rule.model_fields.items()]
        message = (
            f"unknown key; {near(str(loc[-1]), known if len(loc) > 1 else Rules.model_fields)}"
        )
    elif first["type"] == "value_error":
        message = str(first["ctx"]["error"])
    else:
        message = first["msg"]
    line = line_of(node, loc)
    return f"{path}:{line}: {key}: {message}" if line else f"{path}: {key}: {message}"
