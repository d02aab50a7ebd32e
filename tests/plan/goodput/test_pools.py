"""Pools at a load's own arrivals: what simulating every deployment finds, and what closes them."""

from itertools import product
from typing import Any

import pytest

from plan.planning import chat, question, small_space
from windtunnel.deployment import usual_handover
from windtunnel.deployment.handover import find_handover
from windtunnel.metrics import good_requests, request_metrics
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.goodput.objective import NO_MINIMUM, Goodput
from windtunnel.plan.goodput.pools import OPEN, search_pools
from windtunnel.plan.question import Question
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Constraints
from windtunnel.plan.trial import whole_run
from windtunnel.simulate.run import FINISHED
from windtunnel.workload import scale_time

BUSY = scale_time(chat(300), 1 / 90)
LIMITS = Constraints(max_gpus=5)


def space(**more: Any) -> PoolSpace:
    prefill = small_space(device=("h100",), max_num_batched_tokens=(256, 2048), max_num_seqs=(1, 8, 64, 128), **more)
    decode = small_space(
        device=("h100",), tensor_parallel_size=(1,), max_num_batched_tokens=(512, 1024), max_num_seqs=(4, 32, 128)
    )
    return PoolSpace(prefill, decode, handover=find_handover(usual_handover("vllm")), constraints=LIMITS, ratio=9)


def asked(minimum: float = NO_MINIMUM) -> Question:
    return question(BUSY, goodput=("ttft:60", "tpot:12"), attainment=minimum)


def by_hand(whole: PoolSpace, question: Question) -> dict[tuple[int, int, tuple[int, int]], float]:
    """Good tokens per second and GPU of every deployment."""
    found = {}
    sides = [whole.side(role, with_price=False)[0] for role in ("prefill", "decode")]
    for (p, (_, first)), (d, (_, second)) in product(*(enumerate(side) for side in sides)):
        for layout in product(range(1, 5), range(1, 5)):
            deployment = whole.deployment(first, second, layout)
            if deployment.gpus > 5:
                continue
            run = whole_run(question, deployment, question.workload.request_rate)
            good = good_requests(request_metrics(run.requests), run.requests.status == FINISHED, question.slo)
            assert good is not None
            tokens = float(run.requests.output_tokens[good].sum()) / question.workload.duration
            found[p, d, layout] = tokens / deployment.gpus if good.mean() >= question.attainment else 0.0
    return found


@pytest.fixture(scope="module")
def truth() -> dict[tuple[int, int, tuple[int, int]], float]:
    return by_hand(space(), asked())


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search_pools(space(), asked(), Goodput(LIMITS))


def test_the_search_finds_what_trying_everything_finds(found: SearchResult, truth: dict[Any, float]) -> None:
    assert found.best is not None and found.undecided == 0
    print(max(truth.values()), found.best.promise, len(truth), found.trials, found.closed and found.closed.counts)
    assert found.best.promise == pytest.approx(max(truth.values()), rel=1e-12)


def test_what_closes_a_deployment_is_never_less_than_what_it_does(found: SearchResult, truth: dict[Any, float]) -> None:
    closed = found.closed
    assert closed is not None
    for one in closed.closings:
        for p, d, layout in product(one.prefills, one.decodes, one.layouts):
            weight = layout[0] * closed.prefills[p].weight + layout[1] * closed.decodes[d].weight
            assert truth[p, d, layout] <= one.tokens / weight * (1 + 1e-9), (one.rule, p, d, layout)
    assert closed.counts.total() == len(truth) and closed.counts[OPEN] == 0
    assert found.trials < 0.5 * len(truth)
