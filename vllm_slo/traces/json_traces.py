# SPDX-License-Identifier: Apache-2.0
"""Published traces in JSON: Mooncake's, Alibaba's, and AdaServe's workloads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, TextIO

import msgspec

from vllm_slo.traces import fields
from vllm_slo.traces.errors import FieldError, RecordError
from vllm_slo.traces.json_records import json_lines, json_list
from vllm_slo.traces.request import MOONCAKE_BLOCK_TOKENS, TraceRequest
from vllm_slo.traces.times import at_of

MOONCAKE_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
BAILIAN_FIELDS: Final = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length")
ADASERVE_FIELDS: Final = ("emission_time_ms", "input_length", "output_length", "slo_ratio")
_BAILIAN_BLOCK_TOKENS: Final = 16
_MOST_CHATS: Final = 200_000
"""Chats that may still be continued: 20 MB."""


def mooncake(text: TextIO) -> Iterator[TraceRequest]:
    """Mooncake's JSON lines; times are ms, a hash id stands for 512 tokens."""
    return fields.requests_of(json_lines(text), _mooncake)


def _mooncake(item: Mapping[str, Any]) -> TraceRequest:
    return _hashed(item, 1e-3, MOONCAKE_BLOCK_TOKENS)


def _hashed(item: Mapping[str, Any], unit_s: float, block_tokens: int) -> TraceRequest:
    fields.require(item, "timestamp", "input_length", "output_length")
    prompt_tokens = fields.tokens("input_length", item["input_length"])
    return TraceRequest(
        at_of(fields.number("timestamp", item["timestamp"]) * unit_s),
        prompt_tokens,
        fields.tokens("output_length", item["output_length"]),
        hash_ids=fields.hash_ids(item.get("hash_ids", []), prompt_tokens, block_tokens),
        block_tokens=block_tokens,
    )


def bailian(text: TextIO) -> Iterator[TraceRequest]:
    """Alibaba's traces of Qwen; times are seconds, a hash id stands for 16 tokens.

    Its type is the class. A chat and those that continue it are a session, named by the first one;
    at most `_MOST_CHATS` chats are remembered.
    """
    first_of: dict[int, int] = {}
    for where, item in json_lines(text):
        try:
            fields.require(item, *BAILIAN_FIELDS)
            chat = fields.integer("chat_id", item["chat_id"])
            parent = fields.integer("parent_chat_id", item["parent_chat_id"])
            first_of[chat] = first_of.get(parent, parent if parent >= 0 else chat)
            if len(first_of) > _MOST_CHATS:
                del first_of[next(iter(first_of))]
            request = msgspec.structs.replace(
                _hashed(item, 1.0, _BAILIAN_BLOCK_TOKENS),
                slo_class=fields.name("type", item.get("type", "")),
                session=str(first_of[chat]),
            )
        except FieldError as error:
            raise RecordError(f"{where}, {error}") from None
        yield request


def adaserve(text: TextIO) -> Iterator[TraceRequest]:
    """AdaServe's workload, one JSON list that is read whole; times are ms.

    A negative ratio is a TPOT in ms. A positive one is a multiple of a machine's zero-load step.
    """
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
        tpot_ms=-ratio if ratio < 0 else None,
        slo_ratio=ratio,
    )
