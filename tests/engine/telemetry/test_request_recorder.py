# SPDX-License-Identifier: Apache-2.0
"""What is recorded of requests, by the real scheduler under a virtual clock: each end, the times
that clients saw, hashes; and that nothing is served differently because of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.request import Request

from vllm_slo import SLO
from vllm_slo.config.recording import SALT_VARIABLE, RecordingConfig
from vllm_slo.core.attainment import worst_window_tpot_s
from vllm_slo.core.clock import VirtualClock
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.telemetry import recording_files
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics
from vllm_slo.engine.telemetry.request_recorder import RequestRecorder
from vllm_slo.engine.telemetry.state import SOCKET_VARIABLE
from vllm_slo.errors import ConfigError
from vllm_slo.sim.harness import Outcome, VirtualEngine
from vllm_slo.slo.keys import EXEMPT_KEY, GROUP_KEY
from vllm_slo.traces.files import detect, read
from vllm_slo.traces.request import TraceRequest

MODEL = StepTimeModel(((0.0, 0.0, 0.02), (0.0004, 0.0, 0.01)), kv_s=1e-7, max_tokens=8192)
CHAT = SLO(ttft_ms=2000, tpot_ms=100)
KEYS = {
    *("timestamp", "input_length", "output_length", "hash_ids", "class", "tenant", "model"),
    *("session", "priority", "ttft_ms", "tpot_ms", "e2e_ms", "end", "promise", "late_kept"),
    *("served_ttft_ms", "served_tpot_ms", "served_e2e_ms", "attained"),
}
"""All that a line may hold."""

Make = Callable[..., VirtualEngine]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "r.jsonl"


@pytest.fixture
def make(config_folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines that record into ``path``."""
    for variable in (SALT_VARIABLE, SOCKET_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    made: list[VirtualEngine] = []

    def engine(records: bool = True, recording: Any = None, **given: Any) -> VirtualEngine:
        config = {"recording": {"path": str(path), **(recording or {})}}
        config |= {"classes": {"chat": {"ttft_ms": 2000, "tpot_ms": 100}}}
        config |= given.pop("slo_config", {})
        step_time = MODEL.predict_shape_s
        one = VirtualEngine(
            *(Scheduler, config_folder, step_time),
            believed=MODEL,
            records=records,
            slo_config=config,
            **given,
        )
        made.append(one)
        return one

    yield engine
    for one in made:
        one.scheduler.shutdown()


def recorded(engine: VirtualEngine, path: Path) -> list[TraceRequest]:
    """The requests in the file once the engine has ended."""
    engine.scheduler.shutdown()
    assert detect(path) == "vllm-slo"
    requests = list(read(path))
    origin_s = min((request.at_s for request in requests), default=0.0)
    assert all(request.at_s >= origin_s for request in requests)
    return requests


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert all(line.keys() <= KEYS for line in found)
    return found


def as_seen(outcome: Outcome) -> dict[str, float | None]:
    """TTFT, TPOT and end to end in ms, as a client measures them."""
    times = outcome.token_times_s
    worst_s = worst_window_tpot_s(times)
    seconds = {"ttft": times[0] - outcome.arrival_s, "tpot": worst_s}
    seconds["e2e"] = times[-1] - outcome.arrival_s
    return {name: None if s is None else round(s * 1e3, 3) for name, s in seconds.items()}


def as_recorded(request: TraceRequest) -> dict[str, float | None]:
    served = request.served
    assert served is not None
    seconds = {"ttft": served.ttft_s, "tpot": served.tpot_s, "e2e": served.e2e_s}
    return {name: None if s is None else round(s * 1e3, 3) for name, s in seconds.items()}


# --- what became of requests ---------------------------------------------------------------------


@pytest.mark.parametrize("slo", [CHAT, None, SLO(tier="best_effort")])
def test_requests_are_recorded_as_their_clients_saw_them(
    make: Make, path: Path, slo: SLO | None
) -> None:
    engine = make()
    for tokens in (1, 2, 10, 11, 12, 25, 31, 40):
        engine.add(f"r{tokens}", 300, tokens, slo)
        engine.step()
    engine.run()
    requests = recorded(engine, path)
    assert len(requests) == 8
    for request in requests:
        outcome = engine.outcomes[f"r{request.output_tokens}"]
        assert as_recorded(request) == pytest.approx(as_seen(outcome), abs=0.002)
        assert request.served is not None
        assert (request.served.end, request.served.late_kept) == ("completed", None)
        if slo is CHAT:
            assert (request.served.promise, request.served.attained) == ("in_time", True)
            assert (request.ttft_ms, request.tpot_ms, request.e2e_ms) == (2000, 100, None)
        else:
            assert request.served.promise is request.served.attained is None
            assert request.ttft_ms is request.tpot_ms is None


@pytest.mark.parametrize("overlap", [False, True])
def test_times_hold_where_steps_bring_several_tokens(make: Make, path: Path, overlap: bool) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    engine = make(speculative_config=drafts, overlap=overlap)
    for number in range(12):
        slo = CHAT if number % 3 == 0 else None
        engine.add(f"r{number}", 100 + number, 20 + 7 * number, slo, acceptance=0.08 * number)
        engine.step()
    engine.run()
    found = {request.prompt_tokens - 100: request for request in recorded(engine, path)}
    assert len(found) == 12
    for number, request in found.items():
        seen = as_seen(engine.outcomes[f"r{number}"])
        assert as_recorded(request) == pytest.approx(seen, abs=0.002)


def test_arrival_times_count_from_the_beginning(make: Make, path: Path) -> None:
    engine = make()
    engine.wait_until(2.5)
    engine.add("one", 100, 3)
    engine.run()
    engine.wait_until(7.25)
    engine.add("other", 100, 3, CHAT)
    engine.run()
    recorded(engine, path)
    assert [line["timestamp"] for line in lines(path)] == [2500.0, 7250.0]


def test_a_late_promise(make: Make, path: Path) -> None:
    engine = make()
    engine.add("late", 4000, 5, SLO(ttft_ms=1))
    engine.run()
    (request,) = recorded(engine, path)
    assert request.served is not None
    assert (request.served.end, request.served.promise) == ("completed", "late")
    assert (request.served.late_kept, request.served.attained) == (True, False)


def test_a_declined_request(make: Make, path: Path) -> None:
    engine = make()
    engine.add("no", 4000, 5, SLO(ttft_ms=1, e2e_ms=50, on_unattainable="decline"))
    engine.run()
    (request,) = recorded(engine, path)
    assert request.served is not None
    assert (request.served.end, request.served.promise) == ("declined", "none")
    assert request.served.attained is False
    assert as_recorded(request) == {"ttft": None, "tpot": None, "e2e": None}
    assert (request.prompt_tokens, request.output_tokens) == (4000, 0)
    assert (request.ttft_ms, request.e2e_ms) == (1, 50)


@pytest.mark.parametrize("slo", [CHAT, None])
@pytest.mark.parametrize("tokens", [0, 7, 25])
def test_a_client_that_left(make: Make, path: Path, slo: SLO | None, tokens: int) -> None:
    engine = make()
    engine.add("gone", 100, 100, slo)
    while len(engine.outcomes["gone"].token_times_s) < tokens:
        engine.step()
    engine.abort("gone")
    engine.run()
    (request,) = recorded(engine, path)
    assert request.served is not None
    assert (request.served.end, request.served.attained) == ("aborted", None)
    assert (request.output_tokens, request.served.e2e_s) == (tokens, None)
    assert (request.served.ttft_s is None) == (tokens == 0)


def test_a_stop_string_completes_a_request(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's API server finds it, and aborts the request as if its client had left."""
    engine = make()
    engine.add("one", 100, 50, stop=["."])
    for _ in range(5):
        engine.step()
    monkeypatch.setattr(engine.stages, "has_stopped", lambda request: True)
    engine.abort("one")
    (request,) = recorded(engine, path)
    assert request.served is not None and request.served.end == "completed"
    assert as_recorded(request) == pytest.approx(as_seen(engine.outcomes["one"]), abs=0.002)


def test_requests_that_live_when_the_engine_ends_have_failed(make: Make, path: Path) -> None:
    engine = make()
    engine.add("one", 100, 50)
    engine.add("other", 100, 50, CHAT)
    engine.step()
    plain, asked = (request.served for request in recorded(engine, path))
    assert plain is not None and asked is not None
    assert (plain.end, plain.attained) == ("failed", None)
    assert (asked.end, asked.attained) == ("failed", False)


def test_what_nobody_is_served_is_left_out(make: Make, path: Path) -> None:
    engine = make()
    engine.add("quote", 100, 5, CHAT, quote=True)
    engine.scheduler.add_request(sampled("bad", {"slo_ttft_ms": -1}, engine))
    engine.scheduler.add_request(sampled("part", engine.seal.sealed({EXEMPT_KEY: 1}), engine))
    engine.add("served", 70, 3)
    engine.run()
    assert [request.prompt_tokens for request in recorded(engine, path)] == [70]


def test_choices_are_declined_together_with_their_objectives(make: Make, path: Path) -> None:
    engine = make()
    asked = SLO(ttft_ms=1, on_unattainable="decline").to_extra_args() | {GROUP_KEY: "g"}
    engine.scheduler.add_request(sampled("a", engine.seal.sealed(asked), engine, tokens=4000))
    engine.run()
    engine.scheduler.add_request(sampled("b", engine.seal.sealed(asked), engine, tokens=4000))
    engine.run()
    ends = [(r.ttft_ms, r.served and r.served.end) for r in recorded(engine, path)]
    assert ends == [(1, "declined")] * 2


def sampled(name: str, extra: dict[str, Any], engine: VirtualEngine, tokens: int = 50) -> Request:
    """A request with these keys, which has not been sent."""
    engine.outcomes[name] = Outcome(engine.clock.now_s, None)
    engine.lengths[name], engine.stages.ends[name] = 3, ()
    return Request(
        request_id=name,
        prompt_token_ids=[1] * tokens,
        sampling_params=SamplingParams(max_tokens=3, extra_args=extra),
        pooling_params=None,
        arrival_time=engine.clock.now_s,
        block_hasher=engine._hasher,
    )


# --- who asked -----------------------------------------------------------------------------------


def test_classes_are_plain_and_names_are_hashed(make: Make, path: Path) -> None:
    engine = make()
    for name in ("a", "b"):
        asked = SLO(slo_class="chat", tenant="acme", session_id="job-17")
        engine.add(name, 100, 3, asked, priority=3)
    engine.add("c", 100, 3, SLO(tenant="other", session_id="job-17"))
    engine.run()
    first, second, third = sorted(recorded(engine, path), key=lambda r: not r.slo_class)
    assert (first.slo_class, first.priority, first.ttft_ms) == ("chat", 3, 2000)
    assert (third.slo_class, third.priority) == ("", 0)
    assert first.tenant == second.tenant != third.tenant is not None
    assert first.session == second.session is not None
    text = path.read_text()
    assert "acme" not in text and "other" not in text and "job-17" not in text


def test_tenants_may_be_plain(make: Make, path: Path) -> None:
    engine = make(recording={"tenants": "plain"})
    engine.add("a", 100, 3, SLO(tenant="acme", session_id="job-17"))
    engine.run()
    (request,) = recorded(engine, path)
    assert request.tenant == "acme"
    assert "job-17" not in path.read_text()


def test_the_model_is_named_and_an_adapter_with_its_requests(make: Make, path: Path) -> None:
    engine = make(served_model_name="house/model")
    engine.add("a", 128, 3)
    engine.add("b", list(engine.scheduler.requests["a"].prompt_token_ids or ()), 3)
    engine.scheduler.requests["b"].lora_request = SimpleNamespace(lora_name="sql", lora_int_id=1)  # type: ignore[assignment]
    engine.run()
    requests = {request.model: request for request in recorded(engine, path)}
    assert requests.keys() == {"house/model", "sql"}
    assert not set(requests["sql"].hash_ids) & set(requests["house/model"].hash_ids)


def test_a_folder_is_named_without_the_way_to_it(
    make: Make, path: Path, config_folder: Path
) -> None:
    engine = make()
    header = json.loads(path.read_text())
    assert header["model"] == config_folder.name
    assert str(config_folder) not in path.read_text()
    engine.run()


# --- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_prompts_that_begin_alike_have_ids_in_common(make: Make, path: Path, caching: bool) -> None:
    engine = make(enable_prefix_caching=caching, recording={"block_tokens": 100})
    common = list(range(1000, 1250))
    for name, own in (("a", 2000), ("b", 3000)):
        engine.add(name, common + list(range(own, own + 150)), 40)
    engine.add("c", list(range(4000, 4099)), 3)
    engine.run()
    requests = recorded(engine, path)
    a, b, c = sorted(requests, key=lambda r: (-r.prompt_tokens, -r.output_tokens))
    assert (len(a.hash_ids), len(b.hash_ids), len(c.hash_ids)) == (4, 4, 0)
    assert a.hash_ids[:2] == b.hash_ids[:2]
    assert not set(a.hash_ids[2:]) & set(b.hash_ids)
    assert a.block_tokens == 100
    assert not {*range(1000, 1250), *range(2000, 2150)} & {*a.hash_ids}


def test_each_run_has_its_own_salt_unless_processes_share_one(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ids() -> tuple[int, ...]:
        engine = make()
        engine.add("a", list(range(128)), 3, SLO(tenant="acme"))
        engine.run()
        (request,) = recorded(engine, path)
        return request.hash_ids

    assert not set(ids()) & set(ids())
    monkeypatch.setenv(SALT_VARIABLE, "ab" * 16)
    assert ids() == ids()
    assert "abab" not in path.read_text()


# --- files of one engine, and of several ---------------------------------------------------------


def test_files_rotate_and_are_bounded(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_slo.engine.telemetry.request_recorder.MEGABYTE", 1000)
    engine = make(recording={"max_mb": 2, "files": 3})
    for number in range(60):
        engine.add(f"r{number}", 100, 2)
        engine.run()
    last = recorded(engine, path)
    rotated = [path, path.with_name("r.jsonl.1"), path.with_name("r.jsonl.2")]
    assert set(path.parent.iterdir()) == {*rotated, path.with_name("r.jsonl.lock")}
    assert max(file.stat().st_size for file in rotated) <= 2000
    whole = [r for file in reversed(rotated) for r in read(file)]
    assert len(last) < len(whole) < 60
    times = [request.at_s for request in whole]
    assert times == sorted(times)  # of one origin


def test_a_further_engine_of_a_server_adds_its_rank(make: Make, path: Path) -> None:
    config = make(records=False).config
    config.parallel_config.data_parallel_index = 1
    section, series = RecordingConfig(path=str(path)), SchedulerMetrics(1).recording()
    RequestRecorder.of_engine(section, config, VirtualClock(), series, 10).close()
    assert not path.exists()
    assert list(read(path.with_name("r.rank-1.jsonl"))) == []


def test_engines_behind_a_front_share_a_configuration(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, str(path.with_name("socket")))
    engines = [make(), make()]
    for number, engine in enumerate(engines):
        engine.add("one", 100 + number, 3)
        engine.run()
        (request,) = recorded(engine, path.with_name(f"r.replica-{number}.jsonl"))
        assert request.prompt_tokens == 100 + number


def test_an_engine_that_cannot_record_does_not_start(make: Make, path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^recording.path '.*/no/r.jsonl': there is no folder"):
        make(recording={"path": str(path.parent / "no" / "r.jsonl")})
    make()
    with pytest.raises(ConfigError, match="another engine records into it"):
        make()


# --- what it does to the engine ------------------------------------------------------------------


def test_without_it_nothing_is_there(make: Make, path: Path) -> None:
    engine = make(records=False)
    assert engine.scheduler.parts.recorder is None
    engine.add("one", 100, 3, CHAT)
    engine.run()
    engine.scheduler.shutdown()
    assert list(path.parent.iterdir()) == []


def load(engine: VirtualEngine) -> None:
    """Requests of all kinds, some of which wait."""
    for number in range(40):
        kinds = [None, CHAT, SLO(ttft_ms=1), SLO(ttft_ms=1, on_unattainable="decline")]
        engine.add(f"r{number}", 100 + 60 * (number % 7), 5 + number, kinds[number % 4])
        engine.step()
        if number % 10 == 9:
            engine.abort(f"r{number - 1}")
    engine.run()


def seen(engine: VirtualEngine) -> dict[str, Any]:
    return {
        name: (one.token_times_s, one.finish_reason, one.stop_reason, one.report)
        for name, one in engine.outcomes.items()
    }


def test_nothing_is_served_differently(make: Make, path: Path) -> None:
    recording, plain = make(), make(records=False)
    for engine in (recording, plain):
        load(engine)
    assert seen(recording) == seen(plain)
    steps = [[output.num_scheduled_tokens for output in e.history] for e in (recording, plain)]
    assert steps[0] == steps[1]
    requests = recorded(recording, path)
    assert len(requests) == 40
    ends = {request.served.end for request in requests if request.served}
    assert ends == {"completed", "declined", "aborted"}


def test_a_full_disk_costs_lines_and_nothing_else(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, plain = make(), make(records=False)

    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording_files.os, "write", full)
    for engine in (recording, plain):
        load(engine)
    assert seen(recording) == seen(plain)
    assert recorded(recording, path) == []
    series = recording.scheduler.parts.metrics.registry
    labels = {"engine": "0"}
    assert series.get_sample_value("vllm_slo:recorded_requests_total", labels) == 40
    assert series.get_sample_value("vllm_slo:recording_dropped_total", labels) == 40


def test_a_record_that_a_fault_cost_is_forgotten(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(options={"contains_faults": True})

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault")

    with monkeypatch.context() as faulty:
        faulty.setattr(engine.scheduler.parts.sessions, "end", broken)
        engine.add("a", 100, 5, CHAT)
        engine.run()
    engine.add("b", 200, 5, CHAT)
    engine.run()
    assert engine.scheduler.parts.recorder is not None
    assert engine.scheduler.parts.recorder._live == {}
    assert [request.prompt_tokens for request in recorded(engine, path)] == [200]


@pytest.mark.parametrize("method", ["arrived", "note_tokens", "_record"])
def test_a_fault_of_the_recorder_costs_records_and_nothing_else(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    recording = make(options={"contains_faults": True})
    recorder, calls = recording.scheduler.parts.recorder, []
    assert recorder is not None
    asked = getattr(recorder, method)

    def broken(*arguments: Any, **named: Any) -> None:
        calls.append(method)
        if len(calls) == 2:
            raise RuntimeError("a fault")
        asked(*arguments, **named)

    monkeypatch.setattr(recorder, method, broken)
    for name in ("a", "b", "c"):
        recording.add(name, 100, 5)
        recording.run()
    assert len(calls) >= 3
    for name in ("a", "b", "c"):
        assert len(recording.outcomes[name].token_times_s) == 5
    assert recording.scheduler.parts.containment.failures == 1
    assert recorder._live == recorder._paces == {}
    ends = [request.served and request.served.end for request in recorded(recording, path)]
    assert ends == ["completed"] * (3 if method == "note_tokens" else 2)
