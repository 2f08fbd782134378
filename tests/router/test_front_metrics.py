# SPDX-License-Identifier: Apache-2.0
"""What the front shows of itself: metrics, service discovery, the list of replicas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from front_stack import PATIENCE_S, Fake, FrontProcess, eventually, processes, states_arrive
from patience import patience
from prometheus_client.parser import text_string_to_metric_families

ROUTING = {"stale_after_s": patience(5.0), "dead_after_s": patience(10.0)}


@pytest.fixture(scope="module")
def stack() -> Iterator[tuple[FrontProcess, list[Fake]]]:
    with processes() as keep:
        front, fakes = keep(FrontProcess(ROUTING)), [keep(Fake("a")), keep(Fake("b"))]
        front.serve(*fakes)
        yield front, fakes


@pytest.fixture
def front(stack: tuple[FrontProcess, list[Fake]]) -> FrontProcess:
    for fake in stack[1]:
        fake.reset()
    states_arrive(stack[0], stack[1])
    return stack[0]


@pytest.fixture
def fakes(stack: tuple[FrontProcess, list[Fake]]) -> list[Fake]:
    return stack[1]


def test_each_request_counts_once_by_its_result(front: FrontProcess, fakes: list[Fake]) -> None:
    slo = {"ttft_ms": 2_000}
    never = {"ttft_ms": 0.001, "on_unattainable": "decline"}
    results = {
        "promised": {"prompt": "x", "slo": slo},
        "best_effort": {"prompt": "x", "slo": {**slo, "tier": "best_effort"}},
        "no_slo": {"prompt": "x", "stream": True},
        "declined": {"prompt": "x", "slo": never},
        "invalid": {"prompt": "x", "slo": {"ttft_ms": -1}},
    }
    before = {name: front.total("requests_total", result=name) for name in results}
    hops = front.total("hops_count"), front.total("hops_sum")
    first_bytes = front.total("time_to_first_byte_seconds_count")
    decisions = front.total("decision_seconds_count")
    declined = front.total("declined_total", slo_class="custom")
    for request in results.values():
        front.post(json=request)
    front.get("/v1/models")  # no generation
    for name, count in before.items():
        assert front.total("requests_total", result=name) == count + 1, name
    assert front.total("requests_total") == sum(before.values()) + len(results)
    assert front.total("time_to_first_byte_seconds_count") == first_bytes + 3
    assert front.total("decision_seconds_count") == decisions + 4
    assert front.total("hops_count") == hops[0] + 2  # promised and declined
    assert front.total("hops_sum") == hops[1] + 1 + 2
    assert front.total("declined_total", slo_class="custom") == declined + 1


def test_the_replicas_own_verdict_counts(front: FrontProcess, fakes: list[Fake]) -> None:
    for fake in fakes:
        fake.knobs(declines=True)
    before = front.total("requests_total", result="declined")
    refused = front.total("refused_after_promise_total")
    counted_here = front.total("declined_total")
    asked = {"prompt": "x", "slo": {"ttft_ms": 2_000, "on_unattainable": "decline"}}
    assert front.post(json=asked).status_code == 429
    assert front.total("requests_total", result="declined") == before + 1
    assert front.total("declined_total") == counted_here
    assert front.total("refused_after_promise_total") == refused + 1


def test_replicas_are_shown(front: FrontProcess, fakes: list[Fake]) -> None:
    for name in "ab":
        assert front.total("replica_ready", replica=name) == 1
        assert front.total("replica_outstanding", replica=name) == 0
        assert 0 <= front.total("replica_state_age_seconds", replica=name) < PATIENCE_S
    fakes[0].knobs(state={"running": 3, "waiting": 2, "committed": [[9.0, 10]]})
    shown = eventually(
        lambda: (one := front.replicas()["a"])["running"] == 3 and one["promised"] == 1 and one,
        "the state arrives",
    )
    assert shown["status"] == "ready"
    assert shown["waiting"] == 2
    assert shown["load_tokens"] == 5


def test_secrets_are_not_shown(front: FrontProcess, fakes: list[Fake]) -> None:
    front.post()
    pages = [front.get(path).text for path in ("/replicas", "/metrics", "/metrics/targets")]
    pages.append(front.log.decode())
    for fake in fakes:
        assert not any(fake.entry["token"] in page for page in pages)
        assert not any(fake.entry["url"] in page for page in pages[:3])
    assert not any(fake.entry["token"] in str(front.post().headers) for fake in fakes)


def test_prometheus_finds_every_replica(front: FrontProcess) -> None:
    groups = front.get("/metrics/targets", headers={"host": "front.example:80"}).json()
    assert [group["labels"]["replica"] for group in groups] == ["a", "b"]
    # Alerts and panels tell servers apart by this label.
    instances = [group["labels"]["instance"] for group in groups]
    assert instances == ["front.example:80/a", "front.example:80/b"]
    for group in groups:
        assert group["targets"] == ["front.example:80"]
        page = front.get(group["labels"]["__metrics_path__"])
        assert page.text == f'fake_replica{{name="{group["labels"]["replica"]}"}} 1\n'


def test_the_page_is_prometheus_text(front: FrontProcess) -> None:
    page = front.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=")
    names = {family.name for family in text_string_to_metric_families(page.text)}
    assert all(name.startswith("vllm_slo:front_") for name in names)
    labels = {
        label
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
        for label in sample.labels
    }
    assert labels <= {"result", "reason", "replica", "slo_class", "le"}
