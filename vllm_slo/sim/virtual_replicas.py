# SPDX-License-Identifier: Apache-2.0
"""Simulated replicas: one virtual engine, or several that divide prefill and decode."""

from __future__ import annotations

import functools
import heapq
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from vllm_slo.config.model import SLOConfig
from vllm_slo.config.serve_args import tree_arguments
from vllm_slo.config.speculation import SpeculationConfig
from vllm_slo.core.clock import VirtualClock
from vllm_slo.core.routing.replica_state import ReplicaState
from vllm_slo.core.routing.tickets import Ticket
from vllm_slo.core.step_time.estimator import DEFAULT_MARGIN
from vllm_slo.sim.baselines import NO_DEADLINE, LatencyBudget, PrefillFirst, ShedEDF
from vllm_slo.sim.conditions import Conditions
from vllm_slo.sim.errors import SimulationError
from vllm_slo.sim.front import Replica
from vllm_slo.sim.hardware import Hardware
from vllm_slo.sim.harness import AsyncScheduler, EngineShape, Scheduler, VirtualEngine
from vllm_slo.sim.jobs import RoundRequest, RoundResult, answer_text
from vllm_slo.sim.light_scheduler import LightScheduler, LightSLOScheduler
from vllm_slo.sim.systems import System
from vllm_slo.sim.virtual_draft import DraftModel, blocks_of_trees
from vllm_slo.slo.fields import NAME

SCHEDULERS: dict[str, tuple[type[AsyncScheduler], type[AsyncScheduler] | None]] = {
    "slo": (LightSLOScheduler, Scheduler),
    "fcfs": (LightScheduler, AsyncScheduler),
    "priority": (LightScheduler, AsyncScheduler),
    "disaggregated": (LightScheduler, None),
    "prefill_first": (PrefillFirst, None),
    "shed_edf": (ShedEDF, None),
    "latency_budget": (LatencyBudget, None),
}
"""Policy -> its scheduler over the light scheduler, and over vLLM's own if there is one."""
BY_DEADLINE: Final = ("priority", "latency_budget")
"""Policies of which a request's priority is its deadline."""
OF_THE_HARDWARE: Final = ("block_size", "attention_backend", "compilation_config")
"""Arguments of vLLM's engine that trees set where the simulator runs. It has those of the simulated
hardware, or needs none."""


