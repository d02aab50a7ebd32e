"""Served points of ``silicon_sample.csv`` and how its columns are read as a server's settings.

The file records neither server flags nor always the version. Three things are therefore taken from elsewhere:

- **Flags.** Most rows were served by InferenceX (SemiAnalysis), whose scripts are public (``benchmarks/`` of its
  repository): FLAGS holds what they pass. Rows from other sources get the engine's defaults.
- **Version.** The image tag in the source column where ``backend_version`` is empty or a nightly, else the release of
  the day of the measurement.
- **Parallelism.** ``attention_dp_size`` is empty in rows of the other sources: it is GPUs of the experts / tp there.
  Rows with dp > 1 and ep = tp·dp claim more GPUs than a node may have, and their times equal those of their twins with
  dp 1 and ep = tp within 1 % (MiniMax-M2.5 on H100, Kimi-K2.5 on B200): the script knew no data parallelism, so they
  are read as tensor parallelism tp with expert parallelism. Rows with moe_tp = moe_ep = g and tp·dp = g² (64 GPUs of
  an eight-GPU node) are read as g GPUs with expert parallelism for the same reason.
"""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from windtunnel.deployment import Engine, Pool
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.model import Quantization, load_model
from windtunnel.perf.database import find_systems
from windtunnel.validation.recording import nearest_preset

CHECKPOINTS = {
    ("MiniMaxAI/MiniMax-M2.5", "fp4"): "nvidia/MiniMax-M2.5-NVFP4",
    ("meta-llama/Llama-3.1-70B", "fp8"): "nvidia/Llama-3.1-70B-Instruct-FP8",
    ("moonshotai/Kimi-K2.5", "fp4"): "nvidia/Kimi-K2.5-NVFP4",
    ("Qwen/Qwen3-32B", "fp8"): "Qwen/Qwen3-32B-FP8",
    ("Qwen/Qwen3-32B", "fp4"): "nvidia/Qwen3-32B-NVFP4",
    ("deepseek-ai/DeepSeek-R1", "fp4"): "nvidia/DeepSeek-R1-NVFP4",
    ("deepseek-ai/DeepSeek-V3", "fp4"): "nvidia/DeepSeek-R1-NVFP4",
    ("Qwen/Qwen3.5-397B-A17B", "fp4"): "nvidia/Qwen3.5-397B-A17B-NVFP4",
    ("zhipuai/GLM-5", "fp8"): "zai-org/GLM-5-FP8",
    ("zhipuai/GLM-5", "fp4"): "nvidia/GLM-5-NVFP4",
}
"""(model_path, precision) → the checkpoint that was served, where the path does not name it."""

QUANTIZED = {
    ("meta-llama/Llama-3.1-70B", "fp4"): "nvfp4",
    ("Qwen/Qwen3.5-397B-A17B", "fp8"): "fp8_block",
}
"""Quantised checkpoints that the catalogue lacks: the 16-bit model with its weights in this format."""

PREDICTING = ("1.2.0rc6.post3", "1.1.0rc2.post2")
"""Images of TensorRT-LLM with which the scripts served DeepSeek-R1 with multi-token prediction; the same rows without
it stand under DeepSeek-V3 or other images (TPOT 1.5 to 2 times as long at equal settings)."""

ACCEPTED = {1: 1.7, 3: 2.3}
"""Tokens a step, by drafts: an assumption, below the 85 to 90 % of DeepSeek's own report (arXiv 2412.19437, 5.4.3)
since prompts are random."""

CASTING = {("openai/gpt-oss-120b", "b200_sxm")}
"""Served with 8-bit activations beside mxfp4 weights (VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1)."""

FP8_KV = {"kv_cache_dtype": "fp8"}
MEM = {share: {"gpu_memory_utilization": share} for share in (0.8, 0.82, 0.85)}

FLAGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-70B": {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 8192, "async_scheduling": True},
    "openai/gpt-oss-120b": {"max_num_batched_tokens": 8192, "async_scheduling": True},
    "moonshotai/Kimi-K2.5": {"max_num_seqs": "clients"},
}
"""What InferenceX's scripts pass to ``vllm serve``, by model; ``clients`` stands for the row's concurrency."""

