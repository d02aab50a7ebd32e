"""Open loads whose lengths are known in the mean alone."""

import numpy as np
import pytest

from benchmarks.accuracy.open_loads import LONGEST, with_lengths
from windtunnel.validation.measured_points import MeasuredPoint
from windtunnel.workload.columns import Workload


def test_lengths_are_drawn_around_their_means_and_arrivals_stay() -> None:
    known = Workload.from_columns(
        arrival=np.arange(200) / 8, prompt_tokens=np.full(200, 205), output_tokens=np.full(200, 195)
    )
    point = MeasuredPoint("a", "m", "h100_pcie", "vllm", "0.8.5", {}, known, {"ttft": 0.2, "tpot": 0.07})
    one, other = (with_lengths(point, draw).workload for draw in (0, 1))
    for name, mean in (("prompt_tokens", 205), ("output_tokens", 195)):
        tokens = getattr(one, name)
        assert tokens.mean() == pytest.approx(mean, rel=0.01)
        assert tokens.std() > 0.5 * mean and tokens.min() >= 2 and tokens.max() < 2 * LONGEST
        assert (tokens != getattr(other, name)).any()
    assert (one.arrival == known.arrival).all()
