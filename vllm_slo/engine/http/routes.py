# SPDX-License-Identifier: Apache-2.0
"""What each of vLLM's POST routes does with an SLO.

The middleware does not need this list: objectives go through the gate to the engine, whichever
route calls it. The list is for the documentation, and a test compares it with vLLM's own routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["generates", "renders", "pools", "other"]


class RouteInfo(NamedTuple):
    """What a route does with an SLO.

    Attributes:
        kind: ``generates``: objectives are honoured, whatever carries them, and a decline has the
            error shape of the API. ``renders``: the field ``slo`` becomes sampling parameters of
            the rendered request. ``pools``: an SLO is a 400. ``other``: no request of the engine.
        stream: whether answers may be streams.
        note: further remarks, or "".
    """

    kind: Kind
    stream: bool = False
    note: str = ""


_FORM: Final = "the body is a form: use headers, or `slo_*` keys in its field `vllm_xargs`"
_PARTS: Final = "every request that it makes of the engine has the SLO"
_POOLS: Final = RouteInfo("pools")
_RENDERS: Final = RouteInfo("renders")
_OTHER: Final = RouteInfo("other")

ROUTES: Final[Mapping[str, RouteInfo]] = {
    "/v1/completions": RouteInfo("generates", stream=True),
    "/v1/chat/completions": RouteInfo("generates", stream=True),
    "/v1/chat/completions/batch": RouteInfo("generates", note="all conversations or none"),
    "/v1/responses": RouteInfo(
        "generates", stream=True, note="a background response that is declined has failed"
    ),
    "/v1/messages": RouteInfo("generates", stream=True, note="errors have Anthropic's shape"),
    "/invocations": RouteInfo("generates", stream=True, note="as the route whose body it has"),
    "/inference/v1/generate": RouteInfo(
        "generates", stream=True, note="also by `slo_*` keys in `sampling_params.extra_args`"
    ),
    "/v1/audio/transcriptions": RouteInfo("generates", stream=True, note=_FORM),
    "/v1/audio/translations": RouteInfo("generates", stream=True, note=_FORM),
    "/v1/systemone": RouteInfo("generates", note=_PARTS),
    "/generative_scoring": RouteInfo("generates", note=_PARTS),
    "/cohere/v2/chat": RouteInfo("generates", stream=True),
    "/v1/chat/completions/render": _RENDERS,
    "/v1/completions/render": _RENDERS,
    "/v1/messages/render": _RENDERS,
    "/v1/responses/render": _RENDERS,
    "/cohere/v2/chat/render": _RENDERS,
    "/v1/embeddings": _POOLS,
    "/v2/embed": _POOLS,
    "/pooling": _POOLS,
    "/classify": _POOLS,
    "/score": _POOLS,
    "/v1/score": _POOLS,
    "/rerank": _POOLS,
    "/v1/rerank": _POOLS,
    "/v2/rerank": _POOLS,
    **dict.fromkeys(
        [
            *("/tokenize", "/detokenize", "/ping", "/v1/messages/count_tokens"),
            *("/v1/chat/completions/derender", "/v1/completions/derender"),
            *("/v1/responses/{response_id}/cancel", "/inference/v1/abort_requests"),
            *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters"),
            *("/start_profile", "/stop_profile", "/collective_rpc", "/abort_requests"),
            *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
            *("/sleep", "/wake_up", "/release_kv_cache_memory", "/pause", "/resume"),
            *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/fault_tolerance/apply"),
            *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
            *("/start_weight_update", "/start_draft_weight_update", "/update_weights"),
            *("/finish_weight_update", "/update_weight_version", "/weight_checker"),
        ],
        _OTHER,
    ),
}
