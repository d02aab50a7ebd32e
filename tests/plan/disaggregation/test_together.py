"""Separate or together: the verdict follows from both searches, and names the stage that binds."""

import math
from dataclasses import replace

import handmade
import pytest

from plan.planning import chat, question, small_space
from windtunnel.metrics import Interval
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.disaggregation.together import Verdict, longest_part, separate_or_together
from windtunnel.plan.objective import LeastForRate, Objective, RatePerDollar
from windtunnel.plan.question import Question
from windtunnel.plan.search import search
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Constraints

ONE: dict[str, tuple[object, ...]] = {
    "device": ("h100",), "tensor_parallel_size": (1,), "max_num_seqs": (64,), "max_num_batched_tokens": (1024,),
}  # fmt: skip


def both(asked: Question, objective: Objective) -> tuple[SearchResult, SearchResult]:
    """The best pair of pools of one H100 each, and the best single server."""
    apart = PoolSpace(small_space(**ONE), small_space(**ONE), ratio=1)
    return tuple(search(space.enumerate(), asked, objective) for space in (apart, small_space(**ONE)))  # type: ignore[return-value]


def test_the_ratio_is_that_of_the_best_of_both() -> None:
    asked = question(tolerance=0.03)
    separate, together = both(asked, RatePerDollar(count_gpus=True))
    assert separate.best is not None and together.best is not None
    found = separate_or_together(separate, together, lambda seed: chat(seed=seed), (0, 1, 2))
    assert found.ratio == separate.best.promise / together.best.promise
    assert found.separate == (found.ratio > 1)
    assert found.interval is not None and found.interval.runs == 3
    document = found.to_json()
    assert (document["ratio"], document["binds"]) == (found.ratio, found.stage)
    assert document["interval_95"] == [found.interval.low, found.interval.high]


def test_of_costs_less_is_better() -> None:
    """Two GPUs apart cost twice what one that suffices does."""
    separate, together = both(question(tolerance=0.03), LeastForRate(2.0, Constraints(), count_gpus=True))
    found = separate_or_together(separate, together)
    assert (found.ratio, found.separate, found.interval) == (0.5, False, None)
    assert found.words == "together: 2.00 times as good"


@pytest.mark.parametrize(
    ("goodput", "stage", "limit"), [(("ttft:60",), "prefill", "ttft"), (("tpot:12",), "decode", "tpot")]
)
def test_the_stage_that_binds(goodput: tuple[str, ...], stage: str, limit: str) -> None:
    """A limit on the first token alone is missed for its prompt, one on the time per token in the decode pool."""
    asked = question(chat(600), goodput=goodput, tolerance=0.03)
    found = separate_or_together(*both(asked, RatePerDollar(count_gpus=True)))
    assert found.stage == stage
    assert found.evidence.startswith(limit)


def test_the_longest_part_is_that_of_the_slowest() -> None:
    """Request 1 is the slower one: 0.5 s in the queue and 0.5 s of transfer, of which the first is named."""
    assert longest_part(handmade.disaggregated(), question()) == ("queue", 0.5)
    run = handmade.disaggregated()
    assert run.handovers is not None
    longer = replace(run, handovers=replace(run.handovers, ttft_queue=run.handovers.ttft_queue / 2))
    part, seconds = longest_part(longer, question())
    assert part == "transfer"
    assert seconds == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("ratio", "interval", "words"),
    [
        (math.nan, None, "neither keeps the limits"),
        (math.inf, None, "separate: the other cannot keep the limits"),
        (0.0, None, "together: the other cannot keep the limits"),
        (1.5, Interval(1.5, 0.1, 3), "separate: 1.50 times as good (1.40 to 1.60 times for separate, 95 %)"),
        (2.0, Interval(2, 0, 3), "separate: 2.00 times as good under every draw of the load, to a step of the rates"),
        (
            0.8,
            Interval(0.9, 0.2, 3),
            "together: 1.25 times as good (0.70 to 1.10 times for separate, 95 %; draws of the load may turn it)",
        ),
    ],
)
def test_words(ratio: float, interval: Interval | None, words: str) -> None:
    assert Verdict(ratio, interval, None, "").words == words
