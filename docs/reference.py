# SPDX-License-Identifier: Apache-2.0
"""The reference pages, written from the code while the site is built: they cannot go stale.

``PAGES`` maps a page's name to the function that writes it. A thing that the code does not describe
ends the build with a ``ValueError`` that names it.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import inspect
import itertools
import json
import os
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import vllm_slo
from vllm_slo import cli, errors, http_slo, slo
from vllm_slo.config import SLOConfig
from vllm_slo.engine import metrics
from vllm_slo.engine.http import SLOMiddleware
from vllm_slo.router import front_metrics

PACKAGE: Final = Path(vllm_slo.__file__).parent

# --- Markdown ------------------------------------------------------------------------------------


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table; cells are Markdown."""
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *([cell.replace("|", "\\|") for cell in r] for r in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def flow(text: str) -> str:
    """A paragraph in one line, however it is broken in the source."""
    return " ".join(text.split())


def code(text: object) -> str:
    """Inline code."""
    return f"`{text}`"


def prose(docstring: str | None, what: str) -> str:
    """A docstring as Markdown: its sections (``Args:``, ...) become lists.

    Raises:
        ValueError: there is none.
    """
    if not docstring:
        raise ValueError(f"{what}: there is no docstring")
    out: list[str] = []
    section = False
    for line in re.sub(r":\w+:`([^`]+)`", r"`\1`", inspect.cleandoc(docstring)).splitlines():
        if re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            out += [f"**{line[:-1]}**", ""]
            section = True
        elif section and re.match(r"    \S", line):
            name = re.match(r"    ([\w, ]+):\s(.*)", line)
            out.append(f"- `{name[1]}`: {name[2]}" if name else f"- {line.strip()}")
        elif section and line.strip():
            out[-1] += f" {line.strip()}"
        else:
            section = section and not line
            out.append(line)
    return "\n".join(out)


# --- configuration -------------------------------------------------------------------------------


def type_name(kind: Any) -> str:
    """A type as a writer of YAML or JSON thinks of it."""
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(type_name(one) for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is Literal:
        return ", ".join(code(one) for one in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "mapping, see below"
    origin = get_origin(kind)
    if origin is not None and issubclass(origin, dict | Mapping):
        return "mapping of names"
    if origin is not None and issubclass(origin, list | tuple):
        return f"list of {type_name(get_args(kind)[0])}"
    plain = {bool: "true or false", str: "text", float: "number", int: "whole number"}
    return plain.get(kind, "") or str(kind)


def bounds(field: FieldInfo) -> str:
    """The range that a field is checked against, as an interval."""
    low = high = ""
    for rule in field.metadata:
        low = f"[{rule.ge:g}" if getattr(rule, "ge", None) is not None else low
        low = f"({rule.gt:g}" if getattr(rule, "gt", None) is not None else low
        high = f"{rule.le:g}]" if getattr(rule, "le", None) is not None else high
        high = f"{rule.lt:g})" if getattr(rule, "lt", None) is not None else high
    return f"{low or '(-inf'}, {high or 'inf)'}" if low or high else ""


def default_of(field: FieldInfo) -> str:
    """A field's default as YAML says it."""
    if field.default_factory is not None or field.is_required():
        return "required" if field.is_required() else ""
    return "unset" if field.default is None else code(json.dumps(field.default))


def models_of(kind: Any) -> Iterator[type[BaseModel]]:
    """The models within a type."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from models_of(part)


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(prefix of its keys, model), the whole configuration first."""
    yield prefix, model
    for name, field in model.model_fields.items():
        for inner in models_of(field.annotation):
            named = get_origin(field.annotation) is dict
            many = "[]" if get_origin(field.annotation) in (list, tuple) else ""
            yield from sections(inner, f"{prefix}{name}{many}.{'NAME.' if named else ''}")


def configuration() -> str:
    """Every key of the YAML file."""
    parts = [
        "# Configuration",
        flow(
            """One YAML file, given as `vllm-slo serve --slo-config FILE` or in vLLM's
            `--additional-config` as `{"slo_config": "FILE"}`. An unknown key, a value out of
            its range or a class that is not there ends the start with one line that names
            file, line, key and fix. `(` and `)` leave the end of a range out, `[` and `]`
            include it."""
        ),
    ]
    for prefix, model in sections(SLOConfig):
        parts.append(f"## {code(prefix.rstrip('.'))}" if prefix else "## Top level")
        if prefix:
            parts.append(prose(model.__doc__, model.__name__))
        rows = []
        for name, field in model.model_fields.items():
            if not field.description:
                raise ValueError(f"{model.__name__}.{name}: the field has no description")
            kind = type_name(field.annotation) + (f", in {bounds(field)}" if bounds(field) else "")
            rows.append([code(prefix + name), kind, default_of(field), field.description])
        parts.append(table(["key", "type", "default", "what it does"], rows))
    return "\n\n".join(parts)


# --- requests ------------------------------------------------------------------------------------


def described(docstring: str | None) -> dict[str, str]:
    """The entries of a docstring's ``Attributes:`` by name."""
    text = inspect.cleandoc(docstring or "").partition("Attributes:\n")[2]
    text = re.split(r"\n\n?(?=\S)", text)[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", text, re.MULTILINE)
    return {name: " ".join(said.split()) for name, said in entries}


def request_fields() -> list[list[str]]:
    """(key, type, default, meaning) of each field of an SLO."""
    told, hints, rows = described(slo.SLO.__doc__), get_type_hints(slo.SLO), []
    for field in fields(slo.SLO):
        if field.name not in told:
            raise ValueError(f"SLO.{field.name}: its docstring does not describe it")
        key = field.name.removeprefix("slo_")
        default = field.default if field.default is not MISSING else None
        shown = "" if default in (None, ()) else code(json.dumps(default))
        rows.append([code(key), type_name(hints[field.name]), shown, told[field.name]])
    return rows


def requests() -> str:
    """What a request may ask for, and how it says so."""
    rows = request_fields()
    headers = [[code(h), code(n.removeprefix("slo_"))] for h, n in slo.HEADER_FIELDS.items()]
    tiers = ", ".join(map(code, slo.SERVICE_TIERS))
    return "\n\n".join(
        [
            "# Requests",
            "What one request asks for, whichever way it says so. Times are milliseconds.",
            table(["field", "type", "default", "meaning"], rows),
            "## Carriers",
            flow(
                """Several carriers may be used in one request; two that disagree are a 400 that
                names both. What a field leaves unsaid is taken from the request's class, and
                from its `service_tier` after that."""
            ),
            table(
                ["carrier", "how"],
                [
                    ["JSON body", 'the field `slo`: `{"ttft_ms": 500, "tpot_ms": 50}`'],
                    [
                        "`vllm_xargs`, `SamplingParams.extra_args`",
                        "each field with `slo_` before its name: "
                        + ", ".join(code("slo_" + row[0].strip("`")) for row in rows)
                        + "; also SLOs-Serve's `prefill_ddl` (epoch seconds) and `slo_tpot` "
                        "(seconds)",
                    ],
                    ["headers", "the table below, in any case"],
                    ["`service_tier`", f"{tiers}; `service_tiers` of the configuration maps them"],
                ],
            ),
            table(["header", "field"], headers),
            "## What comes back",
            "`service_tier` of the response is the tier that was served:",
            prose(
                import_module("vllm_slo.engine.http_outcome").served_service_tier.__doc__,
                "served_service_tier",
            ).partition("\n\n")[2],
            flow(
                """`slo` is the request's own report: `tier`, `promised`, `reason` (what stood in
                the way where nothing was promised at first), `ttft_ms`, `tpot_ms` (the worst
                window) and `attained` (`null` without an objective)."""
            ),
        ]
    )


# --- metrics -------------------------------------------------------------------------------------


def series_of(registry: CollectorRegistry) -> list[list[str]]:
    """(name as it is exposed, type, labels, help) of everything in a registry."""
    rows = []
    for collector in dict.fromkeys(registry._collector_to_names):
        (family,) = collector.describe()
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(code(label) for label in collector._labelnames)
        rows.append([code(name), family.type, labels, family.documentation])
    return rows


def scheduler_series() -> list[list[str]]:
    """Every series of a scheduler, those included that it has once there is something to say."""
    scheduler = metrics.SchedulerMetrics()
    scheduler.promised_tokens("tenant", 0.0)
    registry = scheduler.registry
    for name, kind in vars(metrics).items():
        if isinstance(kind, type) and name.endswith("Series"):
            first = next(iter(inspect.signature(kind).parameters))
            # What serves several kinds of clients takes the kind first; draft servers bring theirs.
            kind(*(["tenant"] if first != "engine" else []), "0", registry)
    return series_of(registry)


def front_series() -> list[list[str]]:
    """Every series of the front."""
    return series_of(front_metrics.FrontMetrics()._registry)


def metrics_page() -> str:
    """Every series of ours on ``/metrics``."""
    head = ["series", "type", "labels", "what it says"]
    return "\n\n".join(
        [
            "# Metrics",
            flow(
                """In Prometheus's text format. vLLM's own series (`vllm:*`) keep their names and
                stand on the same page. Histograms have `_bucket`, `_sum` and `_count`. Classes
                are those of the configuration: no label takes its values from clients, but for
                `tenant`, of which the first 32 are shown."""
            ),
            "## A server",
            flow(
                """`/metrics` of `vllm serve` and `vllm-slo serve`. Series of draft models, draft
                servers, tenants and orders of best effort are there once there is something to
                say."""
            ),
            table(head, scheduler_series()),
            "## The front of several replicas",
            flow(
                """`/metrics` of `vllm-slo serve --replicas`; every replica's own page is behind
                `/metrics/targets`."""
            ),
            table(head, front_series()),
        ]
    )


# --- HTTP ----------------------------------------------------------------------------------------

MEANING: Final[Mapping[tuple[str, int | str], str]] = {
    ("server", 400): "the objective is not one; `param` names the field, the text has the fix",
    ("server", 403): "the API key may not ask for this; `param` names the field (`access:`)",
    ("server", 413): "a quote is asked for with a body larger than 32 MiB",
    ("server", 429): "no promise can be made, and the request prefers a refusal (`decline`)",
    ("server", "RateLimitError"): "too many quotes are asked for at once",
    ("server", 500): "the configuration broke after the start; the log says how",
    ("server", 501): "a quote is asked of a server with another scheduler",
    ("front", 400): "as above, or not a valid HTTP request",
    ("front", 401): "no valid API key",
    ("front", 404): "no such path, or no such replica",
    ("front", 405): "the method is not allowed here",
    ("front", 408): "the body did not come in time",
    ("front", 413): "the body is larger than 32 MiB",
    ("front", 429): "as above, predicted by the doubles of all replicas that were asked",
    ("front", 431): "the headers are too large",
    ("front", 500): "a mistake in the front; the log has it",
    ("front", 501): "a path whose effect would reach one replica only",
    ("front", 502): "the replicas that were tried failed",
    ("front", 503): "no replica is ready, or the front is stopping",
}


ANSWERING: Final = ("_refuse", "error_messages", "error_response", "json_response", "error_event")
"""The functions that answer with an error."""


FRONT_PATHS: Final[Mapping[str, str]] = {
    "/health": "200 while a replica is ready and the front is not stopping, else 503",
    "/-/healthz": "the same; what KubeRay asks the port that clients use",
    "/metrics": "the front's own [series](metrics.md#the-front-of-several-replicas)",
    "/metrics/targets": "Prometheus's HTTP service discovery: each replica's page",
    "/metrics/replicas/NAME": "a replica's own page",
    "/replicas": "the replicas, and how each is, as JSON",
}


def front_paths(source: str) -> list[list[str]]:
    """(path, what it answers) of the front's own pages, read from its code.

    Raises:
        ValueError: one of them is not in ``FRONT_PATHS``, or is there no more.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):  # path -> method that answers
            answered = [isinstance(value, ast.Attribute) for value in node.values]
            keys = itertools.compress(node.keys, answered)
            found |= {str(one.value) for one in keys if isinstance(one, ast.Constant)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "removeprefix":
            found |= {f"{one.value}NAME" for one in node.args if isinstance(one, ast.Constant)}
    paths = {path for path in found if path.startswith("/")}
    if paths ^ set(FRONT_PATHS):
        raise ValueError(f"reference.FRONT_PATHS: {sorted(paths ^ set(FRONT_PATHS))} differ")
    return [[code(path), told] for path, told in FRONT_PATHS.items()]


def statuses(where: str, paths: Iterable[Path]) -> list[list[str]]:
    """(status, type, meaning) of the errors that some modules answer with, read from their code.

    Raises:
        ValueError: one of them has no ``MEANING``, neither its type nor its status.
    """
    found: set[tuple[int, str]] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            numbers = [a.value for a in node.args if isinstance(a, ast.Constant)]
            status = next((n for n in numbers if isinstance(n, int) and 400 <= n < 600), None)
            if status and name in ANSWERING:
                kinds = [n for n in numbers if isinstance(n, str) and re.fullmatch(r"\w+", n)]
                found.add((status, kinds[0] if kinds else ""))
    rows = []
    for status, kind in sorted(found):
        if not kind and any(other == status and named for other, named in found):
            continue
        told = MEANING.get((where, kind)) or MEANING.get((where, status))
        if told is None:
            raise ValueError(f"{where} answers {status}: reference.MEANING does not say why")
        rows.append([str(status), code(kind) if kind else "", told])
    return rows


async def exchange(body: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """What a client sees of a request to the middleware, before an engine that says ``answer``."""
    messages: list[dict[str, Any]] = []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        said = json.dumps(answer).encode()
        await send({"type": "http.response.body", "body": said, "more_body": False})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json")],
    }
    await SLOMiddleware(engine)(scope, receive, send)
    start, *parts = messages
    lines = [f"HTTP {start['status']}"]
    lines += [
        f"{name.decode()}: {value.decode()}"
        for name, value in start["headers"]
        if not name.startswith(b"content-")
    ]
    said = json.loads(b"".join(part["body"] for part in parts))
    return "\n".join([*lines, "", json.dumps(said, indent=2)])


def example(title: str, body: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """A request and its answer."""
    said = asyncio.run(exchange(body, answer))
    asked = json.dumps(body["slo"])
    return f"### {title}\n\n`slo`: `{asked}`\n\n``` {{ .text .wrapped }}\n{said}\n```"


def http() -> str:
    """Routes, errors, and what they look like."""
    routes = ", ".join(code(route) for route in sorted(http_slo.ROUTES))
    engine, router = PACKAGE / "engine", PACKAGE / "router"
    declined = {"finish_reason": "abort", "stop_reason": "slo_declined:1200", "text": ""}
    head = ["status", "`type`", "when"]
    return "\n\n".join(
        [
            "# HTTP",
            flow(
                f"""The SLO of a request is read on {routes}; bodies of more than
                {http_slo.MAX_BODY_BYTES >> 20} MiB and bodies that are not JSON go to vLLM
                unchanged. Everything else of vLLM's OpenAI server is as it was.
                [Requests](requests.md) has the fields and the carriers."""
            ),
            "## Errors of a server",
            "In OpenAI's shape; those of vLLM itself are its own.",
            table(head, statuses("server", [engine / "http.py", engine / "http_quote.py"])),
            example(
                "An objective that is none",
                {"prompt": "x", "slo": {"ttft_ms": -5}},
                {},
            ),
            example(
                "A key that is none",
                {"prompt": "x", "slo": {"tpot": 50}},
                {},
            ),
            example(
                "Refused rather than served late",
                {"prompt": "x", "slo": {"ttft_ms": 50, "on_unattainable": "decline"}},
                {"choices": [declined]},
            ),
            "## The front of several replicas",
            flow(
                """Generation requests, and a few others of vLLM's, go to a replica. These are the
                front's own:"""
            ),
            table(
                ["path", "answer"],
                front_paths((router / "front.py").read_text(encoding="utf-8")),
            ),
            "### Its errors",
            table(
                head,
                statuses("front", sorted(router.glob("*.py"))),
            ),
            flow(
                """Once a stream has begun an error comes as its last event, in the same shape,
                before `data: [DONE]`."""
            ),
        ]
    )


# --- commands ------------------------------------------------------------------------------------


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of ``vllm-slo COMMAND``."""
    module, text = cli.COMMANDS[command]
    parser = argparse.ArgumentParser(prog=f"vllm-slo {command}", description=text)
    import_module(module).add_arguments(parser)
    if command == "serve":
        import_module(cli.REPLICAS).add_arguments(parser)
    return parser


def commands() -> str:
    """The help of every command."""
    parts = ["# Commands", "`vllm-slo --version` says which one this is."]
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "88"
    try:
        for command in cli.COMMANDS:
            told = parser_of(command).format_help().rstrip()
            parts += [f"## vllm-slo {command}", f"```text\n{told}\n```"]
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return "\n\n".join(parts)


# --- Python --------------------------------------------------------------------------------------


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """A function's signature, without ``self`` and ``cls``."""
    arguments = ast.unparse(node.args)
    arguments = re.sub(r"^(self|cls)(, )?(/, )?", "", arguments)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({arguments}){returns}"


def class_page(path: Path, name: str) -> str:
    """A class: its docstring, its fields and its public methods, read from the source."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    (node,) = (n for n in body if isinstance(n, ast.ClassDef) and n.name == name)
    parts = [f"## vllm_slo.{name}", prose(ast.get_docstring(node), name)]
    for member in node.body:
        if not isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(member)
        if member.name == "__init__":
            shown = signature(member).replace("__init__", name).removesuffix(" -> None")
            parts.insert(1, f"```text\n{textwrap.fill(shown, 88, subsequent_indent='    ')}\n```")
        elif not member.name.startswith("_") and docstring:
            shown = textwrap.fill(signature(member), 88, subsequent_indent="    ")
            parts += [f"### {name}.{member.name}", f"```text\n{shown}\n```"]
            parts.append(prose(docstring, f"{name}.{member.name}"))
    return "\n\n".join(parts)


def python() -> str:
    """The public names."""
    parts = [
        "# Python",
        flow(
            """The names of `vllm_slo`. Importing it loads neither torch nor vLLM; `LLM` and
            `Scheduler` do, when they are first used."""
        ),
    ]
    for name in vllm_slo.__all__:
        if (home := vllm_slo._HOME_OF.get(name)) is None:
            continue
        path = PACKAGE.joinpath(*home.split(".")[1:]).with_suffix(".py")
        parts.append(class_page(path, name))
    llm = ast.parse((PACKAGE / "engine" / "llm.py").read_text(encoding="utf-8")).body
    (report,) = (n for n in llm if isinstance(n, ast.FunctionDef) and n.name == "report_of")
    parts += ["## vllm_slo.engine.llm.report_of", f"```text\n{signature(report)}\n```"]
    parts.append(prose(ast.get_docstring(report), "report_of"))
    parts += ["## vllm_slo.errors", "See [Exceptions](exceptions.md)."]
    parts += ["## vllm_slo.tiny", prose(import_module("vllm_slo.tiny").__doc__, "vllm_slo.tiny")]
    return "\n\n".join(parts)


def exceptions() -> str:
    """The tree of exceptions."""
    parts = ["# Exceptions", prose(errors.__doc__, "vllm_slo.errors")]
    for name in errors.__all__:
        kind = getattr(errors, name)
        bases = ", ".join(code(base.__name__) for base in kind.__bases__)
        parts += [f"## {name}", f"A {bases}.", prose(kind.__doc__, name)]
    return "\n\n".join(parts)


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "commands": commands,
    "configuration": configuration,
    "exceptions": exceptions,
    "http": http,
    "metrics": metrics_page,
    "python": python,
    "requests": requests,
}
