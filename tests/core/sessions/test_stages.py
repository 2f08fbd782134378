# SPDX-License-Identifier: Apache-2.0
"""Answers in stages: what is measured, what is promised, where a stage ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from tokenizers import Tokenizer
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_slo import SLO, tiny
from vllm_slo.config.model import SLOConfig
from vllm_slo.core.attainment import worst_window_tpot_s
from vllm_slo.core.sessions.stages import StagedTPOT
from vllm_slo.core.step_time.model import StepTimeModel
from vllm_slo.core.types import INFINITY
from vllm_slo.engine.scheduler import Scheduler
from vllm_slo.engine.scheduling.stage_marks import AnswerMarks
from vllm_slo.errors import ConfigError, InvalidSLOError
from vllm_slo.sim.harness import EngineShape, VirtualEngine
from vllm_slo.slo.carriers import resolve_slo
from vllm_slo.slo.model import Stage

THINK: Any = [{"until": "</think>", "tpot_ms": 20}, {"tpot_ms": 100}]
FLAT = StepTimeModel(((0.0, 0.0, 0.01), (0.0, 0.0, 0.0)), max_tokens=64)
"""Every step takes 10 ms, however full it is."""


# --- what is measured ----------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.floats(0, 2), min_size=1, max_size=35), min_size=1, max_size=4),
    st.lists(st.floats(0.1, 2) | st.just(INFINITY), min_size=4, max_size=4),
    st.integers(1, 12),
)
@example([[0.0, 0.0, 0.0, 2.0, 2.0, 0.0, 0.0]], [0.75, INFINITY, INFINITY, 1.0], 4)
def test_every_stage_is_measured_as_the_simulator_cuts_it(
    gaps: list[list[float]], tpots: list[float], window: int
) -> None:
    times: list[float] = []
    staged = StagedTPOT(tpots[: len(gaps)], window)
    expected, begins, now_s = [], 0, 0.0
    for number, stage in enumerate(gaps):
        for gap in stage:
            now_s += gap
            times.append(now_s)
            staged.add(now_s)
        # The gap before a stage's first token belongs to that stage.
        expected.append(worst_window_tpot_s(times[max(begins - 1, 0) :], window))
        begins = len(times)
        assert staged.tightest_s == min(tpots[number : len(gaps)])
        if number + 1 < len(gaps):
            staged.next_stage()
    results = staged.results()
    assert [one.worst_s for one in results] == expected
    assert [one.tokens for one in results] == [len(stage) for stage in gaps]
    kept = [worst is None or worst <= t for worst, t in zip(expected, tpots, strict=False)]
    assert staged.attained is all(kept)
    assert [one.attained for one in results] == [
        None if t == INFINITY else ok for ok, t in zip(kept, tpots, strict=False)
    ]
    # A tail joins the last full window, and may save it.
    between = len(gaps[-1]) - (len(gaps) == 1)
    saved = between > window and between % window > 0
    assert saved or not (staged.missed and staged.attained)


def test_a_stage_that_never_began_is_neither_kept_nor_missed() -> None:
    staged = StagedTPOT((0.1, 0.2), 10)
    staged.add(1.0, 3)
    assert [one.attained for one in staged.results()] == [True, None]
    assert staged.attained


def test_a_stage_that_was_missed_stays_missed() -> None:
    staged = StagedTPOT((0.1, 1.0), 10)
    staged.add(0.0)
    staged.add(0.5)
    assert not staged.missed  # the window is open, and could be kept
    staged.next_stage()
    assert staged.missed
    assert not staged.attained


# --- what is asked -------------------------------------------------------------------------------


def test_stages_travel_in_every_carrier() -> None:
    slo = SLO(ttft_ms=500, stages=THINK)
    assert slo.stages == (Stage(20.0, "</think>"), Stage(100.0))
    assert SLO.from_extra_args(slo.to_extra_args()) == slo
    for resolved in (False, True):
        flat = slo.to_extra_args(resolved=resolved)
        assert all(isinstance(value, str | int | float) for value in flat.values())
    nothing: dict[str, Any] = {"classes": {}, "service_tiers": {}}
    in_body = resolve_slo(body_slo={"ttft_ms": 500, "stages": THINK}, **nothing)
    in_xargs = resolve_slo(xargs={"slo_ttft_ms": 500, "slo_stages": json.dumps(THINK)}, **nothing)
    assert in_body == in_xargs == slo


def test_thinking_is_a_stage_before_the_answer() -> None:
    assert SLO(thinking_tpot_ms=20, tpot_ms=100).answer_stages == (Stage(20.0), Stage(100.0))
    assert SLO(thinking_tpot_ms=20).answer_stages == (Stage(20.0), Stage(None))
    assert SLO(thinking_tpot_ms=20).has_objective
    assert SLO(thinking_tpot_ms=20, tpot_ms=100).tightest_tpot_ms == 20
    assert SLO(stages=THINK).tightest_tpot_ms == 20
    assert SLO(ttft_ms=1).tightest_tpot_ms is None


@pytest.mark.parametrize(
    ("stages", "field", "text"),
    [
        ([], "stages", "not a list"),
        ({}, "stages", "not a list"),
        ("[", "stages", "not JSON"),
        ([1], "stages[0]", "not an object"),
        ([{"tpot_ms": 5}, {"tpot_ms": 5}], "stages[0].until", "nothing ends the stage"),
        ([{"tpot_ms": 5, "until": "x"}], "stages[0].until", "ends the last stage"),
        ([{"until": "", "tpot_ms": 5}, {}], "stages[0].until", "not a text"),
        ([{"until": "x" * 65, "tpot_ms": 5}, {}], "stages[0].until", "not a text"),
        ([{"until": "a\ud800", "tpot_ms": 5}, {}], "stages[0].until", "not a text"),
        (r'[{"until": "\udfff", "tpot_ms": 5}, {}]', "stages[0].until", "not a text"),
        ([{"until": "x", "tpot_ms": -1}, {}], "stages[0].tpot_ms", "out of range"),
        ([{"until": "x", "tpot_ms": 1e-322}, {}], "stages[0].tpot_ms", "out of range"),
        ([{"until": "x"}, {}], "stages", "no stage has an objective"),
        ([{"tpot_ms": 5, "ttft_ms": 5}], "stages[0]", "unknown"),
        ([{"until": "x", "tpot_ms": 5}] * 8 + [{}], "stages", "too many"),
    ],
)
def test_a_mistake_in_stages_names_the_place(stages: Any, field: str, text: str) -> None:
    with pytest.raises(InvalidSLOError, match=text) as caught:
        SLO(stages=stages)
    assert caught.value.field == field


@pytest.mark.parametrize("beside", ["tpot_ms", "thinking_tpot_ms"])
def test_stages_beside_another_tpot_are_refused(beside: str) -> None:
    with pytest.raises(InvalidSLOError, match=f"stages: stand beside {beside}"):
        SLO(**{"stages": THINK, beside: 5})


def test_a_request_says_its_tpot_in_another_way_than_its_class() -> None:
    classes = SLOConfig.model_validate(
        {
            "classes": {
                "chat": {"ttft_ms": 500, "tpot_ms": 50},
                "reason": {"thinking_tpot_ms": 20, "tpot_ms": 100},
                "staged": {"stages": THINK},
            }
        }
    ).slo_classes()

    def asked(**body: Any) -> SLO | None:
        return resolve_slo(body_slo=body, classes=classes, service_tiers={})

    staged = asked(**{"class": "chat"}, stages=THINK)
    assert staged is not None
    assert (staged.ttft_ms, staged.tpot_ms, staged.tightest_tpot_ms) == (500, None, 20)
    plain = asked(**{"class": "staged"}, tpot_ms=30)
    assert plain is not None
    assert plain.answer_stages == (Stage(30.0),)
    slower = asked(**{"class": "reason"}, tpot_ms=200)
    assert slower is not None
    assert slower.answer_stages == (Stage(20.0), Stage(200.0))
    assert asked(**{"class": "staged"}) == classes["staged"]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"stages": [{"tpot": 1}]}, "classes.x.stages.0.tpot: unknown key; did you mean 'tpot_ms'"),
        ({"stages": THINK, "tpot_ms": 1}, "classes.x.stages: stand beside tpot_ms"),
    ],
)
def test_a_mistake_in_a_class_is_one_line(spec: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        SLOConfig.from_additional_config({"slo_config": {"classes": {"x": spec}}})


# --- what is promised ----------------------------------------------------------------------------


@pytest.fixture
def engine(config_folder: Path) -> Callable[..., VirtualEngine]:
    def make(model: StepTimeModel = FLAT, **options: Any) -> VirtualEngine:
        return VirtualEngine(
            Scheduler, config_folder, model.predict_shape_s, believed=model, **options
        )

    return make


def test_the_report_tells_every_stage(engine: Any) -> None:
    one = engine()
    one.add("r", 4, 60, SLO(ttft_ms=1000, stages=THINK), stage_ends=[25])
    one.run()
    report = one.outcomes["r"].report
    assert report["promised"]
    assert report["attained"]
    assert report["stages"] == [
        {"tpot_ms": 10.0, "tokens": 25, "attained": True},
        {"tpot_ms": 10.0, "tokens": 35, "attained": True},
    ]


def test_a_stage_that_is_over_gives_back_what_it_drew(engine: Any) -> None:
    # Steps of 10 ms hold two tokens: two requests at 10 ms a token, or one of them and ten at 100.
    two = StepTimeModel(((0.0, 0.0, 0.01), (0.005, 0.0, 0.0)), max_tokens=2)
    tight: Any = [{"until": "x", "tpot_ms": 10.5}, {"tpot_ms": 200}]
    one = engine(two, shape=EngineShape(max_num_batched_tokens=16, max_num_seqs=16))
    for name in "ab":
        one.add(name, 1, 200, SLO(ttft_ms=1000, stages=tight), stage_ends=[20])
    for _ in range(5):
        one.step()
    tracked = one.scheduler.parts.tracker.live
    assert [t.promised for t in tracked.values()] == [True, True]
    one.add("late", 1, 20, SLO(tpot_ms=40))
    one.step()
    assert not tracked["late"].promised
    while tracked["a"].tpot.stage == 0 or tracked["b"].tpot.stage == 0:
        one.step()
    one.step()
    assert tracked["late"].promised  # in the very next step
    one.run()
    assert all(seen.report["attained"] for seen in one.outcomes.values())


def test_a_tight_stage_to_come_is_reserved_from_the_start(engine: Any) -> None:
    two = StepTimeModel(((0.0, 0.0, 0.01), (0.005, 0.0, 0.0)), max_tokens=2)
    later: Any = [{"until": "x", "tpot_ms": 200}, {"tpot_ms": 10.5}]
    one = engine(two, shape=EngineShape(max_num_batched_tokens=16, max_num_seqs=16))
    for name in "abc":
        one.add(name, 1, 60, SLO(ttft_ms=1000, stages=later), stage_ends=[20])
    one.step()
    promised = [t.promised for t in one.scheduler.parts.tracker.live.values()]
    assert sum(promised) == 2
    one.run()
    kept = [seen.report["attained"] for seen in one.outcomes.values() if seen.report["promised"]]
    assert kept
    assert all(kept)


def test_a_step_of_several_tokens_is_cut_at_the_end_of_the_stage(
    engine: Any, config_folder: Path
) -> None:
    one = engine(
        speculative_config={
            "method": "draft_model",
            "model": str(config_folder),
            "num_speculative_tokens": 4,
        }
    )
    one.add("r", 4, 60, SLO(ttft_ms=1000, stages=THINK), stage_ends=[23], acceptance=1.0)
    one.run()
    stages = one.outcomes["r"].report["stages"]
    assert [stage["tokens"] for stage in stages] == [23, 37]


def test_stages_are_counted(engine: Any) -> None:
    one = engine(slo_config={"classes": {"reason": {"stages": THINK}}})
    one.add("kept", 4, 60, SLO(slo_class="reason"), stage_ends=[25])
    one.add("short", 4, 10, SLO(slo_class="reason"), stage_ends=[25])  # ends while it thinks
    one.run()
    count = one.scheduler.parts.metrics.registry.get_sample_value
    labels = {"engine": "0", "slo_class": "reason", "attained": "true"}
    name = "vllm_slo:stages_finished_total"
    assert count(name, {**labels, "stage": "1"}) == 2
    assert count(name, {**labels, "stage": "2"}) == 1


def test_thinking_needs_a_reasoning_parser(engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"classes.x.thinking_tpot_ms: .*--reasoning-parser"):
        VirtualEngine(
            Scheduler,
            engine().config.model_config.model,
            FLAT.predict_shape_s,
            slo_config={"classes": {"x": {"thinking_tpot_ms": 20}}},
            options={"stage_marks": AnswerMarks(SimpleNamespace(reasoner_cls=None))},
        )


# --- where a stage ends --------------------------------------------------------------------------


class _EndToken:
    """A reasoning parser in vLLM's shape: token 7 ends thinking."""

    def __init__(self, tokenizer: Any, chat_template_kwargs: Any) -> None:
        self.tokenizer = tokenizer

    def is_reasoning_end(self, ids: Any) -> bool:
        return 7 in ids

    def is_reasoning_end_streaming(self, ids: Any, new: Any) -> bool:
        return 7 in new


