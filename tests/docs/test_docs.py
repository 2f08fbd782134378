# SPDX-License-Identifier: Apache-2.0
"""Every command and code block of README.md and docs/ does what it says, and every example, too."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import docs_blocks
import pytest
import yaml
from docs_blocks import ROOT, SHOWN, TRIED, Block, Command
from hermetic import python_path
from patience import patience

import vllm_slo
from vllm_slo import cli, errors
from vllm_slo.arguments import NO_READER
from vllm_slo.check.schema import schema_of
from vllm_slo.config.model import SLOConfig
from vllm_slo.engine.http.routes import ROUTES
from vllm_slo.router import front_rules
from vllm_slo.slo import carriers
from vllm_slo.slo import fields as slo_fields
from vllm_slo.slo.carriers import resolve_slo
from vllm_slo.slo.claims import HEADER_FIELDS
from vllm_slo.slo.hints import HINT_HEADERS

BLOCKS = docs_blocks.blocks()
COMMANDS = docs_blocks.commands()
MOST_SKIPS = 12
"""Blocks and commands that are left out, with their reasons; one more is to be thought about."""

PARSED = ("vllm serve", *(f"vllm-slo {name}" for name in cli.COMMANDS))
"""Commands whose arguments are checked, by the parsers that read them."""
QUICK = {
    "simulate": [
        "--systems",
        "vllm-slo",
        "--rate",
        "2",
        "--jobs",
        "8",
        "--windows",
        "1",
        "--processes",
        "1",
    ],
}
"""Command of vllm-slo that a ``run: shell`` block runs -> what makes it quick."""
EXAMPLES = {
    "agent.py": "test_server.py",
    "client.py": "test_docs.py",
    "draft_servers.py": "test_examples.py",
    "inference-pool.yaml": "test_examples_gateway.py",
    "kubernetes.yaml": "test_examples_kubernetes.py",
    "nginx.conf": "test_nginx.py",
    "offline.py": "test_docs.py",
    "ray_serve.py": "test_serve_router.py",
    "rayservice.yaml": "test_examples_ray.py",
    "serve_config.yaml": "test_examples_ray.py",
    "slo.yaml": "test_docs.py",
    "speculation.py": "test_examples.py",
    "stages.py": "test_server.py",
}
"""Example -> the test that runs it."""

# What stands for names that a reader replaces.
NAMES = {"MODEL": "tiny", "D": "tiny", "A": "tiny", "B": "tiny-middle", "HOST": "127.0.0.1"}
PREAMBLE = 'import vllm_slo\n\nprompts = ["def f(", "class A:", "import"]\n'
"""What a block of Python may take for granted that goes on from one before it."""


def filled_in(text: str, url: str = "http://localhost:8000") -> str:
    """A block with names filled in, and the address of the server."""
    text = re.sub(r"\b(MODEL|HOST)\b", lambda found: NAMES[found[0]], text)
    text = re.sub(r'(?<=["\'])[ABD](?=["\'])', lambda found: NAMES[found[0]], text)
    text = re.sub(r"(?<=--draft-model )[ABD]\b|(?<=--model )D\b", lambda f: NAMES[f[0]], text)
    return text.replace("http://localhost:8000", url)


def of_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages and not block.skipped]


def named(*programs: str) -> list[Command]:
    return [one for one in COMMANDS if one.program in programs and not one.skipped]


def pythons(*, offline: bool) -> list[Block]:
    """Blocks of Python that make an engine of their own, or those that do not."""
    return [b for b in of_language("python") if ("LLM(" in b.text) is offline]


# --- nothing is passed over ----------------------------------------------------------------------

LEFT_OUT: list[Block | Command] = [b for b in BLOCKS if b.skipped]
LEFT_OUT += [c for c in COMMANDS if c.skipped]


def test_every_block_is_tried_out() -> None:
    assert len(BLOCKS) > 40 and len(COMMANDS) > 30, "the blocks are not found any more"
    unknown = [f"{b}: {b.language}" for b in BLOCKS if b.language not in TRIED | SHOWN]
    assert not unknown, f"say in docs_blocks.py what becomes of them: {unknown}"
    markers = {one.marker for one in BLOCKS if one.marker and one.marker[0] not in ("file", "skip")}
    assert markers == {("run", "shell"), ("run", "desk"), ("check", "report"), ("check", "syntax")}
    handled = {"make", "pip", "curl", "example", *PARSED}
    lost = [str(one) for one in COMMANDS if one.program not in handled and not one.skipped]
    assert not lost, f"say in docs_blocks.py what becomes of them: {lost}"


def test_few_are_left_out_and_each_has_a_reason() -> None:
    assert all(len(one.skipped or "") > 10 for one in LEFT_OUT)
    assert len(LEFT_OUT) <= MOST_SKIPS, [f"{one}: {one.skipped}" for one in LEFT_OUT]


@pytest.mark.parametrize("one", LEFT_OUT, ids=str)
def test_left_out(one: Block | Command) -> None:
    pytest.skip(f"{one}: {one.skipped}")


def test_every_example_is_run() -> None:
    here = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert here == set(EXAMPLES)
    for example, test in EXAMPLES.items():
        (path,) = (ROOT / "tests").rglob(test)
        assert example in path.read_text(encoding="utf-8")


# --- what is read --------------------------------------------------------------------------------


def unmarked(language: str) -> list[Block]:
    """Blocks of a language that are what it stands for here."""
    return [block for block in of_language(language) if block.marker is None]


@pytest.mark.parametrize("block", unmarked("yaml"), ids=str)
def test_a_configuration_is_one(block: Block) -> None:
    SLOConfig._from_yaml(block.text, str(block))


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.marked("syntax")], ids=str)
def test_what_others_read_is_well_formed(block: Block) -> None:
    assert block.language in ("json", "yaml")  # of which YAML is the wider
    assert list(yaml.safe_load_all(block.text))


def classes_of(page: str) -> dict[str, Any]:
    """The classes that the configurations of a page have, and those of the example."""
    texts = [b.text for b in unmarked("yaml") if b.page == page]
    texts.append((ROOT / "examples" / "slo.yaml").read_text(encoding="utf-8"))
    configs = [SLOConfig.model_validate(yaml.safe_load(text)) for text in texts]
    return {name: one for config in configs for name, one in config.slo_classes().items()}


@pytest.mark.parametrize("block", unmarked("json"), ids=str)
def test_a_body_is_one(block: Block) -> None:
    body = json.loads(block.text)
    asked = resolve_slo(
        body_slo=body.get("slo"),
        xargs=body.get("vllm_xargs"),
        service_tier=body.get("service_tier"),
        classes=classes_of(block.page),
        service_tiers={},
    )
    assert asked is not None, "it asks for nothing"


@pytest.mark.parametrize("command", named("make"), ids=str)
def test_a_target_is_there(command: Command) -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    words = ["make", "-n", "ACCELERATOR=cpu", *command.words[1:]]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("command", named("pip"), ids=str)
def test_an_extra_is_there(command: Command) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = set(project["optional-dependencies"])
    for extras in re.findall(r"vllm-slo\[([\w,]+)\]", command.text):
        assert set(extras.split(",")) <= known
    assert "vllm-slo[" in command.text or "uninstall" in command.words


@pytest.mark.engine  # imports vLLM, and starts none
def test_arguments_are_taken(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("ray")
    (tmp_path / "slo.yaml").write_text("classes: {chat: {ttft_ms: 500}}\n")
    (tmp_path / "engine.json").write_text("{}")
    commands = named(*PARSED)
    assert len(commands) > 15
    lines = [replace(one, text=filled_in(one.text)).words for one in commands]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "docs_arguments.py")],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={**os.environ, "VLLMSLO_DRAFT_TOKEN": "a secret of sixteen"},
    )
    complaints = json.loads(done.stdout.splitlines()[-1])
    wrong = {str(one): said for one, said in zip(commands, complaints, strict=True) if said}
    assert not wrong


SHELL = [one for one in COMMANDS if one.block.marked("shell")]


@pytest.mark.slow
@pytest.mark.parametrize("command", SHELL, ids=str)
def test_a_simulation_runs(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    program, name, *words = command.words
    assert program == "vllm-slo"
    run_script([sys.executable, "-m", "vllm_slo.cli", name, *words, *QUICK[name]], tmp_path)


# --- what is run ---------------------------------------------------------------------------------


def run_script(words: list[str], folder: Path, **environ: str) -> str:
    """Output of a process that must end well."""
    from live_server import environment

    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=patience(280),
        check=False,
        cwd=folder,
        env={**environment(), "PYTHONPATH": python_path(ROOT), **environ},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("vllm")
    live_server = pytest.importorskip("live_server")
    folder = tmp_path_factory.mktemp("docs")
    arguments = [live_server.command("vllm-slo"), "serve", "tiny", *live_server.SMALL]
    arguments += ["--slo-config", str(ROOT / "examples" / "slo.yaml")]
    with live_server.running(arguments, "tiny", folder) as live:
        yield live


@pytest.mark.engine
@pytest.mark.parametrize("block", pythons(offline=False), ids=str)
def test_a_client_gets_its_answer(block: Block, server: Any, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(PREAMBLE + filled_in(block.text, server.url), encoding="utf-8")
    assert run_script([sys.executable, str(script)], tmp_path)


@pytest.mark.engine
@pytest.mark.parametrize("command", named("curl"), ids=str)
def test_curl_gets_its_answer(command: Command, server: Any) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    text = (
        filled_in(command.text, server.url)
        + f" -sS --fail-with-body --max-time {patience(120):.0f}"
    )
    done = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, timeout=patience(150), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = ('"slo":', '"slo.quote"', "vllm_slo:")
    assert any(mark in done.stdout for mark in shown)


@pytest.mark.engine
def test_a_report_has_the_keys_that_are_shown(server: Any) -> None:
    from live_server import ask_openai

    (block,) = (b for b in of_language("json") if b.marked("report"))
    answer = ask_openai(server, "completions", False, {"slo": {"class": "chat"}})
    (report,) = answer.reports
    assert set(json.loads(block.text)["slo"]) == set(report)


@pytest.mark.engine
def test_the_client_example(server: Any, tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "examples" / "client.py"), f"{server.url}/v1"]
    said = run_script(words, tmp_path)
    assert re.search(r"^\{'ttft_ms': 500, 'tpot_ms': 50\} -> \{'tier': 'guaranteed'", said)
    assert re.search(r"^\{'tier': 'best_effort'\} -> \{'tier': 'best_effort'", said, re.M)


@pytest.mark.engine
def test_every_series_of_a_server_is_in_the_reference(server: Any) -> None:
    from live_server import ask_openai

    ask_openai(server, "completions", False, {"slo": {"class": "chat"}})
    server.settled_total("vllm_slo:requests_finished_total")
    live = {name for name, _ in server.metrics() if name.startswith("vllm_slo:")}
    assert live
    known = reference_series()
    assert not {name for name in live if base_of(name) not in known}


def small(block: Block) -> str:
    """A block whose engine is small."""
    text = filled_in(block.text)
    return re.sub(r"LLM\(([^()]*)\)", r"LLM(\1, enforce_eager=True, max_model_len=1024)", text)


def by_engine() -> dict[str, list[Block]]:
    """Blocks that make an engine, by how they make it."""
    groups: dict[str, list[Block]] = {}
    for block in pythons(offline=True):
        groups.setdefault(re.findall(r"LLM\([^()]*\)", small(block))[0], []).append(block)
    return groups


ONE_ENGINE = """
import json, sys
import vllm_slo

