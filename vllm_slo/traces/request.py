# SPDX-License-Identifier: Apache-2.0
"""One recorded request, whatever file it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

MOONCAKE_BLOCK_TOKENS: Final = 512
"""Prompt tokens that one of Mooncake's hash ids stands for (its trace's README)."""

End = Literal["completed", "declined", "aborted", "failed"]
Promise = Literal["in_time", "late", "none"]


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request where it was recorded. Times in seconds; None: not recorded.

    Attributes:
        end: ``completed``: the answer came to its end; ``declined``: refused for its objectives;
            ``aborted``: the client left; ``failed``: an error.
        promise: ``in_time``: its objectives were promised; ``late``: a later time was; ``none``.
        ttft_s: from arrival to the first token.
        tpot_s: per token, over the worst window of ten tokens (``core.attainment``), or the mean
            where the file has no more.
        e2e_s: from arrival to the last token.
        late_kept: whether a late promise was kept.
        attained: whether the server counted its objectives as kept.
    """

    end: End = "completed"
    promise: Promise | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    late_kept: bool | None = None
    attained: bool | None = None


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One recorded request; its token counts may be 0. None: not recorded.

    A trace has millions of them, so this is a `msgspec.Struct`, which is made twenty times faster
    than a frozen dataclass; ``msgspec.structs.replace`` changes fields of a copy.

    Attributes:
        at_s: when it arrived, in seconds: since 2000-01-01 UTC if the trace has dates, else since
            an origin of the trace (`times.is_dated` tells).
        prompt_tokens: of the whole prompt, earlier rounds of its session included.
        slo_class: its name; empty: none.
        tenant, model, session: names, as the server knew them.
        priority: as vLLM's ``priority``: lower is served first.
        ttft_ms, tpot_ms, e2e_ms: the objectives that held for it.
        slo_ratio: AdaServe's TPOT objective; None in the other formats.
        hash_ids: one for each ``block_tokens`` of the prompt. Requests with the same leading ids
            had the same beginning.
        served: what became of it; None: the file does not say.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    slo_class: str = ""
    tenant: str | None = None
    model: str | None = None
    session: str | None = None
    priority: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    slo_ratio: float | None = None
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    served: Served | None = None
