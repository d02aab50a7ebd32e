"""Servers over nodes: each node's part of the command, by what LeaderWorkerSet tells it."""

import os
import subprocess
from pathlib import Path

import pytest

from report.manifests.fleets import mixed, nodes
from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.report.manifests.servers import Server, named, servers_of


def server(deployment: Deployment) -> Server:
    (found,) = servers_of(deployment.spec(), nodes(deployment))
    return found


def ran(folder: Path, text: str, index: int, program: str = "vllm") -> str:
    """The words that a part starts its engine with, on a node of a group."""
    fake = folder / program
    fake.write_text('#!/bin/bash\necho "$*"\n')
    fake.chmod(0o755)
    told = {
        "LWS_WORKER_INDEX": str(index),
        "LWS_LEADER_ADDRESS": "fleet-0.fleet",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    return subprocess.run(("bash", "-c", text), env=told, capture_output=True, text=True, check=True).stdout


def test_one_engine_over_two_nodes(tmp_path: Path) -> None:
    wide = server(mixed(2, tensor_parallel_size=8, pipeline_parallel_size=2))
    assert (wide.nodes, wide.gpus_here) == (2, 8)
    leader, worker = (ran(tmp_path, wide.part(leads=leads), int(not leads)) for leads in (True, False))
    shared = "--nnodes 2 --node-rank {} --master-addr fleet-0.fleet"
    assert leader.endswith(f"--port 8000 {shared.format(0)}\n")
    assert worker.endswith(f"--port 8000 {shared.format(1)} --headless\n")


def test_ranks_of_one_server_over_nodes(tmp_path: Path) -> None:
    """Seven ranks of two GPUs, four on the first node and three on the second."""
    ranks = server(mixed(7, "vllm_dp"))
    assert (ranks.replicas, ranks.gpus, ranks.nodes, ranks.gpus_here) == (1, 14, 2, 8)
    leader, worker = (ran(tmp_path, ranks.part(leads=leads), int(not leads)) for leads in (True, False))
    head = "--data-parallel-address fleet-0.fleet --data-parallel-rpc-port 13345 --data-parallel-size-local"
    assert "--data-parallel-size 7" in leader
    assert leader.endswith(f"{head} 4\n")
    assert worker.endswith(f"{head} 3 --headless --data-parallel-start-rank 4\n")


def test_two_ranks_take_a_node_each(tmp_path: Path) -> None:
    """Of eight GPUs."""
    ranks = server(mixed(2, "vllm_dp", tensor_parallel_size=8))
    leader, worker = (ran(tmp_path, ranks.part(leads=leads), int(not leads)) for leads in (True, False))
    assert "start-rank" not in leader
    assert worker.endswith("--data-parallel-size-local 1 --headless --data-parallel-start-rank 1\n")


def test_sglangs_nodes_meet_at_the_leader(tmp_path: Path) -> None:
    wide = server(mixed(1, preset="sglang-0.5", tensor_parallel_size=8, pipeline_parallel_size=2))
    words = ran(tmp_path, wide.part(leads=False), 1, "python")
    assert "--host 0.0.0.0 --nnodes 2 --node-rank 1 --dist-init-addr fleet-0.fleet:20000" in words
    assert "headless" not in words


def test_what_no_two_nodes_start_is_refused() -> None:
    with pytest.raises(InputError, match="started by MPI"):
        server(mixed(1, preset="trtllm-1.0", tensor_parallel_size=8, pipeline_parallel_size=2)).part(leads=True)
    with pytest.raises(InputError, match="a rank of 16 GPUs spans nodes of 8"):
        _ = server(mixed(2, "vllm_dp", tensor_parallel_size=8, pipeline_parallel_size=2)).nodes


def test_names_are_those_of_clusters() -> None:
    assert named("Qwen3-30B_A3B.Instruct") == "qwen3-30b-a3b-instruct"
    assert len(named("a" * 80)) == 40
