# SPDX-License-Identifier: Apache-2.0
"""What the site has beside its written pages: the reference, schemas, pictures, results,
CONTRIBUTING.md.

Called by MkDocs while it builds. Nothing of this is written to the source tree.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import reference  # beside this file: MkDocs lets hooks import theirs

from vllm_slo.check.schema import schema_of

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

DOCS: Final = Path(__file__).resolve().parent
RESULTS: Final = DOCS.parent / "benchmarks" / "results"

FIGURE: Final = re.compile(r"^!\[([^\]]*)\]\(figure:(\w+)\)$", re.MULTILINE)
REPEAT: Final = re.compile(r"^- command: (.+)$", re.MULTILINE)
TITLE: Final = re.compile(r"^# (.+)$", re.MULTILINE)

_drawn: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every page of benchmark results into the navigation."""
    for section in config.nav or []:
        if "Benchmarks" in section:
            results = [f"benchmarks/{path.name}" for path in sorted(RESULTS.glob("*.md"))]
            section["Benchmarks"] = ["benchmarks/index.md", *results]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, the results and the pictures beside them, as they are."""
    from mkdocs.structure.files import File

    for name, page in reference.PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=page()))
    for kind, name in reference.SCHEMAS.items():
        schema = json.dumps(schema_of(kind), indent=2)
        files.append(File.generated(config, f"reference/{name}", content=schema))
    contributing = str(DOCS.parent / "CONTRIBUTING.md")
    files.append(File.generated(config, "contributing.md", abs_src_path=contributing))
    for path in sorted(RESULTS.iterdir()):
        name = f"benchmarks/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Draw the figures of a page, and fill in the table of benchmarks."""
    if page.file.src_uri == "benchmarks/index.md":
        markdown = markdown.replace("{{ results }}", results_table())
    if page.file.src_uri == "contributing.md":  # its links start from the root of the repository
        markdown = markdown.replace("](docs/", "](")
    return FIGURE.sub(lambda found: figure(found[2], found[1]), markdown)


def results_table() -> str:
    """One line for each page of results: what it is, and the command that repeats it."""
    rows = ["| results | command |", "| --- | --- |"]
    for path in sorted(RESULTS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        title, command = TITLE.search(text), REPEAT.search(text)
        if title is None or command is None:
            raise ValueError(f"{path.name}: a page of results has a title and a '- command:' line")
        shown = command[1].replace("|", "\\|")
        rows.append(f"| [{title[1]}]({path.name}) | {shown} |")
    return "\n".join(rows)


def figure(name: str, told: str) -> str:
    """The picture that ``docs/figures/NAME.py`` draws, in the page, in the page's own colours.

    Args:
        name: of the script, whose ``draw()`` returns SVG.
        told: what the picture shows, for those who do not see it, and as its caption.
    """
    folder = str(DOCS / "figures")
    if folder not in sys.path:  # the scripts share a module
        sys.path.insert(0, folder)
    if name not in _drawn:
        draw: Callable[[], str] = runpy.run_path(f"{folder}/{name}.py")["draw"]
        _drawn[name] = draw()
    svg = _drawn[name].replace("<svg ", '<svg role="img" aria-label="' + told + '" ', 1)
    return f'<figure class="drawn">{svg}<figcaption>{told}</figcaption></figure>'
