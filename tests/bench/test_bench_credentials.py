# SPDX-License-Identifier: Apache-2.0
"""Keys, headers and addresses of the commands that talk to a server: bench and quote."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_openai import Fake, serving

from vllm_slo import cli
from vllm_slo.bench import demo_servers
from vllm_slo.bench.credentials import Credentials, parse_header, shown_command
from vllm_slo.bench.endpoint import ServerTarget, api_root
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.zero_load import ZeroLoad

ZERO = ZeroLoad(((16, 0.02), (256, 0.05), (1024, 0.2)), 0.01, "lone")
KEY = "sk-secret-4711"
TOKEN = "tok-secret-0815"


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving() as server_side:
        yield server_side


@pytest.fixture(autouse=True)
def _no_key_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def bench(url: str, tmp_path: Path, *extra: str) -> int:
    zero = tmp_path / "zero.json"
    zero.write_text(json.dumps(ZERO.to_dict()))
    words = ["--base-url", f"{url}=one", "--rate", "8", "--duration", "0.5"]
    words += ["--length-scale", "0.02", "--zero-load", str(zero)]
    return run("bench", *words, *extra)


def quote(url: str, *extra: str) -> int:
    return run("quote", "--base-url", url, "--prompt", "hello", "--ttft-ms", "5", *extra)


def run(*words: str) -> int:
    """The command as it is typed: `sys.argv` has the words that a report would show."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["vllm-slo", *words])
        return cli.main(list(words))


