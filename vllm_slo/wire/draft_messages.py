# SPDX-License-Identifier: Apache-2.0
"""The wire format between a verifier and its draft servers, version 1.

Small models draft on other machines for one verifier (GoodSpeed, section III-A). The verifier sends
the accepted tokens and how many to draft next; the drafters send tokens and the probabilities with
which they drew them.

A message is one ZMQ frame between the verifier's ROUTER and a drafter's DEALER (see
`vllm_slo.wire.draft_socket`): a msgpack map with the name of the message under ``type``. Unknown
keys are ignored, missing ones and values of another type make the message malformed. Nothing is
pickled.

| message | from | fields |
| --- | --- | --- |
| ``hello`` | drafter | ``wire``, ``name``, ``model``, ``vocab_size``, ``vocabulary``, |
| | | ``max_model_len``, ``max_sessions`` |
| ``welcome`` | verifier | ``epoch`` |
| ``refused`` | verifier | ``reason`` |
| ``draft`` | verifier | ``epoch``, ``round``, ``deadline_s``, ``ended``, |
| | | ``asks``: ``session``, ``keep``, ``tokens``, ``grant``, ``temperature`` |
| ``drafted`` | drafter | ``epoch``, ``round``, ``draft_s``, ``lost``, |
| | | ``answers``: ``session``, ``at``, ``tokens``, ``probabilities`` |
| ``ping`` | verifier | |
| ``pong`` | drafter | |

1. A drafter says hello once per connection: the version of this format (``wire``), a ``name`` that
   no other has, its model, the number of tokens in its vocabulary and `vocabulary_digest` of them
   ("" where not known), how long a prefix with its draft may be, and how many sessions it holds. It
   is welcomed, or refused with a reason of one line and may try again after `RETRY_S`. A later
   drafter with the same name replaces the earlier one.
2. ``epoch`` is a new random number with each welcome. Both drop messages of another epoch, and a
   drafter then says hello again.
3. Sessions are numbers, never used twice in an epoch. An ask changes what the drafter holds of its
   session to ``prefix[:keep] + tokens``, a new session being empty, and asks for up to ``grant``
   tokens that go on from there, drawn at ``temperature``, 0 being greedy. Asks take effect in the
   order they are sent, answered or not, so the verifier knows what the drafter holds. ``ended``
   sessions are let go before that.
4. ``round`` grows from one ``draft`` to the next. A drafter works on the newest that has asks, and
   answers no other. It answers within ``deadline_s`` seconds of receipt with what it has by then;
   sessions without tokens may be absent. ``at`` is the length of the prefix that an answer goes on
   from, ``draft_s`` the time spent. ``lost`` are sessions that it does not hold, or had no room
   for: their next ask has all tokens and a new number. A ``draft`` without asks is not answered.
5. ``probabilities`` are those with which the drafter drew its tokens; of greedy ones, the model's.
6. A ``ping`` is answered at once with a ``pong``. So a suspended drafter is found to work again.

A later version may change everything but ``type`` and ``wire`` of ``hello``, and ``refused``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from vllm_slo.errors import VllmSLOError

WIRE: Final = 1
"""Version of the format."""
MAX_GRANT: Final = 64
"""Tokens of one draft."""
MAX_SESSIONS: Final = 1024
"""Sessions of one drafter, and asks or answers of one message."""
MAX_ASKED_TOKENS: Final = 1 << 20
"""Tokens in the asks of one message; further ones wait for the next round."""
MAX_DRAFT_BYTES: Final = 8 << 20
"""Size of a message to a drafter; messages within the other bounds are smaller."""
MAX_ANSWER_BYTES: Final = 1 << 20
"""Size of a message to the verifier; messages within the other bounds are smaller."""
MAX_NAME: Final = 128
"""Characters of a drafter's name."""
NAME_PATTERN: Final = r"^[A-Za-z0-9._:@/-]+\Z"
"""A drafter's name becomes a label of metrics."""
RETRY_S: Final = 10.0
"""Seconds after which a drafter that was refused may say hello again."""
_MAX_TEXT: Final = 1024
_INT32_MAX: Final = 2**31 - 1

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Size: TypeAlias = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
Text: TypeAlias = Annotated[str, Meta(max_length=_MAX_TEXT)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=NAME_PATTERN)]


class WireError(VllmSLOError, ValueError):
    """Bytes that are not a message of this format."""