make, made = vllm_slo.LLM, {}

def once(*args, **kwargs):
    key = repr((args, kwargs))
    if key not in made:
        made[key] = make(*args, **kwargs)
    return made[key]

vllm_slo.LLM = once
for text in json.loads(sys.argv[1]):
    exec(text, {"__name__": "__main__"})
"""
"""Runs blocks in one process; those that ask for the same engine get the same."""


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("engine", by_engine())
def test_an_engine_of_ones_own(engine: str, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    texts = [PREAMBLE + small(block) for block in by_engine()[engine]]
    words = [sys.executable, "-c", ONE_ENGINE, json.dumps(texts)]
    run_script(words, tmp_path, VLLM_ENABLE_V1_MULTIPROCESSING="0")


@pytest.mark.engine
@pytest.mark.slow
def test_the_offline_example(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    said = run_script(
        [sys.executable, str(ROOT / "examples" / "offline.py")],
        tmp_path,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    assert "'tier': 'guaranteed'" in said and "'tier': 'best_effort'" in said
    assert "class Reader:" in said


# --- names that pages mention --------------------------------------------------------------------


@lru_cache
def reference() -> Any:
    """The module that writes the reference."""
    spec = spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def http_page() -> str:
    """The page on HTTP, whose examples are answered by the middleware."""
    pytest.importorskip("vllm")
    return str(reference().http())


def base_of(series: str) -> str:
    """A series without what the text format adds to its name."""
    return re.sub(r"_(total|bucket|sum|count|created)$", "", series)


def reference_series() -> set[str]:
    """Names of the series in the reference, without what the text format adds."""
    page = reference().metrics_page()
    return {base_of(name) for name in re.findall(r"`(vllm_slo:\w+)`", page)}


def test_every_series_that_a_page_names_exists() -> None:
    known, named_ones = reference_series(), 0
    for page in docs_blocks.pages():
        for name in re.findall(r"vllm_slo:\w+(?![\w*])", page.read_text(encoding="utf-8")):
            named_ones += 1
            assert base_of(name) in known, f"{page.name}: there is no {name}"
    assert named_ones > 20


# --- the reference and the site ------------------------------------------------------------------


def keys_of(schema: dict[str, Any], part: dict[str, Any]) -> Iterator[str]:
    """Every key of a JSON schema's objects, however deep."""
    for name, field in part.get("properties", {}).items():
        yield name
        yield from keys_of(schema, field)
    for inner in (part.get("additionalProperties"), part.get("items"), *part.get("anyOf", ())):
        if isinstance(inner, dict):
            yield from keys_of(schema, inner)
    if "$ref" in part:
        yield from keys_of(schema, schema["$defs"][part["$ref"].rpartition("/")[2]])


