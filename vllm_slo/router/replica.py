# SPDX-License-Identifier: Apache-2.0
"""One replica: vLLM's own OpenAI app and engine on a private port, behind a guard.

``python -m vllm_slo.router.replica --private-host H [--drain-s D] -- MODEL [vllm serve flags]``

It binds a free port and makes up a token; ``{"url", "token"}`` is its only line on stdout, written
once the engine answers. Every path demands the token. ``/vllm-slo/state`` streams what the
scheduler publishes (`StateFeed`). The process ends at once when its stdin does, with status 1
when the engine dies, and with 0 after a drain on SIGTERM; its engine never outlives it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from vllm_slo.engine.compat.version import check_vllm
from vllm_slo.engine.serving import cpu_alias, lifeline
from vllm_slo.engine.telemetry.state import MAX_MESSAGE_BYTES, SOCKET_VARIABLE, unpack
from vllm_slo.errors import VllmSLOError
from vllm_slo.router.protocol import (
    AGE_HEADER,
    OWN_PREFIX,
    STATE_PATH,
    TICKET_HEADER,
    TOKEN_HEADER,
    UNATTAINABLE_HEADER,
)
from vllm_slo.slo.carriers import FORWARDED, Forwarded
from vllm_slo.slo.model import OnUnattainable

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard", "StateFeed", "main"]

_OURS: Final = OWN_PREFIX.encode()
_TOKEN: Final = TOKEN_HEADER.encode()
_MAX_TICKET: Final = 2**63 - 1
_WISHES: Final[Mapping[bytes, OnUnattainable | None]] = {
    b"": None,
    b"best_effort": "best_effort",
    b"decline": "decline",
}

HEARTBEAT_S: Final = 0.25
LOOK_S: Final = 0.1
LAST_WORDS_S: Final = 0.7
"""What running requests are given to end with the engine's error once it is dead."""
GOODBYE_S: Final = 0.3
"""The least that a drain takes, so that the front hears of it before the port closes."""
CUT_S: Final = 1
"""When the drain is over, what still runs is cut off after this; the front sees it break."""
KEEP_ALIVE_S: Final = 75
"""Longer than clients keep idle connections, so that none is closed under a request."""


