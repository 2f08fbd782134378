# SPDX-License-Identifier: Apache-2.0
"""The bench: the open-loop client against a real local server, reports, the command."""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_openai import Fake, serving
from patience import patience

from vllm_slo import cli
from vllm_slo.bench.client import ClientOptions, run_server
from vllm_slo.bench.command import finish
from vllm_slo.bench.drafts import DraftCounts, read_draft_counts
from vllm_slo.bench.endpoint import ServerTarget, describe_server
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.main import build_workload, run_bench
from vllm_slo.bench.planned import PlannedRequest, Workload
from vllm_slo.bench.probes import measure_zero_load
from vllm_slo.bench.quote import _first_model
from vllm_slo.bench.report import BenchReport, comparison_table, in_flight, machine, versions
from vllm_slo.bench.workload import DEFAULT_CLASSES, WorkloadOptions
from vllm_slo.bench.zero_load import ZeroLoad, load_zero_load
from vllm_slo.slo.model import SLO, Stage

ZERO = ZeroLoad(((16, 0.02), (256, 0.05), (1024, 0.2)), 0.01, "lone")


def synthetic(**changes: Any) -> Workload:
    return build_workload(replace(WorkloadOptions(rate=5.0, duration_s=60.0), **changes), ZERO)


@pytest.fixture(autouse=True)
def _no_server_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving() as server_side:
        yield server_side


def requests_of(prompts: list[int], output: int = 12, gap_s: float = 0.01) -> Workload:
    planned = [
        PlannedRequest(f"r{i}", i * gap_s, "chat", n, output, 5.0, 1.0)
        for i, n in enumerate(prompts)
    ]
    return Workload("hand", 0, len(prompts) * gap_s, "test", tuple(planned))


QUIET = ClientOptions(ready_requests=0, drain_s=patience(20.0))


@pytest.mark.alone
def test_client_sends_what_was_planned(fake: Fake) -> None:
    workload = requests_of([5, 6, 7])
    tallies: list[int] = []
    result = run_server(
        ServerTarget("ours", fake.url), workload, QUIET, lambda tally: tallies.append(tally.done)
    )
    assert (result.info.model, result.info.max_model_len, result.info.version) == (
        "tiny",
        512,
        "0.0.test",
    )
    bodies = {len(b["prompt"][0]): b for b in fake.bodies}
    for request in workload.requests:
        body = bodies[request.prompt_tokens]
        assert body["prompt"] == [workload.prompt_ids(request, 512)]
        assert body["max_tokens"] == body["min_tokens"] == 12
        assert body["slo"] == {"ttft_ms": 5000.0, "tpot_ms": 1000.0}
        assert body["stream"] is body["ignore_eos"] is body["return_token_ids"] is True
    assert tallies[-1] == 3
    for sent in result.requests:
        assert sent.error is None
        assert not sent.tokens_estimated
        assert sent.tokens_missing == 0
        assert sent.record.finished
        assert len(sent.record.token_times_s) == 12
    assert in_flight(result, [-1.0, result.elapsed_s]) == [0, 0]


def test_stock_servers_get_no_slo(fake: Fake) -> None:
    workload = requests_of([5])
    run_server(ServerTarget("stock", fake.url, send_slo=False), workload, QUIET)
    run_server(ServerTarget("ours", fake.url), workload, QUIET)
    assert "slo" not in fake.bodies[0]
    assert "slo" in fake.bodies[1]
    assert fake.bodies[0]["prompt"] == fake.bodies[1]["prompt"]
    assert fake.bodies[0]["cache_salt"] != fake.bodies[1]["cache_salt"]


@pytest.mark.alone
def test_client_is_open_loop(fake: Fake) -> None:
    """All requests leave although no earlier one has been answered."""
    fake.holds = 10
    workload = requests_of([5] * 10, output=3, gap_s=0.02)
    result = run_server(ServerTarget("slow", fake.url), workload, QUIET)
    assert all(sent.record.finished for sent in result.requests)
    last_s = max(sent.record.arrival_s for sent in result.requests)
    assert in_flight(result, [last_s]) == [10]


def test_what_the_server_says_of_the_outcome_is_recorded(fake: Fake) -> None:
    fake.behave = {6: "promise", 7: "flex"}
    result = run_server(ServerTarget("ours", fake.url), requests_of([5, 6, 7]), QUIET)
    assert [r.outcome for r in result.records] == ["served", "admitted", "best_effort"]


