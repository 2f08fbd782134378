# SPDX-License-Identifier: Apache-2.0
"""vLLM's own log of requests: the lines it writes, and what it may lack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_slo.traces.errors import TraceError
from vllm_slo.traces.files import detect, read
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.times import parse_date_s

NOON_S = 334 * 86_400 + 12 * 3600  # 30 November of 2000, a leap year


def line(second: int, level: str, text: str, *, colour: bool = False, date: str = "11-30") -> str:
    prefix = f"(APIServer pid=7) {level} {date} 12:00:{second:02} [request_logger.py:52]"
    if colour:
        prefix = (
            f"\x1b[0;36m(APIServer pid=7)\x1b[0;0m \x1b[32m{level}\x1b[0m "
            f"\x1b[90m{date} 12:00:{second:02}\x1b[0m \x1b[90m[request_logger.py:52]\x1b[0m"
        )
    return f"{prefix} {text}\n"


def received(
    name: str, second: int, prompt: int | None = 3, *, n: int = 1, colour: bool = False
) -> str:
    ids = "None" if prompt is None else str(list(range(prompt)))
    details = (
        f"Request {name} details: prompt: 'a: prompt_token_ids: [1] b', "
        f"prompt_token_ids: {ids}, prompt_embeds shape: None."
    )
    return line(second, "DEBUG", details, colour=colour) + line(
        second, "INFO",
        f"Received request {name}: params: SamplingParams(n={n}, max_tokens=9)",
        colour=colour,
    )  # fmt: skip


def answered(name: str, second: int, ids: str, kind: str = "", reason: str = "stop") -> str:
    return line(
        second, "DEBUG", f"Generated response {name}{kind} details: output_token_ids: {ids}"
    ) + line(
        second, "INFO", f"Generated response {name}{kind}: output: 'x', finish_reason: {reason}"
    )


DELTA, COMPLETE = " (streaming delta)", " (streaming complete)"


def requests(tmp_path: Path, text: str) -> list[tuple[float, int, int, str]]:
    path = tmp_path / "server.log"
    path.write_text(text)
    assert detect(path) == "vllm-log"
    found: list[TraceRequest] = list(read(path))
    return [
        (r.at_s - NOON_S, r.prompt_tokens, r.output_tokens, r.served.end) for r in found if r.served
    ]


START = line(0, "INFO", "vLLM API server version 0.32.0")


@pytest.mark.parametrize("colour", [False, True])
def test_whole_answers(tmp_path: Path, colour: bool) -> None:
    text = (
        START
        + received("chatcmpl-a", 1, 3, colour=colour)
        + received("chatcmpl-b", 2, 5)
        + answered("chatcmpl-b", 3, "[7, 8]")
        + line(3, "INFO", "Avg prompt throughput: 5 tokens/s")
        + answered("chatcmpl-a", 4, "[7, 8, 9]", reason="length")
    )
    assert requests(tmp_path, text) == [(2.0, 5, 2, "completed"), (1.0, 3, 3, "completed")]


def test_streams(tmp_path: Path) -> None:
    kept = line(5, "INFO", f"Generated response chatcmpl-b{COMPLETE}: output: "
                "'<streaming_complete: 12 tokens>', finish_reason: streaming_complete")  # fmt: skip
    text = (
        received("chatcmpl-a", 1)
        + answered("chatcmpl-a", 2, "[7]", DELTA, "None")
        + answered("chatcmpl-a", 2, "[7, 8]", DELTA)
        + answered("chatcmpl-a", 3, "None", COMPLETE, "streaming_complete")
        + received("chatcmpl-b", 4)
        + answered("chatcmpl-b", 5, "[7]", DELTA, "None")
        + kept
    )
    assert requests(tmp_path, text) == [(1.0, 3, 3, "completed"), (4.0, 3, 12, "completed")]


def test_several_choices_an_abort_and_what_the_end_of_the_log_cuts_off(tmp_path: Path) -> None:
    text = (
        received("chatcmpl-a", 1, n=2)
        + answered("chatcmpl-a", 2, "[7]")
        + answered("chatcmpl-a", 2, "(7, 8)")
        + received("chatcmpl-b", 3)
        + answered("chatcmpl-b", 4, "[]", reason="abort")
        + received("resp_c_0", 5)
        + answered("resp_c", 6, "[1, 2]")
        + received("chatcmpl-d", 7)
        + answered("chatcmpl-unknown", 8, "[7]")
    )
    assert requests(tmp_path, text) == [
        (1.0, 3, 3, "completed"),
        (3.0, 3, 0, "aborted"),
        (5.0, 3, 2, "completed"),
        (7.0, 3, 0, "aborted"),
    ]


def as_json(text: str) -> str:
    """The lines of a log with the formatter for JSON."""
    lines = []
    for number, each in enumerate(text.splitlines()):
        _, _, message = each.partition("[request_logger.py:52] ")
        told = {"asctime": f"2026-11-30 12:00:{number:02},250", "levelname": "DEBUG"}
        lines.append(json.dumps(told | {"name": "vllm", "process": 7, "message": message}))
    return "\n".join(lines) + "\n"


def test_the_json_log_has_dates(tmp_path: Path) -> None:
    text = START + received("chatcmpl-a", 1) + answered("chatcmpl-a", 2, "[7, 8]")
    path = tmp_path / "server.log"
    path.write_text(as_json(text))
    assert detect(path) == "vllm-log"
    (one,) = read(path)
    assert (one.prompt_tokens, one.output_tokens) == (3, 2)
    assert one.at_s == parse_date_s("2026-11-30 12:00:01.25")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ('{"asctime": "2026-11-30 12:00:00,1", "message": "Received request a', "not a line of"),
        ('{"asctime": 5, "message": "Received request a: "}', "field asctime: '5' is not a date"),
        ('{"asctime": "2026-11-30 12:00:00,1", "msg": "Received request a: "}', "not a line of"),
    ],
)
def test_a_broken_line_of_the_json_log(tmp_path: Path, broken: str, message: str) -> None:
    path = tmp_path / "server.log"
    path.write_text(as_json(START) + broken)
    with pytest.raises(TraceError, match="line 2, ") as caught:
        list(read(path))
    assert message in str(caught.value)


def test_a_new_year(tmp_path: Path) -> None:
    lines = received("chatcmpl-a", 59).replace("11-30 12:00", "12-31 23:59")
    lines += received("chatcmpl-b", 0).replace("11-30 12:00", "01-01 00:00")
    (first, *_), (second, *_) = requests(tmp_path, lines)
    assert second - first == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (received("chatcmpl-a", 1, None) + answered("chatcmpl-a", 2, "[7]"),
         "line 1, request chatcmpl-a: the log does not tell the prompt's length; start "),
        (START + received("chatcmpl-a", 1) + answered("chatcmpl-a", 2, "None"),
         "line 2, request chatcmpl-a: the log does not tell the answer's length; start "),
        (received("cmpl-a", 1), "line 1, request cmpl-a: vLLM logs no answers of /v1/com"),
    ],
)  # fmt: skip
def test_what_the_log_lacks_is_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        requests(tmp_path, text)
    assert f"{tmp_path / 'server.log'} looks like vLLM's log; {message}" in str(caught.value)
    if "answer's" in message:
        assert str(caught.value).endswith("--enable-log-outputs and --enable-log-deltas")
