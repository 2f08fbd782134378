# SPDX-License-Identifier: Apache-2.0
"""A real engine in a process of its own, in which one call of ours after the other fails.

``python injected_engine.py [--trees|--masks]`` prints one line of JSON: how many calls were tried,
in which functions, and for each after which something was not as without the fault, what it was.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from typing import Any

import call_tables
from core_calls import CoreCall, core_calls, wired
from depth import DEPTH
from fault_injection import Call, Fault, Site, counted, sites
from patience import patience
from tree_engine import SPECULATION, grow_all, take_masks
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_slo import LLM, SLO, tiny
from vllm_slo.engine.scheduling.containment import Containment
from vllm_slo.engine.serving.llm import report_of
from vllm_slo.engine.speculation import messages

PROMPTS = ["def read(path):\n", "class Stack:\n    def", "import os\n", "# A comment about"]
PATIENCE_S = int(patience(20))
MOST_PLAYS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
IN_FORM = SamplingParams(
    temperature=0, max_tokens=5, structured_outputs=StructuredOutputsParams(regex="(ab|cd){4}")
)
EASY = SLO(ttft_ms=60_000, tpot_ms=10_000)
WORKERS = (Site(messages, "of"), Site(messages.DraftTrees, "none"))
"""What the worker calls, which is in the same process here."""
STRIDE = 16


class InjectedEngine:
    """An engine with the tiny model, with trees that grow as they can, or without."""

    def __init__(self, *, trees: bool, masks: bool) -> None:
        drafts: dict[str, Any] = {"draft_model": str(tiny.path("draft"))} if trees else {}
        if trees:
            grow_all()
        if masks:
            take_masks()
        self.llm = LLM(
            "tiny",
            **drafts,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            gpu_memory_utilization=0.2,
            disable_log_stats=True,
            slo_config={
                "best_effort": {"order": "laps_sd"},
                **({"speculation": SPECULATION} if trees else {}),
            },
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.held = self.scheduler.parts.containment
        self.answers = self.texts()

    def texts(self) -> list[list[int]]:
        """Tokens of greedy answers to promised and other requests, and of one under a grammar."""
        params = [GREEDY, GREEDY, GREEDY, IN_FORM]
        slos = [EASY, EASY, None, EASY]
        done = self.llm.generate(PROMPTS, params, use_tqdm=False, slo=slos)
        for output, slo in zip(done, slos, strict=True):
            report = report_of(output)
            assert (report is None) == (slo is None), f"report: {report}"
            if report is not None:
                kept = report["promised"] and report["attained"]
                assert kept or report["reason"], f"broken silently: {report}"
        return [list(output.outputs[0].token_ids) for output in done]

    def play(self) -> None:
        """Everything as without faults, and nothing left behind."""
        assert self.texts() == self.answers, "other answers"
        (quote,) = self.llm.quote(PROMPTS[:1], GREEDY, slo=EASY)
        assert "promised" in quote, f"quote: {quote}"
        parts, pool = self.scheduler.parts, self.scheduler.kv_cache_manager.block_pool
        left = {
            "requests": len(self.scheduler.requests),
            "tracked": len(parts.tracker.live),
            "quotes": len(parts.quotes._asking),
            "untold": len(parts.endings.untold),
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        }
        assert not any(left.values()), f"left: {left}"

    def give_up(self) -> None:
        """End what a failed run has left."""
        engine = self.llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)

    def inject(self, call: Call, first: int) -> None:
        before = self.held.failures
        signal.alarm(PATIENCE_S)  # an answer that never comes
        try:
            with Fault(call, first).injected() as fault:
                for _ in range(MOST_PLAYS):  # some calls are made every so many steps
                    self.play()
                    if fault.raised:
                        break
        finally:
            signal.alarm(0)
        assert self.held.failures - before == fault.raised == 1


def tried(calls: Counter[Call], *, trees: bool) -> dict[Call, int]:
    """The calls that fail in this run, and how often each is made: what a worker does with trees,
    and of the others every `STRIDE`-th, since virtual engines try them all."""
    found = sorted(calls, key=str)
    verifying = [c for c in found if isinstance(c, CoreCall) and c.place in call_tables.VERIFYING]
    of_trees = [c for c in found if "speculation" in str(c)] if trees else found
    return {c: calls[c] for c in {*verifying, *(of_trees if DEPTH > 1 else of_trees[::STRIDE])}}


def _give_up(*_: Any) -> None:
    raise TimeoutError("an answer did not come")


def main() -> None:
    signal.signal(signal.SIGALRM, _give_up)
    masks = "--masks" in sys.argv
    trees = masks or "--trees" in sys.argv
    policies, calls = core_calls(), Counter[Call]()
    parts = [site for site in sites() if site.owner is not Containment and site not in WORKERS]
    wrong: dict[str, str] = {}
    with wired(policies):  # vLLM hides from gc what is there when an engine has started
        engine = InjectedEngine(trees=trees, masks=masks)
        with counted(calls, [*policies, *parts]):
            engine.play()
        assert not engine.held.failures
        chosen = tried(calls, trees=trees)
        for call, count in chosen.items():
            try:
                engine.inject(call, 1 + count // 2)
            except Exception as error:  # noqa: BLE001 (all are reported at the end)
                wrong[f"{call} of {count}"] = f"{type(error).__name__}: {error}"[:300]
                sys.stderr.write(f"{call} of {count}: {error!r}\n")
                engine.give_up()
    places = {call.place for call in chosen if isinstance(call, CoreCall)}
    said = {"tried": len(chosen), "places": sorted(places), "wrong": wrong}
    sys.stdout.write(f"\n{json.dumps(said)}\n")
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown takes longer than all of this


if __name__ == "__main__":
    main()
