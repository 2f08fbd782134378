# SPDX-License-Identifier: Apache-2.0
"""Published traces in JSON: Mooncake's, and AdaServe's workloads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TextIO

from vllm_slo.traces import fields
from vllm_slo.traces.errors import FieldError
from vllm_slo.traces.json_records import json_lines, json_list
from vllm_slo.traces.request import MOONCAKE_BLOCK_TOKENS, TraceRequest

MOONCAKE_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
ADASERVE_FIELDS: Final = ("emission_time_ms", "input_length", "output_length", "slo_ratio")


def mooncake(text: TextIO) -> Iterator[TraceRequest]:
    """Mooncake's JSON lines; times are ms."""
    return fields.requests_of(json_lines(text), _mooncake)


def _mooncake(item: Mapping[str, Any]) -> TraceRequest:
    fields.require(item, "timestamp", "input_length", "output_length")
    prompt_tokens = fields.tokens("input_length", item["input_length"])
    ids = fields.hash_ids(item.get("hash_ids", []), prompt_tokens, MOONCAKE_BLOCK_TOKENS)
    return TraceRequest(
        fields.number("timestamp", item["timestamp"]) / 1e3,
        prompt_tokens,
        fields.tokens("output_length", item["output_length"]),
        hash_ids=ids,
    )


def adaserve(text: TextIO) -> Iterator[TraceRequest]:
    """AdaServe's workload, one JSON list that is read whole; times are ms."""
    return fields.requests_of(json_list(text), _adaserve)


def _adaserve(item: Mapping[str, Any]) -> TraceRequest:
    fields.require(item, *ADASERVE_FIELDS)
    at_ms = fields.number("emission_time_ms", item["emission_time_ms"])
    ratio = fields.number("slo_ratio", item["slo_ratio"])
    if at_ms < 0:
        raise FieldError(f"field emission_time_ms: {at_ms} is negative")
    if ratio == 0:
        raise FieldError("field slo_ratio: 0 is no objective")
    return TraceRequest(
        at_ms / 1e3,
        fields.tokens("input_length", item["input_length"]),
        fields.tokens("output_length", item["output_length"]),
        slo_ratio=ratio,
    )