@pytest.mark.parametrize("say_token_ids", [True, False])
def test_tokens_of_multi_token_chunks(fake: Fake, say_token_ids: bool) -> None:
    fake.tokens_per_chunk, fake.say_token_ids = 4, say_token_ids
    (sent,) = run_server(ServerTarget("spec", fake.url), requests_of([5], 10), QUIET).requests
    assert len(sent.record.token_times_s) == 10
    assert sent.tokens_estimated is not say_token_ids
    chunks = Counter(sent.record.token_times_s)
    assert sorted(chunks.values()) == ([2, 4, 4] if say_token_ids else [3, 3, 4])


@pytest.mark.slow
def test_trouble_is_recorded_per_request(fake: Fake) -> None:
    fake.behave = {50: "decline", 51: "crash", 52: "cut", 53: "error", 54: "hang"}
    workload = requests_of([5, 50, 51, 52, 53, 54])
    result = run_server(
        ServerTarget("bad", fake.url), workload, replace(QUIET, drain_s=patience(2.0))
    )
    by_length = {r.record.num_prompt_tokens: r for r in result.requests}
    assert by_length[5].record.finished
    outcomes = {n: r.record.outcome for n, r in by_length.items()}
    assert outcomes == {
        5: "served",
        50: "declined",
        51: "failed",
        52: "failed",
        53: "failed",
        54: "failed",
    }
    assert by_length[50].status == 429
    assert by_length[51].status == 500
    assert len(by_length[52].record.token_times_s) == 2
    assert "ended before" in str(by_length[52].error)
    assert "engine died" in str(by_length[53].error)
    assert "cut off" in str(by_length[54].error)
    summary = BenchReport(workload, ZERO, (result,), "test").summaries(result)["chat"]
    assert (summary.finished, summary.declined, summary.failed) == (1, 1, 4)
    assert summary.attainment == pytest.approx(1 / 6)


def test_requests_that_make_a_server_ready_are_dropped(fake: Fake) -> None:
    options = replace(QUIET, ready_requests=3)
    result = run_server(ServerTarget("warm", fake.url), requests_of([5, 6, 7, 8]), options)
    assert len(result.requests) == 4
    assert len(fake.bodies) == 7
    assert all("slo" not in b for b in fake.bodies[:3])


@pytest.mark.alone
def test_zero_load_measures_a_lone_request(fake: Fake) -> None:
    fake.step_s = 0.01
    begun_s = time.perf_counter()
    zero = measure_zero_load(ServerTarget("lone", fake.url), 300, repeats=2, output_tokens=11)
    took_s = time.perf_counter() - begun_s
    lengths = [16, 64, 256, 289]
    assert [n for n, _ in zero.ttft_points] == lengths
    asked = [(len(body["prompt"][0]), body["max_tokens"]) for body in fake.bodies]
    once = [(n, 2) for n in lengths]  # to warm up
    assert asked == once + [(n, 1) for n in lengths for _ in range(2)] + [(16, 11)] * 2
    assert fake.at_once == 1
    assert all(0.009 < s < took_s for _, s in zero.ttft_points)
    assert 0 < 2 * 10 * zero.tpot_s < took_s  # two answers of ten tokens after the first
    assert zero.server == "lone"


def test_unusable_servers(fake: Fake) -> None:
    with pytest.raises(BenchError, match="--base-url: cannot reach"):
        run_server(ServerTarget("gone", "http://127.0.0.1:9"), requests_of([5]), QUIET)
    with pytest.raises(BenchError, match="serves tiny, not 'other'"):
        run_server(ServerTarget("x", fake.url, "other"), requests_of([5]), QUIET)
    with pytest.raises(BenchError, match="--max-context"):
        run_server(ServerTarget("x", fake.url), requests_of([600]), QUIET)
    with pytest.raises(BenchError, match="does not answer like an OpenAI server"):
        run_server(ServerTarget("x", fake.url + "/nothing"), requests_of([5]), QUIET)
    with pytest.raises(BenchError, match="no requests"):
        run_server(ServerTarget("x", fake.url), Workload("none", 0, 1.0, "", ()), QUIET)
    fake.behave = {5: "crash"}
    with pytest.raises(BenchError, match="a first request failed"):
        run_server(ServerTarget("x", fake.url), requests_of([5]), ClientOptions())
    twice = [ServerTarget("x", fake.url)] * 2
    with pytest.raises(BenchError, match="two servers have the same name"):
        run_bench(twice, WorkloadOptions())
    with pytest.raises(BenchError, match="at least one server"):
        run_bench([], WorkloadOptions())


