"""Launch files: run with a server that only says how it was started, they start every replica once."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from windtunnel.deployment import HANDOVERS, Deployment, Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.report.handover_flags import vllm_transfer
from windtunnel.report.launch_files import launch_files


def entry(replicas: int, router: str = "round_robin", **engine: Any) -> dict[str, Any]:
    """The specification of a deployment of one pool."""
    return Deployment((Pool(load_model("Llama-3.1-8B"), device("h100"), Engine(**engine), replicas),), router).spec()


def written(folder: Path, deployment: dict[str, Any], gpus_per_node: list[int]) -> None:
    """The files of a deployment, in a folder."""
    for name, text in launch_files(deployment, gpus_per_node).items():
        (folder / name).write_text(text)


def started(folder: Path, nodes: int) -> list[str]:
    """What the scripts of all nodes start: devices and words of each."""
    fake = folder / "vllm"
    fake.write_text('#!/bin/bash\necho "$CUDA_VISIBLE_DEVICES $*"\n')
    fake.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "HEAD": "first", "CUDA_VISIBLE_DEVICES": ""}
    lines = []
    for node in range(nodes):
        words = ("bash", str(folder / "node.sh"), str(node))
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        lines += [f"node{node} {line}" for line in done.stdout.splitlines()]
    return lines


@pytest.mark.parametrize("router", ["round_robin", "least_outstanding"])
def test_every_replica_has_gpus_and_a_port_that_the_router_knows(tmp_path: Path, router: str) -> None:
    written(tmp_path, entry(6, router, tensor_parallel_size=2), [8])
    lines = started(tmp_path, 2)
    places = [(line.split()[0], line.split()[1], line.split()[-1]) for line in lines]
    assert sorted(places) == [
        *(("node0", f"{2 * i},{2 * i + 1}", str(8000 + i)) for i in range(4)),
        *(("node1", f"{2 * i},{2 * i + 1}", str(8000 + i)) for i in range(2)),
    ]
    assert all("serve meta-llama/Llama-3.1-8B --tensor-parallel-size 2" in line for line in lines)
    text = (tmp_path / "nginx.conf").read_text()
    assert [line.split()[1] for line in text.splitlines() if line.strip().startswith("server node")] == [
        f"{node}:{port}" for node, _, port in sorted(places)
    ]
    assert ("least_conn;" in text) == (router == "least_outstanding")


def test_vllms_own_balancing_is_one_server_with_ranks(tmp_path: Path) -> None:
    written(tmp_path, entry(6, "vllm_dp", tensor_parallel_size=2), [8])
    first, second = started(tmp_path, 2)
    assert "--data-parallel-size 6" in first
    assert "--data-parallel-size-local 4" in first
    assert "--headless" not in first
    assert second.endswith("--data-parallel-size-local 2 --headless --data-parallel-start-rank 4")
    assert not (tmp_path / "nginx.conf").exists()
    written(tmp_path, entry(2, "vllm_dp"), [8])
    assert started(tmp_path, 1)[0].endswith("--data-parallel-size 2")


def test_what_no_command_starts_is_refused() -> None:
    with pytest.raises(InputError, match="no command starts this"):
        launch_files(entry(1, scheduler="orca"), [8])
    with pytest.raises(InputError, match="spans nodes of 8: take --format leaderworkerset"):
        launch_files(entry(1, tensor_parallel_size=8, pipeline_parallel_size=2), [8])


def apart(engine: str, router: str = "round_robin", handover: str = "vllm-0.32-nixl-pull") -> dict[str, Any]:
    """Two prefill replicas of four GPUs and five decode replicas of two."""
    model, h100 = load_model("Llama-3.1-8B"), device("h100")
    pools = tuple(
        Pool(model, h100, Engine(preset=engine, tensor_parallel_size=size), replicas, role, name=role)
        for role, replicas, size in (("prefill", 2, 4), ("decode", 5, 2))
    )
    return Deployment(pools, router, handover=HANDOVERS[handover]).spec()


def test_pools_apart_have_a_script_each_and_a_front_that_knows_all_servers(tmp_path: Path) -> None:
    written(tmp_path, apart("vllm-0.32"), [8, 8])
    (tmp_path / "hostname").write_text("#!/bin/bash\necho here\n")
    (tmp_path / "vllm").write_text('#!/bin/bash\necho "$VLLM_NIXL_SIDE_CHANNEL_HOST:$VLLM_NIXL_SIDE_CHANNEL_PORT $*"\n')
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for name in ("hostname", "vllm"):
        (tmp_path / name).chmod(0o755)
    lines = {
        script: sorted(
            line
            for node in range(nodes)
            for line in subprocess.run(
                ("bash", str(tmp_path / script), str(node)), env=environment, capture_output=True, text=True, check=True
            ).stdout.splitlines()
        )
        for script, nodes in (("prefill.sh", 1), ("decode.sh", 2))
    }
    assert [line.split()[0] for line in lines["prefill.sh"]] == ["here:5600", "here:5604"], "ports of all ranks"
    assert [line.split()[-1] for line in lines["decode.sh"]] == ["8000", "8000", "8001", "8002", "8003"]
    front = (tmp_path / "front.sh").read_text()
    assert (
        "--kv-connector nixl --policy round_robin --prefill http://prefill0:8000 --prefill http://prefill0:8001"
        in front
    )
    assert "--decode http://decode0:8003 --decode http://decode1:8000 --host 0.0.0.0 --port 8000" in front


def test_servers_that_push_stand_behind_vllms_own_proxy() -> None:
    front = launch_files(apart("vllm-0.32", handover="vllm-0.32-nixl-push"), [8, 8])["front.sh"]
    assert "--prefiller-hosts prefill0 prefill0 --prefiller-ports 8000 8001" in front
    assert "--decoder-hosts decode0 decode0 decode0 decode0 decode1 --decoder-ports 8000 8001 8002 8003 8000" in front


def test_mooncakes_prefill_servers_are_met_at_a_port_of_their_own() -> None:
    files = launch_files(apart("vllm-0.32", handover="vllm-0.32-mooncake"), [8, 8])
    assert "VLLM_MOONCAKE_BOOTSTRAP_PORT=$((8998 + slot)) CUDA" in files["prefill.sh"]
    assert "BOOTSTRAP" not in files["decode.sh"]
    assert (
        "mooncake --policy round_robin --prefill http://prefill0:8000 8998 --prefill http://prefill0:8001 8999"
        in (files["front.sh"])
    )


@pytest.mark.parametrize(
    ("engine", "routers", "words", "notes"),
    [
        ("vllm-0.32", ("session_affinity", None), "--policy consistent_hash --prefill", []),
        ("vllm-0.32", ("prefix_aware:queue=2", "random"), "--policy cache_aware --decode-policy random", []),
        ("vllm-0.32", ("vllm_dp", None), "--policy power_of_two --prefill", ["vllm-router lacks: power_of_two"]),
        ("sglang-0.5", ("dynamo_kv", "power_of_two"), "--policy round_robin --decode-policy power_of_two",
         ["dynamo_kv, which sglang_router lacks: round_robin instead"]),
        ("trtllm-1.0", ("least_outstanding", "random"), "type: load_balancing",
         ["random, which trtllm-serve lacks: round_robin instead"]),
    ],
)  # fmt: skip
def test_a_front_has_the_router_of_the_simulation_or_says_what_it_has(
    engine: str, routers: tuple[str, str | None], words: str, notes: list[str]
) -> None:
    asked = apart(engine, routers[0]) | {"decode_router": routers[1]}
    front = launch_files(asked, [8, 8])["front.sh"]
    assert words in front
    found = [line for line in front.splitlines() if "simulated with" in line]
    assert len(found) == len(notes)
    assert all(note in line for note, line in zip(notes, found, strict=True))


def test_only_decode_servers_of_vllm_compute_prompts_whose_kv_is_gone() -> None:
    for name, connector in (("vllm-0.32-nixl-pull", "NixlConnector"), ("vllm-0.32-mooncake", "MooncakeConnector")):
        rules = replace(HANDOVERS[name], on_expiry="recompute").spec()
        words = {role: vllm_transfer(role, rules)[1] for role in ("prefill", "decode")}
        assert all(connector in text for text in words.values())
        assert [role for role, text in words.items() if '"kv_load_failure_policy": "recompute"' in text] == ["decode"]


@pytest.mark.parametrize(("engine", "starts"), [("sglang-0.5", "sglang.launch_server"), ("trtllm-1.0", "trtllm-serve")])
def test_servers_that_listen_to_their_own_machine_alone_are_told_otherwise(engine: str, starts: str) -> None:
    """vLLM listens to all; the router stands on another machine, or on another node."""
    line = next(line for line in launch_files(entry(2, preset=engine), [8])["node.sh"].splitlines() if starts in line)
    assert line.endswith(" --port $((8000 + slot)) --host 0.0.0.0 &")
    assert "--host" not in launch_files(entry(2), [8])["node.sh"]


def test_ranks_that_share_experts_are_started_as_such() -> None:
    """One server of four GPUs, in whose layers of attention ranks have prompts of their own."""

    def line(engine: str, starts: str) -> str:
        pool = Pool(
            load_model("Qwen/Qwen3-30B-A3B"),
            device("h100"),
            Engine(preset=engine, data_parallel_size=4, enable_expert_parallel=True),
            2,
        )
        return next(
            line
            for line in launch_files(Deployment((pool,)).spec(), [8])["node.sh"].splitlines()
            if starts in line or "attention_dp" in line
        )

    sglang = line("sglang-0.5", "launch_server")
    assert "--tp-size 4 --dp-size 4 --ep-size 4" in sglang
    assert "--enable-dp-attention" in sglang
    assert "--dist-init-addr 127.0.0.1:$((20000 + slot * 16)) " in sglang + " "
    assert line("trtllm-1.0", "trtllm-serve") == "enable_attention_dp: true"
    assert "dist-init-addr" not in launch_files(entry(2, preset="sglang-0.5"), [8])["node.sh"]


def test_sglangs_router_meets_each_prefill_server_at_its_bootstrap_port() -> None:
    files = launch_files(apart("sglang-0.5", "random"), [8, 8])
    assert "--disaggregation-bootstrap-port $((8998 + slot))" in files["prefill.sh"]
    assert "bootstrap" not in files["decode.sh"]
    assert (
        "--policy random --prefill http://prefill0:8000 8998 --prefill http://prefill0:8001 8999" in files["front.sh"]
    )


def test_tensorrt_llms_front_is_a_file() -> None:
    text = launch_files(apart("trtllm-1.0", "least_outstanding"), [8, 8])["front.sh"]
    document = yaml.safe_load(text.partition("<<'END'\n")[2].partition("\nEND")[0])
    assert document["context_servers"]["urls"] == ["prefill0:8000", "prefill0:8001"]
    assert document["generation_servers"]["num_instances"] == 5
    assert document["generation_servers"]["router"] == {"type": "load_balancing"}


def test_only_tensorrt_llms_front_lets_prompts_stay() -> None:
    rules = {"max_local_prefill_length": 256}
    files = launch_files(staying(apart("trtllm-1.0"), rules), [8, 8])
    document = yaml.safe_load(files["front.sh"].partition("<<'END'\n")[2].partition("\nEND")[0])
    assert document["conditional_disagg_config"] == rules
    with pytest.raises(InputError, match="max_local_prefill_length=256: vllm's front sends every prompt"):
        launch_files(staying(apart("vllm-0.32"), rules), [8, 8])


def staying(deployment: dict[str, Any], rules: dict[str, Any]) -> dict[str, Any]:
    return deployment | {"handover": deployment["handover"] | rules}


def test_unlike_mixed_pools_stand_behind_one_router() -> None:
    model = load_model("Llama-3.1-8B")
    pools = tuple(Pool(model, device(name), replicas=2, name=name) for name in ("h100", "a100"))
    files = launch_files(Deployment(pools).spec(), [8, 8])
    assert set(files) == {"h100.sh", "a100.sh", "nginx.conf"}
    assert files["nginx.conf"].count("    server ") == 4
