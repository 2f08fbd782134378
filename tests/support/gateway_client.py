# SPDX-License-Identifier: Apache-2.0
"""A gateway that speaks with an endpoint picker: Envoy's external processing, by message."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from front_stack import Fake, http
from google.protobuf.struct_pb2 import Struct
from patience import patience

from vllm_slo.config.model import SLOConfig
from vllm_slo.router.endpoint_picker import ext_proc as protocol
from vllm_slo.router.endpoint_picker.server import PickerServer, Ports
from vllm_slo.router.endpoint_picker.tls import Certificate
from vllm_slo.router.replica_list import Source
from vllm_slo.router.replica_spec import ReplicaSpec

PATIENCE_S = patience(20.0)
DUPLEX = ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED")
BUFFERED = ("BUFFERED", "BUFFERED")
SLO = {"ttft_ms": 5_000}
DECLINE = {**SLO, "on_unattainable": "decline"}
JSON = {"content-type": "application/json"}


class Replicas:
    """A source of replicas, as given."""

    def __init__(self, specs: Sequence[Any]) -> None:
        self.specs = list(specs)

    async def read(self) -> list[Any]:
        return list(self.specs)


@asynccontextmanager
async def picker(
    source: Source, certificate: Certificate | None = None, fallbacks: int = 0, **config: Any
) -> AsyncIterator[PickerServer]:
    """A picker that knows the state of its replicas; nothing of it is left afterwards."""
    server = PickerServer(
        SLOConfig.model_validate(config),
        source,
        Ports("127.0.0.1", 0, 0, 0),
        certificate,
        fallbacks,
    )
    task = asyncio.create_task(server.run())
    try:
        await until(lambda: task.done() or len(server.bound) == 3)
        await until(lambda: task.done() or server._knows_all() or not server.cluster.listed)
        yield server
        await until(lambda: outstanding(server) == 0)
    finally:
        server.stop.set()
        await task


def outstanding(server: PickerServer) -> int:
    """Requests, and bytes of their bodies, that any account of the picker still has."""
    shadows = sum(each.virtual.outstanding + each.running for each in server.cluster.all())
    in_flight = int(server.metrics.in_flight._value.get())
    return shadows + in_flight + server.picker.decisions.running + server.picker.held_bytes


async def until(holds: Callable[[], Any]) -> None:
    """Wait until ``holds`` says something true."""
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, "not in time"
        await asyncio.sleep(0.005)


class Stream:
    """One request through the gateway.

    ``modes``: of the request's and the response's body; None: the gateway does not state them.
    """

    def __init__(self, server: PickerServer, modes: tuple[str, str] | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.bound['picker']}")
        self._modes = modes
        self.call: Any = None

    async def __aenter__(self) -> Stream:
        process = self._channel.stream_stream(
            f"/{protocol.SERVICE}/{protocol.METHOD}",
            request_serializer=protocol.ProcessingRequest.SerializeToString,
            response_deserializer=protocol.ProcessingResponse.FromString,
        )
        self.call = process(timeout=PATIENCE_S)
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.call.cancel()
        await self._channel.close()

    async def headers(
        self,
        path: str = "/v1/completions",
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        end: bool = False,
        subset: Any = None,
    ) -> None:
        given = {":method": method, ":path": path, ":authority": "gateway", **JSON}
        message = protocol.ProcessingRequest(
            request_headers=_headers({**given, **(headers or {})}, end)
        )
        if subset is not None:
            metadata = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            metadata.update({"x-gateway-destination-endpoint-subset": subset})
        if self._modes is not None:
            request, response = (getattr(protocol, mode) for mode in self._modes)
            message.protocol_config.request_body_mode = request
            message.protocol_config.response_body_mode = response
        await self.call.write(message)

    async def body(self, body: bytes, end: bool = True, kind: str = "request_body") -> None:
        part = protocol.HttpBody(body=body, end_of_stream=end)
        await self.call.write(protocol.ProcessingRequest(**{kind: part}))

    async def trailers(self, kind: str = "request_trailers") -> None:
        await self.call.write(protocol.ProcessingRequest(**{kind: protocol.HttpTrailers()}))

    async def response(
        self, status: int = 200, served: str | None = None, end: bool = False, **headers: str
    ) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        message = protocol.ProcessingRequest(
            response_headers=_headers({":status": str(status), **named}, end)
        )
        if served is not None:
            metadata: Struct = message.metadata_context.filter_metadata["envoy.lb"]
            metadata.update({"x-gateway-destination-endpoint-served": served})
        await self.call.write(message)

    async def read(self, kind: str) -> Any:
        """The next answer, which must be of this kind."""
        answer = await self.call.read()
        assert answer is not grpc.aio.EOF
        assert answer.WhichOneof("response") == kind, answer
        return answer

    async def finish(self) -> None:
        """Close the stream; the picker must have nothing more to say."""
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF
        assert await self.call.code() == grpc.StatusCode.OK


def _headers(given: Mapping[str, str], end: bool) -> Any:
    values = [
        protocol.HeaderValue(key=name, raw_value=value.encode()) for name, value in given.items()
    ]
    return protocol.HttpHeaders(headers=protocol.HeaderMap(headers=values), end_of_stream=end)


def mutation(answer: Any) -> Any:
    """The header mutation of an answer."""
    kind = answer.WhichOneof("response")
    inner = getattr(answer, kind)
    return inner.headers if kind == "immediate_response" else inner.response.header_mutation


def set_headers(answer: Any) -> dict[str, str]:
    """The headers that an answer sets; each replaces what there was."""
    options = mutation(answer).set_headers
    assert all(option.append_action == protocol.OVERWRITE_IF_EXISTS_OR_ADD for option in options)
    return {option.header.key: option.header.raw_value.decode() for option in options}


def destination(answer: Any) -> list[str]:
    """The endpoints that an answer names; header and metadata agree."""
    named = set_headers(answer)["x-gateway-destination-endpoint"]
    metadata = answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"]
    assert named == metadata
    return list(named.split(","))


def streamed(answer: Any) -> tuple[bytes, bool]:
    """A part of a body that is sent on, and whether it is the last."""
    kind = answer.WhichOneof("response")
    part = getattr(answer, kind).response.body_mutation.streamed_response
    return part.body, part.end_of_stream


# --- what several files of tests need -------------------------------------------------------------


def source(fakes: list[Fake]) -> Replicas:
    """The replicas, by their addresses and tokens."""
    return Replicas([ReplicaSpec.from_json(fake.entry) for fake in fakes])


def endpoint(fake: Fake) -> str:
    return str(fake.line("url")["url"]).removeprefix("http://")


def body(slo: Any = None, **fields: Any) -> bytes:
    given = {"prompt": "x", "max_tokens": 2, **fields}
    return json.dumps(given if slo is None else {**given, "slo": slo}).encode()


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def total(server: PickerServer, series: str, **labels: str) -> float:
    text = http("GET", f"http://127.0.0.1:{server.bound['metrics']}/metrics").text
    wanted = [f'{name}="{value}"' for name, value in labels.items()]
    lines = [line for line in text.splitlines() if line.startswith(f"vllm_slo:front_{series}")]
    return sum(float(line.split()[-1]) for line in lines if all(one in line for one in wanted))


async def counted(server: PickerServer, series: str, **labels: str) -> float:
    return await asyncio.to_thread(total, server, series, **labels)
