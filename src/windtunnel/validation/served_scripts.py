"""What InferenceX's scripts pass to SGLang and TensorRT-LLM (``benchmarks/`` of its repository), by the names that
``launch`` has for each engine's flags.

Scripts change while rows are measured: where a row's numbers tell which one served it, SCRIPTS has both.
"""

from math import inf
from typing import Any

from windtunnel.dataclass import dataclass

Flags = dict[str, Any]

FP8_KV: Flags = {"kv-cache-dtype": "fp8_e4m3"}
TRT_FP8_KV: Flags = {"kv-cache-config.dtype": "fp8"}
MEMORY = "kv-cache-config.free-gpu-memory-fraction"


@dataclass(frozen=True)
class Script:
    """One script: which rows it served, and how."""

    backend: str
    model: str
    """Part of the model's name."""
    precision: str
    """The precision of its weights; empty: any."""
    system: str
    """Beginning of the system's name."""
    flags: Flags
    """``clients`` stands for the row's concurrency, ``prompt alone`` for one prompt and a token for every client,
    ``prompt`` for as much and at least 8,192, ``length`` for the longest request."""
    polls: tuple[int, int] = (1, 1)
    """Decode steps between two looks at new requests, below 16 clients and from 16 on (SGLang's
    ``scheduler_recv_interval``)."""
    version: str = ""
    """Beginning of the engine's version; empty: any."""
    gpus: int = 0
    """Tensor parallel size; 0: any."""
    rounds: int = 10
    """Requests for each client."""
    drafts: int = 0
    """Tokens of multi-token prediction."""
    expert_parallel: bool | None = None
    """Whether the row has it; None: either."""
    balance: int = 0
    """``timeout_iters`` of TensorRT-LLM's attention data parallelism, see ``Policy.balance_timeout``."""
    batch_wait: int = 0
    """``batch_wait_timeout_iters``: steps that a prompt waits for others to share its step (``_waiting_requests``, same
    file); set for 1,024 tokens in and out on fewer than 8 GPUs."""
    shown: int = 1
    """Tokens that the first event needs (SGLang before it sent the first token at once)."""
    alone: bool = False
    """Only rows whose measurement no other name of the model has."""


def _sglang(
    model: str, precision: str, system: str, memory: float, chunk: int, seqs: object, stream_interval: int, **more: Any
) -> Script:
    kv = {} if precision == "bf16" or (system.startswith("h200") and "Qwen" not in model) else FP8_KV
    flags: Flags = {"max-running-requests": seqs, "chunked-prefill-size": chunk, "mem-fraction-static": memory, **kv}
    flags |= {"max-prefill-tokens": max(chunk, 16384), "disable-radix-cache": True, "stream-interval": stream_interval}
    return Script("sglang", model, precision, system, flags, **more)


PREDICTING: Flags = {"version": "0.5.9", "gpus": 4, "expert_parallel": False, "drafts": 3}
"""Rows of Qwen3.5 that were served with multi-token prediction: half the time per token of their twins."""
PREDICTING_ALONE: Flags = {"version": "0.5.9", "gpus": 8, "drafts": 2, "alone": True}
"""Rows of DeepSeek-R1 with it (dsr1_fp8_b200_mtp.sh): those without stand under V3 and R1, as the same measurement; the
others have up to 512 clients, and 0.6 to 0.9 of the time per token where V3's have as many."""

