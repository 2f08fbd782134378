# SPDX-License-Identifier: Apache-2.0
"""A reasoning parser for the built-in model, which does not think: its first line stands for that.

vLLM loads it by ``--reasoning-parser-plugin``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.reasoning import ReasoningParser, ReasoningParserManager

MARK = "\n"


@ReasoningParserManager.register_module("first_line")
class FirstLineParser(ReasoningParser):
    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return False  # asked of prompts, which never hold a thought

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        return MARK in self.model_tokenizer.decode(list(delta_ids))

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        head, mark, rest = model_output.partition(MARK)
        return (head, rest) if mark else (model_output, None)

    def extract_reasoning_streaming(self, *args: Any, **kwargs: Any) -> None:
        return None
