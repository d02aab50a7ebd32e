"""The formulas of routers on tables computed by hand."""

from collections.abc import Mapping, Sequence
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.policy import routing
from windtunnel.policy.routing import Conductor, DynamoKv, PrefixAware, Routing, pick


def costs(settings: Routing, prompt: int, rows: Sequence[Mapping[int, float]]) -> list[float]:
    """What the router's formula says of replicas; columns that are not given are 0."""
    view, found = np.zeros((len(rows), routing.COLUMNS)), np.zeros(len(rows))
    view[:, routing.CAPACITY], view[:, routing.BLOCK] = 1000.0, 10.0
    for row, values in zip(view, rows, strict=True):
        for column, value in values.items():
            row[column] = value
    routing.FORMULAS[settings.kind](view, prompt, np.array(settings.weights), found)
    return found.tolist()


def test_llmd_adds_up_weighted_scores() -> None:
    rows = [{routing.WAITING: 3, routing.CACHED: 50, routing.ACTIVE: 250}, {routing.WAITING: 1}, {routing.WAITING: 2}]
    assert costs(PrefixAware(), 100, rows) == pytest.approx([-(2 * 0.5 + 0), -(0 + 1), -(0 + 0.5)])
    assert costs(PrefixAware(prefix=0, queue=0, kv=1), 100, rows) == pytest.approx([-0.75, -1, -1])
    assert costs(PrefixAware(prefix=0, queue=0, load=1), 100, rows)[0] == pytest.approx(-0.5 * (1 - 3 / 128))
    assert costs(PrefixAware(prefix=0, queue=0, tokens=1), 100, rows)[0] == pytest.approx(-(1 - 250 / 2**22))


def test_llmd_scores_equal_queues_alike_and_clamps() -> None:
    assert costs(PrefixAware(), 100, [{routing.CACHED: 500}, {}]) == [-3.0, -1.0]
    assert costs(PrefixAware(prefix=0, queue=0, load=1, kv=1), 9, [{routing.WAITING: 999, routing.ACTIVE: 9999}]) == [0]


def test_dynamo_counts_the_work_that_a_request_adds() -> None:
    """A prompt of 10 blocks. The first replica has 4 of them, 30 blocks in progress of which 5 are to be computed."""
    rows = [
        {routing.CACHED: 40, routing.ACTIVE: 300, routing.PREFILL: 50, routing.OUTSTANDING: 6},
        {routing.ACTIVE: 320},
    ]
    assert costs(DynamoKv(), 100, rows) == [(5 + 10 - 4) + (30 + 10), 10 + 32 + 10]
    assert costs(DynamoKv(request_weight=2.0), 100, rows) == [51 + 12, 52]
    assert costs(DynamoKv(prefill_load_scale=0.5), 100, rows) == [5.5 + 40, 5 + 42]
    decayed = 5 + 10 - 4 / (1 + 3 * 5 / 10)
    assert costs(DynamoKv(overlap_decay=3.0), 100, rows)[0] == pytest.approx(decayed + 40)
    assert costs(DynamoKv(overlap_credit=9.0), 100, rows)[0] == 40  # never less than no work


CONDUCTOR = Conductor(threshold=2.0, bandwidth=1.0, latency=0.25, token_bytes=1e7)


def test_conductor_weighs_a_transfer_against_its_own_prefix() -> None:
    """0.01 s a token to transfer, 0.1 to compute. The best has 80 of 100 tokens, but a queue of 9 s."""
    law = {routing.PER_TOKEN: 0.1, routing.BASE: 1.0}
    rows = [law | {routing.CACHED: 80, routing.QUEUE: 9.0}, law | {routing.CACHED: 40}, law | {routing.CACHED: 39}]
    own = [9 + 1 + 2, 1 + 6]
    assert costs(CONDUCTOR, 100, rows) == pytest.approx([*own, 0.25 + 0.41 + 1 + 2])
    stay = Conductor(threshold=inf, token_bytes=1e7)
    assert costs(stay, 100, rows) == pytest.approx([*own, 1 + 6.1])


def test_conductor_fetches_for_a_replica_that_has_nothing_and_never_from_nothing() -> None:
    assert routing.fetched_tokens(0.0, 80.0, 2.0) == 80
    assert routing.fetched_tokens(0.0, 0.0, 2.0) == 0
    assert routing.fetched_tokens(40.0, 80.0, 2.0) == 0


def test_a_prefill_pays_for_pairs_of_tokens() -> None:
    view = np.zeros((1, routing.COLUMNS))
    view[0, routing.PER_PAIR] = 1.0
    assert routing.prefill_seconds(view, 0, 10, 0) == 50
    assert routing.prefill_seconds(view, 0, 10, 6) == 4 * (6 + 2)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.floats(0, 1, exclude_max=True))
def test_one_of_the_lowest_is_picked(values: list[int], uniform: float) -> None:
    assert values[pick(np.array(values, dtype=np.float64), uniform, 0.0)] == min(values)


def test_equals_are_picked_equally_and_a_temperature_gives_others_a_chance() -> None:
    grid = (np.arange(1000) + 0.5) / 1000
    shares = np.bincount([pick(np.array([2.0, 1.0, 1.0]), u, 0.0) for u in grid], minlength=3)
    assert shares.tolist() == [0, 500, 500]
    weights = np.exp([0.0, -1.0, -0.5])
    drawn = np.bincount([pick(np.array([1.0, 3.0, 2.0]), u, 1.0) for u in grid], minlength=3)
    np.testing.assert_allclose(drawn / 1000, weights / weights.sum(), atol=0.002)
