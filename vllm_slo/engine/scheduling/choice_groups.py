# SPDX-License-Identifier: Apache-2.0
"""Requests that are the choices of one HTTP request: declined together or not at all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Final

from vllm_slo.engine.scheduling.slo_request import SLORequest
from vllm_slo.slo.verdicts import Declined

REMEMBERED: Final = 1_024
"""Groups whose answer is remembered for members still on their way."""


class ChoiceGroups:
    """The live groups of one engine, by the names that the API server gave them."""

    def __init__(self) -> None:
        self._members: dict[str, list[SLORequest]] = {}
        # None: a choice has had a token and ended, so no other one is declined.
        self._answers: OrderedDict[str, Declined | None] = OrderedDict()

    def begin(self, tracked: SLORequest) -> Declined | None:
        """A member has arrived. Returns the answer of its group if that is declined already."""
        if tracked.group is None:
            return None
        if (declined := self._answers.get(tracked.group)) is not None:
            return declined
        self._members.setdefault(tracked.group, []).append(tracked)
        return None

    def end(self, tracked: SLORequest) -> None:
        """A request has ended."""
        if tracked.first_token_s is not None:
            self._remember(tracked, None)
        members = self._members.get(tracked.group or "", [])
        if tracked in members:
            members.remove(tracked)
            if not members:
                del self._members[str(tracked.group)]

    def retain(self, live: Container[str]) -> None:
        """Forget the members that are not live."""
        for group, members in list(self._members.items()):
            members[:] = [member for member in members if member.request.request_id in live]
            if not members:
                del self._members[group]

    def refused_with(
        self, refused: Mapping[str, str], tracked: Mapping[str, SLORequest]
    ) -> dict[str, str]:
        """Further requests to decline because another choice of their group is refused: request id
        -> id of that choice.

        If a choice of the group has a token already, none of its choices is declined any more. One
        that cannot be promised is served without a promise, and is changed to ask for that.
        """
        others: dict[str, str] = {}
        for name in refused:
            one = tracked[name]
            if one.group is None or one.slo.on_unattainable != "decline":
                continue
            members = self._members[one.group]
            if self._has_token(one.group):
                one.slo = replace(one.slo, on_unattainable="best_effort")
                continue
            ids = (member.request.request_id for member in members)
            others |= {other: name for other in ids if other not in refused}
        return others

    def to_decline_with(self, tracked: SLORequest) -> list[SLORequest]:
        """A request that is to be declined and the other choices of its group; none where one of
        them has a token already."""
        if tracked.group is None:
            return [tracked]
        return [] if self._has_token(tracked.group) else list(self._members[tracked.group])

    def _has_token(self, group: str) -> bool:
        """Whether a choice of a group has a token, or had one and has ended."""
        members = self._members[group]
        return group in self._answers or any(one.first_token_s is not None for one in members)

    def declined(self, tracked: SLORequest, answer: Declined) -> None:
        """A choice is declined, and so are those of its group that are still to arrive."""
        self._remember(tracked, answer)

    def _remember(self, tracked: SLORequest, answer: Declined | None) -> None:
        if tracked.group is not None:
            self._answers[tracked.group] = answer
            while len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
