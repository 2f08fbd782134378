# SPDX-License-Identifier: Apache-2.0
"""The example for gateways, inference-pool.yaml: its objects are valid, and fit each other."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from vllm_slo.config.sections import RoutingConfig
from vllm_slo.router.endpoint_picker import command
from vllm_slo.router.replica_list import Dns, source_of

ROOT = Path(__file__).resolve().parents[2]
OBJECTS: Final[dict[tuple[str, str], Any]] = {
    (each["kind"], each["metadata"]["name"]): each
    for each in yaml.safe_load_all((ROOT / "examples/inference-pool.yaml").read_text())
}
PICKER = "vllm-slo-endpoint-picker"
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")


def server() -> Any:
    """The Deployment of the pool's servers."""
    return yaml.safe_load((ROOT / "docker/kubernetes/deployment.yaml").read_text())


def pod() -> Any:
    return OBJECTS["Deployment", PICKER]["spec"]["template"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    (container,) = pod()["spec"]["containers"]
    assert container["command"][-2:] == ["vllm-slo", "endpoint-picker"]
    return parser.parse_args(container["args"])


def test_kubernetes_own_objects_keep_its_schemas() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    own = [each for each in OBJECTS.values() if "/" not in each["apiVersion"]]
    for each in (*own, OBJECTS["Deployment", PICKER]):
        validate(each, "1.33", strict=True)
    assert len(own) == 3 and len(OBJECTS) == 6


def test_the_pool_is_of_the_extensions_first_version() -> None:
    """Field by field, as its API (inference.networking.k8s.io/v1) has them."""
    pool = OBJECTS["InferencePool", "vllm-slo"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert set(pool) == {"apiVersion", "kind", "metadata", "spec"}
    spec = pool["spec"]
    assert {"selector", "targetPorts"} <= set(spec)
    assert set(spec) <= {"selector", "targetPorts", "appProtocol", "endpointPickerRef"}
    assert set(spec["selector"]) == {"matchLabels"}
    labels = spec["selector"]["matchLabels"]
    assert 1 <= len(labels) <= 64
    assert all(len(value) <= 63 and LABEL.fullmatch(value) for value in labels.values())
    assert 1 <= len(spec["targetPorts"]) <= 8
    assert all(set(port) == {"number"} for port in spec["targetPorts"])
    reference = spec["endpointPickerRef"]
    assert set(reference) <= {"group", "kind", "name", "port", "failureMode"}
    assert reference.get("kind", "Service") == "Service" and "group" not in reference
    assert set(reference["port"]) == {"number"}  # required where the kind is Service
    assert reference["failureMode"] in ("FailOpen", "FailClose")
    numbers = [*(port["number"] for port in spec["targetPorts"]), reference["port"]["number"]]
    assert all(isinstance(number, int) and 1 <= number <= 65_535 for number in numbers)


def test_the_route_is_of_the_gateway_api() -> None:
    """Field by field, as the API (gateway.networking.k8s.io/v1) has them."""
    route = OBJECTS["HTTPRoute", "vllm-slo"]
    assert route["apiVersion"] == "gateway.networking.k8s.io/v1"
    spec = route["spec"]
    assert set(spec) <= {"parentRefs", "hostnames", "rules"}
    assert all(NAME.fullmatch(parent["name"]) for parent in spec["parentRefs"])
    (rule,) = spec["rules"]
    assert set(rule) <= {"name", "matches", "filters", "backendRefs", "timeouts", "retry"}
    (match,) = rule["matches"]
    assert match == {"path": {"type": "PathPrefix", "value": "/v1"}}
    (backend,) = rule["backendRefs"]
    pool = OBJECTS["InferencePool", backend["name"]]
    assert backend["kind"] == pool["kind"]
    assert pool["apiVersion"] == f"{backend['group']}/v1"
    assert set(rule["timeouts"]) <= {"request", "backendRequest"}
    duration = re.compile(r"([0-9]{1,5}(h|m|s|ms)){1,4}")
    assert all(duration.fullmatch(value) for value in rule["timeouts"].values())


def test_the_pool_and_the_name_hold_the_same_servers() -> None:
    labels = server()["spec"]["template"]["metadata"]["labels"]
    headless = OBJECTS["Service", "vllm-slo-replicas"]["spec"]
    pool = OBJECTS["InferencePool", "vllm-slo"]["spec"]
    assert headless["selector"] == pool["selector"]["matchLabels"]
    assert headless["selector"].items() <= labels.items()
    assert headless["clusterIP"] == "None"
    (container,) = server()["spec"]["template"]["spec"]["containers"]
    (port,) = container["ports"]
    assert pool["targetPorts"] == [{"number": port["containerPort"]}]
    source = source_of([], arguments().replicas_from, "token")
    assert source == Dns("vllm-slo-replicas", port["containerPort"], "token")


def test_the_pool_leads_to_the_picker() -> None:
    service = OBJECTS["Service", PICKER]["spec"]
    assert service["selector"].items() <= pod()["metadata"]["labels"].items()
    (container,) = pod()["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    (port,) = service["ports"]
    reference = OBJECTS["InferencePool", "vllm-slo"]["spec"]["endpointPickerRef"]
    given = arguments()
    assert reference["name"] == PICKER
    assert reference["port"]["number"] == port["port"] == ports[port["targetPort"]] == given.port
    assert (ports["grpc-health"], ports["metrics"]) == (given.health_port, given.metrics_port)
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == given.health_port
    assert pod()["metadata"]["annotations"]["prometheus.io/port"] == str(given.metrics_port)


def test_the_probes_ask_for_services_that_there_are() -> None:
    pytest.importorskip("grpc_health", reason="pip install 'vllm-slo[gateway]'")
    from vllm_slo.router.endpoint_picker.server import LIVENESS, READINESS

    (container,) = pod()["spec"]["containers"]
    assert container["readinessProbe"]["grpc"]["service"] in READINESS
    assert container["livenessProbe"]["grpc"]["service"] == LIVENESS


def test_files_are_mounted_and_the_token_is_no_secret_here() -> None:
    (container,) = pod()["spec"]["containers"]
    folders = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod()["spec"]["volumes"]}
    assert folders.keys() == volumes.keys()
    secret = OBJECTS["Secret", volumes["token"]["secret"]["secretName"]]
    assert secret["stringData"] == {"token": "REPLACE"}
    assert arguments().token_file == f"{folders['token']}/token"
    text = (ROOT / "docker/kubernetes/configmap.yaml").read_text()
    config = yaml.safe_load(text)
    assert volumes["slo"]["configMap"]["name"] == config["metadata"]["name"]
    (name,) = config["data"]
    assert arguments().slo_config == f"{folders['slo']}/{name}"


def test_requests_have_time_to_end() -> None:
    (container,) = pod()["spec"]["containers"]
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    least_s = int(seconds) + RoutingConfig().drain_s + 10
    assert pod()["spec"]["terminationGracePeriodSeconds"] >= least_s
