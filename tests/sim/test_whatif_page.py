# SPDX-License-Identifier: Apache-2.0
"""The page of ``vllm-slo whatif``: what it says, that it fetches nothing, that names are harmless,
and how it behaves in a browser."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")

import whatif_reports
from browser import PHONE, chromium, visiting
from whatif_reports import System

from vllm_slo.sim import charts
from vllm_slo.sim.measure import Load
from vllm_slo.sim.whatif import page, terminal, words
from vllm_slo.sim.whatif.explanations import VALIDATED
from vllm_slo.slo.model import SLO

ROOT = Path(__file__).resolve().parents[2]
MARKUP = "<script>alert(1)</script>"
QUOTES = "\"'><img src=x onerror=alert(2)>"
NASTY = {MARKUP: SLO(ttft_ms=500, tpot_ms=50), QUOTES: SLO(tpot_ms=20), "&amp;": None}
ALONE = {"br", "circle", "hr", "img", "input", "line", "link", "meta", "polygon", "rect"}


class Page(HTMLParser):
    """Elements with their attributes, texts by kind of element, and that all of them close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ALONE:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def made() -> str:
    return page.render(whatif_reports.report())


# --- numbers -------------------------------------------------------------------------------------


def test_the_tables_have_the_numbers_of_the_json_file(made: str) -> None:
    data = json.loads(json.dumps(whatif_reports.report().to_dict(), allow_nan=False))
    systems = [one["system"] for one in data["systems"]]
    rows = iter(Page(made).rows)
    for each in [data["all"], *data["classes"]]:
        assert next(rows) == ["", *(one["title"] for one in data["systems"])]
        cells = [each["systems"][system] for system in systems]
        if any(each["objectives"].values()):
            told = next(rows)
            assert told[0] == "kept objectives"
            for text, cell in zip(told[1:], cells, strict=True):
                found = cell["attained"]
                assert found["share"] == found["kept"] / found["of"]
                share, low, high = (100 * found[key] for key in ("share", "low", "high"))
                assert text == f"{share:.1f}%{low:.1f} to {high:.1f}%"
            gains = {one["over"]: one for one in each["gains"]}
            told = next(rows)
            for text, system in zip(told[1:], systems, strict=True):
                if system in gains:
                    share = 100 * gains[system]["share"]
                    assert text.replace("\N{MINUS SIGN}", "-").startswith(f"{share:+.1f}")
                else:
                    assert text == ""
        for name, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("End to end", "e2e")):
            for q in ("p50", "p95", "p99"):
                told = next(rows)
                assert told[0] == f"{name} {q}"
                assert told[1:] == [words.duration(cell[key][f"{q}_s"]) for cell in cells]
        told = next(rows)
        if told[0] == "promises kept":
            ours = cells[-1]
            assert told[-1] == f"{ours['promised_kept']} of {ours['promised']}"
            assert next(rows)[-1] == f"{ours['late_kept']} of {ours['late']}"
            told = next(rows)
        assert told == ["answer tokens a second", *(words.rate(c["tokens_per_s"]) for c in cells)]
        if any(each["objectives"].values()):
            assert next(rows)[1:] == [words.rate(cell["attained_per_s"]) for cell in cells]
    assert next(rows, None) is None


def test_each_bar_is_as_long_as_its_share(made: str) -> None:
    report = whatif_reports.report()
    rows = [report.numbers.all, *report.numbers.classes]
    shares = [cell.attained.share for row in rows for cell in row.cells if cell.attained]
    bars = re.findall(r'<rect class="fill" y="2" width="([\d.]+)%"', made)
    assert [float(bar) for bar in bars] == pytest.approx([100 * s for s in shares], abs=0.01)


def test_the_headline_says_by_how_much() -> None:
    numbers = whatif_reports.report().numbers
    ours, (over_served, over_stock) = numbers.all.cells[-1].attained, numbers.all.gains
    assert ours is not None
    assert words.headline(numbers) == (
        f"With vllm-slo, {100 * ours.share:.1f}% of the requests that have an objective would have "
        f"kept it: {100 * over_served.share:.1f} points more than as served and "
        f"{100 * over_stock.share:.1f} points more than with stock vLLM."
    )


def with_ours(*, stock: float, ours: float) -> list[System]:
    return [
        ("fcfs-2048", "Stock vLLM", "stock", stock),
        ("vllm-slo", "vllm-slo", "ours", ours),
    ]


