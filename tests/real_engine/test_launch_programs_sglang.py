"""Launch files in SGLang: its own parser reads every flag, and its router asks both sides.

``WINDTUNNEL_SGLANG`` names the Python of an environment with sglang, and sglang-router for its router. No GPU is
needed, nor all that sglang depends on: ``pip install --no-deps sglang sglang-router``, and what it then misses, torch
first.
"""

import json
import os
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from real_engine.test_launch_programs import Names, apart, through_front
from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.report.launch_files import launch_files

PYTHON = os.environ.get("WINDTUNNEL_SGLANG", "")
real_sglang = pytest.mark.skipif(not PYTHON, reason="WINDTUNNEL_SGLANG names no Python with sglang")
SGLANG = "sglang-0.5"

PARSE = """
import argparse, json, shlex, sys
from sglang.srt.server_args import PortArgs, ServerArgs, prepare_server_args
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
names = [action.dest for action in parser._actions]
found = []
for line in json.load(sys.stdin):
    words = shlex.split(line)
    try:
        asked = prepare_server_args(words[words.index("sglang.launch_server") + 1:])
        known = {name: getattr(asked, name, None) for name in names}
        known = {name: value for name, value in known.items() if isinstance(value, int | float | str)}
        if asked.enable_dp_attention:
            newer = ["--attn-dp-size", str(asked.dp_size)] if "attn_dp_size" in names else []
            ports = PortArgs.init_new(prepare_server_args(words[words.index("sglang.launch_server") + 1:] + newer))
            values = [str(getattr(ports, name)) for name in PortArgs.__annotations__]
            known["ports"] = [value for value in values if value.startswith("tcp://")]
        found.append(known)
    except SystemExit as end:
        found.append(None)
print("FOUND" + json.dumps(found))
"""
"""Reads commands as ``sglang.launch_server`` does: what is set, or null where a flag or its value is refused."""
PARSE_FRONT = """
import json, shlex, sys
from sglang_router.launch_router import parse_router_args
found = [parse_router_args(shlex.split(line)[3:]) for line in json.load(sys.stdin)]
print("FOUND" + json.dumps([[one.policy, one.decode_policy, one.prefill_urls, one.decode_urls] for one in found]))
"""
"""Reads commands as ``sglang_router.launch_router`` does."""


def read(script: str, lines: list[str]) -> list[Any]:
    """What a script in SGLang's Python prints of lines."""
    words = [PYTHON, "-c", script]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        words, input=json.dumps(lines), env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[Any] = json.loads(done.stdout.partition("FOUND")[2])
    return found


def files_of(model: str = "Llama-3.1-8B", replicas: int = 2, **engine: Any) -> dict[str, str]:
    """The files of a pool of SGLang on nodes of eight GPUs."""
    pool = Pool(load_model(model), device("h100"), Engine(preset=SGLANG, **engine), replicas)
    return launch_files(Deployment((pool,)).spec(), [8])


def servers(files: dict[str, str], slot: int = 1) -> list[str]:
    """The commands of servers, as the node's shell makes them for a slot."""
    found = (line for name, text in files.items() if name != "front.sh" for line in text.splitlines())
    return [
        re.sub(r"\$\(\((.*?)\)\)", lambda sum_: str(eval(sum_[1], {"slot": slot})), line).removesuffix(" &").strip()
        for line in found
        if "sglang.launch_server" in line and not line.startswith("#")
    ]


ONE_BY_ONE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tensor_parallel_size": 2}, {"tp_size": 2}),
    ({"pipeline_parallel_size": 2}, {"pp_size": 2}),
    ({"data_parallel_size": 2}, {"dp_size": 2, "enable_dp_attention": False}),
    ({"max_model_len": 4096}, {"context_length": 4096}),
    ({"max_num_seqs": 7}, {"max_running_requests": 7}),
    ({"max_num_batched_tokens": 4096}, {"chunked_prefill_size": 4096}),
    ({"gpu_memory_utilization": 0.8}, {"mem_fraction_static": 0.8}),
    ({"block_size": 32}, {"page_size": 32}),
    ({"block_size": 32, "num_gpu_blocks_override": 1000}, {"max_total_tokens": 32000}),
    ({"dtype": "float16"}, {"dtype": "float16"}),
    ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}),
    ({"kv_cache_dtype": "fp8_e5m2"}, {"kv_cache_dtype": "fp8_e5m2"}),
    ({"quantization": "fp8"}, {"quantization": "fp8"}),
    ({"enable_prefix_caching": False}, {"disable_radix_cache": True}),
    ({"enable_chunked_prefill": False}, {"chunked_prefill_size": -1}),
    ({"async_scheduling": False}, {"disable_overlap_schedule": True}),
    ({"enforce_eager": True}, {}),
]
EXPERTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tensor_parallel_size": 4, "enable_expert_parallel": True}, {"tp_size": 4, "ep_size": 4, "dp_size": 1}),
    (
        {"data_parallel_size": 4, "enable_expert_parallel": True, "max_num_seqs": 16, "max_num_batched_tokens": 1024},
        {"tp_size": 4, "dp_size": 4, "ep_size": 4, "max_running_requests": 64, "chunked_prefill_size": 4096},
    ),
    (
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "quantization": "fp8"},
        {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True, "quantization": "fp8"},
    ),
    *(
        (
            {"data_parallel_size": 4, "enable_expert_parallel": True, "all2all_backend": f"deepep_{ours}"},
            {"moe_a2a_backend": "deepep", "deepep_mode": theirs},
        )
        for ours, theirs in (("low_latency", "low_latency"), ("high_throughput", "normal"), ("auto", "auto"))
    ),
    (
        {"tensor_parallel_size": 4, "num_speculative_tokens": 2, "acceptance_length": 1.5},
        {"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3},
    ),
]


