"""Kubernetes: the router knows every server by its name in the cluster, and servers are asked how they are."""

from typing import Any

import pytest
import yaml

from report.manifests.fleets import apart, mixed, nodes
from windtunnel.deployment import Deployment, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.report.manifests.kubernetes import kubernetes, leaderworkerset


def objects(deployment: Deployment) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(kubernetes(deployment.spec(), nodes(deployment))["kubernetes.yaml"]))


def of(kind: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in found if each["kind"] == kind]


def test_nginx_asks_for_every_pod_of_the_set() -> None:
    found = objects(mixed(3))
    (servers,), (settings,) = of("StatefulSet", found), of("ConfigMap", found)
    assert (servers["spec"]["replicas"], servers["spec"]["serviceName"]) == (3, "llama-3-1-8b")
    text = settings["data"]["default.conf.template"]
    assert [line.split()[1] for line in text.splitlines() if line.strip().startswith("server llama")] == [
        f"llama-3-1-8b-{index}.llama-3-1-8b.${{NAMESPACE}}.svc.cluster.local:8000" for index in range(3)
    ]
    assert "least_conn;" in text
    (front,) = of("Deployment", found)
    assert front["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"] == settings["metadata"]["name"]


def test_every_server_is_asked_while_it_loads_and_after() -> None:
    (servers,) = of("StatefulSet", objects(mixed()))
    (one,) = servers["spec"]["template"]["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert one[probe]["httpGet"] == {"path": "/health", "port": 8000}
    assert one["startupProbe"]["periodSeconds"] * one["startupProbe"]["failureThreshold"] == 3600
    assert servers["spec"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


def test_a_server_alone_needs_no_router() -> None:
    found = objects(mixed(1))
    assert [each["kind"] for each in found] == ["Service", "StatefulSet", "Service"]
    assert found[2]["spec"]["selector"] == found[1]["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize(("backend", "program"), [("vllm", "vllm-router"), ("sglang", "sglang_router")])
def test_both_sides_stand_behind_the_engines_router(backend: str, program: str) -> None:
    (front,) = of("Deployment", objects(apart(backend)))
    script = front["spec"]["template"]["spec"]["containers"][0]["args"][0]
    assert f"exec {'python -m ' if backend == 'sglang' else ''}{program}" in script
    assert "--prefill http://llama-3-1-8b-prefill-1.llama-3-1-8b-prefill:8000" in script
    assert "--decode http://llama-3-1-8b-decode-4.llama-3-1-8b-decode:8000" in script


def test_unlike_mixed_pools_are_told_apart_and_stand_behind_one_router() -> None:
    model = load_model("Llama-3.1-8B")
    pools = tuple(Pool(model, device(name), replicas=2, name=name) for name in ("h100", "a100"))
    found = objects(Deployment(pools))
    assert [each["metadata"]["name"] for each in of("StatefulSet", found)] == ["llama-3-1-8b-h100", "llama-3-1-8b-a100"]
    assert of("ConfigMap", found)[0]["data"]["default.conf.template"].count("  server llama") == 4


def test_groups_over_nodes_have_leaders_that_answer_and_workers_that_do_not() -> None:
    wide = mixed(2, tensor_parallel_size=8, pipeline_parallel_size=2)
    first, *others = yaml.safe_load_all(leaderworkerset(wide.spec(), nodes(wide))["leaderworkerset.yaml"])
    assert (first["kind"], first["spec"]["replicas"]) == ("LeaderWorkerSet", 2)
    template = first["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    leader, worker = (template[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
    assert "readinessProbe" in leader
    assert "readinessProbe" not in worker
    assert worker["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert "app" not in template["workerTemplate"].get("metadata", {}).get("labels", {}), "no address leads to a worker"
    assert [each["kind"] for each in others] == ["ConfigMap", "Deployment", "Service"]
