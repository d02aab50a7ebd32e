"""Commands that start an engine: every flag is a documented one, in its documented form."""

import json
import re
import shlex
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.deployment import HANDOVERS, Deployment, Engine, Handover, Pool, Store
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.report.serve_line import OPTIONS_FILES, serve_line
from windtunnel.scenario.pasted import read_pasted, scenario_of

INTEGER, NUMBER, SWITCH, EITHER, TEXT = r"-?\d+", r"[\d.]+", "", "--(no-)?", r"\S+"

VLLM = {
    "tensor-parallel-size": INTEGER,
    "pipeline-parallel-size": INTEGER,
    "data-parallel-size": INTEGER,
    "all2all-backend": "deepep_low_latency|deepep_high_throughput",
    "dbo-decode-token-threshold": INTEGER,
    "dbo-prefill-token-threshold": INTEGER,
    "enable-dbo": EITHER,
    "max-model-len": INTEGER,
    "max-num-seqs": INTEGER,
    "max-num-batched-tokens": INTEGER,
    "gpu-memory-utilization": NUMBER,
    "block-size": INTEGER,
    "dtype": "float16|bfloat16",
    "kv-cache-dtype": "bfloat16|float16|fp8|fp8_e4m3|fp8_e5m2",
    "quantization": TEXT,
    "num-gpu-blocks-override": INTEGER,
    "kv-offloading-size": NUMBER,
    "long-prefill-token-threshold": INTEGER,
    "prefill-schedule-interval": INTEGER,
    "watermark": NUMBER,
    "scheduling-policy": "priority",
    "speculative-config": r'\{"method": "mtp", "num_speculative_tokens": \d+\}',
    "enable-expert-parallel": EITHER,
    "enable-prefix-caching": EITHER,
    "enable-chunked-prefill": EITHER,
    "async-scheduling": EITHER,
    "scheduler-reserve-full-isl": EITHER,
    "enforce-eager": EITHER,
}
"""Read in vllm/engine/arg_utils.py of 0.32.0 (add_cli_args); truths are argparse.BooleanOptionalAction."""
SGLANG = {
    "model-path": TEXT,
    "tp-size": INTEGER,
    "pp-size": INTEGER,
    "dp-size": INTEGER,
    "ep-size": INTEGER,
    "moe-a2a-backend": "deepep",
    "deepep-mode": "normal|low_latency|auto",
    "enable-two-batch-overlap": SWITCH,
    "context-length": INTEGER,
    "max-running-requests": INTEGER,
    "chunked-prefill-size": INTEGER,
    "mem-fraction-static": NUMBER,
    "page-size": INTEGER,
    "max-total-tokens": INTEGER,
    "dtype": "float16|bfloat16",
    "kv-cache-dtype": "auto|fp8_e5m2|fp8_e4m3|bf16|bfloat16|fp4_e2m1",
    "quantization": TEXT,
    "speculative-algorithm": "EAGLE|EAGLE3|NEXTN|STANDALONE|NGRAM",
    "speculative-num-steps": INTEGER,
    "speculative-eagle-topk": INTEGER,
    "speculative-num-draft-tokens": INTEGER,
    "enable-dp-attention": SWITCH,
    "disable-radix-cache": SWITCH,
    "disable-overlap-schedule": SWITCH,
    "disable-cuda-graph": SWITCH,
}
"""Read in sglang/srt/server_args.py of 0.5.8 (add_cli_args)."""
TRTLLM = {
    "tp_size": INTEGER,
    "pp_size": INTEGER,
    "ep_size": INTEGER,
    "max_batch_size": INTEGER,
    "max_num_tokens": INTEGER,
    "max_seq_len": INTEGER,
    "extra_llm_api_options": re.escape(OPTIONS_FILES["mixed"]),
}
"""Read in tensorrt_llm/commands/serve.py of 1.x (click.option)."""
TRTLLM_FILE: dict[str, set[str]] = {
    "kv_cache_config": {
        *("enable_block_reuse", "enable_partial_reuse", "copy_on_partial_reuse"),
        *("free_gpu_memory_fraction", "tokens_per_block", "max_tokens", "dtype"),
    },
    "enable_chunked_prefill": set(),
    "dtype": set(),
    "enable_attention_dp": set(),
    "disable_overlap_scheduler": set(),
    "cuda_graph_config": set(),
    "scheduler_config": {"capacity_scheduler_policy"},
    "speculative_config": {"decoding_type", "num_nextn_predict_layers"},
}
"""Fields of tensorrt_llm/llmapi/llm_args.py of 1.x."""
FLAGS = {"vllm": VLLM, "sglang": SGLANG, "trtllm": TRTLLM}
STARTS = {
    "vllm": "vllm serve MODEL",
    "sglang": "python -m sglang.launch_server --model-path MODEL",
    "trtllm": "trtllm-serve MODEL",
}


