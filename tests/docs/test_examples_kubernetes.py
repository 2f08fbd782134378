# SPDX-License-Identifier: Apache-2.0
"""The example for fronts in Kubernetes, kubernetes.yaml: its objects are valid, and fit each other
and the servers of docker/kubernetes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from vllm_slo.config.sections import RoutingConfig
from vllm_slo.router import front_command
from vllm_slo.router.replica_flags import source_of_arguments
from vllm_slo.router.replica_list import Dns
from vllm_slo.wire.front_protocol import TOKEN_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
Objects = dict[tuple[str, str], Any]


def objects(path: str) -> Objects:
    """(kind, name) -> object of a file."""
    listed = yaml.safe_load_all((ROOT / path).read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in listed}


OBJECTS: Final = objects("examples/kubernetes.yaml")
POD: Final = OBJECTS["Deployment", "vllm-slo-front"]["spec"]["template"]
(FRONT,) = POD["spec"]["containers"]
SERVERS: Final = objects("docker/kubernetes/deployment.yaml")["Deployment", "vllm-slo-server"]
SERVER_POD: Final = SERVERS["spec"]["template"]
(SERVER,) = SERVER_POD["spec"]["containers"]


def arguments() -> argparse.Namespace:
    """The container's arguments as the command reads them."""
    parser = argparse.ArgumentParser()
    front_command.add_arguments(parser)
    assert FRONT["command"][-2:] == ["vllm-slo", "front"]
    return parser.parse_args(FRONT["args"])


def secret_of(container: Any, variable: str) -> dict[str, Any]:
    """Where a container has a variable of its environment from."""
    (entry,) = (entry for entry in container["env"] if entry["name"] == variable)
    return dict(entry["valueFrom"]["secretKeyRef"])


def test_they_keep_kubernetes_schemas() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for each in OBJECTS.values():
        validate(each, "1.33", strict=True)
    assert len(OBJECTS) == 4


def test_the_name_holds_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    headless = OBJECTS["Service", "vllm-slo-replicas"]["spec"]
    assert headless["clusterIP"] == "None"
    assert headless["selector"].items() <= SERVER_POD["metadata"]["labels"].items()
    (port,) = SERVER["ports"]
    monkeypatch.setenv(TOKEN_VARIABLE, "token")
    source = source_of_arguments(arguments())
    assert source == Dns("vllm-slo-replicas", port["containerPort"], "token")


def test_servers_fronts_and_picker_share_one_token() -> None:
    given = secret_of(FRONT, TOKEN_VARIABLE)
    # Without a front or a picker there is no such Secret, and the servers start all the same.
    assert secret_of(SERVER, TOKEN_VARIABLE) == {**given, "optional": True}
    secret = OBJECTS["Secret", given["name"]]
    assert secret["stringData"] == {given["key"]: "REPLACE"}
    pool = objects("examples/inference-pool.yaml")
    for shared in (("Secret", given["name"]), ("Service", "vllm-slo-replicas")):
        assert pool[shared] == OBJECTS[shared]
    assert secret_of(FRONT, "VLLM_API_KEY") == secret_of(SERVER, "VLLM_API_KEY")


def test_clients_reach_the_fronts() -> None:
    service = OBJECTS["Service", "vllm-slo-front"]["spec"]
    labels = POD["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert OBJECTS["Deployment", "vllm-slo-front"]["spec"]["selector"]["matchLabels"] == labels
    assert not service["selector"].items() <= SERVER_POD["metadata"]["labels"].items()
    (port,), (public,) = FRONT["ports"], service["ports"]
    assert public["targetPort"] == port["name"]
    assert port["containerPort"] == arguments().port
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(arguments().port)


def test_the_configuration_is_the_servers() -> None:
    folders = {mount["name"]: mount["mountPath"] for mount in FRONT["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    assert folders.keys() == volumes.keys()
    ((_, config),) = objects("docker/kubernetes/configmap.yaml").items()
    assert volumes["slo"]["configMap"]["name"] == config["metadata"]["name"]
    (name,) = config["data"]
    assert arguments().slo_config == f"{folders['slo']}/{name}"
    assert f"--slo-config={arguments().slo_config}" in SERVER["args"]


def test_a_front_is_not_restarted_for_lack_of_servers() -> None:
    assert FRONT["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert FRONT["livenessProbe"]["tcpSocket"] == {"port": "http"}


def test_requests_have_time_to_end() -> None:
    sleep, seconds = FRONT["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    least_s = int(seconds) + RoutingConfig().drain_s + 10
    assert POD["spec"]["terminationGracePeriodSeconds"] >= least_s
