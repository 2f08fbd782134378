# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that start later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from vllm_slo.wire import ports


def test_a_free_port_can_be_bound_and_no_connection_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "range")
    ports.EPHEMERAL.write_text("25000\t60999\n")
    found = {ports.free_port() for _ in range(20)}
    assert len(found) > 1  # two servers that start side by side get two
    for port in found:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
        assert ports.FIRST <= port < 25_000


def test_adjacent_ports_are_all_free(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ports.free_ports(3)
    for port in range(first, first + 3):
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
    monkeypatch.setattr(ports, "_candidates", lambda _count: [first, first + 2])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        taken.listen()
        assert ports.free_ports(2) == first + 2
        monkeypatch.setattr(ports, "_candidates", lambda _count: [first])
        with pytest.raises(OSError, match="no 3 adjacent ports"):
            ports.free_ports(3)


@pytest.mark.parametrize("text", ["", "some\n", None, "1024\t60999\n"])
def test_a_range_that_is_unknown_or_leaves_nothing(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "range"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(ports, "EPHEMERAL", path)
    assert ports.FIRST <= ports.free_port() < ports.USUAL


def test_where_all_are_taken_the_system_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        used = taken.getsockname()[1]
        monkeypatch.setattr(ports, "TRIES", 1)
        monkeypatch.setattr(ports, "FIRST", used)
        monkeypatch.setattr(ports, "_first_ephemeral", lambda: used + 1)
        port = ports.free_port()
        assert port not in (0, used)
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))
