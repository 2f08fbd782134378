# SPDX-License-Identifier: Apache-2.0
"""The examples for Ray clusters are what Serve, KubeRay and Kubernetes accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray")

from ray.serve.schema import ServeDeploySchema

from vllm_slo.router.arguments import AppArgs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Field names of KubeRay 1.5's resources, as in its ray.io_rayservices.yaml.
RAY_SERVICE = {
    *("serveConfigV2", "rayClusterConfig", "serveService", "upgradeStrategy", "suspend"),
    *("excludeHeadPodFromServeSvc", "managedBy", "rayClusterDeletionDelaySeconds"),
}
RAY_CLUSTER = {
    *("rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "suspend"),
    *("headGroupSpec", "workerGroupSpecs", "headServiceAnnotations", "gcsFaultToleranceOptions"),
}
HEAD_GROUP = {"rayStartParams", "template", "serviceType", "headService", "enableIngress"}
WORKER_GROUP = {
    *("groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "idleTimeoutSeconds"),
    *("rayStartParams", "template", "scaleStrategy", "suspend"),
}


def application(config: Any) -> AppArgs:
    """The one application of a Serve config, its arguments checked."""
    deployed = ServeDeploySchema.model_validate(config)
    assert deployed.proxy_location == "Disabled"
    (one,) = deployed.applications
    assert one.import_path == "vllm_slo.router.app:build"
    assert one.route_prefix is None
    return AppArgs.checked(one.args)


def manifests() -> tuple[dict[str, Any], dict[str, Any]]:
    text = (EXAMPLES / "rayservice.yaml").read_text(encoding="utf-8")
    service, public = yaml.safe_load_all(text)
    return service, public


def groups() -> list[dict[str, Any]]:
    cluster = manifests()[0]["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_the_serve_config() -> None:
    args = application(yaml.safe_load((EXAMPLES / "serve_config.yaml").read_text()))
    assert (args.fewest, args.most, args.gpus_per_replica) == (2, 8, 1)
    assert args.slo().routing.drain_s == 60
    assert args.slo().classes["chat"].ttft_ms == 2000


def test_the_application_of_the_ray_service_fits_its_pods() -> None:
    service, _ = manifests()
    args = application(yaml.safe_load(service["spec"]["serveConfigV2"]))
    cluster = service["spec"]["rayClusterConfig"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    # KubeRay puts the value on a command line as it is, so the quotes are part of it.
    offered = json.loads(json.loads(head["rayStartParams"]["resources"]))
    assert args.front_resources == offered == {"vllm_slo_front": 1}
    assert (args.fewest, args.most) == (workers["minReplicas"], workers["maxReplicas"])
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == args.gpus_per_replica == args.parallel_size
    assert int(limits["cpu"]) >= (args.cpus_per_replica or 0)
    for group in (head, workers):
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > args.slo().routing.drain_s + 10


def test_the_public_service_leads_to_the_front() -> None:
    service, public = manifests()
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
    selector = dict(public["spec"]["selector"])
    assert selector.pop("ray.io/node-type") == "head"  # KubeRay's own label
    assert selector.items() <= head["metadata"]["labels"].items()
    (container,) = head["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    (port,) = public["spec"]["ports"]
    args = application(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert ports[port["targetPort"]] == port["port"] == args.port
    (workers,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert not selector.items() <= workers["template"]["metadata"]["labels"].items()


def test_the_fields_are_kuberays() -> None:
    service, _ = manifests()
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    spec = service["spec"]
    cluster = spec["rayClusterConfig"]
    assert set(spec) <= RAY_SERVICE
    assert spec["upgradeStrategy"] == {"type": "None"}
    assert set(cluster) <= RAY_CLUSTER
    assert cluster["authOptions"]["mode"] in ("token", "disabled")
    assert set(cluster["headGroupSpec"]) <= HEAD_GROUP
    for group in cluster["workerGroupSpecs"]:
        assert {"groupName", "minReplicas", "maxReplicas", "template"} <= set(group) <= WORKER_GROUP
    for group in groups():
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        # Its own probe, or KubeRay asks for a proxy that is not there.
        assert "readinessProbe" in group["template"]["spec"]["containers"][0]


def test_pods_and_service_keep_kubernetes_own_schemas() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    newest = "1.33"
    _, public = manifests()
    validate(public, newest, strict=True)
    for group in groups():
        pod = {"metadata": {"name": "pod", **group["template"]["metadata"]}}
        template = {"apiVersion": "v1", "kind": "Pod", **pod, "spec": group["template"]["spec"]}
        validate(template, newest, strict=True)
