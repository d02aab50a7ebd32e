"""KV cache tokens that logs print, against those computed: ``python -m benchmarks.accuracy.kv_memory POINTS``.

A point is a line of JSON: what a server's log says of its settings and its memory (../shared/truth/kv/README.md).
Points whose flags name what is not simulated, or whose settings are not known, are left out. Whether a server starts is
asked of all whose log says its settings.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from windtunnel.deployment import PRESETS, Engine, Pool
from windtunnel.deployment.memory import kv_blocks
from windtunnel.errors import InputError
from windtunnel.hardware import GIB, device
from windtunnel.model import load_model

CLEAN = {"kv from GiB"}
"""Flags that a compared point may have."""
REFUSED = "refused"
"""Flag of a server that did not start for want of memory."""
BY_FLASHINFER = "dennislee22/"
"""Logs of vLLM's image that say "Using FlashInfer for top-p & top-k sampling"."""
SHARES = ("gpu_memory_utilization", "mem_fraction_static")


def compared(point: dict[str, Any]) -> bool:
    """Whether a point says enough to be compared, and names a model that is known."""
    known = point["compare"] and point["kv_tokens"] and point["wt_model"] and point["device"] and point["version"]
    return bool(known and set(point["flags"]) <= CLEAN and not point["wt_model"].startswith("cfg/"))


def preset_of(engine: str, version: str) -> str:
    """The newest preset of the engine that is not newer than the version; the oldest, if all are."""
    wanted = _numbers(version)
    found = [name for name in PRESETS if name.startswith(f"{engine}-")]
    return max(
        (name for name in found if _numbers(name.partition("-")[2]) <= wanted),
        key=lambda name: _numbers(name.partition("-")[2]),
        default=min(found, key=lambda name: _numbers(name.partition("-")[2])),
    )


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+", maxsplit=1)[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def pool_of(point: dict[str, Any]) -> Pool:
    """The pool that a log describes. Raises InputError for a model, device or setting that is not known."""
    gpu = device(point["device"])
    if point["memory_total_gib"]:
        total = int(point["memory_total_gib"] * GIB)
        gpu = replace(gpu, usable_memory_bytes=total, memory_bytes=max(gpu.memory_bytes, total))
    share = next((point[name] for name in SHARES if point[name] is not None), None)
    settings = {
        "tensor_parallel_size": point["tp"],
        "pipeline_parallel_size": point["pp"],
        "data_parallel_size": point["dp"],
        "max_model_len": point["max_model_len"],
        "max_num_seqs": point["max_num_seqs"],
        "max_num_batched_tokens": point["max_num_batched_tokens"],
        "gpu_memory_utilization": share,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    if point["kv_cache_dtype"] not in (None, "auto"):
        given["kv_cache_dtype"] = "fp8" if "fp8" in point["kv_cache_dtype"] else "auto"
    given |= {"enable_expert_parallel": True} if point["expert_parallel"] else {}
    given |= {"flashinfer_sampler": True} if point["source"].startswith(BY_FLASHINFER) else {}
    return Pool(
        load_model(point["wt_model"]), gpu, Engine(preset=preset_of(point["engine"], point["version"]), **given)
    )


def error(point: dict[str, Any]) -> float:
    """Computed KV tokens by logged ones, less one."""
    return float(kv_blocks(pool_of(point)).num_tokens / point["kv_tokens"] - 1.0)


def starts(point: dict[str, Any]) -> bool | None:
    """Whether its memory is computed to do; None for a model, device or setting that is not known."""
    if not (point["compare"] and point["wt_model"] and point["device"] and point["version"]):
        return None
    try:
        pool = pool_of(point)
    except InputError:
        return None
    try:
        kv_blocks(pool)
    except InputError:
        return False
    return True


def verdicts(points: list[dict[str, Any]]) -> dict[bool, list[bool]]:
    """Whether a server started → whether it is computed to, of each that can be asked."""
    found: dict[bool, list[bool]] = {True: [], False: []}
    for point in points:
        computed = starts(point)
        if computed is not None:
            found[REFUSED not in point["flags"]].append(computed)
    return found


def main() -> None:
    """Print every compared point, by engine the errors, and how often a server is falsely said to start or not."""
    points = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    found: dict[str, list[float]] = {}
    for number, point in enumerate(points):
        if not compared(point):
            continue
        name = f"{number:3} {point['engine']} {point['version'][:8]:8} {point['wt_model'][:36]:36} {point['device']}"
        try:
            off = error(point)
        except (InputError, TypeError) as refused:
            print(f"{name}: {str(refused)[:110]}")
            continue
        found.setdefault(point["engine"], []).append(off)
        print(f"{name} TP {point['tp']}: {off:+.1%}")
    for engine, errors in found.items():
        size = sorted(map(abs, errors))
        within = sum(one <= 0.08 for one in size) / len(size)
        print(
            f"{engine}: {len(size)} points, mean absolute {mean(size):.1%}, median {median(size):.1%}, "
            f"largest {size[-1]:.1%}, {within:.0%} within 8 %"
        )
    told = verdicts(points)
    started, stopped = told[True], told[False]
    print(
        f"false refusals: {started.count(False)} of {len(started)}; false fits: {stopped.count(True)} of {len(stopped)}"
    )


if __name__ == "__main__":
    main()
