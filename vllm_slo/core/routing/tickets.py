# SPDX-License-Identifier: Apache-2.0
"""The mark by which a front and a replica both know a request."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_TICKET: Final = re.compile(r"(?:([a-z0-9]{0,16}):)?([1-9][0-9]{0,17})")


class Ticket(NamedTuple):
    """The mark of one request. As text it is ``FRONT:NUMBER``, or ``NUMBER`` without a name.

    Attributes:
        front: name of the front that sends the request, ``[a-z0-9]{0,16}``. Several fronts may send
            to one replica; each has a name of its own.
        number: grows with every request that this front sends to this replica, from 1.
    """

    front: str
    number: int

    def __str__(self) -> str:
        return f"{self.front}:{self.number}" if self.front else str(self.number)

    @classmethod
    def parse(cls, text: str) -> Ticket:
        """Inverse of `str`.

        Raises:
            ValueError: the text is no ticket.
        """
        found = _TICKET.fullmatch(text)
        if found is None:
            raise ValueError(f"not a ticket: {text[:80]!r}")
        return cls(found[1] or "", int(found[2]))
