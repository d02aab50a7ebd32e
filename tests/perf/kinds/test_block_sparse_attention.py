"""Block-sparse attention (MiniMax-M3) in the kernel database, on databases made up for the test, and as operators."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perf.kernel_tables import H100, ask, full_database, opened, took, write_table
from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.corrections import ALL
from windtunnel.perf.database import Database, Measured, open_database
from windtunnel.perf.kernel_errors import family_errors, relative_error
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.block_sparse_attention import GRAPH_REQUESTS, BlockSparseAttention, BlockSparseTable, module
from windtunnel.perf.predictor import predictor
from windtunnel.perf.tabulate.operators import operators

REQUESTS, KEYS = (1, 4, 16, 64, 256), (16, 128, 1024, 4096, 65536)
CHUNKS = (16, 1024, 8192)
DECODE = BlockSparseAttention("decode", 6144, 8, 1, 128, 128, 1, 128, 2048)
PREFILL = replace(DECODE, phase="prefill")


def rows(phase: str, contexts: tuple[int, ...] = (0, 128), extra: float = 0.0, requests: Any = REQUESTS) -> Any:
    kernel = DECODE if phase == "generation" else PREFILL
    if phase == "generation":
        points = [(n, 1, keys - 1, n, keys) for n, keys in product(requests, KEYS)]
    else:
        points = [(1, n, context, n, context) for n, context in product(CHUNKS, contexts)]
    return {
        "num_heads": 8,
        "batch_size": [p[0] for p in points],
        "isl": [p[1] for p in points],
        "step": [p[2] for p in points],
        "kv_cache_dtype": "bfloat16",
        "gemm_type": "bfloat16",
        "latency": [max(took(kernel, a, b), extra) for *_, a, b in points],
        "kernel_source": "one",
    }


def write(systems: Path, backend: str, version: str, **changes: Any) -> None:
    for phase in ("generation", "context"):
        write_table(systems, f"h100_sxm/msa/{backend}/{version}/msa_{phase}_module_perf", rows(phase, **changes))


def seconds(kernel: BlockSparseAttention, a: Any, b: Any) -> list[float]:
    return [took(kernel, x, y) * 1e-3 for x, y in zip(a, b, strict=True)]


def test_measured_points_come_back(tmp_path: Path) -> None:
    write(tmp_path, "vllm", "0.24.0")
    here = opened(tmp_path)
    decode = ask(here, DECODE, [4, 64], [1024, 4096])
    np.testing.assert_allclose(decode.seconds, seconds(DECODE, [4, 64], [1024, 4096]), rtol=1e-9)
    prefill = ask(here, PREFILL, [1024, 8192], [0, 128])
    np.testing.assert_allclose(prefill.seconds, seconds(PREFILL, [1024, 8192], [0, 128]), rtol=1e-9)
    assert (decode.sources == MEASURED).all()
    assert (prefill.sources == MEASURED).all()
    assert here.notes == ()


def test_a_longer_context_follows_the_least_times_by_rule(tmp_path: Path) -> None:
    write(tmp_path, "vllm", "0.24.0")
    context = np.array([128.0, 4096, 65536, 500000])
    found = ask(opened(tmp_path), PREFILL, 8192, context)
    assert found.sources.tolist() == [MEASURED, MODELLED, MODELLED, MODELLED]
    assert np.isnan(found.distance[1:]).all()
    assert not found.extrapolated.any()
    assert relative_error(PREFILL, found)[1] == family_errors("block_sparse_prefill").rule
    np.testing.assert_allclose(found.seconds, seconds(PREFILL, [8192] * 4, context), rtol=0.03)


def test_other_heads_and_formats_are_modelled(tmp_path: Path) -> None:
    write(tmp_path, "vllm", "0.24.0")
    here = opened(tmp_path)
    for changes in ({"heads": 16}, {"kv_dtype": "fp8"}, {"dtype": "fp8_block"}):
        other = ask(here, replace(DECODE, **changes), [64], [4096])
        assert other.sources[0] == MODELLED
        assert other.extrapolated[0]


@pytest.mark.parametrize(("a", "b"), [([1, 3, 90, 400], 5000), (7, [100, 3000, 90000, 200000])])
def test_time_grows_with_requests_and_context(tmp_path: Path, a: Any, b: Any) -> None:
    write(tmp_path, "vllm", "0.24.0")
    for kernel in (DECODE, PREFILL, replace(DECODE, heads=16, kv_heads=2)):
        found = ask(opened(tmp_path), kernel, a, b).seconds
        assert (np.diff(found) > 0).all()


def test_tensorrt_llm_takes_another_engines_modules_and_says_so(tmp_path: Path) -> None:
    write(tmp_path, "vllm", "0.24.0")
    write(tmp_path, "trtllm", "1.3.0", extra=50.0)
    here = opened(tmp_path, "trtllm", "1.3.0")
    found = ask(here, PREFILL, [1024], [0])
    np.testing.assert_allclose(found.seconds, seconds(PREFILL, [1024], [0]), rtol=1e-9)
    assert found.sources[0] == INTERPOLATED
    assert "block-sparse attention of trtllm is taken from vllm's measurements" in here.notes
    assert replace(DECODE).measured(opened(tmp_path, "trtllm", "1.3.0"), np.ones(1), np.ones(1)) is not None


def test_prompts_that_the_host_held_up_take_the_kernels_time(tmp_path: Path) -> None:
    write(tmp_path, "sglang", "0.5.16", contexts=(0, 128, 500000), extra=0.7)
    write(tmp_path, "vllm", "0.24.0")
    here = opened(tmp_path, "sglang", "0.5.14")  # the first version with the table stands for older ones
    short, long = ask(here, PREFILL, [16, 1024], 0).seconds, ask(here, PREFILL, [8192], 500000)
    np.testing.assert_allclose(short, seconds(PREFILL, [16, 1024], [0, 0]), rtol=1e-9)
    np.testing.assert_allclose(long.seconds, seconds(PREFILL, [8192], [500000]), rtol=1e-9)
    assert long.sources[0] == MEASURED
    assert "short prompts' block-sparse attention of sglang is taken from vllm's measurements" in here.notes
    database = Database(tmp_path, "h100_sxm", "sglang", "0.5.14", "exact")
    believed = ask(Measured(database, H100, ALL.without("host_bound_tables")), PREFILL, [16], 0)
    assert believed.seconds[0] == pytest.approx(0.7e-3)
    assert believed.sources[0] == MEASURED


def test_sglangs_decodes_beyond_its_graphs_are_not_believed(tmp_path: Path) -> None:
    write(tmp_path, "sglang", "0.5.16", requests=(1, 16, GRAPH_REQUESTS, 2 * GRAPH_REQUESTS))
    found = ask(opened(tmp_path, "sglang", "0.5.16"), DECODE, [256, 512], 4096)
    assert found.sources.tolist() == [MEASURED, MODELLED]
    np.testing.assert_allclose(found.seconds, seconds(DECODE, [256, 512], [4096, 4096]), rtol=0.03)


@pytest.mark.parametrize("name", ["h100_sxm", "h200_sxm", "b300_sxm"])
def test_the_rule_foretells_the_contexts_that_sglang_measured(name: str) -> None:
    database = open_database(name, "sglang")
    assert database is not None
    table, errors = BlockSparseTable(Measured(database, device(name), ALL.without("host_bound_tables"))), []
    for heads, length in product((8, 16, 32, 64), (4096.0, 8192.0, 16384.0)):
        kernel = module("prefill", heads, "bfloat16", "bfloat16")
        floor, context = table.times(kernel, np.ones(1), np.zeros(1)), np.exp2(np.arange(7.0, 17.0))
        measured = table.times(kernel, np.full(10, length), context)
        assert floor is not None
        assert measured is not None
        assert (measured.sources == MEASURED).all()
        if measured.seconds[0] > 1.5 * floor.seconds[0]:
            least = kernel.bound(device(name), np.full(10, length), context)
            errors.append(np.log(measured.seconds[0] * least / least[0] / measured.seconds)[1:])
    spread = np.percentile(np.abs(np.concatenate(errors)), 90) / 1.645
    assert len(errors) > 4
    assert spread < family_errors("block_sparse_prefill").rule


def test_a_point_slower_than_one_with_more_context_is_dropped(tmp_path: Path) -> None:
    table = rows("generation")
    spoilt = [n == 16 and step == 127 for n, step in zip(table["batch_size"], table["step"], strict=True)]
    table["latency"] = [ms * (50.0 if bad else 1.0) for ms, bad in zip(table["latency"], spoilt, strict=True)]
    write_table(tmp_path, "h100_sxm/msa/vllm/0.24.0/msa_generation_module_perf", table)
    found = ask(opened(tmp_path), DECODE, [16, 16], [128, 1024])
    assert found.sources.tolist() == [MODELLED, MEASURED]
    np.testing.assert_allclose(found.seconds, seconds(DECODE, [16, 16], [128, 1024]), rtol=0.03)


def test_without_a_table_there_is_no_answer(tmp_path: Path) -> None:
    assert DECODE.measured(opened(full_database(tmp_path)), np.ones(1), np.ones(1)) is None


def test_costs_by_hand() -> None:
    weights = 6144 * 128 * (8 + 2 + 8 + 1 + 1)
    a, b = np.array([2.0]), np.array([5000.0])
    assert DECODE.flops(a, b)[0] == 2 * (2 * weights + 2 * 8 * 256 * 2048 + 2 * 128 * 5000)
    keys = 2 * (2048 * 256 * 2 + 5000 * 128 * 2)
    assert DECODE.bytes_moved(a, b)[0] == 2 * weights + keys + 2 * (4 * 6144 + 2 * 8 * 256)
    pairs = sum(min(5000 + i, 2048) for i in (1, 2)) * 2 * 8 * 256 + (5001 + 5002) * 2 * 128
    assert PREFILL.flops(a, b)[0] == 2 * 2 * weights + pairs


def test_a_module_holds_its_projections_and_dense_layers_have_their_own() -> None:
    pool = Pool(load_model("MiniMaxAI/MiniMax-M3"), device("h200"), Engine(max_model_len=2048, tensor_parallel_size=8))
    found = {op.name: op for op in operators(pool)}
    assert found["prefill_sparse_attention"].kernel == PREFILL
    assert found["decode_sparse_attention"].kernel == DECODE
    assert found["decode_sparse_attention"].count == 57
    assert found["decode_attention"].kernel == Attention("decode", 8, 1, 128, 128)
    assert [found[name].count for name in ("decode_attention", "qkv_proj", "o_proj", "qk_norm")] == [3] * 4
    assert found["attention_all_reduce"].count == 60


@pytest.mark.parametrize("name", ["h20", "a100_sxm"])
def test_devices_without_a_table_use_the_roofline(name: str) -> None:
    model = load_model("MiniMaxAI/MiniMax-M3")
    found = predictor(Pool(model, device(name), Engine(max_model_len=2048, tensor_parallel_size=8)))
    short, long = (found.times(DECODE, np.full(1, 64.0), np.full(1, keys)) for keys in (4096.0, 65536.0))
    assert short.sources[0] == MODELLED
    assert np.isinf(short.distance[0])
    assert short.error[0] == family_errors("block_sparse_decode").roofline
    assert 0.0 < short.seconds[0] < long.seconds[0]
