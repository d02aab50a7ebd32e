"""The time to look into the queue is taken by the steps that look."""

import numpy as np
import pytest
from oracle.mixed_pools import run_policies
from simulate.test_python_schedulers import demand

from windtunnel.core.engine import Fleet, Record, run
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, Policy

ENGINES = {"core": run, "reference": run_policies}

LIMITS = Limits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64, num_blocks=64, block_size=4)
TIMES = linear(1.0, 0.0, 0.0, 0.0, max_num_batched_tokens=64, max_num_seqs=1, max_model_len=64)


def fleet(look: float, interval: int) -> Fleet:
    rules = Policy(group_order="prefill_first", mixed=False, reschedule_interval=interval, queue_look_time=look)
    return Fleet((LIMITS,), (rules,), (TIMES,), (1,), (1,), (False,))


def simulated(look: float, interval: int, engine: str) -> Record:
    """Two requests with room for one: the second waits while the first decodes eight times."""
    return ENGINES[engine](fleet(look, interval), demand([0.0, 0.0], [4, 4], [9, 1]), 0, np.zeros(2))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("interval", "looks"), [(1, [1, *[1] * 8, 1]), (4, [1, 1, 0, 0, 0, 1, 0, 0, 0, 1])])
def test_only_steps_that_look_take_longer(interval: int, looks: list[int], engine: str) -> None:
    found = simulated(0.25, interval, engine)
    assert found.rows["transfer"].tolist() == [0.25 * look for look in looks]
    assert np.diff(found.rows["start"]).tolist() == [1.0 + 0.25 * look for look in looks[:-1]]
    assert found.requests["finish"].max() == 10.0 + 0.25 * sum(looks)
