# SPDX-License-Identifier: Apache-2.0
"""What a call of a Ray Serve deployment asks for, read from its arguments.

A deployment's methods may take anything, so this looks for what callers of vLLM know:

==================  ================================================================================
objectives          the keyword ``slo``: an `SLO`, or a mapping as in the body field ``slo``;
                    ``extra_args`` of a ``SamplingParams`` (`SLO.to_extra_args`); the carriers in
                    the body of an OpenAI request, as a mapping or as vLLM's object for it; of an
                    HTTP request that Serve's own proxy sends, its headers alone
prompt              the keyword ``prompt``, ``prompt_token_ids``, ``messages`` or ``input``; these
                    fields of a body or of vLLM's prompt; else the first text or list of token ids
                    among the positional arguments; of an HTTP request, the length of its body
most tokens         ``max_tokens`` as a keyword, of a ``SamplingParams``, or of a body
==================  ================================================================================

What cannot be read is left out: the deployment answers for mistakes.
"""

from __future__ import annotations

import pickle  # nosec B403
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm_slo.errors import InvalidSLOError
from vllm_slo.router.body_reader import Asked
from vllm_slo.router.prompts import Prompt, read_max_tokens, read_prompt
from vllm_slo.slo.carriers import Policy, asked_by, carriers_of, slo_headers
from vllm_slo.slo.keys import INTERNAL_KEYS
from vllm_slo.slo.model import SLO

IDS: Final = "prompt_token_ids"
_NAMED: Final = frozenset(
    {"slo", "prompt", IDS, "messages", "input", "max_tokens", "max_completion_tokens"}
)
"""Keywords that are read by their name; other arguments are read by their type."""


def read_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy, epoch_s: float
) -> Asked:
    """The parts of a call that routing needs. Objectives with a mistake count as none.

    ``epoch_s``: when the call was made, for ``prefill_ddl``.
    """
    body = _body_of(args, kwargs)
    return Asked(_slo_of(body, {}, policy, epoch_s), read_prompt(body), read_max_tokens(body))


def read_http_call(argument: Any, policy: Policy, epoch_s: float) -> Asked:
    """As `read_call`, for the one argument with which Serve's own proxy calls an ingress.

    Serve chooses a replica before the body comes. So objectives are read from headers, and the
    whole body counts as text of the prompt.
    """
    headers: list[tuple[bytes, bytes]] = list(_http_scope(argument).get("headers", ()))
    lengths = [value for name, value in headers if name.lower() == b"content-length"]
    size = int(lengths[0]) if lengths and lengths[0].isdigit() else 0
    return Asked(_slo_of({}, slo_headers(headers), policy, epoch_s), Prompt(size=size), None)


def _slo_of(
    body: Mapping[str, Any], headers: Mapping[str, str], policy: Policy, epoch_s: float
) -> SLO | None:
    try:
        slo, _ = asked_by(body, carriers_of(body, headers), policy, epoch_s)
    except InvalidSLOError:
        return None
    return slo


def _body_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as one body of an OpenAI request. An earlier argument counts before a later
    one, and a keyword before both."""
    body: dict[str, Any] = {}
    others = list(args)
    for name, value in kwargs.items():
        if name in _NAMED and not (name == "prompt" and isinstance(value, Mapping)):
            body[name] = value
        else:
            others.append(value)
    for value in others:
        _add_fields(value, body)
    for value in args:
        if isinstance(value, str | list):
            body.setdefault("prompt", value)
            body.setdefault("max_tokens", None)  # not a body, whose default is OpenAI's
    if (ids := body.pop(IDS, None)) is not None:
        body["prompt"] = list(ids)
    if isinstance(slo := body.get("slo"), SLO):
        del body["slo"]
        body["vllm_xargs"] = {**(body.get("vllm_xargs") or {}), **slo.to_extra_args()}
    return body


def _add_fields(value: Any, body: dict[str, Any]) -> None:
    """Add the fields of a body, of vLLM's prompt, or of a ``SamplingParams``."""
    if hasattr(value, "extra_args"):
        extra = {k: v for k, v in (value.extra_args or {}).items() if k not in INTERNAL_KEYS}
        body.setdefault("vllm_xargs", extra)
        body.setdefault("max_tokens", getattr(value, "max_tokens", None))
        return
    if hasattr(value, "model_dump"):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        for name, given in value.items():
            body.setdefault(name, given)


def _http_scope(argument: Any) -> Mapping[str, Any]:
    """The ASGI scope of an HTTP request.

    Serve's proxy has pickled it itself, in this process. What clients send is in it as bytes.
    """
    if isinstance(argument, bytes):
        argument = pickle.loads(argument)  # nosec B301
    scope: Mapping[str, Any] = argument.asgi_scope
    return scope
