# SPDX-License-Identifier: Apache-2.0
"""The configuration of a front, as HAProxy itself reads it."""

from __future__ import annotations

import hashlib
import shutil
import socket
import subprocess

import pytest

from vllm_slo.router import haproxy_config
from vllm_slo.router.haproxy import find_haproxy
from vllm_slo.router.haproxy_config import (
    FrontFolder,
    ProxySettings,
    configuration,
    environment,
    keys_text,
)
from vllm_slo.wire.socket_folder import make_socket_folder


@pytest.mark.parametrize("named", ["plain", "with space", "it's", 'a "word"', "#2", "a\\b"])
def test_any_path(
    named: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the package, the temporary folder and the certificate lie."""
    parent = make_socket_folder("")
    place = parent / named
    place.mkdir()
    request.addfinalizer(lambda: shutil.rmtree(parent))
    script = place / "haproxy.lua"
    shutil.copy(haproxy_config.SCRIPT, script)
    monkeypatch.setattr(haproxy_config, "SCRIPT", script)
    pem = place / "front.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-keyout", str(place / "key"), "-out", str(place / "cert")),
        ],
        check=True,
        capture_output=True,
    )
    pem.write_bytes((place / "cert").read_bytes() + (place / "key").read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        key = hashlib.sha256(b"key").hexdigest()
        settings = ProxySettings(
            FrontFolder(place), listener.fileno(), api_keys=(key,), certificate=pem
        )
        settings.folder.keys.write_text(keys_text(settings.api_keys))
        settings.folder.configuration.write_text(configuration(settings))
        checked = subprocess.run(
            [str(find_haproxy()), "-c", "-f", str(settings.folder.configuration)],
            env=environment(settings, 1),
            pass_fds=(listener.fileno(),),
            capture_output=True,
            text=True,
            check=False,
        )
    assert checked.returncode == 0, checked.stderr
