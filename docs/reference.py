# SPDX-License-Identifier: Apache-2.0
"""The reference pages, written from the code while the site is built: they cannot go stale.

``PAGES`` maps a page's name to the function that writes it. A thing that the code does not describe
ends the build with a ``ValueError`` that names it.
"""

from __future__ import annotations

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
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import vllm_slo
from vllm_slo import cli, errors
from vllm_slo.arguments import Renamed
from vllm_slo.config.model import SLOConfig
from vllm_slo.engine.http import routes as http_routes
from vllm_slo.engine.telemetry import metrics, speculation_metrics
from vllm_slo.engine.telemetry.series import SeriesMaker
from vllm_slo.router import front_metrics, front_page, front_rules
from vllm_slo.slo import carriers
from vllm_slo.slo import model as slo
from vllm_slo.slo.carriers import SERVICE_TIERS
from vllm_slo.slo.claims import HEADER_FIELDS
from vllm_slo.slo.hints import HINT_HEADERS
from vllm_slo.slo.keys import INTERNAL_KEYS
from vllm_slo.slo.verdicts import Declined, Verdict

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
    if kind is slo.Stage:
        return "objects with `until` and `tpot_ms`"
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


TIER: Final = (
    f"{', '.join(map(code, SERVICE_TIERS))}, or a name of your own; `service_tiers` of the "
    "configuration maps it to a class. `flex` is best effort, mapped or not. A tier that is not "
    "mapped asks for nothing"
)

CARRIERS: Final = (
    ("JSON body", 'the field `slo`: `{"ttft_ms": 500, "tpot_ms": 50}`', "1"),
    ("`vllm_xargs`, `SamplingParams.extra_args`", "keys that begin with `slo_`; below", "1"),
    ("SLO headers", "the table below; names in any case", "1"),
    ("class", "`slo.class` or `x-slo-class` names it; the configuration has its fields", "2"),
    ("`service_tier`", TIER, "3"),
    ("hints", "what gateways and vLLM say in their own words; below", "4"),
)
"""Carrier, how it is written, and its rank: a lower one is asked first."""

HINTS: Final[Mapping[str, str]] = {
    "header `x-llm-d-inference-objective`, header `x-gateway-inference-objective`": "names a "
    "class. A class that is not configured is ignored; of the two headers the first counts",
    "header `x-llm-d-inference-fairness-id`, header `x-gateway-inference-fairness-id`": "`tenant`"
    "; of the two headers the first counts. Ignored where `access` is configured: "
    "there the API key says who is asking",
    "header `x-llm-d-inference-ttl`": "a time as Go writes it, such as `1500ms` or `1m30s`: "
    "`ttft_ms`, with `on_unattainable: decline`. `0s` says nothing",
    "header `x-vllm-priority`, body `priority`, body `nvext.agent_hints.priority` (Dynamo)": "a "
    "whole number, which `priorities` of the configuration maps to a class; of several the first "
    "in this list counts. A class that is named goes before it. vLLM's own use of it is unchanged",
    "body `nvext.agent_hints.osl` (Dynamo)": "`expected_output_tokens`",
    "header `x-session-id`, body `session_id`": "`session_id`, if the configuration says "
    "`sessions.read_session_id: true`; the header goes first",
}
"""Hint -> what it stands for."""


def hints() -> list[list[str]]:
    """(hint, what it stands for).

    Raises:
        ValueError: the code reads a header that ``HINTS`` does not tell of, or no more.
    """
    told = set(re.findall(r"header `([\w-]+)`", " ".join(HINTS)))
    if told ^ set(HINT_HEADERS):
        raise ValueError(f"reference.HINTS: {sorted(told ^ set(HINT_HEADERS))} differ")
    return [[hint, meaning] for hint, meaning in HINTS.items()]


