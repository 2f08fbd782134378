# SPDX-License-Identifier: Apache-2.0
"""What several replicas are started with, what is refused, and how Serve is told."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hermetic import ROOT_VARIABLE, python_path
from patience import patience
from support_folder import SUPPORT

pytest.importorskip("ray")

import httpx
from live_replicas import LiveReplicas, eventually, nothing
from live_server import UNIPROC, environment

from vllm_slo import cli, tiny
from vllm_slo.arguments import INTERRUPTED
from vllm_slo.cli import main
from vllm_slo.config.model import SLOConfig
from vllm_slo.config.serve_args import Flags, serve_arguments
from vllm_slo.engine.serving import serve as engine_serve
from vllm_slo.errors import ConfigError
from vllm_slo.router import app, arguments, front_actor, replica_actor
from vllm_slo.router import serve as router_serve
from vllm_slo.router.api_keys import api_keys_in
from vllm_slo.router.arguments import AppArgs, api_key_digest, resources
from vllm_slo.wire.front_protocol import TOKEN_VARIABLE
from vllm_slo.wire.ports import free_port

SLOW = {"FAKE_REPLICA_KNOBS": '{"token_s": 0.1}'}


def checked(**args: Any) -> AppArgs:
    return AppArgs.checked({"model": "m", **args})


# --- flags ---------------------------------------------------------------------------------------


def test_flags_are_read_as_vllm_reads_them() -> None:
    words = [
        *("--max-num-seqs", "-1", "-tp", "2", "--api_key", "a", "b", "--host=::1", "m"),
        "--api-k=c",
    ]
    flags = Flags(words)
    assert flags.last("--tensor-parallel-size") == "2"
    assert flags.values("--api-key") == ["a", "b", "c"]
    assert flags.last("--host") == "::1"
    assert flags.values("--port") is None
    assert flags.last("--headless") is None
    assert Flags(["--headless"]).values("--headless") == []
    assert flags.without("--api-key").words == [
        *("--max-num-seqs", "-1", "-tp", "2", "--host=::1", "m")
    ]


def test_a_config_file_of_vllm_is_looked_into(tmp_path: Path) -> None:
    path = tmp_path / "vllm.yaml"
    path.write_text("tensor-parallel-size: 4\nheadless: false\nserved-model-name: [a, b]\n")
    args = checked(vllm_args=["--config", str(path), "-pp=2"])
    assert args.parallel_size == 8
    assert args.served_model_names == ["a", "b"]
    assert checked(vllm_args=["--config", str(path), "-tp", "1"]).parallel_size == 1
    path.write_text("data-parallel-size: 2\n")
    with pytest.raises(ConfigError, match="--data-parallel-size 2: each replica is one engine"):
        checked(vllm_args=["--config", str(path)])
    for text in ("[", "- 1", ""):
        path.write_text(text)
        assert checked(vllm_args=[f"--config={path}"]).parallel_size == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--distributed-executor-backend", "ray"], "--distributed-executor-backend ray: "),
        (["-dp", "2"], "--data-parallel-size 2: each replica is one engine; use --replicas"),
        (["--data_parallel_size=4"], "--data-parallel-size 4"),
        (["--api-server-count", "3"], "--api-server-count 3: the front is the only API server"),
        (["--nnodes=2"], "--nnodes 2: a replica runs on one node"),
        (["--headless"], "--headless: a replica needs its API"),
        (["--grpc"], "--grpc: the front only speaks HTTP"),
        (["--uds", "/run/s"], "--uds /run/s: "),
        (["--ssl-keyfile", "k", "--ssl-certfile", "c"], "--ssl-keyfile k: TLS is ended before"),
        (["--root-path", "/x"], "--root-path /x: strip the prefix"),
        (["-tp", "two"], "--tensor-parallel-size two: not a whole number above zero"),
        (["-pp", "0"], "--pipeline-parallel-size 0: not"),
        (["--additional-config", "{"], "--additional-config: not JSON"),
        (["--additional-config", "[]"], "--additional-config: not a JSON object"),
        (["--host", "h"], "vllm_args: use the argument host: instead of --host"),
        (["--port=1"], "vllm_args: use the argument port: instead of --port"),
    ],
)
def test_what_does_not_go_with_replicas_is_refused(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(vllm_args=words)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_what_changes_nothing_is_let_through() -> None:
    words = ["-dp", "1", "-asc", "1", "--distributed-executor-backend", "mp", "--max-model-len=9"]
    assert checked(vllm_args=words).vllm_args == tuple(words)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"replica": 2}, "args: replica: unknown key; known: model, replicas"),
        ({"replicas": 0}, "args: replicas: "),
        ({"replicas": 2, "max_replicas": 3}, "args: replicas: cannot be combined"),
        ({"min_replicas": 2}, "args: max_replicas: is needed with min_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "args: max_replicas: 2 is below min_replicas"),
        ({"port": 70_000}, "args: port: "),
        ({"api_key_sha256": ["secret"]}, "args: api_key_sha256: not 64"),
        ({"slo_config": "nowhere.yaml"}, "cannot read the file 'nowhere.yaml'"),
        ({"slo_config": {"clases": {}}}, "slo_config: clases: unknown key"),
        ({"front_resources": "{"}, "args: front_resources: "),
        ({"vllm_args": {"a": 1}}, "args: vllm_args: "),
        ({"cpus_per_replica": 0}, "args: cpus_per_replica: "),
    ],
)
def test_bad_arguments_are_one_line(args: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(**args)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_a_model_is_needed() -> None:
    with pytest.raises(ConfigError, match="args: model: is required"):
        AppArgs.checked({})


def test_words_and_numbers_come_as_yaml_and_command_lines_give_them() -> None:
    args = checked(replicas="2", vllm_args="--a 'b c' -d", front_resources='{"x": 1}')
    assert (args.fewest, args.vllm_args) == (2, ("--a", "b c", "-d"))
    assert args.front_resources == {"x": 1.0}
    assert checked(vllm_args=["--max-model-len", 1024]).vllm_args == ("--max-model-len", "1024")


def test_every_argument_says_what_it_is() -> None:
    for name, spec in AppArgs.model_fields.items():
        assert spec.description and spec.description.endswith("."), name


def test_api_keys_become_digests_and_leave_the_command_line() -> None:
    args = checked(vllm_args=["--api-key", "k1", "k2", "--dtype", "float32"])
    assert args.vllm_args == ("--dtype", "float32")
    assert args.api_key_sha256 == (api_key_digest("k1"), api_key_digest("k2"))
    assert "k1" not in args.model_dump_json()


def test_vllms_own_variable_holds_one_key() -> None:
    environment = {"VLLM_API_KEY": "a,b", "KEYS": "a,,b"}
    assert api_keys_in(environment, "VLLM_API_KEY") == ["a,b"]
    assert api_keys_in(environment, "KEYS") == ["a", "b"]
    assert api_keys_in(environment, "NONE") == []


def test_the_slo_configuration_travels_whole(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text("classes: {chat: {ttft_ms: 500}}\nprofile: p.json\n")
    args = checked(slo_config=str(tmp_path / "slo.yaml"), vllm_args=["--additional-config={}"])
    said = json.loads(json.dumps(args.additional_config()))
    assert said == {"slo_config": {"classes": {"chat": {"ttft_ms": 500}}, "profile": "p.json"}}
    assert SLOConfig.from_additional_config(said) == args.slo()
    assert checked().additional_config() == {}
    both = checked(slo_config={"ageing_s": 5}, vllm_args=["--additional-config", '{"a": 1}'])
    assert both.additional_config() == {"a": 1, "slo_config": {"ageing_s": 5.0}}


def test_a_profile_that_is_here_gets_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.json").touch()
    said = arguments.embedded_config({"profile": "p.json"}, None)
    assert said["slo_config"]["profile"] == str(tmp_path / "p.json")


def test_one_server_and_many_are_told_the_same(tmp_path: Path) -> None:
    line = [
        "serve",
        "tiny",
        "--additional-config",
        '{"slo_config": {"ageing_s": 5.0}}',
        "--dtype",
        "float32",
    ]
    one = engine_serve.command_line(*cli.parse(line))
    many = AppArgs.checked(router_serve.app_args(*cli.parse(line)))
    assert one == ["vllm", "serve", *replica_spec(many).command("h")[6:]]
    assert str(tiny.path("target")) in one
    names = serve_arguments("tiny", ["--served_model_name=x"], {})
    assert "tiny" not in names[1:]


# --- the application -----------------------------------------------------------------------------


def bound(args: dict[str, Any]) -> tuple[Any, Any]:
    """The deployments Front and Replica of an application."""
    front = app.build(args)._bound_deployment
    replica = front.init_args[1]._bound_deployment
    assert (front.name, replica.name) == ("Front", "Replica")
    return front, replica


def replica_spec(args: AppArgs) -> Any:
    return bound(args.model_dump(exclude_unset=True))[1].init_args[0]


def test_replicas_and_front_on_cpu() -> None:
    front, replica = bound({"model": "m", "replicas": 3, "slo_config": {"routing": {"drain_s": 7}}})
    assert (front.num_replicas, replica.num_replicas) == (1, 3)
    assert front.ray_actor_options["resources"] == {"node:__internal_head__": 0.001}
    assert front.ray_actor_options["num_cpus"] == 0
    assert replica.ray_actor_options["num_cpus"] < 0.5  # schedulable on a small machine
    assert not replica.ray_actor_options.get("num_gpus")
    assert replica._replica_config.placement_group_bundles is None
    for one in (front, replica):
        config = one._deployment_config
        assert config.health_check_period_s == 1.0
        assert config.graceful_shutdown_timeout_s > 7
        assert config.max_constructor_retry_count == 3
    assert front.init_args[0].drain_s == replica.init_args[0].drain_s == 7


def test_every_replica_is_known_to_all_fronts() -> None:
    front, replica = bound({"model": "m", "fronts": 3})
    others = [each._bound_deployment for each in front.init_args[2:]]
    assert replica.init_args[0].fronts == ("Front", *(other.name for other in others))
    assert len(others) == 2
    for other in others:
        assert other.init_args[0] == front.init_args[0]
        assert other.init_args[1]._bound_deployment is replica
    assert "--share-port" in front.init_args[0].command()
    assert "--share-port" not in bound({"model": "m"})[0].init_args[0].command()


def test_tensor_parallel_replicas_get_a_placement_group_each() -> None:
    words = ["-tp", "4", "--pipeline-parallel-size=2"]
    _, replica = bound(
        {
            "model": "m",
            "replicas": 2,
            "vllm_args": words,
            "gpus_per_replica": 8,
            "cpus_per_replica": 4,
        }
    )
    assert replica._replica_config.placement_group_bundles == [{"CPU": 4.0, "GPU": 8.0}]
    assert replica._replica_config.placement_group_strategy == "STRICT_PACK"
    assert replica.ray_actor_options["num_gpus"] == 8
    args = checked(vllm_args=words)
    assert resources(args, cluster_has_gpus=True).bundle["GPU"] == 8
    assert resources(args, cluster_has_gpus=False).gpus == 0
    assert resources(checked(gpus_per_replica=0.5), cluster_has_gpus=False).gpus == 0.5


def test_the_number_of_replicas_follows_demand() -> None:
    _, replica = bound({"model": "m", "min_replicas": 2, "max_replicas": 5, "upscale_delay_s": 3})
    scaling = replica._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (2, 2, 5)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (3, 300)
    policy = scaling.policy.get_policy()
    assert policy.__name__ == "replicas_wanted"

    def wanted(
        target: int, *series: list[tuple[float, float]], running: int = 1, requests: int = 0
    ) -> int:
        points = [[SimpleNamespace(timestamp=t, value=v) for t, v in one] for one in series]
        context = SimpleNamespace(
            raw_metrics={"replicas_wanted": dict(enumerate(points))} if series else {},
            target_num_replicas=target,
            running_replicas=running,
            total_num_requests=requests,
            capacity_adjusted_min_replicas=0,
            capacity_adjusted_max_replicas=5,
        )
        number, state = policy(context)
        assert state == {}
        return int(number)

    assert wanted(3) == 3  # nobody said anything yet
    assert wanted(3, []) == 3
    assert wanted(2, [(1.0, 9.0), (2.0, 4.0)]) == 4  # the newest word, not the largest
    assert wanted(2, [(1.0, 4.0)], [(3.0, 3.0)]) == 3
    assert wanted(2, [(1.0, 99.0)]) == 5
    assert wanted(4, [(1.0, 1.0)]) == 1
    assert wanted(4, [(1.0, 0.0)]) == 0
    assert wanted(0, running=0) == 0
    assert wanted(0, running=0, requests=1) == 1  # the front waits for a replica


def test_the_command_line_of_a_replica_and_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("KEYS", "secret,other")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(replica_actor, "_environment_at_start", frozenset)
    front, replica = bound(
        {"model": "m", "replicas": 2, "api_key_env": "KEYS", "env": {"HF_X": "1"}}
    )
    spec = replica.init_args[0]
    words = spec.command("10.0.0.1")
    assert words[:6] == [
        *(sys.executable, "-m", "vllm_slo.router.replica"),
        *("--private-host", "10.0.0.1", "--"),
    ]
    env = spec.environment(node_cores=8)
    assert (env["OMP_NUM_THREADS"], env["VLLM_CPU_OMP_THREADS_BIND"]) == ("4", "nobind")
    assert env["HF_X"] == "1"
    assert "secret" not in str((env, words, front.init_args[0].environment()))
    assert len(env[TOKEN_VARIABLE]) >= 32 and env[TOKEN_VARIABLE] not in repr(spec)
    monkeypatch.setenv(TOKEN_VARIABLE, "of-this-node")
    assert spec.environment(node_cores=8)[TOKEN_VARIABLE] == env[TOKEN_VARIABLE], "one for all"
    spec = bound({"model": "m"})[1].init_args[0]
    assert spec.environment(node_cores=8)[TOKEN_VARIABLE] == "of-this-node"
    with pytest.raises(ConfigError, match=f"{TOKEN_VARIABLE}: the token: use ASCII letters"):
        bound({"model": "m", "env": {TOKEN_VARIABLE: "two words"}})
    config = json.loads(front.init_args[0].command()[-1])
    assert config["api_key_sha256"] == [api_key_digest("secret"), api_key_digest("other")]
    monkeypatch.setattr(
        replica_actor, "_environment_at_start", lambda: frozenset({"OMP_NUM_THREADS"})
    )
    assert spec.environment(node_cores=8)["OMP_NUM_THREADS"] == "1"  # the user's own choice
    spec = bound({"model": "m", "gpus_per_replica": 1})[1].init_args[0]
    assert "VLLM_CPU_OMP_THREADS_BIND" not in spec.environment(node_cores=8)
    spec = bound({"model": "m", "replicas": 9, "cpus_per_replica": 2})[1].init_args[0]
    monkeypatch.setattr(replica_actor, "_environment_at_start", frozenset)
    assert spec.environment(node_cores=4)["OMP_NUM_THREADS"] == "2"
    spec = bound({"model": "m", "replicas": 2, "vllm_args": ["-tp", "2"]})[1].init_args[0]
    assert spec.environment(node_cores=16)["OMP_NUM_THREADS"] == "4"  # for each of its workers


def test_a_variable_with_keys_that_is_not_set_fails_the_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert bound({"model": "m"})[0].init_args[0].command()
    front, _ = bound({"model": "m", "api_key_env": "NO_SUCH_KEYS"})
    with pytest.raises(ConfigError, match="api_key_env: the variable NO_SUCH_KEYS is not set"):
        front.init_args[0].command()


def test_a_replica_that_is_stuck_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which is not asked
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        url = f"http://127.0.0.1:{stuck.getsockname()[1]}"
        with pytest.raises(OSError, match="timed out"):
            replica_actor.require_answer(url, "t", 0.1)
    with pytest.raises(OSError, match="refused"):
        replica_actor.require_answer(url, "t", patience(1.0))
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                assert b"x-vllm-slo-token: t" in connection.recv(10_000).lower()
                connection.sendall(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        replica_actor.require_answer(url, "t", patience(5.0))  # any answer will do
        thread.join()


DIES_TWICE = """
import json, pathlib, sys
starts = pathlib.Path(__file__).with_name("starts")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
print(json.dumps({"listening": "here"}), flush=True)
if len(starts.read_text()) > 2:
    sys.stdin.read()
