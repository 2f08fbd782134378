# SPDX-License-Identifier: Apache-2.0
"""The messages of Envoy's external processing, and what the endpoint picker protocol puts in them.

Sources: Envoy's ``envoy/service/ext_proc/v3/external_processor.proto``, and the proposal "endpoint
picker protocol" (004) of the Gateway API Inference Extension, version 1.0.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from google.protobuf.struct_pb2 import Struct

from vllm_slo.router.decisions import Refusal
from vllm_slo.router.endpoint_picker.ext_proc import (
    OVERWRITE_IF_EXISTS_OR_ADD,
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    ImmediateResponse,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)

DESTINATION: Final = "x-gateway-destination-endpoint"
SERVED: Final = "x-gateway-destination-endpoint-served"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
BALANCER: Final = "envoy.lb"
"""Namespace of the metadata that names endpoints."""
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"

BODIES: Final = frozenset({"request_body", "response_body"})


# --- from the gateway ----------------------------------------------------------------------------


def headers_of(message: Any) -> list[tuple[bytes, bytes]]:
    """Pairs of name and value; names in lower case, pseudo-headers included."""
    return [
        (header.key.lower().encode(), header.raw_value or header.value.encode())
        for header in message.headers.headers
    ]


def value_of(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str:
    """The first value of a header; empty if there is none."""
    return next((value for key, value in headers if key == name), b"").decode("latin-1")


def subset_of(message: Any) -> frozenset[str] | None:
    """The endpoints among which the gateway lets choose, ``IP:PORT`` or ``IP``; None: all."""
    given = _metadata(message, SUBSET_NAMESPACE).get(SUBSET)
    if given is None:
        return None
    listed = given if isinstance(given, list) else [given]
    texts = (text for each in listed if isinstance(each, str) for text in each.split(","))
    return frozenset(text.strip() for text in texts if text.strip())


def served_by(message: Any) -> str | None:
    """The endpoint that the gateway says has answered."""
    served = _metadata(message, BALANCER).get(SERVED)
    return served if isinstance(served, str) and served else None


def _metadata(message: Any, namespace: str) -> Mapping[str, Any]:
    """One namespace of a message's metadata."""
    known = message.metadata_context.filter_metadata
    if namespace not in known:
        return {}
    return {name: _plain(value) for name, value in known[namespace].fields.items()}


def _plain(value: Any) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        return [_plain(each) for each in value.list_value.values]
    return getattr(value, kind) if kind == "string_value" else ""


# --- to the gateway ------------------------------------------------------------------------------


def destined(
    kind: str, endpoints: Sequence[str], headers: Mapping[str, str], removed: Iterable[str]
) -> Any:
    """The answer that says where a request goes.

    Args:
        kind: of the message that is answered: ``request_headers`` or ``request_body``.
        endpoints: ``IP:PORT``, the first one first.
        headers: to set towards the replica.
        removed: names of headers that the replica must not get.
    """
    destination = ",".join(endpoints)
    mutation = _mutation({DESTINATION: destination, **headers}, removed)
    answer = _answer(kind, CommonResponse(header_mutation=mutation))
    metadata = Struct()
    metadata.update({BALANCER: {DESTINATION: destination}})
    answer.dynamic_metadata.CopyFrom(metadata)
    return answer


def unchanged(kind: str, removed: Iterable[str] = ()) -> Any:
    """The answer that lets a message of this kind go on, without the ``removed`` headers."""
    if kind in ("request_trailers", "response_trailers"):
        return ProcessingResponse(**{kind: TrailersResponse()})
    return _answer(kind, CommonResponse(header_mutation=_mutation({}, removed)))


def sent_back(kind: str, part: Any) -> Any:
    """The answer that sends a part of a body on, in the mode in which parts only go on so."""
    streamed = StreamedBodyResponse(body=part.body, end_of_stream=part.end_of_stream)
    mutation = BodyMutation(streamed_response=streamed)
    return _answer(kind, CommonResponse(body_mutation=mutation))


def refused(refusal: Refusal) -> Any:
    """The answer that the client gets in place of a replica's."""
    immediate = ImmediateResponse(
        headers=_mutation(refusal.headers, ()), body=refusal.body, details="vllm_slo"
    )
    immediate.status.code = refusal.status
    return ProcessingResponse(immediate_response=immediate)


def _answer(kind: str, common: Any) -> Any:
    inner = BodyResponse if kind in BODIES else HeadersResponse
    return ProcessingResponse(**{kind: inner(response=common)})


def _mutation(headers: Mapping[str, str], removed: Iterable[str]) -> Any:
    options = [
        HeaderValueOption(
            header=HeaderValue(key=name.lower(), raw_value=value.encode("latin-1")),
            append_action=OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in headers.items()
    ]
    return HeaderMutation(set_headers=options, remove_headers=sorted(removed))
