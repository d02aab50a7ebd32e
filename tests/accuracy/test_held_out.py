"""Held-out kernels: what is taken out, and that it is predicted from the rest."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from perf import kernel_tables

from benchmarks.accuracy.held_out import Bench, errors, taken_out
from benchmarks.accuracy.kernel_errors import NINETIETH, spread
from benchmarks.accuracy.kernel_report import main
from benchmarks.accuracy.kernel_sources import TABLES
from benchmarks.accuracy.plain_models import between_engines, repeats
from windtunnel.perf.database import Columns
from windtunnel.perf.kernel_errors import family_errors, relative_error
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED, KernelTimes, from_source
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.elementwise import Elementwise
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm

GEMM = next(source for source in TABLES if source.table[0] == "gemm")


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    kernel_tables.full_database(tmp_path)
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path))
    return Bench("h100_sxm", "vllm")


def test_a_kernel_that_follows_its_efficiency_is_predicted_from_the_rest(bench: Bench) -> None:
    for split in ("tokens", "shapes"):
        (found,) = bench.held_out(GEMM, split)
        assert found.family == "gemm_bfloat16"
        assert MEASURED not in found.sources
        assert errors(found, found.predicted)["median"] < 0.1
        assert errors(found, found.predicted)["p95"] < errors(found, found.interpolated)["p95"]
    assert len(found.measured) == len(kernel_tables.TOKENS) * 7


def test_ends_stay_and_a_third_goes(bench: Bench) -> None:
    rows = bench.rows(GEMM)
    assert rows is not None
    out = taken_out(rows, GEMM, "tokens")
    assert set(rows["m"][out]) == set(sorted(kernel_tables.TOKENS)[1:-1][1::3])
    shapes = taken_out(rows, GEMM, "shapes")
    assert set(rows["n"][~shapes]) == {256, 4096, 16384}


def test_noise_is_the_spread_of_repeats() -> None:
    rows = Columns(
        {name: np.array(values) for name, values in {"n": [1] * 4, "k": [1] * 4, "m": [1, 1, 1, 2]}.items()}
        | {"latency": np.array([1.0, 1.1, 1.21, 5.0])},
        {"gemm_dtype": (np.zeros(4, dtype=np.int64), ("bfloat16",))},
    )
    assert sorted(repeats(rows, GEMM)) == pytest.approx([0.0, np.log(1.1), np.log(1.1)])


def test_engines_that_call_one_library_repeat_each_other() -> None:
    axes = {"n": np.array([1, 1, 2]), "k": np.array([1, 1, 1]), "m": np.array([1, 2, 1])}
    kinds = {"gemm_dtype": (np.zeros(3, dtype=np.int64), ("bfloat16",))}
    one = Columns(axes | {"latency": np.array([1.0, 2.0, 3.0])}, kinds)
    two = Columns(axes | {"latency": np.array([1.5, 3.3, 4.5])}, kinds)
    # everything takes 1.5 times as long, one point a tenth more
    assert sorted(between_engines(one, [two], GEMM)) == pytest.approx([0.0, 0.0, np.log(1.1)], abs=1e-12)
    assert len(between_engines(one, [], GEMM)) == 0


def test_models_are_compared_where_all_of_them_answer(bench: Bench) -> None:
    decode = next(source for source in TABLES if source.table[1] == "generation_attention_perf")
    (found,) = bench.held_out(decode, "tokens")
    assert found.compared.all()
    few = replace(found, interpolated=np.where(found.measured < 1e-5, found.interpolated, np.nan))
    assert 0 < few.compared.sum() < len(few.measured)
    far = np.where(few.compared, few.measured, 9.0 * few.measured)
    assert errors(few, far) == {"median": 0.0, "p95": 0.0}
    (shapes,) = bench.held_out(decode, "shapes")
    assert shapes.compared.all()


def test_the_report_is_a_table_or_json(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.database() is not None
    assert main(["--device", "h100_sxm"]) == 0
    assert "| h100_sxm, vllm | gemm_bfloat16 | tokens |" in capsys.readouterr().out
    assert main(["--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"gemm_bfloat16", "all_gather"} <= {row["family"] for row in document["kernels"]}
    assert main(["--backend", "none"]) == 2


def test_ninety_per_cent_of_a_normal_law_give_its_deviation() -> None:
    logs = np.random.default_rng(0).normal(0.0, 0.1, 100_000)
    assert spread(np.exp(logs), np.ones_like(logs)) == pytest.approx(0.1, rel=0.02)
    assert NINETIETH == 1.645


def test_errors_grow_with_the_distance_to_data() -> None:
    kernel, octaves = Gemm(4096, 4096), np.array([0.0, 0.0, np.nan, 1.0, 3.0, np.inf])
    sources = np.array([MEASURED, INTERPOLATED, MODELLED, MODELLED, MODELLED, MODELLED], dtype=np.int8)
    found = relative_error(kernel, KernelTimes(np.ones(6), sources, octaves))
    known = family_errors("gemm_bfloat16")
    assert found.tolist()[:4] == pytest.approx([known.measured, known.interpolated, known.rule, known.modelled])
    assert (np.diff(found[3:]) >= 0).all()
    assert found[5] == max(known.roofline, known.modelled)


def test_every_kernel_has_a_family_with_errors() -> None:
    names = {
        kernel.error_family for kernel in (Gemm(1, 1, "float16"), Experts(1, 1, 1, 1, dtype="fp8"), Elementwise(1))
    }
    names.add(Attention("decode", 8, 1, 128, 128).error_family)
    assert names == {"gemm_bfloat16", "experts_fp8", "elementwise", "attention_decode"}
    assert family_errors("no such") == family_errors("other")


def test_distances_are_zero_at_data_and_never_measured_by_rule() -> None:
    assert from_source(np.ones(2), MEASURED).distance.tolist() == [0.0, 0.0]
    plain = from_source(np.ones(2), MODELLED)
    assert np.isnan(plain.distance).all()
    assert not plain.extrapolated.any()
    other = from_source(np.ones(2), INTERPOLATED).modelled()
    assert other.extrapolated.all()
    assert other.distance.tolist() == [1.0, 1.0]


EXCHANGES = {
    source.table[1]: source for source in TABLES if source.table[0] == "comm" and source.axis != "message_size"
}


def test_exchanges_are_left_out_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_tables.with_exchanges(tmp_path)
    kernel_tables.write_table(tmp_path, "h100_sxm/gemm/sglang/0.5.12/gemm_perf", kernel_tables.gemm_rows())
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path))
    for table, mode in (("ll", "low_latency"), ("normal", "high_throughput")):
        found = list(Bench("h100_sxm", "sglang").held_out(EXCHANGES[f"wideep_deepep_{table}_perf"], "tokens"))
        assert [entry.family for entry in found] == [f"dispatch_{mode}", f"combine_{mode}"]
        for entry in found:
            assert entry.errors_of == "exchange"
            assert (entry.sources == INTERPOLATED).all()
            assert 20e-6 < entry.measured[0] < 1e-3
            assert errors(entry, entry.predicted)["p95"] < 0.2
            assert np.isfinite(entry.interpolated).all()


def test_an_engines_own_exchanges_are_in_microseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"ep_size": 8, "hidden_size": [2048] * 6 + [4096] * 6, "topk": 8, "num_experts": 128}
    tokens = [1, 8, 64, 128, 256, 512]
    rows = {"comm_backend": "deepep_ll", "phase": "combine", "num_tokens": 2 * tokens}
    kernel_tables.write_table(
        kernel_tables.full_database(tmp_path),
        "h100_sxm/comm/vllm/0.24.0/moe_a2a_perf",
        rows | sizes | {"latency": [40.0 + n for n in tokens] + [40.0 + 2 * n for n in tokens]},
    )
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path))
    bench, source = Bench("h100_sxm", "vllm"), EXCHANGES["moe_a2a_perf"]
    (found,) = bench.held_out(source, "tokens")
    np.testing.assert_allclose(found.measured, [104e-6, 168e-6])
    (found,) = bench.held_out(source, "shapes")
    np.testing.assert_allclose(found.measured, [1e-6 * (40.0 + 2 * n) for n in tokens])
    np.testing.assert_allclose(found.predicted[:-1], found.measured[:-1], rtol=0.1)
    assert (found.sources == MODELLED).all()


def test_wide_experts_lie_between_the_measured_numbers_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [(ep, n) for ep in (8, 16, 32) for n in (1, 16, 256)]
    rows = {
        "moe_dtype": "bfloat16",
        "distribution": "uniform",
        "num_tokens": [ep * n for ep, n in points],
        "hidden_size": 2048,
        "inter_size": 768,
        "topk": 8,
        "num_experts": 128,
        "moe_tp_size": 1,
        "moe_ep_size": [ep for ep, _ in points],
        "latency": [0.1 * n**0.5 + 8 / ep for ep, n in points],
    }
    kernel_tables.full_database(tmp_path)
    kernel_tables.write_table(tmp_path, "h100_sxm/gemm/sglang/0.5.12/gemm_perf", kernel_tables.gemm_rows())
    kernel_tables.write_table(tmp_path, "h100_sxm/moe/sglang/0.5.10/wideep_context_moe_perf", rows)
    monkeypatch.setenv("WINDTUNNEL_KERNELS", str(tmp_path))
    source = next(source for source in TABLES if source.table[1] == "wideep_context_moe_perf")
    (found,) = Bench("h100_sxm", "sglang").held_out(source, "shapes")
    assert len(found.measured) == 3
    assert (found.sources == MODELLED).all()
    assert errors(found, found.predicted)["p95"] < 0.15