"""


def test_a_front_that_came_back_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dies_twice.py").write_text(DIES_TWICE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = front_actor.FrontSpec("dies_twice", "127.0.0.1", 0, "null", "KEYS", ("0" * 64,), (), 1.0)

    class Front(front_actor.Front):
        def __del__(self) -> None:  # type: ignore[override]
            """Serve awaits it; nobody does here."""

    async def while_healthy(front: front_actor.Front) -> None:
        while True:
            await front.check_health()
            await asyncio.sleep(0.02)

    async def check() -> None:
        front = Front.__new__(Front)
        await front.__init__(spec, None)  # type: ignore[misc,func-returns-value]  # as Serve does
        # Two die, and the third is still to come.
        with pytest.raises(RuntimeError, match="the front process keeps failing"):
            await while_healthy(front)
        while len((tmp_path / "starts").read_text()) < 3 or not front._report:
            await asyncio.sleep(0.02)
        await front.check_health()
        await front.drain()
        for task in front._tasks:
            task.cancel()
        await asyncio.gather(*front._tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(check(), patience(60)))


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--replicas", "2", "-dp", "2"], "--data-parallel-size 2: "),
        (["--replicas", "2", "--max-replicas", "3"], "args: replicas: cannot be combined"),
        (["--min_replicas", "2"], "args: max_replicas: is needed"),
        (["--replicas", "2", "--port", "x"], "--port x: not a number"),
        (["--replicas", "2", "--slo-config", "nowhere.yaml"], "cannot read the file"),
        (["--replicas", "2", "--additional-config", "{"], "--additional-config: not JSON"),
    ],
)
def test_the_command_refuses_before_anything_starts(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "tiny", *words]) == 2
    assert capsys.readouterr().err.startswith(f"vllm-slo: error: {expected}")


def test_a_taken_port_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["--replicas", "2", "--host", "127.0.0.1", "--port", str(port)]
        assert main(["serve", "tiny", *words]) == 2
    assert f"--port {port}: 127.0.0.1: Address already in use" in capsys.readouterr().err


def test_a_cluster_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for address in (f"127.0.0.1:{free_port()}", f"ray://127.0.0.1:{free_port()}"):
        assert main(["serve", "tiny", "--replicas", "2", "--ray-address", address]) == 2
        expected = f"vllm-slo: error: --ray-address {address}: [Errno 111] Connection refused"
        assert capsys.readouterr().err.startswith(expected)


def test_without_ray_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    assert main(["serve", "tiny", "--replicas", "1", "--port", str(free_port())]) == 2
    assert "pip install 'vllm-slo[ray]'" in capsys.readouterr().err


def test_a_single_server_is_still_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(engine_serve, "run", lambda args, rest: seen.append(rest) or 0)
    assert main(["serve", "tiny", "--port", "1", "--api-key", "k"]) == 0
    assert seen == [["--port", "1", "--api-key", "k"]]


def test_secrets_are_not_passed_on() -> None:
    given = {
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HOME": "/h",
        "OMP_NUM_THREADS": "2",
        "TORCH_X": "1",
        "VLLM_API_KEY": "s",
        "HF_TOKEN": "s",
        "VLLM_SECRET": "s",
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/bin",
        "AWS_SECRET_ACCESS_KEY": "s",
    }
    passed = router_serve.passed_on(given)
    assert set(passed) == {"VLLM_LOGGING_LEVEL", "HF_HOME", "OMP_NUM_THREADS", "TORCH_X"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            (
                "A replica failed to start with exception. Retrying 2 more time(s). Error:\n"
                "ray::ServeReplica:a:Replica.initialize_and_get_metadata()\n"
                "    raise RuntimeError(\n"
                "RuntimeError: the replica ended with status 2: error: bad flag\n"
            ),
            "the replica ended with status 2: error: bad flag",
        ),
        ("Something else\nwent wrong\n", "went wrong"),
        ("", "the deployment failed"),
    ],
)
def test_why_a_replica_did_not_start(message: str, expected: str) -> None:
    assert router_serve._reason(message) == expected


@contextmanager
def started(*words: str, port: int = 0) -> Iterator[LiveReplicas]:
    """A process with a local Ray of its own; nothing of it is left at the end."""
    with tempfile.TemporaryDirectory(prefix="r-", dir=os.environ[ROOT_VARIABLE]) as folder:
        ray_env = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token"}
        ray_env["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **environment(),
                **UNIPROC,
                **ray_env,
                **SLOW,
                "PYTHONPATH": python_path(SUPPORT),
            },
            process_group=0,
        )
        live = LiveReplicas(process, port, Path(folder))
        try:
            yield live
            nothing(live.left, "processes", patience(30))
        finally:
            live.kill()


def ended(live: LiveReplicas) -> bool:
    live.processes()
    return live.process.poll() is not None


def ran(program: str, *words: str) -> str:
    """What a program prints that is started with a free port and these words, and succeeds."""
    with started("-c", program, str(free_port()), *words) as live:
        eventually(lambda: ended(live), "its end", patience(240))
        out, err = live.process.communicate()
        assert live.process.returncode == 0, out + err
        return str(out)


@pytest.mark.slow
def test_a_replica_that_does_not_start_ends_the_command() -> None:
    words = ["-m", "vllm_slo.cli", "serve", "tiny", "--port", str(free_port())]
    words += ["--replicas", "2", "--replica-module", "fake_engine_replica", "--no-such-flag"]
    with started(*words) as live:
        eventually(lambda: ended(live), "its end", patience(90))
        out, err = live.process.communicate()
        assert live.process.returncode == 2
        assert out == ""
        (line,) = [line for line in err.splitlines() if line.startswith("vllm-slo: error: ")]
        assert "the replica ended with status 2: vllm serve: error: unrecognized arguments" in line
        assert "Traceback" not in err


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "slo.yaml").write_text("routing: {drain_s: 60}\n")
    port = free_port()
    words = ["serve", "tiny", "--port", str(port), "--host", "127.0.0.1", "--replicas", "1"]
    words += ["--replica-module", "fake_replica", "--slo-config", str(tmp_path / "slo.yaml")]
    with started("-m", "vllm_slo.cli", *words, port=port) as live:
        assert live.process.stdout is not None
        assert "1 replica of tiny behind" in live.process.stdout.readline()
        body = {"model": "tiny", "prompt": "x", "max_tokens": 600, "stream": True}
        with httpx.stream(
            "POST", f"{live.url}/v1/completions", json=body, timeout=patience(30)
        ) as answer:
            next(answer.iter_raw())
            live.processes()
            live.process.send_signal(signal.SIGTERM)
            time.sleep(1.0)
            assert live.process.poll() is None  # it drains
            live.process.send_signal(signal.SIGTERM)
            assert live.process.wait(patience(10)) == INTERRUPTED
        live.process.communicate()


SCALE = """
import sys, time
import httpx, ray
from ray import serve
from vllm_slo.router.app import build
port, within_s = int(sys.argv[1]), float(sys.argv[2])
ray.init(address="local", include_dashboard=False, log_to_driver=False)
serve.start(proxy_location="Disabled")
app = build({
    "model": "tiny", "fronts": 2, "min_replicas": 0, "max_replicas": 2, "upscale_delay_s": 0.2,
    "downscale_delay_s": 1, "slo_config": {"routing": {"demand_window_s": 2}},
    "host": "127.0.0.1", "private_host": "127.0.0.1", "port": port,
    "replica_module": "fake_replica",
})
handle = serve.run(app, name="scaled", route_prefix=None)
url = f"http://127.0.0.1:{port}/v1/completions"
def ask(**slo):
    return httpx.post(url, json={"prompt": "x", "max_tokens": 2, "slo": slo}).status_code
