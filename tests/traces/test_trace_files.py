# SPDX-License-Identifier: Apache-2.0
"""Trace files: told apart by what is in them, read line by line, mistakes named."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from vllm_slo import cli
from vllm_slo.bench.main import build_workload
from vllm_slo.bench.planned import Workload
from vllm_slo.bench.traces import read_recording
from vllm_slo.bench.workload import WorkloadOptions
from vllm_slo.bench.zero_load import ZeroLoad
from vllm_slo.sim import main, plan
from vllm_slo.sim.errors import SimulationError
from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.files import Format, detect, read
from vllm_slo.traces.own_format import header_line, request_line
from vllm_slo.traces.request import TraceRequest

ZERO = ZeroLoad(((16, 0.02), (256, 0.05), (1024, 0.2)), 0.01, "lone")

AZURE_2023 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,48,10\n"
    "2023-11-16 18:17:05.0000001,50,12\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,216,5\n"
    "2024-05-10 00:00:01+00:00,300,7\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,0,1087,Conversation log\n"
    "118.5,GPT-4,417,276,693,API log\n"
)
BURSTGPT_3 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "0,a,1.5,GPT-4,100,10,110,Conversation log\n"
    "10,a,2,ChatGPT,0,20,20,Conversation log\n"
    "20,b,2,ChatGPT,200,20,220,Conversation log\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}\n'
    '{"timestamp": 27482, "input_length": 1100, "output_length": 26, "hash_ids": [46, 47, 2366]}\n'
    '{"timestamp": 30535, "input_length": 20, "output_length": 0, "hash_ids": [2353]}\n'
)
BAILIAN = (
    '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, '
    '"output_length": 9, "type": "text", "turn": 1, "hash_ids": [1, 2, 3]}\n'
    '{"chat_id": 9, "parent_chat_id": 7, "timestamp": 3.0, "input_length": 50, '
    '"output_length": 9, "type": "search", "turn": 2, "hash_ids": [1, 2, 4]}\n'
    '{"chat_id": 10, "parent_chat_id": 9, "timestamp": 4.0, "input_length": 60, '
    '"output_length": 9, "type": "text", "turn": 3, "hash_ids": []}\n'
)
ADASERVE = json.dumps(
    [
        {"emission_time_ms": 1000.0, "input_length": 4, "output_length": 5, "slo_ratio": 1.2},
        {"emission_time_ms": 1500.0, "input_length": 6, "output_length": 7, "slo_ratio": -50},
    ]
)
OURS = header_line(datetime(2026, 11, 30, tzinfo=UTC), 64, "tiny") + request_line(
    TraceRequest(1.0, 100, 20, "chat", hash_ids=(5, 6)), 0.0
)
PLAIN = "arrival_ms;prompt_tokens;output_tokens\n1500;10;20\n"
SAMPLES: dict[str, tuple[Format, str]] = {
    "azure 2023": ("azure", AZURE_2023),
    "azure 2024": ("azure", AZURE_2024),
    "burstgpt": ("burstgpt", BURSTGPT),
    "burstgpt with sessions": ("burstgpt", BURSTGPT_3),
    "mooncake": ("mooncake", MOONCAKE),
    "bailian": ("bailian", BAILIAN),
    "adaserve": ("adaserve", ADASERVE),
    "ours": ("vllm-slo", OURS),
    "plain": ("csv", PLAIN),
}


def written(tmp_path: Path, content: str | bytes, name: str = "trace.dat") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def requests(path: Path) -> list[TraceRequest]:
    return list(read(path, detect(path)))


def workload(path: Path, name: str = "azure-conv", **changes: Any) -> Workload:
    options: dict[str, Any] = {"duration_s": 1.0, "rate": 1.0, "trace": path, **changes}
    return build_workload(WorkloadOptions(workload=name, **options), ZERO)


# --- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("packed", [bytes, gzip.compress, zstd.compress])
@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz", "trace.jsonl.gz", "trace"])
def test_the_content_tells_the_format_and_not_the_name(
    tmp_path: Path, sample: str, packed: Callable[[bytes], bytes], name: str
) -> None:
    form, text = SAMPLES[sample]
    path = written(tmp_path, packed(text.encode()), name)
    assert detect(path) == form
    assert requests(path) == requests(written(tmp_path, text, "plain"))


def test_what_each_format_says(tmp_path: Path) -> None:
    def of(text: str) -> list[tuple[float, int, int]]:
        found = requests(written(tmp_path, text))
        return [(r.at_s - found[0].at_s, r.prompt_tokens, r.output_tokens) for r in found]

    assert of(AZURE_2023) == [(0.0, 48, 10), (pytest.approx(1.0200401), 50, 12)]
    assert of(AZURE_2024) == [(0.0, 216, 5), (pytest.approx(0.99007), 300, 7)]
    assert of(BURSTGPT) == [(0.0, 472, 18), (40.0, 1087, 0), (113.5, 417, 276)]
    assert of(BURSTGPT_3) == [(0.0, 100, 10), (10.0, 0, 20), (20.0, 200, 20)]
    assert of(MOONCAKE) == [(0.0, 1100, 52), (pytest.approx(27.482), 1100, 26), (30.535, 20, 0)]
    hashed = [r.hash_ids for r in requests(written(tmp_path, MOONCAKE))]
    assert hashed == [(46, 47, 48), (46, 47, 2366), (2353,)]
    assert requests(written(tmp_path, ADASERVE)) == [
        TraceRequest(1.0, 4, 5, slo_ratio=1.2),
        TraceRequest(1.5, 6, 7, tpot_ms=50.0, slo_ratio=-50.0),
    ]
    assert [(r.model, r.session) for r in requests(written(tmp_path, BURSTGPT_3))] == [
        ("GPT-4", "a"), ("ChatGPT", "a"), ("ChatGPT", "b"),
    ]  # fmt: skip
    assert requests(written(tmp_path, BAILIAN)) == [
        TraceRequest(1.5, 40, 9, "text", session="7", hash_ids=(1, 2, 3), block_tokens=16),
        TraceRequest(3.0, 50, 9, "search", session="7", hash_ids=(1, 2, 4), block_tokens=16),
        TraceRequest(4.0, 60, 9, "text", session="7", block_tokens=16),
    ]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2024-05-10 00:00:01", 1.0),
        ("2024-05-10T00:00:01", 1.0),
        ("2024-05-10t00:00:01z", 1.0),
        ("2024-05-10 00:00:01Z", 1.0),
        ("2024-05-10 00:00:01+00:00", 1.0),
        ("2024-05-10 02:00:01+02:00", 1.0),
        ("2024-05-10 02:00:01+0200", 1.0),
        ("2024-05-10 02:00:01 +02", 1.0),
        ("2024-05-09 18:30:01-05:30", 1.0),
        ("2024-05-10 00:00", 0.0),
        ("2024-05-10", 0.0),
        *((f"2024-05-10 00:00:00.{'123456789'[:n]}+00:00", float(f"0.{'123456789'[:n]}"))
          for n in range(1, 10)),
        ("2024-05-10T00:00:00.009930Z", 0.00993),
    ],
)  # fmt: skip
def test_dates_with_zones_and_fractions(tmp_path: Path, text: str, seconds: float) -> None:
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00Z,1,1\n"
    first, second = requests(written(tmp_path, f"{head}{text},1,1\n"))
    assert second.at_s - first.at_s == pytest.approx(seconds, abs=2e-7)


@pytest.mark.parametrize(
    "text",
    [
        "yesterday",
        "",
        "2024-13-10 00:00:00",
        "2024-05-10 25:00:00",
        "2024-05-10 00:00:00.",
        "2024-05-10 00:00:00.1234567890",
        "2024-05-10 00:00:00.x",
        "2024-05-10 00:00:00+99:00",
        "2024-05-10 00:00:00 CET",
        "2024-05-10.5",
        "1715299200",
        "٢٠٢٤-05-10 00:00:00",
    ],
)
def test_what_is_no_date(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, f"{AZURE_2024}{text},1,1\n")
    with pytest.raises(TraceError, match=r"line 4, field TIMESTAMP: .* is not a date and time"):
        requests(path)


def test_lines_are_read_as_they_are_needed(tmp_path: Path) -> None:
    """The first request is there although the second line is broken."""
    for text in (AZURE_2024 + "x\n", BURSTGPT + "x\n", MOONCAKE + "x\n"):
        path = written(tmp_path, text)
        assert next(read(path, detect(path))).output_tokens > 0
        with pytest.raises(TraceError):
            requests(path)


def test_windows_line_ends_marks_and_blank_lines(tmp_path: Path) -> None:
    for text in (AZURE_2024, BURSTGPT, MOONCAKE):
        dressed = "\ufeff\n" + text.replace("\n", "\r\n\r\n")
        assert requests(written(tmp_path, dressed)) == requests(written(tmp_path, text, "plain"))


# --- mistakes ------------------------------------------------------------------------------------

BURST_HEAD = BURSTGPT.splitlines()[0] + "\n"
GOOD_LINE = MOONCAKE.splitlines()[0]


def moon(**changes: Any) -> str:
    row = json.loads(GOOD_LINE) | changes
    return GOOD_LINE + "\n" + json.dumps({k: v for k, v in row.items() if v is not None}) + "\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("hello\n", "line 1: 'hello' begins no known trace"),
        ("time,prompt,answer\n1,2,3\n", "no column of prompt tokens among time, prompt, answer; "),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        (b"PK\x03\x04\xff\xfe", "is not UTF-8 text"),
        (gzip.compress(AZURE_2024.encode(), mtime=0)[:-9], "cannot read"),
        (b"\x1f\x8b\x08nonsense", "cannot read"),
        (zstd.compress(AZURE_2024.encode())[:-9], "cannot read"),
        (b"\x28\xb5\x2f\xfdnonsense", "cannot read"),
        ("TIMESTAMP,ContextTokens\n", "Azure CSV; line 1: column GeneratedTokens is missing"),
        ("Timestamp,Model,Request tokens\n", "BurstGPT CSV; line 1: column Response tokens is"),
        (AZURE_2024 + "2024-05-10 00:00:02,5\n", "Azure CSV; line 4, field GeneratedTokens: ''"),
        (AZURE_2024 + "2024-05-10 00:00:02,many,5\n", "line 4, field ContextTokens: 'many'"),
        (AZURE_2024 + "2024-05-10 00:00:02,5,-1\n", "line 4, field GeneratedTokens: '-1'"),
        (AZURE_2024 + "2024-05-10 00:00:02,5,1.5\n", "line 4, field GeneratedTokens: '1.5'"),
        (AZURE_2024 + "2024-05-10 00:00:02,1e300,1\n", "line 4, field ContextTokens: '1e300'"),
        (AZURE_2024 + "2024-05-10 00:00:02,nan,1\n", "line 4, field ContextTokens: 'nan'"),
        (AZURE_2024 + '"' + "x" * 200_000 + "\n", "line 4: field larger than field limit"),
        (BURST_HEAD + "soon,m,1,1,2,l\n", "BurstGPT CSV; line 2, field Timestamp: 'soon'"),
        (BURST_HEAD + "inf,m,1,1,2,l\n", "BurstGPT CSV; line 2, field Timestamp: 'inf'"),
        (BURST_HEAD + "1,m,x,1,2,l\n", "BurstGPT CSV; line 2, field Request tokens: 'x'"),
        (BURST_HEAD + "1,m,1,,2,l\n", "BurstGPT CSV; line 2, field Response tokens: ''"),
        ("{\n", "Mooncake JSON lines; line 1 is not JSON"),
        ("{}\n", "Mooncake JSON lines; line 1, field timestamp: missing"),
        (GOOD_LINE + "\n[1]\n", "Mooncake JSON lines; line 2 is not a JSON object"),
        (GOOD_LINE + "\n" + "[" * 100_000 + "\n", "Mooncake JSON lines; line 2 is not JSON"),
        (GOOD_LINE + "\n" + "1" * 5000 + "\n", "Mooncake JSON lines; line 2 is not JSON"),
        (GOOD_LINE + "\n" + GOOD_LINE[:40] + "\n", "Mooncake JSON lines; line 2 is not JSON"),
        (moon(timestamp="now"), "line 2, field timestamp: 'now' is not a number"),
        (moon(timestamp=True), "line 2, field timestamp: 'True' is not a number"),
        (moon(timestamp=float("nan")), "line 2, field timestamp: 'nan' is not a number"),
        (moon(timestamp=10**400), "line 2, field timestamp: "),
        (moon(input_length=None), "line 2, field input_length: missing"),
        (moon(output_length="5x"), "line 2, field output_length: '5x'"),
        (moon(output_length=True), "line 2, field output_length: 'True'"),
        (moon(hash_ids=3), "line 2, field hash_ids: '3' is not a list of whole numbers"),
        (moon(hash_ids=[1, "x"]), "line 2, field hash_ids: "),
        (moon(hash_ids=[1, True]), "line 2, field hash_ids: "),
        # Another trace has the same fields, and blocks of 16 tokens.
        (moon(hash_ids=[1, 2, 3, 4]), "field hash_ids: 4 ids are too many for 1100 tokens"),
        (
            BAILIAN.replace('"turn": 1', '"turn": 1, "chat_id": "x"'),
            "Alibaba's JSON lines; line 1, field chat_id: 'x' is not a number",
        ),
        (BAILIAN.replace("[1, 2, 4]", "[1, 2, 4, 5, 6]"), "line 2, field hash_ids: 5 ids are too"),
        (
            BAILIAN.replace('"output_length": 9, "type": "search", ', ""),
            "line 2, field output_length: missing",
        ),
        ("[\n{", "AdaServe JSON; line 2 is not JSON"),
        ("[1]", "AdaServe JSON; request 0 is not an object"),
        ('[{"id": 1, "conversations": []}]', "AdaServe JSON; request 0, field emission_time_ms"),
    ],
)
def test_a_mistake_is_told_with_format_line_and_field(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(TraceError) as caught:
        requests(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 700
    with pytest.raises(TraceError, match=re.escape(str(path))):
        read_recording(path, "chat")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "missing.csv"
    with pytest.raises(TraceError, match=f"cannot read {path}: No such file"):
        detect(path)
    with pytest.raises(TraceError, match=f"{tmp_path} holds no recording"):
        requests(tmp_path)


def test_a_format_that_does_not_fit_the_workload(tmp_path: Path) -> None:
    for text, name in ((MOONCAKE, "Mooncake JSON lines"), (AZURE_2024, "Azure CSV")):
        with pytest.raises(TraceError, match=f"looks like {name}; .* takes AdaServe JSON"):
            workload(written(tmp_path, text), "adaserve")
    with pytest.raises(TraceError, match=r"looks like AdaServe JSON; .* takes Azure CSV, Burst"):
        workload(written(tmp_path, ADASERVE))
    with pytest.raises(TraceError, match="looks like AdaServe JSON"):
        read_recording(written(tmp_path, ADASERVE), "code")


# --- workloads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "kept", "left_out"),
    [
        (AZURE_2023, "azure-conv", 2, 0),
        (AZURE_2024, "azure-conv", 2, 0),
        (BURSTGPT, "burstgpt-conv", 2, 1),
        (BURSTGPT_3, "burstgpt-conv", 2, 1),
        (MOONCAKE, "mooncake-conv", 2, 1),
    ],
)
def test_rows_without_tokens_are_left_out(
    tmp_path: Path, text: str, name: str, kept: int, left_out: int
) -> None:
    path = written(tmp_path, text)
    made = workload(path, duration_s=kept, rate=1.0)
    assert (made.name, len(made.requests), made.rows_left_out) == (name, kept, left_out)
    assert made.describe()["rows_left_out"] == left_out
    assert made.source == path.name
    assert {r.slo_class for r in made.requests} == {"chat"}
    read = read_recording(path, "chat")
    assert (read.left_out, len(read.rows)) == (left_out, kept)


def test_a_file_of_failures_has_no_rows(tmp_path: Path) -> None:
    path = written(tmp_path, BURST_HEAD + "5,ChatGPT,472,0,472,Conversation log\n")
    with pytest.raises(TraceError, match="has no rows with prompt and output tokens"):
        workload(path)


def test_the_commands_say_what_they_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fake_openai import serving

    path = written(tmp_path, BURSTGPT, "burst.csv")
    said = "burst.csv: 1 row with 0 prompt or output tokens is left out"
    zero = tmp_path / "zero.json"
    zero.write_text(json.dumps(ZERO.to_dict()))
    words = ["--workload", "azure-conv", "--trace", str(path), "--zero-load", str(zero)]
    with serving() as fake:
        url = ["--base-url", fake.url, "--rate", "4", "--duration", "0.5"]
        assert cli.main(["bench", *url, "--max-context", "64", *words]) == 0
    assert capsys.readouterr().err.splitlines() == [said]

    def stop() -> None:
        raise SimulationError("no simulation")

    for module, command in ((main, "simulate"), (plan, "plan")):
        monkeypatch.setattr(module, "need_vllm", stop)
        words = [
            "--rate",
            "1",
            "--jobs",
            "2",
            "--warmup",
            "0",
            "--trace",
            str(path),
            "--lengths",
            "table",
        ]
        assert cli.main([command, *words]) == 2
        assert capsys.readouterr().err.splitlines() == [said, "vllm-slo: error: no simulation"]


def shared(first: list[int], second: list[int]) -> int:
    """Tokens of the longest common prefix."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(1 for _ in same)


