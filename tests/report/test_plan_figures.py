"""What the page of a search draws, from a search whose answers are chosen."""

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.chosen import SURVEYED, Chosen, answer, outcome

from windtunnel.deployment import SLO
from windtunnel.deployment.slo import PercentileLimit
from windtunnel.hardware import device
from windtunnel.plan.elimination import Entry
from windtunnel.plan.survey import Surveyed
from windtunnel.report.plan_figures import cost_per_million, front, label, pareto, short, slices


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=30))
def test_the_front_is_what_nothing_dominates(rows: list[tuple[int, int, int]]) -> None:
    values = np.array(rows, dtype=np.float64).reshape(-1, 3)
    kept = set(front(values).tolist())
    for place, row in enumerate(values):
        beaten = any((other <= row).all() and (other < row).any() for other in values)
        assert (place in kept) == (not beaten)


def test_the_front_leaves_out_what_is_unknown() -> None:
    assert front(np.array([[1.0, np.nan], [2.0, 2.0]])).tolist() == [1]


def test_axes_and_settings_are_named_in_short() -> None:
    assert short("tensor_parallel_size") == "TP"
    assert short("decode tensor_parallel_size") == "decode TP"
    assert short("kv_cache_dtype") == "KV"
    assert short("decode kv_cache_dtype") == "decode KV"
    assert label(answer(), 1) == "h100, TP 2", "what all have in common is not said"


def test_cost_is_that_of_one_replica() -> None:
    """3.6 USD an hour are 0.001 a second: at 100 tokens a second 10 for a million, twice that with two GPUs."""
    assert cost_per_million(answer(), 0, outcome(1, 100.0, 0, 0)) == pytest.approx(10.0)
    assert cost_per_million(answer(), 1, outcome(1, 100.0, 0, 0)) == pytest.approx(20.0)
    assert math.isnan(cost_per_million(answer(price=0.0), 0, outcome(1, 100.0, 0, 0)))
    assert math.isnan(cost_per_million(answer(), 0, outcome(1, 0.0, 0, 0)))


def test_cost_against_latency_with_the_front_and_the_winner() -> None:
    drawn = pareto(answer(), SURVEYED)
    others, best, winner = drawn["data"]
    assert (others["name"], others["x"], others["y"]) == ("others", [40.0], [300.0])
    assert (best["name"], best["x"], best["y"]) == ("Pareto front", [20.0, 10.0, 10.0], [100.0, 300.0, 400.0])
    assert best["marker"]["color"] == [20.0, 30.0, 10.0]
    assert (best["marker"]["cmin"], best["marker"]["cmax"]) == (0.0, 30.0)
    assert (best["marker"]["showscale"], others["marker"]["showscale"]) == (True, False)
    assert best["text"][2] == "h100, TP 2<br>2 requests/s per replica"
    assert (winner["x"], winner["y"]) == ([60.0], [200.0]), "three replicas of two GPUs at 100 tokens/s"
    assert drawn["layout"]["xaxis"] == {"title": {"text": "$ per million output tokens"}, "type": "log"}
    assert drawn["layout"]["yaxis"] == {"title": {"text": "ttft p90 (ms)"}, "type": "log"}
    free = pareto(answer(price=0.0), SURVEYED)
    assert [trace["x"] for trace in free["data"]] == [[], []], "without a price there is no cost, and no winner there"


def test_a_winner_without_a_value_is_not_drawn() -> None:
    for held in (None, outcome(7, 0.0, 0.2, 0.02), outcome(7, 100.0, math.inf, 0.02)):
        found = answer()
        none = replace(found, entries={1: replace(found.entries[1], held=held)})
        assert [trace["name"] for trace in pareto(none, SURVEYED)["data"]] == ["others", "Pareto front"]
    assert len(pareto(replace(answer(), entries={}), SURVEYED)["data"]) == 2


