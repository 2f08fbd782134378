# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-slo record``: any readable traffic becomes a recording in our own format."""

from __future__ import annotations

import argparse
import math
import secrets
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

from msgspec.structs import replace

from vllm_slo import arguments
from vllm_slo.traces.compression import written
from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.files import detect, format_name
from vllm_slo.traces.names import hashed_name
from vllm_slo.traces.own_format import header_line, request_line
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.selection import add_selection_arguments, no_rows, select, selection_of
from vllm_slo.traces.summary import Summary
from vllm_slo.traces.times import is_dated, moment_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``vllm-slo record``."""
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path,
        help="a trace, a log, spans or a report in a format that is detected, or a folder of "
        "recordings")  # fmt: skip
    add("--out", metavar="FILE", type=Path, required=True,
        help="the recording; .gz or .zst at the end of its name compresses it")  # fmt: skip
    add("--anonymous", action=argparse.BooleanOptionalAction, default=True,
        help="replace the names of tenants and sessions by hashes with a salt that is thrown away "
        "(default: yes); names of classes and models stay")  # fmt: skip
    add_selection_arguments(parser)
    arguments.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the recording and say what it holds.

    Raises:
        TraceError: the source cannot be read, the selection is empty, or the file not written.
    """
    selection = selection_of(args)
    source, out = args.source, args.out
    if out.exists() and source.exists() and out.samefile(source):
        raise TraceError("--out: it is the source itself; name another file")
    requests: Iterable[TraceRequest] = select(source, selection)
    if args.anonymous:
        requests = map(hashed_names(), requests)
    summary = Summary()
    with written(out) as text:
        _write(text, requests, summary)
        if not summary.whole.requests:
            raise no_rows(source, selection)
    if args.json is not None:
        arguments.put_json(summary.to_dict(), args.json, lambda text: TraceError(f"--json: {text}"))
    if not arguments.standard_output(args.json):
        name = format_name(detect(source))
        sys.stdout.write(f"{source} ({name}) -> {out}\n{summary.text()}\n")
    return arguments.OK


def _write(text: TextIO, requests: Iterable[TraceRequest], summary: Summary) -> None:
    """Write requests with a header before the first one, and wherever the size of blocks changes.

    Times count from the first request's second, or from 2000 in a trace without dates.
    """
    block_tokens, created_s = 0, 0.0
    for request in requests:
        summary.add(request)
        if not block_tokens or (request.hash_ids and request.block_tokens != block_tokens):
            if not block_tokens and is_dated(request.at_s):
                created_s = math.floor(request.at_s)
            block_tokens = request.block_tokens
            text.write(header_line(moment_of(created_s), block_tokens, None))
        text.write(request_line(request, created_s))


def hashed_names() -> Callable[[TraceRequest], TraceRequest]:
    """A function that replaces a request's tenant and session by hashes with a new secret salt.

    Equal names stay equal. Nobody can try out names, for the salt is kept nowhere.
    """
    salt = secrets.token_bytes(32)

    def anonymous(request: TraceRequest) -> TraceRequest:
        tenant, session = request.tenant, request.session
        if tenant is None and session is None:
            return request
        return replace(
            request,
            tenant=tenant and hashed_name(salt, "tenant", tenant),
            session=session and hashed_name(salt, "session", session),
        )

    return anonymous