class StateFeed:
    """The newest state of the scheduler, and those who stream it.

    A line is ``{"state", "age_s", "draining", "dead"}``: `ReplicaState` as its ``to_json`` gives it
    or null, seconds since the scheduler took it, whether this replica is about to leave, and
    whether its engine is dead. Of several states that came while a stream was busy it gets the
    newest.
    """

    def __init__(self) -> None:
        self.draining = False
        self.dead = False
        self.closed = False
        self._state = b"null"
        self._taken_s = 0.0
        self._readers: set[asyncio.Event] = set()

    def listen(self, path: Path) -> None:
        """Receive at the Unix socket ``path`` from the engine's process; needs a running loop."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def close(self) -> None:
        """Receive nothing any more."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            while True:
                message = self._socket.recv(MAX_MESSAGE_BYTES)
                with suppress(ValueError):
                    self._state, self._taken_s = unpack(message)
                    self.wake()

    def change(self, **said: bool) -> None:
        """Set ``draining``, ``dead`` or ``closed``, and say so at once."""
        for name, value in said.items():
            setattr(self, name, value)
        self.wake()

    def wake(self) -> None:
        """Let every stream send a line now."""
        for reader in self._readers:
            reader.set()

    def line(self) -> bytes:
        age_s = max(time.monotonic() - self._taken_s, 0.0) if self._taken_s else 0.0
        flags = (json.dumps(self.draining).encode(), json.dumps(self.dead).encode())
        return b'{"state":%s,"age_s":%.6f,"draining":%s,"dead":%s}\n' % (
            *(self._state, age_s),
            *flags,
        )

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """A line now, whenever something changes, and every `HEARTBEAT_S`; ends when closed."""
        changed = asyncio.Event()
        self._readers.add(changed)
        try:
            while True:
                changed.clear()
                last = self.closed
                yield self.line()
                if last:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await changed.wait()
        finally:
            self._readers.discard(changed)

    async def stream(self, receive: Receive, send: Send) -> None:
        """Answer one request for the stream, until its client leaves or the feed is closed."""
        headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        leaves = asyncio.create_task(_client_leaves(receive))
        try:
            async with aclosing(self.lines()) as lines:
                async for line in lines:
                    if leaves.done():
                        return
                    await send({"type": "http.response.body", "body": line, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            leaves.cancel()


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Guard:
    """Outermost ASGI layer of a replica: nobody passes without the token.

    It removes the front's headers and says what they say under `FORWARDED` in the scope; nothing
    that a client sends to the front can end up there.

    Args:
        app: vLLM's app.
        token: what the header must hold.
        feed: served under `STATE_PATH`.
    """

    def __init__(self, app: ASGIApp, token: str, feed: StateFeed) -> None:
        self._app = app
        self._token = token.encode()
        self._feed = feed
        self.running = 0
        """Requests that have not been answered in full; streams of the state do not count."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        ours = [(n, v) for n, v in scope["headers"] if n.startswith(_OURS)]
        tokens = [value for name, value in ours if name == _TOKEN]
        if len(tokens) != 1 or not secrets.compare_digest(tokens[0], self._token):
            await _refuse(scope, send, 401, "this port is the front's alone")
            return
        try:
            said = _forwarded({name: value for name, value in ours if name != _TOKEN})
        except (ValueError, KeyError) as error:
            await _refuse(scope, send, 400, f"a header of the front is broken: {error}")
            return
        if scope["type"] == "http" and scope["path"] == STATE_PATH:
            await self._feed.stream(receive, send)
            return
        others = [(n, v) for n, v in scope["headers"] if not n.startswith(_OURS)]
        inner = {**scope, "headers": others}
        if said is not None:
            inner[FORWARDED] = said
        self.running += 1
        try:
            await self._app(inner, receive, send)
        finally:
            self.running -= 1


def _forwarded(headers: dict[bytes, bytes]) -> Forwarded | None:
    """What the front's headers say; None when there are none.

    Raises:
        ValueError, KeyError: one of them is not what the front writes.
    """
    if not headers:
        return None
    age_ms = float(headers.get(AGE_HEADER.encode(), b"0"))
    ticket = int(headers.get(TICKET_HEADER.encode(), b"0"))
    if not (math.isfinite(age_ms) and age_ms >= 0.0 and 0 <= ticket <= _MAX_TICKET):
        raise ValueError(f"age {age_ms} ms, ticket {ticket}")
    wish = _WISHES[headers.get(UNATTAINABLE_HEADER.encode(), b"")]
    return Forwarded(age_ms=age_ms, ticket=ticket, on_unattainable=wish)


async def _refuse(scope: Scope, send: Send, status: int, text: str) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    kind = "AuthenticationError" if status == 401 else "BadRequestError"
    error = {"message": text, "type": kind, "param": None, "code": status}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Replica:
    """One replica from its start to its end.

    Args:
        args: vLLM's own, parsed.
        drain_s: seconds that running requests are given after SIGTERM.
        folder: private and empty; for the socket of the state.
        announce: called once, with the line for the parent.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        drain_s: float,
        folder: Path,
        announce: Callable[[dict[str, str]], None],
    ) -> None:
        self._args = args
        self._drain_s = drain_s
        self._folder = folder
        self._announce = announce
        self._token = secrets.token_urlsafe(32)
        self._feed = StateFeed()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Serve until told to stop or the engine dies; the exit status."""
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.launcher import setup_server

        path = self._folder / "state"
        self._feed.listen(path)
        os.environ[SOCKET_VARIABLE] = str(path)
        _, sock = setup_server(self._args, reuse_port=False)
        async with build_async_engine_client(self._args) as engine:
            self._heed_signals()
            app = await _vllm_app(self._args, engine)
            guard = Guard(app, self._token, self._feed)
            async with self._served(guard, sock) as ended:
                self._announce({"url": self._url(sock), "token": self._token})
                status = await self._until_the_end(engine, guard, ended)
            if status:
                _leave(self._folder, status)  # vLLM would wait for what is dead
        return status

    def _url(self, sock: socket.socket) -> str:
        host, port = sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _heed_signals(self) -> None:
        def on_signal() -> None:
            (self._hurry if self._stop.is_set() else self._stop).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)

    @asynccontextmanager
    async def _served(self, guard: Guard, sock: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
        """Serve ``guard`` on the socket inside the block."""
        server = _server(guard, self._args)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        try:
            yield serving
        finally:
            self._feed.change(closed=True)
            server.should_exit = True
            server.force_exit = self._feed.dead
            await asyncio.wait([serving], timeout=2.0 * CUT_S)

    async def _until_the_end(self, engine: Any, guard: Guard, ended: asyncio.Task[None]) -> int:
        while not (engine.errored or ended.done() or self._stop.is_set()):
            await _either(self._stop, LOOK_S)
        if self._stop.is_set():
            await self._drain(engine, guard)
        if not (engine.errored or ended.done()):
            return 0
        self._feed.change(dead=True)
        await self._wait_for_requests(guard, LAST_WORDS_S)
        await asyncio.sleep(0.05)  # the last bytes leave
        return 1

    async def _drain(self, engine: Any, guard: Guard) -> None:
        """Let running requests end; nothing new comes once the front has heard of it."""
        self._feed.change(draining=True)
        end_s = time.monotonic() + max(self._drain_s, GOODBYE_S)
        await _either(self._hurry, GOODBYE_S)
        while guard.running and time.monotonic() < end_s:
            if engine.errored or self._hurry.is_set():
                return
            await _either(self._hurry, LOOK_S)

    async def _wait_for_requests(self, guard: Guard, patience_s: float) -> None:
        end_s = time.monotonic() + patience_s
        while guard.running and time.monotonic() < end_s:
            await asyncio.sleep(0.02)


async def _either(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, but not longer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _vllm_app(args: argparse.Namespace, engine: Any) -> Any:
    """vLLM's app for this engine, as its own server builds it."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    tasks = await engine.get_supported_tasks()
    app = build_app(args, tasks, engine.model_config)
    await init_app_state(engine, app.state, args, tasks)
    # vLLM tells its server to exit when the engine is dead; here `Replica` decides.
    app.state.server = SimpleNamespace(should_exit=False)
    return app


def _server(app: Guard, args: argparse.Namespace) -> Any:
    """The HTTP server, as vLLM configures its own, without its signal handlers."""
    import uvicorn
    from vllm.entrypoints.launchers.launcher import NoSignalServer
    from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config

    log_config = get_uvicorn_log_config(args)
    config = uvicorn.Config(
        app,
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CUT_S,
        **({} if log_config is None else {"log_config": log_config}),
    )
    config.load()
    return NoSignalServer(config)


# --- the process ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one replica in this process."""
    options, served = _options(sys.argv[1:] if argv is None else argv)
    announce = _separate_stdout()
    folder = Path(tempfile.mkdtemp(prefix="vllm-slo-"))
    _end_with_stdin(folder)
    for number in (signal.SIGTERM, signal.SIGINT):  # nothing to drain before the engine answers
        signal.signal(number, lambda *_: _leave(folder, 0))
    status = 1
    try:
        lifeline.hold(folder)
        args = _vllm_arguments(served, options.private_host)
        import uvloop

        status = uvloop.run(_run(args, options.drain_s, folder, announce))
    except VllmSLOError as error:
        sys.stderr.write(f"vllm-slo: error: {error}\n")
    except SystemExit as stop:
        sys.stderr.write(f"{stop.code}\n" if isinstance(stop.code, str) else "")
        status = stop.code if isinstance(stop.code, int) else 1
    except Exception:  # noqa: BLE001 - the process ends here, and says why
        import traceback

        traceback.print_exc()
    _leave(folder, status)


async def _run(
    args: argparse.Namespace,
    drain_s: float,
    folder: Path,
    announce: Callable[[dict[str, str]], None],
) -> int:
    return await Replica(args, drain_s, folder, announce).run()


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and what follows ``--``."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_slo.router.replica",
        description="One replica behind the front of vllm-slo; started by it.",
        usage="%(prog)s --private-host H [--drain-s D] -- MODEL [vllm serve flags]",
    )
    parser.add_argument("--private-host", required=True, help="address to listen on")
    parser.add_argument("--drain-s", type=float, default=30.0, help="seconds, on SIGTERM")
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    ours, served = words[:place], words[place + 1 :]
    options = parser.parse_args(ours)
    if not served:
        parser.error("a model is missing after --")
    return options, served


