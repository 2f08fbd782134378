# SPDX-License-Identifier: Apache-2.0
"""The Python entries on a real engine: ``vllm_slo.LLM``, and vLLM's own ``LLM`` with our class."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from patience import patience
from support_folder import SUPPORT

pytest.importorskip("vllm")

from live_server import UNIPROC, environment
from vllm import SamplingParams

from vllm_slo import LLM, SLO, tiny
from vllm_slo.engine.serving.llm import report_of
from vllm_slo.errors import ConfigError, InvalidSLOError
from vllm_slo.slo.fields import Stage
from vllm_slo.traces.files import read

pytestmark = [pytest.mark.engine, pytest.mark.versions]

CLASSES = {"chat": {"ttft_ms": 60000, "tpot_ms": 10000}, "strict": {"ttft_ms": 0.001}}
EASY = SLO(ttft_ms=60000, tpot_ms=10000)
IMPOSSIBLE = SLO(ttft_ms=0.001)
PROMPTS = ["def read(path):\n", "class Stack:\n    def", "import os\n", "# A comment about"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.2,
    "disable_log_stats": True,
}

# vLLM's own class, the engine in one more process, as vLLM does when nothing is set.
PLAIN = """
import json, sys
from vllm import LLM, SamplingParams

said = json.loads(sys.argv[1])
llm = LLM(said["model"], **said["options"])
params = [SamplingParams(temperature=0, max_tokens=12, extra_args=e) for e in said["extra_args"]]
outputs = llm.generate(said["prompts"], params, use_tqdm=False)
print("\\n" + json.dumps([
    [o.outputs[0].text, o.outputs[0].stop_reason, o.kv_transfer_params] for o in outputs
]))
"""


def plain_vllm(
    extra_args: list[dict[str, Any] | None], *, uniproc: bool, **options: Any
) -> list[list[Any]]:
    """[text, stop_reason, kv_transfer_params] of each of ``PROMPTS`` from ``vllm.LLM``.

    Args:
        uniproc: whether the engine and its worker are in the process that asks.
    """
    said = {
        "model": str(tiny.path("target")),
        "options": {**OPTIONS, **options},
        "prompts": PROMPTS,
        "extra_args": extra_args,
    }
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, json.dumps(said)],
        capture_output=True,
        text=True,
        timeout=patience(280),
        check=False,
        env=environment() | (UNIPROC if uniproc else {}),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    return list(json.loads(lines[-1]))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of recorded requests."""
    return tmp_path_factory.mktemp("recording") / "requests.jsonl"


@pytest.fixture(scope="module")
def llm(recording: Path) -> Iterator[LLM]:
    parser = SUPPORT / "first_line_parser.py"
    thinking = {"reasoning_parser": "first_line", "reasoning_parser_plugin": str(parser)}
    config = {"classes": CLASSES, "recording": {"path": str(recording), "block_tokens": 1}}
    engine = LLM("tiny", slo_config=config, structured_outputs_config=thinking, **OPTIONS)
    yield engine
    engine.llm_engine.engine_core.shutdown()


def generate(llm: LLM, prompts: Any = PROMPTS, params: Any = GREEDY, **asked: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False, **asked)


def promised(outputs: list[Any]) -> list[bool | None]:
    reports = [report_of(output) for output in outputs]
    return [None if report is None else in_time(report) for report in reports]


def in_time(report: Mapping[str, Any]) -> bool:
    """Whether the objectives of a request were promised as it asked."""
    return report["promised"] and not report["late"]


def test_without_an_slo_it_says_what_stock_says(llm: LLM) -> None:
    outputs = generate(llm)
    stock = plain_vllm([None] * len(PROMPTS), uniproc=True)
    assert [output.outputs[0].text for output in outputs] == [text for text, _, _ in stock]
    assert promised(outputs) == [None] * len(PROMPTS)
    with_slo = generate(llm, slo=EASY)
    assert [output.outputs[0].text for output in with_slo] == [text for text, _, _ in stock]


def settled(recording: Path) -> int:
    """How many requests are recorded, once the lines of those that have ended are written."""
    lines = -1
    while lines != (lines := len(list(read(recording)))):
        time.sleep(patience(1.0))
    return lines


