# SPDX-License-Identifier: Apache-2.0
"""An OpenAI endpoint: its address, what it says of itself, and a connection to it."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

from vllm_slo.bench.errors import BenchError

if TYPE_CHECKING:
    import openai

_T = TypeVar("_T")

KEEPALIVE_S: Final = 2.0
"""Idle connections are dropped before the 5 s after which vLLM's HTTP server closes them."""


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """A server to drive. ``base_url`` with or without ``/v1``; ``model`` None = its first model.

    ``send_slo``: put the ``slo`` field in the body (a stock server ignores it). ``send_class``:
    name the class in it too, for a server whose configuration knows the classes.
    """

    name: str
    base_url: str
    model: str | None = None
    send_slo: bool = True
    send_class: bool = False
    api_key: str = "EMPTY"

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError("--base-url", f"{self.base_url!r} is not an http(s) address")

    @property
    def api_url(self) -> str:
        """Address of the OpenAI API, ending in ``/v1``."""
        url = self.base_url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server says of itself; None where it does not."""

    model: str
    max_model_len: int | None
    version: str | None


def import_openai() -> Any:
    """The openai module; BenchError where it is not installed."""
    try:
        import openai
    except ImportError as error:
        raise BenchError("bench", "needs the openai client: install vllm-slo[bench]") from error
    return openai


def _on_loopback(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def opener(url: str) -> urllib.request.OpenerDirector:
    """What opens ``url``: on loopback never through a proxy, elsewhere as the environment says.

    Raises:
        ValueError: this is no address.
    """
    handlers = [urllib.request.ProxyHandler({})] if _on_loopback(url) else []
    return urllib.request.build_opener(*handlers)


def _open_client(target: ServerTarget) -> openai.AsyncOpenAI:
    """A client that never retries, never queues for a connection and skips proxies on loopback."""
    sdk = import_openai()
    limits_type = type(sdk.DEFAULT_CONNECTION_LIMITS)  # httpx's, whichever one openai uses
    limits = limits_type(
        max_connections=None, max_keepalive_connections=100, keepalive_expiry=KEEPALIVE_S
    )
    local = _on_loopback(target.base_url)
    http_client = sdk.DefaultAsyncHttpxClient(limits=limits, trust_env=not local)
    client: openai.AsyncOpenAI = sdk.AsyncOpenAI(
        api_key=target.api_key,
        base_url=target.api_url,
        max_retries=0,
        timeout=3600.0,
        http_client=http_client,
    )
    return client


def _version(target: ServerTarget) -> str | None:
    """vLLM's ``/version``; None where there is no such page."""
    url = target.api_url.removesuffix("/v1") + "/version"
    try:
        with opener(url).open(url, timeout=5) as reply:
            return str(json.load(reply)["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def _describe(client: openai.AsyncOpenAI, target: ServerTarget) -> ServerInfo:
    """Ask the server for its models; BenchError where it cannot be reached or lacks the model."""
    sdk = import_openai()
    try:
        models = (await client.models.list(timeout=10.0)).data
    except sdk.APIConnectionError as error:
        raise BenchError(
            "--base-url", f"cannot reach {target.base_url}; is the server running?"
        ) from error
    except (sdk.APIError, ValueError, AttributeError) as error:
        raise BenchError(
            "--base-url", f"{target.base_url} does not answer like an OpenAI server: {error}"
        ) from error
    names = [m.id for m in models or ()]
    if not names:
        raise BenchError("--base-url", f"{target.base_url} serves no model")
    wanted = target.model or names[0]
    if wanted not in names:
        raise BenchError("--model", f"{target.base_url} serves {', '.join(names)}, not {wanted!r}")
    limit = getattr(models[names.index(wanted)], "max_model_len", None)
    version = await asyncio.to_thread(_version, target)
    return ServerInfo(wanted, int(limit) if limit else None, version)


async def with_client(
    target: ServerTarget, work: Callable[[openai.AsyncOpenAI, ServerInfo], Awaitable[_T]]
) -> _T:
    """Run ``work`` with an open client; BenchError where the server cannot be used."""
    client = _open_client(target)
    try:
        return await work(client, await _describe(client, target))
    finally:
        await client.close()


def describe_server(target: ServerTarget) -> ServerInfo:
    """Model, context and version of a server; BenchError where it cannot be used."""

    async def work(_: openai.AsyncOpenAI, info: ServerInfo) -> ServerInfo:
        return info

    return asyncio.run(with_client(target, work))
