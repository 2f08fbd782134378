# SPDX-License-Identifier: Apache-2.0
"""The front of several replicas: HAProxy, which carries the bytes, and the decision service.

`python -m vllm_slo.router.front --host H --port P --config JSON`, started by a parent:

- stdin: JSON lines, each with all replicas; the front stops at the end of stdin.
- stdout: JSON lines: ``{"listening": url}`` once, then ``{"wanted", "ready", "load"}`` on change.
- SIGTERM, or the end of stdin: running requests have `RoutingConfig.drain_s` to end.

Both processes are started again when they end. This process keeps the public socket open, so that
connections wait while HAProxy starts. While the decision service starts, HAProxy sends requests to
the replica with the fewest connections.

Exit status: 0 after a drain, 2 if it cannot start.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from vllm_slo.errors import ConfigError, VllmSLOError
from vllm_slo.router.child import Child
from vllm_slo.router.child_process import heed_signals, read_stdin, report_line, run
from vllm_slo.router.front_config import FrontConfig
from vllm_slo.router.haproxy import connections_allowed, find_haproxy
from vllm_slo.router.haproxy_admin import ask
from vllm_slo.router.haproxy_config import (
    FrontFolder,
    ProxySettings,
    configuration,
    environment,
    keys_text,
)
from vllm_slo.wire.socket_folder import make_socket_folder

logger = logging.getLogger("vllm_slo.front")

BACKLOG: Final = 4_096
STEADY_S: Final = 5.0
"""A process that ran longer did not fail at its start."""
MAX_FAILURES: Final = 8
"""Starts of a process that failed in a row, after which the front ends."""
PAUSE_S: Final = 0.1
"""Before the second start in a row; it doubles, up to `MAX_PAUSE_S`."""
MAX_PAUSE_S: Final = 5.0
PROXY_END_S: Final = 2.0
"""Time for HAProxy to write what it holds when everything has ended."""
DRAIN_MARGIN_S: Final = 5.0


class FrontFailedError(VllmSLOError):
    """A process of the front fails at every start."""


class Front:
    """The two processes of a front, from their start to their end.

    Args:
        config_json: for the decision service; as ``config``.
        haproxy: the program.
        listener: the public socket, which listens.
        report: called with each message for the parent.
        certificate: PEM file, for TLS.
    """

    def __init__(
        self,
        config: FrontConfig,
        config_json: str,
        haproxy: Path,
        listener: socket.socket,
        folder: Path,
        report: Callable[[Mapping[str, Any]], None],
        certificate: Path | None = None,
    ) -> None:
        self.stop = asyncio.Event()
        self._drain_s = config.slo.routing.drain_s
        self._config_json = config_json
        self._haproxy = haproxy
        self._listener = listener
        self._report = report
        self._settings = ProxySettings(
            FrontFolder(folder),
            listener.fileno(),
            config.api_keys,
            connections_allowed(),
            certificate,
        )
        self._replicas: Mapping[str, Any] = {"replicas": []}
        self._generation = 0
        self._service: Child | None = None
        self._proxy: Child | None = None
        self._announced = False

    def take(self, message: Mapping[str, Any]) -> None:
        """A new list of replicas: ``{"replicas": [...]}``."""
        self._replicas = message
        if self._service is not None:
            self._service.write(message)

    async def run(self) -> None:
        """Serve until `stop` is set, then drain.

        Raises:
            FrontFailedError: a process does not start.
        """
        folder = self._settings.folder
        folder.keys.write_text(keys_text(self._settings.api_keys))
        folder.configuration.write_text(configuration(self._settings))
        tasks = [asyncio.create_task(self._keep(start)) for start in (self._serve, self._relay)]
        stopping: asyncio.Task[Any] = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait((*tasks, stopping), return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await self._drain()
            for task in (*tasks, stopping):
                task.cancel()
            await asyncio.gather(*tasks, stopping, return_exceptions=True)

    async def _keep(self, start: Callable[[], Any]) -> None:
        """Run a process again and again.

        Raises:
            FrontFailedError: it fails at every start.
        """
        failures = 0
        while not self.stop.is_set():
            begun_s = time.monotonic()
            why = await start()
            if self.stop.is_set():
                return
            failures = 1 if time.monotonic() - begun_s > STEADY_S else failures + 1
            logger.error(why)
            if failures >= MAX_FAILURES:
                raise FrontFailedError(why)
            if failures > 1:
                await asyncio.sleep(min(PAUSE_S * 2**failures, MAX_PAUSE_S))

    async def _serve(self) -> str:
        """Run the decision service; returns how it ended."""
        service = Child(
            [
                *(sys.executable, "-m", "vllm_slo.router.decision_service"),
                *("--folder", str(self._settings.folder.path), "--config", self._config_json),
            ],
            os.environ,
            patience_s=self._drain_s + DRAIN_MARGIN_S,
        )
        await service.start()
        self._service = service
        service.write(self._replicas)
        self._tell_generation()
        while (message := await service.read()) is not None:
            if "deciding" not in message:
                self._report(message)
            elif not self._announced:
                self._announced = True
                self._report({"listening": _url(self._listener)})
        return await service.obituary("the decision service")

    async def _relay(self) -> str:
        """Run HAProxy; returns how it ended."""
        self._generation += 1
        proxy = Child(
            [str(self._haproxy), "-db", "-q", "-f", str(self._settings.folder.configuration)],
            environment(self._settings, self._generation),
            pass_fds=(self._listener.fileno(),),
        )
        await proxy.start()
        self._proxy = proxy
        self._tell_generation()
        while await proxy.read() is not None:
            pass
        return await proxy.obituary("HAProxy")

    def _tell_generation(self) -> None:
        if self._service is not None and self._generation:
            self._service.write({"generation": self._generation})

    async def _drain(self) -> None:
        """No new connections; then the running requests; then the processes."""
        self.stop.set()
        self._listener.close()
        if self._service is not None and self._service.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._service.pid, signal.SIGTERM)  # it says at once that it stops
        if self._proxy is not None and self._proxy.returncode is None:
            with suppress(OSError):  # no new connections; those that are open go on
                await ask(self._settings.folder.admin, "shutdown frontend public")
        if self._service is not None and self._service.returncode is None:
            await self._service.terminate(self._drain_s + DRAIN_MARGIN_S)
        if self._proxy is not None and self._proxy.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._proxy.pid, signal.SIGUSR1)  # it ends once it has written everything
            with suppress(TimeoutError):
                await asyncio.wait_for(self._proxy.wait(), PROXY_END_S)
            await self._proxy.kill()


def listen(host: str, port: int, *, shares: bool = False) -> socket.socket:
    """The public socket. An empty host stands for every address.

    ``shares``: other fronts of this user may listen there, too; the system divides the connections.

    Raises:
        OSError, OverflowError: it cannot listen there.
    """
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
    return socket.create_server(
        (host, port), family=family, backlog=BACKLOG, reuse_port=shares, dualstack_ipv6=dual
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("::", "0.0.0.0"):
        host = "0.0.0.0"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def front_at(
    config_json: str,
    haproxy: str | None,
    listener: socket.socket,
    report: Callable[[Mapping[str, Any]], None],
    certificate: str | None = None,
) -> AsyncIterator[Front]:
    """A front with this public socket, which is closed at the end; its folder is removed then.

    Raises:
        ConfigError, OSError: it cannot start.
    """
    config = FrontConfig.from_json(config_json)
    program = find_haproxy(haproxy)
    pem = None if certificate is None else Path(certificate).resolve()
    if pem is not None and not pem.is_file():
        raise ConfigError(f"--tls-cert {certificate}: no such file; name a PEM file")
    folder = make_socket_folder("vllm-slo-front-")
    try:
        yield Front(config, config_json, program, listener, folder, report, pem)
    finally:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def listening_errors(host: str, port: int) -> Iterator[None]:
    """Say of errors of the socket what to do.

    Raises:
        ConfigError: inside was an OSError or OverflowError.
    """
    try:
        yield
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        text = f"cannot listen on {host or '*'}:{port}: {reason}; choose another --port"
        raise ConfigError(text) from error


async def _serve(config_json: str, haproxy: str | None, listener: socket.socket) -> None:
    async with front_at(config_json, haproxy, listener, report_line) as front:
        heed_signals(front.stop)
        read_stdin(front.take, front.stop)
        await front.run()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the front; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vllm_slo.router.front")
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--config", default="{}")
    parser.add_argument("--haproxy", help="program to run as HAProxy")
    parser.add_argument("--share-port", action="store_true")
    given = parser.parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        with (
            listening_errors(given.host, given.port),
            listen(given.host, given.port, shares=given.share_port) as listener,
        ):
            run(_serve(given.config, given.haproxy, listener))
    except VllmSLOError as error:
        sys.stderr.write(f"vllm-slo: error: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