def test_every_key_of_the_configuration_is_in_the_reference() -> None:
    page, schema = reference().configuration(), SLOConfig.model_json_schema()
    keys = set(keys_of(schema, schema))
    assert {"classes", "ttft_ms", "draft_model", "max_hops", "order"} <= keys
    assert not {key for key in keys if not re.search(rf"^\| `(\S+\.)?{key}` \|", page, re.M)}


def test_every_field_of_a_request_is_in_the_reference() -> None:
    page = reference().requests()
    assert not {key for key in slo_fields.PUBLIC if f"| `{key}` |" not in page}
    assert not {header for header in HEADER_FIELDS if f"| `{header}` |" not in page}


def test_every_series_in_the_code_is_in_the_reference() -> None:
    known = reference_series()
    for module, fewest in (
        ("engine/telemetry/metrics.py", 6),
        ("engine/telemetry/speculation_metrics.py", 6),
        ("engine/telemetry/step_series.py", 3),
        ("router/front_metrics.py", 6),
    ):
        source = (ROOT / "vllm_slo" / module).read_text(encoding="utf-8")
        named = re.findall(r'"vllm_slo:(\w+)"', source)
        assert len(named) >= fewest
        assert not {name for name in named if f"vllm_slo:{name}" not in known}
    assert {
        "vllm_slo:drafter_up",
        "vllm_slo:tenant_utility",
        "vllm_slo:draft_send_seconds",
    } <= known


