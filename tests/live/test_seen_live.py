# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of a live server: its page in a browser, Prometheus with the dashboard and
the alerts, and traces. One server for all; its tests follow each other, as a day does."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from patience import patience

pytest.importorskip("vllm")
pytest.importorskip("openai")
pytest.importorskip("opentelemetry.proto")
pytest.importorskip("playwright")

import live_server
import yaml
from browser import PHONE, chromium, program, visiting
from dashboards import DASHBOARD, PROMETHEUS, expressions
from live_server import SMALL, LiveServer, ask_openai, command
from otlp_receiver import Receiver, Span, receiving

from vllm_slo.wire.ports import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MARKUP = "<img src=x onerror=alert(1)>"
CONFIG = """\
classes:
  chat: {ttft_ms: 60000, tpot_ms: 10000}
  hasty: {ttft_ms: 0.001}
  strict: {ttft_ms: 0.001, on_unattainable: decline}
  reason: {stages: [{until: " ", tpot_ms: 10000}, {tpot_ms: 10000}]}
"""
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as one:
        yield one


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("seen")
    (folder / "slo.yaml").write_text(CONFIG)
    arguments = [command("vllm-slo"), "serve", "tiny", "--slo-config", "slo.yaml", *SMALL]
    arguments += ["--api-key", "secret", "--otlp-traces-endpoint", receiver.endpoint]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with live_server.running(arguments, "tiny", folder) as live:
            yield live


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as one:
        yield one


def ask(server: LiveServer, slo: dict[str, Any] | None, **extra: Any) -> int:
    """The status of one short request."""
    body = {**extra, **({} if slo is None else {"slo": slo})}
    headers = {"authorization": "Bearer secret", **body.pop("headers", {})}
    return ask_openai(server, "completions", False, body, headers).status


# --- the page ------------------------------------------------------------------------------------


def test_before_anything_was_asked_the_page_says_so(server: LiveServer, browser: Any) -> None:
    with visiting(browser, f"{server.url}/slo") as visit:
        visit.has("#notices", "No data yet")
        assert ask(server, None) == 200
        visit.has("#notices", "Nobody has sent an objective yet")
        visit.has("#steps svg text, #steps .legend", "measured")


def test_numbers_appear_while_the_page_is_open(server: LiveServer, browser: Any) -> None:
    with visiting(browser, f"{server.url}/slo") as visit:
        visit.has("#state", "live")
        for _ in range(3):
            assert ask(server, {"class": "chat"}) == 200
            assert ask(server, {"class": "hasty"}) == 200
        assert ask(server, {"class": "strict"}) == 429
        visit.has("#table tr", "chat100% of 3100% of 3")
        visit.has("#table tr", "hasty0% of 3")
        visit.has("#table tr", "strict0% of 1")
        visit.has("#tiles .tile", "of 7 requests with an objective")
        visit.has("#reasons li", "expired4")
        visit.has("#attainment .legend", "chat 100%")
        visit.has("#admissions .legend", "promised 3")
        assert visit.page.locator("#notices p").count() == 0


def test_stages_have_a_card_of_their_own(server: LiveServer, browser: Any) -> None:
    with visiting(browser, f"{server.url}/slo") as visit:
        visit.has("#table tr", "chat")
        assert not visit.page.locator("#stages-card").is_visible()
        assert ask(server, {"class": "reason"}, max_tokens=60) == 200
        visit.has("#stages tr", "reason100% of 1100% of 1")


def test_what_happened_before_it_was_opened_is_there_at_once(
    server: LiveServer, browser: Any
) -> None:
    with visiting(browser, f"{server.url}/slo") as visit:
        visit.has("#table tr", "chat100% of 3")
        assert visit.page.locator("#attainment svg path, #attainment svg circle").count() > 0


