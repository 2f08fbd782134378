# SPDX-License-Identifier: Apache-2.0
"""Who may use the link of draft servers: the token, the addresses, the keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from vllm_slo.errors import ConfigError
from vllm_slo.wire.draft_socket import (
    MIN_TOKEN,
    MOST_PORTS,
    TOKEN_VARIABLE,
    check_address,
    connected_addresses,
    derive_keys,
    drafter_socket,
    read_token,
    single_addresses,
)

TOKEN = "a token of the tests' own"


def test_both_ends_derive_the_same_keys_and_nobody_else() -> None:
    keys, again, other = derive_keys(TOKEN), derive_keys(TOKEN), derive_keys(f"{TOKEN}.")
    assert keys == again
    pairs = [keys.verifier, keys.drafter, other.verifier, other.drafter]
    assert len({pair.secret for pair in pairs}) == len({pair.public for pair in pairs}) == 4
    assert all(zmq.curve_public(pair.secret) == pair.public for pair in pairs)
    assert keys.verifier.secret.decode() not in repr(keys), "it would end in a log"


def test_a_short_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="15 characters are too few"):
        derive_keys("x" * (MIN_TOKEN - 1))


def test_without_curve_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    with pytest.raises(ConfigError, match="no CURVE"):
        derive_keys(TOKEN)


def test_a_token_is_read_from_its_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(f" {TOKEN}\n")
    monkeypatch.setenv(TOKEN_VARIABLE, "another one\n")
    assert read_token(file) == TOKEN
    assert read_token(None) == "another one"


def test_a_missing_token_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=r"^--token-file: not given, and VLLMSLO_DRAFT_TOKEN is"):
        read_token(None)
    with pytest.raises(ConfigError, match=r"^--token-file .*nowhere: No such file"):
        read_token(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"^--token-file .*binary: not text"):
        read_token(tmp_path / "binary")


def test_without_a_connection_nothing_is_queued() -> None:
    """What waits for a verifier would be read by the next one."""
    with zmq.Context() as context:
        socket = drafter_socket(context, derive_keys(TOKEN), "tcp://127.0.0.1:1")
        socket.connect("tcp://127.0.0.1:1")
        with pytest.raises(zmq.Again):
            socket.send(b"", zmq.NOBLOCK)
        socket.close(0)


@pytest.mark.parametrize(
    ("address", "binds", "connects"),
    [
        ("tcp://10.0.0.1:5800", True, True),
        ("tcp://gpu-1.example.org:5800", True, True),
        ("tcp://[::1]:5800", True, True),
        ("ipc:///tmp/socket", True, True),
        ("tcp://127.0.0.1:*", True, False),
        ("tcp://127.0.0.1:0", True, False),
        ("tcp://*:5800", True, False),
        ("tcp://10.0.0.1:5700-5702", True, True),
        ("tcp://10.0.0.1:5700-5700", True, True),
        ("tcp://*:5700-5702", True, False),
        ("tcp://10.0.0.1:65530-65536", False, False),
        ("tcp://10.0.0.1:5700-", False, False),
        ("tcp://10.0.0.1", False, False),
        ("tcp://10.0.0.1:65536", False, False),
        ("tcp://10.0.0.1:5800 ", False, False),
        ("tcp://10.0.0.1:5800/path", False, False),
        ("tcp://::1:5800", False, False),
        ("10.0.0.1:5800", False, False),
        ("udp://10.0.0.1:5800", False, False),
        ("inproc://here", False, False),
        ("", False, False),
    ],
)
def test_addresses(address: str, binds: bool, connects: bool) -> None:
    for asked, good in ((False, binds), (True, connects)):
        if good:
            check_address(address, "--connect", connects=asked)
            continue
        with pytest.raises(ConfigError) as caught:
            check_address(address, "--connect", connects=asked)
        assert str(caught.value).startswith(f"--connect {address}: not an address; write tcp://")


@pytest.mark.parametrize("ports", ["5700-5699", "0-3", "5700-5764"])
def test_a_range_of_ports_is_bounded(ports: str) -> None:
    said = rf"^--connect tcp://h:{ports}: not a range of ports; .* at most {MOST_PORTS} ports$"
    for asked in (False, True):
        with pytest.raises(ConfigError, match=said):
            check_address(f"tcp://h:{ports}", "--connect", connects=asked)


def test_a_range_stands_for_one_address_a_port() -> None:
    assert single_addresses("tcp://[::1]:5700-5702") == [
        f"tcp://[::1]:{port}" for port in (5700, 5701, 5702)
    ]
    for address in ("tcp://draft-host:5700", "ipc:///tmp/a-1:5-6", "tcp://*:*"):
        assert single_addresses(address) == [address]


def test_a_draft_server_connects_to_each_address_once() -> None:
    given = ["tcp://b:5702-5703", "ipc:///tmp/a", "tcp://b:5700"]
    expected = ["tcp://b:5702", "tcp://b:5703", "ipc:///tmp/a", "tcp://b:5700"]
    assert connected_addresses(given, "--connect") == expected
    with pytest.raises(ConfigError, match=r"^--connect tcp://b:5701: given twice; "):
        connected_addresses(["tcp://b:5700-5702", "tcp://b:5701"], "--connect")
    with pytest.raises(ConfigError, match=r"^--connect: 65 addresses; give at most 64$"):
        connected_addresses(["tcp://b:5700-5763", "tcp://b:1"], "--connect")
