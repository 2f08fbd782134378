# SPDX-License-Identifier: Apache-2.0
"""Warnings about a valid configuration or file of rules: only of what is surely not meant."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_slo.config.model import SLOConfig
from vllm_slo.config.sections import ClassConfig
from vllm_slo.traces.rules import Rule, Rules

Advice = tuple[tuple[str | int, ...], str]
"""(place in the file, what is wrong with it)."""

_BEST_EFFORT_TIER = "flex"


def advice_on(config: SLOConfig) -> list[Advice]:
    """Every warning, in the order of the reference."""
    return [*_classes(config), *_default_class(config), *_tiers(config), *_access(config)]


def advice_on_rules(rules: Rules) -> list[Advice]:
    """A warning if a rule matches every request and something comes after it."""
    last = len(rules.rules) - 1
    for place, rule in enumerate(rules.rules):
        if place == last and rules.default is None:
            break
        if rule.share in (None, 1.0) and not _conditions(rule):
            after = ("rules", place + 1) if place < last else ("default",)
            return [(after, f"never used, because rules.{place} matches every request")]
    return []


def _conditions(rule: Rule) -> dict[str, object]:
    return rule.model_dump(exclude={"name", "share"}, exclude_none=True)


def _classes(config: SLOConfig) -> Iterator[Advice]:
    for name, spec in config.classes.items():
        bounds = (spec.tier, spec.session_e2e_ms, spec.max_wait_ms, spec.max_waiting)
        if not _has_objective(name, spec) and all(bound is None for bound in bounds):
            text = (
                "the class has no objective and no tier; set ttft_ms, tpot_ms or e2e_ms, or tier: "
                "best_effort if none is meant"
            )
            yield ("classes", name), text


def _default_class(config: SLOConfig) -> Iterator[Advice]:
    name = config.default_class
    paces = {n: c.tpot_ms for n, c in config.classes.items() if c.tpot_ms is not None}
    others = [pace for other, pace in paces.items() if other != name]
    if name in paces and others and paces[name] < min(others):
        text = (
            f"{name} has the shortest tpot_ms of all classes ({paces[name]:g}), and every request "
            "that names no class gets it; choose a class with a longer one, or leave the key out"
        )
        yield ("default_class",), text


def _tiers(config: SLOConfig) -> Iterator[Advice]:
    name = config.service_tiers.get(_BEST_EFFORT_TIER)
    if name is not None and _has_objective(name, config.classes[name]):
        text = (
            f"flex is always best effort, so the objectives of {name} do not hold; map it to a "
            "class without objectives, or to null"
        )
        yield ("service_tiers", _BEST_EFFORT_TIER), text


def _access(config: SLOConfig) -> Iterator[Advice]:
    if config.access is None:
        return
    grants = config.access.grants.values()
    for name in config.classes:
        if not any(grant.classes is None or name in grant.classes for grant in grants):
            yield (("classes", name), "no key of access may ask for the class")
    others = config.access.others
    tenants = config.access.tenants | {others.tenant if others else None}
    for tenant in config.quotas.tenants:
        if tenant not in tenants:
            yield (("quotas", "tenants", tenant), "no key of access speaks for the tenant")


def _has_objective(name: str, spec: ClassConfig) -> bool:
    return spec.to_slo(name).has_objective