def _separate_stdout() -> Callable[[dict[str, str]], None]:
    """Send what anybody prints to stderr; returns what writes a JSON line to the real stdout."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)

    def announce(message: dict[str, str]) -> None:
        with suppress(OSError):
            os.write(real, json.dumps(message).encode() + b"\n")

    return announce


def _end_with_stdin(folder: Path) -> None:
    """Leave at once when stdin ends; children get an empty one."""
    real = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        with suppress(OSError):
            while os.read(real, 4096):
                pass
        _leave(folder, 1)

    threading.Thread(target=watch, daemon=True).start()


def _vllm_arguments(served: Sequence[str], host: str) -> argparse.Namespace:
    """Parse as ``vllm serve`` does, in a process that vLLM and our plugin take for one.

    Raises:
        VllmSLOError, SystemExit: they cannot be used.
    """
    check_vllm()
    sys.argv = ["vllm", "serve", *served]
    cpu_alias.register()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.system_utils import decorate_logs

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="vllm")
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    args: argparse.Namespace = parser.parse_args(sys.argv[1:])
    configure_logging_from_args(args)
    serve.validate(args)
    if args.model_tag is not None:
        args.model = args.model_tag
    args.host, args.port, args.uds, args.api_server_count = host, 0, None, None
    decorate_logs("Replica", skip_if_decorated=True)
    return args


def _leave(folder: Path, status: int) -> NoReturn:
    """End this process now, and everything it started."""
    try:
        for child in multiprocessing.active_children():
            child.kill()
        lifeline.clean_up(folder)
        sys.stderr.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # A process that vLLM starts imports this before anything else, long before its plugins.
    lifeline.watch()