def test_the_page_gets_every_rate_and_the_ranking() -> None:
    found = slices(answer(), SURVEYED)
    assert found["found"] == [{"name": "3 × h100, TP 2", "gpus": 6, "price": pytest.approx(21.6), "rate": 7.0}]
    first, second = found["configurations"]
    assert {key: second[key] for key in ("name", "price", "gpus", "device", "tp", "seqs")} == {
        "name": "h100, TP 2", "price": 7.2, "gpus": 2, "device": "h100_sxm", "tp": 2, "seqs": 8
    }  # fmt: skip
    assert [(point["rate"], point["steady"]) for point in first["points"]] == [(1, True), (2, True), (3, False)]
    assert first["points"][0]["values"]["ttft"] == [0.1] * 5
    assert first["points"][0]["values"]["e2el"] == [None] * 5


def test_limits_are_said_at_the_nearest_percentile_of_the_page() -> None:
    assert slices(answer(), ())["slo"] == {"ttft": {"statistic": "p90", "limit": 0.4}}
    assert slices(answer(attainment=0.99), ())["slo"]["ttft"]["statistic"] == "p99"
    assert slices(answer(attainment=0.96), ())["slo"]["ttft"]["statistic"] == "p95"
    percentiles = (PercentileLimit("ttft", 99, 2.0), PercentileLimit("e2el", 60, 9.0), PercentileLimit("itl", 93, 1.0))
    found = slices(answer(slo=SLO(tpot=0.03, percentiles=percentiles), goodput=()), ())["slo"]
    assert found == {
        "tpot": {"statistic": "p90", "limit": 0.03},
        "ttft": {"statistic": "p99", "limit": 2.0},
        "e2el": {"statistic": "p50", "limit": 9.0},
        "itl": {"statistic": "p95", "limit": 1.0},
    }


def test_points_are_rounded_and_the_front_stands_out() -> None:
    """3.6 USD an hour at 70 tokens/s are 14.2857 USD for a million; the winner's three replicas of two GPUs 85.714."""
    surveyed = (Surveyed(0, (outcome(1.23456, 70.0, 0.1234567, 0.0123456), outcome(2, 50.0, 0.2, 0.02))),)
    held = outcome(7, 70.0, 0.1234567, 0.02)
    found = answer()
    found = replace(found, entries={1: replace(found.entries[1], held=held)})
    others, best, winner = pareto(found, surveyed)["data"]
    assert (best["x"], best["y"], best["marker"]["color"]) == ([14.28571], [123.457], [12.346])
    assert best["text"] == ["h100, TP 1<br>1.23 requests/s per replica"]
    assert (winner["x"], winner["y"]) == ([85.71429], [123.457])
    looks = [(trace["marker"]["size"], trace["marker"]["opacity"], trace["marker"]["line"]) for trace in (others, best)]
    assert looks == [(6, 0.35, {"width": 0}), (10, 1.0, {"width": 1})]
    nothing = pareto(answer(), ())["data"][1]["marker"]
    assert (nothing["cmin"], nothing["cmax"]) == (0.0, 1.0)


class Single(Chosen):
    """A search that found one replica."""

    def measured(self, entry: Entry) -> Any:
        return self.contenders[entry.index].candidate.scaled(1), 1.234567


def test_one_replica_is_not_counted_and_pools_are_named_together() -> None:
    found = answer()
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    (only,) = slices(Single(**values), ())["found"]
    assert only == {"name": "h100, TP 2", "gpus": 2, "price": pytest.approx(7.2), "rate": 1.2346}
    contender = found.contenders[1]
    (pool,) = contender.candidate.deployment.pools
    small = replace(pool, name="b", device=device("l40s"), engine=replace(pool.engine, tensor_parallel_size=4))
    pools = (pool, replace(small, engine=replace(small.engine, max_num_seqs=16)))
    candidate = replace(contender.candidate, deployment=replace(contender.candidate.deployment, pools=pools))
    found = replace(found, contenders={1: replace(contender, candidate=candidate)})
    (configuration,) = slices(found, (Surveyed(1, ()),))["configurations"]
    assert {name: configuration[name] for name in ("device", "tp", "seqs", "gpus")} == {
        "device": "h100_sxm + l40s", "tp": 4, "seqs": 16, "gpus": 6
    }  # fmt: skip
