# SPDX-License-Identifier: Apache-2.0
"""The code blocks of README.md and docs/, and what becomes of each in ``docs/test_docs.py``.

A block needs no marker where its language and its first words say how it is tried out: YAML is a
configuration, JSON a request's body, Python is run against a server or, where it makes an ``LLM``,
in a process of its own, and a console's commands go by their names. An HTML comment on the line
before the fence says otherwise:

    <!-- run: shell -->      run the commands for real, ``simulate`` and the like as quick as can be
    <!-- run: desk -->       run the commands of this page one after the other, servers meanwhile
    <!-- file: NAME -->      a file that these commands read
    <!-- check: report -->   JSON with the keys of a request's report
    <!-- check: syntax -->   YAML or JSON that is read by others: well formed
    <!-- skip: REASON -->    left out; the reason is listed by pytest
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FENCE: Final = re.compile(r"^ *```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^ *```$", re.M | re.S)
MARKER: Final = re.compile(r"<!-- (run|file|check|skip): (.+?) -->")
TRIED: Final = {"bash", "console", "json", "python", "sh", "yaml"}
"""Languages of which every block is tried out."""
SHOWN: Final = {"", "http", "promql", "text"}
"""Languages of pictures, output and queries."""

ELSEWHERE: Final = {
    "docker": "docker: there is none where the tests run",
    "kubectl": "a cluster is needed; tests/docs/test_examples_*.py check the manifests",
    "serve deploy": "a Ray cluster is needed; tests/docs/test_examples_ray.py checks the file",
}
"""First words of commands that are not run here -> why."""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it is, and what it says."""

    page: str
    line: int
    language: str
    text: str
    marker: tuple[str, str] | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def skipped(self) -> str | None:
        """Why it is left out, if it is."""
        return self.marker[1] if self.marker and self.marker[0] == "skip" else None

    def marked(self, kind: str) -> bool:
        """Whether its marker says ``run: KIND`` or ``check: KIND``."""
        return self.marker is not None and self.marker[1] == kind


@dataclass(frozen=True)
class Command:
    """A command of a console, its words, and its block."""

    block: Block
    text: str

    def __str__(self) -> str:
        return f"{self.block}: {' '.join(self.words[:3])}"

    @property
    def words(self) -> list[str]:
        """As a shell reads them; comments are dropped, and where output goes."""
        words = shlex.split(self.text.replace("\\\n", " "), comments=True)
        return words[: words.index(">")] if ">" in words else words

    @property
    def program(self) -> str:
        """What kind of command this is: its first word, or two."""
        first, *rest = self.words
        if first == "python" and rest and rest[0].startswith("examples/"):
            return "example"
        if first == "uv":
            return rest[0]
        if first in ("vllm", "vllm-slo", "serve") and rest:
            return f"{first} {rest[0]}"
        return first

    @property
    def skipped(self) -> str | None:
        """Why it is not run, if it is not."""
        return self.block.skipped or ELSEWHERE.get(self.program)


def pages() -> list[Path]:
    """Every page that is written by hand, and README.md."""
    return [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of one page."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        before = text[: found.start()].rstrip().rpartition("\n")[2]
        marker = MARKER.search(before)
        yield Block(
            str(page.relative_to(ROOT)),
            text.count("\n", 0, found.start()) + 1,
            found["language"],
            textwrap.dedent(found["text"]),
            (marker[1], marker[2]) if marker else None,
        )


def blocks() -> list[Block]:
    """All blocks; of two that say the same, the first."""
    known: dict[tuple[str, str], Block] = {}
    for page in pages():
        for block in blocks_of(page):
            known.setdefault((block.language, block.text), block)
    return list(known.values())


def commands_of(block: Block) -> Iterator[Command]:
    """The commands of a console; of a script every line. Output is passed over."""
    shell = block.language in ("bash", "sh")
    lines = iter(block.text.splitlines())
    for line in lines:
        if not shell and not line.startswith("$ "):
            continue
        text = line.removeprefix("$ ")
        while text.strip() and not _complete(text):
            text += "\n" + next(lines)
        if text.strip() and not text.startswith("#"):
            yield Command(block, text)


def _complete(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:  # within quotes
        return False
    return not text.endswith("\\")


def commands() -> list[Command]:
    """The commands of all consoles; of two that say the same, the first."""
    known: dict[str, Command] = {}
    for block in blocks():
        if block.language in ("bash", "console", "sh"):
            for command in commands_of(block):
                known.setdefault(" ".join(command.words), command)
    return list(known.values())
