# SPDX-License-Identifier: Apache-2.0
"""A receiver of traces as collectors are: OTLP over gRPC, on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from patience import patience

__all__ = ["Receiver", "Span", "receiving"]


@dataclass(frozen=True, slots=True)
class Span:
    """One span: ids in hexadecimal, times in seconds since 1970."""

    name: str
    trace_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Receiver(service.TraceServiceServicer):
    """Keeps every span that comes."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        with self._lock:
            self._spans += _spans(request)
        return messages.ExportTraceServiceResponse()

    def wait_for(self, wanted: Callable[[Span], bool], count: int = 1) -> list[Span]:
        """The spans that are wanted, once there are so many."""
        found: list[Span] = []
        end = time.monotonic() + patience(30)
        while time.monotonic() < end:
            with self._lock:
                found = [span for span in self._spans if wanted(span)]
            if len(found) >= count:
                return found
            time.sleep(0.05)
        raise AssertionError(f"{len(found)} spans, not {count}: {self._spans[-20:]}")


def _spans(request: Any) -> Iterator[Span]:
    for of_resource in request.resource_spans:
        resource = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield Span(
                    span.name,
                    span.trace_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    _attributes(span.attributes),
                    resource,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver that listens at its ``endpoint``."""
    receiver = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(receiver, server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(1.0).wait()