@pytest.fixture
def hashed(tmp_path: Path) -> Path:
    rows = [
        {"timestamp": 0, "input_length": 1300, "hash_ids": [0, 1, 2]},
        {"timestamp": 100, "input_length": 1400, "hash_ids": [0, 1, 3]},
        {"timestamp": 200, "input_length": 600, "hash_ids": [0, 4]},
        {"timestamp": 300, "input_length": 600, "hash_ids": [5, 6]},
        {"timestamp": 400, "input_length": 1300, "hash_ids": [0, 1, 2]},
        {"timestamp": 500, "input_length": 600},
        {"timestamp": 600, "input_length": 1300, "hash_ids": [0]},
    ]
    text = "".join(json.dumps(row | {"output_length": 9}) + "\n" for row in rows)
    return written(tmp_path, text)


def test_leading_hash_ids_are_a_shared_part_of_the_prompt(hashed: Path) -> None:
    made = workload(hashed, duration_s=1.0, rate=7.0, max_context=4096)
    prompts = [made.prompt_ids(r, 512) for r in made.requests]
    assert [len(p) for p in prompts] == [1300, 1400, 600, 600, 1300, 600, 1300]
    assert shared(prompts[0], prompts[1]) == pytest.approx(1024, abs=3)  # two blocks
    assert shared(prompts[0], prompts[2]) == pytest.approx(512, abs=3)
    assert shared(prompts[0], prompts[6]) == pytest.approx(512, abs=3)
    assert prompts[0] == prompts[4]
    for other in (3, 5):
        assert shared(prompts[0], prompts[other]) < 4
    assert prompts == [made.prompt_ids(r, 512) for r in made.requests]
    again = workload(hashed, duration_s=1.0, rate=7.0, max_context=4096, seed=1)
    assert shared(again.prompt_ids(again.requests[0], 512), prompts[0]) < 4


def test_blocks_shrink_with_the_prompts(hashed: Path) -> None:
    made = workload(hashed, duration_s=1.0, rate=7.0, max_context=4096, length_scale=0.1)
    prompts = [made.prompt_ids(r, 512) for r in made.requests]
    assert [len(p) for p in prompts] == [130, 140, 60, 60, 130, 60, 130]
    assert shared(prompts[0], prompts[1]) == pytest.approx(102, abs=3)
    assert shared(prompts[0], prompts[2]) == pytest.approx(51, abs=3)
    tiny = workload(hashed, duration_s=1.0, rate=7.0, max_context=4096, length_scale=0.0025)
    first = tiny.requests[0]  # two blocks of 1.28 tokens, and a part of one
    assert (first.prompt_tokens, len(tiny.prompt_ids(first, 512))) == (3, 3)
    clipped = workload(hashed, duration_s=1.0, rate=7.0, max_context=100, length_scale=1.0)
    first, second = (clipped.prompt_ids(r, 512) for r in clipped.requests[:2])
    assert first == second  # both are cut within the first block