def test_a_class_that_loses_is_named_and_what_is_unclear_is_said_to_be() -> None:
    worse, same = with_ours(stock=0.5, ours=4.0), with_ours(stock=1.2, ours=1.2)
    numbers = whatif_reports.report(systems=worse).numbers
    assert "points fewer than with stock vLLM" in words.headline(numbers)
    assert any(
        told.startswith("chat keeps its objectives less often: ")
        for told in words.findings(numbers)
    )
    numbers = whatif_reports.report(systems=same).numbers
    assert "(no clear difference)" in words.headline(numbers)
    assert "No class keeps its objectives less often." in words.findings(numbers)


def test_without_objectives_without_ours_without_a_recording() -> None:
    numbers = whatif_reports.report({"batch": None}).numbers
    assert "No request of this trace has an objective" in words.headline(numbers)
    numbers = whatif_reports.report(systems=whatif_reports.SYSTEMS[:2]).numbers
    assert "not among the systems" in words.headline(numbers)
    html = page.render(whatif_reports.report(systems=whatif_reports.SYSTEMS[1:]))
    assert "There is no column of what was served." in Page(html).text
    assert "As served" not in html
    assert Page(page.render(whatif_reports.report({"batch": None}, count=2))).rows


def test_the_page_says_which_requests_count(made: str) -> None:
    text = " ".join(Page(made).text.split())
    for told in (
        "The first 3 requests are simulated and do not count",
        "4 requests whose client left are simulated and do not count",
        "2 requests ended before their first token",
        "3 requests are longer than the context",
        "1 row of the trace without tokens",
        "vllm-slo whatif monday.jsonl",
        "2 replicas of h100-llama-8b",
        "from 0 s to 600 s",
        "mine.yaml",
        "rules.yaml",
        "NVIDIA H100 SXM data sheet",
        "Answers with stages (think)",
        "Stock vLLM is simulated as fcfs-2048",
    ):
        assert told in text, told


def test_the_errors_that_it_states_are_those_that_were_measured() -> None:
    results = (ROOT / "benchmarks" / "results" / "sim_validation.md").read_text()
    rows = [line.split(" | ") for line in results.splitlines() if line.count(" | ") == 14]
    for kind, within, largest in (("step times", 10, "-8.9"), ("forecast", 3, "+18.1")):
        told = [row for row in rows if row[2] == kind]
        assert len(told) == 13
        assert sum(row[14] == "yes |" for row in told) == within
        assert largest in max((row[6].split()[0] for row in told), key=lambda p: abs(float(p)))
        assert f"{largest} points" in VALIDATED
    assert "10 of 13 comparisons" in VALIDATED
    assert "3 of 13 were" in VALIDATED


def test_the_table_of_the_terminal_has_every_class_and_system() -> None:
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as captured:
        console.print(terminal.render(whatif_reports.report(NASTY)))
    told = captured.get()
    for name in ("all", MARKUP, QUOTES, "&amp;", "As served", "Stock vLLM", "vllm-slo"):
        assert name in told, name


# --- no harm, no network -------------------------------------------------------------------------


def check_alone(html: str) -> None:
    """Raise AssertionError if a page has a script or refers to something elsewhere."""
    for tag, attributes in Page(html).elements:
        assert tag not in ("script", "img", "iframe", "object", "embed", "form", "base")
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("src", "style", "action")
            if name == "href":
                assert value == "data:,"
    assert "http:" not in html and "https:" not in html and "url(" not in html


def test_the_page_refers_to_nothing_elsewhere_and_has_no_script(made: str) -> None:
    check_alone(made)
    for broken in ("<script>1</script>", "<img src=x>", "<p onclick=x></p>", "<a href='/'></a>"):
        with pytest.raises(AssertionError):
            check_alone(made.replace("</main>", f"{broken}</main>"))


def test_the_example_in_the_documentation_is_such_a_page(made: str) -> None:
    """If this fails for its style, make it anew as `docs/reports/example_recording.py` says."""
    example = (ROOT / "docs" / "reports" / "whatif-example.html").read_text(encoding="utf-8")
    check_alone(example)
    assert re.findall(r"<style>.*?</style>", example, re.DOTALL) == re.findall(
        r"<style>.*?</style>", made, re.DOTALL
    )
    headings = [re.findall(r"<h2[^>]*>(.*?)</h2>", html) for html in (example, made)]
    assert headings[0] == headings[1]
    assert "As served" in Page(example).text and "examples/slo.yaml" in Page(example).text


