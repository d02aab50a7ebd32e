"""Objectives refuse what makes no sense."""

from dataclasses import replace

import numpy as np
import pytest

from plan.answer.checker import wrong
from plan.chosen import outcome
from plan.planning import question, small_space
from windtunnel.deployment import Deployment
from windtunnel.errors import InputError
from windtunnel.hardware import device
from windtunnel.plan.advice import advise
from windtunnel.plan.answer.certificate import certificate
from windtunnel.plan.answer.recommendation import sentence
from windtunnel.plan.bound import Bound
from windtunnel.plan.elimination import Contender, impossible
from windtunnel.plan.objective import EnergyPerToken, LeastForRate, Purchase, RatePerDollar
from windtunnel.plan.search import search
from windtunnel.plan.space import Candidate, Constraints
from windtunnel.plan.trial import whole_run, whole_trial
from windtunnel.workload import Both, Fixed, Gamma, Workload, generate


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="target_request_rate=0"):
        LeastForRate(0.0, Constraints())


def test_too_few_gpus_are_the_reason_and_not_the_limits() -> None:
    """One replica of two GPUs could serve 1.5 requests/s at best, so 4 need three, six GPUs, and there are five."""
    space = small_space(device=("h100",), tensor_parallel_size=(2,))
    candidate = space.enumerate().candidates[0]
    objective = LeastForRate(4.0, Constraints(gpus={"h100_sxm": 5}))
    contender = Contender(candidate, Bound(rate=1.5, stretch=0.5, replicas=1))
    assert objective.climb(candidate, contender.bound, question()) is None
    entry = impossible(contender, objective)
    assert entry.status == "refused"
    assert entry.reason == "needs 6 GPUs or more for 4 requests/s: more than the 5 h100_sxm that are available"
    hopeless = Contender(candidate, Bound(rate=0.0, stretch=1.5, replicas=1))
    assert impossible(hopeless, objective).status == "impossible"


ONE = Candidate(0, {}, small_space().deployment({"device": "h100", "tensor_parallel_size": 2}))
"""Two GPUs a replica."""
H100 = device("h100")


def test_the_least_replicas_are_those_that_the_bound_needs() -> None:
    """Each serves at most 2 requests/s: 4 need two, a little more needs three; at most 8 × 2 + 8 are tried."""
    bound = Bound(rate=2.0, stretch=0.5, replicas=1)
    steps = LeastForRate(4.0, Constraints()).climb(ONE, bound, question())
    more = LeastForRate(4.001, Constraints()).climb(ONE, bound, question())
    assert steps is not None and more is not None
    assert (steps.low, steps.high, more.high) == (-24, -2, -3)
    deployment, rate = steps.trial(-3)
    assert (deployment.replicas, deployment.gpus, rate) == (3, 6, 4.0)
    limited = LeastForRate(4.0, Constraints(max_gpus=7)).climb(ONE, bound, question())
    assert limited is not None
    assert (limited.low, limited.high) == (-3, -2)
    exact = LeastForRate(4.0, Constraints(max_gpus=4)).climb(ONE, bound, question())
    assert exact is not None
    assert (exact.low, exact.high) == (-2, -2)
    two = LeastForRate(4.0, Constraints()).climb(ONE, Bound(rate=4.0, stretch=0.5, replicas=2), question())
    assert two is not None
    assert two.high == -2


def test_cost_and_gpus_of_all_replicas_are_what_is_minimised() -> None:
    bound = Bound(rate=2.0, stretch=0.5, replicas=1)
    for count_gpus, unit, each in ((False, "$/h", 2 * H100.price_per_hour), (True, "GPUs", 2)):
        objective = LeastForRate(4.0, Constraints(), count_gpus)
        steps = objective.climb(ONE, bound, question())
        assert steps is not None
        assert objective.value(steps.promise(-3)) == pytest.approx(3 * each)
        assert steps.promise(-2) > steps.promise(-3)
        assert (objective.unit, objective.needs_price) == (unit, not count_gpus)
        assert objective.climb(ONE, Bound(rate=0.0, stretch=2.0, replicas=1), question()) is None
        at_one = objective.climb(ONE, Bound(rate=1.0, stretch=0.5, replicas=1), question())
        assert at_one is not None and at_one.high == -4
    assert LeastForRate(4.0, Constraints(), True).name == "GPUs for 4 requests/s"
    assert LeastForRate(2.5, Constraints()).name == "cost for 2.5 requests/s"


