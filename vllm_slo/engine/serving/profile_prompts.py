# SPDX-License-Identifier: Apache-2.0
"""The texts on which drafts are measured: the user's own, or those that come with Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from vllm_slo.errors import ConfigError
from vllm_slo.tiny import text

_FIELD: Final = "--prompts"
_JSON_LINES: Final = (".jsonl", ".ndjson")
MOST_PROMPTS: Final = 256
"""Prompts that are used at most: four batches of the largest size that is measured."""
MOST_LETTERS: Final = 4_000
"""Letters of a prompt that are kept: more than its first tokens hold that are used."""
APART: Final = 4_000
"""Letters from one built-in prompt of a document to the next."""


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file: JSON lines (``.jsonl``) with the text in ``prompt``, or plain text
    with one prompt a line. Empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, a line is not as described, or there is no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_FIELD}: cannot read {str(path)!r}: {error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            is_json = path.suffix.lower() in _JSON_LINES
            prompts.append(_prompt_of(line, f"{path}:{number}") if is_json else line)
    if not prompts:
        raise ConfigError(f"{_FIELD}: there is no prompt in {str(path)!r}; write one in each line")
    return [prompt[:MOST_LETTERS] for prompt in prompts[:MOST_PROMPTS]]


def _prompt_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{_FIELD}: {where}: not JSON: {error}") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(
            f'{_FIELD}: {where}: there is no text in "prompt"; write {{"prompt": "..."}} in each '
            "line, or name a file of plain text that does not end in .jsonl"
        )
    return prompt


def built_in_prompts() -> list[str]:
    """Parts of Python's library sources with which the built-in models were not trained.

    Raises:
        ConfigError: there are none on this machine.
    """
    documents = text.documents(held_out=True)
    prompts = [
        part
        for document in documents
        for start in range(0, len(document), APART)
        if (part := document[start : start + MOST_LETTERS]).strip()
    ]
    if not prompts:
        raise ConfigError(f"{_FIELD}: this Python has no library sources; name a file of prompts")
    step = max(len(prompts) // MOST_PROMPTS, 1)
    return prompts[::step][:MOST_PROMPTS]
