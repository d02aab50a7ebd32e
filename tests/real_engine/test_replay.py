"""The loop against the real engine, without the engine: steps that the reference makes are found equal, others not."""

from typing import Any

import numpy as np
import pytest
from oracle.replica import table_time

from benchmarks.real_engine.__main__ import judged
from benchmarks.real_engine.fitted import step_times
from benchmarks.real_engine.replay import LIMITS, _served, differing_step, means, restarts
from windtunnel.perf.batch_times import linear

TIMES = linear(
    0.01,
    1e-4,
    1e-7,
    1e-9,
    max_num_batched_tokens=LIMITS["max_num_batched_tokens"],
    max_num_seqs=LIMITS["max_num_seqs"],
    max_model_len=LIMITS["max_model_len"],
)


def recorded(rows: list[list[float]], blocks: int) -> dict[str, Any]:
    """What the engine would have written, had it taken TIMES."""
    requests, group = _served(rows, [row[0] for row in rows], table_time(TIMES), blocks)
    steps = [
        {
            "start": step.start,
            "end": step.end,
            "tokens": {str(part.request.id): part.tokens for part in step.batch.scheduled},
            "computed": {str(part.request.id): part.start for part in step.batch.scheduled},
        }
        for step in group.journal
    ]
    times = {
        name: {str(one.id): getattr(one, name) for one in requests} for name in ("arrival", "first_token", "finish")
    }
    return {"steps": steps, "added": times["arrival"], "first": times["first_token"], "end": times["finish"]}


def rows(count: int) -> list[list[float]]:
    rng = np.random.default_rng(5)
    arrival = np.cumsum(rng.exponential(0.05, count))
    sizes = zip(arrival, rng.integers(1, 600, count), rng.integers(1, 60, count), strict=True)
    return [[float(at), int(prompt), int(output)] for at, prompt, output in sizes]


@pytest.mark.parametrize("blocks", [2000, 40])
def test_equal_steps_are_equal_and_a_changed_one_is_found(blocks: int) -> None:
    asked = rows(40)
    found = recorded(asked, blocks)
    assert (restarts(found) > 0) == (blocks == 40)
    assert differing_step(asked, found, blocks) is None
    step = found["steps"][25]["tokens"]
    step[next(iter(step))] += 1
    assert differing_step(asked, found, blocks) == 25


def test_fitted_batch_times_serve_alike() -> None:
    asked = rows(60)
    found = recorded(asked, 2000)
    times = step_times(asked, found)
    requests, _ = _served(asked, [row[0] for row in asked], table_time(times), 2000)
    mine = ({str(one.id): getattr(one, name) for one in requests} for name in ("first_token", "finish"))
    assert means(asked, *mine) == pytest.approx(means(asked, found["first"], found["end"]), rel=0.05)


def test_an_engine_that_differs_from_itself_proves_nothing() -> None:
    assert judged(error=0.099, spread=0.15) is True
    assert judged(error=0.0, spread=0.151) is None, "anything would be good"
    assert judged(error=0.101, spread=0.102) is None
    assert judged(error=0.131, spread=0.07) is False, "twice the spread was good once"