def entry(model: str = "Qwen/Qwen3-30B-A3B", **engine: Any) -> dict[str, Any]:
    """A pool as manifests have it."""
    pool = Pool(load_model(model), device("h100"), Engine(max_model_len=8192, **engine))
    return Deployment((pool,)).pools[0].spec() | {"lockstep": pool.lockstep}


def flags_of(line: str) -> dict[str, str | None]:
    """Flag → its value, or None for a switch."""
    words = shlex.split(line)
    found: dict[str, str | None] = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = None if after.startswith("--") else after
    return found


def check(line: str, backend: str) -> None:
    """Every flag is documented, with a value of its form."""
    documented = FLAGS[backend]
    for flag, value in flags_of(line).items():
        name = flag.removeprefix("--")
        bare = name.removeprefix("no-") if documented.get(name.removeprefix("no-")) == EITHER else name
        assert bare in documented, flag
        if documented[bare] in (SWITCH, EITHER):
            assert value is None, (flag, value)
        else:
            assert value is not None and re.fullmatch(documented[bare], value), (flag, value)


settings = st.fixed_dictionaries(
    {"preset": st.sampled_from(["vllm-0.32", "vllm-0.10", "vllm-0.16", "sglang-0.5", "trtllm-1.0"])},
    optional={
        "tensor_parallel_size": st.sampled_from([1, 2, 4]),
        "pipeline_parallel_size": st.sampled_from([1, 2]),
        "data_parallel_size": st.sampled_from([1, 2]),
        "enable_expert_parallel": st.booleans(),
        "all2all_backend": st.sampled_from(["deepep_low_latency", "deepep_high_throughput", "deepep_auto"]),
        "enable_dbo": st.booleans(),
        "dbo_decode_token_threshold": st.just(64),
        "dbo_prefill_token_threshold": st.just(1024),
        "max_num_seqs": st.sampled_from([8, 256]),
        "max_num_batched_tokens": st.sampled_from([512, 8192]),
        "gpu_memory_utilization": st.just(0.8),
        "dtype": st.sampled_from(["auto", "float16"]),
        "kv_cache_dtype": st.sampled_from(["auto", "fp8", "fp8_e5m2"]),
        "quantization": st.just("fp8"),
        "enable_prefix_caching": st.booleans(),
        "enable_chunked_prefill": st.booleans(),
        "num_gpu_blocks_override": st.just(1000),
        "async_scheduling": st.booleans(),
        "enforce_eager": st.booleans(),
        "watermark": st.just(0.01),
        "scheduler_reserve_full_isl": st.booleans(),
        "scheduling_policy": st.just("priority"),
        "long_prefill_token_threshold": st.just(256),
        "prefill_schedule_interval": st.just(4),
    },
)


@given(settings, st.sampled_from(["Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"]))
def test_every_flag_is_a_documented_one(engine: dict[str, Any], model: str) -> None:
    try:
        pool = entry(model, **engine)
    except InputError:
        return
    line = serve_line(pool | {"model": "MODEL"})
    backend = engine["preset"].partition("-")[0]
    if line.startswith("#"):
        assert backend == "trtllm"
        return
    file, command = line.rsplit("\n", 1) if "\n" in line else ("", line)
    buffers = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK="
    assert re.sub(f"^{buffers}[0-9]+ ", "", command).startswith(STARTS[backend])
    check(command, backend)
    if backend == "trtllm":
        check_file(file)


