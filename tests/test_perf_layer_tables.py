"""Latent, sparse and linear attention in the kernel database, on databases made up for the test."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_tables import H100, TOKENS, full_database, took, write_table

from windtunnel.perf.corrections import ALL
from windtunnel.perf.database import Database, Measured
from windtunnel.perf.kernel import LAUNCH_GRAPH, Kernel
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED, KernelTimes
from windtunnel.perf.kinds.latent_attention import SMALL_KERNELS, LatentAttention, projections
from windtunnel.perf.kinds.recurrence import Recurrence
from windtunnel.perf.kinds.sparse_attention import SparseAttention

REQUESTS, KEYS = (1, 4, 16, 64, 256), (16, 128, 1024, 4096)
LATENT = LatentAttention("decode", 16, 512, 128, 64, 128)
SPARSE = SparseAttention("decode", 6144, 8, 2048, 512, 192, 64, 256, 32, 128, 2048, "fp8", "fp8_block")
SHARED_INDEX = replace(SPARSE, index_heads=0, index_head_dim=0)
ABSORBED = 5e-6


def opened(systems: Path, backend: str = "vllm", version: str = "0.24.0") -> Measured:
    return Measured(Database(systems, "h100_sxm", backend, version, "exact"), H100)


def ask(measured: Measured, kernel: Kernel, a: Any, b: Any = 0.0) -> KernelTimes:
    x, y = np.broadcast_arrays(np.asarray(a, dtype=float), np.asarray(b, dtype=float))
    found = kernel.measured(measured, x.copy(), y.copy())
    assert found is not None
    return found


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


def sparse_rows(phase: str, factor: float = 1.0, indexes: bool = True) -> dict[str, Any]:
    kernel = SPARSE if phase == "generation" else SparseAttention("prefill", *list(vars(SPARSE).values())[1:])
    if phase == "generation":
        points = [(n, 1, keys - 1, n, keys) for n, keys in product(REQUESTS, KEYS)]
    else:
        points = [(1, n, context, n, context) for n, context in product((16, 1024, 8192), (0, 1024, 8192))]
    return {
        "op_name": f"dsa_{phase}_module" + ("" if indexes else "_skip_indexer"),
        "architecture": "GlmMoeDsaForCausalLM",
        "num_heads": 8,
        "batch_size": [p[0] for p in points],
        "isl": [p[1] for p in points],
        "step": [p[2] for p in points],
        "kv_cache_dtype": "fp8",
        "gemm_type": "fp8_block",
        "latency": [took(kernel, a, b) * factor for *_, a, b in points],
        "kernel_source": "one",
    }


def both_sparse_rows(whole: float, shared: float) -> dict[str, Any]:
    """Decodes with and without an indexer, as long as given times what they take."""
    with_it, without = sparse_rows("generation", whole), sparse_rows("generation", shared, indexes=False)
    each = len(with_it["latency"])
    columns = {name: [with_it[name]] * each + [without[name]] * each for name in with_it}
    return columns | {name: [*with_it[name], *without[name]] for name in ("batch_size", "isl", "step", "latency")}


def test_modules_that_share_an_index_are_measured(tmp_path: Path) -> None:
    place = "h100_sxm/sparse_attention/sglang/0.5.14/dsa_generation_module_perf"
    write_table(tmp_path, place, both_sparse_rows(1.0, 0.6))
    here = opened(tmp_path, "sglang", "0.5.14")
    whole, shared = ask(here, SPARSE, [4, 64], 1024), ask(here, SHARED_INDEX, [4, 64], 1024)
    np.testing.assert_allclose(shared.seconds, 0.6 * whole.seconds, rtol=1e-9)
    assert (shared.sources == MEASURED).all()


def test_a_module_takes_no_longer_without_its_indexer(tmp_path: Path) -> None:
    place = "h100_sxm/sparse_attention/sglang/0.5.14/dsa_generation_module_perf"
    write_table(tmp_path, place, both_sparse_rows(1.0, 1.5))
    here = opened(tmp_path, "sglang", "0.5.14")
    shared = ask(here, SHARED_INDEX, [4, 64], 1024)
    np.testing.assert_allclose(shared.seconds, ask(here, SPARSE, [4, 64], 1024).seconds, rtol=1e-9)
    assert (shared.sources == INTERPOLATED).all()


@pytest.mark.parametrize(("own", "saved"), [(2.0, 0.4), (0.5, 0.2)])
def test_another_engines_indexer_takes_its_share_of_the_faster_module(tmp_path: Path, own: float, saved: float) -> None:
    full_database(tmp_path)
    place = "h100_sxm/sparse_attention/sglang/0.5.14/dsa_generation_module_perf"
    write_table(tmp_path, place, both_sparse_rows(1.0, 0.6))
    alone = ask(opened(tmp_path, "sglang", "0.5.14"), SPARSE, [4, 64], 1024).seconds
    own_place = "h100_sxm/sparse_attention/vllm/0.24.0/dsa_generation_module_perf"
    write_table(tmp_path, own_place, sparse_rows("generation", own))
    here = opened(tmp_path)
    shared = ask(here, SHARED_INDEX, [4, 64], 1024)
    np.testing.assert_allclose(shared.seconds, (own - saved) * alone, rtol=1e-9)
    assert (shared.sources == MODELLED).all()
    priced = "vllm's modules with an indexer, less the share that it takes in sglang's"
    assert here.notes == (f"sparse attention that shares an index: {priced}",)


def test_without_any_module_that_shares_an_index_least_times_tell_the_share(tmp_path: Path) -> None:
    write_table(tmp_path, "h100_sxm/sparse_attention/vllm/0.24.0/dsa_generation_module_perf", sparse_rows("generation"))
    here, point = opened(tmp_path), (np.array([64.0]), np.array([4096.0]))
    least = SHARED_INDEX.bound(H100, *point) / SPARSE.bound(H100, *point)
    shared = ask(here, SHARED_INDEX, [64], 4096)
    np.testing.assert_allclose(shared.seconds, ask(here, SPARSE, [64], 4096).seconds * least, rtol=1e-9)
    assert least[0] < 1.0
    assert shared.sources.tolist() == [MODELLED]


def test_sparse_attention_is_measured_with_its_context(tmp_path: Path) -> None:
    for phase in ("generation", "context"):
        place = f"h100_sxm/sparse_attention/sglang/0.5.14/dsa_{phase}_module_perf"
        write_table(tmp_path, place, sparse_rows(phase))
    here = opened(tmp_path, "sglang", "0.5.14")
    decode = ask(here, SPARSE, [4, 64], [1024, 4096])
    np.testing.assert_allclose(decode.seconds, [took(SPARSE, 4, 1024) * 1e-3, took(SPARSE, 64, 4096) * 1e-3], rtol=1e-9)
    assert (decode.sources == MEASURED).all()
    prefill = SparseAttention("prefill", *list(vars(SPARSE).values())[1:])
    found = ask(here, prefill, [1024, 1024, 4096], [0, 8192, 1024])
    np.testing.assert_allclose(found.seconds[:2], [took(prefill, 1024, c) * 1e-3 for c in (0, 8192)], rtol=1e-9)
    assert found.sources.tolist() == [MEASURED, INTERPOLATED, INTERPOLATED]
    other = ask(here, SparseAttention("decode", 6144, 16, *list(vars(SPARSE).values())[3:]), [4], [1024])
    assert other.sources[0] == MODELLED
    assert other.seconds[0] > decode.seconds[0]
    assert LATENT.measured(here, np.ones(1), np.ones(1)) is None


def test_recurrences_add_up_their_kernels(tmp_path: Path) -> None:
    points = [("generation", n, 1) for n in REQUESTS] + [("context", 1, n) for n in TOKENS]
    rows = {
        "phase": [p[0] for p in points] * 2,
        "batch_size": [p[1] for p in points] * 2,
        "seq_len": [p[2] for p in points] * 2,
        "num_k_heads": 16,
        "num_v_heads": 32,
        "head_k_dim": 128,
        "head_v_dim": 128,
        "d_conv": 4,
        "model_name": "made up",
        "kernel_source": ["convolution"] * len(points) + ["recurrence"] * len(points),
        "latency": [0.001] * len(points) + [0.001 * p[1] + 0.0001 * p[2] for p in points],
    }
    write_table(tmp_path, "h100_sxm/linear_attention/sglang/0.5.14/gdn_perf", rows)
    decode, prefill = (Recurrence(phase, 16, 32, 128, 128, 4) for phase in ("decode", "prefill"))
    here = opened(tmp_path)  # vLLM has no table: SGLang's answers
    np.testing.assert_allclose(ask(here, decode, [4, 64]).seconds, [5.1e-6, 65.1e-6], rtol=1e-6)
    np.testing.assert_allclose(ask(here, prefill, [128, 4096]).seconds, [14.8e-6, 411.6e-6], rtol=1e-6)
    assert (ask(here, decode, [4, 64]).sources == MEASURED).all()
    half = ask(here, Recurrence("decode", 8, 16, 128, 128, 4), [64])
    assert half.sources[0] == MODELLED
    assert half.seconds[0] < 65.1e-6
