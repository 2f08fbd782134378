# SPDX-License-Identifier: Apache-2.0
"""One real engine in a process of its own, with trees or without, on a workload of every kind.

``python tree_engine.py '{"engine": {"trees": true}, "phases": {"whole": {}}}'`` prints one line of
JSON: for every phase what each request got, and how much of what is to be tested really happened.
vLLM on CPU cannot start a second engine where numba is loaded, so each engine has its process, and
one engine serves all phases that it can.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault(
    "NUMBA_NUM_THREADS", "1"
)  # the threads that ngram looks up in spin beside others

import numpy as np
import pytest
import torch
import vllm
from depth import DEPTH
from made_prompts import made_prompts
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_slo import SLO, tiny
from vllm_slo.bench import traces
from vllm_slo.engine.speculation import messages

gc.freeze()  # what was imported stays

PROMPTS = 104 if DEPTH == 1 else 208
TWICE = PROMPTS * 3 // 26
TOKENS = 28
MAX_DEPTH = 5
BLOCK = 32

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 384,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,  # prompts come in chunks
    "block_size": BLOCK,
    "enable_prefix_caching": True,
    "seed": 0,
}
SPECULATION = {
    "max_depth": MAX_DEPTH,
    "min_depth": MAX_DEPTH,  # so small a model would draft little of its own accord
    "max_width": 4,
    "min_width": 4,
    "max_nodes": 20,
    "draft_tokens": 32,
}
SCRATCH = SPECULATION["draft_tokens"] * 2
FEW_BLOCKS = 27  # for eight requests of up to seven blocks: some are preempted

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "draft_model": {"model": str(tiny.path("draft"))},
}
"""vLLM's own methods, with what they need."""
for _name, _said in METHODS.items():
    _said |= {"method": _name, "num_speculative_tokens": MAX_DEPTH}
CLASSES = {
    "tight": {"tpot_ms": 8.0},
    "loose": {"tpot_ms": 2000.0},
    "silent": {"tpot_ms": 500.0, "speculation": "off"},
}
OBJECTIVES = *(SLO(slo_class=name) for name in CLASSES), None
"""In turn, where drafts' lengths are to follow them."""

PHONE = {"regex": r"[a-z]{3}-[0-9]{4}-[a-f]{8}"}
OBJECT = {
    "json": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
        "required": ["name", "size"],
    }
}


def prompts(*, public: bool = False) -> list[str]:
    """Made texts, or problems of three public collections; some of them twice so that prefixes are
    cached."""
    if public:
        code, maths, mixed = map(traces.public_prompts, traces.PROMPTS)
        texts = [*code[:80], *maths[:60], *mixed[::7]]
        texts = [text[:420] for text in texts if len(text) > 80]
    else:
        texts = made_prompts(PROMPTS)
    # Beside each other, so that the second finds the first's blocks before they are needed.
    texts = texts[: PROMPTS - TWICE]
    return [text for i, text in enumerate(texts) for _ in range(1 + (i % 7 == 0 and i < 7 * TWICE))]


def parameters(*, seeded: bool) -> list[SamplingParams]:
    """One of every kind that trees must leave as they are, in turn.

    The seeded are apart: vLLM 0.32 on CPU fails where a seeded request's prompt comes in chunks.
    """
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS}
    random: dict[str, Any] = {"temperature": 0.9, "max_tokens": TOKENS}
    kinds: list[dict[str, Any]] = [
        {**greedy, "ignore_eos": True},
        {**greedy, "frequency_penalty": 0.7, "presence_penalty": 0.4},
        {**greedy, "repetition_penalty": 1.3, "logprobs": 3},
        {**greedy, "structured_outputs": StructuredOutputsParams(**PHONE)},
        {**greedy, "min_tokens": 12, "stop_token_ids": [32, 198, 10, 265]},
        {**greedy, "stop": ["e", "self"], "min_tokens": 4},
        {**greedy, "bad_words": [" the", "self", " in"], "logprobs": 0},
        {**greedy, "structured_outputs": StructuredOutputsParams(**OBJECT), "max_tokens": 40},
        {**greedy, "allowed_token_ids": list(range(0, 512, 2))},
    ]
    if seeded:
        kinds = [
            {**random, "seed": 7, "top_p": 0.9, "ignore_eos": True},
            {**random, "seed": 11, "top_k": 20, "frequency_penalty": 0.3, "logprobs": 2},
        ]
    return [SamplingParams(**kind) for kind in islice(cycle(kinds), PROMPTS)]


