"""Shift: what is drawn, what is kept, and what it is worth elsewhere."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.accuracy.points import Measured, measured
from benchmarks.accuracy.served_errors import folds, shifted
from benchmarks.accuracy.served_shift import drawn_median, error, moved, shifts
from windtunnel.metrics.evidence import PRIOR, ServerKey

SLOW = ServerKey("vllm", "Slow", "h100_sxm", "fp8", "m/slow", "TP1")
RIGHT = SLOW._replace(family="Right", model="m/right")


def points(server: ServerKey, bias: float, loads: int = 12) -> list[Measured]:
    random = np.random.default_rng(7)
    return [
        Measured(server, f"{server}", f"{load}", 0.1, float(random.normal(bias, 0.05)), 0.0)
        for load in range(loads)
        for _ in range(4)
    ]


def test_a_median_is_drawn_to_zero_as_few_loads_know_it() -> None:
    few, many = (drawn_median([replace(one, steps=0.2) for one in points(SLOW, 0.2, loads)]) for loads in (1, 36))
    assert few == pytest.approx(0.2 / (1 + PRIOR))
    assert many == pytest.approx(0.2 * 36 / (36 + PRIOR))


def test_what_helps_elsewhere_is_kept_and_what_does_not_is_not() -> None:
    known = shifts(folds(points(SLOW, 0.15) + points(RIGHT, 0.0)))
    assert set(known) == {SLOW[:3]}
    assert known[SLOW[:3]] == pytest.approx(0.15 * 12 / 16, abs=0.02)
    assert moved(points(SLOW, 0.0)[0], known) == known[SLOW[:3]]
    assert moved(points(RIGHT, 0.0)[0], known) == 0.0
    assert shifts(folds(points(SLOW, 0.15, 2))) == {}  # eight points


def test_what_is_known_to_be_off_has_its_own() -> None:
    bad = points(SLOW, 0.6)
    known = shifts(folds(bad + points(SLOW._replace(model="m/sound"), 0.0)))
    assert set(known) == {SLOW[:5]}
    assert moved(bad[0], known) == pytest.approx(0.45, abs=0.02)


def test_the_worth_is_that_of_points_that_decide_nothing() -> None:
    said = shifted(points(SLOW, 0.15))
    assert "tpot of the half that decides nothing: 1" in said
    assert error([np.log(1.1), -np.log(1.1), 0.0]) == pytest.approx(1 - 1 / 1.1)


def test_a_measurement_under_two_names_counts_once() -> None:
    row = {
        **dict.fromkeys(("family", "dtype", "layout"), "x"),
        **{"backend": "vllm", "system": "h100_sxm", "checkpoint": "a", "version": "1", "isl": 10, "osl": 20},
        **{"concurrency": 4, "kernel_error": 0.1, "reason": "", "unreadable": ""},
        **{"ttft_measured": 0.1, "tpot_measured": 0.02, "ttft_simulated": 0.1, "tpot_simulated": 0.01},
    }
    found = measured([row, row | {"checkpoint": "b"}, row | {"concurrency": 8}, row | {"reason": "too large"}])
    assert [(one.server.model, one.clients) for one in found] == [("a", "4"), ("a", "8")]
