# SPDX-License-Identifier: Apache-2.0
"""Engines in virtual time that draft with chains of models, on guesses of real models.

The built-in models answer prompts of the public collections once. What the draft and the middle
model would guess behind each token of an answer is noted, and whether the target and the middle
model accept it. So a run with any chain can be replayed from these notes, in the times of any
machine, by the policy code that the engine runs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from vllm_slo import tiny
from vllm_slo.bench import traces
from vllm_slo.core.speculation.calibration import DraftCalibration
from vllm_slo.core.speculation.candidate_trees import CandidateTrees, StepLoad, nodes_of_step
from vllm_slo.core.speculation.chain_forecast import DraftLoad
from vllm_slo.core.speculation.model_chain import ModelChains, Plan
from vllm_slo.core.step_time.model import StepTimeModel

COLLECTIONS: Final = ("HumanEval", "GSM8K", "Spec-Bench")
POOL: Final = ("draft", "middle")
PROMPT: Final = 64
"""Tokens of a prompt."""
ANSWER: Final = 48
DEPTH: Final = 8
"""Most tokens that a model guesses."""
MULTIPLE: Final = 4
"""As `CPU_MULTIPLE` of the engine."""
NOISE: Final = 0.05
"""Standard deviation of the logarithm of a pass's time."""
STALL: Final = 1 / 400
"""Share of the passes that the machine holds up."""
STALL_S: Final = 0.2
"""Seconds for which it does; the first pass of each model, which is cold, takes as long."""


# --- what models guess ----------------------------------------------------------------------------


class Guesses(NamedTuple):
    """Greedy guesses behind the tokens of the answers of one collection.

    Attributes:
        q: (models, prompts, ANSWER, DEPTH) the model's probability of each guess after the last.
        hits: (models, prompts, ANSWER) how many of the guesses the target accepts.
        agreed: (prompts, ANSWER, DEPTH + 1) from each guess of the middle model on, how many the
            draft would have guessed as well.
    """

    q: np.ndarray
    hits: np.ndarray
    agreed: np.ndarray


def recorded(collection: str, prompts: int) -> Guesses:
    """What the built-in models guess."""
    import torch
    from tokenizers import Tokenizer

    from vllm_slo.tiny.model import Cache, Llama, generate

    tokenizer = Tokenizer.from_file(str(tiny.path("target") / "tokenizer.json"))
    texts = traces.public_prompts(collection)
    if not texts:
        raise SystemExit("the public prompts are not at hand; see the README's section on data")
    long = (ids for text in texts if len(ids := tokenizer.encode(text).ids) >= PROMPT)
    asked = torch.tensor([ids[:PROMPT] for ids in itertools.islice(long, prompts)])
    count = len(asked)
    with torch.no_grad():
        target = Llama.load(tiny.path("target"))
        answers = generate(target, asked, ANSWER + DEPTH, torch.zeros(count))
        q = torch.zeros(len(POOL), count, ANSWER, DEPTH)
        paths = torch.zeros(len(POOL), count, ANSWER, DEPTH, dtype=torch.long)
        agree = torch.zeros(count, ANSWER, DEPTH, dtype=torch.bool)
        for m in (1, 0):
            model = Llama.load(tiny.path(POOL[m]))
            memory = Cache(model.shape, count, PROMPT + ANSWER + DEPTH, torch.float32)
            model(answers[:, :PROMPT], memory)
            for place in range(1, ANSWER):
                logits = first = model(answers[:, PROMPT + place - 1, None], memory)[:, -1]
                for k in range(DEPTH):
                    chance, guess = logits.softmax(-1).max(-1)
                    q[m, :, place, k], paths[m, :, place, k] = chance, guess
                    logits = model(guess[:, None], memory)[:, -1]
                memory.length -= DEPTH
                if m == 0:
                    logits = first
                    for k in range(DEPTH):
                        given = paths[1, :, place, k]
                        agree[:, place, k] = logits.argmax(-1) == given
                        logits = model(given[:, None], memory)[:, -1]
                    memory.length -= DEPTH
    truth = answers[:, PROMPT:].unfold(1, DEPTH, 1)[:, :ANSWER]
    hits = (paths == truth).long().cumprod(-1).sum(-1)
    agreed = np.zeros((count, ANSWER, DEPTH + 1), dtype=np.int64)
    for k in range(DEPTH - 1, -1, -1):
        agreed[:, :, k] = np.where(agree[:, :, k].numpy(), agreed[:, :, k + 1] + 1, 0)
    return Guesses(q.double().numpy(), hits.numpy(), agreed)