class WireVersionError(WireError):
    """A hello of another version.

    Attributes:
        wire: the version.
    """

    def __init__(self, wire: int) -> None:
        super().__init__(f"wire version {wire}, not {WIRE}")
        self.wire = wire


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    """Any message."""


class Hello(_Message, frozen=True):
    """A drafter introduces itself."""

    wire: int
    name: Name
    model: Text
    vocab_size: Size
    vocabulary: Text
    max_model_len: Size
    max_sessions: Annotated[int, Meta(ge=1, le=MAX_SESSIONS)]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The draft of one session. The verifier checks its numbers."""

    session: int
    at: int
    tokens: Annotated[list[int], Meta(max_length=MAX_GRANT)]
    probabilities: Annotated[list[float], Meta(max_length=MAX_GRANT)]


class Drafted(_Message, frozen=True):
    """A drafter's answers to one round."""

    epoch: int
    round: int
    answers: Annotated[list[Answer], Meta(max_length=MAX_SESSIONS)]
    lost: Annotated[list[int], Meta(max_length=MAX_SESSIONS)]
    draft_s: float


class Pong(_Message, frozen=True):
    """A drafter is alive."""


class Welcome(_Message, frozen=True):
    """The verifier admits a drafter, which forgets all earlier sessions."""

    epoch: Count


class Refused(_Message, frozen=True):
    """The verifier does not admit this drafter."""

    reason: str


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One session's prefix, as a change of what the drafter holds, and what to draft after it."""

    session: Count
    keep: Count
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_ASKED_TOKENS)]
    grant: Annotated[int, Meta(ge=1, le=MAX_GRANT)]
    temperature: Annotated[float, Meta(ge=0.0)]


class Draft(_Message, frozen=True):
    """One round of asks."""

    epoch: Count
    round: Count
    deadline_s: Annotated[float, Meta(ge=0.0)]
    asks: Annotated[list[Ask], Meta(max_length=MAX_SESSIONS)]
    ended: Annotated[list[Count], Meta(max_length=MAX_SESSIONS)]


class Ping(_Message, frozen=True):
    """Is the drafter alive?"""


class _Greeting(msgspec.Struct, frozen=True, tag_field="type", tag="hello"):
    """The part that the hello of every version has."""

    wire: int


FromDrafter: TypeAlias = Hello | Drafted | Pong
FromVerifier: TypeAlias = Welcome | Refused | Draft | Ping

_encoder = msgspec.msgpack.Encoder()
_of_drafter: msgspec.msgpack.Decoder[FromDrafter] = msgspec.msgpack.Decoder(FromDrafter)
_of_verifier: msgspec.msgpack.Decoder[FromVerifier] = msgspec.msgpack.Decoder(FromVerifier)
_of_anybody = msgspec.msgpack.Decoder(_Greeting)
# msgspec raises other errors than its own for text that is not UTF-8 and for deep nesting.
_BROKEN: Final = (msgspec.MsgspecError, ValueError, RecursionError)


def encode(message: FromDrafter | FromVerifier) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def from_drafter(data: bytes) -> FromDrafter:
    """The message that a drafter sent.

    Raises:
        WireVersionError: it is a hello of another version.
        WireError: it is not a message, one of the verifier's, or out of bounds.
    """
    try:
        message = _of_drafter.decode(data)
    except _BROKEN as error:
        _check_version(data)
        raise WireError(_one_line(error)) from None
    if isinstance(message, Hello) and message.wire != WIRE:
        raise WireVersionError(message.wire)
    return message


def from_verifier(data: bytes) -> FromVerifier:
    """The message that a verifier sent.

    Raises:
        WireError: it is not a message, one of a drafter's, or out of bounds.
    """
    try:
        return _of_verifier.decode(data)
    except _BROKEN as error:
        raise WireError(_one_line(error)) from None


def _check_version(data: bytes) -> None:
    try:
        wire = _of_anybody.decode(data).wire
    except _BROKEN:
        return
    if wire != WIRE:
        raise WireVersionError(wire)


def _one_line(error: Exception) -> str:
    return f"not a message of wire version {WIRE}: {' '.join(str(error).split())[:200]}"


def vocabulary_digest(token_ids: Mapping[str, int]) -> str:
    """A digest of every token and its id: equal vocabularies have equal digests.

    Args:
        token_ids: id of each token; empty: not known.

    Returns:
        64 hexadecimal digits; "" where the ids are not known.
    """
    if not token_ids:
        return ""
    ordered = sorted(token_ids.items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(_encoder.encode(ordered)).hexdigest()
