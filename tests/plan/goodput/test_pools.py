"""Pools at a load's own arrivals: what simulating every deployment finds, and what closes them."""

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from plan.answer.checker import wrong
from plan.planning import chat, question, small_space
from windtunnel.deployment import Deployment, usual_handover
from windtunnel.deployment.handover import find_handover
from windtunnel.metrics import good_requests, request_metrics
from windtunnel.perf.batch_times import BatchTimes
from windtunnel.plan.answer.certificate import certificate
from windtunnel.plan.disaggregation.pool_space import PoolSpace
from windtunnel.plan.goodput.closed import FEWER, OPEN, SAME, Server
from windtunnel.plan.goodput.decode_bound import lines_under, most_tokens
from windtunnel.plan.goodput.objective import NO_MINIMUM, Goodput, offered_rate
from windtunnel.plan.goodput.pair_jobs import PairJob, ask_pairs
from windtunnel.plan.goodput.points import SIMULATED, STOPPED
from windtunnel.plan.goodput.pools import light, search_pools
from windtunnel.plan.goodput.side_jobs import AskedSide, Point, SideJob, SideReport
from windtunnel.plan.question import Question
from windtunnel.plan.search_result import SearchResult
from windtunnel.plan.space import Constraints
from windtunnel.plan.trial import tables_for, whole_run
from windtunnel.simulate.run import FINISHED
from windtunnel.workload import scale_time

BUSY = scale_time(chat(300), 1 / 90)
OVERLOAD = scale_time(chat(1500), 1 / 300)
LIMITS = Constraints(max_gpus=5)


