# SPDX-License-Identifier: Apache-2.0
"""The address of a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The address of a replica: its name, the URL of its private port, and its token."""

    name: str
    url: str
    token: str

    @classmethod
    def from_json(cls, given: Any) -> ReplicaSpec:
        """One entry of the parent's list.

        Raises:
            ValueError: the entry is not valid.
        """
        try:
            spec = cls(given["name"], given["url"].rstrip("/"), given["token"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a replica: {error!r}") from error
        if not all(isinstance(text, str) and text for text in (spec.name, spec.url, spec.token)):
            raise ValueError("not a replica: name, url and token must be text")
        return spec

    def __repr__(self) -> str:
        return f"ReplicaSpec({self.name!r}, {self.url!r})"  # without the token