def test_requests_are_recorded(llm: LLM, recording: Path) -> None:
    before = settled(recording)
    plain, asked = generate(llm), generate(llm, slo=SLO(slo_class="chat"))
    until_s = time.monotonic() + patience(20)
    while len(requests := list(read(recording))[before:]) < 2 * len(PROMPTS):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    lengths = sorted((len(o.prompt_token_ids), len(o.outputs[0].token_ids)) for o in plain + asked)
    assert sorted((r.prompt_tokens, r.output_tokens) for r in requests) == lengths
    assert [request.slo_class for request in requests] == [""] * 4 + ["chat"] * 4
    prompts = {request.hash_ids for request in requests}
    assert len(prompts) == len(PROMPTS) and all(prompts)
    reports = [report_of(output) or {} for output in asked]
    for name, attribute in (("ttft_ms", "ttft_s"), ("tpot_ms", "tpot_s")):
        told = sorted(report[name] / 1e3 for report in reports)
        assert sorted(getattr(r.served, attribute) for r in requests[4:]) == pytest.approx(told)
    for request in requests:
        assert request.served is not None and request.served.end == "completed"
        assert 0 < (request.served.ttft_s or 0) < (request.served.e2e_s or 0)


def test_plain_vllm_with_our_scheduler(llm: LLM) -> None:
    expected = [output.outputs[0].text for output in generate(llm)]
    extra = [EASY.to_extra_args(), None, IMPOSSIBLE.to_extra_args(), {"slo_ttft_ms": -1}]
    outputs = plain_vllm(extra, uniproc=False, scheduler_cls="vllm_slo.Scheduler")
    assert [text for text, _, _ in outputs[:3]] == expected[:3]
    carried = [carrier and in_time(carrier["vllm_slo"]) for _, _, carrier in outputs[:3]]
    assert carried == [True, None, False]
    assert [stop for _, stop, _ in outputs[:3]] == [None] * 3
    text, stop, _ = outputs[3]
    assert text == ""
    assert stop.startswith("slo_invalid:ttft_ms: ")


def test_one_slo_for_all(llm: LLM) -> None:
    outputs = generate(llm, slo=EASY)
    assert promised(outputs) == [True] * len(PROMPTS)
    for output in outputs:
        report = report_of(output)
        assert report is not None
        assert set(report) == {
            *("tier", "promised", "late", "reason", "ttft_ms", "tpot_ms", "attained")
        }
        assert report["tier"] == "guaranteed"
        assert report["ttft_ms"] > 0
        assert report["tpot_ms"] > 0
        assert output.outputs[0].stop_reason is None
        assert output.outputs[0].finish_reason in ("length", "stop")


def test_one_slo_for_each(llm: LLM) -> None:
    slos = [EASY, None, IMPOSSIBLE, SLO(tier="best_effort")]
    outputs = generate(llm, slo=slos)
    assert promised(outputs) == [True, None, False, False]
    late = report_of(outputs[2])
    assert late is not None and late["late_promise"]["kept"] is True
    assert (late["promised"], late["late"], late["attained"]) == (True, True, False)


def test_a_prompt_alone_and_token_ids(llm: LLM) -> None:
    assert promised(generate(llm, PROMPTS[0], slo=EASY)) == [True]
    ids = {"prompt_token_ids": [5, 6, 7]}
    assert promised(generate(llm, ids, slo=EASY)) == [True]
    assert promised(generate(llm, [ids, ids], slo=[EASY, None])) == [True, None]


def test_classes(llm: LLM) -> None:
    slos = [SLO(slo_class="chat"), SLO(slo_class="strict"), SLO(slo_class="strict", ttft_ms=60000)]
    assert promised(generate(llm, PROMPTS[:3], slo=slos)) == [True, False, True]


def test_extra_args_and_default_parameters(llm: LLM) -> None:
    carried = SamplingParams(temperature=0, max_tokens=4, extra_args=EASY.to_extra_args())
    assert promised(generate(llm, params=carried)) == [True] * len(PROMPTS)
    assert promised(generate(llm, PROMPTS[:1], None, slo=EASY)) == [True]
    assert GREEDY.extra_args is None


@pytest.mark.parametrize(
    ("slo", "name"),
    [
        ([EASY], "slo"),
        ([EASY] * 5, "slo"),
        ([], "slo"),
        (SLO(slo_class="nope"), "class"),
        ([EASY, EASY, EASY, SLO(slo_class="nope")], "class"),
    ],
)
def test_mistakes_raise_before_the_engine_sees_them(llm: LLM, slo: Any, name: str) -> None:
    with pytest.raises(InvalidSLOError, match=f"^{name}: "):
        generate(llm, slo=slo)
    assert not llm.llm_engine.has_unfinished_requests()


