from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.efficiency import fit
from perf.kernel_tables import EFFICIENCY, H100, full_database, opened
from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import Device, load_devices
from windtunnel.model import load_model
from windtunnel.perf.database import find_systems
from windtunnel.perf.kernel import LAUNCH_EAGER, LAUNCH_GRAPH, Kernel
from windtunnel.perf.kernel_times import MODELLED
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.elementwise import Elementwise, Quantize
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.latent_attention import LatentAttention
from windtunnel.perf.predictor import ATTAINABLE, Lent, predictor, roofline
from windtunnel.perf.tabulate.grid import tabulate

DEVICES = load_devices()
KERNELS: list[Kernel] = [
    Gemm(4096, 4096),
    Gemm(4096, 4096, "nvfp4"),
    Gemm(4096, 4096, "int8"),
    Elementwise(4096.0),
    Quantize(4096),
    Attention("decode", 32, 8, 128, 128),
    Attention("prefill", 32, 8, 128, 128),
    LatentAttention("decode", 16, 512, 128, 64, 128),
    LatentAttention("prefill", 16, 512, 128, 64, 128),
    Experts(2048, 768, 8, 128, dtype="fp8"),
    Collective("all_reduce", 2, 4096),
    Collective("reduce_scatter", 16, 4096),
]
A, B = np.meshgrid([1.0, 2, 64, 65, 4096], [0.0, 1, 1000, 100000], indexing="ij")


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_every_device_answers_every_kernel_above_its_bound(device: Device) -> None:
    source = roofline(device)
    for kernel in KERNELS:
        found = source.times(kernel, A, B)
        assert (found.sources == MODELLED).all()
        assert (found.seconds >= kernel.bound(device, A, B)).all()
        assert (np.diff(found.seconds, axis=0) >= 0).all(), kernel
        assert (np.diff(found.seconds, axis=1) >= 0).all(), kernel


def test_nothing_takes_no_time() -> None:
    assert (roofline(DEVICES["h100_sxm"]).times(Gemm(64, 64), np.zeros(3), np.zeros(3)).seconds == 0).all()


def test_a_faster_memory_makes_decode_faster_in_proportion() -> None:
    device = DEVICES["h100_sxm"]
    twice = replace(device, name="fast", memory_bandwidth=2 * device.memory_bandwidth)
    kernel = Attention("decode", 32, 8, 128, 128)
    one, two = (kernel.bound(d, np.array([64.0]), np.array([8192.0]))[0] for d in (device, twice))
    assert one == pytest.approx(2 * two)


def test_a_device_without_measurements_is_calibrated_on_its_kin() -> None:
    kin = {"a100_sxm": "a100_sxm", "l4": "l40s", "rtx_4090": "l40s", "a30": "a100_sxm", "h20": "h100_sxm"}
    assert {name: roofline(DEVICES[name]).calibrated_on for name in kin} == kin


def test_formats_that_a_device_lacks_multiply_in_16_bits() -> None:
    device = DEVICES["a100_sxm"]
    many, none = np.array([65536.0]), np.zeros(1)
    assert Gemm(8192, 8192, "fp8").bound(device, many, none) == Gemm(8192, 8192).bound(device, many, none)


def test_a_graph_launches_faster_than_the_host() -> None:
    source = roofline(DEVICES["h100_sxm"])
    one, zero = np.ones(1), np.zeros(1)
    eager = source.times(Elementwise(64.0, 2, graph=False), one, zero).seconds[0]
    graph = source.times(Elementwise(64.0, 2), one, zero).seconds[0]
    assert eager - graph == pytest.approx(2 * (LAUNCH_EAGER - LAUNCH_GRAPH))


def test_collectives_across_nodes_use_the_network() -> None:
    device = DEVICES["h100_sxm"]
    inside, across = Collective("all_gather", 8, 8192), Collective("all_gather", 16, 8192)
    a, b = np.array([4096.0]), np.zeros(1)
    ratio = across.bound(device, a, b)[0] / inside.bound(device, a, b)[0]
    assert ratio == pytest.approx(device.link_bandwidth / device.network_bandwidth * (15 / 16) / (7 / 8))


@given(st.sampled_from([0.2, 0.4, 0.8]), st.sampled_from([0.4, 0.6, 0.96]), st.sampled_from([0.0, 5e-6, 2e-5]))
def test_calibration_finds_what_made_the_data(compute: float, memory: float, latency: float) -> None:
    work = np.repeat([1e-6, 1e-5, 1e-4, 1e-3], 4)
    moved = np.tile([1e-6, 1e-5, 1e-4, 1e-3], 4)
    seconds = np.maximum(work / compute, moved / memory) + latency
    found = fit(np.stack([work, moved, seconds]))
    assert found.compute == pytest.approx(compute, abs=0.021)
    assert found.memory == pytest.approx(memory, abs=0.021)
    assert found.latency == pytest.approx(latency, abs=1e-9)


