"""Shift: what is drawn, what is kept, and what it is worth elsewhere."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.accuracy.points import Measured, measured
from benchmarks.accuracy.served_errors import plain_groups, shifted
from benchmarks.accuracy.served_shift import error, left_out, moved, shifted_groups, shrunk
from windtunnel.metrics.evidence import PRIOR, ServerKey, served_groups

SLOW = ServerKey("vllm", "Slow", "h100_sxm", "fp8", "m/slow", "TP1")
RIGHT = SLOW._replace(family="Right", model="m/right")


def points(server: ServerKey, bias: float, loads: int = 8) -> list[Measured]:
    """Of three layouts."""
    random = np.random.default_rng(7)
    servers = [server._replace(layout=layout) for layout in ("TP1", "TP2", "TP4")]
    return [
        Measured(one, f"{one}", f"{load}", 0.1, float(random.normal(bias, 0.02)), 0.0)
        for one in servers
        for load in range(loads)
        for _ in range(4)
    ]


def test_a_median_is_drawn_to_zero_as_few_loads_know_it() -> None:
    group = replace(served_groups()[()], steps=(0.0, 0.1, 0.2, 0.3, 0.4), loads=4)
    assert shrunk([group]) == pytest.approx(0.2 * 4 / (4 + PRIOR))
    assert shrunk([replace(group, loads=396)]) == pytest.approx(0.2 * 396 / (396 + PRIOR))


def test_what_helps_servers_left_out_is_kept_and_what_does_not_is_not() -> None:
    known = shifted_groups(plain_groups(points(SLOW, 0.15) + points(RIGHT, 0.0)))
    assert {key for key, one in known.items() if one.shift} == {SLOW[:3]}
    assert known[SLOW[:3]].shift == pytest.approx(0.15 * 24 / 28, abs=0.01)
    assert moved(points(SLOW, 0.0)[0], known) == known[SLOW[:3]].shift
    assert moved(points(RIGHT, 0.0)[0], known) == 0.0
    before, after = left_out([one for key, one in known.items() if len(key) == 6 and key[1] == "Slow"])
    assert [before, after] == [pytest.approx(0.15, abs=0.01), pytest.approx(0.15 * 4 / 20, abs=0.02)]


def test_the_file_holds_what_its_groups_say() -> None:
    again = shifted_groups(served_groups())
    shifts = {key: one.shift for key, one in served_groups().items() if one.shift}
    assert len(shifts) > 5
    assert {key: again[key].shift for key in shifts} == pytest.approx(shifts, abs=0.0015)  # of rounded quantiles


def test_the_worth_is_that_of_points_that_decide_nothing() -> None:
    assert "tpot of the half that decides nothing: 1" in shifted(points(SLOW, 0.15))
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