def test_what_it_is_told_stays_text(server: LiveServer, browser: Any) -> None:
    """Names are checked long before; the page does not rely on that."""

    def rename(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=answer.text().replace('"chat"', json.dumps(MARKUP)))

    with visiting(browser, "about:blank") as visit:
        visit.context.route("**/slo/data*", rename)
        visit.page.goto(f"{server.url}/slo")
        visit.has("#table tr", f"{MARKUP}100% of 3")
        visit.has("#attainment .legend", MARKUP)
        assert visit.page.locator("main img").count() == 0
        visit.wrong = [line for line in visit.wrong if server.url not in line]


def test_a_scheduler_that_hangs_is_said_to(server: LiveServer, browser: Any) -> None:
    def hang(route: Any) -> None:
        answer = route.fetch()
        told = answer.json()
        place = told["series"].index(["vllm:num_requests_running"])
        for sample in told["samples"]:
            sample[3][str(place)] = 2
        told["about"]["silent_s"] = 61
        route.fulfill(response=answer, json=told)

    with visiting(browser, "about:blank") as visit:
        visit.context.route("**/slo/data*", hang)
        visit.page.goto(f"{server.url}/slo")
        visit.has("#notices .warn", "has said nothing for 61 s, though 2 requests run")
        visit.wrong = [line for line in visit.wrong if server.url not in line]


def test_classes_ranges_and_colours_can_be_chosen(server: LiveServer, browser: Any) -> None:
    with visiting(browser, f"{server.url}/slo") as visit:
        page = visit.page
        visit.has("#table tr", "chat100% of 3")
        page.get_by_role("button", name="hasty", exact=True).click()
        assert (
            page.get_by_role("button", name="hasty", exact=True).get_attribute("aria-pressed")
            == "false"
        )
        visit.has("#tiles .tile", "of 5 requests with an objective")
        assert page.locator("#table tbody tr").count() == 3
        page.get_by_role("button", name="hasty", exact=True).press("Enter")
        visit.has("#tiles .tile", "of 8 requests with an objective")
        for name in ("5 min", "1 h", "6 h", "15 min"):
            page.get_by_role("button", name=name, exact=True).click()
            visit.has("#ranges [aria-pressed=true]", name)
            visit.has("#tiles .tile", "of 8 requests with an objective")
            visit.has("#table tr", "hasty0% of 3")
        for theme, dark in (("light", False), ("dark", True), ("system", False)):
            page.locator("#theme").click()
            visit.has("#theme", theme)
            assert is_dark(visit.colour_of("body", "background-color")) is dark
        page.locator("#theme").click()
        page.locator("#theme").click()
        page.reload()
        visit.has("#theme", "dark")


def test_charts_are_read_by_pointer_and_by_keyboard(server: LiveServer, browser: Any) -> None:
    with visiting(browser, f"{server.url}/slo") as visit:
        page, tip = visit.page, visit.page.locator("#attainment .tip")
        visit.has("#attainment .legend", "chat 100%")
        chart = page.locator("#attainment svg")
        assert chart.get_attribute("aria-label").startswith("Attainment by class. chat 100%")
        chart.hover()
        tip.wait_for(state="visible")
        page.mouse.move(5, 5)
        tip.wait_for(state="hidden")
        chart.focus()
        seen = set()
        for _ in range(30):
            page.keyboard.press("ArrowLeft")
            seen.add(tip.inner_text())
        assert len(seen) == 30
        assert any("chat" in text and "100%" in text for text in seen)
        page.keyboard.press("Escape")
        tip.wait_for(state="hidden")