def refusals(
    capsys: pytest.CaptureFixture[str], url: str, tmp_path: Path, *words: str
) -> Iterator[str]:
    """The one line with which each command refuses."""
    for command in (lambda: bench(url, tmp_path, *words), lambda: quote(url, *words)):
        assert command() == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        yield error


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["option", "environment"])
def test_bench_and_quote_bring_the_key(
    fake: Fake, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.api_key = KEY
    words = ["--api-key", KEY] if way == "option" else []
    if way == "environment":
        monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")  # as `export KEY=$(cat file)` may leave it
    assert bench(fake.url, tmp_path, *words) == 0
    assert quote(fake.url, *words) == 0
    given = {headers.get("authorization") for _, headers in fake.asked}
    assert given == {f"Bearer {KEY}"}


def test_the_option_goes_before_the_environment(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-another")
    fake.api_key = KEY
    assert bench(fake.url, tmp_path, "--api-key", KEY) == 0
    assert quote(fake.url, "--api-key", KEY) == 0
    # A header named on the command line goes before the environment, too.
    assert bench(fake.url, tmp_path, "--header", f"authorization:Bearer {KEY}") == 0
    assert quote(fake.url, "--header", f"authorization:Bearer {KEY}") == 0
    # An empty option: no key, whatever the environment has.
    fake.api_key, fake.asked = None, []
    assert bench(fake.url, tmp_path, "--api-key", "") == 0
    assert quote(fake.url, "--api-key=") == 0
    assert not any("authorization" in headers for _, headers in fake.asked)


def test_headers_go_with_every_request(fake: Fake, tmp_path: Path) -> None:
    words = ["--header", "X-Tenant: team a", "--header", f"x-gateway-token:{TOKEN}"]
    assert bench(fake.url, tmp_path, *words) == 0
    assert quote(fake.url, *words) == 0
    paths = {path for path, _ in fake.asked}
    assert paths == {"/v1/models", "/version", "/v1/completions", "/v1/slo/quote"}
    for _, headers in fake.asked:
        assert headers["x-tenant"] == "team a"
        assert headers["x-gateway-token"] == TOKEN


@pytest.mark.slow
def test_a_key_is_in_nothing_that_is_written(
    fake: Fake,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    children: list[Any] = []
    popen = subprocess.Popen.__init__

    def spy(self: Any, *args: Any, **kwargs: Any) -> None:
        children.append((args, kwargs))
        popen(self, *args, **kwargs)

    monkeypatch.setattr(subprocess.Popen, "__init__", spy)
    secrets = ["--api-key", KEY, f"--header=X-Gateway-Token: Bearer {TOKEN}"]
    out_json, out_png = tmp_path / "report.json", tmp_path / "bench.png"
    files = ["--json", str(out_json), "--out", str(tmp_path)]
    assert bench(fake.url, tmp_path, *secrets, *files) == 0
    assert quote(fake.url, *secrets, "--json") == 0
    report = out_json.read_text()
    command = json.loads(report)["command"]
    assert "--api-key '***'" in command
    assert "'--header=X-Gateway-Token: ***'" in command
    said = "".join(capfd.readouterr())
    seen = [report, out_png.read_bytes().decode("latin-1"), said, caplog.text, repr(children)]
    assert not [text for text in seen if KEY in text or TOKEN in text]


@pytest.mark.parametrize("key", [[], ["--api-key", "sk-wrong-key-42"]])
def test_a_refused_key_is_one_line_that_does_not_have_it(
    fake: Fake, key: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.api_key = KEY
    for error in refusals(capsys, fake.url, tmp_path, *key):
        assert "401" in error
        assert "--api-key" in error
        assert "sk-wrong" not in error


def test_a_server_that_repeats_the_key_in_an_answer(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of a failed request goes into the report."""
    door = fake.app

    def repeats() -> Any:
        app = door()

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            # The first requests, which make the server ready, are let in.
            late = scope.get("path") == "/v1/completions" and len(fake.bodies) >= 4
            fake.api_key = "none fits" if late else None
            await app(scope, receive, send)

        return answer

    monkeypatch.setattr(fake, "app", repeats)
    with serving(fake):
        out = tmp_path / "report.json"
        words = ["--api-key", KEY, "--json", str(out)]
        assert bench(fake.url, tmp_path, *words) == 1
    errors = [one["error"] for one in json.loads(out.read_text())["servers"][0]["requests"]]
    assert all("Incorrect API key provided: Bearer ***" in error for error in errors)
    assert KEY not in out.read_text()


def test_a_key_does_not_follow_a_redirect(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as other:
        fake.redirects_to = other.url
        for error in refusals(capsys, fake.url, tmp_path, "--api-key", KEY):
            assert f"redirects to {other.url}" in error
        assert not other.asked


def test_what_holds_a_key_does_not_show_it() -> None:
    credentials = Credentials(KEY, (("X-Token", TOKEN),))
    target = ServerTarget("a", "http://localhost:1", credentials=credentials)
    for text in (repr(credentials), repr(target), str(target)):
        assert KEY not in text
        assert TOKEN not in text


def test_the_servers_of_the_demo_ask_for_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``VLLM_API_KEY`` vLLM asks for a key that the demo's client does not have."""
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, KEY)
    assert KEY not in map(demo_servers._environment().get, ("VLLM_API_KEY", "OPENAI_API_KEY"))


# --- where answers of quote go -------------------------------------------------------------------


def test_the_answer_of_a_quote_as_json(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--json`` without a value is what it was before it took a file."""
    for words in (["--json"], ["--json", "-"]):
        assert quote(fake.url, *words) == 0
        assert json.loads(capsys.readouterr().out)["object"] == "slo.quote"
    assert quote(fake.url, "--json", str(tmp_path / "quote.json")) == 0
    assert capsys.readouterr().out.startswith("promised: yes")
    assert json.loads((tmp_path / "quote.json").read_text())["promised"] is True
    (tmp_path / "file").write_text("")
    assert quote(fake.url, "--json", str(tmp_path / "file" / "quote.json")) == 2
    assert "vllm-slo: error: --json: cannot write" in capsys.readouterr().err


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no colon"),
        (f"Bearer {TOKEN}", "no colon"),
        (f": {TOKEN}", "no name"),
        (f"{TOKEN} x: 1", "name has a character"),
        ("X-Tenant:", "no value"),
        ("X-Tenant:  ", "no value"),
        (f"X-Tenant: {TOKEN}\r\nX-Other: 1", "value has a character"),
        (f"X-Tenant: {TOKEN}ü", "value has a character"),
        ("Content-Length: 3", "set by the client"),
        ("transfer-encoding: chunked", "set by the client"),
    ],
)
def test_a_bad_header_is_named_and_not_repeated(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BenchError, match=message) as caught:
        parse_header(text)
    assert caught.value.option == "--header"
    for error in refusals(capsys, "http://127.0.0.1:9", tmp_path, f"--header={text}"):
        assert "error: --header: " in error
        assert TOKEN not in error


def test_other_bad_credentials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = ["--header", "X-A: 1", "--header", "x-a: 2"]
    both = ["--api-key", KEY, "--header", f"Authorization: Bearer {KEY}"]
    for words, message in (
        (twice, "--header: x-a is given twice"),
        (both, "--header: both Authorization and --api-key are given"),
        (["--api-key", f"{KEY} x"], "--api-key: the key has a character"),
        (["--api-key", f"{KEY}\x00"], "--api-key: the key has a character"),
        (["--api-key", f"ключ{KEY}"], "--api-key: the key has a character"),
    ):
        for error in refusals(capsys, "http://127.0.0.1:9", tmp_path, *words):
            assert message in error
            assert KEY not in error
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\nx")
    assert quote("http://127.0.0.1:9") == 2
    error = capsys.readouterr().err
    assert "OPENAI_API_KEY: the key has a character" in error
    assert KEY not in error


def test_what_a_report_shows_of_the_command() -> None:
    words = ["vllm-slo", "bench", "--header", f"X-A: {TOKEN}", "--api-key=" + KEY]
    words += ["--header", f"{TOKEN} nonsense", "--model", "m", "--api-key", KEY, "--seed", "1"]
    assert shown_command(words) == (
        "vllm-slo bench --header 'X-A: ***' '--api-key=***' --header '***' --model m "
        "--api-key '***' --seed 1"
    )
    assert shown_command(["vllm-slo", "bench", "--api-key"]) == "vllm-slo bench --api-key"


# --- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/", "//", "/v1//", "//v1/"])
def test_addresses_with_and_without_v1(fake: Fake, ending: str, tmp_path: Path) -> None:
    assert quote(fake.url + ending) == 0
    target = ServerTarget("a", fake.url + ending)
    assert target.api_url == f"{fake.url}/v1"
    if ending == "//v1/":
        assert bench(fake.url + ending, tmp_path) == 0
    wanted = {"/v1/models", "/v1/slo/quote", "/version", "/v1/completions"}
    assert {path for path, _ in fake.asked} <= wanted


@pytest.mark.parametrize(
    ("address", "root"),
    [
        ("http://localhost:8000/v1", "http://localhost:8000"),
        (" https://host/prefix/v1/ ", "https://host/prefix"),
        ("http://v1", "http://v1"),  # a host of that name
        ("http://v1/v1", "http://v1"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_the_root_of_an_address(address: str, root: str) -> None:
    assert api_root(address) == root


@pytest.mark.parametrize(
    "address",
    [
        "localhost:8000",
        "",
        "/v1",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://[::1",
        f"http://user:{KEY}@host",
        f"http://user:{KEY}/@host",
        f"http://host/v1?api_key={KEY}",
        f"http://host/v1#{KEY}",
    ],
)
def test_what_is_no_address_of_a_server(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BenchError, match="--base-url"):
        api_root(address)
    for error in refusals(capsys, address, tmp_path):
        assert "error: --base-url: " in error
        assert KEY not in error