def check_file(text: str) -> None:
    """Every field is documented."""
    first, *body, last = text.splitlines()
    assert (first, last) == (f"cat > {OPTIONS_FILES['mixed']} <<'END'", "END")
    document = yaml.safe_load("\n".join(body))
    for name, value in document.items():
        assert name in TRTLLM_FILE
        assert set(value if isinstance(value, dict) else ()) <= TRTLLM_FILE[name]


def test_vllm() -> None:
    engine = {
        "tensor_parallel_size": 2,
        "dtype": "auto",
        "max_num_seqs": 256,
        "async_scheduling": False,
        "quantization": None,
    }
    line = serve_line({"model": "a model; rm -rf", "engine": {**engine, "enforce_eager": True}})
    assert line == (
        "vllm serve 'a model; rm -rf' --tensor-parallel-size 2 --max-num-seqs 256 --no-async-scheduling --enforce-eager"
    )
    drafts = flags_of(serve_line({"engine": {"num_speculative_tokens": 2, "scheduler_reserve_full_isl": False}}))
    assert drafts["--speculative-config"] == '{"method": "mtp", "num_speculative_tokens": 2}'
    assert "--no-scheduler-reserve-full-isl" in drafts


def test_vllm_is_told_of_host_memory_behind_its_cache() -> None:
    host = Pool(load_model("Qwen/Qwen3-8B"), device("h100"), stores=(Store(capacity=2.0**40),)).spec()
    assert flags_of(serve_line(host))["--kv-offloading-size"] == "1024"
    slow = replace(Store(capacity=2.0**40), chunk_tokens=256)  # for LMCache, which has a file of its own
    assert "kv-offloading" not in serve_line(host | {"stores": [slow.spec()]})


@pytest.mark.parametrize("more", [{}, {"chunk_tokens": 64}, {"write_after": 2}, {"chunk_tokens": 32, "write_after": 3}])
def test_a_store_in_host_memory_comes_back(more: dict[str, Any]) -> None:
    store = Store(capacity=64e9, **more)
    pool = Pool(load_model("Qwen/Qwen3-8B"), device("h100"), stores=(store,)).spec()
    read = scenario_of(read_pasted([serve_line(pool)], None)).deployment()
    assert read.pools[0].stores == (store,)


def test_sglang_counts_what_its_ranks_share_together() -> None:
    engine: dict[str, Any] = {
        "preset": "sglang-0.5",
        "tensor_parallel_size": 2,
        "data_parallel_size": 4,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "kv_cache_dtype": "fp8",
    }
    shared, apart = flags_of(serve_line(entry(**engine))), flags_of(serve_line(entry("Qwen/Qwen3-8B", **engine)))
    names = ("--tp-size", "--dp-size", "--chunked-prefill-size", "--max-running-requests", "--kv-cache-dtype")
    assert [shared[name] for name in names] == ["8", "4", "8192", "256", "fp8_e4m3"]
    assert [apart[name] for name in names] == ["2", "4", "2048", "64", "fp8_e4m3"]
    assert "--enable-dp-attention" in shared and "--enable-dp-attention" not in apart
    whole = flags_of(serve_line(entry(preset="sglang-0.5", enable_chunked_prefill=False)))
    assert whole["--chunked-prefill-size"] == "-1"


