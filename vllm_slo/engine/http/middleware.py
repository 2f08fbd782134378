# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware: reads the SLO of an HTTP request, and puts the report into the response.

`vllm serve ... --middleware vllm_slo.engine.http.SLOMiddleware`

vLLM installs this middleware outside its own, authentication included. It therefore does nothing
before the application asks for the body, which it does only after it has let the client in.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from vllm_slo.config.model import SLOConfig
from vllm_slo.engine import gate
from vllm_slo.engine.compat.api_server import has_reasoning_parser, vllm_config_of
from vllm_slo.engine.http.exchange import Exchange
from vllm_slo.engine.http.front_access import FrontAccess
from vllm_slo.engine.http.live_page import LivePage
from vllm_slo.engine.http.models import MODELS_ROUTE, with_classes
from vllm_slo.engine.http.quote import answer_quote
from vllm_slo.engine.http.reading import Rules
from vllm_slo.engine.http.routes import ROUTES
from vllm_slo.slo.access import Access, Seal
from vllm_slo.slo.carriers import QUOTE_ROUTE

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

EAGER: Final = frozenset(path for path, info in ROUTES.items() if info.kind == "generates")
"""Routes on which every request generates, so mistakes can be answered at once."""


class SLOMiddleware:
    """Pure ASGI middleware for vLLM's API server.

    Request: the body field ``slo``, the ``slo_*`` keys of ``vllm_xargs``, the SLO headers and
    ``service_tier`` are united into one SLO, which the gate (`vllm_slo.engine.gate`) hands to the
    engine with every request that the route makes of it. The body passes byte for byte. A mistake
    is answered with 400 in the error shape of the API before the engine sees the request. An SLO
    that the API key may not ask for (section ``access`` of the configuration) is answered with 403.

    Response: the scheduler's report becomes the field ``slo``; if the request named a
    ``service_tier``, the tier served stands there, too (rule: `served_service_tier`). A declined
    request becomes ``decline_status`` with ``Retry-After`` and ``x-slo-reason``, on every route.

    Behind a front (`FrontAccess`) the scope holds `FORWARDED`. It then reaches the scheduler with
    every request that has an SLO, its own or the default.

    ``clock``: epoch seconds, for `prefill_ddl`.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.time) -> None:
        self.app = app
        self._clock = clock
        self._rules: Rules | None = None
        self._page = LivePage()
        self._front_access = FrontAccess.from_environment()
        if (engine := sys.modules.get("vllm.v1.engine.async_llm")) is not None:
            gate.install(engine)  # it was imported before the plugin could wrap it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._front_access is None:
            await self._serve(scope, receive, send)
        else:
            await self._front_access(self._serve, scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._page.answered(scope, send):
            return
        rules = functools.partial(self.rules, scope)
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif _is(scope, "GET", {MODELS_ROUTE}):
            await self.app(scope, receive, with_classes(send, lambda: rules().policy))
        elif scope["method"] != "POST" or scope["path"].endswith("/render"):
            await self.app(scope, receive, send)
        elif _is(scope, "POST", {QUOTE_ROUTE}):
            await answer_quote(self.app, rules, scope, receive, send, self._clock())
        else:
            exchange = Exchange(
                rules,
                scope,
                receive,
                send,
                eager=_is(scope, "POST", EAGER),
                arrival_s=self._clock(),
            )
            await exchange.run(self.app)

    def rules(self, scope: Scope) -> Rules:
        """How the server's requests are read. The configuration is read at the first call.

        Raises:
            ConfigError: the configuration cannot be used.
        """
        if self._rules is None:
            vllm_config = vllm_config_of(scope.get("app"))
            additional = getattr(vllm_config, "additional_config", None)
            config = SLOConfig.from_additional_config(additional)
            access = None if config.access is None else Access(config.access)
            policy = config.http_policy(thinking=has_reasoning_parser(vllm_config))
            self._rules = Rules(policy, access, Seal.from_environment())
        return self._rules


def _is(scope: Scope, method: str, routes: Collection[str]) -> bool:
    """Whether this is such a request to one of ``routes``."""
    if scope["method"] != method:
        return False
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path in routes or path.removeprefix(root) in routes
