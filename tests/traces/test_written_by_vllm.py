# SPDX-License-Identifier: Apache-2.0
"""What vLLM itself writes is read: its spans, its log, the keys of its bench's results."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_slo.traces import spans
from vllm_slo.traces.bench_reports import VLLM_BENCH_FIELDS
from vllm_slo.traces.files import detect, read
from vllm_slo.traces.request import TraceRequest
from vllm_slo.traces.times import UNIX_ORIGIN_S

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow


def test_the_attributes_of_spans_are_vllms_and_ours() -> None:
    from vllm.tracing import SpanAttributes

    from vllm_slo.engine.telemetry import tracing

    assert spans._OURS == tracing.NAME
    source = inspect.getsource(tracing.attributes_of)
    for told in ("class", "tenant", "ttft_ms", "tpot_ms", "promised", "late", "attained"):
        assert f'"slo.{told}"' in source
    for name in ("_ID", "_PROMPT", "_OUTPUT", "_TTFT_S", "_E2E_S", "_DECODE_S", "_MODEL"):
        assert getattr(spans, name) in vars(SpanAttributes).values()


def test_spans_in_the_json_of_opentelemetry(tmp_path: Path) -> None:
    json_format = pytest.importorskip("google.protobuf.json_format")
    encoder = pytest.importorskip("opentelemetry.exporter.otlp.proto.common.trace_encoder")
    from opentelemetry.sdk.trace import TracerProvider

    start = UNIX_ORIGIN_S + 700_000_000
    told: dict[str, Any] = {
        "gen_ai.request.id": "cmpl-1", "gen_ai.usage.prompt_tokens": 100,
        "gen_ai.usage.completion_tokens": 11, "gen_ai.latency.time_to_first_token": 0.5,
    }  # fmt: skip
    ours = told | {"gen_ai.request.id": "cmpl-1-0a1b2c3d", "slo.class": "chat",
                   "slo.attained": True, "slo.promised": True, "slo.ttft_ms": 500}  # fmt: skip
    tracer = TracerProvider().get_tracer("test")
    path = tmp_path / "spans.jsonl"
    with path.open("w") as file:
        for name, attributes in (("llm_request", told), ("slo_request", ours)):
            span: Any = tracer.start_span(name, attributes=attributes, start_time=start * 10**9)
            span.end(end_time=(start + 2) * 10**9)
            batch = json_format.MessageToDict(encoder.encode_spans([span]))
            file.write(json.dumps(batch) + "\n")
    assert detect(path) == "spans"
    (one,) = read(path)
    assert (one.at_s, one.prompt_tokens, one.output_tokens) == (700_000_000.0, 100, 11)
    assert (one.slo_class, one.ttft_ms) == ("chat", 500.0)
    assert one.served is not None and one.served.attained is True


def _named(record: logging.LogRecord) -> bool:
    record.vllm_process_name = "APIServer"  # as the server's own records have
    return True


@contextmanager
def vllms_log(path: Path) -> Iterator[Any]:
    """vLLM's logger of requests, which writes a file as the server's log is."""
    from vllm import logger as settings
    from vllm.entrypoints.serve.utils import request_logger
    from vllm.logging_utils import NewLineFormatter

    handler = logging.FileHandler(path)
    handler.setFormatter(
        NewLineFormatter(settings._FORMAT, datefmt=settings._DATE_FORMAT, log_level="DEBUG")
    )
    handler.addFilter(_named)
    log = request_logger.logger
    before = (log.level, log.propagate)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield request_logger.RequestLogger(max_log_len=None)
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
        handler.close()


def test_the_lines_of_vllms_log(tmp_path: Path) -> None:
    from vllm import SamplingParams

    path = tmp_path / "server.log"
    with vllms_log(path) as log:
        for name, tokens in (("chatcmpl-a", 5), ("chatcmpl-b", 7)):
            log.log_inputs(
                request_id=name,
                prompt="Received request x: prompt_token_ids: [1, 2]\nand more",
                prompt_token_ids=list(range(tokens)),
                prompt_embeds=None,
                params=SamplingParams(max_tokens=9),
                lora_request=None,
            )
        log.log_outputs("chatcmpl-b", "text", [4, 5], "stop")
        for ids in ([1], [2, 3]):
            log.log_outputs("chatcmpl-a", "x", ids, None, is_streaming=True, delta=True)
        log.log_outputs("chatcmpl-a", "xx", None, "streaming_complete", is_streaming=True)
    assert detect(path) == "vllm-log"
    found: list[TraceRequest] = list(read(path))
    assert [(r.prompt_tokens, r.output_tokens) for r in found] == [(7, 2), (5, 3)]
    assert all(r.served is not None and r.served.end == "completed" for r in found)


def test_the_keys_of_a_detailed_result() -> None:
    from vllm.benchmarks import serve

    source = inspect.getsource(serve)
    for key in (*VLLM_BENCH_FIELDS, "model_id", "endpoint_type"):
        assert f'"{key}"' in source