def test_two_micro_batches_by_the_names_of_each_engine() -> None:
    engine: dict[str, Any] = {"data_parallel_size": 8, "enable_expert_parallel": True, "enable_dbo": True}
    line = flags_of(serve_line(entry(all2all_backend="deepep_low_latency", dbo_decode_token_threshold=64, **engine)))
    assert line["--all2all-backend"] == "deepep_low_latency"
    assert line["--dbo-decode-token-threshold"] == "64"
    assert "--enable-dbo" in line and "--dbo-prefill-token-threshold" not in line
    for backend, mode in (("low_latency", "low_latency"), ("high_throughput", "normal"), ("auto", "auto")):
        line = flags_of(serve_line(entry(preset="sglang-0.5", all2all_backend=f"deepep_{backend}", **engine)))
        assert (line["--moe-a2a-backend"], line["--deepep-mode"]) == ("deepep", mode)
        assert "--enable-two-batch-overlap" in line
    for requests, begins in ((64, "python -m"), (256, "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=256 python -m")):
        sglang = {"preset": "sglang-0.5", "all2all_backend": "deepep_auto", "max_num_seqs": requests, **engine}
        assert serve_line(entry(**sglang)).startswith(begins)
    plain = serve_line(entry(data_parallel_size=2, enable_expert_parallel=True))
    assert "all2all" not in plain and "dbo" not in plain


def test_trtllm_has_a_file_beside_its_flags() -> None:
    line = serve_line(entry("Qwen/Qwen3-8B", preset="trtllm-1.0", kv_cache_dtype="fp8", max_num_batched_tokens=8192))
    text, command = line.rsplit("\n", 1)
    assert flags_of(command)["--max_num_tokens"] == "8192"
    document = yaml.safe_load("\n".join(text.splitlines()[1:-1]))
    assert document["kv_cache_config"] == {
        "enable_block_reuse": False,
        "free_gpu_memory_fraction": 0.9,
        "tokens_per_block": 32,
        "dtype": "fp8",
    }
    evicting = serve_line(entry("Qwen/Qwen3-8B", preset="trtllm-1.0", scheduler="trtllm-max-utilization"))
    assert "capacity_scheduler_policy: MAX_UTILIZATION" in evicting


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ({"scheduler": "orca"}, "vllm-0.32 has no scheduler 'orca'"),
        ({"scheduler": "vllm-0.8-v0"}, "vllm-0.32 has no scheduler 'vllm-0.8-v0'"),
        ({"preset": "trtllm-1.0", "data_parallel_size": 2, "tensor_parallel_size": 2}, "no 2 ranks of attention"),
        ({"preset": "trtllm-1.0", "data_parallel_size": 2}, "enable_attention_dp: true"),
    ],
)
def test_what_cannot_be_started_says_so(engine: dict[str, Any], text: str) -> None:
    assert text in serve_line(entry(**engine))


def test_ranks_without_experts_are_servers_of_their_own() -> None:
    assert "start 2 servers of 1 GPUs each" in serve_line(
        entry("Qwen/Qwen3-8B", preset="trtllm-1.0", data_parallel_size=2)
    )


SOURCES = {"vllm": "engine/arg_utils.py", "sglang": "srt/server_args.py", "tensorrt_llm": "commands/serve.py"}


