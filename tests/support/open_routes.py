# SPDX-License-Identifier: Apache-2.0
"""Builds vLLM's app with an API key, asks each of its routes without one, and says which answer.

A process of its own, since vLLM's switches are environment variables and some leave marks in the
process. Out: JSON, ``{"always": [...], "switched": [...], "guarded": [...]}``: paths that are open
on a server as it is usually started, those that are open besides where everything that adds routes
is switched on, and those that ask for the key.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_slo.config.class_names import MIDDLEWARE
from vllm_slo.live.page import DATA_PATH, PAGE_PATH
from vllm_slo.slo.carriers import QUOTE_ROUTE

USUAL: Final = ("--api-key", "secret", "--middleware", MIDDLEWARE)
SWITCHES: Final = ("--enable-scale-out", "--enable-tokenizer-info-endpoint")
ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_ENABLE_COHERE_API": "1",
}
OURS: Final = (("GET", PAGE_PATH), ("GET", DATA_PATH), ("POST", QUOTE_ROUTE))


def arguments(*words: str) -> Namespace:
    """Arguments of ``vllm serve``."""
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser
    except ImportError:  # before vLLM 0.33
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    parsed: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([*words])
    return parsed


def parsed(*words: str) -> Namespace:
    """Arguments of a small server."""
    return arguments(*USUAL, *words)


def usual() -> Any:
    """The app of a server that generates, with no switch set."""
    return build_app(parsed(), ("generate",))


def switched() -> Iterator[Any]:
    """Apps with everything that adds routes: of a model that generates and hears, and of one that
    pools."""
    from vllm.config import ProfilerConfig

    os.environ |= ENVIRONMENT
    args = parsed(*SWITCHES)
    args.enable_fault_tolerance = True
    args.profiler_config = ProfilerConfig(profiler="torch", torch_profiler_dir="/tmp")
    yield build_app(args, ("generate", "transcription", "realtime"))
    pooling = SimpleNamespace(
        get_pooling_task=lambda tasks: "classify", hf_config=SimpleNamespace(num_labels=1)
    )
    yield build_app(args, ("classify", "embed"), pooling)  # type: ignore[arg-type]


def doors(app: Any) -> Iterator[tuple[str, str]]:
    """(method, path) of everything that can be asked."""
    yield from OURS
    for route in app.routes:
        if "WebSocket" in type(route).__name__:
            yield "websocket", route.path
        else:
            for method in getattr(route, "methods", None) or {"GET"}:
                yield method, route.path


async def is_open(app: Any, method: str, path: str) -> bool:
    """Whether a client without a key gets past the check. What the route makes of the request, for
    which it has no engine here, does not matter."""
    said: list[dict[str, Any]] = []
    asked = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

    async def receive() -> dict[str, Any]:
        return next(asked, {"type": "http.disconnect"})

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    path = path.replace("{", "").replace("}", "")
    scope = {
        "type": "http" if method != "websocket" else "websocket",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"here"), (b"content-type", b"application/json")],
        "subprotocols": [],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "scheme": "http",
        "http_version": "1.1",
        "extensions": {"websocket.http.response": {}},
        "app": app,
    }
    if method == "websocket":
        del scope["method"]
    try:
        async with asyncio.timeout(30):
            await app(scope, receive, send)
    except Exception as error:  # noqa: BLE001 - there is no engine behind the app
        sys.stderr.write(f"{method} {path}: {type(error).__name__}\n")
    return not said or said[0].get("status") != 401


async def main() -> dict[str, list[str]]:
    """All that is open or guarded, sorted."""
    first = usual()
    always = {path for method, path in doors(first) if await is_open(first, method, path)}
    more: set[str] = set()
    guarded: set[str] = set()
    for app in switched():
        for method, path in doors(app):
            (more if await is_open(app, method, path) else guarded).add(path)
    return {
        "always": sorted(always),
        "switched": sorted(more - always),
        "guarded": sorted(guarded),
    }


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(main())))
    sys.stdout.flush()
    os._exit(0)  # threads that look at metrics go on
