"""Kimi delta attention in the kernel database, on databases made up for the test, and as operators."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perf.kernel_tables import H100, took, write_table
from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.perf.corrections import ALL
from windtunnel.perf.database import Columns, Database, Measured, open_database
from windtunnel.perf.kernel_errors import family_errors
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED, KernelTimes
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.elementwise import Elementwise
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.kimi_delta import CONVOLUTION, KimiDelta, KimiDeltaTable
from windtunnel.perf.kinds.recurrence import AXES, PHASES, Recurrence
from windtunnel.perf.predictor import predictor
from windtunnel.perf.tabulate.operators import operators

REQUESTS, TOKENS = tuple(2**i for i in range(11)), tuple(2**i for i in range(16))
DECODE = ("causal_conv1d_update", "fused_recurrent_kda_packed_decode")
PREFILL = (CONVOLUTION, "flashkda_fwd")


def kimi(phase: str, heads: int = 24) -> KimiDelta:
    return KimiDelta(phase, heads, heads, 128, 128, 4)


def rows(shares: dict[str, float], heads: tuple[int, ...] = (24, 48), floor: float = 0.0) -> dict[str, Any]:
    """Each kernel takes its share of the layer's time, convolutions of prompts no less than ``floor`` ms."""
    found: dict[str, list[Any]] = {"phase": [], "batch_size": [], "seq_len": [], "num_v_heads": [], "latency": []}
    sources = []
    for name, share in shares.items():
        decode = name not in PREFILL
        for number in heads:
            for x in REQUESTS if decode else TOKENS:
                whole = took(kimi("decode" if decode else "prefill", number), x)
                values = ("generation" if decode else "context", x if decode else 1, 1 if decode else x, number)
                for column, value in zip(found, values, strict=False):
                    found[column].append(value)
                found["latency"].append(max(share * whole, floor if name == CONVOLUTION else 0.0))
                sources.append(name)
    return {**found, "kernel_source": sources}


SPLIT = {DECODE[0]: 0.25, DECODE[1]: 0.75, PREFILL[0]: 0.25, PREFILL[1]: 0.75}


def opened(systems: Path, backend: str = "vllm", corrections: Any = ALL) -> Measured:
    return Measured(Database(systems, "h100_sxm", backend, "1.0", "exact"), H100, corrections)


def ask(measured: Measured, kernel: KimiDelta, a: Any) -> KernelTimes:
    x = np.asarray(a, dtype=float)
    found = kernel.measured(measured, x, np.zeros_like(x))
    assert found is not None
    return found


def seconds(kernel: KimiDelta, a: Any) -> list[float]:
    return [took(kernel, x) * 1e-3 for x in a]


def test_measured_points_come_back_as_the_sum_of_their_kernels(tmp_path: Path) -> None:
    write_table(tmp_path, "h100_sxm/kda/vllm/1.0/kda_perf", rows(SPLIT))
    here = opened(tmp_path)
    for phase, points in (("decode", [8, 64]), ("prefill", [64, 16384])):
        found = ask(here, kimi(phase), points)
        np.testing.assert_allclose(found.seconds, seconds(kimi(phase), points), rtol=1e-9)
        assert (found.sources == MEASURED).all()
    assert here.notes == ()
    assert Recurrence("decode", 24, 24, 128, 128, 4).measured(here, np.ones(1), np.zeros(1)) is None


def test_a_kernel_that_does_it_all_takes_the_place_of_two_where_it_is_faster(tmp_path: Path) -> None:
    write_table(tmp_path, "h100_sxm/kda/vllm/1.0/kda_perf", rows(SPLIT | {"fused_kda_decode": 0.9}))
    found = ask(opened(tmp_path), kimi("decode"), [8, 64])
    np.testing.assert_allclose(found.seconds, 0.9 * np.array(seconds(kimi("decode"), [8, 64])), rtol=1e-9)
    slower = tmp_path / "slower"
    write_table(slower, "h100_sxm/kda/vllm/1.0/kda_perf", rows(SPLIT | {"fused_kda_decode": 1.1}))
    found = ask(opened(slower), kimi("decode"), [8, 64])
    np.testing.assert_allclose(found.seconds, seconds(kimi("decode"), [8, 64]), rtol=1e-9)


