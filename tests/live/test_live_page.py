# SPDX-License-Identifier: Apache-2.0
"""The live page without a browser: what is kept of the series, in how much memory, and what is
answered to whom."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_app import Server
from patience import patience
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.values import MultiProcessValue

from vllm_slo.engine.http import live_page
from vllm_slo.engine.http.live_page import LivePage
from vllm_slo.engine.http.middleware import SLOMiddleware
from vllm_slo.engine.telemetry.exposition import FOLDER_VARIABLE, FolderCollector
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics
from vllm_slo.live import history
from vllm_slo.live.history import COARSE, FINE, KEPT, STEP_S, History
from vllm_slo.live.merge import merged
from vllm_slo.live.page import Sampler, page

FINISHED = "vllm_slo:requests_finished"
OLDEST = "vllm_slo:best_effort_age_seconds"
RUNNING = "vllm:num_requests_running"
T0 = 1_000_020.0  # where a minute begins


def counter(*values: float, slo_class: str = "chat") -> Metric:
    """One counter, as so many engines tell it."""
    family = CounterMetricFamily(FINISHED, "", labels=["engine", "slo_class", "attained"])
    for engine, value in enumerate(values):
        family.add_metric([str(engine), slo_class, "true"], value)
    return family


def gauge(name: str, *values: float) -> Metric:
    family = GaugeMetricFamily(name, "", labels=["engine"])
    for engine, value in enumerate(values):
        family.add_metric([str(engine)], value)
    return family


def seen(kept: History, *, coarse: bool = False, since: int = 0) -> list[tuple[int, Any, Any]]:
    """(time, increments, gauges) by name and labels, of what a page is told."""
    told = json.loads(json.dumps(kept.since(since, coarse=coarse)))
    names = ["/".join(filter(None, series)) for series in told["series"]]
    return [
        (time_ms, *({names[int(place)]: value for place, value in part.items()} for part in parts))
        for time_ms, _, *parts in told["samples"]
    ]


# --- what is kept --------------------------------------------------------------------------------


def test_counters_are_increments_from_the_first_look_on() -> None:
    kept = History()
    for step, value in enumerate([5.0, 5.0, 7.5]):
        kept.add(T0 + step, [counter(value)])
    name = f"{FINISHED}_total/chat/true"
    assert [counts for _, counts, _ in seen(kept)] == [{}, {}, {name: 2.5}]


def test_a_series_that_comes_later_began_at_nothing() -> None:
    kept = History()
    kept.add(T0, [counter(5.0)])
    kept.add(T0 + 1, [counter(5.0), counter(2.0, slo_class="code")])
    assert seen(kept)[-1][1] == {f"{FINISHED}_total/code/true": 2.0}


def test_a_counter_that_starts_anew_counts_what_it_has() -> None:
    kept = History()
    for step, value in enumerate([40.0, 45.0, 3.0, 4.0]):
        kept.add(T0 + step, [counter(value)])
    counts = [counts.get(f"{FINISHED}_total/chat/true", 0.0) for _, counts, _ in seen(kept)]
    assert counts == [0.0, 5.0, 3.0, 1.0]


def test_one_engine_of_two_starting_anew_hides_nothing_of_the_other() -> None:
    kept = History()
    kept.add(T0, [counter(100.0, 10.0)])
    kept.add(T0 + 1, [counter(1.0, 14.0)])
    assert seen(kept)[-1][1] == {f"{FINISHED}_total/chat/true": 5.0}


def test_a_file_that_is_missed_once_is_made_up_for() -> None:
    kept = History()
    kept.add(T0, [counter(5.0)])
    kept.add(T0 + 1, [])
    kept.add(T0 + 2, [counter(9.0)])
    assert [sum(counts.values()) for _, counts, _ in seen(kept)] == [0, 0, 4.0]


def test_requests_of_engines_are_added_up_and_of_ages_the_highest_counts() -> None:
    kept = History()
    kept.add(T0, [gauge(RUNNING, 3.0, 4.0), gauge(OLDEST, 2.5, 1.5)])
    assert seen(kept)[0][2] == {RUNNING: 7.0, OLDEST: 2.5}


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_in_json_is_left_out(odd: float) -> None:
    kept = History()
    kept.add(T0, [gauge(OLDEST, odd), gauge(RUNNING, 1.0)])
    assert seen(kept)[0][2] == {RUNNING: 1.0}


def test_series_that_the_page_does_not_show_are_not_kept() -> None:
    kept = History()
    kept.add(T0, [gauge("python_info", 1.0), gauge("vllm_slo:draft_model_up", 1.0)])
    assert seen(kept) == [(round(T0 * 1e3), {}, {})]


def test_minutes_add_up_increments_and_keep_peaks() -> None:
    kept = History()
    for second in range(0, 121, 2):
        kept.add(T0 + second, [counter(second / 2), gauge(OLDEST, float(second == 14))])
    minutes = seen(kept, coarse=True)
    assert [time_ms // 60_000 - round(T0) // 60 for time_ms, _, _ in minutes] == [0, 1, 2]
    assert sum(sum(counts.values()) for _, counts, _ in minutes) == 60
    assert [gauges[OLDEST] for _, _, gauges in minutes] == [1.0, 0.0, 0.0]


def test_memory_is_bounded_in_samples_and_in_series(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST_SERIES", 40)
    kept = History()
    for step in range(3 * FINE):
        kept.add(T0 + 60 * step, [counter(step, slo_class=f"class {step}")])
    assert len(kept.since(0, coarse=False)["samples"]) == FINE
    assert len(kept.since(0, coarse=True)["samples"]) == COARSE
    assert len(kept.since(0, coarse=True)["series"]) == len(kept._last) == 40


# --- what a page is told that was there before ---------------------------------------------------


def test_a_page_is_told_only_what_it_does_not_know() -> None:
    kept = History()
    for step in range(5):
        kept.add(T0 + step, [counter(float(step))])
    times = [round((T0 + step) * 1e3) for step in range(5)]
    assert [time_ms for time_ms, _, _ in seen(kept, since=times[2])] == times[3:]
    assert not kept.since(times[2], coarse=False)["reset"]
    assert kept.since(times[4], coarse=False)["samples"] == []


@pytest.mark.parametrize("coarse", [False, True])
def test_a_page_of_another_server_begins_anew(coarse: bool) -> None:
    kept = History()
    kept.add(T0, [counter(1.0)])
    for since in (0, round(T0 * 1e3) - 3_600_000, round(T0 * 1e3) + 3_600_000):
        told = kept.since(since, coarse=coarse)
        assert told["reset"] and len(told["samples"]) == 1


def test_a_minute_that_grows_is_told_again() -> None:
    kept = History()
    for second in (0, 2, 4, 60, 62):
        kept.add(T0 + second, [counter(float(second))])
    first, last = round(T0 * 1e3), round((T0 + 60) * 1e3)
    assert [counts for _, counts, _ in seen(kept, coarse=True, since=last)] == [
        {f"{FINISHED}_total/chat/true": 58.0}
    ]
    assert len(seen(kept, coarse=True, since=first)) == 2


def test_a_clock_that_runs_backwards_takes_back_what_it_had_passed() -> None:
    kept = History()
    for second in (0, 2, 3600, 4, 6):
        kept.add(T0 + second, [counter(float(second))])
    times = [time_ms / 1e3 - T0 for time_ms, _, _ in seen(kept)]
    assert times == [0, 2, 4, 6]
    assert all(span_s >= 0 for _, span_s, *_ in kept.since(0, coarse=False)["samples"])


# --- several servers as one ----------------------------------------------------------------------


def answer_of(server: str, *times: float, value: float, coarse: bool = False) -> dict[str, Any]:
    """What one server says: a counter of its own class, one that both have, and two gauges."""
    kept = History()
    for count, time_s in enumerate(times):
        both = counter(value * count)
        own = counter(float(count), slo_class=server)
        kept.add(time_s, [own, both, gauge(RUNNING, value), gauge(OLDEST, value)])
    about = {"model": server, "classes": {}, "silent_s": value}
    now = {"now": round(times[-1] * 1e3) + 60_000, "about": about}
    return json.loads(json.dumps({**now, **kept.since(0, coarse=coarse)}))


def test_servers_are_added_up_sample_by_sample() -> None:
    one = answer_of("one", T0, T0 + 2, T0 + 4, value=3.0)
    other = answer_of("other", T0 + 2, T0 + 4, value=5.0)
    whole = merged([one, other], coarse=False)
    names = ["/".join(filter(None, series)) for series in whole["series"]]
    assert len(names) == len(set(names)) == 5
    both = names.index(f"{FINISHED}_total/chat/true")
    running, oldest = names.index(RUNNING), names.index(OLDEST)
    assert [sample[0] / 1e3 - T0 for sample in whole["samples"]] == [0, 2, 4]
    assert [sample[2].get(both, 0) for sample in whole["samples"]] == [0, 3, 3 + 5]
    assert [sample[3][running] for sample in whole["samples"]] == [3, 8, 8]
    assert [sample[3][oldest] for sample in whole["samples"]] == [3, 5, 5]
    assert whole["about"] == {"model": "one", "classes": {}, "silent_s": 3.0}


def test_a_sample_that_another_may_still_take_is_held_back() -> None:
    one = answer_of("one", T0, T0 + 2, T0 + 4, value=1.0)
    one["now"] = round((T0 + 5) * 1e3)
    assert [sample[0] / 1e3 - T0 for sample in merged([one], coarse=False)["samples"]] == [0]


def test_minutes_of_servers_are_the_same_where_their_ends_are_not() -> None:
    one = answer_of("one", T0, T0 + 58, T0 + 70, value=1.0, coarse=True)
    other = answer_of("other", T0 + 10, T0 + 64, value=1.0, coarse=True)
    whole = merged([one, other], coarse=True)
    assert [sample[0] / 1e3 - T0 for sample in whole["samples"]] == [58, 70]


def test_one_that_begins_anew_resets_all() -> None:
    answers = [{**answer_of("one", T0, value=1.0), "reset": reset} for reset in (False, True)]
    assert merged(answers, coarse=False)["reset"]
    assert not merged(answers[:1], coarse=False)["reset"]


# --- the sampler ---------------------------------------------------------------------------------


def test_every_process_looks_on_one_grid() -> None:
    sampler = Sampler(lambda: [counter(1.0)], clock=lambda: T0 + 1.7)
    sampler.look()
    (sample,) = json.loads(sampler.data(b"").body)["samples"]
    assert sample[0] == round(T0 * 1e3)


@pytest.mark.parametrize(
    "query",
    [
        *(b"", b"since=", b"since=x", b"since=-1", b"since=\xb2", b"since=%C2%B2", b"a=1&a=2"),
        *(b"since=" + b"9" * 400, b"since=99999999999999999", b"minutes=yes", b"\xff\xfe", b"&&="),
    ],
)
def test_a_query_that_makes_no_sense_is_that_of_a_new_page(query: bytes) -> None:
    sampler = Sampler(lambda: [counter(1.0)], clock=lambda: T0)
    sampler.look()
    told = json.loads(sampler.data(query).body)
    assert told["reset"] and len(told["samples"]) == 1 and told["step_s"] == STEP_S


def await_that(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + patience(10)
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_looking_goes_on_in_a_thread_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_slo.live.page.STEP_S", 0.02)
    registry = CollectorRegistry()
    finished = Counter(FINISHED, "", ["slo_class", "attained"], registry=registry)
    sampler = Sampler(registry.collect)
    sampler.start()
    sampler.start()
    try:
        await_that(lambda: seen(sampler.history))  # the first of all shows where counters begin
        finished.labels("chat", "true").inc(3)
        await_that(lambda: any(counts for _, counts, _ in seen(sampler.history)))
    finally:
        sampler.stop()
    assert sum(sum(counts.values()) for _, counts, _ in seen(sampler.history)) == 3
    before = len(seen(sampler.history))
    time.sleep(0.1)
    assert len(seen(sampler.history)) == before


def test_every_series_that_is_kept_exists_with_its_labels() -> None:
    from series import EVERY

    ours = {name: labels for name, labels in KEPT.items() if name.startswith("vllm_slo:")}
    assert {name: set(labels) - EVERY.get(name, set()) for name, labels in ours.items()} == {
        name: set() for name in ours
    }


# --- over HTTP -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "series"))
    return tmp_path / "series"


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The small app, with what its middleware starts ended."""
    pages: list[LivePage] = []

    class Kept(LivePage):
        def __init__(self) -> None:
            super().__init__()
            pages.append(self)

    monkeypatch.setattr("vllm_slo.engine.http.middleware.LivePage", Kept)
    yield Server()
    for one in pages:
        one.close()


