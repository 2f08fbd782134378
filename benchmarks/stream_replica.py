# SPDX-License-Identifier: Apache-2.0
"""Replicas without engines that stream tokens at a fixed rate, for `data_plane.py`.

`python stream_replica.py RATE PORT...`: all ports in one process, which costs little: one timer
writes the tokens of all streams whose turn it is.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from typing import Any, Final

import uvloop

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.state_stream import StateEncoder
from vllm_slo.core.step_time.model import StepTimeModel

TOKEN: Final = "benchmark"
STREAM_RATE: Final = 20.0
TURNS: Final = 25
HEARTBEAT_S: Final = 0.25
_EVENT: Final = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1764530000,"model":"tiny",'
    b'"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null,'
    b'"stop_reason":null}],"usage":null}\n\n'
)
_PIECE: Final = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_END: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
_STREAM: Final = _HEAD % b"text/event-stream; charset=utf-8"


class Turns:
    """Writes one token of each stream in every period."""

    def __init__(self, rate: float) -> None:
        self._streams: list[set[Connection]] = [set() for _ in range(TURNS)]
        self._now = 0
        self._pause_s = 1.0 / rate / TURNS
        self._loop = asyncio.get_running_loop()
        self._next_s = self._loop.time()
        self._turn()

    def join(self, stream: Connection) -> set[Connection]:
        """The stream's next token comes after a whole period."""
        joined = self._streams[(self._now - 1) % TURNS]
        joined.add(stream)
        return joined

    def _turn(self) -> None:
        while self._next_s <= self._loop.time():
            for stream in tuple(self._streams[self._now]):
                stream.token()
            self._now = (self._now + 1) % TURNS
            self._next_s += self._pause_s
        self._loop.call_at(self._next_s, self._turn)


class Replica:
    """One port: its requests, and the state streams that tell of them."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.events: list[list[Any]] = []
        self._readers: list[tuple[Any, StateEncoder]] = []
        self._state = ReplicaState(
            StepTimeModel(((1e-5, 0.0, 1e-3), (1e-5, 0.0, 1e-3))),
            free_blocks=1e6,
            total_blocks=1_000_000,
            block_sizes=(16,),
            seats=100_000,
            max_step_tokens=8_192,
            max_model_len=8_192,
        )
        asyncio.get_running_loop().call_soon(self._tell)

    def follow(self, transport: Any) -> None:
        """Begin a state stream."""
        transport.write(_HEAD % b"application/x-ndjson")
        reader = (transport, StateEncoder())
        self._readers.append(reader)
        self._write(reader, [], [])

    def _write(self, reader: tuple[Any, StateEncoder], events: list[Any], live: Any = None) -> None:
        line = reader[1].line(self._state, events=events, live=live)
        reader[0].write(b"%x\r\n%b\r\n" % (len(line), line))

    def _tell(self) -> None:
        events, self.events = self.events, []
        self._readers = [reader for reader in self._readers if not reader[0].is_closing()]
        for reader in self._readers:
            self._write(reader, events)
        asyncio.get_running_loop().call_later(HEARTBEAT_S / 2, self._tell)


class Connection(asyncio.Protocol):
    """One connection of the data plane or of a client."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._held = b""
        self._left = 0
        self._ticket = ""
        self._joined: set[Connection] | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, end, rest = self._held.partition(b"\r\n\r\n")
        if not end:
            return
        headers = dict(
            line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line
        )
        size = int(headers.get(b"content-length", b"0"))
        if len(rest) < size:
            return
        self._held = rest[size:]
        if b"/vllm-slo/state" in head[:60]:
            self._replica.follow(self._transport)
            return
        self._ticket = headers.get(b"x-vllm-slo-ticket", b"").decode()
        self._left = int(json.loads(rest[:size])["max_tokens"]) - 1
        self._tell("came")
        self._tell("began")
        self._transport.write(_STREAM + _PIECE)
        self._joined = self._replica.turns.join(self)

    def token(self) -> None:
        """Write the next token, or the end."""
        if self._left > 0:
            self._left -= 1
            self._transport.write(_PIECE)
        else:
            self._transport.write(_END)
            self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._joined is not None:
            self._joined.discard(self)
            self._joined = None
            self._tell("ended", 8, False)

    def _tell(self, event: str, *more: Any) -> None:
        if self._ticket:
            self._replica.events.append([event, self._ticket, *more])


async def _serve(rate: float, ports: list[int]) -> None:
    turns = Turns(rate)
    for port in ports:
        replica = Replica(turns)
        await asyncio.get_running_loop().create_server(
            lambda one=replica: Connection(one),  # type: ignore[misc]
            "127.0.0.1",
            port,
            backlog=8_192,
        )
    await asyncio.Event().wait()


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(_serve(float(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
