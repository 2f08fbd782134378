# SPDX-License-Identifier: Apache-2.0
"""The endpoint picker's servers: health, TLS, ports, and the command."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc_health", reason="pip install 'vllm-slo[gateway]'")
pytest.importorskip("grpc_health", reason="pip install 'vllm-slo[gateway]'")

import grpc
from front_stack import PATIENCE_S, Fake, eventually, http, processes
from gateway_client import (
    Replicas,
    picker,
    run,
    source,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from vllm_slo.errors import ConfigError
from vllm_slo.router.endpoint_picker.server import PickerServer, Ports
from vllm_slo.router.endpoint_picker.tls import Certificate
from vllm_slo.router.replica_list import Urls


@pytest.fixture(scope="module")
def started() -> Iterator[list[Fake]]:
    with processes() as keep:
        fakes = [keep(Fake("a")), keep(Fake("b"))]
        for fake in fakes:
            fake.line("url")
        yield fakes


@pytest.fixture
def fakes(started: list[Fake]) -> list[Fake]:
    for fake in started:
        fake.reset()
    return started


# --- health, TLS, the command ------------------------------------------------------------------


async def health(port: int, service: str, credentials: Any = None) -> str:
    target = f"localhost:{port}"
    options = [("grpc.enable_http_proxy", 0)]
    channel = (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options)
        if credentials is None
        else grpc.aio.secure_channel(target, credentials, options)
    )
    async with channel:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_S)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def test_it_is_ready_when_it_knows_its_replicas(fakes: list[Fake]) -> None:
    async def main() -> None:
        async with picker(Replicas([])) as waiting:
            for port in (waiting.bound["health"], waiting.bound["picker"]):
                assert await health(port, "liveness") == "SERVING"
                for service in ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
                    assert await health(port, service) == "NOT_SERVING"
        async with picker(source(fakes)) as server:
            for _ in range(100):
                if await health(server.bound["health"], "inference-extension") == "SERVING":
                    break
                await asyncio.sleep(0.02)
            assert await health(server.bound["health"], "readiness") == "SERVING"

    run(main())


def test_tls_with_a_certificate_of_its_own_and_with_the_operators(
    fakes: list[Fake], tmp_path: Path
) -> None:
    from vllm_slo.router.endpoint_picker.tls import _self_signed

    key, certificate = _self_signed()
    files = (tmp_path / "tls.crt", tmp_path / "tls.key")
    files[0].write_bytes(certificate)
    files[1].write_bytes(key)

    async def main() -> None:
        async with picker(source(fakes), Certificate(files)) as server:
            trusted = grpc.ssl_channel_credentials(certificate)
            assert await health(server.bound["picker"], "liveness", trusted) == "SERVING"
            new_key, new_certificate = _self_signed()
            files[1].write_bytes(new_key)  # for a moment they do not belong together
            assert await health(server.bound["picker"], "liveness", trusted) == "SERVING"
            files[0].write_bytes(new_certificate)
            trusted = grpc.ssl_channel_credentials(new_certificate)
            assert await health(server.bound["picker"], "liveness", trusted) == "SERVING"
        async with picker(source(fakes), Certificate(None)) as server:
            with pytest.raises(grpc.aio.AioRpcError):
                await health(server.bound["picker"], "liveness", trusted)

    run(main())


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    from vllm_slo.router.endpoint_picker.tls import _self_signed

    (key, certificate), (other, _) = _self_signed(), _self_signed()
    paths = {"key": tmp_path / "key", "cert": tmp_path / "cert"}
    for contents, error in (
        ({}, "--tls-key .*No such file"),
        ({"key": key}, "--tls-cert .*No such file"),
        ({"key": b"x", "cert": certificate}, "no private key"),
        ({"key": key, "cert": b"x"}, "no certificate"),
        ({"key": other, "cert": certificate}, "does not belong"),
    ):
        for name, data in contents.items():
            paths[name].write_bytes(data)
        with pytest.raises(ConfigError, match=error):
            Certificate((paths["cert"], paths["key"])).credentials()


def test_a_replica_needs_an_ip_address() -> None:
    async def main() -> None:
        from vllm_slo.config.model import SLOConfig

        named = Urls(("http://vllm-0:8000",), "t")
        ports = Ports("127.0.0.1", 0, None, None)
        with pytest.raises(ConfigError, match="IP addresses"):
            await PickerServer(SLOConfig(), named, ports, None).run()

    run(main())


def test_a_port_in_use_is_told(fakes: list[Fake]) -> None:
    async def main() -> None:
        from vllm_slo.config.model import SLOConfig

        async with picker(source(fakes)) as server:
            for name in ("picker", "health", "metrics"):
                given = {"picker": 0, "health": 0, "metrics": 0, name: server.bound[name]}
                ports = Ports("127.0.0.1", *given.values())
                with pytest.raises(ConfigError, match="choose another"):
                    await PickerServer(SLOConfig(), source(fakes), ports, None).run()

    run(main())


def test_the_command(fakes: list[Fake], tmp_path: Path) -> None:
    listed = [{key: fake.entry[key] for key in ("name", "url", "token")} for fake in fakes]
    (tmp_path / "replicas.yaml").write_text(json.dumps(listed))
    command = [sys.executable, "-m", "vllm_slo.cli", "endpoint-picker", "--host", "127.0.0.1"]
    command += ["--replicas-from", str(tmp_path / "replicas.yaml")]
    command += ["--port", "0", "--health-port", "0", "--metrics-port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines = []
            while not lines or "listens" not in lines[-1]:
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            assert "self-signed" in lines[-1]
            port = int(lines[-1].partition("metrics on port ")[2].split(";")[0])
            url = f"http://127.0.0.1:{port}/metrics"
            ready = 'vllm_slo:front_replica_ready{replica="b"} 1.0'
            eventually(lambda: ready in http("GET", url).text, "b is ready")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.stderr.read()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ([], "--replica URL"),
        (["--replica", "http://10.0.0.1:1"], "no token"),
        (["--replica", "x", "--tls-key", "k"], "--tls-cert and --tls-key"),
        (["--replica", "x", "--plaintext", "--tls-key", "k", "--tls-cert", "c"], "--plaintext"),
        (["--replica", "x", "--token-file", "/nowhere/t"], "--token-file"),
        (["--replica", "x", "--slo-config", "/nowhere/t"], "/nowhere/t"),
    ],
)
def test_mistakes_on_the_command_line(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_slo.cli import main

    assert main(["endpoint-picker", *flags]) == 2
    printed = capsys.readouterr().err
    assert error in printed and printed.count("\n") == 1