SCRIPTS = (
    _sglang("DeepSeek-R1", "fp8", "b200", 0.82, 16384, 512, 30, polls=(10, 30), **PREDICTING_ALONE),
    _sglang("DeepSeek", "fp8", "b", 0.95, 8192, 32, 30, polls=(10, 10), gpus=4),
    _sglang("DeepSeek", "fp8", "b", 0.82, 32768, "clients, at least 128", 30, polls=(10, 30)),
    _sglang("DeepSeek", "fp4", "b", 0.85, 16384, 256, 30, polls=(10, 30), version="0.5.0", shown=30),
    _sglang("DeepSeek", "fp4", "b", 0.85, 16384, 256, 10, polls=(10, 30)),
    _sglang("DeepSeek", "fp8", "h200", 0.82, 32768, 256, 10),
    _sglang("Qwen3.5", "bf16", "b", 0.82, 32768, 128, 30, polls=(10, 30)),
    _sglang("Qwen3.5", "fp4", "b200", 0.85, 32768, "clients, at least 128", 30, polls=(30, 30)),
    _sglang("Qwen3.5", "fp4", "b300", 0.8, 32768, 128, 30, polls=(10, 30)),
    _sglang("Qwen3.5", "fp8", "b", 0.8, 32768, "clients, at least 128", 30, polls=(10, 30), **PREDICTING),
    _sglang("Qwen3.5", "fp8", "b300", 0.8, 16384, "clients", 50, polls=(10, 10), version="0.5.10"),
    _sglang("Qwen3.5", "fp8", "b", 0.82, 32768, 128, 30, polls=(10, 30)),
    _sglang("Qwen3.5", "fp8", "h200", 0.8, 16384, 128, 50),
    _sglang("GLM-5", "", "b", 0.85, 32768, "clients", 30),
    Script("sglang", "GLM-5", "", "h200", {"mem-fraction-static": 0.85}, rounds=5),
    Script(
        *("trtllm", "DeepSeek", "", "h200"),
        {"max-num-tokens": "prompt alone", "max-batch-size": 512, **TRT_FP8_KV, MEMORY: 0.75, "stream-interval": 10},
        balance=60,
    ),
    Script(
        *("trtllm", "DeepSeek", "", "b200"),
        {"max-num-tokens": "prompt alone", "max-batch-size": 512, **TRT_FP8_KV, MEMORY: 0.8, "stream-interval": 10},
        balance=60,
        version="1.1.0",
    ),
    Script(
        *("trtllm", "DeepSeek", "", ""),
        {"max-num-tokens": "prompt", "max-batch-size": 512, **TRT_FP8_KV, MEMORY: 0.8, "stream-interval": 10},
        balance=60,
    ),
    Script(
        *("trtllm", "Llama-3.1-70B", "", ""),
        {"max-num-tokens": "length", "max-batch-size": 1024, **TRT_FP8_KV, "stream-interval": 10},
        batch_wait=20,
    ),
    Script(
        *("trtllm", "gpt-oss", "", "b"),
        {"max-num-tokens": 20000, "max-batch-size": 512, **TRT_FP8_KV, MEMORY: 0.85, "stream-interval": 20},
        balance=50,
    ),
    Script(
        *("trtllm", "gpt-oss", "", "h"),
        {"max-num-tokens": 20000, "max-batch-size": "clients", MEMORY: 0.85, "stream-interval": 20},
        balance=50,
    ),
)
"""The first that matches served a row."""
NO_SCRIPT = Script("", "", "", "", {})


PREDICTING_FLAGS: Flags = {"max-batch-size": "clients", "max-num-tokens": "one prompt"}
"""TensorRT-LLM with multi-token prediction (dsr1_fp8_b200_trt_mtp.sh and its like): a place for each client, and
(drafts + 1) · places + the prompt's tokens + 64, so that no two prompts share a step. A decode counts drafts + 1
tokens there and one here: ``one prompt`` stands for places + prompt + 64."""


SHORT, LONG_OUTPUT, LONG_PROMPT = (1024, 1024), (1024, 8192), (8192, 1024)
GRAPHS_SINCE = "1.2.0rc6"
"""Image of TensorRT-LLM since which the scripts of DeepSeek on B200 capture prompts."""

GRAPHS: dict[tuple[str, bool], dict[tuple[int, int], tuple[float, float]]] = {
    ("fp8", False): {SHORT: (64, inf), LONG_OUTPUT: (128, 255), LONG_PROMPT: (64, inf)},
    ("fp8", True): {SHORT: (5, inf), LONG_OUTPUT: (9, inf), LONG_PROMPT: (17, inf)},
    ("fp4", True): {SHORT: (32, 128), LONG_OUTPUT: (64, 64)},
}
"""Precision and multi-token prediction → prompt and output tokens → the clients from and up to which prompts were
captured by piecewise graphs: dsr1_*_b200_trt*.sh of February 2026."""
CAPTURED: Flags = {"torch-compile-config.enable-piecewise-cuda-graph": True}
GATHERED: Flags = {"batch-wait-timeout-iters": 40, "batch-wait-max-tokens-ratio": 0.8}


