# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON body of a request as far as its SLO is concerned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

MAX_BODY_BYTES: Final = 32 * 1024 * 1024
"""Longest body that the front and quotes take."""


def is_json_type(content_type: str) -> bool:
    """Whether a Content-Type says that the body is JSON, as FastAPI reads it."""
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def read_body(body: bytes) -> dict[str, Any] | None:
    """The whole body as vLLM reads it: UTF-8, 16 or 32, with or without a byte order mark, the last
    of two equal keys; None if it is not a JSON object."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return given if isinstance(given, dict) else None


_UNSET: Final = msgspec.UNSET
_Large = msgspec.Raw | msgspec.UnsetType


class _Fields(msgspec.Struct, gc=False):
    """The fields of a body that matter here. Prompts are skipped over, not built."""

    slo: Any = _UNSET
    vllm_xargs: Any = _UNSET
    service_tier: Any = _UNSET
    nvext: Any = _UNSET
    priority: Any = _UNSET
    session_id: Any = _UNSET
    background: Any = _UNSET
    use_beam_search: Any = _UNSET
    prompt: _Large = _UNSET
    prompt_embeds: _Large = _UNSET
    messages: _Large = _UNSET


_decoder: Final = msgspec.json.Decoder(_Fields)
_NAMES: Final = _Fields.__struct_fields__


def peek(body: bytes) -> dict[str, Any] | None:
    """As `read_body`, but only the fields of `_Fields`, and much faster.

    Prompts (``prompt``, ``prompt_embeds``, ``messages``) may be `msgspec.Raw`: decode them where
    they are needed. A body that the fast reader refuses is read as vLLM reads it.
    """
    try:
        fields = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        request = read_body(body)
        return request and {name: request[name] for name in _NAMES if name in request}
    values = ((name, getattr(fields, name)) for name in _NAMES)
    return {name: value for name, value in values if value is not _UNSET}


def prompts_in(request: Mapping[str, Any]) -> int:
    """The number of prompts in a peeked request; a list of token ids is one prompt."""
    listed = [_decoded(request.get(key)) for key in ("prompt", "prompt_embeds", "messages")]
    several = [
        len(prompts)
        for prompts in listed
        if isinstance(prompts, list) and isinstance(next(iter(prompts), 0), str | list)
    ]
    return max(sum(several), 1)


def _decoded(value: object) -> object:
    """A prompt as vLLM reads it; None if it is not JSON."""
    if not isinstance(value, msgspec.Raw):
        return value
    try:
        return json.loads(bytes(value))
    except (ValueError, RecursionError):
        return None
