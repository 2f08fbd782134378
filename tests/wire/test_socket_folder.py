# SPDX-License-Identifier: Apache-2.0
"""Sockets can be bound in a private folder, however long the path of the temporary folder is."""

from __future__ import annotations

import socket
import stat
import tempfile
from pathlib import Path

import pytest

from vllm_slo.wire.socket_folder import make_socket_folder


@pytest.mark.parametrize("longer", [0, 30, 200])
def test_a_socket_can_be_bound(
    longer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / ("x" * longer)
    temporary.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    folder = make_socket_folder("vllm-slo-test-")
    try:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        path = folder / "a-long-name"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
            bound.bind(str(path))
        path.unlink()
    finally:
        folder.rmdir()
    assert not any(temporary.iterdir())
