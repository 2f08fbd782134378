# SPDX-License-Identifier: Apache-2.0
"""One request through the gateway: its messages, and the answer to each."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from vllm_slo.router.decisions import Decision, Decisions, Refusal
from vllm_slo.router.endpoint_picker import ext_proc, messages
from vllm_slo.router.replica_spec import ReplicaSpec
from vllm_slo.router.request_reader import Request, prompt_tokens_in
from vllm_slo.slo.body import MAX_BODY_BYTES
from vllm_slo.slo.verdicts import DECLINED_HEADER
from vllm_slo.wire.front_protocol import OWN_PREFIX

logger = logging.getLogger("vllm_slo.endpoint_picker")

MAX_HELD_BYTES: Final = 512 * 1024 * 1024
"""Most bytes of bodies in memory; of further ones the beginning alone decides."""
TAIL_BYTES: Final = 4_096
"""Bytes from the end of an answer in which its token counts are looked for."""
_NO_BODY: Final = frozenset({ext_proc.NONE, ext_proc.STREAMED})
_WHOLE_BODY: Final = frozenset({ext_proc.BUFFERED, ext_proc.BUFFERED_PARTIAL})


@dataclass(slots=True)
class Picker:
    """The parts that all exchanges share.

    Attributes:
        fallbacks: most endpoints after the chosen one that the gateway is told of.
        held_bytes: bytes of all bodies that are held now.
    """

    decisions: Decisions
    fallbacks: int = 0
    held_bytes: int = 0

    def names_in(self, subset: Collection[str] | None) -> Collection[str] | None:
        """The replicas at these endpoints; None: all."""
        if subset is None:
            return None
        listed = self.decisions.cluster.listed.values()
        return {
            each.name
            for each in listed
            if endpoint_of(each.spec) in subset or host_of(each.spec) in subset
        }

    def name_at(self, endpoint: str) -> str | None:
        """The replica at an endpoint."""
        listed = self.decisions.cluster.listed.values()
        return next((each.name for each in listed if endpoint_of(each.spec) == endpoint), None)


class Exchange:
    """Answers the messages of one request, in order.

    Invariant: after `end` nothing of the request is outstanding.
    """

    def __init__(self, picker: Picker) -> None:
        self.is_refused = False
        self._picker = picker
        self._arrival_s = time.monotonic()
        self._headers: list[tuple[bytes, bytes]] = []
        self._method = self._path = ""
        self._among: Collection[str] | None = None
        # A gateway that does not state its modes has those that the protocol demands.
        self._request_mode: int = ext_proc.FULL_DUPLEX_STREAMED
        self._response_mode: int = ext_proc.FULL_DUPLEX_STREAMED
        self._parts: list[Any] = []
        self._held = 0
        self._decision: Decision | None = None
        self._has_ended = False
        self._tail = b""

    async def take(self, message: Any) -> list[Any]:
        """The answers to one message; an empty list: they follow with those to a later one."""
        kind = message.WhichOneof("request")
        if kind == "request_headers":
            return await self._take_request_headers(message)
        if kind == "request_body":
            return await self._take_request_body(message.request_body)
        if kind == "request_trailers":
            before = [] if self._decision else await self._decide("request_headers", whole=True)
            return before if self.is_refused else [*before, messages.unchanged(kind)]
        if kind == "response_headers":
            return self._take_response_headers(message)
        if kind == "response_body":
            return self._take_response_body(message.response_body)
        if kind == "response_trailers":
            self._has_ended = True
            return [messages.unchanged(kind)]
        logger.warning("the gateway sent a message of an unknown kind")
        return []

    def end(self) -> None:
        """Note that the gateway closed the stream, or broke it off."""
        self._release()
        if self._decision is not None:
            tokens = prompt_tokens_in(self._tail) if self._tail else None
            self._picker.decisions.ended(
                self._decision.exchange, tokens, client_left=not self._has_ended
            )

    # --- the request -----------------------------------------------------------------------------

    async def _take_request_headers(self, message: Any) -> list[Any]:
        self._headers = messages.headers_of(message.request_headers)
        self._method = messages.value_of(self._headers, b":method")
        self._path = messages.value_of(self._headers, b":path").partition("?")[0]
        self._among = self._picker.names_in(messages.subset_of(message))
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        has_body = not message.request_headers.end_of_stream
        if has_body and self._request(b"").needs_body:
            if self._request_mode == ext_proc.FULL_DUPLEX_STREAMED:
                return []
            if self._request_mode in _WHOLE_BODY:
                return [messages.unchanged("request_headers", self._own_headers)]
        is_whole = not has_body or self._request_mode not in _NO_BODY
        return await self._decide("request_headers", whole=is_whole)

    async def _take_request_body(self, part: Any) -> list[Any]:
        if self._decision is not None:
            return [self._on("request_body", self._request_mode, part)]
        self._parts.append(part)
        self._held += len(part.body)
        self._picker.held_bytes += len(part.body)
        is_buffered = self._request_mode in _WHOLE_BODY
        too_much = self._held > MAX_BODY_BYTES or self._picker.held_bytes > MAX_HELD_BYTES
        if not (part.end_of_stream or is_buffered or too_much):
            return []
        kind = "request_body" if is_buffered else "request_headers"
        return await self._decide(kind, whole=part.end_of_stream)

    async def _decide(self, kind: str, *, whole: bool) -> list[Any]:
        """The answer to a message of this ``kind`` that says where the request goes, and the parts
        of the body that have been held.

        ``whole``: whether all of the body has come.
        """
        body = b"".join(part.body for part in self._parts)
        request = self._request(body, None if whole else self._length(len(body)))
        decision = await self._picker.decisions.decide(request, self._among)
        parts, self._parts = self._parts, []
        self._release()
        if isinstance(decision, Refusal):
            self.is_refused = True
            return [messages.refused(decision)]
        self._decision = decision
        others = decision.fallbacks[: self._picker.fallbacks]
        endpoints = [endpoint_of(spec) for spec in (decision.replica, *others)]
        first = messages.destined(kind, endpoints, decision.headers, decision.removed)
        if kind == "request_body":
            return [first]
        return [first, *(self._on("request_body", self._request_mode, part) for part in parts)]

    def _request(self, body: bytes, total_bytes: int | None = None) -> Request:
        return Request(self._method, self._path, self._headers, body, self._arrival_s, total_bytes)

    def _length(self, arrived: int) -> int:
        """Length of the whole body, as far as it is known."""
        stated = messages.value_of(self._headers, b"content-length")
        return max(int(stated) if stated.isascii() and stated.isdigit() else 0, arrived)

    @property
    def _own_headers(self) -> set[str]:
        return self._request(b"").own_headers

    def _release(self) -> None:
        self._picker.held_bytes -= self._held
        self._held = 0

    # --- the answer ------------------------------------------------------------------------------

    def _take_response_headers(self, message: Any) -> list[Any]:
        headers = messages.headers_of(message.response_headers)
        own = {name.decode() for name, _ in headers if name.startswith(OWN_PREFIX.encode())}
        if self._decision is not None:
            exchange, decisions = self._decision.exchange, self._picker.decisions
            name = self._picker.name_at(messages.served_by(message) or "")
            if name is not None:
                decisions.served(exchange, name)
            if DECLINED_HEADER in own:
                decisions.declined(exchange)
            elif messages.value_of(headers, b":status").startswith("5"):
                decisions.failed(exchange)
            ended = message.response_headers.end_of_stream
            if ended or self._response_mode == ext_proc.NONE:
                decisions.began(exchange)
                self._has_ended = True
        return [messages.unchanged("response_headers", own)]

    def _take_response_body(self, part: Any) -> list[Any]:
        if self._decision is not None and part.body:
            self._picker.decisions.began(self._decision.exchange)
            self._tail = (self._tail + part.body)[-TAIL_BYTES:]
        self._has_ended = self._has_ended or part.end_of_stream
        return [self._on("response_body", self._response_mode, part)]

    def _on(self, kind: str, mode: int, part: Any) -> Any:
        """The answer that lets a part of a body go on."""
        is_duplex = mode == ext_proc.FULL_DUPLEX_STREAMED
        return messages.sent_back(kind, part) if is_duplex else messages.unchanged(kind)


def endpoint_of(spec: ReplicaSpec) -> str:
    """``IP:PORT`` of a replica."""
    return spec.url.rpartition("/")[2]


def host_of(spec: ReplicaSpec) -> str:
    """The IP of a replica."""
    return endpoint_of(spec).rpartition(":")[0].strip("[]")
