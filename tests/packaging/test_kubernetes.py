# SPDX-License-Identifier: Apache-2.0
"""The manifests of one server: Kubernetes' own schemas, and that they fit each other."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kubernetes_validate")

from front_stack import Fake, eventually, processes
from kubernetes_validate import validate

from vllm_slo.config.model import SLOConfig
from vllm_slo.wire.draft_socket import TOKEN_VARIABLE as DRAFT_TOKEN
from vllm_slo.wire.front_protocol import TOKEN_VARIABLE as FRONT_TOKEN

FOLDER = Path(__file__).resolve().parents[2] / "docker/kubernetes"
NEWEST = "1.33"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "kustomization.yaml")


def manifest(name: str) -> dict[str, Any]:
    (one,) = yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
    return one


DEPLOYMENT = manifest("deployment")["spec"]
POD: dict[str, Any] = DEPLOYMENT["template"]["spec"]
(SERVER,) = POD["containers"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_they_keep_kubernetes_schemas(path: Path) -> None:
    validate(manifest(path.stem), NEWEST, strict=True)


def test_kustomize_takes_all_but_the_secret() -> None:
    names = manifest("kustomization")["resources"]
    assert names == [path.name for path in FILES if path.name != "secret.example.yaml"]
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl here")
    command = [kubectl, "kustomize", str(FOLDER)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    given = sorted(yaml.safe_load_all(text), key=lambda one: one["kind"].lower())
    assert given == [manifest(Path(name).stem) for name in names]


def test_the_selectors_find_the_pods() -> None:
    labels = DEPLOYMENT["template"]["metadata"]["labels"]
    disruption = manifest("poddisruptionbudget")["spec"]
    chosen = [DEPLOYMENT["selector"]["matchLabels"], manifest("service")["spec"]["selector"]]
    for selector in (*chosen, disruption["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    # The front of examples/rayservice.yaml has a Service of its own beside this one.
    assert labels["app.kubernetes.io/name"] != "vllm-slo"
    assert disruption["maxUnavailable"] < DEPLOYMENT["replicas"]


def test_ports_and_probes() -> None:
    (port,) = SERVER["ports"]
    (public,) = manifest("service")["spec"]["ports"]
    assert public["targetPort"] == port["name"]
    scraped = DEPLOYMENT["template"]["metadata"]["annotations"]["prometheus.io/port"]
    assert int(scraped) == port["containerPort"] == 8000  # where vLLM listens unless told
    probes = [SERVER[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    assert all(probe["httpGet"] == {"path": "/health", "port": port["name"]} for probe in probes)
    startup, readiness, liveness = probes
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    # Who is slow loses its traffic well before it is restarted.
    assert readiness["periodSeconds"] * readiness["failureThreshold"] < (
        liveness["periodSeconds"] * liveness["failureThreshold"] / 2
    )


def test_running_requests_have_time_to_end() -> None:
    (drain,) = (word for word in SERVER["args"] if word.startswith("--shutdown-timeout="))
    shell = SERVER["lifecycle"]["preStop"]["exec"]["command"][-1]
    sleep = re.search(r"\nsleep (\d+)\n$", shell)
    tells = re.search(r"timeout=(\d+)\)", shell)
    assert sleep and tells
    least_s = int(tells[1]) + int(sleep[1]) + int(drain.partition("=")[2]) + 10
    assert POD["terminationGracePeriodSeconds"] >= least_s


def test_a_pod_that_is_to_end_tells_the_fronts() -> None:
    """Its preStop hook, run by a shell beside a replica without an engine."""
    *shell, script = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    with processes() as keep:
        fake = keep(Fake("a"))
        said = fake.line("url")
        for before, after in (("http://127.0.0.1:8000/", f"{said['url']}/"), ("sleep 10", "true")):
            assert script.count(before) == 1
            script = script.replace(before, after)
        for token, stops in (("", False), (said["token"], True)):
            environment = {"PATH": os.environ["PATH"], FRONT_TOKEN: token}
            command = [*shell, script]
            done = subprocess.run(command, env=environment, capture_output=True, check=True)
            assert done.stderr == b""
            if stops:
                eventually(lambda: fake.process.poll() is not None, "it drains, and ends")
            else:
                assert fake.process.poll() is None


def test_the_flags_are_ours_or_vllms() -> None:
    pytest.importorskip("vllm")
    from vllm import AsyncEngineArgs

    known = {one.name for one in fields(AsyncEngineArgs)} | {"slo_config"}
    model, *flags = SERVER["args"]
    assert not model.startswith("-")
    names = {flag.partition("=")[0].removeprefix("--").replace("-", "_") for flag in flags}
    assert names <= known


def test_the_configuration_is_mounted_and_read() -> None:
    config = manifest("configmap")
    (name,) = config["data"]
    (volume,) = (one for one in POD["volumes"] if "configMap" in one)
    assert volume["configMap"]["name"] == config["metadata"]["name"]
    (mount,) = (one for one in SERVER["volumeMounts"] if one["name"] == volume["name"])
    assert f"--slo-config={mount['mountPath']}/{name}" in SERVER["args"]


def test_its_classes_are_valid(tmp_path: Path) -> None:
    for name, text in manifest("configmap")["data"].items():
        (tmp_path / name).write_text(text)
        assert set(SLOConfig.load(tmp_path / name).classes) == {"chat", "code", "batch"}


def test_secrets_are_named_and_optional() -> None:
    secret = manifest("secret.example")
    asked = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in SERVER["env"]}
    assert all(one["optional"] for one in asked.values())
    del asked[FRONT_TOKEN]  # see tests/docs/test_examples_kubernetes.py
    assert set(asked) == {"VLLM_API_KEY", DRAFT_TOKEN}
    assert {one["key"] for one in asked.values()} == set(secret["stringData"])
    assert {one["name"] for one in asked.values()} == {secret["metadata"]["name"]}
    assert set(secret["stringData"].values()) == {"REPLACE"}  # no key is written down


def test_it_has_few_rights_and_can_write_where_it_must() -> None:
    pod, container = POD["securityContext"], SERVER["securityContext"]
    assert pod["runAsNonRoot"] and pod["seccompProfile"] == {"type": "RuntimeDefault"}
    user = f"USER {pod['runAsUser']}:{pod['runAsGroup']}\n"
    assert user in (FOLDER.parent / "Dockerfile").read_text()
    assert container["readOnlyRootFilesystem"] and not container["allowPrivilegeEscalation"]
    assert container["capabilities"] == {"drop": ["ALL"]}
    volumes = {one["name"]: one for one in POD["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in SERVER["volumeMounts"]}
    for path in ("/home/vllm/.cache", "/home/vllm/.config", "/tmp", "/dev/shm"):
        assert "emptyDir" in mounts[path]


def test_as_many_gpus_are_asked_for_as_are_limited() -> None:
    resources = SERVER["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == "1"
