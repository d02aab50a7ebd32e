from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.hardware import device
from windtunnel.perf.batch_times import Floats
from windtunnel.perf.kernel import STORED_BYTES, Efficiency, Kernel, cache_format, first_of, pairs
from windtunnel.perf.kinds.attention import Attention
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.elementwise import Elementwise, Quantize
from windtunnel.perf.kinds.experts import Experts
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.latent_attention import LatentAttention

ONE, ZERO = np.ones(1), np.zeros(1)
KERNELS: list[Kernel] = [
    Gemm(4096, 8192),
    Gemm(4096, 8192, "fp8"),
    Elementwise(100.0),
    Quantize(4096),
    Attention("decode", 32, 8, 128, 128),
    Attention("prefill", 32, 8, 128, 128, window=64),
    LatentAttention("decode", 16, 512, 128, 64, 128),
    LatentAttention("prefill", 16, 512, 128, 64, 128),
    Experts(2048, 768, 8, 128),
    Collective("all_reduce", 4, 4096),
]


@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 50))
def test_pairs_are_counted_one_by_one(a: int, b: int, window: int) -> None:
    seen = sum(min(b + i, window) if window else b + i for i in range(1, a + 1))
    assert pairs(np.array([float(a)]), np.array([float(b)]), window)[0] == pytest.approx(seen)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_costs_grow_with_both_axes(kernel: Kernel) -> None:
    a, b = np.meshgrid([1.0, 2.0, 8.0, 100.0], [0.0, 1.0, 50.0, 4000.0], indexing="ij")
    for cost in (kernel.flops(a, b), kernel.bytes_moved(a, b)):
        assert (cost >= 0).all()
        assert (np.diff(cost, axis=0) >= 0).all()
        assert (np.diff(cost, axis=1) >= 0).all()
    assert kernel.describe()


def test_a_gemm_by_hand() -> None:
    assert Gemm(3, 5).flops(7 * ONE, ZERO)[0] == 2 * 3 * 5 * 7
    assert Gemm(3, 5).bytes_moved(7 * ONE, ZERO)[0] == 2 * (3 * 5 + 7 * 5 + 7 * 3)
    assert Gemm(3, 5, "fp8").bytes_moved(7 * ONE, ZERO)[0] == 3 * 5 + 7 * 5 + 2 * 7 * 3
    assert Gemm(3, 5, "fp8", weight_only=True).bytes_moved(7 * ONE, ZERO)[0] == 3 * 5 + 2 * (7 * 5 + 7 * 3)


def test_decode_reads_the_keys_that_a_window_leaves() -> None:
    full, window = Attention("decode", 8, 2, 64, 64), Attention("decode", 8, 2, 64, 64, window=100)
    b = np.array([50.0, 100.0, 5000.0])
    np.testing.assert_allclose(window.bytes_moved(ONE, b), full.bytes_moved(ONE, np.minimum(b, 100.0)))


def test_an_fp8_cache_is_half_as_many_bytes() -> None:
    wide, narrow = (Attention("decode", 8, 8, 64, 64, 0, dtype) for dtype in ("bfloat16", "fp8"))
    long = np.array([1e6])
    assert narrow.bytes_moved(ONE, long)[0] == pytest.approx(0.5 * wide.bytes_moved(ONE, long)[0], rel=1e-4)


def test_few_tokens_touch_few_experts_and_many_touch_all() -> None:
    kernel = Experts(64, 64, 2, 16, ep=2)
    assert kernel.touched(ONE)[0] == pytest.approx(1.0)  # 2 of 16, half of them here
    assert kernel.touched(1e4 * ONE)[0] == pytest.approx(8.0)


def test_an_all_reduce_sends_its_message_twice_around_the_ring() -> None:
    assert Collective("all_reduce", 4, 100).bytes_moved(3 * ONE, ZERO)[0] == pytest.approx(2 * 0.75 * 600)
    assert Collective("all_gather", 4, 100).bytes_moved(3 * ONE, ZERO)[0] == pytest.approx(0.75 * 600)


def test_weights_that_are_widened_multiply_in_16_bits() -> None:
    assert Gemm(1, 1, "fp8").rate == "fp8"
    assert Gemm(1, 1, "fp8", weight_only=True).rate == "bfloat16"
    assert Gemm(1, 1, "int4", weight_only=True).rate == "bfloat16"
    assert Experts(1, 1, 1, 1, dtype="nvfp4").rate == "fp4"


@dataclass(frozen=True)
class Plain(Kernel):
    """So many FLOPs and bytes at each point."""

    work: float
    moved: float

    def flops(self, a: Floats, b: Floats) -> Floats:
        return self.work * a + b

    def bytes_moved(self, a: Floats, b: Floats) -> Floats:
        return self.moved * a + b

    def describe(self) -> str:
        return "plain"

    @property
    def error_family(self) -> str:
        return "plain"


