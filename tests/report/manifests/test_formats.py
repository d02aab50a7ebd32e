"""All formats: the engine's own line is in each, GPUs and probes are there, and clusters take them."""

import json
from typing import Any, get_args

import pytest
import yaml

from report.manifests.fleets import apart, mixed, nodes
from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.report.manifests.formats import FORMATS
from windtunnel.report.serve_line import serve_line
from windtunnel.scenario.output_files import PRINTED, Format

FLEETS = {
    "mixed": mixed(),
    "one": mixed(1),
    "ranks": mixed(3, "vllm_dp"),
    "apart": apart(),
    "sglang": apart("sglang"),
    "trtllm": apart("trtllm"),
}
VLLM_ALONE = ("llm-d", "kserve")


def files(deployment: Deployment, kind: str) -> dict[str, str]:
    return FORMATS[kind](deployment.spec(), nodes(deployment))


def test_the_command_line_knows_them_all() -> None:
    assert set(get_args(Format)) == {*FORMATS, *PRINTED}


@pytest.mark.parametrize("kind", [each for each in FORMATS if each not in ("dynamo", "kserve")])
@pytest.mark.parametrize("name", FLEETS)
def test_every_server_has_the_line_that_the_engine_is_started_by(name: str, kind: str) -> None:
    """There is one table of flags for each engine, and no other mapping."""
    if kind in VLLM_ALONE and name in ("sglang", "trtllm"):
        with pytest.raises(InputError, match="written for vLLM here"):
            files(FLEETS[name], kind)
        return
    text = "\n".join(files(FLEETS[name], kind).values())
    for pool in FLEETS[name].spec()["pools"]:
        assert serve_line(pool, FLEETS[name].spec().get("handover")).rpartition("\n")[2] in text


@pytest.mark.parametrize("name", ["mixed", "apart"])
def test_kserve_has_the_same_flags(name: str) -> None:
    document = yaml.safe_load(files(FLEETS[name], "kserve")["kserve.yaml"])
    sides = [document["spec"].get("prefill"), document["spec"]]
    found = [
        next(
            each["value"] for each in side["template"]["containers"][0]["env"] if each["name"] == "VLLM_ADDITIONAL_ARGS"
        )
        for side in sides
        if side
    ]
    spec = FLEETS[name].spec()
    assert found == [serve_line(pool, spec.get("handover")).split(" ", 3)[3] for pool in spec["pools"]]


@pytest.mark.parametrize("kind", ["kubernetes", "leaderworkerset", "dynamo", "llm-d", "kserve"])
@pytest.mark.parametrize("name", FLEETS)
def test_kubernetes_takes_every_object(name: str, kind: str) -> None:
    """Strictly: no key that its API does not have. Of what others define, the pods."""
    validate = pytest.importorskip("kubernetes_validate").validate
    if kind in VLLM_ALONE and name in ("sglang", "trtllm"):
        return
    for text in files(FLEETS[name], kind).values():
        for document in yaml.safe_load_all(text):
            if str(document.get("apiVersion")) in ("v1", "apps/v1"):
                validate(document, "1.37", strict=True)
            for spec in pods(document):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, "spec": spec}
                validate(pod, "1.37", strict=True)


def pods(node: Any) -> list[Any]:
    """Specifications of pods in what is not Kubernetes' own; llm-d's containers have keys of its chart."""
    if isinstance(node, list):
        return [pod for each in node for pod in pods(each)]
    if not isinstance(node, dict):
        return []
    if "containers" in node and all("modelCommand" not in each for each in node["containers"]):
        return [node]
    return [pod for each in node.values() for pod in pods(each)]


def gpus(kind: str, deployment: Deployment) -> int:
    """GPUs that all pods of a cluster ask for."""

    def count(node: Any, times: int) -> int:
        if isinstance(node, list):
            return sum(count(each, times) for each in node)
        if not isinstance(node, dict):
            return 0
        times *= node.get("replicas", 1) if "template" in str(node.keys()).lower() or "containers" in node else 1
        here = int(node.get("limits", {}).get("nvidia.com/gpu", 0)) * times
        return here + sum(
            count(each, times) for key, each in node.items() if key not in ("limits", "requests", "prefill")
        )

    found = 0
    for text in files(deployment, kind).values():
        for document in yaml.safe_load_all(text):
            found += count(document, 1)
            for side in (document.get("prefill"), document.get("spec", {}).get("prefill")):
                found += count(side, 1) if side else 0
    return found


@pytest.mark.parametrize("kind", ["kubernetes", "leaderworkerset", "dynamo", "llm-d", "kserve"])
@pytest.mark.parametrize("name", ["mixed", "ranks", "apart"])
def test_all_gpus_of_the_plan_are_asked_for(name: str, kind: str) -> None:
    assert gpus(kind, FLEETS[name]) == FLEETS[name].gpus


def test_what_a_format_cannot_start_is_said_with_what_can() -> None:
    wide = mixed(2, tensor_parallel_size=8, pipeline_parallel_size=2)
    for kind in ("scripts", "docker", "systemd", "kubernetes", "llm-d", "kserve"):
        with pytest.raises(InputError, match=r"spans nodes of 8.*take --format leaderworkerset"):
            files(wide, kind)
    assert files(wide, "leaderworkerset")
    assert files(wide, "dynamo")
    with pytest.raises(InputError, match="tpu_v6e: no images of engines are known"):
        files(mixed(2, gpu="tpu_v6e"), "kubernetes")
    with pytest.raises(InputError, match="Compose reserves GPUs of NVIDIA"):
        files(mixed(2, gpu="mi300x"), "docker")
    with pytest.raises(InputError, match="stand behind a proxy of vLLM's tests"):
        files(apart(handover="vllm-0.32-nixl-push"), "kubernetes")
    with pytest.raises(InputError, match="pulls by NIXL"):
        files(apart(handover="vllm-0.32-mooncake"), "llm-d")


def test_amds_gpus_have_their_images_and_name() -> None:
    text = files(mixed(2, gpu="mi300x"), "kubernetes")["kubernetes.yaml"]
    assert "amd.com/gpu: '2'" in text
    assert "vllm/vllm-openai-rocm:v0.32.0" in text


def test_json_is_not_folded_or_quoted_away() -> None:
    """The hand-over's JSON comes out of YAML as it went in."""
    document = next(
        each
        for each in yaml.safe_load_all(files(apart(), "kubernetes")["kubernetes.yaml"])
        if each["kind"] == "StatefulSet"
    )
    script = document["spec"]["template"]["spec"]["containers"][0]["args"][0]
    words = script.partition("--kv-transfer-config '")[2].partition("'")[0]
    assert json.loads(words) == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
