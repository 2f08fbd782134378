# SPDX-License-Identifier: Apache-2.0
"""The process of one replica: ``vllm serve`` on a private port, for the front alone.

``python -m vllm_slo.router.replica --private-host H -- MODEL [vllm serve flags]``

It chooses a free port, and makes up a token unless the environment has one. When the server
answers, it writes its only line to stdout: ``{"url", "token"}``. The process ends at once when its
stdin ends, and as ``vllm serve`` does on SIGTERM or when the engine dies. Its engine never outlives
it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NoReturn

from vllm_slo.errors import VllmSLOError
from vllm_slo.wire.front_protocol import (
    PRIVATE_VARIABLE,
    TOKEN_HEADER,
    TOKEN_VARIABLE,
    token_in,
)
from vllm_slo.wire.ports import free_port

LOOK_S: Final = 0.1
ANSWER_S: Final = 5.0


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one replica in this process."""
    options, served = _options(sys.argv[1:] if argv is None else argv)
    token = token_in(os.environ) or secrets.token_urlsafe(32)
    announce = _separate_stdout()
    _end_with_stdin()
    host, port = options.private_host, free_port(options.private_host)
    os.environ[TOKEN_VARIABLE], os.environ[PRIVATE_VARIABLE] = token, "1"
    shown = f"[{host}]" if ":" in host else host
    ready = {"url": f"http://{shown}:{port}", "token": token}
    watch = threading.Thread(target=_announce_ready, args=(host, port, ready, announce))
    watch.daemon = True
    watch.start()
    status = 1
    try:
        status = _serve([*served, "--host", host, "--port", str(port)])
    except VllmSLOError as error:
        sys.stderr.write(f"vllm-slo: error: {error}\n")
    except SystemExit as stop:
        sys.stderr.write(f"{stop.code}\n" if isinstance(stop.code, str) else "")
        status = stop.code if isinstance(stop.code, int) else 1
    except Exception:  # noqa: BLE001 - the process ends here and prints the reason
        traceback.print_exc()
    sys.stderr.flush()
    sys.exit(status)


def _serve(arguments: Sequence[str]) -> int:
    """Run ``vllm serve`` until it ends.

    Raises:
        VllmSLOError, SystemExit: it cannot start.
    """
    from vllm_slo.engine.compat.version import check_vllm
    from vllm_slo.engine.serving import cpu_alias

    check_vllm()
    sys.argv = ["vllm", "serve", *arguments]
    cpu_alias.register()
    from vllm.entrypoints.cli.main import main as vllm

    vllm()
    return 0


def _options(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The replica's own flags, and the words after ``--``."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_slo.router.replica",
        description="One replica behind the front of vllm-slo; started by it.",
        usage="%(prog)s --private-host H -- MODEL [vllm serve flags]",
    )
    parser.add_argument("--private-host", required=True, help="address to listen on")
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    ours, served = words[:place], words[place + 1 :]
    options = parser.parse_args(ours)
    if not served:
        parser.error("a model is missing after --")
    return options, served


def _separate_stdout() -> Callable[[dict[str, str]], None]:
    """Send everything printed to stderr; returns a function that writes a line to real stdout."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)

    def announce(message: dict[str, str]) -> None:
        with suppress(OSError):
            os.write(real, json.dumps(message).encode() + b"\n")

    return announce


def _end_with_stdin() -> None:
    """End the process at once when stdin ends; children get an empty stdin."""
    real = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        with suppress(OSError):
            while os.read(real, 4096):
                pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _announce_ready(
    host: str, port: int, ready: dict[str, str], announce: Callable[[dict[str, str]], None]
) -> None:
    """Announce the server once it answers."""
    while True:
        connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health", headers={TOKEN_HEADER: ready["token"]})
            if connection.getresponse().status == 200:
                announce(ready)
                return
        connection.close()
        time.sleep(LOOK_S)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    # A process that vLLM starts imports this module first, long before its plugins.
    from vllm_slo.engine.serving import lifeline

    lifeline.watch()
