# SPDX-License-Identifier: Apache-2.0
"""What scheduler and worker tell each other about trees, beside vLLM's own messages.

Both travel as attributes or subclasses of what vLLM sends anyway, so they survive pickling to a
worker in another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from vllm_slo.config.class_names import REMOTE_PROPOSER, TREE_PROPOSER
from vllm_slo.config.model import SLOConfig
from vllm_slo.config.speculation import SpeculationConfig
from vllm_slo.core.arrays import Floats, Ints, Parents
from vllm_slo.core.speculation.model_chain import Plan
from vllm_slo.engine.speculation.draft_check import check_flags
from vllm_slo.engine.speculation.servers_report import ServersReport
from vllm_slo.errors import ConfigError

_ATTRIBUTE = "vllm_slo_trees"
_REPORT = "vllm_slo_drafting"


NO_DRAFT = Plan()


class Grant(NamedTuple):
    """What a draft server is to draft for one request.

    Attributes:
        drafter: its name.
        tokens: how many at most.
    """

    drafter: str
    tokens: int


@dataclass(slots=True)
class StepTrees:
    """Scheduler -> worker, with a step.

    Attributes:
        parents: request id -> parent of each of its draft tokens of this step, -1 for the root.
        plan: what is to be drafted after it.
        silent: requests that are not drafted for.
        grants: of draft servers, what they are to draft after it, by request.
        deadline_s: how long to wait for them.
        unmasked: requests with a grammar whose nodes have the bit mask of their root. Known to
            the scheduler only.
    """

    parents: dict[str, Sequence[int]] = field(default_factory=dict)
    plan: Plan = NO_DRAFT
    silent: frozenset[str] = frozenset()
    grants: dict[str, Grant] = field(default_factory=dict)
    deadline_s: float = 0.0
    unmasked: frozenset[str] = frozenset()


def attach(output: SchedulerOutput, trees: StepTrees) -> None:
    """Send ``trees`` along with a step."""
    setattr(output, _ATTRIBUTE, trees)


def attach_chains(output: SchedulerOutput) -> None:
    """Have the drafts of a step verified as chains, each the child of the one before it, unless
    trees are attached already. That is right for any drafts, and accepts fewer of a tree."""
    if not hasattr(output, _ATTRIBUTE):
        drafts = output.scheduled_spec_decode_tokens
        attach(output, StepTrees({n: range(-1, len(ids) - 1) for n, ids in drafts.items()}))


def keep_first_tokens(output: SchedulerOutput, done: ModelRunnerOutput) -> None:
    """Of requests whose nodes had no bit masks, only the first token is sure to be allowed by the
    grammar: take back the others, which the next steps compute anew."""
    for name in of(output).unmasked:
        index = done.req_id_to_index.get(name)
        if index is not None:
            del done.sampled_token_ids[index][1:]


def of(output: SchedulerOutput) -> StepTrees:
    """The trees sent along with a step; none where there are none."""
    found: StepTrees | None = getattr(output, _ATTRIBUTE, None)
    return found or StepTrees()


@dataclass
class DraftTrees(DraftTokenIds):
    """Worker -> scheduler, after a step: candidates of the requests in ``req_ids``, one request
    after the other, each layer by layer, ``width`` nodes in a layer.

    Attributes:
        counts: nodes of each request.
        tokens: of each candidate, [nodes].
        parents: of each candidate within its request, -1 for the root, [nodes].
        probabilities: the draft's, of each candidate given its path, [nodes].
        width: nodes of a layer.
        model: whose candidates they are, by its place in the pool.
        depth: that they were to have; a tree may end before, where nothing likely follows.
    """

    counts: list[int] = field(default_factory=list)
    tokens: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    parents: Parents = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    probabilities: Floats = field(default_factory=lambda: np.zeros(0))
    width: int = 1
    model: int = 0
    depth: int = 0

    @classmethod
    def none(cls) -> DraftTrees:
        """Nothing was drafted."""
        return cls([], [])


class EdgeTrials(NamedTuple):
    """How one model of a chain took what another had guessed.

    Attributes:
        drafter, verifier: by their places in the pool.
        tried: guesses that were looked at: none behind one that was turned down.
        accepted: how many of them were what the verifier itself would have said.
    """

    drafter: int
    verifier: int
    tried: int
    accepted: int


@dataclass(slots=True)
class DraftingReport:
    """Worker -> scheduler, with a step's output: what drafting was like.

    Attributes:
        seconds: of the step that went into it.
        passes: (model, tokens, seconds) of each forward pass of a draft model.
        edges: what was accepted within the chain.
        similarities: (model, model, 1 - total variation distance of what both would say next); the
            served model's place is behind the last of the pool.
        dropped: models that have failed for good, and why.
        servers: of draft servers; None: there are none on this engine.
        failed: parts of the worker that failed, and without which the step went on.
    """

    seconds: float = 0.0
    passes: list[tuple[int, int, float]] = field(default_factory=list)
    edges: list[EdgeTrials] = field(default_factory=list)
    similarities: list[tuple[int, int, float]] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    servers: ServersReport | None = None
    failed: list[str] = field(default_factory=list)


def note_drafting(done: ModelRunnerOutput, report: DraftingReport) -> None:
    """Tell the scheduler, with a step's output, what drafting was like."""
    setattr(done, _REPORT, report)