@functools.cache
def model_folder(max_model_len: int) -> Path:
    """A folder with the ``config.json`` of a model that is never loaded."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-slo-sim-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 2048,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _speculation(hardware: Hardware, conditions: Conditions) -> SpeculationConfig:
    """As ``vllm-slo serve --draft-model`` configures it."""
    given = (conditions.config or SLOConfig()).speculation
    draft = {"draft_model": str(model_folder(hardware.max_model_len)), "draft_servers": None}
    return given.model_copy(update=draft)


def kv_tokens_for_requests(system: System, hardware: Hardware, conditions: Conditions) -> int:
    """KV tokens of whole blocks that requests can have; trees are verified in the other blocks."""
    blocks = hardware.kv_tokens // hardware.block_size
    if system.trees:
        blocks -= blocks_of_trees(_speculation(hardware, conditions), hardware.block_size)
    return max(blocks, 0) * hardware.block_size


def build_engine(
    system: System,
    hardware: Hardware,
    conditions: Conditions,
    applications: Sequence[str],
    number: int,
    **options: Any,
) -> VirtualEngine:
    """Engine ``number`` of a run. ``options`` go to the scheduler class."""
    light, real = SCHEDULERS[system.policy]
    if conditions.exact and real is None:
        raise SimulationError(
            f"exact: {system.name} runs on the light scheduler only; do not set it"
        )
    engine_args: dict[str, Any] = {}
    slo_config = _slo_config(conditions, applications)
    if system.trees:
        speculation = _speculation(hardware, conditions)
        slo_config["speculation"] = speculation.model_dump(exclude_unset=True)
        engine_args |= tree_arguments(speculation, OF_THE_HARDWARE)
        engine_args["draft"] = draft_model(hardware, speculation)
    if system.policy in BY_DEADLINE:
        engine_args["scheduling_policy"] = "priority"
    if system.drafts:
        engine_args["speculative_config"] = {
            "method": "draft_model",
            "model": str(model_folder(hardware.max_model_len)),
            "num_speculative_tokens": system.drafts,
        }
    if system.policy == "shed_edf":
        options["step_time"] = hardware.step_time.scaled(conditions.margin)
    if system.policy == "latency_budget":
        options["step_time"] = hardware.step_time
        options["budget_s"] = system.step_ms / 1e3
    clock = VirtualClock()
    return VirtualEngine(
        real if conditions.exact and real else light,
        model_folder(hardware.max_model_len),
        conditions.true_step_time(hardware, number, clock),
        EngineShape(
            hardware.kv_tokens // hardware.block_size + 1,
            hardware.block_size,
            min(hardware.max_num_seqs, system.token_budget),  # vLLM refuses more
            system.token_budget,
            min(hardware.max_model_len, kv_tokens_for_requests(system, hardware, conditions)),
        ),
        believed=conditions.believed(hardware, number),
        margin=1.0 if conditions.is_known(number) else DEFAULT_MARGIN,
        slo_config=slo_config,
        overhead=_overhead(system, hardware, conditions),
        clock=clock,
        seed=conditions.seed,
        options=options,
        **engine_args,
    )


def _slo_config(conditions: Conditions, applications: Sequence[str]) -> dict[str, Any]:
    """The configuration of a scheduler: the operator's, without what a simulation cannot have.

    A request states its class and objectives itself, so there is no default class. Where answers
    have stages is not known of recorded requests: their tightest TPOT holds for the whole answer,
    as admission judges them (SLOs-Serve, section 3.2.1). Made-up prompts teach no lengths.
    """
    classes: dict[str, Any] = {name: {} for name in applications if NAME.fullmatch(name)}
    if conditions.config is None:
        return {"classes": classes}
    left_out = {"access", "default_class", "profile", "priorities", "service_tiers", "classes"}
    config = conditions.config.model_dump(exclude_unset=True, exclude=left_out)
    for name, slo in conditions.config.slo_classes().items():
        classes[name] = conditions.config.classes[name].model_dump(
            exclude_unset=True, exclude={"stages", "thinking_tpot_ms", "tpot_ms"}
        ) | {"tpot_ms": slo.tightest_tpot_ms}
    for key in ("draft_model", "draft_servers", "draft_token_file"):
        config.get("speculation", {}).pop(key, None)
    config.get("best_effort", {}).pop("output_length", None)
    return {**config, "classes": classes}


def draft_model(hardware: Hardware, config: SpeculationConfig) -> DraftModel:
    """The draft of a hardware, as a virtual engine takes it."""
    (_, pass_s, _), _ = hardware.step_time.terms
    assert hardware.draft is not None
    return DraftModel(pass_s, hardware.draft.token_s, config.draft_tokens)


def _overhead(
    system: System, hardware: Hardware, conditions: Conditions
) -> Callable[[int], float] | Literal["measured"] | None:
    """Scheduling time per step, as ``VirtualEngine`` takes it."""
    if conditions.overhead == "measured":
        return "measured"
    if conditions.overhead == "none" or hardware.scheduled:
        return None
    return system.overhead_s


class Colocated:
    """One engine that does prefill and decode.

    ``priorities``: whether a request's priority is its deadline.
    """

    def __init__(self, engine: VirtualEngine, number: int, *, priorities: bool = False) -> None:
        self.engine = engine
        self.engine.keep_history = False
        self.number = number
        self.steps = 0
        self._priorities = priorities
        self._prompts: dict[str, list[int]] = {}

    @property
    def busy(self) -> bool:
        return self.engine.busy

    @property
    def now_s(self) -> float:
        return self.engine.clock.now_s

    @property
    def computed_tokens(self) -> int:
        return self.engine.computed_tokens

    @property
    def scheduler_s(self) -> float:
        return self.engine.scheduler_s

    def state(self) -> ReplicaState | None:
        scheduler = self.engine.scheduler
        return scheduler.state() if isinstance(scheduler, Scheduler) else None

    def promise(self, request: RoundRequest, ticket: Ticket) -> float | None:
        scheduler = self.engine.scheduler
        if not isinstance(scheduler, Scheduler):
            return request.seen_s
        self.accept(request, ticket)
        if scheduler.promise_now(request.name):
            return None
        self.engine.abort(request.name)
        self.engine.forget(request.name)
        del self._prompts[request.name]
        return self.engine.clock.now_s

    def accept(self, request: RoundRequest, ticket: Ticket | None) -> None:
        engine = self.engine
        engine.wait_until(request.seen_s)
        ttft_ms = request.slo.ttft_ms if request.slo else None
        deadline_ms = NO_DEADLINE if ttft_ms is None else request.sent_s * 1e3 + ttft_ms
        self._prompts[request.name] = request.prompt
        engine.add(
            request.name,
            request.prompt,
            request.output_tokens,
            request.slo,
            max_tokens=engine.config.model_config.max_model_len - len(request.prompt),
            priority=int(deadline_ms) if self._priorities else request.priority,
            arrival_s=request.sent_s,
            acceptance=request.acceptance,
            ticket=ticket,
            stage_ends=request.stage_ends,
        )

    def step(self) -> list[str]:
        self.steps += 1
        engine = self.engine
        output = engine.step()
        if not output.num_scheduled_tokens and engine.busy and not engine.finished:
            engine.clock.advance(1e-3)
        ended, engine.finished = engine.finished, []
        if isinstance(engine.scheduler, ShedEDF):
            ended += engine.scheduler.dropped
            engine.scheduler.dropped = []
        return ended

    def take(self, name: str) -> tuple[RoundResult, list[int]]:
        seen = self.engine.forget(name)
        prompt = self._prompts.pop(name)
        finished = seen.finish_reason == "stop"
        report = seen.report or {}
        late = report.get("late_promise")
        result = RoundResult(
            seen.arrival_s,
            tuple(seen.token_times_s),
            finished,
            report.get("promised") if late is None else False,
            self.number,
            report.get("reason"),
            None if late is None else late["kept"],
        )
        return result, [*prompt, *answer_text(len(seen.token_times_s))] if finished else []


class Disaggregated:
    """Prefill engines, decode engines, and a link between them that takes no time.

    A prompt goes to the prefill engine with the fewest tokens to compute. Its KV then goes to the
    decode engine with the fewest requests.
    """

    def __init__(
        self, prefill: list[VirtualEngine], decode: list[VirtualEngine], number: int
    ) -> None:
        self._prefill = [Colocated(engine, number) for engine in prefill]
        self._decode = [Colocated(engine, number) for engine in decode]
        self._load = [0 for _ in prefill]
        self._home: dict[str, int] = {}
        self._requests: dict[str, RoundRequest] = {}
        self._first: dict[str, float] = {}
        self._handed: list[tuple[float, str]] = []
        self.steps = 0

    @property
    def _engines(self) -> list[Colocated]:
        return self._prefill + self._decode

    @property
    def busy(self) -> bool:
        return bool(self._handed) or any(engine.busy for engine in self._engines)

    @property
    def now_s(self) -> float:
        ready = [engine.now_s for engine in self._engines if engine.busy]
        ready += [self._handed[0][0]] if self._handed else []
        return min(ready, default=max(engine.now_s for engine in self._engines))

    @property
    def computed_tokens(self) -> int:
        return sum(engine.computed_tokens for engine in self._engines)

    @property
    def scheduler_s(self) -> float:
        return sum(engine.scheduler_s for engine in self._engines)

    def state(self) -> ReplicaState | None:
        return None

    def promise(self, request: RoundRequest, ticket: Ticket) -> float | None:
        return request.seen_s

    def accept(self, request: RoundRequest, ticket: Ticket | None) -> None:
        place = min(range(len(self._load)), key=self._load.__getitem__)
        self._load[place] += len(request.prompt)
        self._home[request.name] = place
        self._requests[request.name] = request
        self._prefill[place].accept(replace(request, output_tokens=1), ticket)

    def step(self) -> list[str]:
        self.steps += 1
        ready_s, number = min(
            ((e.now_s, n) for n, e in enumerate(self._engines) if e.busy), default=(None, 0)
        )
        if self._handed and (ready_s is None or self._handed[0][0] <= ready_s):
            self._hand_over()
            return []
        ended = self._engines[number].step()
        if number >= len(self._prefill):
            return ended
        return [name for name in ended if self._prompt_done(name)]

    def _prompt_done(self, name: str) -> bool:
        """Hand a request over after its first token; whether that token was also the last."""
        place = self._home[name]
        self._load[place] -= len(self._requests[name].prompt)
        if self._requests[name].output_tokens == 1:
            return True
        result, _ = self._prefill[place].take(name)
        self._first[name] = result.token_times_s[0]
        heapq.heappush(self._handed, (self._first[name], name))
        return False

    def _hand_over(self) -> None:
        now_s, name = heapq.heappop(self._handed)
        request = self._requests[name]
        target = min(self._decode, key=lambda replica: replica.engine.live)
        target.accept(
            replace(
                request,
                prompt=[*request.prompt, *answer_text(2)[:1]],
                output_tokens=request.output_tokens - 1,
                seen_s=now_s,
            ),
            None,
        )
        self._home[name] = len(self._prefill) + self._decode.index(target)

    def take(self, name: str) -> tuple[RoundResult, list[int]]:
        request = self._requests.pop(name)
        result, text = self._engines[self._home.pop(name)].take(name)
        first_s = self._first.pop(name, None)
        if first_s is not None:
            result = replace(
                result, token_times_s=(first_s, *result.token_times_s), sent_s=request.sent_s
            )
        return result, text


def build_replicas(
    system: System, hardware: Hardware, conditions: Conditions, applications: Sequence[str]
) -> list[Replica]:
    """The replicas of one run."""
    count = system.engines

    def engine(number: int, **options: Any) -> VirtualEngine:
        return build_engine(system, hardware, conditions, applications, number, **options)

    replicas: list[Replica] = []
    for replica in range(conditions.replicas):
        first = replica * count
        if system.policy == "disaggregated":
            prefill = [engine(first + n) for n in range(system.prefill)]
            decode = [
                engine(first + system.prefill + n, received_kv=True) for n in range(system.decode)
            ]
            replicas.append(Disaggregated(prefill, decode, replica))
        else:
            replicas.append(
                Colocated(engine(first), replica, priorities=system.policy in BY_DEADLINE)
            )
    return replicas
