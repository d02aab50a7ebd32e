"""The time of vision encoders: their kernels, and a table made up for the test."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perf.kernel_tables import opened, write_table
from windtunnel.deployment import Engine, Pool
from windtunnel.hardware import device
from windtunnel.model import load_model
from windtunnel.model.vision import Vision
from windtunnel.perf.encoder import EncoderAttention, encoder_seconds, kernels
from windtunnel.perf.kernel_times import INTERPOLATED, MEASURED, MODELLED
from windtunnel.perf.sources import predictor_from

SMALL = Vision(layers=4, hidden_size=64, heads=4, mlp_size=100, patch_values=48, merge=2, out_size=32, full_layers=4)


def flops(vision: Vision, ranks: int = 1, images: float = 1.0, patches: int = 256) -> float:
    found = kernels(vision, ranks, np.array([images]), patches)
    return sum(count * float(kernel.flops(a, b)[0]) for count, kernel, a, b in found)


def test_work_by_hand() -> None:
    patch, merger = 2 * 256 * 48 * 64, 2 * 64 * (256 * 256 + 256 * 32)
    products = 4 * 2 * 256 * (64 * 192 + 64 * 64 + 64 * 100 + 100 * 64)
    pairs = 4 * 4 * 64 * 256 * 256
    assert flops(SMALL) == patch + products + pairs + merger
    assert flops(SMALL, images=3.0) == 3 * flops(SMALL)
    gate = 4 * 2 * 256 * 64 * 100
    assert flops(replace(SMALL, gated=True)) == flops(SMALL) + gate
    windows = replace(SMALL, window=64, full_layers=1)  # three layers in four windows each
    assert flops(windows) == flops(SMALL) - pairs * 3 / 4 * 3 / 4
    assert flops(SMALL, 2) == pytest.approx((flops(SMALL) - patch) / 2 + patch)


def test_seconds_of_images() -> None:
    pool = Pool(replace(load_model("Qwen/Qwen3-8B"), vision=SMALL), device("h100"), Engine(preset="vllm-0.33"))
    seconds = encoder_seconds(pool, predictor_from(pool, "roofline"), 1024, 4)
    assert seconds[0] == 0.0
    assert (np.diff(seconds) > 0).all()
    assert seconds[4] > 4 * flops(SMALL, patches=4096) / pool.device.peak_flops("bfloat16")
    with pytest.raises(ValueError, match="no sizes"):
        encoder_seconds(Pool(load_model("Qwen/Qwen3-8B"), device("h100")), predictor_from(pool, "roofline"), 1024, 4)


def test_measured_attention(tmp_path: Path) -> None:
    points = [(images, patches) for images in (1, 4) for patches in (256, 1024)]
    rows = {
        "batch_size": [point[0] for point in points],
        "isl": [point[1] for point in points],
        "num_heads": 16,
        "head_dim": 80,
        "latency": [images * patches * 1e-4 for images, patches in points],
    }
    write_table(tmp_path, "h100_sxm/encoder_attention/vllm/0.24.0/encoder_attention_perf", rows)
    here = opened(tmp_path)
    kernel = EncoderAttention(16, 80)
    found = kernel.measured(here, np.array([1.0, 4.0, 2.0]), np.array([256.0, 1024.0, 512.0]))
    assert found is not None
    assert found.sources.tolist() == [MEASURED, MEASURED, INTERPOLATED]
    np.testing.assert_allclose(found.seconds[:2], [25.6e-6, 409.6e-6], rtol=1e-9)
    assert 25.6e-6 < found.seconds[2] < 409.6e-6
    other = EncoderAttention(8, 80).measured(here, np.array([4.0]), np.array([1024.0]))
    assert other is not None
    assert other.sources[0] == MODELLED
    assert other.seconds[0] == pytest.approx(409.6e-6 / 2)