def drafting_of(done: ModelRunnerOutput) -> DraftingReport:
    """What drafting was like in a step; nothing where there was none."""
    found: DraftingReport | None = getattr(done, _REPORT, None)
    return found or DraftingReport()


def speculation_of(vllm_config: VllmConfig) -> SpeculationConfig | None:
    """The configuration of trees on this engine; None: there are none.

    Raises:
        ConfigError: the engine was told only a part of what trees need.
    """
    config = SLOConfig.from_additional_config(vllm_config.additional_config).speculation
    spec = vllm_config.speculative_config
    asked = spec is not None and spec.model in (TREE_PROPOSER, REMOTE_PROPOSER)
    if config.source is None and not asked:
        return None
    check_flags(vllm_config, config)
    return config


def scratch_blocks_per_row(config: SpeculationConfig, block_size: int) -> int:
    """KV blocks that always hold the tokens of a partly filled block, a root and the nodes of the
    deepest path."""
    return -(-(block_size + config.max_depth) // block_size)


def scratch_blocks(config: SpeculationConfig, block_size: int) -> int:
    """KV blocks at the end of the pool that belong to the worker; chains alone, as draft servers
    draft them, are verified in the requests' own."""
    if config.draft_servers is not None:
        return 0
    return config.draft_tokens * scratch_blocks_per_row(config, block_size)


def most_nodes(config: SpeculationConfig, requests: int) -> int:
    """Tree nodes that a step of so many requests can hold. A pass of the draft has
    ``draft_tokens`` rows, each of which goes ``max_depth`` tokens ahead."""
    if config.draft_servers is not None:
        return requests * config.max_nodes
    return min(config.draft_tokens * config.max_depth, requests * config.max_nodes)


def without_scratch(
    kv_cache_config: KVCacheConfig, config: SpeculationConfig, max_model_len: int
) -> KVCacheConfig:
    """The KV cache as the scheduler is to know it: the worker's blocks left out.

    Raises:
        ConfigError: trees cannot be verified in this KV cache, or a request of ``max_model_len``
            tokens would not fit into the rest of it. vLLM has checked that against the whole cache.
            Such a request would wait for ever, and all behind it would wait, too.
    """
    if len(kv_cache_config.kv_cache_groups) != 1:
        raise ConfigError(
            f"{' '.join(config.source or ())}: trees need a model with full attention in every "
            "layer, and a draft likewise; this one has several kinds. Serve it without drafts"
        )
    size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    blocks, taken = kv_cache_config.num_blocks, scratch_blocks(config, size)
    left = blocks - taken
    if taken and max_model_len > (left - 1) * size:  # vLLM gives nobody the first block
        raise ConfigError(
            f"speculation.draft_tokens: {config.draft_tokens} paths need {taken} KV blocks of "
            f"{blocks}, and a request of max_model_len {max_model_len} tokens does not fit into "
            "the rest; lower one of them or give the KV cache more memory"
        )
    return replace(kv_cache_config, num_blocks=left)
