"""Files of clouds: the servers in compose files and manifests, with their replicas, roles and GPUs."""

from pathlib import Path

import pytest

from windtunnel.errors import InputError
from windtunnel.launch import read_source

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
