# SPDX-License-Identifier: Apache-2.0
"""Plain CSV: the names of its columns, its times, what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.files import detect, read
from vllm_slo.traces.named_table import NAMES
from vllm_slo.traces.request import Served, TraceRequest
from vllm_slo.traces.times import parse_date_s

DATE_S = parse_date_s("2026-11-30 12:00:00Z")
UNIX_S = 1_796_040_000  # the same moment


def requests(tmp_path: Path, text: str) -> list[TraceRequest]:
    path = tmp_path / "table.csv"
    path.write_text(text)
    assert detect(path) == "csv"
    return list(read(path))


@pytest.mark.parametrize("time", NAMES["time"])
@pytest.mark.parametrize("prompt", ["prompt_tokens", "ContextTokens", "Input Length", "inputLen"])
def test_usual_names_of_columns(tmp_path: Path, time: str, prompt: str) -> None:
    (one,) = requests(tmp_path, f"id,{time},{prompt},Generated-Tokens\n7,1.5,10,20\n")
    assert one == TraceRequest(1.5, 10, 20)


@given(st.sampled_from(NAMES["prompt tokens"]), st.sampled_from(NAMES["output tokens"]))
def test_every_name_is_read_in_any_case(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, output: str
) -> None:
    folder = tmp_path_factory.mktemp("csv")
    for case in (str.lower, str.upper):
        assert requests(folder, f"time,{case(prompt)},{case(output)}\n2,10,20\n") == [
            TraceRequest(2.0, 10, 20)
        ]


@pytest.mark.parametrize(
    ("column", "value", "at_s"),
    [
        ("time", "12.5", 12.5),
        ("time_s", "12.5", 12.5),
        ("time_ms", "12500", 12.5),
        ("timestamp (us)", "12500000", 12.5),
        ("ts_ns", "12500000000", 12.5),
        ("time", "2026-11-30 12:00:00.5", DATE_S + 0.5),
        ("time", "2026-11-30T13:00:00+01:00", DATE_S),
        ("timestamp", f"{UNIX_S}.5", DATE_S + 0.5),
        ("timestamp", f"{UNIX_S}500", DATE_S + 0.5),
        ("timestamp_ms", f"{UNIX_S}500", DATE_S + 0.5),
        ("timestamp", f"{UNIX_S}500000", DATE_S + 0.5),
        ("timestamp", f"{UNIX_S}500000000", DATE_S + 0.5),
    ],
)
def test_times(tmp_path: Path, column: str, value: str, at_s: float) -> None:
    (one,) = requests(tmp_path, f"{column},prompt_tokens,output_tokens\n{value},1,1\n")
    assert one.at_s == pytest.approx(at_s, abs=1e-5)


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
def test_signs_between_cells_and_all_columns(tmp_path: Path, sign: str) -> None:
    text = (
        "time,prompt_tokens,output_tokens,class,tenant,model,session_id,priority,ttft_ms,tpot_s,"
        "e2e_ms,end,served_ttft_ms,served_tpot_ms,served_e2e_s\n"
        "1,10,20,chat,acme,tiny,s1,-3,500,0.05,9000,aborted,450,48.5,1.5\n"
        "2,10,20,,,,,,,,,,,,\n"
        "\n3,10,20\n"
    )
    rich, *plain = requests(tmp_path, text.replace(",", sign))
    served = Served("aborted", None, 0.45, 0.0485, 1.5)
    assert rich == TraceRequest(
        1.0, 10, 20, "chat", "acme", "tiny", "s1", -3, 500.0, 50.0, 9000.0, served=served
    )
    assert plain == [TraceRequest(2.0, 10, 20), TraceRequest(3.0, 10, 20)]


HEAD = "time,prompt_tokens,output_tokens,ttft_ms,end\n1,10,20,500,completed\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "time,question,output_tokens\n1,2,3\n",
            "line 1: no column of prompt tokens among time, question, output_tokens; needed are",
        ),
        ("prompt_tokens,output_tokens\n1,2\n", "line 1: no column of time among prompt_tokens"),
        ("prompt_tokens,output_tokens,time\n1,2,\n", "line 2, field time: '' is not a date"),
        ("time_ms,prompt_tokens,output_tokens\n2026-01-01,1,2\n", "line 2, field time_ms: "),
        (HEAD + "soon,10,20,,\n", "line 3, field time: 'soon' is not a number"),
        (HEAD + "2,ten,20,,\n", "line 3, field prompt_tokens: 'ten' is not a number of tokens"),
        (HEAD + "2,10,,,\n", "line 3, field output_tokens: '' is not a number of tokens"),
        (HEAD + "2,10,20,0,\n", "line 3, field ttft_ms: '0.0' is not an objective in ms"),
        (HEAD + "2,10,20,5,done\n", "line 3, field end: 'done' is not one of completed, declined"),
        (HEAD + '2,10,20,5,"' + "x" * 200_000, "line 3: field larger than field limit"),
        (HEAD + "2,10\n", "line 3, field output_tokens: ''"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        requests(tmp_path, text)
    assert f"{tmp_path / 'table.csv'} looks like plain CSV; {message}" in str(caught.value)
    assert len(str(caught.value)) < 500
