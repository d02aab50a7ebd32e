"""Dynamo: a component for each pool, with the engine's own flags."""

import pytest
import yaml

from report.manifests.fleets import apart, nodes
from windtunnel.report.manifests.dynamo import dynamo


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_a_dynamo_deployment_has_a_component_for_each_pool(engine: str) -> None:
    fleet = apart(engine)
    document = yaml.safe_load(dynamo(fleet.spec(), nodes(fleet))["dynamo.yaml"])
    front, *workers = document["spec"]["components"]
    assert (front["type"], front["replicas"]) == ("frontend", 1)
    assert [(each["type"], each["replicas"]) for each in workers] == [("prefill", 2), ("decode", 5)]
    for each, gpus in zip(workers, ("4", "2"), strict=True):
        (container,) = each["podTemplate"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": gpus}
        words = container["args"]
        assert words[0] == f"dynamo.{engine}"
        assert words[words.index("--disaggregation-mode") + 1] == each["type"]
        assert gpus in words, "the tensor parallel size"


def test_the_words_of_tensorrt_llms_dynamo_workers() -> None:
    """The file of settings becomes an argument; the model and its flags stay."""
    fleet = apart("trtllm")
    document = yaml.safe_load(dynamo(fleet.spec(), nodes(fleet))["dynamo.yaml"])
    (container,) = document["spec"]["components"][1]["podTemplate"]["spec"]["containers"]
    words = container["args"]
    assert words[:3] == ["dynamo.trtllm", "--model", "meta-llama/Llama-3.1-8B"]
    assert "meta-llama/Llama-3.1-8B" not in words[3:]
    options = yaml.safe_load(words[words.index("--override-engine-args") + 1])
    assert "kv_cache_config" in options
    assert not any("cat >" in word or word.endswith(".yaml") for word in words)
