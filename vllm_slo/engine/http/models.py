# SPDX-License-Identifier: Apache-2.0
"""``GET /v1/models``: the SLO classes that requests may name, beside each model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from vllm_slo.engine.http.messages import resized
from vllm_slo.engine.telemetry.faults import Held
from vllm_slo.slo.body import read_body
from vllm_slo.slo.carriers import Policy
from vllm_slo.slo.fields import PUBLIC_OF
from vllm_slo.slo.model import SLO

if TYPE_CHECKING:
    from starlette.types import Message, Send

MODELS_ROUTE: Final = "/v1/models"
_CLASSES: Final = Held("Models are listed without the classes.")


def with_classes(send: Send, policy: Callable[[], Policy]) -> Send:
    """A `send` that adds the classes, if there are any, to the list of models."""
    held: list[Message] = []

    async def forward(message: Message) -> None:
        held.append(message)
        if message.get("more_body", message["type"] == "http.response.start"):
            return
        start, *parts = held
        body = b"".join(part.get("body", b"") for part in parts)
        if start["status"] == 200:
            with _CLASSES:
                body = _listed(body, policy())
        await send({**start, "headers": resized(start.get("headers", ()), len(body))})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return forward


def _listed(body: bytes, policy: Policy) -> bytes:
    listing = read_body(body)
    models = listing.get("data") if listing else None
    if not policy.classes or not isinstance(models, list):
        return body
    classes = [_shown(name, slo) for name, slo in policy.classes.items()]
    for model in models:
        model["slo_classes"] = classes
    return json.dumps(listing, separators=(",", ":")).encode()


def _shown(name: str, slo: SLO) -> dict[str, Any]:
    """A class as clients read it: the fields that differ from an empty SLO."""
    shown = {
        PUBLIC_OF[spec.name]: getattr(slo, spec.name)
        for spec in fields(SLO)
        if spec.name != "slo_class" and getattr(slo, spec.name) != spec.default
    }
    if slo.stages is not None:
        shown["stages"] = [stage._asdict() for stage in slo.stages]
    return {"name": name, **shown}
