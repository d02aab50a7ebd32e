"""Elimination: standings, and one warm-up for each kind of scheduler."""

from plan.planning import question, small_space
from windtunnel.plan.elimination import Standing, best_of, warm_up, warm_ups

QUESTION = question(attainment=0.9, tolerance=0.03)


def test_each_kind_of_scheduler_is_warmed_up_once() -> None:
    schedulers = (None, "sarathi", "orca", "vllm-0.8-v0", "vllm-0.32")
    space = small_space(scheduler=schedulers, pipeline_parallel_size=(1, 2), max_num_batched_tokens=(2048,))
    found = warm_ups(QUESTION, space.enumerate().candidates)
    kinds = [(job.candidate.settings["scheduler"], job.candidate.settings["pipeline_parallel_size"]) for job in found]
    assert kinds == [(None, 1), (None, 2), ("sarathi", 1), ("sarathi", 2), ("vllm-0.8-v0", 1)]
    warm_up(found[0])


def test_of_equal_scores_the_first_wins() -> None:
    assert best_of((Standing(1.0, 7), Standing(1.0, 3), Standing(2.0, 9)), 2) == (Standing(2.0, 9), Standing(1.0, 3))
    assert Standing(1.0, 3).beats(Standing(1.0, 7))
    assert not Standing(1.0, 7).beats(Standing(1.0, 7))
    assert Standing(0.0, 1).beats(None)
