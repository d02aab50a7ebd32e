"""The scoreboard of simulators: medians over what each predicts, and over what all do."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scoreboard import Means, scores
from windtunnel.validation.served_points import Point, read_points


@pytest.fixture(scope="module")
def points() -> list[Point]:
    some = next(point for point in read_points() if isinstance(point, Point))
    return [replace(some, id=str(k), ttft=0.1 * (k + 1), tpot=0.01) for k in range(3)]


def test_a_simulator_is_judged_by_what_it_predicts_and_by_what_all_do(points: list[Point]) -> None:
    def twice(point: Point, row: Mapping[str, str]) -> Means:
        assert row["id"] == point.id
        return Means(2 * point.ttft, 0.009)

    def only_the_last(point: Point, row: Mapping[str, str]) -> Means | None:
        return Means(point.ttft, 0.013) if row["id"] == "2" else None

    found, common = scores(points, {point.id: {"id": point.id} for point in points}, {"a": twice, "b": only_the_last})
    assert common == 1
    assert (found["a"].rows, found["b"].rows) == (3, 1)
    assert found["a"].own == pytest.approx((1.0, 0.1)) == found["a"].common
    assert found["b"].own == pytest.approx((0.0, 0.3)) == found["b"].common


def test_where_nobody_predicts_all_there_is_nothing_in_common(points: list[Point]) -> None:
    found, common = scores(
        points[:2],
        {point.id: {} for point in points},
        {
            "a": lambda point, _: Means(1.0, 1.0) if point.id == "0" else None,
            "b": lambda point, _: Means(1.0, 1.0) if point.id == "1" else None,
        },
    )
    assert common == 0
    assert np.isnan(found["a"].common).all()
