# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo replay``: recorded traffic to an endpoint, with its prefixes, sessions and classes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_openai import Fake, prompt_tokens, serving
from msgspec.structs import replace

from vllm_slo import cli
from vllm_slo.bench import served
from vllm_slo.bench.errors import BenchError
from vllm_slo.bench.replay_plan import at_rate, planned_replay
from vllm_slo.traces.classes import TrafficClasses
from vllm_slo.traces.request import Served, TraceRequest
from vllm_slo.traces.selection import Recording

HEADER = {"schema": "vllm-slo-trace/1", "created": "2026-12-01T10:00:00Z", "block_tokens": 16}
ROWS: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 40, "output_length": 6, "hash_ids": [1, 2], "class": "chat",
     "session": "a", "tenant": "acme", "end": "completed", "promise": "in_time",
     "served_ttft_ms": 80, "served_tpot_ms": 20, "served_e2e_ms": 500, "attained": True},
    {"timestamp": 40, "input_length": 50, "output_length": 4, "hash_ids": [1, 3], "class": "code",
     "ttft_ms": 70000, "end": "completed", "promise": "late", "served_ttft_ms": 900,
     "served_tpot_ms": 30, "served_e2e_ms": 1200, "attained": False},
    {"timestamp": 80, "input_length": 60, "output_length": 5, "hash_ids": [1, 2, 4],
     "class": "chat", "session": "a", "tenant": "acme", "end": "completed", "attained": True},
    {"timestamp": 120, "input_length": 20, "output_length": 3, "end": "completed"},
    {"timestamp": 160, "input_length": 30, "output_length": 0, "class": "code", "ttft_ms": 1,
     "end": "declined"},
]  # fmt: skip
SLO_YAML = """
classes:
  chat: {ttft_ms: 60000, tpot_ms: 50000, on_unattainable: decline}
  code: {e2e_ms: 90000}
"""


