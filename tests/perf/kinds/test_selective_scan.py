"""Selective scans in batch times: least cost, how they are divided, and that no table holds them."""

import numpy as np
import pytest

from perf.kernel_tables import H100
from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import read_config
from windtunnel.perf.kinds.collective import Collective
from windtunnel.perf.kinds.gemm import Gemm
from windtunnel.perf.kinds.selective_scan import SelectiveScanKernel
from windtunnel.perf.kinds.state_space import Convolution
from windtunnel.perf.predictor import roofline
from windtunnel.perf.tabulate.operator import Operator
from windtunnel.perf.tabulate.operators import operators

ZERO = np.zeros(1)
JAMBA = read_config(
    "jamba",
    {
        "architectures": ["JambaForCausalLM"],
        **{"hidden_size": 4096, "num_hidden_layers": 8, "intermediate_size": 14336, "vocab_size": 65536},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
)


def by_name(tp: int) -> dict[str, Operator]:
    pool = Pool(JAMBA, device("h100_sxm"), Engine(tensor_parallel_size=tp, max_model_len=4096))
    return {operator.name: operator for operator in operators(pool)}


def test_what_a_scan_moves() -> None:
    decode, prefill = (SelectiveScanKernel(phase, 8192, 16, 4) for phase in ("decode", "prefill"))
    tokens, state, decays = 2 * (4 * 8192 + 32), 2 * 8192 * 16 * 4, 4 * 8192 * 16
    for count in (1.0, 64.0):
        asked = np.array([count])
        assert decode.bytes_moved(asked, ZERO) == pytest.approx(count * (tokens + state) + decays)
        assert prefill.bytes_moved(asked, ZERO) == pytest.approx(count * tokens + state + decays)
        assert decode.flops(asked, ZERO) == prefill.flops(asked, ZERO) == 9 * 8192 * 16 * count


def test_channels_are_divided_and_what_a_token_says_is_summed() -> None:
    one, two = by_name(1), by_name(2)
    assert one["decode_scan"].kernel == SelectiveScanKernel("decode", 8192, 16, 2)
    assert two["prefill_scan"].kernel == SelectiveScanKernel("prefill", 4096, 16, 2)
    assert two["decode_convolution"].kernel == Convolution("decode", 4096, 4)
    assert (two["x_proj"].kernel, two["dt_proj"].kernel) == (Gemm(288, 4096), Gemm(4096, 256))
    assert "x_proj_all_reduce" not in one
    reduced = two["x_proj_all_reduce"].kernel
    assert isinstance(reduced, Collective)
    assert two["decode_scan"].count == 7


def test_a_scan_is_modelled_and_never_faster_than_its_bytes() -> None:
    for phase in ("decode", "prefill"):
        kernel = SelectiveScanKernel(phase, 8192, 16, 2)
        assert kernel.measured(None, ZERO, ZERO) is None  # type: ignore[arg-type]  # no table is asked
        tokens = np.array([1.0, 256.0, 8192.0])
        seconds = roofline(device("h100_sxm")).times(kernel, tokens, np.zeros(3)).seconds
        assert (seconds >= kernel.bytes_moved(tokens, np.zeros(3)) / H100.memory_bandwidth).all()
        assert (np.diff(seconds) > 0).all()
