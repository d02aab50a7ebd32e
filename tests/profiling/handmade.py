"""A profile folder from formulas: every operator takes twice its least time on a device, and a launch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.hardware import device
from windtunnel.perf.profile.shapes import HEAD, TOKEN_OPERATORS, Shape
from windtunnel.profiling.clock import reading
from windtunnel.profiling.journal import Journal
from windtunnel.profiling.sizes import decode_sizes, octaves, prefill_sizes
from windtunnel.profiling.tables import write_tables

LLAMA_8B = Shape(4096, 32, 8, 14336, True, 128256, 128)
EXTENT: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 16, "max_model_len": 2048}
LAUNCH = 5e-6


def seconds(operator: str, tp: int, a: int, b: int, shape: Shape = LLAMA_8B, name: str = "h100") -> float:
    kernel = shape.kernel(operator, tp)
    least = kernel.bound(device(name), np.array([float(a)]), np.array([float(b)]))
    return float(2.0 * least[0] + LAUNCH)


def journal(folder: Path, shards: tuple[int, ...] = (1, 2)) -> Journal:
    made = Journal(folder / "measured.jsonl")
    for tp in shards:
        for operator in (*TOKEN_OPERATORS, "attn_kv_cache_save", *HEAD, *(("all_reduce",) if tp > 1 else ())):
            for a in octaves(512):
                made.readings[operator, tp, a, 0] = reading([seconds(operator, tp, a, 0)] * 3)
        planes = {"attn_decode": decode_sizes(16, 2048), "attn_prefill": prefill_sizes(512, 2048)}
        for operator, places in planes.items():
            for a, b in places:
                made.readings[operator, tp, a, b] = reading([seconds(operator, tp, a, b)] * 3)
    return made


def write_profile(folder: Path, device_name: str = "h100_sxm", shards: tuple[int, ...] = (1, 2)) -> Path:
    """The folder of the one model's tables."""
    written = journal(folder, shards)
    host = {"step": 1e-3, "request": 1e-5}
    write_tables(folder, "llama", device_name, replace(LLAMA_8B), written, EXTENT, host)
    return folder / "compute" / device_name / "llama"
