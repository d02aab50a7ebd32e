"""Files of clouds: the servers in compose files and manifests, with their replicas, roles and GPUs."""

from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.launch import read_line, read_source
from windtunnel.launch.sources import whole_servers

COMPOSE = """
services:
  llm:
    image: vllm/vllm-openai:latest
    command: --model Qwen/Qwen3-8B --tensor-parallel-size 2
    environment: {VLLM_USE_V1: "1"}
  web:
    image: nginx
    command: [nginx, -g, daemon off]
"""
KUBERNETES = """
apiVersion: v1
kind: Service
metadata: {name: llm}
---
apiVersion: apps/v1
kind: Deployment
spec:
  replicas: 3
  template:
    spec:
      nodeSelector: {cloud.google.com/gke-accelerator: nvidia-h100-80gb}
      containers:
      - name: llm
        image: vllm/vllm-openai:v0.10.0
        command: [/bin/sh, -c]
        args: ["exec vllm serve $MODEL --max-num-seqs 64"]
        env:
        - {name: MODEL, value: Qwen/Qwen3-8B}
        - {name: TOKEN, valueFrom: {secretKeyRef: {name: a, key: b}}}
"""


def test_compose() -> None:
    (line,) = read_source(COMPOSE)
    assert (line.model, line.flags, line.env) == ("Qwen/Qwen3-8B", {"tensor-parallel-size": 2}, {"VLLM_USE_V1": "1"})


@pytest.mark.parametrize("words", ["deploy: {replicas: 2}", "scale: 2"])
def test_copies_of_a_compose_service(words: str) -> None:
    (line,) = read_source(f"services:\n  vllm:\n    command: vllm serve Qwen/Qwen3-8B\n    {words}\n")
    assert line.replicas == 2


def test_kubernetes(tmp_path: Path) -> None:
    (tmp_path / "deployment.yaml").write_text(KUBERNETES)
    (line,) = read_source(str(tmp_path / "deployment.yaml"))
    assert (line.model, line.flags, line.replicas) == ("Qwen/Qwen3-8B", {"max-num-seqs": 64}, 3)
    assert line.facts == {"device": "nvidia-h100-80gb", "engine": "vllm-0.10"}


GROUPS = """
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
spec:
  replicas: 2
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec: {containers: [{command: [vllm, serve, Qwen/Qwen3-8B, -pp, "2", --nnodes, "2"]}]}
    workerTemplate:
      spec: {containers: [{command: [vllm, serve, Qwen/Qwen3-8B, -pp, "2", --nnodes, "2", --headless]}]}
"""


def test_workers_of_a_group_are_no_servers(tmp_path: Path) -> None:
    (tmp_path / "groups.yaml").write_text(GROUPS)
    (line,) = read_source(str(tmp_path))
    assert (line.replicas, line.flags["pipeline-parallel-size"]) == (2, 2)