def space(decode_blocks: int | None = None, **more: Any) -> PoolSpace:
    prefill = small_space(device=("h100",), max_num_batched_tokens=(256, 2048), max_num_seqs=(1, 8, 64, 128), **more)
    decode = small_space(
        device=("h100",),
        tensor_parallel_size=(1,),
        max_num_batched_tokens=(512, 1024),
        max_num_seqs=(4, 32, 128),
        num_gpu_blocks_override=(decode_blocks,),
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
    assert found.best.promise == pytest.approx(max(truth.values()), rel=1e-12)


def test_what_closes_a_deployment_is_never_less_than_what_it_does(found: SearchResult, truth: dict[Any, float]) -> None:
    closed = found.closed
    assert closed is not None
    for one in closed.closings:
        for p, d, layout in product(one.prefills, one.decodes, one.layouts):
            weight = layout[0] * closed.prefills[p].weight + layout[1] * closed.decodes[d].weight
            assert truth[p, d, layout] <= one.tokens / weight * (1 + 1e-9), (one.rule, p, d, layout)
    assert closed.counts.total() == len(truth) and closed.counts[OPEN] == 0
    assert found.trials < 0.1 * len(truth)


def test_a_certificate_is_checked_without_a_search(found: SearchResult) -> None:
    whole = json.loads(json.dumps(certificate(found)))
    assert wrong(whole, BUSY.arrival.tolist(), BUSY.output_tokens.tolist()) == []
    pools = whole["pools"]
    pairs = [{(p, d, *layout) for p, d, layout in product(*one[1:4])} for one in pools["closed"]]
    alone = 0
    for place, one in enumerate(pools["closed"]):
        others = [*pairs[:place], *pairs[place + 1 :]]
        weights = [pools["servers"]["prefill"][p]["weight"] * a + b for p, _, a, b in pairs[place].difference(*others)]
        if any(pools["offered"] / weight > pools["score"] * 1.001 for weight in weights):
            alone += 1
            without = {**pools, "closed": pools["closed"][:place] + pools["closed"][place + 1 :]}
            assert wrong({**whole, "pools": without}), one
    assert alone
    assert wrong({**whole, "pools": {**pools, "score": pools["score"] / 1.5}})


def test_a_certificate_says_that_nothing_beats_a_given_score(truth: dict[Any, float]) -> None:
    to_beat = 1.01 * max(truth.values())
    found = search_pools(space(), asked(), Goodput(LIMITS), to_beat=to_beat)
    whole = certificate(found)
    assert found.best is None and wrong(whole) == []
    assert wrong({**whole, "pools": {**whole["pools"], "score": to_beat / 2}})


def test_a_least_share_of_good_requests_holds() -> None:
    objective, whole = Goodput(LIMITS), space(tensor_parallel_size=(1,))
    truth = by_hand(whole, asked(0.7))
    found = search_pools(whole, asked(0.7), objective)
    assert found.best is not None
    assert found.best.promise == pytest.approx(max(truth.values()), rel=1e-12)


def test_a_search_that_is_stopped_says_how_much_better_it_could_be() -> None:
    calls = iter(range(10_000))
    stopped = search_pools(space(), asked(), Goodput(LIMITS), stop=lambda: next(calls) > 12)
    assert stopped.undecided > 0 and stopped.could_be is not None
    assert stopped.best is None or stopped.could_be >= stopped.best.promise


@pytest.mark.parametrize(
    ("blocks", "runs", "rules"),
    [(None, 3, {SIMULATED: 1, STOPPED: 2, FEWER: 3}), (150, 4, {SIMULATED: 2, FEWER: 4})],
    ids=["much memory", "little memory"],
)
def test_who_does_the_same_until_a_run_ends_has_no_more(blocks: int | None, runs: int, rules: dict[str, int]) -> None:
    """With little memory prompts are computed again and take up any limit on tokens: the largest stands for both."""
    whole, mine = space(blocks), question(OVERLOAD, goodput=("ttft:60", "tpot:12"), attainment=NO_MINIMUM)
    prefills, decodes = (
        [Server(place, words, pool, 1.0) for place, (words, pool) in enumerate(whole.side(role, with_price=False)[0])]
        for role in ("prefill", "decode")
    )
    decodes.sort(key=lambda one: (-one.limits[1], one.limits[0]))
    points = [Point(prefills[-1], decode, (2, 1), offered_rate(mine)) for decode in decodes]
    report = ask_pairs(PairJob(mine, whole, points, best=0.31 * offered_rate(mine)))
    assert Counter(one.rule for one in report.tried) == rules and report.trials == runs
    for one in report.tried:
        deployment = whole.deployment(one.point.prefill.pool, one.point.decode.pool, (2, 1))
        run = whole_run(mine, deployment, mine.workload.request_rate)
        good = good_requests(request_metrics(run.requests), run.requests.status == FINISHED, mine.slo)
        assert good is not None
        assert run.requests.output_tokens[good].sum() / mine.workload.duration <= one.tokens * (1 + 1e-9)


def test_seats_are_counted_by_rank() -> None:
    """Two ranks have more than 64 requests at once, and neither has: 64 seats are as good as 128, 32 are not."""
    prefill = small_space(device=("h100",), tensor_parallel_size=(1,), max_num_batched_tokens=(2048,))
    decode = small_space(
        device=("h100",),
        tensor_parallel_size=(1,),
        data_parallel_size=(2,),
        max_num_batched_tokens=(512,),
        max_num_seqs=(32, 64, 128),
        num_gpu_blocks_override=(4000,),
        enforce_eager=(True,),
    )
    whole = PoolSpace(prefill, decode, handover=find_handover(usual_handover("vllm")), ratio=9)
    mine = question(scale_time(chat(600), 1 / 100), goodput=("ttft:600", "tpot:30"), attainment=NO_MINIMUM)
    sides = [whole.side(role, with_price=False)[0] for role in ("prefill", "decode")]
    (first, *_), seconds = ([Server(n, words, pool, 1.0) for n, (words, pool) in enumerate(side)] for side in sides)
    points = [Point(first, one, (2, 1), 2 * offered_rate(mine)) for one in reversed(seconds)]
    report = ask_pairs(PairJob(mine, whole, points, best=0.0))
    assert {one.point.decode.limits[1]: one.rule for one in report.tried} == {
        128: SIMULATED,
        64: SAME,
        32: SIMULATED,
    }


@pytest.mark.parametrize("limits", [("ttft:60", "tpot:12"), ("ttft:200", "tpot:8")])
def test_where_all_that_comes_is_decoded_no_more_is_good(truth: dict[Any, float], limits: tuple[str, ...]) -> None:
    whole, mine = space(), question(BUSY, goodput=limits, attainment=NO_MINIMUM)
    real = truth if mine == asked() else by_hand(whole, mine)
    sides = [
        [Server(place, words, replace(pool, replicas=1), 1.0) for place, (words, pool) in enumerate(listed)]
        for listed, _ in (whole.side(role, with_price=False) for role in ("prefill", "decode"))
    ]
    closes = 0
    for prefill in sides[0]:
        job = SideJob(light(mine), whole, (prefill,), (), 0.0)
        for first in range(1, 4):
            side = AskedSide(job, prefill, (), (), {}, SideReport())
            for seats, second in product((4, 32, 128), range(1, 5)):
                decodes = [one for one in sides[1] if one.limits[1] == seats]
                most = side.shared(decodes, (first, second)) * (1 + 1e-9)
                for one in decodes:
                    if (key := (prefill.place, one.place, (first, second))) in real:
                        assert real[key] * (first * prefill.pool.gpus + second) <= most, key
                closes += most < 0.9 * offered_rate(mine)
    assert closes


def test_what_fits_before_deadlines() -> None:
    """Two requests of one second's work until second 1, one more until second 3: in one group a second's work of the
    first two is lost, and of requests that are worth more these are done first."""
    begin, end = np.zeros(3), np.array([1.0, 1.0, 3.0])
    ones = np.ones(3)
    assert most_tokens(begin, end, ones, ones, 1) == pytest.approx(2.0)
    assert most_tokens(begin, end, ones, ones, 2) == pytest.approx(3.0)
    assert most_tokens(begin, end, ones, np.array([5.0, 1.0, 1.0]), 1) == pytest.approx(6.0, rel=0.2)


@pytest.mark.parametrize("ranks", [1, 4])
def test_lines_lie_under_every_step(ranks: int) -> None:
    engine = small_space(max_num_seqs=(32,)).enumerate().candidates[0].deployment.pools[0]
    times = tables_for(asked(), Deployment((engine,)))[0].times
    assert isinstance(times, BatchTimes)
    times = replace(times, expert_tokens=np.linspace(0.0, 0.01, 200)) if ranks > 1 else times
    lines = lines_under(times, ranks)
    for decodes, context in product((1, 3, 17, 32), (0, 100, 2000)):
        each: list[Any] = [(decodes, decodes * context, [])] * ranks
        step = times.lockstep(each) if ranks > 1 else times.batch(*each[0])
        many = decodes * ranks
        least = lines.base + lines.per_decode * many + lines.per_kv_token * many * context
        assert least.max() <= step * (1 + 1e-9)
