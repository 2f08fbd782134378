# SPDX-License-Identifier: Apache-2.0
"""The configuration of HAProxy, the data plane of a front.

A request comes to ``public``, asks the decision service (`haproxy.lua`) and goes to the slot that
the service names. If that replica refuses or fails before its answer begins, HAProxy takes the
server ``again`` in its place, which leads to the frontend ``again``: there the service is asked
once more. So each try is a decision of its own, and a stream that began passes HAProxy once.

Statuses that ``public`` would retry pass from ``again`` to ``public`` in disguise (`_DISGUISE`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_slo.slo.body import MAX_BODY_BYTES
from vllm_slo.slo.carriers import QUOTE_ROUTE
from vllm_slo.wire.api_errors import error_body
from vllm_slo.wire.front_protocol import OWN_PREFIX, RETRIED, TOKEN_HEADER, TRY_NEXT

SCRIPT: Final = Path(__file__).with_name("haproxy.lua")
SLOTS: Final = 256
"""Most replicas at the same time. A slot without a replica costs some kilobytes."""
BUFFER_BYTES: Final = 256 * 1024
"""HAProxy's buffer: the part of a body that a decision sees, and the largest request that is sent
again. HAProxy copies a whole buffer for each request that it may send again, which takes 0.1 ms at
this size and 1 ms at 1 MiB."""
RESERVED_BYTES: Final = 32 * 1024
"""Of the buffer, for headers."""
ROUTED_PATHS: Final = ("/tokenize", "/detokenize", "/version")
"""Paths that go to replicas besides those below /v1/."""
MAX_HEADERS: Final = 128
MAX_LINE_BYTES: Final = 8_190
MAX_HEAD_BYTES: Final = RESERVED_BYTES // 2
HEAD_S: Final = 30
BODY_S: Final = 60
"""Time for the head of a request, and for its body as far as the buffer holds it, seconds."""
IDLE_S: Final = 75
MAX_TRIES: Final = 100
"""Most tries of one request, whatever the decision service says: each takes two open files."""
CONNECT_S: Final = 2
SPARE_FILES: Final = 1_024
MAX_CONNECTIONS: Final = 16_384
MESSAGES: Final = "{ path_beg /v1/messages }"
"""Condition: the request is of Anthropic's API."""
_DISGUISE: Final[Mapping[int, int]] = {
    TRY_NEXT: 525,
    500: 590,
    502: 592,
    503: 593,
    504: 594,
}
_REASONS: Final[Mapping[int, str]] = {
    TRY_NEXT: "Too Early",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
_OWN_ERRORS: Final[Mapping[int, tuple[str, str]]] = {
    400: ("BadRequestError", "this is not a valid HTTP request"),
    408: (
        "BadRequestError",
        f"the request took more than {HEAD_S} s to come, or its body {BODY_S} s",
    ),
    500: ("InternalServerError", "the front failed"),
    502: ("BadGatewayError", "the replica failed before it answered; try again"),
    503: ("ServiceUnavailableError", "no replica can be reached; try again shortly"),
    504: ("GatewayTimeoutError", "the replica did not answer in time; try again"),
}


@dataclass(frozen=True, slots=True)
class FrontFolder:
    """The private folder of a front, with the Unix sockets of its processes."""

    path: Path

    @property
    def decide(self) -> Path:
        """Where the decision service listens for questions."""
        return self.path / "decide"

    @property
    def pages(self) -> Path:
        """Where it serves its pages."""
        return self.path / "pages"

    @property
    def admin(self) -> Path:
        """Where HAProxy takes commands."""
        return self.path / "admin"

    @property
    def again(self) -> Path:
        """Where HAProxy takes requests for another try."""
        return self.path / "again"

    @property
    def keys(self) -> Path:
        """File with the digests of the accepted API keys."""
        return self.path / "keys"

    @property
    def configuration(self) -> Path:
        """File with HAProxy's configuration."""
        return self.path / "haproxy.cfg"


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """What differs between fronts.

    Attributes:
        listener: file descriptor of the public socket, which listens already.
        api_keys: SHA-256 of each accepted key, lower-case hexadecimal; empty: no key is needed.
        connections: most connections of clients.
        certificate: PEM file with certificate and key, for TLS; None: plain HTTP.
    """

    folder: FrontFolder
    listener: int
    api_keys: tuple[str, ...] = ()
    connections: int = MAX_CONNECTIONS
    certificate: Path | None = None


def configuration(settings: ProxySettings) -> str:
    """The text of the configuration file."""
    parts = [
        _global(settings),
        _defaults(),
        _public(settings),
        _again(settings),
        _replicas("replicas", settings, retries=True),
        _replicas("last", settings, retries=False),
        _fallback(),
        _pages(settings),
    ]
    return "\n".join(parts)


def _global(settings: ProxySettings) -> str:
    return _section(
        "global",
        f"maxconn {settings.connections}",
        f"lua-load-per-thread {_quoted(str(SCRIPT))}",
        f"tune.bufsize {BUFFER_BYTES}",
        f"tune.maxrewrite {RESERVED_BYTES}",
        f"tune.http.maxhdr {MAX_HEADERS}",
        f"stats socket {_quoted(str(settings.folder.admin))} mode 600 level admin",
    )


def _defaults() -> str:
    return _section(
        "defaults",
        "mode http",
        f"timeout connect {CONNECT_S}s",
        # A stream may pause for as long as a client waits; the state streams detect replicas that
        # hang.
        "timeout client 24h",
        "timeout server 24h",
        f"timeout http-request {HEAD_S}s",
        f"timeout http-keep-alive {IDLE_S}s",
        "option http-no-delay",
        "option abortonclose",
        "http-reuse always",
        *(_own_error(status, *said) for status, said in _OWN_ERRORS.items()),
    )


def _public(settings: ProxySettings) -> str:
    certificate = _quoted(str(settings.certificate))
    tls = f" ssl crt {certificate} alpn h2,http/1.1" if settings.certificate else ""
    is_api = "{ path_beg /v1/ } !{ method OPTIONS }"
    keys = []
    if settings.api_keys:
        known = _quoted(str(settings.folder.keys))
        has_key = f"{{ http_auth_bearer,sha2(256),hex,lower -m str -f {known} }}"
        keys = [
            _answer(401, "Unauthorized", "Unauthorized", f"{is_api} {MESSAGES} !{has_key}"),
            (
                "http-request return status 401 content-type application/json "
                f"string {_quoted(UNAUTHORIZED)} if {is_api} !{MESSAGES} !{has_key}"
            ),
        ]
    routed = " ".join(ROUTED_PATHS)
    return _section(
        "frontend public",
        f"bind fd@{settings.listener}{tls}",
        *_shape(),
        _answer(
            431,
            "BadRequestError",
            f"the target is longer than {MAX_LINE_BYTES} bytes, or all headers "
            f"than {MAX_HEAD_BYTES}",
            f"{{ url,length gt {MAX_LINE_BYTES} }} or {{ req.hdrs,length gt {MAX_HEAD_BYTES} }}",
        ),
        "http-request use-service prometheus-exporter if { path /metrics/proxy } { method GET }",
        f"http-request del-header {OWN_PREFIX} -m beg",
        "http-request del-header TE",
        *keys,
        _answer(413, "BadRequestError", f"the body is larger than {MAX_BODY_BYTES} bytes",
                f"{{ req.hdr(content-length) -m int gt {MAX_BODY_BYTES} }}"),
        "http-request set-header X-Request-Id %[uuid] if !{ req.hdr(x-request-id) -m found }",
        "http-request set-var(txn.request_id) req.hdr(x-request-id)",
        (
            "http-request set-var(txn.slo_page) bool(true) if "
            f"{{ path {QUOTE_ROUTE} }} {{ method POST }} or "
            f"!{{ path_beg /v1/ }} !{{ path {routed} }}"
        ),
        *_decided(),
        f"http-after-response del-header {OWN_PREFIX} -m beg",
        f"http-after-response set-header {OWN_PREFIX}replica %[var(txn.slo_replica)] "
        "if { var(txn.slo_replica) -m found }",
        "http-after-response set-header X-Request-Id %[var(txn.request_id)] "
        "if { var(txn.request_id) -m found }",
    )  # fmt: skip


def _again(settings: ProxySettings) -> str:
    return _section(
        "frontend again",
        f"bind {_quoted(_unix(settings.folder.again))}",
        *_shape(),
        f"http-request set-var(txn.slo_exchange) req.hdr({OWN_PREFIX}exchange)",
        f"http-request set-var(txn.slo_tries) req.hdr({OWN_PREFIX}tries),add(1)",
        _answer(
            502,
            "BadGatewayError",
            f"{MAX_TRIES} tries have failed; try again",
            f"{{ var(txn.slo_tries) -m int gt {MAX_TRIES} }}",
        ),
        f"http-request del-header {OWN_PREFIX} -m beg",
        *_decided(),
        f"http-after-response set-header {OWN_PREFIX}replica %[var(txn.slo_replica)] "
        "if { var(txn.slo_replica) -m found }",
        *(
            f"http-after-response set-status {disguised} if {{ status {status} }}"
            for status, disguised in _DISGUISE.items()
        ),
    )


def _shape() -> list[str]:
    """Note which API's shape errors are to have."""
    return [
        f"http-request set-var(txn.slo_messages) bool(true) if {MESSAGES}",
        f"http-request set-var(txn.slo_messages) bool(false) if !{MESSAGES}",
    ]


def _decided() -> list[str]:
    """The rules that wait for the body, ask the service and follow its answer."""
    large = f"{{ req.body_len gt {BUFFER_BYTES - 2 * RESERVED_BYTES} }}"
    routed = "!{ var(txn.slo_page) -m found }"
    return [
        (
            f"http-request wait-for-body time {BODY_S}s if "
            f"{routed} {{ req.hdr(content-length) -m int gt 0 }} or "
            f"{routed} {{ req.hdr(transfer-encoding) -m found }}"
        ),
        _answer(411, "BadRequestError", "a large body needs a Content-Length",
                f"{routed} {{ req.hdr(transfer-encoding) -m found }} {large}"),
        f"http-request lua.decide if {routed}",
        "use_backend pages if { var(txn.slo_page) -m found }",
        "use_backend fallback if { var(txn.slo_fallback) -m found }",
        "use_backend last if { var(txn.slo_last) -m found }",
        "default_backend replicas",
    ]  # fmt: skip


def _replicas(name: str, settings: ProxySettings, *, retries: bool) -> str:
    statuses = " ".join(map(str, sorted(RETRIED)))
    again = _quoted(_unix(settings.folder.again))
    lines = [
        "balance roundrobin",
        "use-server %[var(txn.slo_slot)] if { var(txn.slo_slot) -m found }",
        f"server-template r 1-{SLOTS} 127.0.0.1:9 weight 0",
    ]
    if retries:
        lines += [
            "retries 2",
            "option redispatch 1",
            f"retry-on conn-failure empty-response junk-response {statuses}",
            # Two, because HAProxy pauses before it retries a backend's only server.
            f"server again1 {again}",
            f"server again2 {again}",
            _named_by_answer(),
            *(
                f'http-response set-status {status} reason "{_REASONS[status]}" '
                f"if {{ status {disguised} }}"
                for status, disguised in _DISGUISE.items()
            ),
        ]
    else:
        lines += ["retries 0"]
    return _section(f"backend {name}", *lines, _redirect())


def _fallback() -> str:
    """For the time in which the decision service is gone: no promises, but answers."""
    statuses = " ".join(map(str, sorted(RETRIED)))
    return _section(
        "backend fallback",
        "balance leastconn",
        "retries 3",
        "option redispatch 1",
        f"retry-on conn-failure empty-response junk-response {statuses}",
        f"http-request set-header {TOKEN_HEADER} %[var(proc.slo_token)]",
        f"server-template r 1-{SLOTS} 127.0.0.1:9 disabled",
        _redirect(),
    )


def _pages(settings: ProxySettings) -> str:
    return _section(
        "backend pages",
        "timeout server 60s",
        f"server pages {_quoted(_unix(settings.folder.pages))}",
        _named_by_answer(),
    )


def _named_by_answer() -> str:
    """For answers of this front's own processes, which know the replica."""
    name = f"res.hdr({OWN_PREFIX}replica)"
    return f"http-response set-var(txn.slo_replica) {name} if {{ {name} -m found }}"


def _redirect() -> str:
    """A redirect of a replica leads to its private address."""
    body = _error(404, "NotFoundError", "this path is not served here")
    return (
        f"http-response return status 404 content-type application/json lf-string {body} "
        "if { status 300:399 }"
    )


def _answer(status: int, kind: str, text: str, condition: str) -> str:
    return (
        f"http-request return status {status} content-type application/json "
        f"lf-string {_error(status, kind, text)} if {condition}"
    )


def _own_error(status: int, kind: str, text: str) -> str:
    retry = " hdr Retry-After 1 hdr retry-after-ms 1000" if status > 500 else ""
    body = _error(status, kind, text)
    return f"http-error status {status} content-type application/json lf-string {body}{retry}"


def _error(status: int, kind: str, text: str) -> str:
    """An error in a shape that is both OpenAI's and Anthropic's, as a word of log-format."""
    theirs = error_body("/v1/messages", status, kind, text, None)["error"]["type"]
    either = f"%[var(txn.slo_messages),iif({theirs},{kind})]"
    error = {"type": either, "message": text, "param": None, "code": status}
    return _quoted(json.dumps({"type": "error", "error": error}))


UNAUTHORIZED: Final = '{"error":"Unauthorized"}'
"""The body of vLLM's server."""


def _section(title: str, *lines: str) -> str:
    return "\n    ".join([title, *lines]) + "\n"


def _unix(path: Path) -> str:
    return f"unix@{path}"


def _quoted(text: str) -> str:
    """A word of HAProxy's configuration with exactly this text."""
    return "'" + text.replace("'", "'\\''") + "'"


def keys_text(keys: Iterable[str]) -> str:
    """The content of `FrontFolder.keys`."""
    return "".join(f"{key}\n" for key in keys)


def environment(settings: ProxySettings, generation: int) -> dict[str, str]:
    """The environment of HAProxy. ``generation``: grows with each start; see `haproxy.lua`."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ}
    ours = {
        "VLLMSLO_DECISIONS": _unix(settings.folder.decide),
        "VLLMSLO_GENERATION": str(generation),
    }
    return {**kept, **ours}
