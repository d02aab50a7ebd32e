"""Files of clouds: the servers in compose files and manifests, with their replicas, roles and GPUs."""

from pathlib import Path

import pytest

from windtunnel.deployment import HANDOVERS, Deployment, Engine, Link, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.launch import read_source
from windtunnel.model import load_model
from windtunnel.report.dynamo import dynamo_deployment

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


def test_kubernetes(tmp_path: Path) -> None:
    (tmp_path / "deployment.yaml").write_text(KUBERNETES)
    (line,) = read_source(str(tmp_path / "deployment.yaml"))
    assert (line.model, line.flags, line.replicas) == ("Qwen/Qwen3-8B", {"max-num-seqs": 64}, 3)
    assert line.facts["device"] == "nvidia-h100-80gb"


@pytest.mark.parametrize("engine", ["vllm-0.32", "sglang-0.5", "trtllm-1.0"])
def test_dynamo(engine: str) -> None:
    rules = {"v": "vllm-0.32-nixl-pull", "s": "sglang-0.5-bootstrap", "t": "trtllm-1.0"}[engine[0]]
    pools = tuple(
        Pool(load_model("Qwen/Qwen3-8B"), device("h100"), Engine(preset=engine, max_num_seqs=64), 2, role, role)
        for role in ("prefill", "decode")
    )
    text = dynamo_deployment(Deployment(pools, "round_robin", Link(bandwidth=1e9), HANDOVERS[rules]).spec(), [8, 8])
    prefill, decode = read_source(text)
    assert (prefill.role, decode.role, prefill.replicas, decode.replicas) == ("prefill", "decode", 2, 2)
    seats = {"vllm": "max-num-seqs", "sglang": "max-running-requests", "trtllm": "max-batch-size"}[prefill.engine]
    assert decode.flags[seats] == 64


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
