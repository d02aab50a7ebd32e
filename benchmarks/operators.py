"""Kernel times at held-out points of the kernel database: ``python -m benchmarks.operators [--system S] [--markdown]``.

Three kinds of points are left out of the tables and foretold from the rest: every third token count (or number of
requests), every second (n, k) of matrix products, and whole shapes of experts and of latent attention. Beside
windtunnel's own tables: interpolation of logarithms between the nearest kept points (for a missing shape: of the
nearest kept shape, scaled by its work), the calibrated roofline, a linear regression on work and bytes, and the noise
of the data: how far repeated measurements of the same key lie apart.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.held_out import (
    Case,
    Floats,
    Mask,
    cases_of_attention,
    cases_of_experts,
    cases_of_latent,
    cases_of_rows,
    cases_of_shapes,
    dropped_experts,
    every_second_shape,
    every_third,
    thinned,
)
from windtunnel.errors import InputError
from windtunnel.hardware import Device, device
from windtunnel.perf.causes import Causes
from windtunnel.perf.costs import bytes_moved, flops
from windtunnel.perf.database import Columns, Database, open_database
from windtunnel.perf.kernels import Kernel
from windtunnel.perf.measured import Measured
from windtunnel.perf.roofline import roofline

PLAIN = Causes(kernel_choice=False, host_bound_tables=False, cold_cache=False, uneven_contexts=False)
"""Each table by itself: what it holds is foretold, not what an engine would rather run."""

GEMMS = {"gemm bf16": "bfloat16", "gemm fp8": "fp8", "gemm fp8_block": "fp8_block", "gemm nvfp4": "nvfp4"}
EXPERTS = {"experts bf16": "bfloat16", "experts fp8_block": "fp8_block", "experts nvfp4": "nvfp4"}
METHODS = ("windtunnel", "log-log", "roofline", "regression")


def log_log(case: Case) -> Floats:
    """Between the kept points; those of another shape scaled by the ratio of work (of bytes where that is none)."""
    found = np.exp(np.interp(np.log(case.a), np.log(case.kept_a), np.log(case.kept_seconds)))
    if case.kernel == case.kept:
        return np.asarray(found)
    return np.asarray(found * flops(case.kernel, case.a, case.b) / flops(case.kept, case.a, case.b))


def regression(cases: list[Case]) -> list[Floats]:
    """Seconds as a linear function of work and bytes, least squares of relative errors over all kept points."""
    rows = [_features(case.kept, case.kept_a, case.kept_b) / case.kept_seconds[:, None] for case in cases]
    weights = np.linalg.lstsq(np.vstack(rows), np.ones(sum(map(len, rows))), rcond=None)[0]
    return [np.maximum(_features(case.kernel, case.a, case.b) @ weights, 1e-7) for case in cases]


def _features(kernel: Kernel, a: Floats, b: Floats) -> Floats:
    return np.stack([flops(kernel, a, b) * 1e-12, bytes_moved(kernel, a, b) * 1e-9, np.ones_like(a)], axis=1)


def noise(columns: Columns | None, **equal: str) -> tuple[float, float]:
    """Median and 95th percentile of the distance between repeats of one key and kernel; NaN without repeats."""
    part = None if columns is None else columns.where(**equal)
    if part is None or not len(part):
        return float("nan"), float("nan")
    names = [name for name in part.numbers if name not in ("latency", "power", "power_limit")]
    keys = np.stack([*(part[name] for name in names), part.texts["kernel_source"][0]], axis=1)
    _, which, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(which.ravel(), kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])[counts > 1]
    apart = np.abs(part["latency"][order[starts + 1]] / part["latency"][order[starts]] - 1.0)
    return (float(np.median(apart)), float(np.percentile(apart, 95))) if len(apart) else (float("nan"), float("nan"))


def errors(gpu: Device, measured: Measured, cases: list[Case]) -> dict[str, Floats]:
    """Absolute relative errors of each method over all held-out points."""
    found: dict[str, list[Floats]] = {name: [] for name in METHODS}
    bounds = roofline(gpu)
    for case, fitted in zip(cases, regression(cases), strict=True):
        ours = measured.times(case.kernel, case.a, case.b)
        assert ours is not None
        seconds = {
            "windtunnel": ours.seconds,
            "log-log": log_log(case),
            "roofline": bounds.times(case.kernel, case.a, case.b).seconds,
            "regression": fitted,
        }
        for name, value in seconds.items():
            found[name].append(np.abs(value / case.measured - 1.0))
    return {name: np.concatenate(parts) for name, parts in found.items()}


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    what: str
    points: int
    errors: dict[str, Floats]
    noise: tuple[float, float]


def lines(system: str, backend: str) -> Iterator[Line]:
    """Every family, format and way of leaving points out. Raises InputError without a database of the system."""
    database = open_database(system, backend)
    if database is None:
        raise InputError(f"--system {system}: the kernel database has no {backend} tables of it")
    gpu = device(system)

    def line(what: str, cases: list[Case], dropped: Callable[[str, Columns], Mask], apart: tuple[float, float]) -> Line:
        measured = Measured(thinned(database, dropped), gpu, PLAIN)
        found = errors(gpu, measured, cases)
        return Line(what, len(found["windtunnel"]), found, apart)

    def only(name: str, mask: Callable[[Columns], Mask]) -> Callable[[str, Columns], Mask]:
        return lambda table, columns: mask(columns) if table == name else np.zeros(len(columns), dtype=bool)

    gemms = database.read("gemm", "gemm_perf", ("gemm_dtype", "kernel_source"))
    for what, dtype in GEMMS.items():
        apart = noise(gemms, gemm_dtype=dtype)
        if cases := list(cases_of_rows(database, dtype)):
            yield line(f"{what}, every third m", cases, only("gemm_perf", lambda c: every_third(c["m"])), apart)
        if cases := list(cases_of_shapes(database, dtype)):
            yield line(f"{what}, every second (n, k)", cases, only("gemm_perf", every_second_shape), apart)
    moes = database.read("moe", "moe_perf", ("moe_dtype", "distribution", "kernel_source"))
    for what, dtype in EXPERTS.items():
        apart = noise(moes, moe_dtype=dtype)
        for kind, whole in (("every third token count", False), ("whole shapes", True)):
            if cases := list(cases_of_experts(database, dtype, whole)):
                mask = only("moe_perf", lambda c, whole=whole: dropped_experts(c, whole))  # type: ignore[misc]
                yield line(f"{what}, {kind}", cases, mask, apart)
    for phase, axis in (("decode", "batch_size"), ("prefill", "isl")):
        table = "generation_attention_perf" if phase == "decode" else "context_attention_perf"
        apart = noise(database.read("attention", table, ("kv_cache_dtype", "kernel_source")), kv_cache_dtype="bfloat16")
        if cases := list(cases_of_attention(database, phase)):
            mask = only(table, lambda c, axis=axis: every_third(c[axis]))  # type: ignore[misc]
            yield line(f"{phase} attention, every third {axis}", cases, mask, apart)
    other = open_database(system, "trtllm")
    if other is not None and (cases := list(cases_of_latent(other))):
        latent = other.read("mla", "generation_mla_perf", ("kv_cache_dtype", "kernel_source"))
        mask = only("generation_mla_perf", lambda c: np.isin(c["num_heads"], (8, 32)))
        yield replace(_latent_line(other, gpu, cases, mask), noise=noise(latent, kv_cache_dtype="bfloat16"))


def _latent_line(database: Database, gpu: Device, cases: list[Case], mask: Callable[[str, Columns], Mask]) -> Line:
    """Latent attention without the products and launches that its table adds around the kernel."""
    measured = Measured(thinned(database, mask), gpu, PLAIN)
    whole = Measured(database, gpu, PLAIN)
    bare = []
    for case in cases:
        around = whole.times(case.kernel, case.a, case.b)
        assert around is not None
        bare.append(replace(case, measured=around.seconds))
    found = errors(gpu, measured, bare)
    return Line("latent decode attention (trtllm), whole shapes", len(found["windtunnel"]), found, (np.nan, np.nan))


def markdown(found: list[Line]) -> str:
    """The table: median / 95th percentile of the absolute relative error, per cent."""
    head = f"| | points | {' | '.join(METHODS)} | noise |"
    rows = [head, "|---|" + "---:|" * (len(METHODS) + 2)]
    for one in found:
        cells = [_cell(np.median(one.errors[m]), np.percentile(one.errors[m], 95)) for m in METHODS]
        rows.append(f"| {one.what} | {one.points:,} | {' | '.join(cells)} | {_cell(*one.noise)} |")
    return "\n".join(rows)


def _cell(median: float, high: float) -> str:
    return f"{median * 100:.1f} / {high * 100:.0f}" if np.isfinite(median) else "–"


def main(arguments: list[str]) -> int:
    """The command; returns 2 after a wrong input, which is one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=__doc__)
    parser.add_argument("--system", default="h100_sxm", help="a system of the kernel database (h100_sxm)")
    parser.add_argument("--backend", default="vllm", help="engine (vllm)")
    chosen = parser.parse_args(arguments)
    try:
        print(markdown(list(lines(chosen.system, chosen.backend))))
    except InputError as wrong:
        print(f"benchmarks.operators: {wrong}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
