# SPDX-License-Identifier: Apache-2.0
"""The lists of what is open without a key, in docs/security.md, are what servers and fronts do."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_blocks import ROOT
from front_stack import Fake, FrontProcess, http, processes, states_arrive
from patience import patience

from vllm_slo.engine.http.routes import ROUTES
from vllm_slo.router import front_page, front_rules, haproxy_config
from vllm_slo.router.front_page import PATHS
from vllm_slo.slo.carriers import QUOTE_ROUTE

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
REPLICA = "/metrics/replicas/NAME"


def rows_of(head: str) -> list[list[str]]:
    """The cells of the table whose first column is called ``head``."""
    text = PAGE.partition(f"| {head} |")[2]
    lines = re.split(r"\n\n", text)[0].splitlines()[2:]
    assert lines, f"there is no table of {head}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def paths_of(rows: list[list[str]]) -> list[str]:
    """What stands in the first cells."""
    return sorted(path for row in rows for path in re.findall(r"`(/[^`]+)`", row[0]))


@pytest.fixture(scope="module")
def asked() -> dict[str, list[str]]:
    """What a server answers to a client without a key."""
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "open_routes.py")],
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.engine  # imports vLLM, and starts none
def test_what_a_server_leaves_open_is_on_the_page(asked: dict[str, list[str]]) -> None:
    rows = rows_of("open on a server")
    usual = [row for row in rows if row[2].startswith("always")]
    assert paths_of(usual) == asked["always"]
    assert paths_of([row for row in rows if row not in usual]) == asked["switched"]


@pytest.mark.engine
def test_what_a_server_guards_is_what_the_page_says(asked: dict[str, list[str]]) -> None:
    (line,) = re.findall(r"guards the paths that begin with (.+?)\. It guards", PAGE, re.S)
    prefixes = tuple(re.findall(r"`(/\w+)`", line))
    from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX

    assert set(prefixes) == set(GUARDED_PREFIX)
    assert QUOTE_ROUTE in asked["guarded"]
    assert all(path.startswith(prefixes) for path in asked["guarded"])
    assert not [path for path in asked["always"] + asked["switched"] if path.startswith(prefixes)]


@pytest.fixture(scope="module")
def keyed() -> Iterator[FrontProcess]:
    """A front that wants a key, before one replica."""
    digest = hashlib.sha256(b"secret").hexdigest()
    with processes() as keep:
        one = keep(FrontProcess({}, api_key_sha256=[digest]))
        fake = keep(Fake("NAME"))
        one.serve(fake)
        states_arrive(one, [fake])
        yield one


def own_pages() -> set[str]:
    """Every path that the code of the front compares with, but for those below /v1."""
    files = (front_page.__file__, front_rules.__file__, haproxy_config.__file__)
    source = "".join(Path(file).read_text(encoding="utf-8") for file in files)
    named = set(re.findall(r'"(/[\w/-]+)"', source)) | {*PATHS}
    whole = {f"{path}NAME" if path.endswith("/") else path for path in named}
    assert REPLICA in whole
    return {path for path in whole if not path.startswith("/v1/")}


def test_what_a_front_leaves_open_is_on_the_page(keyed: FrontProcess) -> None:
    listed = paths_of(rows_of("open on the front"))
    others = {"/docs", "/load", "/openapi.json", "/v1/models", "/v1/anything", QUOTE_ROUTE}
    doors = own_pages() | set(ROUTES) | others | set(listed)
    found = set()
    for path in doors:
        url = keyed.url + path.replace("{response_id}", "x")
        answers = [http(method, url) for method in ("GET", "POST")]
        if path.startswith("/v1/"):
            assert {answer.status_code for answer in answers} == {401}, path
        elif not all(f"{path} is not served here" in answer.text for answer in answers):
            found.add(path)
    assert sorted(found) == listed