# --- the engine -----------------------------------------------------------------------------------


class Machine(NamedTuple):
    """True times.

    Attributes:
        name: of the machine.
        target: steps of the served model.
        passes: of each draft model, (seconds, seconds for each token).
    """

    name: str
    target: StepTimeModel
    passes: tuple[tuple[float, float], ...]

    def pass_s(self, model: int, tokens: int) -> float:
        """Seconds of a pass of a draft model."""
        fixed_s, token_s = self.passes[model]
        return fixed_s + token_s * tokens


def roofline(flat_s: float, token_s: float, fixed_s: float) -> StepTimeModel:
    """Steps that take ``flat_s``, or ``fixed_s`` and ``token_s`` a token where that is more."""
    return StepTimeModel(((0.0, 0.0, flat_s), (token_s, 0.0, fixed_s)), max_tokens=8192)


TWO_CORES: Final = Machine(
    "two cores", roofline(0.034, 0.001, 0.033), ((0.0007, 0.00006), (0.0027, 0.0004))
)
"""The twins of model_chains.py."""
GPU: Final = Machine("GPU", roofline(0.0100, 0.00004, 0.0090), ((0.0003, 0.0), (0.0016, 0.000004)))
"""Models of 7B, 1.1B and 68M, about, with a pass of the smallest bound by launches."""
MACHINES: Final = (TWO_CORES, GPU)


class Wave(NamedTuple):
    """Requests that come at once."""

    collection: str
    batch: int


