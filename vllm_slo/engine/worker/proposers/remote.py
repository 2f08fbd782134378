# SPDX-License-Identifier: Apache-2.0
"""Chains of drafts from draft servers (GoodSpeed, section III-A): the worker's side.

After each step the draft servers get the committed tokens, and are asked for as many tokens of each
request as the scheduler granted. The drafts that arrive by the deadline go to the scheduler as
trees of one path. The link (`vllm_slo.engine.speculation.draft_link`) works during steps only: a
draft server that connects while the engine is idle is welcomed in the next step.

Drafts are greedy, whatever the sampling parameters of a request. Under exact match a draft x is
accepted with probability p(x), so the likeliest token is the best guess.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_slo.core.arrays import Parents
from vllm_slo.core.speculation.draft_sessions import DraftAsk, DraftTokens
from vllm_slo.engine.compat.runner import RunnerBatch
from vllm_slo.engine.speculation import messages
from vllm_slo.engine.speculation.draft_check import token_ids
from vllm_slo.engine.speculation.draft_link import DraftLink, Exchange
from vllm_slo.engine.speculation.messages import DraftingReport, DraftTrees, Grant
from vllm_slo.engine.speculation.servers_report import (
    DrafterRound,
    DrafterView,
    Fault,
    ServersReport,
)
from vllm_slo.engine.telemetry.faults import Reported
from vllm_slo.wire.draft_messages import vocabulary_digest
from vllm_slo.wire.draft_socket import TOKEN_FILE_FLAG, read_token

logger = init_logger(__name__)


class RemoteProposer:
    """Has draft servers draft; named by ``--speculative-config``.

    Of the workers of one engine only the first listens: vLLM takes its drafts.

    Args:
        vllm_config: of the engine; the address and the token are in its ``additional_config``.

    Attributes:
        layer_names: attention layers of drafts: none.
        report: on drafting since it was last taken.

    Raises:
        ConfigError: some of the flags that draft servers need are missing.
    """

    layer_names: frozenset[str] = frozenset()

    def __init__(self, vllm_config: VllmConfig) -> None:
        config = messages.speculation_of(vllm_config)
        assert config is not None  # checked before the model is loaded
        self.vllm_config = vllm_config
        self.config = config
        self.report = DraftingReport()
        self._link: DraftLink | None = None
        self._faults = Reported(
            "The step has no drafts of draft servers, and all of them connect anew."
        )
        self._reported: Counter[tuple[str, str]] = Counter()

    # Life of the link.

    def load_model(self, _target: Any) -> None:
        """Listen for draft servers.

        Raises:
            ConfigError: the address or the token cannot be used.
        """
        if get_tp_group().rank_in_group or self.config.draft_servers is None:
            return
        model = self.vllm_config.model_config
        link = DraftLink(
            self.config.draft_servers,
            read_token(self.config.draft_token_file, TOKEN_FILE_FLAG),
            vocab_size=model.get_vocab_size(),
            vocabulary=vocabulary_digest(token_ids(model, model.tokenizer)),
        )
        link.bind()
        self._link = link
        logger.info("vllm-slo: draft servers may connect to %s", link.address)

    def close(self) -> None:
        """Stop listening."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def bind(self, batch: RunnerBatch) -> None:
        """Take the runner's batch and KV cache, once they are there. Chains need no scratch."""
        self.batch = batch
        self.blocks_per_row = messages.scratch_blocks_per_row(self.config, batch.block_size)
        self.scratch = batch.num_blocks

    def profile(self) -> None:
        """Nothing to do: no model drafts here."""

    def warm_up(self) -> None:
        """Nothing to do: no model drafts here."""

    def begin_step(self, _output: SchedulerOutput) -> None:
        """Nothing to do: this worker has no KV cache of drafts."""

    def compare_with_target(self, _logits: Tensor, _rows: Mapping[str, int]) -> None:
        """Nothing to do: the distributions of draft servers are not known here."""

    def take_report(self) -> DraftingReport:
        """The report on drafting since the last call."""
        report, self.report = self.report, DraftingReport()
        return report

    # One step.

    def propose(self, output: SchedulerOutput, sampled: list[list[int]]) -> DraftTrees:
        """Chains for the requests that have got tokens in a step, as long as granted.

        Args:
            output: the step.
            sampled: new tokens of each request, by row.
        """
        if self._link is None:
            return DraftTrees.none()
        began_s = time.perf_counter()
        drafts = self._drafted(self._link, output, sampled)
        self.report.seconds += time.perf_counter() - began_s
        self.report.failed += self._faults.take()
        return drafts

    def _drafted(
        self, link: DraftLink, output: SchedulerOutput, sampled: list[list[int]]
    ) -> DraftTrees:
        with self._faults:
            return self._exchange(link, output, sampled)
        link.begin_anew()
        return DraftTrees.none()

    def _exchange(
        self, link: DraftLink, output: SchedulerOutput, sampled: list[list[int]]
    ) -> DraftTrees:
        step = messages.of(output)
        asks = self._asks(step.grants, sampled)
        done = link.exchange(asks, output.finished_req_ids, deadline_s=step.deadline_s)
        drafters = link.drafters
        self.report.servers = ServersReport(
            drafters=tuple(drafters),
            rounds=_rounds(asks, done),
            dropped=self._new_faults(drafters, link.faults),
            send_s=done.send_s,
            receive_s=done.receive_s,
        )
        return _as_trees(done.answers)

    def _asks(
        self, grants: Mapping[str, Grant], sampled: list[list[int]]
    ) -> dict[str, dict[str, DraftAsk]]:
        """Drafter -> request id -> ask, which has all committed tokens of the request."""
        asks: dict[str, dict[str, DraftAsk]] = {}
        for name, grant in grants.items():
            index = self.batch.index_of.get(name)
            if index is not None and sampled[index]:
                prefix = self.batch.token_ids[index, : self.batch.num_tokens[index]]
                asks.setdefault(grant.drafter, {})[name] = DraftAsk(prefix, grant.tokens)
        return asks

    def _new_faults(
        self, drafters: list[DrafterView], all_faults: Mapping[Fault, int]
    ) -> tuple[tuple[str, str, int], ...]:
        """(drafter, reason, times) of everything that was dropped since the last report.

        Faults of unknown senders have "" as the drafter.
        """
        total = Counter(
            {(d.name, str(why)): count for d in drafters for why, count in d.faults.items()}
        )
        total.update({("", str(why)): count for why, count in all_faults.items()})
        new = total - self._reported
        self._reported = total | self._reported
        for (name, why), count in list(new.items()):
            if name:
                new["", why] -= count
        return tuple((name, why, count) for (name, why), count in new.items() if count > 0)


def _rounds(asks: Mapping[str, Mapping[str, DraftAsk]], done: Exchange) -> tuple[DrafterRound, ...]:
    """What each asked drafter did."""
    rounds = []
    for name, times in done.times.items():
        if times.draft_s is None:
            tokens = max(ask.grant for ask in asks[name].values())
        else:
            drafts = (done.answers.get(session) for session in asks[name])
            tokens = max((len(draft.tokens) for draft in drafts if draft), default=0)
        rounds.append(DrafterRound(name, times.wait_s, times.draft_s, tokens))
    return tuple(rounds)


def _as_trees(answers: Mapping[str, DraftTokens]) -> DraftTrees:
    """Chains as trees of width 1."""
    if not answers:
        return DraftTrees.none()
    drafts = list(answers.values())
    tokens = [token for draft in drafts for token in draft.tokens]
    probabilities = [chance for draft in drafts for chance in draft.probabilities]
    counts = [len(draft.tokens) for draft in drafts]
    parents: Parents = np.concatenate([np.arange(-1, n - 1) for n in counts])
    return DraftTrees(
        list(answers),
        [],
        counts,
        np.asarray(tokens, dtype=np.int64),
        parents.astype(np.int32),
        np.asarray(probabilities, dtype=np.float64),
    )
