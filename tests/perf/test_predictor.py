from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.efficiency import fit
from windtunnel.hardware import Device, load_devices
from windtunnel.perf.kernel import LAUNCH_EAGER, LAUNCH_GRAPH, Kernel
from windtunnel.perf.kernel_times import MODELLED
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.elementwise import Elementwise, Quantize
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.latent_attention import LatentAttention
from windtunnel.perf.predictor import roofline

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
