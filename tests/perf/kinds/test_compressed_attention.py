"""Compressed attention and hyper-connections (DeepSeek-V4) in the kernel database, and as operators."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perf.kernel_tables import ask, full_database, opened, took, write_table
from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.database import Columns, Measured, find_systems, open_database
from windtunnel.perf.kernel import Kernel
from windtunnel.perf.kernel_errors import family_errors
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED
from windtunnel.perf.kinds.compressed_attention import TABLES, CompressedAttention, CompressedTable, module
from windtunnel.perf.kinds.hyper_connection import HyperConnection
from windtunnel.perf.predictor import predictor
from windtunnel.perf.tabulate.host import eager_floor
from windtunnel.perf.tabulate.operators import operators
from windtunnel.perf.tabulate.tables import activations

FLASH = "deepseek-ai/DeepSeek-V4-Flash"
REQUESTS, KEYS = (1, 4, 16, 64, 256), (16, 128, 1024, 4096, 65536)
CHUNKS, CONTEXTS = (16, 1024, 8192), (0, 128, 4096)
DECODE, PREFILL = (module(phase, 4, 64, 16, "fp8_block") for phase in ("decode", "prefill"))
PRE, POST = (HyperConnection(side, 4096, 4) for side in ("pre", "post"))
real = pytest.mark.skipif(find_systems() is None, reason="the kernel database is not installed")


def rows(phase: str, ratio: int, heads: tuple[int, ...], factor: float) -> dict[str, Any]:
    if phase == "decode":
        points = [(each, n, 1, keys - 1, n, keys) for each in heads for n, keys in product(REQUESTS, KEYS)]
    else:
        cells = [*product(CHUNKS, CONTEXTS), *((chunk, 65536 - chunk) for chunk in CHUNKS)]
        points = [(each, 1, n, step, n, step) for each in heads for n, step in cells]
    return {
        "num_heads": [p[0] for p in points],
        "tp_size": [64 // p[0] for p in points],
        "batch_size": [p[1] for p in points],
        "isl": [p[2] for p in points],
        "step": [p[3] for p in points],
        "gemm_type": "fp8_block",
        "kernel_source": "one",
        "latency": [factor * took(module(phase, ratio, 64, p[0], "fp8_block"), p[4], p[5]) for p in points],
    }


def write(systems: Path, backend: str = "vllm", heads: tuple[int, ...] = (8, 16, 64), factor: float = 1.0) -> None:
    for (phase, ratio), table in TABLES.items():
        place = f"h100_sxm/sparse_attention/{backend}/0.24.0/{table}"
        write_table(systems, place, rows(phase, ratio, heads, factor))


def write_mixing(systems: Path, backend: str, tokens: tuple[int, ...], factor: float = 1.0) -> None:
    cells = list(product(("pre", "post"), tokens))
    columns = {
        "op_name": [side for side, _ in cells],
        "kernel_source": "one",
        "num_tokens": [n for _, n in cells],
        "num_sites": 2,
        "hc_mult": 4,
        "hidden_size": 4096,
        "latency": [2.0 * factor * took(HyperConnection(side, 4096, 4), n) for side, n in cells],
    }
    write_table(systems, f"h100_sxm/mhc/{backend}/0.24.0/mhc_module_perf", columns)


def seconds(kernel: Kernel, a: Any, b: Any) -> list[float]:
    return [took(kernel, x, y) * 1e-3 for x, y in zip(a, b, strict=True)]


def test_measured_points_come_back(tmp_path: Path) -> None:
    write(tmp_path)
    here = opened(tmp_path)
    for ratio in (4, 128):
        decode, prefill = replace(DECODE, ratio=ratio), replace(PREFILL, ratio=ratio)
        found = ask(here, decode, [4, 64], [1024, 4096])
        np.testing.assert_allclose(found.seconds, seconds(decode, [4, 64], [1024, 4096]), rtol=1e-9)
        chunks, contexts = [1024, 8192, 8192], [0, 128, 57344]
        long = ask(here, prefill, chunks, contexts)
        np.testing.assert_allclose(long.seconds, seconds(prefill, chunks, contexts), rtol=1e-9)
        assert (found.sources == MEASURED).all()
        assert (long.sources == MEASURED).all()
    assert here.notes == ()


def test_contexts_between_measured_ones_are_interpolated(tmp_path: Path) -> None:
    write(tmp_path)
    here, contexts = opened(tmp_path), np.array([2048.0, 20000, 57343, 64512])
    found = ask(here, PREFILL, 8192, contexts)
    assert found.sources.tolist() == [INTERPOLATED, INTERPOLATED, INTERPOLATED, MODELLED]
    np.testing.assert_allclose(found.seconds, seconds(PREFILL, [8192] * 4, contexts), rtol=0.05)
    beyond = ask(here, PREFILL, [8192], 500000)
    assert beyond.sources[0] == MODELLED
    assert beyond.extrapolated[0]


def test_other_heads_are_between_measured_ones(tmp_path: Path) -> None:
    write(tmp_path)
    kernel = replace(DECODE, heads=32, groups=4)
    found = ask(opened(tmp_path), kernel, [4, 64], [1024, 4096])
    assert found.sources.tolist() == [INTERPOLATED] * 2
    assert found.distance.tolist() == [1.0] * 2
    np.testing.assert_allclose(found.seconds, seconds(kernel, [4, 64], [1024, 4096]), rtol=0.1)


@pytest.mark.parametrize("changes", [{"kv_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"top_k": 1024}])
def test_other_sizes_and_formats_are_modelled(tmp_path: Path, changes: dict[str, Any]) -> None:
    write(tmp_path)
    here = opened(tmp_path)
    plain, wider = ask(here, DECODE, [64], [4096]), ask(here, replace(DECODE, **changes), [64], [4096])
    assert wider.sources[0] == MODELLED
    assert wider.extrapolated[0]
    assert plain.seconds[0] < wider.seconds[0] < 2.0 * plain.seconds[0]


def test_a_window_alone_is_modelled_beside_heavy_compression(tmp_path: Path) -> None:
    write(tmp_path)
    here, keys = opened(tmp_path), [4096, 65536]
    window, heavy = (ask(here, replace(DECODE, ratio=ratio), 64, keys) for ratio in (0, 128))
    assert window.sources.tolist() == [MODELLED] * 2
    assert (window.seconds < heavy.seconds).all()
    assert window.seconds[0] == window.seconds[1]
    assert 1.0 < window.seconds[0] / (1e-3 * took(replace(DECODE, ratio=0), 64, 4096)) < 1.2


@pytest.mark.parametrize(("a", "b"), [([1, 3, 90, 400], 5000), (7, [200, 3000, 50000, 200000])])
def test_time_grows_with_requests_and_context(tmp_path: Path, a: Any, b: Any) -> None:
    write(tmp_path)
    for kernel in (DECODE, PREFILL, replace(DECODE, ratio=128)):
        assert (np.diff(ask(opened(tmp_path), kernel, a, b).seconds) > 0).all()


def test_another_engines_modules_stand_in_and_are_said(tmp_path: Path) -> None:
    write(tmp_path, "sglang")
    here = opened(tmp_path)
    found = ask(here, DECODE, [4], [1024])
    np.testing.assert_allclose(found.seconds, seconds(DECODE, [4], [1024]), rtol=1e-9)
    assert found.sources[0] == INTERPOLATED
    assert here.notes == ("compressed attention of vllm is taken from sglang's measurements",)


def test_hyper_connections_are_halves_of_what_was_measured(tmp_path: Path) -> None:
    write_mixing(tmp_path, "vllm", (64, 1024))
    here = opened(tmp_path)
    for kernel in (PRE, POST):
        found = ask(here, kernel, [64, 1024])
        np.testing.assert_allclose(found.seconds, seconds(kernel, [64, 1024], [0, 0]), rtol=1e-9)
        assert found.sources.tolist() == [MEASURED] * 2
    assert ask(here, PRE, [1]).seconds[0] == pytest.approx(took(PRE, 64) * 1e-3)
    assert ask(here, PRE, [1]).sources[0] == MODELLED
    assert ask(here, replace(PRE, hidden=7168), [1024]).sources[0] == MODELLED


def test_few_tokens_take_another_engines_hyper_connections(tmp_path: Path) -> None:
    write_mixing(tmp_path, "vllm", (64, 1024))
    write_mixing(tmp_path, "sglang", (1, 64, 1024), factor=1.5)
    found = ask(opened(tmp_path), PRE, [1, 64, 200])
    assert found.sources.tolist() == [INTERPOLATED, MEASURED, INTERPOLATED]
    np.testing.assert_allclose(found.seconds[:2], [1.5e-3 * took(PRE, 1), 1e-3 * took(PRE, 64)], rtol=1e-9)


def test_without_a_table_there_is_no_answer(tmp_path: Path) -> None:
    here = opened(full_database(tmp_path))
    assert DECODE.measured(here, np.ones(1), np.ones(1)) is None
    assert PRE.measured(here, np.ones(1), np.zeros(1)) is None


def test_costs_by_hand() -> None:
    a, b = np.array([2.0]), np.array([4000.0])
    stored = 4096 * 1536 + 1024 * 16 * 512 + 16 * 512 * 1024 + 2 * 1024 * 4096 + 1024 * 64 * 128
    wide = 4096 * (4 * 640 + 64)
    scores = 4 * 16 * 512
    assert DECODE.flops(a, b)[0] == 2 * (2 * (stored + wide) + scores * (128 + 512) + 2 * 64 * 128 * 1000)
    entries = 2 * (128 + 512) * 584 + 2 * 1000 * 132
    assert DECODE.bytes_moved(a, b)[0] == stored + 2 * wide + entries + 2 * 4 * 4096
    heavy = replace(DECODE, ratio=128)
    rest = stored - 1024 * 64 * 128 + 4096 * 2 * 512
    assert heavy.flops(a, b)[0] == 2 * (2 * rest + scores * (128 + 4000 / 128))
    assert replace(DECODE, ratio=0).flops(a, b)[0] == 2 * (2 * (rest - 4096 * 2 * 512) + scores * 128)
    seen = 2 * 128 + 2 * 512
    index = 2 * 64 * 128 * (4001 + 4002) / 4
    assert PREFILL.flops(a, b)[0] == 2 * 2 * (stored + wide) + scores * seen + index
    assert PRE.flops(a, b)[0] == 2 * 2 * (24 + 1) * 4 * 4096
    assert PRE.bytes_moved(a, b)[0] == 2 * 5 * 2 * 4096 + 4 * 24 * 4 * 4096
    assert POST.bytes_moved(a, b)[0] == 2 * 9 * 2 * 4096


@real
def test_a_module_holds_its_projections_and_streams_are_mixed_twice_a_layer() -> None:
    pool = Pool(load_model(FLASH), device("b200_sxm"), Engine(max_model_len=8192, tensor_parallel_size=4))
    found = {op.name: op for op in operators(pool)}
    assert found["prefill_csa_attention"].kernel == PREFILL
    assert found["decode_csa_attention"].kernel == DECODE
    assert found["decode_hca_attention"].kernel == replace(DECODE, ratio=128)
    kinds = [found[f"decode_{kind}_attention"].count for kind in ("window", "csa", "hca")]
    assert kinds == [2, 21, 20]
    assert [found[f"hyper_connection_{side}"].count for side in ("pre", "post")] == [86, 86]
    assert found["hyper_connection_pre"].kernel == PRE
    assert found["experts"].count == found["attention_all_reduce"].count == 43
    assert not {"qkv_proj", "o_proj"} & set(found)


@real
def test_stages_send_every_stream_and_eager_layers_cost_as_sparse_ones() -> None:
    engine = Engine(preset="sglang-0.5", max_model_len=8192, tensor_parallel_size=4)
    alone = Pool(load_model(FLASH), device("b200_sxm"), engine)
    assert eager_floor(alone) == pytest.approx(43 * (1.2e-3 + 0.45e-3))
    two = replace(alone, engine=Engine(max_model_len=8192, tensor_parallel_size=4, pipeline_parallel_size=2))
    assert activations(two) == [4]


@real
@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
def test_every_point_of_the_database_comes_back_above_its_least_time(backend: str) -> None:
    database = open_database("b200_sxm", backend)
    assert database is not None
    measured = Measured(database, device("b200_sxm"))
    for (phase, ratio), whole in product(TABLES, (64, 128)):
        for heads in (16, 32):
            a, b, took = points(measured.table(CompressedTable), phase, ratio, whole, heads)
            kernel = module(phase, ratio, whole, heads, "fp8_block")
            found = kernel.measured(measured, a, b)
            assert found is not None
            np.testing.assert_allclose(found.seconds, took, rtol=1e-9)
            assert (found.sources == MEASURED).all()
            assert (kernel.bound(measured.device, a, b) < took).all()


@real
@pytest.mark.parametrize("name", ["b200_sxm", "h200_sxm"])
def test_the_assumed_errors_hold_on_points_taken_out(name: str) -> None:
    """Every third row or column of each plane, and the other model's whole tables: the 90th percentile of the errors is
    no larger than the band that stands for it."""
    database = open_database(name, "vllm")
    assert database is not None
    between: list[Any] = []
    other: list[Any] = []
    for (phase, ratio), whole in product(TABLES, (64, 128)):
        kernel = module(phase, ratio, whole, 32, "fp8_block")
        full = CompressedTable(Measured(database, device(name)))
        a, b, took = points(full, phase, ratio, whole, 32)
        for axis in (a, b):
            left_out = np.isin(axis, np.unique(axis)[1:-1][::3])
            kept = of_heads(full, phase, ratio, whole, 32).take(~left_out)
            between.append(errors(full, kernel, kept, (a, b, took), left_out))
        columns = table(full, phase, ratio)
        rest = columns.take(columns["num_heads"] * columns["tp_size"] != whole)
        other.append(errors(full, kernel, rest, (a, b, took), np.ones(len(a), dtype=bool)))
    band = family_errors("compressed")
    assert np.percentile(np.concatenate(between), 90) / 1.645 < band.interpolated
    assert np.percentile(np.concatenate(other), 90) / 1.645 < band.modelled


def table(tables: CompressedTable, phase: str, ratio: int) -> Columns:
    found = tables._table(TABLES[phase, ratio])
    assert found is not None
    return found[0]


def of_heads(tables: CompressedTable, phase: str, ratio: int, whole: int, heads: int) -> Columns:
    chosen = table(tables, phase, ratio).where(gemm_type="fp8_block", num_heads=heads, tp_size=whole // heads)
    return chosen.where(batch_size=1) if phase == "prefill" else chosen


def points(tables: CompressedTable, phase: str, ratio: int, whole: int, heads: int) -> tuple[Any, Any, Any]:
    chosen = of_heads(tables, phase, ratio, whole, heads)
    if phase == "decode":
        first, second = chosen["batch_size"], chosen["isl"] + chosen["step"]
    else:
        first, second = chosen["isl"], chosen["step"]
    return first.astype(float), second.astype(float), chosen["latency"] * 1e-3


def errors(full: CompressedTable, kernel: CompressedAttention, rest: Columns, known: Any, which: Any) -> Any:
    """|log error| of a table that holds ``rest`` alone, at some of the known points."""
    a, b, took = known
    here = CompressedTable(full.known)
    here._made["_table", TABLES[kernel.phase, kernel.ratio]] = (rest, full.backend)
    found = here.times(kernel, a[which], b[which])
    assert found is not None
    return np.abs(np.log(found.seconds / took[which]))


@real
@pytest.mark.parametrize("name", ["h20", "a100_sxm"])
def test_devices_without_a_table_use_the_roofline(name: str) -> None:
    found = predictor(Pool(load_model(FLASH), device(name), Engine(max_model_len=2048, tensor_parallel_size=8)))
    short, long = (found.times(DECODE, np.full(1, 64.0), np.full(1, keys)) for keys in (4096.0, 262144.0))
    assert short.sources[0] == MODELLED
    assert np.isinf(short.distance[0])
    assert short.error[0] == family_errors("compressed").roofline
    assert 0.0 < short.seconds[0] < long.seconds[0]
