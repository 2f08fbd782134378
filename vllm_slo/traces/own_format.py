# SPDX-License-Identifier: Apache-2.0
"""Our own format of recorded traffic, ``vllm-slo-trace/1``: JSON lines, without any text.

The first line is the header, an object with ``schema``, ``created`` (ISO 8601, UTC),
``block_tokens`` (prompt tokens that one hash id stands for) and maybe ``model``. Each other line is
a request. Its keys are Mooncake's where Mooncake has them; a key without a value is left out.
Times are in ms, `timestamp` counts from ``created``. Lines come in order of the requests' ends.

Files may be joined: another header counts for the lines after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO, cast, get_args

from vllm_slo.traces import fields
from vllm_slo.traces.errors import FieldError, RecordError
from vllm_slo.traces.json_records import json_lines
from vllm_slo.traces.request import End, Promise, Served, TraceRequest

SCHEMA: Final = "vllm-slo-trace/1"
_ENDS: Final = get_args(End)
_PROMISES: Final = get_args(Promise)
_MOST_BLOCK_TOKENS: Final = 1_000_000


def header_line(created: datetime, block_tokens: int, model: str | None) -> str:
    """The first line of a file.

    ``created``: with a time zone; ``block_tokens``: of all `hash_ids`; ``model``: of the requests
    that name none.
    """
    header: dict[str, Any] = {
        "schema": SCHEMA,
        "created": created.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        "block_tokens": block_tokens,
    }
    if model is not None:
        header["model"] = model
    return _line(header)


def request_line(request: TraceRequest, created_s: float) -> str:
    """The line of one request. ``created_s``: the header's ``created`` on the clock of ``at_s``."""
    item: dict[str, Any] = {
        "timestamp": round((request.at_s - created_s) * 1e3, 3),
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
        "hash_ids": list(request.hash_ids) or None,
        "class": request.slo_class or None,
        "tenant": request.tenant,
        "model": request.model,
        "session": request.session,
        "priority": request.priority or None,
        "ttft_ms": request.ttft_ms,
        "tpot_ms": request.tpot_ms,
        "e2e_ms": request.e2e_ms,
    }
    served = request.served
    if served is not None:
        item |= {
            "end": served.end,
            "promise": served.promise,
            "served_ttft_ms": _ms(served.ttft_s),
            "served_tpot_ms": _ms(served.tpot_s),
            "served_e2e_ms": _ms(served.e2e_s),
            "late_kept": served.late_kept,
            "attained": served.attained,
        }
    return _line({key: value for key, value in item.items() if value is not None})


def requests(text: TextIO) -> Iterator[TraceRequest]:
    """The requests of a file, in its order; ``at_s`` is seconds since 2000.

    A server may be writing the file: a part of a line at its end is passed over.

    Raises:
        RecordError: a line is broken.
    """
    header: _Header | None = None
    for where, item in json_lines(text, may_be_cut=True):
        try:
            if "schema" in item:
                header = _Header(item)
                continue
            if header is None:
                raise FieldError(f"field schema: missing; the first line must hold {SCHEMA!r}")
            request = _request(item, header)
        except FieldError as error:
            raise RecordError(f"{where}, {error}") from None
        yield request


class _Header:
    """What the header says of the lines after it."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        if item["schema"] != SCHEMA:
            raise FieldError(f"field schema: {str(item['schema'])[:80]!r} is not {SCHEMA!r}")
        fields.require(item, "created", "block_tokens")
        self.created_s = fields.date_s("created", item["created"])
        self.block_tokens = fields.tokens("block_tokens", item["block_tokens"])
        if not 1 <= self.block_tokens <= _MOST_BLOCK_TOKENS:
            raise fields.bad("block_tokens", item["block_tokens"], "a size of blocks")
        self.model = _known(item, "model", fields.name)


def _request(item: Mapping[str, Any], header: _Header) -> TraceRequest:
    fields.require(item, "timestamp", "input_length", "output_length")
    prompt_tokens = fields.tokens("input_length", item["input_length"])
    return TraceRequest(
        header.created_s + fields.number("timestamp", item["timestamp"]) / 1e3,
        prompt_tokens,
        fields.tokens("output_length", item["output_length"]),
        _known(item, "class", fields.name) or "",
        _known(item, "tenant", fields.name),
        _known(item, "model", fields.name) or header.model,
        _known(item, "session", fields.name),
        _known(item, "priority", fields.integer) or 0,
        _known(item, "ttft_ms", fields.objective_ms),
        _known(item, "tpot_ms", fields.objective_ms),
        _known(item, "e2e_ms", fields.objective_ms),
        hash_ids=fields.hash_ids(item.get("hash_ids", []), prompt_tokens, header.block_tokens),
        block_tokens=header.block_tokens,
        served=_served(item) if "end" in item else None,
    )


def _served(item: Mapping[str, Any]) -> Served:
    promise = item.get("promise")
    return Served(
        cast("End", fields.word("end", item["end"], _ENDS)),
        None if promise is None else cast("Promise", fields.word("promise", promise, _PROMISES)),
        _known(item, "served_ttft_ms", fields.duration_s),
        _known(item, "served_tpot_ms", fields.duration_s),
        _known(item, "served_e2e_ms", fields.duration_s),
        _known(item, "late_kept", fields.flag),
        _known(item, "attained", fields.flag),
    )


def _known(item: Mapping[str, Any], key: str, read: Any) -> Any:
    value = item.get(key)
    return None if value is None else read(key, value)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _line(item: Mapping[str, Any]) -> str:
    return json.dumps(item, separators=(",", ":")) + "\n"