def marks(reasoner: Any = None) -> AnswerMarks:
    tokenizer = Tokenizer.from_file(str(tiny.path("target") / "tokenizer.json"))
    return AnswerMarks(SimpleNamespace(tokenizer=tokenizer, reasoner_cls=reasoner))


@pytest.mark.parametrize(
    ("text", "stops", "stopped"),
    [
        ("def read(path):\n    return 1\n\nclass", ["\n\n"], True),
        ("def read(path):\n    return 1\n", ["\n\n"], False),
        ("def read(path):", ["never", "(pa"], True),
        ("def read(path):", [], False),
        ("", ["x"], False),
        ("x" + " y" * 200, ["x"], False),  # it would have stopped long ago
    ],
)
def test_whether_a_stop_string_has_come(text: str, stops: list[str], stopped: bool) -> None:
    found = marks()
    ids = found._tokenizer.encode(text).ids
    params = SimpleNamespace(stop=stops)
    assert found.has_stopped(SimpleNamespace(sampling_params=params, output_token_ids=ids)) is (
        stopped
    )
    pooled = SimpleNamespace(sampling_params=None, output_token_ids=ids)
    assert not found.has_stopped(pooled)
    assert not AnswerMarks(SimpleNamespace(reasoner_cls=None)).has_stopped(
        SimpleNamespace(sampling_params=params, output_token_ids=ids)
    )


