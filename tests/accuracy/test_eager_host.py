"""What decides the host's constants of TensorRT-LLM's latent attention."""

import pytest

from benchmarks.accuracy.eager_host import CONSTANTS, PROMPT, captured, halves, points_of
from windtunnel.perf.database import find_systems

pytestmark = pytest.mark.skipif(find_systems() is None, reason="needs the kernel database's served points")


def test_each_point_decides_one_constant() -> None:
    before, blackwell, in_pieces = (points_of(constant) for constant in CONSTANTS)
    assert {one.system for one in before} == {"h200_sxm"}
    assert {one.system for one in [*blackwell, *in_pieces]} == {"b200_sxm"}
    assert [len(found) for found in (before, blackwell, in_pieces)] == [32, 72, 16]
    assert not {one.id for one in blackwell} & {one.id for one in in_pieces}
    assert all(captured(one) for one in in_pieces)
    assert all(one.isl == PROMPT and one.dp == 1 and not one.repeats for one in [*before, *blackwell, *in_pieces])


def test_halves_are_the_same_always_and_of_one_size() -> None:
    points = points_of(CONSTANTS[0])
    one, other = halves(points)
    assert (one, other) == halves(points)
    assert sorted([*one, *other]) == list(range(32))
    assert len(one) - len(other) == 0
