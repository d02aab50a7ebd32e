"""Latent attention in the kernel database, on databases made up for the test."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perf.kernel_tables import (
    H100,
    TOKENS,
    ask,
    full_database,
    opened,
    took,
    write_table,
)
from windtunnel.perf.corrections import ALL
from windtunnel.perf.database import Database, Measured
from windtunnel.perf.kernel import LAUNCH_GRAPH
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED
from windtunnel.perf.kinds.latent_attention import (
    HIDDEN,
    LEAST_SHARE,
    QUERY_RANK,
    SMALL_KERNELS,
    LatentAttention,
    projections,
)


def test_latent_attention_is_its_module_less_the_projections(tmp_path: Path) -> None:
    full_database(tmp_path)
    kernel = LatentAttention("decode", 16, 512, 128, 64, 128)
    here = opened(tmp_path)
    points = [(b, kv) for b in (1, 16, 256) for kv in (2, 1024, 8192)]

    def gemms(a: float) -> float:
        return sum(float(ask(here, g, [a]).seconds[0]) for g in projections(kernel, HIDDEN, QUERY_RANK, "bfloat16"))

    core = [took(kernel, a, b) * 1e-3 for a, b in points]
    rows = {
        "num_heads": 16,
        "batch_size": [a for a, _ in points],
        "isl": 1,
        "step": [b - 1 for _, b in points],
        "kv_cache_dtype": "bfloat16",
        "gemm_type": "bfloat16",
        "kernel_source": "one",
        "latency": [1e3 * (t + gemms(a)) for t, (a, _) in zip(core, points, strict=True)],
    }
    write_table(tmp_path, "h100_sxm/mla/vllm/0.24.0/mla_generation_module_perf", rows)
    found = ask(opened(tmp_path), kernel, *np.array(points, dtype=float).T)
    module = np.array(rows["latency"]) * 1e-3
    np.testing.assert_allclose(found.seconds, np.maximum(core, LEAST_SHARE * module), rtol=1e-6)
    assert (found.sources == MEASURED).all()
    other = ask(opened(tmp_path), replace(kernel, heads=8), *np.array(points, dtype=float).T)
    assert (other.sources == MODELLED).all()


REQUESTS, KEYS = (1, 4, 16, 64, 256), (16, 128, 1024, 4096)
LATENT = LatentAttention("decode", 16, 512, 128, 64, 128)
ABSORBED = 5e-6


def latent_rows(extra: float, **columns: Any) -> dict[str, Any]:
    points = list(product(REQUESTS, KEYS))
    return {
        "num_heads": 16,
        "batch_size": [n for n, _ in points],
        "isl": 1,
        "step": [keys - 1 for _, keys in points],
        "kv_cache_dtype": "bfloat16",
        "latency": [took(LATENT, n, keys) + extra for n, keys in points],
        "kernel_source": "one",
        **columns,
    }


def absorbed_rows() -> dict[str, Any]:
    return {
        "op_name": ["mla_gen_pre"] * len(TOKENS) + ["mla_gen_post"] * len(TOKENS),
        "bmm_dtype": "bfloat16",
        "num_heads": 16,
        "num_tokens": [*TOKENS, *TOKENS],
        "latency": [ABSORBED * 0.5e3] * (2 * len(TOKENS)),
        "kernel_source": "one",
    }


def test_latent_kernels_stand_with_what_is_launched_around_them(tmp_path: Path) -> None:
    write_table(tmp_path, "h100_sxm/mla/sglang/0.5.14/generation_mla_perf", latent_rows(0.0))
    write_table(tmp_path, "h100_sxm/mla_bmm/sglang/0.5.14/mla_bmm_perf", absorbed_rows())
    found = ask(opened(tmp_path, "sglang", "0.5.14"), LATENT, [4, 64], [1024, 4096])
    alone = np.array([took(LATENT, 4, 1024), took(LATENT, 64, 4096)]) * 1e-3
    np.testing.assert_allclose(found.seconds, alone + ABSORBED + SMALL_KERNELS * LAUNCH_GRAPH, rtol=1e-9)
    assert (found.sources == MEASURED).all()


def test_modules_that_waited_for_the_host_are_shortened_to_their_kernels(tmp_path: Path) -> None:
    full_database(tmp_path)
    here = opened(tmp_path)
    linear = np.array(
        [
            sum(float(ask(here, gemm, [n]).seconds[0]) for gemm in projections(LATENT, 7168, 1536, "bfloat16"))
            for n, _ in product(REQUESTS, KEYS)
        ]
    )
    module = latent_rows(0.1, gemm_type="bfloat16")
    module["latency"] = list(np.array(module["latency"]) + linear * 1e3)
    write_table(tmp_path, "h100_sxm/mla/vllm/0.24.0/mla_generation_module_perf", module)
    write_table(tmp_path, "h100_sxm/mla/trtllm/1.0/generation_mla_perf", latent_rows(0.0))
    write_table(tmp_path, "h100_sxm/mla_bmm/trtllm/1.0/mla_bmm_perf", absorbed_rows())
    found = ask(opened(tmp_path), LATENT, [4, 64], [1024, 4096])
    around = ABSORBED + SMALL_KERNELS * LAUNCH_GRAPH
    alone = np.array([took(LATENT, 4, 1024), took(LATENT, 64, 4096)]) * 1e-3
    np.testing.assert_allclose(found.seconds, alone + around, rtol=0.02)
    assert (found.sources == INTERPOLATED).all()
    database = Database(tmp_path, "h100_sxm", "vllm", "0.24.0", "exact")
    believed = ask(Measured(database, H100, ALL.without("host_bound_tables")), LATENT, [4], [1024])
    assert believed.seconds[0] == pytest.approx(alone[0] + 1e-4, rel=0.02)