DRAFTS = """\
# HELP vllm:spec_decode_num_{0}_total Number.
# TYPE vllm:spec_decode_num_{0}_total counter
vllm:spec_decode_num_{0}_total{{engine="0",model_name="tiny"}} {1}
vllm:spec_decode_num_{0}_total{{engine="1",model_name="tiny"}} {1}
# TYPE vllm:spec_decode_num_{0}_created gauge
vllm:spec_decode_num_{0}_created{{engine="0",model_name="tiny"}} 1.7e+09
"""
POSITIONS = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 7.0\n'


def drafts_page(**counts: float) -> str:
    """vLLM's page with two engines that counted ``counts`` each."""
    return POSITIONS + "".join(DRAFTS.format(name, value) for name, value in counts.items())


def test_drafts_are_counted_over_all_engines(fake: Fake) -> None:
    fake.metrics = drafts_page(drafts=20.0, draft_tokens=150.0, accepted_tokens=45.0)
    counts = read_draft_counts(fake.url)
    assert counts == DraftCounts(40, 300, 90)
    assert counts.to_dict()["accepted_per_step"] == 2.25


@pytest.mark.parametrize(
    "page",
    [
        "",
        "vllm:num_requests_running 3.0\n",
        drafts_page(drafts=20.0, draft_tokens=150.0),
        drafts_page(drafts=float("nan"), draft_tokens=1.0, accepted_tokens=1.0),
        "vllm:spec_decode_num_drafts_total{ 1\n",
    ],
)
def test_a_server_that_says_nothing_of_drafts_has_none(fake: Fake, page: str) -> None:
    fake.metrics = page
    assert read_draft_counts(fake.url) is None


def test_a_server_that_is_gone_has_no_drafts() -> None:
    assert read_draft_counts("http://127.0.0.1:9") is None


