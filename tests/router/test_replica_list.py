# SPDX-License-Identifier: Apache-2.0
"""Lists of replicas: what each source gives, what is refused, and what happens when they change."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

from vllm_slo.errors import ConfigError
from vllm_slo.router.replica_list import (
    MAX_FILE_BYTES,
    Dns,
    File,
    Urls,
    source_of,
    spec_of_url,
    specs_of_file,
    watch,
)
from vllm_slo.router.replica_spec import ReplicaSpec

FIRST = ReplicaSpec("10.0.0.1:8000", "http://10.0.0.1:8000", "secret")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1:8000/", "10.0.0.1:8000"),
        ("http://vllm-0.vllm:80", "vllm-0.vllm:80"),
        ("http://[fd00::1]:8000", "[fd00::1]:8000"),
    ],
)
def test_a_url_names_its_replica(url: str, name: str) -> None:
    assert spec_of_url(url, "secret", "here") == ReplicaSpec(name, f"http://{name}", "secret")


@pytest.mark.parametrize(
    "url",
    [
        *("", "10.0.0.1:8000", "https://10.0.0.1:8000", "http://10.0.0.1", "http://:8000"),
        *("http://a:0", "http://a:99999", "http://a:b", "http://a:1/v1", "http://u:p@a:1"),
        *("http://a:1?x=1", "http://a:1#x", "http://[fd00::1:8000"),
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^here: .*give http://HOST:PORT$"):
        spec_of_url(url, "secret", "here")


def test_a_replica_needs_a_token() -> None:
    for token in (None, ""):
        with pytest.raises(ConfigError, match="--token-file"):
            spec_of_url("http://a:1", token, "here")
    for token in ("schlüssel", "two\nlines"):
        with pytest.raises(ConfigError, match="use ASCII"):
            spec_of_url("http://a:1", token, "here")


def test_a_file_lists_urls_and_mappings() -> None:
    text = """
- http://10.0.0.1:8000
- {url: "http://10.0.0.2:8000", name: b}
- url: http://10.0.0.3:8000
  token: own
"""
    assert specs_of_file(text, "secret", "replicas.yaml") == [
        FIRST,
        ReplicaSpec("b", "http://10.0.0.2:8000", "secret"),
        ReplicaSpec("10.0.0.3:8000", "http://10.0.0.3:8000", "own"),
    ]
    assert specs_of_file('["http://10.0.0.1:8000"]', "secret", "replicas.json") == [FIRST]
    assert specs_of_file("# none yet\n", "secret", "replicas.yaml") == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("- http://a:1\n- nonsense", r"^f:2: url: 'nonsense' is no URL"),
        ("- http://a:1\n-\n  url: http://b:1\n  names: c", r"^f:3: unknown field 'names'.*'name'"),
        ("- http://a:1\n\n- {name: c}", r"^f:3: url is missing"),
        ("- {url: http://a:1, token: 5}", r"^f:1: token: expected text"),
        ("- {url: http://a:1, name: ''}", r"^f:1: name: expected text"),
        ("- 5", r"^f:1: expected a URL"),
        ("http://a:1", r"^f: expected a list"),
        ("- [http://a:1", r"^f:\d: broken YAML"),
        ("- http://a:1\n- http://a:1/", r"^f:2: name: there are two replicas a:1"),
    ],
)
def test_errors_name_line_and_field(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        specs_of_file(text, "secret", "f")


def test_the_command_line_names_one_source(tmp_path: Path) -> None:
    assert source_of(["http://a:1"], None, "t") == Urls(("http://a:1",), "t")
    assert source_of([], str(tmp_path / "r"), None) == File(tmp_path / "r", None)
    assert source_of([], "dns:vllm.ns.svc:8000", "t") == Dns("vllm.ns.svc", 8000, "t")
    for urls, replicas_from in (
        ([], None),
        (["http://a:1"], "f"),
        ([], "DNS:vllm"),
        ([], "DNS:vllm:0"),
        ([], "DNS:http://vllm:8000"),
        ([], "DNS:vllm:99999"),
    ):
        with pytest.raises(ConfigError):
            source_of(urls, replicas_from, "t")
    with pytest.raises(ConfigError, match="--token-file"):
        source_of([], "DNS:vllm:8000", None)


def test_urls_and_what_is_wrong_with_them() -> None:
    urls = ("http://10.0.0.1:8000", "http://10.0.0.2:8000")
    assert [spec.url for spec in asyncio.run(Urls(urls, "secret").read())] == list(urls)
    with pytest.raises(ConfigError, match="two replicas"):
        asyncio.run(Urls((urls[0], urls[0]), "secret").read())


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "replicas.yaml"
    for content, reason in (
        (None, "No such file"),
        (b"\xff", "UTF-8"),
        (b" " * (MAX_FILE_BYTES + 1), "larger"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            asyncio.run(File(path, "secret").read())


def test_every_address_of_a_name_is_a_replica() -> None:
    specs = asyncio.run(Dns("localhost", 8000, "secret").read())
    assert "http://127.0.0.1:8000" in [spec.url for spec in specs]
    assert all(spec.token == "secret" and spec.url == f"http://{spec.name}" for spec in specs)


def test_a_name_without_an_address_has_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = socket.gaierror(socket.EAI_NONAME, "unknown")

    async def main() -> list[ReplicaSpec]:
        async def getaddrinfo(*given: Any, **more: Any) -> Any:
            raise failure

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        return await Dns("vllm", 8000, "secret").read()

    assert asyncio.run(main()) == []
    failure = socket.gaierror(socket.EAI_AGAIN, "later")
    with pytest.raises(OSError, match="later"):
        asyncio.run(main())


def test_a_changed_file_is_read_again_and_a_mistake_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "replicas.yaml"
    path.write_text("- http://10.0.0.1:8000\n")
    seen: list[list[str]] = []

    async def main() -> None:
        task = asyncio.create_task(
            watch(File(path, "t"), lambda specs: seen.append([one.name for one in specs]), 0.005)
        )
        await _until(lambda: len(seen) == 1)
        path.write_text("- nonsense\n")
        await _until(lambda: "nonsense" in caplog.text)
        await asyncio.sleep(0.05)
        assert len(seen) == 1 and caplog.text.count("stays as it was") == 1
        path.write_text("- {url: 'http://10.0.0.2:8000', name: b}\n")
        await _until(lambda: len(seen) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert seen == [["10.0.0.1:8000"], ["b"]]


def test_the_first_list_must_be_right(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        asyncio.run(watch(File(tmp_path / "none", "t"), lambda specs: None))


async def _until(holds: Any) -> None:
    async with asyncio.timeout(10.0):
        while not holds():
            await asyncio.sleep(0.005)