def test_the_roofline_by_hand() -> None:
    """Three seconds of arithmetic or two of memory; less what kernels attain of the peaks."""
    gpu = device("h100")
    peak, bandwidth = gpu.peak_flops("bfloat16"), gpu.memory_bandwidth
    busy, idle = Plain(3 * peak, 2 * bandwidth), Plain(1 * peak, 2 * bandwidth)
    assert busy.bound(gpu, ONE, ZERO)[0] == pytest.approx(3.0)
    assert idle.bound(gpu, ONE, ZERO)[0] == pytest.approx(2.0)
    assert busy.least(gpu)(2 * ONE)[0] == pytest.approx(6.0)
    half = {"plain": Efficiency(compute=0.5, memory=0.8, latency=0.25)}
    assert busy.attained(gpu, half, ONE, ZERO)[0] == pytest.approx(3 / 0.5 + 0.25)
    assert idle.attained(gpu, half, ONE, ZERO)[0] == pytest.approx(2 / 0.8 + 0.25)


@pytest.mark.parametrize(
    ("dtype", "each"),
    [("bfloat16", 2.0), ("fp8", 1.0), ("nvfp4", 0.5 + 1 / 16), ("mxfp4", 0.5 + 1 / 32), ("mxfp8", 1 + 1 / 32),
     ("int4", 0.5 + 2 / 128)],
)  # fmt: skip
def test_stored_numbers_bring_their_scales(dtype: str, each: float) -> None:
    """A byte for each 16 or 32 numbers, two for each 128."""
    assert STORED_BYTES[dtype] == each
    assert cache_format("fp8") == "fp8"
    assert cache_format("bfloat16") == "bfloat16"


def test_the_first_format_that_was_measured_is_taken() -> None:
    assert first_of(("a", "b", "c"), ("c", "b")) == "b"
    assert first_of(("x",), ("c", "b")) == "c"


@pytest.mark.parametrize(
    ("dtype", "each", "rate"),
    [
        ("float32", 4.0, "bfloat16"),
        ("float16", 2.0, "bfloat16"),
        ("fp8", 1.0, "fp8"),
        ("fp8_block", 1.0, "fp8"),
        ("mxfp8", 1.03125, "fp8"),
        ("mxfp4", 0.53125, "fp8"),
        ("int8", 1.0, "int8"),
        ("int4", 0.515625, "bfloat16"),
        ("nvfp4", 0.5625, "fp4"),
    ],
)
def test_a_format_has_its_bytes_and_its_rate(dtype: str, each: float, rate: str) -> None:
    """Of a product of 1,000 × 1,000; rows come in the format of the rate, out in 16 bits."""
    kernel = Gemm(1000, 1000, dtype)
    row = {"bfloat16": 2.0}.get(rate, each) * 1000 + 2.0 * 1000
    assert kernel.rate == rate
    assert kernel.bytes_moved(ONE, ZERO)[0] == pytest.approx(each * 1e6 + row)
    assert kernel.error_family == ("gemm_bfloat16" if dtype == "float16" else f"gemm_{dtype}")
    assert kernel.efficiency_family == f"gemm_{rate}"
    assert kernel.describe() == f"n=1000 k=1000 {dtype}"


def test_caches_of_one_byte_a_number_are_fp8() -> None:
    assert [cache_format(name) for name in ("fp8_e4m3", "fp8_e5m2", "int8", "float16")] == [
        *("fp8", "fp8", "fp8", "bfloat16"),
    ]


def test_small_kernels_take_a_launch_beyond_their_bytes() -> None:
    """2 µs from a graph and 3 µs without, for each launch; a µs for what moves at four fifths of the bandwidth."""
    none = {"elementwise": Efficiency(1.0, 1.0, 0.0)}
    gpu, bytes_ = device("h100"), 0.8e-6 * device("h100").memory_bandwidth
    for launches, graph, micros in ((1, True, 3.0), (3, True, 7.0), (1, False, 4.0), (2, False, 7.0), (0, True, 1.0)):
        kernel = Elementwise(bytes_, launches, graph)
        found = kernel.attained(gpu, {kernel.efficiency_family: none["elementwise"]}, ONE, ZERO)[0]
        assert found == pytest.approx(micros * 1e-6)
    assert Elementwise(1.0, 3).launched == 3
    assert Elementwise(1.0).eager() == Elementwise(1.0, graph=False)


def test_what_a_kernel_does_not_say_of_itself() -> None:
    """It is one launch, moves its bytes over the memory, multiplies in 16 bits, and is the same in every batch."""
    plain = Plain(1.0, 1.0)
    assert (plain.launched, plain.rate, plain.communicates, plain.by_rule) == (1, "bfloat16", False, False)
    assert plain.bandwidth(device("h100")) == device("h100").memory_bandwidth
    same = (plain.eager(), plain.beside_prefill(), plain.beside_experts(), plain.resolved(True), plain.resolved(False))
    assert all(kernel is plain for kernel in same)
    assert Quantize(8).flops(ONE, ZERO).tolist() == [0.0]  # it only moves data
    assert Gemm(1, 2).beside_experts() == Gemm(1, 2, beside=True)