def requests() -> str:
    """What a request may ask for, and how it says so."""
    rows = request_fields()
    headers = [[code(h), code(n.removeprefix("slo_"))] for h, n in HEADER_FIELDS.items()]
    keys = ", ".join(code("slo_" + row[0].strip("`")) for row in rows)
    return "\n\n".join(
        [
            "# Requests",
            flow(
                """What one request can ask for. The way in which it is sent makes no difference.
                Times are in milliseconds."""
            ),
            table(["field", "type", "default", "meaning"], rows),
            flow(
                """`e2e_ms` is divided between prompt and tokens. Both get the same multiple of
                what they take on an idle engine, and the request is promised by the TTFT and the
                TPOT that follow. Its length must be known for that: `expected_output_tokens`, else
                what answers of its class had, else `max_tokens`. If a request has `ttft_ms` or
                `tpot_ms` as well, it has to keep all of them."""
            ),
            "## Carriers",
            flow(
                """A request can use several carriers. They are united field by field, and a field
                has the value of the carrier with the lowest rank. Two carriers of rank 1 that give
                one field two values are a 400 that names both."""
            ),
            table(
                ["carrier", "how it is written", "rank"],
                CARRIERS,
            ),
            flow(
                """If rank 1 names no class, a class that `service_tier` or a hint names fills the
                fields that nobody else gives. A request in which no carrier asks for anything
                belongs to `default_class`, if there is one."""
            ),
            flow(
                """All of them work on every route that generates; the [routes](http.md#routes) say
                which ones do. The body may have any size and any encoding that vLLM takes (UTF-8,
                UTF-16 or UTF-32, escapes like `\\u0073lo`), and it goes to vLLM byte for byte."""
            ),
            "### Headers",
            table(["header", "field"], headers),
            flow(
                """Times in headers follow llm-d. A time of 0 or below has expired, so it is never
                promised. A time that is too large counts as the largest that is allowed. An empty
                header counts as absent. If both names of a field are sent, `x-llm-d-*` is used.
                Text that is no number is a 400."""
            ),
            "### Keys of `vllm_xargs` and `extra_args`",
            flow(
                f"""{keys}. Values are numbers and text, so `slo_stages` is written as JSON and
                `slo_session_last` as 0 or 1. SLOs-Serve's keys are read, too: `prefill_ddl` (when
                the first token is due, epoch seconds) and `slo_tpot` (seconds per token). Any other
                key that begins with `slo_` is a 400, the server's internal keys included:
                {", ".join(map(code, INTERNAL_KEYS))}."""
            ),
            "### Hints",
            flow(
                """These words were made by others, so a hint is never an error: one that is not
                valid or not configured is ignored. A hint of `tenant`, `session_id` or
                `expected_output_tokens` alone asks for nothing. It is used if the request asks for
                something by another carrier."""
            ),
            table(["hint", "stands for"], hints()),
            "## Without HTTP",
            flow(
                """`vllm run-batch`, Ray Serve LLM and programs that embed `AsyncLLM` have no HTTP
                middleware. There the body field `slo`, `vllm_xargs` and `extra_args` work; headers,
                `service_tier` and hints do not. The report stands in `kv_transfer_params`, under
                `vllm_slo`."""
            ),
            flow(
                """A declined line of a batch is an error with code 429 in the output file, and the
                batch goes on. A program gets `vllm_slo.engine.gate.RequestDeclinedError`, whose
                `declined` has `retry_after_ms` and `reason`. `vllm_slo.LLM` raises nothing: a
                declined prompt comes back without tokens, and its `stop_reason` is
                `slo_declined:<milliseconds>:<reason>`."""
            ),
            "## Several choices",
            flow(
                """`n`, several prompts, and the conversations of a batch are choices of one
                request. If one of them is declined, all are. Once a choice has begun, none is
                declined any more: those that cannot be promised are served without a promise.
                Whole answers show the report of the first choice, streams one report for each."""
            ),
            flow(
                """A beam search takes no objectives: with one it is a 400, and the default class
                does not apply to it."""
            ),
            "## What comes back",
            flow(
                """`slo` is the request's own report: `tier`, `promised`, `reason` (what stood in
                the way where nothing was promised at first), `ttft_ms`, `tpot_ms` (the worst
                window) and `attained` (`null` without an objective); `e2e_ms`, `stages` and
                `session` where the request has such an objective. It stands in the answer of every
                API. In a stream it stands in the event that ends a choice: the last chunk of a
                choice (completions, chat), inside `response` of `response.completed` (Responses),
                or `message_delta` (Messages)."""
            ),
            flow(
                """`service_tier` is sent back if the request named one. It is the tier that was
                served:"""
            ),
            prose(
                import_module("vllm_slo.engine.http.outcome").served_service_tier.__doc__,
                "served_service_tier",
            ).partition("\n\n")[2],
            flow(
                """`GET /v1/models` lists the configured classes beside each model, in
                `slo_classes`, with the fields that they set."""
            ),
        ]
    )


