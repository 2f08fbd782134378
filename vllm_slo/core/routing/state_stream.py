# SPDX-License-Identifier: Apache-2.0
"""States of a replica as lines of JSON, of which each holds what changed since the line before.

A line is an object:

- ``n``: number of the line, one more than that of the line before.
- ``whole``: true where nothing is to be known from before; the first line of a stream is whole.
- ``age_s``: seconds since the newest state was taken.
- ``draining``, ``dead``: whether the replica is about to leave, and whether its engine is dead;
  left out while they do not change.
- ``state``: the fields of `ReplicaState` that changed; null: there is no state. It is left out
  while nothing changes.
- ``live``: tickets of all requests that are at the replica; where a stream begins, and in place of
  events that a stalled reader did not take.
- ``events``: what became of requests since the line before; left out if nothing did. See
  `engine.http.state_feed`.

Most fields are written as they are. ``committed`` is key -> promise, or null for one that is over;
``tickets`` is front -> [new ones, those that are over]; ``lengths`` is class -> points, or null;
``decoding`` is a list of [TPOT, requests]. Infinite times are null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, NamedTuple

from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import Demand
from vllm_slo.errors import ProfileError

_OWN_FORM: Final = ("model", "committed", "decoding", "tickets", "lengths")
_AS_THEY_ARE: Final = tuple(
    each.name for each in fields(ReplicaState) if each.name not in _OWN_FORM
)
_PLAIN: Final = frozenset(_AS_THEY_ARE) - {"block_sizes"}
"""Fields that are written and read as they are."""

Event = Sequence[Any]
"""Name of the event, ticket of the request, and more that depends on the name."""

_Row = tuple[float | None, int, float | None, int, float, int]
"""A promise without its id: deadline, prefill tokens, TPOT, blocks, value, context tokens."""


class StateEncoder:
    """Writes the lines of one stream.

    Promises are called by short keys: an id may be of any length, and no other machine needs it.

    Args:
        first: number of the first line. A reader takes no line for one of this stream that belongs
            to another, if streams begin far apart.
    """

    def __init__(self, first: int = 0) -> None:
        self._number = first
        self._is_whole = True
        self._state: ReplicaState | None = None
        self._flags: dict[str, bool] = {}
        self._keys: dict[str, str] = {}
        self._rows: dict[str, _Row] = {}
        self._given = 0

    def begin_anew(self) -> None:
        """The next line is whole. Promises keep their keys."""
        self._is_whole, self._state = True, None
        self._flags = {}
        self._rows = {}

    def line(
        self,
        state: ReplicaState | None,
        *,
        age_s: float = 0.0,
        draining: bool = False,
        dead: bool = False,
        events: Sequence[Event] = (),
        live: Collection[str] | None = None,
    ) -> bytes:
        """The next line, with its line feed.

        Args:
            state: the newest state; None: there is none.
            age_s: seconds since it was taken.
            events: since the line before.
            live: tickets of all requests that are here; None: not said.
        """
        message: dict[str, Any] = {"n": self._number, "age_s": round(age_s, 6)}
        flags = {"draining": draining, "dead": dead}
        message |= {name: on for name, on in flags.items() if self._flags.get(name) is not on}
        if self._is_whole:
            message["whole"] = True
        if self._is_whole or state is not self._state:
            message["state"] = None if state is None else self._changes(state)
        if events:
            message["events"] = events
        if live is not None:
            message["live"] = sorted(live)
        self._number += 1
        self._is_whole, self._state, self._flags = False, state, flags
        if state is None:
            self._rows = {}
        return json.dumps(message, separators=(",", ":")).encode() + b"\n"

    def _changes(self, state: ReplicaState) -> dict[str, Any]:
        """What differs from the state of the line before."""
        before = self._state
        old_tickets: Mapping[str, frozenset[int]] = {}
        old_lengths: Mapping[str, tuple[int, ...]] = {}
        if before is not None:
            old_tickets, old_lengths = before.tickets, before.lengths
        changes: dict[str, Any] = {}
        for name in _AS_THEY_ARE:
            now = getattr(state, name)
            if before is None or now != getattr(before, name):
                changes[name] = now
        if before is None or state.model != before.model:
            changes["model"] = state.model.to_dict()
        if before is None or state.decoding != before.decoding:
            changes["decoding"] = [[_finite(tpot_s), n] for tpot_s, n in state.decoding.items()]
        changed: dict[str, Mapping[str, object]] = {
            "committed": self._changed_promises(state),
            "tickets": _changed_tickets(old_tickets, state.tickets),
            "lengths": _difference(old_lengths, state.lengths),
        }
        return changes | {name: mapping for name, mapping in changed.items() if mapping}

    def _changed_promises(self, state: ReplicaState) -> dict[str, _Row | None]:
        keys: dict[str, str] = {}
        rows: dict[str, _Row] = {}
        for d in state.committed:
            key = self._keys.get(d.request_id)
            if key is None:
                self._given += 1
                key = str(self._given)
            keys[d.request_id] = key
            due_s, tpot_s = _finite(d.deadline_s), _finite(d.tpot_s)
            rows[key] = (due_s, d.prefill_tokens, tpot_s, d.blocks, d.value, d.context_tokens)
        changed = _difference(self._rows, rows)
        self._keys, self._rows = keys, rows
        return changed


class StateLine(NamedTuple):
    """What is known after a line.

    Attributes:
        state: the newest state; None: there is none.
        is_new: whether this line brought it.
        age_s: seconds since it was taken, when the line was written.
        draining: whether the replica is about to leave.
        dead: whether its engine is dead.
        problem: why the states of this stream cannot be read, or None.
        events: of requests, since the line before.
        live: tickets of all requests that are at the replica; None: this line does not say.
    """

    state: ReplicaState | None
    is_new: bool
    age_s: float
    draining: bool
    dead: bool
    problem: str | None
    events: Sequence[Event] = ()
    live: Collection[str] | None = None


class StateDecoder:
    """Reads the lines of a stream; a whole line begins the next stream.

    Unknown keys are ignored: a newer replica may send more. A promise is called by its key.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._draining = self._dead = False
        self._problem: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._state: ReplicaState | None = None
        self._fields: dict[str, Any] = {}
        self._promises: dict[str, Demand] = {}

    def read(self, line: bytes | str) -> StateLine:
        """Take in one line.

        A whole line whose state cannot be read is the ``problem`` of its stream: a newer replica
        may write what is not understood here.

        Raises:
            ValueError: this is no such line, or it says what changed since a line that was not
                read. A whole line is needed then: begin another stream.
        """
        content = _object_of(line)
        number, whole = content.get("n"), content.get("whole") is True
        if type(number) is not int:
            raise ValueError("a line of a state stream has no number")
        if whole:
            self._begin_anew()
        elif self._number is None or number != self._number + 1:
            self._number = None
            raise ValueError(f"line {number} of a state stream does not follow the one before")
        self._number = number
        self._draining = bool(content.get("draining", self._draining))
        self._dead = bool(content.get("dead", self._dead))
        is_new = "state" in content and self._problem is None
        if is_new:
            try:
                self._apply(content["state"])
            except (KeyError, TypeError, AttributeError, ValueError, ProfileError) as error:
                self._forget()
                if not whole:
                    self._number = None
                    raise ValueError(f"not the state of a replica: {error!r}") from error
                self._problem, is_new = f"not the state of a replica: {error!r}", False
        age_s = float(content.get("age_s") or 0.0)
        return StateLine(
            self._state,
            is_new,
            age_s,
            self._draining,
            self._dead,
            self._problem,
            content.get("events", ()),
            content.get("live"),
        )

    def _apply(self, changes: Mapping[str, Any] | None) -> None:
        if changes is None:
            self._forget()
            return
        known = self._fields
        for name, value in changes.items():
            if name in _PLAIN:
                known[name] = value
            elif name == "committed":
                known[name] = self._promised(value)
            elif name == "tickets":
                known[name] = _tickets(known.get(name, {}), value)
            elif name == "decoding":
                known[name] = {_infinite(tpot_s): count for tpot_s, count in value}
            elif name == "model":
                known[name] = StepTimeModel.from_dict(value)
            elif name == "block_sizes":
                known[name] = tuple(value)
            elif name == "lengths":
                merged = {**known.get(name, {}), **value}
                known[name] = {label: tuple(p) for label, p in merged.items() if p is not None}
        self._state = ReplicaState(**known)

    def _promised(self, changes: Mapping[str, _Row | None]) -> tuple[Demand, ...]:
        promises = self._promises
        for key, row in changes.items():
            if row is None:
                del promises[key]
                continue
            due_s, tokens, tpot_s, blocks, value, context = row
            promises[key] = Demand(
                key, _infinite(due_s), tokens, _infinite(tpot_s), blocks, value, context
            )
        return tuple(promises.values())