def answer(ids: list[int], prompt: list[int] | None = None, told: Any = None) -> Any:
    """A request as it is now. `told`: what vLLM tells the engine where output is structured."""
    prompt = prompt or []
    params = StructuredOutputsParams(json_object=True)
    return SimpleNamespace(
        prompt_token_ids=prompt,
        output_token_ids=ids,
        all_token_ids=[*prompt, *ids],
        structured_output_request=told
        and StructuredOutputRequest(params, reasoning_parser_kwargs={"chat_template_kwargs": told}),
    )


@given(
    st.text("ab<>/ki\n é", min_size=1, max_size=30),
    st.text("<>/thinké", min_size=1, max_size=8),
    st.text("ab ", max_size=10),
    st.data(),
)
def test_a_text_is_found_in_whatever_steps_it_comes(
    head: str, until: str, rest: str, data: Any
) -> None:
    found = marks()
    ids = found._tokenizer.encode(head + until + rest).ids
    # By brute force: the fewest tokens whose text has it.
    whole = next(n for n in range(1, len(ids) + 1) if until in found._text(ids[:n]))
    stages: Any = [{"until": until, "tpot_ms": 5}, {"tpot_ms": 5}]
    slo = SLO(stages=stages)
    seen = 0
    while seen < len(ids):
        new = data.draw(st.integers(1, min(6, len(ids) - seen)))
        seen += new
        ended = found.end_of(answer(ids[:seen]), slo, 0, seen - new, new)
        if ended is not None:
            assert seen - new + ended == whole
            return
        assert seen < whole


