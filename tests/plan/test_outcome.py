"""Outcomes: values at a share of the requests, and JSON there and back."""

import json
from dataclasses import replace

import handmade
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan.planning import chat, question, small_space
from windtunnel.deployment import SLO
from windtunnel.deployment.slo import PercentileLimit
from windtunnel.metrics import Growth, queue_growth
from windtunnel.plan.objective import RatePerDollar
from windtunnel.plan.outcome import (
    Margin,
    Outcome,
    at_share,
    measure,
    needed,
    queue_grows,
    request_stretches,
)
from windtunnel.plan.question import Question
from windtunnel.plan.search import search
from windtunnel.simulate.run import Requests


@given(st.lists(st.floats(0, 9), min_size=1, max_size=40), st.floats(0.01, 1.0))
def test_the_value_at_a_share_is_the_least_that_so_many_keep(values: list[float], share: float) -> None:
    array = np.array(values)
    found = at_share(array, share)
    assert (array <= found).mean() >= share
    assert not any((array <= smaller).mean() >= share for smaller in values if smaller < found)
    assert needed(len(values), share) / len(values) >= share


def test_outcomes_survive_json() -> None:
    best = search(small_space().enumerate(with_price=True), question(tolerance=0.03), RatePerDollar()).best
    assert best is not None and best.held is not None and best.missed is not None
    for outcome in (best.held, best.missed):
        assert Outcome.from_json(outcome.to_json()) == outcome


def waiting(delay: float, slope: float, service: float = 10.0) -> Requests:
    arrival = np.arange(100.0)
    scheduled = arrival + delay + slope * arrival
    return handmade.requests(
        arrival=arrival, scheduled=scheduled, first_token=scheduled + 1, finish=scheduled + service
    )


@pytest.mark.parametrize(
    ("delay", "slope", "service", "grows"),
    [
        (0.0, 0.1, 10.0, True),
        (2.0, 0.004, 10.0, False),  # demand is less than 0.5 % above what is served
        (2.0, 0.006, 10.0, True),
        (0.0, 0.01, 9.0, True),  # the last ten wait 0.945 s, of which 0.9 is a tenth of the service
        (0.0, 0.01, 10.0, False),
        (9.0, 0.0, 10.0, False),
    ],
)
def test_a_queue_grows_where_demand_is_half_a_percent_too_high(
    delay: float, slope: float, service: float, grows: bool
) -> None:
    requests = waiting(delay, slope, service)
    assert queue_grows(queue_growth(requests), requests) is grows


def test_an_outcome_by_hand() -> None:
    """Eleven requests a second apart, of which the first is warm-up; of the ten, one takes 2 s and one 4 s."""
    arrival = np.arange(11.0)
    ttft = np.array([9.0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4])
    requests = handmade.requests(
        arrival=arrival,
        scheduled=arrival,
        first_token=arrival + ttft,
        finish=arrival + ttft + 1,
        preemptions=[5, *[1] * 10],
    )
    run = handmade.run(requests, handmade.iterations({"start": 2.0, "decodes": 3, "kv_tokens": 9}))
    for share, stretch in ((0.8, 0.5), (0.9, 1.0), (1.0, 2.0)):
        asked = Question(chat(50), slo=SLO(ttft=2.0), attainment=share)
        found = measure(run, asked, 7.0)
        assert found.stretch == pytest.approx(stretch)
        assert found.met is (stretch <= 1)
        assert found.attainment == pytest.approx(0.9)
        (margin,) = found.margins
        assert margin == Margin(f"ttft p{100 * share:g}", margin.value, 2.0)
        assert margin.value == pytest.approx(2 * stretch)
        assert (found.rate, found.preemptions, found.stopped) == (7.0, 10, False)
        assert not measure(run, asked, 7.0, stopped=True).met
    tokens = 3 + 9  # three decodes at 2.1, and the first tokens from 2 to 10: not those at 11 and 14
    assert found.output_throughput == pytest.approx(tokens / 9)
    assert found.energy_per_token == pytest.approx(2 * (100 * 9 + 600 * 0.1) / tokens)
    assert found.busy == pytest.approx(0.1 / 9)


