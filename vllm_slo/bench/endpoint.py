# SPDX-License-Identifier: Apache-2.0
"""An OpenAI endpoint: its address, its description, and a connection to it."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

from vllm_slo.bench.credentials import KEY_VARIABLE, NO_CREDENTIALS, Credentials
from vllm_slo.bench.errors import BenchError

if TYPE_CHECKING:
    import openai

_T = TypeVar("_T")

URL_VARIABLE: Final = "OPENAI_BASE_URL"

KEEPALIVE_S: Final = 2.0
"""Time after which idle connections are closed; vLLM's HTTP server closes them after 5 s."""


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """A server to send requests to.

    Attributes:
        base_url: see `api_root`.
        model: None: its first model.
        send_slo: whether requests have the ``slo`` field (a stock server ignores it).

    Raises:
        BenchError: ``base_url`` is not the address of a server.
    """

    name: str
    base_url: str
    model: str | None = None
    send_slo: bool = True
    credentials: Credentials = NO_CREDENTIALS

    def __post_init__(self) -> None:
        api_root(self.base_url)

    @property
    def api_url(self) -> str:
        return f"{api_root(self.base_url)}/v1"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server's description of itself; None for what it does not give.

    Attributes:
        version: vLLM's.
        is_vllm: whether it takes vLLM's own fields, which other servers may refuse.
    """

    model: str
    max_model_len: int | None
    version: str | None
    is_vllm: bool = True


def import_openai() -> Any:
    """The openai module; BenchError if it is not installed."""
    try:
        import openai
    except ImportError as error:
        raise BenchError("bench", "needs the openai client: install vllm-slo[bench]") from error
    return openai


def api_root(base_url: str) -> str:
    """The address of a server, without ``/v1`` and slashes at its end.

    Raises:
        BenchError: it is not the address of a server. User names, passwords, queries and fragments
            may be secrets, so they are refused and not repeated.
    """
    try:
        parts = urlsplit(base_url.strip())
        _ = parts.port
    except ValueError:
        raise BenchError("--base-url", "not an address: the host or the port is bad") from None
    if "@" in base_url:
        raise BenchError(
            "--base-url", "a user name or a password cannot be in the address; use --header"
        )
    if parts.query or parts.fragment:
        raise BenchError("--base-url", "the address of a server cannot have '?' or '#'")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BenchError("--base-url", f"{base_url!r} is not an http(s) address")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def refused(url: str, credentials: Credentials, status: int, why: str, location: str) -> NoReturn:
    """Raise for an answer with an error or a redirect.

    Args:
        credentials: that were sent; they are not repeated.
        location: the header of this name, the target of a redirect.

    Raises:
        BenchError: always.
    """
    text = f"{url} answers {status}: {why}"
    if 300 <= status < 400 and location:
        text = f"{url} redirects to {location}; use that address"
    elif status in (401, 403):
        text += f"; check --api-key, {KEY_VARIABLE} and --header"
    raise BenchError("--base-url", credentials.hide(text))


def _on_loopback(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, so that a key goes only to the named server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Make a redirect an ``HTTPError`` for the caller."""


def opener(url: str) -> urllib.request.OpenerDirector:
    """An opener for ``url`` that follows no redirect.

    It uses no proxy on loopback, and elsewhere the one of the environment.

    Raises:
        ValueError: this is not an address.
    """
    handlers = [urllib.request.ProxyHandler({})] if _on_loopback(url) else []
    return urllib.request.build_opener(_NoRedirects, *handlers)


def _open_client(target: ServerTarget) -> openai.AsyncOpenAI:
    """A client that never retries, never waits for a connection and uses no proxy on loopback.

    It follows no redirect, which would cost time and send the key elsewhere. The key is added right
    before a request is sent, so that the SDK cannot log it.
    """
    sdk = import_openai()
    limits_type = type(sdk.DEFAULT_CONNECTION_LIMITS)  # httpx's, whichever one openai uses
    limits = limits_type(
        max_connections=None, max_keepalive_connections=100, keepalive_expiry=KEEPALIVE_S
    )
    local = _on_loopback(target.base_url)
    headers = target.credentials.as_headers()

    async def put_on(request: Any) -> None:
        request.headers.pop("Authorization", None)  # the SDK's placeholder
        request.headers.update(headers)

    http_client = sdk.DefaultAsyncHttpxClient(
        limits=limits,
        trust_env=not local,
        follow_redirects=False,
        event_hooks={"request": [put_on]},
    )
    client: openai.AsyncOpenAI = sdk.AsyncOpenAI(
        api_key="EMPTY",
        base_url=target.api_url,
        max_retries=0,
        timeout=3600.0,
        http_client=http_client,
    )
    return client


def _version(target: ServerTarget) -> str | None:
    """vLLM's ``/version``; None if there is no such page."""
    url = f"{api_root(target.base_url)}/version"
    request = urllib.request.Request(url, headers=target.credentials.as_headers())
    try:
        with opener(url).open(request, timeout=5) as reply:
            return str(json.load(reply)["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def _describe(client: openai.AsyncOpenAI, target: ServerTarget) -> ServerInfo:
    """Ask the server for its models; BenchError if it cannot be reached or lacks the model."""
    sdk = import_openai()
    try:
        models = (await client.models.list(timeout=10.0)).data
    except sdk.APIConnectionError as error:
        raise BenchError(
            "--base-url", f"cannot reach {target.base_url}; is the server running?"
        ) from error
    except (sdk.APIError, ValueError, AttributeError) as error:
        if isinstance(error, sdk.APIStatusError) and error.status_code != 404:
            location = error.response.headers.get("location", "")
            refused(target.base_url, target.credentials, error.status_code, str(error), location)
        text = f"{target.base_url} does not answer like an OpenAI server: {error}"
        raise BenchError("--base-url", target.credentials.hide(text)) from error
    names = [m.id for m in models or ()]
    if not names:
        raise BenchError("--base-url", f"{target.base_url} serves no model")
    wanted = target.model or names[0]
    if wanted not in names:
        raise BenchError("--model", f"{target.base_url} serves {', '.join(names)}, not {wanted!r}")
    card = models[names.index(wanted)]
    limit = getattr(card, "max_model_len", None)
    version = await asyncio.to_thread(_version, target)
    # A gateway may have no /version of the server behind it, but passes its models on.
    is_vllm = version is not None or getattr(card, "owned_by", None) == "vllm"
    return ServerInfo(wanted, int(limit) if limit else None, version, is_vllm)


async def with_client(
    target: ServerTarget, work: Callable[[openai.AsyncOpenAI, ServerInfo], Awaitable[_T]]
) -> _T:
    """Run ``work`` with an open client; BenchError if the server cannot be used."""
    client = _open_client(target)
    try:
        return await work(client, await _describe(client, target))
    finally:
        await client.close()


def describe_server(target: ServerTarget) -> ServerInfo:
    """Model, context and version of a server; BenchError if it cannot be used."""

    async def work(_: openai.AsyncOpenAI, info: ServerInfo) -> ServerInfo:
        return info

    return asyncio.run(with_client(target, work))