def test_a_text_of_the_stage_before_does_not_end_the_next() -> None:
    found = marks()
    ids = found._tokenizer.encode("a;b").ids
    stages: Any = [{"until": ";", "tpot_ms": 5}, {"until": ";b", "tpot_ms": 5}, {}]
    slo = SLO(stages=stages)
    at = next(n for n in range(1, len(ids) + 1) if ";" in found._text(ids[:n]))
    assert found.end_of(answer(ids[:at]), slo, 0, 0, at) == at
    assert found.end_of(answer(ids), slo, 1, 0, len(ids) - at) is None


def test_thinking_ends_where_the_parser_says() -> None:
    found, slo = marks(_EndToken), SLO(thinking_tpot_ms=20, tpot_ms=100)
    found.check(slo)
    assert found.first_stage(answer([], [1, 2]), slo) == 0
    assert found.first_stage(answer([], [1, 7]), slo) == 1  # the prompt has ended it
    assert found.end_of(answer([1, 2, 3], [5]), slo, 0, 0, 3) is None
    assert found.end_of(answer([1, 7, 3], [5]), slo, 0, 0, 3) == 2
    assert found.end_of(answer([1, 2, 7], [5]), slo, 0, 2, 1) == 1


MARKS = {
    "deepseek_r1": ("<think>", "</think>"),
    "deepseek_v3": ("<think>", "</think>"),
    "deepseek_v4": ("<think>", "</think>"),
    "gemma4": ("<|channel>", "<channel|>"),
    "glm45": ("<think>", "</think>"),
    "hy_v3": ("<think>", "</think>"),
    "hy_v4": ("<think>", "</think>"),
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "qwen3": ("<think>", "</think>"),
}
"""vLLM's reasoning parsers that switch by what the chat template is told (and one that does not):
what begins thinking, and what ends it."""


