# SPDX-License-Identifier: Apache-2.0
"""The scheduler's Prometheus series and their way to ``/metrics``."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from patience import patience
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_slo.core.speculation.proportional_fairness import ClientView
from vllm_slo.engine.speculation.servers_report import DrafterRound, DrafterView, ServersReport
from vllm_slo.engine.telemetry import exposition, metrics, speculation_metrics
from vllm_slo.engine.telemetry.exposition import FOLDER_VARIABLE, FolderCollector
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics

Samples = dict[str, float]

GAUGES = {
    "promised_requests": 3.0,
    "best_effort_requests": 2.0,
    "best_effort_age_seconds": 1.5,
    "step_time_margin_ratio": 1.1,
    "step_time_bias_ratio": 0.9,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Not there yet, as ``choose_folder`` leaves it."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "series"))
    return tmp_path / "series"


def busy(engine: int = 0) -> SchedulerMetrics:
    """A scheduler's series after a little of everything."""
    series = SchedulerMetrics(engine)
    series.admission("chat", "promised")
    series.admission("chat", "promised")
    series.admission("code", "declined", "memory")
    series.broken("chat", "ttft")
    series.finished("chat", True, promised="true", tokens=20, ttft_s=0.3, tpot_s=0.02)
    series.finished("chat", False, promised="false", tokens=5, ttft_s=3.0, tpot_s=None)
    series.finished("chat", False, promised="late", tokens=4, ttft_s=4.0, tpot_s=None)
    series.late_promise("chat", kept=True)
    series.finished("none", None, promised="false", tokens=7, ttft_s=None, tpot_s=None)
    series.step(0.010, 0.012)
    series.step(0.020, 0.020)
    return series


def grown(engine: int = 0) -> SchedulerMetrics:
    """A busy scheduler's series after two steps with trees."""
    series = busy(engine)
    series.speculation.speculation_on(True)
    series.speculation.tree_step(
        accepted=[2, 0],
        verified_by_depth=[5, 3, 1],
        accepted_by_depth=[1, 1, 0],
        nodes_slo=4,
        nodes_throughput=5,
    )
    series.speculation.tree_step(
        accepted=[1],
        verified_by_depth=[2],
        accepted_by_depth=[1],
        nodes_slo=0,
        nodes_throughput=2,
    )
    for _ in range(2):
        series.speculation.tree_times(draft_s=0.004, selection_s=0.0001)
    return series


def chained() -> SchedulerMetrics:
    """A scheduler's series after two steps of a chain and one of its second model alone."""
    series = SchedulerMetrics()
    for model in ("small", "middle"):
        series.speculation.draft_model_up(model, up=True)
    for accepted in (2, 3):
        series.speculation.drafting(
            "small>middle",
            [("small", 0.001), ("small", 0.002), ("middle", 0.016)],
            [("small", "middle", 4, accepted)],
            [("small", "middle", 0.75), ("middle", "target", 0.9)],
        )
    series.speculation.drafting("middle", [("middle", 0.014)], [], [("middle", "target", 0.8)])
    series.speculation.draft_model_up("small", up=False)
    return series


def remote() -> SchedulerMetrics:
    """A scheduler's series after three steps with draft servers, one of which left."""
    series = SchedulerMetrics()
    here, there = drafter("here"), drafter("there")
    late = (("here", "late", 2), ("", "refused_hello", 1))
    series.speculation.draft_servers(ServersReport((here, there)), {"here": FARES})
    rounds = DrafterRound("here", 0.010, 0.008, 4), DrafterRound("there", 0.002, 0.001, 1)
    series.speculation.draft_servers(
        ServersReport((here, there), rounds, (), 0.001, 0.010), {"here": FARES}
    )
    series.speculation.draft_servers(
        ServersReport((here,), rounds[:1], late, 0.001, 0.020), {"here": FARES}
    )
    for verified, accepted in ((4, 1), (3, 3)):
        series.speculation.drafts_verified("here", verified, accepted)
    return series


FARES = ClientView(acceptance=0.75, granted=6, goodput=3.5, utility=1.25)


def drafter(name: str, *, up: bool = True) -> DrafterView:
    return DrafterView(name, "model", 512, 8, 2, up, False, False, 0.001, {})


def scrape(folder: Path) -> str:
    registry = CollectorRegistry()
    registry.register(FolderCollector(folder))
    return generate_latest(registry).decode()