# --- metrics -------------------------------------------------------------------------------------


def series_of(registry: CollectorRegistry) -> list[list[str]]:
    """(name as it is exposed, type, labels, help) of everything in a registry."""
    rows = []
    for collector in dict.fromkeys(registry._collector_to_names):
        ours = not hasattr(collector, "describe")  # it makes samples instead
        for family in collector.collect() if ours else collector.describe():
            name = family.name + ("_total" if family.type == "counter" else "")
            names = family.samples[0].labels.keys() - {"le"} if ours else collector._labelnames
            labels = ", ".join(map(code, names))
            rows.append([code(name), family.type, labels, family.documentation])
    return rows


def scheduler_series() -> list[list[str]]:
    """Every series of a scheduler, those included that it has once there is something to say."""
    scheduler = metrics.SchedulerMetrics()
    scheduler.promised_tokens("tenant", 0.0)
    make = SeriesMaker(scheduler.registry, "0")
    for name, kind in (*vars(metrics).items(), *vars(speculation_metrics).items()):
        if not isinstance(kind, type) or Collector in kind.__mro__:
            continue
        if name.endswith("Series"):
            first = next(iter(inspect.signature(kind).parameters))
            # What serves several kinds of clients takes the kind first; draft servers bring theirs.
            kind(*(["tenant"] if first != "make" else []), make)
    return series_of(scheduler.registry)


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
    ("server", 400): "an objective is not valid, or the request cannot have one; `param` names the "
    "field, the text has the fix",
    ("server", 403): "the API key may not ask for this; `param` names the field (`access:`)",
    ("server", 413): "a quote is asked for with a body larger than 32 MiB",
    ("server", "slo_unattainable"): "no promise can be made, and the request prefers a refusal "
    "(`decline`). `decline_status` of the configuration sets another status",
    ("server", "RateLimitError"): "too many quotes are asked for at once",
    ("server", 500): "the configuration broke after the start; the log says how",
    ("server", 501): "a quote is asked of a server with another scheduler",
    ("front", 400): "as above, or not a valid HTTP request",
    ("front", 401): "no valid API key",
    ("front", 404): "no such path, or no such replica",
    ("front", 405): "the method is not allowed here",
    ("front", 408): "the body did not come in time",
    ("front", 413): "the body is larger than 32 MiB",
    (
        "front",
        "slo_unattainable",
    ): "as above, predicted from the shadow states of all replicas that were asked",
    ("front", 431): "the headers are too large",
    ("front", 500): "a mistake in the front; the log has it",
    ("front", 501): "a path whose effect would reach one replica only",
    ("front", 502): "the replicas that were tried failed",
    ("front", 503): "no replica is ready, or the front has too much to do, or it is stopping",
}
"""(Who answers, status or type) -> when."""


ANSWERING: Final = ("_refuse", "error_body", "error_messages", "error_response")
"""The functions that answer with an error."""

DECLINE_STATUS: Final = SLOConfig.model_fields["decline_status"].default

KINDS: Final[Mapping[str, str]] = {
    "generates": "honoured",
    "renders": "rendered",
    "pools": "a 400",
    "other": "none",
}
"""Kind of a route in the code -> what the table says of objectives there."""

KIND_NOTES: Final = """\
- *honoured*: every carrier works. Reports, refusals and mistakes have the API's shape.
- *rendered*: nothing is generated. The field `slo` becomes `slo_*` keys in the sampling parameters
  of the rendered request. They act where that is sent to.
- *a 400*: pooling takes no objectives. The default class does not apply to it.
- *none*: the route sends no request to the engine."""


