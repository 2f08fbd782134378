# SPDX-License-Identifier: Apache-2.0
"""The process of one replica: vLLM's OpenAI app and engine on a private port, behind a token.

``python -m vllm_slo.router.replica --private-host H [--drain-s D] -- MODEL [vllm serve flags]``

It binds a free port and makes up a token. When the engine answers, it writes its only line to
stdout: ``{"url", "token"}``. Every path needs the token. ``/vllm-slo/state`` streams what the
scheduler publishes (`StateFeed`). The process ends at once when its stdin ends, with status 1 when
the engine dies, and with status 0 after a drain on SIGTERM. Its engine never outlives it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

from vllm_slo.engine.compat.process import set_up_process
from vllm_slo.engine.compat.version import check_vllm
from vllm_slo.engine.serving import cpu_alias, lifeline
from vllm_slo.engine.telemetry.state import SOCKET_VARIABLE
from vllm_slo.errors import VllmSLOError
from vllm_slo.router.state_feed import StateFeed
from vllm_slo.router.token_guard import TokenGuard

LOOK_S: Final = 0.1
LAST_WORDS_S: Final = 0.7
"""Time for running requests to end with the engine's error after the engine has died."""
GOODBYE_S: Final = 0.3
"""Shortest drain, so that the front learns of it before the port closes."""
CUT_S: Final = 1
"""Time after the drain until connections that still run are cut off."""
KEEP_ALIVE_S: Final = 75
"""Longer than the front keeps idle connections, so that none is closed under a request."""


class Replica:
    """One replica from its start to its end.

    Args:
        drain_s: seconds for running requests to end after SIGTERM.
        folder: private and empty; for the socket of the state.
        announce: called once with the line for the parent.
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
        """Serve until a signal or until the engine dies; returns the exit status."""
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.launcher import setup_server

        path = self._folder / "state"
        self._feed.listen(path)
        os.environ[SOCKET_VARIABLE] = str(path)
        _, sock = setup_server(self._args, reuse_port=False)
        async with build_async_engine_client(self._args) as engine:
            self._heed_signals()
            app = await _vllm_app(self._args, engine)
            guard = TokenGuard(app, self._token, self._feed)
            async with self._served(guard, sock) as ended:
                self._announce({"url": self._url(sock), "token": self._token})
                status = await self._until_the_end(engine, guard, ended)
            if status:
                _leave(self._folder, status)  # vLLM would wait for the dead engine
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
    async def _served(
        self, guard: TokenGuard, sock: socket.socket
    ) -> AsyncIterator[asyncio.Task[None]]:
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

    async def _until_the_end(
        self, engine: Any, guard: TokenGuard, ended: asyncio.Task[None]
    ) -> int:
        while not (engine.errored or ended.done() or self._stop.is_set()):
            await _either(self._stop, LOOK_S)
        if self._stop.is_set():
            await self._drain(engine, guard)
        if not (engine.errored or ended.done()):
            return 0
        self._feed.change(dead=True)
        end_s = time.monotonic() + LAST_WORDS_S
        while guard.running and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)  # so that the last bytes leave
        return 1

    async def _drain(self, engine: Any, guard: TokenGuard) -> None:
        """Let running requests end; the front learns of the drain and sends no new ones."""
        self._feed.change(draining=True)
        end_s = time.monotonic() + max(self._drain_s, GOODBYE_S)
        await _either(self._hurry, GOODBYE_S)
        while guard.running and time.monotonic() < end_s:
            if engine.errored or self._hurry.is_set():
                return
            await _either(self._hurry, LOOK_S)


async def _either(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, at most so many seconds."""
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
    # vLLM tells its server to exit when the engine is dead; here `Replica` does that.
    app.state.server = SimpleNamespace(should_exit=False)
    return app


def _server(app: TokenGuard, args: argparse.Namespace) -> Any:
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


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one replica in this process."""
    options, served = _options(sys.argv[1:] if argv is None else argv)
    announce = _separate_stdout()
    folder = Path(tempfile.mkdtemp(prefix="vllm-slo-"))
    _end_with_stdin(folder)
    for number in (signal.SIGTERM, signal.SIGINT):  # before the engine answers there is no drain
        signal.signal(number, lambda *_: _leave(folder, 0))
    status = 1
    try:
        lifeline.hold(folder)
        args = _vllm_arguments(served, options.private_host)
        import uvloop

        status = uvloop.run(Replica(args, options.drain_s, folder, announce).run())
    except VllmSLOError as error:
        sys.stderr.write(f"vllm-slo: error: {error}\n")
    except SystemExit as stop:
        sys.stderr.write(f"{stop.code}\n" if isinstance(stop.code, str) else "")
        status = stop.code if isinstance(stop.code, int) else 1
    except Exception:  # noqa: BLE001 - the process ends here and prints the reason
        import traceback

        traceback.print_exc()
    _leave(folder, status)


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The replica's own flags, and the words after ``--``."""
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
    """Send everything printed to stderr; returns a function that writes a line to real stdout."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)

    def announce(message: dict[str, str]) -> None:
        with suppress(OSError):
            os.write(real, json.dumps(message).encode() + b"\n")

    return announce


def _end_with_stdin(folder: Path) -> None:
    """End the process at once when stdin ends; children get an empty stdin."""
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
    """Parse vLLM's arguments as ``vllm serve`` does; vLLM takes this process for one.

    Raises:
        VllmSLOError, SystemExit: the arguments cannot be used.
    """
    check_vllm()
    sys.argv = ["vllm", "serve", *served]
    cpu_alias.register()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.utils.system_utils import decorate_logs

    set_up_process()
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
    """End this process and everything it started, now."""
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
    # A process that vLLM starts imports this module first, long before its plugins.

    lifeline.watch()
