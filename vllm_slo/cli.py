# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-slo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from vllm_slo import __version__
from vllm_slo.errors import VllmSLOError

COMMANDS = {
    "serve": ("vllm_slo.engine.serving.serve", "serve a model with multi-SLO scheduling"),
    "demo": ("vllm_slo.bench.demo", "stock vLLM and vllm-slo side by side on a built-in model"),
    "bench": ("vllm_slo.bench.main", "drive any OpenAI endpoint with several SLO classes"),
    "profile": ("vllm_slo.engine.serving.profile", "measure a model's step times on this machine"),
    "simulate": ("vllm_slo.sim.main", "compare schedulers in virtual time, or find their capacity"),
    "front": ("vllm_slo.router.front_command", "one port before servers that run already"),
    "endpoint-picker": (
        "vllm_slo.router.endpoint_picker.command",
        "choose replicas for a Kubernetes gateway (Envoy's external processing)",
    ),
    "draft-server": ("vllm_slo.router.draft_server", "draft with a small model for a verifier"),
    "quote": ("vllm_slo.bench.quote", "ask a server what a request would be promised now"),
    "whatif": (
        "vllm_slo.sim.whatif.command",
        "a recorded trace as it was served, as stock vLLM would, as vllm-slo would",
    ),
    "plan": ("vllm_slo.sim.plan", "how many replicas a rate of jobs needs"),
}
"""Command -> (module with ``add_arguments(parser)`` and ``run(args)``, one line of help)."""

REPLICAS = "vllm_slo.router.serve"
"""The module that runs ``serve`` with several replicas."""

BESIDE = "vllm_slo.router.draft_beside"
"""The module that starts draft servers beside ``serve``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. A `VllmSLOError` is printed as one line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="vllm-slo",
        description="Serve requests with different latency objectives on one vLLM engine.",
    )
    parser.add_argument("--version", action="version", version=f"vllm-slo {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (_, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == next((word for word in argv if not word.startswith("-")), None):
            import_module(COMMANDS[name][0]).add_arguments(command)
            if name == "serve":
                import_module(REPLICAS).add_arguments(command)
                import_module(BESIDE).add_arguments(command)
    args, rest = parser.parse_known_args(argv)
    module = import_module(COMMANDS[args.command][0])
    try:
        if args.command == "serve":
            replicas = import_module(REPLICAS)
            runner = replicas if replicas.asked_for(args) else module
            import_module(BESIDE).start(args, rest)
            return int(runner.run(args, rest))
        if args.command == "draft-server":
            return int(module.run(args, rest))
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return int(module.run(args))
    except VllmSLOError as error:
        print(f"vllm-slo: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
