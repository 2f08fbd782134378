# SPDX-License-Identifier: Apache-2.0
"""The live page and its data as HTTP answers, for any HTTP server.

``GET /slo`` is one HTML file that asks ``GET /slo/data`` every two seconds. Both need no key, like
``/metrics``, which has the same data. Only the page's own script and style may run in it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

from prometheus_client import Metric

from vllm_slo.live.history import KEPT, MINUTE_S, STEP_S, History

logger = logging.getLogger(__name__)

PAGE_PATH: Final = "/slo"
DATA_PATH: Final = "/slo/data"
MOST_TIME: Final = 0.005
"""Largest share of a core for taking samples; above it they are taken less often."""
_SHARED: Final = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer of status 200."""

    body: bytes
    headers: Mapping[str, str]


@cache
def page() -> Answer:
    """The page. Its content policy allows only its own script and style, by their digests."""
    html = Path(__file__).with_name("page.html").read_bytes()
    script, style = (_digest(html, tag) for tag in (b"script", b"style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": policy}
    return Answer(html, {**_SHARED, **headers})


def _digest(html: bytes, tag: bytes) -> str:
    """The digest of the only element with this tag, as a content policy names it."""
    (text,) = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


class Sampler:
    """Samples the series in a thread, and answers with the samples.

    Args:
        collect: returns the current series; called in the thread.
        about: returns further data on the server, for JSON; called for each answer.
        clock: epoch seconds.
    """

    def __init__(
        self,
        collect: Callable[[], Iterable[Metric]],
        about: Callable[[], Mapping[str, Any]] = dict,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.history = History()
        self._collect = collect
        self._about = about
        self._clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="slo-page", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """Take a sample now. Its time is on the grid of `STEP_S`, like those of other processes."""
        now_s = self._clock()
        self.history.add(now_s - now_s % STEP_S, self._collect())

    def data(self, query: bytes) -> Answer:
        """The answer to ``GET /slo/data``.

        ``query``: of the URL. ``since``: time of the page's last sample, milliseconds;
        ``minutes=1``: samples of a minute.
        """
        asked = parse_qs(query.decode("latin-1"), max_num_fields=8) if len(query) < 256 else {}
        since = asked.get("since", ["0"])[0]
        coarse = asked.get("minutes") == ["1"]
        body = {
            "now": round(self._clock() * 1e3),
            "step_s": MINUTE_S if coarse else STEP_S,
            "labels": KEPT,
            "about": self._about(),
            **self.history.since(
                int(since) if since.isdecimal() and len(since) < 16 else 0, coarse=coarse
            ),
        }
        text = json.dumps(body, separators=(",", ":"), allow_nan=False)
        return Answer(text.encode(), {**_SHARED, "content-type": "application/json"})

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stop.wait(wait_s):
            begun_s = time.thread_time()
            try:
                self.look()
            except Exception:
                if not self._has_failed:  # a page without samples, rather than one log line each
                    logger.exception("vllm-slo: a sample of the live page could not be taken")
                self._has_failed = True
            taken_s = time.thread_time() - begun_s
            wait_s = max(STEP_S - self._clock() % STEP_S, taken_s / MOST_TIME)
