# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo serve``: ``vllm serve`` with all flags for this package set."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm_slo.config.command_line import Flags, is_flag
from vllm_slo.config.model import CONFIG_KEY, SLOConfig, read_additional_config
from vllm_slo.config.recording import RECORD_KEY
from vllm_slo.config.serve_args import serve_arguments
from vllm_slo.config.speculation import DRAFT_KEY, SERVERS_KEY, TOKEN_FILE_KEY, pool_value
from vllm_slo.engine.compat.version import check_vllm
from vllm_slo.engine.serving import cpu_alias
from vllm_slo.errors import ConfigError
from vllm_slo.wire.draft_socket import TOKEN_VARIABLE, check_verifier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this command; all others are vLLM's.

    The model is no argument of the parser, which cannot tell it from the value of a flag that it
    does not know; `model_of` finds it.
    """
    parser.usage = f"{parser.prog} MODEL [options] [options of 'vllm serve']"
    parser.add_argument_group("MODEL", "name or folder of the model; 'tiny' is the built-in one")
    parser.add_argument("--model", metavar="NAME", help="the same as MODEL")
    # vLLM takes underscores for dashes in its flags, so ours do too.
    parser.add_argument(
        "--slo-config",
        "--slo_config",
        metavar="FILE",
        help="YAML file: classes, tiers, margins ('vllm-slo check FILE' checks it)",
    )
    parser.add_argument(
        "--draft-model",
        "--draft_model",
        action="append",
        metavar="NAME",
        help="name or folder of a small model that drafts token trees; 'tiny' is the built-in one. "
        "Given several times, the smallest first, the fastest chain of them is chosen all the time",
    )
    parser.add_argument(
        "--draft-servers",
        "--draft_servers",
        metavar="ADDRESS|N",
        help="the address to which draft servers connect ('vllm-slo draft-server --connect'), such "
        "as tcp://0.0.0.0:5700, in place of --draft-model; with --replicas a range of ports, such "
        "as tcp://0.0.0.0:5700-5703; or how many to start on this machine with --draft-model "
        "(vllm-slo[ray])",
    )
    parser.add_argument(
        "--draft-token-file",
        "--draft_token_file",
        metavar="FILE",
        help=f"file with the secret of draft servers; without it ${TOKEN_VARIABLE} holds it",
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="record what arrives and what becomes of it, without prompts and answers; with "
        "--replicas, each one adds .replica-K to the name (see 'recording' in the YAML file)",
    )
    parser.add_argument(
        "--additional-config",
        "--additional_config",
        default="{}",
        metavar="JSON",
        help="as for 'vllm serve'; what the flags above set is added",
    )


def model_of(named: str | None, rest: Sequence[str]) -> tuple[str, list[str]]:
    """The model, and the words for ``vllm serve`` without it.

    Args:
        named: of ``--model``.
        rest: the words that are none of our flags, in order. The model is the first of them, or
            follows flags written as ``--flag=value``. After any other flag it could be a value.

    Raises:
        ConfigError: no model is named, or two are, or it follows a flag.
    """
    words = list(rest)
    place = next((i for i, w in enumerate(words) if not _is_whole_flag(w)), len(words))
    found = words.pop(place) if place < len(words) and not is_flag(words[place]) else None
    if found is not None and named not in (None, found):
        raise ConfigError(f"two models are named: {found} and --model {named}; name one")
    model = found or named or Flags(words).with_config_file().last("--model")
    if model is None and any(not is_flag(word) for word in words):
        raise ConfigError(
            "name the model first: vllm-slo serve MODEL [options]; after a flag of 'vllm serve' a "
            f"word is taken for its value, as in {' '.join(words)[:80]}"
        )
    if model is None:
        raise ConfigError("the model is missing; use vllm-slo serve MODEL [options]")
    return model, words


def _is_whole_flag(word: str) -> bool:
    """Whether a word is a flag together with its value."""
    return is_flag(word) and "=" in word


def command_line(args: argparse.Namespace, rest: Sequence[str]) -> list[str]:
    """The ``vllm`` command for these arguments.

    Raises:
        ConfigError: the configuration, ``--additional-config``, the draft model or the address and
            the token for draft servers cannot be used.
    """
    additional = read_additional_config(args.additional_config)
    given = {
        CONFIG_KEY: args.slo_config,
        DRAFT_KEY: args.draft_model and pool_value(args.draft_model),
        SERVERS_KEY: args.draft_servers,
        TOKEN_FILE_KEY: args.draft_token_file,
        RECORD_KEY: args.record,
    }
    additional |= {key: value for key, value in given.items() if value is not None}
    speculation = SLOConfig.from_additional_config(additional).speculation
    if speculation.draft_servers is not None:
        check_verifier(speculation.draft_servers, speculation.draft_token_file)
    return ["vllm", "serve", *serve_arguments(args.model, rest, additional)]


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Serve until stopped.

    Raises:
        VllmSLOError: the version of vLLM or the configuration cannot be used.
    """
    check_vllm()
    sys.argv = command_line(args, rest)
    cpu_alias.register()
    from vllm.entrypoints.cli.main import main

    main()
    return 0