def test_capacity_is_divided_by_the_price_of_all_gpus() -> None:
    asked = question(tolerance=0.5)  # rates are powers of 1.5
    steps = RatePerDollar().climb(ONE, Bound(rate=3.0, stretch=0.5, replicas=1), asked)
    assert steps is not None
    assert steps.high == 2
    assert steps.promise(2) == pytest.approx(2.25 / (2 * H100.price_per_hour))
    assert steps.trial(2)[1] == pytest.approx(2.25)
    assert asked.rate(steps.low) <= 3e-3 < asked.rate(steps.low + 1)
    assert RatePerDollar().climb(ONE, Bound(rate=0.0, stretch=2.0, replicas=1), asked) is None
    assert RatePerDollar().needs_price


def test_energy_is_idle_power_between_requests_and_the_rest_while_one_computes() -> None:
    """At 2.25 requests/s, 3 at most, and 10 tokens each, less a tenth: (idle / 2.25 + (full − idle) / 3) / 10."""
    asked = question(generate(Gamma(1.0), Both(Fixed(5), Fixed(10)), 50), tolerance=0.5)
    objective = EnergyPerToken()
    steps = objective.climb(ONE, Bound(rate=3.0, stretch=0.5, replicas=1), asked)
    assert steps is not None
    idle, full = 2 * H100.idle_power_w, 2 * H100.power_w
    assert objective.value(steps.promise(2)) == pytest.approx(0.9 * (idle / 2.25 + (full - idle) / 3.0) / 10)
    assert not objective.needs_price
    assert objective.climb(ONE, Bound(rate=0.0, stretch=2.0, replicas=1), asked) is None
    assert objective.value(steps.score(2, outcome(1, 9.0, 0.1, 0.01))) == 1.0, "what the trial measured"
    assert LeastForRate(0.5, Constraints()).rate == 0.5


def test_where_no_replica_is_allowed_there_are_no_steps() -> None:
    """One replica of two GPUs would do, and one GPU is allowed."""
    bound = Bound(rate=50.0, stretch=0.5, replicas=1)
    assert LeastForRate(4.0, Constraints(max_gpus=1)).climb(ONE, bound, question()) is None
    one = LeastForRate(4.0, Constraints(max_gpus=2)).climb(ONE, bound, question())
    assert one is not None
    assert (one.low, one.high) == (-1, -1)
    for rate in (float("inf"), float("nan"), -1.0):
        with pytest.raises(InputError, match="must be a number > 0"):
            LeastForRate(rate, Constraints())


def served(replicas: int, **axes: int) -> Deployment:
    """H100s, of which eight are a node."""
    one = small_space().deployment({"device": "h100", "max_model_len": 2048} | axes)
    return replace(one, pools=(replace(one.pools[0], replicas=replicas),))


@pytest.mark.parametrize(
    ("replicas", "size", "spare", "gpus"), [(1, 1, 0, 8), (8, 1, 0, 8), (8, 1, 1, 16), (3, 4, 0, 16), (2, 8, 1, 24)]
)
def test_whole_nodes_and_spare_replicas_are_bought(replicas: int, size: int, spare: int, gpus: int) -> None:
    deployment = served(replicas, tensor_parallel_size=size)
    purchase = Purchase(True, spare)
    assert purchase.gpus(deployment) == gpus
    assert purchase.price(deployment) == pytest.approx(gpus * deployment.pools[0].device.price_per_hour)
    assert Purchase(False, spare).gpus(deployment) == (replicas + spare) * size
    assert purchase.broken(deployment, Constraints(max_gpus=gpus)) is None
    assert purchase.broken(deployment, Constraints(max_gpus=gpus - 1)) is not None
    assert purchase.broken(deployment, Constraints(gpus={"h100_sxm": gpus - 1})) is not None
    assert purchase.broken(deployment, Constraints(max_price_per_hour=purchase.price(deployment) - 0.01)) is not None


