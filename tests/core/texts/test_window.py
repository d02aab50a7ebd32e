"""A window after a warm-up: when it opens, who comes, and gaps in which nothing is in flight. A step takes a second."""

import numpy as np

from windtunnel.core.engine import Demand, Fleet, Record, run
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV1
from windtunnel.workload.agents.measured import Measured

STEP = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=8, max_model_len=256)
FLEET = Fleet((Limits(8, 64, 256, 100, 16),), (VllmV1(async_scheduling=False),), (STEP,), (1,), (1,), (False,))


def record(
    outputs: list[int], after: list[list[int]], think: list[float], sessions: list[int], **measured: float
) -> Record:
    """Two requests of a warm-up, and what comes then: the first three wait for one of these each."""
    n = len(outputs)
    opening = np.array([r for r in range(2, n) if set(after[r]) <= {0, 1} and after[r]])
    demand = Demand(
        arrival=np.array([0.0 if not waits else np.nan for waits in after]),
        prompt_tokens=np.full(n, 8),
        output_tokens=np.array(outputs),
        overruns=np.zeros(n, bool),
        refused=np.zeros(n, bool),
        follow=np.full(n, -1),
        think_time=np.array(think),
        max_concurrency=0,
        after=(np.cumsum([0, *map(len, after)]), np.array([p for waits in after for p in waits])),
        sessions=np.array(sessions),
        lanes=2,
        measured=Measured(np.array([0, 1]), opening, **measured),
    )
    return run(FLEET, demand, 0, np.zeros(n))


def test_it_opens_when_the_warm_up_has_drained_and_nobody_comes_after_its_end() -> None:
    after = [[], [], [0], [2], [3], [1], []]
    found = record([1, 3, 2, 1, 1, 1, 1], after, [0, 0, 0.5, 4.0, 15.0, 2.0, 0], [0, 1, 0, 0, 0, 1, 2], seconds=20.0)
    # the warm-up takes 1 s and 3 s; session 2 takes the place of session 1, whose last request comes at 5 s
    came = found.requests["scheduled"]
    np.testing.assert_allclose(came[:4], [0.0, 0.0, 3.5, 9.5])
    assert np.isnan(came[4])  # 10.5 + 15 s is after 3 + 20 s
    assert came[5] == 5.5  # it waits for the step that runs at 5 s
    assert came[6] == 6.5
    np.testing.assert_allclose(found.requests["finish"][:4], [1.0, 3.0, 5.5, 10.5])


def test_where_nothing_is_in_flight_everything_comes_as_much_earlier() -> None:
    after = [[], [], [0], [2], [3], [1]]
    found = record(
        [1, 3, 2, 1, 1, 1], after, [0, 0, 0.5, 100.0, 20.0, 60.0], [0, 1, 0, 0, 0, 1], seconds=1000.0, idle_gap=10.0
    )
    # at 5.5 s the next ones come at 63 and 105.5 s: at 15.5 and 58; at 16.5 s the latter at 26.5
    np.testing.assert_allclose(found.requests["scheduled"], [0.0, 0.0, 3.5, 26.5, 37.5, 15.5])


def test_a_warm_up_without_a_limit_of_gaps_moves_nothing() -> None:
    found = record([1, 3, 2, 1], [[], [], [0], [2]], [0, 0, 0.5, 100.0], [0, 1, 0, 0], seconds=1000.0)
    np.testing.assert_allclose(found.requests["scheduled"], [0.0, 0.0, 3.5, 105.5])
