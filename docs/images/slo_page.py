# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of the live page in this folder: `python docs/images/slo_page.py`.

Starts `vllm-slo serve tiny` on loopback, sends it three classes of requests for three minutes, in
the middle of which more come than it can serve in time, and has Chromium look at `/slo` on a desk,
on a phone and in the dark. Needs the extras `bench` and `dev`, and Chromium.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
CLASSES = """\
classes:
  chat: {ttft_ms: 2000, tpot_ms: 100}
  code: {ttft_ms: 800, tpot_ms: 50, value: 2}
  agent: {ttft_ms: 400, tpot_ms: 60, on_unattainable: decline}
"""
SHARES = {"chat": 0.45, "code": 0.35, "agent": 0.2}
QUIET, BUSY = 3.0, 40.0  # requests a second
START_S, TRAFFIC_S, LOOK_AFTER_S = 240.0, 200.0, 180.0
COLOURS = 192
SHOTS = {
    "desktop": {"viewport": {"width": 1280, "height": 900}},
    "phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
}


def start(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The server's process and URL, once it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "slo.yaml").write_text(CLASSES)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "vllm_slo.cli", "serve", "tiny"),
            *("--slo-config", "slo.yaml", "--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", "1024", "--max-num-seqs", "32", "--enforce-eager"),
            *("--gpu-memory-utilization", "0.2"),
        ],
        cwd=folder,
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **os.environ},
        start_new_session=True,
    )
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return process, url
        time.sleep(0.5)
    raise SystemExit("the server did not start; see its log above")


async def traffic(url: str, seconds: float) -> None:
    """Requests come whether or not those before them are done."""
    draw, begun_s = random.Random(0), time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits()) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        pending = set()
        while (now_s := time.monotonic() - begun_s) < seconds:
            busy = 0.45 < now_s / seconds < 0.6
            await asyncio.sleep(draw.expovariate(BUSY if busy else QUIET))
            (name,) = draw.choices(list(SHARES), list(SHARES.values()))
            body = {
                "model": model,
                "prompt": [draw.randrange(3, 500) for _ in range(draw.randrange(60, 500))],
                "max_tokens": draw.randrange(30, 120),
                "ignore_eos": True,
                "slo": {"class": name},
            }
            pending.add(asyncio.create_task(client.post("/v1/completions", json=body)))
            pending = {task for task in pending if not task.done()}
        await asyncio.gather(*pending)


def shoot(url: str) -> None:
    """The pictures; with fewer colours they are half as large and look the same."""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for name, settings in SHOTS.items():
            page = browser.new_context(**settings).new_page()
            page.goto(f"{url}/slo")
            page.get_by_role("button", name="5 min", exact=True).click()
            page.locator("#table tr", has_text="chat").first.wait_for()
            page.wait_for_timeout(1000)
            png = page.screenshot(full_page=name != "phone")
            image = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS)
            image.save(HERE / f"slo-page-{name}.png", optimize=True)
        browser.close()


async def look_at_traffic(url: str) -> None:
    """Look while requests are still being served."""

    async def look() -> None:
        await asyncio.sleep(LOOK_AFTER_S)
        await asyncio.to_thread(shoot, url)

    await asyncio.gather(traffic(url, TRAFFIC_S), look())


def main() -> None:
    """Start, send, look, stop."""
    with tempfile.TemporaryDirectory() as folder:
        process, url = start(Path(folder))
        try:
            asyncio.run(look_at_traffic(url))
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


if __name__ == "__main__":
    main()