def test_a_proxy_is_not_asked_for_what_is_on_loopback(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    fake.metrics = drafts_page(drafts=20.0, draft_tokens=150.0, accepted_tokens=45.0)
    assert read_draft_counts(fake.url) is not None
    assert _first_model(fake.url) == "tiny"
    assert describe_server(ServerTarget("a", fake.url)).version == "0.0.test"
    with pytest.raises(BenchError, match="refused"):  # by the proxy
        _first_model("http://nowhere.invalid")


# ---------------------------------------------------------------------- reports and command


def bench(*words: str) -> int:
    """The command as it is typed: the exit status, also of argparse."""
    try:
        return cli.main(["bench", *words])
    except SystemExit as left:
        return int(str(left.code))


@pytest.mark.slow
def test_command_end_to_end(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_json = tmp_path / "deep" / "report.json"
    zero = tmp_path / "zero.json"
    zero.write_text(json.dumps(ZERO.to_dict()))
    status = bench(
        "--base-url", f"{fake.url}=one", "--base-url", f"{fake.url}=two", "--no-slo", "one",
        "--rate", "20", "--duration", "1", "--length-scale", "0.05", "--seed", "7",
        "--zero-load", str(zero), "--json", str(out_json), "--out", str(tmp_path / "pictures"),
    )  # fmt: skip
    assert status == 0
    assert_picture(tmp_path / "pictures" / "bench.png")
    shown = capsys.readouterr().out
    for word in ("chat", "code", "summary", "batch", "total", "one", "two", "goodput", "TTFT"):
        assert word in shown
    data = json.loads(out_json.read_text())
    assert data["schema"] == "vllm-slo-bench/1"
    assert set(data) == {
        "schema", "command", "created", "machine", "versions", "seed", "definitions", "workload",
        "zero_load", "warnings", "servers", "concurrency", "recorded",
    }  # fmt: skip
    assert data["seed"] == 7
    assert data["workload"]["requests"] == 20
    assert [s["name"] for s in data["servers"]] == ["one", "two"]
    for server in data["servers"]:
        assert len(server["requests"]) == 20
        assert set(server["classes"]) == {"chat", "code", "summary", "batch"}
        assert server["total"]["n"] == 20
        assert server["vllm_version"] == "0.0.test"
    planned = [{(r["id"], r["prompt_tokens"]) for r in s["requests"]} for s in data["servers"]]
    assert planned[0] == planned[1]
    assert load_zero_load(out_json) == ZERO  # a report can be the yardstick of the next
    slo_sent = ["slo" in b for b in fake.bodies if b["min_tokens"] == b["max_tokens"]]
    assert any(slo_sent)


def report_of(fake: Fake, workload: Workload) -> BenchReport:
    first = run_server(ServerTarget("stock", fake.url, send_slo=False), workload, QUIET)
    second = run_server(ServerTarget("ours", fake.url), workload, QUIET)
    return BenchReport(workload, ZERO, (first, second), "test")


def assert_picture(path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    with image_module.open(path) as image:
        image.load()
        pixels = np.asarray(image.convert("RGB"))
        opaque = np.asarray(image.convert("RGBA"))[..., 3].min()
    assert min(pixels.shape[:2]) > 600
    assert opaque == 255  # legible on a dark page too
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    inked = (pixels < 128).all(axis=2).mean()
    assert 0.002 < inked < 0.5


@pytest.mark.slow
def test_picture_opens_and_is_not_blank(fake: Fake, tmp_path: Path) -> None:
    report = report_of(fake, synthetic(rate=20.0, duration_s=1.0, length_scale=0.02))
    finish(report, None, None, tmp_path / "picture.png")
    assert_picture(tmp_path / "picture.png")


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["decline", "hang", "crash"])
def test_report_of_a_disaster(fake: Fake, tmp_path: Path, trouble: str) -> None:
    """Nothing finished: tables, JSON and picture still come out, and say so."""
    from rich.console import Console

    fake.behave = {5: trouble}
    workload = requests_of([5, 5])
    runs = (run_server(ServerTarget("x", fake.url), workload, replace(QUIET, drain_s=0.3)),)
    report = BenchReport(workload, ZERO, runs, "test")
    text = io.StringIO()
    out_png = tmp_path / "r.png" if trouble == "hang" else None
    finish(report, Console(file=text, width=80), tmp_path / "r.json", out_png)
    assert "0%" in text.getvalue()
    assert json.loads((tmp_path / "r.json").read_text())["servers"][0]["total"]["finished"] == 0
    if out_png is not None:
        assert_picture(out_png)


@pytest.mark.slow
def test_picture_without_any_objective(fake: Fake, tmp_path: Path) -> None:
    batch = next(c for c in DEFAULT_CLASSES if c.name == "batch")
    workload = synthetic(rate=10.0, duration_s=0.5, length_scale=0.02, classes=(batch,))
    finish(report_of(fake, workload), None, tmp_path / "r.json", tmp_path / "r.png")
    assert_picture(tmp_path / "r.png")


def test_table_fits_eighty_columns(fake: Fake) -> None:
    from rich.console import Console

    text = io.StringIO()
    Console(file=text, width=80).print(comparison_table(report_of(fake, requests_of([5, 6]))))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text.getvalue()


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (["--rate", "-2"], "argument --rate: must be above 0, got -2"),
        (["--rate", "nan"], "argument --rate: must be above 0"),
        (["--rate", "many"], "argument --rate: 'many' is not a number"),
        (["--duration", "0"], "argument --duration: must be above 0"),
        (["--classes", ""], "error: --classes: name at least one class"),
        (["--classes", "chta"], "error: --classes: unknown class 'chta'; did you mean chat?"),
        (["--workload", "azur"], "argument --workload: 'azur' is unknown; did you mean azure?"),
        (["--workload", "adaserve", "--trace", "missing.json"], "error: cannot read missing.json"),
        (["--trace", "x.csv"], "error: --trace: only with an azure-* or adaserve workload"),
        (["--zero-load", "missing.json"], "error: --zero-load: cannot read missing.json"),
        (["--no-slo", "nobody"], "error: --no-slo: no server is named 'nobody'"),
        (["--vocab-size", "1"], "argument --vocab-size: must be at least 2, got 1"),
        (["--warmup", "4"], "argument --warmup: must be at least 0 and at most 1, got 4"),
        (["--drain", "0"], "argument --drain: must be above 0"),
        (["--seed", "-4"], "argument --seed: must be at least 0, got -4"),
        (["--model", "other"], "error: --model: "),
        (["--rules", "rules.yaml"], "error: --rules: only with --slo-config"),
        (["--slo-config", "missing.yaml"], "error: cannot read the file 'missing.yaml'"),
        (["--every-class"], "error: --every-class: only with --min-attainment"),
        (["--classes", "batch", "--min-attainment", "1"], "error: --min-attainment: no request"),
        (["--base-url", "http://127.0.0.1:9=x"], "error: --base-url: two servers have the same"),
    ],
)
def test_bad_options_are_named(
    fake: Fake, extra: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--base-url", f"{fake.url}=x", *extra) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert problem in error
    assert error.startswith("vllm-slo: error: ")
    assert not any(b.get("slo") for b in fake.bodies)


def test_unreachable_server_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--base-url", "http://127.0.0.1:9") == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm-slo: error: --base-url: cannot reach http://127.0.0.1:9")
    assert error.count("\n") == 1


def test_the_server_of_the_environment(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench("--rate", "1") == 2
    assert "--base-url: name a server, or set OPENAI_BASE_URL" in capsys.readouterr().err
    monkeypatch.setenv("OPENAI_BASE_URL", f"{fake.url}/v1")
    assert bench("--rate", "1", "--model", "other") == 2
    assert "serves tiny, not 'other'" in capsys.readouterr().err
    assert cli.main(["quote", "--prompt", "hello", "--ttft-ms", "5"]) == 0


SLO_YAML = """
classes:
  chat: {ttft_ms: 60000, tpot_ms: 50000}
  report: {e2e_ms: 90000, value: 3, on_unattainable: decline}
  batch: {tier: best_effort}
"""
SHORT = ("--rate", "24", "--duration", "0.5", "--length-scale", "0.02")


@pytest.fixture
def slo_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "slo.yaml"
    path.write_text(SLO_YAML)
    return path


def test_classes_of_a_servers_configuration(
    fake: Fake, slo_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their objectives are in ms, so nothing is measured first."""
    out = tmp_path / "report.json"
    words = ["--base-url", fake.url, *SHORT, "--slo-config", str(slo_yaml), "--json", str(out)]
    assert bench(*words) == 0
    shown = capsys.readouterr().out
    assert "chat: TTFT 60,000 ms, TPOT 50,000 ms (4 requests" in shown
    assert "report: end to end 90,000 ms (4 requests" in shown
    assert len(fake.bodies) == 4 + 12  # of which 4 make the server ready
    asked = Counter(json.dumps(body.get("slo")) for body in fake.bodies[4:])
    assert asked == {
        '{"ttft_ms": 60000.0, "tpot_ms": 50000.0}': 4,
        '{"e2e_ms": 90000.0, "value": 3.0, "on_unattainable": "decline"}': 4,
        '{"tier": "best_effort"}': 4,
    }
    data = json.loads(out.read_text())
    assert data["zero_load"] is None
    latencies = data["servers"][0]["latencies"]
    assert latencies["report"]["attainment"] == 1.0
    assert latencies["batch"]["with_objective"] == 0
    assert latencies["total"]["e2e"]["p50_s"] <= latencies["total"]["e2e"]["p99_s"]


def test_shares_and_rules_of_configured_classes(
    fake: Fake, slo_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--base-url", fake.url, *SHORT, "--slo-config", str(slo_yaml)]
    assert bench(*words, "--classes", "chat=3,report=1", "--send", "class") == 0
    assert all("slo" not in body for body in fake.bodies[:4]), "the server may not know a class"
    asked = Counter(body["slo"]["class"] for body in fake.bodies[4:])
    assert asked == {"chat": 9, "report": 3}
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules: [{class: report, recorded_class: batch}]\ndefault: chat\n")
    fake.bodies.clear()
    assert bench(*words, "--rules", str(rules), "--send", "class") == 0
    asked = Counter(body["slo"]["class"] for body in fake.bodies[4:])
    assert asked == {"chat": 11, "report": 1}  # the mix has a tenth of batch
    rules.write_text("rules: [{class: report, recorded_class: batch}]\n")
    fake.bodies.clear()
    assert bench(*words, "--rules", str(rules), "--send", "class") == 0
    assert [body.get("slo") for body in fake.bodies[4:]].count(None) == 11  # also of its own chat
    capsys.readouterr()
    assert bench(*words, "--rules", str(rules), "--classes", "chat") == 2
    assert "--classes: leave it out; --rules give the classes" in capsys.readouterr().err
    assert bench(*words, "--classes", "chatt") == 2
    assert "unknown class 'chatt'; did you mean chat?" in capsys.readouterr().err
    slo_yaml.write_text("default_class: null\n")
    assert bench(*words) == 2
    assert "--slo-config: the file has no classes" in capsys.readouterr().err


def test_objectives_of_a_configuration_are_scaled_whole() -> None:
    slo = SLO(stages=(Stage(10, "x"), Stage(30)), ttft_ms=4, max_wait_ms=8)
    request = PlannedRequest("r", 0.0, "c", 5, 5, None, None).asking(slo).scaled(2.5)
    assert (request.ttft_slo_s, request.tpot_slo_s) == (0.010, 0.075)
    body = request.slo_body()
    assert body == {
        "ttft_ms": 10,
        "stages": [{"tpot_ms": 25, "until": "x"}, {"tpot_ms": 75}],
        "max_wait_ms": 20,
    }
    job = SLO(ttft_ms=4, session_id="s", session_e2e_ms=100, slo_class="job")
    request = request.asking(job).scaled(2)
    assert request.slo_body(session_id="mine") == {
        "ttft_ms": 8,
        "session_id": "mine",
        "session_e2e_ms": 200,
    }
    assert request.slo_body() == {"ttft_ms": 8}
    assert request.slo_body("class", "mine") == {"class": "job", "session_id": "mine"}
    assert request.slo_body("none", "mine") is None
    assert request.asking(None).slo_body() is None


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--min-attainment", "1"], 1, "x: 75.0% of total kept their objectives"),
        (["--min-attainment", "75%"], 0, ""),
        (["--min-attainment", "0.6", "--every-class"], 1, "x: 50.0% of chat kept"),
        ([], 0, ""),
    ],
)
def test_the_least_attainment_decides_the_status(
    fake: Fake,
    slo_yaml: Path,
    words: list[str],
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every second request of one of the two classes is declined."""
    short = ["--rate", "8", "--duration", "1", "--classes", "chat,report"]
    url = ["--base-url", f"{fake.url}=x", "--slo-config", str(slo_yaml), *short]
    fake.declines = lambda body: "tpot_ms" in body.get("slo", {}) and len(fake.declined) < 2
    assert bench(*url, "--length-scale", "0.02", *words) == status
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == bool(said)


def test_the_first_requests_are_sent_and_not_counted(fake: Fake) -> None:
    workload = requests_of([5, 6, 7, 8])
    result = run_server(ServerTarget("x", fake.url), workload, replace(QUIET, warmup=0.5))
    assert len(result.requests) == len(fake.bodies) == 4
    assert [r.num_prompt_tokens for r in result.records] == [7, 8]
    report = BenchReport(workload, ZERO, (result,), "test")
    assert report.summaries(result)["total"].n == 2
    server = report.to_dict()["servers"][0]
    assert (server["warmup_requests"], len(server["requests"])) == (2, 4)
    assert result.counted_s == result.elapsed_s - result.records[0].arrival_s
    with pytest.raises(BenchError, match="--warmup: no request is left to count"):
        run_server(ServerTarget("x", fake.url), workload, replace(QUIET, warmup=1.0))


def test_only_json_is_printed_for_a_dash(
    fake: Fake, slo_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--base-url", fake.url, *SHORT, "--slo-config", str(slo_yaml), "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "vllm-slo-bench/1"


def test_old_names_work_and_say_the_new_one(
    fake: Fake, slo_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,9,3\n")
    names = {"--workload-file": trace, "--out-json": tmp_path / "r.json"}
    words = ["--base-url", fake.url, "--workload", "azure-conv", "--slo-config", str(slo_yaml)]
    words += ["--rate", "1", "--duration", "1", "--classes", "chat"]
    assert bench(*words, *(word for name, path in names.items() for word in (name, str(path)))) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("vllm-slo: note: --workload-file is now called --trace; the old name")
    assert second.startswith("vllm-slo: note: --out-json is now called --json; the old name")
    assert json.loads((tmp_path / "r.json").read_text())["workload"]["requests"] == 1
    assert bench("--out-png", str(tmp_path / "p.png"), "--rate", "x") == 2
    assert "--out-png is now called --out DIR;" in capsys.readouterr().err


def test_unwritable_outputs(fake: Fake, tmp_path: Path) -> None:
    report = report_of(fake, requests_of([5]))
    (tmp_path / "file").write_text("")
    for out_json, out_png in (
        (tmp_path / "file" / "r.json", None),
        (None, tmp_path / "file" / "r"),
    ):
        with pytest.raises(BenchError, match="cannot write"):
            finish(report, None, out_json, out_png)


def test_machine_and_versions_are_json() -> None:
    assert machine()["cores"] >= 1
    assert versions()["python"]
    json.dumps([machine(), versions()])
