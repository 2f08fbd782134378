# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo quote``: ask a server what it would promise a request now."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from vllm_slo import arguments
from vllm_slo.bench.credentials import (
    NO_CREDENTIALS,
    Credentials,
    add_credential_arguments,
    credentials_of,
)
from vllm_slo.bench.endpoint import URL_VARIABLE, api_root, opener, refused
from vllm_slo.bench.errors import BenchError
from vllm_slo.slo.model import SLO

DEFAULT_URL: Final = "http://localhost:8000"
ROUTE: Final = "/v1/slo/quote"
TIMEOUT_S: Final = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``vllm-slo quote``: the server, and the request that it is asked about."""
    parser.add_argument(
        "--base-url",
        default=os.environ.get(URL_VARIABLE) or DEFAULT_URL,
        metavar="URL",
        help=f"the server, with or without /v1 (default: {URL_VARIABLE}, or {DEFAULT_URL})",
    )
    add_credential_arguments(parser)
    parser.add_argument("--model", metavar="NAME", help="model (default: the server's first)")
    parser.add_argument(
        "--prompt", required=True, help="text, or @FILE; with --chat a user's message"
    )
    parser.add_argument("--chat", action="store_true", help="ask for a chat completion")
    parser.add_argument("--max-tokens", metavar="TOKENS", type=arguments.whole(1), default=256,
        help="longest answer (default: 256)")  # fmt: skip
    number = arguments.number()
    parser.add_argument("--ttft-ms", metavar="MS", type=number, help="objective: first token")
    parser.add_argument("--tpot-ms", metavar="MS", type=number,
        help="objective: each token after it")  # fmt: skip
    parser.add_argument("--class", dest="slo_class", metavar="NAME",
        help="class of the server's configuration")  # fmt: skip
    parser.add_argument("--value", type=number, help="weight if not everything can be promised")
    parser.add_argument("--json", metavar="FILE", type=Path, nargs="?", const=Path("-"),
        help="also write the answer as JSON; - prints only it")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Ask and print; returns 0 if the request would be promised, 1 if not.

    Raises:
        InvalidSLOError: an objective is out of its range.
        BenchError: the server cannot be asked.
    """
    credentials = credentials_of(args)
    quote = ask(args.base_url, _body(args, credentials), credentials)
    if arguments.standard_output(args.json):
        Console(highlight=False).print_json(json.dumps(quote))
    else:
        for line in in_words(quote):
            Console(highlight=False).print(line)
        if args.json is not None:
            arguments.put_json(quote, args.json, partial(BenchError, "--json"))
    return arguments.OK if quote["promised"] else arguments.NO


def ask(
    base_url: str, body: Mapping[str, Any], credentials: Credentials = NO_CREDENTIALS
) -> dict[str, Any]:
    """The quote for a request with this body.

    Raises:
        BenchError: the server cannot be reached, or refuses the request.
    """
    return _call(f"{api_root(base_url)}{ROUTE}", json.dumps(body).encode(), credentials)


def _body(args: argparse.Namespace, credentials: Credentials) -> dict[str, Any]:
    slo = {
        "ttft_ms": args.ttft_ms,
        "tpot_ms": args.tpot_ms,
        "slo_class": args.slo_class,
        "value": args.value,
    }
    SLO(**{name: given for name, given in slo.items() if given is not None})
    slo["class"] = slo.pop("slo_class")
    text = args.prompt
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise BenchError("--prompt", f"cannot read {text[1:]!r}: {why}") from error
    model = args.model or _first_model(args.base_url, credentials)
    asked = {"messages": [{"role": "user", "content": text}]} if args.chat else {"prompt": text}
    given = {name: value for name, value in slo.items() if value is not None}
    return {"model": model, "max_tokens": args.max_tokens, **asked, "slo": given}


def _first_model(base_url: str, credentials: Credentials = NO_CREDENTIALS) -> str:
    listed = _call(f"{api_root(base_url)}/v1/models", None, credentials)
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise BenchError("--model", f"{base_url} lists no model; give one") from None


def _call(url: str, body: bytes | None, credentials: Credentials) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", **credentials.as_headers()}
    request = urllib.request.Request(url, body, headers)
    try:
        with opener(url).open(request, timeout=TIMEOUT_S) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        text = credentials.hide(error.read().decode(errors="replace"))
        location = error.headers.get("location", "")
        refused(url, credentials, error.code, _message(text), location)
    except OSError as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or reason
        text = f"cannot reach {url}: {why}; is the server running?"
        raise BenchError("--base-url", credentials.hide(text)) from error
    except ValueError as error:
        text = f"{url} does not answer with JSON: {error}"
        raise BenchError("--base-url", credentials.hide(text)) from error


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]


_WHY: Final[Mapping[str, str]] = {
    "prefill": "its prompt would not be done in time",
    "decode": "steps have no room for more tokens at that pace",
    "memory": "KV memory is spoken for",
    "seats": "every seat is promised",
    "expired": "its deadline has passed already",
    "quota": "its tenant's quota is used up",
    "planning_failed": "the server could not work it out; its log says why",
    "no_chunked_prefill": "the server runs without chunked prefill",
    "pipeline_parallel": "the server runs with pipeline parallelism",
    "prefill_schedule_interval": "the server holds prompts back (--prefill-schedule-interval)",
    "best_effort": "it asks for best effort",
    "no_objective": "it asks for nothing",
}


def in_words(quote: Mapping[str, Any]) -> list[str]:
    """A quote as lines of text."""
    if quote["promised"]:
        lines = ["promised: yes"]
    else:
        why = _WHY.get(quote["reason"], str(quote["reason"]))
        lines = [f"promised: no, {why}"]
        if quote["in_the_way"]:
            listed = ", ".join(f"{n} of {name}" for name, n in quote["in_the_way"].items())
            lines.append(f"promises in the way: {listed}")
        if quote["reason"] in ("prefill", "decode", "memory", "seats", "quota"):
            lines.append(f"worth asking again in {quote['retry_after_ms']} ms")
        if quote["cheapest"]:
            lines.append(f"would be promised now: {_objectives(quote['cheapest'])}")
    shortest = {name: quote[name] for name in ("ttft_ms", "tpot_ms") if quote[name] is not None}
    if shortest:
        lines.append(f"shortest that could be promised, each alone: {_objectives(shortest)}")
    return lines


def _objectives(objectives: Mapping[str, float | None]) -> str:
    named = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"))
    values = [(label, objectives.get(name)) for name, label in named]
    return ", ".join(f"{label} {_number(ms)} ms" for label, ms in values if ms is not None)


def _number(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"
