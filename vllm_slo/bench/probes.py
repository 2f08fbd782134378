# SPDX-License-Identifier: Apache-2.0
"""What lone requests take on a server, measured without objectives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_slo.bench.client import ClientOptions, Sender, SentRequest, probe_requests, send_probes
from vllm_slo.bench.endpoint import ServerInfo, ServerTarget, with_client
from vllm_slo.bench.planned import Workload
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.core.attainment import mean_tpot_s

if TYPE_CHECKING:
    import openai


class _Probes:
    """Sends probes of token ids to one server."""

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        target: ServerTarget,
        info: ServerInfo,
        options: ClientOptions,
    ) -> None:
        self._sender = Sender(client, target, info, options)
        self._options = options

    async def send(
        self, lengths: Sequence[tuple[int, int]], prefix: str, *, together: bool = False
    ) -> list[SentRequest]:
        """Send requests of these (prompt, output) lengths; BenchError if one fails."""
        requests = probe_requests(lengths, prefix)
        source = Workload("probe", self._options.seed, 1.0, "probe", tuple(requests))
        prompts = [source.prompt_ids(r, self._options.vocab_size) for r in requests]
        return await send_probes(self._sender, requests, prompts, together)


def measure_zero_load(
    target: ServerTarget,
    max_context: int,
    options: ClientOptions | None = None,
    repeats: int = 5,
    output_tokens: int = 31,
) -> ZeroLoad:
    """Latency of a lone request, without an SLO.

    It is the median TTFT by prompt length (16, 64, ... ``max_context``), and the median TPOT over
    answers of ``output_tokens``.

    Raises:
        BenchError: it cannot be measured.
    """
    options = options or ClientOptions()
    top = max(1, max_context - max(output_tokens, 2))
    lengths = sorted({min(n, top) for n in (16, 64, 256, 1024, 4096, 16384, top)})

    async def work(client: openai.AsyncOpenAI, info: ServerInfo) -> ZeroLoad:
        probes = _Probes(client, target, info, options)
        await probes.send([(n, 2) for n in lengths], "zero-warmup")
        sent = await probes.send([(n, 1) for n in lengths for _ in range(repeats)], "zero-ttft")
        ttfts = [r.record.ttft_s or 0.0 for r in sent]
        medians = [
            float(np.median(ttfts[i * repeats : (i + 1) * repeats])) for i in range(len(lengths))
        ]
        rising = np.maximum.accumulate(medians)  # a longer prompt is only faster by noise
        sent = await probes.send([(lengths[0], output_tokens)] * repeats, "zero-tpot")
        tpots = [mean_tpot_s(r.record.token_times_s) or 0.0 for r in sent]
        points = tuple((n, float(s)) for n, s in zip(lengths, rising, strict=True))
        return ZeroLoad(points, float(np.median(tpots)), target.name)

    return asyncio.run(with_client(target, work))


def measure_step(
    target: ServerTarget,
    together: int = 1,
    options: ClientOptions | None = None,
    repeats: int = 3,
    output_tokens: int = 31,
) -> float:
    """Seconds of a step in which ``together`` requests decode: the median of their TPOTs.

    No SLO is sent.

    Raises:
        BenchError: it cannot be measured.
    """
    options = options or ClientOptions()

    async def work(client: openai.AsyncOpenAI, info: ServerInfo) -> float:
        probes = _Probes(client, target, info, options)
        tpots: list[float] = []
        for repeat in range(repeats):
            lengths = [(16, output_tokens)] * together
            sent = await probes.send(lengths, f"step-{repeat}", together=True)
            tpots += [mean_tpot_s(r.record.token_times_s) or 0.0 for r in sent]
        return float(np.median(tpots))

    return asyncio.run(with_client(target, work))
