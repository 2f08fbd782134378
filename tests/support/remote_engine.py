# SPDX-License-Identifier: Apache-2.0
"""One real engine in a process of its own that draft servers draft for; see ``tree_engine.py``.

``python remote_engine.py ADDRESS`` takes commands as lines of JSON and answers each with one.
While it serves it says after each step how far it is.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from patience import patience
from tree_engine import ENGINE, FEW_BLOCKS, grow_all, parameters, prompts, said_by

from vllm_slo import LLM
from vllm_slo.engine.worker import model_runner
from vllm_slo.engine.worker.proposers import RemoteProposer

WAIT_S = patience(200.0)
DEPTH = 3
"""Tokens ahead, in every step: so small a model would draft little of its own accord."""


def tell(**said: Any) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


class Verified:
    """What became of drafts, by the drafter that they are from."""

    def __init__(self, drafting: Any) -> None:
        self.offered: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        observe = drafting.observe

        def observing(verified: Any) -> None:
            found = list(verified)
            for name, offered, accepted in found:
                if offered:
                    self.offered[drafting._authors[name]] += offered
                    self.accepted[drafting._authors[name]] += accepted
            observe(found)

        drafting.observe = observing


class Engine:
    """The engine under test."""

    def __init__(self, address: str) -> None:
        grow_all()
        speculation = {
            "max_depth": DEPTH,
            "min_depth": DEPTH,
            "draft_deadline_ms": patience(200.0),
        }
        options = {k: v for k, v in ENGINE.items() if k != "block_size"}
        self.llm = LLM(
            "tiny",
            draft_servers=address,
            slo_config={"speculation": speculation},
            num_gpu_blocks_override=FEW_BLOCKS,
            **options,
        )
        core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.scheduler = core.scheduler
        self.drafting = self.scheduler._speculation.drafting
        self.verified = Verified(self.drafting)
        self.runs = 0

    def serve(self, count: int, kinds: str = "greedy") -> dict[str, Any]:
        """What so many requests get."""
        self.runs += 1
        self.llm.reset_prefix_cache()
        self.verified.offered.clear()
        self.verified.accepted.clear()
        params = parameters(seeded=False)
        engine, said = self.llm.llm_engine, {}
        for place, text in enumerate(prompts()[:count]):
            one = params[place if kinds == "mixed" else 0]
            engine.add_request(f"{self.runs}-{place}", text, one)
        steps = preempted = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    said[int(output.request_id.partition("-")[2])] = said_by(output)
            steps += 1
            preempted = sum(request.num_preemptions for request in self.scheduler.running)
            tell(ended=len(said))
        return {
            "said": [said[place] for place in range(count)],
            "steps": steps,
            "preempted": preempted,
            "offered": self.verified.offered,
            "accepted": self.verified.accepted,
        }

    def await_drafters(self, names: list[str]) -> dict[str, Any]:
        """Serve until these are ready: an idle engine makes no steps, and welcomes nobody."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            self.llm.generate("def", parameters(seeded=False)[0], use_tqdm=False)
            ready = sorted(n for n, d in self.drafting._drafters.items() if d.ready)
            if ready == sorted(names):
                return {"ready": ready}
            time.sleep(0.05)
        return {"ready": ready}


@contextmanager
def broken(what: str) -> Any:
    """Make one part wrong for a while."""
    undo: Callable[[], None]
    if what == "walk":  # drafts are accepted whatever was sampled
        walk = model_runner.tree_sampling.token_tree.walk
        model_runner.tree_sampling.token_tree.walk = lambda tokens, parents, sampled: list(
            range(len(tokens))
        )

        def undo() -> None:
            model_runner.tree_sampling.token_tree.walk = walk
    elif what == "positions":  # all nodes stand where the first one does
        positions = model_runner.node_positions

        def at_the_first(slots: Any) -> Any:
            placed = positions(slots)
            placed[1] = placed[1].min()
            return placed

        model_runner.node_positions = at_the_first

        def undo() -> None:
            model_runner.node_positions = positions
    elif what == "prefix":  # drafters are sent all but the last token
        asks = RemoteProposer._asks

        def short(self: Any, *args: Any) -> Any:
            found = asks(self, *args)
            for of in found.values():
                for name, ask in of.items():
                    of[name] = type(ask)(ask.prefix[:-1], ask.grant)
            return found

        RemoteProposer._asks = short  # type: ignore[method-assign]

        def undo() -> None:
            RemoteProposer._asks = asks  # type: ignore[method-assign]
    else:
        raise ValueError(what)
    try:
        yield
    finally:
        undo()


def main() -> None:
    engine = Engine(sys.argv[1])
    tell(done={})
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("break", None)
        if "ready" in command:
            tell(done=engine.await_drafters(command["ready"]))
        elif what:
            with broken(what):
                tell(done=engine.serve(**command))
        else:
            tell(done=engine.serve(**command))
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
