# SPDX-License-Identifier: Apache-2.0
"""What a call of a Ray Serve deployment asks for, by its arguments."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_slo import SLO
from vllm_slo.config.model import SLOConfig
from vllm_slo.router.body_reader import Asked
from vllm_slo.router.prompts import TokenRatio
from vllm_slo.router.serve_calls import read_call, read_http_call

CONFIG = {"classes": {"chat": {"ttft_ms": 500}}, "default_class": None}
POLICY = SLOConfig.from_additional_config({"slo_config": CONFIG}).http_policy()
WANTED = SLO(ttft_ms=700, tpot_ms=70)
FIELDS = {"ttft_ms": 700, "tpot_ms": 70}
PARAMS = SimpleNamespace(max_tokens=20, extra_args=WANTED.to_extra_args())  # as SamplingParams


def read(*args: Any, **kwargs: Any) -> Asked:
    return read_call(args, kwargs, POLICY, 1_000.0)


def tokens(asked: Asked) -> int:
    return TokenRatio().tokens(asked.prompt)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("hi",), {"slo": WANTED}),
        (("hi",), {"slo": FIELDS}),
        (("hi", PARAMS), {}),
        (("hi",), {"sampling_params": PARAMS}),
        (({"prompt": "hi", "slo": FIELDS},), {}),
        ((), {"body": {"prompt": "hi", "slo": FIELDS}}),
        ((), {"body": {"prompt": "hi", "vllm_xargs": WANTED.to_extra_args()}}),
        (({"prompt": "hi", "slo": {"ttft_ms": 1}},), {"slo": WANTED}),
        (("hi", SimpleNamespace(extra_args={**WANTED.to_extra_args(), "slo_seal": "x"})), {}),
        (("hi", SimpleNamespace(extra_args={"slo_tpot": 0.07, "prefill_ddl": 1_000.7})), {}),
    ],
)
def test_objectives_are_found_wherever_callers_put_them(args: Any, kwargs: Any) -> None:
    slo = read(*args, **kwargs).slo
    assert slo is not None
    assert slo.ttft_ms == pytest.approx(700) and slo.tpot_ms == pytest.approx(70)


def test_a_request_object_of_vllm_is_read() -> None:
    protocol = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")
    request = protocol.CompletionRequest(
        model="m", prompt=[1] * 40, max_tokens=9, vllm_xargs=WANTED.to_extra_args()
    )
    asked = read(request)
    assert (asked.slo, tokens(asked), asked.max_tokens) == (WANTED, 40, 9)


def test_sampling_params_of_vllm_are_read() -> None:
    vllm = pytest.importorskip("vllm")
    asked = read("hi", vllm.SamplingParams(max_tokens=7, extra_args=WANTED.to_extra_args()), "id")
    assert (asked.slo, asked.max_tokens) == (WANTED, 7)


def test_a_class_of_the_configuration_is_applied() -> None:
    slo = read("hi", slo={"class": "chat"}).slo
    assert slo is not None and (slo.ttft_ms, slo.slo_class) == (500, "chat")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((1, None, object()), {"temperature": 0.5, "request_id": "a"}),
        (("hi",), {"slo": {"ttft_ms": -1}}),
        (("hi",), {"slo": "fast"}),
        (("hi",), {"slo": {"class": "no such class"}}),
        (("hi", SimpleNamespace(extra_args=None, max_tokens=None)), {}),
        (({"prompt": "hi", "vllm_xargs": "no mapping"},), {}),
        (({"slo": FIELDS, "vllm_xargs": {"slo_ttft_ms": 1}},), {}),
    ],
)
def test_without_objectives_that_can_be_read_there_are_none(args: Any, kwargs: Any) -> None:
    assert read(*args, **kwargs).slo is None


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (("x" * 350,), {}, 100),
        ((), {"prompt": "x" * 350}, 100),
        (([5] * 30, "request-id"), {}, 30),
        ((), {"prompt_token_ids": tuple([5] * 30), "request_id": "a"}, 30),
        (({"prompt_token_ids": [5] * 30, "prompt": "a text"},), {}, 30),
        ((), {"prompt": {"prompt_token_ids": [5] * 30}}, 30),
        (({"messages": [{"role": "user", "content": "x" * 345}]},), {}, 8 + 100),
        ((), {"messages": [{"role": "user", "content": "x" * 345}]}, 8 + 100),
        ((), {}, 1),
    ],
)
def test_the_length_of_the_prompt(args: Any, kwargs: Any, expected: int) -> None:
    assert tokens(read(*args, **kwargs)) == expected


def test_the_most_tokens_of_the_answer() -> None:
    assert read("hi").max_tokens is None  # a deployment has a default of its own
    assert read("hi", max_tokens=5).max_tokens == 5
    assert read({"prompt": "hi"}).max_tokens == 16  # OpenAI's default


def http(headers: list[tuple[bytes, bytes]]) -> bytes:
    """The argument with which Serve's proxy calls an ingress."""
    common = pytest.importorskip("ray.serve._private.common")
    scope = {"type": "http", "headers": headers}
    return pickle.dumps(common.StreamingHTTPRequest(scope, proxy_actor_name="proxy"))


def test_an_http_request_is_read_by_its_headers() -> None:
    headers = [(b"X-SLO-TTFT-MS", b"700"), (b"x-slo-tpot-ms", b"70"), (b"content-length", b"350")]
    asked = read_http_call(http(headers), POLICY, 0.0)
    assert (asked.slo, tokens(asked), asked.max_tokens) == (WANTED, 100, None)


def test_an_http_request_without_objectives_has_none() -> None:
    for headers in ([], [(b"x-slo-ttft-ms", b"soon")], [(b"content-length", b"many")]):
        asked = read_http_call(http(headers), POLICY, 0.0)
        assert (asked.slo, tokens(asked)) == (None, 1)
