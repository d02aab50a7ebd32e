"""Served points of ``silicon_sample.csv`` and how its columns are read as a server's settings.

The file records neither server flags nor always the version. Three things are therefore taken from elsewhere:

- **Flags.** Most rows were served by InferenceX (SemiAnalysis), whose scripts are public (``benchmarks/`` of its
  repository): FLAGS and ``served_scripts`` hold what they pass. Rows from other sources get the engine's defaults.
- **Version.** The image tag in the source column where ``backend_version`` is empty or a nightly, else the release of
  the day of the measurement.
- **Parallelism.** TensorRT-LLM's rows before December 2025 hold ones, whatever their scripts chose
  (``served_scripts.early_layout``). ``attention_dp_size`` is empty in rows of the other sources: it is GPUs of the
  experts / tp there. Rows with dp > 1 and ep = tp·dp claim more GPUs than a node may have, and their times equal those
  of their twins with dp 1 and ep = tp within 1 % (MiniMax-M2.5 on H100, Kimi-K2.5 on B200): the script knew no data
  parallelism, so they are read as tensor parallelism tp with expert parallelism. Rows with moe_tp = moe_ep = g and
  tp·dp = g² (64 GPUs of an eight-GPU node) are read as g GPUs with expert parallelism for the same reason. vLLM's
  rows of the other sources with experts over ranks are read without: their generator's rules of that day did not pass
  the flag (aiconfigurator 0.5 and 0.7, ``rule_plugin/vllm.rule``), and times equal those of their twins. Where the
  other sources have n clients for each of ``batch_size``, n is the ranks of attention if it is the number of the
  experts' GPUs, else replicas.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from windtunnel.dataclass import dataclass
from windtunnel.deployment import Deployment, Engine, Pool
from windtunnel.deployment.versions import nearest_preset
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.launch import read_flags
from windtunnel.metrics.evidence import ServerKey, server_key
from windtunnel.perf.database import find_systems
from windtunnel.validation.pool_points import PoolsPoint, of_columns, with_likely_seats
from windtunnel.validation.recipes import SPARE_TOKENS
from windtunnel.validation.served_checkpoints import quantized_on_load, served_model
from windtunnel.validation.served_scripts import (
    GRAPHS_SINCE,
    NO_SCRIPT,
    PREDICTING_FLAGS,
    RECORDED,
    TRT_FP8_KV,
    Script,
    early_layout,
    prompt_graphs,
    script,
)

PREDICTING, PREDICTING_SINCE = ("1.2.0rc6.post3", "1.1.0rc2.post2"), "2026-01"
"""Images of TensorRT-LLM with which the scripts served DeepSeek-R1 with multi-token prediction, and from which month;
the same rows without it stand under DeepSeek-V3, other images, or earlier days of the same one (TPOT 1.3 to 2.1 times
as long at equal settings)."""

ACCEPTED = {1: 1.7, 2: 1.9, 3: 2.3}
"""Tokens a step, by drafts: an assumption, below the 85 to 90 % of DeepSeek's own report (arXiv 2412.19437, 5.4.3)
since prompts are random."""

CASTING = {("openai/gpt-oss-120b", "b200_sxm")}
"""Served with 8-bit activations and mxfp4 weights (VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1)."""

MARLIN = {("openai/gpt-oss-120b", "h100_sxm"), ("openai/gpt-oss-120b", "h200_sxm")}
"""Served by vLLM with Marlin's kernels (VLLM_MXFP4_USE_MARLIN=1), which widen mxfp4 as they do integers of 4 bits. The
kernel database has them for integers, which take as many bytes: those times stand for them."""

FLAGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-70B": {"kv-cache-dtype": "fp8", "max-num-batched-tokens": 8192, "async-scheduling": True},
    "openai/gpt-oss-120b": {"max-num-batched-tokens": 8192, "async-scheduling": True},
    "moonshotai/Kimi-K2.5": {"max-num-seqs": "clients"},
}
"""What InferenceX's scripts pass to ``vllm serve``, by model; ``clients`` stands for the row's concurrency."""

FLAGS_BY_SYSTEM: dict[tuple[str, str], dict[str, Any]] = {
    ("meta-llama/Llama-3.1-70B", "h100_sxm"): {"max-num-seqs": "clients"},
    ("meta-llama/Llama-3.1-70B", "h200_sxm"): {"max-num-seqs": "clients"},
    ("meta-llama/Llama-3.1-70B", "b200_sxm"): {"max-num-seqs": 512},
    ("openai/gpt-oss-120b", "h100_sxm"): {"max-num-seqs": "clients"},
    ("openai/gpt-oss-120b", "h200_sxm"): {"max-num-seqs": "clients"},
    ("openai/gpt-oss-120b", "b200_sxm"): {"max-num-seqs": 512, "kv-cache-dtype": "fp8"},
    ("MiniMaxAI/MiniMax-M2.5", "h100_sxm"): {"max-num-seqs": 256},
    ("MiniMaxAI/MiniMax-M2.5", "b200_sxm"): {"gpu-memory-utilization": 0.95, "block-size": 32},
    ("MiniMaxAI/MiniMax-M2.5", "b300_sxm"): {"kv-cache-dtype": "fp8", "block-size": 32},
}
COLUMNS = (
    *("id", "silicon_data_source", "backend", "backend_version", "model_path", "system", "precision", "mode", "isl"),
    *("osl", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "silicon_ttft_ms", "silicon_tpot_ms"),
)
"""The columns that are read."""


GENERATED: dict[str, Any] = {"max-num-tokens": "prompt"}
GENERATED_BY_PRECISION: dict[str, dict[str, Any]] = {"fp8": TRT_FP8_KV}
"""What aiconfigurator writes, whose deployments of TensorRT-LLM the other sources measured."""

ONE_WAITS = {"meta-llama/Llama-3.1-8B-Instruct"}
"""Models that TensorRT-LLM served the other sources with a place fewer than clients. One request waits at all times:
with 8, 16 and 32 clients the mean time to first token grows by output · TPOT / clients, whatever the lengths and GPUs
(0.8 to 1.2 of it, and 0.0 of the other models'): what Little's law says of one place too few."""

LARGEST_WORKER = 16
"""Most GPUs that share every layer in one worker."""

RELEASES = {
    "vllm": (("2025-07", "0.10.0"), ("2025-12", "0.12.0"), ("2026-02", "0.16.0"), ("2026-04", "0.19.0")),
    "sglang": (("2025-07", "0.5.0"),),
    "trtllm": (("2025-07", "1.0.0"), ("2025-10", "1.1.0")),
}
"""Month of release and version of engines that have a preset."""


LAYOUT = ("tensor_parallel_size", "data_parallel_size", "num_speculative_tokens", "acceptance_length")
"""What the row says itself."""


@dataclass(frozen=True)
class Point:
    """One row: a server, its load, and the mean latencies (seconds)."""

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
    replicas: int = 1
    month: str = ""
    """Of the measurement, as 2026-01; empty where the row does not say."""
    repeats: bool = False
    """A row before it tells of the same measurement, perhaps under another name of the model."""
    shared: bool = False
    """A row tells of the same measurement under another name of the model."""

    @property
    def script(self) -> Script:
        """The script that served it, as far as known; vLLM's flags are FLAGS."""
        if not self.scripted:
            return NO_SCRIPT
        return script(
            *(self.backend, self.model_path, self.precision or "bf16", self.system),
            *(self.version, self.tp, self.expert_parallel, self.shared),
        )

    @property
    def equal(self) -> bool:
        """Its client sent equal prompts and asked for equal outputs: genai-perf, which measured the other sources' rows
        of 256, 512, 1,024, ... tokens. Those of whole thousands are aiperf's, whose text is not cut to a number."""
        return not self.scripted and bool(self.isl % 1000)

    @property
    def client(self) -> str:
        """Whose path was measured, a name of CLIENTS. Where hundreds of requests are in flight, as in rows of whole
        thousands, they wait for server and client as those of InferenceX do."""
        return "genai-perf" if self.equal else "inferencex"

    @property
    def wait_steps(self) -> float:
        """Steps that a request waits on average until the server looks at it, beyond the one that runs, and until the
        server shows its first token."""
        served = self.script
        poll = served.polls[self.concurrency >= 16]
        short = (self.isl, self.osl) == (1024, 1024) and self.tp < 8
        return 0.5 * (poll - 1) + served.batch_wait * short + served.shown - 1

    @property
    def scored(self) -> bool:
        """Counts in the errors."""
        return not self.repeats

    @property
    def rounds(self) -> int:
        """Requests for each client."""
        return self.script.rounds

    def deployment(self) -> Deployment:
        """What is simulated. Raises InputError for what cannot be."""
        return Deployment((self.pool(),))

    def pool(self) -> Pool:
        """The only pool of it. Raises InputError for what cannot be."""
        if not (self.ttft > 0 and self.tpot > 0):
            raise InputError("the row holds no latencies")
        if not self.concurrency:
            raise InputError("the row does not say how many clients there were")
        if self.tp > LARGEST_WORKER:
            raise InputError(f"{self.tp} GPUs together: pools of a rack that the row does not tell apart")
        model = served_model(self.model_path, self.precision)
        served = (self.model_path, self.system)
        if served in CASTING and model.quantization is not None:
            model = model.with_quantization(replace(model.quantization, weight_only=False))
        if self._widened and model.quantization is not None:
            model = model.with_quantization(replace(model.quantization, method="int4"))
        engine = Engine(
            tensor_parallel_size=self.tp,
            data_parallel_size=self.dp,
            enable_expert_parallel=self.expert_parallel,
            max_model_len=min(self.isl + self.osl + SPARE_TOKENS, model.max_position_embeddings),
            quantization=quantized_on_load(model, self.precision),
            **self._speculation(),
            **self.settings(),
        )
        return Pool(model, device(self.system), engine, self.replicas)

    def server(self, pool: Pool) -> ServerKey:
        """Its pool, as the evidence knows it: by the weights of the checkpoint."""
        key = server_key(pool.spec())
        return key._replace(dtype="mxfp4") if self._widened else key

    @property
    def _widened(self) -> bool:
        return self.backend == "vllm" and (self.model_path, self.system) in MARLIN

    @property
    def _predicts(self) -> bool:
        """Served by TensorRT-LLM's scripts of multi-token prediction."""
        served = self.backend == "trtllm" and self.model_path == "deepseek-ai/DeepSeek-R1"
        return served and self.version in PREDICTING and self.month >= PREDICTING_SINCE

    def _speculation(self) -> dict[str, Any]:
        """Multi-token prediction: with 3 drafts, with 1 under attention data parallelism (the same scripts)."""
        drafts = self.script.drafts
        if self._predicts:
            drafts = 1 if self.dp > 1 else 3
        if not drafts:
            return {}
        return {"num_speculative_tokens": drafts, "acceptance_length": ACCEPTED[drafts]}

    def settings(self) -> dict[str, Any]:
        """Of ``deployment.Engine``: the version, and what its script says."""
        if self.backend == "trtllm" and not self.scripted:
            flags = GENERATED | GENERATED_BY_PRECISION.get(self.precision, {})
            flags |= {"max-batch-size": "all but one client"} if self.model_path in ONE_WAITS else {}
        elif self.backend == "vllm":
            flags = FLAGS.get(self.model_path, {}) | FLAGS_BY_SYSTEM.get((self.model_path, self.system), {})
        else:
            flags = self.script.flags | (PREDICTING_FLAGS if self._predicts else {}) | self._prompt_graphs()
        stands_for = {
            "clients": self.concurrency,
            "clients, at least 128": max(128, self.concurrency),
            "all but one client": max(1, self.concurrency // self.replicas - 1),
            "length": self.isl + self.osl + SPARE_TOKENS,
            "one prompt": -(-(self.isl + self.concurrency // self.dp + 64) // 64) * 64,
            "prompt alone": -(-(self.isl + self.concurrency + 64) // 64) * 64,
            "prompt": max(8192, -(-(self.isl + self.concurrency // self.replicas + 64) // 64) * 64),
        }
        chosen = {name: stands_for.get(value, value) for name, value in flags.items()}
        if self.backend == "trtllm":
            chosen |= self._ranks_of_trtllm()
            if "max-batch-size" in chosen:
                chosen["max-batch-size"] = max(1, chosen["max-batch-size"] // self.dp)
        if self.backend == "sglang" and self.dp > 1:
            chosen |= {"tp-size": self.tp * self.dp, "dp-size": self.dp, "enable-dp-attention": True}
        preset = nearest_preset(self.backend, self.version)
        found = read_flags(self.backend, chosen, {"engine": preset, **self._speculation()})
        return {"preset": preset, **{name: value for name, value in found.items() if name not in LAYOUT}}

    def _prompt_graphs(self) -> dict[str, Any]:
        """What TensorRT-LLM's scripts of 2026 said of prompts."""
        late = self.system == "b200_sxm" and self.version.startswith(GRAPHS_SINCE)
        if self.backend != "trtllm" or not late or "DeepSeek" not in self.model_path:
            return {}
        whole, lengths = self.tp == 8 and self.expert_parallel, (self.isl, self.osl)
        return prompt_graphs(self.precision, self._predicts, lengths, self.concurrency, self.dp, whole)

    def _ranks_of_trtllm(self) -> dict[str, Any]:
        """How its ranks of attention wait for each other's prompts."""
        if self.dp == 1 or not self.script.balance:
            return {}
        drafts = self._speculation()
        more = {"attention-dp-config.enable-balance": True, "attention-dp-config.timeout-iters": self.script.balance}
        if drafts:
            more |= {"speculative-config.num-nextn-predict-layers": drafts["num_speculative_tokens"]}
        return more


def find_file() -> Path:
    """The file of the kernel database's package, which is located and never imported. Raises InputError without it."""
    systems = find_systems()
    if systems is None or not (systems / "silicon_sample.csv").is_file():
        raise InputError("silicon_sample.csv: not found; install aiconfigurator-core")
    return systems / "silicon_sample.csv"


Served = Point | PoolsPoint
"""One row, of either mode."""


def read_points(path: Path | None = None) -> list[Served]:
    """Every row of the file, the package's unless another is given. Raises InputError naming what is wrong."""
    path = path or find_file()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})") from error
    if missing := [name for name in COLUMNS if not rows or name not in rows[0]]:
        raise InputError(f"{path}: no column {', '.join(missing)}: it must be like silicon_sample.csv")
    points: list[Served] = []
    for number, row in enumerate(rows, 2):
        try:
            points.append(_point(row))
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}:{number}: {error}") from error
    likely = iter(with_likely_seats([point for point in points if isinstance(point, PoolsPoint)]))
    return _once([next(likely) if isinstance(point, PoolsPoint) else point for point in points])


def _once(points: Iterable[Served]) -> list[Served]:
    """The points, those that repeat a measurement of a server that prefills and decodes marked."""
    read, found, known = list(points), list[Served](), set[tuple[Any, ...]]()
    models: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for point in read:
        if isinstance(point, Point):
            models[_measurement(point)].add(point.model_path)
    for point in read:
        if isinstance(point, Point):
            same = _measurement(point)
            point = replace(point, repeats=same in known, shared=len(models[same]) > 1)  # noqa: PLW2901 - in its place
            known.add(same)
        found.append(point)
    return found


def _measurement(point: Point) -> tuple[Any, ...]:
    """What rows of one measurement have in common; latencies to nine digits, since rows round them differently."""
    latencies = (f"{seconds:.9g}" for seconds in (point.ttft, point.tpot))
    return (point.backend, point.system, point.isl, point.osl, point.concurrency, *latencies)


def _point(row: Mapping[str, str]) -> Served:
    clients = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    concurrency = int(clients[1]) if clients else 0
    day = re.search(r"measured=(\d{4}-\d{2})", row["silicon_data_source"])
    of_row: dict[str, Any] = {
        "id": row["id"],
        "mode": row["mode"],
        "backend": row["backend"],
        "version": version(row),
        "model_path": row["model_path"],
        "precision": row["precision"],
        "system": row["system"],
        "isl": int(row["isl"]),
        "osl": int(row["osl"]),
        "concurrency": concurrency,
        "ttft": float(row["silicon_ttft_ms"] or "nan") * 1e-3,
        "tpot": float(row["silicon_tpot_ms"] or "nan") * 1e-3,
        "scripted": "auto-gap-analysis" not in row["silicon_data_source"],
    }
    if row["mode"] == "disagg":
        return of_columns(row, **of_row)
    tp, dp, expert_parallel = _before_recorded(row, concurrency) or parallelism(row)
    share = groups(row, concurrency)
    if share > 1 and _size(row["moe_tp_size"]) * _size(row["moe_ep_size"]) == share == tp:
        tp, dp, share = 1, tp, 1
    month = day[1] if day else ""
    return Point(tp=tp, dp=dp, expert_parallel=expert_parallel, replicas=share, month=month, **of_row)


def groups(row: Mapping[str, str], concurrency: int) -> int:
    """Replicas that share the clients of a row of the other sources: clients ÷ ``batch_size`` if whole, else one."""
    batch = _size(row.get("batch_size") or "")
    alone = "auto-gap-analysis" not in row["silicon_data_source"] or _size(row["attention_dp_size"]) > 1
    return 1 if alone or not row.get("batch_size") or concurrency % batch else max(concurrency // batch, 1)


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
    if row["backend"] == "vllm" and "auto-gap-analysis" in row["silicon_data_source"]:
        expert_parallel = False
    if row["model_path"].startswith("MiniMaxAI/") and row["precision"] == "fp8" and tp == 8:
        expert_parallel = True  # slices of 1,536 / 8 are no whole fp8 blocks: vLLM refuses to start without
    return tp, dp, expert_parallel


def _before_recorded(row: Mapping[str, str], concurrency: int) -> tuple[int, int, bool] | None:
    """What a script chose that recorded neither expert nor data parallelism; None for other rows."""
    day = re.search(r"measured=(\d{4}-\d{2})", row["silicon_data_source"])
    if row["backend"] != "trtllm" or not day or day[1] >= RECORDED or _size(row["moe_ep_size"]) > 1:
        return None
    model, precision, lengths = row["model_path"], row["precision"], (int(row["isl"]), int(row["osl"]))
    return early_layout(model, precision, row["system"], _size(row["tp_size"]), lengths, concurrency)


def version(row: Mapping[str, str]) -> str:
    """The engine's version: as recorded, from the image's tag, or the release of the day."""
    if re.match(r"\d", row["backend_version"]):
        return row["backend_version"]
    if tag := re.search(r":v(\d[\d.]*\d)", row["silicon_data_source"]):
        return tag[1]
    day = re.search(r"measured=(\d{4}-\d{2})", row["silicon_data_source"])
    releases = RELEASES.get(row["backend"], RELEASES["vllm"])
    return max((name for month, name in releases if day and month <= day[1]), default=releases[0][1], key=_numbers)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _size(text: str) -> int:
    value = float(text) if text else 1.0
    return int(value) if isfinite(value) and value >= 1 else 1