def test_heads_between_measured_numbers_are_interpolated_and_others_modelled(tmp_path: Path) -> None:
    write_table(tmp_path, "h100_sxm/kda/vllm/1.0/kda_perf", rows(SPLIT))
    here = opened(tmp_path)
    between = ask(here, kimi("prefill", 32), [1024])
    np.testing.assert_allclose(between.seconds, seconds(kimi("prefill", 32), [1024]), rtol=0.03)
    assert between.sources[0] == INTERPOLATED
    few, fewest = ask(here, kimi("prefill", 8), [1024]), ask(here, kimi("prefill", 24), [1024])
    assert few.sources[0] == MODELLED
    assert few.seconds[0] == fewest.seconds[0]  # heads run side by side
    states = ask(here, kimi("decode", 8), [192])
    assert states.sources[0] == MODELLED
    np.testing.assert_allclose(states.seconds, seconds(kimi("decode", 24), [64]), rtol=1e-9)
    wide = ask(here, KimiDelta("decode", 24, 24, 64, 128, 4), [64])
    assert wide.sources[0] == MODELLED
    assert wide.seconds[0] < ask(here, kimi("decode"), [64]).seconds[0]


@pytest.mark.parametrize("heads", [8, 24, 32, 96])
def test_time_grows_with_requests_and_tokens(tmp_path: Path, heads: int) -> None:
    write_table(tmp_path, "h100_sxm/kda/vllm/1.0/kda_perf", rows(SPLIT))
    for phase in ("decode", "prefill"):
        found = ask(opened(tmp_path), kimi(phase, heads), np.exp2(np.arange(1.0, 17.0)))
        assert (np.diff(found.seconds) > 0).all()


def test_convolutions_that_waited_for_the_host_are_another_engines(tmp_path: Path) -> None:
    write_table(tmp_path, "h100_sxm/kda/vllm/1.0/kda_perf", rows(SPLIT, floor=0.8))
    write_table(tmp_path, "h100_sxm/kda/sglang/1.0/kda_perf", rows({CONVOLUTION: 0.25}))
    here = opened(tmp_path)
    found = ask(here, kimi("prefill"), [64, 1024])
    np.testing.assert_allclose(found.seconds, seconds(kimi("prefill"), [64, 1024]), rtol=1e-9)
    assert (found.sources == INTERPOLATED).all()
    assert here.notes == ("convolutions of Kimi delta attention of vllm are taken from sglang's measurements",)
    believed = ask(opened(tmp_path, corrections=ALL.without("host_bound_tables")), kimi("prefill"), [64])
    assert believed.seconds[0] > 0.8e-3


def test_an_engine_without_the_table_takes_another_engines_and_says_so(tmp_path: Path) -> None:
    write_table(tmp_path, "h100_sxm/kda/sglang/9.9/kda_perf", rows(SPLIT))
    here = opened(tmp_path, "trtllm")
    assert ask(here, kimi("decode"), [8]).sources[0] == INTERPOLATED
    assert here.notes == ("Kimi delta attention of trtllm is taken from sglang's measurements",)
    assert kimi("decode").measured(opened(tmp_path / "empty"), np.ones(1), np.zeros(1)) is None


def test_states_are_read_no_faster_than_from_memory(tmp_path: Path) -> None:
    """A microbenchmark repeats one layer, whose states a cache then holds; those of all layers do not fit."""
    table = rows(SPLIT, (24,))
    cached = np.isin(table["batch_size"], (8, 64)) & (np.array(table["phase"]) == "generation")
    table["latency"] = list(np.where(cached, 0.2, 1.0) * np.array(table["latency"]))
    write_table(tmp_path, "h100_sxm/kda/vllm/1.0/kda_perf", table)
    found = ask(opened(tmp_path), kimi("decode"), [64, 1024])
    moved = kimi("decode").bytes_moved(np.array([64.0, 1024.0]), np.zeros(2))
    assert found.seconds[0] == pytest.approx(found.seconds[1] * moved[0] / moved[1])
    alone = ask(opened(tmp_path, corrections=ALL.without("cold_cache")), kimi("decode"), [64])
    assert alone.seconds[0] == pytest.approx(0.2 * seconds(kimi("decode"), [64])[0])