def test_a_phone_scrolls_one_way_only(server: LiveServer, browser: Any) -> None:
    with visiting(browser, f"{server.url}/slo", viewport=PHONE, has_touch=True) as visit:
        visit.has("#table tr", "chat")
        assert visit.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        wide = visit.page.evaluate(
            "[...document.querySelectorAll('main *:not(thead, thead *)')].filter((node) =>"
            " node.getBoundingClientRect().right > innerWidth + 0.5).map((node) => node.outerHTML)"
        )
        assert wide == []
        visit.page.get_by_role("button", name="1 h", exact=True).tap()
        visit.has("#ranges [aria-pressed=true]", "1 h")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_can_be_read(
    server: LiveServer, browser: Any, scheme: str
) -> None:
    with visiting(browser, f"{server.url}/slo", color_scheme=scheme) as visit:
        visit.has("#table tr", "chat")
        paper, card = (visit.colour_of(s, "background-color") for s in ("body", ".card"))
        assert is_dark(paper) is is_dark(card) is (scheme == "dark")
        for selector in ("h1", ".card .note", ".tile .value", "#table td", "button"):
            assert contrast(visit.colour_of(selector), card) >= 4.5, selector


def test_a_server_that_is_gone_is_said_to_be(server: LiveServer, browser: Any) -> None:
    with visiting(browser, f"{server.url}/slo") as visit:
        visit.has("#table tr", "chat")
        visit.forgiven = True  # Chromium itself writes that it is offline
        visit.context.set_offline(True)
        visit.has("#state", "no answer")
        visit.has("#notices", "What is shown is of then")
        assert visit.page.title() == "(no answer) vllm-slo"
        visit.context.set_offline(False)
        visit.has("#state", "live")
        assert visit.page.locator("#notices p").count() == 0


def is_dark(colour: tuple[int, int, int]) -> bool:
    return luminance(colour) < 0.2


def luminance(colour: tuple[int, int, int]) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = [c / 255 for c in colour]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# --- what vLLM guards ----------------------------------------------------------------------------


def test_the_page_asks_for_no_more_than_metrics_do(server: LiveServer) -> None:
    answers = {}
    for path in ("/v1/models", "/metrics", "/slo", "/slo/data"):
        try:
            with urllib.request.urlopen(server.url + path, timeout=patience(60)) as answer:
                answers[path] = answer.status
        except urllib.error.HTTPError as error:
            answers[path] = error.code
    assert answers == {"/v1/models": 401, "/metrics": 200, "/slo": 200, "/slo/data": 200}


# --- traces --------------------------------------------------------------------------------------


def test_a_request_is_traced_with_what_was_decided(server: LiveServer, receiver: Receiver) -> None:
    header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    begun_s = time.time()
    assert ask(server, {"class": "chat", "value": 2, "tenant": "one"}, headers=header) == 200
    assert ask(server, {"class": "hasty"}, headers=header) == 200
    assert ask(server, {"class": "strict"}, headers=header) == 429
    assert ask(server, None, headers=header) == 200
    ours = receiver.wait_for(lambda s: s.name == "slo_request" and s.trace_id == TRACE, 3)
    theirs = receiver.wait_for(lambda s: s.name == "llm_request" and s.trace_id == TRACE, 3)
    assert {span.parent_id for span in ours + theirs} == {PARENT}
    assert len(ours) == 3  # a request without an SLO has none of these
    chat, hasty, strict = (of_class(ours, name) for name in ("chat", "hasty", "strict"))
    said = chat.attributes
    assert {key: said[key] for key in said if key.startswith("slo.")} == {
        "slo.class": "chat",
        "slo.tenant": "one",
        "slo.value": 2.0,
        "slo.ttft_ms": 60000.0,
        "slo.tpot_ms": 10000.0,
        "slo.tier": "guaranteed",
        "slo.promised": True,
        "slo.late": False,
        "slo.ttft_achieved_ms": pytest.approx(30_000, abs=30_000),
        "slo.tpot_achieved_ms": pytest.approx(5_000, abs=5_000),
        "slo.attained": True,
        "slo.declined": False,
    }
    assert said["gen_ai.usage.completion_tokens"] == 6
    request_id = of_request(theirs, said["gen_ai.request.id"])
    assert request_id.attributes["gen_ai.usage.completion_tokens"] == 6
    assert begun_s <= chat.start_s <= chat.end_s <= time.time()
    assert chat.end_s - chat.start_s >= said["slo.ttft_achieved_ms"] / 1e3
    told = [(s.attributes["slo.late"], s.attributes["slo.reason"]) for s in (hasty, strict)]
    assert told == [(True, "expired"), (False, "expired")]
    assert hasty.attributes["slo.attained"] is False
    assert (hasty.attributes["slo.declined"], strict.attributes["slo.declined"]) == (False, True)
    assert "slo.attained" not in strict.attributes
    # Made where the decision was: in the engine's process, not in the API server's.
    assert chat.resource["vllm.process_kind"] == "engine_core"
    assert chat.resource["vllm.process_id"] != request_id.resource["vllm.process_id"]