@real_sglang
def test_sglang_reads_every_flag_that_is_written() -> None:
    """All settings with a flag, one at a time; ranks of attention, exchanges of experts, drafts, pools apart."""
    asked = [(files_of(**words), read_as) for words, read_as in ONE_BY_ONE]
    asked += [(files_of("deepseek-ai/DeepSeek-V3", **words), read_as) for words, read_as in EXPERTS]
    lines = [servers(files) for files, _ in asked]
    assert [len(found) for found in lines] == [1] * len(asked)
    both = servers(launch_files(apart("sglang-0.5-bootstrap", preset=SGLANG), [8, 8]))
    found = read(PARSE, [*(line for [line] in lines), *both])
    assert [line for [line], each in zip(lines, found, strict=False) if each is None] == []
    for (_, read_as), each in zip(asked, found, strict=False):
        assert {name: each[name] for name in read_as} == read_as
        assert (each["host"], each["port"]) == ("0.0.0.0", 8001)
    prefill, decode = found[-2:]
    assert (prefill["disaggregation_mode"], prefill["disaggregation_bootstrap_port"]) == ("prefill", 8999)
    assert decode["disaggregation_mode"] == "decode"


@real_sglang
def test_servers_of_a_node_whose_ranks_meet_have_ports_of_their_own() -> None:
    """SGLang takes them one behind another, from its server's own on where nothing else is said."""
    files = files_of("Qwen/Qwen3-30B-A3B", 4, data_parallel_size=2)
    lines = [line for slot in range(4) for line in servers(files, slot)]
    ports = [set(each["ports"]) for each in read(PARSE, lines)]
    assert min(map(len, ports)) >= 4
    assert len(set.union(*ports)) == sum(map(len, ports))
    beside = [re.sub(r" --dist-init-addr \S+", "", line) for line in lines]
    ports = [set(each["ports"]) for each in read(PARSE, beside)]
    assert len(set.union(*ports)) < sum(map(len, ports)), "the flag is no longer needed"


@real_sglang
def test_sglangs_router_reads_every_policy() -> None:
    routers = ("round_robin", "random", "power_of_two", "prefix_aware", "least_outstanding", "dynamo_kv")
    fronts = [launch_files(apart("sglang-0.5-bootstrap", router, preset=SGLANG), [8, 8]) for router in routers]
    found = read(PARSE_FRONT, [files["front.sh"].splitlines()[-1] for files in fronts])
    policies = ["round_robin", "random", "power_of_two", "cache_aware", "power_of_two", "round_robin"]
    assert [each[0] for each in found] == policies
    prefills = [["http://prefill0:8000", 8998], ["http://prefill0:8001", 8999]]
    places = [prefills, ["http://decode0:8000", "http://decode0:8001"]]
    assert [each[2:] for each in found] == [places] * len(routers)


@real_sglang
def test_sglangs_router_asks_both_sides_at_once(tmp_path: Path) -> None:
    """In turns on either side; both are told of the prefill server's bootstrap port and of one room."""
    command = launch_files(apart("sglang-0.5-bootstrap", preset=SGLANG), [8, 8])["front.sh"].splitlines()[-1]
    assert command.startswith("python -m sglang_router.launch_router")
    ports, answers = through_front(tmp_path, f"{shlex.quote(PYTHON)}{command.removeprefix('python')}")
    assert {port: Counter(one for one, _ in Names.asked)[port] for port in ports} == dict.fromkeys(ports, 2)
    assert {int(answer["choices"][0]["text"]) for answer in answers} == set(ports[2:])
    for first, second in zip(Names.asked[::2], Names.asked[1::2], strict=True):
        (asked, body), (_, other) = sorted((first, second), key=lambda one: one[0] in ports[2:])
        assert (body["bootstrap_room"], body["bootstrap_port"]) == (other["bootstrap_room"], other["bootstrap_port"])
        assert body["bootstrap_port"] == 8998 + ports.index(asked)