def engine_options(said: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``vllm.LLM``; ``options`` are further ones."""
    engine = {**ENGINE, **said.get("options", {})}
    if said.get("seeded"):
        engine = {**engine, "max_num_batched_tokens": 4096}
    if said.get("sample"):
        engine = {**engine, "max_num_batched_tokens": 1024, "max_num_seqs": 64}
    blocks = 130 if said.get("sample") else FEW_BLOCKS
    if said.get("method"):
        return {
            **engine,
            "num_gpu_blocks_override": blocks,
            "scheduler_cls": "vllm_slo.Scheduler",
            "speculative_config": METHODS[said["method"]],
            "additional_config": {"slo_config": {"classes": CLASSES}},
        }
    if not said.get("trees"):
        return {**engine, "num_gpu_blocks_override": blocks}
    return {
        **engine,
        "num_gpu_blocks_override": blocks + SCRATCH,
        "scheduler_cls": "vllm_slo.Scheduler",
        "worker_cls": "vllm_slo.engine.worker.TreeWorker",
        "speculative_config": {
            "method": "custom_class",
            "model": "vllm_slo.engine.proposers.TreeProposer",
            "num_speculative_tokens": SPECULATION["max_nodes"],
        },
        "additional_config": {
            "draft_model": [folder_of(name) for name in said.get("pool", ["draft"])],
            "slo_config": {"speculation": SPECULATION},
        },
    }


def grow_all() -> None:
    """Verify every node for which there is room, whether it pays or not."""
    from vllm_slo.core.speculation import candidate_trees

    candidate_trees.worthwhile_nodes = lambda chances, *_: len(chances)


def take_masks() -> None:
    """Verify as on a GPU: one kernel with a mask of ancestors, here a dense one in torch."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_slo.engine.worker import setup

    setup._BACKENDS[AttentionBackendEnum.CPU_ATTN] = "masked_backend.TreeMaskedBackend"


def break_it(what: str, scheduler: Any, patch: pytest.MonkeyPatch) -> None:
    """Make one part of verification wrong, to see the tests fail."""
    from vllm_slo.engine.compat.runner import RunnerBatch
    from vllm_slo.engine.worker import model_runner
    from vllm_slo.engine.worker.proposers import lm, pool

    runner = model_runner.TreeRunner
    if what == "mask":  # every node sees the nodes scheduled before it
        patch.setattr(runner, "_attach_rows", lambda self, metadata, common: None)
        patch.setattr(runner, "_attach_masks", lambda self, metadata, common: None)
        patch.setattr(runner, "_compact", lambda self, accepted: None)
    elif what == "compaction":
        patch.setattr(runner, "_compact", lambda self, accepted: None)
    elif what == "positions":
        patch.setattr(runner, "_place_nodes", lambda self: None)  # one behind the other
    elif what == "draft":  # it computes what it has no blocks for
        patch.setattr(RunnerBatch, "allocated_tokens", lambda self, index: 10**9)
        patch.setattr(scheduler, "num_lookahead_tokens", 0)
    elif what == "guesses":  # what was guessed is taken for what was said
        patch.setattr(lm.DraftCoverage, "confirm", _confirm_guesses)
    elif what == "catching up":  # it reads the last token, whatever it has missed before that
        patch.setattr(pool.TreeProposer, "_lacking", _last_tokens(pool.TreeProposer._lacking))
    elif what == "walk":  # the likeliest child is accepted whatever was sampled
        patch.setattr(
            model_runner.tree_sampling.token_tree, "walk", lambda tokens, parents, sampled: [0]
        )
    else:
        raise ValueError(what)


def _confirm_guesses(self: Any, name: str, _: Any, blocks: Any) -> None:
    if name in self._guesses:
        guessed = len(self._guesses.pop(name, (0, ()))[1])
        self.advance(name, self.tokens(name) + guessed, blocks)


def _last_tokens(lacking: Any) -> Any:
    def last(*args: Any) -> dict[int, tuple[int, int]]:
        return {i: (stop - 1, stop) for i, (_, stop) in lacking(*args).items()}

    return last


def rest_by_turns(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Nothing is drafted after so many steps in a row, then after as many something is, as if
    prompts came whose first tokens are late."""
    from vllm_slo.engine.speculation.next_drafts import NextDrafts

    decide, done = NextDrafts.decide, count()

    def resting(drafts: Any, lagging: int, *, barred: bool) -> None:
        decide(drafts, lagging, barred=barred or next(done) // steps % 2 == 0)

    patch.setattr(NextDrafts, "decide", resting)


def let_fail(place: int, passes: int) -> None:
    """A draft model runs out of memory after so many passes."""
    from vllm_slo.engine.worker.proposers.lm import DraftModel

    forward, left = DraftModel.forward, iter(range(passes))

    def failing(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.prefix == f"draft{place}" and next(left, None) is None:
            raise torch.OutOfMemoryError("out of memory")
        return forward(model, *args, **kwargs)

    DraftModel.forward = failing  # type: ignore[method-assign]


def folder_of(name: str) -> str:
    """The folder of a built-in model; ``broken`` is one whose weights cannot be read."""
    if name != "broken":
        return str(tiny.path(name))
    folder = Path(tempfile.mkdtemp(prefix="vllm-slo-broken-"))
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(tiny.path("draft"), folder, dirs_exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    return str(folder)


class Counters:
    """What happened in the engine in one phase."""

    def __init__(self, llm: vllm.LLM, *, chains: bool) -> None:
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler  # type: ignore[attr-defined]
        self.begin()
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output

        def counting_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.preempted += len(output.preempted_req_ids or ())
            for new in output.scheduled_new_reqs:
                self.cached += new.num_computed_tokens
                self.chunks += len(new.prompt_token_ids) > output.num_scheduled_tokens[new.req_id]
            return output

        def counting_update(output: Any, done: Any) -> Any:
            self.count_passes(output, done)
            for name, parents in getattr(output, "vllm_slo_trees").parents.items():  # noqa: B009
                given = len(done.sampled_token_ids[done.req_id_to_index[name]])
                self.seen["trees"] += 1
                self.seen["branching"] += any(p != i - 1 for i, p in enumerate(parents))
                self.seen["nodes"] += len(parents)
                self.seen["tokens"] += given
                self.seen["deepest"] = max(self.seen["deepest"], given - 1)
            return update(output, done)

        def counting_chains(output: Any, done: Any) -> Any:
            for name, drafts in output.scheduled_spec_decode_tokens.items():
                given = len(done.sampled_token_ids[done.req_id_to_index[name]])
                self.lengths[len(drafts)] = self.lengths.get(len(drafts), 0) + 1
                self.seen["tokens"] += given
                self.seen["deepest"] = max(self.seen["deepest"], given - 1)
            ahead = output.num_spec_tokens_to_schedule
            self.ahead[ahead] = self.ahead.get(ahead, 0) + 1
            return update(output, done)

        self.scheduler.schedule = counting_schedule
        if self.scheduler.num_spec_tokens:
            self.scheduler.update_from_output = counting_chains if chains else counting_update

    def count_passes(self, output: Any, done: Any) -> None:
        """Of a step that drafts for some request: the passes of the only draft, and what the first
        of them reads, apart for the first such step after some without drafting."""
        plan, passes = messages.of(output).plan, messages.drafting_of(done).passes
        if plan.depth and len(passes) > 1:
            found = self.drafting["resumed" if self.rested else "going on"]
            found.append((len(passes), passes[0][1]))
        self.rested = not plan.depth or (self.rested and len(passes) <= 1)

    def begin(self) -> None:
        """Count from here on."""
        self.drafting: dict[str, list[tuple[int, int]]] = {"resumed": [], "going on": []}
        self.rested = False
        self.seen = {"trees": 0, "branching": 0, "nodes": 0, "tokens": 0, "deepest": 0}
        self.lengths: dict[int, int] = {}
        self.ahead: dict[int, int] = {}
        self.preempted = 0
        self.cached = 0
        self.chunks = 0

    def report(self) -> dict[str, Any]:
        return {
            **self.seen,
            "lengths": self.lengths,
            "ahead": self.ahead,
            "preempted": self.preempted,
            "cached": self.cached,
            "chunks": self.chunks,
            "drafting": self.drafting,
        }


class DraftWatch:
    """Whether the drafts' KV caches hold what their guesses need: at every root that is guessed
    from, each model is to say what it says after a pass over the whole request; and what a chain
    proposes is to be what its last model would go on with by itself.

    Attributes:
        roots, wrong: roots and guesses looked at, and those that were others.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from vllm_slo.engine.worker.proposers.chain import ChainSearch

        self.roots = self.wrong = 0
        run, read = ChainSearch.run, ChainSearch.read

        def watched_run(search: Any) -> None:
            run(search)
            rows = np.flatnonzero(search.counts)
            if not len(rows):
                return
            for member in search.chain:
                if member.place in search.roots:
                    few = rows[: len(search.roots[member.place])]
                    whole = self.whole(search, member, few, 0 * few + 1).softmax(dim=-1)
                    self.count((whole - search.roots[member.place]).abs().amax(dim=-1) > 1e-3)
            counts = search.counts[rows]
            whole = self.whole(search, search.chain[-1], rows, counts).argmax(dim=-1)
            said = np.concatenate([search.ahead.guesses[row, : search.counts[row]] for row in rows])
            self.count(whole != torch.from_numpy(said))

        def watched_read(search: Any) -> Any:
            logits = read(search)
            rows = np.arange(len(search.counts))
            whole = self.whole(search, search.chain[0], rows, 0 * rows + 1)
            self.count((whole - logits).abs().amax(dim=-1) > 0.01)
            return logits

        patch.setattr(ChainSearch, "run", watched_run)
        patch.setattr(ChainSearch, "read", watched_read)

    def whole(self, search: Any, member: Any, rows: Any, counts: Any) -> Any:
        """Logits of a pass over whole requests, from their roots on."""
        stops = search.ahead.ends[rows] + counts - 1
        return search.ahead.run(member.model, rows, 0 * rows, stops, counts)

    def count(self, wrong: Any) -> None:
        self.roots += len(wrong)
        self.wrong += int(wrong.sum())


PLANS = (
    ((0, 1), 5, 4, 2),
    ((0,), 3, 4, 3),
    ((0, 1), 4, 1, 1),
    ((1,), 5, 1, 5),
    ((), 0, 1, 1),
    ((0, 1, 2), 5, 2, 2),
    ((1, 2), 5, 3, 3),
    ((0,), 5, 1, 5),
    ((2,), 2, 3, 2),
)
"""(chain, depth, width, window), by turns."""


def rotate_chains(every: int, used: Counter[str]) -> None:
    """Another chain every few steps, whichever would be fastest."""
    from vllm_slo.core.speculation.model_chain import ModelChains
    from vllm_slo.engine.speculation.messages import Plan

    steps = count()

    def choose(chains: Any, *_: Any, **__: Any) -> Plan:
        there = {model for model, up in enumerate(chains.forecasts.available) if up}
        usable = [plan for plan in PLANS if there >= {*plan[0]}]
        plan = Plan(*usable[next(steps) // every % len(usable)])
        used["-".join(map(str, plan.chain))] += 1
        return plan

    ModelChains.choose = choose  # type: ignore[method-assign]


def watch_draft_passes() -> list[tuple[str, int, int]]:
    """(model, requests, most tokens of one) of each pass of a draft from here on."""
    from vllm_slo.engine.worker.proposers.lm import DraftModel

    passes: list[tuple[str, int, int]] = []
    forward = DraftModel.forward

    def watched(model: Any, tokens: Any, positions: Any, common: Any, **named: Any) -> Any:
        passes.append((model.prefix, common.num_reqs, common.max_query_len))
        return forward(model, tokens, positions, common, **named)

    DraftModel.forward = watched  # type: ignore[method-assign]
    return passes


def profile(worker: Any) -> list[tuple[int, int]]:
    """(tokens, rows of logits) of the passes with which drafts take part in memory profiling."""
    from vllm_slo.engine.worker.proposers.lm import DraftModel

    sizes: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        run = DraftModel.profile
        patch.setattr(DraftModel, "profile", lambda *args: sizes.append(args[1:]) or run(*args))
        worker.model_runner.profile_run()
    return sizes


def said_by(output: vllm.RequestOutput) -> dict[str, Any]:
    """What one request got."""
    one = output.outputs[0]
    logprobs = None
    if one.logprobs is not None:
        logprobs = [
            sorted((token, round(entry.logprob, 4)) for token, entry in place.items())
            for place in one.logprobs
        ]
    return {
        "tokens": list(one.token_ids),
        "text": one.text,
        "end": [one.finish_reason, one.stop_reason],
        "logprobs": logprobs,
    }


def main() -> None:
    asked = json.loads(sys.argv[1])
    engine, phases = asked["engine"], asked["phases"]
    if engine.get("trees"):
        grow_all()
    if engine.get("masked"):
        take_masks()
    used: Counter[str] = Counter()
    if engine.get("rotate"):
        rotate_chains(engine["rotate"], used)
    if engine.get("fail"):
        let_fail(*engine["fail"])
    passes = watch_draft_passes()
    llm = vllm.LLM(str(tiny.path("target")), **engine_options(engine))
    warmed = sorted(set(passes))
    counters = Counters(llm, chains="method" in engine)
    found = {}
    for name, phase in phases.items():
        used.clear()
        counters.begin()
        assert llm.reset_prefix_cache(), "a phase finds nothing of the one before it"
        found[name] = run_phase(llm, engine, phase, counters)
        found[name]["chains"] = dict(used)
        found[name]["warmed"] = warmed
    if engine.get("trees"):
        found[name]["profiled"] = llm.collective_rpc(profile)[0]
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def run_phase(
    llm: vllm.LLM, engine: dict[str, Any], phase: dict[str, Any], counters: Counters
) -> dict[str, Any]:
    """Serve the workload, or every so many of its requests; ``break``, ``rest`` and ``watch`` do
    what they say."""
    every = int(phase.get("every", 1))
    texts = prompts(public=phase.get("public", False))[::every]
    kinds = parameters(seeded=engine.get("seeded", False))[::every]
    if engine.get("method"):
        for params, slo in zip(kinds, cycle(OBJECTIVES), strict=False):
            params.extra_args = slo.to_extra_args() if slo else None
    if "sample" in engine:
        texts, kinds = _samples(engine["sample"])
    with pytest.MonkeyPatch.context() as patch:
        if "break" in phase:
            break_it(phase["break"], counters.scheduler, patch)
        if "rest" in phase:
            rest_by_turns(phase["rest"], patch)
        watch = DraftWatch(patch) if phase.get("watch") else None
        outputs = llm.generate(texts, kinds, use_tqdm=False)
    found = {"said": [said_by(o) for o in outputs], "seen": counters.report()}
    if engine.get("trees"):
        chains = counters.scheduler._speculation.drafting.chains
        found["there"] = [model for model, up in enumerate(chains.forecasts.available) if up]
    if watch is not None:
        found["seen"] |= {"roots": watch.roots, "wrong": watch.wrong}
    return found


def _samples(said: dict[str, Any]) -> tuple[list[str], list[SamplingParams]]:
    """One prompt many times, for the distribution of what follows."""
    count = said["count"]
    params = SamplingParams(
        temperature=said["temperature"], top_p=said.get("top_p", 1.0), max_tokens=said["tokens"],
        ignore_eos=True,
    )  # fmt: skip
    return [said["prompt"]] * count, [params] * count


if __name__ == "__main__":
    main()