def samples(text: str) -> Samples:
    """Every sample as ``name{label=value,...}``, labels by name."""
    return {
        sample.name + "{" + ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items())) + "}": (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


# --- what is counted -----------------------------------------------------------------------------


def test_drafting_is_counted_by_chain_model_and_edge() -> None:
    got = samples(generate_latest(chained().registry).decode())
    expected = {
        "chain_steps_total{chain=small>middle,engine=0}": 2,
        "chain_steps_total{chain=middle,engine=0}": 1,
        "passes_total{engine=0,model=small}": 4,
        "passes_total{engine=0,model=middle}": 3,
        "pass_seconds_total{engine=0,model=middle}": pytest.approx(0.046),
        "tried_tokens_total{drafter=small,engine=0,verifier=middle}": 8,
        "accepted_tokens_total{drafter=small,engine=0,verifier=middle}": 5,
        "similarity_ratio{drafter=small,engine=0,verifier=middle}": 0.75,
        "similarity_ratio{drafter=middle,engine=0,verifier=target}": 0.8,
        "model_up{engine=0,model=small}": 0,
        "model_up{engine=0,model=middle}": 1,
    }
    assert expected == {name: got[f"vllm_slo:draft_{name}"] for name in expected}


def test_draft_servers_are_counted_by_name() -> None:
    got = samples(generate_latest(remote().registry).decode())
    expected = {
        "drafter_up{drafter=here,engine=0}": 1,
        "drafter_up{drafter=there,engine=0}": 0,
        "drafter_acceptance_ratio{drafter=here,engine=0}": 0.75,
        "drafter_granted_tokens{drafter=here,engine=0}": 6,
        "drafter_goodput_tokens{drafter=here,engine=0}": 3.5,
        "drafter_utility{drafter=here,engine=0}": 1.25,
        "drafter_dropped_total{drafter=here,engine=0,reason=late}": 2,
        "drafter_dropped_total{drafter=,engine=0,reason=refused_hello}": 1,
        "drafter_verified_tokens_total{drafter=here,engine=0}": 7,
        "drafter_accepted_tokens_total{drafter=here,engine=0}": 4,
        "drafter_wait_seconds_total{drafter=here,engine=0}": pytest.approx(0.020),
        "drafter_wait_seconds_total{drafter=there,engine=0}": pytest.approx(0.002),
        "draft_receive_seconds_total{engine=0}": pytest.approx(0.030),
        "draft_send_seconds_total{engine=0}": pytest.approx(0.002),
    }
    assert expected == {name: got.get(f"vllm_slo:{name}") for name in expected}
    assert not any("drafter=,engine=0}" in name for name in got)


def test_the_gauges_of_a_draft_server_that_is_gone_say_so() -> None:
    series = remote()
    series.speculation.draft_servers(ServersReport((drafter("there"),)), {})
    got = samples(generate_latest(series.registry).decode())
    gone = "{drafter=here,engine=0}"
    assert got[f"vllm_slo:drafter_up{gone}"] == got[f"vllm_slo:drafter_granted_tokens{gone}"] == 0
    for name in ("acceptance_ratio", "goodput_tokens", "utility"):
        assert math.isnan(got[f"vllm_slo:drafter_{name}{gone}"])


def test_draft_servers_without_end_are_not_all_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation_metrics, "MAX_DRAFTERS", 3)
    series = SchedulerMetrics()
    for number in range(9):
        name = f"d{number}"
        rounds, dropped = (DrafterRound(name, 0.01, 0.01, 1),), ((name, "late", 1),)
        report = ServersReport((drafter(name), drafter("stays")), rounds, dropped, 0.0, 0.01)
        series.speculation.draft_servers(report, {name: FARES, "stays": FARES})
        series.speculation.drafts_verified(name, 2, 1)
    text = generate_latest(series.registry).decode()
    assert {name for name in ("d0", "d1", "d2", "d8", "stays") if f'"{name}"' in text} == {
        *("d0", "d1", "stays")
    }