def get(server: Server, path: str, method: str = "GET", **asgi: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(server.app, **asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://slo") as client:
            return await client.request(method, path)

    return asyncio.run(run())


def test_the_page_lets_in_its_own_script_and_style_and_nothing_else(server: Server) -> None:
    answer = get(server, "/slo")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_the_page_makes_no_markup_of_what_it_is_told_and_asks_nobody_else() -> None:
    text = page().body.decode()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in text
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\sstyle=|\son[a-z]+=", text)  # the policy would refuse them


def test_data_of_a_server_that_has_done_nothing(server: Server) -> None:
    told = get(server, "/slo/data").json()
    assert told["about"]["silent_s"] is None
    assert told["about"]["classes"]["chat"] == [500, 50]
    assert not [name for name, *_ in told["series"] if name.startswith("vllm_slo:")]


def test_data_is_what_the_scheduler_wrote(server: Server, folder: Path) -> None:
    series = SchedulerMetrics()
    series.admission("<b>chat</b>", "promised")
    series.publish(0.0, best_effort_age_seconds=1.5)
    told = get(server, "/slo/data").json()
    end = time.monotonic() + patience(10)
    while not told["samples"] and time.monotonic() < end:
        time.sleep(0.02)
        told = get(server, "/slo/data").json()
    assert ["vllm_slo:admissions_total", "<b>chat</b>", "promised", ""] in told["series"]
    assert told["about"]["silent_s"] < patience(60)
    place = str(told["series"].index([OLDEST]))
    assert told["samples"][-1][3][place] == 1.5


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("HEAD", "/slo", 200), ("HEAD", "/slo/data", 200), ("POST", "/slo", 404)),
        *(("GET", "/slo/", 404), ("GET", "/slo/other", 404), ("DELETE", "/slo/data", 404)),
    ],
)
def test_other_paths_and_methods_are_the_applications(
    server: Server, method: str, path: str, status: int
) -> None:
    answer = get(server, path, method)
    assert answer.status_code == status
    assert method != "HEAD" or not answer.content