class _Words:
    """A tokenizer: each mark is a token, or as many as it has words, and so is each letter."""

    def __init__(self) -> None:
        marks = {part for pair in MARKS.values() for mark in pair for part in _parts(mark)}
        efforts = {f"<{slash}ifm|think_fast>" for slash in ("", "/")}
        self._words = [*sorted(marks | efforts), *"abcdefghijklmnopqrstuvwxyz "]

    def get_vocab(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self._words)}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        vocab = self.get_vocab()
        longest = sorted(vocab, key=len, reverse=True)
        return [vocab[word] for word in re.findall("|".join(map(re.escape, longest)), text)]

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(self._words[number] for number in ids)


def _parts(mark: str) -> list[str]:
    return re.findall(r"<[^>]+>|[a-z]+", mark) if mark.count("<") > 1 else [mark]


def real_marks(parser: str) -> tuple[AnswerMarks, Callable[[str], list[int]]]:
    """The real thing, with a parser of vLLM's; and its tokenizer."""
    words = _Words()
    reasoner = ReasoningParserManager.get_reasoning_parser(parser)
    return AnswerMarks(SimpleNamespace(tokenizer=words, reasoner_cls=reasoner)), words.encode


@pytest.mark.parametrize("parser", MARKS)
def test_thinking_is_found_whatever_the_parser_has_to_be_told(parser: str) -> None:
    (found, ids), slo = real_marks(parser), SLO(thinking_tpot_ms=20, tpot_ms=100)
    begins, ends = MARKS[parser]
    thinks, does_not = ids(f"hi {begins}"), ids(f"hi {begins}{ends}")
    for _ in range(2):  # one that has come to its end changes nothing for the next
        assert found.first_stage(answer([], thinks), slo) == 0
        assert found.first_stage(answer([], does_not), slo) == 1
        said = [*ids("so it is"), *ids(ends), *ids("yes")]
        whole = len(said) - len(ids("yes"))
        at = [
            number
            for number in range(1, whole + 1)
            if found.end_of(answer(said[:number], thinks), slo, 0, number - 1, 1)
        ]
        assert at == [whole]
        assert found.end_of(answer(said, thinks), slo, 0, 0, len(said)) == whole


@pytest.mark.parametrize("parser", ["deepseek_v3", "tokenizer alone"])
def test_a_parser_that_does_not_fit_the_model_is_told_before_it_is_used(parser: str) -> None:
    """The tiny model's tokenizer has no marks of thinking; a plug-in may not take what we say."""
    if parser == "tokenizer alone":

        def reasoner(tokenizer: Any) -> None:
            raise AssertionError(tokenizer)
    else:
        reasoner = ReasoningParserManager.get_reasoning_parser(parser)
    found = marks(reasoner)
    found.check(SLO(tpot_ms=100))
    with pytest.raises(InvalidSLOError, match=r"^thinking_tpot_ms: .* does not fit its model"):
        found.check(SLO(thinking_tpot_ms=20))


def test_what_vllm_tells_of_a_request_is_believed() -> None:
    slo = SLO(thinking_tpot_ms=20, tpot_ms=100)
    found, ids = real_marks("deepseek_v3")
    prompt = ids("hi <think>")
    assert found.first_stage(answer([], prompt, {"thinking": True}), slo) == 0
    assert found.first_stage(answer([], prompt, {"thinking": False}), slo) == 1
    assert found.first_stage(answer([], prompt), slo) == 0
    # Another effort thinks between other marks.
    found, ids = real_marks("k2_horizon")
    fast = answer(
        ids("so</ifm|think_fast>"), ids("<ifm|think_fast>"), {"reasoning_effort": "medium"}
    )
    assert found.end_of(fast, slo, 0, 0, 3) == 3
    kept = fast.structured_output_request.reasoner
    assert found.end_of(fast, slo, 0, 0, 3) == 3
    assert fast.structured_output_request.reasoner is kept  # the one that vLLM uses, too