@pytest.fixture
def lent(tmp_path: Path) -> Lent:
    """The made-up H100's measurements, lent to a device like it."""
    measured = opened(full_database(tmp_path))
    return Lent(measured, replace(H100, name="kin"), roofline(H100).efficiencies)


GEMM = Gemm(4096, 4096)
ROWS = np.array([1.0, 16, 16384])


def test_a_device_like_the_lender_takes_as_long(lent: Lent) -> None:
    found, theirs = lent.times(GEMM, ROWS, 0 * ROWS), GEMM.measured(lent.measured, ROWS, 0 * ROWS)
    assert found is not None
    assert theirs is not None
    np.testing.assert_allclose(found.seconds, theirs.seconds)
    assert (found.sources == MODELLED).all()
    assert np.isinf(found.distance).all()


def test_memory_slows_small_batches_and_multiprocessors_large_ones(lent: Lent) -> None:
    known = lent.times(GEMM, ROWS, 0 * ROWS)
    assert known is not None
    for changed, few, many in (
        ({"memory_bandwidth": H100.memory_bandwidth / 2}, 2.0, 1.0),
        ({"multiprocessors": H100.multiprocessors // 2}, 1.0, 2.0),
        ({"flops": {"bfloat16": H100.flops["bfloat16"] * 0.6}}, 1.0, 1.0),  # the lender attains half of its peak
        ({"flops": {"bfloat16": H100.flops["bfloat16"] / 4}}, 1.0, 4 * EFFICIENCY / ATTAINABLE),
    ):
        found = replace(lent, device=replace(lent.device, **changed)).times(GEMM, ROWS, 0 * ROWS)
        assert found is not None
        ratios = found.seconds / known.seconds
        assert ratios[0] == pytest.approx(few, rel=0.2)
        assert ratios[-1] == pytest.approx(many, rel=0.2)


@pytest.mark.skipif(find_systems() is None, reason="no kernel database installed")
def test_casts_follow_their_rule_where_measurements_are_lent() -> None:
    pool = Pool(load_model("Qwen3-8B"), DEVICES["h20"], Engine())
    found, quantize = predictor(pool), Quantize(4096)
    rows = np.array([1.0, 64, 4096])
    assert found.times(quantize, rows, 0 * rows).seconds == pytest.approx(
        roofline(pool.device).times(quantize, rows, 0 * rows).seconds, abs=2e-6
    )


def test_check_bits_in_the_memory_are_read_too(lent: Lent) -> None:
    checked = replace(lent, device=replace(lent.device, inline_ecc=True))
    plain, slower = (each.times(GEMM, ROWS, 0 * ROWS) for each in (lent, checked))
    assert plain is not None
    assert slower is not None
    assert 1.03 < slower.seconds[0] / plain.seconds[0] < 16 / 15
    assert slower.seconds[-1] == pytest.approx(plain.seconds[-1], rel=0.01)


def test_collectives_are_lent_between_equal_links_only(lent: Lent) -> None:
    kernel = Collective("all_reduce", 4, 4096)
    assert lent.times(kernel, ROWS, 0 * ROWS) is not None
    assert replace(lent, device=replace(H100, link="pcie")).times(kernel, ROWS, 0 * ROWS) is None
    assert lent.times(Elementwise(4096.0), ROWS, 0 * ROWS) is None


@pytest.mark.skipif(find_systems() is None, reason="the kernel database is not installed")
def test_who_lends_to_whom() -> None:
    def lender(name: str) -> str | None:
        pool = Pool(load_model("Qwen/Qwen3-0.6B"), DEVICES[name], Engine(max_num_seqs=8, max_model_len=4096))
        found = predictor(pool)
        return found.lent.measured.device.name if found.lent else None

    assert lender("rtx_4090") == "l40s"
    assert lender("a100_sxm_40gb") == "a100_sxm"
    assert lender("h20") == "h100_sxm"
    assert lender("h100_sxm") is None  # measured itself
    assert lender("mi300x") is None  # of another kind


@pytest.mark.skipif(find_systems() is None, reason="the kernel database is not installed")
def test_times_on_amd_say_what_they_are_worth() -> None:
    def notes(preset: str) -> str:
        engine = Engine(preset=preset, max_num_seqs=8, max_model_len=4096)
        return " ".join(tabulate(Pool(load_model("Qwen/Qwen3-0.6B"), DEVICES["mi300x"], engine)).notes)

    assert "take it for a bound" in notes("vllm-0.32")
    assert "vLLM 0.6.1 attained on MI300X" in notes("vllm-0.6")
