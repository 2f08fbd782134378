# SPDX-License-Identifier: Apache-2.0
"""``vllm-slo draft-server`` as users start it: its flags, and one with the built-in model."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from live_server import command, environment
from patience import patience

from vllm_slo import cli, tiny
from vllm_slo.config.serve_args import runs_on_cpu
from vllm_slo.core.speculation.draft_sessions import DraftAsk, DraftTokens
from vllm_slo.engine.speculation.draft_link import DraftLink
from vllm_slo.wire.draft_socket import TOKEN_VARIABLE

TOKEN = "a token of the tests' own"
VOCAB = 2048
START_S = patience(240.0)
LONG_S = patience(30.0)
"""For drafts that nobody hurries."""
PROMPT = [(17 * place) % 1000 + 300 for place in range(70)]


# --- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--connect", "10.0.0.1:80"], "--connect 10.0.0.1:80: not an address; write tcp://"),
        (["--connect", "tcp://*:80"], "--connect tcp://*:80: not an address"),
        (["--name", "a b"], "--name a b: use up to 128 letters"),
        (["--token-file", "/nowhere"], "--token-file /nowhere: No such file or directory"),
        ([], "--token-file: not given, and VLLMSLO_DRAFT_TOKEN is not set"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_loaded(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    argv = ["draft-server", "--model", "tiny", "--connect", "tcp://127.0.0.1:1", *flags]
    assert cli.main(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"vllm-slo: error: {said}")
    assert told.count("\n") == 1


def test_a_token_too_short_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "token"
    file.write_text("short\n")
    argv = ["--model", "tiny", "--connect", "tcp://127.0.0.1:1", "--token-file", str(file)]
    assert cli.main(["draft-server", *argv]) == 2
    assert "5 characters are too few" in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--no-such-flag", "3"], "--no-such-flag: neither a flag of 'vllm-slo draft-server' nor"),
        (["--dtype", "decimal"], "argument --dtype: invalid choice: 'decimal'"),
        (["--model", "./nowhere"], "--model ./nowhere: there is no such folder"),
    ],
)
def test_a_mistake_in_the_engines_flags_is_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    argv = ["draft-server", "--model", "tiny", "--connect", "tcp://127.0.0.1:1", *flags]
    assert cli.main(argv) == 2
    assert f"vllm-slo: error: {said}" in capsys.readouterr().err


@pytest.mark.engine
def test_the_engine_is_told_what_suits_drafting_unless_the_user_says_otherwise() -> None:
    from vllm_slo.engine.speculation.draft_engine import engine_arguments

    said = engine_arguments("tiny", [], max_sessions=5)
    assert said.model == str(tiny.path("draft"))
    assert said.enable_prefix_caching is True
    assert said.async_scheduling is False
    assert said.logprobs_mode == "processed_logprobs"
    assert said.max_num_seqs == 5
    assert said.block_size == (32 if runs_on_cpu() else None)
    assert said.kv_cache_memory_bytes == 1 << 30
    flags = ["--max-num-seqs", "9", "--kv-cache-memory-bytes", "4096", "--block-size=64"]
    told = engine_arguments("tiny-middle", flags, max_sessions=5)
    assert told.model == str(tiny.path("middle"))
    assert (told.max_num_seqs, told.kv_cache_memory_bytes, told.block_size) == (9, 4096, 64)
    other = engine_arguments("some/model", [], max_sessions=5)
    assert (other.model, other.kv_cache_memory_bytes) == ("some/model", None)


@pytest.mark.engine
def test_texts_are_no_longer_than_the_draft_model_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A served model's length may be passed on to a draft model that takes less."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_slo.engine.speculation.draft_engine import engine_arguments, fitted

    def length(*flags: str) -> int | None:
        given = engine_arguments("tiny", flags, max_sessions=5)
        return fitted(EngineArgs.from_cli_args(given)).max_model_len

    assert length() is None
    assert length("--max-model-len", "512") == 512
    taken = length("--max-model-len", "100000")
    assert (
        taken
        == json.loads((tiny.path("draft") / "config.json").read_text())["max_position_embeddings"]
    )
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert length("--max-model-len", "100000") == 100_000


# --- one with a model ----------------------------------------------------------------------------


@dataclass
class Running:
    """A draft server with the built-in model, and the verifiers that it found.

    Attributes:
        link: of the verifier that most tests are about.
        other: of the one that shares the model with it.
    """

    link: DraftLink
    other: DraftLink
    process: subprocess.Popen[bytes]
    log: Path

    def until_ready(self) -> None:
        end = time.monotonic() + START_S
        while not all(any(one.ready for one in link.drafters) for link in (self.link, self.other)):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            self.link.poll()
            self.other.poll()
            time.sleep(0.02)

    def draft(self, deadline_s: float = LONG_S, **asks: DraftAsk) -> Mapping[str, DraftTokens]:
        """Drafts by session."""
        self.until_ready()
        return self.drafts_of(self.link, asks, deadline_s)

    def drafts_of(
        self, link: DraftLink, asks: Mapping[str, DraftAsk], deadline_s: float = LONG_S
    ) -> Mapping[str, DraftTokens]:
        """Drafts by session, of one of the verifiers."""
        done = link.exchange({"tiny": asks}, deadline_s=deadline_s)
        assert not done.late or deadline_s < LONG_S, self.log.read_text()[-4000:]
        return done.answers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("draft_server")
    log, token = folder / "log", folder / "token"
    token.write_text(TOKEN)
    link, other = (DraftLink("tcp://127.0.0.1:*", TOKEN, vocab_size=VOCAB) for _ in range(2))
    link.bind()
    other.bind()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                *(command("vllm-slo"), "draft-server", "--model", "tiny", "--name", "tiny"),
                *("--connect", link.address, "--connect", other.address),
                *("--token-file", str(token), "--max-sessions", "4"),
                *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512"),
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment(),
        )
    running = Running(link, other, process, log)
    try:
        running.until_ready()
        yield running
    finally:
        process.kill()
        process.wait()
        running.link.close()
        running.other.close()


Odds = Callable[[Sequence[int], Sequence[int], float], list[list[float]]]


@pytest.fixture(scope="module")
def odds() -> Odds:
    """The built-in draft model itself, in transformers: of each token that follows a prefix, the
    probabilities of what might have come there."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.path("draft"), dtype=torch.float32)

    def read(prefix: Sequence[int], tokens: Sequence[int], temperature: float) -> list[list[float]]:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prefix, *tokens]])).logits[0]
        after = logits[len(prefix) - 1 : len(prefix) - 1 + len(tokens)]
        return torch.softmax(after / temperature, dim=-1).tolist()

    return read


