# SPDX-License-Identifier: Apache-2.0
"""Prompts that are made here, the same on every machine: the beginnings of Python modules.

The built-in models know Python's library, so their drafts are often right after such text.
"""

from __future__ import annotations

import random
from typing import Final

NAMES: Final = """
name value key path line data text result item node index count size start end mode flag parent
child source target buffer stream header body field record entry token state level limit offset
"""
VERBS: Final = """
get set read write open close parse format find make check update remove copy load save send
handle convert split join encode decode register
"""
NOUNS: Final = """
file string list dictionary object module message connection request response table parser
reader writer handler cache queue thread process socket directory attribute class function
"""
ERRORS: Final = ("ValueError", "TypeError", "KeyError", "OSError", "RuntimeError")
MODULES: Final = ("os", "sys", "re", "io", "time", "types", "functools", "collections")


def made_prompts(count: int, seed: int = 0) -> list[str]:
    """So many different texts of about 200 to 420 characters, all of a seed alike."""
    rng = random.Random(seed)
    return [_module(rng)[: rng.randint(200, 420)] for _ in range(count)]


def _module(rng: random.Random) -> str:
    """A module's docstring and imports, then functions and methods of a class."""
    noun, other = rng.sample(NOUNS.split(), 2)
    modules = sorted(rng.sample(MODULES, rng.randint(1, 3)))
    lines = [f'"""{rng.choice(VERBS.split()).title()} a {noun} from a {other}."""', ""]
    lines += [f"import {module}" for module in modules]
    lines += ["", f"__all__ = ['{rng.choice(VERBS.split())}_{noun}']", ""]
    if rng.random() < 0.5:
        lines += [f"class {noun.title()}{other.title()}:", *_function(rng, "    ", "self, ")]
    for _ in range(4):
        lines += ["", *_function(rng, "", "")]
    first = rng.randrange(0, 6)  # not every text begins alike
    return "\n".join(lines[first:]) + "\n"


def _function(rng: random.Random, indent: str, receiver: str) -> list[str]:
    one, two, three = rng.sample(NAMES.split(), 3)
    verb, noun = rng.choice(VERBS.split()), rng.choice(NOUNS.split())
    error = rng.choice(ERRORS)
    place = "self." if receiver else ""
    bodies = (
        [f"if {one} is None:", f"    {one} = {place}{two}", f"return {one}"],
        [f"for {three} in {one}:", f"    if {three} not in {two}:", "        continue"],
        [f"if not isinstance({one}, str):", f"    raise {error}('{one} must be a str')"],
        ["try:", f"    {three} = {place}{verb}({one})", f"except {error}:", "    pass"],
        [f"{place}{three} = len({one}) + {rng.randint(0, 64)}", f"return {place}{three}"],
    )
    lines = [
        f"def {verb}_{noun}({receiver}{one}, {two}=None):",
        f'    """{verb.title()} the {noun} and return its {three}."""',
        *("    " + line for line in rng.choice(bodies)),
    ]
    return [indent + line for line in lines]
