# SPDX-License-Identifier: Apache-2.0
"""A chain of draft models (SpecRouter, section 4.3): each verifies what the one before it guessed.

The first model guesses a window of tokens. The next model checks them in one pass, keeps those that
are its own greedy choice, adds one token, and so on. The chain repeats until the last model has as
many tokens as are wanted. So the proposal is the last model's own greedy continuation, token for
token (lossless at each level against the next).

Guesses lie where their tokens will lie once accepted: in the request's own blocks, behind its
committed tokens, and behind these in scratch blocks. Each request has its own length, so taking a
guess back only lowers that length, and no keys or values are ever moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_slo.core.arrays import Floats, Ints, Parents
from vllm_slo.core.speculation.model_chain import Plan
from vllm_slo.engine.speculation.messages import DraftingReport, EdgeTrials
from vllm_slo.engine.worker.proposers.lm import DraftModel, common_metadata
from vllm_slo.engine.worker.transfer import to_device

UNLIKELY = 0.02
"""Path probability below which a chain ends: hardly any tree would take the next token."""
COMPARED = 8
"""Requests of a step by whose next-token distributions models are compared."""


@dataclass(frozen=True, slots=True)
class Member:
    """A model of the chain.

    Attributes:
        place: in the pool.
        model: the model.
    """

    place: int
    model: DraftModel


class Ahead:
    """Guesses behind the committed tokens of some requests, and the blocks that both lie in.

    Args:
        committed: tokens of the whole batch, [requests, positions].
        places: the requests' places in the batch, [n].
        ends: committed tokens of each, [n].
        tables: blocks of the whole batch, [requests, columns].
        owned: blocks that each holds, [n].
        scratch: scratch blocks of each, [n, blocks]. Requests that are only caught up need none,
            so there may be fewer rows.
        depth: most guesses of a request.
        block_size: tokens per block.

    Attributes:
        guesses: token ids, [n, depth].
    """

    def __init__(
        self,
        committed: NDArray[np.int32],
        places: Ints,
        ends: Ints,
        tables: NDArray[np.integer[Any]],
        owned: Ints,
        scratch: Ints,
        depth: int,
        block_size: int,
    ) -> None:
        self.places = places
        self.ends = ends
        self.guesses = np.zeros((len(places), depth), dtype=np.int64)
        self._committed = committed
        self._block_size = block_size
        columns = max(int(owned.max()) + scratch.shape[1], 1)
        self._table = np.zeros((len(places), columns), dtype=np.int32)
        shared = min(columns, tables.shape[1])
        self._table[:, :shared] = tables[places, :shared]
        behind = owned[: len(scratch), None] + np.arange(scratch.shape[1])
        np.put_along_axis(self._table[: len(scratch)], behind, scratch.astype(np.int32), axis=1)

    def run(self, draft: DraftModel, rows: Ints, starts: Ints, stops: Ints, asked: Ints) -> Tensor:
        """One causal pass of a model.

        Args:
            draft: the model.
            rows: the requests, [r].
            starts, stops: range of their tokens to compute, guesses included, [r].
            asked: number of the last of these tokens whose logits are wanted, [r].

        Returns:
            The logits, [asked tokens, vocabulary], request by request.
        """
        lengths = stops - starts
        begins = np.cumsum(np.append(0, lengths))
        row = np.repeat(rows, lengths)
        places = np.arange(begins[-1]) - np.repeat(begins[:-1] - starts, lengths)
        device, size = draft.device, self._block_size
        slots = self._table[row, places // size].astype(np.int64) * size + places % size
        positions = to_device(np.minimum(places, draft.max_len - 1), device)
        columns = -(-int(stops.max()) // size)
        common = common_metadata(
            begins,
            stops,
            to_device(self._table[rows, :columns], device),
            to_device(slots, device),
            positions,
        )
        tokens = to_device(self._tokens(row, places), device)
        hidden = draft.forward(tokens, positions, common)
        wanted = np.repeat(begins[1:], asked) - _down_to_one(asked)
        return draft.logits(hidden[to_device(wanted, device)])

    def _tokens(self, row: Ints, places: Ints) -> NDArray[np.int32]:
        """Token ids at some places of some requests."""
        beyond = places - self.ends[row]
        last = self._committed.shape[1] - 1
        committed = self._committed[self.places[row], np.minimum(places, last)]
        guessed = self.guesses[row, np.clip(beyond, 0, self.guesses.shape[1] - 1)]
        return np.where(beyond < 0, committed, guessed).astype(np.int32)


def _down_to_one(counts: Ints) -> Ints:
    """[c, c - 1, .., 1] of every count c, one after the other."""
    ends = np.cumsum(counts)
    descending: Ints = np.repeat(ends, counts) - np.arange(ends[-1] if len(ends) else 0)
    return descending


class DraftKVState:
    """How far a model has computed each request, and what joins its first pass.

    Args:
        computed: tokens whose keys and values it has, [n].
        others: (row, start, stop) of requests that are not drafted for now and only caught up.

    Attributes:
        caught_up: those of ``others`` that are done, [.., 3].
    """

    def __init__(self, computed: Ints, others: Sequence[tuple[int, int, int]]) -> None:
        self.computed = computed
        self.others = np.asarray(others, dtype=np.int64).reshape(-1, 3)
        self.caught_up = self.others[:0]


class ChainSearch:
    """One drafting step of a chain over ``n`` requests.

    Args:
        chain: the models, in the order in which they work.
        kv_states: of each model.
        ahead: the requests; the first ``n`` of them are drafted for.
        temperatures: divisors of the last model's logits, [n, 1].
        plan: tokens of the last model (depth), candidates for each (width), and guesses of the
            first model between two passes of the second (window).
        report: gets the times of passes, and the acceptance within the chain.
        at_work: is told the place of the model that runs next.

    Attributes:
        counts: tokens that the last model has for each request, [n].
        tokens, probabilities: its candidates, the likeliest first, [n, depth, width].
        roots: place in the pool -> the model's distribution after the committed tokens of the first
            few requests, [few, vocabulary].
    """

    def __init__(
        self,
        chain: Sequence[Member],
        kv_states: Sequence[DraftKVState],
        ahead: Ahead,
        temperatures: Tensor,
        plan: Plan,
        report: DraftingReport,
        at_work: Callable[[int], None],
    ) -> None:
        self.chain = chain
        self.kv_states = kv_states
        self.ahead = ahead
        self.temperatures = temperatures
        self.window = plan.window
        self.report = report
        self._at_work = at_work
        n = len(temperatures)
        self.counts = np.zeros(n, dtype=np.int64)
        self.tokens = np.zeros((n, plan.depth, plan.width), dtype=np.int64)
        self.probabilities = np.zeros((n, plan.depth, plan.width))
        self.roots: dict[int, Tensor] = {}
        self._ends = ahead.ends[:n]
        self._path = np.ones(n)

    def run(self) -> None:
        """Repeat the chain until the last model has all tokens, or all paths are unlikely."""
        last = len(self.chain) - 1
        depth = self.tokens.shape[1]
        left = np.full_like(self.counts, depth)
        while left.any():
            self.counts += self._continue(last, left)
            left = np.where(self._path >= UNLIKELY, depth - self.counts, 0)
        for level, kv_states in enumerate(self.kv_states):
            if len(kv_states.others):
                self._pass(level, self.counts[:0], self.counts[:0], self.counts[:0])

    def read(self) -> Tensor:
        """The first model's logits after the committed tokens, [n, vocabulary]."""
        rows = np.arange(len(self.counts))
        logits, _ = self._pass(0, rows, self._ends, np.ones_like(rows))
        self.kv_states[0].computed[:] = self._ends
        return logits

    def _continue(self, level: int, left: Ints) -> Ints:
        """Guess up to ``left`` more tokens of each request at a level.

        Returns:
            The number of guesses of each request, [n]. A single model guesses one token a call.
        """
        if level == 0:
            steps = int(left.max()) if level < len(self.chain) - 1 else 1
            for step in range(steps):
                self._check(0, np.flatnonzero(left > step), np.full_like(left, step))
            return np.minimum(left, steps)
        room = np.maximum(left - 1, 0)
        guessed = self._continue(level - 1, np.minimum(room, self.window) if level == 1 else room)
        return self._check(level, np.flatnonzero(left), guessed)

    def _check(self, level: int, rows: Ints, guessed: Ints) -> Ints:
        """One pass of a level's model over ``guessed`` tokens behind those of the last model.

        The model keeps the guesses that are its own greedy choice, and adds a token. The first
        model has no guesses of others to check: it reads its own and adds a token.

        Returns:
            The tokens of each request that are this model's own now, [n].
        """
        own_now = np.zeros_like(guessed)
        if not len(rows):
            return own_now
        trusted = level == 0
        kv_states = self.kv_states[level]
        have, own = self.counts[rows], guessed[rows]
        stops = self._ends[rows] + have + own
        asked = np.ones_like(own) if trusted else own + 1
        logits, tokens = self._pass(level, rows, stops, asked)
        starts = np.cumsum(asked) - asked
        kept = own
        if not trusted:
            kept = self._agreement(rows, tokens, starts, own)
            self._count_edge(level, own, kept)
        self.ahead.guesses[rows, have + kept] = tokens[starts + (0 if trusted else kept)]
        kv_states.computed[rows] = stops
        for below in self.kv_states[: level + 1]:
            valid = self._ends[rows] + have + kept
            below.computed[rows] = np.minimum(below.computed[rows], valid)
        if level == len(self.chain) - 1:
            self._add_candidates(rows, have, logits, starts, asked if trusted else kept + 1)
        own_now[rows] = kept + 1
        return own_now

    def _pass(self, level: int, rows: Ints, stops: Ints, asked: Ints) -> tuple[Tensor, Ints]:
        """Run a level's model up to ``stops``. Requests to catch up join its first pass.

        Returns:
            Its logits where asked, [asked tokens, vocabulary], and its likeliest tokens there.
        """
        kv_states, member = self.kv_states[level], self.chain[level]
        began_s = time.perf_counter()
        starts, first = kv_states.computed[rows], member.place not in self.roots
        others, kv_states.others = kv_states.others, kv_states.others[:0]
        self._at_work(member.place)
        logits = self.ahead.run(
            member.model,
            np.append(rows, others[:, 0]),
            np.append(starts, others[:, 1]),
            np.append(stops, others[:, 2]),
            np.append(asked, np.zeros(len(others), dtype=np.int64)),
        )
        kv_states.caught_up = np.concatenate((kv_states.caught_up, others))
        tokens = logits.argmax(dim=-1).cpu().numpy()
        count = int((stops - starts).sum() + (others[:, 2] - others[:, 1]).sum())
        self.report.passes.append((member.place, count, time.perf_counter() - began_s))
        if first and len(asked):
            few = (np.cumsum(asked) - asked)[:COMPARED]
            self.roots[member.place] = logits[to_device(few, logits.device)].float().softmax(dim=-1)
        return logits, tokens

    def _agreement(self, rows: Ints, tokens: Ints, starts: Ints, own: Ints) -> Ints:
        """Number of leading guesses of each request that are the model's greedy choice, [r]."""
        most = int(own.max()) if len(own) else 0
        steps = np.arange(most)
        have = self.counts[rows]
        there = np.minimum(have[:, None] + steps, self.ahead.guesses.shape[1] - 1)
        guesses = self.ahead.guesses[rows[:, None], there]
        greedy = tokens[np.minimum(starts[:, None] + steps, len(tokens) - 1)]
        same = (guesses == greedy) & (steps < own[:, None])
        agreeing: Ints = np.cumprod(same, axis=1).sum(axis=1)
        return agreeing

    def _count_edge(self, level: int, own: Ints, kept: Ints) -> None:
        tried = int(np.minimum(kept + 1, own).sum())
        if tried:
            drafter, verifier = self.chain[level - 1].place, self.chain[level].place
            self.report.edges.append(EdgeTrials(drafter, verifier, tried, int(kept.sum())))

    def _add_candidates(
        self, rows: Ints, have: Ints, logits: Tensor, starts: Ints, new: Ints
    ) -> None:
        """Add the last model's candidates for each of its ``new`` tokens."""
        owner = np.repeat(np.arange(len(rows)), new)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(new) - new, new)
        chosen = to_device(starts[owner] + within, logits.device)
        heat = self.temperatures[to_device(rows[owner], logits.device)]
        logp = (logits[chosen].float() / heat).log_softmax(dim=-1)
        best, tokens = logp.topk(self.tokens.shape[2], dim=-1)
        where = rows[owner], have[owner] + within
        likely = best.double().exp().cpu().numpy()
        candidates, chosen_token = tokens.cpu().numpy(), self.ahead.guesses[where]
        # Of equal logits, the token with which the chain went on comes first.
        is_chosen = candidates == chosen_token[:, None]
        self.tokens[where] = np.where(is_chosen, candidates[:, :1], candidates)
        self.tokens[(*where, 0)] = chosen_token
        self.probabilities[where] = likely
        np.multiply.at(self._path, rows[owner], likely[:, 0])

    def trees(self) -> tuple[list[int], Ints, Parents, Floats]:
        """(nodes of each request, tokens, parents, probabilities), request by request: a chain of
        the likeliest tokens with the other candidates beside them."""
        _, depth, width = self.tokens.shape
        exists = np.arange(depth) < self.counts[:, None]
        parents = np.repeat(np.arange(-1, depth - 1) * width, width).astype(np.int32)
        parents[:width] = -1
        rows = np.broadcast_to(parents.reshape(depth, width), self.tokens.shape)
        counts = (self.counts * width).tolist()
        return (
            counts,
            self.tokens[exists].ravel(),
            rows[exists].ravel(),
            self.probabilities[exists].ravel(),
        )
