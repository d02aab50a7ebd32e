"""Steps that wait for an encoder: with the jump as without it, and as the log has them."""

import numpy as np
import pytest

from windtunnel.core.engine import Demand, Fleet, run
from windtunnel.core.rebuild import iteration_times
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, VllmV1
from windtunnel.policy.encoder import Encoder

SIZE = 16


@pytest.mark.parametrize("seed", range(20))
def test_steps_are_as_long_with_the_jump(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, count, tokens = int(rng.integers(2, 15)), int(rng.integers(1, 3)), int(rng.choice([64, 128]))
    first, offsets = np.arange(n + 1) * count, np.tile(np.arange(count) * SIZE, n)
    images = first, offsets, np.full(n * count, SIZE), np.arange(n * count)
    seconds = np.append(0.0, np.cumsum(rng.random(tokens // SIZE) * 0.05)).tolist()
    policy = VllmV1(
        async_scheduling=bool(rng.integers(2)),
        encoder=Encoder(tokens, tokens, input_size=SIZE, seconds=tuple(seconds)),
        long_prefill_token_threshold=int(rng.choice([0, 0, 20])),
    )
    times = linear(0.01, 0.001, 1e-5, 1e-7, max_num_batched_tokens=tokens, max_num_seqs=8, max_model_len=400)
    limits, none, nobody = Limits(8, tokens, 400, int(rng.choice([40, 200])), 8), np.zeros(n), np.zeros(n, dtype=bool)
    prompts, outputs = rng.integers(1, 80, n) + count * SIZE, rng.integers(1, 30, n)
    arrival = np.cumsum(rng.exponential(0.1, n))
    demand = Demand(arrival, prompts, outputs, nobody, nobody, np.full(n, -1), none, 0, images=images)
    fleet = Fleet((limits,), (policy,), (times,), (1,), (1,), (False,))
    jumped, single = (run(fleet, demand, 0, none, jumps) for jumps in (True, False))
    for name in ("finish", "first_token", "scheduled"):
        assert jumped.requests[name].tolist() == single.requests[name].tolist(), name
    steps = [
        iteration_times(record.rows, (times,), np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64))
        for record in (jumped, single)
    ]
    assert steps[0].start.tolist() == steps[1].start.tolist()
    assert steps[0].duration.tolist() == steps[1].duration.tolist()
    assert set(jumped.rows["transfer"].tolist()) <= set(seconds)
    assert (jumped.rows["transfer"] > 0).any()