def of_class(spans: list[Span], name: str) -> Span:
    (found,) = (span for span in spans if span.attributes["slo.class"] == name)
    return found


def of_request(spans: list[Span], internal_id: str) -> Span:
    """vLLM's span of a request; the engine's name for it begins with the server's."""
    named = ((span, span.attributes["gen_ai.request.id"]) for span in spans)
    (found,) = (span for span, name in named if internal_id.startswith(name))
    return found


# --- Prometheus ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prometheus(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the server, with the configuration as shipped but for
    where and how often."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    every = f"{patience(1_000):.0f}ms"
    config["global"] = {"scrape_interval": every, "evaluation_interval": every}
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    (job,) = (job for job in config["scrape_configs"] if job["job_name"] == "vllm-slo")
    job["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    config["scrape_configs"] = [job]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "GOMAXPROCS": "1"},
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(patience(30))


def query(prometheus: str, path: str, **parameters: str) -> Any:
    url = f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=patience(30)) as answer:
        body = json.load(answer)
    assert body["status"] == "success" and not body.get("warnings"), body
    return body["data"]


def panels_without_data(prometheus: str) -> set[str]:
    window = f"{patience(30):.0f}s"
    empty = set()
    for title, expression in expressions(json.loads(DASHBOARD.read_text())):
        asked = expression.replace("$__rate_interval", window).replace("$__range", window)
        asked = asked.replace("$slo_class", ".*").replace("$instance", ".*")
        if not query(prometheus, "query", query=asked)["result"]:
            empty.add(title)
    return empty


def test_a_prometheus_reads_the_server_and_the_dashboard(
    server: LiveServer, prometheus: str
) -> None:
    end = time.monotonic() + patience(60)
    attained = 'vllm_slo:requests_finished_total{slo_class="chat",attained="true"}'
    sampled: list[Any] = []
    while time.monotonic() < end and not sampled:
        with suppress(OSError):
            sampled = query(prometheus, "query", query=f"count_over_time({attained}[1m]) > 4")[
                "result"
            ]
        time.sleep(0.5)
    assert sampled, "Prometheus has not read the server"
    # Neither drafts, draft servers, tenants, stages, sessions nor a front are here, and nothing
    # was broken.
    expected = {
        *("Acceptance of draft tokens", "Tokens of a tree", "Draft lengths", "Draft servers"),
        *("Drafts of tenants", "Front: requests", "Front: replicas", "Promises broken"),
        *("Attainment by stage", "Sessions"),
    }
    end = time.monotonic() + patience(60)
    while True:
        for _ in range(2):
            assert ask(server, {"class": "chat"}) == 200
            assert ask(server, {"class": "hasty"}) == 200
            time.sleep(patience(2.5))
        empty = panels_without_data(prometheus)
        if empty <= expected or time.monotonic() > end:
            break
    assert empty <= expected


def test_prometheus_evaluates_every_rule(prometheus: str) -> None:
    end = time.monotonic() + patience(30)
    while time.monotonic() < end:
        rules = [r for group in query(prometheus, "rules")["groups"] for r in group["rules"]]
        if all(rule["health"] == "ok" for rule in rules):
            break
        time.sleep(0.5)
    assert rules and {rule["health"] for rule in rules} == {"ok"}, rules
    assert {rule["name"] for rule in rules if rule.get("state") == "firing"} == set()
