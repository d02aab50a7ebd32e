"""DistServe's algorithms against plain loops over every layout, and by hand."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.errors import InputError
from windtunnel.plan.disaggregation.placement import Layout, Placement, goodput, high_affinity, low_affinity

RATES = st.just(0.0) | st.floats(0.01, 10)


@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.floats(0.1, 50))
def test_algorithm_1_is_the_best_of_each_side(data: st.DataObject, nodes: int, size: int, rate: float) -> None:
    everywhere = [
        Layout(stages, width)
        for width, stages in product(range(1, size + 1), range(1, nodes * size + 1))
        if width * stages <= nodes * size
    ]
    sides = [{layout: data.draw(RATES) for layout in everywhere} for _ in range(2)]
    found = high_affinity(sides[0].__getitem__, sides[1].__getitem__, rate=rate, nodes=nodes, gpus_per_node=size)
    best = [max(side[layout] / layout.gpus for layout in everywhere) for side in sides]
    if min(best) == 0:
        assert found is None
        return
    assert found is not None
    for layout, served, side, top, count in (
        (found.prefill, found.prefill_rate, sides[0], best[0], found.prefills),
        (found.decode, found.decode_rate, sides[1], best[1], found.decodes),
    ):
        assert side[layout] == served == pytest.approx(top * layout.gpus)
        assert count == math.ceil(rate / served)
    assert found.rate_per_gpu * found.gpus >= rate * (1 - 1e-9)


@given(st.data(), st.integers(1, 2), st.integers(2, 4), st.floats(0.1, 50))
def test_algorithm_2_keeps_both_sides_of_a_stage_in_a_node(
    data: st.DataObject, nodes: int, size: int, rate: float
) -> None:
    pairs = {
        (Layout(stages, first), Layout(stages, second)): data.draw(RATES)
        for stages, first, second in product(range(1, nodes + 1), range(1, size), range(1, size))
        if first + second <= size
    }
    found = low_affinity(lambda *pair: pairs[pair], rate=rate, nodes=nodes, gpus_per_node=size)
    best = max(served / (first.gpus + second.gpus) for (first, second), served in pairs.items())
    if best == 0:
        assert found is None
        return
    assert found is not None
    served = pairs[found.prefill, found.decode]
    assert served / (found.prefill.gpus + found.decode.gpus) == pytest.approx(best)
    assert found.prefills == found.decodes == math.ceil(rate / served)
    assert found.prefill.inter_op == found.decode.inter_op


def test_queueing_theory_chooses_the_stages() -> None:
    """Prefill as M/D/1, 0.1 s on one GPU: with a limit of 0.11 s on the mean; GPUs that share layers make it 1.6 times
    as fast for twice their number, stages leave it as long but take the next one earlier."""
    step = 0.1

    def mean_ttft(layout: Layout, rate: float) -> float:
        seconds = step / layout.intra_op**0.7
        slot = seconds / layout.inter_op
        return math.inf if rate * slot >= 1 else seconds + rate * slot**2 / (2 * (1 - rate * slot))

    def served(layout: Layout) -> float:
        return goodput(lambda rate: mean_ttft(layout, rate) <= 0.11, layout.gpus / step, 1e-4)

    found = high_affinity(served, lambda layout: float(layout == Layout(1, 1)), rate=20.0, nodes=1, gpus_per_node=4)
    grid = {
        Layout(stages, width): 0.0 for stages, width in ((1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3), (1, 4))
    }
    for layout in grid:
        grid[layout] = served(layout) / layout.gpus
    assert found is not None
    assert found.prefill == max(grid, key=grid.__getitem__)
    assert found.prefill.intra_op > 1
    assert (found.decode, found.decodes) == (Layout(1, 1), 20)


def test_a_placement_counts_its_gpus() -> None:
    placed = Placement(Layout(1, 2), Layout(2, 1), 3, 2, prefill_rate=4.0, decode_rate=5.0)
    assert placed.gpus == 10
    assert placed.rate_per_gpu == 1.0


def test_goodput_bisects() -> None:
    assert goodput(lambda rate: rate <= 3.3, 10.0, 1e-3) == pytest.approx(3.3, rel=2e-3)
    assert goodput(lambda rate: False, 10.0) < 1e-5  # noqa: ARG005
    assert goodput(lambda rate: True, 10.0) == pytest.approx(10.0, rel=0.02)  # noqa: ARG005


@pytest.mark.parametrize(
    ("words", "message"),
    [({"rate": 0.0}, "rate=0"), ({"nodes": 0}, "nodes=0"), ({"gpus_per_node": 0}, "gpus_per_node=0")],
)
def test_nonsense_is_refused(words: dict[str, float], message: str) -> None:
    settings = {"rate": 1.0, "nodes": 1, "gpus_per_node": 1} | words
    with pytest.raises(InputError, match=message):
        high_affinity(lambda _: 1.0, lambda _: 1.0, **settings)  # type: ignore[arg-type]
