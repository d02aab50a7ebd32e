"""Attention-DP servers that hold prompts back: their measured times per token."""

import pytest

from benchmarks.accuracy.prefill_interval import INTERVAL, ROWS

CLOSE = 0.15
"""Relative error that is allowed."""


def test_a_measured_server_with_the_interval_is_close() -> None:
    row = ROWS[3]
    assert abs(row.simulated(INTERVAL) / row.measured - 1) < CLOSE


@pytest.mark.long
def test_all_are() -> None:
    for row in ROWS:
        assert abs(row.simulated(INTERVAL) / row.measured - 1) < CLOSE, row
