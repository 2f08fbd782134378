# SPDX-License-Identifier: Apache-2.0
"""Debian's Chromium, driven by Playwright, and what a page must not do in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from patience import patience

__all__ = ["Visit", "chromium", "program", "visiting"]

FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}


def program(name: str) -> str:
    """A program of the system, which CI has (`.ci/run`); elsewhere what needs it is skipped."""
    found = shutil.which(name)
    if found is None:
        needed = any(os.environ.get(variable) for variable in ("CI", "VLLMSLO_TEST_ALL"))
        assert not needed, f"{name} is not installed: see .ci/run"
        pytest.skip(f"there is no {name} here: apt-get install {name}")
    return found


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window."""
    path = program("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=FLAGS, timeout=patience(30_000)
        )
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """A page in a fresh profile; ``wrong`` is what it did that it must not."""

    def __init__(self, browser: Any, url: str, **settings: Any) -> None:
        self.context = browser.new_context(**settings)
        self.page = self.context.new_page()
        self.page.set_default_timeout(patience(20_000))
        self.wrong: list[str] = []
        self.forgiven = False
        origin = urlsplit(url).netloc
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on(
            "request",
            lambda request: (
                self.wrong.append(f"asked {request.url}")
                if urlsplit(request.url).scheme != "data" and urlsplit(request.url).netloc != origin
                else None
            ),
        )
        self.page.goto(url)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not self.forgiven:
            self.wrong.append(f"console: {message.text}")

    def has(self, selector: str, text: str) -> None:
        """Wait until the element there says this, among other things."""
        self.page.locator(selector, has_text=text).first.wait_for()

    def colour_of(self, selector: str, what: str = "color") -> tuple[int, int, int]:
        """A colour as the browser paints it."""
        script = f"node => getComputedStyle(node)['{what}']"
        said = self.page.locator(selector).first.evaluate(script)
        red, green, blue, *_ = (
            said.removeprefix("rgba(").removeprefix("rgb(").rstrip(")").split(",")
        )
        return int(red), int(green), int(blue)


@contextmanager
def visiting(browser: Any, url: str, **settings: Any) -> Iterator[Visit]:
    """A visit that fails if anything went wrong in the browser."""
    visit = Visit(browser, url, **{"viewport": DESKTOP, **settings})
    try:
        yield visit
        assert visit.wrong == []
    finally:
        visit.context.close()