def test_bad_extra_args_raise(llm: LLM) -> None:
    wrong = SamplingParams(extra_args={"slo_ttft": 5})
    with pytest.raises(InvalidSLOError, match=r"^ttft: "):
        generate(llm, params=wrong)


def test_decline(llm: LLM) -> None:
    never = SLO(ttft_ms=0.001, on_unattainable="decline")
    outputs = generate(llm, slo=[never, EASY, None, never])
    for output in (outputs[0], outputs[3]):
        assert output.finished
        assert output.outputs[0].text == ""
        assert output.outputs[0].finish_reason == "abort"
        prefix, wait_ms, reason = str(output.outputs[0].stop_reason).split(":")
        assert (prefix, reason) == ("slo_declined", "expired")
        assert int(wait_ms) >= 1
    assert all(output.outputs[0].text for output in outputs[1:3])


def test_chat(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Read a file."}]
    one = llm.chat(talk, GREEDY, use_tqdm=False, slo=EASY)
    two = llm.chat([talk, talk], GREEDY, use_tqdm=False, slo=[EASY, IMPOSSIBLE])
    assert promised(one) == [True]
    assert promised(two) == [True, False]
    assert one[0].outputs[0].text == two[1].outputs[0].text
    with pytest.raises(InvalidSLOError):
        llm.chat([talk, talk], GREEDY, use_tqdm=False, slo=[EASY])


def test_quotes_change_nothing(llm: LLM) -> None:
    before = [output.outputs[0].text for output in generate(llm)]
    slos = [EASY, SLO(tpot_ms=0.001), None, SLO(slo_class="chat")]
    quotes = llm.quote(PROMPTS, GREEDY, slo=slos)
    assert [one["promised"] for one in quotes] == [True, False, False, True]
    assert [one["reason"] for one in quotes] == [None, "decode", "no_objective", None]
    assert [one["class"] for one in quotes] == [None, None, None, "chat"]
    assert quotes[0]["cheapest"] == {"ttft_ms": 60000, "tpot_ms": 10000}
    assert quotes[1]["cheapest"]["tpot_ms"] > 0.001
    assert not llm.llm_engine.has_unfinished_requests()
    assert GREEDY.extra_args is None
    after = generate(llm, slo=EASY)
    assert [output.outputs[0].text for output in after] == before
    assert promised(after) == [True] * len(PROMPTS)
    (one,) = llm.quote(PROMPTS[0], slo=EASY)
    assert one["promised"]
    with pytest.raises(InvalidSLOError, match=r"^class: "):
        llm.quote(PROMPTS, slo=SLO(slo_class="nope"))


def test_several_samples_of_a_prompt(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=1.0, max_tokens=4, seed=1)
    (output,) = generate(llm, PROMPTS[0], params, slo=EASY)
    assert len(output.outputs) == 2
    assert promised([output]) == [True]


def test_what_it_cannot_be_built_with() -> None:
    with pytest.raises(ConfigError, match="scheduler_cls"):
        LLM("tiny", scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    with pytest.raises(ConfigError, match=r"^access: there are no clients here"):
        LLM("tiny", slo_config={"access": {}})
    with pytest.raises(ConfigError, match="clases: unknown key"):
        LLM("tiny", slo_config={"clases": {}})
    with pytest.raises(ConfigError, match="cannot read"):
        LLM("tiny", slo_config="no/such/file.yaml")


@pytest.mark.parametrize(
    "slo",
    [
        SLO(ttft_ms=60000, thinking_tpot_ms=9000, tpot_ms=10000),
        SLO(ttft_ms=60000, stages=(Stage(tpot_ms=9000, until="\n"), Stage(tpot_ms=10000))),
    ],
    ids=["parser", "text"],
)
def test_thinking_ends_where_the_text_says(llm: LLM, slo: SLO) -> None:
    params = SamplingParams(temperature=0, max_tokens=48)
    plain = generate(llm, params=params)
    outputs = generate(llm, params=params, slo=slo)
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in plain]
    tokenizer = llm.get_tokenizer()
    ended = 0
    for output in outputs:
        ids = list(output.outputs[0].token_ids)
        texts = (tokenizer.decode(ids[:n]) for n in range(1, len(ids) + 1))
        thought = next((n for n, text in enumerate(texts, 1) if "\n" in text), len(ids))
        report = report_of(output)
        assert report is not None
        assert [stage["tokens"] for stage in report["stages"]] == [thought, len(ids) - thought]
        assert report["attained"]
        ended += thought < len(ids)
    assert ended >= 2
