"""Served errors: bands that are made of one half of the groups, and checked on the other."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.accuracy.served_errors import (
    Sample,
    contained,
    first_half,
    fit_engines,
    random_halves,
    render,
    sample,
)
from windtunnel.simulate.error_band import LEVEL, served_errors
from windtunnel.validation.served_points import Point
from windtunnel.validation.served_replay import Result


def drawn(groups: int, points: int, seed: int = 0) -> Sample:
    """Groups of points whose latencies miss the simulated ones by a normal law in logs."""
    random = np.random.default_rng(seed)
    names = np.repeat([f"model {i}" for i in range(groups)], points)
    n = len(names)
    return Sample(
        names,
        np.where(np.arange(n) % 2, "vllm", "sglang"),
        np.full(n, 0.1),
        random.normal(0.05, 0.2, n),
        random.normal(0.3, 0.3, n),
    )


def test_bands_of_one_half_hold_nine_tenths_of_the_other() -> None:
    points = drawn(12, 200)
    half = first_half(points.group)
    assert sorted(set(points.group[half])) != sorted(set(points.group[~half]))
    errors = fit_engines(points.part(half))
    assert set(errors) == {"vllm", "sglang"}
    tpot, ttft = contained(points.part(~half), errors)
    assert tpot == pytest.approx(LEVEL, abs=0.03)
    assert LEVEL - 0.03 < ttft < 0.99
    assert np.median([share for share, _ in random_halves(points, 10)]) == pytest.approx(LEVEL, abs=0.03)


def test_an_engine_without_bands_is_out_of_them() -> None:
    points = drawn(4, 50)
    known = {name: errors for name, errors in fit_engines(points).items() if name == "vllm"}
    assert contained(points, known)[0] == pytest.approx(LEVEL / 2, abs=0.1)


def test_points_become_a_sample_without_those_that_were_not_simulated() -> None:
    point = Point("a", "agg", "vllm", "0.19.0", "m", "", "h100_sxm", 100, 10, 4, 1, 1, False, 0.2, 0.02)
    found = sample([Result(point, 0.1, 0.02, 0.0, 0.05), Result(replace(point, id="b"), reason="because")])
    assert found.group.tolist() == ["m on h100_sxm"]
    assert found.ttft.tolist() == [pytest.approx(np.log(2.0))]
    assert found.tpot.tolist() == [0.0]


def test_the_file_holds_every_engine() -> None:
    text = render(drawn(6, 50))
    assert "[vllm]\nfloor = " in text
    for engine in ("vllm", "sglang", "trtllm"):
        assert served_errors(engine).step_low <= 0 <= served_errors(engine).step_high
    widest = served_errors("unknown")
    assert widest.first_token_high == max(served_errors(name).first_token_high for name in ("vllm", "sglang", "trtllm"))