def test_requests_are_counted_by_what_became_of_them() -> None:
    got = samples(generate_latest(busy().registry).decode())
    expected = {
        "admissions_total{engine=0,outcome=promised,reason=,slo_class=chat}": 2,
        "admissions_total{engine=0,outcome=declined,reason=memory,slo_class=code}": 1,
        "promises_broken_total{engine=0,objective=ttft,slo_class=chat}": 1,
        "requests_finished_total{attained=true,engine=0,promised=true,slo_class=chat}": 1,
        "requests_finished_total{attained=false,engine=0,promised=false,slo_class=chat}": 1,
        "requests_finished_total{attained=false,engine=0,promised=late,slo_class=chat}": 1,
        "late_promises_finished_total{engine=0,kept=true,slo_class=chat}": 1,
        "requests_finished_total{attained=none,engine=0,promised=false,slo_class=none}": 1,
        "generation_tokens_total{attained=true,engine=0,slo_class=chat}": 20,
        "generation_tokens_total{attained=false,engine=0,slo_class=chat}": 9,
        "generation_tokens_total{attained=none,engine=0,slo_class=none}": 7,
        "ttft_seconds_count{engine=0,slo_class=chat}": 3,
        "ttft_seconds_bucket{engine=0,le=0.5,slo_class=chat}": 1,
        "worst_window_tpot_seconds_count{engine=0,slo_class=chat}": 1,
        "step_time_ratio_count{engine=0}": 2,
        "step_seconds_total{engine=0}": pytest.approx(0.032),
        "step_predicted_seconds_total{engine=0}": pytest.approx(0.030),
    }
    assert {name: got[f"vllm_slo:{name}"] for name in expected} == expected
    # A request without tokens has no TTFT to observe.
    assert "vllm_slo:ttft_seconds_count{engine=0,slo_class=none}" not in got