def test_the_page_is_found_below_a_root_path(server: Server) -> None:
    assert get(server, "/behind/slo", root_path="/behind").status_code == 200


def test_looking_begins_with_the_server(folder: Path) -> None:
    middleware = SLOMiddleware(app)
    assert middleware._page._sampler._thread is None
    try:
        asyncio.run(middleware({"type": "lifespan"}, never, never))
        assert middleware._page._sampler._thread is not None
    finally:
        middleware._page.close()


async def app(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "lifespan"


async def never(*_: Any) -> Any:
    raise AssertionError("nothing is said in this test")


def test_of_vllms_series_only_those_on_the_page_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = CollectorRegistry()
    Gauge(RUNNING, "", registry=registry).set(3)
    Counter("vllm:spec_decode_num_draft_tokens", "", registry=registry).inc(7)
    Counter("vllm:prompt_tokens", "", registry=registry).inc(7)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    got = {s.name: s.value for family in live_page.vllm_series() for s in family.samples}
    assert got == {RUNNING: 3, "vllm:spec_decode_num_draft_tokens_total": 7}


def test_with_several_api_servers_nothing_is_counted_twice(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's multiprocess mode: what a scheduler counts is shared by itself, beside its file.
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr("prometheus_client.values.ValueClass", MultiProcessValue())
    series = SchedulerMetrics()
    series.admission("chat", "promised")
    Gauge(RUNNING, "", ["engine"], multiprocess_mode="mostrecent", registry=None).labels("0").set(3)
    kept, shown = History(), LivePage()
    for step in range(2):
        series.publish(10.0 * step, promised_requests=2.0)
        kept.add(T0 + step, shown._collect())
        series.admission("chat", "promised")
    _, counts, gauges = seen(kept)[-1]
    assert counts["vllm_slo:admissions_total/chat/promised"] == 1
    assert (gauges["vllm_slo:promised_requests"], gauges[RUNNING]) == (2.0, 3.0)

    shared = CollectorRegistry()  # as `/metrics` has them: without the files
    MultiProcessCollector(shared)
    labels = {"engine": "0", "slo_class": "chat", "outcome": "promised", "reason": ""}
    assert shared.get_sample_value("vllm_slo:admissions_total", labels) == 3


def test_a_folder_of_two_engines_is_one_server(folder: Path) -> None:
    for engine in (0, 1):
        series = SchedulerMetrics(engine)
        series.publish(0.0, promised_requests=2.0, best_effort_age_seconds=1.0 + engine)
    kept = History()
    kept.add(T0, FolderCollector(folder).collect())
    gauges = seen(kept)[0][2]
    assert (gauges["vllm_slo:promised_requests"], gauges[OLDEST]) == (4.0, 2.0)


def test_the_page_asks_for_outcomes_that_there_are() -> None:
    text = Path(history.__file__).with_name("page.html").read_text(encoding="utf-8")
    asked = set(re.findall(r'told\("(\w+)"\)', text))
    (admissions,) = (
        family
        for family in SchedulerMetrics().registry.collect()
        if family.name == "vllm_slo:admissions"
    )
    assert "promised_late" in asked
    assert asked <= set(re.findall(r"\w+", admissions.documentation))