FLAGS_BY_SYSTEM: dict[tuple[str, str], dict[str, Any]] = {
    ("meta-llama/Llama-3.1-70B", "h100_sxm"): {"max_num_seqs": "clients"},
    ("meta-llama/Llama-3.1-70B", "h200_sxm"): {"max_num_seqs": "clients"},
    ("meta-llama/Llama-3.1-70B", "b200_sxm"): {"max_num_seqs": 512},
    ("openai/gpt-oss-120b", "h100_sxm"): {"max_num_seqs": "clients"},
    ("openai/gpt-oss-120b", "h200_sxm"): {"max_num_seqs": "clients"},
    ("openai/gpt-oss-120b", "b200_sxm"): {"max_num_seqs": 512, "kv_cache_dtype": "fp8"},
    ("MiniMaxAI/MiniMax-M2.5", "h100_sxm"): {"max_num_seqs": 256},
    ("MiniMaxAI/MiniMax-M2.5", "b200_sxm"): {"gpu_memory_utilization": 0.95, "block_size": 32},
    ("MiniMaxAI/MiniMax-M2.5", "b300_sxm"): {"kv_cache_dtype": "fp8", "block_size": 32},
}
COLUMNS = (
    *("id", "silicon_data_source", "backend", "backend_version", "model_path", "system", "precision", "mode", "isl"),
    *("osl", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms"),
)
"""The columns that are read."""


SERVED: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    ("sglang", "DeepSeek", "fp8", "b", {"max_num_seqs": 128, "max_num_batched_tokens": 32768, **FP8_KV, **MEM[0.82]}),
    ("sglang", "DeepSeek", "fp4", "", {"max_num_seqs": 256, "max_num_batched_tokens": 16384, **FP8_KV, **MEM[0.85]}),
    ("sglang", "DeepSeek", "fp8", "h200", {"max_num_seqs": 256, "max_num_batched_tokens": 32768, **MEM[0.82]}),
    ("sglang", "Qwen3.5", "bf16", "", {"max_num_seqs": 128, "max_num_batched_tokens": 32768, **MEM[0.82]}),
    ("sglang", "Qwen3.5", "fp8", "b200", {"max_num_seqs": 128, "max_num_batched_tokens": 32768, **FP8_KV, **MEM[0.82]}),
    ("sglang", "Qwen3.5", "", "", {"max_num_seqs": 128, "max_num_batched_tokens": 16384, **FP8_KV, **MEM[0.8]}),
    ("sglang", "GLM-5", "", "", {"max_num_seqs": "clients", "max_num_batched_tokens": 32768, **FP8_KV, **MEM[0.85]}),
    ("trtllm", "DeepSeek", "", "", {"max_num_batched_tokens": "prompt", "max_num_seqs": 512, **FP8_KV, **MEM[0.8]}),
    ("trtllm", "Llama-3.1-70B", "", "b", {"max_num_batched_tokens": 16384, "max_num_seqs": 1024, **FP8_KV}),
    ("trtllm", "Llama-3.1-70B", "", "h", {"max_num_batched_tokens": "prompt", "max_num_seqs": 1024, **FP8_KV}),
    ("trtllm", "gpt-oss", "", "b", {"max_num_batched_tokens": 20000, "max_num_seqs": 512, **FP8_KV, **MEM[0.85]}),
    ("trtllm", "gpt-oss", "", "h", {"max_num_batched_tokens": 20000, "max_num_seqs": "clients", **MEM[0.85]}),
)
"""What the same scripts pass to SGLang and TensorRT-LLM, under vLLM's names: engine, part of the model's name,
precision, beginning of the system's name. ``prompt`` stands for one prompt and a token for every client, at least
8,192."""
SPARE_TOKENS = 200
"""``max_model_len`` beyond prompt and output, as the same scripts have it."""

RELEASES = (("2025-07", "0.10.0"), ("2025-12", "0.12.0"), ("2026-02", "0.16.0"), ("2026-04", "0.19.0"))
"""Month from which a version of vLLM that a preset stands for was out."""