def test_the_readme_says_why_each_package_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(one for extra in extras.values() for one in extra)]
    names = {re.match(r"[\w-]+", one)[0] for one in needed}  # type: ignore[index]
    table = (ROOT / "README.md").read_text().split("## What it stands on")[1]
    told = set(re.findall(r"[\w-]+", " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
    assert not names - told
    page = (ROOT / "README.md").read_text().split("There are extras")[1].split("\n\n")[0]
    assert {*extras} - {"cpu", "cuda", "dev"} <= {*re.findall(r"`([a-z]+)`", page)}


def test_every_exception_is_in_the_reference() -> None:
    page, seen = reference().exceptions(), {errors.VllmSLOError}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.VllmSLOError):
            seen.add(kind)
    assert len(seen) > 4
    assert not {kind.__name__ for kind in seen if f"## {kind.__name__}\n" not in page}


def test_every_command_and_public_name_is_in_the_reference() -> None:
    commands, python = reference().commands(), reference().python()
    assert not {name for name in cli.COMMANDS if f"usage: vllm-slo {name}" not in commands}
    public = set(vllm_slo.__all__) - {"__version__"}
    assert not {name for name in public if f"## vllm_slo.{name}\n" not in python}


def test_every_exit_status_is_on_the_page_of_the_command_line() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    told = {int(status) for status in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert told == {*(status for status, _ in cli.STATUSES), NO_READER}


def test_the_variables_of_the_page_are_read_somewhere() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    rows = page.split("## Environment variables")[1].split("## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)
    assert len(named) > 6
    sources = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "vllm_slo").rglob("*.py"))
    assert not {name for name in named if f'"{name}"' not in sources}


def test_every_old_name_is_in_the_reference() -> None:
    rows = reference().old_names()
    assert ["`vllm-slo profile`", "`--out`", "`--json`"] in rows
    page = reference().commands().partition("## Old names")[2]
    assert all(f"| {' | '.join(row)} |" in page for row in rows)


def test_an_error_without_a_meaning_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text('error_response(418, "Teapot", "no coffee")\n')
    with pytest.raises(ValueError, match="418"):
        reference().statuses("front", [tmp_path / "new.py"])


@pytest.mark.engine  # imports vLLM, and starts none
def test_the_reference_has_the_refusals_of_quotes(http_page: str) -> None:
    rows = http_page.splitlines()
    for status, kind in (
        ("413", "`BadRequestError`"),
        ("429", "`RateLimitError`"),
        ("501", "`NotImplementedError`"),
    ):
        assert any(row.startswith(f"| {status} | {kind} | ") and "quote" in row for row in rows)


@pytest.mark.engine
def test_every_route_is_in_the_reference(http_page: str) -> None:
    for path, info in ROUTES.items():
        (row,) = re.findall(rf"^\| `{re.escape(path)}` \| (.+) \|$", http_page, re.M)
        assert row.startswith(reference().KINDS[info.kind])
        assert info.note in row
    assert all(f"`{path}`" in http_page for path in carriers.ROUTES | front_rules.PROXIED)


@pytest.mark.engine
def test_the_reference_shows_what_a_decline_looks_like(http_page: str) -> None:
    for kind in ("slo_unattainable", "rate_limit_error"):
        assert f'"type": "{kind}"' in http_page
    assert http_page.count("retry-after-ms: 1200\nx-slo-reason: prefill") == 2


def test_the_status_of_a_decline_is_in_the_reference() -> None:
    page = ROOT / "vllm_slo" / "engine" / "http" / "exchange.py"
    rows = reference().statuses("server", [page])
    assert ["429", "`slo_unattainable`"] in [row[:2] for row in rows]


def test_every_hint_is_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    page = reference().requests()
    assert not [header for header in HINT_HEADERS if f"header `{header}`" not in page]
    page = reference()
    monkeypatch.setattr(page, "HINT_HEADERS", {"x-coffee": "tenant"})
    with pytest.raises(ValueError, match="x-coffee"):
        page.hints()


def test_a_page_of_the_front_that_nobody_explains_ends_the_build() -> None:
    with pytest.raises(ValueError, match="/coffee"):
        reference().front_paths('{"/health": self._health, "/coffee": self._brew}')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning."""
    pytest.importorskip("material")
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "WARNING" not in done.stderr
    return folder


@pytest.mark.slow
def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    fetched = r'<(?:script|img|iframe|source)[^>]* src="?https?:|<link[^>]* href="?https?:'
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(fetched, text), page
        assert not re.search(r"(unpkg|jsdelivr|googleapis|gstatic)\.", text), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:", sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.slow
def test_the_schemas_are_beside_the_reference(site: Path) -> None:
    for kind, name in reference().SCHEMAS.items():
        assert json.loads((site / "reference" / name).read_text(encoding="utf-8")) == schema_of(
            kind
        )


@pytest.mark.slow
def test_every_page_is_found_by_the_search(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {str(p.relative_to(site)) for p in site.rglob("*.html") if p.name != "404.html"}
    pages = {page for page in pages if not page.startswith("reports/")}  # examples of results
    assert pages <= found | {""} | {"index.html"}
    assert any("budget line" in entry["text"] for entry in index["docs"])


def test_the_search_works_in_pages_opened_as_files(site: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no chromium here")
    done = subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--virtual-time-budget=20000", f"--user-data-dir={tmp_path}"),
            (site / "concepts" / "index.html").as_uri() + "?q=budget",
        ],
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=True,
    )
    assert re.search(r'href="file:[^"]*admission.html[^"]*" class="md-search-result', done.stdout)


def test_every_figure_is_drawn_in_the_pages_own_colours(site: Path) -> None:
    asked = [
        (page, name)
        for page in docs_blocks.pages()
        for name in re.findall(r"\(figure:(\w+)\)", page.read_text(encoding="utf-8"))
    ]
    scripts = {p.stem for p in (ROOT / "docs" / "figures").glob("*.py")} - {"style"}
    assert {name for _, name in asked} == scripts
    for page, _ in asked:
        built = site / page.relative_to(ROOT / "docs").with_suffix(".html")
        text = built.read_text(encoding="utf-8")
        assert '<svg role="img" aria-label="' in text and "currentColor" in text
        assert "figure:" not in re.sub(r"<svg.*?</svg>", "", text, flags=re.S)


def test_the_result_that_pages_quote_first_is_that_of_the_dynamic_program() -> None:
    """The picture of the budget line and its caption tell the same."""
    text = (ROOT / "docs" / "concepts" / "admission.md").read_text(encoding="utf-8")
    assert "C comes too late" in text
    done = subprocess.run(
        [sys.executable, "-c", TOLD],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT / "docs" / "figures",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["A", "B", "D"]


TOLD = """
from budget_line import ASKING, CAPACITY, MODEL, RUNNING, plan_admission
print(*plan_admission(0.0, ASKING, [], RUNNING, MODEL, CAPACITY).admitted)
"""