@pytest.mark.long
@pytest.mark.parametrize("package", SOURCES)
def test_the_documented_flags_are_those_of_the_package(package: str) -> None:
    """Where the engine is installed, its own source names every flag; nothing of it is imported."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    source = (Path(next(iter(spec.submodule_search_locations))) / SOURCES[package]).read_text(encoding="utf-8")
    for name in FLAGS[package.replace("tensorrt_llm", "trtllm")]:
        assert f'"--{name}"' in source, name


def apart(backend: str, role: str, **handover: Any) -> str:
    """The command of a server of one side."""
    presets = {"vllm": "vllm-0.32", "sglang": "sglang-0.5", "trtllm": "trtllm-1.0"}
    pool = Pool(load_model("Llama-3.1-8B"), device("h100"), Engine(preset=presets[backend]), role=role)
    return serve_line(pool.spec(), Handover(**{"transfer": "pull", **handover}).spec())


def transfer_config(line: str) -> Any:
    words = shlex.split(line)
    return json.loads(words[words.index("--kv-transfer-config") + 1])


def test_vllm_hands_over_by_a_connector() -> None:
    assert transfer_config(apart("vllm", "prefill", lease=30.0)) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
    }
    assert transfer_config(apart("vllm", "decode", lease=60.0)) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"kv_lease_duration": 60.0},
    }
    assert transfer_config(apart("vllm", "prefill", transfer="push"))["kv_connector"] == "NixlPushConnector"
    mooncake = HANDOVERS["vllm-0.32-mooncake"].spec()
    pool = Pool(load_model("Llama-3.1-8B"), device("h100"), role="decode").spec()
    assert transfer_config(serve_line(pool, mooncake))["kv_connector"] == "MooncakeConnector"
    assert "--kv-transfer-config" not in serve_line(pool | {"role": "mixed"}, mooncake)


def test_sglang_is_told_its_side() -> None:
    for role in ("prefill", "decode"):
        assert f" --disaggregation-mode {role}" in apart("sglang", role, reserved_decode_tokens=512)
    assert "--num-reserved-decode-tokens" not in apart("sglang", "decode", reserved_decode_tokens=512)
    assert "--num-reserved-decode-tokens 64" in apart("sglang", "decode", reserved_decode_tokens=64)
    assert "--disaggregation-decode-polling-interval 8" in apart("sglang", "decode", polling_interval=8)
    assert "polling" not in apart("sglang", "prefill", polling_interval=8)


def test_tensorrt_llm_is_told_in_its_options() -> None:
    for role, name, overlap in (("prefill", "context.yaml", True), ("decode", "generation.yaml", None)):
        first, *body, last, command = apart("trtllm", role).splitlines()
        assert (first, last) == (f"cat > {name} <<'END'", "END")
        options = yaml.safe_load("\n".join(body))
        assert options["cache_transceiver_config"] == {"backend": "DEFAULT"}
        assert options.get("disable_overlap_scheduler") is overlap
        assert command.endswith(f"--extra_llm_api_options {name}")


def test_every_flag_of_sglang_by_hand() -> None:
    """Five drafts and the token before them are checked at once; 1,000 blocks of 16 are 16,000 tokens."""
    engine = {
        "preset": "sglang-0.5", "tensor_parallel_size": 2, "pipeline_parallel_size": 2, "max_model_len": 4096,
        "max_num_seqs": 64, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.8, "block_size": 16,
        "num_gpu_blocks_override": 1000, "dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "quantization": "fp8",
        "num_speculative_tokens": 5, "enable_prefix_caching": False, "async_scheduling": False, "enforce_eager": True,
    }  # fmt: skip
    assert serve_line({"model": "M", "engine": engine}) == (
        "python -m sglang.launch_server --model-path M --tp-size 2 --pp-size 2 --context-length 4096 "
        "--max-running-requests 64 --chunked-prefill-size 2048 --mem-fraction-static 0.8 --page-size 16 "
        "--max-total-tokens 16000 --dtype bfloat16 --quantization fp8 --speculative-algorithm NEXTN "
        "--speculative-num-steps 5 --speculative-eagle-topk 1 --speculative-num-draft-tokens 6 --disable-radix-cache "
        "--disable-cuda-graph"
    )
    bare = serve_line({"model": "M", "engine": {"preset": "sglang-0.5", "async_scheduling": False}})
    assert bare == "python -m sglang.launch_server --model-path M --tp-size 1 --disable-overlap-schedule"
    blocks = serve_line({"model": "M", "engine": {"preset": "sglang-0.5", "num_gpu_blocks_override": 1000}})
    assert blocks.endswith("--max-total-tokens 1000")


@pytest.mark.parametrize(
    ("seqs", "drafts", "mode", "buffers"),
    [
        (128, None, "auto", None), (129, None, "auto", 129), (64, 1, "low_latency", None), (65, 1, "low_latency", 130),
        (2048, None, "auto", 1024), (2048, None, "high_throughput", None),
    ],
)  # fmt: skip
def test_buffers_of_deepep_hold_a_token_of_each_request_and_draft(
    seqs: int, drafts: int | None, mode: str, buffers: int | None
) -> None:
    """128 tokens unless more are wanted, and at most 1,024; those of high throughput have no such limit."""
    engine = {"preset": "sglang-0.5", "max_num_seqs": seqs, "num_speculative_tokens": drafts}
    line = serve_line({"model": "M", "engine": engine | {"all2all_backend": f"deepep_{mode}"}})
    begins = f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK={buffers} " if buffers else ""
    assert line.startswith(begins + "python -m sglang.launch_server")


def test_every_setting_of_trtllm_by_hand() -> None:
    engine = {
        "preset": "trtllm-1.0", "data_parallel_size": 4, "pipeline_parallel_size": 1, "enable_expert_parallel": True,
        "max_num_seqs": 32, "max_num_batched_tokens": 4096, "max_model_len": 2048, "gpu_memory_utilization": 0.8,
        "block_size": 32, "num_gpu_blocks_override": 10, "kv_cache_dtype": "fp8_e4m3", "enable_prefix_caching": True,
        "enable_chunked_prefill": True, "dtype": "float16", "async_scheduling": False, "enforce_eager": True,
        "scheduler": "trtllm-max-utilization", "num_speculative_tokens": 3,
    }  # fmt: skip
    assert serve_line({"model": "M", "engine": engine, "lockstep": True}) == (
        "cat > trtllm.yaml <<'END'\n"
        "kv_cache_config:\n"
        "  enable_block_reuse: true\n"
        "  free_gpu_memory_fraction: 0.8\n"
        "  tokens_per_block: 32\n"
        "  max_tokens: 320\n"
        '  dtype: "fp8"\n'
        "enable_chunked_prefill: true\n"
        "dtype: float16\n"
        "enable_attention_dp: true\n"
        "disable_overlap_scheduler: true\n"
        "cuda_graph_config: null\n"
        "scheduler_config:\n  capacity_scheduler_policy: MAX_UTILIZATION\n"
        "speculative_config:\n  decoding_type: MTP\n  num_nextn_predict_layers: 3\n"
        "END\n"
        "trtllm-serve M --tp_size 4 --ep_size 4 --max_batch_size 32 --max_num_tokens 4096 --max_seq_len 2048 "
        "--extra_llm_api_options trtllm.yaml"
    )
    divided = serve_line({"model": "M", "engine": engine | {"shared_head": True}, "lockstep": True})
    assert "\nenable_lm_head_tp_in_adp: true\n" in divided
    several = {"preset": "trtllm-1.0", "data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert serve_line({"engine": several}).endswith("start 2 servers of 4 GPUs each, behind a router")
    assert serve_line({"engine": several, "lockstep": True}).endswith("no 2 ranks of attention with 2 GPUs each")
    stages = {"preset": "trtllm-1.0", "pipeline_parallel_size": 2, "async_scheduling": False}
    line = serve_line({"model": "M", "engine": stages})
    assert "--pp_size 2" in line and "disable_overlap_scheduler" not in line


@pytest.mark.parametrize(
    ("name", "silent", "said", "words"),
    [
        ("pipeline_parallel_size", 1, 2, "--pipeline-parallel-size 2"),
        ("data_parallel_size", 1, 2, "--data-parallel-size 2"),
        ("enable_dbo", False, True, "--enable-dbo"),
        ("dtype", "auto", "float16", "--dtype float16"),
        ("kv_cache_dtype", "auto", "fp8", "--kv-cache-dtype fp8"),
        ("enable_expert_parallel", False, True, "--enable-expert-parallel"),
        ("enable_prefix_caching", True, False, "--no-enable-prefix-caching"),
        ("enable_chunked_prefill", None, True, "--enable-chunked-prefill"),
        ("enforce_eager", False, True, "--enforce-eager"),
        ("scheduler_reserve_full_isl", True, False, "--no-scheduler-reserve-full-isl"),
    ],
)
def test_what_vllm_does_by_itself_needs_no_flag(name: str, silent: Any, said: Any, words: str) -> None:
    assert serve_line({"model": "M", "engine": {name: silent}}) == "vllm serve M"
    assert serve_line({"model": "M", "engine": {name: said}}) == f"vllm serve M {words}"
