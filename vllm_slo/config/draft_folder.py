# SPDX-License-Identifier: Apache-2.0
"""Checks a draft model by the files in its folder. Nothing here loads torch or vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_slo.errors import ConfigError


def check_draft_folder(draft: str, model: str, tokenizer: str) -> None:
    """Refuse a draft model of which its folder alone says that it will not do.

    Names that are not folders are left to vLLM, and so is all that takes a model's code to know.

    ``draft``, ``model``, ``tokenizer``: name or folder of the draft model, and of the served one
    and its tokenizer.

    Raises:
        ConfigError: there is no such folder, or no model in it, or its vocabulary is another.
    """
    folder = Path(draft)
    if not folder.is_dir():
        if _looks_like_a_path(draft) and not folder.is_file():
            raise ConfigError(
                f"speculation.draft_model: there is no folder {draft!r}; name a folder that holds "
                "a model, or a model of the Hugging Face hub"
            )
        return
    if not (folder / "config.json").is_file() and not (folder / "params.json").is_file():
        raise ConfigError(
            f"speculation.draft_model: {draft!r} holds no config.json; name the folder of a model"
        )
    check_vocabulary(
        draft,
        _vocab_size(folder),
        _vocab_size(Path(model)),
        _token_ids(folder),
        _token_ids(Path(tokenizer)),
    )


def check_vocabulary(
    draft: str,
    theirs: int | None,
    ours: int | None,
    their_ids: Mapping[str, int],
    our_ids: Mapping[str, int],
) -> None:
    """Refuse a draft model to which tokens have other ids.

    Models of one family may differ in size by padding, which no tokenizer ever yields: with equal
    ids that does no harm.

    Args:
        theirs, ours: vocabulary sizes of the draft model and of the served one; None: not known.
        their_ids, our_ids: ids of the tokens; empty: not known.

    Raises:
        ConfigError: one line.
    """
    if their_ids and our_ids and their_ids != our_ids:
        token, _ = min(their_ids.items() ^ our_ids.items(), key=lambda item: (item[1], item[0]))
        raise ConfigError(
            f"speculation.draft_model: to {draft!r} token {token!r} is "
            f"{their_ids.get(token, 'unknown')}, to the served model "
            f"{our_ids.get(token, 'unknown')}; use a draft of the same family"
        )
    if theirs is None or ours is None or theirs == ours:
        return
    differ_by_padding = their_ids and our_ids and max(our_ids.values()) < min(theirs, ours)
    if not differ_by_padding:
        raise ConfigError(
            f"speculation.draft_model: {draft!r} has a vocabulary of {theirs} tokens, the served "
            f"model of {ours}; use a draft of the same family"
        )


def _looks_like_a_path(name: str) -> bool:
    if "://" in name:
        return False
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.endswith("/")


def _json_in(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty where there is none, which vLLM may complain of."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _vocab_size(folder: Path) -> int | None:
    size = _json_in(folder / "config.json").get("vocab_size")
    return size if isinstance(size, int) else None


def _token_ids(folder: Path) -> dict[str, int]:
    """Ids of a fast tokenizer's tokens; empty where there is none that lists them by name."""
    tokenizer = _json_in(folder / "tokenizer.json")
    model = tokenizer.get("model")
    ids = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(ids, dict):
        return {}
    added = tokenizer.get("added_tokens") or ()
    return {**ids, **{token["content"]: token["id"] for token in added}}