_SHARED = """
import os
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm_slo.engine.telemetry.metrics import SchedulerMetrics
series = SchedulerMetrics(1)
series.admission("chat", "promised")
series.step(0.010, 0.014)
series.step(0.020, 0.018)
series.step(0.0, 0.1)
series.publish(1.0, promised_requests=3.0)
registry = series.registry
if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_several_api_servers_show_what_one_shows(tmp_path: Path) -> None:
    """They read the values that processes share, as vLLM sets Prometheus up for them."""
    shown = []
    for shared in ({}, {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}):
        run = subprocess.run(
            [sys.executable, "-c", _SHARED],
            env={**os.environ, **shared},
            capture_output=True,
            check=True,
            text=True,
        )
        got = samples(run.stdout)
        shown.append({name: value for name, value in got.items() if "_created" not in name})
    assert shown[0] == shown[1]
    assert shown[0]["vllm_slo:step_time_ratio_count{engine=1}"] == 2


@pytest.mark.parametrize(("predicted_s", "actual_s"), [(0.0, 0.1), (0.1, 0.0), (0.1, -0.2)])
def test_a_step_that_measures_nothing_is_not_counted(predicted_s: float, actual_s: float) -> None:
    series = SchedulerMetrics()
    series.step(predicted_s, actual_s)
    got = samples(generate_latest(series.registry).decode())
    assert got["vllm_slo:step_time_ratio_count{engine=0}"] == 0


def test_trees_are_counted_by_depth_and_by_why_they_were_chosen() -> None:
    got = samples(generate_latest(grown().registry).decode())
    expected = {
        "speculation_enabled{engine=0}": 1,
        "tree_tokens_count{engine=0}": 3,
        "tree_tokens_sum{engine=0}": 6,  # three trees: their roots' tokens, and three nodes
        "tree_tokens_bucket{engine=0,le=1.0}": 1,
        "tree_tokens_bucket{engine=0,le=2.0}": 2,
        "tree_tokens_bucket{engine=0,le=3.0}": 3,
        "tree_verified_tokens_total{depth=1,engine=0}": 7,
        "tree_verified_tokens_total{depth=2,engine=0}": 3,
        "tree_verified_tokens_total{depth=3,engine=0}": 1,
        "tree_accepted_tokens_total{depth=1,engine=0}": 2,
        "tree_accepted_tokens_total{depth=2,engine=0}": 1,
        "tree_chosen_tokens_total{engine=0,phase=slo}": 4,
        "tree_chosen_tokens_total{engine=0,phase=throughput}": 7,
        "tree_draft_seconds_total{engine=0}": pytest.approx(0.008),
        "tree_selection_seconds_total{engine=0}": pytest.approx(0.0002),
    }
    trees = {name: got.get(f"vllm_slo:{name}") for name in expected}
    assert trees == expected
    # A depth at which nothing was accepted has no series yet.
    assert "vllm_slo:tree_accepted_tokens_total{depth=3,engine=0}" not in got


def test_without_a_draft_there_is_no_word_of_trees() -> None:
    text = generate_latest(busy().registry).decode()
    assert "tree" not in text
    assert "speculation" not in text


def test_a_draft_that_has_failed_is_seen_without_another_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "SETTLE_S", 0.02)
    series = SchedulerMetrics()
    key = "vllm_slo:speculation_enabled{engine=0}"
    for on in (True, False):
        series.speculation.speculation_on(on)
        assert until(lambda: samples(scrape(folder)).get(key) == float(on))  # noqa: B023 - at once


@pytest.mark.parametrize(("made", "number"), [(busy, 22), (grown, 29), (remote, 33)])
def test_every_name_says_its_unit(
    folder: Path, made: Callable[[], SchedulerMetrics], number: int
) -> None:
    series = made()
    series.publish(0.0, **GAUGES)
    families = list(text_string_to_metric_families(scrape(folder)))
    names = {family.name for family in families if not family.name.endswith("_created")}
    units = ("_seconds", "_ratio", "_requests", "_tokens")
    counts = {"vllm_slo:admissions", "vllm_slo:requests_finished", "vllm_slo:promises_broken"}
    counts |= {"vllm_slo:stages_finished", "vllm_slo:sessions_finished", "vllm_slo:sessions"}
    counts |= {"vllm_slo:warm_prefix_blocks", "vllm_slo:quotes"}
    counts.add("vllm_slo:late_promises_finished")
    counts.add("vllm_slo:planning_failures")
    # Neither counts nor quantities: yes or no.
    counts |= {"vllm_slo:speculation_enabled", "vllm_slo:planning_stands_aside"}
    counts |= {"vllm_slo:drafter_up", "vllm_slo:drafter_dropped"}
    counts.add("vllm_slo:drafter_utility")  # a logarithm, which has no unit
    assert len(names) == number
    assert all(name.startswith("vllm_slo:") for name in names)
    assert all(name.endswith(units) for name in names - counts)
    assert all(
        sample.name.endswith("_total")
        for family in families
        if family.type == "counter"
        for sample in family.samples
    )
    assert all(family.documentation for family in families)


def test_labels_stay_few_however_many_requests_come() -> None:
    """Series grow with classes and outcomes, never with requests."""
    series = SchedulerMetrics()

    def many(count: int) -> int:
        for i in range(count):
            series.admission("chat", "best_effort", ("prefill", "decode")[i % 2])
            series.finished(
                "chat", i % 3 == 0, promised="true", tokens=i, ttft_s=i / 100, tpot_s=i / 1000
            )
            series.step(0.01, 0.01 + i / 1000)
            series.speculation.tree_step(
                accepted=[i % 6],
                verified_by_depth=[i] * 5,
                accepted_by_depth=[1] * 5,
                nodes_slo=i,
                nodes_throughput=i,
            )
            series.speculation.tree_times(draft_s=0.004, selection_s=0.0001)
        return len(samples(generate_latest(series.registry).decode()))

    assert many(10) == many(500)
    allowed = {"engine", "slo_class", "outcome", "reason", "promised", "attained", "objective"}
    allowed |= {"depth", "phase"}
    for family in series.registry.collect():
        for sample in family.samples:
            assert set(sample.labels) <= allowed | {"le"}


# --- the way through the folder ------------------------------------------------------------------


@pytest.mark.parametrize("made", [busy, grown])
def test_what_is_published_is_what_is_scraped(
    folder: Path, made: Callable[[], SchedulerMetrics], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "SETTLE_S", 60.0)
    series = made()
    assert samples(scrape(folder)) == {}  # nothing was written yet, and the folder is not there
    series.publish(0.0, **GAUGES)
    assert samples(scrape(folder)) == samples(generate_latest(series.registry).decode())
    for name, value in GAUGES.items():
        assert samples(scrape(folder))[f"vllm_slo:{name}{{engine=0}}"] == value


def test_two_engines_are_told_apart_and_named_once(folder: Path) -> None:
    first, second = busy(0), busy(1)
    second.admission("chat", "promised")
    first.publish(0.0, **GAUGES)
    second.publish(0.0, **GAUGES)
    text = scrape(folder)
    got = samples(text)
    name = "vllm_slo:admissions_total{{engine={},outcome=promised,reason=,slo_class=chat}}"
    assert got[name.format(0)] == 2
    assert got[name.format(1)] == 3
    kinds = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
    assert len(got) == 2 * len(samples(generate_latest(first.registry).decode()))


def test_a_collector_can_be_scraped_again_and_again(folder: Path) -> None:
    series = busy()
    registry = CollectorRegistry(auto_describe=True)
    registry.register(FolderCollector(folder))
    for count in range(3, 6):
        series.admission("chat", "promised")
        series.publish(0.0)
        got = samples(generate_latest(registry).decode())
        key = "vllm_slo:admissions_total{engine=0,outcome=promised,reason=,slo_class=chat}"
        assert got[key] == count


@pytest.mark.parametrize(
    "content", [b"\xff\xfe not text", b'vllm_slo:x{engine="0" 1\n', b"vllm_slo:x one\n", b""]
)
def test_a_file_that_cannot_be_read_costs_only_itself(folder: Path, content: bytes) -> None:
    busy().publish(0.0, **GAUGES)
    before = samples(scrape(folder))
    (folder / "engine-0-1.prom").write_bytes(content)
    (folder / "engine-9-9.prom").mkdir()
    (folder / "engine-0-2.tmp").write_text("half written")
    assert samples(scrape(folder)) == before


def test_publishing_is_due_once_an_interval(folder: Path) -> None:
    series = SchedulerMetrics()
    assert series.due(0.0)
    series.publish(100.0)
    assert not series.due(100.0 + metrics.PUBLISH_INTERVAL_S / 2)
    assert series.due(100.0 + metrics.PUBLISH_INTERVAL_S)


def test_a_disk_that_cannot_be_written_costs_metrics_and_not_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("in the way")
    monkeypatch.setenv(FOLDER_VARIABLE, str(blocked / "below"))
    series = busy()
    series.publish(0.0, **GAUGES)
    series.publish(9.0, **GAUGES)
    series.publish_soon(**GAUGES)
    assert blocked.read_text() == "in the way"


def test_a_disk_that_has_room_again_gets_metrics_again(folder: Path) -> None:
    series = busy()
    series.publish(0.0, **GAUGES)
    (written,) = folder.glob("*.prom")
    before = written.read_bytes()
    in_the_way = written.with_suffix(".tmp")
    in_the_way.mkdir()
    series.broken("chat", "ttft")
    series.publish(2.0, **GAUGES)
    assert written.read_bytes() == before
    in_the_way.rmdir()
    series.publish(4.0, **GAUGES)
    assert written.read_bytes() != before


def test_what_its_owner_has_removed_is_not_made_anew(folder: Path) -> None:
    series = busy()
    series.publish(0.0, **GAUGES)
    exposition.remove_folder(folder)
    series.publish(2.0, **GAUGES)
    series.publish(4.0, **GAUGES)
    assert not folder.exists()


def test_without_a_folder_series_are_kept_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    series = busy()
    series.publish(0.0, **GAUGES)
    series.publish_soon(**GAUGES)
    assert list(tmp_path.iterdir()) == []
    got = samples(generate_latest(series.registry).decode())
    assert got["vllm_slo:promised_requests{engine=0}"] == 3


def until(fact: Callable[[], bool]) -> bool:
    """Whether it becomes true within some seconds."""
    deadline = time.monotonic() + patience(10)
    while not fact() and time.monotonic() < deadline:
        time.sleep(0.01)
    return fact()


def test_the_last_word_is_written_without_another_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "SETTLE_S", 0.02)
    series = busy()
    key = "vllm_slo:best_effort_requests{engine=0}"
    for last in (2.0, 0.0):
        series.publish_soon(best_effort_requests=9.0)
        series.publish_soon(best_effort_requests=last)
        assert until(lambda: samples(scrape(folder)).get(key) == last)  # noqa: B023 - at once


def test_the_folder_is_private_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "before")
    folder = exposition.choose_folder()
    assert not folder.exists()
    assert folder != exposition.choose_folder()
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    busy().publish(0.0)
    assert folder.stat().st_mode & 0o077 == 0
    assert [path.suffix for path in folder.iterdir()] == [".prom"]
    exposition.remove_folder(folder)
    assert not folder.exists()
    exposition.remove_folder(folder)  # twice is not an error


def test_a_folder_that_its_owner_removed_stays_away(folder: Path) -> None:
    series = busy()
    series.publish(0.0, **GAUGES)
    exposition.remove_folder(folder)
    series.publish(9.0, **GAUGES)
    assert not folder.exists()
