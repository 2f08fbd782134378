# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-slo``: its commands, an example for each, and what an exit status says."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import Final, TextIO

from vllm_slo import __version__
from vllm_slo.arguments import BUG, ERROR, INTERRUPTED, NO, NO_READER, OK, USAGE, Parser, nearest
from vllm_slo.errors import VllmSLOError

COMMANDS = {
    "serve": ("vllm_slo.engine.serving.serve", "serve a model with multi-SLO scheduling"),
    "demo": ("vllm_slo.bench.demo", "stock vLLM and vllm-slo side by side on a built-in model"),
    "bench": ("vllm_slo.bench.main", "drive any OpenAI endpoint with several SLO classes"),
    "replay": ("vllm_slo.bench.replay", "send recorded traffic to a live endpoint"),
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
    "record": ("vllm_slo.traces.command", "turn logs, spans or a trace into a recording to share"),
    "plan": ("vllm_slo.sim.plan", "how many replicas traffic needs, and what they cost"),
    "check": ("vllm_slo.check.command", "say what a file is, and whether it is valid"),
    "completion": ("vllm_slo.completion", "print the script with which a shell completes options"),
}
"""Command -> (module with ``add_arguments(parser)`` and ``run(args)``, one line of help)."""

EXAMPLES: Final = {
    "serve": "vllm-slo serve tiny --slo-config slo.yaml --port 8000",
    "demo": "vllm-slo demo --duration 45 --out demo-output",
    "bench": "vllm-slo bench --base-url http://localhost:8000 --rate 2 --duration 30",
    "replay": "vllm-slo replay trace.jsonl --base-url http://localhost:8000 --slo-config slo.yaml",
    "profile": "vllm-slo profile tiny --quick",
    "simulate": "vllm-slo simulate --scenario mixed --rate 2,4 --hardware a100-opt-13b",
    "front": "vllm-slo front --replica http://10.0.0.1:8000 --token-file token",
    "endpoint-picker": "vllm-slo endpoint-picker --replicas-from DNS:vllm:8000 --token-file token",
    "draft-server": "vllm-slo draft-server --model tiny --connect tcp://10.0.0.1:5700",
    "quote": "vllm-slo quote --prompt 'def parse(' --ttft-ms 500 --tpot-ms 50",
    "whatif": "vllm-slo whatif trace.jsonl --slo-config slo.yaml --hardware h100-llama-8b",
    "record": "vllm-slo record trace.csv --from 600 --to 1200 --out traffic.jsonl.zst",
    "plan": "vllm-slo plan --scenario mixed --rate 20 --hardware a100-opt-13b",
    "check": "vllm-slo check slo.yaml trace.csv",
    "completion": "vllm-slo completion bash > ~/.local/share/bash-completion/completions/vllm-slo",
}
"""Command -> one command line that works, for its help."""

NOTES: Final = {
    "serve": "All other flags go to 'vllm serve'; 'vllm serve --help=all' "
    "lists them, 'vllm serve --help=max' those with 'max' in their name. The model comes before "
    "them.",
    "draft-server": "All other flags go to vLLM's engine, as with 'vllm serve'.",
}
"""Command that passes unknown flags on -> what its help says about them."""

REPLICAS = "vllm_slo.router.serve"
"""The module that runs ``serve`` with several replicas."""

BESIDE = "vllm_slo.router.draft_beside"
"""The module that starts draft servers beside ``serve``."""

STATUSES: Final = (
    (OK, "it worked; the answer is yes"),
    (NO, "it worked, and the answer is no: not promised, not attained, not valid"),
    (USAGE, "an option, a file or a server cannot be used; one line says why"),
    (BUG, "an error in vllm-slo; the traceback says where"),
    (INTERRUPTED, "ended by Ctrl-C"),
)
"""Exit status -> what it says."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    A `VllmSLOError` is printed as one line. Any other error is a mistake of ours, and its traceback
    is printed.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            print(end="", flush=True)  # a reader that has left shows here, not at the exit
    except VllmSLOError as error:
        print(f"{ERROR}{error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich has heeded it
            return NO_READER
        if isinstance(stop.code, str):  # the plugin refuses to serve
            print(stop.code, file=sys.stderr)
            return USAGE
        raise
    except Exception as error:  # noqa: BLE001 (its traceback is printed)
        if isinstance(error, BrokenPipeError) and _has_no_reader(sys.stdout):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return NO_READER
        import traceback  # takes as long to import as the rest of the help

        traceback.print_exc()
        return BUG


def parsers(loaded: Collection[str] = COMMANDS) -> dict[str, Parser]:
    """The parsers of all commands by name; that of ``vllm-slo`` itself has the name "".

    ``loaded``: the commands that get their arguments. Each takes the import of its module.
    """
    parser = Parser(
        prog="vllm-slo",
        description="Serve requests with different latency objectives on one vLLM engine.",
        epilog="'vllm-slo COMMAND --help' shows the options of a command and an example.\n\n"
        "exit status:\n\n" + "\n".join(f"  {status:<5}{text}" for status, text in STATUSES),
    )
    parser.add_argument("--version", action="version", version=f"vllm-slo {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    made = {"": parser}
    for name, (module, text) in COMMANDS.items():
        made[name] = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.\n\n{NOTES.get(name, '')}",
            epilog=f"example:\n\n  {EXAMPLES[name]}" if name in EXAMPLES else None,
        )
        if name in loaded:
            import_module(module).add_arguments(made[name])
            if name == "serve":
                import_module(REPLICAS).add_arguments(made[name])
                import_module(BESIDE).add_arguments(made[name])
    return made


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of a command line, and the words that the command passes on.

    Raises:
        SystemExit: the command line is wrong, or asks for help.
        VllmSLOError: ``serve`` is given no model.
    """
    command = next((word for word in argv if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        near = nearest(command, COMMANDS)
        hint = f"; did you mean {near}?" if near else ""
        parsers(())[""].error(f"{command!r} is not a command{hint}")
    made = parsers(() if command is None else (command,))
    args, rest = made[""].parse_known_args(argv)
    if command == "serve":
        args.model, rest = import_module(COMMANDS["serve"][0]).model_of(args.model, rest)
    elif command is not None and command not in NOTES:
        made[command].refuse_unknown(rest)
    return args, rest


def _run(argv: list[str]) -> int:
    if not argv:
        parsers(())[""].print_help(sys.stderr)
        return USAGE
    args, rest = parse(argv)
    module = import_module(COMMANDS[args.command][0])
    if args.command == "serve":
        replicas = import_module(REPLICAS)
        runner = replicas if replicas.asked_for(args) else module
        import_module(BESIDE).start(args, rest)
        return int(runner.run(args, rest))
    if args.command == "draft-server":
        return int(module.run(args, rest))
    if args.command == "completion":
        return int(module.run(args, parsers()[""]))
    return int(module.run(args))


def _has_no_reader(stream: TextIO) -> bool:
    """Whether whatever read a stream has closed it, so that a broken pipe is not another one."""
    import select

    try:
        poll = select.poll()
        poll.register(stream, 0)
    except OSError:  # it is no file
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