def until(what, condition):
    end = time.monotonic() + within_s
    while not condition():
        told = handle.status.remote().result(), serve.status().applications
        assert time.monotonic() < end, (what, *told)
        time.sleep(0.1)
    print(what, flush=True)
def count():
    return len(handle.status.remote().result()["replicas"])
until("one at the start", lambda: count() == 1)
until("none without requests", lambda: count() == 0)
assert ask() == 503
until("one for a request", lambda: ask() == 200)
until("two for what is not promised", lambda: ask(ttft_ms=1) == 200 and count() == 2)
serve.delete("scaled")
ray.shutdown()
"""


@pytest.mark.slow
def test_the_number_of_replicas_follows_requests() -> None:
    ran(SCALE, f"{patience(60):.0f}")


ROLL = """
import sys, threading, time
import httpx, ray
from ray import serve
from vllm_slo.router.app import build_fronts, build_replicas
port, within_s = int(sys.argv[1]), float(sys.argv[2])
ray.init(address="local", include_dashboard=False, log_to_driver=False)
serve.start(proxy_location="Disabled")
given = {"model": "tiny", "replicas": 2, "host": "127.0.0.1", "private_host": "127.0.0.1",
         "port": port, "replica_module": "fake_replica"}
def deploy(version):
    replicas = {**given, "front_app": "fronts", "env": {"VERSION": version}}
    serve.run(build_replicas(replicas), name="replicas", route_prefix=None)