class Without(KimiDeltaTable):
    """A table that lacks some of its rows."""

    points: Any = ()
    heads: int = 0

    def _table(self, engine: str) -> Columns | None:
        found = super()._table(engine)
        if found is None:
            return None
        out = found["num_v_heads"] == self.heads
        for phase, axis in AXES.items():
            code = found.texts["phase"][1].index(PHASES[phase])
            out |= np.isin(found[axis], self.points) & (found.texts["phase"][0] == code)
        return found.take(~out)


@pytest.mark.parametrize("name", ["h200_sxm", "b200_sxm"])
def test_what_is_left_out_comes_back_within_its_error(name: str) -> None:
    database = open_database(name, "sglang")
    assert database is not None
    whole = KimiDeltaTable(Measured(database, device(name)))
    interpolated, modelled = [], []
    for phase, heads in (("decode", 24), ("decode", 48), ("prefill", 24), ("prefill", 48)):
        kernel, points = kimi(phase, heads), np.exp2(np.arange(1.0, 10.0))
        truth = whole.times(kernel, points)
        assert truth is not None
        lacking = Without(Measured(database, device(name)))
        lacking.points = (4, 32, 256)
        found = lacking.times(kernel, points)
        assert found is not None
        interpolated.append(np.log(found.seconds / truth.seconds)[np.isin(points, lacking.points)])
        lacking = Without(Measured(database, device(name)))
        lacking.heads = heads
        found = lacking.times(kernel, points)
        assert found is not None
        modelled.append(np.log(found.seconds / truth.seconds))
    errors = family_errors(kimi("decode").error_family)
    assert np.percentile(np.abs(np.concatenate(interpolated)), 90) < 1.645 * errors.interpolated
    assert np.percentile(np.abs(np.concatenate(modelled)), 90) < 1.645 * errors.modelled


def test_a_layer_has_one_projection_in_and_the_ends_of_its_low_ranks() -> None:
    model = load_model("moonshotai/Kimi-Linear-48B-A3B-Instruct")
    found = {op.name: op for op in operators(Pool(model, device("h200"), Engine(tensor_parallel_size=4)))}
    assert found["qkvg_proj"].kernel == Gemm(3 * 8 * 128 + 128 + 128 + 8, 2304)
    assert found["decay_proj"].kernel == found["output_gate_proj"].kernel == Gemm(8 * 128, 128)
    assert found["prefill_recurrence"].kernel == kimi("prefill", 8)
    assert [found[name].count for name in ("qkvg_proj", "gated_norm", "decode_recurrence")] == [20] * 3
    assert [found[name].count for name in ("decode_latent_attention", "o_proj")] == [7, 27]


@pytest.mark.parametrize("name", ["mi300x", "a100_sxm"])
def test_devices_without_a_table_use_the_roofline(name: str) -> None:
    model = load_model("moonshotai/Kimi-Linear-48B-A3B-Instruct")
    found = predictor(Pool(model, device(name), Engine())).times(kimi("decode"), np.array([1.0, 64]), np.zeros(2))
    assert (found.sources == MODELLED).all()
    assert np.isinf(found.distance).all()
    assert (np.diff(found.seconds) > 0).all()
    assert (found.error == family_errors("kimi_delta").roofline).all()


def test_kimi_k3_completes_both_sums_before_it_normalises_the_experts() -> None:
    pool = Pool(load_model("moonshotai/Kimi-K3"), device("b300"), Engine(tensor_parallel_size=8))
    ops = operators(pool)
    found = {op.name: op for op in ops}
    assert found["expert_all_reduce"].kernel == Collective("all_reduce", 8, 7168 + 3584)
    assert found["latent_norm"].kernel == Elementwise(4.0 * 3584)
    assert found["qkvg_proj"].kernel == Gemm(4 * 1536 + 128 + 12, 7168)
    assert found["output_gate_proj"].count == 24  # of latent attention; the linear layers' is in their projection
    assert "norm" not in found
    mixed = [op for op in ops if op.name == "attention_residual"]
    assert sum(op.count for op in mixed) == 2 * 93
    assert {op.kernel for op in mixed} == {Elementwise((8.0 + 2.0 * n) * 7168) for n in range(9)}