@dataclass(frozen=True)
class Point:
    """One row: what served whom how fast (seconds)."""

    id: str
    mode: str
    """``agg`` or ``disagg``."""
    backend: str
    version: str
    model_path: str
    precision: str
    """Empty: 16 bits."""
    system: str
    isl: int
    osl: int
    concurrency: int
    """Clients; 0 where the row does not say."""
    tp: int
    dp: int
    expert_parallel: bool
    ttft: float
    tpot: float
    scripted: bool = True
    """Served by InferenceX's scripts."""

    @property
    def poll_steps(self) -> int:
        """Decode steps between two looks at new requests (SGLang's ``scheduler_recv_interval``): the scripts for
        DeepSeek and Qwen3.5 on Blackwell set 10, and 30 from 16 clients on."""
        polls = self.backend == "sglang" and self.scripted and self.system.startswith("b")
        if not polls or not any(name in self.model_path for name in ("DeepSeek", "Qwen3.5")):
            return 1
        return 30 if self.concurrency >= 16 and self.system == "b200_sxm" else 10

    def pool(self) -> Pool:
        """What is simulated. Raises InputError for what cannot be."""
        if self.mode != "agg":
            raise InputError("separate prefill and decode pools are not simulated yet")
        if not (self.ttft > 0 and self.tpot > 0):
            raise InputError("the row holds no latencies")
        if not self.concurrency:
            raise InputError("the row does not say how many clients there were")
        name = CHECKPOINTS.get((self.model_path, self.precision), self.model_path)
        model = load_model(name)
        if method := QUANTIZED.get((self.model_path, self.precision)):
            model = model.with_quantization(Quantization(method))
        if (self.model_path, self.system) in CASTING and model.quantization is not None:
            model = model.with_quantization(replace(model.quantization, weight_only=False))
        quantization = "fp8" if self.precision == "fp8" and model.quantization is None else None
        engine = Engine(
            preset=nearest_preset(self.backend, self.version),
            tensor_parallel_size=self.tp,
            data_parallel_size=self.dp,
            enable_expert_parallel=self.expert_parallel,
            max_model_len=min(self.isl + self.osl + SPARE_TOKENS, model.max_position_embeddings),
            quantization=quantization,
            **self._speculation(),
            **self._flags(),
        )
        return Pool(model, device(self.system), engine)

    def _speculation(self) -> dict[str, Any]:
        """Multi-token prediction: with 3 drafts, with 1 under attention data parallelism (the same scripts)."""
        served = self.backend == "trtllm" and self.model_path == "deepseek-ai/DeepSeek-R1"
        if not (served and self.version in PREDICTING):
            return {}
        drafts = 1 if self.dp > 1 else 3
        return {"num_speculative_tokens": drafts, "acceptance_length": ACCEPTED[drafts]}

    def _flags(self) -> dict[str, Any]:
        if self.backend == "vllm":
            flags = FLAGS.get(self.model_path, {}) | FLAGS_BY_SYSTEM.get((self.model_path, self.system), {})
        else:
            flags = next((flags for *where, flags in SERVED if self._is(*where)), {})
        stands_for = {
            "clients": self.concurrency,
            "prompt": max(8192, -(-(self.isl + self.concurrency + 64) // 64) * 64),
        }
        chosen = {name: stands_for.get(value, value) for name, value in flags.items()}
        seqs = chosen.get("max_num_seqs", 0)
        return chosen | ({"max_num_seqs": max(1, seqs // self.dp)} if self.backend != "vllm" and seqs else {})

    def _is(self, backend: str, model: str, precision: str, system: str) -> bool:
        return (
            self.scripted
            and self.backend == backend
            and model in self.model_path
            and precision in ("", self.precision)
            and self.system.startswith(system)
        )


def find_file() -> Path:
    """The file of the kernel database's package, which is located and never imported. Raises InputError without it."""
    systems = find_systems()
    if systems is None or not (systems / "silicon_sample.csv").is_file():
        raise InputError("silicon_sample.csv: not found; install aiconfigurator-core")
    return systems / "silicon_sample.csv"


def read_points(path: Path | None = None) -> list[Point]:
    """Every row of the file, the package's unless another is given. Raises InputError naming what is wrong."""
    path = path or find_file()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})") from error
    if missing := [name for name in COLUMNS if not rows or name not in rows[0]]:
        raise InputError(f"{path}: no column {', '.join(missing)}: it must be like silicon_sample.csv")
    points = []
    for number, row in enumerate(rows, 2):
        try:
            points.append(_point(row))
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}:{number}: {error}") from error
    return points


def _point(row: Mapping[str, str]) -> Point:
    clients = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    tp, dp, expert_parallel = parallelism(row)
    return Point(
        id=row["id"],
        mode=row["mode"],
        backend=row["backend"],
        version=version(row),
        model_path=row["model_path"],
        precision=row["precision"],
        system=row["system"],
        isl=int(row["isl"]),
        osl=int(row["osl"]),
        concurrency=int(clients[1]) if clients else 0,
        tp=tp,
        dp=dp,
        expert_parallel=expert_parallel,
        ttft=float(row["silicon_ttft_ms"] or "nan") * 1e-3,
        tpot=float(row["silicon_tpot_ms"] or "nan") * 1e-3,
        scripted="auto-gap-analysis" not in row["silicon_data_source"],
    )


def parallelism(row: Mapping[str, str]) -> tuple[int, int, bool]:
    """(tensor parallel size, data parallel size, expert parallel) of a row; see the top of this file."""
    tp, dp = _size(row["tp_size"]), _size(row["attention_dp_size"])
    moe_tp, moe_ep = _size(row["moe_tp_size"]), _size(row["moe_ep_size"])
    expert_parallel = moe_ep > 1
    if moe_tp == moe_ep > 1 and tp * dp == moe_tp * moe_ep and row["attention_dp_size"]:
        tp, dp = (moe_ep, 1) if dp == 1 else (1, moe_ep)
    if not row["attention_dp_size"]:
        dp = max(1, moe_tp * moe_ep // tp)
    elif tp > 1 and dp > 1 and moe_ep == tp * dp:
        dp = 1
    if row["model_path"].startswith("MiniMaxAI/") and row["precision"] == "fp8" and tp == 8:
        expert_parallel = True  # slices of 1,536 / 8 are no whole fp8 blocks: vLLM refuses to start without
    return tp, dp, expert_parallel


def version(row: Mapping[str, str]) -> str:
    """The engine's version: as recorded, from the image's tag, or the release of the day."""
    if re.match(r"\d", row["backend_version"]):
        return row["backend_version"]
    if tag := re.search(r":v(\d[\d.]*\d)", row["silicon_data_source"]):
        return tag[1]
    day = re.search(r"measured=(\d{4}-\d{2})", row["silicon_data_source"])
    return max((name for month, name in RELEASES if day and month <= day[1]), default=RELEASES[0][1], key=_numbers)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _size(text: str) -> int:
    value = float(text) if text else 1.0
    return int(value) if isfinite(value) and value >= 1 else 1