def _object_of(line: bytes | str) -> dict[str, Any]:
    """Raises ValueError unless the line is an object."""
    try:
        content = json.loads(line if isinstance(line, str) else line.decode())
    except RecursionError as error:
        raise ValueError(f"not a line of a state stream: {error!r}") from error
    if not isinstance(content, dict):
        raise ValueError("a line of a state stream is not an object")
    return content


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are new or changed, and None for those that are gone."""
    changed = {key: value for key, value in now.items() if before.get(key) != value}
    gone = before.keys() - now.keys()
    return changed | dict.fromkeys(gone)


def _changed_tickets(
    before: Mapping[str, frozenset[int]], now: Mapping[str, frozenset[int]]
) -> dict[str, tuple[list[int], list[int]]]:
    changed = {}
    for front in before.keys() | now.keys():
        old, new = before.get(front, frozenset()), now.get(front, frozenset())
        if old != new:
            changed[front] = sorted(new - old), sorted(old - new)
    return changed


def _tickets(
    before: Mapping[str, frozenset[int]], changes: Mapping[str, tuple[list[int], list[int]]]
) -> dict[str, frozenset[int]]:
    now = dict(before)
    for front, (new, over) in changes.items():
        left = now.pop(front, frozenset())
        left = left.difference(over) if over else left
        left = left.union(new) if new else left
        if left:
            now[front] = left
    return now


def _finite(time_s: float) -> float | None:
    return time_s if math.isfinite(time_s) else None


def _infinite(time_s: float | None) -> float:
    return math.inf if time_s is None else time_s
