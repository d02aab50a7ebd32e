"""Casts in the kernel database, on a database made up for the test."""

from pathlib import Path

import numpy as np

from perf.kernel_tables import (
    ask,
    opened,
    write_table,
)
from windtunnel.perf.kernel_times import INTERPOLATED
from windtunnel.perf.kinds.elementwise import Quantize


def test_quantisation_adds_the_cast_and_the_search_for_the_scale(tmp_path: Path) -> None:
    for table, ms in (("scale_matrix_perf", 0.002), ("computescale_perf", 0.001)):
        rows = {"m": [1, 16, 1, 16], "k": [1024, 1024, 4096, 4096], "latency": [ms, 2 * ms, ms, 4 * ms]}
        write_table(tmp_path, f"h100_sxm/quantize/vllm/0.24.0/{table}", rows)
    here = opened(tmp_path)
    np.testing.assert_allclose(ask(here, Quantize(1024), [1, 16]).seconds, [3e-6, 6e-6])
    between = ask(here, Quantize(2048), [16])
    assert 6e-6 < between.seconds[0] < 12e-6
    assert between.sources[0] == INTERPOLATED