@dataclass
class Engine:
    """Serves waves of requests.

    Args:
        machine: what it runs on.
        guesses: collection -> what the models guess.
        seed: of the noise of measured times.
        plan: of every step, whose trees are verified in full; None: `ModelChains` chooses.
        room: nodes of a step that there is room for.

    Attributes:
        seconds, tokens: of all steps so far, without the noise.
        plans: of each step, with the requests in it.
    """

    machine: Machine
    guesses: dict[str, Guesses]
    seed: int
    plan: Plan | None = None
    room: int = 1024
    seconds: float = 0.0
    tokens: int = 0
    plans: list[tuple[Plan, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chains = ModelChains(POOL, DEPTH, 1)
        self._calibrations = [DraftCalibration(DEPTH) for _ in POOL]
        self._dice = random.Random(self.seed)
        self._now_s = 0.0
        self._cold = set(range(len(POOL)))

    def serve(self, wave: Wave, prompts: Sequence[int]) -> None:
        """Serve prompts of a collection, by their numbers, to the end of all answers."""
        guesses = self.guesses[wave.collection]
        requests, done = np.asarray(prompts), np.ones(len(prompts), dtype=np.int64)
        drafted, drafting_s = Plan(), 0.0
        is_first = True
        while len(requests):
            batch = len(requests)
            model = drafted.chain[-1] if drafted.chain else 0
            q = guesses.q[model, requests, done, : drafted.depth]
            counts = self._verified(drafted, q, ANSWER - 1 - done)
            plan = self._choose(batch, int(batch if is_first else 0))
            kept = np.minimum(guesses.hits[model, requests, done], counts)
            step_s = self.machine.target.predict_s(batch + int(counts.sum()))
            if batch == len(prompts) and not is_first:
                self.seconds += step_s + drafting_s
                self.tokens += int((kept + 1).sum())
            measured_s = self._noisy(step_s)
            self._now_s += measured_s
            lacked = ANSWER - done
            done = done + kept + 1
            goes_on = done < ANSWER
            passes, edges = self._draft(plan, guesses, requests[goes_on], done[goes_on])
            drafting_s = sum(self.machine.pass_s(*one) for one in passes)
            if self.plan is None:
                self._learn_trees(drafted, q, counts, kept)
                self._learn_step(plan, kept + 1, lacked, is_first, passes, edges)
            drafted, is_first = plan, False
            requests, done = requests[goes_on], done[goes_on]

    # A step.

    def _choose(self, batch: int, begun: int) -> Plan:
        if self.plan is not None:
            self.plans.append((self.plan, batch))
            return self.plan
        load = DraftLoad(batch, 0, DEPTH, begun=begun)
        plan = self.chains.choose(load, self.machine.target, self._now_s)
        self.plans.append((plan, batch))
        return plan

    def _verified(self, drafted: Plan, q: np.ndarray, useful: np.ndarray) -> np.ndarray:
        """How many guesses of each request are verified."""
        batch, depth = q.shape
        if not depth:
            return np.zeros(batch, dtype=np.int64)
        if self.plan is not None:
            fixed: np.ndarray = np.minimum(useful, min(depth, self.room // batch))
            return fixed
        last = drafted.chain[-1]
        offsets = np.arange(batch + 1) * depth
        parents = np.tile(np.arange(-1, depth - 1, dtype=np.int32), batch)
        chances, _ = self._calibrations[last].path_probabilities(offsets, parents, q.ravel())
        depths = np.tile(np.arange(1, depth + 1), batch)
        self.chains.shapes[last].observe_nodes(chances, depths, offsets)
        chances[depths > np.repeat(useful, depth)] = 0.0
        limits = np.full(batch, depth)
        trees = CandidateTrees(offsets, parents, chances, chances, limits)
        load = StepLoad(
            *(batch, 0, batch, 0, batch + self.room, math.inf, math.inf, lambda: ()),
            MULTIPLE,
        )
        target = self.machine.target.besides(drafted.drafting_s)
        taken = nodes_of_step(trees, load, target, target) > 0
        verified: np.ndarray = np.minimum(trees.counts(taken), np.maximum(useful, 0))
        return verified

    def _draft(
        self, plan: Plan, guesses: Guesses, requests: np.ndarray, done: np.ndarray
    ) -> tuple[list[tuple[int, int]], tuple[int, int]]:
        """The passes of drafting, (model, tokens), and the guesses of the draft that the middle
        model tried and accepted."""
        if not plan.chain or not len(requests):
            return [], (0, 0)
        if len(plan.chain) == 1:
            return [(plan.chain[0], len(requests))] * plan.depth, (0, 0)
        passes, tried, accepted = [], 0, 0
        at = np.zeros(len(requests), dtype=np.int64)
        while len(at):
            asked = np.minimum(plan.depth - at - 1, plan.window)
            passes += [(0, int((asked > k).sum())) for k in range(int(asked.max()))]
            passes.append((1, int((asked + 1).sum())))
            kept = np.minimum(guesses.agreed[requests, done, at], asked)
            tried += int(np.minimum(kept + 1, asked).sum())
            accepted += int(kept.sum())
            at = at + kept + 1
            left = at < plan.depth
            requests, done, at = requests[left], done[left], at[left]
        return passes, (tried, accepted)

    # What is learnt of it, as the engine does.

    def _learn_trees(
        self, drafted: Plan, q: np.ndarray, counts: np.ndarray, kept: np.ndarray
    ) -> None:
        if not drafted.chain or not counts.sum():
            return
        last = drafted.chain[-1]
        place = np.tile(np.arange(q.shape[1]), (len(q), 1))
        seen = place < np.minimum(kept + 1, counts)[:, None]
        hit = place < kept[:, None]
        self._calibrations[last].observe((place + 1)[seen], q[seen], hit[seen])
        tried, accepted = int(seen.sum()), int((hit & seen).sum())
        self.chains.edges.observe_acceptance(last, len(POOL), tried, accepted)

    def _learn_step(
        self,
        plan: Plan,
        given: np.ndarray,
        lacked: np.ndarray,
        is_first: bool,
        passes: list[tuple[int, int]],
        edges: tuple[int, int],
    ) -> None:
        before = getattr(self, "_last", Plan())
        whole = given[lacked > before.depth]
        times = [(m, tokens, self._pass_s(m, tokens)) for m, tokens in passes]
        took_s = sum(s for *_, s in times)
        if not is_first and 2 * len(whole) > before.requests:
            self.chains.observe_step(before, float(whole.mean()))
        self._last = plan
        self._now_s += took_s
        for m, tokens, seconds in times:
            self.chains.times[m].observe(tokens, seconds)
        if edges[0]:
            self.chains.edges.observe_acceptance(0, 1, *edges)

    def _pass_s(self, model: int, tokens: int) -> float:
        cold_s = STALL_S if model in self._cold else 0.0
        self._cold.discard(model)
        return cold_s + self._noisy(self.machine.pass_s(model, tokens))

    def _noisy(self, seconds: float) -> float:
        """A time as it is measured."""
        held_s = STALL_S if self._dice.random() < STALL else 0.0
        return seconds * self._dice.lognormvariate(0.0, NOISE) + held_s


# --- worlds ---------------------------------------------------------------------------------------

FIXED: Final = (
    Plan(),
    *(Plan((0,), depth, 1, depth) for depth in (2, 4, 7)),
    Plan((1,), 4, 1, 4),
    *(Plan((0, 1), depth, 1, 4) for depth in (4, 8)),
)
"""As in model_chains.py."""


class World(NamedTuple):
    """What comes to an engine.

    Attributes:
        name: what it is called.
        machine: it runs on.
        settling: waves that come first, and are not counted.
        waves: of the requests that count.
        room: nodes of a step that there is room for.
    """

    name: str
    machine: Machine
    settling: tuple[Wave, ...]
    waves: tuple[Wave, ...]
    room: int = 1024


WAVES: Final = {1: (12, 12), 16: (8, 3), 64: (6, 2)}
"""Batch -> waves to settle, waves that count."""


def worlds() -> Iterator[World]:
    """Batches of one kind, and a run that changes, on each machine."""
    for machine in MACHINES:
        for batch, (settling, count) in WAVES.items():
            for collection in COLLECTIONS:
                wave = (Wave(collection, batch),)
                name = f"{machine.name}, {collection}, batch {batch}"
                yield World(name, machine, wave * settling, wave * count)
        phases = [("HumanEval", 4, 4), ("GSM8K", 4, 4), ("HumanEval", 1, 3), ("HumanEval", 16, 2)]
        waves = tuple(Wave(name, batch) for name, batch, count in phases for _ in range(count))
        yield World(f"{machine.name}, changing", machine, (Wave("Spec-Bench", 4),) * 8, waves)
    for room in (8, 24):
        wave = (Wave("GSM8K", 16),)
        yield World(f"GPU, GSM8K, batch 16, {room} nodes", GPU, wave * 8, wave * 3, room)


def played(
    world: World, guesses: dict[str, Guesses], seed: int, plan: Plan | None = None
) -> Engine:
    """The engine after a world with the prompts and the noise of a seed; only what counts is in
    its sums."""
    dice = random.Random(f"{world.name} {seed}")
    engine = Engine(world.machine, guesses, seed, plan, world.room)
    for place, wave in enumerate((*world.settling, *world.waves)):
        known = range(guesses[wave.collection].hits.shape[1])
        prompts = dice.choices(known, k=wave.batch)
        if place == len(world.settling):
            engine.seconds, engine.tokens = 0.0, 0
            engine.plans.clear()
        if plan is None or place >= len(world.settling):
            engine.serve(wave, prompts)
    return engine