def prompt_graphs(
    precision: str, predicts: bool, lengths: tuple[int, int], clients: int, ranks: int, whole: bool
) -> Flags:
    """Flags of TensorRT-LLM's DeepSeek scripts since GRAPHS_SINCE about prompts: where they are captured, and where
    they wait for each other (``ranks`` of attention; ``whole``: eight GPUs with expert parallelism)."""
    if (precision, predicts) == ("fp4", False):
        return CAPTURED if whole and lengths == SHORT else {}
    least, most = GRAPHS.get((precision, predicts), {}).get(lengths, (inf, inf))
    if not least <= clients <= most or (predicts and ranks > 1 and (precision, clients) not in BY_RANKS):
        return {}
    return CAPTURED | (GATHERED if lengths == SHORT and not predicts else {})


BY_RANKS = {("fp4", 32), ("fp4", 64)}
"""Precision and clients where prompts were captured with attention data parallelism and multi-token prediction."""


def script(
    backend: str, model: str, precision: str, system: str, version: str, gpus: int, expert_parallel: bool, shared: bool
) -> Script:
    """The script that served a row of InferenceX; one without flags if none is known."""
    for each in SCRIPTS:
        named = each.backend == backend and each.model in model and each.precision in ("", precision)
        built = system.startswith(each.system) and version.startswith(each.version) and each.gpus in (0, gpus)
        if named and built and each.expert_parallel in (None, expert_parallel) and not (each.alone and shared):
            return each
    return NO_SCRIPT


RECORDED = "2025-12"
"""Month from which rows of TensorRT-LLM say how experts and attention were divided. Scripts before it chose by the load
and recorded neither, so that the columns hold ones: EARLY. Rows of gpt-oss on H200 that were measured in both months
take the same time per token within 2 %."""

Loads = dict[tuple[int, int], tuple[float, float]]
"""Prompt and output tokens → the most clients without expert parallelism, and without attention data parallelism."""

ALWAYS = -1

EARLY: tuple[tuple[str, str, str, int, Loads], ...] = (
    ("gpt-oss", "", "h200", 0, dict.fromkeys((SHORT, LONG_OUTPUT, LONG_PROMPT), (ALWAYS, inf))),
    ("DeepSeek", "fp8", "h200", 0, {SHORT: (ALWAYS, 64), LONG_OUTPUT: (ALWAYS, 64), LONG_PROMPT: (ALWAYS, 32)}),
    ("DeepSeek", "fp8", "b200", 0, {SHORT: (ALWAYS, 32), LONG_OUTPUT: (ALWAYS, 64), LONG_PROMPT: (ALWAYS, 64)}),
    ("DeepSeek", "fp4", "b200", 4, {SHORT: (32, 255), LONG_OUTPUT: (32, 255), LONG_PROMPT: (32, 32)}),
    ("DeepSeek", "fp4", "b200", 8, {SHORT: (8, 255), LONG_OUTPUT: (16, 255), LONG_PROMPT: (32, 32)}),
)
"""Model, precision, system, GPUs (0: any) and loads, of InferenceX's scripts as they stood in November 2025
(dsr1_fp8_h200_trt_slurm.sh, dsr1_fp8_b200_trt_slurm.sh, dsr1_fp4_b200_trt_slurm.sh, gptoss_fp4_h200_trt_slurm.sh)."""


def early_layout(
    model: str, precision: str, system: str, gpus: int, lengths: tuple[int, int], clients: int
) -> tuple[int, int, bool] | None:
    """(tensor parallel size, data parallel size, expert parallel) of a row that was measured before RECORDED; None
    where no script of that time is known."""
    for name, bits, place, count, loads in EARLY:
        if name in model and bits in ("", precision) and system.startswith(place) and count in (0, gpus):
            if lengths not in loads:
                return None
            experts, attention = loads[lengths]
            return (1, gpus, True) if clients > attention else (gpus, 1, clients > experts)
    return None
