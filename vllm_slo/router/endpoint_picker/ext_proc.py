# SPDX-License-Identifier: Apache-2.0
"""Envoy's external processing protocol, as far as the endpoint picker speaks it.

The messages are made here from their fields, whose numbers are Envoy's
(``envoy/service/ext_proc/v3/external_processor.proto`` and what it imports, API v3). The packages
that have all of Envoy's messages bring OpenTelemetry's too, of another version, over those that
vLLM's tracing needs. Fields that are not listed are skipped when a message is read, as protobuf
does with newer fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pool, message_factory, struct_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD: Final = "Process"

NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)
"""``ProcessingMode.BodySendMode``."""
APPEND_IF_EXISTS_OR_ADD, ADD_IF_ABSENT, OVERWRITE_IF_EXISTS_OR_ADD, OVERWRITE_IF_EXISTS = range(4)
"""``HeaderValueOption.HeaderAppendAction``."""

_PACKAGE: Final = "vllm_slo.ext_proc"
_STRUCT: Final = ".google.protobuf.Struct"
_MESSAGES: Final[Mapping[str, str]] = {
    "HeaderValue": "key:string=1 value:string=2 raw_value:bytes=3",
    "HeaderMap": "headers:HeaderValue*=1",
    "HeaderValueOption": "header:HeaderValue=1 append_action:int32=3 keep_empty_value:bool=4",
    "HeaderMutation": "set_headers:HeaderValueOption*=1 remove_headers:string*=2",
    "FilterMetadataEntry": "key:string=1 value:Struct=2",
    "Metadata": "filter_metadata:FilterMetadataEntry*=1",
    "HttpHeaders": "headers:HeaderMap=1 end_of_stream:bool=3",
    "HttpBody": "body:bytes=1 end_of_stream:bool=2",
    "HttpTrailers": "trailers:HeaderMap=1",
    "ProtocolConfiguration": "request_body_mode:int32=1 response_body_mode:int32=2",
    "ProcessingRequest": (
        "request_headers:HttpHeaders=2/request response_headers:HttpHeaders=3/request "
        "request_body:HttpBody=4/request response_body:HttpBody=5/request "
        "request_trailers:HttpTrailers=6/request response_trailers:HttpTrailers=7/request "
        "metadata_context:Metadata=8 observability_mode:bool=10 "
        "protocol_config:ProtocolConfiguration=11"
    ),
    "StreamedBodyResponse": "body:bytes=1 end_of_stream:bool=2",
    "BodyMutation": (
        "body:bytes=1/mutation clear_body:bool=2/mutation "
        "streamed_response:StreamedBodyResponse=3/mutation"
    ),
    "CommonResponse": (
        "status:int32=1 header_mutation:HeaderMutation=2 body_mutation:BodyMutation=3 "
        "clear_route_cache:bool=5"
    ),
    "HeadersResponse": "response:CommonResponse=1",
    "BodyResponse": "response:CommonResponse=1",
    "TrailersResponse": "header_mutation:HeaderMutation=1",
    "HttpStatus": "code:int32=1",
    "ImmediateResponse": (
        "status:HttpStatus=1 headers:HeaderMutation=2 body:bytes=3 details:string=5"
    ),
    "ProcessingMode": (
        "request_header_mode:int32=1 response_header_mode:int32=2 request_body_mode:int32=3 "
        "response_body_mode:int32=4 request_trailer_mode:int32=5 response_trailer_mode:int32=6"
    ),
    "ProcessingResponse": (
        "request_headers:HeadersResponse=1/response response_headers:HeadersResponse=2/response "
        "request_body:BodyResponse=3/response response_body:BodyResponse=4/response "
        "request_trailers:TrailersResponse=5/response "
        "response_trailers:TrailersResponse=6/response "
        "immediate_response:ImmediateResponse=7/response dynamic_metadata:Struct=8 "
        "mode_override:ProcessingMode=9"
    ),
}
"""Message -> its fields: ``name:type=number``, ``*`` if repeated, ``/oneof`` if it is of one."""
_SCALARS: Final[Mapping[str, Any]] = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "int32": FieldDescriptorProto.TYPE_INT32,  # on the wire as an enumeration
}


def _described(name: str, fields: str) -> DescriptorProto:
    message = DescriptorProto(name=name)
    if name.endswith("Entry"):
        message.options.map_entry = True
    oneofs: list[str] = []
    for text in fields.split():
        field_name, _, rest = text.partition(":")
        kind, _, number = rest.partition("=")
        number, _, oneof = number.partition("/")
        field = message.field.add(name=field_name, number=int(number))
        repeated = kind.endswith("*")
        field.label = (
            FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
        )
        kind = kind.removesuffix("*")
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
        else:
            field.type = FieldDescriptorProto.TYPE_MESSAGE
            field.type_name = _STRUCT if kind == "Struct" else f".{_PACKAGE}.{_home(kind)}"
        if oneof:
            if oneof not in oneofs:
                oneofs.append(oneof)
                message.oneof_decl.add(name=oneof)
            field.oneof_index = oneofs.index(oneof)
    return message


def _home(kind: str) -> str:
    """Entries of a map are inside the message that has it."""
    return f"Metadata.{kind}" if kind.endswith("Entry") else kind


def _made() -> dict[str, Any]:
    file = FileDescriptorProto(
        name="vllm_slo/ext_proc.proto", package=_PACKAGE, syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )  # fmt: skip
    described = {name: _described(name, fields) for name, fields in _MESSAGES.items()}
    described["Metadata"].nested_type.add().CopyFrom(described.pop("FilterMetadataEntry"))
    file.message_type.extend(described.values())
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in described
    }


_CLASSES: Final = _made()
HeaderValue: Final = _CLASSES["HeaderValue"]
HeaderMap: Final = _CLASSES["HeaderMap"]
HeaderValueOption: Final = _CLASSES["HeaderValueOption"]
HeaderMutation: Final = _CLASSES["HeaderMutation"]
Metadata: Final = _CLASSES["Metadata"]
HttpHeaders: Final = _CLASSES["HttpHeaders"]
HttpBody: Final = _CLASSES["HttpBody"]
HttpTrailers: Final = _CLASSES["HttpTrailers"]
ProtocolConfiguration: Final = _CLASSES["ProtocolConfiguration"]
ProcessingRequest: Final = _CLASSES["ProcessingRequest"]
StreamedBodyResponse: Final = _CLASSES["StreamedBodyResponse"]
BodyMutation: Final = _CLASSES["BodyMutation"]
CommonResponse: Final = _CLASSES["CommonResponse"]
HeadersResponse: Final = _CLASSES["HeadersResponse"]
BodyResponse: Final = _CLASSES["BodyResponse"]
TrailersResponse: Final = _CLASSES["TrailersResponse"]
HttpStatus: Final = _CLASSES["HttpStatus"]
ImmediateResponse: Final = _CLASSES["ImmediateResponse"]
ProcessingMode: Final = _CLASSES["ProcessingMode"]
ProcessingResponse: Final = _CLASSES["ProcessingResponse"]