def test_a_role_in_front() -> None:
    (line,) = read_source("decode: vllm serve M")
    assert line.role == "decode"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ls -l", "starts no server that is known"),
        ("gone.sh", "there is no such file"),
        ("python -m atom.entrypoints.openai_server --model M", "ATOM: is not simulated"),
        ("apiVersion: v1\nkind: [", "not YAML"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_source(text)


def test_commands_of_several_nodes_are_one_server() -> None:
    """Only the first node's starts it; a further node's alone stands for it."""
    sglang = "python3 -m sglang.launch_server --model-path m --tp 16 --nnodes 2 --dist-init-addr a:5 --node-rank"
    vllm = "vllm serve m -dp 16 --data-parallel-size-local 8"
    for first, second in (
        (f"{sglang} 0", f"{sglang} 1"),
        (vllm, f"{vllm} --headless --data-parallel-start-rank 8"),
        (f"{vllm} --data-parallel-rank 0", f"{vllm} --data-parallel-rank 1"),
    ):
        both = read_source(f"{first}\n{second}")
        assert whole_servers(both) == both[:1]
        assert whole_servers(both[::-1]) == both[:1]
        assert whole_servers(both[1:]) == both[1:]
        assert whole_servers(both[:1] * 2) == both[:1] * 2
    roles = [*read_source(f"prefill: {sglang} 1"), *read_source(f"decode: {sglang} 0")]
    assert whole_servers(roles) == roles


DYNAMO = """
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
spec:
  services:
    Frontend: {replicas: 1, extraPodSpec: {mainContainer: {image: dynamo:1}}}
    prefill:
      subComponentType: prefill
      replicas: 2
      multinode: {nodeCount: 2}
      extraPodSpec:
        mainContainer:
          command: [python3, -m, dynamo.trtllm]
          args: [--model-path, Qwen/Qwen3-8B, --extra-engine-args, /config/prefill.yaml]
---
apiVersion: v1
kind: ConfigMap
data:
  prefill.yaml: |
    tensor_parallel_size: 8
    kv_cache_config: {enable_block_reuse: true}
"""


def test_a_dynamo_graph_has_its_replicas_and_files_of_its_config_map() -> None:
    (line,) = read_source(DYNAMO)
    assert (line.replicas, line.role, line.flags["tp-size"]) == (2, "prefill", 8)
    assert line.flags["kv-cache-config.enable-block-reuse"] is True


def test_values_of_the_production_stack_are_servers() -> None:
    text = """
servingEngineSpec:
  modelSpec:
  - name: a
    repository: vllm/vllm-openai
    tag: v0.19.1
    modelURL: Qwen/Qwen3-8B
    replicaCount: 3
    vllmConfig: {tensorParallelSize: 4, maxModelLen: 8192, enablePrefixCaching: false, v1: 1,
                 extraArgs: [--max-num-seqs, "64"]}
    lmcacheConfig: {enabled: true, cpuOffloadingBufferSize: "20"}
"""
    (line,) = read_source(text)
    assert (line.model, line.replicas, line.facts["engine"]) == ("Qwen/Qwen3-8B", 3, "vllm-0.19")
    wanted = {"tensor-parallel-size": 4, "max-model-len": 8192, "enable-prefix-caching": False, "max-num-seqs": 64}
    assert wanted.items() <= dict(line.flags).items()
    assert line.env["LMCACHE_MAX_LOCAL_CPU_SIZE"] == "20"


def test_the_release_of_an_image_that_another_stands_for_is_said() -> None:
    run = "docker run --gpus all lmsysorg/sglang:{} python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B"
    old, new = (read_line(read_source(run.format(tag))[0]) for tag in ("v0.5.9-cu129", "v0.5.23"))
    assert old.notes["engine"] == "the image has 0.5.9, which is simulated by the rules of sglang-0.4.6"
    assert "engine" not in new.notes and "release" not in old.facts


def test_whole_numbers_may_stand_in_quotes() -> None:
    line = "vllm serve Qwen/Qwen3-30B-A3B -dp 8 --enable-expert-parallel --eplb-config "
    line += """'{"num_redundant_experts":"32"}'"""
    assert read_line(read_source(line)[0]).settings["num_redundant_experts"] == 32


def test_a_service_of_kserve_says_how_its_gpus_share_the_work() -> None:
    """Its workers are part of the server, and the prefill side has sizes of its own."""
    text = """
apiVersion: serving.kserve.io/v1alpha2
kind: LLMInferenceService
spec:
  model: {uri: "hf://deepseek-ai/DeepSeek-R1", name: deepseek-ai/DeepSeek-R1}
  replicas: 1
  parallelism: {data: 32, dataLocal: 8, expert: true, tensor: 1}
  template:
    containers:
    - name: main
      env:
      - {name: VLLM_ADDITIONAL_ARGS, value: "--max-model-len 8192"}
      - {name: VLLM_ALL2ALL_BACKEND, value: deepep_high_throughput}
  worker:
    containers:
    - name: main
      env: [{name: VLLM_ADDITIONAL_ARGS, value: "--max-model-len 8192"}]
  prefill:
    replicas: 2
    parallelism: {tensor: 8}
    template: {containers: [{name: main, resources: {}}]}
"""
    decode, prefill = read_source(text)
    found = read_line(decode)
    wanted = {"data_parallel_size": 32, "enable_expert_parallel": True, "all2all_backend": "deepep_high_throughput"}
    assert (wanted | {"max_model_len": 8192}).items() <= dict(found.settings).items()
    assert not found.not_simulated and decode.role == "decode"
    assert (prefill.role, prefill.replicas, dict(prefill.flags)) == ("prefill", 2, {"tensor-parallel-size": 8})


def test_labels_of_llm_d_say_the_role_and_tags_of_lmcache_no_release_of_vllm() -> None:
    text = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: a, labels: {llm-d.ai/role: prefill}}
spec:
  replicas: 2
  template:
    metadata: {labels: {llm-d.ai/role: prefill}}
    spec: {containers: [{name: vllm, image: "lmcache/vllm-openai:v0.3.5", command: [vllm, serve, m]}]}
"""
    (line,) = read_source(text)
    assert (line.role, line.replicas, line.facts) == ("prefill", 2, {})
    (line,) = read_source(text.replace("lmcache", "vllm").replace("v0.3.5", "v0.19.0"))
    assert line.facts["engine"] == "vllm-0.19"