def test_the_cost_of_a_rate_is_that_of_what_is_bought() -> None:
    """Replicas are steps; with nodes of eight their cost never falls, and stays the same within a node."""
    candidate = Candidate(0, {}, served(1))
    bound, asked = Bound(10.0, 0.5, 1), question()
    plain = LeastForRate(25.0, Constraints()).climb(candidate, bound, asked)
    nodes = LeastForRate(25.0, Constraints(), purchase=Purchase(True, 1)).climb(candidate, bound, asked)
    assert plain is not None and nodes is not None
    price = candidate.deployment.price_per_hour
    assert (plain.promise(-3), plain.promise(-8)) == (-3 * price, -8 * price)
    assert (nodes.promise(-3), nodes.promise(-7), nodes.promise(-8)) == (-8 * price, -8 * price, -16 * price)
    assert nodes.trial(-3)[0].replicas == 3, "the spare one does not serve"
    few = LeastForRate(25.0, Constraints(max_gpus=12), count_gpus=True, purchase=Purchase(True, 1))
    climbed = few.climb(candidate, bound, asked)
    assert climbed is not None and (climbed.low, climbed.promise(climbed.low)) == (-7, -8)
    with pytest.raises(InputError, match="spare=-1"):
        Purchase(spare=-1)


ELASTIC = (
    "none",
    "policy=forecast rps=90 predictor=trend most=4 interval=1 startup=0",
    "policy=thresholds most=4 interval=9",
)
RISING = Workload.from_columns(
    arrival=np.cumsum(1 / np.linspace(5.0, 200.0, 2000)), prompt_tokens=[300] * 2000, output_tokens=[60] * 2000
)


def test_an_autoscaler_costs_what_is_up_on_average() -> None:
    """Against every autoscaler and number of replicas simulated whole; what follows the rate is the cheapest."""
    asked = question(RISING, ("ttft:400", "tpot:15"), tolerance=0.05)
    space = small_space(device=("h100",), tensor_parallel_size=(1,), max_num_seqs=(64,), autoscale=ELASTIC)
    enumeration, rate = space.enumerate(with_price=True), RISING.request_rate
    objective, found = LeastForRate(rate, Constraints(max_gpus=12)), {}
    for one in enumeration.candidates:
        for count in range(1, 5) if one.deployment.scaling is None else [one.deployment.replicas]:
            tried = whole_trial(asked, one.scaled(count), rate)
            if tried.met and one.index not in found:
                lives = whole_run(asked, one.scaled(count), rate).manifest.get("lives")
                paid = sum(lives["paid_s"]) / lives["seconds"] if lives else count
                found[one.index] = paid * one.scaled(1).price_per_hour
    answer = search(enumeration, asked, objective, top=9)
    assert {entry.index: -entry.promise for entry in answer.ranking} == pytest.approx(found)
    best = answer.best
    assert best is not None and best.held is not None
    assert answer.contenders[best.index].candidate.settings["autoscale"] == ELASTIC[1]
    assert answer.paid(best)[1] == pytest.approx(found[best.index])
    assert f"{best.held.gpus:.3g} GPUs, ${found[best.index]:.2f}/h on average" in sentence(answer, best)
    assert wrong(certificate(answer)) == []
    assert advise(answer) is not None
    with pytest.raises(InputError, match="without whole_nodes and spare"):
        search(enumeration, asked, replace(objective, purchase=Purchase(spare=1)))
