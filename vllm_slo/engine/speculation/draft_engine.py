# SPDX-License-Identifier: Apache-2.0
"""A draft server's model, on a vLLM engine of its own in this process.

Each ask of a round is a request whose prompt is the session's prefix. Prefix caching finds what
earlier rounds computed of it, and all sessions are drafted for in one batch. Requests end with the
round. A draft that is not finished in time is returned as far as it is.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from vllm import SamplingParams, envs
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from vllm_slo import tiny
from vllm_slo.config.command_line import Flags
from vllm_slo.config.serve_args import BUILT_IN_DRAFTS, given_arguments, runs_on_cpu, tiny_arguments
from vllm_slo.core.speculation.draft_sessions import DraftAsk, DraftTokens
from vllm_slo.engine.compat.version import check_vllm
from vllm_slo.engine.speculation.draft_check import one_line
from vllm_slo.errors import ConfigError
from vllm_slo.wire.draft_messages import vocabulary_digest

logger = logging.getLogger("vllm_slo.draft_server")

_CPU_BLOCK: Final = 32
"""Tokens of a KV block if the user sets no flag. Prefix caching finds whole blocks only, and vLLM's
default of 128 on CPU is more than a round adds."""


class DraftEngine:
    """Drafts with one model. Not for use by several threads.

    Args:
        model: its name or folder; ``tiny`` and ``tiny-middle`` are the built-in ones.
        flags: flags of vLLM's engine.
        max_sessions: sessions drafted for at a time, if ``--max-num-seqs`` is not given.

    Attributes:
        vocab_size: tokens of the model's vocabulary.
        vocabulary: its `vocabulary_digest`; "" without a tokenizer.
        max_model_len: tokens of a prefix and its draft.

    Raises:
        ConfigError: a flag is not one of vLLM's engine, or the model cannot be loaded.
        IncompatibleVLLMError: the installed vLLM is not supported.
    """

    def __init__(self, model: str, flags: Sequence[str], *, max_sessions: int) -> None:
        check_vllm()
        # Otherwise vLLM puts the model into another process on CPU, which costs milliseconds.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        arguments = engine_arguments(model, flags, max_sessions=max_sessions)
        try:
            config = fitted(EngineArgs.from_cli_args(arguments)).create_engine_config()
            self._engine = LLMEngine(config, Executor.get_class(config), log_stats=False)
        except Exception as error:
            raise ConfigError(f"--model {model}: cannot be loaded: {one_line(error)}") from error
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.max_model_len: int = config.model_config.max_model_len
        tokenizer = self._engine.tokenizer
        self.vocabulary = vocabulary_digest(dict(tokenizer.get_vocab()) if tokenizer else {})
        self._rounds = 0
        self._step_s = 0.0  # of the last step that added to drafts alone
        # At its first use vLLM compiles the code that takes probabilities, which takes seconds.
        self.draft([DraftAsk([0], 2), DraftAsk([0], 2, 1.0)], math.inf, lambda: False)

    def draft(
        self, asks: Sequence[DraftAsk], deadline_s: float, interrupted: Callable[[], bool]
    ) -> list[DraftTokens]:
        """A draft for each ask, as long as granted, or as time allows, or up to the end of text.

        At least one step is made, however short the time. No step is begun that would likely end
        too late.

        Args:
            asks: the prefixes and grants. An ask that the model cannot take gets an empty draft.
            deadline_s: seconds from now.
            interrupted: is called between steps; when true, the drafts so far are returned.
        """
        end_s = time.monotonic() + deadline_s
        self._rounds += 1
        tokens: list[list[int]] = [[] for _ in asks]
        probabilities: list[list[float]] = [[] for _ in asks]
        running = [self._add(f"{self._rounds}.{place}", ask) for place, ask in enumerate(asks)]
        begun_s, steps = time.monotonic(), 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                place, [new] = int(output.request_id.partition(".")[2]), output.outputs
                tokens[place] += new.token_ids
                probabilities[place] += map(_probability, new.token_ids, new.logprobs)
            now_s, steps = time.monotonic(), steps + 1
            if steps > 1:
                self._step_s = now_s - begun_s
            begun_s = now_s
            if now_s + self._step_s > end_s or interrupted():
                break
        self._engine.abort_request([name for name in running if name is not None], internal=True)
        return [DraftTokens(*draft) for draft in zip(tokens, probabilities, strict=True)]

    def close(self) -> None:
        """Release the model."""
        self._engine.engine_core.shutdown()

    def _add(self, name: str, ask: DraftAsk) -> str | None:
        """Queue a request; None if the engine does not take it."""
        try:
            params = SamplingParams(
                temperature=ask.temperature,
                max_tokens=ask.grant,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = tokens_input(list(ask.prefix))
            return self._engine.add_request(name, prompt, params)
        except (ValueError, VLLMValidationError):  # too long, or ids beyond the vocabulary
            return None


def _probability(token: int, logprobs: Any) -> float:
    """The probability of a drawn token; rounding may put its logarithm above zero."""
    return min(math.exp(logprobs[token].logprob), 1.0)


def engine_arguments(model: str, flags: Sequence[str], *, max_sessions: int) -> argparse.Namespace:
    """The arguments of a draft server's engine: defaults that suit it, then the user's own flags.

    Probabilities are taken after the temperature, as drafts are drawn. Steps are not overlapped:
    that would add a step to every round.

    Raises:
        ConfigError: a flag is not one of vLLM's engine, its value is not valid, or there is no such
            folder.
    """
    if model.startswith(("/", "./", "../")) and not Path(model).is_dir():
        raise ConfigError(f"--model {model}: there is no such folder; name one that holds a model")
    parser = EngineArgs.add_cli_args(_Parser(add_help=False, allow_abbrev=False))
    parser.set_defaults(
        model=model,
        enable_prefix_caching=True,
        async_scheduling=False,
        logprobs_mode="processed_logprobs",
        max_num_seqs=max_sessions,
        disable_log_stats=True,
        **({"block_size": _CPU_BLOCK} if runs_on_cpu() else {}),
    )
    if model in BUILT_IN_DRAFTS:
        folder = str(tiny.path(BUILT_IN_DRAFTS[model]))
        parser.set_defaults(model=folder, **tiny_arguments(given_arguments(Flags(flags))))
    args, unknown = parser.parse_known_args(list(flags))
    if unknown:
        raise ConfigError(
            f"{unknown[0]}: neither a flag of 'vllm-slo draft-server' nor of vLLM's engine"
        )
    return args


def fitted(given: EngineArgs) -> EngineArgs:
    """The arguments, with no longer texts than the draft model can take.

    The served model's ``--max-model-len`` may be longer. Such texts go on without drafts, as with a
    draft model beside the served one.

    Raises:
        Exception: vLLM cannot read the model.
    """
    if (given.max_model_len or 0) <= 0 or envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN:
        return given
    longest = replace(given, max_model_len=None).create_model_config().max_model_len
    if longest >= given.max_model_len:
        return given
    logger.warning(
        "--max-model-len %d: the draft model takes %d tokens; longer texts get no drafts",
        given.max_model_len,
        longest,
    )
    return replace(given, max_model_len=longest)


class _Parser(FlexibleArgumentParser):
    """vLLM's parser, which raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