def is_greedy(odds: Odds, prefix: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether each token is the model's likeliest, or as good as."""
    chances = odds(prefix, tokens, 1.0)
    return all(row[token] >= max(row) - 1e-5 for row, token in zip(chances, tokens, strict=True))


def drawn_with(
    odds: Odds, prefix: Sequence[int], draft: DraftTokens, temperature: float
) -> list[float]:
    rows = odds(prefix, draft.tokens, temperature)
    return [row[token] for row, token in zip(rows, draft.tokens, strict=True)]


@pytest.mark.engine
def test_it_drafts_the_models_own_continuation(server: Running, odds: Odds) -> None:
    """Of several sessions at once, each as long as granted."""
    prefixes = {"a": PROMPT, "b": PROMPT[:33], "c": PROMPT[20:]}
    asks = {name: DraftAsk(prefix, 4 + len(name)) for name, prefix in prefixes.items()}
    drafts = server.draft(LONG_S, **asks)
    for name, prefix in prefixes.items():
        assert len(drafts[name].tokens) == asks[name].grant
        assert is_greedy(odds, prefix, drafts[name].tokens)
        expected = drawn_with(odds, prefix, drafts[name], 1.0)
        assert drafts[name].probabilities == pytest.approx(expected, abs=1e-3)


@pytest.mark.engine
def test_a_session_grows_is_rolled_back_and_goes_on(server: Running, odds: Odds) -> None:
    text, before = list(PROMPT), server.link.faults
    for keep in (len(text), len(text) + 3, 40, 41, 64):
        text = [*text, *server.draft(grows=DraftAsk(text, 5))["grows"].tokens][:keep]
        draft = server.draft(grows=DraftAsk(text, 5))["grows"]
        assert len(draft.tokens) == 5 and is_greedy(odds, text, draft.tokens)
    assert server.link.faults == before


@pytest.mark.engine
def test_drawn_tokens_come_with_the_odds_they_were_drawn_with(server: Running, odds: Odds) -> None:
    """Beside a greedy session in the same batch, whose odds are those of the model as it is."""
    drafts = server.draft(drawn=DraftAsk(PROMPT, 24, 1.7), plain=DraftAsk(PROMPT, 24))
    for name, temperature in (("drawn", 1.7), ("plain", 1.0)):
        expected = drawn_with(odds, PROMPT, drafts[name], temperature)
        assert drafts[name].probabilities == pytest.approx(expected, abs=1e-3)
    assert is_greedy(odds, PROMPT, drafts["plain"].tokens)
    assert not is_greedy(odds, PROMPT, drafts["drawn"].tokens)


@pytest.mark.engine
def test_when_time_is_short_it_hands_over_what_it_has(server: Running, odds: Odds) -> None:
    """Half the time that all of it takes; on a busy machine that may be too little, or enough."""
    server.draft(short=DraftAsk(PROMPT, 8))
    for _ in range(20):
        server.until_ready()
        begun_s = time.monotonic()
        whole = server.draft(short=DraftAsk(PROMPT, 64))["short"]
        took_s = time.monotonic() - begun_s
        draft = server.draft(took_s / 2, short=DraftAsk(PROMPT, 64)).get("short")
        if draft is not None:
            assert is_greedy(odds, PROMPT, draft.tokens)
            assert 0 < len(draft.tokens) <= len(whole.tokens)
            if len(draft.tokens) < len(whole.tokens):
                return
    raise AssertionError("never a part")


@pytest.mark.engine
def test_what_the_model_cannot_take_harms_no_other_session(server: Running, odds: Odds) -> None:
    good = DraftAsk(PROMPT, 4)
    drafts = server.draft(
        foreign=DraftAsk([1, VOCAB + 5], 4), long=DraftAsk([5] * 510, 9), good=good
    )
    assert set(drafts) == {"long", "good"}
    assert len(drafts["long"].tokens) == 2, "up to the longest text"
    assert is_greedy(odds, PROMPT, drafts["good"].tokens)


@pytest.mark.engine
def test_two_verifiers_share_the_model(server: Running, odds: Odds) -> None:
    """At the same time and with sessions of one name: each text goes on as its own. Together they
    have more sessions than the server takes of one verifier."""
    server.until_ready()
    texts = {server.link: PROMPT, server.other: PROMPT[35:]}
    before = {link: link.faults for link in texts}  # tests with short deadlines left some

    def follow(link: DraftLink) -> list[int]:
        text = list(texts[link])
        for _ in range(8):
            asks = {f"s{place}": DraftAsk(text[place:], 4) for place in range(4)}
            drafts = server.drafts_of(link, asks)
            assert len(drafts) == 4
            text += drafts["s0"].tokens
        return text

    with ThreadPoolExecutor() as threads:
        for link, text in zip(texts, threads.map(follow, texts), strict=True):
            prompt = texts[link]
            assert len(text) == len(prompt) + 32
            assert is_greedy(odds, prompt, text[len(prompt) :])
            assert link.faults == before[link]


@pytest.mark.engine
def test_a_verifier_that_goes_away_loses_its_own_sessions_alone(
    server: Running, odds: Odds
) -> None:
    """In the middle of its round, which is then over; the other one's sessions are still held."""
    text = [*PROMPT, *server.draft(stays=DraftAsk(PROMPT, 5))["stays"].tokens]
    before = server.link.faults
    long = {f"long{place}": DraftAsk(PROMPT[place:], 64) for place in range(4)}
    server.other.exchange({"tiny": long}, deadline_s=0.0)
    address = server.other.address
    server.other.close()
    done = server.link.exchange({"tiny": {"stays": DraftAsk(text, 5)}}, deadline_s=LONG_S)
    assert is_greedy(odds, text, done.answers["stays"].tokens)
    assert server.link.faults == before
    server.other = DraftLink(address, TOKEN, vocab_size=VOCAB)
    server.other.bind()
    server.until_ready()
    again = server.drafts_of(server.other, {"again": DraftAsk(PROMPT, 6)})["again"]
    assert is_greedy(odds, PROMPT, again.tokens)


@pytest.mark.engine
def test_a_verifier_that_restarts_is_found_again(server: Running, odds: Odds) -> None:
    address = server.link.address
    server.link.close()
    time.sleep(1.0)
    server.link = DraftLink(address, TOKEN, vocab_size=VOCAB)
    server.link.bind()
    assert is_greedy(odds, PROMPT, server.draft(again=DraftAsk(PROMPT, 6))["again"].tokens)
    said = server.log.read_text()
    lost = said.index(f"{address} has disconnected; trying to reconnect")
    assert lost < said.rindex("is connected")


@pytest.mark.engine
def test_sigterm_ends_it_in_the_middle_of_a_round(server: Running) -> None:
    server.until_ready()
    server.link.exchange({"tiny": {"last": DraftAsk(PROMPT, 64)}}, deadline_s=0.0)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(patience(20)) == 0, server.log.read_text()[-4000:]
    assert "Traceback" not in server.log.read_text()