def test_limits_of_a_request_hold_together() -> None:
    """Of four requests each limit is kept by three, and both by two."""
    requests = handmade.requests(
        arrival=[0.0] * 4, scheduled=[0.0] * 4, first_token=[1.0, 1, 1, 3], finish=[2.0, 2, 9, 3.5]
    )
    asked = Question(chat(50), slo=SLO(ttft=2.0, e2el=4.0), attainment=0.75)
    found = measure(handmade.run(requests, handmade.iterations()), asked, 1.0)
    assert found.attainment == 0.5
    assert [(margin.name, margin.stretch) for margin in found.margins] == [
        ("ttft p75", 0.5),
        ("e2el p75", 0.875),
        ("tightest limit", 1.5),
    ]
    assert (found.stretch, found.met) == (1.5, False)
    binding = found.binding()
    assert binding is not None
    assert binding.name == "tightest limit"


def test_limits_on_percentiles_and_a_growing_queue_are_margins_too() -> None:
    requests = waiting(0.0, 0.1, 10.0)
    asked = Question(chat(50), slo=SLO(ttft=100.0, percentiles=(PercentileLimit("ttft", 50, 20.0),)), attainment=0.5)
    found = measure(handmade.run(requests, handmade.iterations()), asked, 2.0)
    assert [margin.name for margin in found.margins] == ["ttft_p50", "ttft p50", "queue growth"]
    assert found.margins[2].value == pytest.approx(0.1, rel=0.01)
    assert found.margins[2].limit == 0.005
    assert found.stretch <= 1 and not found.met, "limits hold, but the queue grows"
    binding = found.binding()
    assert binding is not None and binding.name == "queue growth"


def test_unfinished_requests_are_beyond_every_limit_and_single_tokens_have_none() -> None:
    requests = handmade.requests(
        arrival=[0.0, 0.0, 0.0], output_tokens=[1, 3, 3], status=[0, 0, 3], scheduled=[0.0] * 3,
        first_token=[1.0, 1.0, 1.0], finish=[1.0, 2.0, np.nan],
    )  # fmt: skip
    found = request_stretches(requests, {"tpot": 0.25, "ttft": 2.0})
    assert found["tpot"].tolist() == [0.0, 2.0, np.inf]
    assert found["ttft"].tolist() == [0.5, 0.5, np.inf]


def test_nothing_measured_is_no_success() -> None:
    """Without limits a run holds; with limits and without requests that are measured nothing is known."""
    run = handmade.run(handmade.requests(arrival=[]), handmade.iterations())
    for slo in (SLO(), SLO(ttft=1.0), SLO(percentiles=(PercentileLimit("ttft", 99, 1.0),))):
        found = measure(run, Question(chat(50), slo=slo), 1.0)
        assert (found.stretch, found.met) == (np.inf, False)
        assert found.binding() is None
        assert np.isnan(found.attainment)
    free = measure(handmade.two_requests(), Question(chat(50), slo=SLO()), 1.0)
    assert (free.stretch, free.met, free.margins) == (0.0, True, ())


def test_what_is_unknown_survives_json() -> None:
    found = measure(handmade.run(handmade.requests(arrival=[]), handmade.iterations()), question(), 1.0)
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    again = Outcome.from_json(document)
    assert (again.stretch, again.rate) == (np.inf, 1.0)
    assert np.isnan([again.attainment, again.energy_per_token, again.latencies["ttft"]["p90"]]).all()
    beyond = replace(found, margins=(Margin("ttft_p99", np.inf, 0.5),), rate=np.inf)
    back = Outcome.from_json(json.loads(json.dumps(beyond.to_json(), allow_nan=False)))
    assert (back.margins, back.rate) == (beyond.margins, np.inf)


def test_a_queue_is_judged_by_trend_and_by_a_tenth_of_the_service() -> None:
    requests = waiting(0.0, 0.1, 10.0)
    clear = Growth(slope=0.006, trend=0.6, delay=1.001)
    assert queue_grows(clear, requests)
    assert not queue_grows(clear._replace(trend=0.59), requests)
    assert not queue_grows(clear._replace(slope=0.005), requests)
    assert not queue_grows(clear._replace(delay=0.999), requests)
    assert not queue_grows(None, requests)
    never = handmade.requests(arrival=[0.0])
    assert queue_grows(clear._replace(delay=0.001), never), "nobody was served: any wait is too long"


def test_a_queue_that_does_not_grow_is_no_margin() -> None:
    """A hundred requests that all wait for 9 s: enough to judge, and none waits longer than the one before."""
    requests = waiting(9.0, 0.0, 10.0)
    assert queue_growth(requests) is not None
    found = measure(handmade.run(requests, handmade.iterations()), Question(chat(50), slo=SLO(ttft=20.0)), 2.0)
    assert [(margin.name, margin.value, margin.limit) for margin in found.margins] == [("ttft p90", 10.0, 20.0)]
    assert found.met
