# SPDX-License-Identifier: Apache-2.0
"""The live page on vLLM's server: ``GET /slo`` and ``GET /slo/data``.

vLLM loads plugins for endpoints only if ``VLLM_PLUGINS`` names them, and warns of others. The page
should need no setting, so the SLO middleware serves it, before vLLM's own middleware. Like
``/metrics`` it needs no API key.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Metric

from vllm_slo.config.model import SLOConfig
from vllm_slo.engine.compat.api_server import vllm_config_of
from vllm_slo.engine.telemetry.exposition import FOLDER_VARIABLE, FolderCollector
from vllm_slo.errors import ConfigError
from vllm_slo.live.history import KEPT
from vllm_slo.live.page import DATA_PATH, PAGE_PATH, Answer, Sampler, page

if TYPE_CHECKING:
    from starlette.types import Scope, Send

_OURS: Final = "vllm_slo:"
_THEIRS: Final = tuple(name for name in KEPT if not name.startswith(_OURS))


class LivePage:
    """Answers the two paths, and samples the series of this server from its start on."""

    def __init__(self) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        self._folder = Path(folder) if folder else None
        self._app: Any = None
        self._classes: Mapping[str, Any] | None = None
        self._sampler = Sampler(self._collect, self._about)

    async def answered(self, scope: Scope, send: Send) -> bool:
        """Answer a connection to the page. Whether it was one."""
        if scope["type"] == "lifespan":
            self._begin(scope)
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return False
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/"))
        if path not in (PAGE_PATH, DATA_PATH):
            return False
        self._begin(scope)
        if path == PAGE_PATH:
            answer = page()
        else:  # a whole history takes milliseconds, which streams should not wait for
            answer = await asyncio.to_thread(self._sampler.data, scope["query_string"])
        await _send(answer, send, whole=scope["method"] == "GET")
        return True

    def close(self) -> None:
        self._sampler.stop()

    def _begin(self, scope: Scope) -> None:
        self._app = scope.get("app")
        self._sampler.start()

    def _collect(self) -> Iterable[Metric]:
        if self._folder is not None:
            yield from FolderCollector(self._folder).collect()
        yield from vllm_series()

    def _about(self) -> dict[str, Any]:
        vllm_config = vllm_config_of(self._app)
        model_config = getattr(vllm_config, "model_config", None)
        if self._classes is None and vllm_config is not None:
            self._classes = _objectives(vllm_config.additional_config)
        return {
            "model": getattr(model_config, "served_model_name", None),
            "classes": self._classes or {},
            "silent_s": self._silent_s(),
        }

    def _silent_s(self) -> float | None:
        """Seconds since a scheduler wrote its series; None: none has written yet."""
        times = []
        for path in self._folder.glob("*.prom") if self._folder is not None else ():
            try:
                times.append(path.stat().st_mtime)
            except OSError:
                continue
        return round(max(time.time() - max(times), 0.0), 1) if times else None


def vllm_series() -> Iterable[Metric]:
    """vLLM's own series of `KEPT`; with several API servers all of their series.

    A scheduler's series are left out: they are in its file already, and shared among processes.
    """
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        from prometheus_client import CollectorRegistry, multiprocess

        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return (family for family in registry.collect() if not family.name.startswith(_OURS))
    from prometheus_client import REGISTRY

    return REGISTRY.restricted_registry(_THEIRS).collect()


def _objectives(additional_config: object) -> dict[str, Any]:
    """Class -> [TTFT, TPOT], milliseconds or None; empty if the configuration cannot be used."""
    try:
        classes = SLOConfig.from_additional_config(additional_config).slo_classes()
    except ConfigError:
        return {}
    return {name: [slo.ttft_ms, slo.tpot_ms] for name, slo in classes.items()}


async def _send(answer: Answer, send: Send, *, whole: bool) -> None:
    headers = {**answer.headers, "content-length": str(len(answer.body))}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})
    await send({"type": "http.response.body", "body": answer.body if whole else b""})