FRONT_PATHS: Final[Mapping[str, str]] = {
    "/health": "200 while a replica is ready and the front is not stopping, else 503",
    "/-/healthz": "the same; what KubeRay asks the port that clients use",
    "/metrics": "the front's own [series](metrics.md#the-front-of-several-replicas)",
    "/metrics/targets": "Prometheus's HTTP service discovery: each replica's page",
    "/metrics/replicas/NAME": "a replica's own page",
    "/replicas": "the replicas, and how each is, as JSON",
    "/slo": "the [live page](../howto/live-page.md) of all replicas",
    "/slo/data": "its data",
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
    paths = {path for path in found if path.startswith("/")} | {*front_page.PATHS}
    if paths ^ set(FRONT_PATHS):
        raise ValueError(f"reference.FRONT_PATHS: {sorted(paths ^ set(FRONT_PATHS))} differ")
    return [[code(path), told] for path, told in FRONT_PATHS.items()]


def constant(node: ast.expr) -> object:
    """What an argument is, if the source says so: a constant, or ``HTTPStatus.NAME``."""
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "HTTPStatus":
        return HTTPStatus[node.attr].value
    return node.value if isinstance(node, ast.Constant) else None


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
            said = [value for one in node.args if (value := constant(one)) is not None]
            kinds = [one for one in said if isinstance(one, str) and re.fullmatch(r"\w+", one)]
            kind = kinds[0] if kinds else ""
            status = next((n for n in said if isinstance(n, int) and 400 <= n < 600), None)
            if kind == "slo_unattainable":
                status = DECLINE_STATUS
            if status and name in ANSWERING:
                found.add((int(status), kind))
    rows = []
    for status, kind in sorted(found):
        if not kind and any(other == status and named for other, named in found):
            continue
        told = MEANING.get((where, kind)) or MEANING.get((where, status))
        if told is None:
            raise ValueError(f"{where} answers {status}: reference.MEANING does not say why")
        rows.append([str(status), code(kind) if kind else "", told])
    return rows


async def exchange(path: str, body: Mapping[str, Any], verdict: Verdict | None) -> str:
    """What a client sees of a request to the middleware, before an engine that says ``verdict``."""
    # Imports vLLM, which takes seconds; other pages do without.
    from vllm_slo.engine.gate import CALLER
    from vllm_slo.engine.http.middleware import SLOMiddleware

    messages: list[dict[str, Any]] = []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        caller = CALLER.get()
        assert caller is not None
        if verdict is not None:
            await caller.settle(verdict)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
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


def example(
    title: str,
    body: Mapping[str, Any],
    verdict: Verdict | None = None,
    path: str = "/v1/completions",
) -> str:
    """A request and its answer."""
    said = asyncio.run(exchange(path, body, verdict))
    asked = json.dumps(body["slo"])
    return f"### {title}\n\n`{path}`, `slo`: `{asked}`\n\n``` {{ .text .wrapped }}\n{said}\n```"


def routes() -> list[list[str]]:
    """(path, what becomes of objectives, whether it streams, note) of vLLM's POST routes."""
    return [
        [code(path), KINDS[info.kind], "yes" if info.stream else "", info.note]
        for path, info in http_routes.ROUTES.items()
    ]


def at_the_front() -> list[list[str]]:
    """(paths, what the front does with them)."""
    routed = ", ".join(map(code, sorted(carriers.ROUTES)))
    proxied = ", ".join(map(code, sorted(front_rules.PROXIED)))
    refused = ", ".join(map(code, sorted(front_rules.ONE_REPLICA_ONLY)))
    return [
        [routed, "to the replica that can keep the promise"],
        [code(carriers.QUOTE_ROUTE), "replicas are asked in turn; the first yes is the answer"],
        [
            f"any other path below `/v1/`, {proxied}",
            flow(
                """to the replicas in turn. Objectives are honoured as by one server. If the replica
                declines, that is the answer: no other one is asked"""
            ),
        ],
        [
            f"{refused}, anything below `/v1/responses/`",
            flow(
                """501: one replica alone would know of it. So a stored response cannot be fetched
                or cancelled through a front"""
            ),
        ],
        ["any other path but those below", "404, whatever the table above says"],
    ]


def http() -> str:
    """Routes, errors, and what they look like."""
    engine, router = PACKAGE / "engine", PACKAGE / "router"
    bad = {"prompt": "x", "slo": {"ttft_ms": -5}}
    unknown = {"prompt": "x", "slo": {"tpot": 50}}
    declining = {"prompt": "x", "slo": {"ttft_ms": 50, "on_unattainable": "decline"}}
    declined = Declined(1200, "prefill")
    head = ["status", "`type`", "when"]
    parts = [
        "# HTTP",
        flow(
            """vLLM's API server answers as it does without vllm-slo, but for what this page says.
            Bodies pass byte for byte. [Requests](requests.md) has the fields and the carriers."""
        ),
        "## Routes",
        flow(
            """What becomes of an objective on each of vLLM's POST routes. Which of them a server
            has depends on its model and its flags: `/inference` and `/render` need
            `--enable-scale-out`."""
        ),
        table(["path", "objectives", "streams", "note"], routes()),
        KIND_NOTES,
        flow(
            """A route that is not in the table, such as one of a plugin, honours objectives, too.
            There a mistake is answered when the route asks the engine to generate, and not as soon
            as the body is read."""
        ),
        "Of this package are:",
        table(
            ["path", "answer"],
            [
                [code(f"POST {carriers.QUOTE_ROUTE}"), "a [quote](../howto/quotes.md)"],
                ["`GET /slo`, `GET /slo/data`", "the [live page](../howto/live-page.md)"],
                ["`GET /v1/models`", "vLLM's list; `slo_classes` has the configured classes"],
            ],
        ),
        "## Errors of a server",
        flow(
            """On `/v1/messages` errors have Anthropic's shape, and its types: a status of 429 is
            `rate_limit_error`, 503 and 529 are `overloaded_error`. On Cohere's routes they are
            `{"message": ...}`. On all others they have OpenAI's shape. Errors of vLLM itself are
            its own."""
        ),
        table(
            head,
            statuses("server", [engine / "http" / f"{name}.py" for name in ("exchange", "quote")]),
        ),
        flow(
            """A decline has three headers: `Retry-After` (seconds) and `retry-after-ms` say when it
            is worth asking again, `x-slo-reason` says what stood in the way: `prefill`, `decode`,
            `memory`, `seats`, `expired`, `quota`, `session`, `planning_failed`, or what keeps the
            server from promising anything (`no_chunked_prefill`, `pipeline_parallel`,
            `prefill_schedule_interval`), as in reports; or `wait` or `queue`, where the request
            would not wait so long (`max_wait_ms`, `max_waiting`)."""
        ),
        flow(
            """A decline comes instead of a stream. Only if vLLM has sent a comment by then to keep
            the connection alive (`--sse-keep-alive-interval`), it is an error within the stream. A
            background response has been answered by then, so its status becomes `failed`."""
        ),
        example("An objective that is not valid", bad),
        example("A field that does not exist", unknown),
        example("Declined", declining, declined),
        example("Declined, in Anthropic's shape", declining, declined, "/v1/messages"),
        "## The front of several replicas",
        "`vllm-slo serve --replicas` has one front with one port. What it does with a path:",
        table(["path", "what the front does"], at_the_front()),
        "These pages are the front's own:",
        table(
            ["path", "answer"], front_paths((router / "front_page.py").read_text(encoding="utf-8"))
        ),
        "### Its errors",
        table(head, statuses("front", sorted(router.glob("*.py")))),
        flow(
            """Once a stream has begun, an error is its last event, in the shape of the API, before
            `data: [DONE]` where the API has that."""
        ),
    ]
    return "\n\n".join(parts)


# --- commands ------------------------------------------------------------------------------------


def commands() -> str:
    """The help of every command."""
    parts = ["# Commands", "`vllm-slo --version` says which one this is."]
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "88"
    try:
        parsers = cli.parsers()
        for command in cli.COMMANDS:
            told = parsers[command].format_help().rstrip()
            parts += [f"## vllm-slo {command}", f"```text\n{told}\n```"]
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return "\n\n".join(
        [*parts, "## Old names", OLD_NAMES, table(["command", "old", "new"], old_names())]
    )


OLD_NAMES: Final = "They work for one version, with a note."


def old_names() -> list[list[str]]:
    """(command, old name of an option, its new name)."""
    return [
        [code(f"vllm-slo {command}"), code(old), code(action.new)]
        for command, parser in cli.parsers().items()
        if command
        for action in parser.every_action()
        if isinstance(action, Renamed)
        for old in action.option_strings
    ]


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
    llm = ast.parse((PACKAGE / "engine" / "serving" / "llm.py").read_text(encoding="utf-8")).body
    (report,) = (n for n in llm if isinstance(n, ast.FunctionDef) and n.name == "report_of")
    parts += ["## vllm_slo.engine.serving.llm.report_of", f"```text\n{signature(report)}\n```"]
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


SCHEMAS: Final = {"configuration": "slo.schema.json", "rules": "rules.schema.json"}
"""Kind of file -> the name of its schema, beside the pages."""
PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "commands": commands,
    "configuration": configuration,
    "exceptions": exceptions,
    "http": http,
    "metrics": metrics_page,
    "python": python,
    "requests": requests,
}
