# SPDX-License-Identifier: Apache-2.0
"""The classes of recorded requests and their objectives, as a server with a configuration reads
them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from vllm_slo.config.model import SLOConfig
from vllm_slo.errors import InvalidSLOError
from vllm_slo.slo.fields import NAME
from vllm_slo.slo.model import SLO, slo_of_fields
from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.rules import Rules


@dataclass(frozen=True)
class TrafficClasses:
    """Gives recorded requests their classes and objectives.

    Attributes:
        config: the server's configuration; without a file, one that has no classes.
        rules: None: the recorded classes count.
    """

    config: SLOConfig
    rules: Rules | None = None

    @classmethod
    def load(cls, slo_config: Path | None, rules: Path | None) -> TrafficClasses:
        """Read the configuration and the rules.

        Raises:
            ConfigError: the configuration cannot be used.
            TraceError: the rules cannot be used, or name a class that is not configured.
        """
        config = SLOConfig.load(slo_config)
        if rules is None:
            return cls(config)
        return cls(config, Rules.load(rules, sorted(config.classes) if slo_config else None))

    @cached_property
    def _classes(self) -> dict[str, SLO]:
        return self.config.slo_classes()

    def class_of(self, request: TraceRequest, index: int) -> str:
        """The class of the request at ``index`` of its trace; empty: none.

        The first of these that there is: the rules' class; the recorded class, if it is configured;
        that of the recorded priority; the recorded class with the recorded objectives; the default
        class; the recorded class, without an objective.
        """
        if self.rules is not None and (ruled := self.rules.class_of(request, index)) is not None:
            return ruled
        if request.slo_class in self.config.classes:
            return request.slo_class
        if request.priority and request.priority in self.config.priorities:
            return self.config.priorities[request.priority]
        if _has_objective(request) or request.slo_class:
            return request.slo_class
        return self.config.default_class or ""

    def slo_of(self, request: TraceRequest, index: int) -> SLO | None:
        """The SLO of the request at ``index`` of its trace; None: it asks for nothing.

        A configured class replaces the recorded objectives.

        Raises:
            TraceError: the recorded objectives are out of range.
        """
        name = self.class_of(request, index)
        stated: dict[str, Any] = {}
        if name in self._classes:
            stated["slo_class"] = name
        elif _has_objective(request):
            stated |= {
                "slo_class": _name(name),
                "ttft_ms": request.ttft_ms,
                "tpot_ms": request.tpot_ms,
                "e2e_ms": request.e2e_ms,
            }
        else:
            return None
        stated |= {"tenant": _name(request.tenant), "session_id": _name(request.session)}
        stated = {field: value for field, value in stated.items() if value is not None}
        try:
            return slo_of_fields(stated, {}, self._classes if name in self._classes else None)
        except InvalidSLOError as error:
            raise TraceError(f"request {index} of the trace: {error}") from error


def _has_objective(request: TraceRequest) -> bool:
    return not (request.ttft_ms is request.tpot_ms is request.e2e_ms is None)


def _name(recorded: str | None) -> str | None:
    """A recorded name as a server takes it: one with other characters is replaced by its hash."""
    if not recorded or NAME.fullmatch(recorded):
        return recorded or None
    return blake2b(recorded.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def add_class_arguments(parser: argparse.ArgumentParser) -> None:
    """``--slo-config`` and ``--rules``."""
    group = parser.add_argument_group("classes")
    group.add_argument("--slo-config", metavar="FILE", type=Path,
                       help="the server's slo.yaml: classes, objectives, quotas")  # fmt: skip
    group.add_argument("--rules", metavar="FILE", type=Path,
                       help="YAML rules that give each request a class")  # fmt: skip


def classes_of(args: argparse.Namespace) -> TrafficClasses:
    """The classes of parsed arguments; raises as `TrafficClasses.load`."""
    return TrafficClasses.load(args.slo_config, args.rules)