def names():
    shown = httpx.get(f"http://127.0.0.1:{port}/replicas").json()
    return {one["name"] for one in shown if one["status"] == "ready"}
def until(condition):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, names()
        time.sleep(0.05)
serve.run(build_fronts({**given, "replica_app": "replicas"}), name="fronts", route_prefix=None)
deploy("1")
until(lambda: len(names()) == 2)
before, failed, stop, count = names(), [], threading.Event(), 0
def ask():
    global count
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    while not stop.is_set():
        try:
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
            failed.extend([] if answer.text.endswith("[DONE]\\n\\n") else [answer.text])
        except httpx.HTTPError as error:
            failed.append(repr(error))
        count += 1
clients = [threading.Thread(target=ask) for _ in range(2)]
for client in clients:
    client.start()
deploy("2")
until(lambda: len(names() - before) == 2 and not names() & before)
stop.set()
for client in clients:
    client.join()
assert count > 5 and not failed, (count, failed)
for name in ("replicas", "fronts"):
    serve.delete(name)
ray.shutdown()
"""


@pytest.mark.slow
def test_replicas_are_deployed_anew_without_a_failed_request() -> None:
    ran(ROLL, f"{patience(60):.0f}")


def test_replicas_alone_need_the_name_of_the_fronts() -> None:
    with pytest.raises(ConfigError, match="front_app"):
        app.build_replicas({"model": "m"})


@pytest.mark.parametrize("name", ["front_app", "replica_app"])
def test_one_application_names_no_other(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        app.build({"model": "m", name: "other"})


GCS = """
import os, sys, time
import httpx, psutil, ray
from ray import serve
from vllm_slo.router.app import build
port, after_s = int(sys.argv[1]), float(sys.argv[2])
ray.init(address="local", include_dashboard=False, log_to_driver=False)
serve.start(proxy_location="Disabled")
handle = serve.run(build({
    "model": "tiny", "replicas": 2, "host": "127.0.0.1", "private_host": "127.0.0.1",
    "port": port, "replica_module": "fake_replica",
}), name="alone", route_prefix=None)
while handle.status.remote().result()["ready"] < 2:
    time.sleep(0.1)
(gcs,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "gcs_server"]
gcs.kill()
statuses, end = set(), time.monotonic() + after_s
while time.monotonic() < end:
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
    statuses.add((answer.status_code, answer.headers["x-vllm-slo-replica"]))
print(sorted(status for status, _ in statuses), flush=True)
for process in psutil.Process().children(recursive=True):
    if process.name().startswith("ray"):
        process.kill()  # Ray cannot end in order; what it ran has to end by itself
os._exit(0)
"""


@pytest.mark.slow
def test_requests_go_on_without_gcs() -> None:
    """Ray itself gives up after a minute; see RAY_gcs_rpc_server_reconnect_timeout_s."""
    assert ran(GCS, "5") == "[200, 200]\n"


def test_the_environment_at_start_is_that_of_the_process() -> None:
    code = (
        "import os; os.environ['LATER'] = '1'; from vllm_slo.router import replica_actor as a;"
        "print(sorted(a._environment_at_start() & {'AT_START', 'LATER'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "AT_START": "1"},
    )
    assert done.stdout.strip() == "['AT_START']"