def trace(tmp_path: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    path = tmp_path / "day.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [HEADER, *rows]))
    return str(path)


def slo_yaml(tmp_path: Path) -> list[str]:
    path = tmp_path / "slo.yaml"
    path.write_text(SLO_YAML)
    return ["--slo-config", str(path)]


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving() as server_side:
        yield server_side


@pytest.fixture(autouse=True)
def _no_server_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def replay(*words: str) -> int:
    """The command as it is typed: the exit status, also of argparse."""
    try:
        return cli.main(["replay", *words])
    except SystemExit as left:
        return int(str(left.code))


READY = 4
"""Requests that are sent first, so that the server is ready; they have the trace's lengths."""


def sent(fake: Fake, ready: int = READY) -> list[dict[str, Any]]:
    """The bodies of the trace's requests, by the lengths of their prompts."""
    return sorted(fake.bodies[ready:], key=prompt_tokens)


# --- what is sent --------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["", "/v1"])
@pytest.mark.parametrize("api", ["completions", "chat", "responses"])
def test_each_api_gets_the_trace(fake: Fake, api: str, ending: str, tmp_path: Path) -> None:
    """With lengths, prefixes, one session id for both rounds, a key, and a further header."""
    fake.api_key = "sk-secret-4711"
    out = tmp_path / "report.json"
    words = ["--base-url", fake.url + ending, "--api", api, "--api-key", "sk-secret-4711"]
    words += ["--header", "X-Tenant: team a", "--json", str(out), *slo_yaml(tmp_path)]
    assert replay(trace(tmp_path), *words) == 0
    bodies = sent(fake)
    assert [prompt_tokens(body) for body in bodies] == [20, 30, 40, 50, 60]
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    assert [body[limit] for body in bodies] == [3, 4, 6, 4, 5]  # 4: as others of its class
    assert all(body["ignore_eos"] for body in bodies)
    assert all(body.get("min_tokens") == body.get("max_tokens") for body in bodies)
    unsaid, late, first, code, second = (body.get("slo") for body in bodies)
    assert unsaid is None
    assert late == code == {"e2e_ms": 90000.0}
    session_id = first.pop("session_id")
    assert second.pop("session_id") == session_id
    wanted = {"ttft_ms": 60000.0, "tpot_ms": 50000.0, "on_unattainable": "decline"}
    assert first == second == {**wanted, "tenant": "acme"}
    texts = [_prompt(body, api) for body in bodies]
    blocks = 16 if api == "completions" else 14  # words: the opening and the space before it
    assert texts[2][:blocks] == texts[3][:blocks] == texts[4][:blocks]
    assert texts[2][: 2 * blocks] == texts[4][: 2 * blocks] != texts[3][: 2 * blocks]
    assert texts[0][:blocks] != texts[2][:blocks]
    for path, headers in fake.asked:
        assert headers["x-tenant"] == "team a", path
    server = json.loads(out.read_text())["servers"][0]
    assert server["warnings"] == []
    assert server["prompt_tokens"] == {
        "requests": 5, "planned": 200, "counted": 200, "most_off": 0,
    }  # fmt: skip
    assert [r["output_tokens"] for r in server["requests"]][:4] == [6, 4, 5, 3]


def _prompt(body: dict[str, Any], api: str) -> list[Any]:
    if api == "completions":
        return list(body["prompt"][0])
    text = body["input"] if api == "responses" else body["messages"][0]["content"]
    return list(text.split())


@pytest.mark.parametrize("api", ["completions", "chat", "responses"])
def test_other_servers_get_no_fields_of_vllm(api: str, tmp_path: Path) -> None:
    with serving(Fake(is_vllm=False, has_tokenizer=False)) as fake:
        words = ["--base-url", fake.url, "--api", api]
        assert replay(trace(tmp_path), *words, "--send", "none") == 0
        known = {"model", "prompt", "messages", "input", "max_tokens", "max_output_tokens"}
        known |= {"temperature", "stream", "stream_options", "store"}
        assert all(set(body) <= known for body in fake.bodies)


@pytest.mark.parametrize(
    ("send", "wanted"),
    [
        ("objectives", [None, {"ttft_ms": 1}, {}, {"ttft_ms": 70000}, {}]),
        ("class", [None, *({"class": name} for name in ("code", "chat", "code", "chat"))]),
        ("none", [None] * 5),
    ],
)
def test_what_the_slo_field_holds(fake: Fake, send: str, wanted: list[Any], tmp_path: Path) -> None:
    """Without a configuration: the recorded objectives."""
    assert replay(trace(tmp_path), "--base-url", fake.url, "--send", send) == 0
    slos = [body.get("slo") for body in sent(fake)]
    sessions = [slo.pop("session_id") for slo in slos if slo is not None and "session_id" in slo]
    assert slos == wanted
    assert len(sessions) == (0 if send == "none" else 2)
    assert len(set(sessions)) <= 1


def test_a_rule_file_gives_the_classes(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text('rules: [{class: code, prompt_tokens: "45-"}]\ndefault: chat\n')
    words = ["--base-url", fake.url, *slo_yaml(tmp_path), "--rules", str(rules)]
    assert replay(trace(tmp_path), *words, "--send", "class") == 0
    assert [body["slo"]["class"] for body in sent(fake)] == ["chat"] * 3 + ["code"] * 2
    assert "code: end to end 90,000 ms (2 requests" in capsys.readouterr().out


# --- when it is sent -----------------------------------------------------------------------------


def test_rounds_wait_for_their_answers(fake: Fake, tmp_path: Path) -> None:
    """Round 2 of the session is due when round 1 is still being answered."""
    fake.step_s = 0.05  # 6 tokens: 0.3 s
    assert replay(trace(tmp_path), "--base-url", fake.url) == 0
    began = {prompt_tokens(body): at_s for at_s, body in fake.began[READY:]}
    ended = {prompt_tokens(body): at_s for at_s, body in fake.ended[READY:]}
    assert began[60] >= ended[40]
    assert began[50] < ended[40]  # the others do not wait


@pytest.mark.alone
def test_the_pace(fake: Fake, tmp_path: Path) -> None:
    fake.step_s = 0.0
    rows = [{k: v for k, v in row.items() if k != "session"} for row in ROWS]
    for words, span_s in (([], 0.16), (["--speed", "0.5"], 0.32), (["--rate", "10"], 0.4)):
        fake.began.clear()
        fake.bodies.clear()
        assert replay(trace(tmp_path, rows), "--base-url", fake.url, *words) == 0
        times = [at_s for at_s, _ in fake.began[READY:]]
        assert times[-1] - times[0] == pytest.approx(span_s, abs=0.06)


def test_closed_loop(fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.step_s = 0.02
    words = ["--base-url", fake.url, "--concurrency", "2"]
    slow = [row | {"timestamp": row["timestamp"] * 1e6} for row in ROWS]
    assert replay(trace(tmp_path, slow), *words) == 0  # days, if times counted
    assert "5 requests, 2 at once" in capsys.readouterr().out
    times = sorted(
        [(at_s, 1) for at_s, _ in fake.began[READY:]] + [(s, -1) for s, _ in fake.ended[READY:]]
    )
    open_now = [sum(step for _, step in times[: n + 1]) for n in range(len(times))]
    assert max(open_now) == 2


def test_a_part_of_a_trace(fake: Fake, tmp_path: Path) -> None:
    words = ["--base-url", fake.url, "--from", "0.04", "--rows", "2", "--length-scale", "0.5"]
    assert replay(trace(tmp_path), *words) == 0
    assert [prompt_tokens(body) for body in sent(fake, ready=2)] == [25, 30]


# --- the report ----------------------------------------------------------------------------------


def test_the_report_stands_beside_what_was_recorded(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.spares = READY
    fake.behave = {40: "late", 50: "decline", 60: "crash"}
    out = tmp_path / "report.json"
    words = ["--base-url", f"{fake.url}=mine", "--json", str(out), *slo_yaml(tmp_path)]
    rows = [*ROWS, {"timestamp": 170, "input_length": 70, "output_length": 3, "class": "chat"}]
    assert replay(trace(tmp_path, rows), *words) == 0
    data = json.loads(out.read_text())
    recorded, ours = data["recorded"], data["servers"][0]["latencies"]
    assert list(recorded) == list(ours) == ["", "chat", "code", "total"]
    counts = ("requests", "with_objective", "attainment", "finished", "late", "declined", "failed")
    assert [recorded["total"][name] for name in counts] == [5, 4, 0.5, 4, 1, 1, 0]
    assert [ours["total"][name] for name in counts] == [6, 5, 3 / 5, 4, 1, 1, 1]
    assert recorded["code"]["ttft"] == {"p50_s": 0.9, "p95_s": 0.9, "p99_s": 0.9}
    assert recorded["chat"]["e2e"]["p50_s"] == 0.5
    shown = capsys.readouterr().out
    assert "recorded" in shown
    assert "mine" in shown
    table = shown.partition("p50 / p95 / p99")[2].partition("warning")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert "0.08/0.08/0.08" in table
    assert "…" not in table


def test_the_first_share_is_not_counted_in_either(fake: Fake, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    words = ["--base-url", fake.url, "--warmup", "40%", "--json", str(out)]
    assert replay(trace(tmp_path), *words) == 0
    data = json.loads(out.read_text())
    assert data["servers"][0]["latencies"]["total"]["requests"] == 3
    assert data["recorded"]["total"]["requests"] == 3
    assert len(fake.bodies) == READY + 5


def test_a_trace_without_outcomes_has_nothing_recorded() -> None:
    assert served.of_trace([("chat", TraceRequest(0.0, 1, 1))]) == {}


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ([], 0),
        (["--min-attainment", "0.75"], 0),
        (["--min-attainment", "0.76"], 1),
        (["--min-attainment", "0.75", "--every-class"], 1),
    ],
)
def test_the_least_attainment_decides_the_status(
    fake: Fake, words: list[str], status: int, tmp_path: Path
) -> None:
    fake.spares = READY
    fake.behave = {50: "decline"}  # one of two of class code; both of chat attain
    words = ["--base-url", fake.url, *slo_yaml(tmp_path), *words]
    assert replay(trace(tmp_path), *words) == status


def test_no_answer_is_status_1(fake: Fake, tmp_path: Path) -> None:
    fake.spares = READY
    fake.behave = {20: "crash", 30: "decline", 40: "cut", 50: "error"}
    words = [trace(tmp_path), "--base-url", fake.url]
    assert replay(*words) == 0
    fake.bodies.clear()
    fake.behave[60] = "decline"
    assert replay(*words) == 1


@pytest.mark.slow
def test_a_picture(fake: Fake, tmp_path: Path) -> None:
    words = ["--base-url", fake.url, "--out", str(tmp_path / "out"), *slo_yaml(tmp_path)]
    assert replay(trace(tmp_path), *words) == 0
    assert (tmp_path / "out" / "replay.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_left_out_is_said(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"timestamp": 1, "input_length": 510, "output_length": 3}
    empty = {"timestamp": 2, "input_length": 0, "output_length": 3}
    assert replay(trace(tmp_path, [*ROWS, long, empty]), "--base-url", fake.url) == 0
    empty_row, unanswered, too_long = capsys.readouterr().err.splitlines()
    assert empty_row == "day.jsonl: 1 row with 0 prompt or output tokens is left out"
    assert unanswered.startswith("day.jsonl: the lengths of 1 answers were not recorded; lengths")
    assert too_long.startswith("day.jsonl: requests too long for the server, left out: 1; --length")
    assert Counter(map(prompt_tokens, fake.bodies))[510] == 0


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["missing.jsonl"], "error: cannot read missing.jsonl: No such file"),
        ([], "error: the following arguments are required: TRACE"),
        (["TRACE", "--base-url", "localhost:8000"], "error: --base-url: "),
        (["TRACE", "--base-url", "http://127.0.0.1:9"], "error: --base-url: cannot reach"),
        (["TRACE", "--base-url", ""], "error: --base-url: name a server, or set OPENAI_BASE_URL"),
        (["TRACE", "--api", "messages"], "argument --api: invalid choice: 'messages'"),
        (["TRACE", "--rate", "0"], "argument --rate: must be above 0, got 0"),
        (["TRACE", "--rate", "2", "--speed", "2"], "error: --rate: leave it out, or --speed"),
        (["TRACE", "--rate", "2", "--rows", "1"], "error: --rate: the requests of the trace came"),
        (["TRACE", "--concurrency", "0"], "argument --concurrency: must be at least 1, got 0"),
        (["TRACE", "--concurrency", "2", "--rate", "2"], "error: --concurrency: times do not"),
        (["TRACE", "--concurrency", "2", "--speed", "2"], "error: --concurrency: times do not"),
        (["TRACE", "--max-context", "9"], "error: --length-scale: no request fits 9 tokens"),
        (["TRACE", "--warmup", "1"], "error: --warmup: no request is left to count"),
        (["TRACE", "--send", "all"], "argument --send: invalid choice: 'all'"),
        (["TRACE", "--slo-config", "none.yaml"], "error: cannot read the file 'none.yaml'"),
        (["TRACE", "--rules", "none.yaml"], "error: cannot read none.yaml"),
        (["TRACE", "--min-attainment", "2"], "argument --min-attainment: must be above 0 and at"),
        (["TRACE", "--every-class"], "error: --every-class: only with --min-attainment"),
        (["TRACE", "--from", "0.1", "--to", "0.13", "--min-attainment", "1"],
         "error: --min-attainment: no request has an objective"),
        (["TRACE", "--json", "day.jsonl/report.json"], "error: --json: cannot write"),
        (["TRACE", "--model", "other"], "error: --model: "),
        (["TRACE", "--header", "x"], "error: --header: no colon in it"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_line(
    fake: Fake,
    words: list[str],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [trace(tmp_path) if word == "TRACE" else word for word in words]
    url = [] if "--base-url" in words else ["--base-url", fake.url]
    assert replay(*words, *url) == 2
    *usage, error = [
        line for line in capsys.readouterr().err.splitlines() if "were not" not in line
    ]
    assert problem in error
    assert error.startswith("vllm-slo")
    assert not usage or usage[0].startswith("usage: ")


# --- the plan ------------------------------------------------------------------------------------

NO_CLASSES = TrafficClasses.load(None, None)


def recording(*requests: TraceRequest) -> Recording:
    return Recording("t", "test", requests, 0)


def test_think_times_and_the_rate() -> None:
    first = TraceRequest(0.0, 8, 4, session="s", served=Served(e2e_s=2.0))
    rounds = [first, replace(first, at_s=5.0, served=Served(end="declined")), first]
    rows = recording(*rounds[:2], replace(first, at_s=6.0), replace(first, at_s=7.0, session="t"))
    plan = planned_replay(rows, NO_CLASSES)
    assert [request.think_s for request in plan.workload.requests] == [0.0, 3.0, 0.0, 0.0]
    faster = at_rate(rows, 6.0)
    plan = planned_replay(faster, NO_CLASSES)
    assert plan.workload.rate == pytest.approx(6.0)
    assert faster.speed == pytest.approx(14.0)
    assert plan.workload.requests[1].think_s == pytest.approx(3.0 / 14)
    with pytest.raises(BenchError, match="--rate"):
        at_rate(recording(first, first), 1.0)


def test_two_tenants_share_no_session() -> None:
    first = TraceRequest(0.0, 8, 4, tenant="a", session="s", served=Served(e2e_s=2.0))
    rows = [first, replace(first, at_s=5.0, tenant="b"), replace(first, at_s=9.0)]
    sent = planned_replay(recording(*rows), NO_CLASSES).workload.requests
    assert [request.think_s for request in sent] == [0.0, 0.0, 7.0]
    assert sent[0].session == sent[2].session != sent[1].session


def test_lengths_and_blocks_are_scaled_together() -> None:
    row = TraceRequest(0.0, 100, 10, hash_ids=(1, 2), block_tokens=50)
    (made,) = planned_replay(recording(row), NO_CLASSES, length_scale=0.1).workload.requests
    assert (made.prompt_tokens, made.output_tokens, made.block_tokens) == (10, 1, 5)
