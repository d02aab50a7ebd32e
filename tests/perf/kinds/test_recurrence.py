"""Linear attention in the kernel database, on a database made up for the test."""

from pathlib import Path

import numpy as np

from perf.kernel_tables import TOKENS, ask, opened, write_table
from windtunnel.perf.kernel_times import MEASURED, MODELLED
from windtunnel.perf.kinds.recurrence import Recurrence

REQUESTS, KEYS = (1, 4, 16, 64, 256), (16, 128, 1024, 4096)


def test_recurrences_add_up_their_kernels(tmp_path: Path) -> None:
    points = [("generation", n, 1) for n in REQUESTS] + [("context", 1, n) for n in TOKENS]
    rows = {
        "phase": [p[0] for p in points] * 2,
        "batch_size": [p[1] for p in points] * 2,
        "seq_len": [p[2] for p in points] * 2,
        "num_k_heads": 16,
        "num_v_heads": 32,
        "head_k_dim": 128,
        "head_v_dim": 128,
        "d_conv": 4,
        "model_name": "made up",
        "kernel_source": ["convolution"] * len(points) + ["recurrence"] * len(points),
        "latency": [0.001] * len(points) + [0.001 * p[1] + 0.0001 * p[2] for p in points],
    }
    write_table(tmp_path, "h100_sxm/linear_attention/sglang/0.5.14/gdn_perf", rows)
    decode, prefill = (Recurrence(phase, 16, 32, 128, 128, 4) for phase in ("decode", "prefill"))
    here = opened(tmp_path)  # vLLM has no table: SGLang's answers
    np.testing.assert_allclose(ask(here, decode, [4, 64]).seconds, [5.1e-6, 65.1e-6], rtol=1e-6)
    np.testing.assert_allclose(ask(here, prefill, [128, 4096]).seconds, [14.8e-6, 411.6e-6], rtol=1e-6)
    assert (ask(here, decode, [4, 64]).sources == MEASURED).all()
    half = ask(here, Recurrence("decode", 8, 16, 128, 128, 4), [64])
    assert half.sources[0] == MODELLED
    assert half.seconds[0] < 65.1e-6
