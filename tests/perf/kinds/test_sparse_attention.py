"""Sparse attention in the kernel database, on databases made up for the test."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perf.kernel_tables import H100, ask, full_database, opened, took, write_table
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED
from windtunnel.perf.kinds.latent_attention import LatentAttention
from windtunnel.perf.kinds.sparse_attention import SparseAttention

REQUESTS, KEYS = (1, 4, 16, 64, 256), (16, 128, 1024, 4096)
LATENT = LatentAttention("decode", 16, 512, 128, 64, 128)
SPARSE = SparseAttention("decode", 6144, 8, 2048, 512, 192, 64, 256, 32, 128, 2048, "fp8", "fp8_block")
SHARED_INDEX = replace(SPARSE, index_heads=0, index_head_dim=0)


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