def test_the_policy_allows_this_style_sheet_and_nothing_else(made: str) -> None:
    (policy,) = (
        attributes["content"]
        for tag, attributes in Page(made).elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    (style,) = re.findall(r"<style>(.*?)</style>", made, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy is not None
    assert policy.startswith("default-src 'none'; ") and f"style-src 'sha256-{digest}';" in policy
    assert "script-src" not in policy and "unsafe" not in policy


def test_names_from_files_are_only_text() -> None:
    html = page.render(whatif_reports.report(NASTY, name=MARKUP, format=QUOTES, selection=MARKUP))
    parsed = Page(html)
    assert not {tag for tag, _ in parsed.elements} & {"script", "img"}
    for name in NASTY:
        assert parsed.text.count(name) > 2
    assert MARKUP not in html and "onerror=alert(2)>" not in html


# --- charts --------------------------------------------------------------------------------------


def test_a_logarithmic_axis_holds_its_times_and_names_some() -> None:
    for times in ([0.01, 3.0], [0.5], [0.04, 0.05, 0.06], [1e-4, 1e3], []):
        scale = charts.LogAxis.around(times)
        assert all(0 < scale.place(time_s) < 100 for time_s in times)
        ticks = scale.ticks()
        places = [scale.place(tick) for tick in ticks]
        assert len(places) >= 2 and all(3 <= place <= 97 for place in places)
        assert all(b - a >= 22 for a, b in itertools.pairwise(places))
    scale = charts.LogAxis(0.01, 1.0)
    assert scale.place(0.1) == pytest.approx(50)
    assert (scale.place(1e-9), scale.place(1e9)) == (0, 100)


def test_the_load_is_drawn_on_one_scale() -> None:
    picture = charts.load(Load((0.0, 1.0, 2.0), (0, 2, 1), (1, 2, 0), True), 8.0, height=80)
    (every,) = re.findall(r'class="best-effort" points="([^"]*)"', picture)
    (promised,) = re.findall(r'class="promised" points="([^"]*)"', picture)
    assert every == "0,80 0,70.0 1,40.0 2,70.0 2,80"
    assert promised == "0,80 0,80.0 1,60.0 2,70.0 2,80"
    plain = charts.load(Load((0.0, 1.0), (0, 0), (1, 1), False), 1.0)
    assert "promised" not in plain and 'class="plain"' in plain


def test_what_charts_are_told_is_escaped() -> None:
    scale = charts.LogAxis(0.1, 10)
    labels = [MARKUP for _ in scale.ticks()]
    assert "<script>" not in charts.axis(scale, labels)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (None, "\N{EN DASH}"),
        (0.00123, "1.2 ms"),
        (0.0234, "23 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (1234.0, "1,234 s"),
    ],
)
def test_times_have_three_digits(seconds: float | None, told: str) -> None:
    assert words.duration(seconds) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(5.0, "5.00 s"), (119.0, "119 s"), (600.0, "10 min"), (605.2, "10 min 5 s"),
     (7200.0, "2 h"), (9000.0, "2 h 30 min")],
)  # fmt: skip
def test_stretches_are_told_in_two_units(seconds: float, told: str) -> None:
    assert words.stretch(seconds) == told


# --- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright")
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "whatif.html"
    path.write_text(page.render(whatif_reports.report(NASTY, name=QUOTES)), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "screen", [{"width": 1280, "height": 900}, PHONE, {"width": 320, "height": 600}]
)
def test_it_opens_anywhere(
    browser: Any, written: Path, scheme: str, screen: dict[str, int]
) -> None:
    settings = {"color_scheme": scheme, "viewport": screen}
    with visiting(browser, written.as_uri(), **settings) as visit:
        wide, window = visit.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window
        paper, ink = visit.colour_of("body", "backgroundColor"), visit.colour_of("body")
        assert (sum(paper) > sum(ink)) is (scheme == "light")
        bar, track = visit.colour_of("svg .fill", "fill"), visit.colour_of("svg .track", "fill")
        assert bar != track and (0, 0, 0) not in (bar, track)
        width = visit.page.locator("svg.bar").first.bounding_box()["width"]
        assert width > 100


@pytest.mark.slow
def test_it_prints_on_white(browser: Any, written: Path) -> None:
    with visiting(browser, written.as_uri(), color_scheme="dark") as visit:
        visit.page.emulate_media(media="print")
        assert visit.colour_of("body", "backgroundColor") == (255, 255, 255)
        assert visit.colour_of("body") == (0, 0, 0)
        pages = visit.page.pdf(format="A4")
        assert len(re.findall(rb"/Type\s*/Page\b", pages)) < 9
