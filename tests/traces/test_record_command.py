# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo record``: what it writes, what it hides, what it says."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from vllm_slo import cli
from vllm_slo.traces.files import detect, read
from vllm_slo.traces.own_format import header_line, request_line
from vllm_slo.traces.request import Served, TraceRequest
from vllm_slo.traces.times import parse_date_s

MOONCAKE = (
    '{"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [4, 5, 6]}\n'
    '{"timestamp": 2500, "input_length": 20, "output_length": 0}\n'
)
TABLE = (
    "time,prompt_tokens,output_tokens,class,tenant,session,model\n"
    "2026-11-30 12:00:00.25,10,100,chat,acme,s1,tiny\n"
    "2026-11-30 12:00:01,20,200,chat,acme,acme,tiny\n"
    "2026-11-30 12:00:10,30,300,batch,,,\n"
)


def source(tmp_path: Path, text: str, name: str = "source.txt") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_a_trace_stays_what_it_was(tmp_path: Path) -> None:
    path, out = source(tmp_path, MOONCAKE), tmp_path / "out.jsonl"
    assert cli.main(["record", str(path), "--out", str(out)]) == 0
    assert detect(out) == "vllm-slo"
    assert list(read(out)) == list(read(path))
    assert json.loads(out.read_text().splitlines()[0])["block_tokens"] == 512
    assert [p.name for p in tmp_path.iterdir()] == unordered("source.txt", "out.jsonl")


def unordered(*names: str) -> Any:
    class AnyOrder(list[str]):
        def __eq__(self, other: object) -> bool:
            return isinstance(other, list) and sorted(self) == sorted(other)

        __hash__ = None  # type: ignore[assignment]

    return AnyOrder(names)


def test_names_are_hashed_with_a_salt_of_each_run(tmp_path: Path) -> None:
    path, out = source(tmp_path, TABLE), tmp_path / "out.jsonl"
    runs = []
    for _ in range(2):
        assert cli.main(["record", str(path), "--out", str(out)]) == 0
        runs.append(list(read(out)))
        assert "acme" not in out.read_text() and '"s1"' not in out.read_text()
    first, second, third = runs[0]
    assert first.tenant == second.tenant and first.session != second.session
    assert second.tenant != second.session  # the same name, of another kind
    assert (third.tenant, third.session) == (None, None)
    assert (first.slo_class, first.model) == ("chat", "tiny")
    assert runs[1][0].tenant != first.tenant
    assert cli.main(["record", str(path), "--out", str(out), "--no-anonymous"]) == 0
    assert list(read(out)) == list(read(path))


@pytest.mark.parametrize(
    ("suffix", "unpack"), [(".gz", gzip.decompress), (".zst", zstd.decompress), ("", bytes)]
)
def test_the_name_of_the_file_decides_its_packing(tmp_path: Path, suffix: str, unpack: Any) -> None:
    out = tmp_path / f"out.jsonl{suffix}"
    assert cli.main(["record", str(source(tmp_path, TABLE)), "--out", str(out)]) == 0
    assert unpack(out.read_bytes()).startswith(b'{"schema":"vllm-slo-trace/1"')
    assert len(list(read(out))) == 3


def test_a_stretch_of_it(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["record", str(source(tmp_path, TABLE)), "--out", str(out)]
    assert cli.main([*words, "--from", "2026-11-30 12:00:01", "--speed", "2"]) == 0
    start_s = parse_date_s("2026-11-30 12:00:00.25")
    assert [r.at_s - start_s for r in read(out)] == pytest.approx([0.375, 4.875])
    assert cli.main([*words, "--from", "0.5", "--to", "5"]) == 0
    assert [r.prompt_tokens for r in read(out)] == [20]


def test_a_folder_of_recordings_with_blocks_of_two_sizes(tmp_path: Path) -> None:
    folder, out = tmp_path / "recordings", tmp_path / "out.jsonl"
    folder.mkdir()
    served = Served("declined", "none")
    for number, block_tokens in enumerate((64, 16, 16)):
        start = datetime(2026, 11, 30, 12, number, tzinfo=UTC)
        one = TraceRequest(0.5, 30, 0, hash_ids=(1,), block_tokens=block_tokens, served=served)
        text = header_line(start, block_tokens, "tiny") + request_line(one, 0.0)
        name = ("a.jsonl", "a.jsonl.1", "a.jsonl.2.gz")[number]
        packed = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
        (folder / name).write_bytes(packed)
    for name in ("notes.txt", "a.jsonl.lock", ".b.jsonl.part", ".c.jsonl"):
        (folder / name).write_text("not a recording")
    assert cli.main(["record", str(folder), "--out", str(out)]) == 0
    assert list(read(out)) == list(read(folder))
    assert [(r.block_tokens, r.model, r.served) for r in read(out)] == [
        (64, "tiny", served), (16, "tiny", served), (16, "tiny", served),
    ]  # fmt: skip
    assert out.read_text().count("schema") == 2


def test_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out, figures = source(tmp_path, TABLE), tmp_path / "out.jsonl", tmp_path / "a.json"
    words = ["record", str(path), "--out", str(out)]
    assert cli.main([*words, "--json", str(figures)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{path} (plain CSV) -> {out}",
        "3 requests in 9.8 seconds, 0.205 requests/s",
        "  all           3 requests  prompt p50 20, p99 30  output p50 200, p99 300 tokens",
        "  batch         1 requests  prompt p50 30, p99 30  output p50 300, p99 300 tokens",
        "  chat          2 requests  prompt p50 10, p99 20  output p50 100, p99 200 tokens",
    ]
    told = json.loads(figures.read_text())
    assert (told["requests"], told["span_s"], told["requests_per_s"]) == (3, 9.75, 0.2051)
    assert told["classes"]["chat"]["output_tokens"] == {"p50": 100, "p99": 200, "sum": 300}
    assert cli.main([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-file"], "cannot read no-such-file: No such file or directory"),
        (["SOURCE", "--from", "100"], "SOURCE has no rows in this selection"),
        (["SOURCE", "--out", "SOURCE"], "--out: it is the source itself; name another file"),
        (["SOURCE", "--out", "no/such/folder/x"], "cannot write no/such/folder/x: No such file"),
        (["SOURCE", "--json", "SOURCE/x"], "--json: cannot write SOURCE/x: File exists"),
        (["SOURCE", "--from", "5", "--to", "4"], "--to: must be later than --from"),
        (["BROKEN"], "BROKEN looks like plain CSV; line 3, field prompt_tokens: 'x' is not a num"),
    ],
)
def test_what_cannot_be_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    path = source(tmp_path, TABLE)
    broken = source(tmp_path, TABLE.replace(",20,", ",x,"), "broken.txt")
    out = tmp_path / "out.jsonl"

    def real(text: str) -> str:
        return text.replace("SOURCE", str(path)).replace("BROKEN", str(broken))

    given = ["record", *map(real, words)]
    assert cli.main(given if "--out" in words else [*given, "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"vllm-slo: error: {real(message)}")
    assert path.read_text() == TABLE
    assert out.exists() == ("--json" in words)
    assert not list(tmp_path.glob(".*"))
