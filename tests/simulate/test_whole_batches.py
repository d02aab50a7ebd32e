"""Static batches with padding, step by step as worked out by hand."""

from typing import Any

import numpy as np
import pytest

from simulate.test_python_schedulers import demand
from windtunnel.core.engine import Fleet, Record, run
from windtunnel.errors import InputError
from windtunnel.perf.batch_times import linear
from windtunnel.policy import Limits, WholeBatches, scheduler

LIMITS = Limits(max_num_seqs=3, max_num_batched_tokens=40, max_model_len=64, num_blocks=30, block_size=4)


def simulated(
    arrival: list[float], prompt: list[int], output: list[int], limits: Limits = LIMITS, **rules: Any
) -> Record:
    sizes = {name: getattr(limits, name) for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len")}
    times = linear(1.0, 0.1, 0.0, 0.0, **sizes)  # a step of n tokens takes 1 + n / 10 s
    fleet = Fleet((limits,), (WholeBatches(**rules),), (times,), (1,), (1,), (False,))
    return run(fleet, demand(arrival, prompt, output), 0, np.zeros(len(arrival)))


def test_prompts_are_padded_and_answers_leave_together() -> None:
    found = simulated([0.0, 0.0], [10, 4], [3, 1])
    # prefill of 2 × 10 tokens: 3 s; two decodes of both, although the second request has ended: 1.2 s each
    assert found.rows["chunk_tokens"].tolist() == [10, 10, 0, 0]
    assert found.rows["decodes"].tolist() == [0, 0, 2, 2]
    assert found.rows["discarded"].tolist() == [0, 0, 1, 1]
    assert found.rows["kv_tokens"].tolist() == [0, 0, 20, 22]
    assert found.requests["first_token"].tolist() == pytest.approx([3.0, 3.0])
    assert found.requests["finish"].tolist() == pytest.approx([5.4, 5.4])


def test_answers_may_leave_singly_but_memory_stays() -> None:
    found = simulated([0.0, 0.0], [10, 4], [3, 1], answer_singly=True)
    assert found.requests["finish"].tolist() == pytest.approx([5.4, 3.0])
    assert set(found.rows["used_blocks"].tolist()) == {6}  # 2 × ⌈(10 + 3 − 1) / 4⌉, to the end
    assert found.rows["decodes"].tolist() == [0, 0, 2, 2]
    assert found.rows["discarded"].tolist() == [0, 0, 1, 1]


def test_whoever_comes_during_the_first_prefill_waits_for_the_whole_batch() -> None:
    found = simulated([0.0, 0.5], [10, 10], [3, 3])
    assert found.requests["scheduled"].tolist() == pytest.approx([0.0, 2.0 + 2 * 1.1])


def test_a_batch_is_as_large_as_places_and_padded_memory_allow() -> None:
    found = simulated([0.0] * 5, [4] * 5, [2] * 5)
    assert np.unique(found.requests["scheduled"], return_counts=True)[1].tolist() == [3, 2]
    tight = Limits(max_num_seqs=3, max_num_batched_tokens=40, max_model_len=64, num_blocks=9, block_size=4)
    # beside a prompt of 16 tokens each takes 5 blocks, so only one fits; the short ones then fit together
    found = simulated([0.0] * 3, [16, 4, 4], [2, 2, 2], tight)
    assert np.unique(found.requests["scheduled"], return_counts=True)[1].tolist() == [1, 2]


def test_prompts_that_no_step_holds_together_are_computed_one_step_after_the_other() -> None:
    found = simulated([0.0] * 3, [20, 15, 10], [2, 2, 2])
    # 40 tokens a step: two padded prompts, then the third; all decode once
    assert found.rows["chunk_tokens"].tolist() == [20, 20, 20, 0]
    assert found.rows["steps"].tolist() == [1, 0, 1, 1]
    assert found.requests["first_token"].tolist() == pytest.approx([5.0, 5.0, 8.0])
    assert found.requests["finish"].tolist() == pytest.approx([9.3] * 3)


def test_a_batch_that_is_not_full_waits_for_its_delay() -> None:
    found = simulated([1.0, 2.0, 9.0], [10, 10, 10], [1, 1, 1], max_queue_delay=3.0)
    assert found.requests["scheduled"].tolist() == pytest.approx([4.0, 4.0, 12.0])
    full = simulated([1.0, 2.0, 2.5], [10, 10, 10], [1, 1, 1], max_queue_delay=3.0)
    assert full.requests["scheduled"].tolist() == pytest.approx([2.5] * 3)


def test_it_has_a_name_and_checks_its_settings() -> None:
    assert scheduler("static:max_num_seqs=8,answer_singly=yes") == WholeBatches(max_num_seqs=8, answer_singly=True)
    with pytest.raises(InputError, match="max_queue_delay=-1"):
        WholeBatches(max_queue_delay=-1.0)
